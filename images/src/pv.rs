//! Builds the paravirtual driver out of tree: our kernel module, and the kernel's nouveau with hooks that call this
//! module.
//!
//! The repository does not contain nouveau. Its sources come from the Debian source package of the kernel, in the same
//! version, and [`crate::hooks`] patches them. Only the two modules are stored in the cache.

use std::fs;
use std::io::{Read, Write};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context, Error, Result, anyhow, bail};
use liblzma::read::XzDecoder;

use crate::apt::{self, Apt, Fetched};
use crate::cache::{Cache, hash_file, key, remove};
use crate::hooks::Coccinelle;
use crate::kbuild::{self, Kbuild};
use crate::kernel::Unpacked;
use crate::progress::{Progress, Step, mib};
use crate::recipe::{KernelRecipe, Made, Package, ParavirtualRecipe, Record, Suite};

/// Version of the recipe. It must be incremented when the recipe's result changes.
const VERSION: &str = "1";
/// File name of our module.
const MODULE: &str = "gpu_mediator_pv.ko";
/// File name of the driver.
const DRIVER: &str = "nouveau.ko";
/// The driver's folder in the kernel's sources.
const DRIVER_FOLDER: &str = "drivers/gpu/drm/nouveau";

/// Returns the folder of our sources. It contains the sources of the module and, in the subfolder `nouveau`, the hooks.
fn sources() -> PathBuf {
    crate::cache::workspace().join("guest/pv-module")
}

/// Returns the kernel with the paravirtual modules if they are in the cache.
pub fn find(kernel: &Unpacked, cache: &Cache) -> Result<Option<Unpacked>> {
    let key = item_key(kernel)?;
    cache.find("pv", &key).map(|folder| with_modules(kernel, &folder, &key)).transpose()
}

/// Finds or creates the paravirtual modules. Returns `kernel` with these modules in place of the stock driver.
pub fn ensure(
    kernel: &Unpacked,
    recipes: (&KernelRecipe, &ParavirtualRecipe),
    cache: &Cache,
    record: &mut Record,
    progress: &Progress,
) -> Result<Unpacked> {
    let key = item_key(kernel)?;
    let folder = match cache.find("pv", &key) {
        Some(folder) => folder,
        None => {
            let made = record.kernels.get(&kernel.name).context("the suite of the kernel is not recorded")?.clone();
            let suite = recipes.0.from.iter().find(|suite| suite.target() == made.suite);
            let suite =
                suite.with_context(|| format!("images/manifest.toml no longer has the suite {}", made.suite))?;
            let mut packages = Vec::new();
            let folder = cache.make("pv", &key, |folder| {
                packages = Build { kernel, made: &made, cache, progress, folder }.run(suite, recipes.1)?;
                Ok(())
            })?;
            let made = Made { recipe: VERSION.into(), key: key.clone(), suite: made.suite, packages };
            record.paravirtual.insert(kernel.name.clone(), made);
            folder
        }
    };
    with_modules(kernel, &folder, &key)
}

/// Returns the key of an item that is created from `kernel` and our sources.
fn item_key(kernel: &Unpacked) -> Result<String> {
    let mut inputs = vec![VERSION.to_owned(), kernel.key.clone()];
    let root = sources();
    for path in files_below(&root)? {
        inputs.push(path.strip_prefix(&root).unwrap_or(&path).to_string_lossy().into_owned());
        inputs.push(hash_file(&path)?);
    }
    Ok(key(&inputs.iter().map(String::as_str).collect::<Vec<_>>()))
}

/// Returns the kernel with the modules of `folder` instead of the stock driver.
fn with_modules(kernel: &Unpacked, folder: &Path, key: &str) -> Result<Unpacked> {
    let mut modules = kernel.modules.clone();
    match modules.pop() {
        Some(stock) if stock.file_name().is_some_and(|name| name == DRIVER) => {}
        _ => bail!("the last module of the kernel {} is not {DRIVER}", kernel.name),
    }
    modules.extend([folder.join(MODULE), folder.join(DRIVER)]);
    Ok(Unpacked { modules, key: format!("{}-{key}", kernel.key), ..kernel.clone() })
}

struct Build<'a> {
    kernel: &'a Unpacked,
    made: &'a Made,
    cache: &'a Cache,
    progress: &'a Progress,
    folder: &'a Path,
}

