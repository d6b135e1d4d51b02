use super::*;
use crate::model::world::{self, Guest, LARGE, PAGE};
use nvspec::addr::LARGE_PAGE;
use proptest::prelude::*;

const INSTANCE: u64 = 0x1000;
const DIRECTORY: u64 = 0x2_0000;
const LPT: u64 = 0x3_0000;
const SPT: u64 = 0x4_0000;

fn vram(at: u64) -> Place {
    Place::Vram(GuestVramAddr(at))
}

/// Creates a guest with an instance block limit of 16 MiB and a directory that refers to both tables.
fn guest() -> Guest {
    let mut guest = Guest::new();
    guest.write64(vram(INSTANCE + vm::PDB_LO), DIRECTORY);
    guest.write64(vram(INSTANCE + vm::LIMIT_LO), 0xff_ffff);
    guest.write64(vram(DIRECTORY), 1 | (LPT >> 12) << 4 | (1 << 32) | (SPT >> 12) << 36);
    guest
}

fn bound() -> ApertureTlb {
    let mut tlb = ApertureTlb::new();
    tlb.bind(Some(vram(INSTANCE)), None);
    tlb
}

fn pte(address: u64) -> u64 {
    1 | (address >> 12) << 4
}

#[test]
fn a_small_page_is_found_with_its_offset_and_rights() {
    let mut guest = guest();
    guest.write64(vram(SPT + 5 * 8), pte(0x7_7000));
    guest.write64(vram(SPT + 6 * 8), pte(0x5000) | 4 | (2 << 33));
    let mut tlb = bound();
    assert_eq!(
        tlb.translate(5 * PAGE + 0x123, &mut guest),
        Ok(Mapping { place: vram(0x7_7123), bytes: PAGE - 0x123, writable: true })
    );
    assert_eq!(
        tlb.translate(6 * PAGE, &mut guest),
        Ok(Mapping { place: Place::Ram(Gpa(0x5000)), bytes: PAGE, writable: false })
    );
    assert_eq!(tlb.directory(&mut guest), Some(vram(DIRECTORY)));
}

#[test]
fn a_valid_large_page_wins_over_a_small_one() {
    let mut guest = guest();
    guest.write64(vram(SPT + 33 * 8), pte(0x9000));
    let mut tlb = bound();
    assert_eq!(tlb.translate(33 * PAGE, &mut guest).map(|found| found.place), Ok(vram(0x9000)));
    guest.write64(vram(LPT + 8), pte(3 * LARGE));
    tlb.flush();
    assert_eq!(tlb.translate(33 * PAGE, &mut guest).map(|found| found.place), Ok(vram(3 * LARGE + PAGE)));
}

#[test]
fn faults_are_the_hardwares() {
    let mut guest = guest();
    assert_eq!(ApertureTlb::new().translate(0, &mut guest), Err(WalkFault::Unbound));
    let mut nowhere = ApertureTlb::new();
    nowhere.bind(Some(vram(u64::MAX - 0x100)), None);
    assert_eq!(nowhere.translate(0, &mut guest), Err(WalkFault::Unbound));
    assert_eq!(nowhere.directory(&mut guest), None);
    let mut tlb = bound();
    assert_eq!(tlb.translate(0x100_0000, &mut guest), Err(WalkFault::Limit));
    assert_eq!(tlb.translate(0, &mut guest), Err(WalkFault::Pte));
    guest.write64(vram(SPT), pte(0) | (1 << 33));
    assert_eq!(tlb.translate(0, &mut guest), Err(WalkFault::Pte), "the page is in peer memory");
    guest.write64(vram(DIRECTORY), 0);
    assert_eq!(tlb.translate(0, &mut guest), Err(WalkFault::Pde));
    guest.write64(vram(DIRECTORY), (1 << 32) | 0xfff_ffff << 36);
    assert_eq!(tlb.translate(0, &mut guest), Err(WalkFault::Pde), "the table is outside the guest's memory");
}

