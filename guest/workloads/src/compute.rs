//! Contexts that compute through nouveau.

use std::sync::Arc;

use anyhow::{Result, ensure};
pub use gdev::nouveau::MOST_IN_FLIGHT;
use gdev::nouveau::{Device, Nouveau, TUNING};
use gdev::{Context, Tuning};

/// A context of nouveau.
pub type Guest = Context<Nouveau>;

/// Limits that make every copy of VRAM use the copy engine, whose work the tests count.
const BY_ENGINE: Tuning = Tuning { direct_write_bytes: 0, direct_read_bytes: 0, ..TUNING };

/// Creates a context.
pub fn context(device: &Arc<Device>) -> Result<Guest> {
    Ok(Context::new(Nouveau::new(device)?, BY_ENGINE))
}

/// Creates a context in which a launch waits for the oldest submission if `in_flight` submissions are in flight.
pub fn running_ahead(device: &Arc<Device>, in_flight: u64) -> Result<Guest> {
    ensure!((1..=MOST_IN_FLIGHT).contains(&in_flight), "{in_flight} in flight: from 1 to {MOST_IN_FLIGHT}");
    Ok(Context::new(Nouveau::running_ahead(device, in_flight)?, BY_ENGINE))
}
