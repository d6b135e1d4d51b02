//! Tests that guest programs continue in new workers. All are real processes on the fake driver.

mod support;

use std::process::Stdio;

use rustix::process::{Pid, Signal, kill_process};
use support::guest::Loopback;
use support::{PROGRAM, Program, Rig, owner};

fn start(rig: &Rig, guest: &Loopback, arguments: &[&str]) -> Program {
    Program::start(guest.command(rig, PROGRAM).args(arguments))
}

fn only_worker(guest: &Loopback) -> i32 {
    let workers = guest.workers();
    let [worker] = workers[..] else { panic!("one worker: {workers:?}") };
    worker
}

/// Waits for the next line of the program `objects`, and returns its round number.
fn round(program: &mut Program) -> u64 {
    let line = program.line();
    let words: Vec<&str> = line.split(' ').collect();
    assert_eq!(words.first(), Some(&"step"), "{line}");
    words[1].parse().expect("a number")
}

fn rounds(program: &mut Program, count: usize) {
    for _ in 0..count {
        round(program);
    }
}

/// Makes a program create or destroy objects, and waits until it has completed two more rounds.
fn change(program: &mut Program, line: &str) {
    program.say(line);
    while program.line() != line {}
    rounds(program, 2);
}

#[test]
fn program_computes_on_while_its_worker_is_restarted_repeatedly() {
    let rig = Rig::new(256);
    let _owner = owner(&rig, 64, &[]);
    let guest = Loopback::start(&rig, "a");
    let mut program = start(&rig, &guest, &["live", "--mib", "12"]);
    program.steps(2);
    let mut other = start(&rig, &guest, &["live", "--mib", "4"]);
    other.steps(2);
    let workers = guest.workers();
    let mut worker = workers[0];
    for count in 0..6 {
        if count == 3 {
            program.grow();
        }
        let next = guest.restart(worker).expect("restarted");
        assert_ne!(next, worker);
        worker = next;
        program.steps(3);
        other.steps(3);
    }
    assert_eq!(program.end(), "held 8");
    assert_eq!(other.end(), "held 2");
    rig.until_free();
}

#[test]
fn objects_of_all_kinds_survive_restarts() {
    let rig = Rig::new(256);
    let _owner = owner(&rig, 64, &[]);
    let guest = Loopback::start(&rig, "a");
    let mut program = start(&rig, &guest, &["objects"]);
    rounds(&mut program, 3);
    for _ in 0..6 {
        guest.restart(only_worker(&guest)).expect("restarted");
        rounds(&mut program, 4);
    }
    assert_eq!(program.end(), "done");
    rig.until_free();
}

#[test]
fn output_of_kernels_survives_a_restart() {
    let rig = Rig::new(256);
    let _owner = owner(&rig, 64, &[]);
    let guest = Loopback::start(&rig, "a");
    let mut program = start(&rig, &guest, &["printing"]);
    // Before a worker has seen output, output can arrive later than after a wait for a stream. A next worker expects
    // output, even if it executes the launch itself.
    assert_eq!(program.print("context").len(), 2);
    for _ in 0..3 {
        assert!(program.print("launch").is_empty(), "the driver does not write before a wait");
        guest.restart(only_worker(&guest)).expect("restarted");
        assert_eq!(program.print("stream").len(), 4, "two kernels have printed");
    }
}

#[test]
fn object_that_prevents_a_restart_is_named_and_nothing_changes() {
    let rig = Rig::new(256);
    let _owner = owner(&rig, 64, &[]);
    let guest = Loopback::start(&rig, "a");
    let mut program = start(&rig, &guest, &["objects"]);
    round(&mut program);
    let mut worker = only_worker(&guest);
    for (kind, reason) in [
        ("event", "it has recorded an event with timing"),
        ("mapping", "it has an object of cuMemCreate, which cannot be created again"),
        ("array", "it has an object of cuArrayCreate_v2"),
        ("address", "it uses the address of a module's variable"),
        ("pointer", "it uses the address of a module's variable"),
        ("pinned", "it uses the address of a module's variable"),
        ("unreadable", "a module has variables that are not found"),
        ("missing", "a module has variables that are not found"),
        ("pointers", "it uses the address of a module's variable"),
        ("heap", "its kernels allocate memory (malloc)"),
        ("captured", "it has an object of cuStreamEndCapture"),
        ("capture", "a stream captures a graph"),
    ] {
        change(&mut program, kind);
        let refused = guest.restart(worker).expect_err(kind);
        assert!(refused.starts_with("refused: ") && refused.contains(reason), "{kind}: {refused}");
        rounds(&mut program, 3);
        assert_eq!(only_worker(&guest), worker, "{kind}");
        change(&mut program, "end");
        worker = guest.restart(worker).unwrap_or_else(|reason| panic!("{kind}: {reason}"));
        rounds(&mut program, 3);
    }
    assert_eq!(program.end(), "done");
}

