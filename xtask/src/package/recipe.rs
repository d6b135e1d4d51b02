//! The recipe of a package: its file tree, and its metadata for dpkg.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context, Result, bail};

use super::spec::{
    DAEMON, GDEV, GUEST, GUEST_FOLDER, GUEST_LINKS, LIBVIRT_APPARMOR, LIBVIRT_HOOK, LINKS, LOADER_FILE, PROXMOX_HOOK,
    Spec,
};
use super::symbols::{self, Symbols};
use super::tree::Tree;
use super::{names, output, rpm};
use crate::release::{self, MAINTAINER};
use crate::run::{root, shown};

/// The only supported architecture.
const ARCHITECTURE: &str = "amd64";
/// Pages that operators do not need: benchmark results, and pages about the project's language.
const NOT_PACKAGED: [&str; 4] = ["evaluation.md", "language-sample.md", "language.md", "overhead.md"];

/// Inputs shared by all packages.
pub(super) struct Recipe {
    /// Folder with the programs.
    pub binaries: PathBuf,
    pub version: String,
    /// Timestamp of all files, in seconds since 1970.
    pub epoch: u64,
    /// True to build uncompressed packages.
    pub fast: bool,
}

impl Recipe {
    /// Builds a package in `out`. Returns the package's path.
    pub fn make(&self, spec: &Spec, out: &Path) -> Result<PathBuf> {
        let tree = Self::tree(spec.name, out);
        let symbols = Self::tree(&symbols::name(spec), out);
        for tree in [&tree, &symbols] {
            tree.clear()?;
        }
        let found = self.built(spec, &tree, &symbols)?;
        match spec.name {
            name if name == DAEMON.name => daemon_files(&tree)?,
            name if name == GUEST.name => guest_files(&tree)?,
            name if name == GDEV.name => self.gdev_files(&tree)?,
            _ => kubernetes_files(&tree)?,
        }
        self.documents(spec.name, &tree)?;
        self.control(spec, &tree)?;
        found.finish(self, spec, &symbols)?;
        self.build(spec.name, &tree, out)
    }

    /// Builds the debug symbol package for a package after [`Self::make`] has created its tree. Returns its path.
    pub fn make_symbols(&self, spec: &Spec, out: &Path) -> Result<PathBuf> {
        let name = symbols::name(spec);
        self.build(&name, &Self::tree(&name, out), out)
    }

    /// Builds an RPM in `out` from the package's existing tree. Returns its path.
    pub fn make_rpm(&self, spec: &Spec, out: &Path) -> Result<PathBuf> {
        rpm::make(self, spec, &Self::tree(spec.name, out), self.libc(spec)?, out)
    }

    fn tree(name: &str, out: &Path) -> Tree {
        Tree::new(out.join("tree").join(name))
    }

    fn build(&self, name: &str, tree: &Tree, out: &Path) -> Result<PathBuf> {
        tree.set_times(self.epoch)?;
        let package = out.join(format!("{name}_{}_{ARCHITECTURE}.deb", self.version));
        let mut command = Command::new("dpkg-deb");
        command
            .args(["--build", "--root-owner-group", if self.fast { "-Znone" } else { "-Zxz" }])
            .arg(tree.path(""))
            .arg(&package);
        command.env("SOURCE_DATE_EPOCH", self.epoch.to_string()).stdout(Stdio::null());
        if !shown(&mut command).context("the package dpkg has dpkg-deb")? {
            bail!("dpkg-deb failed");
        }
        Ok(package)
    }

    /// Returns the newest glibc version that the package's mandatory programs require.
    fn libc(&self, spec: &Spec) -> Result<Option<(u32, u32)>> {
        let programs = spec.built.iter().filter(|one| one.is_required);
        let libc = programs.map(|one| libc_version(&self.binaries.join(one.name))).collect::<Result<Vec<_>>>()?;
        Ok(libc.into_iter().flatten().max())
    }

    /// Adds the stripped build outputs to `tree`, and their debug symbols to `symbols`. Skips missing optional outputs.
    fn built(&self, spec: &Spec, tree: &Tree, symbols: &Tree) -> Result<Symbols> {
        let mut found = Symbols::default();
        for one in spec.built {
            let built = self.binaries.join(one.name);
            if !one.is_required && !built.exists() {
                eprintln!("package: without {}: there is no {}", one.path, built.display());
                continue;
            }
            tree.copy(&built, one.path, one.mode)?;
            found.take(&tree.path(one.path), symbols)?;
        }
        Ok(found)
    }

