use super::*;
use proptest::prelude::*;
use rig::Rig;
use std::collections::HashMap;

const BAR1: u64 = 17 << 20;
const BAR3: u64 = 1 << 20;

/// Model of the memory: the guest page that each slot shows according to the recorded moves.
#[derive(Default)]
struct World {
    card: HashMap<u32, u32>,
    slots: BTreeMap<Slot, u32>,
}

impl World {
    fn carry_out(&mut self, moves: &Moves) {
        for (page, slot) in &moves.outs {
            let value = self.slots.get(slot).copied().unwrap_or(0);
            self.card.insert(*page, value);
        }
        for slot in &moves.blanks {
            self.slots.insert(*slot, 0);
        }
        for (page, slot) in &moves.ins {
            let value = self.card.remove(page).unwrap_or(*page);
            self.slots.insert(*slot, value);
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    /// Checks, for arbitrary guest mappings, that a page has only one home, which is in PRAMIN only if no other slot
    /// maps the page. Only the home contains the page's data, and other slots show zeros.
    #[test]
    fn every_page_has_one_home_and_its_data(
        steps in prop::collection::vec((0usize..3, prop::collection::vec((0u32..12, 0u32..10), 1..8)), 1..40),
    ) {
        let rig = Rig::new(64);
        let before = rig.usage().2;
        let mut remap = Remap::open(&rig.host, (BAR1, BAR3)).unwrap();
        let mut world = World::default();
        for (which, changes) in steps {
            let showing = MappedWindow::ALL[which];
            let (start, _) = remap.extent(showing).unwrap();
            let mut found = BTreeMap::new();
            for (page, want) in changes {
                // Do not use page 0, so that a blank slot differs from one that shows a page.
                let place = match want {
                    0 => None,
                    9 => Some(Place::Ram(nvspec::addr::Gpa(0))),
                    want => Some(Place::Vram(GuestVramAddr(u64::from(want) << 12))),
                };
                let page = start / SMALL_PAGE + u64::from(page);
                if let Some((page, want)) = remap.difference(showing, page, place, 8 << 12) {
                    found.insert(page, want);
                } else {
                    found.remove(&(page as u32));
                }
            }
            let changes: Vec<_> = found.into_iter().collect();
            let concerned = remap.concerned(showing, &changes);
            let moves = remap.book(showing, &changes);
            let moved: BTreeSet<u32> = moves.outs.iter().chain(&moves.ins).map(|(page, _)| *page).collect();
            for range in ranges(moved) {
                let GuestRange::Vram(at, len) = range else { panic!("{range:?}") };
                let within = |other: &GuestRange| {
                    matches!(other, GuestRange::Vram(from, all) if from.0 <= at.0 && at.0 + len <= from.0 + all)
                };
                prop_assert!(concerned.iter().any(within), "{range:?} moved without being reported");
            }
            world.carry_out(&moves);
            let mut wanted: BTreeMap<u32, Vec<Slot>> = BTreeMap::new();
            for (at, window) in remap.windows.iter().enumerate() {
                let window = window.as_ref().unwrap();
                for (index, want) in window.wants.iter().enumerate().take(12) {
                    if let PageTarget::Vram(page) = want {
                        let slot = Slot { window: at, page: window.first + index as u32 };
                        wanted.entry(*page).or_default().push(slot);
                    }
                }
            }
            prop_assert_eq!(remap.homes.len(), wanted.len());
            for (page, slots) in &wanted {
                let home = remap.home(u64::from(*page)).expect("the page has a home");
                prop_assert!(slots.contains(&home));
                prop_assert!(!home.gives_way() || slots.iter().all(|slot| slot.gives_way()), "PRAMIN keeps {page}");
                let waiting = remap.waiting.get(page).map_or(0, Vec::len);
                prop_assert_eq!(waiting + 1, slots.len());
                for slot in slots {
                    let shown = world.slots.get(slot).copied().unwrap_or(0);
                    prop_assert_eq!(shown, if *slot == home { *page } else { 0 });
                }
            }
            for (slot, shown) in &world.slots {
                prop_assert!(*shown == 0 || remap.home(u64::from(*shown)) == Some(*slot));
            }
        }
        let homes = remap.pages();
        prop_assert_eq!(remap.forget().len(), homes);
        remap.close(&rig.host);
        prop_assert_eq!(rig.usage().2, before);
    }
}

#[test]
fn pramin_yields_page_to_bars_and_reports_strays() {
    let rig = Rig::new(64);
    let mut remap = Remap::open(&rig.host, (BAR1, BAR3)).unwrap();
    let first = (u64::from(pramin::BASE) / SMALL_PAGE) as u32;
    let place = |page| Slot { window: MappedWindow::Pramin.index(), page: first + page };
    assert_eq!(
        remap.book(MappedWindow::Pramin, &[(first, PageTarget::Vram(3)), (first + 1, PageTarget::Vram(4))]).ins.len(),
        2
    );
    let taken = remap.book(MappedWindow::Bar3, &[(7, PageTarget::Vram(4))]);
    let in_bar3 = Slot { window: MappedWindow::Bar3.index(), page: 7 };
    assert_eq!((taken.outs, taken.ins), (vec![(4, place(1))], vec![(4, in_bar3)]));
    assert_eq!(taken.strays, []);
    assert_eq!((remap.home(4), remap.counts.aliases), (Some(in_bar3), 0), "the driver continues with BAR3");
    // Return the page to PRAMIN. Then give it to BAR3 again, and move the PRAMIN window.
    let back = remap.book(MappedWindow::Bar3, &[(7, PageTarget::Nothing)]);
    assert_eq!((back.ins, back.strays), (vec![(4, place(1))], vec![place(1)]));
    remap.book(MappedWindow::Bar3, &[(7, PageTarget::Vram(4))]);
    let gone = remap.book(MappedWindow::Pramin, &[(first + 1, PageTarget::Vram(9))]);
    assert_eq!((gone.outs, gone.strays), (vec![], vec![place(1)]));
    // Without BAR3, BAR1 takes precedence over PRAMIN.
    let low = (TRAPPED_BAR1 / SMALL_PAGE) as u32;
    remap.book(MappedWindow::Pramin, &[(first + 2, PageTarget::Vram(4))]);
    remap.book(MappedWindow::Bar1, &[(low, PageTarget::Vram(4))]);
    let given = remap.book(MappedWindow::Bar3, &[(7, PageTarget::Nothing)]);
    assert_eq!(given.ins, [(4, Slot { window: MappedWindow::Bar1.index(), page: low })]);
    remap.forget();
    remap.close(&rig.host);
}

#[test]
fn a_small_bar1_is_trapped_as_a_whole() {
    let rig = Rig::new(64);
    let mut remap = Remap::open(&rig.host, (TRAPPED_BAR1, BAR3)).unwrap();
    assert!(remap.area(MappedWindow::Bar1).is_none() && remap.extent(MappedWindow::Bar1).is_none());
    assert_eq!(remap.area(MappedWindow::Bar3).map(|(_, area)| (area.offset, area.size)), Some((0, BAR3)));
    remap.close(&rig.host);
}

#[test]
fn whereabouts_distinguish_split_ranges() {
    let rig = Rig::new(64);
    let mut remap = Remap::open(&rig.host, (BAR1, BAR3)).unwrap();
    let at = |page: u64| GuestVramAddr(page * SMALL_PAGE);
    let changes: Vec<_> = (0..32).map(|page| (page, PageTarget::Vram(32 + page))).collect();
    assert_eq!(remap.whereabouts(at(32), LARGE_PAGE), Home::Chunk);
    remap.book(MappedWindow::Bar3, &changes[..5]);
    assert_eq!(remap.whereabouts(at(32), LARGE_PAGE), Home::Apart);
    assert_eq!(remap.whereabouts(at(30), 4 * SMALL_PAGE), Home::Apart);
    assert_eq!(remap.whereabouts(at(37), SMALL_PAGE), Home::Chunk);
    remap.book(MappedWindow::Bar3, &changes[5..]);
    let Home::Host(first) = remap.whereabouts(at(32), LARGE_PAGE) else {
        panic!("the pages are not contiguous in host memory")
    };
    assert_eq!(remap.whereabouts(at(35), SMALL_PAGE), Home::Host(first.offset(3 * SMALL_PAGE)));
    assert_eq!(first.0 % LARGE_PAGE, 0);
    // PRAMIN moves in steps of 64 KiB, so a large page in it may be unaligned for the card.
    let start = (u64::from(pramin::BASE) / SMALL_PAGE) as u32;
    remap.book(
        MappedWindow::Pramin,
        &(0..32).map(|page| (start + 16 + page, PageTarget::Vram(64 + page))).collect::<Vec<_>>(),
    );
    assert_eq!(remap.whereabouts(at(64), LARGE_PAGE), Home::Apart);
    assert!(matches!(remap.whereabouts(at(64), SMALL_PAGE), Home::Host(_)));
    remap.forget();
    remap.close(&rig.host);
}
