//! Memory that the driver allocates, and that never moves. This library accounts for it.
//!
//! UNSAFETY: forwards the program's calls.
#![allow(unsafe_code, reason = "see UNSAFETY")]

use std::collections::HashMap;
use std::ffi::{c_int, c_void};
use std::sync::{Mutex, MutexGuard, PoisonError};

use cuda_protocol::FixedKind;

use super::Operations;
use super::foreign::{Foreign, Target};
use crate::driver::{self, Address, Handle, INVALID_CONTEXT, INVALID_DEVICE, OUT_OF_MEMORY, Object, SUCCESS};

/// An object with accounted memory, identified by the type and value of its handle.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Thing {
    /// Card memory, identified by its address.
    Address(u64),
    /// Array, identified by its handle.
    Array(u64),
    /// Mipmapped array, identified by its handle.
    Mipmap(u64),
    /// Host memory, identified by its address.
    Host(u64),
}

#[derive(Clone, Copy, Debug)]
struct Counted {
    card: u8,
    kind: FixedKind,
    bytes: u64,
}

/// Accounts of driver memory.
#[derive(Debug, Default)]
pub struct Fixed {
    counted: Mutex<HashMap<Thing, Counted>>,
    /// Driver handles. Locked during driver calls for these objects, because the driver reuses the handles of destroyed
    /// objects.
    handles: Mutex<Foreign<Counted>>,
    /// Pools whose memory may be shared with other processes.
    pools: Mutex<Vec<u64>>,
}

impl Fixed {
    fn counted(&self) -> MutexGuard<'_, HashMap<Thing, Counted>> {
        self.counted.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn handles(&self) -> MutexGuard<'_, Foreign<Counted>> {
        self.handles.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn pools(&self) -> MutexGuard<'_, Vec<u64>> {
        self.pools.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Operations<'_> {
    fn return_counted(self, ended: impl IntoIterator<Item = Counted>) {
        for Counted { card, kind, bytes } in ended {
            self.link.unfix(card, kind, bytes);
        }
    }

    /// Requests fixed memory from the owner, and returns empty chunks if necessary. Returns true if the owner permits
    /// it.
    pub fn fix(self, card: u8, kind: FixedKind, bytes: u64) -> bool {
        self.persist(|| if self.link.fix(card, kind, bytes) { Ok(()) } else { Err(OUT_OF_MEMORY) }).is_ok()
    }

    /// Reserves `bytes` on the current card, calls the driver through `make`, and records the object. Releases the
    /// reservation on failure.
    pub fn count(self, kind: FixedKind, bytes: u64, make: impl FnOnce() -> (c_int, Thing)) -> c_int {
        let Some((_, card)) = self.link.current_card() else { return INVALID_CONTEXT };
        if !self.fix(card, kind, bytes) {
            return OUT_OF_MEMORY;
        }
        let (result, thing) = make();
        if result == SUCCESS {
            self.memory.fixed.counted().insert(thing, Counted { card, kind, bytes });
        } else {
            self.link.unfix(card, kind, bytes);
        }
        result
    }

    /// Removes a destroyed object from the accounts, if they contain it.
    pub fn uncount(self, thing: Thing) {
        let ended = self.memory.fixed.counted().remove(&thing);
        self.return_counted(ended);
    }

    /// Returns true if the driver must allocate from a pool, because the allocations may be shared with processes.
    pub fn is_exported_pool(self, pool: Object) -> bool {
        self.memory.fixed.pools().contains(&(pool as u64))
    }

    /// Records a pool whose memory may be shared.
    pub fn add_exported_pool(self, pool: Object) {
        self.memory.fixed.pools().push(pool as u64);
    }

    /// Removes a pool's record.
    pub fn forget_pool(self, pool: Object) {
        self.memory.fixed.pools().retain(|known| *known != pool as u64);
    }

