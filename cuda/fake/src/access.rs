//! Checks the access rights of work that uses other cards' memory.

use std::cell::Cell;
use std::ffi::c_int;

use crate::{card, memory};

thread_local! {
    /// Device whose work this thread runs.
    static RUNS_ON: Cell<c_int> = const { Cell::new(-1) };
    /// The last checked range: its start, its end, and the generation of access rights.
    static CHECKED: Cell<(u64, u64, u64)> = const { Cell::new((0, 0, 0)) };
}

/// Sets the device whose work this thread runs.
pub fn runs_on(device: c_int) {
    RUNS_ON.set(device);
    CHECKED.set((0, 0, 0));
}

/// Kills the program if the device of this thread's work does not have access to an address on another card.
pub fn check(at: u64) {
    let device = RUNS_ON.get();
    if device < 0 || card::visible().len() < 2 {
        return;
    }
    let (start, end, checked) = CHECKED.get();
    let generation = memory::generation();
    if (start..end).contains(&at) && checked == generation {
        return;
    }
    match memory::access_of(at, device) {
        Some((range, access)) if access != 0 => CHECKED.set((range.0, range.0 + range.1, generation)),
        Some(_) => {
            eprintln!("fake libcuda: work of device {device} uses {at:#x}, to which it has no access");
            std::process::abort();
        }
        // No allocation is mapped at the address, so it is in host memory.
        None => {}
    }
}
