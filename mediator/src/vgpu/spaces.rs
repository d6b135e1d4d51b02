//! The VM's GPU address spaces: which guest page directory has which shadow, kept in step at each flush.

use super::ram::RamMap;
use crate::host::{CardVram, HostCard, HostError};
use nvspec::addr::{Gpa, GuestVramAddr, Iova, Place, VramAddr};
use nvspec::mmu::PD_ENTRIES;
use shadow_pt::{Frames, GuestMemory, GuestRange, Limits, NoMemory, Shadow, ShadowMemory, SyncReport, Unreadable};
use std::cell::RefCell;
use vmm_glue::Link;
use vram::{CardAddr, PagePool, VmId};

/// Card memory that the shadow tables of one VM may take, in bytes. A directory takes 64 KiB, and each 128 MiB of
/// address space that is in use 264 KiB.
const POOL_BYTES: u64 = 128 << 20;

/// What a VM has: what its page tables may name.
pub(super) struct Owned<'a> {
    pub(super) vm: VmId,
    pub(super) ram: &'a RamMap,
    pub(super) link: &'a Link,
    pub(super) bus_master: bool,
}

/// All address spaces of one VM.
pub(super) struct Spaces {
    list: Vec<Shadow>,
    pool: PagePool,
    /// Sums since the VM was created.
    pub(super) report: SyncReport,
    /// Synchronisations since then.
    pub(super) syncs: u64,
}

impl Spaces {
    pub(super) fn new() -> Self {
        Self { list: Vec::new(), pool: PagePool::new(POOL_BYTES), report: SyncReport::default(), syncs: 0 }
    }

    /// The shadow of the guest's directory at `directory`, made and filled if it does not exist.
    pub(super) fn open(&mut self, host: &HostCard, owned: &Owned<'_>, directory: Place) -> Result<VramAddr, HostError> {
        let known = self.list.iter().position(|shadow| shadow.guest_directory() == directory);
        let index = match known {
            Some(index) => index,
            None => {
                let reserved = PD_ENTRIES - 1..PD_ENTRIES;
                let limits = Limits { reserved, table_bytes: POOL_BYTES };
                let mut guard = host.lock();
                let state = RefCell::new(&mut guard.vram);
                let mut memory = TableMemory { state: &state, pool: &mut self.pool };
                let shadow = Shadow::new(directory, limits, &mut memory)
                    .map_err(|error: NoMemory| HostError::Refused(error.to_string()))?;
                self.list.push(shadow);
                self.list.len() - 1
            }
        };
        self.sync_one(host, owned, index)?;
        Ok(self.list[index].directory())
    }

    /// Brings the shadows of `directory` (of all, for `None`) up to date, and flushes the card's TLBs for them.
    pub(super) fn sync(
        &mut self,
        host: &HostCard,
        owned: &Owned<'_>,
        directory: Option<Place>,
    ) -> Result<(), HostError> {
        for index in 0..self.list.len() {
            if directory.is_none_or(|directory| self.list[index].guest_directory() == directory) {
                self.sync_one(host, owned, index)?;
            }
        }
        Ok(())
    }

    fn sync_one(&mut self, host: &HostCard, owned: &Owned<'_>, index: usize) -> Result<(), HostError> {
        let Self { list, pool, report, syncs } = self;
        let shadow = &mut list[index];
        let mut guard = host.lock();
        let state = RefCell::new(&mut guard.vram);
        let mut guest = Tables { state: &state, owned };
        let frames = Granted { state: &state, owned };
        let mut memory = TableMemory { state: &state, pool };
        let done = shadow.sync(&mut guest, &frames, &mut memory);
        state.borrow_mut().memory.invalidate(shadow.directory(), false)?;
        shadow.flushed(&mut memory);
        report.merge(&done);
        *syncs += 1;
        if done.denied.total() != 0 {
            tracing::warn!(denied = ?done.denied, directory = %shadow.guest_directory(),
                "page table entries name what the VM does not have; they stay unmapped");
        }
        Ok(())
    }

    /// Takes guest RAM out of all shadows. When it returns, the card cannot reach it.
    pub(super) fn withdraw_ram(&mut self, host: &HostCard, gpa: u64, size: u64) -> Result<(), HostError> {
        let Self { list, pool, .. } = self;
        let mut guard = host.lock();
        let state = RefCell::new(&mut guard.vram);
        let mut memory = TableMemory { state: &state, pool };
        for shadow in list {
            let done = shadow.invalidate(GuestRange::Ram(Gpa(gpa), size), &mut memory);
            if done.entries_written != 0 {
                state.borrow_mut().memory.invalidate(shadow.directory(), false)?;
            }
            shadow.flushed(&mut memory);
        }
        Ok(())
    }

