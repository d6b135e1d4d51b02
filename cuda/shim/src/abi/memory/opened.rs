//! Driver functions for memory shared between a tenant's processes.
//!
//! UNSAFETY: reads and writes through the program's pointers, as the driver would.
#![allow(unsafe_code, reason = "see UNSAFETY")]

use std::ffi::c_int;
use std::time::{Duration, Instant};

use cuda_protocol::{FromTenant, Refusal};

use crate::abi::{memory, memory_at, shim};
use crate::driver::{self, Address, INVALID_CONTEXT, INVALID_VALUE, Ipc, NOT_SUPPORTED, OUT_OF_MEMORY, SUCCESS};
use crate::link::Answer;
use crate::memory::opened::Token;
use crate::symbols::at;

/// `CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS`, the only flag, which is mandatory.
const LAZY: u32 = 1;
/// Timeout for a relocation that delays an export.
// TIMEOUT: relocating a process's chunks takes milliseconds; an owner that needs much longer is stuck.
const UNDER_WAY: Duration = Duration::from_secs(20);

unsafe extern "C" fn get_handle(handle: *mut Ipc, address: Address) -> c_int {
    let (memory, since) = (memory_at(address), Instant::now());
    loop {
        if memory.with(|chunks| chunks.opened.find(address).is_some()) {
            // As with NVIDIA's driver, a process cannot share memory that another process has shared with it.
            return INVALID_VALUE;
        }
        let backed = memory.with(|chunks| {
            let backed = chunks.backing(address)?;
            // Mark the chunks first: once the owner has replied, the next owner must not move them for this process
            // alone.
            chunks.mark_shared(&backed.chunks);
            Some(backed)
        });
        let Some(backed) = backed else {
            // SAFETY: guaranteed by the caller.
            return unsafe { driver::ipc_get_mem_handle(handle, address) };
        };
        if handle.is_null() {
            return INVALID_VALUE;
        }
        let count = u32::try_from(backed.chunks.len()).unwrap_or(u32::MAX);
        let list = backed.chunks.clone();
        match memory.link.request(|request| FromTenant::Export { request, chunks: list }) {
            Answer::Shared(share) => {
                memory.with(|chunks| chunks.opened.add_own(share));
                let (offset, bytes, card) = (backed.offset, backed.bytes, backed.card);
                // SAFETY: `handle` is not null, and the caller guarantees that it is valid.
                unsafe { *handle = Token { share, offset, bytes, chunks: count, card }.write() };
                return SUCCESS;
            }
            // A relocation is in progress.
            Answer::Refused(Refusal::Moving, _) if since.elapsed() < UNDER_WAY => {
                std::thread::sleep(Duration::from_millis(1));
            }
            Answer::Refused(Refusal::Exhausted | Refusal::Quota, _) => return OUT_OF_MEMORY,
            Answer::Away if memory.link.wait_for_owner() => {}
            _ => return NOT_SUPPORTED,
        }
    }
}

/// Opens a handle through the owner if this library created it, and with `real` otherwise.
unsafe fn open(to: *mut Address, handle: Ipc, flags: u32, real: unsafe fn(*mut Address, Ipc, u32) -> c_int) -> c_int {
    let Some(token) = Token::read(&handle) else {
        // SAFETY: guaranteed by the caller.
        return unsafe { real(to, handle, flags) };
    };
    let memory = memory();
    let Some(chunk_bytes) = memory.link.terms().map(|terms| terms.chunk_bytes) else { return INVALID_CONTEXT };
    if to.is_null() || flags != LAZY || !token.fits(chunk_bytes) {
        return INVALID_VALUE;
    }
    let device = match driver::current_device() {
        Ok(device) => device,
        Err(error) => return error,
    };
    memory.contexts.note_current();
    memory.memory.set_elsewhere();
    let found = memory.with(|chunks| match chunks.opened.is_own(&token.share) {
        // The driver returns the same error for the process's own memory.
        true => Err(INVALID_CONTEXT),
        false => Ok(chunks.opened.again(token.share)),
    });
    let mut opened = match found {
        Err(error) => return error,
        Ok(Some(address)) => Ok(address),
        Ok(None) => Err(INVALID_VALUE),
    };
    if opened.is_err() {
        let ask = |request| FromTenant::Open { request, share: token.share };
        memory.obtain_by(ask, token.chunks, |chunks, granted| {
            let Some(granted) = granted else { return Vec::new() };
            // Another thread may have opened the memory first.
            if let Some(address) = chunks.opened.again(token.share) {
                opened = Ok(address);
                return granted.iter().map(|part| part.0.id).collect();
            }
            match chunks.opened.map(token, device, chunk_bytes, granted) {
                Ok(address) => {
                    opened = Ok(address);
                    Vec::new()
                }
                Err(back) => {
                    opened = Err(OUT_OF_MEMORY);
                    back
                }
            }
        });
    }
    match opened {
        Ok(address) => {
            // SAFETY: `to` is not null, and the caller guarantees that it is valid.
            unsafe { *to = address };
            SUCCESS
        }
        Err(error) => error,
    }
}

unsafe extern "C" fn open_handle(to: *mut Address, handle: Ipc, flags: u32) -> c_int {
    // SAFETY: guaranteed by the caller.
    unsafe { open(to, handle, flags, driver::ipc_open_mem_handle) }
}

unsafe extern "C" fn open_handle_v2(to: *mut Address, handle: Ipc, flags: u32) -> c_int {
    // SAFETY: guaranteed by the caller.
    unsafe { open(to, handle, flags, driver::ipc_open_mem_handle_v2) }
}

unsafe extern "C" fn close_handle(address: Address) -> c_int {
    let shim = shim();
    let card = shim.of_address(address);
    let memory = shim.memory(card);
    if !memory.with(|chunks| chunks.opened.starts_at(address)) {
        // SAFETY: guaranteed by the caller.
        return unsafe { driver::ipc_close_mem_handle(address) };
    }
    if !memory.captures.any() {
        // Wait until no work uses the memory. SAFETY: the call takes no pointers.
        shim.in_context(card, || unsafe { driver::ctx_synchronize() });
    }
    let closed = memory.with(|chunks| {
        let freed = driver::relaxed(|| chunks.opened.close(address));
        freed.map(|freed| memory.give_back(freed))
    });
    if closed.is_some() { SUCCESS } else { INVALID_VALUE }
}

pub fn ours(index: usize) -> Option<*mut ()> {
    Some(match index {
        at::cuIpcGetMemHandle => get_handle as *mut (),
        at::cuIpcOpenMemHandle => open_handle as *mut (),
        at::cuIpcOpenMemHandle_v2 => open_handle_v2 as *mut (),
        at::cuIpcCloseMemHandle => close_handle as *mut (),
        _ => return None,
    })
}
