//! Driver functions for virtual memory that a program manages itself.
//!
//! This library implements handles for unshared card memory, which can move like other memory. Other handles belong to
//! the driver, and their memory is fixed. Invalid calls return the same error codes as NVIDIA's driver 580.
//!
//! UNSAFETY: reads and writes through the program's pointers, as the driver would.
#![allow(unsafe_code, reason = "see UNSAFETY")]

use std::ffi::{c_int, c_void};
use std::os::fd::AsFd as _;
use std::sync::PoisonError;

use cuda_protocol::FixedKind;

use super::ranges;
use crate::abi::{memory, memory_at, shim};
use crate::driver::{self, Access, Address, Handle, INVALID_VALUE, NOT_SUPPORTED, OUT_OF_MEMORY, Object, SUCCESS};
use crate::memory::Operations;
use crate::memory::chunks::ChunkMemory;
use crate::memory::foreign::Target;
use crate::memory::handles::{Backing, Described, Freed, Handles, Pages as _, Piece, Property};
use crate::memory::pages::Driver;
use crate::shim::Card;
use crate::symbols::at;

/// `CU_MEM_ALLOCATION_TYPE_PINNED`.
const PINNED: c_int = 1;
/// `CU_MEM_LOCATION_TYPE_DEVICE`.
const DEVICE: c_int = 1;
/// `CU_MEM_ALLOC_GRANULARITY_RECOMMENDED`.
const RECOMMENDED: c_int = 1;
/// Size of `CUarrayMapInfo` and the offset of its handle, in bytes.
const ARRAY_MAP: (usize, usize) = (96, 64);
/// Offset of the array in `CUarrayMapInfo`, in bytes.
const ARRAY_OF_MAP: usize = 8;
/// Offset of the operation in `CUarrayMapInfo`, in bytes.
const OPERATION_OF_MAP: usize = 56;
/// Offset of the handle type in `CUarrayMapInfo`, in bytes.
const KIND_OF_MAP: usize = 60;
/// `CU_MEM_OPERATION_TYPE_MAP`.
const MAPS: u32 = 1;
/// `CU_MEM_HANDLE_TYPE_GENERIC`.
const GENERIC: u32 = 0;

/// `CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR`.
const DESCRIPTOR: c_int = 1;
/// `CUmemAllocationProp::allocFlags::gpuDirectRDMACapable`. PyTorch sets this flag for each card that supports it.
/// Chunks do not support it, and the pointer attributes report this.
const RDMA: c_int = 1 << 8;

/// Returns the card of a handle that this library can implement, and the card's index in the owner's list. The handle
/// must be for pinned memory on a card, and the memory must be neither compressed nor for sparse arrays. A shareable
/// handle qualifies until it is exported.
fn movable(property: &Property) -> Option<(&'static Card, u8)> {
    let &[kind, handles, place, device, _, _, flags, rest] = property;
    let by_descriptor = handles == 0 || handles == DESCRIPTOR;
    let plain = (kind, place, flags & !RDMA, rest) == (PINNED, DEVICE, 0, 0) && by_descriptor;
    let card = plain.then(|| shim().of_device(device)).flatten()?;
    card.link.card(device).map(|number| (card, number))
}

/// Returns the memory operations for a card.
fn of(card: &'static Card) -> Operations<'static> {
    shim().memory(card)
}

/// Records the current context, because its card may not be the memory's card.
fn note_context() {
    shim().current().contexts.note_current();
}

/// Returns the card whose accounts contain a driver handle's memory, or else the current card.
fn of_driver(handle: Handle) -> &'static Card {
    let shim = shim();
    shim.cards().find(|card| of(card).knows_fixed(handle)).unwrap_or(shim.current())
}

unsafe fn read(property: *const c_void) -> Option<Property> {
    // SAFETY: guaranteed by the caller: `CUmemAllocationProp` has 32 bytes.
    (!property.is_null()).then(|| unsafe { property.cast::<Property>().read() })
}

