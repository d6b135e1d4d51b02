//! Contexts of the program, noted as they are made: a drain must reach the work in each.
//!
//! UNSAFETY: passes calls on.
#![allow(unsafe_code, reason = "see UNSAFETY")]

use std::ffi::{c_int, c_void};

use crate::driver::{self, Object, SUCCESS};
use crate::slots::at;
use crate::tenant;

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
    // SAFETY: the caller's promise.
    unsafe { driver::ctx_destroy(context) }
}

/// Functions of this module by symbol.
pub fn ours(index: usize) -> Option<*mut ()> {
    Some(match index {
        at::cuDevicePrimaryCtxRetain => primary_ctx_retain as *mut (),
        at::cuCtxCreate_v2 => ctx_create as *mut (),
        at::cuCtxCreate_v3 => ctx_create_v3 as *mut (),
        at::cuCtxCreate_v4 => ctx_create_v4 as *mut (),
        at::cuCtxDestroy_v2 => ctx_destroy as *mut (),
        _ => return None,
    })
}
