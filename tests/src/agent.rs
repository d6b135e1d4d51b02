//! The host's end of the agent protocol: sends commands to a guest's init over the guest's second serial port.
//!
//! The guest sends `READY <release>`. The host sends `<id> <command>`. The guest replies with any number of output
//! lines `<id> | <line>`, followed by `<id> = <code>`. Other lines are ignored as line noise.

use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, Write};
use std::os::unix::net::UnixStream;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow, bail};

use crate::wait;

/// Default time limit of a command. Guests under emulation are slow.
pub const COMMAND_LIMIT: Duration = Duration::from_secs(180);

/// Interval between health checks while waiting.
const HEALTH_CHECK_INTERVAL: Duration = Duration::from_millis(250);

/// Health check of a VM, which returns an error with the reason if the VM can no longer respond.
pub type Health = Arc<dyn Fn() -> Result<()> + Send + Sync>;

/// Output and exit code of a command.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Output {
    /// Lines of output.
    pub lines: Vec<String>,
    /// Exit code of the command. 0 means success.
    pub code: i32,
}

impl Output {
    /// Returns all lines, joined by newlines.
    pub fn text(&self) -> String {
        self.lines.join("\n")
    }

    /// Returns this output if the command succeeded, or an error that contains its lines otherwise.
    pub fn success(self) -> Result<Self> {
        if self.code != 0 {
            bail!("the command exited with code {}:\n{}", self.code, self.text());
        }
        Ok(self)
    }
}

#[derive(Default)]
struct Job {
    lines: Vec<String>,
    code: Option<i32>,
    // Reason, if the guest restarted or disconnected before the command ended.
    lost: Option<&'static str>,
}

#[derive(Default)]
struct State {
    boots: u32,
    release: String,
    closed: bool,
    next: u64,
    jobs: BTreeMap<u64, Job>,
}

#[derive(Default)]
struct Shared {
    state: Mutex<State>,
    changed: Condvar,
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The host's end of a guest's agent.
pub struct Agent {
    shared: Arc<Shared>,
    writer: Mutex<UnixStream>,
    health: Health,
}

/// A running command. Commands may run concurrently.
pub struct Pending<'a> {
    agent: &'a Agent,
    id: u64,
    command: String,
}

impl Agent {
    /// Creates an agent that communicates over `stream` and calls `health` while it waits.
    pub fn new(stream: UnixStream, health: Health) -> Result<Self> {
        let shared = Arc::new(Shared::default());
        let reader = stream.try_clone().context("cannot clone the agent's stream")?;
        let of_reader = Arc::clone(&shared);
        thread::spawn(move || read_lines(reader, &of_reader));
        Ok(Self { shared, writer: Mutex::new(stream), health })
    }

    /// Returns the number of times that the guest has reported `READY`.
    pub fn boots(&self) -> u32 {
        self.shared.lock().boots
    }

    /// Waits until the guest has reported `READY` `boots` times. Returns the release of its kernel.
    pub fn wait_boots(&self, boots: u32, limit: Duration) -> Result<String> {
        self.wait(limit, "the guest to be ready", |state| (state.boots >= boots).then(|| Ok(state.release.clone())))
    }

    /// Runs one command until it exits. Does not check the exit code (see [`Output::success`]).
    pub fn run(&self, command: &str) -> Result<Output> {
        self.run_within(command, COMMAND_LIMIT)
    }

    /// Runs one command like [`Agent::run`], but with time limit `limit`.
    pub fn run_within(&self, command: &str, limit: Duration) -> Result<Output> {
        self.send(command)?.wait_within(limit)
    }

