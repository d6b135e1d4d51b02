//! Probe sequence of nouveau, with the values that it must read. Offsets are literals, as in nouveau, so that the test
//! also verifies the register declarations.

use super::mock::{Call, Rig, VRAM};
use crate::backend::{Aperture, Place};
use nvspec::addr::GuestVramAddr;
use nvspec::chip::GF100;
use nvspec::regs::windows;

#[test]
fn identity_and_straps_are_those_of_the_chip() {
    let mut rig = Rig::new();
    assert_eq!(rig.rd(0x000000), 0x0c03_00a3);
    assert_eq!(rig.rd(0x000004), 0, "little endian");
    assert_eq!(rig.rd(0x101000) & 0x0040_0040, 0x0040_0000, "27 MHz");
    assert_eq!(rig.rd(0x02240c) & 2, 2, "the VBIOS has initialized the card");
    assert_eq!(rig.rd(0x022500), 7, "no display, no video; both copy engines");
    assert_eq!(rig.rd(0x088000), 0x06d8_10de, "configuration space as shown by the card");
    assert_eq!(rig.rd(0x088088) >> 16 & 3, 2, "5 GT/s");
}

#[test]
fn memory_has_the_size_that_was_asked_for() {
    let mut rig = Rig::with(|config| config.vram_bytes = 768 << 20);
    let partitions = rig.rd(0x022438);
    let disabled = rig.rd(0x022554);
    let mut mib = 0;
    for partition in (0..partitions).filter(|partition| disabled & (1 << partition) == 0) {
        mib += rig.rd(0x11020c + partition * 0x1000);
    }
    assert_eq!((partitions, mib), (1, 768));
    assert_eq!(rig.rd(0x17e8dc) >> 28, 2, "cache slices");
    rig.wr(0x11020c, 4096);
    assert_eq!(rig.rd(0x11020c), 768, "a guest cannot enlarge its memory");
}

#[test]
fn vbios_is_readable_through_prom_and_ones_after_its_end() {
    let mut rig = Rig::new();
    let shadow = rig.mask(0x088050, 1, 0);
    assert_eq!(shadow & 1, 0);
    assert_eq!(rig.rd(0x300000), 0x0002_aa55);
    assert_eq!(rig.rd(0x300004), 0xffff_2211);
    assert_eq!(rig.rd(0x30fffc), 0xffff_ffff);
    rig.wr(0x300000, 0);
    assert_eq!(rig.rd(0x300000), 0x0002_aa55, "PROM is missing its signature");
}

#[test]
fn units_answer_idle_and_done() {
    let mut rig = Rig::new();
    rig.mask(0x121c4c, 0x3f, 2);
    assert_eq!(rig.rd(0x121c4c) & 0x3f, 0);
    assert_eq!((rig.rd(0x121c70), rig.rd(0x121c74), rig.rd(0x121c78)), (1, 1, GF100.gpcs));
    rig.wr(0x070000, 1);
    assert_eq!(rig.rd(0x070000) & 2, 0);
    for flush in [0x070004, 0x070010] {
        rig.wr(flush, 1);
        assert_eq!(rig.rd(flush) & 3, 0);
    }
    rig.wr(0x17e8cc, 0);
    rig.wr(0x17e8d0, 0x10);
    rig.wr(0x17e8c8, 4);
    assert_eq!(rig.rd(0x1410c8), 0);
    assert_eq!((rig.rd(0x400700), rig.rd(0x40060c) & 1, rig.rd(0x002640)), (0, 0, 0));
    assert_eq!(rig.mock.take(), [Call::FlushApertures]);
}

#[test]
fn clocks_have_no_pll_that_runs() {
    let mut rig = Rig::new();
    for pll in [0x00e800, 0x00e820, 0x132000, 0x132020, 0x137000, 0x137020, 0x137040, 0x1370e0] {
        assert_eq!(rig.rd(pll) & 1, 0, "{pll:#x}");
    }
}

#[test]
fn timer_advances_and_takes_the_drivers_time() {
    let mut rig = Rig::new();
    rig.wr(0x009410, 5);
    rig.wr(0x009400, 0x1000_0000);
    let (first, high) = (rig.rd(0x009400), rig.rd(0x009410));
    assert_eq!((first & 0x1f, high), (0, 5));
    assert!((0x1000_0000..0x1000_0200).contains(&first), "{first:#x}");
    assert!(rig.rd(0x009400) > first, "the clock must advance, because the driver's timeouts depend on it");
}

