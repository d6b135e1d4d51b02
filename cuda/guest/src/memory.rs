//! Card memory, and address queries.
//!
//! UNSAFETY: reads and writes through the program's pointers.
#![allow(unsafe_code, reason = "see UNSAFETY")]

use std::ffi::c_void;

use crate::addresses::{self, Place};
use crate::allocations::{self, Allocation};
use crate::call::{code, index, invoke, resolve_stream, to};
use crate::contexts::{current_device, current_handle};
use crate::frame::{Frame, Handler};
use crate::registered::{self, Registered};
use crate::result::{INVALID_VALUE, NOT_SUPPORTED, OUT_OF_MEMORY, SUCCESS};
use crate::{pinned, thread};

pub const HANDLERS: &[(&str, Handler)] = &[
    ("cuMemAlloc_v2", allocate),
    ("cuMemAllocPitch_v2", allocate_pitch),
    ("cuMemFree_v2", free),
    ("cuMemAllocAsync", allocate_async),
    ("cuMemAllocFromPoolAsync", allocate_from_pool),
    ("cuPointerGetAttribute", pointer_attribute),
    ("cuPointerGetAttributes", pointer_attributes),
    ("cuMemPoolGetAttribute", pool_attribute),
];

/// Maximum number of attempts to allocate memory at addresses that the program does not use.
const TRIES: usize = 4;

/// Allocates memory with `call`, and retries while the program uses the returned addresses for other memory.
fn allocated(mut call: impl FnMut() -> Result<(u64, u64), i32>, free: impl Fn(u64)) -> Result<u64, i32> {
    let mut refused = Vec::new();
    let mut result = Err(OUT_OF_MEMORY);
    for _ in 0..TRIES {
        match call() {
            Ok((address, bytes)) if addresses::add(address, bytes) => {
                result = Ok(address);
                break;
            }
            // The program uses this address for other memory. Free the allocation only at the end, so that the next one
            // gets a different address.
            Ok((address, _)) => refused.push(address),
            Err(code) => {
                result = Err(code);
                break;
            }
        }
    }
    refused.into_iter().for_each(free);
    result
}

fn give_back(address: u64) {
    // Free an allocation at an address that the program uses for other memory.
    let _ = invoke(index!("cuMemFree_v2+"), &[address]);
}

fn store(frame: &Frame, result: Result<u64, i32>) -> i32 {
    result.map_or_else(|error| error, |address| frame.put(0, address))
}

/// Records an allocation in the current context, and returns its address.
fn remember(result: Result<u64, i32>, bytes: u64) -> Result<u64, i32> {
    if let (Ok(address), Ok(device)) = (&result, current_device()) {
        allocations::add(*address, Allocation { bytes, context: thread::current(), device });
    }
    result
}

fn allocate(frame: &Frame) -> i32 {
    let bytes = frame.arg(1);
    if frame.arg(0) == 0 {
        return INVALID_VALUE;
    }
    let call = || {
        let mut address = 0u64;
        invoke(index!("cuMemAlloc_v2+"), &[to(&mut address), bytes]).map(|()| (address, bytes))
    };
    store(frame, remember(allocated(call, give_back), bytes))
}

fn allocate_pitch(frame: &Frame) -> i32 {
    let (width, rows, element) = (frame.arg(2), frame.arg(3), frame.arg(4));
    let mut pitch = 0u64;
    let call = || {
        let mut address = 0u64;
        invoke(index!("cuMemAllocPitch_v2+"), &[to(&mut address), to(&mut pitch), width, rows, element])
            .map(|()| (address, pitch.saturating_mul(rows)))
    };
    let result = allocated(call, give_back);
    let result = remember(result, pitch.saturating_mul(rows));
    frame.put_optional(1, pitch);
    store(frame, result)
}

fn allocate_async(frame: &Frame) -> i32 {
    let bytes = frame.arg(1);
    let call = || {
        let stream = resolve_stream(frame.arg(2), frame.per_thread)?;
        let mut address = 0u64;
        invoke(index!("cuMemAllocAsync+"), &[to(&mut address), bytes, stream]).map(|()| (address, bytes))
    };
    store(frame, allocated(call, give_back))
}

fn allocate_from_pool(frame: &Frame) -> i32 {
    let bytes = frame.arg(1);
    let call = || {
        let stream = resolve_stream(frame.arg(3), frame.per_thread)?;
        let mut address = 0u64;
        let args = [to(&mut address), bytes, frame.arg(2), stream];
        invoke(index!("cuMemAllocFromPoolAsync+"), &args).map(|()| (address, bytes))
    };
    store(frame, allocated(call, give_back))
}

fn free(frame: &Frame) -> i32 {
    let address = frame.arg(0);
    if address == 0 {
        return SUCCESS;
    }
    if addresses::place(address) == Place::Pinned {
        // This is managed memory, which the library allocates as pinned memory.
        return code(pinned::free(address));
    }
    // An unrecorded address may be invalid, so wait for the call's result.
    let is_known = allocations::remove(address);
    let call = if is_known { index!("cuMemFree_v2-") } else { index!("cuMemFree_v2+") };
    code(invoke(call, &[address]).map(|()| addresses::remove(address)))
}

