//! Runs a daemon with the fake driver's cards as a process, and sends requests to it.

use std::io::{Read as _, Write as _};
use std::os::unix::net::{UnixDatagram, UnixStream};
use std::process::{Child, Command, Output};
use std::time::Duration;

use super::{Program, Rig, built};

/// A daemon that is ready to serve.
pub struct Daemon(pub Child);

impl Daemon {
    pub fn start(rig: &Rig) -> Self {
        let notify = rig.folder.path().join("notify");
        let _ = std::fs::remove_file(&notify);
        let ready = UnixDatagram::bind(&notify).expect("bound");
        // TIMEOUT: only a failing test waits this long.
        ready.set_read_timeout(Some(Duration::from_secs(60))).expect("set");
        let mut command = rig.command(built("mediatord"), "plain");
        command.arg("--config").arg(rig.folder.path().join("m.toml")).env("NOTIFY_SOCKET", &notify);
        let daemon = Self(command.spawn().expect("starts"));
        let mut text = [0; 64];
        let length = ready.recv(&mut text).expect("the daemon reports that it is ready");
        assert!(text[..length].starts_with(b"READY=1"));
        daemon
    }

    pub fn kill(mut self) {
        self.0.kill().expect("killed");
        self.0.wait().expect("ends");
    }
}

impl Daemon {
    /// Returns the process IDs of the owners in the order of their start. Before any restart, this is the order of the
    /// configured cards.
    pub fn owners(&self) -> Vec<String> {
        let children = format!("/proc/{0}/task/{0}/children", self.0.id());
        let children = std::fs::read_to_string(children).expect("readable");
        children.split_whitespace().map(str::to_owned).collect()
    }
}

/// Returns the running owners of a daemon, sorted by their process IDs. Any thread of the daemon may have started them.
pub fn owner_pids(daemon: u32) -> Vec<i32> {
    let tasks = std::fs::read_dir(format!("/proc/{daemon}/task")).expect("it runs").flatten();
    let children = tasks.filter_map(|task| std::fs::read_to_string(task.path().join("children")).ok());
    let children: Vec<String> = children.collect();
    let pids = children.iter().flat_map(|list| list.split_whitespace()).filter_map(|pid| pid.parse().ok());
    let is_owner = |pid: &i32| {
        let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
        stat.contains("(cuda-owner)") && !stat.contains(") Z ")
    };
    let mut owners: Vec<i32> = pids.filter(is_owner).collect();
    owners.sort_unstable();
    owners
}

/// Sends a signal. After SIGSTOP, waits until every thread has stopped, because threads handle the signal with a delay.
pub fn signal(which: &str, pid: &str) {
    assert!(Command::new("kill").args([which, pid]).status().expect("starts").success());
    // TIMEOUT: only a failing test waits this long.
    for _ in 0..6000 {
        if which != "-STOP" || is_stopped(pid) {
            return;
        }
        std::thread::sleep(Duration::from_millis(10));
    }
    panic!("process {pid} does not stop");
}

/// Returns true if all threads of a process are stopped, or if it has no threads.
fn is_stopped(pid: &str) -> bool {
    let tasks = std::fs::read_dir(format!("/proc/{pid}/task")).into_iter().flatten().flatten();
    tasks.filter_map(|task| std::fs::read_to_string(task.path().join("stat")).ok()).all(|stat| {
        let state = stat.rsplit_once(") ").map(|(_, state)| state.chars().next());
        matches!(state, Some(Some('T' | 't' | 'Z' | 'X')))
    })
}

