//! NVML device lookups. A program finds only the tenant's cards, in the tenant's order.
//!
//! UNSAFETY: calls functions with the signatures in NVML's header, and writes through the program's pointers.
#![allow(unsafe_code, reason = "see UNSAFETY")]
#![allow(non_snake_case, reason = "names of NVML")]

use std::ffi::{c_int, c_void};

use super::{Device, INSUFFICIENT_SIZE, INVALID_ARGUMENT, NO_FUNCTION, NOT_FOUND, SUCCESS, hello, uuid};
use crate::abi::shim;
use crate::symbols::{at, real};

/// Maximum number of devices to query. No machine has this many cards.
const MAX_CARDS: u32 = 256;

/// Returns the tenant's cards in the tenant's order, each with the index of its owner's socket and its UUID. The list
/// is empty until every owner has replied once, because a card's index must not change.
fn cards() -> Vec<(usize, [u8; 16])> {
    let now = |&(number, uuid): &(usize, [u8; 16])| (number, shim().card(number).link.moved_to().unwrap_or(uuid));
    first_cards().iter().map(now).collect()
}

/// Returns the cards that the program started with.
fn first_cards() -> &'static [(usize, [u8; 16])] {
    let shim = shim();
    let known = &shim.libraries.cards;
    if let Some(cards) = known.get() {
        return cards;
    }
    let mut all = Vec::new();
    for number in 0..shim.cards().count() {
        let Some((_, welcome)) = hello(number) else { return &[] };
        all.extend(welcome.cards.iter().map(|card| (number, card.uuid)));
    }
    // Do not block: a child must not wait for a thread of its parent that was setting this value.
    let _ = known.set(all);
    known.get().map_or(&[], Vec::as_slice)
}

/// Returns the tenant's card that has this UUID.
pub(super) fn find(uuid: &[u8; 16]) -> Option<(usize, [u8; 16])> {
    cards().iter().find(|(_, card)| card == uuid).copied()
}

/// Returns true if a device belongs to the tenant.
fn is_own(device: Device) -> bool {
    uuid(device).is_some_and(|uuid| find(&uuid).is_some())
}

/// Returns the devices of the tenant's cards, in the tenant's order.
unsafe fn own() -> Vec<Device> {
    let (count, by_index) = (real(at::nvmlDeviceGetCount_v2), real(at::nvmlDeviceGetHandleByIndex_v2));
    if count.is_null() || by_index.is_null() {
        return Vec::new();
    }
    // SAFETY: the header declares the symbols with these arguments, and the pointers refer to local variables.
    let all: Vec<Device> = unsafe {
        let count: unsafe extern "C" fn(*mut u32) -> c_int = std::mem::transmute(count);
        let by_index: unsafe extern "C" fn(u32, *mut Device) -> c_int = std::mem::transmute(by_index);
        let mut number = 0;
        if count(&raw mut number) != SUCCESS {
            return Vec::new();
        }
        let device = |index| {
            let mut device = std::ptr::null_mut();
            (by_index(index, &raw mut device) == SUCCESS).then_some(device)
        };
        (0..number.min(MAX_CARDS)).filter_map(device).collect()
    };
    let known: Vec<_> = all.into_iter().filter_map(|device| Some((uuid(device)?, device))).collect();
    let device = |card: &[u8; 16]| known.iter().find(|(uuid, _)| uuid == card).map(|(_, device)| *device);
    cards().iter().filter_map(|(_, card)| device(card)).collect()
}

unsafe fn counted(index: usize, to: *mut u32) -> c_int {
    let function = real(index);
    if function.is_null() {
        return NO_FUNCTION;
    }
    // SAFETY: the header declares the symbol with this argument, which the caller guarantees to be valid.
    unsafe {
        let function: unsafe extern "C" fn(*mut u32) -> c_int = std::mem::transmute(function);
        let result = function(to);
        if result == SUCCESS && !to.is_null() {
            *to = u32::try_from(own().len()).unwrap_or(0);
        }
        result
    }
}

unsafe fn by_index(index: usize, number: u32, to: *mut Device) -> c_int {
    let function = real(index);
    if function.is_null() {
        return NO_FUNCTION;
    }
    // SAFETY: as above. The first call checks whether NVML works at all.
    unsafe {
        let function: unsafe extern "C" fn(u32, *mut Device) -> c_int = std::mem::transmute(function);
        let result = function(0, to);
        if result != SUCCESS {
            return result;
        }
        let found = own().get(number as usize).copied();
        *to = found.unwrap_or(std::ptr::null_mut());
        if found.is_some() { SUCCESS } else { INVALID_ARGUMENT }
    }
}

/// Finds a device by the UUID, PCI address or serial number at `name`, and rejects other tenants' devices.
unsafe fn by_name(index: usize, name: *const c_void, to: *mut Device) -> c_int {
    let function = real(index);
    if function.is_null() {
        return NO_FUNCTION;
    }
    // SAFETY: as above.
    unsafe {
        let function: unsafe extern "C" fn(*const c_void, *mut Device) -> c_int = std::mem::transmute(function);
        let result = function(name, to);
        if result == SUCCESS && !is_own(*to) {
            *to = std::ptr::null_mut();
            return NOT_FOUND;
        }
        result
    }
}

