//! Tests registers and windows.

use super::driver::{At, Driver, PAGE, small};
use crate::{Config, SimGpu};
use card::{Aperture, Card, InterruptMode};
use nvspec::regs::windows::pramin;
use nvspec::regs::{self, pbfb, pbfb_bcast, pbus, pfb, pfifo, pmc, ppci, ptop};
use nvspec::{Access, RegInfo};
use vmm_sys_util::eventfd::{EFD_NONBLOCK, EventFd};

/// Registers that read as values other than the stored ones. Each has its own test or is a chip constant.
const COMPUTED: &[&str] = &[
    "BOOT_0",
    "ENABLE",
    "PBDMA_ENABLE",
    "PBDMA_PRESENT",
    "TIME_0",
    "TIME_1",
    "ALARM_0",
    "BAR_FLUSH",
    "L2_FLUSH",
    "L2_INVALIDATE",
    "MMU_CTRL",
    "MMU_INVALIDATE",
    "CBC_PARAM",
    "MEM_AMOUNT",
    "GPC_COUNT",
    "TPC_PER_GPC",
    "ENGINES_DISABLED",
    "ROP_COUNT",
    "COMMAND",
    "CONFIG",
    "MSI_REARM",
    "TPC_COUNT",
    "UNITS",
    "CURRENT",
    "DMEM_CONTROL",
    "DMEM_DATA",
    "IMEM_DATA",
    "CPU_CONTROL",
    "INTR_EN_SET",
    "INTR_EN_CLEAR",
    "QUEUE_TAIL",
    "INTR",
    "RUNLIST",
    "PREEMPT",
    "CHANNEL",
    "CHANNEL_STATE",
    "PWR_HANDSHAKE",
    "UCODE_ERROR",
    "MAILBOX",
    "FAULT_TRIGGER",
    "QUEUE_INFO",
    "MESSAGE_INFO",
    "INTR_EN",
    "CHANNEL_CURRENT",
    "INTR_LTC",
    "ENG_RUNLIST",
    "ENG_RUNLIST_BASE",
    "RUNLIST_STATUS",
    "ENGINE_STATUS",
    "NON_STALL_ID",
    "PBDMA_INTR_ID",
];

fn plain(info: &RegInfo) -> bool {
    !COMPUTED.contains(&info.name)
}

fn offsets(info: &RegInfo) -> impl Iterator<Item = u32> + use<> {
    let (offset, stride) = (info.offset, info.stride);
    (0..info.count).map(move |index| offset + index * stride)
}

#[test]
fn plain_registers_have_their_reset_values() {
    let card = SimGpu::for_test(&small());
    let wrong: Vec<_> = regs::blocks()
        .flat_map(|(block, _, _, info)| info.iter().map(move |info| (block, info)))
        .filter(|(_, info)| plain(info) && info.access != Access::Wo)
        .flat_map(|(block, info)| offsets(info).map(move |offset| (block, info.name, offset, info.reset)))
        .filter(|(_, _, offset, reset)| card.read32(*offset) != *reset)
        .collect();
    assert_eq!(wrong, []);
}

#[test]
fn plain_registers_obey_their_access_kind() {
    let card = SimGpu::for_test(&small());
    let mut wrong = Vec::new();
    for (block, _, _, infos) in regs::blocks() {
        for info in infos.iter().filter(|info| plain(info)) {
            for offset in offsets(info) {
                let before = card.read32(offset);
                card.write32(offset, u32::MAX);
                let ones = card.read32(offset);
                card.write32(offset, 0);
                let zeros = card.read32(offset);
                let expected = match info.access {
                    Access::Rw => (u32::MAX, 0),
                    Access::Ro => (before, before),
                    Access::Wo => (0, 0),
                    Access::W1c => (0, 0),
                };
                if (ones, zeros) != expected {
                    wrong.push((block, info.name, offset, ones, zeros));
                }
            }
        }
    }
    assert_eq!(wrong, []);
}

