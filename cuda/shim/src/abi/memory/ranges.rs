//! Changes to address ranges in a program with several cards. A range may contain mappings of memory on several cards.

use std::ffi::c_int;
use std::sync::MutexGuard;

use super::own::give_back;
use crate::driver::{Access, Address, INVALID_VALUE, SUCCESS};
use crate::memory::chunks::ChunkMemory;
use crate::memory::handles::{Cover, Pages as _};
use crate::memory::pages::Driver;
use crate::shim::{Card, Shim};

/// Locks the memory of all cards, in card order. Returns an error if this library has reserved part of the range, or if
/// the range contains only part of a mapping.
fn lock(shim: &Shim, at: Address, bytes: u64) -> Result<Vec<(&Card, MutexGuard<'_, ChunkMemory>)>, c_int> {
    let all: Vec<_> = shim.cards().map(|card| (card, shim.memory(card).lock())).collect();
    let is_wrong = |memory: &ChunkMemory| memory.reserved(at, bytes) || memory.handles.cover(at, bytes) == Cover::Part;
    if all.iter().any(|(_, memory)| is_wrong(memory)) { Err(INVALID_VALUE) } else { Ok(all) }
}

/// Unmaps a range.
pub fn unmap(shim: &Shim, at: Address, bytes: u64) -> c_int {
    let mut all = match lock(shim, at, bytes) {
        Ok(all) => all,
        Err(error) => return error,
    };
    let result = Driver.unmap(at, bytes);
    if result != SUCCESS {
        return result;
    }
    for (card, memory) in &mut all {
        let operations = shim.memory(card);
        let freed = memory.handles.unmapped(&mut Driver, at, bytes);
        freed.into_iter().for_each(|freed| give_back(operations, freed));
        operations.unmapped_fixed(at, bytes);
    }
    SUCCESS
}

/// Sets the access permissions of a range.
pub fn set_access(shim: &Shim, at: Address, bytes: u64, access: &[Access]) -> c_int {
    // From now on, work on another card may use the memory.
    let crosses = |card: &Card| {
        let own = |access: &Access| access.device().is_none_or(|device| card.link.card(device).is_some());
        !access.iter().all(own) && shim.memory(card).with(|memory| memory.handles.cover(at, bytes) != Cover::None)
    };
    if shim.cards().any(crosses) {
        shim.allow_cross_access();
    }
    let mut all = match lock(shim, at, bytes) {
        Ok(all) => all,
        Err(error) => return error,
    };
    if let Some(error) = all.iter().find_map(|(_, memory)| memory.handles.refuses(at, bytes, access)) {
        return error;
    }
    let result = Driver.allow(at, bytes, access);
    if result == SUCCESS {
        all.iter_mut().for_each(|(_, memory)| memory.handles.allowed(at, bytes, access));
    }
    result
}