    /// Allocates with `make` from a pool whose memory may be shared. The memory stays in the accounts until it is
    /// freed.
    pub fn allocate_of_pool(self, bytes: usize, make: impl FnOnce() -> (c_int, Address)) -> c_int {
        self.count(FixedKind::Shared, bytes as u64, || {
            let (result, address) = make();
            (result, Thing::Address(address))
        })
    }

    /// Calls `cuMemCreate` for memory that the driver must allocate itself. The memory stays in the accounts until its
    /// last reference and mapping are gone.
    ///
    /// # Safety
    /// Same as for the driver's function.
    pub unsafe fn create_fixed(self, handle: *mut Handle, bytes: usize, property: *const c_void, flags: u64) -> c_int {
        // SAFETY: guaranteed by the caller: `CUmemAllocationProp` begins with four 32-bit numbers; the third and fourth
        // are the location.
        let place = unsafe { property.cast::<[c_int; 4]>().as_ref() };
        let [_, _, location, device] = place.copied().unwrap_or([1, 0, 1, 0]);
        let (kind, card) = match (location, self.link.card(device)) {
            (1, Some(card)) => (FixedKind::Driver, card),
            (1, None) => return INVALID_DEVICE,
            // Host memory does not belong to a card, so charge it to the current card.
            _ => (FixedKind::Host, self.link.current_card().map_or(0, |(_, card)| card)),
        };
        let counted = Counted { card, kind, bytes: bytes as u64 };
        if !self.fix(card, kind, counted.bytes) {
            return OUT_OF_MEMORY;
        }
        let mut handles = self.memory.fixed.handles();
        // SAFETY: as above; the driver has written the handle if it returned success.
        let (result, old) = unsafe {
            match driver::mem_create(handle, bytes, property, flags) {
                SUCCESS => (SUCCESS, handles.add(*handle, counted)),
                error => (error, Some(counted)),
            }
        };
        drop(handles);
        self.return_counted(old);
        result
    }

    /// Returns true if these accounts contain a driver handle's memory.
    pub fn knows_fixed(self, handle: Handle) -> bool {
        self.memory.fixed.handles().knows(handle)
    }

    /// Calls `cuMemRelease` for a driver handle.
    ///
    /// # Safety
    /// Same as for the driver's function.
    pub unsafe fn release_fixed(self, handle: Handle) -> c_int {
        let mut handles = self.memory.fixed.handles();
        // SAFETY: guaranteed by the caller.
        let result = unsafe { driver::mem_release(handle) };
        let ended = (result == SUCCESS).then(|| handles.release(handle)).flatten();
        drop(handles);
        self.return_counted(ended);
        result
    }

    /// Calls `cuMemMap` for a driver handle.
    ///
    /// # Safety
    /// Same as for the driver's function.
    pub unsafe fn map_fixed(self, address: Address, bytes: usize, offset: usize, handle: Handle, flags: u64) -> c_int {
        let mut handles = self.memory.fixed.handles();
        // SAFETY: guaranteed by the caller.
        let result = unsafe { driver::mem_map(address, bytes, offset, handle, flags) };
        if result == SUCCESS {
            handles.map(address, bytes as u64, handle);
        }
        result
    }

    /// Records that the driver has unmapped all mappings in a range.
    pub fn unmapped_fixed(self, address: Address, bytes: u64) {
        let ended = self.memory.fixed.handles().unmap(address, bytes);
        self.return_counted(ended);
    }

    /// Records another reference by the program to a driver handle.
    pub fn retained_fixed(self, handle: Handle) {
        self.memory.fixed.handles().retain(handle);
    }

    /// Records that a driver handle's memory is bound to an object. The binding keeps the memory alive.
    pub fn bound_fixed(self, target: Target, handle: Handle) {
        self.memory.fixed.handles().bind(target, handle);
    }

    /// Removes all memory bindings of the targets that match `is_it`.
    pub fn unbound_fixed(self, is_it: impl Fn(Target) -> bool) {
        let ended = self.memory.fixed.handles().unbind(is_it);
        self.return_counted(ended);
    }
}
