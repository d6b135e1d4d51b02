//! The process of a control daemon, and the commands sent to it.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::{self, Read as _, Seek as _, Write as _};
use std::os::fd::OwnedFd;
use std::os::unix::fs::DirBuilderExt as _;
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::{Gid, MemfdFlags, Uid, chown, memfd_create};
use rustix::process::{Pid, PidfdFlags, Signal, geteuid, pidfd_open, pidfd_send_signal};

/// Time limit for the reply to a command.
// TIMEOUT: the daemon replies within milliseconds.
const COMMAND_TIMEOUT: Duration = Duration::from_secs(5);
/// Time limit for the reply to a daemon's first command.
// TIMEOUT: the driver's initialization takes seconds on a host with many cards.
const START_TIMEOUT: Duration = Duration::from_secs(20);
/// Interval between checks of a process that is starting or exiting.
const CHECK_INTERVAL: Duration = Duration::from_millis(5);
/// Maximum length of a socket path (`sun_path` in unix(7)) in bytes, excluding the terminating NUL.
const MAX_SOCKET_PATH: usize = 107;
/// Length in bytes of a daemon's longest socket name, including the separator.
const SOCKET_NAME: usize = 24;
/// Maximum size of a reply in bytes.
const MAX_ANSWER: u64 = 60 << 10;
/// Name of the file with the daemon's process ID and start time.
const RECORD: &str = "control.pid";
/// Name of the file with the daemon's own output.
const OUTPUT: &str = "output";
/// Name of the program from util-linux that starts the daemon as another user.
const SETPRIV: &str = "setpriv";
/// Group ID for a user that is not in the host's user database.
const NO_GROUP: u32 = 65_534;

/// Configuration of a group's daemon.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MpsConfig {
    /// Path of `nvidia-cuda-mps-control`.
    pub program: PathBuf,
    /// Folder of this daemon's files.
    pub folder: PathBuf,
    /// The card, as a value of `CUDA_VISIBLE_DEVICES`.
    pub card: String,
    /// User ID of the server and its clients, if known.
    pub user: Option<u32>,
}

/// Returns the pipe folder of a daemon, which is the value of `CUDA_MPS_PIPE_DIRECTORY` for programs.
#[must_use]
pub fn pipe_folder(folder: &Path) -> PathBuf {
    folder.join("pipes")
}

/// Reason why a daemon cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum ControlError {
    /// The program does not exist.
    #[error("{} does not exist: install the package with NVIDIA's MPS, or set the program's path in `cuda.mps_control`", .0.display())]
    Missing(PathBuf),
    /// The path of the daemon's sockets is too long.
    #[error("the path {} is too long for sockets by {excess} bytes: choose a shorter group name or a shorter `socket_dir`", path.display())]
    TooLong {
        /// Folder of the sockets.
        path: PathBuf,
        /// Excess length in bytes.
        excess: usize,
    },
    /// A folder of the daemon cannot be created.
    #[error("the folder {} cannot be created: {source}", path.display())]
    Folder {
        /// Path of the folder.
        path: PathBuf,
        /// Underlying error.
        source: io::Error,
    },
    /// The ownership of a daemon's folder cannot be changed to the clients' user.
    #[error("{} cannot belong to user {user}: {source}; a daemon that is not root needs CAP_CHOWN, CAP_SETUID and CAP_SETGID", path.display())]
    User {
        /// Path of the folder.
        path: PathBuf,
        /// User ID of the clients.
        user: u32,
        /// Underlying error.
        source: io::Error,
    },
    /// A program cannot be started.
    #[error("{program} cannot be started: {source}")]
    Start {
        /// Name of the program.
        program: String,
        /// Underlying error.
        source: io::Error,
    },
    /// The daemon has exited.
    #[error("the MPS control daemon exited: {0}")]
    Ended(String),
    /// The daemon rejected a command.
    #[error("the MPS control daemon rejected `{command}`: {answer}")]
    Refused {
        /// The rejected command.
        command: String,
        /// The daemon's reply.
        answer: String,
    },
    /// The daemon does not reply.
    #[error("the MPS control daemon did not reply to `{command}` within {} s", limit.as_secs())]
    Late {
        /// The command without a reply.
        command: String,
        /// Time limit for the reply.
        limit: Duration,
    },
}

