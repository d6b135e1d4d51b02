//! The VM's GPU address spaces: the wiring between `shadow-pt`, the guest's memory and the card.

use super::named::Names;
use super::ram::RamMap;
use super::remap::{Home, Remap};
use nvspec::addr::{Gpa, GpuVa, GuestVramAddr, Iova, Place, SMALL_PAGE, VramAddr};
use nvspec::mmu::Rights;
use owner::{CardVram, HostCard, HostError, HostState};
use shadow_pt::{
    AddressSpaces, Frame, Frames, GuestMemory, GuestRange, HostPage, Limits, Mapping, Mode, NoMemory, RELINK_PIECES,
    ShadowMemory, SpaceId, SyncReport, Unreadable,
};
use std::cell::RefCell;
use std::collections::BTreeSet;
use vmm_glue::Link;
use vram::{CardAddr, GuestAddr, PagePool, VmId};

/// Card memory that the shadow tables of one VM may take, in bytes. A directory takes 64 KiB, and each 128 MiB of
/// address space that is in use 264 KiB.
const POOL_BYTES: u64 = 128 << 20;

/// What a VM has: what its page tables may name.
pub(super) struct Owned<'a> {
    pub(super) vm: VmId,
    pub(super) ram: &'a RamMap,
    pub(super) link: &'a Link,
    pub(super) bus_master: bool,
    pub(super) remap: &'a Remap,
    /// Page tables that it has us keep.
    pub(super) tables: Option<&'a pv::Tables>,
}

/// All address spaces of one VM.
pub(super) struct Spaces {
    vm: VmId,
    shadows: AddressSpaces,
    pool: PagePool,
    /// Sums since the VM was created.
    pub(super) report: SyncReport,
    /// Times since then that tables were looked at.
    pub(super) syncs: u64,
}

impl Spaces {
    pub(super) fn new(vm: VmId, mode: Mode) -> Self {
        Self {
            vm,
            shadows: AddressSpaces::new(mode, Limits { table_bytes: POOL_BYTES }),
            pool: PagePool::new(POOL_BYTES),
            report: SyncReport::default(),
            syncs: 0,
        }
    }

    /// The shadow of the guest's directory at `directory`, made if it does not exist. Nothing of a new one is mapped
    /// before [`Self::prepare`].
    pub(super) fn open(&mut self, host: &HostCard, directory: Place) -> Result<SpaceId, HostError> {
        let mut guard = host.lock();
        let state = RefCell::new(&mut guard.vram);
        let mut memory = TableMemory::new(self.vm, &state, &mut self.pool);
        self.shadows.open(directory, &mut memory).map_err(|error| memory.refused(error))
    }

    /// Returns where the shadow directory of a space lies on the card.
    pub(super) fn directory(&self, space: SpaceId) -> Option<VramAddr> {
        self.shadows.directory(space)
    }

    /// The guest's CPU has written its VRAM.
    pub(super) fn written(&mut self, address: GuestVramAddr, len: u64) {
        self.shadows.written(address, len);
    }

    /// Something was granted that was not before.
    pub(super) fn granted(&mut self) {
        self.shadows.granted();
    }

    /// Returns where a GPU virtual address leads by the shadow of a space.
    pub(super) fn resolve(&self, space: SpaceId, va: GpuVa) -> Option<Mapping> {
        self.shadows.resolve(space, va)
    }

    /// The guest flushes the TLB of `directory` (of all, for `None`). What lost a permission is on the card, and out of
    /// its TLBs, when this returns.
    pub(super) fn flush(
        &mut self,
        host: &HostCard,
        owned: &Owned<'_>,
        directory: Option<Place>,
    ) -> Result<(), HostError> {
        let spaces: Vec<_> = match directory {
            Some(directory) => self.shadows.find(directory).into_iter().collect(),
            None => self.shadows.ids().collect(),
        };
        for space in spaces {
            self.sync(&mut host.lock(), owned, space, false)?;
        }
        Ok(())
    }

    /// Work of a channel of `space` is about to be given to the card: all that the guest has mapped is.
    pub(super) fn prepare(
        &mut self,
        state: &mut HostState,
        owned: &Owned<'_>,
        space: SpaceId,
    ) -> Result<(), HostError> {
        self.sync(state, owned, space, true)
    }