#[test]
fn two_timers_do_not_share_their_time() {
    let (mut a, mut b) = (Rig::new(), Rig::new());
    a.wr(0x009410, 77);
    assert_eq!(b.rd(0x009410), 0);
    assert_eq!(a.rd(0x009410), 77);
}

#[test]
fn started_pmu_reports_its_queues() {
    let mut rig = Rig::new();
    rig.wr(0x000200, 0xffff_ffff);
    rig.wr(0x10a014, 0xffff);
    assert_eq!(rig.rd(0x10a04c), 0);
    rig.mask(0x000200, 0x2000, 0);
    rig.mask(0x000200, 0x2000, 0x2000);
    assert_eq!(rig.rd(0x10a10c) & 6, 0);
    rig.wr(0x10a1c0, 0x0100_0000);
    rig.wr(0x10a1c4, 0x1234);
    assert_eq!(rig.rd(0x10a4d0), 0, "the PMU must not report queues before its start");
    rig.wr(0x10a10c, 0);
    rig.wr(0x10a104, 0);
    rig.wr(0x10a100, 2);
    let (send, receive) = (rig.rd(0x10a4d0), rig.rd(0x10a4dc));
    assert!(send >> 16 > 0 && receive >> 16 > 0 && send & 0xffff != receive & 0xffff);
    rig.wr(0x10a580, 1);
    assert_eq!(rig.rd(0x10a580), 1, "the driver must acquire the mutex");
}

#[test]
fn copy_engines_take_their_firmware() {
    let mut rig = Rig::new();
    for base in [0x104000, 0x105000] {
        assert_eq!(rig.rd(base + 0x12c) & 0xf, 3, "version");
        let sizes = rig.rd(base + 0x108);
        assert!(sizes & 0x1ff >= 9 && (sizes >> 9) & 0x1ff >= 2, "the 2446 code dwords fit: {sizes:#x}");
        rig.wr(base + 0x014, 0xffff_ffff);
        rig.wr(base + 0x180, 0x0100_0000);
        rig.wr(base + 0x188, 0);
        rig.wr(base + 0x184, 0xdead_beef);
        rig.wr(base + 0x1c0, 0x0100_0000);
        rig.wr(base + 0x1c4, 1);
        rig.wr(base + 0x10c, 1);
        rig.wr(base + 0x104, 0);
        rig.wr(base + 0x100, 2);
        rig.wr(base + 0x048, 3);
        assert_eq!(rig.rd(base + 0x048), 3);
    }
    assert_eq!(rig.denied(), [""; 0]);
}

#[test]
fn pbdmas_are_counted_by_both_kernels() {
    let mut rig = Rig::new();
    rig.wr(0x002204, 0xffff_ffff);
    assert_eq!(rig.rd(0x002204).count_ones(), 3, "6.1");
    rig.mask(0x000204, 0xffff_ffff, 0xffff_ffff);
    assert_eq!(rig.rd(0x000204).count_ones(), 3, "6.12");
}

/// Uploads the firmware of FECS and GPCCS, appends their register lists, and starts FECS, as nouveau does.
fn start_graph(rig: &mut Rig) {
    rig.wr(0x000200, 0xffff_ffff);
    rig.wr(0x000260, 0);
    for falcon in [0x409000, 0x41a000] {
        rig.wr(falcon + 0x1c0, 0x0100_0000);
        for value in [0x10, 0x20, 0x30] {
            rig.wr(falcon + 0x1c4, value);
        }
        rig.wr(falcon + 0x180, 0x0100_0000);
        rig.wr(falcon + 0x188, 0);
        rig.wr(falcon + 0x184, 0xdead_beef);
    }
    rig.wr(0x000260, 1);
    for falcon in [0x409000, 0x41a000] {
        rig.wr(falcon + 0x1c0, 0x0200_0004);
        assert_eq!(
            (rig.rd(falcon + 0x1c4), rig.rd(falcon + 0x1c4)),
            (0x20, 0x30),
            "the driver must read back its list"
        );
    }
    rig.wr(0x40910c, 0);
    rig.wr(0x409100, 2);
}

