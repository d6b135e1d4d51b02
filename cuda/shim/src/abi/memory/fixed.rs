//! Functions that make the driver allocate memory. This library accounts for that memory.
//!
//! UNSAFETY: reads descriptors through the program's pointers, as the driver would.
#![allow(unsafe_code, reason = "see UNSAFETY")]

use std::ffi::{c_int, c_void};

use cuda_protocol::FixedKind;

use crate::abi::{memory, shim};
use crate::driver::{self, Address, Object, SUCCESS};
use crate::memory::fixed::Thing;
use crate::memory::foreign::Target;
use crate::symbols::at;

/// Removes an object from the accounts of its card.
fn uncount(thing: Thing) {
    let shim = shim();
    shim.cards().for_each(|card| shim.memory(card).uncount(thing));
}

/// Removes an array's memory bindings.
fn unbind(array: Object) {
    let (shim, array) = (shim(), Target::Array(array as u64));
    shim.cards().for_each(|card| shim.memory(card).unbound_fixed(|target| target == array));
}

unsafe extern "C" fn managed(address: *mut Address, bytes: usize, flags: u32) -> c_int {
    memory().count(FixedKind::Managed, bytes as u64, || {
        // SAFETY: guaranteed by the caller; the driver has written the address if it returned success.
        unsafe {
            let result = driver::mem_alloc_managed(address, bytes, flags);
            (result, Thing::Address(if result == SUCCESS { *address } else { 0 }))
        }
    })
}

unsafe extern "C" fn host_alloc(address: *mut *mut c_void, bytes: usize, flags: u32) -> c_int {
    memory().count(FixedKind::Host, bytes as u64, || {
        // SAFETY: as above.
        unsafe {
            let result = driver::mem_host_alloc(address, bytes, flags);
            (result, Thing::Host(if result == SUCCESS { *address as u64 } else { 0 }))
        }
    })
}

unsafe extern "C" fn alloc_host(address: *mut *mut c_void, bytes: usize) -> c_int {
    memory().count(FixedKind::Host, bytes as u64, || {
        // SAFETY: as above.
        unsafe {
            let result = driver::mem_alloc_host(address, bytes);
            (result, Thing::Host(if result == SUCCESS { *address as u64 } else { 0 }))
        }
    })
}

unsafe extern "C" fn free_host(address: *mut c_void) -> c_int {
    // SAFETY: guaranteed by the caller.
    let result = unsafe { driver::mem_free_host(address) };
    if result == SUCCESS {
        uncount(Thing::Host(address as u64));
    }
    result
}

unsafe extern "C" fn host_register(address: *mut c_void, bytes: usize, flags: u32) -> c_int {
    memory().count(FixedKind::Host, bytes as u64, || {
        // SAFETY: guaranteed by the caller.
        (unsafe { driver::mem_host_register(address, bytes, flags) }, Thing::Host(address as u64))
    })
}

unsafe extern "C" fn host_unregister(address: *mut c_void) -> c_int {
    // SAFETY: guaranteed by the caller.
    let result = unsafe { driver::mem_host_unregister(address) };
    if result == SUCCESS {
        uncount(Thing::Host(address as u64));
    }
    result
}

/// Returns the element size of a `CUarray_format` in bytes. Elements of block formats are counted as four bytes.
fn element(format: u32) -> u64 {
    match format {
        0x01 | 0x08 => 1,
        0x02 | 0x09 | 0x10 => 2,
        _ => 4,
    }
}

/// Returns the size of an array in bytes. An extent of 0 means an unused dimension.
fn array_bytes(extents: &[u64], format: u32, channels: u32) -> u64 {
    let elements = extents.iter().fold(1u64, |product, extent| product.saturating_mul((*extent).max(1)));
    elements.saturating_mul(element(format)).saturating_mul(channels.max(1).into())
}

/// Reads an array descriptor: `dimensions` extents, a format, and the number of channels. Returns the array size in
/// bytes.
unsafe fn described(descriptor: *const c_void, dimensions: usize) -> u64 {
    if descriptor.is_null() {
        return 0;
    }
    // SAFETY: guaranteed by the caller: the extents are 64-bit integers, and the two fields after them are 32-bit
    // integers.
    unsafe {
        let extents = std::slice::from_raw_parts(descriptor.cast::<u64>(), dimensions);
        let rest = descriptor.cast::<u64>().add(dimensions).cast::<u32>();
        array_bytes(extents, *rest, *rest.add(1))
    }
}

unsafe extern "C" fn array(made: *mut Object, descriptor: *const c_void) -> c_int {
    // SAFETY: guaranteed by the caller.
    let bytes = unsafe { described(descriptor, 2) };
    memory().count(FixedKind::Array, bytes, || {
        // SAFETY: as above.
        unsafe {
            let result = driver::array_create(made, descriptor);
            (result, Thing::Array(if result == SUCCESS { *made as u64 } else { 0 }))
        }
    })
}

unsafe extern "C" fn array_3d(made: *mut Object, descriptor: *const c_void) -> c_int {
    // SAFETY: guaranteed by the caller.
    let bytes = unsafe { described(descriptor, 3) };
    memory().count(FixedKind::Array, bytes, || {
        // SAFETY: as above.
        unsafe {
            let result = driver::array_3d_create(made, descriptor);
            (result, Thing::Array(if result == SUCCESS { *made as u64 } else { 0 }))
        }
    })
}

unsafe extern "C" fn array_destroy(array: Object) -> c_int {
    // SAFETY: guaranteed by the caller.
    let result = unsafe { driver::array_destroy(array) };
    if result == SUCCESS {
        uncount(Thing::Array(array as u64));
        unbind(array);
    }
    result
}

unsafe extern "C" fn mipmap(made: *mut Object, descriptor: *const c_void, levels: u32) -> c_int {
    // SAFETY: guaranteed by the caller. The smaller levels together are smaller than the first one.
    let bytes = unsafe { described(descriptor, 3) }.saturating_mul(2);
    memory().count(FixedKind::Array, bytes, || {
        // SAFETY: as above.
        unsafe {
            let result = driver::mipmapped_array_create(made, descriptor, levels);
            (result, Thing::Mipmap(if result == SUCCESS { *made as u64 } else { 0 }))
        }
    })
}

unsafe extern "C" fn mipmap_destroy(array: Object) -> c_int {
    // SAFETY: guaranteed by the caller.
    let result = unsafe { driver::mipmapped_array_destroy(array) };
    if result == SUCCESS {
        uncount(Thing::Mipmap(array as u64));
        unbind(array);
    }
    result
}

unsafe extern "C" fn pool_create(pool: *mut Object, property: *const c_void) -> c_int {
    // SAFETY: guaranteed by the caller.
    let result = unsafe { driver::mem_pool_create(pool, property) };
    // SAFETY: `CUmemPoolProps` begins with the allocation type and the handle types.
    let shared = !property.is_null() && unsafe { *property.cast::<c_int>().add(1) } != 0;
    if result == SUCCESS && shared {
        // SAFETY: the driver has written the pool.
        memory().add_exported_pool(unsafe { *pool });
    }
    result
}

unsafe extern "C" fn pool_destroy(pool: Object) -> c_int {
    let shim = shim();
    shim.cards().for_each(|card| shim.memory(card).forget_pool(pool));
    // SAFETY: guaranteed by the caller.
    unsafe { driver::mem_pool_destroy(pool) }
}

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
