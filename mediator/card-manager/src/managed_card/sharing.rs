//! Sharing of memory between two cards while a VM moves from one to the other. The VM's host memory is also mapped for
//! the other card, so it need not be copied during the VM's downtime. Only one of the cards runs the VM.
//!
//! 1. The target card *borrows* the VM's memory from the other card's host memory ([`ManagedCard::lend`]). It also has
//!    its own memory for the VM, whose pages are already allocated.
//! 2. After the VM has stopped, borrowed chunks that have moved in the meantime are returned ([`ManagedCard::part`]),
//!    and copied like chunks that were never borrowed.
//! 3. After the VM has resumed, the borrowed memory is copied in parts. The VM's work is off the engines during each
//!    part, as in a relocation ([`ManagedCard::copy_borrowed_memory`]). The memory is returned to the old card only
//!    afterwards.

use super::{CardState, ManagedCard};
use crate::ManagerError;
use card::DmaMemory;
use card_memory::Dirty;
use card_memory::pinned::Borrowed;
use nvspec::addr::SMALL_PAGE;
use std::collections::{BTreeMap, BTreeSet};
use vram::{GuestVramAddr, HostAddr, Place, TenantId};

/// Number of bytes copied at a time, while the VM's work is stopped.
const BATCH_BYTES: u64 = 8 << 20;

/// A chunk that borrows another card's memory.
struct Lent {
    at: GuestVramAddr,
    slot: HostAddr,
    memory: Borrowed,
}

impl ManagedCard {
    /// Makes VM `its` of card `to` borrow these chunks of VM `vm`, which keeps working. Returns the chunks that cannot
    /// be borrowed, for example because they are on the card, or because the cards' chunk sizes differ.
    ///
    /// # Errors
    /// Returns an error if the other card has too little memory or does not respond.
    pub(super) fn lend(
        &self,
        vm: TenantId,
        chunks: &[GuestVramAddr],
        to: &ManagedCard,
        its: TenantId,
    ) -> Result<Vec<GuestVramAddr>, ManagerError> {
        let mut rest = Vec::new();
        let here = self.lock().chunk_bytes();
        let same = to.lock().chunk_bytes() == here;
        for at in chunks {
            let lies = same.then(|| self.lock().host_memory_of(vm, *at)).flatten();
            let borrowed = match lies {
                Some(memory) => match to.receive(its, *at)? {
                    Place::Host(slot) => to.lock().vram_mut().pinned.borrow(slot, memory)?,
                    Place::Card(_) => false,
                },
                None => false,
            };
            if !borrowed {
                rest.push(*at);
            }
        }
        Ok(rest)
    }

    /// Makes VM `its` of card `to` return borrowed chunks of a VM that have moved in the meantime. Its own memory at
    /// these addresses contains zeros. No memory of this card may move during the call. Returns the chunks that are
    /// still borrowed, and therefore identical on both cards.
    ///
    /// # Errors
    /// Returns an error if the other card cannot use its own memory.
    pub(super) fn part(
        &self,
        vm: TenantId,
        chunks: &[GuestVramAddr],
        to: &ManagedCard,
        its: TenantId,
    ) -> Result<BTreeSet<u64>, ManagerError> {
        let lies: BTreeMap<u64, usize> = {
            let state = self.lock();
            let of = |at: &GuestVramAddr| Some((at.0, state.host_memory_of(vm, *at)?.host_address().addr()));
            chunks.iter().filter_map(of).collect()
        };
        let lent = to.lock().lent_to(its);
        let mut same = BTreeSet::new();
        for Lent { at, slot, memory } in lent {
            if lies.get(&at.0) == Some(&memory.theirs.host_address().addr()) {
                same.insert(at.0);
            } else {
                to.lock().vram_mut().pinned.own(slot)?;
            }
        }
        Ok(same)
    }