#[test]
fn graph_firmware_comes_up_and_makes_a_channel_current() {
    let mut rig = Rig::new();
    assert_eq!(rig.rd(0x409604), 0x0001_0001, "one ROP, one GPC");
    assert_eq!(rig.rd(0x502608), 4, "texture clusters");
    assert_eq!(rig.rd(0x50a608), 0, "a second GPC exists");
    assert_eq!(rig.rd(0x409800), 0);
    start_graph(&mut rig);
    assert_eq!(rig.rd(0x409800) >> 31, 1, "ready");
    assert_eq!(rig.rd(0x409804), GF100.graph_context_bytes);

    // Set the channel of the golden context.
    rig.wr(0x404170, 0x12);
    assert_eq!(rig.rd(0x404170) & 0x10, 0);
    rig.wr(0x409840, 0x8000_0000);
    assert_eq!(rig.rd(0x409800) >> 31, 0);
    rig.wr(0x409500, 0x8000_0123);
    rig.wr(0x409504, 1);
    assert_eq!(rig.rd(0x409800) >> 31, 1);
    assert_eq!(rig.rd(0x409b00), 0x8000_0123);

    // Direct context writes and state registers are only stored.
    rig.wr(0x400208, 0x8000_0000);
    rig.wr(0x400204, 0);
    rig.wr(0x400200, 0x1000);
    assert_eq!(rig.rd(0x400700) & 4, 0);
    rig.wr(0x40448c, 5);
    rig.wr(0x404488, 0x8000_9097);
    rig.wr(0x419848, 0x77);
    assert_eq!(rig.rd(0x419848), 0x77);

    // Unload the driver.
    rig.wr(0x409b04, 0x8000_0123);
    rig.mask(0x409b04, 0x8000_0000, 0);
    rig.wr(0x409000, 0x100);
    assert_eq!(rig.rd(0x409b00) >> 31, 0);
    assert_eq!(rig.denied(), [""; 0]);
    assert_eq!(rig.mock.take(), [], "the backend was called");
}

#[test]
fn context_commands_are_checked() {
    let mut rig = Rig::new();
    rig.wr(0x409500, 0x8000_0001);
    rig.wr(0x409504, 1);
    assert_eq!(rig.rd(0x409800), 0, "FECS responds without firmware");
    start_graph(&mut rig);
    rig.wr(0x409840, 0x8000_0000);
    rig.wr(0x409504, 0x10);
    assert_eq!(rig.rd(0x409800) >> 31, 0, "FECS accepts an unknown command");
    rig.wr(0x409500, 0x8000_0000 | (VRAM >> 12) as u32);
    rig.wr(0x409504, 1);
    assert_eq!(rig.rd(0x409800) >> 31, 0, "FECS accepts an instance block beyond VRAM");
    assert_eq!(rig.denied(), ["fecs.COMMAND: address outside VRAM", "fecs.COMMAND: unsupported feature"]);
}

#[test]
fn graph_reset_restarts_firmware_of_this_guest_only() {
    let mut rig = Rig::new();
    start_graph(&mut rig);
    rig.wr(0x418880, 0x5555);
    rig.mask(0x000200, 0x1000, 0);
    rig.mask(0x000200, 0x1000, 0x1000);
    assert_eq!((rig.rd(0x409800), rig.rd(0x418880)), (0, 0));
    assert_eq!(rig.mock.take(), [Call::ResetEngine(0)]);
}

