//! Packages the same files as an RPM with the crate `rpm`, so that no tool of another distribution is needed.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, ensure};
use rpm::{BuildConfig, CompressionType, Dependency, FileMode, FileOptions, Package, PackageBuilder};

use super::tree::Tree;
use super::{CONFFILES, NAME, Recipe};
use crate::run::root;

/// Name of the architecture in RPM.
const ARCHITECTURE: &str = "x86_64";
/// Files that have a different location in other distributions than in Debian.
const ELSEWHERE: [(&str, &str); 1] =
    [("usr/share/zsh/vendor-completions/_mediatorctl", "usr/share/zsh/site-functions/_mediatorctl")];

/// Creates the package from a tree's files in `out`. Returns its path. `libc` is the newest version of glibc that a
/// program requires.
pub(super) fn make(recipe: &Recipe, tree: &Tree, libc: Option<(u32, u32)>, out: &Path) -> Result<PathBuf> {
    let epoch = u32::try_from(recipe.epoch).context("the time is not one of RPM")?;
    let mut builder =
        PackageBuilder::new(NAME, &recipe.version, "MIT", ARCHITECTURE, "Shares NVIDIA cards between virtual machines");
    let compression = if recipe.fast { CompressionType::None } else { CompressionType::Gzip };
    builder.using_config(BuildConfig::v4().compression(compression).source_date(epoch));
    builder.description(
        "One daemon, mediatord, owns the NVIDIA cards of a KVM host and gives each virtual machine a virtual GPU that the stock nouveau \
         driver drives without modification. mediatorctl shows and changes what each may have.",
    );
    builder.release("1").build_host("localhost");
    for (path, mode) in tree.listed()? {
        let place = ELSEWHERE.iter().find(|(from, _)| *from == path).map_or(path.as_str(), |(_, to)| to);
        let mode = FileMode::regular(u16::try_from(mode & 0o7777).unwrap_or(0o644));
        let options = FileOptions::new(format!("/{place}")).mode(mode).user("root").group("root");
        let options = match CONFFILES.contains(&path.as_str()) {
            true => options.config().noreplace(),
            false => options,
        };
        builder.with_file(tree.path(&path), options)?;
    }
    for (path, target) in tree.links()? {
        builder.with_symlink(FileOptions::symlink(format!("/{path}"), target).user("root").group("root"))?;
    }
    if let Some((major, minor)) = libc {
        builder.requires(Dependency::any(format!("libc.so.6(GLIBC_{major}.{minor})(64bit)")));
    }
    builder.requires(Dependency::any("libgcc")).requires(Dependency::any("systemd"));
    builder.requires(Dependency::script_pre("shadow-utils"));
    let script = |name: &str| {
        let path = root().join("packaging/rpm").join(name);
        fs::read_to_string(&path).with_context(|| format!("cannot read {}", path.display()))
    };
    builder.pre_install_script(script("pre")?).post_install_script(script("post")?);
    builder.pre_uninstall_script(script("preun")?).post_uninstall_script(script("postun")?);
    let package = out.join(format!("{NAME}-{}-1.{ARCHITECTURE}.rpm", recipe.version));
    builder.build()?.write_file(&package).with_context(|| format!("cannot write {}", package.display()))?;
    Ok(package)
}

/// Returns all problems of a package; `again` is the result of a second build. The package must contain the files in
/// `expected` with these access rights.
pub(super) fn problems(package: &Path, again: &Path, expected: &[(&str, &str)]) -> Result<Vec<String>> {
    let read = Package::open(package).with_context(|| format!("cannot read {}", package.display()))?;
    read.verify_digests().context("the RPM's own sums")?;
    let mut problems = Vec::new();
    ensure!(read.metadata.get_name()? == NAME, "the RPM has another name");
    let entries = read.metadata.get_file_entries()?;
    for (path, mode) in expected {
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
    for path in CONFFILES {
        let is_config = entries
            .iter()
            .any(|entry| entry.path() == Path::new("/").join(path) && entry.flags().contains(rpm::FileFlags::CONFIG));
        if !is_config {
            problems.push(format!("RPM: {path} is not a configuration file"));
        }
    }
    if fs::read(package)? != fs::read(again)? {
        problems.push("RPM: made twice, it is not the same".to_owned());
    }
    Ok(problems)
}

/// Returns access rights in the format of `ls -l`.
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
