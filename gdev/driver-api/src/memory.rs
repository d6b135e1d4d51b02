//! Memory and copies.

use std::collections::BTreeMap;
use std::ffi::{c_uint, c_void};

use gdev::{Context, Copy, Memory, Place};

use crate::context::{Handle, State, with};
use crate::device::target;
use crate::error::{Code, Outcome, Status, status, store};

/// Maximum size of the buffer from which a fill copies, in bytes.
const FILL_BYTES: usize = 1 << 20;

/// Finds the memory that contains an address. Also returns the offset of the address in this memory.
fn find(memory: &BTreeMap<u64, Memory>, address: u64) -> Option<(Memory, u64)> {
    let (start, found) = memory.range(..=address).next_back()?;
    (address - start < found.bytes).then_some((*found, address - start))
}

/// Returns the card memory or segment that contains an address, and the offset of the address in it.
fn card(state: &State, address: u64) -> Outcome<(Memory, u64)> {
    find(&state.memory, address).or_else(|| find(&state.attached, address)).ok_or(Code::InvalidValue)
}

unsafe fn bytes<'a>(from: *const c_void, size: usize) -> Outcome<&'a [u8]> {
    if from.is_null() || isize::try_from(size).is_err() {
        return Err(Code::InvalidValue);
    }
    // SAFETY: guaranteed by the caller. See UNSAFETY in the crate documentation.
    Ok(unsafe { std::slice::from_raw_parts(from.cast(), size) })
}

unsafe fn bytes_mut<'a>(to: *mut c_void, size: usize) -> Outcome<&'a mut [u8]> {
    if to.is_null() || isize::try_from(size).is_err() {
        return Err(Code::InvalidValue);
    }
    // SAFETY: guaranteed by the caller. See UNSAFETY in the crate documentation.
    Ok(unsafe { std::slice::from_raw_parts_mut(to.cast(), size) })
}

/// Declares a function under its original name, which predates 64-bit addresses.
macro_rules! first_name {
    ($old:ident, $new:ident, ($($argument:ident: $type:ty),*)) => {
        #[doc = concat!("The same as [`", stringify!($new), "`]; addresses and sizes are 64 bits wide in this library.")]
        #[unsafe(no_mangle)]
        pub unsafe extern "C" fn $old($($argument: $type),*) -> Status {
            // SAFETY: see UNSAFETY in the crate documentation.
            unsafe { $new($($argument),*) }
        }
    };
}

/// Allocates card memory.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuMemAlloc_v2(address: *mut u64, size: usize) -> Status {
    status(with(|state| {
        if size == 0 || address.is_null() {
            return Err(Code::InvalidValue);
        }
        let memory = state.gpu.allocate(Place::Vram, size as u64)?;
        state.memory.insert(memory.address, memory);
        // SAFETY: see UNSAFETY in the crate documentation.
        unsafe { store(address, memory.address) }
    }))
}
first_name!(cuMemAlloc, cuMemAlloc_v2, (address: *mut u64, size: usize));

/// Waits for the context's work, and frees card memory.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuMemFree_v2(address: u64) -> Status {
    status(with(|state| {
        let memory = *state.memory.get(&address).ok_or(Code::InvalidValue)?;
        state.gpu.finish()?;
        state.gpu.free(memory)?;
        state.memory.remove(&address);
        Ok(())
    }))
}
first_name!(cuMemFree, cuMemFree_v2, (address: u64));

/// Allocates pinned memory.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuMemAllocHost_v2(address: *mut *mut c_void, size: usize) -> Status {
    status(with(|state| {
        if size == 0 || address.is_null() {
            return Err(Code::InvalidValue);
        }
        let memory = state.gpu.allocate(Place::Ram, size as u64)?;
        let start = state.gpu.host_address(memory).inspect_err(|_| drop(state.gpu.free(memory)))?.as_ptr();
        state.pinned.insert(start.expose_provenance() as u64, memory);
        // SAFETY: see UNSAFETY in the crate documentation.
        unsafe { store(address, start.cast()) }
    }))
}
first_name!(cuMemAllocHost, cuMemAllocHost_v2, (address: *mut *mut c_void, size: usize));

