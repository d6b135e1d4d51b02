//! A guest, a GPU and a host that execute operations decoded from bytes. The state is checked after each operation.

use super::check::{Fit, HostPages, View};
use super::world::{Card, GUEST_VRAM, Grants, Guest, LARGE, PAGE, reachable};
use crate::{AddressSpaces, GuestRange, HostPage, Limits, Mode, Parts, Place, SpaceId};
use nvspec::addr::{Gpa, GuestVramAddr, VramAddr};
use nvspec::mmu::Rights;
use std::cell::Cell;
#[cfg(test)]
use std::collections::BTreeMap;
use std::collections::BTreeSet;

/// Size of an encoded operation in bytes.
pub(crate) const OP_BYTES: usize = 8;
/// Maximum number of operations per input.
pub(crate) const MAX_OPS: usize = 96;
/// Card address of the first mediator page.
const HOST_PAGE: u64 = 0x5_0000_0000;
/// First I/O page for guest VRAM in host memory, aligned to the size of a large page.
const HOSTED: u64 = 0x2_0000;

const DIRECTORY: u64 = 0x1_0000;
const LPT: u64 = 0x2_0000;
const SPT: u64 = 0x3_0000;
const RAM: u64 = 0x1000 * PAGE;
const OTHER_RAM: u64 = 0x2000 * PAGE;

/// Directories: two ordinary ones, one that is also a table, one in RAM, and one that is partly outside guest memory.
const DIRECTORIES: [Place; 5] = [
    Place::Vram(GuestVramAddr(DIRECTORY)),
    Place::Vram(GuestVramAddr(0x9_0000)),
    Place::Vram(GuestVramAddr(LPT)),
    Place::Ram(Gpa(RAM)),
    Place::Vram(GuestVramAddr(GUEST_VRAM - PAGE)),
];

/// Tables. Some overlap, some are also directories, some are partly or entirely outside guest memory, and some are in
/// RAM.
const TABLES: [Place; 8] = [
    Place::Vram(GuestVramAddr(LPT)),
    Place::Vram(GuestVramAddr(SPT)),
    Place::Vram(GuestVramAddr(SPT + PAGE)),
    Place::Vram(GuestVramAddr(DIRECTORY)),
    Place::Vram(GuestVramAddr(GUEST_VRAM - PAGE)),
    Place::Vram(GuestVramAddr(GUEST_VRAM)),
    Place::Ram(Gpa(RAM)),
    Place::Ram(Gpa(OTHER_RAM)),
];

/// Indices of the directory entries that operations modify.
const PDES: [u64; 5] = [0, 1, 600, 8190, 8191];

/// Limit for tables in bytes, which many directory entries with full-size tables reach.
const TABLE_BYTES: u64 = 4 << 20;
/// Low limit for tables in bytes.
const FEW_TABLE_BYTES: u64 = 0x9000;
/// Size of the tables of a directory entry in bytes: 1,024 large and 32,768 small entries.
const MAX_TABLE_BYTES: u64 = (1024 + 32768) * 8;

/// Operands of an operation.
struct Operands<'a>(&'a [u8]);

