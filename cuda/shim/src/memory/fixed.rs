//! Memory that the driver allocates itself: it is counted but never moves.
//!
//! UNSAFETY: reads descriptions that the program's pointers name, as the driver would.
#![allow(unsafe_code, reason = "see UNSAFETY")]

use std::collections::HashMap;
use std::ffi::{c_int, c_void};
use std::sync::{Mutex, PoisonError};

use cuda_protocol::FixedKind;

use super::calls::card;
use super::chunks;
use super::foreign::{Foreign, Target};
use crate::driver::{self, Address, Handle, INVALID_CONTEXT, INVALID_DEVICE, OUT_OF_MEMORY, Object, SUCCESS};
use crate::requests;
use crate::symbols::at;
use crate::tenant;

/// A thing that is counted, by the kind of its handle and its value.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Thing {
    Address(u64),
    Array(u64),
    Mipmap(u64),
    Host(u64),
}

#[derive(Clone, Copy, Debug)]
struct Counted {
    card: u8,
    kind: FixedKind,
    bytes: u64,
}

static COUNTED: Mutex<Option<HashMap<Thing, Counted>>> = Mutex::new(None);
/// Handles of the driver. Locked during driver calls for these objects, because the driver reuses the numbers of ended
/// ones.
static HANDLES: Mutex<Option<Foreign<Counted>>> = Mutex::new(None);
/// Pools whose memory may be shared with other processes.
static POOLS: Mutex<Vec<u64>> = Mutex::new(Vec::new());

fn handles<T>(work: impl FnOnce(&mut Foreign<Counted>) -> T) -> T {
    work(HANDLES.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert_default())
}

fn give_back(ended: impl IntoIterator<Item = Counted>) {
    for Counted { card, kind, bytes } in ended {
        requests::unfix(card, kind, bytes);
    }
}

/// Asks to count memory; gives empty chunks back if that is needed. Returns whether the owner allows it.
pub fn fix(card: u8, kind: FixedKind, bytes: u64) -> bool {
    chunks::persist(|| if requests::fix(card, kind, bytes) { Ok(()) } else { Err(OUT_OF_MEMORY) }).is_ok()
}

/// Asks for `bytes` of the current card, calls the driver, and remembers the result, or gives the bytes back. Without a
/// context on one of the tenant's cards, the memory cannot be counted and is not created.
fn count(kind: FixedKind, bytes: u64, make: impl FnOnce() -> (c_int, Thing)) -> c_int {
    let Some((_, card)) = card() else { return INVALID_CONTEXT };
    if !fix(card, kind, bytes) {
        return OUT_OF_MEMORY;
    }
    let (result, thing) = make();
    if result == SUCCESS {
        let mut counted = COUNTED.lock().unwrap_or_else(PoisonError::into_inner);
        counted.get_or_insert_default().insert(thing, Counted { card, kind, bytes });
    } else {
        requests::unfix(card, kind, bytes);
    }
    result
}

fn uncount(thing: Thing) {
    give_back(COUNTED.lock().unwrap_or_else(PoisonError::into_inner).as_mut().and_then(|c| c.remove(&thing)));
}

/// An address that the driver frees.
pub fn freed(address: Address) {
    uncount(Thing::Address(address));
}

/// Returns true if allocations of a pool may be shared, so that the driver must make them.
pub fn exported_pool(pool: Object) -> bool {
    POOLS.lock().unwrap_or_else(PoisonError::into_inner).contains(&(pool as u64))
}

unsafe extern "C" fn managed(address: *mut Address, bytes: usize, flags: u32) -> c_int {
    count(FixedKind::Managed, bytes as u64, || {
        // SAFETY: the caller's promise; the driver has written the address if it succeeds.
        unsafe {
            let result = driver::mem_alloc_managed(address, bytes, flags);
            (result, Thing::Address(if result == SUCCESS { *address } else { 0 }))
        }
    })
}

unsafe extern "C" fn host_alloc(address: *mut *mut c_void, bytes: usize, flags: u32) -> c_int {
    count(FixedKind::Host, bytes as u64, || {
        // SAFETY: as above.
        unsafe {
            let result = driver::mem_host_alloc(address, bytes, flags);
            (result, Thing::Host(if result == SUCCESS { *address as u64 } else { 0 }))
        }
    })
}

unsafe extern "C" fn alloc_host(address: *mut *mut c_void, bytes: usize) -> c_int {
    count(FixedKind::Host, bytes as u64, || {
        // SAFETY: as above.
        unsafe {
            let result = driver::mem_alloc_host(address, bytes);
            (result, Thing::Host(if result == SUCCESS { *address as u64 } else { 0 }))
        }
    })
}

unsafe extern "C" fn free_host(address: *mut c_void) -> c_int {
    // SAFETY: the caller's promise.
    let result = unsafe { driver::mem_free_host(address) };
    if result == SUCCESS {
        uncount(Thing::Host(address as u64));
    }
    result
}

