//! Driver functions that allocate, free or query memory.
//!
//! UNSAFETY: reads and writes through the program's pointers, as the driver would.
#![allow(unsafe_code, reason = "see UNSAFETY")]

use std::ffi::{c_int, c_void};

use cuda_protocol::FromTenant;

use crate::abi::{memory, memory_at, shim};
use crate::driver::{self, Address, Handle, INVALID_VALUE, Object, SUCCESS};
use crate::link::Answer;
use crate::memory::chunks::ChunkMemory;
use crate::memory::fixed::Thing;
use crate::streams::Stream;
use crate::symbols::at;

/// `CU_POINTER_ATTRIBUTE_*`: attributes that the driver would report for a chunk instead of the whole allocation.
mod attribute {
    use std::ffi::c_int;

    pub const MEMORY_TYPE: c_int = 2;
    pub const HOST_POINTER: c_int = 4;
    pub const BUFFER_ID: c_int = 7;
    pub const DEVICE_ORDINAL: c_int = 9;
    pub const LEGACY_IPC: c_int = 10;
    pub const RANGE_START: c_int = 11;
    pub const RANGE_SIZE: c_int = 12;
    pub const HANDLE_TYPES: c_int = 14;
    pub const MAPPING_SIZE: c_int = 18;
    pub const MAPPING_BASE: c_int = 19;
    pub const BLOCK_ID: c_int = 20;
}

/// `CU_MEMORYTYPE_DEVICE`.
const DEVICE: u32 = 2;
/// Alignment of the row pitch in bytes.
const PITCH: u64 = 512;

/// Allocates memory in stream order. May reuse memory that the stream has freed, without a driver call.
unsafe fn allocate_after(address: *mut Address, bytes: u64, stream: Object, per_thread: bool) -> c_int {
    let shim = shim();
    let card = shim.of_stream(Stream::named(stream as u64, per_thread));
    shim.in_context(card, || {
        let memory = shim.memory(card);
        let again = if address.is_null() || bytes == 0 { None } else { memory.take_back(bytes, stream, per_thread) };
        let Some(found) = again else {
            // SAFETY: guaranteed by the caller.
            return unsafe { allocate(address, bytes) };
        };
        // SAFETY: `address` is not null, and the caller guarantees that it is valid.
        unsafe { *address = found };
        SUCCESS
    })
}

/// Allocates memory on the current card at an address that an allocation of the same size had in another process with
/// the same address region. Returns an error if the address is not free. Workers call this function to restore a
/// program. With a size of 0, only checks that allocations are backed by chunks.
#[unsafe(no_mangle)]
extern "C" fn gpu_mediator_allocate_at(address: Address, bytes: u64) -> c_int {
    let Some((device, card)) = memory().link.current_card() else { return driver::INVALID_CONTEXT };
    match bytes {
        0 => SUCCESS,
        _ => memory().allocate(device, card, bytes, Some(address)).map_or_else(|error| error, |_| SUCCESS),
    }
}

unsafe fn allocate(address: *mut Address, bytes: u64) -> c_int {
    if address.is_null() || bytes == 0 {
        return INVALID_VALUE;
    }
    let memory = memory();
    let Some((device, card)) = memory.link.current_card() else { return driver::INVALID_CONTEXT };
    match memory.allocate(device, card, bytes, None) {
        Ok(found) => {
            // SAFETY: `address` is not null, and the caller guarantees that it is valid.
            unsafe { *address = found };
            SUCCESS
        }
        Err(error) => error,
    }
}

unsafe extern "C" fn mem_alloc(address: *mut Address, bytes: usize) -> c_int {
    // SAFETY: guaranteed by the caller.
    unsafe { allocate(address, bytes as u64) }
}

