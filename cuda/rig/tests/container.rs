//! Tests a program in its own namespaces, as in a container: the library is mounted over the driver's file, and the
//! folder of the tenant's socket is bind-mounted. The program has no other access to the host.

mod support;

use std::os::unix::fs::MetadataExt as _;
use std::path::Path;
use std::process::Command;

use support::daemon::{Daemon, good, pair, programs, until};
use support::{Program, Rig, built, chunks, owner, settled};

/// Commands that the runtime executes in the namespaces before the program starts. The arguments are the image's
/// folder, the library, the socket's folder, and the program with its arguments. The commands mount the socket's whole
/// folder, because a bind-mounted socket would not survive its owner.
const RUNTIME: &str = r#"
set -e
image=$1 library=$2 sockets=$3
shift 3
mount --make-rprivate /
mount --bind "$library" "$image/lib/libcuda.so.1"
mount --bind "$sockets" "$image/run"
export LD_LIBRARY_PATH="$image/lib" GPU_MEDIATOR_CUDA_DRIVER="$image/lib/libcuda.so.580"
export GPU_MEDIATOR_CUDA_SOCKET="$image/run/socket"
exec "$@"
"#;

const NAMESPACES: [&str; 7] =
    ["--user", "--map-root-user", "--mount", "--pid", "--fork", "--mount-proc", "--kill-child"];

/// Creates an image with the driver under its versioned name and under the name that programs load, as NVIDIA's
/// container toolkit does.
fn image(rig: &Rig) -> std::path::PathBuf {
    let image = rig.folder.path().join("image");
    for folder in ["lib", "run"] {
        std::fs::create_dir_all(image.join(folder)).expect("a folder");
    }
    for name in ["libcuda.so.580", "libcuda.so.1"] {
        std::fs::copy(built("libcuda_fake.so"), image.join("lib").join(name)).expect("copied");
    }
    std::os::unix::fs::symlink("libcuda.so.1", image.join("lib/libcuda.so")).expect("a link");
    image
}

/// Starts the program in a tenant's container.
fn contained(rig: &Rig, image: &Path, arguments: &[&str]) -> Program {
    contained_program(rig, image, support::PROGRAM.as_ref(), arguments)
}

fn contained_program(rig: &Rig, image: &Path, program: &Path, arguments: &[&str]) -> Program {
    let mut command = rig.command("unshare", "plain");
    command.args(NAMESPACES).args(["sh", "-c", RUNTIME, "runtime"]).arg(image).arg(built("libcuda.so"));
    command.arg(rig.socket().parent().expect("a folder"));
    command.env(cuda_protocol::TENANT_VARIABLE, "a");
    Program::start(command.arg(program).args(arguments))
}

/// Returns true if the test may create namespaces on this host.
fn has_namespaces() -> bool {
    let tried = Command::new("unshare").args(NAMESPACES).args(["sh", "-c", "mount --make-rprivate /"]).output();
    let can = tried.as_ref().is_ok_and(|output| output.status.success());
    if !can {
        println!("skipped: this host does not permit namespaces: {tried:?}");
    }
    can
}

#[test]
fn container_program_is_tenant_and_leaves_no_memory() {
    if !has_namespaces() {
        return;
    }
    let rig = Rig::new(256);
    let image = image(&rig);
    let serving = owner(&rig, 32, &["--quanta", "off"]);
    let mut inside = contained(&rig, &image, &["live", "--mib", "24"]);
    inside.steps(2);
    // Both programs together use more memory than the card has, so chunks of the program in the container are moved.
    let mut outside = rig.program("b", &["live", "--mib", "24"]);
    outside.steps(5);
    inside.grow();
    inside.steps(5);
    assert_eq!(inside.end(), "held 14");
    assert_eq!(outside.end(), "held 12");

    // Kill one program, and replace the owner of the other.
    let mut inside = contained(&rig, &image, &["live", "--mib", "8"]);
    inside.steps(2);
    inside.kill();
    let mut inside = contained(&rig, &image, &["live", "--mib", "8"]);
    inside.steps(2);
    serving.kill();
    inside.steps(5);
    let serving = owner(&rig, 32, &["--quanta", "off"]);
    inside.grow();
    assert_eq!(inside.end(), "held 6");
    let view = settled(&rig, serving);
    assert_eq!((chunks(&view, 0), chunks(&view, 1)), (0, 0), "{view}");
    rig.until_free();
}