    /// Adds the header, examples and pages for Gdev's interface.
    fn gdev_files(&self, tree: &Tree) -> Result<()> {
        let (source, documents) = (root().join("gdev"), format!("usr/share/doc/{}", GDEV.name));
        tree.copy(&source.join("c/include/gdev.h"), "usr/include/gdev.h", 0o644)?;
        for example in
            ["c/examples/c/add.c", "c/examples/c/add.ptx", "c/examples/c/add.sm20", "driver-api/examples/c/driver.c"]
        {
            let name = example.rsplit('/').next().unwrap_or_default();
            tree.copy(&source.join(example), &format!("{documents}/examples/{name}"), 0o644)?;
        }
        tree.copy(&root().join("docs/guides/gdev.md"), &format!("{documents}/gdev.md"), 0o644)?;
        let description = fs::read_to_string(root().join("packaging/gdev/gdev.pc")).context("gdev.pc")?;
        let description = description.replace("@VERSION@", &self.version);
        tree.write("usr/share/pkgconfig/gdev.pc", description.as_bytes(), 0o644)?;
        let page = fs::read(root().join("packaging/gdev/gdev-crypt.1")).context("the man page")?;
        tree.compressed(&page, "usr/share/man/man1/gdev-crypt.1.gz")
    }

    /// Adds the changelog and the licence.
    fn documents(&self, name: &str, tree: &Tree) -> Result<()> {
        let folder = format!("usr/share/doc/{name}");
        let mut releases = release::releases()?;
        if let Some(newest) = releases.first_mut() {
            // For a package with another version, put that version into the newest entry.
            newest.version.clone_from(&self.version);
        }
        tree.compressed(release::debian(name, &releases).as_bytes(), &format!("{folder}/changelog.gz"))?;
        let licence = fs::read_to_string(root().join("LICENSE")).context("LICENSE")?;
        tree.write(&format!("{folder}/copyright"), copyright(&licence).as_bytes(), 0o644)
    }

    fn control(&self, spec: &Spec, tree: &Tree) -> Result<()> {
        let libc =
            self.libc(spec)?.map_or_else(|| "libc6".to_owned(), |(major, minor)| format!("libc6 (>= {major}.{minor})"));
        let depends = [libc.as_str(), "libgcc-s1", spec.depends].into_iter().filter(|name| !name.is_empty());
        let depends: Vec<_> = depends.collect();
        let fields = format!("Depends: {}\nSection: admin\n", depends.join(", "));
        let description: String = spec.description.iter().map(|line| format!(" {line}\n")).collect();
        self.write_control(tree, spec.name, &fields, &format!("{}\n{description}", spec.summary))?;
        if !spec.conffiles.is_empty() {
            let conffiles: String = spec.conffiles.iter().map(|path| format!("/{path}\n")).collect();
            tree.write("DEBIAN/conffiles", conffiles.as_bytes(), 0o644)?;
        }
        if spec.has_service {
            for script in ["postinst", "prerm", "postrm"] {
                tree.copy(&root().join("packaging").join(script), &format!("DEBIAN/{script}"), 0o755)?;
            }
        }
        Ok(())
    }

    /// Writes the checksums, and the control file with additional `fields` and a description.
    pub fn write_control(&self, tree: &Tree, name: &str, fields: &str, description: &str) -> Result<()> {
        let text = format!(
            "Package: {name}\nVersion: {}\nArchitecture: {ARCHITECTURE}\nMaintainer: {MAINTAINER}\n\
             Installed-Size: {}\nPriority: optional\n{fields}Description: {description}",
            self.version,
            tree.kib()?,
        );
        tree.write("DEBIAN/md5sums", &tree.md5sums()?, 0o644)?;
        tree.write("DEBIAN/control", text.as_bytes(), 0o644)
    }
}

/// Adds the daemon package's files that are not build outputs.
fn daemon_files(tree: &Tree) -> Result<()> {
    for (path, target) in LINKS {
        if tree.path(path).with_file_name(target).exists() {
            tree.link(path, target)?;
        }
    }
    tool_files(tree)?;
    let source = root().join("packaging");
    tree.copy(&source.join("gpu-mediator.service"), "usr/lib/systemd/system/gpu-mediator.service", 0o644)?;
    tree.copy(&source.join("gpu-mediator.toml"), "etc/gpu-mediator.toml", 0o644)?;
    tree.copy(&source.join("libvirt/gpu-mediator"), LIBVIRT_HOOK, 0o755)?;
    tree.copy(&source.join("libvirt/apparmor"), LIBVIRT_APPARMOR, 0o644)?;
    tree.copy(&source.join("proxmox/gpu-mediator-hook"), PROXMOX_HOOK, 0o755)?;
    let folder = format!("usr/share/doc/{}", DAEMON.name);
    for example in ["slurm/plugstack.conf", "cuda.conf", "page.conf"] {
        let name = example.rsplit('/').next().unwrap_or_default();
        tree.copy(&source.join(example), &format!("{folder}/examples/{name}"), 0o644)?;
    }
    for (part, ending) in [("grafana", ".json"), ("prometheus", ".rules.yml")] {
        let from = source.join(part);
        for name in names(&from)?.iter().filter(|name| name.ends_with(ending)) {
            tree.copy(&from.join(name), &format!("usr/share/{}/{part}/{name}", DAEMON.name), 0o644)?;
        }
    }
    for part in ["guides", "design", "reference"] {
        let pages = root().join("docs").join(part);
        let packaged = |name: &String| {
            (name.ends_with(".md") || name.ends_with(".json")) && !NOT_PACKAGED.contains(&name.as_str())
        };
        for name in names(&pages)?.into_iter().filter(packaged) {
            tree.copy(&pages.join(&name), &format!("{folder}/{part}/{name}"), 0o644)?;
        }
    }
    Ok(())
}

