//! A private apt with its lists, cache, status and configuration in the cache folder.
//!
//! It adopts only the settings for network access and date checks from the system's apt. In the private apt, no
//! packages are installed, so resolving a package yields all of its dependencies down to the C library.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Error, Result, anyhow, bail};

use crate::cache::{Cache, hash_file, size_of};
use crate::exec;
use crate::mirror::{self, MIRROR_VARIABLE, Mirror};
use crate::progress::{Progress, Step, mib};
use crate::recipe::{Package, Suite};

/// The package that contains apt-get and apt-cache.
const APT: &str = "apt";

/// Programs required on the host, each with the package that contains it.
const PROGRAMS: [(&str, &str); 3] = [("apt-get", APT), ("apt-cache", APT), ("dpkg-deb", "dpkg")];

/// A problem with the host that does not depend on the suite.
#[derive(Debug)]
pub struct HostProblem(String);

impl std::fmt::Display for HostProblem {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for HostProblem {}

impl HostProblem {
    fn from(error: &Error) -> Error {
        Error::new(Self(format!("{error:#}")))
    }
}

/// Settings adopted from the host: network access, and the strictness of date checks.
const KEPT: [&str; 7] = [
    "Acquire::http",
    "Acquire::https",
    "Acquire::ftp",
    "Acquire::Force",
    "Acquire::Retries",
    "Acquire::Check-",
    "Acquire::Max-",
];

/// A private apt for one suite, with up-to-date package lists.
pub struct Apt {
    root: PathBuf,
    suite: Suite,
}

/// A package file on disk that apt has verified against the signed lists.
pub struct Fetched {
    /// Name, version and SHA-256 of the package.
    pub package: Package,
    /// Path of the package file.
    pub path: PathBuf,
}

impl Apt {
    /// Prepares a private apt for `suite` and fetches the suite's package lists.
    pub fn open(suite: &Suite, cache: &Cache, progress: &Progress) -> Result<Self> {
        let host = |e: Error| HostProblem::from(&e);
        require_programs().map_err(host)?;
        let mirror = mirror::find().map_err(host)?;
        let keyring = mirror::keyring().map_err(host)?;
        let apt = Self { root: cache.path("apt").join(suite.target()), suite: suite.clone() };
        for folder in ["state/lists/partial", "cache/archives/partial"] {
            let path = apt.root.join(folder);
            fs::create_dir_all(&path).with_context(|| format!("cannot create {}", path.display()))?;
        }
        apt.write("state/status", "")?;
        apt.write("apt.conf", &apt.configuration()?)?;
        apt.write("apt.sources", &sources(suite, &mirror, &keyring, true))?;
        let mut step = progress.step(format!("fetching the package lists of Debian {}", suite.target()));
        let Err(first) = apt.update(&mut step) else { return Ok(apt) };
        if !lacks_a_suite(&first) {
            bail!(HostProblem(format!(
                "cannot fetch the package lists of Debian {} from {}: check the network, and apt's proxy settings if \
                 a proxy is needed. ({MIRROR_VARIABLE} selects another mirror; with a copy of another machine's cache \
                 folder, no network is needed.) {first:#}",
                suite.target(),
                mirror.main
            )));
        }
        // Sid has no security suite, and small mirrors may lack one. In both cases, use only the main archive.
        apt.write("apt.sources", &sources(suite, &mirror, &keyring, false))?;
        apt.update(&mut step).with_context(|| format!("{} does not have {}", mirror.main, suite.target()))?;
        progress.line(&format!("images: the mirror has no security suite for {}; continuing without it", suite.base));
        Ok(apt)
    }