/// A running control daemon.
pub(crate) struct Control {
    config: MpsConfig,
    /// Child process, or `None` if an earlier owner started the daemon.
    child: Option<Child>,
    pidfd: OwnedFd,
}

/// State of one server: its clients, and a flag that is set if one of them has caused a fault.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct ServerState {
    pub(crate) clients: Vec<u32>,
    pub(crate) faulty: bool,
}

impl Control {
    /// Returns the daemon of an earlier owner, or starts a new one. The returned flag is set if the daemon is new.
    pub(crate) fn open(config: &MpsConfig) -> Result<(Self, bool), ControlError> {
        if let Some(found) = Self::find(config) {
            return Ok((found, false));
        }
        Ok((Self::start(config)?, true))
    }

    /// Returns the daemon of an earlier owner. If the daemon does not reply, kills it and returns `None`.
    pub(crate) fn find(config: &MpsConfig) -> Option<Self> {
        let record = fs::read_to_string(config.folder.join(RECORD)).ok()?;
        let (pid, start) = record.trim().split_once(' ')?;
        let number = pid.parse().ok().and_then(Pid::from_raw)?;
        let pidfd = pidfd_open(number, PidfdFlags::empty()).ok()?;
        // The process ID is not reused while the descriptor is open, so this is the start time of the same process.
        if start_of(pid).as_deref() != Some(start) {
            return None;
        }
        let found = Self { config: config.clone(), child: None, pidfd };
        match found.command("get_server_list") {
            Ok(_) => Some(found),
            Err(error) => {
                tracing::warn!(%error, pid, "killing the MPS control daemon of an earlier owner");
                found.kill();
                None
            }
        }
    }

    fn start(config: &MpsConfig) -> Result<Self, ControlError> {
        if !config.program.exists() {
            return Err(ControlError::Missing(config.program.clone()));
        }
        let log = config.folder.join("log");
        let pipes = pipe_folder(&config.folder);
        let excess = (pipes.as_os_str().len() + SOCKET_NAME).saturating_sub(MAX_SOCKET_PATH);
        if excess > 0 {
            return Err(ControlError::TooLong { path: pipes, excess });
        }
        // A program that finds the pipe of an exited daemon cannot initialize the driver.
        let _ = fs::remove_dir_all(&pipes);
        for path in [&log, &pipes] {
            let failed = |source| ControlError::Folder { path: path.clone(), source };
            let root_or_known = geteuid().is_root() || config.user.is_some();
            // Programs of users that this daemon cannot serve must not find it, so that they run without MPS.
            let mode = if root_or_known { 0o755 } else { 0o700 };
            fs::DirBuilder::new().recursive(true).mode(mode).create(path).map_err(failed)?;
            if let Some(user) = config.other_user() {
                let group = Gid::from_raw(group_of(user));
                let user = Uid::from_raw(user);
                let failed = |source: rustix::io::Errno| ControlError::User {
                    path: path.clone(),
                    user: user.as_raw(),
                    source: source.into(),
                };
                chown(path, Some(user), Some(group)).map_err(failed)?;
            }
        }
        let output = config.folder.join(OUTPUT);
        let failed = |source| ControlError::Folder { path: output.clone(), source };
        let file = File::create(&output).map_err(failed)?;
        let second = file.try_clone().map_err(failed)?;
        let mut command = config.program_as_user();
        // The daemon must not receive signals from the owner's terminal.
        command.arg("-f").process_group(0).stdin(Stdio::null()).stdout(file).stderr(second);
        let name = || config.program.display().to_string();
        let failed = |source| ControlError::Start { program: name(), source };
        let mut child = command.spawn().map_err(failed)?;
        let number = i32::try_from(child.id()).ok().and_then(Pid::from_raw);
        let pidfd = number.ok_or(rustix::io::Errno::INVAL).and_then(|pid| pidfd_open(pid, PidfdFlags::empty()));
        let pidfd = match pidfd {
            Ok(pidfd) => pidfd,
            Err(error) => {
                let _ = child.kill();
                let _ = child.wait();
                return Err(failed(error.into()));
            }
        };
        let pid = child.id().to_string();
        let record = format!("{pid} {}", start_of(&pid).unwrap_or_default());
        let mut control = Self { config: config.clone(), child: Some(child), pidfd };
        if let Err(source) = fs::write(config.folder.join(RECORD), record) {
            control.kill();
            return Err(ControlError::Folder { path: config.folder.clone(), source });
        }
        let begin = Instant::now();
        loop {
            if let Some(why) = control.ended() {
                return Err(ControlError::Ended(why));
            }
            match control.command("get_server_list") {
                Ok(_) => return Ok(control),
                Err(error) if begin.elapsed() > START_TIMEOUT => {
                    control.kill();
                    return Err(error);
                }
                Err(_) => std::thread::sleep(CHECK_INTERVAL * 4),
            }
        }
    }

