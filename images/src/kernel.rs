//! A stock Debian kernel: `vmlinuz` and the requested modules, in load order.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, anyhow, bail};

use crate::apt::{self, Apt, Fetched};
use crate::cache::{Cache, key};
use crate::modinfo;
use crate::progress::Progress;
use crate::recipe::{KernelRecipe, Made, RECIPE_VERSION, Record, Suite};

/// A kernel in the cache.
#[derive(Clone, Debug)]
pub struct Unpacked {
    /// Short name, such as `6.12`.
    pub name: String,
    /// Release as `uname -r` prints it.
    pub release: String,
    /// Path of the kernel image.
    pub vmlinuz: PathBuf,
    /// Paths of the uncompressed modules, in load order. The last requested module is last.
    pub modules: Vec<PathBuf>,
    /// Name of the kernel's folder in the cache, derived from the recipe's version, the modules and the package.
    pub key: String,
}

impl Unpacked {
    /// Returns true if the unpacked modules include `module`.
    fn has(&self, module: &str) -> bool {
        let name = modinfo::normal(module);
        self.modules.iter().any(|path| path.file_stem().is_some_and(|stem| stem == name.as_str()))
    }
}

/// The parts of a kernel package to keep.
#[derive(Clone, Copy, Debug)]
pub struct Wanted<'a> {
    /// Name of the kernel in the record of created items.
    pub entry: &'a str,
    /// The modules to pack, together with all their dependencies.
    pub modules: &'a [&'a str],
}

/// Finds or creates the kernel of `recipe`.
pub fn ensure(
    recipe: &KernelRecipe,
    wanted: Wanted<'_>,
    cache: &Cache,
    record: &mut Record,
    progress: &Progress,
) -> Result<Unpacked> {
    if let Some(made) = record.kernels.get(wanted.entry).filter(|m| m.recipe == RECIPE_VERSION)
        && let Some(folder) = cache.find("kernel", &made.key)
        && let Ok(kernel) = load(recipe, &made.key, &folder)
        && wanted.modules.iter().all(|module| kernel.has(module))
    {
        return Ok(kernel);
    }
    let (kernel, made) = apt::first_of(&recipe.from, |suite| make(recipe, wanted.modules, suite, cache, progress))?;
    record.kernels.insert(wanted.entry.to_owned(), made);
    Ok(kernel)
}

fn make(
    recipe: &KernelRecipe,
    modules: &[&str],
    suite: &Suite,
    cache: &Cache,
    progress: &Progress,
) -> Result<(Unpacked, Made)> {
    let apt = Apt::open(suite, cache, progress)?;
    let image = apt.depends(&recipe.package, progress)?.into_iter().find(|d| d.starts_with("linux-image-"));
    let image = image.ok_or_else(|| anyhow!("the package {} depends on no kernel image", recipe.package))?;
    if !image.starts_with(&format!("linux-image-{}.", recipe.name)) {
        bail!("{} depends on {image}, which is not a {} kernel", recipe.package, recipe.name);
    }
    let fetched = apt.fetch_one(&image, progress)?;
    let key = key(&[RECIPE_VERSION, &modules.join(" "), &fetched.package.sha256]);
    let folder = match cache.find("kernel", &key) {
        Some(folder) => folder,
        None => cache.make("kernel", &key, |folder| fill(&fetched, modules, folder, progress))?,
    };
    let kernel = load(recipe, &key, &folder)?;
    apt.clean()?;
    progress.line(&format!("images: kernel {} is ready, with {} modules", kernel.release, kernel.modules.len()));
    let packages = vec![fetched.package];
    Ok((kernel, Made { recipe: RECIPE_VERSION.into(), key, suite: suite.target().into(), packages }))
}

/// Unpacks the image package and keeps the files that a guest needs.
fn fill(package: &Fetched, modules: &[&str], folder: &Path, progress: &Progress) -> Result<()> {
    let all = folder.join("all");
    fs::create_dir(&all).with_context(|| format!("cannot create {}", all.display()))?;
    let mut step = progress.step(format!("unpacking {}", package.package.name));
    apt::unpack(package, &all, &mut step)?;
    let vmlinuz = only_entry(&all.join("boot"), "vmlinuz-")?;
    let release = vmlinuz.file_name().unwrap_or_default().to_string_lossy().replace("vmlinuz-", "");
    let tree = ["usr/lib/modules", "lib/modules"].iter().map(|d| all.join(d).join(&release)).find(|d| d.is_dir());
    let tree = tree.ok_or_else(|| anyhow!("the package {} contains no modules", package.package.name))?;

    let order = modinfo::closure(&tree.join("kernel"), modules)?;
    let target = folder.join("modules");
    fs::create_dir(&target).with_context(|| format!("cannot create {}", target.display()))?;
    let mut names = String::new();
    for module in &order {
        let name = format!("{}.ko", module.name);
        fs::write(target.join(&name), &module.bytes).with_context(|| format!("cannot write the module {name}"))?;
        names.push_str(&name);
        names.push('\n');
    }
    fs::write(folder.join("modules.list"), names).context("cannot write modules.list")?;
    fs::write(folder.join("release"), &release).context("cannot write the release")?;
    fs::rename(&vmlinuz, folder.join("vmlinuz")).context("cannot move vmlinuz")?;
    crate::cache::remove(&all)
}

fn load(recipe: &KernelRecipe, key: &str, folder: &Path) -> Result<Unpacked> {
    let read = |name: &str| fs::read_to_string(folder.join(name)).with_context(|| format!("cannot read {name}"));
    let modules: Vec<_> = read("modules.list")?.lines().map(|l| folder.join("modules").join(l)).collect();
    let vmlinuz = folder.join("vmlinuz");
    for path in modules.iter().chain([&vmlinuz]) {
        if !path.is_file() {
            bail!("{} is missing", path.display());
        }
    }
    Ok(Unpacked { name: recipe.name.clone(), release: read("release")?, vmlinuz, modules, key: key.to_owned() })
}

/// Returns the only entry of `folder` whose name starts with `prefix`.
fn only_entry(folder: &Path, prefix: &str) -> Result<PathBuf> {
    let entries = fs::read_dir(folder).with_context(|| format!("cannot read {}", folder.display()))?;
    let mut found: Vec<_> = entries.flatten().map(|e| e.path()).collect();
    found.retain(|p| p.file_name().is_some_and(|n| n.to_string_lossy().starts_with(prefix)));
    match found.pop() {
        Some(path) if found.is_empty() => Ok(path),
        _ => bail!("{} does not contain exactly one {prefix}*", folder.display()),
    }
}
