//! Copies by M2MF in PGRAPH and by the copy engines.
//!
//! Modules: [`layout`] computes the addresses of a surface's bytes, [`job`] is a copy in progress, and [`m2mf`] and
//! [`ce`] are the two method sets that describe copies.

pub mod ce;
pub mod job;
pub mod layout;
pub mod m2mf;

#[cfg(test)]
mod tests;

pub use ce::CopyEngine;
pub use m2mf::M2mf;

use crate::engines::{EngineCx, EngineError, Progress};

/// Continues `job`, and drops it when it is done or faults.
fn step(job: &mut Option<job::Job>, cx: &mut EngineCx<'_>, budget: u64) -> Result<Progress, EngineError> {
    let Some(current) = job else { return Ok(Progress::Done) };
    let result = current.step(cx, budget);
    if !matches!(result, Ok(Progress::More)) {
        *job = None;
    }
    result
}