    /// Returns a description of the daemon's exit if it has exited.
    pub(crate) fn ended(&mut self) -> Option<String> {
        let status = match &mut self.child {
            Some(child) => child.try_wait().ok().flatten()?.to_string(),
            None => is_ended(&self.pidfd).then(|| "its process has exited".to_owned())?,
        };
        let said = fs::read(self.config.folder.join(OUTPUT)).unwrap_or_default();
        let said = String::from_utf8_lossy(&said);
        let last = said.lines().rev().find(|line| !line.trim().is_empty()).unwrap_or_default();
        let last: String = last.chars().filter(|c| !c.is_control()).take(200).collect();
        Some(if last.is_empty() { status } else { format!("{status}, its last line: {last}") })
    }

    /// Kills the daemon, which terminates its servers.
    pub(crate) fn kill(mut self) {
        // The daemon may already have exited.
        let sent = pidfd_send_signal(&self.pidfd, Signal::KILL);
        let begin = Instant::now();
        while self.ended().is_none() {
            // The signal fails if this process may not signal processes of the daemon's user.
            if begin.elapsed() > COMMAND_TIMEOUT {
                tracing::error!(?sent, folder = %self.config.folder.display(), "the MPS control daemon does not exit");
                break;
            }
            std::thread::sleep(CHECK_INTERVAL);
        }
        self.forget();
    }

    /// Shuts down the daemon, whose servers must not have clients.
    pub(crate) fn quit(mut self) {
        if self.command("quit").is_ok() {
            let begin = Instant::now();
            while begin.elapsed() < COMMAND_TIMEOUT {
                if self.ended().is_some() {
                    return self.forget();
                }
                std::thread::sleep(CHECK_INTERVAL);
            }
        }
        self.kill();
    }

    /// Removes the daemon's record and pipes, so that programs that start later run without MPS.
    fn forget(&self) {
        let _ = fs::remove_file(self.config.folder.join(RECORD));
        let _ = fs::remove_dir_all(pipe_folder(&self.config.folder));
    }

    /// Removes the record and pipes of an exited daemon.
    pub(crate) fn bury(self) {
        self.forget();
    }

    /// Starts a server for the clients' user, or for this process's user. If the clients' user is unknown and this
    /// process runs as root, does nothing: the daemon then serves any user.
    pub(crate) fn start_server(&self) -> Result<(), ControlError> {
        let own = geteuid().as_raw();
        let user = self.config.user.or((own != 0).then_some(own));
        user.map_or(Ok(()), |user| self.command(&format!("start_server -uid {user}")).map(drop))
    }

    /// Returns the state of all servers.
    pub(crate) fn servers(&self) -> Result<BTreeMap<u32, ServerState>, ControlError> {
        let mut servers = BTreeMap::new();
        for server in numbers(&self.command("get_server_list")?) {
            let clients = numbers(&self.command(&format!("get_client_list {server}"))?);
            let status = self.command(&format!("get_server_status {server}"))?;
            servers.insert(server, ServerState { clients, faulty: status.contains("FAULT") });
        }
        Ok(servers)
    }

