//! Colours of tables and errors on a terminal.
//!
//! Text is styled line by line after untrusted words have been escaped, so a name can affect only its own colour. Table
//! headers are bold, and states that matter to operators are coloured.

use std::io::{self, IsTerminal, Write};

use anstream::{AutoStream, ColorChoice};
use anstyle::{AnsiColor, Style};

/// Style of table headers.
const HEAD: Style = Style::new().bold();
/// Styles of states: those that require the operator's action, unusual ones, and good ones.
const BAD: Style = AnsiColor::Red.on_default();
const ODD: Style = AnsiColor::Yellow.on_default();
const GOOD: Style = AnsiColor::Green.on_default();
/// Style of the program name in front of errors.
const ERROR: Style = AnsiColor::Red.on_default().bold();
/// Prefix of errors.
const PROGRAM: &str = "mediatorctl:";

/// States as they appear in table cells.
const STATES: [(Style, &[&str]); 3] = [
    (
        BAD,
        &[
            "failed",
            "unserved",
            "quarantined",
            "killed",
            "kill_failed",
            "owner_lost",
            "mps_lost",
            "upgrade_failed",
            "move_failed",
            "save_failed",
            "restore_failed",
        ],
    ),
    (ODD, &["starting", "stopping", "stopped", "suspended", "note", "overran", "suppressed"]),
    (GOOD, &["connected", "working", "served", "ok"]),
];
/// Words that mark a cell as requiring the operator's action.
const ALARMS: [&str; 8] = [
    "MISSING",
    "QUARANTINED",
    "MEMORY NOT SHARED",
    "MEMORY WITHDRAWN",
    "WITHOUT MEMORY",
    "ACCESSES REFUSED",
    "UNACCOUNTED",
    "LOST",
];

/// Output streams on which colours are enabled.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Colours {
    /// True for standard output.
    pub(super) out: bool,
    /// True for standard error.
    pub(super) err: bool,
}

impl Colours {
    /// Returns the streams that are terminals with colour support. `NO_COLOR` and `TERM=dumb` disable colours.
    pub(super) fn of_terminals() -> Self {
        let (out, err) = (io::stdout(), io::stderr());
        Self {
            out: out.is_terminal() && AutoStream::choice(&out) != ColorChoice::Never,
            err: err.is_terminal() && AutoStream::choice(&err) != ColorChoice::Never,
        }
    }
}

/// A writer that styles lines if colours are enabled.
pub(super) struct Painted<'a> {
    to: &'a mut dyn Write,
    is_on: bool,
    /// Bytes of the incomplete current line.
    line: Vec<u8>,
}

impl<'a> Painted<'a> {
    pub(super) fn new(to: &'a mut dyn Write, is_on: bool) -> Self {
        Self { to, is_on, line: Vec::new() }
    }

    fn write_line(&mut self) -> io::Result<()> {
        let line = std::mem::take(&mut self.line);
        match std::str::from_utf8(&line) {
            Ok(text) => self.to.write_all(painted(text).as_bytes()),
            Err(_) => self.to.write_all(&line),
        }
    }
}

impl Write for Painted<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        if !self.is_on {
            return self.to.write(bytes);
        }
        for piece in bytes.split_inclusive(|byte| *byte == b'\n') {
            self.line.extend_from_slice(piece);
            if piece.ends_with(b"\n") {
                self.write_line()?;
            }
        }
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        self.write_line()?;
        self.to.flush()
    }
}

impl Drop for Painted<'_> {
    fn drop(&mut self) {
        let _ = self.write_line();
    }
}

/// Returns the line with its styles.
fn painted(line: &str) -> String {
    let text = line.trim_end_matches('\n');
    let end = &line[text.len()..];
    if let Some(rest) = text.strip_prefix(PROGRAM) {
        return format!("{ERROR}{PROGRAM}{ERROR:#}{rest}{end}");
    }
    let cells: Vec<&str> = text.split("  ").map(str::trim).filter(|cell| !cell.is_empty()).collect();
    if is_head(&cells) {
        return format!("{HEAD}{text}{HEAD:#}{end}");
    }
    let mut shown = String::new();
    let mut rest = text;
    for cell in cells {
        let Some((before, after)) = rest.split_once(cell) else { continue };
        shown.push_str(before);
        match style(cell) {
            Some(style) => shown.push_str(&format!("{style}{cell}{style:#}")),
            None => shown.push_str(cell),
        }
        rest = after;
    }
    shown + rest + end
}

/// Returns true for a table header: several cells in capital letters.
fn is_head(cells: &[&str]) -> bool {
    let is_capital = |cell: &&str| cell.chars().any(char::is_alphabetic) && !cell.chars().any(char::is_lowercase);
    cells.len() > 1 && cells.iter().all(is_capital) && !cells.iter().any(|cell| style(cell).is_some())
}

fn style(cell: &str) -> Option<Style> {
    if ALARMS.iter().any(|alarm| cell.contains(alarm)) {
        return Some(BAD);
    }
    STATES.iter().find(|(_, words)| words.contains(&cell)).map(|(style, _)| *style)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn written(text: &str, is_on: bool) -> String {
        let mut out = Vec::new();
        // Write small chunks, as they arrive from a stream.
        let mut painted = Painted::new(&mut out, is_on);
        text.as_bytes().chunks(3).for_each(|piece| painted.write_all(piece).unwrap());
        drop(painted);
        String::from_utf8(out).unwrap()
    }

    #[test]
    fn heads_states_and_errors_have_styles() {
        let text = "NAME  STATE\nweb   connected\nfile  failed, MEMORY NOT SHARED\nmediatorctl: no daemon\n  start it";
        assert_eq!(
            written(text, true),
            "\u{1b}[1mNAME  STATE\u{1b}[0m\nweb   \u{1b}[32mconnected\u{1b}[0m\n\
             file  \u{1b}[31mfailed, MEMORY NOT SHARED\u{1b}[0m\n\u{1b}[1m\u{1b}[31mmediatorctl:\u{1b}[0m no daemon\n  start it"
        );
        assert_eq!(written(text, false), text);
    }

    #[test]
    fn styles_do_not_change_the_text() {
        let text = "kind  note\n\nVRAM  64 MiB\n  größe  ok  failed  x\nMISSING  device  ok\n";
        let shown = written(text, true);
        assert_eq!(anstream::adapter::strip_str(&shown).to_string(), text);
        assert!(shown.contains("\u{1b}[31mMISSING\u{1b}[0m") && !shown.contains("\u{1b}[1mVRAM"), "{shown:?}");
    }
}
