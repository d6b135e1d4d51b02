use super::*;
use crate::tests::world::{self, Card, GUEST_VRAM, Grants, Guest, LARGE, PAGE, reachable};
use proptest::prelude::*;

const DIRECTORY: u64 = 0x1_0000;
/// Two tables of each size. The small ones are shortened to an eighth by the directory entry, to 32 KiB.
const LPT: u64 = 0x2_0000;
const SPT: u64 = 0x3_0000;
const EIGHTH: u64 = 3 << 2;

struct World {
    guest: Guest,
    grants: Grants,
    card: Card,
    shadow: Shadow,
}

fn vram(at: u64) -> Place {
    Place::Vram(GuestVramAddr(at))
}

fn pde(large: Option<u64>, small: Option<u64>, size: u64) -> u64 {
    let large = large.map_or(0, |at| 1 | (at >> 12) << 4);
    large | size | small.map_or(0, |at| (1 << 32) | (at >> 12) << 36)
}

fn pte(aperture: u64, address: u64) -> u64 {
    1 | (address >> 12) << 4 | aperture << 33
}

impl World {
    fn new() -> Self {
        Self::with(Limits { reserved: 8191..8192, table_bytes: 4 << 20 })
    }

    fn with(limits: Limits) -> Self {
        let mut card = Card::default();
        let mut grants = Grants::default();
        // Writable, writable but in two pieces, to read only.
        grants.map(0x1000, 0x8000, 64, true);
        grants.map(0x1040, 0x9000, 32, true);
        grants.map(0x2000, 0xb000, 32, false);
        let shadow = Shadow::new(vram(DIRECTORY), limits, &mut card).unwrap();
        Self { guest: Guest::new(), grants, card, shadow }
    }

    /// One directory entry with both tables.
    fn mapped() -> Self {
        let mut world = Self::new();
        world.guest.write64(vram(DIRECTORY), pde(Some(LPT), Some(SPT), EIGHTH));
        world
    }

    fn sync(&mut self) -> SyncReport {
        let report = self.shadow.sync(&mut self.guest, &self.grants, &mut self.card);
        self.shadow.flushed(&mut self.card);
        report
    }

    fn invalidate(&mut self, range: GuestRange) -> SyncReport {
        let report = self.shadow.invalidate(range, &mut self.card);
        self.shadow.flushed(&mut self.card);
        report
    }

    /// Where the card ends up at `va`: aperture and address.
    fn at(&self, va: u64) -> Option<(u64, u64)> {
        self.page(va).map(|page| (page.aperture, page.address))
    }

    fn page(&self, va: u64) -> Option<world::Page> {
        world::walk((false, self.shadow.directory().0), va, &|ram, at| {
            assert!(!ram, "the card walks host memory");
            Some(self.card.read64(at))
        })
    }

    fn guest_page(&self, va: u64) -> Option<world::Page> {
        world::walk((false, DIRECTORY), va, &|ram, at| self.guest.read64(ram, at))
    }

    /// Invariant 1.
    fn check_isolation(&self) {
        for page in reachable(&self.card, self.shadow.directory().0) {
            match page.aperture {
                0 => assert!(self.grants.owns_vram(page.address), "foreign VRAM {page:x?}"),
                1 => panic!("another card's memory {page:x?}"),
                _ => assert!(self.grants.owns_ram(page.address, !page.read_only), "foreign RAM {page:x?}"),
            }
        }
    }
}

#[test]
fn nothing_is_mapped_before_the_first_synchronisation() {
    let world = World::mapped();
    assert!(reachable(&world.card, world.shadow.directory().0).is_empty());
}

#[test]
fn legal_entries_of_both_sizes_are_translated() {
    let mut world = World::mapped();
    world.guest.write64(vram(LPT + 3 * 8), pte(0, 2 * LARGE));
    world.guest.write64(vram(SPT + 5 * 8), pte(0, LARGE + PAGE));
    world.guest.write64(vram(SPT + 6 * 8), pte(2, 0x1003 * PAGE));
    let report = world.sync();
    assert_eq!(world.at(3 * LARGE + 7 * PAGE), Some((0, 7 * LARGE + 7 * PAGE)));
    assert_eq!(world.at(5 * PAGE), Some((0, 41 * LARGE + PAGE)));
    assert_eq!(world.at(6 * PAGE), Some((2, 0x8003 * PAGE)));
    assert_eq!(world.at(7 * PAGE), None);
    assert_eq!((report.denied.total(), report.lost_permission, report.tables_scanned), (0, false, 3));
    // The directory, 1024/8 large entries, 32768/8 small ones.
    assert_eq!(report.bytes_scanned, 0x1_0000 + 0x400 + 0x8000);
    world.check_isolation();
}