unsafe fn granularity(property: &Property) -> u64 {
    let mut bytes = 0;
    // SAFETY: the pointers are valid.
    let result = unsafe { driver::mem_get_granularity(&raw mut bytes, (&raw const *property).cast(), 0) };
    if result == SUCCESS { (bytes as u64).max(1) } else { 1 }
}

unsafe extern "C" fn create(handle: *mut Handle, bytes: usize, property: *const c_void, flags: u64) -> c_int {
    // SAFETY: guaranteed by the caller.
    let read = unsafe { read(property) };
    let Some((property_of, (card, number))) = read.and_then(|p| Some((p, movable(&p)?))) else {
        // The property contains the memory's device.
        let card = read.and_then(|property| shim().of_device(property[3])).unwrap_or(shim().current());
        // SAFETY: as above.
        return unsafe { of(card).create_fixed(handle, bytes, property, flags) };
    };
    // SAFETY: the call uses no pointers from the caller.
    let granularity = unsafe { granularity(&property_of) };
    if handle.is_null() || flags != 0 || bytes == 0 || !(bytes as u64).is_multiple_of(granularity) {
        return INVALID_VALUE;
    }
    note_context();
    card.memory_is_elsewhere();
    let memory = of(card);
    match shim().in_context(card, || memory.persist(|| make(memory, number, &property_of, bytes as u64))) {
        Ok(made) => {
            // SAFETY: `handle` is not null, and the caller guarantees that it is valid.
            unsafe { *handle = made };
            SUCCESS
        }
        Err(error) => error,
    }
}

/// Creates a handle from chunks, with driver memory for a remainder smaller than a chunk.
fn make(memory: Operations<'_>, card: u8, property: &Property, bytes: u64) -> Result<Handle, c_int> {
    let chunk_bytes = memory.link.chunk_bytes();
    let wanted = u32::try_from(bytes / chunk_bytes).map_err(|_| OUT_OF_MEMORY)?;
    let rest = rest(memory, card, property, bytes % chunk_bytes)?;
    if wanted == 0 {
        return Ok(memory.with(|chunks| chunks.handles.add(card, *property, rest.into_iter().collect())));
    }
    let (mut made, mut left) = (Err(OUT_OF_MEMORY), rest);
    memory.obtain(card, wanted, |chunks, granted| {
        let Some(granted) = granted else { return Vec::new() };
        let ids: Vec<_> = granted.iter().map(|part| part.0.id).collect();
        let mut pieces = Vec::new();
        for (chunk, descriptor) in granted {
            let Some(handle) = Driver.import(descriptor.as_fd()) else {
                pieces.iter().for_each(|piece: &Piece| Driver.release(piece.handle));
                return ids;
            };
            let backing = Backing::new(chunk, descriptor.lasting());
            pieces.push(Piece { handle, bytes: chunk_bytes, chunk: Some(backing) });
        }
        pieces.extend(left.take());
        made = Ok(chunks.handles.add(card, *property, pieces));
        Vec::new()
    });
    if let Some(rest) = left {
        Driver.release(rest.handle);
        memory.link.unfix(card, FixedKind::Driver, rest.bytes);
    }
    made
}

/// Allocates the remainder, which is smaller than a chunk, from the driver, as fixed memory.
fn rest(memory: Operations<'_>, card: u8, property: &Property, bytes: u64) -> Result<Option<Piece>, c_int> {
    if bytes == 0 {
        return Ok(None);
    }
    if !memory.link.fix(card, FixedKind::Driver, bytes) {
        return Err(OUT_OF_MEMORY);
    }
    let mut handle = 0;
    // Like chunks, this memory is not exportable.
    let property: Property = [property[0], 0, property[2], property[3], 0, 0, 0, 0];
    // SAFETY: the pointers are valid.
    match unsafe { driver::mem_create(&raw mut handle, bytes as usize, (&raw const property).cast(), 0) } {
        SUCCESS => Ok(Some(Piece { handle, bytes, chunk: None })),
        error => {
            memory.link.unfix(card, FixedKind::Driver, bytes);
            Err(error)
        }
    }
}