    /// Copies the borrowed memory of an arrived VM to this card's own memory, a few MiB at a time. The VM's work is off
    /// the engines during each copy.
    ///
    /// # Errors
    /// Returns an error if this card still uses the other card's memory. In this case, the other card must not reuse
    /// the memory.
    pub fn copy_borrowed_memory(&self, vm: TenantId) -> Result<(), ManagerError> {
        loop {
            let _one_at_a_time = self.moving.lock();
            let mut lent = self.lock().lent_to(vm);
            lent.truncate((BATCH_BYTES / self.lock().chunk_bytes()).max(1) as usize);
            if lent.is_empty() {
                break;
            }
            self.copy_borrowed_batch(vm, &lent)?;
        }
        // Scrub memory that the VM has released in the meantime.
        self.scrub();
        if self.lock().vram().pinned.borrows() {
            return Err(ManagerError::Unsettled("it still uses memory of the card that a VM has left"));
        }
        Ok(())
    }

    fn copy_borrowed_batch(&self, vm: TenantId, lent: &[Lent]) -> Result<(), ManagerError> {
        self.lock().begin_settling(vm, lent);
        let copied = if self.vacate(vm) {
            // Wait until the last writes of the VM's engines have arrived.
            let arrived = self.lock().vram().memory.barrier().map_err(ManagerError::from);
            let bytes = self.lock().chunk_bytes();
            arrived.and_then(|()| {
                lent.iter().try_for_each(|one| {
                    one.memory.copy(0, bytes)?;
                    self.lock().settle_one(vm, one)
                })
            })
        } else {
            Err(ManagerError::NotStill)
        };
        self.lock().end_settling(vm, lent);
        copied
    }
}

impl CardState {
    /// Returns the host memory of a chunk, or `None` if the chunk is on the card or not at the start of its host
    /// memory.
    fn host_memory_of(&self, vm: TenantId, at: GuestVramAddr) -> Option<DmaMemory> {
        let Some(Place::Host(slot)) = self.place_of(vm, at) else { return None };
        let (memory, offset) = self.vram().pinned.memory(slot)?;
        (offset == 0).then_some(memory)
    }

    /// Returns the chunks of a VM that borrow another card's memory.
    fn lent_to(&self, vm: TenantId) -> Vec<Lent> {
        let pinned = &self.vram().pinned;
        if !pinned.borrows() {
            return Vec::new();
        }
        let lent = |at: GuestVramAddr| {
            let Some(Place::Host(slot)) = self.place_of(vm, at) else { return None };
            Some(Lent { at, slot, memory: pinned.borrowed(slot)? })
        };
        self.chunks_of(vm).into_iter().filter_map(lent).collect()
    }

    /// Stops a VM's channels, makes them leave the engines, and starts to record the VM's CPU writes to these chunks.
    fn begin_settling(&mut self, vm: TenantId, lent: &[Lent]) {
        let bytes = self.chunk_bytes();
        for one in lent {
            self.vram_mut().copied.insert((vm, one.at.0 / bytes), Dirty::new(bytes));
        }
        self.keep_from_running(vm);
    }

    /// Copies again the pages that the VM's CPUs wrote during the copy, and switches the chunk to the card's own
    /// memory. If the chunk was freed, only stops recording its writes.
    fn settle_one(&mut self, vm: TenantId, Lent { at, slot, memory }: &Lent) -> Result<(), ManagerError> {
        let bytes = self.chunk_bytes();
        let written = self.vram_mut().copied.remove(&(vm, at.0 / bytes));
        if self.place_of(vm, *at) != Some(Place::Host(*slot)) {
            return Ok(());
        }
        for page in written.iter().flat_map(Dirty::pages) {
            memory.copy(page, SMALL_PAGE.min(bytes - page))?;
        }
        self.vram_mut().pinned.own(*slot)
    }

    fn end_settling(&mut self, vm: TenantId, lent: &[Lent]) {
        let bytes = self.chunk_bytes();
        for one in lent {
            self.vram_mut().copied.remove(&(vm, one.at.0 / bytes));
        }
        self.go_on(vm);
    }
}