#[test]
fn library_mount_is_visible_only_inside_container() {
    if !has_namespaces() {
        return;
    }
    let rig = Rig::new(256);
    let image = image(&rig);
    let before = std::fs::metadata(image.join("lib/libcuda.so.1")).expect("there").ino();
    let serving = owner(&rig, 32, &[]);
    let mut inside = contained(&rig, &image, &["hold", "--mib", "4"]);
    assert_eq!(inside.line(), "holds");
    let now = std::fs::metadata(image.join("lib/libcuda.so.1")).expect("there").ino();
    assert_eq!(before, now, "outside the container the file is the driver's");
    assert_eq!(inside.end(), "held");
    assert_eq!(chunks(&settled(&rig, serving), 0), 0);
}

/// Commands of a runtime that applies a CDI file to a container. The arguments are the image's folder, and the program
/// with its arguments. Each line of the variable `MOUNTS` is a mount: a host path and a container path.
const BY_CDI: &str = r#"
set -e
image=$1
shift
mount --make-rprivate /
printf '%s\n' "$MOUNTS" | while read -r host inside; do
    if [ -d "$host" ]; then mkdir -p "$image$inside"; else mkdir -p "$(dirname "$image$inside")"; : > "$image$inside"; fi
    mount --bind "$host" "$image$inside"
done
exec "$@"
"#;

/// Starts the program in a container with a CDI device.
fn with_device(rig: &Rig, image: &Path, device: &serde_json::Value, arguments: &[&str]) -> Program {
    let edits = &device["containerEdits"];
    let text = |value: &serde_json::Value| value.as_str().expect("a text").to_owned();
    let mount = |mount: &serde_json::Value| format!("{} {}", text(&mount["hostPath"]), text(&mount["containerPath"]));
    let mounts: Vec<_> = edits["mounts"].as_array().expect("mounts").iter().map(mount).collect();
    let mut command = rig.command("unshare", "plain");
    command.args(NAMESPACES).args(["sh", "-c", BY_CDI, "runtime"]).arg(image).env("MOUNTS", mounts.join("\n"));
    for pair in edits["env"].as_array().expect("variables").iter().map(text) {
        let (name, value) = pair.split_once('=').expect("a variable");
        // In this test, the image is a folder on the host.
        let value = if value.starts_with('/') { format!("{}{value}", image.display()) } else { value.to_owned() };
        command.env(name, value);
    }
    Program::start(command.arg(support::PROGRAM).args(arguments))
}

#[test]
fn a_container_with_a_cdi_device_finds_the_next_daemon() {
    if !has_namespaces() {
        return;
    }
    let rig = pair();
    let daemon = Daemon::start(&rig);
    let image = rig.folder.path().join("image");
    std::fs::create_dir(&image).expect("a folder");
    let (shim, driver) = (rig.folder.path().join("shim"), rig.fake.display().to_string());
    let shim = shim.display().to_string();
    let spec = good(&rig, &["tenant", "cdi", "a", "--library", &shim, "--driver", &driver]);
    let spec: serde_json::Value = serde_json::from_str(&spec).expect("JSON");
    let device = &spec["devices"][0];
    let mut inside = with_device(&rig, &image, device, &["live", "--mib", "8"]);
    inside.steps(2);
    daemon.kill();
    let _daemon = Daemon::start(&rig);
    // Getting memory and turns from the next owner shows that the program has reconnected.
    inside.grow();
    until(&rig, "a", "the program is served", |a| programs(a) == 1);
    // Start another program after the daemon's restart.
    let mut later = with_device(&rig, &image, device, &["live", "--mib", "8"]);
    later.steps(2);
    until(&rig, "a", "both are served", |a| programs(a) == 2);
    assert_eq!((inside.end(), later.end()), ("held 6".to_owned(), "held 4".to_owned()));
}

#[test]
fn container_program_beyond_account_is_found_by_host_pid() {
    if !has_namespaces() {
        return;
    }
    let rig = Rig::new(256);
    let image = image(&rig);
    let mut serving = owner(&rig, 128, &["--margin-mib", "0"]);
    // The program opens the driver by its other name, which also refers to the library in the container.
    let mut program = contained_program(&rig, &image, &built("cuda-hoard"), &["past", "--mib", "20"]);
    assert_eq!(program.line(), "20");
    let view = support::hostile::until_accounts(&mut serving, "the excess is detected", |view| {
        view["tenants"][0]["unaccounted"][0][1] == 20 << 20
    });
    let pid = view["tenants"][0]["unaccounted"][0][0].as_u64().expect("a number");
    assert!(pid > 2, "in the container it is the first or the second process: {view}");
    let name = std::fs::read_to_string(format!("/proc/{pid}/comm")).expect("it runs");
    assert_eq!(name.trim(), "cuda-hoard");
    program.kill();
    support::describe(serving);
}