/// Returns freed memory to the owner. Must be called with the memory locked, so that a new owner receives a consistent
/// report.
pub(super) fn give_back(memory: Operations<'_>, freed: Freed) {
    memory.give_back(freed.chunks);
    if freed.fixed > 0 {
        memory.link.unfix(freed.card, FixedKind::Driver, freed.fixed);
    }
    if freed.exported > 0 {
        memory.link.unfix(freed.card, FixedKind::Shared, freed.exported);
    }
}

unsafe extern "C" fn release(handle: Handle) -> c_int {
    if !Handles::is_ours(handle) {
        // SAFETY: guaranteed by the caller.
        return unsafe { of(of_driver(handle)).release_fixed(handle) };
    }
    let memory = of(shim().of_handle(handle));
    memory.with(|chunks| match chunks.handles.release(&mut Driver, handle) {
        Ok(ended) => {
            ended.into_iter().for_each(|freed| give_back(memory, freed));
            SUCCESS
        }
        Err(error) => error,
    })
}

unsafe extern "C" fn map(address: Address, bytes: usize, offset: usize, handle: Handle, flags: u64) -> c_int {
    if !Handles::is_ours(handle) {
        // SAFETY: guaranteed by the caller.
        return unsafe { of(of_driver(handle)).map_fixed(address, bytes, offset, handle, flags) };
    }
    if flags != 0 {
        return INVALID_VALUE;
    }
    note_context();
    let card = shim().of_handle(handle);
    if shim().cards().any(|other| other.number != card.number && of(other).with(|m| m.reserved(address, bytes as u64)))
    {
        return INVALID_VALUE;
    }
    of(card).with(|chunks| {
        if chunks.reserved(address, bytes as u64) {
            return INVALID_VALUE;
        }
        chunks.handles.map(&mut Driver, address, bytes as u64, offset as u64, handle)
    })
}

unsafe extern "C" fn unmap(address: Address, bytes: usize) -> c_int {
    let length = bytes as u64;
    if !shim().is_single() {
        return ranges::unmap(shim(), address, length);
    }
    let memory = memory();
    memory.with(|chunks| {
        if chunks.reserved(address, length) {
            return INVALID_VALUE;
        }
        match chunks.handles.unmap(&mut Driver, address, length) {
            Ok(ended) => {
                ended.into_iter().for_each(|freed| give_back(memory, freed));
                memory.unmapped_fixed(address, length);
                SUCCESS
            }
            Err(error) => error,
        }
    })
}

unsafe extern "C" fn set_access(address: Address, bytes: usize, access: *const Access, count: usize) -> c_int {
    note_context();
    if access.is_null() || count == 0 {
        return INVALID_VALUE;
    }
    // SAFETY: guaranteed by the caller: the list has `count` entries.
    let list = unsafe { std::slice::from_raw_parts(access, count) };
    if !shim().is_single() {
        return ranges::set_access(shim(), address, bytes as u64, list);
    }
    memory().with(|chunks| {
        if chunks.reserved(address, bytes as u64) {
            return INVALID_VALUE;
        }
        chunks.handles.allow(&mut Driver, address, bytes as u64, list)
    })
}

unsafe extern "C" fn get_access(flags: *mut u64, location: *const [c_int; 2], address: Address) -> c_int {
    memory_at(address).with(|chunks| {
        chunks.bring_for(address);
        let ours = || {
            // SAFETY: the caller guarantees that a non-null pointer is valid.
            let &[kind, id] = unsafe { location.as_ref() }?;
            (kind == DEVICE).then(|| chunks.handles.access(address, Access::none(kind, id))).flatten()
        };
        match ours() {
            Some(_) if flags.is_null() => INVALID_VALUE,
            Some(found) => {
                // SAFETY: the pointer is not null.
                unsafe { *flags = found as u64 };
                SUCCESS
            }
            // SAFETY: guaranteed by the caller.
            None => unsafe { driver::mem_get_access(flags, location, address) },
        }
    })
}