unsafe extern "C" fn host_register(address: *mut c_void, bytes: usize, flags: u32) -> c_int {
    count(FixedKind::Host, bytes as u64, || {
        // SAFETY: the caller's promise.
        (unsafe { driver::mem_host_register(address, bytes, flags) }, Thing::Host(address as u64))
    })
}

unsafe extern "C" fn host_unregister(address: *mut c_void) -> c_int {
    // SAFETY: the caller's promise.
    let result = unsafe { driver::mem_host_unregister(address) };
    if result == SUCCESS {
        uncount(Thing::Host(address as u64));
    }
    result
}

/// Size of an element by `CUarray_format` in bytes; formats of blocks count as four bytes.
fn element(format: u32) -> u64 {
    match format {
        0x01 | 0x08 => 1,
        0x02 | 0x09 | 0x10 => 2,
        _ => 4,
    }
}

/// Returns the bytes of an array of these extents, where 0 stands for a missing dimension.
fn array_bytes(extents: &[u64], format: u32, channels: u32) -> u64 {
    let elements = extents.iter().fold(1u64, |product, extent| product.saturating_mul((*extent).max(1)));
    elements.saturating_mul(element(format)).saturating_mul(channels.max(1).into())
}

/// Reads a descriptor of `dimensions` extents that a format and a number of channels follow.
unsafe fn described(descriptor: *const c_void, dimensions: usize) -> u64 {
    if descriptor.is_null() {
        return 0;
    }
    // SAFETY: the caller's promise: extents are 64-bit numbers, followed by the two others as 32-bit numbers.
    unsafe {
        let extents = std::slice::from_raw_parts(descriptor.cast::<u64>(), dimensions);
        let rest = descriptor.cast::<u64>().add(dimensions).cast::<u32>();
        array_bytes(extents, *rest, *rest.add(1))
    }
}

unsafe extern "C" fn array(made: *mut Object, descriptor: *const c_void) -> c_int {
    // SAFETY: the caller's promise.
    let bytes = unsafe { described(descriptor, 2) };
    count(FixedKind::Array, bytes, || {
        // SAFETY: as above.
        unsafe {
            let result = driver::array_create(made, descriptor);
            (result, Thing::Array(if result == SUCCESS { *made as u64 } else { 0 }))
        }
    })
}

unsafe extern "C" fn array_3d(made: *mut Object, descriptor: *const c_void) -> c_int {
    // SAFETY: the caller's promise.
    let bytes = unsafe { described(descriptor, 3) };
    count(FixedKind::Array, bytes, || {
        // SAFETY: as above.
        unsafe {
            let result = driver::array_3d_create(made, descriptor);
            (result, Thing::Array(if result == SUCCESS { *made as u64 } else { 0 }))
        }
    })
}

unsafe extern "C" fn array_destroy(array: Object) -> c_int {
    // SAFETY: the caller's promise.
    let result = unsafe { driver::array_destroy(array) };
    if result == SUCCESS {
        uncount(Thing::Array(array as u64));
        give_back(handles(|handles| handles.unbind(|target| target == Target::Array(array as u64))));
    }
    result
}

unsafe extern "C" fn mipmap(made: *mut Object, descriptor: *const c_void, levels: u32) -> c_int {
    // SAFETY: the caller's promise. All smaller levels together have less than a third of the first level's size.
    let bytes = unsafe { described(descriptor, 3) }.saturating_mul(2);
    count(FixedKind::Array, bytes, || {
        // SAFETY: as above.
        unsafe {
            let result = driver::mipmapped_array_create(made, descriptor, levels);
            (result, Thing::Mipmap(if result == SUCCESS { *made as u64 } else { 0 }))
        }
    })
}

unsafe extern "C" fn mipmap_destroy(array: Object) -> c_int {
    // SAFETY: the caller's promise.
    let result = unsafe { driver::mipmapped_array_destroy(array) };
    if result == SUCCESS {
        uncount(Thing::Mipmap(array as u64));
        give_back(handles(|handles| handles.unbind(|target| target == Target::Array(array as u64))));
    }
    result
}

/// `cuMemCreate` of memory that the driver must have itself. It counts until its last reference and its last mapping
/// are gone.
///
/// # Safety
/// Same as for the driver's function.
pub unsafe fn create(handle: *mut Handle, bytes: usize, property: *const c_void, flags: u64) -> c_int {
    // SAFETY: the caller's promise: `CUmemAllocationProp` begins with four 32-bit numbers, the third and fourth the
    // place.
    let [_, _, location, device] = unsafe { property.cast::<[c_int; 4]>().as_ref() }.copied().unwrap_or([1, 0, 1, 0]);
    let (kind, card) = match (location, tenant::card(device)) {
        (1, Some(card)) => (FixedKind::Driver, card),
        (1, None) => return INVALID_DEVICE,
        // Host memory belongs to no card, so it counts for the first card.
        _ => (FixedKind::Host, card().map_or(0, |(_, card)| card)),
    };
    let bytes_counted = bytes as u64;
    if !fix(card, kind, bytes_counted) {
        return OUT_OF_MEMORY;
    }
    let (result, old) = handles(|handles| {
        // SAFETY: as above; the driver has written the handle if it succeeds.
        unsafe {
            match driver::mem_create(handle, bytes, property, flags) {
                SUCCESS => (SUCCESS, handles.add(*handle, Counted { card, kind, bytes: bytes_counted })),
                error => (error, Some(Counted { card, kind, bytes: bytes_counted })),
            }
        }
    });
    give_back(old);
    result
}