/// Adds the guest library's symbolic links, and the file that makes the loader find them.
fn guest_files(tree: &Tree) -> Result<()> {
    for (path, target) in GUEST_LINKS {
        tree.link(path, target)?;
    }
    tree.write(LOADER_FILE, format!("{GUEST_FOLDER}\n").as_bytes(), 0o644)?;
    tree.write("DEBIAN/triggers", b"activate-noawait ldconfig\n", 0o644)?;
    tree.copy(&root().join("packaging/guest/lintian"), "usr/share/lintian/overrides/gpu-mediator-guest", 0o644)?;
    let page = fs::read(root().join("packaging/guest/gpu-mediator-guest-doctor.1")).context("the man page")?;
    tree.compressed(&page, "usr/share/man/man1/gpu-mediator-guest-doctor.1.gz")
}

/// Adds shell completions and man pages, which `mediatorctl` prints.
fn tool_files(tree: &Tree) -> Result<()> {
    let ctl = tree.path("usr/bin/mediatorctl");
    for (shell, path) in [
        ("bash", "usr/share/bash-completion/completions/mediatorctl"),
        ("zsh", "usr/share/zsh/vendor-completions/_mediatorctl"),
        ("fish", "usr/share/fish/vendor_completions.d/mediatorctl.fish"),
    ] {
        let script = output(Command::new(&ctl).args(["completion", shell]))?;
        tree.write(path, &script, 0o644)?;
    }
    let pages = tempfile::tempdir().context("a folder for man pages")?;
    output(Command::new(&ctl).arg("man").arg(pages.path()))?;
    for page in names(pages.path())? {
        let section = page.rsplit('.').next().unwrap_or_default().to_owned();
        let text = fs::read(pages.path().join(&page)).with_context(|| format!("man page {page}"))?;
        tree.compressed(&text, &format!("usr/share/man/man{section}/{page}.gz"))?;
    }
    Ok(())
}

/// Adds the manifests, the chart and the Containerfile.
fn kubernetes_files(tree: &Tree) -> Result<()> {
    let fleet = root().join("fleet");
    let share = format!("usr/share/{}", DAEMON.name);
    tree.copy_folder(&fleet.join("kubernetes"), &format!("{share}/kubernetes"))?;
    tree.copy_folder(&fleet.join("helm"), &format!("{share}/helm"))?;
    let recipe = "usr/share/doc/gpu-mediator-kubernetes/examples/Containerfile";
    tree.copy(&fleet.join("Containerfile"), recipe, 0o644)
}

/// Returns the licence in Debian's format.
fn copyright(licence: &str) -> String {
    let indented = licence.lines().map(|line| if line.is_empty() { " .".to_owned() } else { format!(" {line}") });
    let text: Vec<_> = indented.collect();
    format!(
        "Format: https://www.debian.org/doc/packaging-manuals/copyright-format/1.0/\n\n\
         Files: *\nCopyright: The gpu-mediator authors\nLicense: Expat\n{}\n",
        text.join("\n")
    )
}

/// Returns the newest glibc version that a program requires, according to its symbol versions.
fn libc_version(program: &Path) -> Result<Option<(u32, u32)>> {
    let bytes = fs::read(program).with_context(|| format!("cannot read {}", program.display()))?;
    let prefix = b"GLIBC_";
    let versions =
        bytes.windows(prefix.len()).enumerate().filter(|(_, window)| window == prefix).filter_map(|(at, _)| {
            let rest = bytes.get(at + prefix.len()..)?;
            let end = rest.iter().position(|byte| !byte.is_ascii_digit() && *byte != b'.')?;
            let mut parts = std::str::from_utf8(rest.get(..end)?).ok()?.split('.');
            Some((parts.next()?.parse().ok()?, parts.next()?.parse().ok()?))
        });
    Ok(versions.max())
}