/// Allocates pinned memory. Rejects flags that request more than `cuMemAllocHost` provides.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuMemHostAlloc(address: *mut *mut c_void, size: usize, flags: c_uint) -> Status {
    /// `CU_MEMHOSTALLOC_PORTABLE | CU_MEMHOSTALLOC_DEVICEMAP`.
    const PORTABLE_OR_MAPPED: c_uint = 1 | 2;
    if flags & PORTABLE_OR_MAPPED != 0 {
        return status(Err(Code::NotSupported));
    }
    // SAFETY: see UNSAFETY in the crate documentation.
    unsafe { cuMemAllocHost_v2(address, size) }
}

/// Waits for the context's work, and frees pinned memory.
#[unsafe(no_mangle)]
pub extern "C" fn cuMemFreeHost(address: *mut c_void) -> Status {
    status(with(|state| {
        let start = address.addr() as u64;
        let memory = *state.pinned.get(&start).ok_or(Code::InvalidValue)?;
        state.gpu.finish()?;
        state.gpu.free(memory)?;
        state.pinned.remove(&start);
        Ok(())
    }))
}

/// Stores the total device memory and the part that this context has not allocated, in bytes. Other contexts and
/// tenants may already use some of the unallocated memory.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuMemGetInfo_v2(free: *mut usize, total: *mut usize) -> Status {
    status(with(|state| {
        let all = gdev::memory_bytes(target(state.device)?)?;
        let used: u64 = state.memory.values().map(|memory| memory.bytes).sum();
        // SAFETY: see UNSAFETY in the crate documentation.
        unsafe {
            store(free, all.saturating_sub(used) as usize)?;
            store(total, all as usize)
        }
    }))
}
first_name!(cuMemGetInfo, cuMemGetInfo_v2, (free: *mut usize, total: *mut usize));

/// Stores the start and size of the allocation that contains an address.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuMemGetAddressRange_v2(start: *mut u64, size: *mut usize, address: u64) -> Status {
    status(with(|state| {
        let (memory, _) = card(state, address)?;
        // Either pointer may be NULL. SAFETY: see UNSAFETY in the crate documentation.
        unsafe {
            let _ = store(start, memory.address);
            let _ = store(size, memory.bytes as usize);
        }
        Ok(())
    }))
}
first_name!(cuMemGetAddressRange, cuMemGetAddressRange_v2, (start: *mut u64, size: *mut usize, address: u64));

/// Copies `size` bytes from this process to the card, and waits.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuMemcpyHtoD_v2(to: u64, from: *const c_void, size: usize) -> Status {
    status(with(|state| {
        if size == 0 {
            return Ok(());
        }
        let (memory, offset) = card(state, to)?;
        // SAFETY: see UNSAFETY in the crate documentation.
        state.gpu.write(memory, offset, unsafe { bytes(from, size) }?)?;
        Ok(state.gpu.finish()?)
    }))
}
first_name!(cuMemcpyHtoD, cuMemcpyHtoD_v2, (to: u64, from: *const c_void, size: usize));

/// Copies `size` bytes from the card to this process, and waits.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuMemcpyDtoH_v2(to: *mut c_void, from: u64, size: usize) -> Status {
    status(with(|state| {
        if size == 0 {
            return Ok(());
        }
        let (memory, offset) = card(state, from)?;
        // SAFETY: see UNSAFETY in the crate documentation.
        Ok(state.gpu.read(memory, offset, unsafe { bytes_mut(to, size) }?)?)
    }))
}
first_name!(cuMemcpyDtoH, cuMemcpyDtoH_v2, (to: *mut c_void, from: u64, size: usize));

/// Copies `size` bytes within card memory, and waits.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuMemcpyDtoD_v2(to: u64, from: u64, size: usize) -> Status {
    status(with(|state| {
        on_card(state, to, from, size)?;
        Ok(state.gpu.finish()?)
    }))
}
first_name!(cuMemcpyDtoD, cuMemcpyDtoD_v2, (to: u64, from: u64, size: usize));

fn on_card(state: &mut State, to: u64, from: u64, size: usize) -> Outcome<()> {
    if size == 0 {
        return Ok(());
    }
    let (to, to_offset) = card(state, to)?;
    let (from, from_offset) = card(state, from)?;
    state.gpu.copy(&Copy { from, from_offset, to, to_offset, bytes: size as u64 })?;
    Ok(())
}