#[test]
fn what_did_not_change_is_not_written() {
    let mut world = World::mapped();
    for index in 0..100 {
        world.guest.write64(vram(SPT + index * 8), pte(0, index * PAGE));
    }
    let first = world.sync();
    // One entry of the directory, one run of 100.
    assert_eq!((first.entries_written, first.writes), (101, 2));
    let second = world.sync();
    assert_eq!((second.entries_written, second.writes), (0, 0));
    world.guest.write64(vram(SPT + 50 * 8), pte(0, 0));
    let third = world.sync();
    assert_eq!((third.entries_written, third.writes, third.lost_permission), (1, 1, true));
}

#[test]
fn unmapped_is_unreachable_after_the_flush() {
    let mut world = World::mapped();
    world.guest.write64(vram(SPT), pte(0, 0));
    world.guest.write64(vram(SPT + 8), pte(0, PAGE));
    world.sync();
    world.guest.write64(vram(SPT), 0);
    assert!(world.sync().lost_permission);
    assert_eq!((world.at(0), world.at(PAGE)), (None, Some((0, 40 * LARGE + PAGE))));
    world.guest.write64(vram(SPT + 8), pte(0, PAGE) | 4);
    assert!(world.sync().lost_permission);
    assert!(world.page(PAGE).unwrap().read_only);
    world.guest.write64(vram(DIRECTORY), 0);
    assert!(world.sync().lost_permission);
    assert_eq!(world.at(PAGE), None);
    // Only the directory is left.
    assert_eq!(world.card.allocated.len(), 1);
    assert_eq!(world.shadow.card_bytes(), PD_BYTES);
}

#[test]
fn gaining_is_not_losing() {
    let mut world = World::mapped();
    world.guest.write64(vram(SPT), pte(0, 0) | 4);
    world.sync();
    world.guest.write64(vram(SPT), pte(0, 0));
    world.guest.write64(vram(SPT + 8), pte(0, 0));
    assert!(!world.sync().lost_permission);
    assert!(!world.page(0).unwrap().read_only);
}

#[test]
fn losses_are_written_before_gains() {
    let mut world = World::mapped();
    world.guest.write64(vram(SPT + 100 * 8), pte(0, 0));
    world.sync();
    world.card.writes.clear();
    world.guest.write64(vram(SPT), pte(0, 0));
    world.guest.write64(vram(SPT + 100 * 8), 0);
    world.sync();
    let written: Vec<u64> =
        world.card.writes.iter().map(|(_, data)| u64::from_le_bytes(data[..8].try_into().unwrap()) & 1).collect();
    assert_eq!(written, [0, 1]);
}

#[test]
fn a_new_table_is_filled_before_it_is_linked() {
    let mut world = World::mapped();
    world.guest.write64(vram(SPT), pte(0, 0));
    world.sync();
    let linked = world.card.writes.iter().position(|(at, _)| *at == world.shadow.directory().0).unwrap();
    assert_eq!(linked, world.card.writes.len() - 1);
    assert_eq!(world.card.writes.len(), 2);
}

#[test]
fn tables_are_freed_only_after_the_flush() {
    let mut world = World::mapped();
    world.sync();
    world.guest.write64(vram(DIRECTORY), 0);
    world.shadow.sync(&mut world.guest, &world.grants, &mut world.card);
    assert!(world.card.freed.is_empty(), "the card's TLB may still walk it");
    world.shadow.flushed(&mut world.card);
    assert_eq!(world.card.freed.len(), 2);
}

#[test]
fn denied_entries_are_counted_once_and_never_reach_the_card() {
    let mut world = World::mapped();
    world.guest.write64(vram(SPT), pte(0, GUEST_VRAM));
    world.guest.write64(vram(SPT + 8), pte(1, 0));
    world.guest.write64(vram(SPT + 16), pte(2, 0x7777 * PAGE));
    world.guest.write64(vram(SPT + 24), pte(0, 0) | (0xff << 36));
    world.guest.write64(vram(LPT + 8), pte(2, 0x1030 * PAGE));
    world.guest.write64(vram(LPT + 16), pte(0, PAGE));
    let denied = world.sync().denied;
    for (reason, count) in
        [(Denial::Vram, 1), (Denial::Peer, 1), (Denial::Ram, 1), (Denial::Kind, 1), (Denial::Unaligned, 2)]
    {
        assert_eq!(denied.of(reason), count, "{}", reason.name());
    }
    assert!(reachable(&world.card, world.shadow.directory().0).is_empty());
    assert_eq!(world.sync().denied.total(), 0, "nothing is new");
}

