use super::Reference;
use crate::engines::copy::layout::{Blocks, Surface};
use nvspec::addr::GpuVa;
use proptest::prelude::*;

fn blocks(size: [u64; 3], log2: [u32; 3]) -> Blocks {
    Blocks {
        base: GpuVa(0),
        width_log2: log2[0],
        rows_log2: log2[1],
        slices_log2: log2[2],
        blocks_x: size[0].div_ceil(1 << log2[0]),
        blocks_y: size[1].div_ceil(1 << log2[1]),
        x: 0,
        y: 0,
        z: 0,
    }
}

/// Compares the addresses of a surface of 128 bytes by 24 rows, whose blocks are two GOBs high, with addresses computed
/// by hand.
#[test]
fn known_addresses_of_a_small_surface() {
    let surface = Surface::Blocks(Blocks { base: GpuVa(0x1_0000), ..blocks([128, 24, 1], [6, 4, 0]) });
    for ((x, y), offset) in [
        ((0, 0), 0),
        ((63, 0), 63),
        ((0, 1), 64),
        ((5, 7), 7 * 64 + 5),
        ((0, 8), 512),
        ((0, 15), 512 + 7 * 64),
        ((64, 0), 1024),
        ((64, 8), 1024 + 512),
        ((0, 16), 2048),
        ((127, 23), 2048 + 1024 + 7 * 64 + 63),
    ] {
        assert_eq!(surface.locate(x, y).0, GpuVa(0x1_0000 + offset), "{x},{y}");
    }
    assert_eq!(surface.locate(70, 3).1, 58, "bytes to the end of the GOB row");
}

/// Tests the four slices of a surface with blocks of 64 bytes by 8 rows by 2 slices.
#[test]
fn known_addresses_of_slices() {
    let at = |z| Surface::Blocks(Blocks { z, ..blocks([64, 16, 4], [6, 3, 1]) }).locate(0, 8).0.0;
    assert_eq!([at(0), at(1), at(2), at(3)], [1024, 1024 + 512, 3072, 3072 + 512]);
}

#[test]
fn pitch_may_be_negative_and_addresses_have_40_bits() {
    let surface = Surface::Pitch { base: GpuVa(0x1000), pitch: -0x100 };
    assert_eq!(surface.locate(4, 3), (GpuVa(0xd04), u64::MAX));
    assert_eq!(surface.locate(0, 0x11).0, GpuVa((1 << 40) - 0x100));
    let high = Surface::Pitch { base: GpuVa((1 << 40) - 0x10), pitch: 0x20 };
    assert_eq!(high.locate(0, 1).0, GpuVa(0x10));
    let far = Blocks { base: GpuVa((1 << 40) - 512), ..blocks([64, 16, 1], [6, 3, 0]) };
    assert_eq!(Surface::Blocks(far).locate(0, 8).0, GpuVa(0));
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn block_linear_agrees_with_laying_bytes_out_one_by_one(
        narrow in any::<bool>(),
        (rows, slices) in (3u32..7, 0u32..4),
        size in (1u64..200, 1u64..100, 1u64..9),
    ) {
        let width = if narrow { 4 } else { 6 };
        let size = [size.0, size.1, size.2];
        let reference = Reference::new(size, [1 << width, 1 << rows, 1 << slices]);
        for z in 0..size[2] {
            let surface = Surface::Blocks(Blocks { z, ..blocks(size, [width, rows, slices]) });
            for y in 0..size[1] {
                for x in 0..size[0] {
                    let (va, run) = surface.locate(x, y);
                    prop_assert_eq!(va.0, reference.offset(x, y, z), "{},{},{}", x, y, z);
                    prop_assert_eq!(run, (1 << width) - x % (1 << width));
                }
            }
        }
    }

    #[test]
    fn origin_is_only_an_offset_of_the_coordinates(
        origin in (0u64..1 << 20, 0u64..1 << 16), at in (0u64..1000, 0u64..1000), z in 0u64..64,
    ) {
        let plain = Blocks { z, ..blocks([1 << 20, 1 << 16, 64], [6, 7, 2]) };
        let moved = Blocks { x: origin.0, y: origin.1, ..plain };
        prop_assert_eq!(
            Surface::Blocks(moved).locate(at.0, at.1),
            Surface::Blocks(plain).locate(origin.0 + at.0, origin.1 + at.1)
        );
    }
}