/// Copies `size` bytes from this process to the card. If the source is pinned, does not wait. Otherwise, returns once
/// the source may be reused.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuMemcpyHtoDAsync_v2(to: u64, from: *const c_void, size: usize, stream: Handle) -> Status {
    status(with(|state| {
        state.check_stream(stream)?;
        if size == 0 {
            return Ok(());
        }
        let (memory, to_offset) = card(state, to)?;
        if let Some((pinned, from_offset)) = find(&state.pinned, from.addr() as u64) {
            state.gpu.copy(&Copy { from: pinned, from_offset, to: memory, to_offset, bytes: size as u64 })?;
            return Ok(());
        }
        // SAFETY: see UNSAFETY in the crate documentation.
        Ok(state.gpu.write(memory, to_offset, unsafe { bytes(from, size) }?)?)
    }))
}
first_name!(cuMemcpyHtoDAsync, cuMemcpyHtoDAsync_v2, (to: u64, from: *const c_void, size: usize, stream: Handle));

/// Copies `size` bytes from the card to this process. If the target is pinned, does not wait. Otherwise, waits like
/// [`cuMemcpyDtoH_v2`].
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuMemcpyDtoHAsync_v2(to: *mut c_void, from: u64, size: usize, stream: Handle) -> Status {
    status(with(|state| {
        state.check_stream(stream)?;
        if size == 0 {
            return Ok(());
        }
        let (memory, from_offset) = card(state, from)?;
        if let Some((pinned, to_offset)) = find(&state.pinned, to.addr() as u64) {
            state.gpu.copy(&Copy { from: memory, from_offset, to: pinned, to_offset, bytes: size as u64 })?;
            return Ok(());
        }
        // SAFETY: see UNSAFETY in the crate documentation.
        Ok(state.gpu.read(memory, from_offset, unsafe { bytes_mut(to, size) }?)?)
    }))
}
first_name!(cuMemcpyDtoHAsync, cuMemcpyDtoHAsync_v2, (to: *mut c_void, from: u64, size: usize, stream: Handle));

/// Copies `size` bytes within card memory without waiting.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuMemcpyDtoDAsync_v2(to: u64, from: u64, size: usize, stream: Handle) -> Status {
    status(with(|state| {
        state.check_stream(stream)?;
        on_card(state, to, from, size)
    }))
}
first_name!(cuMemcpyDtoDAsync, cuMemcpyDtoDAsync_v2, (to: u64, from: u64, size: usize, stream: Handle));

/// Fills `count` bytes of card memory with a value.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuMemsetD8_v2(to: u64, value: u8, count: usize) -> Status {
    status(with(|state| fill(state, to, &[value], count)))
}
first_name!(cuMemsetD8, cuMemsetD8_v2, (to: u64, value: u8, count: usize));

/// Fills `count` 32-bit words of card memory with a value.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuMemsetD32_v2(to: u64, value: c_uint, count: usize) -> Status {
    status(with(|state| fill(state, to, &value.to_le_bytes(), count)))
}
first_name!(cuMemsetD32, cuMemsetD32_v2, (to: u64, value: c_uint, count: usize));

fn fill(state: &mut State, to: u64, unit: &[u8], count: usize) -> Outcome<()> {
    let size = count.checked_mul(unit.len()).ok_or(Code::InvalidValue)?;
    if size == 0 {
        return Ok(());
    }
    let (memory, offset) = card(state, to)?;
    let pattern: Vec<u8> = unit.iter().copied().cycle().take(size.min(FILL_BYTES)).collect();
    write_repeated(&mut state.gpu, memory, offset, &pattern, size)
}

fn write_repeated(gpu: &mut Context, memory: Memory, offset: u64, pattern: &[u8], size: usize) -> Outcome<()> {
    let fits = offset.checked_add(size as u64).is_some_and(|end| end <= memory.bytes);
    if !fits {
        return Err(Code::InvalidValue);
    }
    for at in (0..size).step_by(pattern.len()) {
        let length = pattern.len().min(size - at);
        gpu.write(memory, offset + at as u64, &pattern[..length])?;
    }
    Ok(())
}
