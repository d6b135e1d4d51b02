//! The protocol between the guest and the host on a serial port.
//!
//! The guest sends `READY <kernel release>`. The host sends `<id> <words>`. The guest replies with any number of lines
//! `<id> | <output>`, followed by `<id> = <exit code>`. Commands run sequentially. A command with `&` before its words
//! runs in the background.

use std::fs::File;
use std::io::Read;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::mpsc::channel;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use crate::commands;
use crate::request::{Answers, Request};

/// Maximum length of a line from the host, in bytes. Longer lines are truncated.
const LONGEST_LINE: usize = 4096;

/// Exit code for an unknown or malformed command.
const BAD_COMMAND: i32 = 127;

/// Exit code for a command whose handler panicked.
const PANICKED: i32 = 254;

/// Serves the serial port. Returns only if its descriptor cannot be duplicated, or the thread that executes commands
/// has ended.
pub fn serve(line: &File) {
    let (Ok(mut reader), Ok(writer)) = (line.try_clone(), line.try_clone()) else {
        return println!("guest-init: agent: the line cannot be shared");
    };
    let writer = Arc::new(Mutex::new(writer));
    let release = rustix::system::uname().release().to_string_lossy().into_owned();
    let banner = Answers { line: Arc::clone(&writer), id: String::new() };
    banner.send(&format!("READY {release}\n"));

    let (queue, queued) = channel::<(Request, Answers)>();
    std::thread::spawn(move || {
        for (request, answers) in queued {
            execute(&request, &answers);
        }
    });
    let mut lines = LineBuffer::default();
    let mut bytes = [0; 256];
    loop {
        let length = match reader.read(&mut bytes) {
            Ok(length) if length > 0 => length,
            _ => {
                // After a hangup, the port works again once the host has reopened it.
                std::thread::sleep(Duration::from_millis(100));
                continue;
            }
        };
        for text in lines.push(&bytes[..length]) {
            let Some(request) = Request::parse(&text) else {
                if let Some(id) = text.split_whitespace().next() {
                    Answers { line: Arc::clone(&writer), id: id.to_owned() }.end(BAD_COMMAND);
                }
                continue;
            };
            let answers = Answers { line: Arc::clone(&writer), id: request.id.clone() };
            if request.background {
                std::thread::spawn(move || execute(&request, &answers));
            } else if queue.send((request, answers)).is_err() {
                return;
            }
        }
    }
}

fn execute(request: &Request, answers: &Answers) {
    let outcome = catch_unwind(AssertUnwindSafe(|| commands::execute(request, answers)));
    match outcome {
        Ok(Ok(code)) => answers.end(code),
        Ok(Err(error)) => {
            answers.output(&format!("error: {error}"));
            answers.end(if error.kind() == std::io::ErrorKind::InvalidInput { BAD_COMMAND } else { 1 });
        }
        Err(_) => answers.end(PANICKED),
    }
}

/// Splits received bytes into lines.
#[derive(Default)]
struct LineBuffer {
    partial: Vec<u8>,
}

impl LineBuffer {
    fn push(&mut self, bytes: &[u8]) -> Vec<String> {
        let mut lines = Vec::new();
        for &byte in bytes {
            let ends = matches!(byte, b'\n' | b'\r');
            if ends && !self.partial.is_empty() {
                lines.push(String::from_utf8_lossy(&self.partial).into_owned());
                self.partial.clear();
            } else if !ends && self.partial.len() < LONGEST_LINE {
                self.partial.push(byte);
            }
        }
        lines
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn request(id: &str, background: bool, words: &str) -> Request {
        Request { id: id.to_owned(), background, words: words.to_owned() }
    }

    #[test]
    fn requests_are_parsed_with_and_without_background() {
        assert_eq!(Request::parse("7 load debug=info\r"), Some(request("7", false, "load debug=info")));
        assert_eq!(Request::parse("a1 & run /bin/x  y"), Some(request("a1", true, "run /bin/x  y")));
        assert_eq!(Request::parse("a1 &run x"), Some(request("a1", true, "run x")));
        assert_eq!(Request::parse("7"), None);
        assert_eq!(Request::parse("7 &"), None);
        assert_eq!(Request::parse(""), None);
    }

    #[test]
    fn lines_are_joined_over_reads_and_cut_at_the_bound() {
        let mut lines = LineBuffer::default();
        assert!(lines.push(b"1 no").is_empty());
        assert_eq!(lines.push(b"des\n\n2 dmesg\n3"), ["1 nodes", "2 dmesg"]);
        let long = vec![b'x'; LONGEST_LINE * 2];
        assert!(lines.push(&long).is_empty());
        let cut = lines.push(b"\n");
        assert_eq!(cut[0].len(), LONGEST_LINE);
    }

    #[test]
    fn output_of_several_lines_carries_the_id_on_each() {
        let file = tempfile();
        let answers = Answers { line: Arc::new(Mutex::new(file.try_clone().expect("clone"))), id: "9".to_owned() };
        answers.output("one\r\ntwo");
        answers.end(3);
        assert_eq!(contents(file), "9 | one\n9 | two\n9 = 3\n");
    }

    fn tempfile() -> File {
        let name = rustix::fs::memfd_create("answers", rustix::fs::MemfdFlags::CLOEXEC).expect("memfd");
        File::from(name)
    }

    fn contents(mut file: File) -> String {
        use std::io::Seek;
        file.rewind().expect("rewind");
        let mut text = String::new();
        file.read_to_string(&mut text).expect("read");
        text
    }
}
