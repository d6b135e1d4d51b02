//! Programs as tenants of a daemon, on the fake driver: `mediatord`, `mediatorctl`, the owner and programs as processes.

mod support;

use std::io::{Read as _, Write as _};
use std::os::unix::net::{UnixDatagram, UnixStream};
use std::process::{Child, Output};
use std::time::Duration;

use support::{Program, Rig, built};

struct Daemon(Child);

impl Daemon {
    fn start(rig: &Rig) -> Self {
        let notify = rig.folder.path().join("notify");
        let _ = std::fs::remove_file(&notify);
        let ready = UnixDatagram::bind(&notify).expect("bound");
        // TIMEOUT: only a failing test waits so long.
        ready.set_read_timeout(Some(Duration::from_secs(60))).expect("set");
        let mut command = rig.command(built("mediatord"), "plain");
        command.arg("--config").arg(rig.folder.path().join("m.toml")).env("NOTIFY_SOCKET", &notify);
        let daemon = Self(command.spawn().expect("starts"));
        let mut text = [0; 64];
        let length = ready.recv(&mut text).expect("the daemon says that it is ready");
        assert!(text[..length].starts_with(b"READY=1"));
        daemon
    }

    fn kill(mut self) {
        self.0.kill().expect("killed");
        self.0.wait().expect("ends");
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn rig() -> Rig {
    let rig = Rig::new(256);
    let folder = rig.folder.path().display().to_string();
    let tenant =
        |name: &str, more: &str| format!("[[tenant]]\nname = \"{name}\"\ncard = \"fake\"\nvram_mib = 64\n{more}");
    let text = format!(
        "[daemon]\nadmin_socket = \"{folder}/admin.sock\"\nsocket_dir = \"{folder}\"\n\
         [[card]]\nname = \"fake\"\nkind = \"cuda\"\nvram_mib = 64\nmemory.host_mib = 128\nmemory.quanta.mode = \"off\"\n\
         cuda.driver = \"{}\"\ncuda.chunk_mib = 2\ncuda.host_ready_mib = 4\n{}{}",
        rig.fake.display(),
        tenant("a", ""),
        tenant("b", "time.weight = 300\n"),
    );
    std::fs::write(rig.folder.path().join("m.toml"), text).expect("written");
    rig
}

fn ctl(rig: &Rig, arguments: &[&str]) -> Output {
    let mut command = rig.command(built("mediatorctl"), "plain");
    command.arg("--socket").arg(rig.folder.path().join("admin.sock")).args(arguments).output().expect("starts")
}

fn json(rig: &Rig, arguments: &[&str]) -> serde_json::Value {
    let output = ctl(rig, &[&["--json"], arguments].concat());
    assert!(output.status.success(), "{arguments:?}: {}", String::from_utf8_lossy(&output.stderr));
    serde_json::from_slice(&output.stdout).expect("JSON")
}

/// Starts the program by `mediatorctl run`.
fn run(rig: &Rig, tenant: &str, more: &[&str], arguments: &[&str]) -> Program {
    let mut command = rig.command(built("mediatorctl"), "plain");
    command.env(cuda_protocol::DRIVER_VARIABLE, &rig.fake);
    command.arg("--socket").arg(rig.folder.path().join("admin.sock")).args(["run", "--tenant", tenant]).args(more);
    command.arg("--library").arg(rig.folder.path().join("front")).arg("--").arg(support::PROGRAM).args(arguments);
    Program::start(&mut command)
}

/// Looks at a tenant until it is as expected.
fn until(rig: &Rig, tenant: &str, what: &str, done: impl Fn(&serde_json::Value) -> bool) {
    // TIMEOUT: only a failing test waits so long.
    for _ in 0..600 {
        if done(&json(rig, &["tenant", "show", tenant])) {
            return;
        }
        std::thread::sleep(Duration::from_millis(100));
    }
    panic!("{what}: {}", json(rig, &["tenant", "show", tenant]));
}

fn mib(tenant: &serde_json::Value, key: &str) -> u64 {
    tenant[key].as_u64().expect("a number") >> 20
}

fn programs(tenant: &serde_json::Value) -> usize {
    tenant["programs"].as_array().expect("a list").len()
}

fn get(rig: &Rig, path: &str) -> String {
    let mut stream = UnixStream::connect(rig.folder.path().join("admin.sock")).expect("connects");
    write!(stream, "GET {path} HTTP/1.0\r\nhost: mediatord\r\n\r\n").expect("written");
    let mut text = String::new();
    stream.read_to_string(&mut text).expect("read");
    text
}

#[test]
fn two_programs_share_a_card_of_a_daemon_and_outlive_it() {
    let rig = rig();
    let daemon = Daemon::start(&rig);
    let mut one = run(&rig, "a", &[], &["live", "--mib", "32"]);
    let mut two = run(&rig, "b", &["--weight", "200"], &["live", "--mib", "24"]);
    for program in [&mut one, &mut two] {
        program.steps(3);
    }
    until(&rig, "b", "its program is seen, with its weight", |b| programs(b) == 1 && b["time"]["weight"] == 200);

    // The same commands as for virtual machines change what tenants may have, while they work.
    let set = ctl(&rig, &["memory", "set-quota", "a", "16"]);
    assert!(set.status.success(), "{}", String::from_utf8_lossy(&set.stderr));
    until(&rig, "a", "what is over the quota has gone to host memory", |a| {
        mib(a, "on_card_bytes") <= 16 && mib(a, "in_host_bytes") >= 16
    });
    assert!(ctl(&rig, &["sched", "set-vm", "a", "--weight", "50"]).status.success());
    assert_eq!(json(&rig, &["tenant", "show", "a"])["time"]["weight"], 50);
    assert_eq!(ctl(&rig, &["tenant", "set", "a", "--quota-mib", "15"]).status.code(), Some(2), "no whole chunks");
    assert_eq!(ctl(&rig, &["tenant", "show", "z"]).status.code(), Some(3));
    for (arguments, shown) in [(["top", "--once"], "b"), (["sched", "show"], "b"), (["memory", "show"], "b")] {
        let output = ctl(&rig, &arguments);
        let text = String::from_utf8_lossy(&output.stdout).into_owned();
        assert!(output.status.success() && text.contains(shown), "{arguments:?}: {text}");
    }
    let metrics = get(&rig, "/metrics");
    assert!(metrics.contains("gpu_mediator_tenant_programs{tenant=\"a\",card=\"fake\"} 1"), "{metrics}");

    // The daemon is killed, its owner ends with it, and the next ones take the programs over.
    daemon.kill();
    for program in [&mut one, &mut two] {
        program.steps(10);
    }
    let daemon = Daemon::start(&rig);
    for program in [&mut one, &mut two] {
        program.grow();
    }
    until(&rig, "a", "its memory is counted again", |a| mib(a, "on_card_bytes") + mib(a, "in_host_bytes") >= 36);

    // A program that is killed leaves nothing behind.
    one.kill();
    until(&rig, "a", "what it had is free", |a| {
        programs(a) == 0 && mib(a, "on_card_bytes") + mib(a, "in_host_bytes") == 0
    });
    assert_eq!(two.end(), "held 14");
    drop(daemon);
    rig.until_free();
}

#[test]
fn an_owner_that_is_killed_is_started_again() {
    let rig = rig();
    let _daemon = Daemon::start(&rig);
    let mut program = run(&rig, "a", &["--memory", "32M"], &["live", "--mib", "8"]);
    program.steps(3);
    // The owner's process: the daemon's only child.
    let children = std::fs::read_to_string(format!("/proc/{0}/task/{0}/children", _daemon.0.id())).expect("readable");
    let owner = children.split_whitespace().next().expect("the owner runs").to_owned();
    assert!(std::process::Command::new("kill").args(["-9", &owner]).status().expect("starts").success());
    program.grow();
    until(&rig, "a", "it is served, with what was set", |a| {
        a["served"] == true && programs(a) == 1 && a["memory"]["quota_mib"] == 32
    });
    assert_eq!(program.end(), "held 6");
}

#[test]
fn who_may_use_a_tenants_socket_is_that_tenant_and_no_other() {
    let rig = rig();
    let _daemon = Daemon::start(&rig);
    // The name that a program gives does not matter beside the socket that it comes by.
    let mut command = rig.command(support::PROGRAM, "front");
    command.env(cuda_protocol::TENANT_VARIABLE, "b");
    let output = command.env(cuda_protocol::SOCKET_VARIABLE, rig.folder.path().join("a.cuda")).arg("look").output();
    let output = output.expect("starts");
    assert!(!output.status.success());
    assert!(String::from_utf8_lossy(&output.stderr).contains("Denied"), "{output:?}");
}
