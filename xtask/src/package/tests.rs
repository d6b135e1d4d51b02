//! Tests how packages are built and checked.

use std::os::unix::fs::PermissionsExt;

use super::*;

/// Creates a folder with programs that pass the recipe's checks.
fn programs() -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    let script = "#!/bin/sh\n# GLIBC_2.9 GLIBC_2.34 GLIBC_2.4\ncase $1 in\n\
                  completion) echo \"for $2\";;\nman) for page in mediatorctl.1 mediatord.8 gpu-mediator.toml.5; do \
                  echo .TH > $2/$page; done;;\nesac\n";
    for name in [
        "mediatord",
        "mediatorctl",
        "gpu-mediator-dra",
        "gpu-mediator-kubevirt",
        "libcuda_guest.so",
        "gpu-mediator-guest-doctor",
        "libgdev.so",
        "libgdev_cuda.so",
        "gdev-crypt",
    ] {
        let path = folder.path().join(name);
        fs::write(&path, script).unwrap();
        fs::set_permissions(&path, fs::Permissions::from_mode(0o700)).unwrap();
    }
    folder
}

fn made(out: &Path, version: &str) -> PathBuf {
    let binaries = programs();
    let recipe =
        Recipe { binaries: binaries.path().to_owned(), version: version.to_owned(), epoch: 1_700_000_000, fast: true };
    recipe.make(&DAEMON, out).unwrap()
}

/// Returns the text of the daemon's systemd unit.
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
        // Without systemd on this host, leave the comparison to the package's guest test.
        assert!(unit().contains("PrivateMounts=yes"));
        return;
    };
    let text = String::from_utf8(rated.stdout).unwrap();
    assert!(text.contains(&format!("gpu-mediator.service: {said} ")), "{said}\n{text}");
}

/// Checks that the runtime folder survives a stop of the service. Containers have mounted it, and would not see the
/// contents of a new folder at its path.
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
    assert_eq!(check::problems_of_contents(&DAEMON, &one, &two).unwrap(), Vec::<String>::new());
    assert!(one.ends_with("gpu-mediator_1.2.3_amd64.deb"));
    let control = output(Command::new("dpkg-deb").arg("--info").arg(&one)).unwrap();
    let control = String::from_utf8(control).unwrap();
    for line in ["Version: 1.2.3", "Depends: libc6 (>= 2.34), libgcc-s1, adduser"] {
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
        recipe.make(&DAEMON, &out).unwrap();
        recipe.make_rpm(&DAEMON, &out).unwrap()
    };
    let (one, two) = (make("1"), make("2"));
    assert!(one.ends_with("gpu-mediator-1.2.3-1.x86_64.rpm"));
    assert_eq!(rpm::problems(&DAEMON, &one, &two).unwrap(), Vec::<String>::new());
    let other = Spec { expected: &[("usr/bin/x", "-rwxr-xr-x")], ..DAEMON };
    let missing = rpm::problems(&other, &one, &folder.path().join("1/tree/gpu-mediator/etc/gpu-mediator.toml"));
    assert_eq!(missing.unwrap(), ["RPM: usr/bin/x is missing", "RPM: a second build differs"]);
}

#[test]
fn check_notices_another_package_and_a_missing_file() {
    let folder = tempfile::tempdir().unwrap();
    let (one, two) = (made(&folder.path().join("1"), "1.2.3"), made(&folder.path().join("2"), "1.2.4"));
    let problems = check::problems_of_contents(&DAEMON, &one, &two).unwrap();
    assert_eq!(problems, ["a second build differs"]);

    let tree = folder.path().join("1/tree/gpu-mediator");
    fs::remove_file(tree.join("usr/lib/systemd/system/gpu-mediator.service")).unwrap();
    fs::set_permissions(tree.join("usr/bin/mediatord"), fs::Permissions::from_mode(0o644)).unwrap();
    let bad = folder.path().join("bad.deb");
    output(Command::new("dpkg-deb").args(["--build", "--root-owner-group"]).arg(&tree).arg(&bad)).unwrap();
    let problems = check::problems_of_contents(&DAEMON, &bad, &bad).unwrap();
    assert_eq!(
        problems,
        [
            "usr/bin/mediatord: -rw-r--r-- root/root, expected -rwxr-xr-x root/root",
            "usr/lib/systemd/system/gpu-mediator.service is missing"
        ]
    );
}

/// Returns a package's files.
fn files(package: &Path) -> Vec<String> {
    let listed = output(Command::new("dpkg-deb").arg("--contents").arg(package)).unwrap();
    let listed = String::from_utf8(listed).unwrap();
    let paths = listed.lines().filter_map(|line| line.split_once(" ./"));
    paths.map(|(_, path)| path.to_owned()).filter(|path| !path.ends_with('/')).collect()
}

#[test]
fn package_has_no_results_of_benchmarks() {
    let folder = tempfile::tempdir().unwrap();
    let files = files(&made(folder.path(), "1.2.3"));
    let documents: Vec<_> = files.iter().filter(|path| path.contains("/doc/")).collect();
    assert!(documents.iter().any(|path| path.ends_with("/guides/operating.md")), "{documents:?}");
    for name in ["evaluation.md", "overhead.md", "bench"] {
        assert!(!documents.iter().any(|path| path.contains(name)), "{name}");
    }
    let data: Vec<_> = documents.iter().copied().filter(|path| path.ends_with(".json")).collect();
    assert_eq!(data, ["usr/share/doc/gpu-mediator/reference/api.json"]);
}