    /// Fetches `packages` and all their dependencies.
    pub fn fetch_closure(&self, packages: &[String], progress: &Progress) -> Result<Vec<Fetched>> {
        let resolve = |extra: &str| {
            let mut command = self.command("apt-get");
            command.args(["-qq", "-y"]).args(self.preference()).args(["install", extra]).args(packages);
            command
        };
        let mut step = progress.step(format!("resolving {}", packages.join(", ")));
        // apt does not list files that an interrupted run has already fetched. With an empty archive folder, apt lists
        // all files.
        let empty = self.root.join("empty");
        fs::create_dir_all(empty.join("partial")).with_context(|| format!("cannot create {}", empty.display()))?;
        let mut list = resolve("--print-uris");
        list.arg("-o").arg(format!("Dir::Cache::archives={}", empty.display()));
        let listed = exec::run(&mut list, APT, &mut step, String::new)?;
        let listed = parse_uris(&String::from_utf8_lossy(&listed.stdout));
        let archives = self.root.join("cache/archives");
        let total: u64 = listed.iter().map(|l| l.size).sum();
        let mut step = progress.step(format!("fetching {} packages, {}", listed.len(), mib(total)));
        let done = || format!("{} of {}", mib(size_of(&archives)), mib(total));
        exec::run(&mut resolve("--download-only"), APT, &mut step, done)?;
        listed.iter().map(|l| fetched(&archives.join(&l.file))).collect()
    }

    /// Fetches `packages` and all their dependencies except for the packages in `unneeded`.
    pub fn fetch_closure_without(
        &self,
        packages: &[String],
        unneeded: &[String],
        progress: &Progress,
    ) -> Result<Vec<Fetched>> {
        if unneeded.is_empty() {
            return self.fetch_closure(packages, progress);
        }
        let mut list = self.command("apt-get");
        list.args(["-qq", "-y"]).args(self.preference()).args(["install", "--print-uris"]).args(packages);
        let mut step = progress.step(format!("resolving {}", packages.join(", ")));
        let listed = exec::run(&mut list, APT, &mut step, String::new)?;
        let mut listed = parse_uris(&String::from_utf8_lossy(&listed.stdout));
        listed.retain(|one| !unneeded.iter().any(|name| name == one.package()));
        let folder = self.root.join("cache/part");
        crate::cache::remove(&folder)?;
        fs::create_dir_all(&folder).with_context(|| format!("cannot create {}", folder.display()))?;
        let total: u64 = listed.iter().map(|one| one.size).sum();
        let mut step = progress.step(format!("fetching {} packages, {}", listed.len(), mib(total)));
        let mut command = self.command("apt-get");
        command.arg("-qq").args(self.preference()).arg("download").args(listed.iter().map(Listed::package));
        command.current_dir(&folder);
        exec::run(&mut command, APT, &mut step, || format!("{} of {}", mib(size_of(&folder)), mib(total)))?;
        listed.iter().map(|one| fetched(&folder.join(&one.file))).collect()
    }

    /// Fetches only `package`, in the target suite's version.
    pub fn fetch_one(&self, package: &str, progress: &Progress) -> Result<Fetched> {
        let folder = self.root.join("cache/single");
        crate::cache::remove(&folder)?;
        fs::create_dir_all(&folder).with_context(|| format!("cannot create {}", folder.display()))?;
        let mut step = progress.step(format!("fetching {package}"));
        let mut list = self.command("apt-get");
        list.arg("-qq").args(self.preference()).args(["--print-uris", "download", package]);
        let listed = parse_uris(&String::from_utf8_lossy(&exec::run(&mut list, APT, &mut step, String::new)?.stdout));
        let [listed] = listed.as_slice() else {
            bail!("apt-get lists {} files for {package}, expected one", listed.len())
        };
        let mut command = self.command("apt-get");
        command.arg("-qq").args(self.preference()).args(["download", package]).current_dir(&folder);
        exec::run(&mut command, APT, &mut step, || format!("{} of {}", mib(size_of(&folder)), mib(listed.size)))?;
        fetched(&folder.join(&listed.file))
    }