impl Drop for Daemon {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Returns a `[[card]]` table for the fake driver.
pub fn card(rig: &Rig, name: &str, more: &str) -> String {
    format!(
        "[[card]]\nname = \"{name}\"\nkind = \"cuda\"\nvram_mib = 64\nmemory.host_mib = 128\nmemory.quanta.mode = \"off\"\n\
         cuda.driver = \"{}\"\ncuda.chunk_mib = 2\ncuda.host_ready_mib = 4\n{more}",
        rig.fake.display()
    )
}

/// Returns a `[[tenant]]` table.
pub fn tenant(name: &str, card: &str, more: &str) -> String {
    format!("[[tenant]]\nname = \"{name}\"\ncard = \"{card}\"\nvram_mib = 64\n{more}")
}

/// Creates a rig with a daemon configuration that contains `tables`.
pub fn rig(tables: impl FnOnce(&Rig) -> String) -> Rig {
    let rig = Rig::new(512);
    let folder = rig.folder.path().display().to_string();
    let text = format!(
        "[daemon]\nadmin_socket = \"{folder}/admin.sock\"\nsocket_dir = \"{folder}\"\nstate_dir = \"{folder}/state\"\n{}",
        tables(&rig)
    );
    std::fs::write(rig.folder.path().join("m.toml"), text).expect("written");
    rig
}

/// Creates a rig with two tenants, `a` and `b`, on one card.
pub fn pair() -> Rig {
    rig(|rig| card(rig, "fake", "") + &tenant("a", "fake", "") + &tenant("b", "fake", "time.weight = 300\n"))
}

/// Runs a command that must succeed. Returns its output.
pub fn good(rig: &Rig, arguments: &[&str]) -> String {
    let output = ctl(rig, arguments);
    assert!(output.status.success(), "{arguments:?}: {}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8_lossy(&output.stdout).into_owned()
}

/// Runs a command that must fail with the exit code `code`. Returns its error output.
pub fn bad(rig: &Rig, code: i32, arguments: &[&str]) -> String {
    let output = ctl(rig, arguments);
    let text = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(output.status.code(), Some(code), "{arguments:?}: {text}");
    text
}

pub fn ctl_command(rig: &Rig, arguments: &[&str]) -> Command {
    let mut command = rig.command(built("mediatorctl"), "plain");
    command.arg("--socket").arg(rig.folder.path().join("admin.sock")).args(arguments);
    command
}

pub fn ctl(rig: &Rig, arguments: &[&str]) -> Output {
    ctl_command(rig, arguments).output().expect("starts")
}

pub fn json(rig: &Rig, arguments: &[&str]) -> serde_json::Value {
    let output = ctl(rig, &[&["--json"], arguments].concat());
    assert!(output.status.success(), "{arguments:?}: {}", String::from_utf8_lossy(&output.stderr));
    serde_json::from_slice(&output.stdout).expect("JSON")
}

/// Starts a program through `mediatorctl run`.
pub fn run(rig: &Rig, tenant: &str, more: &[&str], arguments: &[&str]) -> Program {
    let mut command = rig.command(built("mediatorctl"), "plain");
    command.env(cuda_protocol::DRIVER_VARIABLE, &rig.fake);
    command.arg("--socket").arg(rig.folder.path().join("admin.sock")).args(["run", "--tenant", tenant]).args(more);
    command.arg("--library").arg(rig.folder.path().join("shim")).arg("--").arg(super::PROGRAM).args(arguments);
    Program::start(&mut command)
}

/// Polls a tenant's state until `done` returns true.
pub fn until(rig: &Rig, tenant: &str, what: &str, done: impl Fn(&serde_json::Value) -> bool) {
    // TIMEOUT: only a failing test waits this long.
    for _ in 0..600 {
        if done(&json(rig, &["tenant", "show", tenant])) {
            return;
        }
        std::thread::sleep(Duration::from_millis(100));
    }
    panic!("{what}: {}", json(rig, &["tenant", "show", tenant]));
}

pub fn mib(tenant: &serde_json::Value, key: &str) -> u64 {
    tenant[key].as_u64().expect("a number") >> 20
}

pub fn programs(tenant: &serde_json::Value) -> usize {
    tenant["programs"].as_array().expect("a list").len()
}

pub fn get(rig: &Rig, path: &str) -> String {
    let mut stream = UnixStream::connect(rig.folder.path().join("admin.sock")).expect("connects");
    write!(stream, "GET {path} HTTP/1.0\r\nhost: mediatord\r\n\r\n").expect("written");
    let mut text = String::new();
    stream.read_to_string(&mut text).expect("read");
    text
}
