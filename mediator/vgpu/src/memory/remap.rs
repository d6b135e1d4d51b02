//! Apertures backed by host memory (`apertures = "remapped"`): maps pages of BAR1, BAR3 or PRAMIN to guest VRAM pages.
//!
//! The VMM maps a file under most of an aperture, once, so that CPU accesses to this part cause no messages. While the
//! guest's tables map a page of its VRAM there, the page of the file is the VRAM page's *home*. The mediator moves the
//! contents there when the guest flushes its TLB, and back when the mapping is removed. All other accesses to the VRAM
//! page, including the card's, use the home. For PRAMIN, a register selects the pages, not the guest's tables.
//!
//! This module only keeps records. `vm-device` allocates the memory, and `moves` moves the pages.
//!
//! A page has only one home. The mapped parts of the apertures cannot show guest RAM, and can show guest VRAM only
//! once: further slots show zeros. Such slots are counted, and logged once. PRAMIN yields to the other apertures,
//! because a driver leaves the PRAMIN window in place after its last use.

mod overlay;
mod saved;

pub(crate) use overlay::Overlay;
pub(crate) use saved::SavedRemap;

use crate::counts::counts;
use card_manager::{ManagedCard, ManagerError};
use devmodel::backend::Aperture;
use nvspec::addr::{GuestVramAddr, Iova, LARGE_PAGE, Place, SMALL_PAGE};
use nvspec::regs::windows::pramin;
use saved_state::Invalid;
use shadow_pt::GuestRange;
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use vm_device::WindowMemory;
use vmm_glue::{Mapping, MmapArea, RegionIndex};

/// Size in bytes of the trapped start of BAR1, a multiple of 2 MiB. nouveau places all doorbells (512 KiB) there.
pub(crate) const TRAPPED_BAR1: u64 = 16 << 20;

/// A part of a BAR that shows guest VRAM and that a client can map.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum MappedWindow {
    /// Part of BAR1 beyond the trapped start.
    Bar1,
    /// BAR3.
    Bar3,
    /// PRAMIN, in BAR0.
    Pramin,
}

impl MappedWindow {
    pub(crate) const ALL: [Self; 3] = [Self::Bar1, Self::Bar3, Self::Pramin];

    /// Returns the window in a BAR, if the BAR has one.
    pub(crate) fn for_region(region: RegionIndex) -> Option<Self> {
        Self::ALL.into_iter().find(|showing| showing.region() == region)
    }

    /// Returns the region that contains the window.
    pub(crate) fn region(self) -> RegionIndex {
        match self {
            Self::Bar1 => RegionIndex::Bar1,
            Self::Bar3 => RegionIndex::Bar3,
            Self::Pramin => RegionIndex::Bar0,
        }
    }

    /// Returns the window's name and its range in the region, for apertures of `bar1` and `bar3` bytes.
    fn extent(self, (bar1, bar3): (u64, u64)) -> (&'static str, u64, u64) {
        match self {
            Self::Bar1 => ("bar1", TRAPPED_BAR1, bar1),
            Self::Bar3 => ("bar3", 0, bar3),
            Self::Pramin => ("pramin", pramin::BASE.into(), pramin::END.into()),
        }
    }

    fn index(self) -> usize {
        self as usize
    }
}

impl From<Aperture> for MappedWindow {
    fn from(aperture: Aperture) -> Self {
        match aperture {
            Aperture::Bar1 => Self::Bar1,
            Aperture::Bar3 => Self::Bar3,
        }
    }
}

/// Memory that the guest's tables map at a page of a mapped aperture.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum PageTarget {
    /// The page maps no guest memory.
    #[default]
    Nothing,
    /// The page maps the guest VRAM page with this number.
    Vram(u32),
    /// The page maps guest RAM, which a mapped aperture cannot show.
    Ram,
}

/// A page of a mapped aperture, numbered from the start of the BAR.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Slot {
    window: usize,
    page: u32,
}

impl Slot {
    /// Returns true if this slot yields to all other slots that map the same page, even to later ones.
    fn gives_way(self) -> bool {
        self.window == MappedWindow::Pramin.index()
    }
}

#[derive(Debug)]
struct Window {
    memory: WindowMemory,
    /// Number of the window's first page.
    first: u32,
    wants: Vec<PageTarget>,
}

