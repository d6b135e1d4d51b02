//! Builds out-of-tree kernel modules using the host's compiler and the headers and build tools from a kernel's
//! packages.

use std::fs;
use std::io::Read;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail};

use crate::exec;
use crate::hooks::{library_folders, loader};
use crate::progress::Step;

/// Programs required on the host, each with the package that contains it.
const PROGRAMS: [(&str, &str); 5] =
    [("make", "make"), ("gcc", "gcc"), ("ld", "binutils"), ("strip", "binutils"), ("tar", "tar")];
/// Folder of the wrapped programs, next to their wrappers.
const WRAPPED: &str = ".elf";
/// Compiler options that a kernel's configuration may require but that older compilers lack, each with the make
/// variable that disables it. If an option is disabled, the kernel uses a fallback.
const OPTIONS: [(&str, &str); 1] = [("-fmin-function-alignment=16", "CONFIG_CC_HAS_MIN_FUNCTION_ALIGNMENT=")];

/// The unpacked headers and build tools of one kernel.
pub struct Kbuild {
    headers: PathBuf,
}

/// Checks that the host has the required build programs. An error names the package to install.
pub fn require_programs() -> Result<()> {
    for (program, package) in PROGRAMS {
        if exec::probe(Command::new(program).arg("--version")).is_none() {
            bail!("the program {program} cannot be run; install the package {package} (`apt-get install {package}`)");
        }
    }
    Ok(())
}

impl Kbuild {
    /// Prepares the packages `linux-headers-RELEASE`, its `-common` part, `linux-kbuild-*` and its libraries, which are
    /// all unpacked below `root`.
    pub fn prepare(root: &Path, release: &str) -> Result<Self> {
        if root.to_string_lossy().contains(|c: char| c.is_whitespace() || ":#$'\"\\".contains(c)) {
            bail!(
                "make cannot build in {}: its path has unsupported characters; use another GPU_MEDIATOR_CACHE",
                root.display()
            );
        }
        let headers = root.join("usr/src").join(format!("linux-headers-{release}"));
        let makefile = headers.join("Makefile");
        // The makefile of the headers includes files of the common part by their installed paths.
        let text = fs::read_to_string(&makefile).with_context(|| format!("cannot read {}", makefile.display()))?;
        let text = text.replace(" /usr/src/", &format!(" {}/", root.join("usr/src").display()));
        fs::write(&makefile, text).with_context(|| format!("cannot write {}", makefile.display()))?;
        let libraries = library_folders(root);
        let loader = loader(&libraries)?;
        let libraries = std::env::join_paths(&libraries).context("library folders")?;
        let prefix = format!("exec {} --library-path {}", loader.display(), libraries.to_string_lossy());
        let tools = fs::read_dir(root.join("usr/lib")).context("the packages contain no build tools")?;
        for folder in tools.flatten().filter(|e| e.file_name().to_string_lossy().starts_with("linux-kbuild-")) {
            wrap(&folder.path(), &prefix)?;
        }
        Ok(Self { headers })
    }

    /// Builds the modules listed in the Kbuild file of `sources`, without debugging information.
    pub fn build(&self, sources: &Path, step: &mut Step<'_>) -> Result<()> {
        let jobs = std::thread::available_parallelism().map_or(1, usize::from);
        let mut command = Command::new("make");
        command.arg("-C").arg(&self.headers).arg(format!("-j{jobs}")).arg(format!("M={}", sources.display()));
        // Debian's makefiles specify the compiler that built the kernel, but another version also works. In Linux 6.1,
        // nouveau searches for its own headers below NOUVEAU_PATH.
        command.args(["CC=gcc", "NOUVEAU_PATH=", "CONFIG_DEBUG_INFO=", "CONFIG_DEBUG_INFO_BTF_MODULES="]);
        for (option, variable) in OPTIONS {
            if exec::probe(Command::new("gcc").args([option, "-E", "-x", "c", "/dev/null"])).is_none() {
                command.arg(variable);
            }
        }
        command.arg("modules").env_remove("MAKEFLAGS").env("LC_ALL", "C");
        exec::run(&mut command, "make", step, || format!("{} objects", objects(sources))).map(drop)
    }
}

