//! The option `--watch`, which repeats commands that show data.

use std::io::{self, IsTerminal, Write};
use std::time::Duration;

use clap::Args;

use super::client::ClientError;
use super::values::seconds;
use super::{Arguments, Code, Form, answer};

/// Escape sequence that clears the screen and moves the cursor home.
const CLEAR: &str = "\x1b[H\x1b[2J";

/// The option `--watch`.
#[derive(Clone, Copy, Debug, Args)]
pub(super) struct Watch {
    /// Repeats the command at this interval, in seconds
    #[arg(
        long,
        value_name = "SECONDS",
        num_args = 0..=1,
        require_equals = true,
        default_missing_value = "2",
        value_parser = seconds
    )]
    watch: Option<Duration>,
}

impl Watch {
    /// Returns the interval between two refreshes, if the option is given.
    pub fn interval(self) -> Option<Duration> {
        self.watch
    }
}

/// Repeats a command until the output is closed or the command fails. On a terminal, each table replaces the previous
/// one. Otherwise, an empty line separates tables or CSV outputs. Each JSON output is one line, and each YAML output
/// one document.
pub(super) fn run(
    interval: Duration,
    form: Form,
    arguments: &Arguments,
    out: &mut dyn Write,
) -> Result<Code, ClientError> {
    let screen = form.is_table() && io::stdout().is_terminal();
    let mut first = true;
    loop {
        let (text, _) = answer(form, arguments.clone())?;
        let text = form.shown(&text);
        let written = match form {
            Form::Json => write_line(&text, out),
            Form::Yaml => write!(out, "---\n{text}"),
            Form::Table | Form::Wide if screen => write!(out, "{CLEAR}{text}"),
            Form::Table | Form::Wide | Form::Csv if first => out.write_all(text.as_bytes()),
            Form::Table | Form::Wide | Form::Csv => write!(out, "\n{text}"),
        };
        if written.and_then(|()| out.flush()).is_err() {
            return Ok(Code::Good);
        }
        first = false;
        std::thread::sleep(interval);
    }
}

fn write_line(json: &str, out: &mut dyn Write) -> io::Result<()> {
    let value: serde_json::Value = serde_json::from_str(json)?;
    writeln!(out, "{}", Form::Json.shown(&value.to_string()))
}
