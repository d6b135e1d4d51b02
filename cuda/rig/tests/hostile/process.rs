//! A program's own process: children, signals, limits, descriptors, and memory that it has freed.

use std::process::{Command, Output};

use super::support::{Rig, owner};

const PROCESS: &str = env!("CARGO_BIN_EXE_cuda-process");

/// Runs the program as tenant `a` of an owner, and sees it succeed; its output.
fn run(rig: &Rig, arguments: &[&str]) -> String {
    let owner = owner(rig, 64, &[]);
    let text = text(&as_tenant(rig, arguments).output().expect("starts"));
    owner.end();
    text
}

fn as_tenant(rig: &Rig, arguments: &[&str]) -> Command {
    let mut command = rig.command(PROCESS, "front");
    command.env(cuda_protocol::SOCKET_VARIABLE, rig.socket()).env(cuda_protocol::TENANT_VARIABLE, "a");
    command.args(arguments);
    command
}

fn text(output: &Output) -> String {
    let error = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{}: {error}", output.status);
    String::from_utf8_lossy(&output.stdout).trim().to_owned()
}

/// Prints of the program without the library.
fn plain(rig: &Rig, arguments: &[&str]) -> String {
    text(&rig.command(PROCESS, "plain").args(arguments).output().expect("starts"))
}

#[test]
fn after_a_fork_every_function_says_that_the_driver_is_not_initialised() {
    let rig = Rig::new(256);
    for way in ["fork", "clone"] {
        let arguments = ["fork", "--way", way];
        assert_eq!(run(&rig, &arguments), plain(&rig, &arguments), "{way}");
    }
}

#[test]
fn a_child_of_a_program_that_has_not_initialised_the_driver_works() {
    let rig = Rig::new(256);
    assert_eq!(run(&rig, &["fork-before"]), plain(&rig, &["fork-before"]));
}

#[test]
fn signals_are_the_programs() {
    let rig = Rig::new(256);
    assert_eq!(run(&rig, &["signals"]), plain(&rig, &["signals"]));
}

#[test]
fn children_have_the_programs_limit_of_open_files_and_none_of_the_librarys_descriptors() {
    let rig = Rig::new(256);
    assert_eq!(run(&rig, &["children", "--mib", "40"]), plain(&rig, &["children", "--mib", "40"]));
}

#[test]
fn the_library_takes_the_place_of_no_standard_descriptor() {
    let rig = Rig::new(256);
    let said = |mut command: Command| {
        let file = rig.folder.path().join("said");
        assert!(command.arg("closed").arg(&file).status().expect("starts").success());
        std::fs::read_to_string(&file).expect("written")
    };
    // The driver itself does that.
    let plain = said(rig.command(PROCESS, "plain"));
    let owner = owner(&rig, 64, &[]);
    assert_eq!(said(as_tenant(&rig, &[])), plain);
    owner.end();
}

#[test]
fn a_library_that_is_closed_stays_for_its_thread() {
    let rig = Rig::new(256);
    assert_eq!(run(&rig, &["unload"]), plain(&rig, &["unload"]));
}
