//! The symbols in the driver API and in NVML, and the corresponding real functions.
//!
//! UNSAFETY: reads call arguments by position.
#![allow(unsafe_code, reason = "see UNSAFETY")]
#![allow(non_upper_case_globals, missing_docs, dead_code, reason = "names of the driver API")]

use std::ffi::CStr;
use std::sync::atomic::{AtomicPtr, Ordering};

include!(concat!(env!("OUT_DIR"), "/symbols.rs"));

/// Functions of the real libraries, or null for functions that do not exist. The driver's functions precede those of
/// NVML. Static, because the stubs of submissions jump through this table.
pub static REAL: [AtomicPtr<()>; ALL] = [const { AtomicPtr::new(std::ptr::null_mut()) }; ALL];

/// Returns the real function of a symbol, or null if it does not exist.
#[inline]
pub fn real(index: usize) -> *mut () {
    REAL.get(index).map_or(std::ptr::null_mut(), |r| r.load(Ordering::Relaxed))
}

/// Arguments of a call whose signature is unknown.
#[derive(Clone, Copy, Debug)]
pub struct Arguments {
    registers: *const u64,
    stack: *const u64,
}

impl Arguments {
    /// Wraps the arguments that a stub has saved: six registers, and the remaining arguments on the caller's stack.
    pub const fn new(registers: *const u64, stack: *const u64) -> Self {
        Self { registers, stack }
    }

    /// Arguments of a call without any.
    pub const NONE: Self = Self { registers: std::ptr::null(), stack: std::ptr::null() };

    /// Returns the argument with the zero-based index `n` as an integer or pointer.
    ///
    /// # Safety
    /// The function must have more than `n` arguments and no floating-point arguments.
    #[inline]
    pub unsafe fn get(&self, n: usize) -> u64 {
        // SAFETY: the stub has saved six registers in descending order. The remaining arguments are on the caller's
        // stack.
        unsafe { if n < 6 { *self.registers.add(5 - n) } else { *self.stack.add(n - 6) } }
    }
}
