//! Tests programs with NVIDIA's unmodified CUDA runtime on the fake driver, without the library and as a tenant.
//!
//! `cargo xtask test --suite cuda` downloads the runtimes as wheels. A runtime accepts a driver only if its export
//! tables behave like those of NVIDIA's driver. The fake driver uses the tables of `cuda-exports`.

mod support;

use std::path::{Path, PathBuf};
use std::process::Command;

use support::{Rig, built, owner, settled};

/// Key of the integrity check, as contained in the library.
const KEY: [u8; 16] = 0x146A_DDAE_53A9_A752_AA08_4136_0BF5_5A9F_u128.to_be_bytes();

/// Returns the path of the runtime with the given major version.
fn runtime(version: u32) -> PathBuf {
    let folder = std::env::var("GPU_MEDIATOR_CUDA_RUNTIMES").expect("cargo xtask test --suite cuda names a folder");
    Path::new(&folder).join(version.to_string()).join("libcudart.so")
}

/// Returns a command that runs the program that uses the runtime.
fn program(rig: &Rig, library: &str, version: u32) -> Command {
    let mut command = rig.command(env!("CARGO_BIN_EXE_cuda-runtime"), library);
    command.arg(runtime(version));
    command
}

/// Runs a program that must succeed, and returns its output.
fn text(command: &mut Command) -> String {
    let output = command.output().expect("starts");
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    let error = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{text}{error}");
    // The fake driver reports calls to unknown table slots.
    assert!(!error.contains("export table"), "{error}");
    text
}

/// Runs the program without the library and as a tenant.
fn runs(version: u32, reported: u32) {
    let rig = Rig::new(256);
    let plain = text(&mut program(&rig, "plain", version));
    assert!(plain.starts_with(&format!("runtime={reported} driver=13000 devices=1 warp=32\n")), "{plain}");
    assert_eq!(plain.matches("verified").count(), 2, "{plain}");
    assert_eq!(plain.matches("reset").count(), 2, "{plain}");
    let owner = owner(&rig, 64, &[]);
    let mut tenant = program(&rig, "shim", version);
    tenant.env(cuda_protocol::SOCKET_VARIABLE, rig.socket()).env(cuda_protocol::TENANT_VARIABLE, "a");
    assert_eq!(text(&mut tenant), plain);
    // Once the owner has detected the program's exit, it has charged the program's turns.
    let view = settled(&rig, owner);
    let charged = view["tenants"][0]["charged_ns"].as_u64();
    assert!(charged.is_some_and(|ns| ns > 0), "its work passed the gate: {view}");
}

#[test]
fn runtime_of_cuda_11_works_alone_and_as_a_tenant() {
    runs(11, 11_080);
}

#[test]
fn runtime_of_cuda_12_works_alone_and_as_a_tenant() {
    runs(12, 12_090);
}

#[test]
fn runtime_of_cuda_13_works_alone_and_as_a_tenant() {
    runs(13, 13_050);
}

/// Checks that the runtimes verify the result: with a different key in the driver, they fail with 103.
#[test]
fn wrong_integrity_answer_is_refused_by_each_runtime() {
    let rig = Rig::new(256);
    let mut driver = std::fs::read(built("libcuda_fake.so")).expect("readable");
    let places: Vec<usize> =
        driver.windows(KEY.len()).enumerate().filter(|(_, w)| *w == KEY).map(|(at, _)| at).collect();
    assert!(!places.is_empty(), "the driver contains the key");
    places.iter().for_each(|place| driver[*place] ^= 1);
    std::fs::create_dir(rig.folder.path().join("wrong")).expect("a folder");
    std::fs::write(rig.folder.path().join("wrong/libcuda.so.1"), driver).expect("written");
    for version in [11, 12, 13] {
        let output = program(&rig, "wrong", version).output().expect("starts");
        let text = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(!output.status.success() && text.contains("failed with 103"), "{version}: {text}");
    }
}
