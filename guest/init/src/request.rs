//! A command from the host, and its output.

use std::fs::File;
use std::io::Write;
use std::sync::{Arc, Mutex, PoisonError};

/// A command sent by the host.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Request {
    /// ID that the host assigned to the command.
    pub id: String,
    /// Set if the command runs in the background.
    pub background: bool,
    /// The words after the ID.
    pub words: String,
}

impl Request {
    /// Parses a line from the host. Returns `None` if it contains no words.
    pub fn parse(line: &str) -> Option<Self> {
        let (id, rest) = line.trim().split_once(char::is_whitespace)?;
        let rest = rest.trim_start();
        let (background, words) = match rest.strip_prefix('&') {
            Some(words) => (true, words.trim_start()),
            None => (false, rest),
        };
        (!words.is_empty()).then(|| Self { id: id.to_owned(), background, words: words.to_owned() })
    }
}

/// Sends the output of a command. Outputs of concurrent commands are interleaved line by line.
#[derive(Clone)]
pub struct Answers {
    /// The serial port to the host.
    pub line: Arc<Mutex<File>>,
    /// ID that the host assigned to the command.
    pub id: String,
}

impl Answers {
    /// Sends one line of output.
    pub fn output(&self, text: &str) {
        for text in text.split('\n') {
            self.send(&format!("{} | {}\n", self.id, text.trim_end_matches('\r')));
        }
    }

    /// Sends the exit code, which ends the command.
    pub fn end(&self, code: i32) {
        self.send(&format!("{} = {code}\n", self.id));
    }

    /// Waits until all output has been transmitted.
    pub fn drain(&self) {
        let line = self.line.lock().unwrap_or_else(PoisonError::into_inner);
        // Ignore errors: this program cannot fix a port that does not drain.
        let _ = rustix::termios::tcdrain(&*line);
    }

    /// Sends text unchanged.
    pub fn send(&self, text: &str) {
        let mut line = self.line.lock().unwrap_or_else(PoisonError::into_inner);
        if let Err(error) = line.write_all(text.as_bytes()) {
            println!("guest-init: agent: {error}: {text}");
        }
    }
}