    /// Starts a command that runs concurrently with other commands.
    pub fn start(&self, command: &str) -> Result<Pending<'_>> {
        self.send(&format!("& {command}"))
    }

    /// Sends a command without waiting for it. Without `&`, the guest runs it after all earlier commands without `&`.
    pub fn send(&self, command: &str) -> Result<Pending<'_>> {
        if command.contains('\n') {
            bail!("a command for the guest is one line: {command:?}");
        }
        let id = {
            let mut state = self.shared.lock();
            state.next += 1;
            let id = state.next;
            state.jobs.insert(id, Job::default());
            id
        };
        let mut writer = self.writer.lock().unwrap_or_else(PoisonError::into_inner);
        if let Err(error) = writer.write_all(format!("{id} {command}\n").as_bytes()) {
            (self.health)()?;
            return Err(error).with_context(|| format!("cannot send {command:?} to the guest"));
        }
        Ok(Pending { agent: self, id, command: command.to_owned() })
    }

    fn wait<T>(&self, limit: Duration, what: &str, mut done: impl FnMut(&mut State) -> Option<Result<T>>) -> Result<T> {
        let limit = wait::scaled(limit);
        let deadline = Instant::now() + limit;
        let mut state = self.shared.lock();
        loop {
            if let Some(result) = done(&mut state) {
                return result;
            }
            let (next, waited) =
                self.shared.changed.wait_timeout(state, HEALTH_CHECK_INTERVAL).unwrap_or_else(PoisonError::into_inner);
            state = next;
            if !waited.timed_out() && !state.closed {
                continue;
            }
            if let Some(result) = done(&mut state) {
                return result;
            }
            let closed = state.closed;
            drop(state);
            (self.health)().with_context(|| format!("while waiting for {what}"))?;
            if closed {
                bail!("the VM closed its serial line while the host waited for {what}");
            }
            if Instant::now() >= deadline {
                bail!("timed out after {} s while waiting for {what}", limit.as_secs());
            }
            state = self.shared.lock();
        }
    }
}

impl Pending<'_> {
    /// Waits until the command exits.
    pub fn wait(self) -> Result<Output> {
        self.wait_within(COMMAND_LIMIT)
    }

    /// Waits like [`Pending::wait`], but with time limit `limit`.
    pub fn wait_within(self, limit: Duration) -> Result<Output> {
        let what = format!("the guest's command {:?}", self.command);
        self.agent.wait(limit, &what, |state| {
            let job = state.jobs.get_mut(&self.id)?;
            if let Some(code) = job.code {
                let lines = std::mem::take(&mut job.lines);
                return Some(Ok(Output { lines, code }));
            }
            job.lost.map(|why| Err(anyhow!("{why} before {what} ended; it had printed:\n{}", job.lines.join("\n"))))
        })
    }

    /// Waits until the command has printed a line that contains `text`, and returns that line.
    pub fn wait_line(&self, text: &str, limit: Duration) -> Result<String> {
        let what = format!("a line with {text:?} from {:?}", self.command);
        self.agent.wait(limit, &what, |state| {
            let job = state.jobs.get(&self.id)?;
            if let Some(line) = job.lines.iter().find(|l| l.contains(text)) {
                return Some(Ok(line.clone()));
            }
            let ended = job.code.is_some() || job.lost.is_some();
            ended.then(|| Err(anyhow!("the command ended without {what}:\n{}", job.lines.join("\n"))))
        })
    }

    /// Returns the lines printed so far.
    pub fn lines(&self) -> Vec<String> {
        self.agent.shared.lock().jobs.get(&self.id).map(|j| j.lines.clone()).unwrap_or_default()
    }

    /// Sends SIGTERM to the command's process.
    pub fn terminate(&self) -> Result<()> {
        self.agent.run(&format!("kill {} 15", self.id))?.success().map(drop)
    }

    /// Sends SIGKILL to the command's process.
    pub fn kill(&self) -> Result<()> {
        self.agent.run(&format!("kill {} 9", self.id))?.success().map(drop)
    }

    /// Returns true if the command has exited.
    pub fn ended(&self) -> bool {
        self.agent.shared.lock().jobs.get(&self.id).is_none_or(|j| j.code.is_some() || j.lost.is_some())
    }
}

impl Drop for Pending<'_> {
    fn drop(&mut self) {
        self.agent.shared.lock().jobs.remove(&self.id);
    }
}

fn read_lines(stream: UnixStream, shared: &Shared) {
    let mut reader = BufReader::new(stream);
    let mut bytes = Vec::new();
    loop {
        bytes.clear();
        match reader.read_until(b'\n', &mut bytes) {
            Ok(count) if count > 0 => handle(&String::from_utf8_lossy(&bytes), &mut shared.lock()),
            _ => break,
        }
        shared.changed.notify_all();
    }
    let mut state = shared.lock();
    state.closed = true;
    lose(&mut state, "the VM went away");
    drop(state);
    shared.changed.notify_all();
}

