//! Driver functions that create or destroy contexts. They maintain the list of contexts for drains.
//!
//! UNSAFETY: forwards calls.
#![allow(unsafe_code, reason = "see UNSAFETY")]

use std::ffi::{c_int, c_void};

use super::{peers, shim};
use crate::driver::{self, Object, SUCCESS};
use crate::shim::Card;
use crate::symbols::at;

/// Records a new context on a device.
fn made(context: u64, device: c_int) {
    let shim = shim();
    let card = shim.of_device(device).unwrap_or(shim.first());
    card.contexts.note(context);
}

macro_rules! made {
    ($name:ident($($arg:ident: $ty:ty),*)) => {
        unsafe extern "C" fn $name(context: *mut Object, $($arg: $ty,)* device: c_int) -> c_int {
            // SAFETY: guaranteed by the caller; the driver has written the context if it returned success.
            unsafe {
                let result = driver::$name(context, $($arg,)* device);
                if result == SUCCESS {
                    made(*context as u64, device);
                }
                result
            }
        }
    };
}

unsafe extern "C" fn primary_ctx_retain(context: *mut Object, device: c_int) -> c_int {
    // SAFETY: guaranteed by the caller; the driver has written the context if it returned success.
    unsafe {
        let result = driver::primary_ctx_retain(context, device);
        if result == SUCCESS {
            made(*context as u64, device);
            shim().peers.set_primary(device, *context as u64);
        }
        result
    }
}

made!(ctx_create(flags: u32));
made!(ctx_create_v3(affinity: *const c_void, count: c_int, flags: u32));
made!(ctx_create_v4(parameters: *const c_void, flags: u32));

/// Removes all records of a context that is about to be destroyed.
fn ends(context: Object) {
    let (shim, context) = (shim(), context as u64);
    let card = shim.of_context(context).unwrap_or(shim.current());
    // Destroying the context also destroys its streams.
    shim.stream_ends(None);
    peers::ends(|pair| pair.from.0 == context || pair.to.0 == context);
    card.contexts.forget(context);
    shim.memory(card).context_ends(context);
    card.pacing.solo_backlog.forget();
    card.pacing.fences.context_ends(context);
    shim.captures.context_ended(Some(context));
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

/// Prepares for the possible destruction of a card's context: streams can no longer reuse memory that they freed, and
/// the context's events are discarded.
fn may_end(card: &Card) {
    let shim = shim();
    shim.stream_ends(None);
    shim.memory(card).contexts_end();
    card.pacing.solo_backlog.forget();
    card.pacing.fences.contexts_may_end();
}

/// Records that the primary context of a card's device was destroyed.
fn ended(card: &Card, device: c_int) {
    let shim = shim();
    card.pacing.fences.contexts_ended();
    if shim.is_single() {
        shim.captures.context_ended(None);
    } else {
        card.contexts.all().into_iter().for_each(|context| shim.captures.context_ended(Some(context)));
    }
    if let Some(primary) = shim.peers.primary(device) {
        peers::ends(|pair| pair.from.0 == primary || pair.to.0 == primary);
    }
}

unsafe extern "C" fn green_ctx_destroy(context: Object) -> c_int {
    shim().cards().for_each(may_end);
    // SAFETY: guaranteed by the caller.
    unsafe { driver::green_ctx_destroy(context) }
}

macro_rules! primary_ends {
    ($name:ident) => {
        unsafe extern "C" fn $name(device: c_int) -> c_int {
            let shim = shim();
            let card = shim.of_device(device).unwrap_or(shim.first());
            may_end(card);
            // SAFETY: guaranteed by the caller.
            let result = unsafe { driver::$name(device) };
            let (mut flags, mut active) = (0, 0);
            // SAFETY: the pointers refer to local variables.
            let told = unsafe { driver::primary_ctx_get_state(device, &raw mut flags, &raw mut active) };
            // If other references exist, the context stays active, and its work continues.
            if told == SUCCESS && active == 0 {
                ended(card, device);
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
