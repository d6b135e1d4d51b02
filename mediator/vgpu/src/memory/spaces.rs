//! A VM's GPU address spaces: connects `shadow-pt` to guest memory and the card.

use super::grants::Grants;
use super::operands::{Names, Objects};
use super::view::{Pool, Ring, View};
use super::{Memory, POOL_BYTES, ram};
use ::channels::{Doorbell, PullError, Pulled};
use card_manager::{Bindings, CardState, CardVram, ManagerError, Needs, Reader};
use nvspec::addr::{Gpa, GuestVramAddr, Place, VramAddr};
use nvspec::mmu::Rights;
use shadow_pt::{AddressSpaces, GuestRange, HostPage, Limits, RELINK_PIECES, SavedSpaces, SpaceId};
use std::collections::BTreeSet;
use std::ops::Range;
use std::sync::Arc;
use vmm_glue::DmaRegion;
use vmm_glue::memory::MemoryTable;
use vram::{PagePool, TenantId};

/// Returns a view for building shadow tables.
fn for_tables<'a>(
    vm: TenantId,
    vram: &'a mut CardVram,
    grants: &'a Grants,
    pool: &'a mut PagePool,
) -> View<'a, Pool<'a>> {
    View::with(vram, grants, Pool::new(vm, pool))
}

impl Memory {
    /// Returns the shadow of the guest directory at `directory`, creating it if necessary. A new shadow does not map
    /// guest memory until [`Self::prepare`] is called.
    pub(crate) fn open(&mut self, directory: Place) -> Result<SpaceId, ManagerError> {
        let Self { host, vm, grants, shadows, pool, .. } = self;
        let mut guard = host.lock();
        let mut view = for_tables(*vm, guard.vram_mut(), grants, pool);
        shadows.open(directory, &mut view).map_err(|error| view.refused(error))
    }

    /// Adopts this VM's address spaces, which were saved on another card. The VM must have no other address spaces. The
    /// adopted ones do not map guest memory until [`Self::prepare`] is called. Returns the old and the new address of
    /// each directory.
    pub(super) fn adopt(&mut self, saved: SavedSpaces) -> Result<Vec<(VramAddr, VramAddr)>, ManagerError> {
        let Self { host, vm, grants, shadows, pool, .. } = self;
        let mut guard = host.lock();
        let mut view = for_tables(*vm, guard.vram_mut(), grants, pool);
        let (saved, places) = saved.moved(&mut view).map_err(|error| view.refused(error))?;
        let own = |at: VramAddr, _| places.iter().any(|(_, here)| *here == at);
        let limits = Limits { table_bytes: POOL_BYTES };
        *shadows = AddressSpaces::restored(saved, shadows.mode(), limits, &mut view, own)?;
        Ok(places)
    }

    /// Returns the VRAM address of an address space's shadow directory.
    pub(crate) fn directory(&self, space: SpaceId) -> Option<VramAddr> {
        self.shadows.directory(space)
    }

    /// Records a write by the guest's CPU to its VRAM.
    pub(crate) fn written(&mut self, address: GuestVramAddr, len: u64) {
        self.shadows.written(address, len);
    }

    /// Marks changed pages of kept page tables for the address spaces that use them.
    pub(crate) fn tables_written(&mut self) {
        let Self { grants, shadows, .. } = self;
        if let Some(tables) = grants.tables_mut() {
            tables.take_written(|at, bytes| shadows.written(at, bytes));
        }
    }

    /// Records that page tables may map more memory now.
    pub(crate) fn granted(&mut self) {
        self.shadows.granted();
    }

    /// Handles the guest's TLB flush of `directory`, or of all directories if `None`. After this call, neither the
    /// card's tables nor its TLBs permit accesses that the guest has revoked.
    pub(crate) fn flush(&mut self, directory: Option<Place>) -> Result<(), ManagerError> {
        let spaces: Vec<_> = match directory {
            Some(directory) => self.shadows.find(directory).into_iter().collect(),
            None => self.shadows.ids().collect(),
        };
        let host = Arc::clone(&self.host);
        for space in spaces {
            self.sync(&mut host.lock(), space, false)?;
        }
        Ok(())
    }

