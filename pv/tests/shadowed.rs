//! Tests that `shadow-pt` processes the tables of a paravirtual guest in the same way as those of other guests. Some
//! entries take effect on the card, and others are denied.

use nvspec::addr::{Gpa, GpuVa, GuestVramAddr, Iova, Place, VramAddr};
use pv::{Kind, TableId, Tables};
use shadow_pt::{
    AddressSpaces, Denial, Frame, Frames, GuestMemory, Limits, Mode, Parts, ShadowMemory, SpaceId, Unreadable,
};
use std::collections::BTreeMap;

const PAGE: u64 = 4096;
const VRAM: u64 = 4 << 20;
/// Start of guest VRAM on the card.
const ON_CARD: u64 = 0x1000_0000;
const SHADOWS: u64 = 0x8000_0000;
const INSTANCE: GuestVramAddr = GuestVramAddr(0x1000);
const DIRECTORY: u32 = 1;
const SMALL_TABLE: u32 = 2;
const LARGE_TABLE: u32 = 3;

/// Grants for a guest without RAM, with contiguous VRAM.
struct Grants;

impl Frames for Grants {
    fn vram(&mut self, address: GuestVramAddr, len: u64) -> Option<Frame> {
        (address.0.checked_add(len)? <= VRAM).then_some(Frame::Vram(VramAddr(ON_CARD + address.0)))
    }

    fn ram(&mut self, _: Gpa, _: u64, _: bool) -> Option<Iova> {
        None
    }
}

/// A guest in which only table space is readable.
struct Guest<'a>(&'a Tables);

impl GuestMemory for Guest<'_> {
    fn read(&mut self, place: Place, data: &mut [u8]) -> Result<(), Unreadable> {
        match place {
            Place::Vram(address) => self.0.read(address, data).map_err(|_| Unreadable),
            Place::Ram(_) => Err(Unreadable),
        }
    }
}

#[derive(Default)]
struct Card(BTreeMap<u64, u64>, u64);

impl ShadowMemory for Card {
    fn alloc(&mut self, bytes: u64) -> Option<VramAddr> {
        self.1 += bytes.next_multiple_of(PAGE);
        Some(VramAddr(SHADOWS + self.1 - bytes.next_multiple_of(PAGE)))
    }

    fn free(&mut self, _: VramAddr, _: u64) {}

    fn write(&mut self, address: VramAddr, data: &[u8]) {
        let entries = data.as_chunks().0.iter().map(|entry| u64::from_le_bytes(*entry));
        self.0.extend((address.0..).step_by(8).zip(entries));
    }
}

impl Card {
    fn entry(&self, table: u64, index: u64) -> u64 {
        self.0.get(&(table + index * 8)).copied().unwrap_or(0)
    }
}

/// A guest with an address space, and the mediator code that handles its flushes.
struct Rig {
    tables: Tables,
    spaces: AddressSpaces,
    space: SpaceId,
    card: Card,
}

fn id(handle: u32) -> TableId {
    TableId::new(handle).unwrap()
}

impl Rig {
    fn new(mode: Mode) -> Self {
        let mut tables = Tables::new(GuestVramAddr(VRAM), 1 << 20);
        for (handle, kind) in [(DIRECTORY, Kind::Directory), (SMALL_TABLE, Kind::Small), (LARGE_TABLE, Kind::Large)] {
            tables.create(id(handle), kind).unwrap();
        }
        tables.set(id(DIRECTORY), 1, Some(id(SMALL_TABLE)), Some(id(LARGE_TABLE))).unwrap();
        tables.bind(id(DIRECTORY), INSTANCE).unwrap();
        let mut spaces = AddressSpaces::new(mode, Limits { table_bytes: 4 << 20 });
        let mut card = Card::default();
        let directory = tables.directory_of(INSTANCE).unwrap();
        let space = spaces.open(Place::Vram(directory), &mut card).unwrap();
        Self { tables, spaces, space, card }
    }

    /// Handles a guest TLB flush, and returns the numbers of denied entries by reason.
    fn flush(&mut self) -> [u64; 3] {
        self.tables.take_written(|address, bytes| self.spaces.written(address, bytes));
        let world = &mut Parts { guest: &mut Guest(&self.tables), frames: &mut Grants, memory: &mut self.card };
        let report = self.spaces.flush(self.space, true, world);
        self.spaces.flushed(self.space, &mut self.card);
        [Denial::Vram, Denial::Table, Denial::Ram].map(|reason| report.denied.count_of(reason))
    }