#[test]
fn kubernetes_package_has_programs_manifests_and_chart() {
    let folder = tempfile::tempdir().unwrap();
    let binaries = programs();
    let recipe =
        Recipe { binaries: binaries.path().to_owned(), version: "1.2.3".to_owned(), epoch: 1_700_000_000, fast: true };
    let package = recipe.make(&KUBERNETES, folder.path()).unwrap();
    assert_eq!(check::problems_of_contents(&KUBERNETES, &package, &package).unwrap(), Vec::<String>::new());
    let rpm = recipe.make_rpm(&KUBERNETES, folder.path()).unwrap();
    assert_eq!(rpm::problems(&KUBERNETES, &rpm, &rpm).unwrap(), Vec::<String>::new());
}

#[test]
fn guest_package_has_libraries_under_all_names() {
    let folder = tempfile::tempdir().unwrap();
    let binaries = programs();
    let recipe =
        Recipe { binaries: binaries.path().to_owned(), version: "1.2.3".to_owned(), epoch: 1_700_000_000, fast: true };
    let package = recipe.make(&GUEST, folder.path()).unwrap();
    assert_eq!(check::problems_of_contents(&GUEST, &package, &package).unwrap(), Vec::<String>::new());
    let files = files(&package);
    for name in ["libcuda.so", "libnvidia-ml.so.1", "libnvidia-ml.so"] {
        let link = format!("usr/lib/gpu-mediator-guest/{name} -> libcuda.so.1");
        assert!(files.contains(&link), "{link}: {files:?}");
    }
    let tree = folder.path().join("tree/gpu-mediator-guest");
    let list = fs::read_to_string(tree.join("etc/ld.so.conf.d/gpu-mediator-guest.conf")).unwrap();
    assert_eq!(list, "/usr/lib/gpu-mediator-guest\n");
    let rpm = recipe.make_rpm(&GUEST, folder.path()).unwrap();
    assert_eq!(rpm::problems(&GUEST, &rpm, &rpm).unwrap(), Vec::<String>::new());
}

#[test]
fn gdev_package_has_libraries_header_and_examples() {
    let folder = tempfile::tempdir().unwrap();
    let binaries = programs();
    let recipe =
        Recipe { binaries: binaries.path().to_owned(), version: "1.2.3".to_owned(), epoch: 1_700_000_000, fast: true };
    let package = recipe.make(&GDEV, folder.path()).unwrap();
    assert_eq!(check::problems_of_contents(&GDEV, &package, &package).unwrap(), Vec::<String>::new());
    let found = fs::read_to_string(folder.path().join("tree/gpu-mediator-gdev/usr/share/pkgconfig/gdev.pc")).unwrap();
    assert!(found.contains("Version: 1.2.3\n"), "{found}");
    let rpm = recipe.make_rpm(&GDEV, folder.path()).unwrap();
    assert_eq!(rpm::problems(&GDEV, &rpm, &rpm).unwrap(), Vec::<String>::new());
}

/// Returns the ELF notes of a program, as printed by `readelf`.
fn notes(program: &Path) -> String {
    String::from_utf8(output(Command::new("readelf").arg("--notes").arg(program)).unwrap()).unwrap()
}

#[test]
fn debug_symbols_are_found_by_the_build_id() {
    let folder = tempfile::tempdir().unwrap();
    let binaries = programs();
    // Package this test program, which has symbols.
    let this = std::env::current_exe().unwrap();
    fs::copy(&this, binaries.path().join("gpu-mediator-dra")).unwrap();
    let version = "1.2.3".to_owned();
    let recipe = Recipe { binaries: binaries.path().to_owned(), version, epoch: 1_700_000_000, fast: true };
    recipe.make(&KUBERNETES, folder.path()).unwrap();
    let package = recipe.make_symbols(&KUBERNETES, folder.path()).unwrap();
    assert!(package.ends_with("gpu-mediator-kubernetes-dbgsym_1.2.3_amd64.deb"));

    let notes = notes(&this);
    let id = notes.lines().find_map(|line| line.trim().strip_prefix("Build ID: ")).unwrap();
    let symbols = format!("usr/lib/debug/.build-id/{}/{}.debug", &id[..2], &id[2..]);
    assert_eq!(files(&package).iter().filter(|path| path.contains("/debug/")).collect::<Vec<_>>(), [&symbols]);
    let tree = |name: &str, path: &str| folder.path().join("tree").join(name).join(path);
    let sections = |program: &Path| {
        String::from_utf8(output(Command::new("readelf").args(["--wide", "--sections"]).arg(program)).unwrap()).unwrap()
    };
    let program = tree("gpu-mediator-kubernetes", "usr/bin/gpu-mediator-dra");
    assert!(self::notes(&program).contains(id) && !sections(&program).contains(".symtab"));
    assert!(sections(&tree("gpu-mediator-kubernetes-dbgsym", &symbols)).contains(".symtab"));
    let control = String::from_utf8(output(Command::new("dpkg-deb").arg("--field").arg(&package)).unwrap()).unwrap();
    for line in ["Depends: gpu-mediator-kubernetes (= 1.2.3)", "Section: debug", &format!("Build-Ids: {id}")] {
        assert!(control.contains(line), "{line}\n{control}");
    }
}