    /// Terminates a client's work on the card. The client's later calls fail.
    pub(crate) fn terminate(&self, server: u32, client: u32) -> Result<(), ControlError> {
        self.command(&format!("terminate_client {server} {client}")).map(drop)
    }

    /// Sends a command as an operator would: through a second process of the program.
    fn command(&self, text: &str) -> Result<String, ControlError> {
        let failed = |source| ControlError::Start { program: self.config.program.display().to_string(), source };
        let mut command = self.config.program_as_user();
        // Use files, because unlike pipes they do not fill up, and a process that keeps a file open does not delay the
        // poll.
        let file =
            |name: &str| memfd_create(name, MemfdFlags::CLOEXEC).map(File::from).map_err(|error| failed(error.into()));
        let (mut output, mut errors) = (file("mps-output")?, file("mps-errors")?);
        let copy = |file: &File| file.try_clone().map_err(failed);
        command.stdin(Stdio::piped()).stdout(copy(&output)?).stderr(copy(&errors)?);
        let mut child = command.spawn().map_err(failed)?;
        if let Some(mut input) = child.stdin.take() {
            // If the process has exited, the write fails, and its exit status is checked below.
            let _ = input.write_all(format!("{text}\n").as_bytes());
        }
        let begin = Instant::now();
        let status = loop {
            match child.try_wait() {
                Ok(Some(status)) => break status,
                Ok(None) if begin.elapsed() < COMMAND_TIMEOUT => std::thread::sleep(CHECK_INTERVAL),
                Ok(None) | Err(_) => {
                    let _ = child.kill();
                    let _ = child.wait();
                    return Err(ControlError::Late { command: text.to_owned(), limit: COMMAND_TIMEOUT });
                }
            }
        };
        let mut answer = String::new();
        let mut read = |file: &mut File| file.rewind().and_then(|()| file.take(MAX_ANSWER).read_to_string(&mut answer));
        // Ignore the error: a reply that is not UTF-8 is treated as an empty one.
        let _ = read(&mut output);
        if !status.success() {
            let _ = read(&mut errors);
            let answer = answer.trim().chars().filter(|c| !c.is_control()).take(200).collect();
            return Err(ControlError::Refused { command: text.to_owned(), answer });
        }
        Ok(answer)
    }
}

impl MpsConfig {
    /// Returns the user ID of the clients if it differs from that of this process.
    fn other_user(&self) -> Option<u32> {
        self.user.filter(|user| *user != geteuid().as_raw())
    }

    /// Returns a command that runs the program with the daemon's environment, as the user of the clients.
    fn program_as_user(&self) -> Command {
        let mut command = match self.other_user() {
            None => Command::new(&self.program),
            Some(user) => {
                let mut command = Command::new(SETPRIV);
                command.arg(format!("--reuid={user}")).arg(format!("--regid={}", group_of(user)));
                command.args(["--clear-groups", "--inh-caps=-all", "--ambient-caps=-all", "--"]).arg(&self.program);
                command
            }
        };
        command.env("CUDA_MPS_PIPE_DIRECTORY", pipe_folder(&self.folder));
        command.env("CUDA_MPS_LOG_DIRECTORY", self.folder.join("log"));
        command.env("CUDA_VISIBLE_DEVICES", &self.card);
        command
    }
}

/// Returns the group ID of a user from the host's user database, which can be a file or a service.
fn group_of(user: u32) -> u32 {
    let found = nix::unistd::User::from_uid(user.into());
    found.ok().flatten().map_or(NO_GROUP, |user| user.gid.as_raw())
}

/// Returns the start time of a process, in clock ticks (proc_pid_stat(5)).
fn start_of(pid: &str) -> Option<String> {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    // Field 3 is the first one after the program name in parentheses.
    let (_, rest) = stat.rsplit_once(')')?;
    rest.split_whitespace().nth(19).map(str::to_owned)
}

fn is_ended(pidfd: &OwnedFd) -> bool {
    let now = Timespec { tv_sec: 0, tv_nsec: 0 };
    poll(&mut [PollFd::new(pidfd, PollFlags::IN)], Some(&now)).is_ok_and(|ready| ready > 0)
}