#[test]
fn a_large_page_of_ram_needs_every_piece() {
    let mut world = World::mapped();
    world.guest.write64(vram(LPT), pte(2, 0x1020 * PAGE));
    world.guest.write64(vram(LPT + 8), pte(2, 0x1000 * PAGE));
    // 32 pages of which the last 16 lie elsewhere for the card.
    world.grants.map(0x1050, 0xc000, 16, true);
    world.guest.write64(vram(LPT + 16), pte(2, 0x1040 * PAGE));
    assert_eq!(world.sync().denied.of(Denial::Ram), 1);
    assert_eq!(world.at(31 * PAGE), Some((2, 0x803f * PAGE)));
    assert_eq!(world.at(2 * LARGE), None);
    world.check_isolation();
}

#[test]
fn withdrawn_ram_is_unreachable_at_once_and_comes_back_when_granted() {
    let mut world = World::mapped();
    world.guest.write64(vram(SPT), pte(2, 0x1000 * PAGE));
    world.guest.write64(vram(SPT + 8), pte(0, GUEST_VRAM - PAGE));
    world.guest.write64(vram(LPT + 8), pte(3, 0x1000 * PAGE));
    world.sync();
    // One byte of it is enough.
    let report = world.invalidate(GuestRange::Ram(Gpa(0x101f * PAGE + 0xfff), 1));
    assert_eq!((report.entries_written, report.lost_permission), (1, true));
    assert_eq!((world.at(LARGE), world.at(0).is_some()), (None, true));
    world.invalidate(GuestRange::Ram(Gpa(0x1000 * PAGE), 64 * PAGE));
    assert_eq!((world.at(0), world.at(PAGE).is_some()), (None, true));
    for page in 0x1000..0x1040 {
        world.grants.ram.remove(&page);
    }
    assert_eq!(world.sync().denied.total(), 0, "the guest has written nothing new");
    assert_eq!(world.at(0), None);
    world.grants.map(0x1000, 0xd000, 64, true);
    world.sync();
    assert_eq!(world.at(0), Some((2, 0xd000 * PAGE)));
    assert_eq!(world.at(LARGE + PAGE), Some((3, 0xd001 * PAGE)));
}

#[test]
fn withdrawn_vram_is_unreachable_at_once() {
    let mut world = World::mapped();
    world.guest.write64(vram(SPT), pte(0, LARGE));
    world.guest.write64(vram(SPT + 8), pte(2, 0x1000 * PAGE));
    world.guest.write64(vram(LPT + 8), pte(0, LARGE));
    world.sync();
    let report = world.invalidate(GuestRange::Vram(GuestVramAddr(LARGE), LARGE));
    assert_eq!(report.entries_written, 2);
    assert_eq!((world.at(0), world.at(LARGE), world.at(PAGE).is_some()), (None, None, true));
}

#[test]
fn a_directory_that_is_its_own_table_names_only_what_its_bytes_mean() {
    let mut world = World::new();
    let own = pde(Some(DIRECTORY), Some(DIRECTORY), 0);
    world.guest.write64(vram(DIRECTORY), own);
    world.guest.write64(vram(DIRECTORY + 8), pte(0, 3 * LARGE));
    world.sync();
    // As entries, the first is frame 0x10 of VRAM with the low bits of a kind that the chip does not have or has.
    assert_eq!(world.at(PAGE), Some((0, 90 * LARGE)));
    world.check_isolation();
}

#[test]
fn a_table_that_many_entries_name_is_read_once_and_kept_once() {
    let mut world = World::new();
    for index in 0..8191 {
        world.guest.write64(vram(DIRECTORY + index * 8), pde(None, Some(SPT), EIGHTH));
    }
    world.guest.write64(vram(SPT), pte(0, 0));
    let report = world.sync();
    assert_eq!(report.tables_scanned, 2);
    assert_eq!(world.shadow.card_bytes(), PD_BYTES + 0x8000);
    assert_eq!(world.at(5 << 27), Some((0, 40 * LARGE)));
    assert_eq!(world.at(8190 << 27), Some((0, 40 * LARGE)));
}