/// Pages whose homes change. The caller must carry out all `outs` before any `ins`.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct Moves {
    /// Guest VRAM pages that move back to the card, and their old slots.
    pub(crate) outs: Vec<(u32, Slot)>,
    /// Slots that must show zeros from now on.
    pub(crate) blanks: Vec<Slot>,
    /// PRAMIN pages that showed zeros because their VRAM had another home. Writes to these pages are lost.
    pub(crate) strays: Vec<Slot>,
    /// Guest VRAM pages that move under an aperture, and their new slots.
    pub(crate) ins: Vec<(u32, Slot)>,
}

/// Location of a range of guest VRAM.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Home {
    /// The range is stored in its chunk.
    Chunk,
    /// The whole range is under a mapped aperture, and is contiguous for the card.
    Host(Iova),
    /// Parts of the range have different homes.
    Apart,
}

counts! {
    /// Events since the VM was created.
    RemapCounts {
        /// Pages moved to or from host memory.
        moves: "aperture_moves",
        /// Mapped aperture pages that could not show the memory mapped by the guest.
        aliases: "aperture_aliases",
        /// Number of times that the VM's work was stopped for moves.
        stops: "aperture_stops",
        /// Moves that were deferred because the guest had used up its move budget.
        waits: "aperture_waits",
        /// Accesses to mappable parts of apertures that arrived as messages.
        messages: "aperture_messages",
    }
}

/// A VM's mapped apertures. Empty if the VM's apertures are trapped.
#[derive(Debug, Default)]
pub(crate) struct Remap {
    windows: [Option<Window>; MappedWindow::ALL.len()],
    /// Home slots of the guest VRAM pages that are in host memory, by page number.
    homes: HashMap<u32, Slot>,
    /// Other slots that map each guest VRAM page in host memory, in the order in which they were mapped.
    waiting: BTreeMap<u32, Vec<Slot>>,
    /// Set while the guest's driver state is being removed. No pages move during this time.
    pub(crate) closing: bool,
    warned: bool,
    /// True if the card's TLBs may still map memory that no page table maps.
    pub(crate) stale: bool,
    pub(crate) counts: RemapCounts,
}

impl Remap {
    /// Allocates host memory for PRAMIN, and for BAR1 and BAR3 of the given sizes. Returns an error if memory or I/O
    /// addresses are exhausted.
    pub(crate) fn open(host: &ManagedCard, bars: (u64, u64)) -> Result<Self, ManagerError> {
        let mut this = Self::default();
        for showing in MappedWindow::ALL {
            let (name, start, end) = showing.extent(bars);
            if start >= end {
                continue;
            }
            match WindowMemory::new(host, name, start, end) {
                Ok(memory) => this.windows[showing.index()] = Some(Window::new(memory)),
                Err(error) => {
                    this.close(host);
                    return Err(error);
                }
            }
        }
        Ok(this)
    }

    /// Creates apertures with the same memory for another card, or for another VM whose client maps this memory. If
    /// `inhabited` is true, they contain the same pages; otherwise, they are empty. Returns an error if the card
    /// rejects the memory or has no free I/O addresses.
    pub(crate) fn on(&self, host: &ManagedCard, inhabited: bool) -> Result<Self, ManagerError> {
        let mut this = Self { counts: self.counts, warned: self.warned, ..Self::default() };
        for (window, old) in this.windows.iter_mut().zip(&self.windows) {
            let Some(old) = old else { continue };
            match old.memory.on(host) {
                Ok(memory) if inhabited => *window = Some(Window { wants: old.wants.clone(), ..Window::new(memory) }),
                Ok(memory) => *window = Some(Window::new(memory)),
                Err(error) => {
                    this.close(host);
                    return Err(error);
                }
            }
        }
        if inhabited {
            (this.homes, this.waiting) = (self.homes.clone(), self.waiting.clone());
        }
        Ok(this)
    }

    /// Returns the pages under the apertures, which stay readable after the records have changed.
    pub(crate) fn overlay(&self) -> Overlay {
        let place = |(page, slot): (&u32, &Slot)| Some((u64::from(*page), self.memory(*slot)?.region(slot.page)));
        Overlay::from_pages(self.homes.iter().filter_map(place).collect())
    }