impl Operands<'_> {
    fn byte(&mut self) -> u64 {
        let Some((first, rest)) = self.0.split_first() else { return 0 };
        self.0 = rest;
        u64::from(*first)
    }

    fn element<T: Copy>(&mut self, list: &[T]) -> T {
        list[self.byte() as usize % list.len()]
    }

    fn below(&mut self, bound: u64) -> u64 {
        self.byte() % bound
    }

    /// Generates a directory entry.
    fn pde(&mut self) -> u64 {
        let shape = self.byte();
        let half = |place: Place| {
            let system = matches!(place, Place::Ram(_));
            (if system { 2 + (shape >> 7) } else { 1 }, place.address() >> 12)
        };
        let (large, small) = (half(self.element(&TABLES)), half(self.element(&TABLES)));
        // Checking a full-size table is slow, so most tables are an eighth of that size.
        let size = if shape & 0x70 == 0 { (shape >> 2) & 3 } else { 3 };
        let large = if shape & 1 != 0 { large.0 | large.1 << 4 } else { 0 };
        let small = if shape & 2 != 0 { small.0 << 32 | small.1 << 36 } else { 0 };
        if shape & 3 == 0 { 0 } else { large | small | size << 2 }
    }

    /// Generates a table entry.
    fn pte(&mut self) -> u64 {
        let (shape, which) = (self.byte(), self.byte());
        let flags = [0, 0, 0, 4, 2, 1 << 32, 0xdb << 36, 7 << 44][(shape >> 4) as usize % 8];
        let vram = |at: u64| 1 | (at / PAGE) << 4 | flags;
        let ram = |page: u64| 1 | page << 4 | (2 | (which & 1)) << 33 | flags;
        match shape & 15 {
            0 => 0,
            1 => u64::from_le_bytes([shape as u8, which as u8, 0x5a, which as u8, 1, 0, shape as u8, which as u8]),
            // Most of these addresses are in pages that contain tables.
            2..=5 => vram([DIRECTORY, LPT, SPT, SPT + PAGE, 0x9_0000, GUEST_VRAM - PAGE][which as usize % 6]),
            6..=8 => vram(which * PAGE),
            9 | 10 => vram(which % 9 * LARGE),
            11 | 12 => ram(0xff0 + which % 128),
            13 => ram([0x1000, 0x1020, 0x1040, 0x1060][which as usize / 2 % 4]),
            14 => ram(0x1ff8 + which % 48),
            _ => 1 << 33 | 1,
        }
    }
}

struct Opened {
    id: SpaceId,
    host: HostPages,
}

/// The model and the code under test.
pub(crate) struct Machine {
    mode: Mode,
    /// True if tables may be missing, because the limit for tables is low or has been reached.
    lacks_tables: Cell<bool>,
    guest: Guest,
    grants: Grants,
    card: Card,
    spaces: AddressSpaces,
    open: Vec<Opened>,
    /// Card chunks that belong to no VM.
    spare: Vec<u64>,
    /// Guest VRAM pages that the CPU can write without a trap.
    unseen: BTreeSet<u64>,
    /// Spaces that have been neither flushed nor prepared since the last unreported write.
    untold: BTreeSet<SpaceId>,
}

impl Machine {
    pub(crate) fn new(mode: Mode, tight: bool) -> Self {
        let mut guest = Guest::new();
        for page in (0x1000..0x1010).chain(0x2000..0x2008) {
            guest.ram.insert(page, vec![0; PAGE as usize]);
        }
        let mut grants = Grants::default();
        grants.map(0x1000, 0x8000, 64, true);
        grants.map(0x1040, 0x9000, 32, true);
        grants.map(0x2000, 0xb000, 32, false);
        let limits = Limits { table_bytes: if tight { FEW_TABLE_BYTES } else { TABLE_BYTES } };
        let mut machine = Self {
            mode,
            lacks_tables: Cell::new(tight),
            guest,
            grants,
            card: Card::default(),
            spaces: AddressSpaces::new(mode, limits),
            open: Vec::new(),
            spare: vec![70, 71, 72],
            unseen: BTreeSet::new(),
            untold: BTreeSet::new(),
        };
        machine.open(DIRECTORIES[0]);
        machine
    }

    /// Executes the operations in `bytes`, then prepares, checks and frees everything.
    pub(crate) fn run(mut self, bytes: &[u8]) {
        for op in bytes.chunks(OP_BYTES).take(MAX_OPS) {
            self.step(op);
        }
        for index in 0..self.open.len() {
            self.prepare(index);
            // Reread entries that were not granted.
            self.prepare(index);
            // Nothing has changed since, so another call must find no work.
            let again = self.prepare(index);
            assert_eq!((again.translated, again.entries_written, again.denied.total()), (0, 0, 0));
        }
        self.spaces.audit(&self.unseen);
        while !self.open.is_empty() {
            self.close(0);
        }
        for page in std::mem::take(&mut self.unseen) {
            self.spaces.unseen(GuestVramAddr(page), false);
        }
        self.spaces.audit(&self.unseen);
        assert!(self.card.allocated.is_empty(), "card memory was leaked");
        assert_eq!((self.spaces.card_bytes(), self.spaces.tables()), (0, 0));
    }