fn handle(line: &str, state: &mut State) {
    let line = line.trim_end_matches(['\n', '\r']);
    // Firmware may print bytes before the guest's first line.
    if let Some(at) = line.find("READY ") {
        state.boots += 1;
        state.release = line[at + 6..].trim().to_owned();
        lose(state, "the guest restarted");
        return;
    }
    let Some((id, rest)) = line.split_once(' ') else { return };
    let Some(job) = id.parse().ok().and_then(|id: u64| state.jobs.get_mut(&id)) else { return };
    if let Some(text) = rest.strip_prefix("| ") {
        job.lines.push(text.to_owned());
    } else if rest == "|" {
        job.lines.push(String::new());
    } else if let Some(code) = rest.strip_prefix("= ").and_then(|c| c.trim().parse().ok()) {
        job.code = Some(code);
    }
}

fn lose(state: &mut State, why: &'static str) {
    for job in state.jobs.values_mut().filter(|j| j.code.is_none()) {
        job.lost = Some(why);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns the agent of a guest that a thread simulates. `answer` maps each line from the host to the guest's
    /// reply.
    fn guest(answer: impl Fn(&str) -> String + Send + 'static) -> Agent {
        let (ours, theirs) = UnixStream::pair().unwrap();
        thread::spawn(move || {
            let mut writer = theirs.try_clone().unwrap();
            writer.write_all(b"\x1b[2Jnoise\nxREADY 6.1.0-test\n").unwrap();
            for line in BufReader::new(theirs).lines().map_while(Result::ok) {
                if writer.write_all(answer(&line).as_bytes()).is_err() {
                    break;
                }
            }
        });
        let agent = Agent::new(ours, Arc::new(|| Ok(()))).unwrap();
        // Commands sent before the guest has started would be lost.
        agent.wait_boots(1, WAIT_TIMEOUT).unwrap();
        agent
    }

    const WAIT_TIMEOUT: Duration = Duration::from_secs(20);

    #[test]
    fn a_command_returns_its_lines_and_code() {
        let agent = guest(|line| {
            let (id, command) = line.split_once(' ').unwrap();
            format!("{id} | got {command}\n{id} |\n{id} = 7\n")
        });
        assert_eq!(agent.wait_boots(1, WAIT_TIMEOUT).unwrap(), "6.1.0-test");
        let output = agent.run_within("cat x", WAIT_TIMEOUT).unwrap();
        assert_eq!(output, Output { lines: vec!["got cat x".into(), String::new()], code: 7 });
        assert!(output.success().unwrap_err().to_string().contains("code 7"));
    }

    #[test]
    fn commands_may_end_in_another_order() {
        let agent = guest(|line| match line {
            "1 & slow" => String::new(),
            _ => "2 | second\n2 = 0\n1 | first\n1 = 1\n".to_owned(),
        });
        let slow = agent.start("slow").unwrap();
        let fast = agent.start("fast").unwrap();
        assert_eq!(fast.wait_within(WAIT_TIMEOUT).unwrap().lines, ["second"]);
        assert_eq!(slow.wait_line("fir", WAIT_TIMEOUT).unwrap(), "first");
        assert_eq!(slow.wait_within(WAIT_TIMEOUT).unwrap(), Output { lines: vec!["first".into()], code: 1 });
    }

    #[test]
    fn guest_restart_ends_running_command() {
        let agent = guest(|_| "1 | part\nREADY 6.1.0-test\n".to_owned());
        let error = agent.run_within("work", WAIT_TIMEOUT).unwrap_err().to_string();
        assert!(error.contains("the guest restarted") && error.contains("part"), "{error}");
        assert_eq!(agent.boots(), 2);
    }

    #[test]
    fn an_unhealthy_vm_ends_the_wait() {
        let (ours, _theirs) = UnixStream::pair().unwrap();
        let agent = Agent::new(ours, Arc::new(|| bail!("QEMU is gone"))).unwrap();
        let error = format!("{:#}", agent.wait_boots(1, WAIT_TIMEOUT).unwrap_err());
        assert!(error.contains("QEMU is gone"), "{error}");
    }

    #[test]
    fn a_closed_line_ends_the_wait() {
        let (ours, theirs) = UnixStream::pair().unwrap();
        let agent = Agent::new(ours, Arc::new(|| Ok(()))).unwrap();
        drop(theirs);
        assert!(agent.wait_boots(1, WAIT_TIMEOUT).unwrap_err().to_string().contains("closed its serial line"));
    }

    #[test]
    fn two_lines_in_one_command_are_refused() {
        let agent = guest(|_| String::new());
        assert!(agent.send("a\nb").is_err());
    }
}
