//! The current context of each thread.

use std::cell::Cell;
use std::ffi::c_int;

use crate::{card, further};

/// Handle of the first device's primary context. Those of the other devices follow. A device's further contexts are at
/// offsets that are multiples of [`CONTEXT_STRIDE`].
pub const CONTEXT: u64 = 0x7700_0000;
pub const CONTEXT_STRIDE: u64 = 0x100;

thread_local! {
    /// The thread's current context, or 0 if it has none.
    pub static CURRENT: Cell<u64> = const { Cell::new(0) };
}

/// Returns the device of the current context, or the first device if no context is current.
pub fn current_device() -> c_int {
    device_of(CURRENT.get()).unwrap_or(0)
}

/// Returns the device of an existing context.
pub fn device_of(context: u64) -> Option<c_int> {
    let number = context.checked_sub(CONTEXT)?;
    let device = (number % CONTEXT_STRIDE) as c_int;
    (further::is_there(number / CONTEXT_STRIDE) && card::of_device(device).is_some()).then_some(device)
}
