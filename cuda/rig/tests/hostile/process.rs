//! Tests the library's effects on a program's process: children, signals, limits, descriptors, and freed memory.

use std::fs::File;
use std::os::unix::fs::FileExt as _;
use std::process::{Command, Output};

use cuda_protocol::{ChunkId, FromOwner, FromTenant, Link, Place};

use super::support::hostile::*;
use super::support::{Program, Rig, describe, owner};

const PROCESS: &str = env!("CARGO_BIN_EXE_cuda-process");

/// Runs the program as tenant `a` of an owner, and checks that it succeeds. Returns its output.
fn run(rig: &Rig, arguments: &[&str]) -> String {
    let owner = owner(rig, 64, &[]);
    let text = text(&as_tenant(rig, arguments).output().expect("starts"));
    owner.end();
    text
}

fn as_tenant(rig: &Rig, arguments: &[&str]) -> Command {
    let mut command = rig.command(PROCESS, "shim");
    command.env(cuda_protocol::SOCKET_VARIABLE, rig.socket()).env(cuda_protocol::TENANT_VARIABLE, "a");
    command.args(arguments);
    command
}

fn text(output: &Output) -> String {
    let error = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{}: {error}", output.status);
    String::from_utf8_lossy(&output.stdout).trim().to_owned()
}

/// Returns the program's output without the library.
fn plain(rig: &Rig, arguments: &[&str]) -> String {
    text(&rig.command(PROCESS, "plain").args(arguments).output().expect("starts"))
}

#[test]
fn forked_child_gets_same_driver_errors_as_without_library() {
    let rig = Rig::new(256);
    for way in ["fork", "clone"] {
        let arguments = ["fork", "--way", way];
        assert_eq!(run(&rig, &arguments), plain(&rig, &arguments), "{way}");
    }
}

#[test]
fn child_forked_before_driver_init_works() {
    let rig = Rig::new(256);
    assert_eq!(run(&rig, &["fork-before"]), plain(&rig, &["fork-before"]));
}

#[test]
fn signals_are_the_programs() {
    let rig = Rig::new(256);
    assert_eq!(run(&rig, &["signals"]), plain(&rig, &["signals"]));
}

#[test]
fn children_inherit_file_limit_but_no_library_descriptors() {
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
    // The library must behave like the driver itself.
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

#[test]
fn memory_freed_by_busy_program_is_reused_without_copy() {
    let rig = Rig::new(256);
    let mut serving = owner(&rig, 64, &["--quanta", "off"]);
    let mut busy = Program::start(&mut as_tenant(&rig, &["freed", "--mib", "48"]));
    let said = busy.line();
    let free: u64 = said.strip_prefix("free ").and_then(|mib| mib.parse().ok()).unwrap_or_else(|| panic!("{said:?}"));
    assert_eq!(free, 64 - 2, "all memory is free except the chunk of its word");
    let mut other = rig.program("b", &["hold", "--mib", "48"]);
    assert_eq!(other.line(), "holds");
    // While the first program was alone, it may have submitted a tenth of a second of work.
    let view = until_accounts(&mut serving, "free chunks are kept", |view| account(view, 1, "chunks_on_card") == 24);
    assert_eq!(account(&view, 0, "moved_out"), 0, "empty chunks were copied: {view}");
    other.end();
    assert_eq!(busy.end(), "worked");
    describe(serving);
}

#[test]
fn memory_freed_by_busy_program_returns_without_demand() {
    let rig = Rig::new(256);
    let mut serving = owner(&rig, 64, &[&["--quanta", "off"], &NEVER_IDLE[..]].concat());
    // The turns alternate, so the first program's library keeps receiving messages.
    let mut busy = Program::start(&mut as_tenant(&rig, &["freed", "--mib", "48"]));
    let mut neighbour = Neighbour::begin(&rig, "b", &[]);
    assert!(busy.line().starts_with("free"));
    until_accounts(&mut serving, "free chunks are kept", |view| account(view, 0, "chunks_on_card") == 1);
    // Both tenants always have work.
    assert_has_share(&mut serving, &mut neighbour, 500);
    neighbour.end();
    assert_eq!(busy.end(), "worked");
    describe(serving);
}

#[test]
fn program_that_drops_environment_and_folder_is_adopted() {
    let rig = Rig::new(256);
    let first = owner(&rig, 64, &[]);
    let mut command = as_tenant(&rig, &["forgets"]);
    command.current_dir(rig.folder.path()).env(cuda_protocol::SOCKET_VARIABLE, "run/socket");
    let mut program = Program::start(&mut command);
    assert_eq!(program.line(), "forgot");
    first.kill();
    let second = owner(&rig, 64, &[]);
    program.say("go on");
    assert_eq!(program.end(), "101010101010101 202020202020202");
    describe(second);
}

/// Allocates chunks for a program. Returns the chunks in host memory, with their files.
fn host_chunks(link: &Link, request: u32, chunks: u32) -> Vec<(ChunkId, File)> {
    link.send(&FromTenant::Allocate { request, card: 0, chunks }, &[]).expect("sent");
    let mut host = Vec::new();
    loop {
        let received = link.receive().expect("received");
        match received.message {
            FromOwner::Granted { chunks, more, .. } => {
                let files = received.descriptors.into_iter().map(File::from);
                let in_host = chunks.into_iter().zip(files).filter(|(chunk, _)| chunk.place == Place::Host);
                host.extend(in_host.map(|(chunk, file)| (chunk.id, file)));
                if !more {
                    return host;
                }
            }
            FromOwner::Reclaim { order } => link.send(&FromTenant::Reclaimed { order }, &[]).expect("sent"),
            FromOwner::Refused { reason, .. } => panic!("{reason:?}"),
            _ => {}
        }
    }
}

fn connected(rig: &Rig) -> Link {
    let link = Link::connect(&rig.socket()).expect("connects");
    link.send(&FromTenant::Hello(hello("a", false)), &[]).expect("sent");
    assert!(matches!(link.receive().expect("received").message, FromOwner::Welcome(_)));
    link
}

#[test]
fn host_memory_is_not_shared_between_programs_of_tenant() {
    const MINE: &[u8] = b"of the first";
    const YOURS: &[u8] = b"of the second";
    let rig = Rig::new(256);
    let serving = owner(&rig, 8, &["--quanta", "off"]);
    let first = connected(&rig);
    let had = host_chunks(&first, 1, 16);
    assert!(had.len() >= 8, "{} of 16 chunks in host memory", had.len());
    for (_, file) in &had {
        file.write_all_at(MINE, 4096).expect("written");
    }
    first.send(&FromTenant::Free { chunks: had.iter().map(|(id, _)| *id).collect() }, &[]).expect("sent");
    // The second program may belong to another user of the tenant. The first program has kept its descriptors.
    let second = connected(&rig);
    let mut text = [0; MINE.len()];
    for (id, file) in host_chunks(&second, 1, 16) {
        file.read_exact_at(&mut text, 4096).expect("read");
        assert_eq!(text, [0; MINE.len()], "{id:?} contains data of the first program");
        file.write_all_at(YOURS, 8192).expect("written");
    }
    let mut text = [0; YOURS.len()];
    for (id, file) in &had {
        file.read_exact_at(&mut text, 8192).expect("read");
        assert_eq!(text, [0; YOURS.len()], "{id:?} shows data of the second program to the first");
    }
    drop((first, second));
    describe(serving);
}
