//! A folder with unpacked Debian packages. A test mounts it as the root file system of programs that use fixed paths,
//! such as a browser or the tools that check packages.

use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};

use crate::apt::{self, Apt};
use crate::cache::{Cache, key, remove};
use crate::progress::Progress;
use crate::recipe::{Made, Suite, TreeRecipe};

/// Version of the recipe. It must be incremented when the recipe's result changes.
const VERSION: &str = "1";
/// Folders that are links to folders in `/usr`.
const MERGED: [&str; 4] = ["bin", "sbin", "lib", "lib64"];
/// Mount points for the kernel's file systems and for a test's files.
const MOUNTED: [&str; 4] = ["proc", "dev", "tmp", "mnt"];

/// Finds or creates the folder called `name`.
pub fn ensure(
    name: &str,
    recipe: &TreeRecipe,
    cache: &Cache,
    record: &mut Option<Made>,
    progress: &Progress,
) -> Result<PathBuf> {
    let inputs = recipe.packages.iter().chain(&recipe.without).chain(&recipe.unneeded).map(String::as_str);
    let version = key(&[VERSION].into_iter().chain(inputs).collect::<Vec<_>>());
    if let Some(made) = record.as_ref().filter(|made| made.recipe == version)
        && let Some(root) = cache.find(name, &made.key)
    {
        return Ok(root);
    }
    let make = |suite: &Suite| make(name, recipe, &version, suite, cache, progress);
    let (root, made) = apt::first_of(&recipe.from, make)?;
    *record = Some(made);
    Ok(root)
}

fn make(
    name: &str,
    recipe: &TreeRecipe,
    version: &str,
    suite: &Suite,
    cache: &Cache,
    progress: &Progress,
) -> Result<(PathBuf, Made)> {
    let apt = Apt::open(suite, cache, progress)?;
    let fetched = apt.fetch_closure_without(&recipe.packages, &recipe.unneeded, progress)?;
    let inputs = [version, suite.target()].into_iter().chain(fetched.iter().map(|one| one.package.sha256.as_str()));
    let key = key(&inputs.collect::<Vec<_>>());
    let root = match cache.find(name, &key) {
        Some(root) => root,
        None => cache.make(name, &key, |folder| {
            let mut step = progress.step(format!("unpacking {} packages for the {name}", fetched.len()));
            fetched.iter().try_for_each(|package| apt::unpack(package, folder, &mut step))?;
            recipe.without.iter().try_for_each(|name| remove(&folder.join(name)))?;
            complete(folder)
        })?,
    };
    apt.clean()?;
    let packages = fetched.into_iter().map(|package| package.package).collect();
    Ok((root, Made { recipe: version.to_owned(), key, suite: suite.target().to_owned(), packages }))
}

/// Adds the mount points and the links of a merged `/usr`.
fn complete(root: &Path) -> Result<()> {
    for name in MOUNTED {
        std::fs::create_dir_all(root.join(name)).with_context(|| format!("cannot create the folder {name}"))?;
    }
    for name in MERGED.into_iter().filter(|name| !root.join(name).exists()) {
        symlink(format!("usr/{name}"), root.join(name)).with_context(|| format!("cannot link {name}"))?;
    }
    // Debian's programs read this link. Normally, the maintainer scripts of base-files create it.
    let origins = root.join("etc/dpkg/origins");
    if origins.join("debian").exists() {
        symlink("debian", origins.join("default")).context("cannot link the default origin")?;
    }
    Ok(())
}