    /// Returns true if the VMM maps any aperture.
    pub(crate) fn is_open(&self) -> bool {
        self.windows.iter().any(Option::is_some)
    }

    /// Replaces the memory, which must contain no pages, with zeroed memory for the next client's apertures of `bars`
    /// bytes. If `bars` is `None` or no memory is available, these apertures are trapped.
    pub(crate) fn renew(&mut self, host: &ManagedCard, bars: Option<(u64, u64)>) {
        let (counts, warned) = (self.counts, self.warned);
        self.close(host);
        let fresh = bars.map_or_else(|| Ok(Self::default()), |bars| Self::open(host, bars));
        match fresh {
            Ok(fresh) => *self = Self { counts, warned, ..fresh },
            Err(error) => tracing::error!(%error, "the next client's apertures will be trapped"),
        }
    }

    /// Unmaps the memory from the card. The windows must contain no pages.
    pub(crate) fn close(&mut self, host: &ManagedCard) {
        for window in std::mem::take(&mut self.windows).into_iter().flatten() {
            window.memory.close(host, self.stale);
        }
    }

    /// Zeroes all memory, which the same client continues to map. The windows must contain no pages.
    pub(crate) fn blank(&self, host: &ManagedCard) {
        for window in self.windows.iter().flatten() {
            if let Err(error) = window.memory.blank(host) {
                tracing::error!(%error, "cannot clear memory under an aperture, so it keeps its contents after a reset");
            }
        }
    }

    /// Returns the file under a window, and the part of the region that it backs, or `None` if the window is trapped.
    pub(crate) fn area(&self, showing: MappedWindow) -> Option<(Arc<OwnedFd>, MmapArea)> {
        self.window(showing).map(|window| window.memory.area())
    }

    /// Replaces the window's memory with the client's own pages. Returns an error if the number of pages differs, the
    /// window contains pages, or the card rejects the memory.
    pub(crate) fn lend(
        &mut self,
        host: &ManagedCard,
        showing: MappedWindow,
        area: MmapArea,
        pages: &Arc<Mapping>,
    ) -> Result<(), ManagerError> {
        let window = self.empty_window(showing).filter(|window| window.memory.area().1 == area);
        let in_use = || ManagerError::host("cannot replace an aperture's memory", io::ErrorKind::ResourceBusy);
        window.ok_or_else(in_use)?.memory.replace(host, pages)
    }

    /// Replaces the window's memory with `file`, which is zeroed. The client of a killed process still maps this file.
    /// Returns an error if the whole window is trapped, if it contains pages, or if the client does not map this file.
    pub(crate) fn take_file(
        &mut self,
        host: &ManagedCard,
        showing: MappedWindow,
        file: Arc<OwnedFd>,
    ) -> Result<(), ManagerError> {
        let trapped = || Invalid::new("a client has mapped a trapped aperture");
        let window = self.empty_window(showing).ok_or_else(trapped)?;
        let taken = window.memory.taken(host, file)?;
        std::mem::replace(&mut window.memory, taken).close(host, false);
        Ok(())
    }

    /// Counts a message that accesses the window's region, if the access is within the window.
    pub(crate) fn count_message(&mut self, showing: MappedWindow, offset: u64) {
        let mapped = self.window(showing).is_some_and(|window| window.want((offset / SMALL_PAGE) as u32).is_some());
        self.counts.messages += u64::from(mapped);
    }

    /// Returns the number of pages in host memory.
    pub(crate) fn pages(&self) -> usize {
        self.homes.len()
    }

    /// Returns the slot of a guest VRAM page, if the page is in host memory.
    pub(crate) fn home(&self, page: u64) -> Option<Slot> {
        if self.homes.is_empty() {
            return None;
        }
        self.homes.get(&u32::try_from(page).ok()?).copied()
    }