unsafe extern "C" fn index_of(device: Device, to: *mut u32) -> c_int {
    let function = real(at::nvmlDeviceGetIndex);
    if function.is_null() {
        return NO_FUNCTION;
    }
    // SAFETY: as above.
    unsafe {
        let function: unsafe extern "C" fn(Device, *mut u32) -> c_int = std::mem::transmute(function);
        let result = function(device, to);
        if result != SUCCESS {
            return result;
        }
        let place = uuid(device).and_then(|uuid| cards().iter().position(|(_, card)| *card == uuid));
        let Some(place) = place.and_then(|at| u32::try_from(at).ok()) else { return INVALID_ARGUMENT };
        *to = place;
        SUCCESS
    }
}

/// Fetches a list of devices with `ask`, which takes a capacity and a buffer, and removes other tenants' devices.
unsafe fn filtered(count: *mut u32, to: *mut Device, ask: impl Fn(*mut u32, *mut Device) -> c_int) -> c_int {
    if count.is_null() {
        return ask(count, to);
    }
    let (mut list, mut number) = ([std::ptr::null_mut(); MAX_CARDS as usize], MAX_CARDS);
    let result = ask(&raw mut number, list.as_mut_ptr());
    if result != SUCCESS {
        return result;
    }
    let own: Vec<Device> = list.iter().take(number as usize).copied().filter(|device| is_own(*device)).collect();
    // SAFETY: guaranteed by the caller: a valid count, and a list of that length or NULL.
    unsafe {
        let room = std::mem::replace(&mut *count, u32::try_from(own.len()).unwrap_or(0)) as usize;
        if to.is_null() || own.is_empty() {
            return SUCCESS;
        }
        if room < own.len() {
            return INSUFFICIENT_SIZE;
        }
        std::ptr::copy_nonoverlapping(own.as_ptr(), to, own.len());
    }
    SUCCESS
}

unsafe extern "C" fn topology_set(cpu: u32, count: *mut u32, to: *mut Device) -> c_int {
    let function = real(at::nvmlSystemGetTopologyGpuSet);
    if function.is_null() {
        return NO_FUNCTION;
    }
    // SAFETY: as above.
    unsafe {
        let function: unsafe extern "C" fn(u32, *mut u32, *mut Device) -> c_int = std::mem::transmute(function);
        filtered(count, to, |count, to| function(cpu, count, to))
    }
}

unsafe extern "C" fn nearest(device: Device, level: c_int, count: *mut u32, to: *mut Device) -> c_int {
    let function = real(at::nvmlDeviceGetTopologyNearestGpus);
    if function.is_null() {
        return NO_FUNCTION;
    }
    // SAFETY: as above.
    unsafe {
        let function: unsafe extern "C" fn(Device, c_int, *mut u32, *mut Device) -> c_int =
            std::mem::transmute(function);
        filtered(count, to, |count, to| function(device, level, count, to))
    }
}

unsafe extern "C" fn of_unit(unit: *mut c_void, count: *mut u32, to: *mut Device) -> c_int {
    let function = real(at::nvmlUnitGetDevices);
    if function.is_null() {
        return NO_FUNCTION;
    }
    // SAFETY: as above.
    unsafe {
        let function: unsafe extern "C" fn(*mut c_void, *mut u32, *mut Device) -> c_int = std::mem::transmute(function);
        filtered(count, to, |count, to| function(unit, count, to))
    }
}

macro_rules! way {
    ($index:ident, $call:ident($($arg:ident: $ty:ty),*) $symbol:ident) => {
        unsafe extern "C" fn $symbol($($arg: $ty),*) -> c_int {
            // SAFETY: guaranteed by the caller.
            unsafe { $call(at::$symbol, $($arg),*) }
        }
        if $index == at::$symbol {
            return Some($symbol as *mut ());
        }
    };
}

macro_rules! ways {
    ($index:ident, $call:ident $arguments:tt: $($symbol:ident),*) => { $(way!($index, $call $arguments $symbol);)* };
}

pub fn ours(index: usize) -> Option<*mut ()> {
    ways!(index, counted(to: *mut u32): nvmlDeviceGetCount, nvmlDeviceGetCount_v2);
    ways!(index, by_index(number: u32, to: *mut Device): nvmlDeviceGetHandleByIndex, nvmlDeviceGetHandleByIndex_v2);
    ways!(index, by_name(name: *const c_void, to: *mut Device): nvmlDeviceGetHandleByUUID, nvmlDeviceGetHandleByUUIDV,
        nvmlDeviceGetHandleByPciBusId, nvmlDeviceGetHandleByPciBusId_v2, nvmlDeviceGetHandleBySerial);
    Some(match index {
        at::nvmlDeviceGetIndex => index_of as *mut (),
        at::nvmlSystemGetTopologyGpuSet => topology_set as *mut (),
        at::nvmlDeviceGetTopologyNearestGpus => nearest as *mut (),
        at::nvmlUnitGetDevices => of_unit as *mut (),
        _ => return None,
    })
}
