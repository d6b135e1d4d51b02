//! `cuInit`, and the lookup of this library's replacement functions.
//!
//! UNSAFETY: forwards the call.
#![allow(unsafe_code, reason = "see UNSAFETY")]

use std::ffi::c_int;

use super::stubs::{GATES, PRESENTS};
use super::{captures, contexts, devices, lookup, memory, peers, shim};
use crate::driver::{self, SUCCESS};
use crate::symbols::{GATED, NAMES_MEMORY, at};
use crate::{agent, fork, visible};

/// `cuInit`. Fails if a tenant's program cannot connect, so that the program never runs outside its limits.
unsafe extern "C" fn init(flags: u32) -> c_int {
    // SAFETY: guaranteed by the caller.
    let driver = || unsafe { driver::init(flags) };
    agent::start(shim(), |cards, others| {
        fork::initialises();
        let result = visible::initialise(cards, others, driver);
        if result != SUCCESS {
            fork::is_not_initialised();
        }
        result
    })
}

/// Returns this library's replacement for a symbol, if it has one.
pub fn ours(index: usize) -> Option<*mut ()> {
    devices::ours(index).or_else(|| within(index))
}

/// Returns this library's replacement for a call that does not name a hidden device, if it has one.
pub fn within(index: usize) -> Option<*mut ()> {
    let present =
        || NAMES_MEMORY.get(index).is_some_and(|names| *names).then(|| PRESENTS.get(index).map(|f| *f as *mut ()));
    let gated = || GATED.get(index).is_some_and(|gated| *gated).then(|| GATES.get(index).map(|f| *f as *mut ()));
    (index == at::cuInit)
        .then_some(init as *mut ())
        .or_else(|| lookup::ours(index))
        .or_else(|| memory::ours(index))
        .or_else(|| contexts::ours(index))
        .or_else(|| captures::ours(index))
        .or_else(|| peers::ours(index))
        .or_else(|| gated().flatten())
        .or_else(|| present().flatten())
}
