//! A daemon's directory, and the daemon as a process.
#![allow(dead_code, reason = "each test file uses only a part")]

pub mod guest;

use std::fs;
use std::os::unix::net::UnixDatagram;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output};
use std::time::Duration;

use rig::service_manager::{Heard, ServiceManager};
use rustix::process::{Pid, Signal, kill_process};
use tempfile::TempDir;

pub const DAEMON: &str = env!("CARGO_BIN_EXE_mediatord");
/// Timeout of a wait, longer than any successful wait.
pub const WAIT_TIMEOUT: Duration = Duration::from_secs(60);

/// Returns the path of mediatorctl. It is an example of this package, which cargo builds together with the tests unless
/// `cargo test --test` selects a single one.
pub fn ctl() -> PathBuf {
    let tool = Path::new(DAEMON).with_file_name("examples").join("mediatorctl");
    assert!(tool.exists(), "{} is missing, build it with: cargo build --package mediatord --examples", tool.display());
    tool
}

/// A directory with a configuration file, and with the daemon's sockets.
pub struct Place(TempDir);

impl Place {
    pub fn new(more: &str) -> Self {
        let place = Self(tempfile::tempdir().unwrap());
        let folder = place.0.path().display().to_string();
        let text = format!("[daemon]\nadmin_socket = \"{folder}/admin.sock\"\nsocket_dir = \"{folder}\"\n{more}");
        fs::write(place.path("m.toml"), text).unwrap();
        place
    }

    /// Like [`Self::new`], but with a state directory `kept`.
    pub fn with_state(more: &str) -> Self {
        let place = Self::new("");
        let folder = place.0.path().display().to_string();
        let text = fs::read_to_string(place.path("m.toml")).unwrap();
        fs::write(place.path("m.toml"), format!("{text}state_dir = \"{folder}/kept\"\n{more}")).unwrap();
        place
    }

    /// Runs a `mediatorctl` command that must succeed, and parses its JSON output.
    pub fn ctl_json(&self, arguments: &[&str]) -> serde_json::Value {
        let output = self.ctl(&[&["--json"], arguments].concat());
        assert!(output.status.success(), "{arguments:?}: {}", String::from_utf8_lossy(&output.stderr));
        serde_json::from_slice(&output.stdout).unwrap()
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    pub fn daemon(&self) -> Command {
        let mut command = Command::new(DAEMON);
        command.arg("--config").arg(self.path("m.toml"));
        for variable in ["NOTIFY_SOCKET", "LISTEN_FDS", "FDSTORE", "WATCHDOG_USEC", "WATCHDOG_PID"] {
            command.env_remove(variable);
        }
        command.env("MEDIATORD_LOG", "info");
        command
    }

    pub fn ctl(&self, arguments: &[&str]) -> Output {
        Command::new(ctl()).arg("--socket").arg(self.path("admin.sock")).args(arguments).output().unwrap()
    }

    /// Starts the daemon, and waits for its readiness like a service manager.
    pub fn start(&self, command: &mut Command) -> Running {
        let _ = fs::remove_file(self.path("notify"));
        let notify = UnixDatagram::bind(self.path("notify")).unwrap();
        notify.set_read_timeout(Some(WAIT_TIMEOUT)).unwrap();
        let child = command
            .env("NOTIFY_SOCKET", self.path("notify"))
            .stderr(fs::File::create(self.path("log")).unwrap())
            .spawn()
            .unwrap();
        let running = Running { child, notify };
        assert_eq!(running.notified(), "READY=1", "{}", fs::read_to_string(self.path("log")).unwrap());
        running
    }
}

/// A daemon that runs until dropped.
pub struct Running {
    pub child: Child,
    notify: UnixDatagram,
}

impl Running {
    pub fn notified(&self) -> String {
        let mut text = [0; 256];
        let len = self.notify.recv(&mut text).unwrap();
        String::from_utf8_lossy(&text[..len]).trim().to_owned()
    }

    pub fn end(mut self, signal: Signal) {
        kill_process(Pid::from_child(&self.child), signal).unwrap();
        assert_eq!(self.notified(), "STOPPING=1");
        assert!(self.child.wait().unwrap().success());
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// A daemon that is killed at the end of a test, even if the test fails.
pub struct Service(pub Child);

impl Drop for Service {
    fn drop(&mut self) {
        // The process may have exited.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// A service manager for the daemon in a directory.
pub struct Manager<'a> {
    pub place: &'a Place,
    pub manager: ServiceManager,
}

impl<'a> Manager<'a> {
    pub fn new(place: &'a Place) -> Self {
        Self { place, manager: ServiceManager::new(&place.path("notify")).unwrap() }
    }

    pub fn spawn(&self) -> Service {
        let mut command = self.manager.command(Path::new(DAEMON)).unwrap();
        command.arg("--config").arg(self.place.path("m.toml")).env("WATCHDOG_USEC", "300000");
        Service(command.stderr(fs::File::create(self.place.path("log")).unwrap()).spawn().unwrap())
    }

    pub fn start(&self) -> Service {
        let daemon = self.spawn();
        self.until("READY=1");
        daemon
    }

    /// Waits until the daemon notifies the manager with this line.
    #[track_caller]
    pub fn until(&self, line: &str) {
        self.wait(|heard| heard.take(line));
    }

    /// Waits until the descriptor store contains exactly the descriptors with these names, which must be sorted.
    #[track_caller]
    pub fn until_kept(&self, names: &[&str]) {
        self.wait(|heard| heard.keeps(names).then_some(()));
    }

    #[track_caller]
    pub fn wait<T>(&self, look: impl FnMut(&mut Heard) -> Option<T>) -> T {
        self.manager.wait(WAIT_TIMEOUT, look).unwrap()
    }
}
