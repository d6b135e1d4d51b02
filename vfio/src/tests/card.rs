//! Tests an open card: registers, apertures, memory, interrupts, resets, and the mediator on such a card.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use card::{Aperture, Card, DmaError, DmaMemory, InterruptMode};
use nvspec::regs::{pbus, pfifo, pmc, ppci};
use proptest::prelude::*;
use rig::Rig;
use rig::driver::{At, Driver, M2MF, PAGE, m2mf_copy, object};
use vfio_bindings::bindings::vfio::{
    VFIO_DEVICE_FLAGS_PCI, VFIO_DEVICE_FLAGS_RESET, VFIO_PCI_ERR_IRQ_INDEX, VFIO_PCI_REQ_IRQ_INDEX,
};
use vfio_host::fake::Plan;
use vm_memory::MmapRegion;
use vmm_sys_util::eventfd::{EFD_NONBLOCK, EventFd};

use super::fake::{GROUP, Machine, Nature};
use crate::Reset;
use crate::kernel::Dependent;

/// Polls `happened` until it returns true, for at most a minute.
fn eventually(mut happened: impl FnMut() -> bool) -> bool {
    (0..60_000).any(|_| {
        let so = happened();
        if !so {
            std::thread::sleep(Duration::from_millis(1));
        }
        so
    })
}

fn memory(len: usize) -> DmaMemory {
    DmaMemory::new(Arc::new(MmapRegion::<()>::new(len).unwrap()), 0, len, true).unwrap()
}

#[test]
fn registers_are_reached_mapped_and_by_the_file() {
    for mappable in [true, false] {
        let machine = Machine::new(Nature { mappable, ..Nature::default() });
        let card = machine.card();
        assert_eq!(card.read32(pmc::BOOT_0::OFFSET), machine.sim.read32(pmc::BOOT_0::OFFSET));
        card.write32(pbus::PRAMIN_WINDOW::OFFSET, 0x123);
        assert_eq!(machine.sim.read32(pbus::PRAMIN_WINDOW::OFFSET), 0x123);
        // Offsets that are unaligned or outside BAR0 read as ones, and writes to them are lost.
        for offset in [1, 2, 16 << 20, u32::MAX, u32::MAX - 3] {
            card.write32(offset, 0);
            assert_eq!(card.read32(offset), u32::MAX, "{offset:#x}");
        }
    }
}

/// Creates a mediator for a card with BARs that are mappable if `mappable` is true.
fn with_bar1(mappable: bool) -> (Arc<Machine>, Rig) {
    mediated(Nature { mappable, ..Nature::default() })
}

/// Creates a mediator for a card on a host with the properties `nature`.
fn mediated(nature: Nature) -> (Arc<Machine>, Rig) {
    let machine = std::cell::OnceCell::new();
    let config = simgpu::Config { vram_mib: 64, compute_workers: Some(1), ..simgpu::Config::default() };
    let rig = Rig::made(&config, &rig::sharing(), |sim| {
        let machine = machine.get_or_init(|| Machine::around(sim, nature));
        Arc::new(machine.card())
    });
    (machine.into_inner().unwrap(), rig)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]
    #[test]
    fn apertures_take_accesses_of_any_length(offset in 0_u64..64, len in 0_usize..64, mappable: bool) {
        // BAR3 maps the mediator's own structures, and no channel in this test uses the end of USERD in BAR1.
        let (machine, rig) = with_bar1(mappable);
        let card = rig.host.card();
        let at = (64 << 10) - 128 + offset;
        let data: Vec<u8> = (0..len as u8).map(|byte| byte ^ 0x5a).collect();
        let mut before = vec![0; 256];
        machine.sim.aperture_read(Aperture::Bar3, at - 64, &mut before);
        card.aperture_write(Aperture::Bar3, at, &data);
        let (mut own, mut seen) = (vec![0; len], vec![0; 256]);
        card.aperture_read(Aperture::Bar3, at, &mut own);
        machine.sim.aperture_read(Aperture::Bar3, at - 64, &mut seen);
        before[64..64 + len].copy_from_slice(&data);
        prop_assert_eq!((own, seen), (data, before));
    }
}

