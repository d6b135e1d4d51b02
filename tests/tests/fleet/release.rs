//! Tests releases: packages, scripts, manifests with their chart, and the Kubernetes driver's container image.

use std::collections::BTreeSet;
use std::env;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use tests::Debian;
use tests::daemon::{Ended, binary, run_to_end};
use tests::files::Files;
use tests::toolbox::Toolbox;
use tests::wait::Scratch;

use crate::site::CONTAINERS;

/// Time limit for building packages or fetching Helm's library, including `cargo`.
const LIMIT: Duration = Duration::from_secs(400);
/// Scripts of the packages and this repository.
const SCRIPTS: &str = ".ci/run packaging/postinst packaging/postrm packaging/prerm packaging/libvirt/gpu-mediator \
                       packaging/proxmox/gpu-mediator-hook";
/// Errors that lintian reports because the tests' packages are not compressed.
const UNCOMPRESSED: [&str; 2] = ["uses-no-compression-for-control-tarball", "uses-no-compression-for-data-tarball"];
/// Command that checks all man pages of all packages with mandoc, and then prints the number of pages.
const LINT_PAGES: &str = "for package in /mnt/*.deb; do dpkg-deb --extract $package /tmp/tree; done; cd /tmp/tree/usr/share/man; \
                          gzip --decompress --recursive .; mandoc -T lint -W warning man*/* 2>&1 || true; ls man*/* | wc --lines";
/// Script that creates a substitute for Debian's base image: the files of the packages that dpkg needs, and dpkg's
/// database.
const BASE: &str = r#"
cd /var/lib/dpkg/info
for name in base-files coreutils dash diffutils dpkg findutils grep libacl1 libattr1 libbz2-1.0 libc-bin libc6 libcap2 libgcc-s1 \
    libgmp10 liblzma5 libmd0 libpcre2-8-0 libselinux1 libssl3t64 libsystemd0 libzstd1 perl-base sed tar zlib1g; do
    for list in $name.list $name:amd64.list; do test ! -e $list || cat $list; done
done | sed -e 's#^/\(bin\|sbin\|lib\|lib64\)/#/usr/\1/#' -e '\#^/\(bin\|sbin\|lib\|lib64\)$#d' -e 's#^/##' | sort -u > /tmp/files
mkdir /tmp/base
cd /
while read -r file; do
    if test -d "$file" -a ! -L "$file"; then mkdir -p "/tmp/base/$file"; elif test -e "$file"; then echo "$file"; fi
done < /tmp/files > /tmp/copied
cp --archive --parents $(cat /tmp/copied) bin sbin lib lib64 var/lib/dpkg/status etc/passwd etc/group /tmp/base
mkdir -p /tmp/base/tmp /tmp/base/var/lib/dpkg/info /tmp/base/var/lib/dpkg/updates
touch /tmp/base/var/lib/dpkg/available
tar -C /tmp/base -c . | podman import --change 'ENV PATH=/usr/sbin:/usr/bin' - docker.io/library/debian:trixie-slim
"#;

/// Returns the root folder of the workspace.
fn workspace() -> PathBuf {
    images::cache::workspace()
}

/// Runs xtask, and fails unless it succeeds.
fn xtask(arguments: &[&str], paths: &[&Path]) -> Result<Ended> {
    let mut command = Command::new(env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    command.args(["run", "--quiet", "--package", "xtask", "--"]).args(arguments).args(paths);
    run_to_end(&mut command, LIMIT)?.success()
}

/// Builds all packages from the programs under test.
fn packages(out: &Path) -> Result<()> {
    let programs = binary("mediatord")?;
    let programs = programs.parent().context("a folder of programs")?;
    let arguments = ["package", "--fast", "--rpm", "--out"];
    xtask(&arguments, &[out, Path::new("--binaries"), programs]).map(drop)
}

/// Returns the words that follow `mark` in all lines that contain it.
fn marked<'a>(report: &'a str, mark: &str) -> BTreeSet<&'a str> {
    report.lines().filter_map(|line| line.split_once(mark)?.1.split_whitespace().next()).collect()
}

