//! `cargo xtask package`: the Debian package, and the same files as an RPM.
//!
//! Parts: the recipe (this file), `tree` (the layout of its files), `rpm` (the other format), `check` (checks of a
//! finished package).
//!
//! The same sources and programs give the same bytes: times are the time of the last commit (or `SOURCE_DATE_EPOCH`),
//! names are sorted, and root owns everything.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context, Result, bail};
use clap::Args;

use crate::run::{cargo, root, shown, target};

mod check;
mod rpm;
mod tree;

use tree::Tree;

/// Name of the package.
const NAME: &str = "gpu-mediator";
/// The programs in the package.
const PROGRAMS: [&str; 2] = ["mediatord", "mediatorctl"];
/// Configuration files: an upgrade keeps the administrator's changes.
const CONFFILES: [&str; 3] = [
    "etc/gpu-mediator.toml",
    "etc/libvirt/hooks/qemu.d/gpu-mediator",
    "etc/apparmor.d/abstractions/libvirt-qemu.d/gpu-mediator",
];
/// Files for CUDA tenants and for Slurm, with their paths.
const FURTHER: [(&str, &str); 4] = [
    ("cuda-owner", "usr/lib/gpu-mediator/cuda-owner"),
    ("libcuda.so", "usr/lib/gpu-mediator/cuda/libcuda.so.1"),
    ("gpu-mediator-slurm", "usr/bin/gpu-mediator-slurm"),
    ("libspank_gpu_mediator.so", "usr/lib/gpu-mediator/slurm/spank_gpu_mediator.so"),
];
/// Further names of the library, each a link to a file in the same folder. Programs open the library under any of these
/// names, in any order, but a process must load it only once.
const LINKS: [(&str, &str); 3] = [
    ("usr/lib/gpu-mediator/cuda/libcuda.so", "libcuda.so.1"),
    ("usr/lib/gpu-mediator/cuda/libnvidia-ml.so.1", "libcuda.so.1"),
    ("usr/lib/gpu-mediator/cuda/libnvidia-ml.so", "libcuda.so.1"),
];
/// The only supported architecture.
const ARCHITECTURE: &str = "amd64";

/// The options.
#[derive(Args)]
pub struct PackageArgs {
    /// Take the programs from this folder instead of building them for release.
    #[arg(long, value_name = "DIR")]
    binaries: Option<PathBuf>,
    /// Folder for the package; by default the folder `package` next to the builds.
    #[arg(long, value_name = "DIR")]
    out: Option<PathBuf>,
    /// Make it twice, and an RPM, and check their contents.
    #[arg(long)]
    check: bool,
    /// Make an RPM as well.
    #[arg(long)]
    rpm: bool,
    /// Do not compress it.
    #[arg(long)]
    fast: bool,
}

/// Creates the package. Returns true if it passes the checks.
pub fn run(args: &PackageArgs) -> Result<bool> {
    let binaries = match &args.binaries {
        Some(folder) => folder.clone(),
        None => {
            if !shown(&mut cargo(&[
                "build",
                "--release",
                "--package",
                "mediatord",
                "--package",
                "mediatorctl",
                "--package",
                "cuda-owner",
                "--package",
                "cuda-shim",
                "--package",
                "slurm-plugin",
            ]))? {
                bail!("the programs do not build");
            }
            target().join("release")
        }
    };
    let out = args.out.clone().unwrap_or_else(|| target().join("package"));
    let recipe = Recipe { binaries, version: env!("CARGO_PKG_VERSION").to_owned(), epoch: epoch()?, fast: args.fast };
    let package = recipe.make(&out)?;
    println!("{}", package.display());
    let rpm = if args.rpm || args.check { Some(recipe.make_rpm(&out)?) } else { None };
    if let Some(rpm) = &rpm {
        println!("{}", rpm.display());
    }
    if !args.check {
        return Ok(true);
    }
    let again = recipe.make(&out.join("again"))?;
    let mut problems = check::problems(&package, &again)?;
    if let Some(rpm) = &rpm {
        problems.extend(rpm::problems(rpm, &recipe.make_rpm(&out.join("again"))?, &check::EXPECTED)?);
    }
    for problem in &problems {
        eprintln!("package: {problem}");
    }
    println!("check package ... {}", if problems.is_empty() { "ok" } else { "FAILED" });
    Ok(problems.is_empty())
}

