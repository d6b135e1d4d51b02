//! Progress messages of image creation. On a terminal, each running step has a spinner. Otherwise, a line is printed
//! when a step starts, and every few seconds while it runs.

use std::io::{self, IsTerminal};
use std::time::{Duration, Instant};

use indicatif::{MultiProgress, ProgressBar, ProgressDrawTarget, ProgressStyle};

/// Interval at which a long step reports that it is still running.
const REPORT_INTERVAL: Duration = Duration::from_secs(5);
/// Interval at which a spinner is redrawn.
const TICK_INTERVAL: Duration = Duration::from_millis(100);
/// Template of a step's spinner.
const SPINNER: &str = "{spinner} images: {prefix}, {elapsed} {msg}";

/// Receiver of progress messages.
pub struct Progress(Sink);

enum Sink {
    Lines(Box<dyn Fn(&str) + Send + Sync>),
    /// Spinners, with lines printed above them.
    Spinners(MultiProgress),
}

impl Progress {
    /// Creates a receiver that shows spinners on standard error if it is a terminal, or writes lines to it otherwise.
    /// Standard output remains parseable.
    pub fn stderr() -> Self {
        match io::stderr().is_terminal() {
            true => Self::drawn(ProgressDrawTarget::stderr()),
            false => Self::to(|line| eprintln!("{line}")),
        }
    }

    /// Creates a receiver that drops all lines.
    pub fn quiet() -> Self {
        Self::to(|_| {})
    }

    /// Creates a receiver that passes lines to `sink`, without line ends.
    pub fn to(sink: impl Fn(&str) + Send + Sync + 'static) -> Self {
        Self(Sink::Lines(Box::new(sink)))
    }

    fn drawn(target: ProgressDrawTarget) -> Self {
        Self(Sink::Spinners(MultiProgress::with_draw_target(target)))
    }

    /// Prints one line.
    pub fn line(&self, text: &str) {
        match &self.0 {
            Sink::Lines(sink) => sink(text),
            // If the terminal no longer exists, ignore the error.
            Sink::Spinners(all) => drop(all.println(text)),
        }
    }

    /// Announces a step and returns a reporter of its progress.
    pub fn step(&self, what: impl Into<String>) -> Step<'_> {
        let what = what.into();
        let bar = match &self.0 {
            Sink::Lines(sink) => {
                sink(&format!("images: {what} ..."));
                None
            }
            Sink::Spinners(all) => Some(spinner(all, &what)),
        };
        let now = Instant::now();
        Step { progress: self, what, started: now, told: now, bar }
    }
}

/// Adds a spinner for a step.
fn spinner(all: &MultiProgress, what: &str) -> ProgressBar {
    let bar = all.add(ProgressBar::new_spinner()).with_prefix(what.to_owned());
    if let Ok(style) = ProgressStyle::with_template(SPINNER) {
        bar.set_style(style);
    }
    bar.enable_steady_tick(TICK_INTERVAL);
    bar
}

/// A running step.
pub struct Step<'a> {
    progress: &'a Progress,
    what: String,
    started: Instant,
    told: Instant,
    /// The spinner of the step, on a terminal.
    bar: Option<ProgressBar>,
}

impl Step<'_> {
    /// Updates the spinner. Without a spinner, prints a line if the last one is older than `REPORT_INTERVAL`. Must be
    /// called often. `detail` returns the progress of the step.
    pub fn tick(&mut self, detail: impl FnOnce() -> String) {
        if let Some(bar) = &self.bar {
            return bar.set_message(detail());
        }
        if self.told.elapsed() < REPORT_INTERVAL {
            return;
        }
        self.told = Instant::now();
        let (seconds, detail) = (self.started.elapsed().as_secs(), detail());
        let gap = if detail.is_empty() { "" } else { ", " };
        self.progress.line(&format!("images: {} ... {seconds} s{gap}{detail}", self.what));
    }
}

impl Drop for Step<'_> {
    fn drop(&mut self) {
        if let Some(bar) = self.bar.take() {
            let seconds = self.started.elapsed().as_secs();
            bar.finish_and_clear();
            self.progress.line(&format!("images: {} took {seconds} s", self.what));
        }
    }
}

/// Formats `bytes` in MiB, rounded up.
pub fn mib(bytes: u64) -> String {
    format!("{} MiB", bytes.div_ceil(1 << 20))
}

#[cfg(test)]
mod tests {
    use super::*;
    use indicatif::TermLike;
    use std::sync::{Arc, Mutex};

    /// A terminal that collects its output.
    #[derive(Clone, Debug, Default)]
    struct Collector(Arc<Mutex<String>>);

    impl TermLike for Collector {
        fn width(&self) -> u16 {
            100
        }
        fn move_cursor_up(&self, _: usize) -> io::Result<()> {
            Ok(())
        }
        fn move_cursor_down(&self, _: usize) -> io::Result<()> {
            Ok(())
        }
        fn move_cursor_right(&self, _: usize) -> io::Result<()> {
            Ok(())
        }
        fn move_cursor_left(&self, _: usize) -> io::Result<()> {
            Ok(())
        }
        fn write_line(&self, text: &str) -> io::Result<()> {
            self.write_str(&format!("{text}\n"))
        }
        fn write_str(&self, text: &str) -> io::Result<()> {
            self.0.lock().expect("no panic").push_str(text);
            Ok(())
        }
        fn clear_line(&self) -> io::Result<()> {
            Ok(())
        }
        fn flush(&self) -> io::Result<()> {
            Ok(())
        }
    }

    #[test]
    fn steps_on_a_terminal_have_spinners_that_leave_a_line() {
        let terminal = Collector::default();
        let progress = Progress::drawn(ProgressDrawTarget::term_like(Box::new(terminal.clone())));
        let mut step = progress.step("unpacking nginx");
        step.tick(|| "12 of 30 MiB".to_owned());
        progress.line("images: beside it");
        let shown = || terminal.0.lock().expect("no panic").clone();
        assert!(shown().contains("images: beside it"), "{}", shown());
        assert!(shown().contains("images: unpacking nginx, ") && shown().contains("12 of 30 MiB"), "{}", shown());
        assert!(!shown().contains(" took "), "{}", shown());
        drop(step);
        assert!(shown().contains("images: unpacking nginx took 0 s"), "{}", shown());
    }

    #[test]
    fn steps_elsewhere_are_lines() {
        let lines = Arc::new(Mutex::new(Vec::new()));
        let sink = Arc::clone(&lines);
        let progress = Progress::to(move |line| sink.lock().expect("no panic").push(line.to_owned()));
        let mut step = progress.step("unpacking nginx");
        step.tick(|| unreachable!("too early"));
        drop(step);
        assert_eq!(*lines.lock().expect("no panic"), ["images: unpacking nginx ..."]);
        ProgressStyle::with_template(SPINNER).expect("a template");
    }
}
