//! Tests of the VRAM window, the apertures, and accesses of unusual sizes.

use super::mock::{Rig, VRAM};
use crate::backend::{Aperture, NoMemory};

const BAR0_WINDOW: u32 = 0x001700;
const PRAMIN: u64 = 0x70_0000;

#[test]
fn the_window_shows_vram_where_it_is_placed() {
    let mut rig = Rig::new();
    rig.wr(BAR0_WINDOW, 0x2);
    rig.wr(0x70_0010, 0x1122_3344);
    assert_eq!(rig.mock.vram[0x2_0010..0x2_0014], [0x44, 0x33, 0x22, 0x11]);
    assert_eq!(rig.rd(0x70_0010), 0x1122_3344);
    rig.gpu.bar0_write(PRAMIN + 0x21, &[0xaa; 7], &mut rig.mock).unwrap();
    assert_eq!(rig.mock.vram[0x2_0020..0x2_002a], [0, 0xaa, 0xaa, 0xaa, 0xaa, 0xaa, 0xaa, 0xaa, 0, 0]);
}

#[test]
fn the_window_ends_with_vram() {
    let mut rig = Rig::new();
    // The second half of the window is beyond the end of the guest's VRAM.
    rig.wr(BAR0_WINDOW, ((VRAM >> 16) - 8) as u32);
    rig.wr(0x77_fffc, 7);
    assert_eq!(rig.rd(0x77_fffc), 7);
    rig.wr(0x78_0000, 7);
    assert_eq!(rig.rd(0x78_0000), u32::MAX);
    let mut across = [0; 8];
    rig.gpu.bar0_read(PRAMIN + 0x7_fffc, &mut across, &mut rig.mock);
    assert_eq!(across, [0xff; 8], "an access that is partly outside VRAM must read all ones");
    assert_eq!(rig.denied(), ["pbus.PRAMIN_WINDOW: address outside VRAM"]);
    assert_eq!(rig.gpu.denials().total(), 3);
}

#[test]
fn the_highest_window_does_not_wrap() {
    let mut rig = Rig::new();
    rig.wr(BAR0_WINDOW, 0x00ff_ffff);
    assert_eq!(rig.rd(0x7f_fffc), u32::MAX);
    rig.wr(0x7f_fffc, 1);
    assert_eq!(rig.denied(), ["pbus.PRAMIN_WINDOW: address outside VRAM"]);
}

#[test]
fn a_window_on_other_memory_shows_nothing() {
    let mut rig = Rig::new();
    for target in 1..4 {
        rig.wr(BAR0_WINDOW, target << 24);
        rig.wr(0x70_0000, 0x55);
        assert_eq!(rig.rd(0x70_0000), u32::MAX, "target {target}");
    }
    assert_eq!(rig.mock.vram[0], 0);
    assert_eq!(rig.denied(), ["pbus.PRAMIN_WINDOW: unsupported address target"]);
}

#[test]
fn the_window_register_reads_back_for_drivers_that_save_it() {
    let mut rig = Rig::new();
    rig.wr(BAR0_WINDOW, 0xffff_ffff);
    assert_eq!(rig.rd(BAR0_WINDOW), 0x03ff_ffff);
}

#[test]
fn an_access_across_the_windows_end_is_cut() {
    let mut rig = Rig::new();
    rig.wr(BAR0_WINDOW, 0);
    rig.mock.vram[0xf_fffc..0x10_0000].copy_from_slice(&[1, 2, 3, 4]);
    let mut data = [0; 8];
    rig.gpu.bar0_read(PRAMIN + 0xf_fffc, &mut data, &mut rig.mock);
    assert_eq!(data, [1, 2, 3, 4, 0x00, 0xda, 0xd0, 0xba]);
}

