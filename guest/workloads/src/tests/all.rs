//! Runs all tests sequentially.

use anyhow::{Result, ensure};

use super::Facts;
use crate::options::Options;
use crate::rig::Rig;
use crate::{Test, report};

/// The tests that `all` runs.
const NAMES: [&str; 10] = ["query", "map", "copy", "sweep", "move", "fences", "channels", "procs", "gdev", "scan"];

/// Runs `all [--quick]`. Continues after a failure, so that all failures are reported.
pub fn run(rig: &Rig, options: &Options) -> Result<Facts> {
    let mut failed = Vec::new();
    for name in NAMES {
        let Some(test) = Test::named(name) else { continue };
        if !report::run(rig, options, &test) {
            failed.push(name);
        }
    }
    ensure!(failed.is_empty(), "failed: {}", failed.join(" "));
    Ok(vec![("tests", NAMES.len().to_string()), ("seed", rig.seed().to_string())])
}
