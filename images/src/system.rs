//! A Debian system with systemd. Tests install our Debian package on it, as an operator would.
//!
//! The root file system is the initramfs. The packages are unpacked but not configured. This module replaces the
//! necessary parts of their maintainer scripts: it creates users and groups, the merged `/usr`, and dpkg's database.
//! The database lists all packages as installed, so that dpkg checks the dependencies of packages that are installed
//! later.
//!
//! The system has no udev, D-Bus, logins or network.
//!
//! Sources: `bootup(7)`, `machine-id(5)`, `passwd(5)`, `shadow(5)`, `deb-control(5)`, `dpkg(1)`.

use std::collections::BTreeMap;
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, ensure};

use crate::Kernel;
use crate::apt::{self, Apt, Fetched};
use crate::cache::{Cache, key, remove};
use crate::cpio::Archive;
use crate::exec;
use crate::kernel::Unpacked;
use crate::progress::{Progress, Step};
use crate::recipe::{Made, Suite, TreeRecipe};

/// Version of the recipe. It must be incremented when the recipe's result changes.
const VERSION: &str = "2";
/// File name of the system's archive.
const ARCHIVE: &str = "system.cpio";
/// Folders that become links to folders in `/usr`, even if a package contains them as folders.
const MERGED: [&str; 4] = ["bin", "lib", "lib64", "sbin"];
/// Path of the agent in the system.
const AGENT: &str = "usr/sbin/tests-agent";
/// Unit that starts the agent after booting, so that the agent's first message indicates that the system is up.
const AGENT_UNIT: &str = "[Unit]\nDescription=Commands of the host's tests\n\n[Service]\nExecStart=/usr/sbin/tests-agent\nStandardOutput=journal+console\n";
/// Folder of the administrator's systemd units.
const UNITS: &str = "etc/systemd/system";

/// A system and its kernel.
#[derive(Clone, Debug)]
pub struct System {
    kernel: Unpacked,
    archive: PathBuf,
    agent: PathBuf,
}

impl System {
    /// Creates a system that consists of `kernel` and the files in `archive`. The program `agent` communicates with the
    /// host.
    #[must_use]
    pub fn new(kernel: Unpacked, archive: PathBuf, agent: PathBuf) -> Self {
        Self { kernel, archive, agent }
    }

    /// Writes the initramfs of the system, extended by `more`, to the file `initrd`. Files in `more` take precedence.
    pub fn bootable(&self, more: Archive, initrd: &Path) -> Result<Kernel> {
        let mut agent = Archive::default();
        agent.file(AGENT, 0o755, &read(&self.agent)?);
        // The kernel accepts concatenated archives.
        let all = [read(&self.archive)?, agent.finish(), more.finish()].concat();
        fs::write(initrd, all).with_context(|| format!("cannot write {}", initrd.display()))?;
        let Unpacked { name, release, vmlinuz, .. } = self.kernel.clone();
        Ok(Kernel { name, release, vmlinuz, initrd: initrd.to_owned() })
    }
}

/// Finds or creates the files of the system called `name`. Returns the path of the system's archive.
pub fn ensure(
    name: &str,
    recipe: &TreeRecipe,
    cache: &Cache,
    record: &mut Option<Made>,
    progress: &Progress,
) -> Result<PathBuf> {
    let libc = host_libc()?;
    let version = version(recipe, libc);
    if let Some(made) = record.as_ref().filter(|made| made.recipe == version)
        && let Some(folder) = cache.find(name, &made.key)
    {
        return Ok(folder.join(ARCHIVE));
    }
    let make = |suite: &Suite| make(name, recipe, &version, libc, suite, cache, progress);
    let (folder, made) = apt::first_of(&recipe.from, make)?;
    *record = Some(made);
    Ok(folder.join(ARCHIVE))
}

/// Version of the C library. Programs linked against one version also run with later versions.
type Libc = (u32, u32);

/// Returns the version of the host's C library. The programs in our Debian package are linked against this library.
fn host_libc() -> Result<Libc> {
    let output = Command::new("getconf").arg("GNU_LIBC_VERSION").output().context("getconf")?;
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    let version = text.trim().strip_prefix("glibc ").and_then(libc_version);
    version.with_context(|| format!("`getconf GNU_LIBC_VERSION` prints {text:?}, which is not a glibc version"))
}

/// Returns the leading two numbers of a version: `2.36` of `2.36-9+deb12u13`.
fn libc_version(text: &str) -> Option<Libc> {
    let mut numbers = text.split(|c: char| !c.is_ascii_digit()).map(str::parse);
    Some((numbers.next()?.ok()?, numbers.next()?.ok()?))
}

/// Returns the version of the files, which depends on the manifest, this recipe and this host.
fn version(recipe: &TreeRecipe, libc: Libc) -> String {
    let inputs = [&recipe.packages[..], &recipe.without, &recipe.masked].concat();
    let libc = format!("{}.{}", libc.0, libc.1);
    let inputs: Vec<_> = inputs.iter().map(String::as_str).chain([AGENT_UNIT, &libc]).collect();
    format!("{VERSION}-{}", key(&inputs))
}

