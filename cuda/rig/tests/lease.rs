//! Tests limits that apply while a program runs. They must end with the program, regardless of how the program and the
//! daemon exit.

mod support;

use std::io::{BufRead, BufReader};
use std::process::{Child, Command, Stdio};

use serde_json::Value;
use support::Rig;
use support::daemon::*;

/// Script that exits when its input is closed.
const WAITS: &str = "echo up; read line; exit 7";

/// Returns a command that runs a shell script as a program of tenant `a`, with additional options of `run`.
fn script(rig: &Rig, more: &[&str], script: &str) -> Command {
    let library = rig.folder.path().join("shim").display().to_string();
    let mut command = ctl_command(rig, &["run", "--tenant", "a", "--library", &library]);
    command.args(more).args(["--", "sh", "-c", script]);
    command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    command
}

/// Starts a script, and waits until it has printed a line.
fn started(rig: &Rig, more: &[&str], text: &str) -> Child {
    let mut child = script(rig, more, text).spawn().expect("starts");
    let mut line = String::new();
    BufReader::new(child.stdout.as_mut().expect("piped")).read_line(&mut line).expect("a line");
    assert_eq!(line, "up\n");
    child
}

/// Returns those limits of a tenant that the tests change.
fn limits(tenant: &Value) -> [Value; 3] {
    [&tenant["memory"]["quota_mib"], &tenant["memory"]["weight"], &tenant["time"]["weight"]].map(Clone::clone)
}

#[test]
fn run_limits_of_killed_program_are_restored() {
    let rig = pair();
    let daemon = Daemon::start(&rig);
    good(&rig, &["tenant", "set", "a", "--quota-mib", "48"]);
    let before = limits(&json(&rig, &["tenant", "show", "a"]));
    let mut running = started(&rig, &["--memory", "32M", "--weight", "70"], WAITS);
    let held = json(&rig, &["tenant", "show", "a"]);
    assert_eq!(limits(&held), [32, 70, 70].map(Value::from));
    running.kill().expect("killed");
    running.wait().expect("ends");
    until(&rig, "a", "its limits are restored", |a| limits(a) == before);
    let events = json(&rig, &["events", "--kind", "changed", "--tenant", "a"]);
    let last = events["events"].as_array().expect("a list").last().expect("one").clone();
    let text = last["text"].as_str().expect("a text");
    assert!(text.contains("memory.quota_mib = 48") && text.ends_with("has exited"), "{last}");
    assert_eq!(last["author"]["kind"], "daemon");
    // The next daemon does not apply the run's limits again.
    daemon.kill();
    let _next = Daemon::start(&rig);
    assert_eq!(limits(&json(&rig, &["tenant", "show", "a"])), before);
}

#[test]
fn run_limits_survive_the_daemon_but_not_the_program() {
    let rig = pair();
    let daemon = Daemon::start(&rig);
    let before = limits(&json(&rig, &["tenant", "show", "a"]));
    let mut running = started(&rig, &["--memory", "32M"], WAITS);
    daemon.kill();
    let daemon = Daemon::start(&rig);
    assert_eq!(json(&rig, &["tenant", "show", "a"])["memory"]["quota_mib"], 32, "the program still runs");
    drop(running.stdin.take());
    assert_eq!(running.wait().expect("ends").code(), Some(7));
    until(&rig, "a", "its limits are restored", |a| limits(a) == before);

    // The program exits while no daemon runs.
    let mut running = started(&rig, &["--memory", "16M"], WAITS);
    daemon.kill();
    running.kill().expect("killed");
    running.wait().expect("ends");
    let _daemon = Daemon::start(&rig);
    assert_eq!(limits(&json(&rig, &["tenant", "show", "a"])), before);
}

#[test]
fn run_with_memory_and_weight_restores_both_afterwards() {
    let rig = pair();
    let _daemon = Daemon::start(&rig);
    good(&rig, &["tenant", "set", "a", "--quota-mib", "48"]);
    let before = limits(&json(&rig, &["tenant", "show", "a"]));
    let mut running = started(&rig, &["--memory", "32M", "--weight", "70"], WAITS);
    // A second run is rejected, because it would later restore the first run's limits.
    let second = script(&rig, &["--memory", "16M"], "true").output().expect("starts");
    let error = String::from_utf8_lossy(&second.stderr).into_owned();
    assert_eq!(second.status.code(), Some(4), "{error}");
    let expected = format!("process {} already holds a lease on limits of tenant `a`", running.id());
    assert!(error.contains(&expected), "{error}");
    drop(running.stdin.take());
    assert_eq!(running.wait().expect("ends").code(), Some(7));
    until(&rig, "a", "its limits are restored", |a| limits(a) == before);

    // A value that an operator sets meanwhile is kept, and a signal is forwarded to the program.
    let trap = "trap 'exit 9' TERM; echo up; while :; do sleep 0.1; done";
    let mut running = started(&rig, &["--memory", "32M", "--weight", "60"], trap);
    good(&rig, &["tenant", "set", "a", "--quota-mib", "40"]);
    let pid = rustix::process::Pid::from_child(&running);
    rustix::process::kill_process(pid, rustix::process::Signal::TERM).expect("sent");
    assert_eq!(running.wait().expect("ends").code(), Some(9));
    until(&rig, "a", "only the other limits are restored", |a| {
        limits(a) == [Value::from(40), before[1].clone(), before[2].clone()]
    });
    // If a program cannot be started, its limits are restored immediately.
    let library = rig.folder.path().join("shim").display().to_string();
    bad(&rig, 1, &["run", "--tenant", "a", "--library", &library, "--memory", "16M", "--", "/no/such/program"]);
    until(&rig, "a", "the limits are restored", |a| limits(a)[0] == 40);
}
