//! Builds an RPM with the same files as the Debian package, using the `rpm` crate instead of another distribution's
//! tools.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, ensure};
use rpm::{BuildConfig, CompressionType, Dependency, FileMode, FileOptions, Package, PackageBuilder};

use super::recipe::Recipe;
use super::spec::{LIBVIRT_HOOK, LOADER_FILE, Spec};
use super::tree::Tree;
use crate::release::{self, MAINTAINER};
use crate::run::root;

/// RPM's name of the architecture.
const ARCHITECTURE: &str = "x86_64";
/// Files with different paths in Debian packages and RPMs: the Debian path, and the RPM path.
const ELSEWHERE: [(&str, &str); 1] =
    [("usr/share/zsh/vendor-completions/_mediatorctl", "usr/share/zsh/site-functions/_mediatorctl")];
/// Name of a file that only Debian packages contain. RPM keeps the changelog in the package header.
const DEBIAN_ONLY: &str = "changelog.gz";
/// Folder of files for lintian, Debian's package checker.
const LINTIAN: &str = "usr/share/lintian/";

/// Returns true if an upgrade must keep the administrator's changes to a file. By RPM's rules, an executable must not
/// be marked as a configuration file.
fn is_config(spec: &Spec, path: &str) -> bool {
    spec.conffiles.contains(&path) && path != LIBVIRT_HOOK
}

/// Returns true for a Debian-only file.
fn is_debian_only(path: &str) -> bool {
    path.ends_with(DEBIAN_ONLY) || path.starts_with(LINTIAN)
}

/// Creates an RPM in `out` from a tree's files. Returns its path. `libc` is the newest glibc version that a program
/// requires.
pub(super) fn make(recipe: &Recipe, spec: &Spec, tree: &Tree, libc: Option<(u32, u32)>, out: &Path) -> Result<PathBuf> {
    let epoch = u32::try_from(recipe.epoch).context("the time is out of RPM's range")?;
    let mut summary = spec.summary.to_owned();
    if let Some(first) = summary.get_mut(..1) {
        first.make_ascii_uppercase();
    }
    let mut builder = PackageBuilder::new(spec.name, &recipe.version, "MIT", ARCHITECTURE, &summary);
    let compression = if recipe.fast { CompressionType::None } else { CompressionType::Gzip };
    builder.using_config(BuildConfig::v4().compression(compression).source_date(epoch));
    builder.description(spec.description.join("\n")).packager(MAINTAINER).group("System Environment/Daemons");
    builder.release("1").build_host("localhost");
    for release in release::releases()?.into_iter().rev() {
        let noon = release.date.at(12, 0, 0, 0).to_zoned(jiff::tz::TimeZone::UTC).context("a date of a release")?;
        let seconds = u32::try_from(noon.timestamp().as_second()).context("a date of a release")?;
        let changes: String = release.changes.iter().map(|change| release::wrapped(change)).collect();
        builder.add_changelog_entry(format!("{MAINTAINER} - {}-1", release.version), changes.trim_end(), seconds);
    }
    for (path, mode) in tree.listed()?.into_iter().filter(|(path, _)| !is_debian_only(path)) {
        let place = ELSEWHERE.iter().find(|(from, _)| *from == path).map_or(path.as_str(), |(_, to)| to);
        let mode = FileMode::regular(u16::try_from(mode & 0o7777).unwrap_or(0o644));
        let mut options = FileOptions::new(format!("/{place}")).mode(mode).user("root").group("root");
        if is_config(spec, &path) {
            options = options.config().noreplace();
        }
        if path.starts_with("usr/share/doc/") || path.starts_with("usr/share/man/") {
            options = options.doc();
        }
        builder.with_file(tree.path(&path), options)?;
    }
    for (path, target) in tree.links()? {
        builder.with_symlink(FileOptions::symlink(format!("/{path}"), target).user("root").group("root"))?;
    }
    if let Some((major, minor)) = libc {
        builder.requires(Dependency::any(format!("libc.so.6(GLIBC_{major}.{minor})(64bit)")));
    }
    builder.requires(Dependency::any("libgcc_s.so.1()(64bit)"));
    if tree.path(LOADER_FILE).exists() {
        // Not all RPM distributions run ldconfig from a trigger.
        builder.post_install_script("/sbin/ldconfig\n").post_uninstall_script("/sbin/ldconfig\n");
    }
    if spec.has_service {
        builder.requires(Dependency::any("systemd")).requires(Dependency::script_pre("shadow-utils"));
        let script = |name: &str| {
            let path = root().join("packaging/rpm").join(name);
            fs::read_to_string(&path).with_context(|| format!("cannot read {}", path.display()))
        };
        builder.pre_install_script(script("pre")?).post_install_script(script("post")?);
        builder.pre_uninstall_script(script("preun")?).post_uninstall_script(script("postun")?);
    }
    let package = out.join(format!("{}-{}-1.{ARCHITECTURE}.rpm", spec.name, recipe.version));
    builder.build()?.write_file(&package).with_context(|| format!("cannot write {}", package.display()))?;
    Ok(package)
}

/// Returns all problems of a package. `again` is the package from a second build.
pub(super) fn problems(spec: &Spec, package: &Path, again: &Path) -> Result<Vec<String>> {
    let read = Package::open(package).with_context(|| format!("cannot read {}", package.display()))?;
    read.verify_digests().context("the RPM's own checksums")?;
    let mut problems = Vec::new();
    ensure!(read.metadata.get_name()? == spec.name, "the RPM has another name");
    let entries = read.metadata.get_file_entries()?;
    for (path, mode) in spec.expected.iter().filter(|(path, _)| !path.ends_with(DEBIAN_ONLY)) {
        let place = ELSEWHERE.iter().find(|(from, _)| from == path).map_or(*path, |(_, to)| to);
        let found = entries.iter().find(|entry| entry.path() == Path::new("/").join(place));
        match found {
            None => problems.push(format!("RPM: {place} is missing")),
            Some(entry) => {
                let bits = u32::from(entry.mode().permissions());
                if shown(bits) != *mode {
                    problems.push(format!("RPM: {place}: {}, expected {mode}", shown(bits)));
                }
            }
        }
    }
    for path in spec.conffiles.iter().filter(|path| is_config(spec, path)) {
        let is_config = entries
            .iter()
            .any(|entry| entry.path() == Path::new("/").join(path) && entry.flags().contains(rpm::FileFlags::CONFIG));
        if !is_config {
            problems.push(format!("RPM: {path} is not a configuration file"));
        }
    }
    if fs::read(package)? != fs::read(again)? {
        problems.push("RPM: a second build differs".to_owned());
    }
    Ok(problems)
}

/// Returns permissions in the format of `ls -l`.
fn shown(bits: u32) -> String {
    let letters = "rwxrwxrwx".chars().enumerate();
    let each = letters.map(|(at, letter)| if bits >> (8 - at) & 1 == 1 { letter } else { '-' });
    std::iter::once('-').chain(each).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rights_are_shown_as_ls_does() {
        assert_eq!((shown(0o644).as_str(), shown(0o755).as_str()), ("-rw-r--r--", "-rwxr-xr-x"));
    }
}
