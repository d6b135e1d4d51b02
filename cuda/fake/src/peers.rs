//! Functions for peer access. All cards support access to each other's memory, but work that uses another card's memory
//! without enabled access kills the program. NVIDIA's driver is less strict and destroys only the context.
//!
//! `cuMemSetAccess` gives a card access to a mapping. A card can access memory from `cuMemAlloc` while one of its
//! contexts has enabled access to a context of the memory's card. Copies between two cards do not need access, because
//! NVIDIA's driver copies through host memory. Such copies must specify the context of each address.
//!
//! UNSAFETY: reads and writes through the program's pointers, as the real driver does.
#![allow(unsafe_code, reason = "see UNSAFETY")]
#![allow(non_snake_case, reason = "names of the driver API")]
#![allow(clippy::undocumented_unsafe_blocks, reason = "see UNSAFETY; the promise is the caller's everywhere")]

use std::ffi::c_int;

use crate::api::{api, context, initialised, named, put};
use crate::current::{CURRENT, current_device, device_of};
use crate::result::*;
use crate::work::{self, Op};
use crate::{memory, pairs};

/// Enables or disables the current context's access to memory of the context `peer`.
fn change(peer: u64, enable: bool) -> i32 {
    let (Some(from), Some(to)) = (device_of(CURRENT.get()), device_of(peer)) else { return INVALID_CONTEXT };
    if from == to {
        return INVALID_DEVICE;
    }
    if !pairs::change((CURRENT.get(), peer), enable) {
        return if enable { PEER_ACCESS_ALREADY_ENABLED } else { PEER_ACCESS_NOT_ENABLED };
    }
    let access = if enable || pairs::of(to).contains(&from) { 3 } else { 0 };
    memory::allow_plain(to, from, access).err().unwrap_or(SUCCESS)
}

/// Returns an operation that copies between two contexts. Each address must be in the memory of its context's card.
fn copy(to: (u64, u64), from: (u64, u64), bytes: u64) -> Result<Op, i32> {
    for (at, context) in [to, from] {
        let device = device_of(context).ok_or(INVALID_CONTEXT)?;
        if memory::find(at).is_none_or(|found| found.device != device) {
            return Err(INVALID_VALUE);
        }
    }
    Ok(Op::Copy(to.0, from.0, bytes))
}

api! {
    initialised cuDeviceCanAccessPeer(can: *mut c_int, device: c_int, peer: c_int) {
        if named(device).is_err() || named(peer).is_err() {
            return INVALID_DEVICE;
        }
        put(can, Ok(c_int::from(device != peer)))
    }
    context cuCtxEnablePeerAccess(peer: u64, flags: u32) {
        if flags != 0 {
            return INVALID_VALUE;
        }
        change(peer, true)
    }
    context cuCtxDisablePeerAccess(peer: u64) {
        work::finish_all();
        change(peer, false)
    }
    context cuMemcpyPeer(to: u64, to_context: u64, from: u64, from_context: u64, bytes: usize) {
        match copy((to, to_context), (from, from_context), bytes as u64) {
            Ok(op) => work::synchronous(op),
            Err(error) => error,
        }
    }
    context cuMemcpyPeerAsync(
        to: u64, to_context: u64, from: u64, from_context: u64, bytes: usize, stream: u64
    ) {
        match copy((to, to_context), (from, from_context), bytes as u64) {
            Ok(op) => work::submit(stream, op),
            Err(error) => error,
        }
    }
    // No kernel of the fake supports multi-device launches.
    context cuLaunchCooperativeKernelMultiDevice(_list: *const c_int, _count: u32, _flags: u32) { INVALID_VALUE }
    context cuStreamGetCtx(stream: u64, to: *mut u64) { put(to, work::context_of(stream)) }
    context cuMemPoolSetAccess(_pool: u64, list: *const [c_int; 3], count: usize) {
        let list = if list.is_null() { &[][..] } else { std::slice::from_raw_parts(list, count) };
        let is_own = |[kind, device, _]: &[c_int; 3]| *kind == 1 && *device == current_device();
        if list.iter().all(is_own) { SUCCESS } else { NOT_SUPPORTED }
    }
}