#[test]
fn reset_brings_every_register_back() {
    let driver = Driver::new(&small());
    let fresh = SimGpu::for_test(&small());
    driver.card.reset();
    let wrong: Vec<_> = regs::blocks()
        .flat_map(|(_, _, _, info)| info.iter())
        .flat_map(|info| offsets(info).map(move |offset| (info.name, offset)))
        .filter(|(_, offset)| driver.rd(*offset) != fresh.read32(*offset))
        .collect();
    assert_eq!(wrong, []);
}

#[test]
fn undeclared_registers_are_counted_and_read_the_rings_error() {
    let card = SimGpu::for_test(&small());
    assert_eq!(card.read32(0x00_0ff8), 0xbad0_da00);
    card.write32(0x00_0ff8, 5);
    assert_eq!(card.undeclared_registers(), [(0x00_0ff8, 2)]);
    assert_eq!(card.read32(0x00_0002), u32::MAX);
    assert_eq!(card.read32(16 << 20), u32::MAX);
}

#[test]
fn windows_show_the_same_memory() {
    let mut driver = Driver::new(&small());
    let at = driver.vram(1);
    driver.map_bar1(0x10_0000, at, 1);
    driver.poke(at + 8, 0x1234_5678);
    let mut data = [0; 8];
    driver.card.aperture_read(Aperture::Bar1, 0x10_0008, &mut data);
    assert_eq!(data, [0x78, 0x56, 0x34, 0x12, 0, 0, 0, 0]);
    driver.card.aperture_write(Aperture::Bar1, 0x10_0009, &[0xaa, 0xbb]);
    assert_eq!(driver.peek(at + 8), 0x12bb_aa78);
    // BAR3 is unbound, so its offsets are VRAM addresses.
    driver.card.aperture_read(Aperture::Bar3, at + 8, &mut data[..4]);
    assert_eq!(data[..4], [0x78, 0xaa, 0xbb, 0x12]);
}

#[test]
fn page_that_is_not_flushed_is_still_reached() {
    let mut driver = Driver::new(&small());
    let (first, second) = (driver.vram(1), driver.vram(1));
    driver.map_bar1(0x10_0000, first, 1);
    driver.card.aperture_write(Aperture::Bar1, 0x10_0000, &[1; 4]);
    driver.pte(driver.bar1, 0x10_0000, (second >> 8) as u32 | 1, 0);
    driver.card.aperture_write(Aperture::Bar1, 0x10_0000, &[2; 4]);
    assert_eq!((driver.peek(first), driver.peek(second)), (0x0202_0202, 0));
    driver.flush();
    driver.card.aperture_write(Aperture::Bar1, 0x10_0000, &[3; 4]);
    assert_eq!((driver.peek(first), driver.peek(second)), (0x0202_0202, 0x0303_0303));
}

#[test]
fn unmapped_aperture_page_reads_ones_and_reports_fault() {
    let driver = Driver::new(&small());
    let mut data = [0; 4];
    driver.card.aperture_read(Aperture::Bar1, 0x12_3456, &mut data);
    assert_eq!(data, [0xff; 4]);
    let unit = 4;
    assert_eq!(driver.rd(pfifo::MMU_FAULT_ID::OFFSET), 1 << unit);
    assert_eq!(driver.rd(pfifo::FAULT_VA_LO::at(unit)), 0x12_3456);
    // Expect reason 2 (page not present), hub, client 7 (BAR read).
    assert_eq!(driver.rd(pfifo::FAULT_TYPE::at(unit)), 0x742);
    assert_eq!(driver.rd(pmc::INTR_0::OFFSET), pmc::INTR_0::PFIFO.mask());
    driver.wr(pfifo::MMU_FAULT_ID::OFFSET, 1 << unit);
    assert_eq!(driver.rd(pmc::INTR_0::OFFSET), 0);
}

