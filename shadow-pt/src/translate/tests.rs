use super::*;

/// Returns the shadow, which must be a single entry.
fn one(raw: u64, size: PageSize, grants: &Grants) -> Result<u64, Denial> {
    translate(raw, size, &mut grants.clone()).map(|shadow| match shadow {
        Shadow::Entry(entry) => entry,
        Shadow::Split(_) => panic!("the shadow is split"),
    })
}
use crate::model::world::{GUEST_VRAM, Grants, LARGE, PAGE};
use nvspec::addr::{Iova, VramAddr};

fn grants() -> Grants {
    let mut grants = Grants::default();
    // Grant 128 KiB of contiguous writable RAM, 128 KiB of non-contiguous RAM, and one read-only page.
    grants.map(0x1000, 0x8000, 32, true);
    grants.map(0x1020, 0x9000, 31, true);
    grants.map(0x103f, 0xa000, 1, true);
    grants.map(0x2000, 0xb000, 1, false);
    grants
}

fn raw(aperture: u64, address: u64) -> u64 {
    1 | ((address >> 12) << 4) | (aperture << 33)
}

#[test]
fn invalid_entry_is_zero_regardless_of_other_bits() {
    assert_eq!(one(!1, PageSize::Small, &grants()), Ok(0));
}

#[test]
fn vram_goes_to_the_chunk_and_keeps_its_flags() {
    let flags = 2 | 4 | (1 << 32) | (0xfe << 36);
    assert_eq!(one(raw(0, LARGE + PAGE) | flags, PageSize::Small, &grants()), Ok(raw(0, 41 * LARGE + PAGE) | flags));
    assert_eq!(one(raw(0, 2 * LARGE), PageSize::Large, &grants()), Ok(raw(0, 7 * LARGE)));
}

#[test]
fn encryption_tags_and_meaningless_bits_do_not_reach_the_card() {
    let dirt = 8 | (1 << 35) | (0x1_ffff << 44) | (7 << 61);
    assert_eq!(one(raw(0, 0) | dirt, PageSize::Small, &grants()), Ok(raw(0, 40 * LARGE)));
}

#[test]
fn ungranted_entries_are_denied_with_reason() {
    let cases = [
        (raw(0, GUEST_VRAM), PageSize::Small, Denial::Vram),
        (raw(0, 0xff_ffff_f000), PageSize::Small, Denial::Vram),
        (raw(0, 8 * LARGE), PageSize::Large, Denial::Vram),
        // The first page belongs to the guest, but the last one does not.
        (raw(0, 7 * LARGE), PageSize::Large, Denial::Vram),
        (raw(1, 0), PageSize::Small, Denial::Peer),
        (raw(2, 0x5000 * PAGE), PageSize::Small, Denial::Ram),
        (raw(3, 0x5000 * PAGE), PageSize::Small, Denial::Ram),
        // Only the first page is granted.
        (raw(2, 0x2000 * PAGE), PageSize::Large, Denial::Ram),
        (raw(0, PAGE), PageSize::Large, Denial::Unaligned),
        (raw(0, 0) | (0xff << 36), PageSize::Small, Denial::Kind),
        (raw(0, 0) | (0x06 << 36), PageSize::Small, Denial::Kind),
    ];
    for (entry, size, denial) in cases {
        assert_eq!(one(entry, size, &grants()), Err(denial), "{entry:#x} {size:?}");
    }
}

#[test]
fn ram_that_may_only_be_read_becomes_read_only() {
    assert_eq!(one(raw(2, 0x2000 * PAGE), PageSize::Small, &grants()), Ok(raw(2, 0xb000 * PAGE) | 4));
    assert_eq!(one(raw(3, 0x1000 * PAGE), PageSize::Small, &grants()), Ok(raw(3, 0x8000 * PAGE)));
}

/// Returns the aperture and page number of each small entry that replaces a large entry.
fn split(entry: u64, grants: &Grants) -> Vec<(u64, u64)> {
    match translate(entry, PageSize::Large, &mut grants.clone()) {
        Ok(Shadow::Split(pieces)) => pieces.iter().map(|piece| (piece >> 33 & 3, piece >> 4 & 0xfff_ffff)).collect(),
        other => panic!("{other:?}"),
    }
}