    /// Translates a GPU virtual address to a VRAM address.
    fn walk(&self, address: GpuVa) -> Option<u64> {
        let directory = self.spaces.directory(self.space)?;
        let pde = self.card.entry(directory.0, address.0 >> 27);
        let frame = |entry: u64| (entry >> 4 & 0xfff_ffff) << 12;
        let large = if pde & 3 == 1 { self.card.entry(frame(pde), address.0 >> 17 & 0x3ff) } else { 0 };
        let small = if pde >> 32 & 3 == 1 { self.card.entry(pde >> 36 << 12, address.0 >> 12 & 0x7fff) } else { 0 };
        match (large & 1, small & 1) {
            (1, _) => Some(frame(large) + address.0 % 0x2_0000),
            (_, 1) => Some(frame(small) + address.0 % PAGE),
            _ => None,
        }
    }
}

/// Returns an entry for a page of guest VRAM.
fn pte(address: u64) -> u64 {
    1 | (address >> 12) << 4
}

fn at(index: u64, page: u64) -> GpuVa {
    GpuVa((1 << 27) + index * page)
}

#[test]
fn entries_of_both_sizes_reach_the_card_translated() {
    for mode in [Mode::Naive, Mode::Incremental, Mode::LazyAdd] {
        let mut rig = Rig::new(mode);
        rig.tables.run(id(SMALL_TABLE), 600, 3, pte(0x5000), 0x10).unwrap();
        rig.tables.run(id(LARGE_TABLE), 700, 2, pte(0x2_0000), 0x200).unwrap();
        assert_eq!(rig.flush(), [0; 3]);
        assert_eq!(rig.walk(at(599, PAGE)), None);
        assert_eq!(rig.walk(at(602, PAGE)), Some(ON_CARD + 0x7000));
        assert_eq!(rig.walk(at(701, 0x2_0000)), Some(ON_CARD + 0x4_0000));
    }
}

#[test]
fn zeroed_entries_leave_card_after_flush() {
    for mode in [Mode::Naive, Mode::Incremental, Mode::LazyAdd] {
        let mut rig = Rig::new(mode);
        rig.tables.run(id(SMALL_TABLE), 0, 1024, pte(0x1000), 0).unwrap();
        rig.flush();
        rig.tables.zero(id(SMALL_TABLE), 511, 2).unwrap();
        rig.flush();
        let mapped = [510, 511, 512, 513].map(|index| rig.walk(at(index, PAGE)).is_some());
        assert_eq!(mapped, [true, false, false, true]);
    }
}

#[test]
fn entries_to_table_space_or_past_vram_do_not_reach_card() {
    let mut rig = Rig::new(Mode::default());
    let directory = rig.tables.directory_of(INSTANCE).unwrap();
    let entries = [pte(directory.0), pte(VRAM), pte(VRAM - PAGE), pte(0xff_ffff_f000)];
    rig.tables.list(id(SMALL_TABLE), 0, &entries.map(zerocopy::little_endian::U64::new)).unwrap();
    assert_eq!(rig.flush(), [3, 0, 0]);
    let mapped = [0, 1, 2, 3].map(|index| rig.walk(at(index, PAGE)));
    assert_eq!(mapped, [None, None, Some(ON_CARD + VRAM - PAGE), None]);
}

#[test]
fn removed_table_maps_nothing_and_successor_only_its_entries() {
    for mode in [Mode::Naive, Mode::Incremental, Mode::LazyAdd] {
        let mut rig = Rig::new(mode);
        rig.tables.run(id(SMALL_TABLE), 0, 2, pte(0x1000), 0x10).unwrap();
        rig.flush();
        rig.tables.destroy(id(SMALL_TABLE)).unwrap();
        rig.flush();
        assert_eq!(rig.walk(at(1, PAGE)), Some(ON_CARD + 0x2000), "the directory still refers to the table");
        rig.tables.set(id(DIRECTORY), 1, None, None).unwrap();
        rig.tables.create(id(SMALL_TABLE), Kind::Small).unwrap();
        rig.tables.set(id(DIRECTORY), 1, Some(id(SMALL_TABLE)), None).unwrap();
        rig.tables.run(id(SMALL_TABLE), 1, 1, pte(0x9000), 0).unwrap();
        rig.flush();
        assert_eq!((rig.walk(at(0, PAGE)), rig.walk(at(1, PAGE))), (None, Some(ON_CARD + 0x9000)));
        rig.tables.clear();
        assert_eq!(rig.flush(), [0, 1, 0], "the directory no longer exists");
        assert_eq!(rig.walk(at(1, PAGE)), None);
    }
}