unsafe extern "C" fn mem_alloc_pitch(
    address: *mut Address,
    pitch: *mut usize,
    width: usize,
    height: usize,
    _element: u32,
) -> c_int {
    let Some(row) = (width as u64).checked_next_multiple_of(PITCH) else { return INVALID_VALUE };
    let Some(bytes) = row.checked_mul(height as u64) else { return INVALID_VALUE };
    if pitch.is_null() {
        return INVALID_VALUE;
    }
    // SAFETY: guaranteed by the caller.
    let result = unsafe { allocate(address, bytes) };
    if result == SUCCESS {
        // SAFETY: the pointer is not null.
        unsafe { *pitch = row as usize };
    }
    result
}

/// Frees memory after the work of the current context and of the memory's card has completed. Returns false if the
/// memory does not belong to this library.
fn free(address: Address) -> bool {
    let shim = shim();
    let card = shim.of_address(address);
    if !shim.is_single() && card.number != shim.current().number && !shim.captures.any() {
        // Another card's work may use the memory.
        // SAFETY: the call takes no pointers.
        unsafe { driver::ctx_synchronize() };
    }
    shim.in_context(card, || shim.memory(card).free(address))
}

/// Removes memory from the accounts after the driver has freed it.
fn uncount(address: Address) {
    let shim = shim();
    shim.cards().for_each(|card| shim.memory(card).uncount(Thing::Address(address)));
}

unsafe extern "C" fn mem_free(address: Address) -> c_int {
    if address != 0 && free(address) {
        return SUCCESS;
    }
    if memory_at(address).is_freed(address) {
        return INVALID_VALUE;
    }
    // SAFETY: guaranteed by the caller.
    let result = unsafe { driver::mem_free(address) };
    if result == SUCCESS {
        uncount(address);
    }
    result
}

/// Frees memory in stream order. Returns false if the memory does not belong to this library.
fn free_after(address: Address, stream: Object, per_thread: bool) -> bool {
    let shim = shim();
    let card = shim.of_stream(Stream::named(stream as u64, per_thread));
    if !shim.is_single() && shim.of_address(address).number != card.number {
        // An event cannot track the work of another card.
        if !shim.captures.any() {
            // SAFETY: the call takes no pointers.
            shim.in_context(card, || unsafe { driver::ctx_synchronize() });
        }
        return free(address);
    }
    shim.in_context(card, || shim.memory(card).free_after(address, stream, per_thread))
}

/// Returns true if the driver itself must allocate from a pool.
fn is_exported_pool(pool: Object) -> bool {
    let shim = shim();
    shim.cards().any(|card| shim.memory(card).is_exported_pool(pool))
}

fn captures(stream: Object, per_thread: bool) -> bool {
    if !shim().captures.any() {
        return false;
    }
    Stream::named(stream as u64, per_thread).is_capturing()
}

macro_rules! ordered {
    ($alloc:ident, $alloc_pool:ident, $free:ident,
     $real_alloc:ident, $real_pool:ident, $real_free:ident, $per_thread:literal) => {
        unsafe extern "C" fn $alloc(address: *mut Address, bytes: usize, stream: Object) -> c_int {
            if captures(stream, $per_thread) {
                // The capture turns the allocation into a graph node, which owns the memory.
                // SAFETY: guaranteed by the caller.
                return unsafe { driver::$real_alloc(address, bytes, stream) };
            }
            // SAFETY: as above.
            unsafe { allocate_after(address, bytes as u64, stream, $per_thread) }
        }

        unsafe extern "C" fn $alloc_pool(address: *mut Address, bytes: usize, pool: Object, stream: Object) -> c_int {
            // SAFETY: as above.
            let real = || unsafe { driver::$real_pool(address, bytes, pool, stream) };
            if captures(stream, $per_thread) {
                return real();
            }
            if is_exported_pool(pool) {
                return memory().allocate_of_pool(bytes, || {
                    let result = real();
                    // SAFETY: the driver has written the address if it returned success.
                    (result, if result == SUCCESS { unsafe { *address } } else { 0 })
                });
            }
            // SAFETY: as above.
            unsafe { allocate_after(address, bytes as u64, stream, $per_thread) }
        }

        unsafe extern "C" fn $free(address: Address, stream: Object) -> c_int {
            if !captures(stream, $per_thread) && free_after(address, stream, $per_thread) {
                return SUCCESS;
            }
            if memory_at(address).is_freed(address) {
                return INVALID_VALUE;
            }
            // SAFETY: as above.
            let result = unsafe { driver::$real_free(address, stream) };
            if result == SUCCESS {
                // The pool may retain the memory. The owner then accounts for it as other driver memory of the program.
                uncount(address);
            }
            result
        }
    };
}

