//! Compute contexts on nouveau.

use std::sync::Arc;

use anyhow::{Result, ensure};
pub use gdev::nouveau::MOST_IN_FLIGHT;
use gdev::nouveau::{Device, Nouveau, TUNING};
use gdev::{Context, Tuning};

/// A context on nouveau.
pub type Guest = Context<Nouveau>;

/// Copy settings with which every VRAM copy uses a copy engine, because the tests count these copies.
const BY_ENGINE: Tuning = Tuning { direct_write_bytes: 0, direct_read_bytes: 0, ..TUNING };

/// Creates a context whose VRAM copies all use a copy engine.
pub fn context(device: &Arc<Device>) -> Result<Guest> {
    Ok(Context::new(Nouveau::new(device)?, BY_ENGINE))
}

/// Creates a context that measures the GPU time of its launches.
pub fn measuring(device: &Arc<Device>) -> Result<Guest> {
    let mut guest = context(device)?;
    guest.backend_mut().measure_launches();
    Ok(guest)
}

/// Creates a context with at most `in_flight` submissions in flight. Further launches wait for the oldest submission.
pub fn running_ahead(device: &Arc<Device>, in_flight: u64) -> Result<Guest> {
    ensure!((1..=MOST_IN_FLIGHT).contains(&in_flight), "{in_flight} in flight: from 1 to {MOST_IN_FLIGHT}");
    Ok(Context::new(Nouveau::running_ahead(device, in_flight)?, BY_ENGINE))
}
