//! Tests programs with the guest library that run concurrently with each other and with host programs: failures of
//! workers and owners, moving memory, and shares of a card's time. All are real processes on the fake driver.

mod support;

use std::process::Command;

use support::daemon::{self, Daemon, card, good, tenant};
use support::guest::Loopback;
use support::{PROGRAM, Program, Rig, describe, owner};

/// Runs a command. Returns its standard output and standard error.
fn texts(command: &mut Command) -> (String, String) {
    let output = command.output().expect("starts");
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    (text(&output.stdout), text(&output.stderr))
}

fn start(rig: &Rig, guest: &Loopback, arguments: &[&str]) -> Program {
    Program::start(guest.command(rig, PROGRAM).args(arguments))
}

#[test]
fn killed_worker_ends_its_program_with_719_and_no_other() {
    let rig = Rig::new(256);
    let _owner = owner(&rig, 64, &[]);
    let guest = Loopback::start(&rig, "a");
    let mut lost = guest.command(&rig, PROGRAM);
    let lost = lost.args(["live", "--mib", "8"]).stderr(std::process::Stdio::piped());
    let mut lost = Program::start(lost);
    lost.steps(3);
    let [worker] = guest.workers()[..] else { panic!("one worker") };
    let mut other = start(&rig, &guest, &["live", "--mib", "8"]);
    let mut host = rig.program("b", &["live", "--mib", "8"]);
    other.steps(3);
    rustix::process::kill_process(
        rustix::process::Pid::from_raw(worker).expect("a process"),
        rustix::process::Signal::KILL,
    )
    .expect("killed");
    let output = lost.child.wait_with_output().expect("ends");
    let error = String::from_utf8_lossy(&output.stderr);
    assert!(!output.status.success() && error.contains("failed with 719"), "{error}");
    other.steps(20);
    host.steps(20);
    assert_eq!(other.end(), "held 4");
    assert_eq!(host.end(), "held 4");
    rig.until_free();
}

#[test]
fn programs_keep_working_when_the_owner_is_replaced() {
    let rig = Rig::new(256);
    let first = owner(&rig, 64, &[]);
    let guest = Loopback::start(&rig, "a");
    let mut program = start(&rig, &guest, &["live", "--mib", "16"]);
    program.grow();
    first.kill();
    program.steps(20);
    let second = owner(&rig, 64, &[]);
    program.grow();
    program.steps(10);
    let view = describe(second);
    assert!(support::chunks(&view, 0) >= 12, "its 24 MiB are accounted: {view}");
    assert_eq!(program.end(), "held 12");
    rig.until_free();
}

#[test]
fn memory_that_does_not_fit_moves_under_guest_and_host_programs() {
    let rig = Rig::new(256);
    let arguments = ["train", "--mib", "35", "--rounds", "30", "--spin-us", "300"];
    let (plain, _) = texts(rig.command(PROGRAM, "plain").args(arguments));
    let owner = owner(&rig, 48, &[]);
    let guest = Loopback::start(&rig, "a");
    let mut inside = start(&rig, &guest, &arguments);
    let mut outside = rig.program("b", &arguments);
    assert_eq!([inside.line(), outside.line()], [plain.trim(), plain.trim()]);
    inside.end();
    outside.end();
    let view = describe(owner);
    assert!(view["relocations"].as_u64() > Some(0), "70 MiB do not fit into 48: {view}");
}

#[test]
fn guest_programs_share_time_by_weights_that_change_live() {
    let rig = daemon::rig(|rig| card(rig, "fake", "") + &["a", "b", "c"].map(|name| tenant(name, "fake", "")).concat());
    let _daemon = Daemon::start(&rig);
    let guests = ["a", "b"].map(|name| Loopback::under_daemon(&rig, name));
    let count = |guest: &Loopback| start(&rig, guest, &["count", "--kernel-us", "300"]);
    let mut programs = vec![count(&guests[0]), count(&guests[1])];
    programs.push(daemon::run(&rig, "c", &[], &["count", "--kernel-us", "300"]));
    for (name, weight) in [("a", "300"), ("b", "200"), ("c", "100")] {
        good(&rig, &["tenant", "set", name, "--weight", weight]);
    }
    let mut counts = || -> Vec<u64> {
        programs.iter_mut().for_each(|program| program.say("how much"));
        programs.iter_mut().map(|program| program.line().parse().expect("a number")).collect()
    };
    let before = counts();
    let parts = loop {
        let done: Vec<u64> = counts().iter().zip(&before).map(|(now, before)| now - before).collect();
        let sum: u64 = done.iter().sum();
        if sum >= 3_000_000 {
            break done.into_iter().map(|done| done * 1000 / sum).collect::<Vec<_>>();
        }
        std::thread::sleep(std::time::Duration::from_millis(200));
    };
    // The parts may differ by a tenth of the total, because a busy host delays programs.
    let good = parts.iter().zip([500, 333, 167]).all(|(part, due)| part.abs_diff(due) <= 100);
    assert!(good, "3:2:1 gave {parts:?}");
    programs.into_iter().for_each(|program| drop(program.end()));
}

#[test]
fn quota_of_a_guests_tenant_changes_live() {
    let rig = daemon::rig(|rig| card(rig, "fake", "") + &tenant("a", "fake", ""));
    let _daemon = Daemon::start(&rig);
    let guest = Loopback::under_daemon(&rig, "a");
    let mut program = start(&rig, &guest, &["live", "--mib", "24"]);
    program.steps(3);
    good(&rig, &["tenant", "set", "a", "--quota-mib", "16"]);
    daemon::until(&rig, "a", "its memory is within the quota", |a| daemon::mib(a, "on_card_bytes") <= 16);
    program.steps(10);
    assert_eq!(program.end(), "held 12");
}

#[test]
fn pinned_memory_and_host_functions_work_as_natively() {
    let rig = Rig::new(256);
    let program = env!("CARGO_BIN_EXE_cuda-host");
    let (plain, error) = texts(&mut rig.command(program, "plain"));
    assert!(!plain.is_empty(), "{error}");
    let _owner = owner(&rig, 64, &[]);
    let guest = Loopback::start(&rig, "a");
    for synchronous in ["0", "1"] {
        let mut command = guest.command(&rig, program);
        let (text, error) = texts(command.env("GPU_MEDIATOR_CUDA_SYNC", synchronous));
        assert_eq!(text, plain, "{error}");
    }
}

#[test]
fn forked_child_and_wrong_calls_get_the_drivers_errors() {
    let rig = Rig::new(256);
    let run = |command: &mut Command, what: &str| texts(command.arg(what)).0;
    let plain = ["fork", "wrong"].map(|what| run(&mut rig.command(PROGRAM, "plain"), what));
    let _owner = owner(&rig, 128, &[]);
    let guest = Loopback::start(&rig, "a");
    let [fork, wrong] = ["fork", "wrong"].map(|what| run(&mut guest.command(&rig, PROGRAM), what));
    assert_eq!(fork, plain[0]);
    // Guests cannot export memory descriptors.
    let comparable = |text: &str| {
        text.split(' ').filter(|word| !word.starts_with("export")).map(str::to_owned).collect::<Vec<_>>().join(" ")
    };
    assert_eq!(comparable(&wrong), comparable(&plain[1]));
}
