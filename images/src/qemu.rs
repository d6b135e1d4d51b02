//! Provides QEMU: the host's QEMU if it is new enough, or otherwise a QEMU that is unpacked from Debian packages and
//! run with its own loader.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::{env, fs};

use anyhow::{Result, anyhow, bail};

use crate::apt::{self, Apt, HostProblem};
use crate::cache::{Cache, key};
use crate::exec;
use crate::progress::Progress;
use crate::recipe::{Made, QemuRecipe, RECIPE_VERSION, Record, Suite};

/// File name of QEMU's executable.
pub(crate) const PROGRAM: &str = "qemu-system-x86_64";
/// The environment variable with the path of a QEMU to use unchanged.
pub const QEMU_VARIABLE: &str = "GPU_MEDIATOR_QEMU";

/// Command that starts QEMU.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Qemu {
    /// The program to run: QEMU, or the dynamic loader that starts QEMU.
    pub program: PathBuf,
    /// Arguments that precede all others.
    pub args: Vec<String>,
    /// Environment variables that the program needs.
    pub env: Vec<(String, String)>,
    /// Version of QEMU, such as `11.1.3`.
    pub version: String,
}

impl Qemu {
    /// Returns a command that starts QEMU. The caller must add the arguments that describe the machine.
    pub fn command(&self) -> Command {
        let mut command = Command::new(&self.program);
        command.args(&self.args).envs(self.env.iter().map(|(k, v)| (k, v)));
        command
    }
}

/// Finds or creates a QEMU that satisfies the recipe.
pub fn ensure(recipe: &QemuRecipe, cache: &Cache, record: &mut Record, progress: &Progress) -> Result<Qemu> {
    if let Some(path) = env::var_os(QEMU_VARIABLE) {
        let qemu = Qemu { program: path.into(), args: Vec::new(), env: Vec::new(), version: String::new() };
        return check(qemu, recipe).map_err(|e| e.context(format!("the QEMU in {QEMU_VARIABLE}")));
    }
    let host = Qemu { program: PROGRAM.into(), args: Vec::new(), env: Vec::new(), version: String::new() };
    if let Ok(qemu) = check(host, recipe) {
        record.qemu = None;
        return Ok(qemu);
    }
    if let Some(made) = record.qemu.as_ref().filter(|m| m.recipe == RECIPE_VERSION)
        && let Some(folder) = cache.find("qemu", &made.key)
        && let Ok(qemu) = check(unpacked(&folder)?, recipe)
    {
        return Ok(qemu);
    }
    let mut errors = Vec::new();
    for suite in &recipe.from {
        match make(recipe, suite, cache, progress) {
            Ok((qemu, made)) => {
                record.qemu = Some(made);
                return Ok(qemu);
            }
            Err(error) if error.is::<HostProblem>() => {
                return Err(error.context(format!(
                    "QEMU >= {} is not installed as {PROGRAM}, and none could be fetched",
                    recipe.minimum
                )));
            }
            Err(error) => {
                progress.line(&format!("images: no QEMU from Debian {}: {error:#}", suite.target()));
                errors.push(format!("Debian {}: {error:#}", suite.target()));
            }
        }
    }
    bail!(
        "no QEMU >= {} with the device {} was found or created; install one as {PROGRAM}, or name it in {QEMU_VARIABLE}.\n{}",
        recipe.minimum,
        recipe.device,
        errors.join("\n")
    )
}

fn make(recipe: &QemuRecipe, suite: &Suite, cache: &Cache, progress: &Progress) -> Result<(Qemu, Made)> {
    let apt = Apt::open(suite, cache, progress)?;
    let fetched = apt.fetch_closure(&recipe.packages, progress)?;
    let mut inputs = vec![RECIPE_VERSION];
    inputs.extend(fetched.iter().map(|f| f.package.sha256.as_str()));
    let key = key(&inputs);
    let folder = match cache.find("qemu", &key) {
        Some(folder) => folder,
        None => cache.make("qemu", &key, |folder| {
            let mut step = progress.step(format!("unpacking QEMU and the {} packages that it needs", fetched.len()));
            fetched.iter().try_for_each(|package| apt::unpack(package, folder, &mut step))
        })?,
    };
    let qemu = check(unpacked(&folder)?, recipe)?;
    let packages = fetched.into_iter().map(|f| f.package).collect();
    apt.clean()?;
    progress.line(&format!("images: QEMU {} is ready", qemu.version));
    Ok((qemu, Made { recipe: RECIPE_VERSION.into(), key, suite: suite.target().into(), packages }))
}