impl Build<'_> {
    /// Builds both modules in `self.folder`. Returns the packages used for the build.
    fn run(&self, suite: &Suite, recipe: &ParavirtualRecipe) -> Result<Vec<Package>> {
        kbuild::require_programs()?;
        let (headers, build, tools) =
            (self.folder.join("headers"), self.folder.join("build"), self.folder.join("coccinelle"));
        for folder in [&headers, &build, &tools] {
            fs::create_dir(folder).with_context(|| format!("cannot create {}", folder.display()))?;
        }
        let mut packages = Vec::new();
        self.coccinelle(recipe, &tools, &mut packages)?;
        let apt = Apt::open(suite, self.cache, self.progress)?;
        let driver = build.join("nouveau");
        self.driver_source(&apt, &driver, &mut packages)?;
        let mut step = self.progress.step(format!("hooking nouveau of Linux {}", self.kernel.name));
        Coccinelle::at(&tools).apply(&sources().join("nouveau"), &self.kernel.name, &driver, &mut step)?;
        our_sources(&build)?;
        self.headers(&apt, &headers, &mut packages)?;
        apt.clean()?;
        let kbuild = Kbuild::prepare(&headers, &self.kernel.release)?;
        let mut step = self.progress.step(format!("building the paravirtual nouveau for {}", self.kernel.release));
        kbuild.build(&build, &mut step)?;
        for (from, to) in [(build.join(MODULE), MODULE), (driver.join(DRIVER), DRIVER)] {
            let to = self.folder.join(to);
            fs::rename(&from, &to).with_context(|| format!("the build created no {}", from.display()))?;
            kbuild::strip(&to, &mut step)?;
        }
        for folder in [headers, build, tools] {
            remove(&folder)?;
        }
        Ok(packages)
    }

    /// Unpacks the program that applies the hooks.
    fn coccinelle(&self, recipe: &ParavirtualRecipe, to: &Path, packages: &mut Vec<Package>) -> Result<()> {
        let fetch = |suite: &_| -> Result<Vec<Package>> {
            let apt = Apt::open(suite, self.cache, self.progress)?;
            let unpacked = recipe.hooks.iter().map(|name| self.unpack(&apt.fetch_one(name, self.progress)?, to));
            let unpacked = unpacked.collect();
            apt.clean()?;
            unpacked
        };
        packages.extend(apt::first_of(&recipe.from, fetch).context("Coccinelle")?);
        Ok(())
    }

    /// Unpacks the headers, the build tools and the libraries of the tools.
    fn headers(&self, apt: &Apt, to: &Path, packages: &mut Vec<Package>) -> Result<()> {
        let headers = format!("linux-headers-{}", self.kernel.release);
        let needs = apt.depends(&headers, self.progress)?;
        let named = |prefix: &str, suffix: &str| {
            let found = needs.iter().find(|name| name.starts_with(prefix) && name.ends_with(suffix));
            found.cloned().ok_or_else(|| anyhow!("the package {headers} needs no {prefix}*{suffix}"))
        };
        for name in [headers.clone(), named("linux-headers-", "-common")?] {
            packages.push(self.unpack(&self.fetch_same(apt, &name)?, to)?);
        }
        for fetched in apt.fetch_closure(&[named("linux-kbuild-", "")?], self.progress)? {
            packages.push(self.unpack(&fetched, to)?);
        }
        Ok(())
    }

    /// Unpacks only the driver from the kernel's sources.
    fn driver_source(&self, apt: &Apt, to: &Path, packages: &mut Vec<Package>) -> Result<()> {
        let fetched = self.fetch_same(apt, &format!("linux-source-{}", self.kernel.name))?;
        let all = self.folder.join("source");
        packages.push(self.unpack(&fetched, &all)?);
        // This package may be as large as all other packages combined.
        remove(&fetched.path)?;
        let archives: Vec<_> = files_below(&all.join("usr/src"))?;
        let archive = archives.iter().find(|path| path.to_string_lossy().ends_with(".tar.xz"));
        let archive = archive.with_context(|| format!("the package {} contains no sources", fetched.package.name))?;
        let mut step = self.progress.step(format!("unpacking nouveau of Linux {}", self.kernel.name));
        unpack_driver(archive, &all, &mut step)?;
        let driver = all.join(DRIVER_FOLDER);
        fs::rename(&driver, to).with_context(|| format!("the kernel's sources contain no {DRIVER_FOLDER}"))?;
        remove(&all)
    }

    /// Fetches the version of a package that matches the kernel.
    fn fetch_same(&self, apt: &Apt, name: &str) -> Result<Fetched> {
        let version = self.made.packages.first().map(|package| package.version.as_str());
        let version = version.context("the version of the kernel is not recorded")?;
        let explain = |error: Error| {
            error.context(format!(
                "{name} {version}, the version of the kernel in the cache, is unavailable; `cargo xtask setup --refresh` fetches the \
                 newest kernel"
            ))
        };
        apt.fetch_one(&format!("{name}={version}"), self.progress).map_err(explain)
    }

    fn unpack(&self, fetched: &Fetched, to: &Path) -> Result<Package> {
        let mut step = self.progress.step(format!("unpacking {}", fetched.package.name));
        apt::unpack(fetched, to, &mut step)?;
        Ok(fetched.package.clone())
    }
}