#[test]
fn apertures_and_tlb_flush_are_translated() {
    let mut rig = Rig::new();
    rig.wr(0x001714, 0x8000_0f00);
    rig.wr(0x001704, 0x8000_0e00);
    rig.wr(0x100c80, 0x00ff_8000);
    assert_ne!(rig.rd(0x100c80) & 0x00ff_0000, 0, "the queue has no free slots");
    rig.wr(0x100cb8, 0x00d0 << 4);
    rig.wr(0x100cbc, 0x8000_0001);
    assert_ne!(rig.rd(0x100c80) & 0x8000, 0, "done");
    rig.wr(0x100cb8, (0x0012_3456 << 4) | 3);
    rig.wr(0x100cbc, 0x8000_0005);
    rig.wr(0x100cbc, 0x8000_0003);
    rig.mask(0x001704, 0x8000_0000, 0);
    assert_eq!(rig.rd(0x001704), 0x0e00);
    let vram = |address| Some(Place::Vram(GuestVramAddr(address)));
    assert_eq!(
        rig.mock.take(),
        [
            Call::BindAperture(Aperture::Bar3, vram(0xf0_0000)),
            Call::BindAperture(Aperture::Bar1, vram(0xe0_0000)),
            Call::FlushTlb(vram(0xd_0000), false),
            Call::FlushTlb(Some(Place::Ram(nvspec::addr::Gpa(0x1_2345_6000))), true),
            Call::FlushTlb(None, false),
            Call::BindAperture(Aperture::Bar1, None),
        ]
    );
}

#[test]
fn reset_gives_the_power_on_state_but_keeps_the_counters() {
    let mut rig = Rig::new();
    rig.enable_msi();
    start_graph(&mut rig);
    rig.wr(0x003000, 0xc000_0010);
    rig.wr(0x001700, 0x12);
    rig.rd(0x06000c);
    rig.config(4, &[6]);
    rig.mock.take();
    rig.gpu.reset(&mut rig.mock);
    assert_eq!(
        rig.mock.take(),
        [
            Call::ResetFifo,
            Call::BindAperture(Aperture::Bar1, None),
            Call::BindAperture(Aperture::Bar3, None),
            Call::BusMaster(false),
            Call::PlaceWindow(Some(GuestVramAddr(0))),
        ]
    );
    let fresh = Rig::new();
    let changed: Vec<_> = rig
        .gpu
        .inspect()
        .into_iter()
        .zip(fresh.gpu.inspect())
        .filter(|(now, fresh)| now != fresh)
        .map(|((name, value), _)| (name, value))
        .collect();
    assert_eq!(changed, [("denied_accesses", "1".to_owned())]);
    for offset in [0x409800, 0x003000, 0x001700, 0x000140, 0x000200] {
        assert_eq!(rig.rd(offset), 0, "{offset:#x}");
    }
}

#[test]
fn unknown_registers_are_denied_and_counted_by_name() {
    let mut rig = Rig::new();
    assert_eq!(rig.rd(0x06000c), windows::UNCLAIMED);
    rig.wr(0x06000c, 1);
    rig.wr(0x06000c, 2);
    rig.wr(0x001718, 0x8000_0000);
    let counts: Vec<_> =
        rig.gpu.denials().iter().map(|(site, _, count)| (site.to_string(), count.reads, count.writes)).collect();
    assert_eq!(counts, [("pbus.PEEPHOLE_BLOCK".to_owned(), 0, 1), ("0x06000c".to_owned(), 1, 2)]);
    assert_eq!(rig.mock.take(), []);
}

#[test]
fn the_other_large_page_size_is_refused() {
    let mut rig = Rig::new();
    rig.mask(0x100c80, 1, 1);
    assert_eq!(rig.rd(0x100c80) & 1, 0);
    assert_eq!(rig.denied(), ["pfb.MMU_CTRL: unsupported feature"]);
}

#[test]
fn invalid_vgpu_config_error_names_problem() {
    let refused = |change: fn(&mut crate::VGpuConfig)| {
        let mut config = crate::VGpuConfig::of_chip(&GF100, VRAM, std::sync::Arc::from([]));
        change(&mut config);
        crate::VGpu::new(config).expect_err("the configuration was accepted").to_string()
    };
    assert_eq!(
        refused(|config| config.vram_bytes = (20 << 20) + 1),
        "VRAM of 0x1400001 bytes: must be a multiple of 1 MiB from 16 MiB to 1 TiB"
    );
    assert_eq!(refused(|config| config.channels = 129), "129 channels: must be from 1 to 128");
    assert_eq!(
        refused(|config| config.vbios = vec![0; 70_000].into()),
        "a VBIOS of 70000 bytes does not fit in PROM, which has 65536 bytes"
    );
    assert_eq!(
        refused(|config| config.pci.bar0_bytes = 4 << 20),
        "BAR0 has 0x400000 bytes, but the chip's registers need 0x1000000"
    );
}
