//! Messages for the user while images are created: one line when a step starts, and a line every few seconds while it
//! runs.

use std::time::{Duration, Instant};

/// Interval at which a long step reports that it is still running.
const REPORT_INTERVAL: Duration = Duration::from_secs(5);

/// Receiver of progress lines.
pub struct Progress {
    sink: Box<dyn Fn(&str) + Send + Sync>,
}

impl Progress {
    /// Creates a receiver that writes lines to standard error, so that standard output stays parseable.
    pub fn stderr() -> Self {
        Self::to(|line| eprintln!("{line}"))
    }

    /// Creates a receiver that drops all lines.
    pub fn quiet() -> Self {
        Self::to(|_| {})
    }

    /// Creates a receiver that passes lines to `sink`, without line ends.
    pub fn to(sink: impl Fn(&str) + Send + Sync + 'static) -> Self {
        Self { sink: Box::new(sink) }
    }

    /// Prints one line.
    pub fn line(&self, text: &str) {
        (self.sink)(text);
    }

    /// Announces a step and returns a reporter of its progress.
    pub fn step(&self, what: impl Into<String>) -> Step<'_> {
        let what = what.into();
        self.line(&format!("images: {what} ..."));
        let now = Instant::now();
        Step { progress: self, what, started: now, told: now }
    }
}

/// A running step.
pub struct Step<'a> {
    progress: &'a Progress,
    what: String,
    started: Instant,
    told: Instant,
}

impl Step<'_> {
    /// Prints a line when one is due. Must be called often. `detail` returns the progress of the step.
    pub fn tick(&mut self, detail: impl FnOnce() -> String) {
        if self.told.elapsed() < REPORT_INTERVAL {
            return;
        }
        self.told = Instant::now();
        let (seconds, detail) = (self.started.elapsed().as_secs(), detail());
        let gap = if detail.is_empty() { "" } else { ", " };
        self.progress.line(&format!("images: {} ... {seconds} s{gap}{detail}", self.what));
    }
}

/// Formats `bytes` in whole MiB.
pub fn mib(bytes: u64) -> String {
    format!("{} MiB", bytes.div_ceil(1 << 20))
}
