//! Tests C programs that use Gdev's API: directly on the fake driver, as tenant programs, and in a guest.

mod support;

use std::path::{Path, PathBuf};
use std::process::Command;

use support::guest::Loopback;
use support::hostile::{account, until_accounts};
use support::{Rig, built, owner};

/// Compiles a program of `gdev/c/examples/c` with the committed header.
fn compiled(rig: &Rig, name: &str) -> PathBuf {
    compiled_with(rig, "c", name, &built("libgdev.so"))
}

/// Compiles a program from a crate's examples, and links it with the library at `library`.
fn compiled_with(rig: &Rig, part: &str, name: &str, library: &Path) -> PathBuf {
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../gdev").join(part);
    let folder = library.parent().expect("a folder");
    let program = rig.folder.path().join(name);
    let mut compiler = Command::new("cc");
    compiler.args(["-std=c11", "-D_GNU_SOURCE", "-Wall", "-Wextra", "-Werror", "-O1", "-o"]).arg(&program);
    compiler.arg("-I").arg(source.join("include")).arg(source.join(format!("examples/c/{name}.c")));
    compiler.arg(library).arg(format!("-Wl,-rpath,{}", folder.display()));
    let output = compiler.output().expect("a C compiler");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    program
}

/// Returns the path of the kernel's image. With the fake driver, each module contains all kernels, regardless of its
/// image.
fn image() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../gdev/c/examples/c/add.ptx")
}

fn succeeds(command: &mut Command) -> String {
    let output = command.output().expect("starts");
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(output.status.success(), "{text}{}", String::from_utf8_lossy(&output.stderr));
    text
}

#[test]
fn c_program_computes_alone_as_a_tenant_and_in_a_guest() {
    let rig = Rig::new(256);
    let (program, image) = (compiled(&rig, "add"), image());
    let program = program.to_str().expect("UTF-8");
    assert_eq!(succeeds(rig.command(program, "plain").arg("cuda").arg(&image)), "verified 100000 words\n");

    let mut owner = owner(&rig, 64, &[]);
    let mut tenant = rig.command(program, "shim");
    tenant.env(cuda_protocol::SOCKET_VARIABLE, rig.socket()).env(cuda_protocol::TENANT_VARIABLE, "b");
    assert_eq!(succeeds(tenant.arg("cuda:0").arg(&image).arg("0x123456789")), "verified 100000 words\n");
    until_accounts(&mut owner, "the tenant's work is charged", |view| account(view, 1, "charged_ns") > 0);

    let guest = Loopback::start(&rig, "a");
    let mut inside = guest.command(&rig, program);
    assert_eq!(succeeds(inside.arg("cuda").arg(&image)), "verified 100000 words\n");
    until_accounts(&mut owner, "the guest's work is charged", |view| account(view, 0, "charged_ns") > 0);
    owner.end();
}

#[test]
fn driver_api_program_runs_unchanged_alone_and_as_a_tenant() {
    let rig = Rig::new(256);
    // The program links to Gdev's library, which finds the driver's library through the environment.
    let link = rig.folder.path().join("libcuda.so.1");
    std::os::unix::fs::symlink(built("libgdev_cuda.so"), &link).expect("a link");
    let program = compiled_with(&rig, "driver-api", "driver", &link);
    let program = program.to_str().expect("UTF-8");
    assert_eq!(succeeds(rig.command(program, "plain").arg(image())), "verified 100000 words\n");
    let owner = owner(&rig, 64, &[]);
    let mut tenant = rig.command(program, "shim");
    tenant.env(cuda_protocol::SOCKET_VARIABLE, rig.socket()).env(cuda_protocol::TENANT_VARIABLE, "b");
    assert_eq!(succeeds(tenant.arg(image())), "verified 100000 words\n");
    owner.end();
}

#[test]
fn wrong_calls_are_refused_by_name_and_harm_nothing() {
    let rig = Rig::new(256);
    let (program, image) = (compiled(&rig, "wrong"), image());
    let program = program.to_str().expect("UTF-8");
    assert_eq!(succeeds(rig.command(program, "plain").arg("cuda").arg(&image)), "0 mistakes\n");
    rig.until_free();
}

#[test]
fn missing_device_is_named_with_a_remedy() {
    let rig = Rig::new(64);
    let (program, image) = (compiled(&rig, "add"), image());
    let mut command = rig.command(program.to_str().expect("UTF-8"), "plain");
    let output = command.arg("nouveau:/dev/dri/renderD250").arg(&image).output().expect("starts");
    let error = String::from_utf8_lossy(&output.stderr);
    assert!(error.contains("/dev/dri/renderD250") && error.contains("nouveau is loaded"), "{error}");
    let mut command = rig.command(program.to_str().expect("UTF-8"), "plain");
    let output = command.env("LD_LIBRARY_PATH", "/nonexistent").arg("cuda").arg(&image).output().expect("starts");
    let error = String::from_utf8_lossy(&output.stderr);
    assert!(error.contains("libcuda.so.1") && error.contains("NVIDIA's driver"), "{error}");
}