#[test]
fn accesses_beyond_an_aperture_read_as_ones() {
    let machine = Machine::new(Nature::default());
    let card = machine.card();
    for offset in [128 << 20, (128 << 20) - 1, u64::MAX, u64::MAX - 3] {
        let mut data = [0; 4];
        card.aperture_write(Aperture::Bar1, offset, &data);
        card.aperture_read(Aperture::Bar1, offset, &mut data);
        assert_eq!(data, [0xff; 4], "{offset:#x}");
    }
}

#[test]
fn memory_is_pinned_for_two_at_the_same_time() {
    // In this test, the kernel completes a mapping only after another mapping has begun.
    let together = Some(Arc::new(std::sync::Barrier::new(2)));
    let machine = Machine::new(Nature { pins_together: together, ..Nature::default() });
    let card = Arc::new(machine.card());
    let (tell, told) = std::sync::mpsc::channel();
    for iova in [0x10_0000, 0x20_0000] {
        let (card, tell) = (Arc::clone(&card), tell.clone());
        std::thread::spawn(move || tell.send(card.map_dma(iova, memory(0x2000))));
    }
    for _ in 0..2 {
        told.recv_timeout(Duration::from_secs(60)).expect("one waits for the other").unwrap();
    }
    card.unmap_dma(0x10_0000, 0x2000).unwrap();
    assert!(matches!(card.unmap_dma(0x10_0000, 0x2000), Err(DmaError::NotMapped { .. })));
    card.unmap_dma(0x20_0000, 0x2000).unwrap();
}

#[test]
fn memory_is_mapped_until_it_is_unmapped_or_the_card_is_closed() {
    let machine = Machine::new(Nature { limit: 3, ..Nature::default() });
    let card = machine.card();
    card.map_dma(0x10_0000, memory(0x3000)).unwrap();
    let overlaps = [0x10_0000, 0x10_2000, 0xf_f000];
    for iova in overlaps {
        let error = card.map_dma(iova, memory(0x2000)).unwrap_err();
        assert!(matches!(error, DmaError::Overlap { existing: 0x10_0000, .. }), "{error}");
    }
    assert!(matches!(card.map_dma(0x800, memory(0x1000)), Err(DmaError::Unaligned { .. })));
    assert!(matches!(card.map_dma(0xff_ffff_f000, memory(0x2000)), Err(DmaError::OutOfReach { bits: 40, .. })));
    assert!(matches!(card.map_dma(!0xfff, memory(0x2000)), Err(DmaError::OutOfReach { .. })));
    for iova in [0xfee0_0000, 0xfedf_f000, 0xfeef_f000, 1 << 39, (1 << 39) - 0x1000] {
        let error = card.map_dma(iova, memory(0x2000)).unwrap_err();
        assert!(matches!(error, DmaError::Reserved { .. }), "{iova:#x}: {error}");
    }
    assert_eq!(card.unmappable(), [0xfee0_0000..0xfef0_0000, 1 << 39..1 << 40]);
    for (iova, len) in [(0x10_0000, 0x1000), (0x10_1000, 0x2000), (0, 0x3000)] {
        assert!(matches!(card.unmap_dma(iova, len), Err(DmaError::NotMapped { .. })), "{iova:#x}+{len:#x}");
    }
    card.map_dma(0x20_0000, memory(0x1000)).unwrap();
    card.unmap_dma(0x10_0000, 0x3000).unwrap();
    card.map_dma(0x10_0000, memory(0x1000)).unwrap();
    assert_eq!(machine.mappings(), [(0x10_0000, 0x1000), (0x20_0000, 0x1000)]);
    card.map_dma(0x30_0000, memory(0x1000)).unwrap();
    let error = card.map_dma(0x40_0000, memory(0x1000)).unwrap_err().to_string();
    assert!(error.contains("there are 3; raise `dma_entry_limit`"), "{error}");
    drop(card);
    assert_eq!(machine.mappings(), []);
}