    /// Returns the home of `len` bytes of guest VRAM, which must be whole pages.
    pub(crate) fn whereabouts(&self, address: GuestVramAddr, len: u64) -> Home {
        let first = address.0 / SMALL_PAGE;
        let pages = len / SMALL_PAGE;
        if self.homes.is_empty() {
            return Home::Chunk;
        }
        let Some(slot) = self.home(first) else {
            let any = (1..pages).any(|page| self.home(first + page).is_some());
            return if any { Home::Apart } else { Home::Chunk };
        };
        let next = |page: u64| Slot { page: slot.page + page as u32, ..slot };
        if !(1..pages).all(|page| self.home(first + page) == Some(next(page))) {
            return Home::Apart;
        }
        // PRAMIN can start at an address that is not aligned to the card's large pages.
        let iova = self.memory(slot).map(|memory| memory.iova(slot.page));
        iova.filter(|iova| iova.0.is_multiple_of(len)).map_or(Home::Apart, Home::Host)
    }

    /// Fills `data` from byte `offset` of a page. The bytes must be within the page.
    pub(crate) fn read(&self, slot: Slot, offset: u64, data: &mut [u8]) {
        if let Some(memory) = self.memory(slot) {
            memory.read(slot.page, offset, data);
        }
    }

    /// Writes `data` at byte `offset` of a page. The bytes must be within the page.
    pub(crate) fn write(&self, slot: Slot, offset: u64, data: &[u8]) {
        if let Some(memory) = self.memory(slot) {
            memory.write(slot.page, offset, data);
        }
    }

    fn memory(&self, slot: Slot) -> Option<&WindowMemory> {
        self.windows.get(slot.window)?.as_ref().map(|window| &window.memory)
    }

    fn window(&self, showing: MappedWindow) -> Option<&Window> {
        self.windows[showing.index()].as_ref()
    }

    /// Returns the window if it contains no pages.
    fn empty_window(&mut self, showing: MappedWindow) -> Option<&mut Window> {
        let is_empty = !self.homes.values().any(|slot| slot.window == showing.index());
        self.windows[showing.index()].as_mut().filter(|_| is_empty)
    }

    /// Returns the offset of the window's first byte in its region, and the window's length in pages. Returns `None` if
    /// the whole window is trapped, or while pages must not move.
    pub(crate) fn extent(&self, showing: MappedWindow) -> Option<(u64, u64)> {
        let window = self.window(showing).filter(|_| !self.closing)?;
        Some((u64::from(window.first) * SMALL_PAGE, window.wants.len() as u64))
    }

    /// Returns a page and its new target, if the target has changed. `vram_bytes` is the size of guest VRAM.
    pub(crate) fn difference(
        &self,
        showing: MappedWindow,
        page: u64,
        place: Option<Place>,
        vram_bytes: u64,
    ) -> Option<(u32, PageTarget)> {
        let window = self.window(showing)?;
        let page = u32::try_from(page).ok()?;
        let want = match place {
            Some(Place::Vram(at)) if at.0 < vram_bytes => PageTarget::Vram(u32::try_from(at.0 / SMALL_PAGE).ok()?),
            Some(Place::Ram(_)) => PageTarget::Ram,
            Some(Place::Vram(_)) | None => PageTarget::Nothing,
        };
        (window.want(page)? != want).then_some((page, want))
    }

    /// Returns the ranges of guest VRAM that `changes` affect.
    pub(crate) fn concerned(&self, showing: MappedWindow, changes: &[(u32, PageTarget)]) -> Vec<GuestRange> {
        let Some(window) = self.window(showing) else { return Vec::new() };
        let mut pages = BTreeSet::new();
        for (page, want) in changes {
            for want in [*want, window.want(*page).unwrap_or_default()] {
                if let PageTarget::Vram(page) = want {
                    pages.insert(page);
                }
            }
        }
        ranges(pages)
    }