#[test]
fn packages_pass_lintian_and_rpmlint() -> Result<()> {
    let scratch = Scratch::new("packages")?;
    packages(scratch.path())?;
    let tools = Toolbox::open()?;
    let report = tools.run(scratch.path(), "lintian --tag-display-limit 0 --allow-root /mnt/*.deb")?;
    println!("{}{}", report.stdout, report.stderr);
    let mut errors = BTreeSet::new();
    for line in report.stdout.lines().filter_map(|line| line.strip_prefix("E: ")) {
        errors.extend(line.split_once(": ").and_then(|(_, tag)| tag.split_whitespace().next()));
    }
    // The expected errors show that lintian has read the packages.
    ensure!(errors == UNCOMPRESSED.into(), "errors of lintian: {errors:?}");
    for package in ["gpu-mediator", "gpu-mediator-kubernetes", "gpu-mediator-guest", "gpu-mediator-gdev"] {
        for package in [package.to_owned(), format!("{package}-dbgsym")] {
            ensure!(report.stdout.contains(&format!("E: {package}: ")), "lintian has not read {package}");
        }
    }
    let pages = tools.run(scratch.path(), LINT_PAGES)?.success()?;
    ensure!(
        pages.stdout.lines().last().is_some_and(|count| count.parse::<u32>().is_ok_and(|count| count > 60)),
        "{}",
        pages.stdout
    );
    ensure!(!pages.stdout.contains("mandoc:"), "warnings of mandoc:\n{}", pages.stdout);
    let report = tools.run(scratch.path(), "rpmlint /mnt/*.rpm")?;
    println!("{}{}", report.stdout, report.stderr);
    // Releases are signed manually.
    ensure!(marked(&report.stdout, ": E: ") == ["no-signature"].into(), "errors of rpmlint");
    ensure!(report.stdout.contains("4 packages and 0 specfiles checked"), "rpmlint has not read all");
    Ok(())
}

/// Tests that the loader finds the guest's libraries once the package is installed, and that the doctor names the
/// missing device.
#[test]
fn guest_package_installs_libraries_that_programs_find() -> Result<()> {
    let scratch = Scratch::new("guest-package")?;
    packages(scratch.path())?;
    let package = format!("gpu-mediator-guest_{}_amd64.deb", env!("CARGO_PKG_VERSION"));
    let root = scratch.path().join("guest");
    let mut unpack = Command::new("dpkg-deb");
    run_to_end(unpack.arg("--extract").arg(scratch.path().join(&package)).arg(&root), LIMIT)?.success()?;
    // Run ldconfig with a separate configuration and cache instead of the host's.
    let folder = fs::read_to_string(root.join("etc/ld.so.conf.d/gpu-mediator-guest.conf"))?;
    let folder = root.join(folder.trim().trim_start_matches('/'));
    let (list, cache) = (scratch.path().join("list"), scratch.path().join("cache"));
    fs::write(&list, format!("{}\n", folder.display()))?;
    let ldconfig = || Command::new("/sbin/ldconfig");
    run_to_end(ldconfig().arg("-X").arg("-C").arg(&cache).arg("-f").arg(&list), LIMIT)?.success()?;
    let list = run_to_end(ldconfig().arg("-C").arg(&cache).arg("-p"), LIMIT)?.success()?.stdout;
    for name in ["libcuda.so.1", "libnvidia-ml.so.1", "libcuda.so", "libnvidia-ml.so"] {
        let found = list.lines().find_map(|line| line.trim().strip_prefix(name)?.strip_prefix(" ("));
        let place = found.and_then(|line| line.split_once(" => ")).map(|(_, place)| place);
        ensure!(place.map(Path::new) == Some(&folder.join(name)), "{name}: {place:?}\n{list}");
    }
    // This machine does not have the device.
    let mut doctor = Command::new(root.join("usr/bin/gpu-mediator-guest-doctor"));
    let doctor = run_to_end(&mut doctor, LIMIT)?;
    ensure!(doctor.code == Some(1), "{}{}", doctor.stdout, doctor.stderr);
    ensure!(doctor.stdout.contains("MISSING  device") && doctor.stdout.contains("--cuda"), "{}", doctor.stdout);
    Ok(())
}