    /// Calls [`Self::run`], but saves and restores the spaces after every `every`-th operation.
    #[cfg(test)]
    pub(crate) fn run_restored(mut self, bytes: &[u8], every: usize) {
        for (nth, op) in (1..).zip(bytes.chunks(OP_BYTES).take(MAX_OPS)) {
            self.step(op);
            if nth % every == 0 {
                self.restore();
            }
        }
        self.restore();
        self.run(&[]);
    }

    /// Saves and restores the spaces, as a mediator does after removing all work from the card.
    #[cfg(test)]
    fn restore(&mut self) {
        let ids: Vec<_> = self.spaces.ids().collect();
        let directories: Vec<_> = ids.iter().map(|id| self.spaces.directory(*id)).collect();
        let saved = self.spaces.save();
        let read = postcard::from_bytes(&postcard::to_allocvec(&saved).unwrap()).unwrap();
        let limits = self.spaces.shared.limits;
        let sizes: BTreeMap<u64, usize> = self.card.allocated.iter().map(|(at, held)| (*at, held.len())).collect();
        let owns = |at: VramAddr, bytes| sizes.get(&at.0).is_some_and(|held| *held as u64 == bytes);
        self.spaces = AddressSpaces::restored(read, self.mode, limits, &mut self.card, owns).unwrap();
        assert_eq!(self.spaces.ids().collect::<Vec<_>>(), ids);
        assert_eq!(ids.iter().map(|id| self.spaces.directory(*id)).collect::<Vec<_>>(), directories);
        for page in &self.unseen {
            self.spaces.unseen(GuestVramAddr(*page), true);
        }
        assert_eq!(self.spaces.tables(), 0);
        self.check_all();
        for index in 0..self.open.len() {
            self.prepare(index);
        }
    }