#[test]
fn scattered_or_unaligned_large_page_becomes_small_entries() {
    let mut grants = grants();
    let apart: Vec<_> = (0..31).map(|page| (2, 0x9000 + page)).chain([(2, 0xa000)]).collect();
    assert_eq!(split(raw(2, 0x1020 * PAGE), &grants), apart);
    grants.map(0x1000, 0x8001, 32, true);
    let shifted: Vec<_> = (0..32).map(|page| (3, 0x8001 + page)).collect();
    assert_eq!(split(raw(3, 0x1000 * PAGE), &grants), shifted);
    // Move one VRAM page to host memory. Then move all pages, first contiguous and then misaligned.
    grants.hosted.insert(64 + 5, 0xf005);
    let mixed: Vec<_> = (0..32).map(|page| if page == 5 { (2, 0xf005) } else { (0, 7 * 32 + page) }).collect();
    assert_eq!(split(raw(0, 2 * LARGE), &grants), mixed);
    grants.hosted.extend((0..32).map(|page| (64 + page, 0xf000 + page)));
    assert_eq!(one(raw(0, 2 * LARGE), PageSize::Large, &grants), Ok(raw(2, 0xf000 * PAGE)));
    grants.hosted.extend((0..32).map(|page| (64 + page, 0xf001 + page)));
    let shifted: Vec<_> = (0..32).map(|page| (2, 0xf001 + page)).collect();
    assert_eq!(split(raw(0, 2 * LARGE), &grants), shifted);
}

#[test]
fn split_entries_keep_flags_and_rights_of_each_page() {
    let mut grants = grants();
    grants.map(0x1030, 0xb000, 16, false);
    let flags = 2 | (1 << 32) | (0xdb << 36);
    let Ok(Shadow::Split(pieces)) = translate(raw(2, 0x1020 * PAGE) | flags, PageSize::Large, &mut grants) else {
        panic!("the shadow is a single entry")
    };
    for (page, piece) in pieces.iter().enumerate() {
        let read_only = if page < 16 { 0 } else { 4 };
        let place = if page < 16 { 0x9000 + page } else { 0xb000 + page - 16 };
        let kept = 1 | 2 | read_only | (1 << 32) | (0xfe << 36);
        assert_eq!(*piece, kept | (2 << 33) | (place as u64) << 4, "{page}");
    }
}

#[test]
fn vram_in_host_memory_is_host_memory_for_the_card() {
    let mut grants = grants();
    grants.hosted.insert(33, 0xf000);
    assert_eq!(one(raw(0, LARGE + PAGE), PageSize::Small, &grants), Ok(raw(2, 0xf000 * PAGE)));
    assert_eq!(one(raw(0, LARGE + 2 * PAGE), PageSize::Small, &grants), Ok(raw(0, 41 * LARGE + 2 * PAGE)));
    assert_eq!(one(raw(0, LARGE + PAGE) | 4, PageSize::Small, &grants), Ok(raw(2, 0xf000 * PAGE) | 4));
}

#[test]
fn an_address_that_no_entry_can_hold_is_denied() {
    let mut grants = Grants::default();
    grants.map(1, 1 << 28, 1, true);
    assert_eq!(one(raw(2, PAGE), PageSize::Small, &grants), Err(Denial::Ram));
}

#[test]
fn compressed_kinds_become_their_counterparts() {
    for (kind, becomes) in [(0xdb, 0xfe), (0x02, 0x01), (0x17, 0x11), (0xc0, 0xa8), (0x3f, 0x27), (0x00, 0x00)] {
        let entry = one(raw(0, 0) | (kind << 36), PageSize::Small, &grants()).unwrap();
        assert_eq!((entry >> 36) & 0xff, becomes, "{kind:#x}");
    }
}

#[test]
fn permission_loss_is_distinguished_from_gain() {
    let entry = raw(0, 0x1000);
    let cases = [
        (0, entry, false),
        (entry, 0, true),
        (entry, entry | 4, true),
        (entry | 4, entry, false),
        (entry, entry | 2, true),
        (entry | 2, entry, false),
        (entry | 2, entry | 4, true),
        (entry, raw(0, 0x2000), true),
        (entry, raw(2, 0x1000), true),
        (entry, entry | (1 << 32), true),
    ];
    for (old, new, lost) in cases {
        assert_eq!(loses(old, new), lost, "{old:#x} to {new:#x}");
    }
}