    /// Updates the card's tables of `space` before its work is submitted.
    pub(crate) fn prepare(&mut self, state: &mut CardState, space: SpaceId) -> Result<(), ManagerError> {
        // Ignore tables in mapped memory here, because they seldom change, and each doorbell would read all of them
        // again.
        if self.shadows.is_settled(space) { Ok(()) } else { self.sync(state, space, true) }
    }

    /// Same as [`Self::prepare`] for all address spaces.
    pub(crate) fn prepare_all(&mut self) -> Result<(), ManagerError> {
        let host = Arc::clone(&self.host);
        for space in self.shadows.ids().collect::<Vec<_>>() {
            self.sync(&mut host.lock(), space, true)?;
        }
        Ok(())
    }

    fn sync(&mut self, state: &mut CardState, space: SpaceId, prepare: bool) -> Result<(), ManagerError> {
        let Self { vm, grants, shadows, pool, report, syncs, .. } = self;
        let Some(directory) = shadows.directory(space) else { return Ok(()) };
        let (vram, channels) = state.parts();
        let busy = !prepare && channels.busy_directory(&mut vram.memory, directory);
        let mut view = for_tables(*vm, vram, grants, pool);
        let done = if prepare { shadows.prepare(space, &mut view) } else { shadows.flush(space, busy, &mut view) };
        if done.changed() {
            flush_card(shadows, [space], &mut view)?;
        }
        report.merge(&done);
        *syncs += u64::from(done.tables_scanned != 0);
        if done.denied.total() != 0 {
            tracing::warn!(denied = ?done.denied, directory = ?shadows.guest_directory(space),
                "denied page table entries that refer to memory outside the VM");
        }
        Ok(())
    }

    /// Pulls a channel's ring entries up to a doorbell onto the card. The last two arguments are the known state of the
    /// channel's subchannels. Also returns the engines that the work needs.
    pub(crate) fn pull(
        &self,
        state: &mut CardState,
        space: SpaceId,
        doorbell: Doorbell,
        objects: &mut Objects,
        bindings: &mut Bindings,
    ) -> (Result<Pulled, PullError>, Needs) {
        let now = state.now_ns();
        let asks = state.asks_needs(doorbell.channel);
        if !asks {
            // The work is not parsed, so it may bind any objects.
            *bindings = Bindings::default();
        }
        let reader = asks.then(|| Reader::new(bindings));
        let (vram, channels) = state.parts();
        let names = vram.watches().then(|| Names::new(objects));
        let ring = Ring { vm: self.vm, shadows: &self.shadows, space, names, reader };
        let mut view = View::with(vram, &self.grants, ring);
        let pulled = channels.pull(&mut view, doorbell, now);
        (pulled, view.needs())
    }

    /// Maps the mediator's own pages into the reserved part of an address space. Each entry contains the number of a
    /// page in this part, its VRAM address, and the GPU's access rights.
    pub(crate) fn map_host(
        &mut self,
        space: SpaceId,
        pages: &[(HostPage, VramAddr, Rights)],
    ) -> Result<(), ManagerError> {
        self.change_own(space, |shadows, view| {
            pages.iter().try_for_each(|&(page, at, rights)| {
                shadows.map_host(space, page, at, rights, view).map_err(|error| view.refused(error))
            })
        })
    }

    /// Unmaps pages from the reserved part of an address space. The channel that used them must have left the card.
    /// Returns an error if the card does not respond. In this case, its TLBs may still map the pages.
    pub(crate) fn unmap_host(
        &mut self,
        space: SpaceId,
        pages: &[(HostPage, VramAddr, Rights)],
    ) -> Result<(), ManagerError> {
        self.change_own(space, |shadows, view| {
            pages.iter().for_each(|&(page, ..)| shadows.unmap_host(space, page, view));
            Ok(())
        })
    }