/// Inputs for a package.
struct Recipe {
    /// The folder with the programs.
    binaries: PathBuf,
    version: String,
    /// The time stamp of all files in the package, in seconds since 1970.
    epoch: u64,
    /// True if the package is not compressed.
    fast: bool,
}

impl Recipe {
    /// Creates the package in `out`. Returns its path.
    fn make(&self, out: &Path) -> Result<PathBuf> {
        let stage = out.join("tree");
        if stage.exists() {
            fs::remove_dir_all(&stage).with_context(|| format!("cannot empty {}", stage.display()))?;
        }
        let tree = Tree::new(stage.clone());
        self.programs(&tree)?;
        self.files(&tree)?;
        self.control(&tree)?;
        tree.set_times(self.epoch)?;
        let package = out.join(format!("{NAME}_{}_{ARCHITECTURE}.deb", self.version));
        let mut command = Command::new("dpkg-deb");
        command
            .args(["--build", "--root-owner-group", if self.fast { "-Znone" } else { "-Zxz" }])
            .arg(&stage)
            .arg(&package);
        command.env("SOURCE_DATE_EPOCH", self.epoch.to_string()).stdout(Stdio::null());
        if !shown(&mut command).context("the package dpkg has dpkg-deb")? {
            bail!("dpkg-deb failed");
        }
        Ok(package)
    }

    /// Creates an RPM in `out` from the package's existing tree. Returns its path.
    fn make_rpm(&self, out: &Path) -> Result<PathBuf> {
        rpm::make(self, &Tree::new(out.join("tree")), self.libc()?, out)
    }

    /// Returns the newest version of glibc that a program requires.
    fn libc(&self) -> Result<Option<(u32, u32)>> {
        let libc = PROGRAMS.iter().map(|name| libc_version(&self.binaries.join(name))).collect::<Result<Vec<_>>>()?;
        Ok(libc.into_iter().flatten().max())
    }

    fn programs(&self, tree: &Tree) -> Result<()> {
        for name in PROGRAMS {
            let path = format!("usr/bin/{name}");
            tree.copy(&self.binaries.join(name), &path, 0o755)?;
            strip(&tree.path(&path))?;
        }
        for (name, path) in FURTHER {
            let built = self.binaries.join(name);
            if !built.exists() {
                eprintln!("package: without {path}: there is no {}", built.display());
                continue;
            }
            tree.copy(&built, path, 0o755)?;
            strip(&tree.path(path))?;
        }
        for (path, target) in LINKS {
            if tree.path(path).with_file_name(target).exists() {
                tree.link(path, target)?;
            }
        }
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
            tree.compressed(&pages.path().join(&page), &format!("usr/share/man/man{section}/{page}.gz"))?;
        }
        Ok(())
    }

    fn files(&self, tree: &Tree) -> Result<()> {
        let source = root().join("packaging");
        tree.copy(&source.join("gpu-mediator.service"), "usr/lib/systemd/system/gpu-mediator.service", 0o644)?;
        tree.copy(&source.join("gpu-mediator.toml"), "etc/gpu-mediator.toml", 0o644)?;
        let [_, hook, apparmor] = CONFFILES;
        tree.copy(&source.join("libvirt/gpu-mediator"), hook, 0o755)?;
        tree.copy(&source.join("libvirt/apparmor"), apparmor, 0o644)?;
        let folder = format!("usr/share/doc/{NAME}");
        tree.copy(&source.join("slurm/plugstack.conf"), &format!("{folder}/examples/plugstack.conf"), 0o644)?;
        tree.copy(&source.join("cuda.conf"), &format!("{folder}/examples/cuda.conf"), 0o644)?;
        for (part, ending) in [("grafana", ".json"), ("prometheus", ".rules.yml")] {
            let from = source.join(part);
            for name in names(&from)?.iter().filter(|name| name.ends_with(ending)) {
                tree.copy(&from.join(name), &format!("usr/share/{NAME}/{part}/{name}"), 0o644)?;
            }
        }
        for part in ["guides", "design", "reference"] {
            let pages = root().join("docs").join(part);
            for name in names(&pages)?.iter().filter(|name| name.ends_with(".md") || name.ends_with(".json")) {
                tree.copy(&pages.join(name), &format!("{folder}/{part}/{name}"), 0o644)?;
            }
        }
        let licence = fs::read_to_string(root().join("LICENSE")).context("LICENSE")?;
        tree.write(&format!("{folder}/copyright"), copyright(&licence).as_bytes(), 0o644)
    }

    fn control(&self, tree: &Tree) -> Result<()> {
        let libc =
            self.libc()?.map_or_else(|| "libc6".to_owned(), |(major, minor)| format!("libc6 (>= {major}.{minor})"));
        let text = format!(
            "Package: {NAME}\n\
             Version: {}\n\
             Architecture: {ARCHITECTURE}\n\
             Maintainer: The gpu-mediator authors <gpu-mediator@localhost>\n\
             Installed-Size: {}\n\
             Depends: {libc}, libgcc-s1, adduser, init-system-helpers\n\
             Section: admin\n\
             Priority: optional\n\
             Description: shares NVIDIA cards between virtual machines\n \
             One daemon, mediatord, owns the NVIDIA cards of a KVM host and gives each\n \
             virtual machine a virtual GPU that the stock nouveau driver drives without\n \
             modification. mediatorctl shows and changes what each may have.\n",
            self.version,
            tree.kib()?,
        );
        let sums = tree.md5sums()?;
        tree.write("DEBIAN/md5sums", &sums, 0o644)?;
        tree.write("DEBIAN/control", text.as_bytes(), 0o644)?;
        let conffiles: String = CONFFILES.iter().map(|path| format!("/{path}\n")).collect();
        tree.write("DEBIAN/conffiles", conffiles.as_bytes(), 0o644)?;
        for script in ["postinst", "prerm", "postrm"] {
            tree.copy(&root().join("packaging").join(script), &format!("DEBIAN/{script}"), 0o755)?;
        }
        Ok(())
    }
}