#[test]
fn a_shortened_table_ends_where_it_says() {
    let mut guest = guest();
    guest.write64(vram(INSTANCE + vm::LIMIT_LO), 0xff_ffff_ffff);
    // Reduce the table to an eighth of its full size, which covers 16 MiB.
    guest.write64(vram(DIRECTORY), 1 | 3 << 2 | (LPT >> 12) << 4);
    guest.write64(vram(LPT + 127 * 8), pte(0));
    let mut tlb = bound();
    assert!(tlb.translate(127 * LARGE, &mut guest).is_ok());
    assert_eq!(tlb.translate(128 * LARGE, &mut guest), Err(WalkFault::PdeSize));
}

#[test]
fn hits_are_cached_until_a_flush_and_misses_are_not() {
    let mut guest = guest();
    let mut tlb = bound();
    assert!(tlb.translate(0, &mut guest).is_err());
    guest.write64(vram(SPT), pte(0x9000));
    assert_eq!(tlb.translate(0, &mut guest).map(|found| found.place), Ok(vram(0x9000)));
    let reads = guest.reads;
    guest.write64(vram(SPT), pte(0xa000));
    assert_eq!(tlb.translate(8, &mut guest).map(|found| found.place), Ok(vram(0x9008)));
    assert_eq!(guest.reads, reads);
    tlb.flush();
    assert_eq!(tlb.translate(0, &mut guest).map(|found| found.place), Ok(vram(0xa000)));
    tlb.bind(None, None);
    assert_eq!(tlb.translate(0, &mut guest), Err(WalkFault::Unbound));
}

proptest! {
    /// Compares translations through arbitrary tables with those of an independent page walker. Pages that share a
    /// cache slot must not affect each other.
    #[test]
    fn the_walk_is_the_walkers(
        pde in any::<u64>(),
        sane in any::<bool>(),
        limit in prop_oneof![Just(0xff_ffffu64), 0u64..0x180_0000],
        entries in prop::collection::vec((0u64..4096, any::<bool>(), any::<u64>()), 0..40),
        probes in prop::collection::vec(0u64..0x100_0000, 1..60),
    ) {
        let mut guest = guest();
        guest.write64(vram(INSTANCE + vm::LIMIT_LO), limit);
        if !sane {
            guest.write64(vram(DIRECTORY), pde);
        }
        for (index, large, raw) in entries {
            // Frames and targets are arbitrary. Large pages are aligned, as the independent walker assumes.
            let raw = if large { raw & !(0x1f << 4) } else { raw };
            let at = if large { LPT + (index % 128) * 8 } else { SPT + index * 8 };
            guest.write64(vram(at), raw);
        }
        let mut tlb = bound();
        for _ in 0..2 {
            for &va in &probes {
                let expected = world::walk((false, DIRECTORY), va, &|ram, at| guest.read64(ram, at))
                    .filter(|page| page.aperture != 1 && va & !(PAGE - 1) <= limit)
                    .map(|page| {
                        let place = if page.aperture == 0 {
                            vram(page.address + va % PAGE)
                        } else {
                            Place::Ram(Gpa(page.address + va % PAGE))
                        };
                        (place, !page.read_only)
                    });
                let found = tlb.translate(va, &mut guest).ok().map(|found| (found.place, found.writable));
                prop_assert_eq!(found, expected);
            }
        }
        // The survey must agree with single translations for any part of the aperture.
        let blocks = probes[0] % 6;
        let mut seen = Vec::new();
        tlb.survey(blocks << 21, 16 * 256 - (blocks << 9), &mut guest, |page, place| seen.push((page, place)));
        prop_assert_eq!(seen.len() as u64, 4096 - (blocks << 9));
        for (expected, (page, place)) in ((blocks << 9)..).zip(seen) {
            prop_assert_eq!(page, expected);
            prop_assert_eq!(place, tlb.translate(page * PAGE, &mut guest).ok().map(|found| found.place));
        }
    }
}

const _: () = assert!(LARGE == LARGE_PAGE);