fn make(
    name: &str,
    recipe: &TreeRecipe,
    version: &str,
    libc: Libc,
    suite: &Suite,
    cache: &Cache,
    progress: &Progress,
) -> Result<(PathBuf, Made)> {
    let apt = Apt::open(suite, cache, progress)?;
    let theirs = apt.fetch_one("libc6", progress)?.package.version;
    ensure!(
        libc_version(&theirs) >= Some(libc),
        "its libc6 {theirs} is older than this host's {}.{}, against which the package's programs are linked",
        libc.0,
        libc.1
    );
    let fetched = apt.fetch_closure(&recipe.packages, progress)?;
    let mut inputs = vec![version];
    inputs.extend(fetched.iter().map(|package| package.package.sha256.as_str()));
    let key = key(&inputs);
    let folder = match cache.find(name, &key) {
        Some(folder) => folder,
        None => cache.make(name, &key, |folder| {
            let mut step = progress.step(format!("unpacking a Debian {} of {} packages", suite.base, fetched.len()));
            let archive = pack(recipe, &fetched, &folder.join("all"), &mut step)?;
            fs::write(folder.join(ARCHIVE), archive).context("cannot write the system's archive")
        })?,
    };
    apt.clean()?;
    let packages = fetched.into_iter().map(|package| package.package).collect();
    Ok((folder, Made { recipe: version.to_owned(), key, suite: suite.target().to_owned(), packages }))
}

/// Returns the system as an archive. The packages are unpacked into `scratch`, which is removed afterwards.
fn pack(recipe: &TreeRecipe, packages: &[Fetched], scratch: &Path, step: &mut Step<'_>) -> Result<Vec<u8>> {
    fs::create_dir(scratch).with_context(|| format!("cannot create {}", scratch.display()))?;
    packages.iter().try_for_each(|package| apt::unpack(package, scratch, step))?;
    let mut archive = Archive::default();
    for (name, path) in merged(scratch, &recipe.without)? {
        add(&mut archive, &name, &path)?;
    }
    for name in MERGED {
        archive.link(name, &format!("usr/{name}"));
    }
    accounts(&mut archive, scratch)?;
    books(&mut archive, packages, step)?;
    // The kernel opens the console for init before init can mount anything.
    archive.device("dev/console", 0o600, 5, 1);
    archive.link("init", "usr/lib/systemd/systemd");
    archive.link("var/run", "/run");
    archive.file("etc/hostname", 0o644, b"host\n");
    // With an empty machine-id, systemd skips the questions of a first boot and generates an ID.
    archive.file("etc/machine-id", 0o444, b"");
    for unit in &recipe.masked {
        archive.link(&format!("{UNITS}/{unit}"), "/dev/null");
    }
    archive.file(&format!("{UNITS}/agent.service"), 0o644, AGENT_UNIT.as_bytes());
    archive.folder(&format!("{UNITS}/multi-user.target.wants"));
    archive.link(&format!("{UNITS}/multi-user.target.wants/agent.service"), "../agent.service");
    remove(scratch)?;
    Ok(archive.finish())
}

/// Returns all files below `root`, by their names in a system with a merged `/usr`. Folders precede their contents.
fn merged(root: &Path, without: &[String]) -> Result<BTreeMap<String, PathBuf>> {
    let mut names = BTreeMap::new();
    let mut folders = vec![root.to_owned()];
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(&folder).with_context(|| format!("cannot read {}", folder.display()))? {
            let entry = entry?;
            let path = entry.path();
            let name = path.strip_prefix(root)?.to_str().context("a file's name is not UTF-8")?.to_owned();
            if without.contains(&name) {
                continue;
            }
            if entry.file_type()?.is_dir() {
                folders.push(path.clone());
            }
            let first = name.split('/').next().unwrap_or_default();
            let name = if MERGED.contains(&first) { format!("usr/{name}") } else { name };
            names.insert(name, path);
        }
    }
    Ok(names)
}

/// Adds the file, folder or link at `path` under the name `name`.
fn add(archive: &mut Archive, name: &str, path: &Path) -> Result<()> {
    let metadata = fs::symlink_metadata(path).with_context(|| format!("cannot stat {}", path.display()))?;
    let mode = metadata.permissions().mode() & 0o7777;
    if metadata.is_dir() {
        archive.folder_with(name, mode);
    } else if metadata.is_symlink() {
        let target = fs::read_link(path)?;
        archive.link(name, target.to_str().context("a link's target is not UTF-8")?);
    } else {
        archive.file(name, mode, &read(path)?);
    }
    Ok(())
}

