//! A card's address region, and the chunks that back it.
//!
//! A chunk that moves to host memory is unmapped, and mapped again before the program's work may run. The driver takes
//! 0.3 ms to map 16 MiB of host memory and 0.08 ms to unmap it. Mapping the new location immediately would make each
//! slice wait for both, although a chunk is usually back on the card before its next use.

use std::collections::{BTreeMap, BTreeSet};
use std::ffi::c_int;
use std::os::fd::AsFd as _;

use chunk_arena::Arena;
use cuda_protocol::{Chunk, ChunkId, Place};

use super::handles::{Backing, Pages};
use crate::descriptors::ChunkDescriptor;
use crate::driver::{Access, Address, Handle, SUCCESS};
use crate::log::report;

/// A chunk of a region.
#[derive(Debug)]
pub struct Slot {
    /// The driver's handle, or `None` while the chunk is not mapped.
    handle: Option<Handle>,
    pub chunk: Backing,
}

/// The address region of one card.
#[derive(Debug)]
pub struct Region {
    /// Devices with access to the chunks: the card's own device, and its peers.
    access: Vec<c_int>,
    /// Index of the card in the owner's list.
    pub card: u8,
    pub base: Address,
    /// Size of the address range in bytes.
    pub bytes: u64,
    pub chunk_bytes: u64,
    pub arena: Arena,
    pub spare: BTreeSet<u32>,
    slots: BTreeMap<u32, Slot>,
    /// Indices of evicted chunks that are not mapped.
    away: BTreeSet<u32>,
}

/// Splits ascending numbers into consecutive runs. Returns the first number and the length of each run.
fn runs(numbers: impl IntoIterator<Item = u32>) -> Vec<(u32, u32)> {
    let mut runs: Vec<(u32, u32)> = Vec::new();
    for number in numbers {
        match runs.last_mut() {
            Some((first, count)) if *first + *count == number => *count += 1,
            _ => runs.push((number, 1)),
        }
    }
    runs
}

impl Region {
    /// Creates an unmapped region at reserved addresses. The first device in `access` is the card's own.
    pub fn new(access: Vec<c_int>, card: u8, base: Address, bytes: u64, chunk_bytes: u64) -> Self {
        let arena = Arena::new(bytes, chunk_bytes);
        let (slots, spare, away) = Default::default();
        Self { access, card, base, bytes, chunk_bytes, arena, spare, slots, away }
    }

    /// Returns the card's driver device.
    pub fn device(&self) -> c_int {
        self.access.first().copied().unwrap_or(-1)
    }

    /// Grants another device access to all current and future chunks. Returns true on success.
    pub fn add_peer(&mut self, pages: &mut impl Pages, device: c_int) -> bool {
        self.access.push(device);
        self.allow(pages, self.slots.keys().copied())
    }

    /// Revokes another device's access. Returns true on success.
    pub fn remove_peer(&mut self, pages: &mut impl Pages, device: c_int) -> bool {
        if !self.access.contains(&device) {
            return true;
        }
        self.access.retain(|peer| *peer != device);
        self.set_access(pages, self.slots.keys().copied(), &[Access::none_of(device)])
    }

    /// Returns true if an address is in the region.
    pub fn contains(&self, address: Address) -> bool {
        address >= self.base && address - self.base < self.bytes
    }

    /// Returns true if an address is in an evicted chunk that is not mapped.
    pub fn is_away(&self, address: Address) -> bool {
        let number = || u32::try_from((address - self.base) / self.chunk_bytes).unwrap_or(u32::MAX);
        !self.away.is_empty() && self.contains(address) && self.away.contains(&number())
    }

    /// Returns the number of evicted chunks that are not mapped.
    pub fn away(&self) -> usize {
        self.away.len()
    }

    /// Returns the chunk at an index.
    pub fn slot(&self, number: u32) -> Option<&Slot> {
        self.slots.get(&number)
    }

    /// Like [`Self::slot`], but mutable.
    pub fn slot_mut(&mut self, number: u32) -> Option<&mut Slot> {
        self.slots.get_mut(&number)
    }

    /// Returns all chunks.
    pub fn chunks(&self) -> impl Iterator<Item = &Backing> {
        self.slots.values().map(|slot| &slot.chunk)
    }

    fn address(&self, chunk: u32) -> Address {
        self.base + u64::from(chunk) * self.chunk_bytes
    }

    /// Maps new chunks at unmapped indices, which must be in ascending order. On failure, maps none of them and returns
    /// false.
    pub fn map(&mut self, pages: &mut impl Pages, numbers: &[u32], chunks: &[(Chunk, ChunkDescriptor)]) -> bool {
        let mut mapped = Vec::new();
        for (&number, (chunk, descriptor)) in numbers.iter().zip(chunks) {
            let Some(handle) = self.attach(pages, number, descriptor) else { break };
            let chunk = Backing::new(*chunk, descriptor.lasting());
            self.slots.insert(number, Slot { handle: Some(handle), chunk });
            mapped.push(number);
        }
        if mapped.len() == numbers.len() && self.allow(pages, mapped.iter().copied()) {
            return true;
        }
        self.unmap(pages, &mapped);
        false
    }

    /// Unmaps chunks that no work uses. Returns their IDs.
    pub fn unmap(&mut self, pages: &mut impl Pages, numbers: &[u32]) -> Vec<ChunkId> {
        let sorted: BTreeSet<u32> = numbers.iter().copied().filter(|number| self.slots.contains_key(number)).collect();
        self.take_away(pages, sorted.iter().copied());
        let mut ids = Vec::new();
        for number in sorted {
            self.away.remove(&number);
            ids.extend(self.slots.remove(&number).map(|slot| slot.chunk.id));
        }
        ids
    }