ordered!(alloc_async, alloc_pool, free_async, mem_alloc_async, mem_alloc_from_pool, mem_free_async, false);
ordered!(
    alloc_async_per_thread,
    alloc_pool_per_thread,
    free_async_per_thread,
    mem_alloc_async_per_thread,
    mem_alloc_from_pool_per_thread,
    mem_free_async_per_thread,
    true
);

unsafe extern "C" fn mem_get_info(free: *mut usize, total: *mut usize) -> c_int {
    // SAFETY: guaranteed by the caller.
    let result = unsafe { driver::mem_get_info(free, total) };
    if result != SUCCESS {
        return result;
    }
    let memory = memory();
    let Some((_, card)) = memory.link.current_card() else { return result };
    if let Answer::Memory(free_bytes, total_bytes) =
        memory.link.request(|request| FromTenant::AskMemory { request, card })
    {
        // SAFETY: the driver has written to both pointers.
        unsafe {
            *free = free_bytes.saturating_add(memory.spare(card)).min(total_bytes) as usize;
            *total = total_bytes as usize;
        }
    }
    result
}

unsafe extern "C" fn device_total_mem(bytes: *mut usize, device: c_int) -> c_int {
    // SAFETY: guaranteed by the caller.
    let result = unsafe { driver::device_total_mem(bytes, device) };
    let info = shim().of_device(device).and_then(|card| {
        let number = card.link.card(device)?;
        card.link.terms()?.cards.get(usize::from(number))
    });
    if let (SUCCESS, Some(info)) = (result, info) {
        // SAFETY: the driver has written to `bytes`.
        unsafe { *bytes = info.total_bytes as usize };
    }
    result
}

/// The allocation or mapping that contains an address, as the program sees it.
struct Known {
    start: Address,
    bytes: u64,
    device: c_int,
    /// This library's handle and the mapping's ID, if the program mapped the memory itself.
    own: Option<(Handle, u64)>,
}

fn known(chunks: &ChunkMemory, address: Address) -> Option<Known> {
    if let Some((start, bytes, device)) = chunks.find(address).or_else(|| chunks.opened.find(address)) {
        return Some(Known { start, bytes, device, own: None });
    }
    let found = chunks.handles.find(address)?;
    let own = Some((found.handle, found.id));
    Some(Known { start: found.start, bytes: found.bytes, device: found.device, own })
}

unsafe extern "C" fn mem_get_address_range(base: *mut Address, bytes: *mut usize, address: Address) -> c_int {
    memory_at(address).with(|chunks| {
        let Some(known) = known(chunks, address) else {
            // SAFETY: guaranteed by the caller.
            return unsafe { driver::mem_get_address_range(base, bytes, address) };
        };
        // SAFETY: the caller's pointers may be null.
        unsafe {
            if let Some(base) = base.as_mut() {
                *base = known.start;
            }
            if let Some(bytes) = bytes.as_mut() {
                *bytes = known.bytes as usize;
            }
        }
        SUCCESS
    })
}

