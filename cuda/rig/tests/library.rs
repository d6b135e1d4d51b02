//! Tests programs with the library and the scripted owner on the fake driver. All are real processes.
//!
//! The tests compare a program's output with its output without the library.

mod support;

use std::io::{BufRead as _, BufReader, Write as _};
use std::process::{Child, Command, Output, Stdio};
use std::time::Duration;

use support::{NO_DRIVER, PROGRAM, Rig, host_has_driver};

const OWNER: &str = env!("CARGO_BIN_EXE_cuda-scripted-owner");

/// Process of a scripted owner.
struct Owner {
    child: Child,
    output: BufReader<std::process::ChildStdout>,
}

/// Rig functions for the scripted owner and for programs without a tenant name.
trait Scripted {
    /// Returns the program's output without the library.
    fn plain(&self, arguments: &[&str]) -> String;

    /// Returns a command that runs the program with the library.
    fn mediated(&self, arguments: &[&str]) -> Command;

    /// Returns the program's output with the library and the owner.
    fn tenant(&self, arguments: &[&str]) -> String;

    /// Starts the scripted owner.
    fn owner(&self, arguments: &[&str]) -> Owner;
}

impl Scripted for Rig {
    fn plain(&self, arguments: &[&str]) -> String {
        text(&self.command(PROGRAM, "plain").args(arguments).output().expect("starts"))
    }

    fn mediated(&self, arguments: &[&str]) -> Command {
        let mut command = self.command(PROGRAM, "shim");
        command.args(arguments).env(cuda_protocol::SOCKET_VARIABLE, self.socket());
        command
    }

    fn tenant(&self, arguments: &[&str]) -> String {
        text(&self.mediated(arguments).output().expect("starts"))
    }

    fn owner(&self, arguments: &[&str]) -> Owner {
        let mut command = self.command(OWNER, "plain");
        command.arg("--socket").arg(self.socket()).arg("--driver").arg(&self.fake).args(arguments);
        let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().expect("starts");
        let mut output = BufReader::new(child.stdout.take().expect("piped"));
        let mut line = String::new();
        output.read_line(&mut line).expect("a line");
        assert_eq!(line.trim(), "ready");
        Owner { child, output }
    }
}

impl Owner {
    /// Stops the owner. Returns its counters.
    fn counts(mut self) -> serde_json::Value {
        drop(self.child.stdin.take());
        let mut line = String::new();
        self.output.read_line(&mut line).expect("a line");
        assert!(self.child.wait().expect("ends").success());
        serde_json::from_str(&line).expect("JSON")
    }

    fn kill(mut self) {
        self.child.kill().expect("killed");
        self.child.wait().expect("ends");
    }
}

fn text(output: &Output) -> String {
    let error = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{}: {error}", output.status);
    String::from_utf8_lossy(&output.stdout).trim().to_owned()
}

#[test]
fn without_an_owner_every_call_passes() {
    let rig = Rig::new(256);
    for arguments in [&["train"][..], &["churn"], &["look"], &["fork"], &["own"], &["wrong"]] {
        let passed = text(&rig.command(PROGRAM, "shim").args(arguments).output().expect("starts"));
        assert_eq!(passed, rig.plain(arguments), "{arguments:?}");
    }
}

#[test]
fn program_without_owner_fails_at_init() {
    let rig = Rig::new(64);
    let output = rig.mediated(&["look"]).output().expect("starts");
    assert!(!output.status.success());
    let error = String::from_utf8_lossy(&output.stderr);
    assert!(error.contains("cuInit failed with 802"), "{error}");
}

#[test]
fn program_without_driver_reports_reason_and_remedy() {
    let rig = Rig::new(64);
    let mut command = rig.mediated(&["look"]);
    command.env(cuda_protocol::DRIVER_VARIABLE, "/none").env_remove(cuda_protocol::LOG_VARIABLE);
    if host_has_driver(&rig) {
        return println!("skipped: this host has a driver, which the library finds");
    }
    let output = command.output().expect("starts");
    assert!(!output.status.success());
    let error = String::from_utf8_lossy(&output.stderr);
    assert!(error.starts_with(NO_DRIVER) && error.contains("cuInit failed with 100"), "{error}");
    assert_eq!(error.matches("gpu-mediator:").count(), 1, "{error}");
}

#[test]
fn results_are_those_of_a_run_without_the_library() {
    let rig = Rig::new(256);
    let owner = rig.owner(&["--device-mib", "128", "--quota-mib", "128"]);
    for arguments in [&["train"][..], &["churn"], &["fork"], &["own"]] {
        assert_eq!(rig.tenant(arguments), rig.plain(arguments), "{arguments:?}");
    }
    let counts = owner.counts();
    assert!(counts["granted"].as_u64().expect("a number") >= 20, "{counts}");
}

