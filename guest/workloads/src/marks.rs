//! Marks between the phases of a run. Each mark prints a line for the host, and waits until the host has read its
//! counters.

use std::fs;
use std::path::PathBuf;
use std::thread::sleep;
use std::time::{Duration, Instant};

use anyhow::{Result, ensure};

/// Time limit for the host to respond.
const HOST_TIMEOUT: Duration = Duration::from_secs(120);
/// Interval between polls of the file.
const POLL_INTERVAL: Duration = Duration::from_millis(2);

/// Prints marks if the host has requested them.
#[derive(Debug, Clone, Copy)]
pub struct Marks {
    wanted: bool,
}

impl Marks {
    /// Creates marks, which have no effect unless `wanted` is true.
    pub fn new(wanted: bool) -> Self {
        Self { wanted }
    }

    /// Prints `MARK name` and `more` for the host, waits for the file `/mark-NAME`, and removes it.
    pub fn at(self, name: &str, more: &str) -> Result<()> {
        if !self.wanted {
            return Ok(());
        }
        let (told, began) = (PathBuf::from(format!("/mark-{name}")), Instant::now());
        println!("MARK {name} {more}");
        while !told.exists() {
            ensure!(began.elapsed() < HOST_TIMEOUT, "the host has not read mark {name}");
            sleep(POLL_INTERVAL);
        }
        Ok(fs::remove_file(told)?)
    }
}