    /// Frees the shadows that no channel uses.
    pub(super) fn collect(&mut self, host: &HostCard) {
        let Self { list, pool, .. } = self;
        let mut guard = host.lock();
        let unused =
            list.extract_if(.., |shadow| !guard.channels.uses_directory(shadow.directory())).collect::<Vec<_>>();
        let state = RefCell::new(&mut guard.vram);
        let mut memory = TableMemory { state: &state, pool };
        for shadow in unused {
            shadow.destroy(&mut memory);
        }
        self.pool.reclaim(&mut guard.vram.chunks);
    }

    /// Frees all shadows, and the VM's pool. No channel of the VM is bound any more. What a channel uses that the card
    /// has not let go of stays.
    pub(super) fn clear(&mut self, host: &HostCard) {
        self.collect(host);
        if self.list.is_empty() {
            self.pool.release_all(&mut host.lock().vram.chunks);
        }
    }

    /// Address spaces, and card memory that their shadows take, in bytes.
    pub(super) fn usage(&self) -> (usize, u64) {
        (self.list.len(), self.list.iter().map(Shadow::card_bytes).sum())
    }
}

/// Reads a guest's structures, wherever they lie.
pub(super) struct Tables<'a, 'b, 'c> {
    pub(super) state: &'a RefCell<&'b mut CardVram>,
    pub(super) owned: &'a Owned<'c>,
}

impl Tables<'_, '_, '_> {
    pub(super) fn fill(&mut self, place: Place, data: &mut [u8]) -> Option<()> {
        match place {
            Place::Vram(address) => read_vram(&mut self.state.borrow_mut(), self.owned.vm, address, data),
            Place::Ram(address) if self.owned.bus_master => self.owned.link.memory().read(address.0, data).ok(),
            Place::Ram(_) => None,
        }
    }
}

/// Reads guest VRAM, chunk by chunk.
pub(super) fn read_vram(state: &mut CardVram, vm: VmId, address: GuestVramAddr, data: &mut [u8]) -> Option<()> {
    let mut done = 0;
    while done < data.len() {
        let at = address.checked_add(done as u64)?;
        let left = state.chunks.chunk_bytes() - at.0 % state.chunks.chunk_bytes();
        let run = left.min((data.len() - done) as u64) as usize;
        let place = state.guest_vram(vm, at, run as u64)?;
        state.memory.read(place, &mut data[done..done + run]).ok()?;
        done += run;
    }
    Some(())
}

impl GuestMemory for Tables<'_, '_, '_> {
    fn read(&mut self, place: Place, data: &mut [u8]) -> Result<(), Unreadable> {
        self.fill(place, data).ok_or(Unreadable)
    }
}

impl channels::GuestMemory for Tables<'_, '_, '_> {
    fn read(&mut self, place: Place, data: &mut [u8]) -> Result<(), channels::Unreadable> {
        self.fill(place, data).ok_or(channels::Unreadable)
    }
}

/// What the VM's tables may name.
struct Granted<'a, 'b, 'c> {
    state: &'a RefCell<&'b mut CardVram>,
    owned: &'a Owned<'c>,
}

impl Frames for Granted<'_, '_, '_> {
    fn vram(&self, address: GuestVramAddr, len: u64) -> Option<VramAddr> {
        self.state.borrow().guest_vram(self.owned.vm, address, len)
    }

    fn ram(&self, address: Gpa, len: u64, write: bool) -> Option<Iova> {
        let (iova, run) = self.owned.ram.translate(address, write)?;
        (run >= len).then_some(iova)
    }
}

/// Card memory for shadow tables, from the VM's pool.
struct TableMemory<'a, 'b> {
    state: &'a RefCell<&'b mut CardVram>,
    pool: &'a mut PagePool,
}

impl ShadowMemory for TableMemory<'_, '_> {
    fn alloc(&mut self, bytes: u64) -> Option<VramAddr> {
        let state = &mut **self.state.borrow_mut();
        let address = loop {
            match self.pool.alloc(&mut state.chunks, bytes) {
                Ok(CardAddr(address)) => break VramAddr(address),
                // Chunks that wait to be scrubbed may do.
                Err(_) if state.scrub_one().ok()? => {}
                Err(_) => return None,
            }
        };
        state.memory.zero(address, bytes).ok()?;
        Some(address)
    }

    fn free(&mut self, address: VramAddr, _bytes: u64) {
        self.pool.free(CardAddr(address.0));
    }

    fn write(&mut self, address: VramAddr, data: &[u8]) {
        let state = &mut **self.state.borrow_mut();
        if let Err(error) = state.memory.write(address, data) {
            tracing::error!(%error, "a shadow page table could not be written");
        }
    }
}
