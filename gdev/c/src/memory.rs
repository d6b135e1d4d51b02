//! Memory and copies.

use std::ffi::{c_int, c_void};

use gdev::{Context, Copy, Place};

use crate::handle::{Ghandle, Kind, Outcome, State, bytes, bytes_mut, invalid, status, store, value, with};

/// Allocates `size` bytes of card memory. Returns the GPU virtual address, or 0 on error.
#[unsafe(no_mangle)]
pub extern "C" fn gmalloc(handle: Ghandle, size: u64) -> u64 {
    value(with(handle, |state| Ok(state.allocate(Place::Vram, size)?.address)))
}

/// Frees card memory allocated by [`gmalloc`]. Returns its size in bytes, or 0 on error.
#[unsafe(no_mangle)]
pub extern "C" fn gfree(handle: Ghandle, address: u64) -> u64 {
    value(with(handle, |state| state.end(address, Kind::Own, Context::free)))
}

/// Allocates `size` bytes of pinned memory. Returns its address in this process, or NULL on error.
#[unsafe(no_mangle)]
pub extern "C" fn gmalloc_dma(handle: Ghandle, size: u64) -> *mut c_void {
    let address = value(with(handle, |state| {
        if size == 0 {
            return Err(invalid("an allocation of 0 bytes"));
        }
        let memory = state.context.allocate(Place::Ram, size)?;
        let address = state.context.host_address(memory).inspect_err(|_| drop(state.context.free(memory)))?;
        let address = address.as_ptr().expose_provenance() as u64;
        state.pinned.insert(address, memory);
        Ok(address)
    }));
    std::ptr::with_exposed_provenance_mut(address as usize)
}

/// Frees pinned memory allocated by [`gmalloc_dma`]. Returns its size in bytes, or 0 on error.
#[unsafe(no_mangle)]
pub extern "C" fn gfree_dma(handle: Ghandle, buffer: *mut c_void) -> u64 {
    value(with(handle, |state| {
        let address = buffer.addr() as u64;
        let memory = state.pinned.get(&address).copied();
        let memory = memory.ok_or_else(|| invalid("the address does not come from gmalloc_dma of this handle"))?;
        state.context.finish()?;
        state.context.free(memory)?;
        state.pinned.remove(&address);
        Ok(memory.bytes)
    }))
}

/// Copies `size` bytes from this process to the card, after all earlier work, and waits.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn gmemcpy_to_device(handle: Ghandle, to: u64, from: *const c_void, size: u64) -> c_int {
    status(with(handle, |state| {
        let (memory, offset) = state.memory_at(to)?;
        // SAFETY: see UNSAFETY in the crate documentation.
        let from = unsafe { bytes(from, size) }?;
        state.context.write(memory, offset, from)?;
        Ok(state.context.finish()?)
    }))
}

/// Copies `size` bytes from the card to this process, after all earlier work, and waits.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn gmemcpy_from_device(handle: Ghandle, to: *mut c_void, from: u64, size: u64) -> c_int {
    status(with(handle, |state| {
        let (memory, offset) = state.memory_at(from)?;
        // SAFETY: see UNSAFETY in the crate documentation.
        let to = unsafe { bytes_mut(to, size) }?;
        Ok(state.context.read(memory, offset, to)?)
    }))
}

/// Copies `size` bytes of pinned memory to the card without waiting. Stores the number for `gsync` in `id`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn gmemcpy_to_device_async(
    handle: Ghandle,
    to: u64,
    from: *const c_void,
    size: u64,
    id: *mut u64,
) -> c_int {
    status(with(handle, |state| {
        let (to, to_offset) = state.memory_at(to)?;
        let (from, from_offset) = state.pinned_at(from.addr() as u64)?;
        // SAFETY: see UNSAFETY in the crate documentation.
        unsafe { submit(state, &Copy { from, from_offset, to, to_offset, bytes: size }, id) }
    }))
}

/// Copies `size` bytes from the card to pinned memory without waiting. Stores the number for `gsync` in `id`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn gmemcpy_from_device_async(
    handle: Ghandle,
    to: *mut c_void,
    from: u64,
    size: u64,
    id: *mut u64,
) -> c_int {
    status(with(handle, |state| {
        let (to, to_offset) = state.pinned_at(to.addr() as u64)?;
        let (from, from_offset) = state.memory_at(from)?;
        // SAFETY: see UNSAFETY in the crate documentation.
        unsafe { submit(state, &Copy { from, from_offset, to, to_offset, bytes: size }, id) }
    }))
}

/// Copies `write_size` bytes of pinned memory to the card, and `read_size` bytes from the card to pinned memory, after
/// all earlier work, and waits. The copies run concurrently if the card has two copy engines.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn gmemcpy_both(
    handle: Ghandle,
    to: u64,
    from: *const c_void,
    write_size: u64,
    read_to: *mut c_void,
    read_from: u64,
    read_size: u64,
) -> c_int {
    status(with(handle, |state| {
        if write_size == 0 || read_size == 0 {
            return Err(invalid("a copy of 0 bytes"));
        }
        let ((to, to_offset), (from, from_offset)) = (state.memory_at(to)?, state.pinned_at(from.addr() as u64)?);
        let write = Copy { from, from_offset, to, to_offset, bytes: write_size };
        let (to, to_offset) = state.pinned_at(read_to.addr() as u64)?;
        let (from, from_offset) = state.memory_at(read_from)?;
        Ok(state.context.copy_both([&write, &Copy { from, from_offset, to, to_offset, bytes: read_size }])?)
    }))
}

/// Copies `size` bytes within card memory, and waits.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn gmemcpy(handle: Ghandle, to: u64, from: u64, size: u64) -> c_int {
    status(with(handle, |state| {
        // SAFETY: no result is stored.
        unsafe { within_card(state, to, from, size, std::ptr::null_mut()) }?;
        Ok(state.context.finish()?)
    }))
}

/// Copies `size` bytes within card memory without waiting. Stores the number for `gsync` in `id`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn gmemcpy_async(handle: Ghandle, to: u64, from: u64, size: u64, id: *mut u64) -> c_int {
    // SAFETY: see UNSAFETY in the crate documentation.
    status(with(handle, |state| unsafe { within_card(state, to, from, size, id) }))
}

unsafe fn within_card(state: &mut State, to: u64, from: u64, bytes: u64, id: *mut u64) -> Outcome<()> {
    let (to, to_offset) = state.memory_at(to)?;
    let (from, from_offset) = state.memory_at(from)?;
    let overlap =
        to == from && to_offset < from_offset.saturating_add(bytes) && from_offset < to_offset.saturating_add(bytes);
    if overlap && bytes > 0 {
        return Err(invalid("the ranges of a copy overlap"));
    }
    // SAFETY: guaranteed by the caller. See UNSAFETY in the crate documentation.
    unsafe { submit(state, &Copy { from, from_offset, to, to_offset, bytes }, id) }
}

unsafe fn submit(state: &mut State, copy: &Copy, id: *mut u64) -> Outcome<()> {
    if copy.bytes == 0 {
        return Err(invalid("a copy of 0 bytes"));
    }
    let fence = state.context.copy(copy)?;
    let number = state.number(fence);
    // SAFETY: guaranteed by the caller. See UNSAFETY in the crate documentation.
    unsafe { store(id, number) }
}
