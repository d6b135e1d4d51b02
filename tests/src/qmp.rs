//! A minimal QMP client (QEMU Machine Protocol).

use std::collections::VecDeque;
use std::io::{ErrorKind, Read, Write};
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow, bail};
use serde_json::{Value, json};

use crate::wait;

/// Time limit for QEMU's reply to a command.
const COMMAND_LIMIT: Duration = Duration::from_secs(60);
/// Timeout of a single read, after which the deadline is checked.
const READ_TIMEOUT: Duration = Duration::from_millis(100);

/// A QMP connection in command mode.
pub struct Qmp {
    stream: UnixStream,
    buffer: Vec<u8>,
    events: VecDeque<Value>,
}

impl Qmp {
    /// Reads the greeting from `stream`, and leaves capabilities negotiation mode.
    pub fn new(stream: UnixStream) -> Result<Self> {
        stream.set_read_timeout(Some(READ_TIMEOUT)).context("QMP socket")?;
        let mut qmp = Self { stream, buffer: Vec::new(), events: VecDeque::new() };
        let greeting = qmp.message(Instant::now() + wait::scaled(COMMAND_LIMIT))?;
        if greeting.get("QMP").is_none() {
            bail!("QEMU sent {greeting} instead of a QMP greeting");
        }
        qmp.execute("qmp_capabilities", json!({}))?;
        Ok(qmp)
    }

    /// Executes a command, and returns its result.
    pub fn execute(&mut self, command: &str, arguments: Value) -> Result<Value> {
        let request = json!({"execute": command, "arguments": arguments});
        self.stream.write_all(format!("{request}\n").as_bytes()).with_context(|| format!("cannot send {command}"))?;
        let deadline = Instant::now() + wait::scaled(COMMAND_LIMIT);
        loop {
            let mut message = self.message(deadline).with_context(|| format!("waiting for the reply to {command}"))?;
            if let Some(value) = message.get_mut("return") {
                return Ok(value.take());
            }
            if let Some(error) = message.get("error") {
                let text = error.get("desc").and_then(Value::as_str).unwrap_or("no description");
                bail!("QEMU rejected {command}: {text}");
            }
            self.events.push_back(message);
        }
    }

    /// Waits for an event `name` that `fits` accepts, which may have been received earlier. Keeps all other events.
    pub fn wait_event(&mut self, name: &str, limit: Duration, fits: impl Fn(&Value) -> bool) -> Result<Value> {
        let deadline = Instant::now() + wait::scaled(limit);
        let wanted = |e: &Value| e["event"] == name && fits(&e["data"]);
        loop {
            if let Some(at) = self.events.iter().position(wanted) {
                return self.events.remove(at).ok_or_else(|| anyhow!("event list changed"));
            }
            let message = self.message(deadline).with_context(|| format!("waiting for the event {name}"))?;
            self.events.push_back(message);
        }
    }

    /// Discards all received events.
    pub fn forget_events(&mut self) {
        self.events.clear();
    }

    fn message(&mut self, deadline: Instant) -> Result<Value> {
        loop {
            if let Some(end) = self.buffer.iter().position(|b| *b == b'\n') {
                let line: Vec<u8> = self.buffer.drain(..=end).collect();
                return serde_json::from_slice(&line).context("QEMU sent invalid JSON");
            }
            let mut chunk = [0; 4096];
            match self.stream.read(&mut chunk) {
                Ok(0) => bail!("QEMU closed its QMP socket"),
                Ok(count) => self.buffer.extend_from_slice(&chunk[..count]),
                Err(e) if matches!(e.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut | ErrorKind::Interrupted) => {
                    if Instant::now() >= deadline {
                        bail!("QEMU did not respond in time");
                    }
                }
                Err(e) => return Err(e).context("reading from QEMU"),
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::{BufRead, BufReader};
    use std::thread;

    fn qemu(answers: &'static [&'static str]) -> Qmp {
        let (ours, mut theirs) = UnixStream::pair().unwrap();
        thread::spawn(move || {
            theirs.write_all(b"{\"QMP\": {}}\n").unwrap();
            let mut reader = BufReader::new(theirs.try_clone().unwrap());
            for answer in ["{\"return\": {}}"].iter().chain(answers) {
                let mut line = String::new();
                if reader.read_line(&mut line).unwrap_or(0) == 0 {
                    return;
                }
                theirs.write_all(format!("{answer}\n").as_bytes()).unwrap();
            }
        });
        Qmp::new(ours).unwrap()
    }

    #[test]
    fn events_before_an_answer_are_kept() {
        let mut qmp = qemu(&["{\"event\": \"E\", \"data\": {\"device\": \"x\"}}\n{\"return\": 5}"]);
        assert_eq!(qmp.execute("c", json!({})).unwrap(), 5);
        let event = qmp.wait_event("E", Duration::ZERO, |d| d["device"] == "x").unwrap();
        assert_eq!(event["event"], "E");
    }

    #[test]
    fn refused_command_error_has_the_reason() {
        let mut qmp = qemu(&["{\"error\": {\"class\": \"GenericError\", \"desc\": \"no such device\"}}"]);
        let error = qmp.execute("device_del", json!({})).unwrap_err().to_string();
        assert_eq!(error, "QEMU rejected device_del: no such device");
    }
}
