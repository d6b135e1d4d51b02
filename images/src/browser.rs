//! A browser without windows: Debian's headless Chromium, in a folder that a test mounts as root, because the browser
//! looks for its files next to its program.

use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};

use crate::apt::{self, Apt};
use crate::cache::{Cache, key, remove};
use crate::progress::Progress;
use crate::recipe::{Made, Record, Suite, TreeRecipe};

/// Version of the recipe; increased when its result changes.
const VERSION: &str = "1";
/// Path of the browser in its folder.
pub const PROGRAM: &str = "/usr/lib/chromium/chromium-headless-shell";
/// Folders that are links to folders in `/usr`.
const MERGED: [&str; 3] = ["bin", "lib", "lib64"];

/// Finds the folder with the browser, or creates it.
pub fn ensure(recipe: &TreeRecipe, cache: &Cache, record: &mut Record, progress: &Progress) -> Result<PathBuf> {
    let inputs = [VERSION].into_iter().chain(recipe.packages.iter().chain(&recipe.without).map(String::as_str));
    let version = key(&inputs.collect::<Vec<_>>());
    if let Some(made) = record.browser.as_ref().filter(|made| made.recipe == version)
        && let Some(root) = cache.find("browser", &made.key)
    {
        return Ok(root);
    }
    let (root, made) = apt::first_of(&recipe.from, |suite| make(recipe, &version, suite, cache, progress))?;
    record.browser = Some(made);
    Ok(root)
}

fn make(
    recipe: &TreeRecipe,
    version: &str,
    suite: &Suite,
    cache: &Cache,
    progress: &Progress,
) -> Result<(PathBuf, Made)> {
    let apt = Apt::open(suite, cache, progress)?;
    let fetched = apt.fetch_closure(&recipe.packages, progress)?;
    let inputs = [version, suite.target()].into_iter().chain(fetched.iter().map(|one| one.package.sha256.as_str()));
    let key = key(&inputs.collect::<Vec<_>>());
    let root = match cache.find("browser", &key) {
        Some(root) => root,
        None => cache.make("browser", &key, |folder| {
            let mut step = progress.step(format!("unpacking a browser of {} packages", fetched.len()));
            fetched.iter().try_for_each(|package| apt::unpack(package, folder, &mut step))?;
            recipe.without.iter().try_for_each(|name| remove(&folder.join(name)))?;
            complete(folder)
        })?,
    };
    apt.clean()?;
    let packages = fetched.into_iter().map(|package| package.package).collect();
    Ok((root, Made { recipe: version.to_owned(), key, suite: suite.target().to_owned(), packages }))
}

/// Adds the folders on which a test mounts the kernel's file systems, and the links of a merged `/usr`.
fn complete(root: &Path) -> Result<()> {
    for name in ["proc", "dev", "tmp"] {
        std::fs::create_dir_all(root.join(name)).with_context(|| format!("cannot create {name} of the browser"))?;
    }
    for name in MERGED.into_iter().filter(|name| !root.join(name).exists()) {
        symlink(format!("usr/{name}"), root.join(name))
            .with_context(|| format!("cannot link {name} of the browser"))?;
    }
    Ok(())
}