/// Parses the process IDs in a reply, one per line. Ignores other lines.
fn numbers(answer: &str) -> Vec<u32> {
    answer.lines().filter_map(|line| line.trim().parse().ok()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::PermissionsExt as _;

    fn config(folder: &Path, program: &str) -> MpsConfig {
        MpsConfig { program: program.into(), folder: folder.join("group"), card: String::new(), user: None }
    }

    #[test]
    fn missing_program_is_named_with_the_key() {
        let folder = tempfile::tempdir().expect("a folder");
        let error = Control::open(&config(folder.path(), "/nonexistent/control")).err().expect("no program");
        let text = error.to_string();
        assert!(text.contains("/nonexistent/control") && text.contains("`cuda.mps_control`"), "{text}");
        assert!(!folder.path().join("group").exists(), "no files are left");
    }

    #[test]
    fn program_that_ends_at_once_is_reported_with_its_last_line() {
        let folder = tempfile::tempdir().expect("a folder");
        // `mv` fails both with and without the argument. A command must not succeed before the exit is detected.
        let error = Control::open(&config(folder.path(), "/bin/mv")).err().expect("it exits");
        assert!(matches!(&error, ControlError::Ended(why) if why.contains("its last line")), "{error}");
    }

    #[test]
    fn path_too_long_for_sockets_is_refused() {
        let folder = tempfile::tempdir().expect("a folder");
        let config = config(&folder.path().join("x".repeat(100)), "/bin/cat");
        let error = Control::open(&config).err().expect("too long");
        assert!(matches!(error, ControlError::TooLong { .. }), "{error}");
    }

    #[test]
    fn process_with_another_start_time_is_not_taken_over() {
        let folder = tempfile::tempdir().expect("a folder");
        let config = config(folder.path(), "/bin/cat");
        fs::create_dir_all(&config.folder).expect("a folder");
        fs::write(config.folder.join(RECORD), format!("{} 1", std::process::id())).expect("written");
        assert!(Control::find(&config).is_none());
    }

    /// A program that runs until the command `quit`, and records its user and group.
    const CONTROL: &str = r#"#!/bin/sh
if [ "$1" = -f ]; then
    echo "$(id -u) $(id -g)" > "$CUDA_MPS_LOG_DIRECTORY/ids"
    echo $$ > "$CUDA_MPS_PIPE_DIRECTORY/control"
    exec sleep 600
fi
read -r command
pid=$(cat "$CUDA_MPS_PIPE_DIRECTORY/control") && case $command in quit) kill "$pid" ;; esac
"#;

    #[test]
    fn daemon_of_another_user_runs_as_this_user_and_ends() {
        // Only root, or a daemon with the capabilities from the package's drop-in, can start processes as other users.
        if !geteuid().is_root() {
            return;
        }
        let folder = tempfile::tempdir().expect("a folder");
        let program = folder.path().join("control");
        fs::write(&program, CONTROL).expect("written");
        for path in [folder.path(), &program] {
            fs::set_permissions(path, fs::Permissions::from_mode(0o755)).expect("set");
        }
        // Debian's first user after root, and a user that is in no database.
        for (user, group) in [(1, 1), (54_321, NO_GROUP)] {
            let name = program.to_str().expect("a path");
            let config = MpsConfig { user: Some(user), ..config(&folder.path().join(user.to_string()), name) };
            let (control, is_new) = Control::open(&config).expect("it serves");
            let ids = fs::read_to_string(config.folder.join("log/ids")).expect("written by the daemon");
            assert_eq!((ids.trim(), is_new), (&*format!("{user} {group}"), true));
            let found = Control::find(&config).expect("the next owner finds it");
            control.quit();
            assert!(is_ended(&found.pidfd) && !pipe_folder(&config.folder).exists());
        }
    }

    #[test]
    fn answers_without_numbers_are_empty() {
        assert_eq!(numbers("12\n 13 \nServer 14 not found\n"), [12, 13]);
    }
}