    /// Returns the names of the direct dependencies of `package` in the target suite.
    pub fn depends(&self, package: &str, progress: &Progress) -> Result<Vec<String>> {
        let mut step = progress.step(format!("looking up {package}"));
        let mut command = self.command("apt-cache");
        command.args(self.preference()).args(["--no-all-versions", "show", package]);
        let output = exec::run(&mut command, APT, &mut step, String::new)?;
        let text = String::from_utf8_lossy(&output.stdout).into_owned();
        let line = text.lines().find_map(|l| l.strip_prefix("Depends:"));
        let line = line.ok_or_else(|| anyhow!("the package {package} of {} has no Depends", self.suite.target()))?;
        Ok(line.split(',').filter_map(|d| d.split_whitespace().next()).map(str::to_owned).collect())
    }

    /// Returns the options that select an add-on suite. A plain release must not be selected, because it would then
    /// take precedence over its own security suite.
    fn preference(&self) -> Vec<&str> {
        self.suite.suite.as_deref().map(|s| vec!["-t", s]).unwrap_or_default()
    }

    /// Frees the disk space of the fetched packages.
    pub fn clean(&self) -> Result<()> {
        crate::cache::remove(&self.root.join("cache"))
    }

    fn update(&self, step: &mut Step<'_>) -> Result<()> {
        let lists = self.root.join("state/lists");
        let mut command = self.command("apt-get");
        command.args(["-qq", "update", "--error-on=any"]);
        exec::run(&mut command, APT, step, || mib(size_of(&lists))).map(drop)
    }

    fn command(&self, program: &str) -> Command {
        let mut command = Command::new(program);
        command.env("APT_CONFIG", self.root.join("apt.conf")).env("LC_ALL", "C");
        command.env("DEBIAN_FRONTEND", "noninteractive");
        command
    }

    fn configuration(&self) -> Result<String> {
        let mut text = String::new();
        let mut set = |name: &str, value: &str| text.push_str(&format!("{name} \"{value}\";\n"));
        let inside = |name: &str| self.root.join(name).to_string_lossy().into_owned();
        if inside("").contains(['"', '\n', '\\']) {
            bail!("the cache folder {} has a character in its path that apt does not support", self.root.display());
        }
        set("Dir::State", &inside("state"));
        set("Dir::State::status", &inside("state/status"));
        set("Dir::Cache", &inside("cache"));
        set("Dir::Etc::sourcelist", &inside("apt.sources"));
        // The host's hooks must not run, and the host's pins and keys must have no effect.
        for name in ["main", "parts", "sourceparts", "preferences", "preferencesparts", "trusted", "trustedparts"] {
            set(&format!("Dir::Etc::{name}"), "/dev/null");
        }
        set("APT::Architecture", "amd64");
        set("APT::Architectures::", "amd64");
        set("APT::Install-Recommends", "false");
        // Without root privileges, apt cannot switch to another user. With root privileges, the other user may not have
        // access to the cache folder.
        set("APT::Sandbox::User", "");
        set("Debug::NoLocking", "true");
        set("Acquire::Languages", "none");
        set("Acquire::Retries", "3");
        let host = exec::probe(Command::new("apt-config").args(["dump", "Acquire"])).unwrap_or_default();
        for line in host.lines().filter(|l| KEPT.iter().any(|k| l.starts_with(k))) {
            text.push_str(line);
            text.push('\n');
        }
        Ok(text)
    }