    /// Changes the reserved part of an address space, and flushes the address space from the card's TLBs.
    fn change_own(
        &mut self,
        space: SpaceId,
        change: impl FnOnce(&mut AddressSpaces, &mut View<'_, Pool<'_>>) -> Result<(), ManagerError>,
    ) -> Result<(), ManagerError> {
        let Self { host, vm, grants, shadows, pool, .. } = self;
        let Some(directory) = shadows.directory(space) else { return Ok(()) };
        let mut guard = host.lock();
        let mut view = for_tables(*vm, guard.vram_mut(), grants, pool);
        change(shadows, &mut view)?;
        view.invalidate(directory)
    }

    /// Returns true if any shadow may map a byte in the range.
    pub(crate) fn names(&self, range: GuestRange) -> bool {
        self.shadows.names(range)
    }

    /// Starts or stops the log of guest RAM that shadows map. A new log starts with the RAM that is mapped now.
    pub(crate) fn log_ram(&mut self, on: bool) {
        self.shadows.log_ram(on);
    }

    /// Returns the ranges of guest RAM within `range` that shadows have mapped since the last call. See
    /// [`AddressSpaces::take_named_ram`].
    pub(crate) fn take_written(&mut self, range: Range<u64>, goes_on: bool) -> Vec<Range<u64>> {
        self.shadows.take_named_ram(range, goes_on)
    }

    /// Records whether the guest's CPU can write a page of its VRAM without a message.
    pub(crate) fn unseen(&mut self, address: GuestVramAddr, unseen: bool) {
        self.shadows.unseen(address, unseen);
    }

    /// Updates the shadows of ranges that have moved. After this call, the card uses the new locations.
    pub(crate) fn relocated(&mut self, state: &mut CardState, ranges: &[GuestRange]) -> Result<(), ManagerError> {
        let Self { vm, grants, shadows, pool, report, .. } = self;
        let mut view = for_tables(*vm, state.vram_mut(), grants, pool);
        let mut touched = BTreeSet::new();
        for range in ranges {
            let (spaces, done) = shadows.retranslate(*range, &mut view);
            report.merge(&done);
            touched.extend(spaces);
        }
        flush_card(shadows, touched, &mut view)
    }

    /// Maps lent guest memory for the card.
    pub(crate) fn lend(&mut self, region: &DmaRegion) -> Result<(), ManagerError> {
        let Self { host, vm, grants, .. } = self;
        grants.ram_mut().map(host, *vm, region)?;
        // Entries that mapped this memory before it was lent, or while it was moved, are valid now.
        self.granted();
        Ok(())
    }

    /// Same as [`Self::lend`] for all memory that the client lends. Also removes regions that are no longer lent.
    pub(crate) fn lend_all(&mut self, lent: &MemoryTable) -> Result<(), ManagerError> {
        let (gone, new) = self.grants.ram().difference(lent);
        gone.into_iter().for_each(|(gpa, size)| self.withdraw(gpa, size));
        new.into_iter().try_for_each(|region| self.lend(&region))
    }

    /// Unmaps withdrawn guest memory. After this call, the card cannot access the memory.
    pub(crate) fn withdraw(&mut self, gpa: u64, size: u64) {
        // Remove the grant first, so that no new translation uses the memory.
        let lent: Option<ram::Lent> = self.grants.ram_mut().take(gpa);
        let flushed = self.withdraw_ram(gpa, size);
        // Wait until all earlier writes have arrived. A late write would be lost, or would corrupt reused memory.
        let flushed = flushed.and_then(|()| Ok(self.host.lock().vram().memory.barrier()?));
        if let Err(error) = &flushed {
            tracing::error!(vm = %self.vm, %error, "the card's TLBs may still contain memory that was withdrawn");
        }
        if let Some(lent) = lent {
            lent.give_back(&self.host, self.vm, flushed.is_err());
        }
    }

    /// Withdraws a region that is private to the client, in which the card would read zeros.
    pub(crate) fn withdraw_unshared(&mut self, gpa: u64) {
        if let Some(size) = self.grants.ram_mut().size_at(gpa) {
            self.withdraw(gpa, size);
        }
    }

    /// Withdraws all memory of a disconnected client, and disables bus mastering.
    pub(crate) fn forget_ram(&mut self) {
        while let Some((gpa, size)) = self.grants.ram_mut().first() {
            self.withdraw(gpa, size);
        }
        self.grants.set_bus_master(false);
    }