#[test]
fn aperture_reaches_host_memory() {
    let driver = Driver::new(&small());
    let region = driver.host(0x8000_0000, 1);
    driver.map(driver.bar1, 0x10_0000, At::Host(0x8000_0000), 1);
    driver.card.aperture_write(Aperture::Bar1, 0x10_0010, b"data");
    let mut seen = [0; 4];
    use vm_memory::{Bytes, VolatileMemory};
    region.as_volatile_slice().read_slice(&mut seen, 0x10).expect("within");
    assert_eq!(&seen, b"data");
    driver.card.unmap_dma(0x8000_0000, PAGE).expect("mapped");
    driver.card.aperture_write(Aperture::Bar1, 0x10_0010, b"late");
    region.as_volatile_slice().read_slice(&mut seen, 0x10).expect("within");
    assert_eq!(&seen, b"data");
    assert_eq!(driver.card.counters().lost, 1);
}

#[test]
fn msi_is_sent_per_rearm_and_intx_per_unmask() {
    let mut driver = Driver::new(&small());
    let event = EventFd::new(EFD_NONBLOCK).expect("event");
    driver.card.set_interrupt(InterruptMode::Msi, Some(event.try_clone().expect("clone")));
    driver.submit_runlist(&[]);
    assert_eq!(event.read().expect("runlist interrupt"), 1);
    driver.submit_runlist(&[]);
    assert!(event.read().is_err(), "not re-armed");
    driver.wr(ppci::MSI_REARM::OFFSET, 0xff);
    assert_eq!(event.read().expect("still pending"), 1);
    driver.wr(pfifo::RUNLIST_INTR::OFFSET, u32::MAX);
    driver.wr(ppci::MSI_REARM::OFFSET, 0xff);
    assert!(event.read().is_err(), "nothing pending");

    driver.card.set_interrupt(InterruptMode::Intx, Some(event.try_clone().expect("clone")));
    driver.submit_runlist(&[]);
    assert_eq!(event.read().expect("level"), 1);
    driver.card.unmask_intx();
    assert_eq!(event.read().expect("still asserted"), 1);
    driver.wr(pmc::INTR_EN_0::OFFSET, 0);
    driver.card.unmask_intx();
    assert!(event.read().is_err(), "disabled");
}

#[test]
fn tlb_control_always_has_room_and_is_always_done() {
    let driver = Driver::new(&small());
    driver.wr(pfb::MMU_CTRL::OFFSET, 1);
    assert_eq!(driver.rd(pfb::MMU_CTRL::OFFSET), 0x00ff_8001);
}

#[test]
fn vbios_is_in_the_rom_and_the_memory_size_in_the_controllers() {
    let driver = Driver::new(&small());
    let image = crate::vbios::build(&nvspec::chip::GF100);
    let rom = nvspec::regs::windows::prom::BASE;
    let first = u32::from_le_bytes([image[0], image[1], image[2], image[3]]);
    assert_eq!(driver.rd(rom), first);
    assert_eq!(driver.rd(rom + image.len() as u32), u32::MAX);
    assert_eq!(driver.rd(regs::pbfb::MEM_AMOUNT::at(0)), 64);
}

#[test]
fn pramin_follows_its_window() {
    let driver = Driver::new(&small());
    driver.poke(0x20_0000, 1);
    driver.poke(0x20_0004, 2);
    driver.wr(pbus::PRAMIN_WINDOW::OFFSET, 0x1f);
    assert_eq!(driver.rd(nvspec::regs::windows::pramin::BASE + 0x1_0004), 2);
}

#[test]
fn card_without_post_reports_no_memory() {
    let card = SimGpu::new(&Config { posted: false, ..small() }).unwrap();
    for _ in 0..2 {
        assert!(!ptop::DEVINIT_STATUS::DONE.is_set(card.read32(ptop::DEVINIT_STATUS::OFFSET)));
        assert_eq!((card.read32(pbfb::MEM_AMOUNT::at(0)), card.read32(pbfb_bcast::MEM_AMOUNT::OFFSET)), (0, 0));
        card.write32(pramin::BASE, 0x1234);
        assert_eq!(card.read32(pramin::BASE), u32::MAX, "no unit responds");
        card.reset();
    }
}