/// Pipes an archive into `tar`, which extracts only the driver's folder and strips the archive's top folder from its
/// path.
fn unpack_driver(archive: &Path, to: &Path, step: &mut Step<'_>) -> Result<()> {
    let file = fs::File::open(archive).with_context(|| format!("cannot open {}", archive.display()))?;
    let mut tar = Command::new("tar")
        .args(["-x", "--strip-components=1", "--wildcards", "-C"])
        .arg(to)
        .arg(format!("*/{DRIVER_FOLDER}"))
        .stdin(Stdio::piped())
        .spawn()
        .context("cannot start tar; install the package tar")?;
    let mut pipe = tar.stdin.take().context("tar has no input")?;
    let (mut decoder, mut buffer, mut done) = (XzDecoder::new(file), vec![0; 1 << 20], 0);
    loop {
        let count = decoder.read(&mut buffer).with_context(|| format!("cannot unpack {}", archive.display()))?;
        if count == 0 {
            break;
        }
        pipe.write_all(&buffer[..count]).context("tar exited early")?;
        done += count as u64;
        step.tick(|| mib(done));
    }
    drop(pipe);
    let status = tar.wait().context("waiting for tar")?;
    if !status.success() {
        bail!("tar failed ({status}) on {}", archive.display());
    }
    Ok(())
}

/// Copies our module's sources to `build`, and our files for the driver to the driver's folder.
fn our_sources(build: &Path) -> Result<()> {
    let (ours, driver) = (sources(), build.join("nouveau"));
    let hooks = driver.join("gmpv");
    fs::create_dir(&hooks).with_context(|| format!("cannot create {}", hooks.display()))?;
    for (from, to) in [(ours.clone(), build), (ours.join("nouveau"), &hooks)] {
        for entry in fs::read_dir(&from).with_context(|| format!("cannot read {}", from.display()))?.flatten() {
            if entry.path().extension().is_some_and(|e| e == "c" || e == "h") {
                copy(&entry.path(), &to.join(entry.file_name()))?;
            }
        }
    }
    let read = |path: PathBuf| fs::read_to_string(&path).with_context(|| format!("cannot read {}", path.display()));
    let write = |path: PathBuf, text: String| {
        fs::write(&path, text).with_context(|| format!("cannot write {}", path.display()))
    };
    write(build.join("Kbuild"), read(ours.join("Kbuild"))? + "obj-m += nouveau/\n")?;
    write(driver.join("Kbuild"), read(driver.join("Kbuild"))? + &read(ours.join("nouveau/Kbuild"))?)
}

fn copy(from: &Path, to: &Path) -> Result<()> {
    fs::copy(from, to).map(drop).with_context(|| format!("cannot copy {} to {}", from.display(), to.display()))
}

/// Returns all files below `folder`, sorted by path.
fn files_below(folder: &Path) -> Result<Vec<PathBuf>> {
    let mut files = Vec::new();
    for entry in fs::read_dir(folder).with_context(|| format!("cannot read {}", folder.display()))? {
        let path = entry?.path();
        if path.is_dir() {
            files.extend(files_below(&path)?);
        } else {
            files.push(path);
        }
    }
    files.sort();
    Ok(files)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn kernel(modules: &[&str]) -> Unpacked {
        Unpacked {
            name: "6.1".into(),
            release: "6.1.0".into(),
            vmlinuz: "/v".into(),
            modules: modules.iter().map(Into::into).collect(),
            key: "k".into(),
        }
    }

    #[test]
    fn driver_is_replaced_and_its_dependency_precedes_it() {
        let made = with_modules(&kernel(&["/s/drm.ko", "/s/nouveau.ko"]), Path::new("/p"), "q").unwrap();
        let modules: Vec<_> = made.modules.iter().map(|m| m.to_string_lossy().into_owned()).collect();
        assert_eq!(modules, ["/s/drm.ko", "/p/gpu_mediator_pv.ko", "/p/nouveau.ko"]);
        assert_eq!((made.key.as_str(), made.name.as_str()), ("k-q", "6.1"));
        assert!(with_modules(&kernel(&["/s/drm.ko"]), Path::new("/p"), "q").is_err());
    }

    #[test]
    fn the_key_changes_with_the_kernel() {
        let one = kernel(&[]);
        let other = Unpacked { key: "l".into(), ..one.clone() };
        assert_eq!(item_key(&one).unwrap(), item_key(&one).unwrap());
        assert_ne!(item_key(&one).unwrap(), item_key(&other).unwrap());
    }
}