    fn write(&self, name: &str, text: &str) -> Result<()> {
        let path = self.root.join(name);
        fs::write(&path, text).with_context(|| format!("cannot write {}", path.display()))
    }
}

/// Calls `make` for each suite until a call succeeds, and returns its result. Stops on a problem with the host, because
/// it would affect all suites.
pub fn first_of<T>(suites: &[Suite], mut make: impl FnMut(&Suite) -> Result<T>) -> Result<T> {
    let mut errors = Vec::new();
    for suite in suites {
        match make(suite) {
            Err(error) if !error.is::<HostProblem>() => errors.push(format!("Debian {}: {error:#}", suite.target())),
            done => return done,
        }
    }
    bail!("no source provides it:\n{}", errors.join("\n"))
}

/// Unpacks a package file into `target`.
pub fn unpack(package: &Fetched, target: &Path, step: &mut Step<'_>) -> Result<()> {
    let mut command = Command::new("dpkg-deb");
    command.arg("-x").arg(&package.path).arg(target);
    exec::run(&mut command, "dpkg", step, || package.package.name.clone()).map(drop)
}

fn require_programs() -> Result<()> {
    for (program, package) in PROGRAMS {
        if exec::probe(Command::new(program).arg("--version")).is_none() {
            bail!("the program {program} cannot be run; install the package {package} (`apt-get install {package}`)");
        }
    }
    Ok(())
}

/// Returns true if the error indicates that the mirror lacks one of the suites.
fn lacks_a_suite(error: &Error) -> bool {
    let text = format!("{error:#}");
    ["404", "does not have a Release file", "no longer has a Release file"].iter().any(|sign| text.contains(sign))
}

fn sources(suite: &Suite, mirror: &Mirror, keyring: &Path, security: bool) -> String {
    let stanza = |uri: &str, suites: &str| {
        format!(
            "Types: deb\nURIs: {uri}\nSuites: {suites}\nComponents: main\nArchitectures: amd64\nSigned-By: {}\n\n",
            keyring.display()
        )
    };
    let mut text = stanza(&mirror.main, &suite.base);
    if let Some(more) = &suite.suite {
        text.push_str(&stanza(&mirror.main, more));
    }
    if security {
        text.push_str(&stanza(&mirror.security, &format!("{}-security", suite.base)));
    }
    text
}

struct Listed {
    file: String,
    size: u64,
}

impl Listed {
    /// Returns the package's name.
    fn package(&self) -> &str {
        self.file.split('_').next().unwrap_or_default()
    }
}

/// Parses the output of `--print-uris`: lines of `'URI' FILE SIZE HASH`.
fn parse_uris(text: &str) -> Vec<Listed> {
    let mut listed = Vec::new();
    for line in text.lines() {
        let Some((_, rest)) = line.strip_prefix('\'').and_then(|l| l.split_once("' ")) else { continue };
        let mut words = rest.split_whitespace();
        if let (Some(file), Some(Ok(size))) = (words.next(), words.next().map(str::parse)) {
            listed.push(Listed { file: file.to_owned(), size });
        }
    }
    listed
}

/// Parses the name of a fetched file: `NAME_VERSION_ARCH.deb`, with `:` escaped.
fn fetched(path: &Path) -> Result<Fetched> {
    let file = path.file_name().unwrap_or_default().to_string_lossy().replace("%3a", ":");
    let mut parts = file.split('_');
    let (Some(name), Some(version)) = (parts.next(), parts.next()) else { bail!("{file} is not a package file name") };
    let package = Package { name: name.to_owned(), version: version.to_owned(), sha256: hash_file(path)? };
    Ok(Fetched { package, path: path.to_path_buf() })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn printed_uris_give_file_and_size() {
        let text = "'http://m.example/pool/q_1%3a2.deb' q_1%3a2_amd64.deb 42 SHA256:00\nnoise\n";
        let listed = parse_uris(text);
        assert_eq!(listed.len(), 1);
        assert_eq!((listed[0].file.as_str(), listed[0].size), ("q_1%3a2_amd64.deb", 42));
        assert_eq!(listed[0].package(), "q");
    }

    #[test]
    fn sources_name_every_suite_once_and_the_keyring_always() {
        let suite = Suite { base: "trixie".into(), suite: Some("trixie-backports".into()) };
        let mirror = Mirror { main: "http://m.example/debian".into(), security: "http://m.example/sec".into() };
        let text = sources(&suite, &mirror, Path::new("/k.gpg"), true);
        assert_eq!(text.matches("Signed-By: /k.gpg").count(), 3);
        assert!(text.contains("Suites: trixie-backports\n"));
        assert!(text.contains("URIs: http://m.example/sec\nSuites: trixie-security\n"));
        assert!(!sources(&suite, &mirror, Path::new("/k.gpg"), false).contains("-security"));
    }
}