/// Tests that a program compiles against the package's files, and finds the library at its path in the package.
#[test]
fn gdev_package_has_what_programs_need() -> Result<()> {
    let scratch = Scratch::new("gdev-package")?;
    packages(scratch.path())?;
    let package = format!("gpu-mediator-gdev_{}_amd64.deb", env!("CARGO_PKG_VERSION"));
    let root = scratch.path().join("root");
    let mut unpack = Command::new("dpkg-deb");
    run_to_end(unpack.arg("--extract").arg(scratch.path().join(&package)).arg(&root), LIMIT)?.success()?;
    let description = fs::read_to_string(root.join("usr/share/pkgconfig/gdev.pc"))?;
    let value = |key: &str| description.lines().find_map(|line| line.strip_prefix(key)).map(str::trim);
    let folder = root.join(value("libdir=").context("libdir")?.trim_start_matches('/'));
    let libraries = value("Libs:").context("Libs")?.replace("${libdir}", &folder.display().to_string());
    let (source, program) = (root.join("usr/share/doc/gpu-mediator-gdev/examples/add.c"), scratch.path().join("add"));
    let mut compile = Command::new("cc");
    compile.arg(&source).arg("-I").arg(root.join("usr/include")).arg("-o").arg(&program);
    compile.args(libraries.split_whitespace()).arg(format!("-Wl,-rpath,{}", folder.display()));
    run_to_end(&mut compile, LIMIT)?.success()?;
    // The program loads the library, and reports that the device does not exist.
    let image = source.with_file_name("add.sm20");
    let ended = run_to_end(Command::new(&program).arg("vgpu:/no/socket").arg(image), LIMIT)?;
    ensure!(ended.code == Some(1) && ended.stderr.contains("/no/socket"), "{}{}", ended.stdout, ended.stderr);
    run_to_end(Command::new(root.join("usr/bin/gdev-crypt")).arg("--version"), LIMIT)?.success()?;
    Ok(())
}

#[test]
fn scripts_pass_shellcheck() -> Result<()> {
    let tools = Toolbox::open()?;
    let checked = tools
        .run(&workspace(), &format!("cd /mnt && shellcheck {SCRIPTS} && shellcheck --shell=sh packaging/rpm/*"))?;
    checked.success()?;
    let bad = tools.run(&workspace(), "echo 'rm $1' | shellcheck --shell=sh -")?;
    ensure!(bad.code == Some(1) && bad.stdout.contains("SC2086"), "{}{}", bad.stdout, bad.stderr);
    Ok(())
}

#[test]
fn chart_has_the_objects_of_kustomize() -> Result<()> {
    let scratch = Scratch::new("chart")?;
    let tools = Toolbox::open()?;
    let manifests = workspace().join("fleet/kubernetes");
    let rendered = tools.run(&manifests, "kustomize build /mnt")?.success()?.stdout;
    ensure!(rendered.contains("image: gpu-mediator:"), "{rendered}");
    tools.run(&manifests, "kustomize build /mnt/example")?.success()?;
    let file = scratch.path().join("kustomize.yaml");
    fs::write(&file, rendered)?;
    let packages = xtask(&["helm-tools"], &[])?.stdout;
    let mut compare = Command::new("python3");
    compare.arg(Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fleet/chart.py"));
    compare.arg(workspace().join("fleet/helm/gpu-mediator")).arg(&file).env("PYTHONPATH", packages.trim());
    let compared = run_to_end(&mut compare, LIMIT)?.success()?;
    println!("{}", compared.stdout);
    ensure!(compared.stdout.contains("11 objects are equal and valid in 1.34, 1.37"), "{}", compared.stdout);
    Ok(())
}

#[test]
fn image_of_the_driver_builds_from_its_package() -> Result<()> {
    if let Some(why) = tests::debian::impossible() {
        println!("skipped: {why}");
        return Ok(());
    }
    let scratch = Scratch::new("image")?;
    packages(scratch.path())?;
    let version = env!("CARGO_PKG_VERSION");
    let name = format!("gpu-mediator-kubernetes_{version}_amd64.deb");
    let mut files = Files::default();
    files.copy(&scratch.path().join(&name), &format!("root/context/{name}"), 0o644)?;
    files.copy(&workspace().join("fleet/Containerfile"), "root/Containerfile", 0o644)?;
    let host = Debian::start_up("image", files)?;
    host.ok(CONTAINERS)?;
    host.write("/root/base.sh", 0o644, BASE)?;
    host.ok("sh -e /root/base.sh")?;
    let tag = format!("gpu-mediator:{version}");
    host.ok(&format!(
        "podman build --pull=never --network=host --isolation=chroot --ulimit=nofile=1024:1024 --ulimit=nproc=1024:1024 --file /root/Containerfile --tag {tag} /root/context"
    ))?;
    let run = "podman run --rm --network=none --cgroups=disabled";
    // Started as in the DaemonSet, the driver reports that the name of its node is missing.
    let driver = host.sh(&format!("{run} localhost/{tag} serve"))?;
    ensure!(driver.code != 0 && driver.text().contains("--node <NAME>"), "{}", driver.text());
    let schema = host.ok(&format!("{run} localhost/{tag} schema"))?;
    let published = fs::read_to_string(workspace().join("fleet/kubernetes/share-parameters.schema.json"))?;
    ensure!(schema.trim() == published.trim(), "the image's driver has another schema:\n{schema}");
    host.ok(&format!("{run} --entrypoint=/usr/bin/gpu-mediator-kubevirt localhost/{tag} --help")).map(drop)
}
