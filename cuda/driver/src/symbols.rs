//! The symbols of the driver API and of NVML, and their real functions.
//!
//! UNSAFETY: reads the arguments of functions by position.
#![allow(unsafe_code, reason = "see UNSAFETY")]
#![allow(non_upper_case_globals, missing_docs, dead_code, reason = "names of the driver API")]

use std::ffi::CStr;
use std::sync::atomic::{AtomicPtr, Ordering};

include!(concat!(env!("OUT_DIR"), "/symbols.rs"));

/// Functions of the real libraries, or null for functions that a library does not have. The driver's functions come
/// first, and then NVML's. Static, because the stubs of submissions jump through this table.
pub static REAL: [AtomicPtr<()>; ALL] = [const { AtomicPtr::new(std::ptr::null_mut()) }; ALL];

/// Returns the real function of a symbol, or null if the library does not have it.
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
    /// Wraps the arguments that a stub has saved: six registers, and the rest on the caller's stack.
    pub const fn new(registers: *const u64, stack: *const u64) -> Self {
        Self { registers, stack }
    }

    /// The value for a call without arguments.
    pub const NONE: Self = Self { registers: std::ptr::null(), stack: std::ptr::null() };

    /// Returns argument `n`, starting at 0, as an integer or pointer.
    ///
    /// # Safety
    /// The function must have more than `n` arguments, and none of them may be a floating-point number.
    #[inline]
    pub unsafe fn get(&self, n: usize) -> u64 {
        // SAFETY: the stub has saved six registers, in descending order, and the rest is on the caller's stack.
        unsafe { if n < 6 { *self.registers.add(5 - n) } else { *self.stack.add(n - 6) } }
    }
}
