//! Progress of slow commands, shown on a terminal if the output is a table.
//!
//! The progress is drawn on standard error and erased at the end, so that standard output contains only the response.

use std::io::{self, IsTerminal, Read};
use std::time::Duration;

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};

use super::Form;

/// Interval between spinner updates.
const TICK_INTERVAL: Duration = Duration::from_millis(100);
/// Template for a command of unknown duration.
const SPINNER: &str = "{spinner} {msg}, {elapsed}";
/// Template for transfers of unknown size.
const BYTES: &str = "{spinner} {msg}: {bytes}, {binary_bytes_per_sec}, {elapsed}";
const BYTES_OF: &str = "{msg}: {wide_bar} {bytes} of {total_bytes}, {binary_bytes_per_sec}, {eta} left";

/// Progress of a command, erased when this value is dropped.
pub(super) struct Progress(ProgressBar);

impl Progress {
    /// Shows that a command is running.
    pub(super) fn of_command(form: Form, message: String) -> Self {
        Self::new(form, None, SPINNER, message)
    }

    /// Shows the number of bytes transferred, out of `total` if known.
    pub(super) fn of_bytes(form: Form, total: Option<u64>, message: String) -> Self {
        Self::new(form, total, if total.is_some() { BYTES_OF } else { BYTES }, message)
    }

    fn new(form: Form, total: Option<u64>, template: &str, message: String) -> Self {
        let target = match is_shown(form, io::stderr().is_terminal()) {
            true => ProgressDrawTarget::stderr(),
            false => ProgressDrawTarget::hidden(),
        };
        let bar = ProgressBar::with_draw_target(total, target).with_message(message);
        if let Ok(style) = ProgressStyle::with_template(template) {
            bar.set_style(style);
        }
        bar.enable_steady_tick(TICK_INTERVAL);
        Self(bar)
    }

    /// Counts transferred bytes.
    pub(super) fn advance(&self, bytes: usize) {
        self.0.inc(bytes as u64);
    }

    /// Returns a reader that counts the bytes that it reads.
    pub(super) fn counted<R: Read>(&self, reader: R) -> impl Read + use<R> {
        Counted { reader, bar: self.0.clone() }
    }
}

impl Drop for Progress {
    fn drop(&mut self) {
        self.0.finish_and_clear();
    }
}

/// Returns true if progress is shown.
fn is_shown(form: Form, is_terminal: bool) -> bool {
    is_terminal && matches!(form, Form::Table | Form::Wide)
}

struct Counted<R> {
    reader: R,
    bar: ProgressBar,
}

impl<R: Read> Read for Counted<R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let read = self.reader.read(buffer)?;
        self.bar.inc(read as u64);
        Ok(read)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn progress_is_drawn_on_terminals_only_with_tables() {
        assert!(is_shown(Form::Table, true) && is_shown(Form::Wide, true));
        for form in [Form::Json, Form::Yaml, Form::Csv] {
            assert!(!is_shown(form, true), "{form:?}");
        }
        assert!(!is_shown(Form::Table, false));
    }

    #[test]
    fn templates_are_valid_and_bytes_are_counted() {
        for template in [SPINNER, BYTES, BYTES_OF] {
            ProgressStyle::with_template(template).unwrap();
        }
        let progress = Progress::of_bytes(Form::Json, Some(10), "restores".to_owned());
        let mut read = Vec::new();
        progress.counted(&b"0123456"[..]).read_to_end(&mut read).unwrap();
        assert_eq!((read.len(), progress.0.position(), progress.0.length()), (7, 7, Some(10)));
        assert!(progress.0.is_hidden());
    }
}