#[test]
fn tables_in_ram_are_tables() {
    let mut world = World::new();
    for page in 0x1000..0x1008 {
        world.guest.ram.insert(page, vec![0; 4096]);
    }
    let at = 0x1000 * PAGE;
    world.guest.write64(vram(DIRECTORY), EIGHTH | (2 << 32) | (at >> 12) << 36);
    world.guest.write64(Place::Ram(Gpa(at + 8)), pte(2, at));
    world.sync();
    assert_eq!(world.at(PAGE), Some((2, 0x8000 * PAGE)));
    // The RAM goes: the table is no more.
    world.guest.ram.clear();
    let report = world.sync();
    assert_eq!((report.denied.of(Denial::Table), report.lost_permission), (1, true));
    assert_eq!(world.at(PAGE), None);
    assert_eq!(world.sync().denied.total(), 0);
}

#[test]
fn a_table_that_ends_beyond_the_guests_memory_is_taken_as_far_as_it_goes() {
    let mut world = World::new();
    let last = GUEST_VRAM - PAGE;
    world.guest.write64(vram(DIRECTORY), pde(None, Some(last), 0));
    world.guest.write64(vram(last), pte(0, 0));
    let report = world.sync();
    assert_eq!((report.denied.total(), report.bytes_scanned), (0, 0x1_0000 + PAGE));
    assert_eq!(world.at(0), Some((0, 40 * LARGE)));
    world.guest.write64(vram(DIRECTORY), pde(None, Some(GUEST_VRAM), 0));
    assert_eq!(world.sync().denied.of(Denial::Table), 1);
    assert_eq!(world.at(0), None);
}

#[test]
fn a_directory_beyond_the_guests_memory_maps_nothing() {
    for place in [vram(GUEST_VRAM), vram(!0xfff), Place::Ram(Gpa(0x5000))] {
        let mut card = Card::default();
        let limits = Limits { reserved: 0..0, table_bytes: 1 << 20 };
        let mut shadow = Shadow::new(place, limits, &mut card).unwrap();
        let report = shadow.sync(&mut Guest::new(), &Grants::default(), &mut card);
        assert_eq!((report.denied.of(Denial::Table), report.writes), (1, 0));
        let again = shadow.sync(&mut Guest::new(), &Grants::default(), &mut card);
        assert_eq!(again.denied.total(), 0);
    }
}

#[test]
fn reserved_entries_stay_the_hosts() {
    let mut world = World::new();
    world.guest.write64(vram(DIRECTORY + 8191 * 8), pde(Some(LPT), None, EIGHTH));
    world.guest.write64(vram(LPT), pte(0, 0));
    let report = world.sync();
    assert_eq!((report.denied.of(Denial::Reserved), report.writes), (1, 0));
    assert_eq!(world.at(8191 << 27), None);
    assert_eq!(world.sync().denied.total(), 0);
}

#[test]
fn tables_beyond_the_limit_are_absent_and_what_was_there_stays() {
    let mut world = World::with(Limits { reserved: 0..0, table_bytes: 0x8000 });
    world.guest.write64(vram(DIRECTORY), pde(None, Some(SPT), EIGHTH));
    world.guest.write64(vram(SPT), pte(0, 0));
    world.sync();
    // A table that sorts before the first.
    world.guest.write64(vram(DIRECTORY + 8), pde(None, Some(LPT), EIGHTH));
    assert_eq!(world.sync().denied.of(Denial::Limit), 1);
    assert_eq!((world.at(0).is_some(), world.at(1 << 27)), (true, None));
    assert_eq!(world.shadow.card_bytes(), PD_BYTES + 0x8000);
    // Room again.
    world.guest.write64(vram(DIRECTORY), 0);
    world.sync();
    world.guest.write64(vram(LPT), pte(0, 0));
    world.sync();
    assert_eq!((world.at(0), world.at(1 << 27).is_some()), (None, true));
}

