//! Marks between the phases of a run: a line for the host, and a wait until the host has looked at what it counts.

use std::fs;
use std::path::PathBuf;
use std::thread::sleep;
use std::time::{Duration, Instant};

use anyhow::{Result, ensure};

/// Time that the host may take.
const PATIENCE: Duration = Duration::from_secs(120);
/// Time between two looks whether it has.
const LOOK: Duration = Duration::from_millis(2);

/// Marks, if the host wants any.
#[derive(Debug, Clone, Copy)]
pub struct Marks {
    wanted: bool,
}

impl Marks {
    /// Marks that are made if `wanted`.
    pub fn new(wanted: bool) -> Self {
        Self { wanted }
    }

    /// Says `MARK name` and what else the host is to know, and waits for the file `/mark-NAME`, which it takes away.
    pub fn at(self, name: &str, more: &str) -> Result<()> {
        if !self.wanted {
            return Ok(());
        }
        let (told, began) = (PathBuf::from(format!("/mark-{name}")), Instant::now());
        println!("MARK {name} {more}");
        while !told.exists() {
            ensure!(began.elapsed() < PATIENCE, "nobody has looked at mark {name}");
            sleep(LOOK);
        }
        Ok(fs::remove_file(told)?)
    }
}