unsafe extern "C" fn retain(handle: *mut Handle, address: *mut c_void) -> c_int {
    let at = address as Address;
    let memory = memory_at(at);
    memory.with(|chunks| {
        if handle.is_null() || chunks.reserved(at, 1) {
            return INVALID_VALUE;
        }
        match chunks.handles.retain(at) {
            Some(found) => {
                // SAFETY: the pointer is not null.
                unsafe { *handle = found };
                SUCCESS
            }
            // SAFETY: guaranteed by the caller; the driver has written the handle if it returned success.
            None => unsafe {
                let result = driver::mem_retain(handle, address);
                if result == SUCCESS {
                    of(of_driver(*handle)).retained_fixed(*handle);
                }
                result
            },
        }
    })
}

unsafe extern "C" fn get_property(property: *mut c_void, handle: Handle) -> c_int {
    if !Handles::is_ours(handle) {
        // SAFETY: guaranteed by the caller.
        return unsafe { driver::mem_get_property(property, handle) };
    }
    match of(shim().of_handle(handle)).with(|chunks| chunks.handles.property(handle)) {
        Some(found) if !property.is_null() => {
            // SAFETY: guaranteed by the caller: `CUmemAllocationProp` has 32 bytes.
            unsafe { property.cast::<Property>().write(found) };
            SUCCESS
        }
        _ => INVALID_VALUE,
    }
}

/// For memory that can move, recommends at least the chunk size as the granularity, because only multiples of the chunk
/// size can move completely. The minimum granularity is the driver's.
unsafe extern "C" fn get_granularity(bytes: *mut usize, property: *const c_void, option: c_int) -> c_int {
    // SAFETY: guaranteed by the caller.
    let result = unsafe { driver::mem_get_granularity(bytes, property, option) };
    // SAFETY: as above.
    let ours = || unsafe { read(property) }.and_then(|property| movable(&property));
    if result == SUCCESS
        && option == RECOMMENDED
        && let Some((card, _)) = ours()
        && let Some(terms) = card.link.terms()
    {
        // SAFETY: the driver has written to the pointer.
        unsafe { *bytes = (*bytes).max(terms.chunk_bytes as usize) };
    }
    result
}

unsafe extern "C" fn export(target: *mut c_void, handle: Handle, kind: c_int, flags: u64) -> c_int {
    if !Handles::is_ours(handle) {
        // SAFETY: guaranteed by the caller.
        return unsafe { driver::mem_export(target, handle, kind, flags) };
    }
    match exportable(handle, kind) {
        // SAFETY: as above.
        Ok(whole) => unsafe { driver::mem_export(target, whole, kind, flags) },
        Err(error) => error,
    }
}

/// Returns a driver handle that can be exported in place of a handle of this library. The driver cannot export imported
/// memory such as chunks, so the contents are copied to driver memory, which is shared and cannot move.
fn exportable(handle: Handle, kind: c_int) -> Result<Handle, c_int> {
    let owner = shim().of_handle(handle);
    let memory = of(owner);
    let _one = memory.memory.exports.lock().unwrap_or_else(PoisonError::into_inner);
    let Some(found) = memory.with(|chunks| chunks.handles.described(handle)) else { return Err(INVALID_VALUE) };
    if kind != DESCRIPTOR || found.property[1] & kind == 0 {
        return Err(INVALID_VALUE);
    }
    if let Some(whole) = found.whole {
        return Ok(whole);
    }
    let Described { card, property, bytes, .. } = found;
    if !memory.fix(card, FixedKind::Shared, bytes) {
        return Err(OUT_OF_MEMORY);
    }
    let mut whole = 0;
    // SAFETY: the pointers are valid.
    let mut result = unsafe { driver::mem_create(&raw mut whole, bytes as usize, (&raw const property).cast(), 0) };
    if result == SUCCESS {
        let unite = |chunks: &mut ChunkMemory| unite(memory, chunks, handle, whole, property[3], bytes);
        result = shim().drained(owner, || memory.with(unite));
        if result != SUCCESS {
            Driver.release(whole);
        }
    }
    if result == SUCCESS {
        Ok(whole)
    } else {
        memory.link.unfix(card, FixedKind::Shared, bytes);
        Err(result)
    }
}