#[test]
fn memory_over_pin_limit_error_says_which_limit_to_raise() {
    use rustix::process::{Resource, getrlimit, setrlimit};
    let machine = Machine::new(Nature { memlock: 0x2000, ..Nature::default() });
    let card = machine.card();
    card.map_dma(0, memory(0x2000)).unwrap();
    // No other code in this process locks memory, so lowering the limit is harmless and needs no privilege.
    let before = getrlimit(Resource::Memlock);
    let limit = before.current.unwrap_or(1 << 30);
    setrlimit(Resource::Memlock, rustix::process::Rlimit { current: Some(limit), ..before }).unwrap();
    let error = card.map_dma(0x10_0000, memory(0x1000)).unwrap_err().to_string();
    assert!(error.contains(&format!("this process may pin {limit:#x} bytes; raise RLIMIT_MEMLOCK")), "{error}");
    assert!(error.contains("LimitMEMLOCK=infinity"), "{error}");
    assert_eq!(machine.mappings(), [(0, 0x2000)]);
    // Without a limit, the error reports that the host lacks memory.
    setrlimit(Resource::Memlock, before).unwrap();
    if before.current.is_none() {
        assert!(matches!(card.map_dma(0x10_0000, memory(0x1000)), Err(DmaError::Host(_))));
    }
}

#[test]
fn vm_ram_over_pin_limit_is_rejected_and_others_continue() {
    // The pin limit suffices for the mediator's own memory and 1 MiB of guest RAM, but not for 64 MiB.
    let (machine, rig) = mediated(Nature { memlock: 2 << 20, ..Nature::default() });
    let mut large = rig.guest(0, 16, 8);
    assert!(!large.map_ram(0, 64 << 20, true), "exceeds the limit");
    assert!(rig.host.failure().is_none() && !large.is_disconnected());
    let mut driver = Driver::new(rig.guest(1, 16, 8));
    assert!(driver.guest.map_ram(0, 1 << 20, true));
    let mut channel = driver.channel(0);
    driver.buffer(&channel, 0x100_0000, 1, 7);
    driver.map(channel.space, 0x300_0000, At::Ram(0x8000), 1);
    driver.flush();
    driver.submit(&mut channel, &[object(M2MF), m2mf_copy(0x100_0000, 0x300_0000, PAGE as u32)].concat());
    driver.wait(&channel);
    assert!(driver.ram_holds(0x8000, 1, 7), "{:?}", machine.mappings());
}

#[test]
fn interrupts_change_their_kind_and_go_off() {
    let machine = Machine::new(Nature::default());
    let card = machine.card();
    let event = EventFd::new(EFD_NONBLOCK).unwrap();
    // The card signals the end of a runlist update.
    let signalled = || eventually(|| event.read().is_ok());
    let cause = || {
        card.write32(pmc::ENABLE::OFFSET, u32::MAX);
        card.write32(pmc::INTR_EN_0::OFFSET, 1);
        card.write32(pfifo::INTR_EN::OFFSET, u32::MAX);
        card.write32(pfifo::RUNLIST_BASE::OFFSET, 0x100);
        card.write32(pfifo::RUNLIST::OFFSET, 0x01f0_0000);
    };
    // Neither call has an effect before an interrupt is configured.
    card.set_interrupt(InterruptMode::Msi, None);
    card.unmask_intx();
    card.set_interrupt(InterruptMode::Msi, Some(event.try_clone().unwrap()));
    cause();
    assert!(signalled(), "MSI");
    card.write32(ppci::MSI_REARM::OFFSET, ppci::MSI_REARM::REARM.mask());
    assert!(signalled(), "it is still pending");
    card.set_interrupt(InterruptMode::Intx, Some(event.try_clone().unwrap()));
    assert!(signalled(), "INTx");
    card.unmask_intx();
    assert!(signalled(), "it is still asserted");
    card.write32(pmc::INTR_EN_0::OFFSET, 0);
    card.set_interrupt(InterruptMode::Msi, None);
    card.unmask_intx();
}

