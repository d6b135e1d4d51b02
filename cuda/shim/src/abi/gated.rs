//! Submissions, which pass through the gate.
//!
//! UNSAFETY: reads call arguments by position.
#![allow(unsafe_code, reason = "see UNSAFETY")]

use std::ffi::c_int;

use crate::driver::SUCCESS;
use crate::shim::{Card, Shim};
use crate::streams::{self, stream};
use crate::symbols::{Arguments, COPIES, at};

mod several;

/// Token passed from [`enter`] to [`leave`] for a submission that the gate does not count.
const UNGATED_TOKEN: u64 = u64::MAX;

/// Combines a function and its grid dimensions into a key.
fn shaped(function: u64, grid: [u32; 3]) -> u64 {
    let mix = |key: u64, size: u32| (key.rotate_left(23) ^ u64::from(size)).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    grid.into_iter().fold(function, mix)
}

/// Returns a key that identifies repeated submissions of the same work, for estimates of its duration.
fn key(index: usize, arguments: Arguments) -> u64 {
    // SAFETY: the positions match the declarations in the headers.
    let get = |n| unsafe { arguments.get(n) };
    match index {
        at::cuLaunchKernel
        | at::cuLaunchKernel_ptsz
        | at::cuLaunchCooperativeKernel
        | at::cuLaunchCooperativeKernel_ptsz => shaped(get(0), [get(1) as u32, get(2) as u32, get(3) as u32]),
        at::cuLaunchKernelEx | at::cuLaunchKernelEx_ptsz => {
            let config = get(0) as *const [u32; 3];
            // SAFETY: `CUlaunchConfig` begins with the three grid dimensions.
            let grid = if config.is_null() { [0; 3] } else { unsafe { config.read_unaligned() } };
            shaped(get(1), grid)
        }
        _ if COPIES.get(index).copied().unwrap_or(false) => ((index as u64) << 8) | u64::from(get(2).leading_zeros()),
        _ => get(0),
    }
}

/// Prepares a submission. Waits while its card's gate is closed, or while too much of the program's work is in flight.
#[inline(always)]
pub fn enter(shim: &Shim, index: usize, arguments: Arguments) -> u64 {
    if shim.is_single() {
        enter_on(shim, shim.first(), index, arguments)
    } else {
        several::enter(shim, index, arguments)
    }
}

#[inline(always)]
fn enter_on(shim: &Shim, card: &Card, index: usize, arguments: Arguments) -> u64 {
    let (captures, pacing) = (&shim.captures, &card.pacing);
    if captures.any() && stream(index, arguments).is_capturing() {
        // The driver checks addresses when it captures a copy, so first map evicted chunks.
        shim.present();
        return UNGATED_TOKEN;
    }
    let measured = pacing.wait(captures, &card.gate, || stream(index, arguments));
    let held = !measured || card.gate.is_closed();
    let stripe = card.pass();
    // A slice that began while this thread was blocked may have enabled or disabled measuring.
    if pacing.run_ahead.is_active() {
        pacing.run_ahead.begin(captures, stream(index, arguments), held);
    }
    stripe as u64
}

/// Completes a submission.
#[inline(always)]
pub fn leave(shim: &Shim, index: usize, arguments: Arguments, token: u64, result: c_int) {
    if token == UNGATED_TOKEN {
        return;
    }
    if shim.is_single() {
        leave_on(shim, shim.first(), index, arguments, token, result);
    } else {
        several::leave(shim, index, arguments, token, result);
    }
}

#[inline(always)]
fn leave_on(shim: &Shim, card: &Card, index: usize, arguments: Arguments, token: u64, result: c_int) {
    let (captures, pacing) = (&shim.captures, &card.pacing);
    if pacing.run_ahead.is_active() {
        let copy = COPIES.get(index).copied().unwrap_or(false);
        let stream = stream(index, arguments);
        match result {
            SUCCESS => pacing.run_ahead.submitted(captures, stream, key(index, arguments), copy),
            _ => pacing.run_ahead.failed(stream),
        }
        if !streams::is_known(index) {
            pacing.submitted_anywhere();
        }
    } else if result == SUCCESS {
        pacing.submitted_unmeasured(captures, stream(index, arguments), streams::is_known(index));
    }
    card.gate.done(token as usize);
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::gate;
    use crate::settings::Settings;

    #[test]
    fn a_function_is_as_long_as_its_grid_is_large() {
        let keys = [[1, 1, 1], [2, 1, 1], [1, 2, 1], [1, 1, 2]].map(|grid| shaped(0x7f00_1000, grid));
        let all: std::collections::BTreeSet<_> = keys.into_iter().chain([shaped(0x7f00_1040, [1, 1, 1])]).collect();
        assert_eq!(all.len(), 5);
    }

    #[test]
    fn work_held_before_measurement_is_measured_from_its_start() {
        let shim = Shim::new(Settings::default());
        let index = at::cuCtxSynchronize;
        let card = shim.first();
        let flying = || card.pacing.run_ahead.groups();
        assert!(card.gate.close(gate::NO_SLICE, None));
        let found = std::thread::scope(|scope| {
            let (shim, flying) = (&shim, &flying);
            let thread = scope.spawn(move || {
                let token = enter(shim, index, Arguments::NONE);
                let began = flying();
                leave(shim, index, Arguments::NONE, token, crate::driver::INVALID_CONTEXT);
                (began, flying())
            });
            while !card.gate.is_held() {
                std::thread::yield_now();
            }
            card.pacing.run_ahead.bound(4000);
            card.gate.open(gate::NO_SLICE);
            thread.join().expect("passes")
        });
        assert_eq!(found, (1, 0), "begun before it goes to the driver, and withdrawn after the failure");
        assert!(card.gate.close(gate::NO_SLICE, None), "no thread is inside the gate");
    }
}