/// Removes debugging data, which is nine tenths of a program, as Debian's policy requires. Scripts have no such data.
fn strip(program: &Path) -> Result<()> {
    let bytes = fs::read(program).with_context(|| format!("cannot read {}", program.display()))?;
    if bytes.starts_with(b"\x7fELF") {
        let mut command = Command::new("strip");
        output(command.args(["--remove-section=.comment", "--remove-section=.note"]).arg(program))
            .context("the package binutils has strip")?;
    }
    Ok(())
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

/// Returns the newest version of glibc that a program requires, from the names of versions in the program.
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

/// Returns the time of the last commit, unless the environment sets another time.
fn epoch() -> Result<u64> {
    let text = match std::env::var("SOURCE_DATE_EPOCH") {
        Ok(text) => text,
        Err(_) => {
            let text = output(Command::new("git").current_dir(root()).args(["log", "-1", "--format=%ct"]))?;
            String::from_utf8_lossy(&text).into_owned()
        }
    };
    text.trim().parse().context("set SOURCE_DATE_EPOCH to seconds since 1970")
}

/// Returns a program's output.
fn output(command: &mut Command) -> Result<Vec<u8>> {
    let name = command.get_program().to_string_lossy().into_owned();
    let output = command.stdin(Stdio::null()).output().with_context(|| format!("cannot start {name}"))?;
    if !output.status.success() {
        bail!("{name} failed ({}):\n{}", output.status, String::from_utf8_lossy(&output.stderr));
    }
    Ok(output.stdout)
}

/// Returns the names in a folder, in order.
fn names(folder: &Path) -> Result<Vec<String>> {
    let entries = fs::read_dir(folder).with_context(|| format!("cannot read {}", folder.display()))?;
    let mut names = entries
        .map(|entry| Ok(entry?.file_name().to_string_lossy().into_owned()))
        .collect::<std::io::Result<Vec<_>>>()?;
    names.sort();
    Ok(names)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::PermissionsExt;

    /// Creates a folder with programs that pass the recipe's checks.
    fn programs() -> tempfile::TempDir {
        let folder = tempfile::tempdir().unwrap();
        let script = "#!/bin/sh\n# GLIBC_2.9 GLIBC_2.34 GLIBC_2.4\ncase $1 in\n\
                      completion) echo \"for $2\";;\nman) for page in mediatorctl.1 mediatord.8 gpu-mediator.toml.5; do \
                      echo .TH > $2/$page; done;;\nesac\n";
        for name in PROGRAMS {
            let path = folder.path().join(name);
            fs::write(&path, script).unwrap();
            fs::set_permissions(&path, fs::Permissions::from_mode(0o700)).unwrap();
        }
        folder
    }

    fn made(out: &Path, version: &str) -> PathBuf {
        let binaries = programs();
        let recipe = Recipe {
            binaries: binaries.path().to_owned(),
            version: version.to_owned(),
            epoch: 1_700_000_000,
            fast: true,
        };
        recipe.make(out).unwrap()
    }

    /// Returns the lines of the unit.
    fn unit() -> String {
        fs::read_to_string(root().join("packaging/gpu-mediator.service")).unwrap()
    }

    #[test]
    fn exposure_of_unit_is_as_page_says() {
        let page = fs::read_to_string(root().join("docs/guides/operating.md")).unwrap();
        let (_, rest) = page.split_once("rates the unit's exposure at ").unwrap();
        let (said, _) = rest.split_once(" of 10").unwrap();
        let command = ["security", "--no-pager", "--offline=true", "packaging/gpu-mediator.service"];
        let Ok(rated) = Command::new("systemd-analyze").args(command).current_dir(root()).output() else {
            // On a host without systemd, the test of the package in a guest makes this comparison.
            assert!(unit().contains("PrivateMounts=yes"));
            return;
        };
        let text = String::from_utf8(rated.stdout).unwrap();
        assert!(text.contains(&format!("gpu-mediator.service: {said} ")), "{said}\n{text}");
    }

    /// Containers have mounted the folder: a new folder at that path would not be visible to them.
    #[test]
    fn runtime_folder_outlives_stop_of_service() {
        let unit = unit();
        let set = |key: &str| unit.lines().filter_map(|line| line.strip_prefix(key)?.strip_prefix('=')).next_back();
        assert_eq!(set("RuntimeDirectory"), Some("gpu-mediator"));
        assert_eq!(set("RuntimeDirectoryPreserve"), Some("yes"));
    }

    #[test]
    fn package_has_expected_contents_and_is_reproducible() {
        let folder = tempfile::tempdir().unwrap();
        let (one, two) = (made(&folder.path().join("1"), "1.2.3"), made(&folder.path().join("2"), "1.2.3"));
        assert_eq!(check::problems_of_contents(&one, &two).unwrap(), Vec::<String>::new());
        assert!(one.ends_with("gpu-mediator_1.2.3_amd64.deb"));
        let control = output(Command::new("dpkg-deb").arg("--info").arg(&one)).unwrap();
        let control = String::from_utf8(control).unwrap();
        for line in ["Version: 1.2.3", "Depends: libc6 (>= 2.34), libgcc-s1, adduser, init-system-helpers"] {
            assert!(control.contains(line), "{line}\n{control}");
        }
    }

    #[test]
    fn rpm_has_the_same_files_and_is_the_same_each_time() {
        let folder = tempfile::tempdir().unwrap();
        let (binaries, version) = (programs(), "1.2.3".to_owned());
        let recipe = Recipe { binaries: binaries.path().to_owned(), version, epoch: 1_700_000_000, fast: true };
        let make = |name: &str| {
            let out = folder.path().join(name);
            recipe.make(&out).unwrap();
            recipe.make_rpm(&out).unwrap()
        };
        let (one, two) = (make("1"), make("2"));
        assert!(one.ends_with("gpu-mediator-1.2.3-1.x86_64.rpm"));
        assert_eq!(rpm::problems(&one, &two, &check::EXPECTED).unwrap(), Vec::<String>::new());
        let missing =
            rpm::problems(&one, &folder.path().join("1/tree/etc/gpu-mediator.toml"), &[("usr/bin/x", "-rwxr-xr-x")]);
        assert_eq!(missing.unwrap(), ["RPM: usr/bin/x is missing", "RPM: made twice, it is not the same"]);
    }

    #[test]
    fn check_notices_another_package_and_a_missing_file() {
        let folder = tempfile::tempdir().unwrap();
        let (one, two) = (made(&folder.path().join("1"), "1.2.3"), made(&folder.path().join("2"), "1.2.4"));
        let problems = check::problems_of_contents(&one, &two).unwrap();
        assert_eq!(problems, ["made twice, it is not the same"]);

        let tree = folder.path().join("1/tree");
        fs::remove_file(tree.join("usr/lib/systemd/system/gpu-mediator.service")).unwrap();
        fs::set_permissions(tree.join("usr/bin/mediatord"), fs::Permissions::from_mode(0o644)).unwrap();
        let bad = folder.path().join("bad.deb");
        output(Command::new("dpkg-deb").args(["--build", "--root-owner-group"]).arg(&tree).arg(&bad)).unwrap();
        let problems = check::problems_of_contents(&bad, &bad).unwrap();
        assert_eq!(
            problems,
            [
                "usr/bin/mediatord: -rw-r--r-- root/root, expected -rwxr-xr-x root/root",
                "usr/lib/systemd/system/gpu-mediator.service is missing"
            ]
        );
    }
}