    fn sync(
        &mut self,
        state: &mut HostState,
        owned: &Owned<'_>,
        space: SpaceId,
        prepare: bool,
    ) -> Result<(), HostError> {
        let Self { vm, shadows, pool, report, syncs } = self;
        let Some(directory) = shadows.directory(space) else { return Ok(()) };
        let HostState { vram, channels, .. } = state;
        let busy = !prepare && channels.busy_directory(&mut vram.memory, directory);
        let state = RefCell::new(vram);
        let mut guest = Tables { state: &state, owned };
        let frames = Granted { state: &state, owned };
        let mut memory = TableMemory::new(*vm, &state, pool);
        let done = if prepare {
            shadows.prepare(space, &mut guest, &frames, &mut memory)
        } else {
            shadows.flush(space, busy, &mut guest, &frames, &mut memory)
        };
        if done.changed() {
            flush_card(shadows, [space], &mut memory)?;
        }
        report.merge(&done);
        *syncs += u64::from(done.tables_scanned != 0);
        if done.denied.total() != 0 {
            tracing::warn!(denied = ?done.denied, directory = ?shadows.guest_directory(space),
                "page table entries name what the VM does not have; they stay unmapped");
        }
        Ok(())
    }

    /// Maps the mediator's own pages into the reserved part of a space: the page there, where it lies, whether the GPU may
    /// write it.
    pub(super) fn map_host(
        &mut self,
        host: &HostCard,
        space: SpaceId,
        pages: &[(HostPage, VramAddr, Rights)],
    ) -> Result<(), HostError> {
        self.change_own(host, space, |shadows, memory| {
            pages.iter().try_for_each(|&(page, at, rights)| {
                shadows.map_host(space, page, at, rights, memory).map_err(|error| memory.refused(error))
            })
        })
    }

    /// Takes them out again. The channel that used them is off the card.
    ///
    /// # Errors
    /// When the card does not answer: its TLBs may still lead to them from that space.
    pub(super) fn unmap_host(
        &mut self,
        host: &HostCard,
        space: SpaceId,
        pages: &[(HostPage, VramAddr, Rights)],
    ) -> Result<(), HostError> {
        self.change_own(host, space, |shadows, memory| {
            pages.iter().for_each(|&(page, ..)| shadows.unmap_host(space, page, memory));
            Ok(())
        })
    }

    /// Changes the reserved part of a space, and has the card forget what it has of that space.
    fn change_own(
        &mut self,
        host: &HostCard,
        space: SpaceId,
        change: impl FnOnce(&mut AddressSpaces, &mut TableMemory<'_, '_>) -> Result<(), HostError>,
    ) -> Result<(), HostError> {
        let Self { vm, shadows, pool, .. } = self;
        let Some(directory) = shadows.directory(space) else { return Ok(()) };
        let mut guard = host.lock();
        let state = RefCell::new(&mut guard.vram);
        change(shadows, &mut TableMemory::new(*vm, &state, pool))?;
        Ok(state.borrow_mut().memory.invalidate(directory, false)?)
    }

    /// Returns whether a shadow may map a byte of the range.
    pub(super) fn names(&self, range: GuestRange) -> bool {
        self.shadows.names(range)
    }

    /// The guest's CPU can write a page of its VRAM without a message from now on, or not any more.
    pub(super) fn unseen(&mut self, address: GuestVramAddr, unseen: bool) {
        self.shadows.unseen(address, unseen);
    }

    /// The ranges live elsewhere than before. When it returns, the card uses them where they are.
    pub(super) fn relocated(
        &mut self,
        state: &mut HostState,
        owned: &Owned<'_>,
        ranges: &[GuestRange],
    ) -> Result<(), HostError> {
        let Self { vm, shadows, pool, report, .. } = self;
        let state = RefCell::new(&mut state.vram);
        let frames = Granted { state: &state, owned };
        let mut memory = TableMemory::new(*vm, &state, pool);
        let mut touched = BTreeSet::new();
        for range in ranges {
            let (spaces, done) = shadows.retranslate(*range, &frames, &mut memory);
            report.merge(&done);
            touched.extend(spaces);
        }
        flush_card(shadows, touched, &mut memory)
    }

    /// Keeps the card from the guest's RAM, or lets it again. When it returns after the former, the card cannot reach any.
    /// Costs a directory for each space, whatever its tables hold; the card's lock is free between pieces of one.
    pub(super) fn bar_ram(&mut self, host: &HostCard, barred: bool) -> Result<(), HostError> {
        let Self { vm, shadows, pool, report, .. } = self;
        for space in shadows.bar_ram(barred) {
            for piece in 0..RELINK_PIECES {
                let mut guard = host.lock();
                let state = RefCell::new(&mut guard.vram);
                let mut memory = TableMemory::new(*vm, &state, pool);
                report.merge(&shadows.relink(space, piece, &mut memory));
            }
            let mut guard = host.lock();
            let state = RefCell::new(&mut guard.vram);
            flush_card(shadows, [space], &mut TableMemory::new(*vm, &state, pool))?;
        }
        Ok(())
    }