/// Copies a handle's contents to `whole`, and replaces the handle's memory with it. No work may be in flight.
fn unite(
    memory: Operations<'_>,
    chunks: &mut ChunkMemory,
    handle: Handle,
    whole: Handle,
    device: c_int,
    bytes: u64,
) -> c_int {
    let mut base = 0;
    // SAFETY: the pointer is valid.
    let result = unsafe { driver::mem_address_reserve(&raw mut base, 2 * bytes as usize, 0, 0, 0) };
    if result != SUCCESS {
        return result;
    }
    let mut mapped = 0;
    let all = std::iter::once((whole, bytes)).chain(chunks.handles.pieces(handle));
    let mut result = all.fold(SUCCESS, |result, (piece, bytes)| match result {
        SUCCESS => match Driver.map(base + mapped, bytes, piece) {
            SUCCESS => {
                mapped += bytes;
                SUCCESS
            }
            error => error,
        },
        error => error,
    });
    if result == SUCCESS {
        result = Driver.allow(base, mapped, &[Access::all(device)]);
    }
    if result == SUCCESS {
        // SAFETY: both ranges are mapped, and the copy completes before they are unmapped.
        result = unsafe {
            match driver::memcpy_dtod(base, base + bytes, bytes as usize) {
                SUCCESS => driver::ctx_synchronize(),
                error => error,
            }
        };
    }
    if mapped > 0 {
        Driver.unmap(base, mapped);
    }
    // SAFETY: the reservation belongs to this library, and has no mappings.
    unsafe { driver::mem_address_free(base, 2 * bytes as usize) };
    if result != SUCCESS {
        return result;
    }
    match chunks.handles.unite(&mut Driver, handle, whole) {
        Some(rest) => {
            give_back(memory, rest);
            SUCCESS
        }
        None => OUT_OF_MEMORY,
    }
}

unsafe fn names_ours(list: *const c_void, count: u32) -> bool {
    let (stride, place) = ARRAY_MAP;
    // SAFETY: guaranteed by the caller: the list has `count` entries.
    let handle = |n: usize| unsafe { list.cast::<u8>().add(n * stride + place).cast::<Handle>().read_unaligned() };
    !list.is_null() && (0..count as usize).any(|n| Handles::is_ours(handle(n)))
}

/// Records memory that was mapped into arrays. The memory stays in the accounts until the array is destroyed, because
/// only the driver knows which parts of an array a stream has unmapped.
unsafe fn note_arrays(list: *const c_void, count: u32) {
    let (stride, place) = ARRAY_MAP;
    for n in 0..if list.is_null() { 0 } else { count as usize } {
        // SAFETY: guaranteed by the caller: the list has `count` entries, which the driver has read.
        unsafe {
            let entry = list.cast::<u8>().add(n * stride);
            let word = |at: usize| entry.add(at).cast::<u64>().read_unaligned();
            let half = |at: usize| entry.add(at).cast::<u32>().read_unaligned();
            if (half(OPERATION_OF_MAP), half(KIND_OF_MAP)) == (MAPS, GENERIC) {
                of(of_driver(word(place))).bound_fixed(Target::Array(word(ARRAY_OF_MAP)), word(place));
            }
        }
    }
}