/// `cuMemRelease` of a driver handle.
///
/// # Safety
/// Same as for the driver's function.
pub unsafe fn release(handle: Handle) -> c_int {
    let (result, ended) = handles(|handles| {
        // SAFETY: the caller's promise.
        let result = unsafe { driver::mem_release(handle) };
        (result, (result == SUCCESS).then(|| handles.release(handle)).flatten())
    });
    give_back(ended);
    result
}

/// `cuMemMap` of a driver handle.
///
/// # Safety
/// Same as for the driver's function.
pub unsafe fn map(address: Address, bytes: usize, offset: usize, handle: Handle, flags: u64) -> c_int {
    handles(|handles| {
        // SAFETY: the caller's promise.
        let result = unsafe { driver::mem_map(address, bytes, offset, handle, flags) };
        if result == SUCCESS {
            handles.map(address, bytes as u64, handle);
        }
        result
    })
}

/// The driver has unmapped all that was mapped in a range.
pub fn unmapped(address: Address, bytes: u64) {
    give_back(handles(|handles| handles.unmap(address, bytes)));
}

/// The program has one more reference to a driver handle.
pub fn retained(handle: Handle) {
    handles(|handles| handles.retain(handle));
}

/// A driver handle's memory is bound to an object and lives as long as the object.
pub fn bound(target: Target, handle: Handle) {
    handles(|handles| handles.bind(target, handle));
}

/// Removes all memory bindings of a target.
pub fn unbound(is_it: impl Fn(Target) -> bool) {
    give_back(handles(|handles| handles.unbind(is_it)));
}

/// Allocates of a pool that may be shared by `make`, counted until the address is freed.
pub fn of_pool(bytes: usize, make: impl FnOnce() -> (c_int, Address)) -> c_int {
    count(FixedKind::Shared, bytes as u64, || {
        let (result, address) = make();
        (result, Thing::Address(address))
    })
}

unsafe extern "C" fn pool_create(pool: *mut Object, property: *const c_void) -> c_int {
    // SAFETY: the caller's promise.
    let result = unsafe { driver::mem_pool_create(pool, property) };
    // SAFETY: `CUmemPoolProps` begins with the kind of allocation and the kinds of handles.
    let shared = !property.is_null() && unsafe { *property.cast::<c_int>().add(1) } != 0;
    if result == SUCCESS && shared {
        // SAFETY: the driver has written the pool.
        POOLS.lock().unwrap_or_else(PoisonError::into_inner).push(unsafe { *pool } as u64);
    }
    result
}

unsafe extern "C" fn pool_destroy(pool: Object) -> c_int {
    POOLS.lock().unwrap_or_else(PoisonError::into_inner).retain(|p| *p != pool as u64);
    // SAFETY: the caller's promise.
    unsafe { driver::mem_pool_destroy(pool) }
}

/// Functions of this module by symbol.
pub fn ours(index: usize) -> Option<*mut ()> {
    Some(match index {
        at::cuMemAllocManaged => managed as *mut (),
        at::cuMemHostAlloc => host_alloc as *mut (),
        at::cuMemAllocHost_v2 => alloc_host as *mut (),
        at::cuMemFreeHost => free_host as *mut (),
        at::cuMemHostRegister_v2 => host_register as *mut (),
        at::cuMemHostUnregister => host_unregister as *mut (),
        at::cuArrayCreate_v2 => array as *mut (),
        at::cuArray3DCreate_v2 => array_3d as *mut (),
        at::cuArrayDestroy => array_destroy as *mut (),
        at::cuMipmappedArrayCreate => mipmap as *mut (),
        at::cuMipmappedArrayDestroy => mipmap_destroy as *mut (),
        at::cuMemPoolCreate => pool_create as *mut (),
        at::cuMemPoolDestroy => pool_destroy as *mut (),
        _ => return None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn missing_dimensions_of_arrays_count_as_one() {
        assert_eq!(array_bytes(&[100, 0], 0x20, 4), 1600);
        assert_eq!(array_bytes(&[100, 10, 2], 0x10, 1), 4000);
        assert_eq!(array_bytes(&[u64::MAX, 2, 2], 0x20, 4), u64::MAX, "the driver refuses it");
    }
}