#[test]
fn results_hold_while_chunks_move_under_the_program() {
    let rig = Rig::new(256);
    let arguments = ["train", "--mib", "20", "--rounds", "80", "--spin-us", "2000"];
    let alone = rig.plain(&arguments);
    let owner = rig.owner(&["--device-mib", "16", "--quota-mib", "64", "--relocate-ms", "5", "--batch", "3"]);
    assert_eq!(rig.tenant(&arguments), alone);
    let counts = owner.counts();
    assert!(counts["moved"].as_u64().expect("a number") >= 3, "no chunk has moved: {counts}");
}

#[test]
fn allocations_come_and_go_while_chunks_move() {
    let rig = Rig::new(256);
    let owner = rig.owner(&["--device-mib", "64", "--quota-mib", "128", "--relocate-ms", "5", "--batch", "2"]);
    assert_eq!(rig.tenant(&["churn"]), rig.plain(&["churn"]));
    let counts = owner.counts();
    assert!(counts["moved"].as_u64().expect("a number") >= 2, "no chunk has moved: {counts}");
}

#[test]
fn results_hold_under_turns_with_bounded_work_in_flight() {
    let rig = Rig::new(256);
    let arguments = ["train", "--mib", "20", "--rounds", "120", "--spin-us", "1000"];
    let alone = rig.plain(&arguments);
    let owner = rig.owner(&["--quota-mib", "64", "--run-ahead-us", "4000", "--turn-us", "10000"]);
    assert_eq!(rig.tenant(&arguments), alone);
    let counts = owner.counts();
    assert!(counts["turns"].as_u64().expect("a number") >= 1, "{counts}");
    assert!(counts["launches"].as_u64().expect("a number") >= 1, "{counts}");
    assert!(counts["busy_ns"].as_u64().expect("a number") >= 1_000_000, "one kernel's time at least: {counts}");
}

#[test]
fn tenant_gets_its_quota_and_memory_info_reports_it() {
    let rig = Rig::new(256);
    let owner = rig.owner(&["--device-mib", "20", "--quota-mib", "60"]);
    assert!(rig.tenant(&["look"]).starts_with("free=60 total=60 device=60"), "memory information is the tenant's");
    // Ten allocations of 6 MiB exceed the owner's card memory per process.
    assert_eq!(rig.tenant(&["fill"]), "60");
    // The closed socket notifies the owner that the program has exited, and the owner frees its memory.
    let free = (0..1000).any(|_| rig.plain(&["look"]).starts_with("free=256"));
    assert!(free, "all memory is free again after the program has exited");
    assert_eq!(owner.counts()["refused"], 1);
}

#[test]
fn stream_reuses_freed_memory_of_every_size_immediately() {
    let rig = Rig::new(256);
    let owner = rig.owner(&["--device-mib", "64", "--quota-mib", "64"]);
    // From the second round on, work in flight still uses all of the memory.
    assert_eq!(rig.tenant(&["cycle", "--rounds", "5"]), "20");
    assert_eq!(owner.counts()["refused"], 0);
    // If the limit does not permit all sizes together, memory freed for one size is reused for the others.
    let owner = rig.owner(&["--device-mib", "20", "--quota-mib", "20"]);
    rig.tenant(&["cycle", "--rounds", "5"]);
    owner.counts();
}

#[test]
fn killed_program_leaves_no_memory() {
    let rig = Rig::new(256);
    let owner = rig.owner(&["--device-mib", "128", "--quota-mib", "128", "--relocate-ms", "3", "--batch", "4"]);
    for delay_ms in [0, 20, 60, 150, 400] {
        let mut program = rig.mediated(&["train", "--mib", "30", "--rounds", "100000"]);
        let mut child = program.stdout(Stdio::null()).stderr(Stdio::null()).spawn().expect("starts");
        std::thread::sleep(Duration::from_millis(delay_ms));
        child.kill().expect("killed");
        child.wait().expect("ends");
    }
    // The owner still serves programs, and all memory is free.
    assert_eq!(rig.tenant(&["fill"]), "126");
    owner.counts();
    assert!(rig.plain(&["look"]).starts_with("free=256 total=256"), "{}", rig.plain(&["look"]));
}

#[test]
fn program_survives_owner_restart_and_is_adopted() {
    let rig = Rig::new(256);
    let owner = rig.owner(&["--device-mib", "64", "--quota-mib", "64"]);
    let mut child = rig
        .mediated(&["hold", "--mib", "10"])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .expect("starts");
    let mut output = BufReader::new(child.stdout.take().expect("piped"));
    let mut line = String::new();
    output.read_line(&mut line).expect("a line");
    assert_eq!(line.trim(), "holds");
    owner.kill();
    std::fs::remove_file(rig.socket()).expect("a killed owner leaves its socket behind");
    let owner = rig.owner(&["--device-mib", "64", "--quota-mib", "64"]);
    // TIMEOUT: enough for several connection attempts by the library.
    std::thread::sleep(Duration::from_millis(cuda_protocol::RECONNECT_MS * 10));
    child.stdin.take().expect("piped").write_all(b"on").expect("written");
    line.clear();
    output.read_line(&mut line).expect("a line");
    assert_eq!(line.trim(), "held", "the contents are preserved, and memory is available again");
    assert!(child.wait().expect("ends").success());
    let counts = owner.counts();
    assert_eq!(counts["adopted"], 5, "{counts}");
    assert_eq!(counts["adopted_with_descriptor"], 5, "{counts}");
}

