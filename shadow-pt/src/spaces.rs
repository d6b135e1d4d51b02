//! All address spaces of a VM.

mod saved;

pub use saved::SavedSpaces;

use crate::bits::bit;
use crate::host::{FIRST_ENTRY, HostPage, HostTable};
use crate::ids::{GuestRange, MAX_SPACES, SpaceId};
use crate::mode::Scope;
use crate::pages::{FrameRun, PageIndex, User};
use crate::reverse::{BLOCK_PAGES_SHIFT, Piece, ReverseMap};
use crate::shared::{Limits, Shared};
use crate::space::Space;
use crate::split::Pair;
use crate::table::{Books, Changes, Table, TableKey, Tables};
use crate::translate::{PIECES_BYTES, PageSize};
use crate::{Frames, Mapping, Mode, Place, ShadowMemory, SyncReport, World};
use nvspec::addr::{Gpa, GpuVa, GuestVramAddr, LARGE_PAGE, SMALL_PAGE, VA_BITS, VramAddr};
use nvspec::mmu::{ENTRY_BYTES, PD_BYTES, PDE_SHIFT, PDE_SPAN, Pde, Pte, Rights};
use std::collections::BTreeMap;
use std::ops::Range;

/// Number of parts in which a directory is relinked.
pub const RELINK_PIECES: u32 = 8;

/// Card memory for shadow directories and tables is exhausted, or the VM has the maximum number of address spaces.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("no card memory is left for a shadow page directory or table, or the VM has too many address spaces")]
pub struct NoMemory;

/// A change to a page that must be reported to the page's users.
#[derive(Clone, Copy)]
enum News {
    /// The page's contents may have changed.
    Dirty,
    /// The GPU can now write the page.
    Watch,
    /// The GPU can no longer write the page.
    Unwatch,
}

/// All address spaces of a VM: guest directories and their shadows on the card.
#[derive(Debug)]
pub struct AddressSpaces {
    mode: Mode,
    spaces: Vec<Option<Box<Space>>>,
    generations: u32,
    pub(crate) shared: Shared,
}

/// State of a range's stepwise removal from all spaces.
#[derive(Debug)]
pub struct Withdrawal {
    range: GuestRange,
    /// Table pages that may contain entries for the range and have not been checked yet.
    pieces: Vec<Piece>,
}

impl Withdrawal {
    /// Number of table pages per step, each with 512 entries. The card's lock is held during a step.
    pub(crate) const PAGES_PER_STEP: usize = 2;
}

impl AddressSpaces {
    /// Creates the state of a VM that has no address spaces.
    #[must_use]
    pub fn new(mode: Mode, limits: Limits) -> Self {
        let shared = Shared {
            limits,
            tables: Tables::default(),
            pages: PageIndex::default(),
            reverse: ReverseMap::default(),
            gained: Vec::new(),
            table_bytes: 0,
            writes: 0,
            rooms: 0,
            splits_left: limits.table_bytes / PIECES_BYTES,
            ram_barred: false,
        };
        Self { mode, spaces: Vec::new(), generations: 0, shared }
    }

    /// Returns the TLB flush mode.
    #[must_use]
    pub fn mode(&self) -> Mode {
        self.mode
    }

    /// Returns the space of the guest directory at `directory`, which is created if necessary. A new space maps nothing
    /// until the first call of [`Self::prepare`] or [`Self::flush`]. Directories are aligned to 4 KiB, so lower address
    /// bits are ignored.
    ///
    /// # Errors
    /// Returns [`NoMemory`] if the space cannot be created.
    pub fn open(&mut self, directory: Place, memory: &mut impl ShadowMemory) -> Result<SpaceId, NoMemory> {
        if let Some(id) = self.find(directory) {
            return Ok(id);
        }
        let index = match self.spaces.iter().position(Option::is_none) {
            Some(index) => index,
            None if self.spaces.len() < MAX_SPACES => {
                self.spaces.push(None);
                self.spaces.len().saturating_sub(1)
            }
            None => return Err(NoMemory),
        };
        let slot = self.spaces.get_mut(index).ok_or(NoMemory)?;
        let card = memory.alloc(PD_BYTES).ok_or(NoMemory)?;
        let index = u32::try_from(index).map_err(|_| NoMemory)?;
        self.generations = self.generations.wrapping_add(1);
        let generation = SpaceId::generation_of(self.generations);
        *slot = Some(Box::new(Space::new(index, generation, aligned(directory), card, &mut self.shared)));
        Ok(SpaceId::new(generation, index))
    }