#[test]
fn apertures_reach_the_backend_within_their_size_only() {
    let mut rig = Rig::with(|config| config.pci.bar3_bytes = 8 << 20);
    let Rig { gpu, mock } = &mut rig;
    gpu.aperture_write(Aperture::Bar1, 0x1000, &[1, 2, 3], mock).unwrap();
    let mut data = [0; 4];
    gpu.aperture_read(Aperture::Bar3, 0x1000, &mut data, mock);
    assert_eq!(data, [1, 2, 3, 0]);
    gpu.aperture_read(Aperture::Bar1, VRAM / 2, &mut data, mock);
    assert_eq!(data, [0xff; 4], "the address is not mapped");
    gpu.aperture_read(Aperture::Bar3, (8 << 20) - 2, &mut data, mock);
    assert_eq!(data, [0xff; 4], "the offset is beyond the BAR");
    gpu.aperture_write(Aperture::Bar3, u64::MAX, &[0; 2], mock).unwrap();
    assert_eq!(rig.denied(), ["BAR1: no mapping", "BAR3: unknown register"]);
}

#[test]
fn write_without_memory_fails_without_denial_or_partial_write() {
    let mut rig = Rig::new();
    rig.wr(BAR0_WINDOW, 0);
    rig.mock.lacks_memory = true;
    let before = rig.rd(BAR0_WINDOW);
    let Rig { gpu, mock } = &mut rig;
    // The second access extends from the window into a register, which must not be written if the write to the window
    // fails.
    for (at, len) in [(PRAMIN, 4), (PRAMIN + 0xf_fffc, 8)] {
        assert_eq!(gpu.bar0_write(at, &vec![1; len], mock), Err(NoMemory));
    }
    assert_eq!(gpu.aperture_write(Aperture::Bar1, 0, &[1; 4], mock), Err(NoMemory));
    rig.mock.lacks_memory = false;
    assert_eq!((rig.denied(), rig.rd(BAR0_WINDOW)), (Vec::<String>::new(), before));
    rig.gpu.bar0_write(PRAMIN, &[7; 4], &mut rig.mock).unwrap();
    assert_eq!(rig.mock.vram[0], 7);
}

#[test]
fn bytes_of_storage_registers_keep_their_neighbours() {
    let mut rig = Rig::new();
    rig.wr8(0x6013d4, 0x1f);
    rig.wr8(0x6013d5, 0x57);
    assert_eq!(rig.rd(0x6013d4), 0x571f);
    let mut byte = [0];
    rig.gpu.bar0_read(0x6013d5, &mut byte, &mut rig.mock);
    assert_eq!(byte, [0x57]);
}

#[test]
fn a_byte_written_to_a_clearing_register_clears_only_there() {
    let mut rig = Rig::new();
    rig.gpu.sched_error(0xa, &mut rig.mock);
    rig.gpu.runlist_done(&mut rig.mock);
    rig.wr8(0x002100, 0xff);
    assert_eq!(rig.rd(0x002100), 0x4000_0100);
    rig.wr8(0x002101, 0x01);
    assert_eq!(rig.rd(0x002100), 0x4000_0000);
}

#[test]
fn eight_bytes_are_two_registers() {
    let mut rig = Rig::new();
    let mut data = [0; 8];
    rig.gpu.bar0_read(0, &mut data, &mut rig.mock);
    assert_eq!(data, [0xa3, 0x00, 0x03, 0x0c, 0, 0, 0, 0]);
    rig.gpu.bar0_write(0x000640, &[0; 8], &mut rig.mock).unwrap();
    assert_eq!((rig.rd(0x000640), rig.rd(0x000644)), (0, 0));
}

#[test]
fn accesses_beyond_registers_read_as_ones() {
    let mut rig = Rig::new();
    let mut data = [0; 4];
    rig.gpu.bar0_read(0x1_0000_0000, &mut data, &mut rig.mock);
    assert_eq!(data, [0xff; 4]);
    rig.gpu.bar0_read(u64::MAX - 1, &mut [0; 16], &mut rig.mock);
    rig.gpu.bar0_write(u64::MAX - 1, &[0; 16], &mut rig.mock).unwrap();
}