#[test]
fn a_card_without_memory_leaves_entries_absent() {
    let mut world = World::mapped();
    world.guest.write64(vram(SPT), pte(0, 0));
    world.guest.write64(vram(LPT + 8), pte(0, LARGE));
    world.card.room = Some(1);
    assert_eq!(world.sync().denied.of(Denial::Limit), 1);
    // Keys are taken in the order of their places: the large table has got the memory.
    assert_eq!((world.at(0), world.at(LARGE).is_some()), (None, true));
    world.card.room = None;
    world.sync();
    assert!(world.at(0).is_some());
    assert!(matches!(
        Shadow::new(vram(0), Limits { reserved: 0..0, table_bytes: 0 }, &mut Card { room: Some(0), ..Card::default() }),
        Err(NoMemory)
    ));
}

#[test]
fn destroying_frees_everything() {
    let mut world = World::mapped();
    world.sync();
    world.guest.write64(vram(DIRECTORY), pde(None, Some(SPT), EIGHTH));
    world.shadow.sync(&mut world.guest, &world.grants, &mut world.card);
    world.shadow.destroy(&mut world.card);
    assert!(world.card.allocated.is_empty());
}

#[derive(Clone, Debug)]
enum Op {
    Pde { index: u64, raw: u64 },
    Pte { table: u64, index: u64, raw: u64 },
    Sync,
    Withdraw { first: u64, pages: u64 },
    Grant { first: u64, iova: u64, pages: u64, writable: bool },
}

/// Places for tables, some of which overlap, are the directory, lie half or wholly outside, or in RAM.
const PLACES: [u64; 8] =
    [LPT, SPT, SPT + 0x1000, DIRECTORY, GUEST_VRAM - 0x1000, GUEST_VRAM, 0x1000 * PAGE, 0x2000 * PAGE];

fn any_pde() -> impl Strategy<Value = u64> {
    let half = || (0u64..4, prop::sample::select(&PLACES[..]));
    prop_oneof![
        6 => (half(), half(), 0u64..4).prop_map(|((lt, large), (st, small), size)| {
            // A full table takes long to look through; most are an eighth.
            lt | (size | 2) << 2 | (large >> 12) << 4 | st << 32 | (small >> 12) << 36
        }),
        3 => Just(pde(Some(LPT), Some(SPT), EIGHTH)),
        2 => Just(0),
        1 => any::<u64>().prop_map(|raw| raw | 2 << 2),
    ]
}

fn any_pte() -> impl Strategy<Value = u64> {
    let flags = || prop::sample::select(&[0u64, 2, 4, 1 << 32, 0xfe << 36, 0xdb << 36, 7 << 44][..]);
    prop_oneof![
        4 => (0..GUEST_VRAM / PAGE + 2, flags()).prop_map(|(page, flags)| pte(0, page * PAGE) | flags),
        3 => (0..GUEST_VRAM / LARGE + 1, flags()).prop_map(|(page, flags)| pte(0, page * LARGE) | flags),
        4 => (2u64..4, 0xff0u64..0x1070, flags()).prop_map(|(ap, page, flags)| pte(ap, page * PAGE) | flags),
        2 => (0x7fu64..0x84, flags()).prop_map(|(page, flags)| pte(2, page * LARGE) | flags),
        1 => (0x1ff0u64..0x2030, flags()).prop_map(|(page, flags)| pte(3, page * PAGE) | flags),
        1 => Just(0),
        2 => any::<u64>(),
    ]
}

/// Large pages that are granted, or nearly.
const LEGAL_LARGE: [u64; 5] = [
    1 | (0x1000 << 4) | (2 << 33),
    1 | (0x1020 << 4) | (3 << 33),
    1 | (0x1040 << 4) | (2 << 33),
    1 | (0x20 << 4),
    // The last of the guest's VRAM, not all of which is there.
    1 | (0xe0 << 4),
];

fn op() -> impl Strategy<Value = Op> {
    prop_oneof![
        3 => (prop::sample::select(&[0u64, 1, 2, 8190, 8191][..]), any_pde()).prop_map(|(index, raw)| Op::Pde { index, raw }),
        8 => (prop::sample::select(&PLACES[..]), 0u64..40, any_pte())
            .prop_map(|(table, index, raw)| Op::Pte { table, index, raw }),
        4 => (0u64..8, prop::sample::select(&LEGAL_LARGE[..])).prop_map(|(index, raw)| Op::Pte { table: LPT, index, raw }),
        3 => Just(Op::Sync),
        1 => (0xff0u64..0x1070, 1u64..50).prop_map(|(first, pages)| Op::Withdraw { first, pages }),
        1 => (0x1000u64..0x1060, prop::sample::select(&[0x8000u64, 0x9000, 0x9010, 0xe000][..]), 1u64..50, any::<bool>())
            .prop_map(|(first, iova, pages, writable)| Op::Grant { first, iova, pages, writable }),
    ]
}