    fn step(&mut self, op: &[u8]) {
        let mut of = Operands(op);
        let kind = of.byte() % 36;
        let space = |this: &Self, of: &mut Operands<'_>| {
            let count = this.open.len() as u64;
            (count != 0).then(|| of.below(count) as usize)
        };
        match kind {
            0..=3 => {
                let place = of.element(&DIRECTORIES);
                let index = of.element(&PDES);
                self.cpu(place, index, of.pde());
            }
            4 => {
                let Some(index) = space(self, &mut of) else { return };
                let (table, at, frame) = (of.byte(), of.below(4), of.byte());
                self.expose(index, table, at, frame);
            }
            5 => {
                let Some(index) = space(self, &mut of) else { return };
                let (at, shape) = (of.below(4), of.byte());
                let late = (1 + of.byte() as usize * 4, of.below(4) * 8, of.pte());
                self.cpu(TABLES[1], at, if shape & 2 == 0 { 0 } else { of.pte() });
                self.flush(index, shape & 1 != 0, Some(late));
                if shape & 4 != 0 {
                    self.flush(index, shape & 1 != 0, None);
                }
            }
            6 => {
                let Some(index) = space(self, &mut of) else { return };
                let (at, shape) = (1024 + of.below(2), of.byte());
                self.withdraw_and_give(index, at, shape);
            }
            7..=10 => {
                let place = of.element(&TABLES);
                let index = of.below(40);
                self.cpu(place, index, of.pte());
            }
            11 => self.fill(of.below(GUEST_VRAM / PAGE) * PAGE, (1 + of.below(3)) * PAGE, of.pte()),
            12..=15 => {
                let Some(index) = space(self, &mut of) else { return };
                let (nth, at) = (of.byte() as usize, of.below(40) * 8);
                let value = if nth & 1 == 0 { of.pte() } else { of.pde() };
                self.gpu(index, nth, at, value);
            }
            16..=19 => {
                let Some(index) = space(self, &mut of) else { return };
                let (busy, late) = (of.byte() & 1 != 0, (of.byte() as usize, of.below(40) * 8));
                let value = of.pte();
                self.flush(index, busy, Some((late.0, late.1, value)));
            }
            20..=22 => {
                let Some(index) = space(self, &mut of) else { return };
                self.prepare(index);
            }
            23 => {
                let first = 0xff0 + of.below(0x80);
                self.withdraw(first, 1 + of.below(50));
            }
            24 => {
                let (first, pages) = (0x1000 + of.below(0x60), 1 + of.below(50));
                self.withdraw(first, pages);
                let iova = of.element(&[0x8000u64, 0x9000, 0x9010, 0xe000]);
                let shape = of.byte();
                self.grants.map(first, iova, pages, shape & 1 != 0);
                self.given(GuestRange::Ram(Gpa(first * PAGE), pages * PAGE), shape & 2 != 0);
            }
            25 => {
                let page = 0x1000 + of.below(16);
                if self.guest.ram.remove(&page).is_none() {
                    self.guest.ram.insert(page, vec![0; PAGE as usize]);
                    self.given(GuestRange::Ram(Gpa(page * PAGE), PAGE), true);
                } else {
                    self.write_untold();
                }
            }
            26 => self.relocate(of.below(8) as usize),
            27 => self.take_or_give(of.below(8) as usize, of.byte() & 1 != 0),
            28 => {
                let place = of.element(&DIRECTORIES);
                if self.open.len() < 4 {
                    self.open(place);
                }
            }
            29 => {
                let Some(index) = space(self, &mut of) else { return };
                self.close(index);
            }
            30 => {
                let Some(index) = space(self, &mut of) else { return };
                let (at, page, shape) = (of.below(3) as u32 * 2047, HOST_PAGE + of.byte() * PAGE, of.byte());
                let at = if shape & 8 == 0 { HostPage::Own(at) } else { HostPage::Shared(at) };
                let Opened { id, host } = &mut self.open[index];
                if shape & 3 == 0 {
                    self.spaces.unmap_host(*id, at, &mut self.card);
                    host.remove(&at);
                } else {
                    let rights = [Rights::ReadOnly, Rights::ReadWrite, Rights::Privileged][(shape & 3) as usize - 1];
                    self.spaces.map_host(*id, at, VramAddr(page), rights, &mut self.card).unwrap();
                    host.insert(at, (page, rights));
                }
                self.check(index, Fit::Isolated);
            }
            32..=33 => {
                let (first, shape) = (of.below(GUEST_VRAM / PAGE), of.byte());
                let first = if shape & 1 == 0 { first & !31 } else { first };
                let pages = [1, 2, 32, 33, 64][(shape >> 4) as usize % 5];
                self.host(first, pages, (shape & 2 == 0).then(|| HOSTED + of.below(3) * 0x70 + (shape >> 2 & 1)));
            }
            34 => {
                let page = [SPT, SPT + PAGE, LPT, DIRECTORY][of.below(4) as usize];
                let unseen = self.unseen.insert(page) || !self.unseen.remove(&page);
                self.spaces.unseen(GuestVramAddr(page), unseen);
            }
            35 => {
                // The CPU writes a page without a report.
                let pages: Vec<u64> = self.unseen.iter().copied().collect();
                let (nth, at) = (of.byte() as usize, of.below(40) * 8);
                let value = if nth & 1 == 0 { of.pte() } else { of.pde() };
                if let Some(page) = nth.checked_rem(pages.len()).map(|nth| pages[nth]) {
                    self.guest.write64(Place::Vram(GuestVramAddr(page + at)), value);
                    self.write_untold();
                }
            }
            _ => {
                // Withdraw memory that the guest still owns, and then grant it again.
                let range = GuestRange::Vram(GuestVramAddr(of.byte() * PAGE), (1 + of.below(64)) * PAGE);
                self.invalidate(range);
                self.given(range, of.byte() & 1 != 0);
            }
        }
    }

    fn cpu(&mut self, place: Place, index: u64, value: u64) {
        let Some(at) = place.checked_add(index * 8) else { return };
        self.guest.write64(at, value);
        match at {
            Place::Vram(at) => self.spaces.written(at, 8),
            Place::Ram(_) => self.write_untold(),
        }
    }

    /// Records an unreported write.
    fn write_untold(&mut self) {
        self.untold.extend(self.spaces.ids());
    }

    /// Makes a guest entry map a page of a table or directory as writable.
    fn expose(&mut self, index: usize, table: u64, at: u64, frame: u64) {
        let directory = self.spaces.guest_directory(self.open[index].id).unwrap();
        self.cpu(directory, 0, 1 | 3 << 2 | (LPT >> 12) << 4 | 1 << 32 | (SPT >> 12) << 36);
        let page = [SPT, SPT, LPT, directory.address()][frame as usize % 4] / PAGE;
        if table & 7 == 0 {
            self.cpu(TABLES[0], at, 1 | (page & !31) << 4);
        } else {
            self.cpu(TABLES[1], at, 1 | page << 4);
        }
        self.prepare(index);
    }

    /// Withdraws RAM, and grants it again. In between, the guest may unmap the RAM and flush its TLB. `at` selects an
    /// entry in a page with few other entries, so that the page may have no permissions to lose.
    fn withdraw_and_give(&mut self, index: usize, at: u64, shape: u64) {
        let directory = self.spaces.guest_directory(self.open[index].id).unwrap();
        self.cpu(directory, 0, 3 << 2 | 1 << 32 | (SPT >> 12) << 36);
        self.cpu(TABLES[1], at, 1 | 0x1008 << 4 | 2 << 33);
        self.prepare(index);
        let given = self.grants.ram.get(&0x1008).copied();
        self.withdraw(0x1008, 1);
        if shape & 1 != 0 {
            self.cpu(TABLES[1], at, 0);
        }
        if shape & 2 != 0 {
            self.flush(index, shape & 4 != 0, None);
        }
        self.grants.ram.extend(given.map(|given| (0x1008, given)));
        self.given(GuestRange::Ram(Gpa(0x1008 * PAGE), PAGE), shape & 8 != 0);
        let soundness = match self.mode {
            Mode::Lazy => Fit::Isolated,
            _ if shape & 2 == 0 => Fit::Isolated,
            _ => Fit::Sound,
        };
        self.check(index, soundness);
    }

    fn fill(&mut self, start: u64, len: u64, value: u64) {
        for at in (start..start + len).step_by(8) {
            // Consecutive entries refer to consecutive pages, as if a driver had filled the table.
            let value = if value & 1 == 0 { 0 } else { value.wrapping_add(((at / 8) % 64) << 4) };
            self.guest.write64(Place::Vram(GuestVramAddr(at)), value);
        }
        self.spaces.written(GuestVramAddr(start), len);
    }

    /// Returns the guest pages that a space's shadow maps as writable.
    fn writable(&self, index: usize) -> Vec<Place> {
        let directory = self.spaces.directory(self.open[index].id).unwrap().0;
        let pages = reachable(&self.card, directory).into_iter().filter(|page| !page.read_only);
        let places = pages.filter_map(|page| match page.aperture {
            0 => self.grants.guest_vram(page.address).map(|at| Place::Vram(GuestVramAddr(at))),
            _ => {
                let ram = self.grants.guest_ram(page.address).map(|at| Place::Ram(Gpa(at)));
                ram.or_else(|| self.grants.hosted_vram(page.address).map(|at| Place::Vram(GuestVramAddr(at))))
            }
        });
        let mut places: Vec<Place> = places.collect();
        // Prefer pages that contain tables, because they matter most.
        places.sort_by_key(|place| {
            let table = TABLES.iter().chain(&DIRECTORIES).any(|table| table == place);
            (!table, *place)
        });
        places.dedup();
        places
    }

    /// Writes a page that the shadow maps as writable, as the GPU would, without a report.
    fn gpu(&mut self, index: usize, nth: usize, at: u64, value: u64) {
        let places = self.writable(index);
        if let Some(place) = pick(&places, nth) {
            self.guest.write64(place.checked_add(at).unwrap(), value);
            self.write_untold();
        }
    }

    fn flush(&mut self, index: usize, busy: bool, late: Option<(usize, u64, u64)>) {
        let id = self.open[index].id;
        let before = self.writable(index);
        let report = self.spaces.flush(
            id,
            busy,
            &mut Parts { guest: &mut self.guest, frames: &mut self.grants, memory: &mut self.card },
        );
        self.untold.remove(&id);
        let fit = match (self.mode, busy) {
            (Mode::Lazy, false) => {
                assert!(!report.changed());
                Fit::Isolated
            }
            (Mode::LazyAdd, false) => Fit::Sound,
            _ => Fit::Exact,
        };
        self.check(index, fit);
        if late.is_some_and(|(nth, ..)| nth & 32 != 0) {
            // The card's TLBs are not flushed between these calls.
            self.spaces.flush(
                id,
                busy,
                &mut Parts { guest: &mut self.guest, frames: &mut self.grants, memory: &mut self.card },
            );
            self.check(index, fit);
        }
        if let Some((nth, at, value)) = late
            && let Some(place) = pick(&before, nth).filter(|_| nth & 1 == 1)
        {
            // The GPU writes through stale TLB entries.
            self.guest.write64(place.checked_add(at).unwrap(), value);
            self.write_untold();
        }
        self.spaces.flushed(id, &mut self.card);
    }

    fn prepare(&mut self, index: usize) -> crate::SyncReport {
        let id = self.open[index].id;
        if self.spaces.is_settled(id) && !self.untold.remove(&id) {
            // A caller need not prepare a settled space before its work runs.
            self.check(index, Fit::Exact);
        }
        self.untold.remove(&id);
        let report = self
            .spaces
            .prepare(id, &mut Parts { guest: &mut self.guest, frames: &mut self.grants, memory: &mut self.card });
        self.check(index, Fit::Exact);
        self.spaces.flushed(id, &mut self.card);
        report
    }

    fn invalidate(&mut self, range: GuestRange) {
        let mut withdrawal = self.spaces.withdraw(range);
        let mut all = std::collections::BTreeSet::new();
        while let Some((touched, report)) = self.spaces.invalidate(&mut withdrawal, &mut self.card) {
            assert_eq!(touched.is_empty(), !report.changed());
            all.extend(touched);
        }
        self.check_all();
        for id in all {
            self.spaces.flushed(id, &mut self.card);
        }
    }

    /// Reports that a range now belongs to the guest: this exact range if `exactly` is true, or only that memory was
    /// granted otherwise.
    fn given(&mut self, range: GuestRange, exactly: bool) {
        if exactly {
            self.retranslate(range);
        } else {
            self.spaces.granted();
        }
    }

    fn retranslate(&mut self, range: GuestRange) {
        let (touched, report) = self.spaces.retranslate(
            range,
            &mut Parts { guest: &mut self.guest, frames: &mut self.grants, memory: &mut self.card },
        );
        assert_eq!(touched.is_empty(), !report.changed());
        self.check_all();
        for id in touched {
            self.spaces.flushed(id, &mut self.card);
        }
    }

    fn withdraw(&mut self, first: u64, pages: u64) {
        for page in first..first + pages {
            self.grants.ram.remove(&page);
        }
        self.invalidate(GuestRange::Ram(Gpa(first * PAGE), pages * PAGE));
    }

    /// Moves a chunk to another address on the card.
    fn relocate(&mut self, chunk: usize) {
        let Some(old) = self.grants.chunks[chunk] else { return };
        let new = self.spare.remove(0);
        self.spare.push(old);
        self.grants.chunks[chunk] = Some(new);
        self.retranslate(GuestRange::Vram(GuestVramAddr(chunk as u64 * LARGE), LARGE));
    }

    /// Moves VRAM pages to host memory starting at I/O page `to`, or back to the card.
    fn host(&mut self, first: u64, pages: u64, to: Option<u64>) {
        let pages = first..(first + pages).min(GUEST_VRAM / PAGE);
        let places = to.map(|to| to..to + (pages.end - pages.start));
        // First, move other pages away from the destination.
        let others =
            self.grants.hosted.iter().filter(|(page, at)| {
                !pages.contains(page) && places.as_ref().is_some_and(|places| places.contains(at))
            });
        for page in others.map(|(page, _)| *page).collect::<Vec<_>>() {
            self.grants.hosted.remove(&page);
            self.retranslate(GuestRange::Vram(GuestVramAddr(page * PAGE), PAGE));
        }
        for page in pages.clone() {
            self.grants.hosted.remove(&page);
        }
        self.grants.hosted.extend(pages.clone().zip(places.into_iter().flatten()));
        self.retranslate(GuestRange::Vram(GuestVramAddr(pages.start * PAGE), (pages.end - pages.start) * PAGE));
    }

    fn take_or_give(&mut self, chunk: usize, exactly: bool) {
        let range = GuestRange::Vram(GuestVramAddr(chunk as u64 * LARGE), LARGE);
        if let Some(old) = self.grants.chunks[chunk].take() {
            self.spare.push(old);
            self.guest.gone |= 1 << chunk;
            self.invalidate(range);
        } else {
            self.grants.chunks[chunk] = Some(self.spare.remove(0));
            self.guest.gone &= !(1 << chunk);
            self.given(range, exactly);
        }
    }

    fn open(&mut self, place: Place) {
        let known = self.spaces.find(place);
        let id = self.spaces.open(place, &mut self.card).unwrap();
        assert_eq!(self.spaces.guest_directory(id), Some(place));
        assert_eq!((known.is_some(), self.spaces.find(place)), (self.open.iter().any(|open| open.id == id), Some(id)));
        if known.is_none() {
            self.open.push(Opened { id, host: HostPages::new() });
            self.check(self.open.len() - 1, Fit::Sound);
        }
    }

    fn close(&mut self, index: usize) {
        let Opened { id, .. } = self.open.remove(index);
        self.spaces.close(id, &mut self.card);
        assert_eq!((self.spaces.directory(id), self.spaces.guest_directory(id)), (None, None));
        let report = self
            .spaces
            .prepare(id, &mut Parts { guest: &mut self.guest, frames: &mut self.grants, memory: &mut self.card });
        assert_eq!(report, crate::SyncReport::default());
        self.spaces.flushed(id, &mut self.card);
    }

    fn check_all(&self) {
        for index in 0..self.open.len() {
            self.check(index, Fit::Isolated);
        }
    }

    fn check(&self, index: usize, fit: Fit) {
        // The next table may not have fitted. A missing table is created only by a later change.
        if self.spaces.card_bytes() + MAX_TABLE_BYTES > TABLE_BYTES {
            self.lacks_tables.set(true);
        }
        let fit = if self.lacks_tables.get() && fit == Fit::Exact { Fit::Sound } else { fit };
        let Self { guest, grants, card, spaces, open, .. } = self;
        let Opened { id, host } = &open[index];
        View { guest, grants, card, spaces, id: *id, host }.check(fit);
    }
}

/// Selects one of the places. Half of the values of `nth` select one of the first four.
fn pick(places: &[Place], nth: usize) -> Option<Place> {
    let among = if nth & 2 == 0 { places.len().min(4) } else { places.len() };
    (nth / 4).checked_rem(among).map(|index| places[index])
}