/// Adds Debian's standard groups and users, which cannot log in, and a PAM configuration that does not prompt when root
/// switches to another user.
fn accounts(archive: &mut Archive, root: &Path) -> Result<()> {
    let master = |name: &str| read(&root.join(format!("usr/share/base-passwd/{name}.master")));
    let (users, groups) = (master("passwd")?, master("group")?);
    archive.file("etc/passwd", 0o644, &users);
    archive.file("etc/group", 0o644, &groups);
    let names = |bytes: &[u8]| -> Vec<String> {
        let text = String::from_utf8_lossy(bytes).into_owned();
        text.lines().filter_map(|line| Some(line.split_once(':')?.0.to_owned())).collect()
    };
    let lines =
        |names: Vec<String>, rest: &str| names.iter().map(|name| format!("{name}:*:{rest}\n")).collect::<String>();
    archive.file("etc/shadow", 0o640, lines(names(&users), "19000:0:99999:7:::").as_bytes());
    archive.file("etc/gshadow", 0o640, lines(names(&groups), ":").as_bytes());
    for kind in ["account", "auth", "password", "session"] {
        let line = format!("{kind} required pam_permit.so\n");
        archive.file(&format!("etc/pam.d/common-{kind}"), 0o644, line.as_bytes());
    }
    Ok(())
}

/// Writes dpkg's database: marks each package as installed, and lists its files.
fn books(archive: &mut Archive, packages: &[Fetched], step: &mut Step<'_>) -> Result<()> {
    let mut ask = |what: &str, package: &Fetched| -> Result<String> {
        let mut command = Command::new("dpkg-deb");
        command.arg(what).arg(&package.path);
        let answer = exec::run(&mut command, "dpkg", step, || package.package.name.clone())?;
        Ok(String::from_utf8_lossy(&answer.stdout).into_owned())
    };
    let mut status = String::new();
    for package in packages {
        let control = ask("--field", package)?;
        status.push_str(&control);
        status.push_str("Status: install ok installed\n\n");
        let same = control.lines().any(|line| line == "Multi-Arch: same");
        let name = format!("{}{}", package.package.name, if same { ":amd64" } else { "" });
        let files: String = ask("--contents", package)?.lines().filter_map(listed).collect();
        archive.file(&format!("var/lib/dpkg/info/{name}.list"), 0o644, files.as_bytes());
    }
    archive.file("var/lib/dpkg/status", 0o644, status.as_bytes());
    Ok(())
}

/// Converts a line of `dpkg-deb --contents` (similar to `ls -l`, with a path that begins with `./`) to a line of dpkg's
/// database.
fn listed(line: &str) -> Option<String> {
    let (_, path) = line.split_once(" ./")?;
    let path = path.split(" -> ").next()?.split(" link to ").next()?.trim_end_matches('/');
    Some(if path.is_empty() { "/.\n".to_owned() } else { format!("/{path}\n") })
}

fn read(path: &Path) -> Result<Vec<u8>> {
    fs::read(path).with_context(|| format!("cannot read {}", path.display()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn usr_is_merged_and_excluded_folders_are_left_out() {
        let root = tempfile::tempdir().unwrap();
        for folder in ["bin", "usr/bin", "usr/share/doc/x", "etc"] {
            fs::create_dir_all(root.path().join(folder)).unwrap();
        }
        for file in ["bin/sh", "usr/bin/env", "usr/share/doc/x/copyright", "etc/hosts"] {
            fs::write(root.path().join(file), "").unwrap();
        }
        let names = merged(root.path(), &["usr/share/doc".to_owned()]).unwrap();
        assert_eq!(
            names.keys().map(String::as_str).collect::<Vec<_>>(),
            ["etc", "etc/hosts", "usr", "usr/bin", "usr/bin/env", "usr/bin/sh", "usr/share"]
        );
        assert_eq!(names["usr/bin/sh"], root.path().join("bin/sh"));
    }

    #[test]
    fn contents_of_a_package_become_lines_of_the_books() {
        let line = |path: &str| listed(&format!("-rwxr-xr-x root/root    125688 2023-01-05 09:20 {path}"));
        assert_eq!(line("./").as_deref(), Some("/.\n"));
        assert_eq!(line("./usr/bin/").as_deref(), Some("/usr/bin\n"));
        assert_eq!(line("./bin/sh -> dash").as_deref(), Some("/bin/sh\n"));
        assert_eq!(line("./usr/bin/perl link to ./usr/bin/perl5.36.0").as_deref(), Some("/usr/bin/perl\n"));
        assert_eq!(listed(""), None);
    }

    #[test]
    fn another_list_is_another_version() {
        let recipe = |packages: &[&str], masked: &[&str]| TreeRecipe {
            packages: packages.iter().map(|&name| name.to_owned()).collect(),
            without: Vec::new(),
            unneeded: Vec::new(),
            masked: masked.iter().map(|&name| name.to_owned()).collect(),
            from: Vec::new(),
        };
        let made = |recipe| version(&recipe, (2, 36));
        assert_eq!(made(recipe(&["a"], &[])), made(recipe(&["a"], &[])));
        assert_ne!(made(recipe(&["a"], &[])), made(recipe(&["b"], &[])));
        assert_ne!(made(recipe(&["a"], &[])), version(&recipe(&["a"], &[]), (2, 41)));
    }

    #[test]
    fn versions_of_the_c_library_are_compared_by_their_numbers() {
        assert_eq!(libc_version("2.36-9+deb12u13"), Some((2, 36)));
        assert!(libc_version("2.41-12") > libc_version("2.9"));
        assert_eq!(libc_version("musl"), None);
        assert!(host_libc().unwrap() >= (2, 17));
    }
}