    /// Permits or prevents access by the card to the guest's RAM.
    pub(crate) fn set_bus_master(&mut self, enabled: bool) -> Result<(), ManagerError> {
        self.grants.set_bus_master(enabled);
        if enabled {
            self.grants.check_shared();
            self.granted();
        }
        // A guest may do this often, so only unlink the tables that map its RAM, and keep their entries.
        self.bar_ram(!enabled)
    }

    /// Prevents the card's access to the guest's RAM, or permits it again. If `barred` is true, the card cannot access
    /// any of this RAM after the call. The cost per address space is that of updating one directory, regardless of the
    /// number of tables. The card's lock is released between the parts of a directory.
    fn bar_ram(&mut self, barred: bool) -> Result<(), ManagerError> {
        let Self { host, vm, grants, shadows, pool, report, .. } = self;
        for space in shadows.bar_ram(barred) {
            for piece in 0..RELINK_PIECES {
                let mut guard = host.lock();
                let mut view = for_tables(*vm, guard.vram_mut(), grants, pool);
                report.merge(&shadows.relink(space, piece, &mut view));
            }
            let mut guard = host.lock();
            flush_card(shadows, [space], &mut for_tables(*vm, guard.vram_mut(), grants, pool))?;
        }
        Ok(())
    }

    /// Removes guest RAM from all shadows, so that the card cannot access it after this call. The card's lock is
    /// released between steps, because a guest may map the same page any number of times.
    fn withdraw_ram(&mut self, gpa: u64, size: u64) -> Result<(), ManagerError> {
        let Self { host, vm, grants, shadows, pool, .. } = self;
        let mut withdrawal = shadows.withdraw(GuestRange::Ram(Gpa(gpa), size));
        let mut touched = BTreeSet::new();
        loop {
            let mut guard = host.lock();
            let mut view = for_tables(*vm, guard.vram_mut(), grants, pool);
            let Some((spaces, _)) = shadows.invalidate(&mut withdrawal, &mut view) else { break };
            touched.extend(spaces);
        }
        for space in touched {
            let mut guard = host.lock();
            flush_card(shadows, [space], &mut for_tables(*vm, guard.vram_mut(), grants, pool))?;
        }
        Ok(())
    }

    /// Frees shadows that no channel uses anymore, and returns chunks that the VM's pool no longer needs.
    pub(crate) fn collect(&mut self) {
        let Self { host, vm, grants, shadows, pool, .. } = self;
        let mut guard = host.lock();
        let unused: Vec<SpaceId> = shadows
            .ids()
            .filter(|space| {
                shadows.directory(*space).is_some_and(|directory| !guard.channels().uses_directory(directory))
            })
            .collect();
        let mut view = for_tables(*vm, guard.vram_mut(), grants, pool);
        for space in unused {
            shadows.close(space, &mut view);
        }
        pool.reclaim(&mut guard.vram_mut().chunks);
        guard.vram_mut().pool_changed(*vm, pool);
    }

    /// Frees all shadows, except those of channels that are still on the card. The VM must have no bound channels. If
    /// no shadows are left, also frees the VM's pool, and returns true.
    pub(crate) fn clear(&mut self) -> bool {
        self.collect();
        let none = self.shadows.count() == 0;
        if none {
            let mut state = self.host.lock();
            self.pool.release_all(&mut state.vram_mut().chunks);
            state.vram_mut().pool_changed(self.vm, &self.pool);
        }
        none
    }

    /// Returns the number of address spaces and the card memory that their shadows use, in bytes.
    pub(crate) fn usage(&self) -> (usize, u64) {
        (self.shadows.count(), self.shadows.card_bytes())
    }
}

/// Flushes these address spaces from the card's TLBs, and frees memory to which only old entries refer.
fn flush_card(
    shadows: &mut AddressSpaces,
    spaces: impl IntoIterator<Item = SpaceId>,
    view: &mut View<'_, Pool<'_>>,
) -> Result<(), ManagerError> {
    for space in spaces {
        let Some(directory) = shadows.directory(space) else { continue };
        view.invalidate(directory)?;
        shadows.flushed(space, view);
    }
    Ok(())
}