#[test]
fn resets_end_interrupts_and_leave_the_card_enabled() {
    let resettable = VFIO_DEVICE_FLAGS_PCI | VFIO_DEVICE_FLAGS_RESET;
    let on_the_bus = vec![Dependent { group: GROUP, address: Machine::address() }];
    for (wanted, expected) in
        [(Reset::Auto, vec!["function reset"]), (Reset::Bus, vec!["bus reset"]), (Reset::Units, vec![])]
    {
        let nature = Nature { flags: resettable, dependents: on_the_bus.clone(), ..Nature::default() };
        let machine = Machine::new(nature);
        machine.sysfs.spoil(Plan::CARD.address, "reset_method", "flr\n");
        let card = machine.open(wanted).unwrap();
        card.set_interrupt(InterruptMode::Msi, Some(EventFd::new(EFD_NONBLOCK).unwrap()));
        card.write32(pmc::INTR_EN_0::OFFSET, 1);
        card.map_dma(0, memory(0x1000)).unwrap();
        card.reset();
        assert_eq!(machine.log(), expected);
        assert_eq!(card.read32(pmc::INTR_EN_0::OFFSET) & 1, 0);
        assert_eq!((machine.enabled(), machine.mappings().len()), ((true, true), 1), "memory remains mapped");
    }
    // A bus reset that loses the VBIOS settings must be reported when the card is opened again.
    let nature = Nature { dependents: on_the_bus, reset_loses_post: true, ..Nature::default() };
    let machine = Machine::new(nature);
    let card = machine.open(Reset::Bus).unwrap();
    card.reset();
    drop(card);
    let error = machine.open(Reset::Bus).unwrap_err().to_string();
    assert!(error.contains("has not been initialised by its VBIOS"), "{error}");
}

#[test]
fn mediator_runs_a_guest_on_it() {
    for node in [false, true] {
        runs_a_guest(Nature { node, ..Nature::default() });
    }
}

fn runs_a_guest(nature: Nature) {
    let (machine, rig) = mediated(nature);
    let mut driver = Driver::new(rig.guest(1, 16, 8));
    assert!(driver.guest.map_ram(0, 1 << 20, true));
    let mut channel = driver.channel(0);
    // Copy data from VRAM to VRAM, and then to guest RAM through the IOMMU.
    let (from, to, ram) = (0x100_0000, 0x200_0000, 0x300_0000);
    driver.buffer(&channel, from, 4, 7);
    let target = driver.buffer(&channel, to, 4, 9);
    driver.map(channel.space, ram, At::Ram(0x8000), 4);
    driver.flush();
    let bytes = 4 * PAGE as u32;
    driver.submit(&mut channel, &[object(M2MF), m2mf_copy(from, to, bytes), m2mf_copy(to, ram, bytes)].concat());
    // The guest waits for the card's interrupt, which is delivered through VFIO.
    driver.wait(&channel);
    assert!(driver.vram_holds(target, 4, 7) && driver.ram_holds(0x8000, 4, 7));
    drop(driver);
    drop(rig);
    // A thread of the card's owner may briefly hold the card.
    assert!(eventually(|| machine.mappings().is_empty()), "{:?}", machine.mappings());
}

#[test]
fn vms_lose_card_taken_by_host_and_get_the_reason() {
    let cases = [(VFIO_PCI_REQ_IRQ_INDEX, "the host needs it back"), (VFIO_PCI_ERR_IRQ_INDEX, "its bus reported")];
    for (index, expected) in cases {
        let (machine, rig) = with_bar1(true);
        let guest = rig.guest(0, 16, 8);
        assert_eq!(rig.host.card().lost(), None);
        machine.take_away(index);
        assert!(
            eventually(|| rig.host.failure().is_some_and(|why| why.starts_with(expected))),
            "{:?}",
            rig.host.failure()
        );
        assert!(eventually(|| guest.is_disconnected()), "its client is notified");
        let told = guest.remove().unwrap_err().to_string();
        assert!(told.contains(expected), "{told}");
    }
}

/// A way to make a card fail.
type Mishap = fn(&Machine);

#[test]
fn vms_lose_card_that_is_reset_externally_or_stops_answering() {
    let cases: [(Mishap, &str); 2] = [
        (|machine| machine.sim.reset(), "another program has reset it"),
        (|machine| machine.silent.store(true, Ordering::SeqCst), "it no longer responds"),
    ];
    for (happens, expected) in cases {
        let (machine, rig) = with_bar1(true);
        let mut driver = Driver::new(rig.guest(0, 16, 8));
        let mut channel = driver.channel(0);
        driver.submit(&mut channel, &[]);
        driver.wait(&channel);
        happens(&machine);
        assert!(
            eventually(|| rig.host.failure().is_some_and(|why| why.contains(expected))),
            "{:?}",
            rig.host.failure()
        );
        assert!(eventually(|| driver.guest.is_disconnected()), "its client is notified");
        let told = driver.guest.remove().unwrap_err().to_string();
        assert!(told.contains(expected), "{told}");
    }
}