/// Returns the command for a QEMU unpacked into `root`. QEMU uses the loader, libraries and firmware from `root`.
fn unpacked(root: &Path) -> Result<Qemu> {
    let text = |path: &Path| -> Result<String> {
        path.to_str().map(str::to_owned).ok_or_else(|| anyhow!("the cache folder's path is not UTF-8"))
    };
    let loader = ["lib64", "usr/lib64", "usr/lib/x86_64-linux-gnu", "lib/x86_64-linux-gnu"]
        .iter()
        .map(|d| root.join(d).join("ld-linux-x86-64.so.2"))
        .find(|p| p.exists())
        .ok_or_else(|| anyhow!("the unpacked packages contain no dynamic loader"))?;
    let libraries: BTreeSet<_> = ["usr/lib/x86_64-linux-gnu", "lib/x86_64-linux-gnu", "usr/lib64", "lib64", "usr/lib"]
        .iter()
        .map(|d| root.join(d))
        .filter(|d| holds_libraries(d))
        .collect();
    let libraries = libraries.iter().map(|p| text(p)).collect::<Result<Vec<_>>>()?.join(":");
    let mut args = vec!["--library-path".to_owned(), libraries, text(&root.join("usr/bin").join(PROGRAM))?];
    for data in ["usr/share/qemu", "usr/share/seabios"] {
        args.extend(["-L".to_owned(), text(&root.join(data))?]);
    }
    let modules = text(&root.join("usr/lib/x86_64-linux-gnu/qemu"))?;
    Ok(Qemu { program: loader, args, env: vec![("QEMU_MODULE_DIR".into(), modules)], version: String::new() })
}

fn holds_libraries(folder: &Path) -> bool {
    let Ok(entries) = fs::read_dir(folder) else { return false };
    entries.flatten().any(|e| e.file_name().to_string_lossy().contains(".so"))
}

/// Returns `qemu` with its version, or an error if it does not satisfy the recipe.
fn check(mut qemu: Qemu, recipe: &QemuRecipe) -> Result<Qemu> {
    let name = qemu.program.display().to_string();
    let text = exec::probe(qemu.command().arg("--version")).ok_or_else(|| anyhow!("{name} cannot be run"))?;
    let version = parse_version(&text).ok_or_else(|| anyhow!("{name} --version prints no version"))?;
    if !at_least(&version, &recipe.minimum) {
        bail!("{name} is QEMU {version}, older than {}", recipe.minimum);
    }
    let devices = exec::probe(qemu.command().args(["-device", "help"])).unwrap_or_default();
    if !devices.contains(&format!("\"{}\"", recipe.device)) {
        bail!("{name} (QEMU {version}) was built without the device {}", recipe.device);
    }
    qemu.version = version;
    Ok(qemu)
}

fn parse_version(text: &str) -> Option<String> {
    let rest = text.split_once("version ")?.1;
    let end = rest.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(rest.len());
    Some(rest[..end].to_owned()).filter(|v| v.contains('.'))
}

fn at_least(version: &str, minimum: &str) -> bool {
    let numbers = |v: &str| v.split('.').map(|n| n.parse().unwrap_or(0)).collect::<Vec<u32>>();
    numbers(version) >= numbers(minimum)
}

/// Returns the path of QEMU's executable, even if a loader starts QEMU.
pub(crate) fn binary(qemu: &Qemu) -> Result<PathBuf> {
    let is_it = |path: &Path| path.file_name().is_some_and(|name| name == PROGRAM);
    if let Some(path) = qemu.args.iter().map(Path::new).find(|path| is_it(path)) {
        return Ok(path.to_owned());
    }
    if qemu.program.components().count() > 1 {
        return Ok(qemu.program.clone());
    }
    let folders = env::var_os("PATH").unwrap_or_default();
    match env::split_paths(&folders).map(|folder| folder.join(&qemu.program)).find(|path| path.is_file()) {
        Some(path) => Ok(path),
        None => bail!("{} is in no folder of PATH", qemu.program.display()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn qemu_version_is_parsed_from_output() {
        let text = "QEMU emulator version 11.1.3 (Debian 1:11.1.3+ds-1)\nCopyright";
        assert_eq!(parse_version(text).as_deref(), Some("11.1.3"));
        assert_eq!(parse_version("nothing"), None);
    }

    #[test]
    fn versions_compare_by_number() {
        assert!(at_least("10.1", "10.1"));
        assert!(at_least("10.1.2", "10.1"));
        assert!(at_least("11.0", "10.1"));
        assert!(!at_least("10.0.13", "10.1"));
        assert!(!at_least("9.2", "10.1"));
    }
}