    /// Records the `changes` in a window, and returns the moves that they require.
    pub(crate) fn book(&mut self, showing: MappedWindow, changes: &[(u32, PageTarget)]) -> Moves {
        let at = showing.index();
        let mut moves = Moves::default();
        // Each entry consists of a guest VRAM page, a slot that maps it, and a flag that is set if the slot was
        // waiting.
        let mut wanted: Vec<(u32, Slot, bool)> = Vec::new();
        // Process removals first, because an insertion may need a page that is removed elsewhere.
        for (page, want) in changes {
            let slot = Slot { window: at, page: *page };
            let Some(old) = self.windows[at].as_mut().and_then(|window| window.want_mut(*page)) else { continue };
            let old = std::mem::replace(old, *want);
            if let PageTarget::Vram(frame) = old {
                if self.homes.get(&frame) == Some(&slot) {
                    self.homes.remove(&frame);
                    moves.outs.push((frame, slot));
                    wanted.extend(self.waiting.remove(&frame).into_iter().flatten().map(|slot| (frame, slot, true)));
                } else if let Some(waiting) = self.waiting.get_mut(&frame) {
                    waiting.retain(|other| *other != slot);
                    if waiting.is_empty() {
                        self.waiting.remove(&frame);
                    }
                    moves.strays.extend(slot.gives_way().then_some(slot));
                }
            }
            if *want == PageTarget::Ram {
                self.count_alias();
            }
            moves.blanks.push(slot);
        }
        // Drop waiting slots that map another page after the changes.
        wanted.retain(|(frame, slot, _)| self.want(*slot) == Some(PageTarget::Vram(*frame)));
        let new = changes.iter().filter_map(|(page, want)| match want {
            PageTarget::Vram(frame) => Some((*frame, Slot { window: at, page: *page }, false)),
            PageTarget::Nothing | PageTarget::Ram => None,
        });
        wanted.extend(new);
        wanted.sort_by_key(|(_, slot, _)| slot.gives_way());
        for (frame, slot, waited) in wanted {
            let home = self.homes.get(&frame).copied();
            if home == Some(slot) {
                continue;
            }
            if home.is_some_and(|home| !home.gives_way() || slot.gives_way()) {
                self.waiting.entry(frame).or_default().push(slot);
                if !waited && !slot.gives_way() {
                    self.count_alias();
                }
                continue;
            }
            if let Some(home) = home {
                moves.outs.push((frame, home));
                moves.blanks.push(home);
                self.waiting.entry(frame).or_default().push(home);
            }
            moves.strays.extend((waited && slot.gives_way()).then_some(slot));
            self.homes.insert(frame, slot);
            moves.ins.push((frame, slot));
        }
        self.counts.moves += (moves.outs.len() + moves.ins.len()) as u64;
        moves
    }

    fn want(&self, slot: Slot) -> Option<PageTarget> {
        self.windows.get(slot.window)?.as_ref()?.want(slot.page)
    }

    /// Counts a page that could not show the memory that the guest has mapped.
    pub(crate) fn count_alias(&mut self) {
        self.counts.aliases += 1;
        if !std::mem::replace(&mut self.warned, true) {
            tracing::error!(
                "the guest has mapped RAM, or VRAM that is already mapped, in an aperture, and reads zeros. \
                 Configure the VM with apertures = \"trapped\""
            );
        }
    }

    /// Removes the records of all pages in host memory, whose contents are lost. Returns the pages' numbers.
    pub(crate) fn forget(&mut self) -> BTreeSet<u32> {
        self.waiting.clear();
        self.windows.iter_mut().flatten().for_each(|window| window.wants.fill(PageTarget::Nothing));
        std::mem::take(&mut self.homes).into_keys().collect()
    }
}

impl Window {
    fn new(memory: WindowMemory) -> Self {
        let (_, area) = memory.area();
        let (first, pages) = (area.offset / SMALL_PAGE, area.size / SMALL_PAGE);
        Self { memory, first: first as u32, wants: vec![PageTarget::Nothing; pages as usize] }
    }

    fn want(&self, page: u32) -> Option<PageTarget> {
        self.wants.get(page.checked_sub(self.first)? as usize).copied()
    }

    fn want_mut(&mut self, page: u32) -> Option<&mut PageTarget> {
        self.wants.get_mut(page.checked_sub(self.first)? as usize)
    }
}

/// Converts pages to ranges of guest VRAM.
pub(crate) fn ranges(pages: BTreeSet<u32>) -> Vec<GuestRange> {
    let mut runs: Vec<(u64, u64)> = Vec::new();
    for page in pages.into_iter().map(u64::from) {
        match runs.last_mut() {
            Some((first, count)) if *first + *count == page => *count += 1,
            _ => runs.push((page, 1)),
        }
    }
    let range = |(first, count)| GuestRange::Vram(GuestVramAddr(first * SMALL_PAGE), count * SMALL_PAGE);
    runs.into_iter().map(range).collect()
}

const _: () = assert!(TRAPPED_BAR1.is_multiple_of(2 << 20) && (2 << 20) % LARGE_PAGE == 0);

#[cfg(test)]
mod tests;
