//! Contexts of the program, noted as they are made: a drain must reach the work in each.
//!
//! UNSAFETY: passes calls on.
#![allow(unsafe_code, reason = "see UNSAFETY")]

use std::ffi::{c_int, c_void};

use crate::driver::{self, Object, SUCCESS};
use crate::slots::at;
use crate::{lone, memory, tenant};

macro_rules! made {
    ($name:ident($($arg:ident: $ty:ty),*)) => {
        unsafe extern "C" fn $name(context: *mut Object, $($arg: $ty),*) -> c_int {
            // SAFETY: the caller's promise; the driver has written the context if it succeeds.
            unsafe {
                let result = driver::$name(context, $($arg),*);
                if result == SUCCESS {
                    tenant::note(*context as u64);
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

unsafe extern "C" fn ctx_destroy(context: Object) -> c_int {
    tenant::forget(context as u64);
    memory::context_ends(context as u64);
    lone::forget();
    // SAFETY: the caller's promise.
    unsafe { driver::ctx_destroy(context) }
}

macro_rules! ends_all {
    ($name:ident($arg:ident: $ty:ty)) => {
        /// Unmarks what streams of a context have freed, and forgets its events.
        unsafe extern "C" fn $name($arg: $ty) -> c_int {
            memory::contexts_end();
            lone::forget();
            // SAFETY: the caller's promise.
            unsafe { driver::$name($arg) }
        }
    };
}

ends_all!(primary_ctx_release(device: c_int));
ends_all!(primary_ctx_release_first(device: c_int));
ends_all!(primary_ctx_reset(device: c_int));
ends_all!(primary_ctx_reset_first(device: c_int));
ends_all!(ctx_destroy_first(context: Object));
ends_all!(green_ctx_destroy(context: Object));

/// Functions of this module by symbol.
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