#[test]
fn memory_above_the_limit_prevents_a_restart() {
    let rig = Rig::new(256);
    let _owner = owner(&rig, 64, &[]);
    let guest = Loopback::start_with(&rig, "a", Stdio::inherit(), &["--restart-mib", "6"]);
    let mut program = start(&rig, &guest, &["live", "--mib", "4"]);
    program.steps(2);
    let worker = guest.restart(only_worker(&guest)).expect("restarted");
    program.grow();
    let refused = guest.restart(worker).expect_err("too much memory");
    assert!(refused.contains("its memory and images have 8 MiB, more than the limit"), "{refused}");
    program.steps(3);
    assert_eq!(program.end(), "held 4");
    assert_eq!(guest.restart(1), Err("refused: no worker has the process ID 1".to_owned()));
}

#[test]
fn restart_uses_the_whole_quota_of_the_program() {
    let rig = Rig::new(256);
    let _owner = owner(&rig, 64, &[]);
    let guest = Loopback::start(&rig, "a");
    let mut program = start(&rig, &guest, &["live", "--mib", "60"]);
    program.steps(2);
    for _ in 0..3 {
        guest.restart(only_worker(&guest)).expect("the old worker's memory is free first");
        program.steps(2);
    }
    assert_eq!(program.end(), "held 30");
}

#[test]
fn worker_killed_during_a_restart_ends_only_its_program() {
    let rig = Rig::new(256);
    let _owner = owner(&rig, 64, &[]);
    let guest = Loopback::start(&rig, "a");
    let mut other = start(&rig, &guest, &["live", "--mib", "4"]);
    other.steps(2);
    let neighbour = only_worker(&guest);
    // Delays after which the workers are killed, from before the save to after the restore.
    for wait_ms in [0, 2, 5, 10, 20, 40, 80] {
        let mut lost = guest.command(&rig, PROGRAM);
        let mut lost = Program::start(lost.args(["live", "--mib", "24"]).stderr(Stdio::piped()));
        lost.steps(2);
        let own = guest.workers().into_iter().find(|worker| *worker != neighbour).expect("a worker");
        std::thread::scope(|scope| {
            let restart = scope.spawn(|| guest.restart(own));
            std::thread::sleep(std::time::Duration::from_millis(wait_ms));
            while !restart.is_finished() {
                for worker in guest.workers().into_iter().filter(|worker| *worker != neighbour) {
                    let _ = kill_process(Pid::from_raw(worker).expect("a process"), Signal::KILL);
                }
            }
            let result = restart.join().expect("no panic");
            match result {
                // The restart completed before the kill.
                Ok(worker) => {
                    let _ = kill_process(Pid::from_raw(worker).expect("a process"), Signal::KILL);
                }
                Err(reason) => {
                    let known = ["ended", "in progress", "no worker", "could not continue"];
                    assert!(known.iter().any(|known| reason.contains(known)), "{reason}");
                }
            }
        });
        let output = lost.child.wait_with_output().expect("ends");
        let error = String::from_utf8_lossy(&output.stderr);
        assert!(!output.status.success() && error.contains("failed with 719"), "{error}");
        other.steps(2);
    }
    assert_eq!(other.end(), "held 2");
    rig.until_free();
}

#[test]
fn restart_of_a_busy_program_waits_for_its_work() {
    let rig = Rig::new(256);
    let _owner = owner(&rig, 64, &[]);
    let guest = Loopback::start(&rig, "a");
    let arguments = ["train", "--mib", "20", "--rounds", "100", "--spin-us", "20000"];
    let plain = rig.command(PROGRAM, "plain").args(arguments).output().expect("starts");
    let mut command = guest.command(&rig, PROGRAM);
    let mut program = command.args(arguments).stdout(Stdio::piped()).spawn().expect("starts");
    // The program launches a captured graph. The first restarts may fail because the program has not started yet.
    let mut restarted = 0;
    while restarted < 5 && program.try_wait().expect("a process").is_none() {
        let Some(worker) = guest.workers().first().copied() else { continue };
        match guest.restart(worker) {
            Ok(_) => restarted += 1,
            Err(reason) => {
                let known = ["no worker", "started", "captures", "ended"];
                assert!(known.iter().any(|known| reason.contains(known)), "{reason}");
            }
        }
    }
    assert!(restarted > 0, "the program has ended before a restart");
    let output = program.wait_with_output().expect("ends");
    assert!(output.status.success());
    assert_eq!(output.stdout, plain.stdout);
}

#[test]
fn requests_that_are_not_requests_are_refused() {
    let rig = Rig::new(256);
    let _owner = owner(&rig, 64, &[]);
    let guest = Loopback::start(&rig, "a");
    assert!(guest.restart(-1).expect_err("a negative number").contains("is not a request"));
    let mut program = start(&rig, &guest, &["live", "--mib", "4"]);
    program.steps(1);
    assert_eq!(program.end(), "held 2");
}
