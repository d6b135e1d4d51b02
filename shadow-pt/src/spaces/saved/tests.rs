//! Tests of saved address spaces that were modified, or that refer to memory not owned by the VM.

use super::*;
use crate::model::world::Card;
use nvspec::mmu::Rights;
use proptest::prelude::*;

const LIMITS: Limits = Limits { table_bytes: 1 << 20 };

/// Creates two spaces, one of which has channel pages and shared pages.
fn spaces(card: &mut Card) -> AddressSpaces {
    let mut spaces = AddressSpaces::new(Mode::Incremental, LIMITS);
    for directory in [Place::Vram(GuestVramAddr(0x1_0000)), Place::Ram(Gpa(0x5000))] {
        spaces.open(directory, card).unwrap();
    }
    let id = spaces.find(Place::Ram(Gpa(0x5000))).unwrap();
    for page in [crate::HostPage::Own(3), crate::HostPage::Shared(7)] {
        spaces.map_host(id, page, VramAddr(0x7000), Rights::ReadWrite, card).unwrap();
    }
    spaces
}

fn restored(saved: SavedSpaces, card: &mut Card) -> Result<AddressSpaces, Invalid> {
    let sizes: Vec<(u64, u64)> = card.allocated.iter().map(|(at, held)| (*at, held.len() as u64)).collect();
    AddressSpaces::restored(saved, Mode::LazyAdd, LIMITS, card, |at, bytes| sizes.contains(&(at.0, bytes)))
}

fn refused(edit: impl FnOnce(&mut SavedSpaces)) -> String {
    let mut card = Card::default();
    let mut saved = spaces(&mut card).save();
    edit(&mut saved);
    let writes = card.writes.len();
    let error = restored(saved, &mut card).expect_err("the spaces were restored").to_string();
    assert_eq!((card.writes.len(), card.freed.len()), (writes, 0), "card memory was changed");
    error
}

fn first(saved: &mut SavedSpaces) -> &mut SavedSpace {
    saved.spaces[0].as_mut().unwrap()
}

#[test]
fn the_mediators_own_pages_stay_mapped() {
    let mut card = Card::default();
    let before = spaces(&mut card);
    let directory = before.directory(before.find(Place::Ram(Gpa(0x5000))).unwrap()).unwrap();
    let entries = |card: &Card| card.entries(directory.0, 8192).collect::<Vec<_>>();
    let (saved, told) = (before.save(), entries(&card));
    let after = restored(saved.clone(), &mut card).unwrap();
    assert_eq!(entries(&card), told);
    assert_ne!((told[8190], told[8191]), (0, 0));
    assert_eq!((after.save(), after.mode()), (saved, Mode::LazyAdd));
}

#[test]
fn moved_spaces_get_directories_on_new_card_and_map_nothing() {
    let mut here = Card::default();
    let before = spaces(&mut here);
    let mut there = Card::default();
    // The addresses on the other card are different.
    let occupied = crate::ShadowMemory::alloc(&mut there, 0x3000).unwrap();
    let (saved, places) = before.save().moved(&mut there).unwrap();
    let after = restored(saved, &mut there).unwrap();
    for (id, moved) in before.ids().zip(after.ids()) {
        let (old, new) = (before.directory(id).unwrap(), after.directory(moved).unwrap());
        assert_eq!(
            (moved, after.guest_directory(moved)),
            (id, before.guest_directory(id)),
            "the address of the guest directory has changed"
        );
        assert!(places.contains(&(old, new)) && new != occupied);
        assert!(there.entries(new.0, 8192).all(|entry| entry == 0), "a page is mapped before the space is prepared");
    }
    assert_eq!((places.len(), after.count()), (2, 2));
    let saved = before.save();
    assert_eq!(saved.moved(&mut Card { room: Some(1), ..Card::default() }).unwrap_err(), NoMemory);
}

#[test]
fn card_memory_of_others_is_refused() {
    assert!(refused(|saved| first(saved).card += 0x1000).contains("not owned by the VM"));
    assert!(refused(|saved| first(saved).card = 3).contains("not owned by the VM"));
    assert!(refused(|saved| first(saved).own = Some(0)).contains("not owned by the VM"));
    assert!(
        refused(|saved| {
            let own = saved_own(saved);
            first(saved).common = own;
        })
        .contains("not owned by the VM")
    );
    // Reject memory that is already in use, both for a directory and for a table to free.
    assert!(
        refused(|saved| {
            let card = first(saved).card;
            saved.spaces[1].as_mut().unwrap().card = card;
        })
        .contains("not owned by the VM")
    );
    assert!(
        refused(|saved| {
            let card = first(saved).card;
            saved.old.push((card, PD_BYTES));
        })
        .contains("not owned by the VM")
    );
}

fn saved_own(saved: &SavedSpaces) -> Option<u64> {
    saved.spaces[1].unwrap().own
}

#[test]
fn spaces_that_cannot_be_are_refused() {
    assert!(refused(|saved| saved.spaces.resize(MAX_SPACES + 1, None)).contains("at most"));
    assert!(refused(|saved| first(saved).generation = 1).contains("is not the generation"));
    assert!(refused(|saved| first(saved).directory = SavedPlace::Ram(0x5000)).contains("the same directory"));
    assert!(refused(|saved| first(saved).directory = SavedPlace::Vram(0x1_0001)).contains("not page-aligned"));
}

proptest! {
    #[test]
    fn edited_bytes_never_panic(edits in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..4)) {
        let mut card = Card::default();
        let mut bytes = postcard::to_allocvec(&spaces(&mut card).save()).unwrap();
        for (at, value) in edits {
            let at = at.index(bytes.len());
            bytes[at] = value;
        }
        let Ok((saved, _)) = postcard::take_from_bytes::<SavedSpaces>(&bytes) else { return Ok(()) };
        let Ok(mut spaces) = restored(saved, &mut card) else { return Ok(()) };
        for id in spaces.ids().collect::<Vec<_>>() {
            spaces.close(id, &mut card);
        }
        prop_assert_eq!(spaces.card_bytes(), 0);
    }
}
