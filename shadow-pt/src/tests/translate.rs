use super::*;
use crate::model::world::{GUEST_VRAM, Grants, LARGE, PAGE};

fn grants() -> Grants {
    let mut grants = Grants::default();
    // 128 KiB writable in one piece, the same not in one piece, one page to read.
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
fn an_entry_that_is_not_valid_is_zero_whatever_else_it_says() {
    assert_eq!(translate(!1, PageSize::Small, &grants()), Ok(0));
}

#[test]
fn vram_goes_to_the_chunk_and_keeps_its_flags() {
    let flags = 2 | 4 | (1 << 32) | (0xfe << 36);
    assert_eq!(
        translate(raw(0, LARGE + PAGE) | flags, PageSize::Small, &grants()),
        Ok(raw(0, 41 * LARGE + PAGE) | flags)
    );
    assert_eq!(translate(raw(0, 2 * LARGE), PageSize::Large, &grants()), Ok(raw(0, 7 * LARGE)));
}

#[test]
fn encryption_tags_and_meaningless_bits_do_not_reach_the_card() {
    let dirt = 8 | (1 << 35) | (0x1_ffff << 44) | (7 << 61);
    assert_eq!(translate(raw(0, 0) | dirt, PageSize::Small, &grants()), Ok(raw(0, 40 * LARGE)));
}

#[test]
fn what_is_not_granted_is_denied_with_its_reason() {
    let cases = [
        (raw(0, GUEST_VRAM), PageSize::Small, Denial::Vram),
        (raw(0, 0xff_ffff_f000), PageSize::Small, Denial::Vram),
        (raw(0, 8 * LARGE), PageSize::Large, Denial::Vram),
        // Its first page is the guest's, its last is not.
        (raw(0, 7 * LARGE), PageSize::Large, Denial::Vram),
        (raw(1, 0), PageSize::Small, Denial::Peer),
        (raw(2, 0x5000 * PAGE), PageSize::Small, Denial::Ram),
        (raw(3, 0x5000 * PAGE), PageSize::Small, Denial::Ram),
        // Every piece is granted, but the last lies elsewhere.
        (raw(2, 0x1020 * PAGE), PageSize::Large, Denial::Ram),
        // Only its first page is granted.
        (raw(2, 0x2000 * PAGE), PageSize::Large, Denial::Ram),
        (raw(0, PAGE), PageSize::Large, Denial::Unaligned),
        (raw(0, 0) | (0xff << 36), PageSize::Small, Denial::Kind),
        (raw(0, 0) | (0x06 << 36), PageSize::Small, Denial::Kind),
    ];
    for (entry, size, denial) in cases {
        assert_eq!(translate(entry, size, &grants()), Err(denial), "{entry:#x} {size:?}");
    }
}

#[test]
fn ram_that_may_only_be_read_becomes_read_only() {
    assert_eq!(translate(raw(2, 0x2000 * PAGE), PageSize::Small, &grants()), Ok(raw(2, 0xb000 * PAGE) | 4));
    assert_eq!(translate(raw(3, 0x1000 * PAGE), PageSize::Small, &grants()), Ok(raw(3, 0x8000 * PAGE)));
}

#[test]
fn a_large_page_that_is_unaligned_for_the_card_is_denied() {
    let mut grants = Grants::default();
    grants.map(0x1000, 0x8001, 32, true);
    assert_eq!(translate(raw(2, 0x1000 * PAGE), PageSize::Large, &grants), Err(Denial::Unaligned));
}

#[test]
fn an_address_that_no_entry_can_hold_is_denied() {
    let mut grants = Grants::default();
    grants.map(1, 1 << 28, 1, true);
    assert_eq!(translate(raw(2, PAGE), PageSize::Small, &grants), Err(Denial::Ram));
}

#[test]
fn compressed_kinds_become_their_counterparts() {
    for (kind, becomes) in [(0xdb, 0xfe), (0x02, 0x01), (0x17, 0x11), (0xc0, 0xa8), (0x3f, 0x27), (0x00, 0x00)] {
        let entry = translate(raw(0, 0) | (kind << 36), PageSize::Small, &grants()).unwrap();
        assert_eq!((entry >> 36) & 0xff, becomes, "{kind:#x}");
    }
}

#[test]
fn losing_is_told_from_gaining() {
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

/// All apertures, flags, kinds and a boundary of addresses: the result is an entry whose every 4 KiB is granted, with
/// no more rights than the guest asked for, or none.
#[test]
fn exhaustive_small_world() {
    let grants = grants();
    let addresses = [0, PAGE, LARGE, 6 * LARGE, 7 * LARGE, GUEST_VRAM - PAGE, GUEST_VRAM, 8 * LARGE]
        .into_iter()
        .chain([0x0fff, 0x1000, 0x101f, 0x1020, 0x103e, 0x103f, 0x1040, 0x2000, 0xfff_ffff].map(|page| page * PAGE));
    let mut granted = 0u32;
    for address in addresses {
        for aperture in 0..4 {
            for kind in 0..256u64 {
                for flags in 0..16u64 {
                    for size in [PageSize::Small, PageSize::Large] {
                        let guest = raw(aperture, address) & !1 | flags | (kind << 36);
                        let Ok(shadow) = translate(guest, size, &grants) else { continue };
                        if shadow == 0 {
                            assert_eq!(guest & 1, 0);
                            continue;
                        }
                        granted += 1;
                        assert_eq!(guest & 1, 1);
                        assert_eq!((shadow >> 33) & 3, aperture);
                        assert!(shadow & 8 == 0 && shadow >> 44 == 0);
                        assert_eq!(shadow & 2, guest & 2);
                        assert!(shadow & 4 != 0 || guest & 4 == 0, "the guest asked for read-only");
                        let start = ((shadow >> 4) & 0xfff_ffff) * PAGE;
                        for at in (start..start + size.bytes()).step_by(PAGE as usize) {
                            match aperture {
                                0 => assert!(grants.owns_vram(at)),
                                _ => assert!(grants.owns_ram(at, shadow & 4 == 0)),
                            }
                        }
                    }
                }
            }
        }
    }
    assert!(granted > 10_000, "the test world grants too little to mean anything: {granted}");
}