/// Corrects an attribute that the driver has reported for the chunk at its current location. Returns true if the
/// attribute has a value.
unsafe fn correct(known: &Known, attribute: c_int, data: *mut c_void) -> bool {
    let plain = known.own.is_none();
    // SAFETY: the driver has written a value of this type to `data`.
    unsafe {
        match attribute {
            attribute::MEMORY_TYPE => *data.cast::<u32>() = DEVICE,
            attribute::HOST_POINTER => {
                *data.cast::<u64>() = 0;
                return false;
            }
            attribute::DEVICE_ORDINAL => *data.cast::<c_int>() = known.device,
            attribute::HANDLE_TYPES => *data.cast::<u32>() = 0,
            attribute::LEGACY_IPC => *data.cast::<bool>() = plain,
            // The driver reports the correct range if the program reserved it itself.
            attribute::RANGE_START if plain => *data.cast::<u64>() = known.start,
            attribute::RANGE_SIZE if plain => *data.cast::<usize>() = known.bytes as usize,
            attribute::MAPPING_BASE => *data.cast::<u64>() = known.start,
            attribute::MAPPING_SIZE => *data.cast::<usize>() = known.bytes as usize,
            // The driver's IDs change when chunks move.
            attribute::BUFFER_ID | attribute::BLOCK_ID => {
                if let Some((handle, mapping)) = known.own {
                    *data.cast::<u64>() = if attribute == attribute::BUFFER_ID { mapping } else { handle };
                }
            }
            _ => {}
        }
    }
    true
}

unsafe extern "C" fn pointer_get_attribute(data: *mut c_void, attribute: c_int, address: Address) -> c_int {
    // Prevent moves during the query, because the driver does not know a chunk's address while the chunk is being
    // replaced.
    memory_at(address).with(|chunks| {
        chunks.bring_for(address);
        // SAFETY: guaranteed by the caller.
        let result = unsafe { driver::pointer_get_attribute(data, attribute, address) };
        if result != SUCCESS || data.is_null() {
            return result;
        }
        // SAFETY: as above.
        match known(chunks, address).is_none_or(|known| unsafe { correct(&known, attribute, data) }) {
            true => SUCCESS,
            false => INVALID_VALUE,
        }
    })
}

unsafe extern "C" fn pointer_get_attributes(
    count: u32,
    attributes: *const c_int,
    data: *mut *mut c_void,
    address: Address,
) -> c_int {
    memory_at(address).with(|chunks| {
        chunks.bring_for(address);
        // SAFETY: guaranteed by the caller: both arrays have `count` elements.
        unsafe {
            let result = driver::pointer_get_attributes(count, attributes, data, address);
            if result == SUCCESS
                && !attributes.is_null()
                && !data.is_null()
                && let Some(known) = known(chunks, address)
            {
                for at in 0..count as usize {
                    correct(&known, *attributes.add(at), *data.add(at));
                }
            }
            result
        }
    })
}

pub fn ours(index: usize) -> Option<*mut ()> {
    Some(match index {
        at::cuMemAlloc_v2 => mem_alloc as *mut (),
        at::cuMemAllocPitch_v2 => mem_alloc_pitch as *mut (),
        at::cuMemFree_v2 => mem_free as *mut (),
        at::cuMemAllocAsync => alloc_async as *mut (),
        at::cuMemAllocAsync_ptsz => alloc_async_per_thread as *mut (),
        at::cuMemAllocFromPoolAsync => alloc_pool as *mut (),
        at::cuMemAllocFromPoolAsync_ptsz => alloc_pool_per_thread as *mut (),
        at::cuMemFreeAsync => free_async as *mut (),
        at::cuMemFreeAsync_ptsz => free_async_per_thread as *mut (),
        at::cuMemGetInfo_v2 => mem_get_info as *mut (),
        at::cuDeviceTotalMem_v2 => device_total_mem as *mut (),
        at::cuMemGetAddressRange_v2 => mem_get_address_range as *mut (),
        at::cuPointerGetAttribute => pointer_get_attribute as *mut (),
        at::cuPointerGetAttributes => pointer_get_attributes as *mut (),
        _ => return None,
    })
}
