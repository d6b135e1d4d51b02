use super::*;
use proptest::prelude::*;
use rig::Rig;
use std::collections::HashMap;

const BAR1: u64 = 17 << 20;
const BAR3: u64 = 1 << 20;

/// Memory as the books move it: what guest page each place shows.
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

    /// Whatever the guest maps where: a page has one home, among the places that want it; its data is there and nowhere
    /// else; a place that is no home shows zeros.
    #[test]
    fn every_page_has_one_home_and_its_data(
        steps in prop::collection::vec((any::<bool>(), prop::collection::vec((0u32..12, 0u32..10), 1..8)), 1..40),
    ) {
        let rig = Rig::new(64);
        let before = rig.usage().2;
        let mut remap = Remap::open(&rig.host, BAR1, BAR3).unwrap();
        let mut world = World::default();
        for (first, changes) in steps {
            let aperture = if first { Aperture::Bar1 } else { Aperture::Bar3 };
            let (start, _) = remap.extent(aperture).unwrap();
            let mut found = BTreeMap::new();
            for (page, want) in changes {
                // Page 0 does not occur, so that a blank place is told from one with data.
                let place = match want {
                    0 => None,
                    9 => Some(Place::Ram(nvspec::addr::Gpa(0))),
                    want => Some(Place::Vram(GuestVramAddr(u64::from(want) << 12))),
                };
                let page = start / SMALL_PAGE + u64::from(page);
                if let Some((page, want)) = remap.difference(aperture, page, place, 8 << 12) {
                    found.insert(page, want);
                } else {
                    found.remove(&(page as u32));
                }
            }
            let changes: Vec<_> = found.into_iter().collect();
            let concerned = remap.concerned(aperture, &changes);
            let moves = remap.book(aperture, &changes);
            let moved: BTreeSet<u32> = moves.outs.iter().chain(&moves.ins).map(|(page, _)| *page).collect();
            for range in ranges(moved) {
                let GuestRange::Vram(at, len) = range else { panic!("{range:?}") };
                let within = |other: &GuestRange| {
                    matches!(other, GuestRange::Vram(from, all) if from.0 <= at.0 && at.0 + len <= from.0 + all)
                };
                prop_assert!(concerned.iter().any(within), "{range:?} moves and is not said to");
            }
            world.carry_out(&moves);
            let mut wanted: BTreeMap<u32, Vec<Slot>> = BTreeMap::new();
            for (at, window) in remap.windows.iter().enumerate() {
                let window = window.as_ref().unwrap();
                for (index, want) in window.wants.iter().enumerate().take(12) {
                    if let Want::Vram(page) = want {
                        let slot = Slot { window: at, page: window.first + index as u32 };
                        wanted.entry(*page).or_default().push(slot);
                    }
                }
            }
            prop_assert_eq!(remap.homes.len(), wanted.len());
            for (page, slots) in &wanted {
                let home = remap.home(u64::from(*page)).expect("a home");
                prop_assert!(slots.contains(&home));
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
fn a_small_bar1_is_trapped_as_a_whole() {
    let rig = Rig::new(64);
    let mut remap = Remap::open(&rig.host, TRAPPED_BAR1, BAR3).unwrap();
    assert!(remap.area(Aperture::Bar1).is_none() && remap.extent(Aperture::Bar1).is_none());
    assert_eq!(remap.area(Aperture::Bar3).map(|(_, area)| (area.offset, area.size)), Some((0, BAR3)));
    remap.close(&rig.host);
}

#[test]
fn whereabouts_tell_pieces_apart() {
    let rig = Rig::new(64);
    let mut remap = Remap::open(&rig.host, BAR1, BAR3).unwrap();
    let at = |page: u64| GuestVramAddr(page * SMALL_PAGE);
    let changes: Vec<_> = (0..32).map(|page| (page, Want::Vram(32 + page))).collect();
    assert_eq!(remap.whereabouts(at(32), LARGE_PAGE), Home::Chunk);
    remap.book(Aperture::Bar3, &changes[..5]);
    assert_eq!(remap.whereabouts(at(32), LARGE_PAGE), Home::Apart);
    assert_eq!(remap.whereabouts(at(30), 4 * SMALL_PAGE), Home::Apart);
    assert_eq!(remap.whereabouts(at(37), SMALL_PAGE), Home::Chunk);
    remap.book(Aperture::Bar3, &changes[5..]);
    let Home::Host(first) = remap.whereabouts(at(32), LARGE_PAGE) else { panic!("apart") };
    assert_eq!(remap.whereabouts(at(35), SMALL_PAGE), Home::Host(first.offset(3 * SMALL_PAGE)));
    assert_eq!(first.0 % LARGE_PAGE, 0);
    remap.forget();
    remap.close(&rig.host);
}