/// What the card must end at for a guest entry, by the grants alone: `None` when any 4 KiB of it is not granted.
fn expected(guest: &world::Page, grants: &Grants, va: u64) -> Option<(u64, u64, bool)> {
    let bytes = if guest.large { LARGE } else { PAGE };
    let first = guest.address - if guest.large { va & 0x1_f000 } else { 0 };
    if nvspec::mmu::kind::uncompressed((guest.raw >> 36) as u8).is_none()
        || guest.aperture == 1
        || !first.is_multiple_of(bytes)
    {
        return None;
    }
    let pages = first / PAGE..(first + bytes) / PAGE;
    let frames: Option<Vec<(u64, bool)>> = pages
        .map(|page| match guest.aperture {
            0 => grants.vram_page(page * PAGE).map(|at| (at / PAGE, true)),
            _ => grants.ram.get(&page).copied(),
        })
        .collect();
    let frames = frames?;
    let (start, _) = frames[0];
    let contiguous = frames.iter().zip(start..).all(|((frame, _), wanted)| *frame == wanted);
    if !contiguous || !(start * PAGE).is_multiple_of(bytes) {
        return None;
    }
    let writable = frames.iter().all(|(_, writable)| *writable);
    let within = if guest.large { va & 0x1_f000 } else { 0 };
    Some((guest.aperture, start * PAGE + within, guest.read_only || !writable))
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(96))]
    /// Invariants 1 and 2 over any sequence: no reachable frame is foreign, what is unmapped or withdrawn is
    /// unreachable, and where the guest's entry is legal the card ends where the guest meant.
    #[test]
    fn any_sequence_of_table_writes_stays_isolated(ops in prop::collection::vec(op(), 1..50)) {
        let mut world = World::mapped();
        for page in (0x1000..0x1010).chain(0x2000..0x2008) {
            world.guest.ram.insert(page, vec![0; 4096]);
        }
        for op in ops.into_iter().chain([Op::Sync]) {
            match op {
                Op::Pde { index, raw } => world.guest.write64(vram(DIRECTORY + index * 8), raw),
                Op::Pte { table, index, raw } => {
                    let place = if table > GUEST_VRAM { Place::Ram(Gpa(table)) } else { vram(table) };
                    world.guest.write64(place.checked_add(index * 8).unwrap(), raw);
                }
                Op::Withdraw { first, pages } => {
                    for page in first..first + pages {
                        world.grants.ram.remove(&page);
                    }
                    world.invalidate(GuestRange::Ram(Gpa(first * PAGE), pages * PAGE));
                    world.check_isolation();
                }
                Op::Grant { first, iova, pages, writable } => {
                    // A region is withdrawn before another takes its place.
                    world.invalidate(GuestRange::Ram(Gpa(first * PAGE), pages * PAGE));
                    world.grants.map(first, iova, pages, writable);
                    world.check_isolation();
                }
                Op::Sync => {
                    world.sync();
                    world.check_isolation();
                    for pde in [0u64, 1, 2, 8190, 8191] {
                        for page in 0..40u64 {
                            for va in [(pde << 27) + page * PAGE, (pde << 27) + page * LARGE + PAGE] {
                                let (guest, card) = (world.guest_page(va), world.page(va));
                                let Some(guest) = guest.filter(|_| pde != 8191) else {
                                    prop_assert_eq!(card, None, "more than the guest has at {:#x}", va);
                                    continue;
                                };
                                match expected(&guest, &world.grants, va) {
                                    Some((aperture, address, read_only)) => {
                                        let card = card.ok_or_else(|| TestCaseError::fail(format!("{va:#x} is lost")))?;
                                        prop_assert_eq!(
                                            (card.aperture, card.address, card.read_only, card.privileged),
                                            (aperture, address, read_only, guest.privileged)
                                        );
                                    }
                                    // Under a large page that is denied, the card may find the small one.
                                    None => prop_assert!(card.is_none() || guest.large),
                                }
                            }
                        }
                    }
                }
            }
        }
        let World { shadow, mut card, .. } = world;
        shadow.destroy(&mut card);
        prop_assert!(card.allocated.is_empty());
    }
}