/// Removes debugging information from a module.
pub fn strip(module: &Path, step: &mut Step<'_>) -> Result<()> {
    exec::run(Command::new("strip").arg("-g").arg(module), "binutils", step, String::new).map(drop)
}

/// Replaces every program below `folder` with a script. The script runs the program with the loader of the program's
/// own release, because the host's C library may be too old.
fn wrap(folder: &Path, prefix: &str) -> Result<()> {
    for entry in fs::read_dir(folder).with_context(|| format!("cannot read {}", folder.display()))?.flatten() {
        let (path, kind) = (entry.path(), entry.file_type().context("file type")?);
        if kind.is_dir() && entry.file_name() != WRAPPED {
            wrap(&path, prefix)?;
        }
        if !kind.is_file() || !is_program(&path)? {
            continue;
        }
        let moved = folder.join(WRAPPED).join(entry.file_name());
        fs::create_dir_all(folder.join(WRAPPED)).context("cannot create a folder for wrapped programs")?;
        fs::rename(&path, &moved).with_context(|| format!("cannot move {}", path.display()))?;
        // Some programs run other programs in the same folder, which they locate using argv[0].
        let (name, real) = (path.display(), moved.display());
        fs::write(&path, format!("#!/bin/sh\n{prefix} --argv0 {name} {real} \"$@\"\n"))
            .and_then(|()| fs::set_permissions(&path, fs::Permissions::from_mode(0o755)))
            .with_context(|| format!("cannot write {}", path.display()))?;
    }
    Ok(())
}

/// Returns true if `path` is an executable ELF file.
fn is_program(path: &Path) -> Result<bool> {
    let cannot = || format!("cannot read {}", path.display());
    let mut file = fs::File::open(path).with_context(cannot)?;
    let executable = file.metadata().with_context(cannot)?.permissions().mode() & 0o111 != 0;
    let mut magic = [0; 4];
    Ok(executable && file.read(&mut magic).with_context(cannot)? == 4 && magic == *b"\x7fELF")
}

fn objects(folder: &Path) -> usize {
    let entries = fs::read_dir(folder).into_iter().flatten().flatten();
    let counts = entries.map(|entry| match entry.file_type() {
        Ok(kind) if kind.is_dir() => objects(&entry.path()),
        _ => usize::from(entry.path().extension().is_some_and(|e| e == "o")),
    });
    counts.sum()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn programs_are_wrapped_and_scripts_are_not() {
        let folder = tempfile::tempdir().unwrap();
        let below = folder.path().join("tools");
        fs::create_dir(&below).unwrap();
        for (name, text, mode) in
            [("elf", "\x7fELFxyz", 0o755), ("script", "#!/bin/sh\n", 0o755), ("data", "\x7fELF", 0o644)]
        {
            fs::write(below.join(name), text).unwrap();
            fs::set_permissions(below.join(name), fs::Permissions::from_mode(mode)).unwrap();
        }
        wrap(folder.path(), "exec loader").unwrap();
        let text = |name: &str| fs::read_to_string(below.join(name)).unwrap();
        let (name, moved) = (below.join("elf"), below.join(".elf/elf"));
        let expected = format!("#!/bin/sh\nexec loader --argv0 {} {} \"$@\"\n", name.display(), moved.display());
        assert_eq!((text("elf"), text(".elf/elf").as_str()), (expected, "\x7fELFxyz"));
        assert_eq!((text("script").as_str(), text("data").as_str()), ("#!/bin/sh\n", "\x7fELF"));
    }

    #[test]
    fn a_path_that_make_cannot_take_is_refused() {
        let error = Kbuild::prepare(Path::new("/with space"), "6.1").err().unwrap();
        assert!(error.to_string().contains("GPU_MEDIATOR_CACHE"), "{error}");
    }
}
