//! The driver's functions that create and destroy contexts. Drains need the list of contexts.
//!
//! UNSAFETY: forwards calls.
#![allow(unsafe_code, reason = "see UNSAFETY")]

use std::ffi::{c_int, c_void};

use super::{memory, shim};
use crate::driver::{self, Object, SUCCESS};
use crate::symbols::at;

macro_rules! made {
    ($name:ident($($arg:ident: $ty:ty),*)) => {
        unsafe extern "C" fn $name(context: *mut Object, $($arg: $ty),*) -> c_int {
            // SAFETY: guaranteed by the caller; the driver has written the context if it succeeds.
            unsafe {
                let result = driver::$name(context, $($arg),*);
                if result == SUCCESS {
                    shim().contexts.note(*context as u64);
                }
                result
            }
        }
    };
}

made!(primary_ctx_retain(device: c_int));
made!(ctx_create(flags: u32, device: c_int));
made!(ctx_create_v3(affinity: *const c_void, count: c_int, flags: u32, device: c_int));
made!(ctx_create_v4(parameters: *const c_void, flags: u32, device: c_int));

/// Removes the records about a context that is about to end.
fn ends(context: Object) {
    let shim = shim();
    shim.contexts.forget(context as u64);
    memory().context_ends(context as u64);
    shim.pacing.solo_backlog.forget();
    shim.pacing.fences.context_ends(context as u64);
    shim.captures.context_ended(Some(context as u64));
}

unsafe extern "C" fn ctx_destroy(context: Object) -> c_int {
    ends(context);
    // SAFETY: guaranteed by the caller.
    unsafe { driver::ctx_destroy(context) }
}

unsafe extern "C" fn ctx_destroy_first(context: Object) -> c_int {
    ends(context);
    // SAFETY: guaranteed by the caller.
    unsafe { driver::ctx_destroy_first(context) }
}

/// Prepares for the possible end of a context: streams can no longer reuse the memory that they freed, and the
/// context's events are forgotten.
fn may_end() {
    let pacing = &shim().pacing;
    memory().contexts_end();
    pacing.solo_backlog.forget();
    pacing.fences.contexts_may_end();
}

unsafe extern "C" fn green_ctx_destroy(context: Object) -> c_int {
    may_end();
    // SAFETY: guaranteed by the caller.
    unsafe { driver::green_ctx_destroy(context) }
}

macro_rules! primary_ends {
    ($name:ident) => {
        unsafe extern "C" fn $name(device: c_int) -> c_int {
            may_end();
            // SAFETY: guaranteed by the caller.
            let result = unsafe { driver::$name(device) };
            let (mut flags, mut active) = (0, 0);
            // SAFETY: the pointers point to locals.
            let told = unsafe { driver::primary_ctx_get_state(device, &raw mut flags, &raw mut active) };
            // Other threads may still have a reference; in this case, their work continues.
            if told == SUCCESS && active == 0 {
                shim().pacing.fences.contexts_ended();
                shim().captures.context_ended(None);
            }
            result
        }
    };
}

primary_ends!(primary_ctx_release);
primary_ends!(primary_ctx_release_first);
primary_ends!(primary_ctx_reset);
primary_ends!(primary_ctx_reset_first);

pub fn ours(index: usize) -> Option<*mut ()> {
    Some(match index {
        at::cuDevicePrimaryCtxRetain => primary_ctx_retain as *mut (),
        at::cuCtxCreate_v2 => ctx_create as *mut (),
        at::cuCtxCreate_v3 => ctx_create_v3 as *mut (),
        at::cuCtxCreate_v4 => ctx_create_v4 as *mut (),
        at::cuCtxDestroy_v2 => ctx_destroy as *mut (),
        at::cuCtxDestroy => ctx_destroy_first as *mut (),
        at::cuDevicePrimaryCtxRelease_v2 => primary_ctx_release as *mut (),
        at::cuDevicePrimaryCtxRelease => primary_ctx_release_first as *mut (),
        at::cuDevicePrimaryCtxReset_v2 => primary_ctx_reset as *mut (),
        at::cuDevicePrimaryCtxReset => primary_ctx_reset_first as *mut (),
        at::cuGreenCtxDestroy => green_ctx_destroy as *mut (),
        _ => return None,
    })
}
