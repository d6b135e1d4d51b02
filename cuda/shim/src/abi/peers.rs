//! Driver functions for peer access in a program with several cards.
//!
//! `cuDeviceCanAccessPeer` and copies between contexts do not need a replacement: the driver sees only the program's
//! cards, and copies pass the gate.
//!
//! UNSAFETY: forwards calls.
#![allow(unsafe_code, reason = "see UNSAFETY")]

use std::ffi::{c_int, c_void};

use super::shim;
use super::stubs::GATES;
use crate::driver::{self, Access, INVALID_CONTEXT, NOT_SUPPORTED, Object, SUCCESS};
use crate::events;
use crate::log::report;
use crate::peers::Pair;
use crate::symbols::at;

/// Returns the device of a context.
fn device_of(context: Object) -> Result<c_int, c_int> {
    events::within(context as u64, driver::current_device)
}

/// `cuCtxEnablePeerAccess`: grants the current context access to the memory of `peer`.
unsafe extern "C" fn enable(peer: Object, flags: u32) -> c_int {
    // SAFETY: guaranteed by the caller.
    let result = unsafe { driver::ctx_enable_peer_access(peer, flags) };
    if result != SUCCESS {
        return result;
    }
    let shim = shim();
    let context = driver::current_context();
    let allowed = match (driver::current_device(), device_of(peer)) {
        (Ok(from), Ok(to)) => shim.of_device(to).ok_or(INVALID_CONTEXT).and_then(|card| {
            shim.allow_cross_access();
            shim.peers.add(Pair { from: (context as u64, from), to: (peer as u64, to) });
            shim.memory(card).add_peer(from)
        }),
        (Err(error), _) | (_, Err(error)) => Err(error),
    };
    if let Err(error) = allowed {
        // SAFETY: the access was enabled above.
        unsafe { disable(peer) };
        return error;
    }
    SUCCESS
}

/// `cuCtxDisablePeerAccess`.
unsafe extern "C" fn disable(peer: Object) -> c_int {
    // SAFETY: guaranteed by the caller.
    let result = unsafe { driver::ctx_disable_peer_access(peer) };
    if result == SUCCESS {
        let context = driver::current_context() as u64;
        ends(|pair| pair.from.0 == context && pair.to.0 == peer as u64);
    }
    result
}

/// Removes the pairs that match `is_it`, and revokes access between devices that have no other pair.
pub fn ends(is_it: impl Fn(&Pair) -> bool) {
    let shim = shim();
    for (from, to) in shim.peers.remove(is_it) {
        if let Some(card) = shim.of_device(to) {
            shim.memory(card).remove_peer(from);
        }
    }
}

/// `cuMemPoolSetAccess`. Allocations from pools are backed by chunks, so the pool's access settings do not apply to
/// them. A call that grants access to another card is rejected, and other calls are forwarded.
unsafe extern "C" fn pool_set_access(pool: Object, access: *const Access, count: usize) -> c_int {
    if !access.is_null() {
        // SAFETY: guaranteed by the caller: the list has `count` entries.
        let list = unsafe { std::slice::from_raw_parts(access, count) };
        let own = driver::current_device().ok();
        let is_other = |access: &Access| access.flags() != 0 && access.device() != own;
        if list.iter().any(is_other) {
            report!("cuMemPoolSetAccess is not supported for another card: enable peer access between the contexts");
            return NOT_SUPPORTED;
        }
    }
    // SAFETY: guaranteed by the caller.
    unsafe { driver::mem_pool_set_access(pool, access, count) }
}

/// `cuLaunchCooperativeKernelMultiDevice`, which NVIDIA has deprecated. A call with several kernels is rejected,
/// because it would need slices on several cards at the same time.
unsafe extern "C" fn launch_multi_device(list: *const c_void, count: u32, flags: u32) -> c_int {
    if count > 1 {
        report!("cuLaunchCooperativeKernelMultiDevice is not supported with several cards");
        return NOT_SUPPORTED;
    }
    type Call = unsafe extern "C" fn(*const c_void, u32, u32) -> c_int;
    // SAFETY: the headers declare the symbol with these arguments, which the caller guarantees to be valid.
    unsafe {
        let call: Call = std::mem::transmute(GATES[at::cuLaunchCooperativeKernelMultiDevice]);
        call(list, count, flags)
    }
}

pub fn ours(index: usize) -> Option<*mut ()> {
    if shim().is_single() {
        return None;
    }
    Some(match index {
        at::cuCtxEnablePeerAccess => enable as *mut (),
        at::cuCtxDisablePeerAccess => disable as *mut (),
        at::cuMemPoolSetAccess => pool_set_access as *mut (),
        at::cuLaunchCooperativeKernelMultiDevice => launch_multi_device as *mut (),
        _ => return None,
    })
}