    /// Returns the space of the guest directory at `directory`, if it exists.
    #[must_use]
    pub fn find(&self, directory: Place) -> Option<SpaceId> {
        let directory = aligned(directory);
        self.each().find(|(_, space)| space.directory.place == directory).map(|(id, _)| id)
    }

    /// Returns the IDs of all spaces.
    pub fn ids(&self) -> impl Iterator<Item = SpaceId> + '_ {
        self.each().map(|(id, _)| id)
    }

    /// Returns the card address of the space's shadow directory, for instance blocks and TLB flushes.
    #[must_use]
    pub fn directory(&self, id: SpaceId) -> Option<VramAddr> {
        self.space(id).map(|space| space.directory.card)
    }

    /// Returns the guest address of the space's directory.
    #[must_use]
    pub fn guest_directory(&self, id: SpaceId) -> Option<Place> {
        self.space(id).map(|space| space.directory.place)
    }

    /// Returns the number of spaces.
    #[must_use]
    pub fn count(&self) -> usize {
        self.each().count()
    }

    /// Returns the total number of shadow tables, excluding directories.
    #[must_use]
    pub fn tables(&self) -> usize {
        self.shared.tables.count()
    }

    /// Returns the amount of card memory in use in bytes, including directories.
    #[must_use]
    pub fn card_bytes(&self) -> u64 {
        self.each().fold(0, |sum, (_, space)| sum.saturating_add(space.card_bytes()))
    }

    /// Returns the number of the space's guest table pages that may have changed since they were last read.
    #[must_use]
    pub fn waiting(&self, id: SpaceId) -> u64 {
        self.space(id).map_or(0, |space| space.waiting(&self.shared.tables))
    }

    /// Records that the guest's CPU has written `len` bytes of guest VRAM. Must be called for every such write,
    /// including writes by the mediator on behalf of the guest, before the next flush.
    pub fn written(&mut self, address: GuestVramAddr, len: u64) {
        const PAGE_SHIFT: u32 = SMALL_PAGE.trailing_zeros();
        let Some(more) = len.checked_sub(1) else { return };
        let end = self.shared.pages.end();
        let first = address.0 >> PAGE_SHIFT;
        let last = address.0.saturating_add(more) >> PAGE_SHIFT;
        for frame in first..last.saturating_add(1).min(end) {
            if let Ok(frame) = u32::try_from(frame)
                && self.shared.pages.is_table(frame)
            {
                self.shared.writes = self.shared.writes.wrapping_add(1);
                if self.shared.pages.news(frame) {
                    self.mark(frame);
                }
            }
        }
    }

    /// Records that the guest's CPU can write the guest VRAM page at `address` without a trap if `unseen` is true.
    /// Otherwise, records that it no longer can. [`Self::written`] need not be called for untrapped writes. Calls are
    /// counted: each call with `true` must be balanced by a call with `false`.
    pub fn unseen(&mut self, address: GuestVramAddr, unseen: bool) {
        let Some(frame) = PageIndex::frame(address.0) else { return };
        let mut run = Vec::new();
        FrameRun::push(&mut run, frame, false);
        if unseen {
            self.shared.gained.append(&mut run);
            self.count_gained();
        } else {
            self.release(run);
        }
    }

    /// Performs the updates that a guest TLB flush of the space requires immediately. `busy` is true if the card is
    /// executing work of one of the space's channels, in which case no update may be deferred. Afterwards, the card's
    /// tables contain no entry that the guest removed before the flush, except in [`Mode::Lazy`]. If the report
    /// requires it, the caller must flush the card's TLBs for [`Self::directory`], and then call [`Self::flushed`].
    pub fn flush(&mut self, id: SpaceId, busy: bool, world: &mut impl World) -> SyncReport {
        if let Some((space, shared)) = self.space_mut(id) {
            space.flushed_at = shared.writes;
            space.announced = true;
        }
        let scope = match (self.mode, busy) {
            (Mode::Naive, _) | (Mode::Lazy, true) => Scope::Everything,
            (Mode::Incremental, _) | (Mode::LazyAdd, true) => Scope::Pending,
            (Mode::LazyAdd, false) => Scope::Losing,
            (Mode::Lazy, false) => {
                let mut report = SyncReport::default();
                if let Some((space, shared)) = self.space_mut(id) {
                    space.marked = true;
                    report.deferred = space.waiting(&shared.tables);
                }
                return report;
            }
        };
        self.sync(id, scope, false, world)
    }

    /// Records that the guest has announced its previous writes, as it must after writes through an aperture. Pages
    /// that may have changed without a trap must be read again.
    pub fn announced(&mut self) {
        for space in self.spaces.iter_mut().flatten() {
            space.announced = true;
        }
    }

    /// Returns true if [`Self::prepare`] has nothing to do, because all changes reported through [`Self::flush`],
    /// [`Self::announced`] or [`Self::written`] have been read. Other changes are not detected: a card may or may not
    /// observe them.
    #[must_use]
    pub fn is_settled(&self, id: SpaceId) -> bool {
        self.space(id).is_none_or(|space| space.is_settled(&self.shared.tables))
    }

    /// Completes all deferred updates. Must be called before the card executes work of one of the space's channels.
    /// Afterwards, the shadow matches the guest's tables, except for entries that are not granted. The card's TLBs must
    /// be flushed as after [`Self::flush`].
    ///
    /// Another guest CPU may be in the middle of writing an entry. An entry that is not granted is not mapped. It is
    /// reported as denied when it is found again, or immediately if the space's tables have not been written since the
    /// last flush.
    pub fn prepare(&mut self, id: SpaceId, world: &mut impl World) -> SyncReport {
        let marked = self.space(id).is_some_and(|space| space.marked);
        self.sync(id, if marked { Scope::Everything } else { Scope::Pending }, true, world)
    }

    fn sync(&mut self, id: SpaceId, scope: Scope, unflushed: bool, world: &mut impl World) -> SyncReport {
        let Some((space, shared)) = self.space_mut(id) else { return SyncReport::default() };
        space.marked = false;
        // Pages that cannot lose permissions have not been read yet.
        space.announced &= scope == Scope::Losing;
        let report = space.sync(shared, scope, unflushed, world);
        self.count_gained();
        report
    }

    /// Records that the card's TLBs no longer contain the entries that previous calls have removed. Frees unlinked
    /// tables. Pages mapped writable only by removed entries are no longer writable by the GPU.
    pub fn flushed(&mut self, id: SpaceId, memory: &mut impl ShadowMemory) {
        let Some((space, _)) = self.space_mut(id) else { return };
        let released = space.flushed(memory);
        self.release(released);
    }

    /// Starts removing from all spaces a range that no longer belongs to the guest. [`Frames`] must no longer grant the
    /// range.
    pub fn withdraw(&mut self, range: GuestRange) -> Withdrawal {
        self.mark_range(range);
        Withdrawal { range, pieces: self.shared.reverse.pieces(range) }
    }

    /// Removes the entries that map into the range from the next few table pages. Returns `None` if no pages remain.
    /// Until then, the spaces must not change in any other way. After each call, the caller must flush the card's TLBs
    /// for the returned spaces, and call [`Self::flushed`] for each. If memory is granted again later,
    /// [`Self::granted`] or [`Self::retranslate`] restores the entries.
    pub fn invalidate(
        &mut self,
        withdrawal: &mut Withdrawal,
        memory: &mut impl ShadowMemory,
    ) -> Option<(Vec<SpaceId>, SyncReport)> {
        let Withdrawal { range, pieces } = withdrawal;
        let left = pieces.len().saturating_sub(Withdrawal::PAGES_PER_STEP);
        let step = pieces.split_off(left);
        let invalidate =
            |table: &mut Table, piece, _: &mut _, books: &mut Books<'_>, changes: &mut Changes, _: &mut SyncReport| {
                table.invalidate(piece, *range, books, changes);
            };
        (!step.is_empty()).then(|| self.visit(&step, memory, invalidate))
    }

    /// Denies or permits the card's access to all guest RAM. Denial unlinks the tables that map RAM, so its cost
    /// depends only on the directories. Other pages in these tables also become inaccessible. While RAM is denied,
    /// [`Frames`] must not grant it. Returns the spaces for which the caller must call [`Self::relink`] for each part,
    /// and then flush the card's TLBs.
    #[must_use]
    pub fn bar_ram(&mut self, barred: bool) -> Vec<SpaceId> {
        let Self { spaces, shared, .. } = self;
        shared.ram_barred = barred;
        let each = (0u32..).zip(spaces).filter_map(|(index, space)| Some((index, space.as_deref()?)));
        each.filter_map(|(index, space)| space.bar_tables(shared).then_some(SpaceId::new(space.generation, index)))
            .collect()
    }

    /// Writes one of the [`RELINK_PIECES`] parts of a space's directory after [`Self::bar_ram`]. The guest must not be
    /// notified of completion until all parts have been written.
    pub fn relink(&mut self, id: SpaceId, piece: u32, memory: &mut impl ShadowMemory) -> SyncReport {
        let mut report = SyncReport::default();
        if let Some((space, shared)) = self.space_mut(id) {
            let pages = crate::bits::members(space.directory.all()).filter(|page| page % RELINK_PIECES == piece);
            let pages = pages.fold(0, |set, page| set | bit(page));
            space.relink(pages, shared, memory, &mut report);
        }
        report
    }

    /// Updates the spaces after a range has moved, or has been assigned to the guest. Retranslates the entries that map
    /// into the range, and marks tables within it as pending. The caller must then proceed as after
    /// [`Self::invalidate`].
    pub fn retranslate(
        &mut self,
        range: GuestRange,
        world: &mut (impl Frames + ShadowMemory),
    ) -> (Vec<SpaceId>, SyncReport) {
        self.mark_range(range);
        let pieces = self.shared.reverse.pieces(range);
        self.visit(&pieces, world, |table, piece, world, books, changes, report| {
            table.retranslate(piece, range, world, books, changes, report);
        })
    }

    /// Returns true if any entry of any space may refer to a byte of the range.
    #[must_use]
    pub fn names(&self, range: GuestRange) -> bool {
        !self.shared.reverse.pieces(range).is_empty()
    }

    /// Starts or stops logging the RAM to which entries refer. A new log starts with the RAM to which entries currently
    /// refer.
    pub fn log_ram(&mut self, on: bool) {
        self.shared.reverse.log(on);
    }

    /// Returns blocks that cover all RAM in `range` to which entries have referred since the last call. A block within
    /// `range` is reported again if `goes_on` is true and entries still refer to it, or if entries refer to it again
    /// later.
    pub fn take_named_ram(&mut self, range: Range<u64>, goes_on: bool) -> Vec<Range<u64>> {
        self.shared.reverse.take_named(range, goes_on)
    }

    /// Records that memory was granted. Denied entries and unreadable tables must be reread.
    pub fn granted(&mut self) {
        let Self { spaces, shared, .. } = self;
        spaces.iter_mut().flatten().for_each(|space| space.granted());
        for (number, table) in shared.tables.iter_mut() {
            if table.granted()
                && let Some(Some(space)) = spaces.get_mut(table.space as usize)
            {
                enqueue(number, table, space);
            }
        }
        shared.rooms = shared.rooms.wrapping_add(1);
    }

    /// Returns the guest memory to which the current shadow maps a GPU virtual address. Returns `None` if the address
    /// is unmapped, or maps a mediator page.
    #[must_use]
    pub fn resolve(&self, id: SpaceId, va: GpuVa) -> Option<Mapping> {
        let space = self.space(id)?;
        let index = u32::try_from(va.0 >> PDE_SHIFT).ok().filter(|index| *index < FIRST_ENTRY)? as usize;
        if va.0 >> VA_BITS != 0 || space.directory.entry(index) == 0 {
            return None;
        }
        let pde = Pde::from(space.directory.raw(index));
        let pair = Pair::from_pde(pde);
        let offset = va.0 & PDE_SPAN.wrapping_sub(1);
        let large = |pair: &Pair| Some(&self.shared.tables.get(space.table(&pair.large)?)?.mirror);
        TableKey::both(pde).into_iter().flatten().find_map(|key| {
            let table = self.shared.tables.get(space.table(&key)?)?;
            let at = usize::try_from(offset.wrapping_shr(key.size.shift())).ok()?;
            let shadow = match (key.size, pair.as_ref().and_then(|pair| Some((pair, large(pair)?)))) {
                (PageSize::Large, Some((pair, large))) if table.mirror.entry(at) == 0 => {
                    let page = usize::try_from(offset.wrapping_shr(PageSize::Small.shift())).ok()?;
                    space.splits.piece(pair, page, large).unwrap_or(0)
                }
                // If the replacement table could not be created, the guest's small-page table is not linked either.
                (PageSize::Small, Some((pair, large))) if space.splits.stand_in(pair, large) == Some(None) => 0,
                _ => table.mirror.entry(at),
            };
            let shadow = Pte::from(shadow);
            if !shadow.valid() {
                return None;
            }
            let guest = Pte::from(table.mirror.raw(at));
            let address = guest.address().saturating_add(offset & key.size.bytes().wrapping_sub(1));
            let place = if guest.aperture().is_system() {
                Place::Ram(Gpa(address))
            } else {
                Place::Vram(GuestVramAddr(address))
            };
            let within = address & SMALL_PAGE.wrapping_sub(1);
            Some(Mapping { place, bytes: SMALL_PAGE.saturating_sub(within), writable: !shadow.read_only() })
        })
    }

    /// Maps a mediator page, replacing any page with the same index. The card's TLBs must be flushed before the page is
    /// used.
    ///
    /// # Errors
    /// Returns [`NoMemory`] if card memory is exhausted, the index or the address is out of range, or the space is
    /// closed.
    pub fn map_host(
        &mut self,
        id: SpaceId,
        page: HostPage,
        at: VramAddr,
        rights: Rights,
        memory: &mut impl ShadowMemory,
    ) -> Result<(), NoMemory> {
        let (space, _) = self.space_mut(id).ok_or(NoMemory)?;
        let (area, index) = page.split().ok_or(NoMemory)?;
        let entry = HostTable::pte(at, rights).ok_or(NoMemory)?;
        let slot = space.host.get_mut(area as usize).ok_or(NoMemory)?;
        if let Some(host) = slot {
            host.set(index, entry, memory);
            return Ok(());
        }
        let host = HostTable::new(area, memory).ok_or(NoMemory)?;
        let Some(pde) = host.pde() else {
            memory.free(host.card(), host.bytes());
            return Err(NoMemory);
        };
        host.set(index, entry, memory);
        *slot = Some(host);
        if let Some(entry) = space.directory.shadow.get_mut(area.entry() as usize) {
            *entry = pde;
        }
        let at = space.directory.card.offset(u64::from(area.entry()).saturating_mul(ENTRY_BYTES));
        memory.write(at, &pde.to_le_bytes());
        Ok(())
    }

    /// Unmaps a mediator page. The card's TLBs must be flushed before the memory is reused.
    pub fn unmap_host(&mut self, id: SpaceId, page: HostPage, memory: &mut impl ShadowMemory) {
        if let Some((space, _)) = self.space_mut(id)
            && let Some((area, index)) = page.split()
            && let Some(host) = space.host.get(area as usize).copied().flatten()
        {
            host.set(index, 0, memory);
        }
    }

    /// Closes a space and frees its memory. The card must no longer use its directory.
    pub fn close(&mut self, id: SpaceId, memory: &mut impl ShadowMemory) {
        if self.space(id).is_none() {
            return;
        }
        if let Some(space) = self.spaces.get_mut(id.index()).and_then(Option::take) {
            let released = space.close(&mut self.shared, memory);
            self.release(released);
        }
    }

    /// Calls `visit` for each table page in `pieces`, and writes the changes to the card. Returns the changed spaces.
    fn visit<M: ShadowMemory>(
        &mut self,
        pieces: &[Piece],
        memory: &mut M,
        mut visit: impl FnMut(&mut Table, Piece, &mut M, &mut Books<'_>, &mut Changes, &mut SyncReport),
    ) -> (Vec<SpaceId>, SyncReport) {
        let mut report = SyncReport::default();
        let Self { spaces, shared, .. } = self;
        let Shared { tables, reverse, gained, splits_left, .. } = shared;
        let mut work: BTreeMap<u32, Vec<(u32, Changes)>> = BTreeMap::new();
        for pieces in pieces.chunk_by(|a, b| a.table() == b.table()) {
            let Some(number) = pieces.first().map(|piece| piece.table()) else { continue };
            let Some(table) = tables.get_mut(number) else { continue };
            let Some(Some(space)) = spaces.get_mut(table.space as usize) else { continue };
            let mut changes = Changes::default();
            for piece in pieces {
                let mut books =
                    Books { reverse, gained, released: &mut space.released, splits_left, half_written: false };
                visit(table, *piece, memory, &mut books, &mut changes, &mut report);
            }
            if table.is_pending() {
                enqueue(number, table, space);
            }
            if !changes.is_empty() {
                work.entry(table.space).or_default().push((number, changes));
            }
        }
        let mut touched = Vec::new();
        for (index, work) in work {
            let Some(Some(space)) = spaces.get_mut(index as usize) else { continue };
            let written = report.entries_written;
            space.commit(shared, &work, 0, memory, &mut report);
            if report.entries_written != written {
                touched.push(SpaceId::new(space.generation, index));
            }
        }
        self.count_gained();
        (touched, report)
    }

    /// Records that all table pages in a guest VRAM range may have changed.
    fn mark_range(&mut self, range: GuestRange) {
        let (system, start, len) = range.parts();
        if system || len == 0 {
            return;
        }
        let last_known = self.shared.pages.end().saturating_sub(1);
        let page = |address: u64| u32::try_from((address >> SMALL_PAGE.trailing_zeros()).min(last_known)).ok();
        if start >> SMALL_PAGE.trailing_zeros() > last_known {
            return;
        }
        if let (Some(first), Some(last)) = (page(start), page(start.saturating_add(len.saturating_sub(1)))) {
            for frame in self.shared.pages.tables_in(first, last) {
                self.mark(frame);
            }
        }
    }

    /// Records that a page may have changed.
    fn mark(&mut self, frame: u32) {
        self.shared.pages.set_marked(frame);
        self.tell(frame, News::Dirty);
    }

    fn tell(&mut self, frame: u32, news: News) {
        let Self { spaces, shared: Shared { tables, pages, .. }, .. } = self;
        for user in pages.users(frame) {
            match *user {
                User::Directory(space, page) => {
                    if let Some(Some(space)) = spaces.get_mut(space as usize) {
                        set(&mut space.directory.dirty, &mut space.directory.watched, bit(page), news);
                    }
                }
                User::Table(number, page) => {
                    let Some(table) = tables.get_mut(number) else { continue };
                    set(&mut table.mirror.dirty, &mut table.mirror.watched, bit(page), news);
                    if let Some(Some(space)) = spaces.get_mut(table.space as usize) {
                        enqueue(number, table, space);
                    }
                }
            }
        }
    }

    /// Counts pages that have become writable by the GPU, and watches those that contain tables.
    fn count_gained(&mut self) {
        let mut turned = Vec::new();
        for run in self.shared.gained.drain(..) {
            self.shared.pages.count(run, true, &mut turned);
        }
        for frame in turned {
            self.tell(frame, News::Watch);
        }
    }

    /// Stops counting entries that made pages writable by the GPU. The GPU may have written these pages until now.
    fn release(&mut self, released: Vec<FrameRun>) {
        let mut turned = Vec::new();
        for run in released {
            self.shared.pages.count(run, false, &mut turned);
        }
        for frame in turned {
            self.tell(frame, News::Unwatch);
        }
    }

    pub(crate) fn each(&self) -> impl Iterator<Item = (SpaceId, &Space)> {
        (0u32..).zip(&self.spaces).filter_map(|(index, space)| {
            let space = space.as_deref()?;
            Some((SpaceId::new(space.generation, index), space))
        })
    }

    fn space(&self, id: SpaceId) -> Option<&Space> {
        self.spaces.get(id.index())?.as_deref().filter(|space| space.generation == id.generation())
    }

    fn space_mut(&mut self, id: SpaceId) -> Option<(&mut Space, &mut Shared)> {
        let space = self.spaces.get_mut(id.index())?.as_deref_mut()?;
        (space.generation == id.generation()).then_some((space, &mut self.shared))
    }
}

fn set(dirty: &mut u64, watched: &mut u64, page: u64, news: News) {
    match news {
        News::Dirty => *dirty |= page,
        News::Watch => *watched |= page,
        News::Unwatch => {
            *watched &= !page;
            *dirty |= page;
        }
    }
}

fn enqueue(number: u32, table: &mut Table, space: &mut Space) {
    if !table.queued {
        table.queued = true;
        space.queue.push(number);
    }
}

/// Returns the start of the 4 KiB page that contains `place`.
fn aligned(place: Place) -> Place {
    match place {
        Place::Vram(address) => Place::Vram(address.page()),
        Place::Ram(address) => Place::Ram(address.page()),
    }
}

const _: () = assert!(LARGE_PAGE.is_multiple_of(SMALL_PAGE) && BLOCK_PAGES_SHIFT == 9);

#[cfg(test)]
mod tests;