/// Compares translations with the specification, for all combinations of flags, apertures and page sizes, several
/// storage kinds, and addresses around every boundary (chunks, the end of VRAM, RAM regions and their parts, read-only
/// RAM, the maximum address of an entry).
#[test]
fn exhaustive_small_world() {
    let mut grants = grants();
    // Grant RAM that is misaligned for the card, RAM that is partly read-only, and RAM beyond the maximum address of an
    // entry.
    grants.map(0x3000, 0xc001, 32, true);
    grants.map(0x3020, 0xd000, 16, true);
    grants.map(0x3030, 0xd010, 16, false);
    grants.map(0x4000, (1 << 28) - 32, 64, true);
    grants.chunks[4] = None;
    // Move a VRAM page and a whole large page to host memory.
    grants.hosted.insert(40, 0xe000);
    grants.hosted.extend((0..32).map(|page| (96 + page, 0xe020 + page)));
    let edges = |page: u64| page.saturating_sub(1)..page + 2;
    let chunks = (0..10).flat_map(|chunk| edges(chunk * 32)).chain(edges(GUEST_VRAM / PAGE));
    let regions =
        [0x1000, 0x1020, 0x103f, 0x1040, 0x2000, 0x2020, 0x3000, 0x3020, 0x3030, 0x3040, 0x4000, 0x4020, 0x4040];
    let pages = chunks.chain(regions.into_iter().flat_map(edges)).chain([0xfff_ffe0, 0xfff_ffff]);
    let kinds = [0u64, 1, 2, 6, 0x17, 0xdb, 0xfe, 0xff];
    let few = pages.flat_map(|page| kinds.map(|kind| (page, kind)));
    let all_kinds = [0, 32, 0x1000, 0x2000].into_iter().flat_map(|page| (0..256).map(move |kind| (page, kind)));
    let (mut granted, mut denied, mut split) = (0u32, 0u32, 0u32);
    for (page, kind) in few.chain(all_kinds) {
        for bits in 0..256u64 {
            // From bit 0: valid, privileged, read-only, encrypted, volatile, aperture (2 bits). The last bit sets a
            // compression tag and an unused bit.
            let guest =
                bits & 15 | (bits >> 4 & 7) << 32 | page << 4 | kind << 36 | ((bits >> 7) * (0x5_5555 << 43 | 1 << 35));
            for (size, large) in [(PageSize::Small, false), (PageSize::Large, true)] {
                let wanted = crate::model::spec::entry(guest, large, &grants);
                let pieces = crate::model::spec::pieces(guest, &grants).filter(|_| large);
                let found = translate(guest, size, &mut grants);
                // `named` must recognize every entry that can be granted, without querying the grants.
                assert!(named(guest, size).is_some() || (wanted == 0 && pieces.is_none()));
                granted += u32::from(wanted != 0);
                denied += u32::from(found.is_err());
                split += u32::from(pieces.is_some());
                let is_denied = guest & 1 != 0 && wanted == 0 && pieces.is_none();
                match found {
                    Err(_) => assert!(is_denied, "{guest:#x} {size:?} {found:?}"),
                    Ok(Shadow::Entry(entry)) => assert!(entry == wanted && !is_denied && pieces.is_none()),
                    Ok(Shadow::Split(found)) => assert_eq!(Some(found.to_vec()), pieces, "{guest:#x}"),
                }
            }
        }
    }
    assert!(
        granted > 35_000 && denied > 40_000 && split > 2_000,
        "too few cases were tested: {granted} granted, {denied} denied, {split} split"
    );
}

/// Grants all memory at its guest addresses, except for one page.
struct AllBut(u64);

impl AllBut {
    fn grants(&self, address: u64, len: u64) -> bool {
        !(address / PAGE..(address + len).div_ceil(PAGE)).contains(&self.0)
    }
}

impl Frames for AllBut {
    fn vram(&mut self, address: GuestVramAddr, len: u64) -> Option<Frame> {
        self.grants(address.0, len).then_some(Frame::Vram(VramAddr(address.0)))
    }

    fn ram(&mut self, address: Gpa, len: u64, _: bool) -> Option<Iova> {
        self.grants(address.0, len).then_some(Iova(address.0))
    }
}

#[test]
fn every_piece_of_a_large_page_counts() {
    for (aperture, denial) in [(0, Denial::Vram), (2, Denial::Ram)] {
        let entry = raw(aperture, 3 * LARGE);
        for missing in 3 * 32..4 * 32 {
            let found = translate(entry, PageSize::Large, &mut AllBut(missing));
            assert_eq!(found, Err(denial), "page {missing:#x} is not granted");
        }
        for beside in [3 * 32 - 1, 4 * 32] {
            assert_eq!(translate(entry, PageSize::Large, &mut AllBut(beside)), Ok(Shadow::Entry(entry)));
        }
    }
}