fn pool_attribute(frame: &Frame) -> i32 {
    let (attribute, mut value) = (frame.int(1), 0u64);
    match invoke(frame.index, &[frame.arg(0), u64::from(attribute), to(&mut value)]) {
        // Attributes 1 to 3 are flags. The others are sizes in bytes.
        Ok(()) if (1..=3).contains(&attribute) => frame.put(2, value as u32),
        Ok(()) => frame.put(2, value),
        Err(error) => error,
    }
}

/// Returns the size of an attribute's value in bytes.
fn attribute_bytes(kind: u32) -> Option<usize> {
    Some(match kind {
        2 | 6 | 8 | 9 | 10 | 13 | 14 | 15 | 16 => 4,
        3 | 4 | 7 | 11 | 12 | 18 | 19 | 20 => 8,
        _ => return None,
    })
}

/// Returns an attribute of registered memory, which the card cannot access.
fn attribute_of_registered(kind: u32, address: u64, found: Registered) -> Result<u64, i32> {
    Ok(match kind {
        1 => current_handle(),
        // `CU_MEMORYTYPE_HOST`.
        2 => 1,
        4 => address,
        7 | 11 | 19 => found.address,
        // The memory is neither managed nor mapped for the card.
        8 | 13 => 0,
        9 => u64::from(current_device()?),
        12 | 18 => found.bytes,
        _ => return Err(INVALID_VALUE),
    })
}

/// Returns an attribute of an address.
fn attribute_of(kind: u32, address: u64) -> Result<u64, i32> {
    if addresses::place(address) == Place::Pageable
        && let Some(found) = registered::find(address)
    {
        return attribute_of_registered(kind, address, found);
    }
    if kind == 1 {
        return match addresses::place(address) {
            Place::Pageable => Err(INVALID_VALUE),
            Place::Card | Place::Pinned => Ok(current_handle()),
        };
    }
    if addresses::place(address) == Place::Card
        && let Some(found) = allocations::find(address)
    {
        // Avoid messages to the worker, because Triton queries every pointer before each launch.
        match kind {
            // `CU_MEMORYTYPE_DEVICE`.
            2 => return Ok(2),
            3 => return Ok(address),
            4 => return Err(INVALID_VALUE),
            8 => return Ok(0),
            9 => return Ok(u64::from(found.device)),
            _ => {}
        }
    }
    let found = match addresses::place(address) {
        Place::Pageable => return Err(INVALID_VALUE),
        Place::Card => None,
        Place::Pinned => Some(pinned::find(address).ok_or(INVALID_VALUE)?),
    };
    let Some(found) = found else {
        let mut value = 0u64;
        invoke(index!("cuPointerGetAttribute+"), &[to(&mut value), u64::from(kind), address])?;
        return Ok(value);
    };
    Ok(match kind {
        // `CU_MEMORYTYPE_HOST`, also for managed memory.
        2 => 1,
        3 | 4 => address,
        7 => found.address,
        8 => u64::from(found.managed),
        9 => u64::from(current_device()?),
        10 => 1,
        11 | 19 => found.address,
        12 | 18 => found.bytes,
        16 => 3,
        _ => return Err(NOT_SUPPORTED),
    })
}

/// Stores an attribute's value, with the size of its type.
///
/// # Safety
/// `place` must point to memory for the value.
unsafe fn store_attribute(place: *mut c_void, kind: u32, value: u64) {
    let bytes = if kind == 1 { 8 } else { attribute_bytes(kind).unwrap_or(4) };
    // Write only one byte for a boolean, because some programs provide only one byte, as the driver's header permits.
    let bytes = if matches!(kind, 8 | 10) { 1 } else { bytes };
    // SAFETY: guaranteed by the caller.
    unsafe { std::ptr::copy_nonoverlapping(value.to_le_bytes().as_ptr(), place.cast(), bytes) };
}

fn pointer_attribute(frame: &Frame) -> i32 {
    let (place, kind, address) = (frame.arg(0) as *mut c_void, frame.int(1), frame.arg(2));
    if place.is_null() {
        return INVALID_VALUE;
    }
    if kind != 1 && attribute_bytes(kind).is_none() {
        return NOT_SUPPORTED;
    }
    match attribute_of(kind, address) {
        Ok(value) => {
            // SAFETY: the program passes a pointer to memory for the attribute.
            unsafe { store_attribute(place, kind, value) };
            SUCCESS
        }
        Err(error) => error,
    }
}

fn pointer_attributes(frame: &Frame) -> i32 {
    let (count, address) = (frame.int(0) as usize, frame.arg(3));
    let (kinds, places) = (frame.arg(1) as *const u32, frame.arg(2) as *const *mut c_void);
    if kinds.is_null() || places.is_null() || count > 64 {
        return INVALID_VALUE;
    }
    for at in 0..count {
        // SAFETY: both of the program's arrays have this length.
        let (kind, place) = unsafe { (kinds.add(at).read_unaligned(), places.add(at).read_unaligned()) };
        // Attributes that do not apply to an address are zero.
        let value = attribute_of(kind, address).unwrap_or(0);
        if !place.is_null() {
            // SAFETY: as above.
            unsafe { store_attribute(place, kind, value) };
        }
    }
    SUCCESS
}