macro_rules! map_array {
    ($name:ident, $real:ident) => {
        /// Maps memory into sparse arrays. Handles for sparse arrays always belong to the driver.
        unsafe extern "C" fn $name(list: *const c_void, count: u32, stream: Object) -> c_int {
            // SAFETY: guaranteed by the caller.
            unsafe {
                if names_ours(list, count) {
                    return INVALID_VALUE;
                }
                let result = driver::$real(list, count, stream);
                if result == SUCCESS {
                    note_arrays(list, count);
                }
                result
            }
        }
    };
}

map_array!(map_array, mem_map_array);
map_array!(map_array_per_thread, mem_map_array_per_thread);

unsafe extern "C" fn bind(
    multicast: Handle,
    at: usize,
    handle: Handle,
    offset: usize,
    bytes: usize,
    flags: u64,
) -> c_int {
    if Handles::is_ours(handle) {
        return NOT_SUPPORTED;
    }
    // SAFETY: guaranteed by the caller.
    let result = unsafe { driver::multicast_bind_mem(multicast, at, handle, offset, bytes, flags) };
    if result == SUCCESS {
        of(of_driver(handle)).bound_fixed(Target::Multicast(multicast, at as u64), handle);
    }
    result
}

macro_rules! bind {
    ($name:ident, $real:ident) => {
        unsafe extern "C" fn $name(
            to: u64,
            device: c_int,
            at: usize,
            handle: Handle,
            offset: usize,
            bytes: usize,
            flags: u64,
        ) -> c_int {
            if Handles::is_ours(handle) {
                return NOT_SUPPORTED;
            }
            // SAFETY: guaranteed by the caller.
            let result = unsafe { driver::$real(to, device, at, handle, offset, bytes, flags) };
            if result == SUCCESS {
                of(of_driver(handle)).bound_fixed(Target::Multicast(to, at as u64), handle);
            }
            result
        }
    };
}

bind!(bind_v2, multicast_bind_mem_v2);
bind!(bind_endpoint, endpoint_bind_mem);

macro_rules! unbind {
    ($name:ident, $real:ident) => {
        unsafe extern "C" fn $name(from: u64, device: c_int, at: usize, bytes: usize) -> c_int {
            // SAFETY: the call takes no pointers.
            let result = unsafe { driver::$real(from, device, at, bytes) };
            if result == SUCCESS {
                let range = at as u64..(at as u64).saturating_add(bytes as u64);
                let is_it =
                    |target| matches!(target, Target::Multicast(of, at) if of == from && range.contains(&at));
                shim().cards().for_each(|card| of(card).unbound_fixed(is_it));
            }
            result
        }
    };
}

unbind!(unbind, multicast_unbind);
unbind!(unbind_endpoint, endpoint_unbind);

/// Returns this module's implementation of a symbol.
pub fn ours(index: usize) -> Option<*mut ()> {
    Some(match index {
        at::cuMemCreate => create as *mut (),
        at::cuMemRelease => release as *mut (),
        at::cuMemMap => map as *mut (),
        at::cuMemUnmap => unmap as *mut (),
        at::cuMemSetAccess => set_access as *mut (),
        at::cuMemGetAccess => get_access as *mut (),
        at::cuMemRetainAllocationHandle => retain as *mut (),
        at::cuMemGetAllocationPropertiesFromHandle => get_property as *mut (),
        at::cuMemGetAllocationGranularity => get_granularity as *mut (),
        at::cuMemExportToShareableHandle => export as *mut (),
        at::cuMemMapArrayAsync => map_array as *mut (),
        at::cuMemMapArrayAsync_ptsz => map_array_per_thread as *mut (),
        at::cuMulticastBindMem => bind as *mut (),
        at::cuMulticastBindMem_v2 => bind_v2 as *mut (),
        at::cuLogicalEndpointBindMem => bind_endpoint as *mut (),
        at::cuMulticastUnbind => unbind as *mut (),
        at::cuLogicalEndpointUnbind => unbind_endpoint as *mut (),
        _ => return None,
    })
}