    /// Takes guest RAM out of all shadows. When it returns, the card cannot reach it. The card's lock is free between pieces:
    /// a guest may have mapped a page any number of times.
    pub(super) fn withdraw_ram(&mut self, host: &HostCard, gpa: u64, size: u64) -> Result<(), HostError> {
        let Self { vm, shadows, pool, .. } = self;
        let mut withdrawal = shadows.withdraw(GuestRange::Ram(Gpa(gpa), size));
        let mut touched = BTreeSet::new();
        loop {
            let mut guard = host.lock();
            let state = RefCell::new(&mut guard.vram);
            let step = shadows.invalidate(&mut withdrawal, &mut TableMemory::new(*vm, &state, pool));
            let Some((spaces, _)) = step else { break };
            touched.extend(spaces);
        }
        for space in touched {
            let mut guard = host.lock();
            let state = RefCell::new(&mut guard.vram);
            flush_card(shadows, [space], &mut TableMemory::new(*vm, &state, pool))?;
        }
        Ok(())
    }

    /// Frees the shadows that no channel uses.
    pub(super) fn collect(&mut self, host: &HostCard) {
        let Self { vm, shadows, pool, .. } = self;
        let mut guard = host.lock();
        let unused: Vec<SpaceId> = shadows
            .ids()
            .filter(|space| {
                shadows.directory(*space).is_some_and(|directory| !guard.channels.uses_directory(directory))
            })
            .collect();
        let state = RefCell::new(&mut guard.vram);
        let mut memory = TableMemory::new(*vm, &state, pool);
        for space in unused {
            shadows.close(space, &mut memory);
        }
        pool.reclaim(&mut guard.vram.chunks);
        guard.vram.pool_changed(*vm, pool);
    }

    /// Frees all shadows, and the VM's pool. No channel of the VM is bound any more. What a channel uses that the card
    /// has not let go of stays; says whether there is none of that.
    pub(super) fn clear(&mut self, host: &HostCard) -> bool {
        self.collect(host);
        let none = self.shadows.count() == 0;
        if none {
            let vram = &mut host.lock().vram;
            self.pool.release_all(&mut vram.chunks);
            vram.pool_changed(self.vm, &self.pool);
        }
        none
    }

    /// Address spaces, and card memory that their shadows take, in bytes.
    pub(super) fn usage(&self) -> (usize, u64) {
        (self.shadows.count(), self.shadows.card_bytes())
    }
}

/// The card's TLBs forget what they hold of these spaces; what only old entries named is free then.
fn flush_card(
    shadows: &mut AddressSpaces,
    spaces: impl IntoIterator<Item = SpaceId>,
    memory: &mut TableMemory<'_, '_>,
) -> Result<(), HostError> {
    for space in spaces {
        let Some(directory) = shadows.directory(space) else { continue };
        memory.state.borrow_mut().memory.invalidate(directory, false)?;
        shadows.flushed(space, memory);
    }
    Ok(())
}

/// Reads a guest's structures, wherever they lie.
pub(super) struct Tables<'a, 'b, 'c> {
    pub(super) state: &'a RefCell<&'b mut CardVram>,
    pub(super) owned: &'a Owned<'c>,
}

impl Tables<'_, '_, '_> {
    pub(super) fn fill(&mut self, place: Place, data: &mut [u8]) -> Option<()> {
        match place {
            Place::Vram(address) => self.fill_vram(address, data),
            Place::Ram(address) if self.owned.bus_master => self.owned.link.memory().read(address.0, data).ok(),
            Place::Ram(_) => None,
        }
    }
}

impl Tables<'_, '_, '_> {
    /// Page by page, wherever each lives.
    fn fill_vram(&mut self, address: GuestVramAddr, data: &mut [u8]) -> Option<()> {
        let Owned { vm, remap, tables, .. } = self.owned;
        if let Some(tables) = tables.filter(|tables| tables.contains(address)) {
            return tables.read(address, data).ok();
        }
        if remap.pages() == 0 {
            return self.state.borrow_mut().guest_read(*vm, address, data);
        }
        let mut done = 0;
        while done < data.len() {
            let at = address.checked_add(done as u64)?;
            let within = at.0 % SMALL_PAGE;
            let run = ((SMALL_PAGE - within) as usize).min(data.len() - done);
            let piece = &mut data[done..done + run];
            match remap.home(at.0 / SMALL_PAGE) {
                Some(slot) => remap.read(slot, within, piece),
                None => self.state.borrow_mut().guest_read(*vm, at, piece)?,
            }
            done += run;
        }
        Some(())
    }
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