/// Results of invalid calls with NVIDIA's driver 580 on an H200.
const WRONG: &str = "nothing=1 odd=1 flags=1 no-such-card=101 map-part=801 map-offset=801 map-nothing=1 \
    map-odd-address=1 map-unreserved=1 map=0 map-over=1 map-beside=0 map-over-plain=1 allow-part=1 allow-gap=1 \
    allow-part-and-whole=1 allow-no-such-card=1 allow-host=801 allow-what=1 allow-reading=0 allow=0 access-unmapped=1 \
    unmap-part=1 unmap-part-and-whole=1 unmap-nothing=1 unmap-plain=1 retain-unmapped=1 retain-plain=1 free=1 \
    range-unmapped=500 attribute-unmapped=1 attribute-host-pointer=1 export=1 release=0 release-again=1 map-released=1 \
    map-shared=0 allow-both=0 export-shared=0 retain-shared=0 release-shared=0 release-last=0 unmap=0 release-gone=1 retain-gone=1 release-two=0 unreserve=0";

#[test]
fn invalid_virtual_memory_calls_return_driver_errors() {
    let rig = Rig::new(256);
    assert_eq!(rig.plain(&["wrong"]), WRONG);
    // Test card memory, host memory, and handles whose size is not a whole number of chunks.
    for arguments in
        [&["--quota-mib", "128"][..], &["--device-mib", "0"], &["--chunk-mib", "4"], &["--chunk-mib", "64"]]
    {
        let owner = rig.owner(arguments);
        assert_eq!(rig.tenant(&["wrong"]), WRONG, "{arguments:?}");
        let counts = owner.counts();
        assert_eq!(counts["fixed_bytes"], 0, "{counts}");
    }
}

/// Checks that a program that maps its memory itself gets the same results while chunks move, with each of two chunk
/// sizes.
fn moves_what_the_program_maps(more: &[&str]) {
    let rig = Rig::new(256);
    let arguments = [&["own", "--mib", "32", "--rounds", "80", "--spin-us", "2000"], more].concat();
    let alone = rig.plain(&arguments);
    for chunk in ["2", "4"] {
        let bounds = ["--device-mib", "24", "--quota-mib", "96", "--relocate-ms", "4", "--batch", "5"];
        let owner = rig.owner(&[&bounds[..], &["--chunk-mib", chunk]].concat());
        assert_eq!(rig.tenant(&arguments), alone, "chunks of {chunk} MiB");
        let counts = owner.counts();
        assert!(counts["moved"].as_u64().expect("a number") >= 20, "{counts}");
        assert_eq!(counts["fixed_bytes"], 0, "memory allocated by the driver is counted until it is freed: {counts}");
        assert!(rig.free().starts_with("free=256"), "{}", rig.free());
    }
}

#[test]
fn handles_of_the_program_itself_move_under_its_work() {
    moves_what_the_program_maps(&[]);
}

#[test]
fn handles_that_could_be_exported_move_until_they_are() {
    moves_what_the_program_maps(&["--shareable"]);
}

#[test]
fn program_handles_are_bounded_by_tenant_quota() {
    let rig = Rig::new(256);
    let owner = rig.owner(&["--device-mib", "20", "--quota-mib", "60"]);
    assert_eq!(rig.tenant(&["own-fill"]), "60 60", "all memory is free again between the two programs");
    let counts = owner.counts();
    assert_eq!((&counts["granted"], &counts["freed"]), (&60.into(), &60.into()), "{counts}");
}

#[test]
fn memory_of_graphs_counts_and_is_refused_before_they_run() {
    let rig = Rig::new(256);
    assert_eq!(rig.plain(&["graphs"]), "20 0 0 0", "the card has free memory");
    let owner = rig.owner(&["--quota-mib", "64"]);
    assert_eq!(rig.tenant(&["graphs"]), "20 2 0 2");
    let counts = owner.counts();
    // The driver keeps the last graph's memory until the program exits.
    assert_eq!(counts["fixed_bytes"], 40 << 20, "{counts}");
}

#[test]
fn killed_program_with_own_mappings_leaves_no_memory() {
    let rig = Rig::new(256);
    let owner = rig.owner(&["--device-mib", "128", "--quota-mib", "128", "--relocate-ms", "3", "--batch", "4"]);
    for delay_ms in [0, 20, 60, 150, 400] {
        let mut program = rig.mediated(&["own", "--mib", "44", "--rounds", "1000000"]);
        let mut child = program.stdout(Stdio::null()).stderr(Stdio::null()).spawn().expect("starts");
        std::thread::sleep(Duration::from_millis(delay_ms));
        child.kill().expect("killed");
        child.wait().expect("ends");
    }
    assert_eq!(rig.tenant(&["own-fill"]), "126 126");
    owner.counts();
    assert!(rig.free().starts_with("free=256"), "{}", rig.free());
}