    /// Unmaps the given chunks if they are mapped, and releases their handles. The indices must be in ascending order.
    fn take_away(&mut self, pages: &mut impl Pages, numbers: impl Iterator<Item = u32>) {
        let mapped = numbers.filter(|number| self.slots.get(number).is_some_and(|slot| slot.handle.is_some()));
        for (first, count) in runs(mapped) {
            pages.unmap(self.address(first), u64::from(count) * self.chunk_bytes);
            for number in first..first + count {
                if let Some(handle) = self.slots.get_mut(&number).and_then(|slot| slot.handle.take()) {
                    pages.release(handle);
                }
            }
        }
    }

    /// Unmaps all chunks. They must be in host memory.
    pub fn detach(&mut self, pages: &mut impl Pages) {
        let numbers: Vec<u32> = self.slots.keys().copied().collect();
        self.take_away(pages, numbers.iter().copied());
        self.away.extend(numbers);
    }

    /// Imports a descriptor, and maps its memory at the address of an unmapped chunk.
    fn attach(&self, pages: &mut impl Pages, number: u32, descriptor: &ChunkDescriptor) -> Option<Handle> {
        let handle = pages.import(descriptor.as_fd())?;
        if pages.map(self.address(number), self.chunk_bytes, handle) == SUCCESS {
            return Some(handle);
        }
        pages.release(handle);
        None
    }

    /// Replaces the memory of consecutive chunks, starting at index `first`. Returns the number of chunks replaced
    /// before the first failure. Evicted chunks are inaccessible until [`Self::bring`]. No work may be in flight.
    pub fn redirect(&mut self, pages: &mut impl Pages, first: u32, moves: &[(Chunk, ChunkDescriptor)]) -> usize {
        let mut new: Vec<(Option<Handle>, Backing)> = Vec::new();
        for (chunk, descriptor) in moves {
            let backing = Backing::new(*chunk, descriptor.lasting());
            let goes_away = chunk.place == Place::Host && backing.descriptor.is_some();
            let handle = if goes_away { None } else { pages.import(descriptor.as_fd()) };
            if handle.is_none() && !goes_away {
                break;
            }
            new.push((handle, backing));
        }
        let count = new.len();
        let all = || (first..).take(count);
        let mapped = |number: &u32| self.slots.get(number).is_some_and(|slot| slot.handle.is_some());
        for (start, count) in runs(all().filter(mapped)) {
            pages.unmap(self.address(start), u64::from(count) * self.chunk_bytes);
        }
        let mut done = 0;
        let mut failed = false;
        for (number, (handle, backing)) in all().zip(new) {
            let at = self.address(number);
            failed |= handle.is_some_and(|handle| !failed && pages.map(at, self.chunk_bytes, handle) != SUCCESS);
            let Some(slot) = self.slots.get_mut(&number) else { continue };
            if failed {
                // Keep the previous mapping.
                handle.into_iter().for_each(|handle| pages.release(handle));
                if let Some(old) = slot.handle {
                    pages.map(at, self.chunk_bytes, old);
                }
                continue;
            }
            slot.handle.into_iter().for_each(|old| pages.release(old));
            (slot.handle, slot.chunk) = (handle, backing);
            match handle {
                Some(_) => self.away.remove(&number),
                None => self.away.insert(number),
            };
            done += 1;
        }
        if !self.allow(pages, (first..).take(moves.len())) {
            report!("redirected chunks cannot be accessed");
        }
        done
    }

    /// Maps evicted chunks. Returns true if all are mapped.
    pub fn bring(&mut self, pages: &mut impl Pages) -> bool {
        let numbers: Vec<u32> = self.away.iter().copied().collect();
        let mut here = Vec::new();
        for number in numbers {
            let Some(slot) = self.slots.get(&number) else { continue };
            let Some(handle) = slot.chunk.descriptor.as_ref().and_then(|descriptor| pages.import(descriptor.as_fd()))
            else {
                continue;
            };
            if pages.map(self.address(number), self.chunk_bytes, handle) != SUCCESS {
                pages.release(handle);
                continue;
            }
            if let Some(slot) = self.slots.get_mut(&number) {
                slot.handle = Some(handle);
            }
            here.push(number);
        }
        for (first, count) in runs(here) {
            let run = first..first + count;
            if self.allow(pages, run.clone()) {
                self.away.retain(|number| !run.contains(number));
            } else {
                self.take_away(pages, run);
            }
        }
        self.away.is_empty()
    }

    /// Grants the card and its peers access to the given chunks if they are mapped. The indices must be in ascending
    /// order. Returns true on success.
    fn allow(&self, pages: &mut impl Pages, numbers: impl Iterator<Item = u32>) -> bool {
        let access: Vec<Access> = self.access.iter().map(|device| Access::all(*device)).collect();
        self.set_access(pages, numbers, &access)
    }

    /// Like [`Self::allow`], with the given access.
    fn set_access(&self, pages: &mut impl Pages, numbers: impl Iterator<Item = u32>, access: &[Access]) -> bool {
        let mapped = numbers.filter(|number| self.slots.get(number).is_some_and(|slot| slot.handle.is_some()));
        let bytes = |count| u64::from(count) * self.chunk_bytes;
        let mut allow =
            |&(first, count): &(u32, u32)| pages.allow(self.address(first), bytes(count), access) == SUCCESS;
        // Try each run, even after a failure.
        let mut all = true;
        for run in &runs(mapped) {
            all &= allow(run);
        }
        all
    }
}

#[cfg(test)]
mod tests;