/// A guest's GPFIFO ring, by the shadow of its channel's address space.
pub(super) struct Ring<'s, 'a, 'b, 'c> {
    pub(super) spaces: &'s Spaces,
    pub(super) space: SpaceId,
    pub(super) tables: Tables<'a, 'b, 'c>,
    /// When somebody wants to know what work names.
    pub(super) names: Option<Names<'s>>,
}

impl channels::GuestRing for Ring<'_, '_, '_, '_> {
    fn read(&mut self, va: GpuVa, data: &mut [u8]) -> Result<(), channels::Unmapped> {
        let mut done = 0;
        while done < data.len() {
            let at = GpuVa(va.0 + done as u64);
            let Mapping { place, bytes, .. } = self.spaces.resolve(self.space, at).ok_or(channels::Unmapped)?;
            let run = bytes.min((data.len() - done) as u64) as usize;
            self.tables.fill(place, &mut data[done..done + run]).ok_or(channels::Unmapped)?;
            done += run;
        }
        Ok(())
    }

    fn taken(&mut self, va: GpuVa, dwords: u32) {
        let Some(mut names) = self.names.take() else { return };
        let mut bytes = vec![0; names.words(dwords) * 4];
        // Where nothing is mapped, the card says so.
        if channels::GuestRing::read(self, va, &mut bytes).is_ok() {
            let vram = &mut **self.tables.state.borrow_mut();
            names.each(&bytes, vram.chunks.chunk_bytes(), |at, len| {
                if let Some(Mapping { place: Place::Vram(address), .. }) = self.spaces.resolve(self.space, at) {
                    vram.named(self.tables.owned.vm, GuestAddr(address.0), len);
                }
            });
        }
        self.names = Some(names);
    }
}

/// What the VM's tables may name. What has no place on the card yet gets one: the GPU may write there without asking.
struct Granted<'a, 'b, 'c> {
    state: &'a RefCell<&'b mut CardVram>,
    owned: &'a Owned<'c>,
}

impl Frames for Granted<'_, '_, '_> {
    fn vram(&self, address: GuestVramAddr, len: u64) -> Option<Frame> {
        match self.owned.remap.whereabouts(address, len) {
            Home::Chunk => {
                let state = &mut **self.state.borrow_mut();
                match state.place(self.owned.vm, address, len)? {
                    vram::Place::Card(CardAddr(at)) => Some(Frame::Vram(VramAddr(at))),
                    vram::Place::Host(at) => Some(Frame::Host(state.pinned.iova(at))),
                }
            }
            Home::Host(iova) => Some(Frame::Host(iova)),
            Home::Apart => None,
        }
    }

    fn ram(&self, address: Gpa, len: u64, write: bool) -> Option<Iova> {
        // PCI: a device whose bus mastering is off accesses no memory.
        if !self.owned.bus_master {
            return None;
        }
        let (iova, run) = self.owned.ram.translate(address, write)?;
        (run >= len).then_some(iova)
    }
}

/// Card memory for shadow tables, from the VM's pool.
struct TableMemory<'a, 'b> {
    vm: VmId,
    state: &'a RefCell<&'b mut CardVram>,
    pool: &'a mut PagePool,
    /// There was none, but may be later.
    lacks: bool,
}

impl<'a, 'b> TableMemory<'a, 'b> {
    fn new(vm: VmId, state: &'a RefCell<&'b mut CardVram>, pool: &'a mut PagePool) -> Self {
        Self { vm, state, pool, lacks: false }
    }

    /// Why something could not be made.
    fn refused(&self, error: NoMemory) -> HostError {
        if self.lacks { HostError::Lacking } else { HostError::Refused(error.to_string()) }
    }
}

impl ShadowMemory for TableMemory<'_, '_> {
    fn alloc(&mut self, bytes: u64) -> Option<VramAddr> {
        let found = self.state.borrow_mut().alloc_for(self.vm, self.pool, bytes);
        self.lacks |= matches!(found, Err(HostError::Lacking));
        found.ok()
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
