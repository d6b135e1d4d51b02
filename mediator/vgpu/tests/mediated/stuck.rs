//! Tests engines whose work never ends.

use super::{A, B, CARD_MIB, Rig, driver, fill, is_filled, rig, usage};
use card::Card;
use nvspec::fifo::{VirtualChannelId, engine};
use nvspec::regs::{pfifo, pmc};
use rig::altered::{Alter, Altered};
use rig::driver::{CE0, Channel, Driver, M2MF, PAGE, ce_copy, m2mf_copy, object};
use simgpu::{EngineId, Fault, FaultKind, SimGpu};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// Makes an engine hang at the next copy of a new channel, and waits for the hang.
pub(super) fn hang(rig: &Rig, driver: &mut Driver, engine: EngineId) -> Channel {
    let mut channel = driver.channel(1);
    driver.buffer(&channel, A, 1, 1);
    driver.buffer(&channel, B, 1, 2);
    let copy = match engine {
        EngineId::Graph => [object(M2MF), m2mf_copy(A, B, PAGE as u32)].concat(),
        _ => [object(CE0), ce_copy(A, B, 1)].concat(),
    };
    // This copy makes the card clear PGRAPH for the VM before the fault is injected.
    driver.submit(&mut channel, &copy);
    driver.wait(&channel);
    assert!(rig.card.inject(Fault { engine, kind: FaultKind::Hang, after: 0, count: 1 }));
    driver.submit(&mut channel, &copy);
    let unit = if engine == EngineId::Graph { 0 } else { 4 };
    while !pfifo::ENGINE_STATUS::BUSY.is_set(rig.card.read32(pfifo::ENGINE_STATUS::at(unit))) {
        std::thread::yield_now();
    }
    channel
}

pub(super) fn works(driver: &mut Driver, channel: &mut Channel, seed: u32) {
    driver.buffer(channel, A, 1, seed);
    let to = driver.buffer(channel, B, 1, 99);
    driver.submit(channel, &[object(CE0), ce_copy(A, B, 1)].concat());
    driver.wait(channel);
    assert!(driver.vram_holds(to, 1, seed), "a copy engine works");
    let to = driver.buffer(channel, B, 1, 98);
    driver.submit(channel, &[object(M2MF), m2mf_copy(A, B, PAGE as u32)].concat());
    driver.wait(channel);
    assert!(driver.vram_holds(to, 1, seed), "M2MF works");
}

#[test]
fn vm_with_a_hung_engine_goes_and_others_use_the_engine_again() {
    for engine in [EngineId::Copy0, EngineId::Graph] {
        let rig = rig();
        let mut other = driver(&rig, 1);
        let mut channel = other.channel(1);
        works(&mut other, &mut channel, 4);
        let before = usage(&rig);
        let mut bad = driver(&rig, 0);
        hang(&rig, &mut bad, engine);
        bad.guest.remove().unwrap();
        assert_eq!(usage(&rig), before, "{engine:?}");
        works(&mut other, &mut channel, 5);
        // The VM's memory is zeroed and assigned to the next VM.
        let next = rig.guest(2, 16, 4);
        assert!(is_filled(&next, 0));
    }
}

#[test]
fn client_that_leaves_a_hung_engine_is_cleaned_up_after() {
    let rig = rig();
    let mut bad = driver(&rig, 0);
    hang(&rig, &mut bad, EngineId::Copy0);
    fill(&bad.guest, 0x77);
    bad.guest.reconnect();
    assert!(is_filled(&bad.guest, 0));
    let Driver { mut guest, .. } = bad;
    assert!(guest.map_ram(0, super::MIB, true));
    let mut driver = Driver::new(guest);
    let mut channel = driver.channel(1);
    works(&mut driver, &mut channel, 3);
}

#[test]
fn guest_unbinding_or_preempting_hung_channel_can_continue() {
    let rig = rig();
    let mut driver = driver(&rig, 0);
    let hung = hang(&rig, &mut driver, EngineId::Copy0);
    driver.unbind(&hung);
    let hung = hang(&rig, &mut driver, EngineId::Graph);
    driver.guest.wr(pfifo::PREEMPT::OFFSET, u32::from(hung.id));
    driver.unbind(&hung);
    let mut channel = driver.channel(2);
    works(&mut driver, &mut channel, 6);
    assert_eq!(rig.usage().1, 1);
}

/// A guest ring with a single entry.
struct Ring([u8; 8]);

impl channels::GuestRing for Ring {
    fn read(&mut self, _va: nvspec::addr::GpuVa, data: &mut [u8]) -> Result<(), channels::Unmapped> {
        data.copy_from_slice(&self.0);
        Ok(())
    }
}

impl channels::GuestMemory for Ring {
    fn read(&mut self, _place: nvspec::addr::Place, _data: &mut [u8]) -> Result<(), channels::Unreadable> {
        Err(channels::Unreadable)
    }
}

#[test]
fn fault_of_channel_unbound_before_service_blocks_no_vm() {
    let rig = rig();
    let (mut bad, mut good) = (driver(&rig, 0), driver(&rig, 1));
    let mut other = good.channel(1);
    let mut channel = bad.channel(1);
    bad.buffer(&channel, A, 1, 1);
    // This submission makes the card clear PGRAPH for the VM, and admits the VM's channel.
    bad.submit(&mut channel, &[]);
    bad.wait(&channel);
    let put = bad.queue(&mut channel, &[object(CE0), ce_copy(A, B, 1)].concat());
    let mut ring = Ring([0; 8]);
    bad.guest.vram_read(channel.ring + 8 * u64::from(put - 1), &mut ring.0);
    {
        // Holding this lock stops the card's interrupt thread.
        let state = &mut *rig.host.lock();
        let physical = state.channels().physical(channels::TenantId(0), VirtualChannelId(1)).unwrap();
        let (vram, all) = state.parts();
        let parts = &mut channels::Parts { card: &mut vram.memory, guest: &mut ring };
        let doorbell = all.doorbell(parts, channels::TenantId(0), VirtualChannelId(1), put).unwrap();
        assert_eq!(doorbell.channel, physical);
        let pulled = all.pull(parts, doorbell, 0).unwrap();
        assert!(all.start(parts, physical, pulled.submission.unwrap()));
        while rig.card.read32(pfifo::MMU_FAULT_ID::OFFSET) == 0 {
            std::thread::yield_now();
        }
        state.end_channel(vram::TenantId(0), VirtualChannelId(1)).unwrap();
    }
    works(&mut good, &mut other, 7);
    assert_eq!(good.faults, []);
}

/// A fast card: a released engine reaches its next fault before the mediator does anything else.
struct Quick;

impl Alter for Quick {
    fn write32(&self, card: &SimGpu, offset: u32, value: u32) {
        card.write32(offset, value);
        if offset == pfifo::SCHED_DISABLE::OFFSET && value == 0 {
            let stopped = || card.read32(pfifo::SCHED_ENABLE_ACK::OFFSET) != 0;
            // Without a next fault, wait until no channel has work.
            let state = |channel| card.read32(pfifo::CHANNEL_STATE::at(channel));
            let at_rest = || (0..16).all(|channel| !pfifo::CHANNEL_STATE::PENDING.is_set(state(channel)));
            let _ = (0..20_000).any(|_| stopped() || at_rest() || (std::thread::yield_now(), false).1);
        }
    }
}

#[test]
fn engine_faulting_again_immediately_continues() {
    let rig = Rig::wrapped(CARD_MIB, |card| Altered::over(card, Quick));
    let mut driver = driver(&rig, 0);
    let mut channels = [1, 2, 3].map(|id| driver.channel(id));
    // Queue work on all channels before the engine starts.
    rig.card.write32(pfifo::SCHED_DISABLE::OFFSET, 1 << engine::GR);
    for channel in &mut channels {
        driver.buffer(channel, A, 1, 1);
        driver.submit(channel, &[object(M2MF), m2mf_copy(A, B, PAGE as u32)].concat());
    }
    rig.card.write32(pfifo::SCHED_DISABLE::OFFSET, 0);
    let mut faulted: Vec<_> = (0..channels.len()).map(|_| driver.wait_fault().instance).collect();
    faulted.sort_unstable();
    assert_eq!(faulted, channels.map(|channel| channel.instance));
    channels.iter().for_each(|channel| driver.unbind(channel));
    let mut channel = driver.channel(4);
    works(&mut driver, &mut channel, 8);
}

/// A card that reports a fault of copy engine 0 late, after the faulting channel has left the card and the engine was
/// reset.
struct Late(Arc<AtomicBool>);

impl Alter for Late {
    fn read32(&self, card: &SimGpu, offset: u32) -> u32 {
        const UNIT: u32 = nvspec::mmu::fault::unit::CE0;
        let value = card.read32(offset);
        let at = pfifo::FAULT_INST::at(UNIT);
        match offset {
            _ if !self.0.load(Ordering::SeqCst) => value,
            pmc::INTR_0::OFFSET => value | pmc::INTR_0::PFIFO.mask(),
            pfifo::INTR::OFFSET => value | pfifo::INTR::MMU_FAULT.mask(),
            pfifo::MMU_FAULT_ID::OFFSET => value | 1 << UNIT,
            offset if offset == at => pfifo::FAULT_INST::ADDRESS.mask(),
            _ => value,
        }
    }

    fn write32(&self, card: &SimGpu, offset: u32, value: u32) {
        card.write32(offset, value);
        if offset == pfifo::MMU_FAULT_ID::OFFSET {
            self.0.store(false, Ordering::SeqCst);
        }
    }
}

#[test]
fn late_fault_report_leaves_engine_to_current_channel() {
    let late = Arc::new(AtomicBool::new(false));
    let reports = Arc::clone(&late);
    let rig = Rig::wrapped(CARD_MIB, |card| Altered::over(card, Late(reports)));
    let (mut at_work, mut other) = (driver(&rig, 0), driver(&rig, 1));
    let mut channel = other.channel(1);
    works(&mut other, &mut channel, 1);
    // The engine stays busy until it is reset.
    hang(&rig, &mut at_work, EngineId::Copy0);
    let works_for = || {
        use pfifo::ENGINE_STATUS::{BUSY, CHANNEL};
        rig.card.read32(pfifo::ENGINE_STATUS::at(engine::CE0)) & (BUSY.mask() | CHANNEL.mask())
    };
    let before = works_for();
    late.store(true, Ordering::SeqCst);
    let began = std::time::Instant::now();
    while late.load(Ordering::SeqCst) {
        // The card raises an interrupt when a runlist takes effect.
        other.unbind(&channel);
        other.bind(&channel);
        other.list(&[channel.id]);
        assert!(began.elapsed() < std::time::Duration::from_secs(60), "the fault was not handled");
        std::thread::yield_now();
    }
    // Once this lock has been acquired, all effects of the report are complete.
    drop(rig.host.lock());
    assert_eq!(works_for(), before, "the other channel's work is still in progress");
}

/// Waits until the VM has received more interrupts than `before`.
fn wait_interrupted(driver: &mut Driver, before: u64) {
    let began = std::time::Instant::now();
    while driver.guest.counter("interrupts") <= before {
        assert!(began.elapsed() < std::time::Duration::from_secs(60), "no interrupt has arrived");
        // Handle the interrupts received so far. Otherwise, no more would arrive.
        driver.service();
        std::thread::yield_now();
    }
}

#[test]
fn locked_vm_does_not_delay_interrupts_of_neighbour() {
    let rig = rig();
    let (mut slow, mut quick) = (driver(&rig, 0), driver(&rig, 1));
    let (mut held, mut other) = (slow.channel(1), quick.channel(1));
    works(&mut slow, &mut held, 3);
    works(&mut quick, &mut other, 4);
    let to = slow.buffer(&held, B, 1, 97);
    slow.service();
    let before = slow.guest.counter("interrupts");
    slow.submit(&mut held, &[object(CE0), ce_copy(A, B, 1)].concat());
    slow.guest.while_locked(|| {
        // The slow VM's work raises its interrupt before the fast VM's work does.
        for _ in 0..3 {
            quick.service();
            let before = quick.guest.counter("interrupts");
            quick.submit(&mut other, &[object(CE0), ce_copy(A, B, 1)].concat());
            wait_interrupted(&mut quick, before);
        }
    });
    wait_interrupted(&mut slow, before);
    slow.wait(&held);
    assert!(slow.vram_holds(to, 1, 3));
}

#[test]
fn guest_that_preempts_a_hung_channel_holds_up_no_neighbour() {
    let rig = rig();
    let (mut bad, mut good) = (driver(&rig, 0), driver(&rig, 1));
    let mut channel = good.channel(1);
    let hung = hang(&rig, &mut bad, EngineId::Graph);
    let id = u32::from(hung.id);
    let pending = pfifo::PREEMPT::PENDING;
    bad.guest.wr(pfifo::PREEMPT::OFFSET, id);
    assert!(pending.is_set(bad.guest.rd(pfifo::PREEMPT::OFFSET)));
    // In the meantime, the neighbour's channels are bound and unbound, and leave the card on request.
    for _ in 0..3 {
        good.guest.wr(pfifo::PREEMPT::OFFSET, u32::from(channel.id));
        let began = std::time::Instant::now();
        while pending.is_set(good.guest.rd(pfifo::PREEMPT::OFFSET)) {
            assert!(began.elapsed() < std::time::Duration::from_secs(60), "the neighbour's channel did not leave");
            std::thread::yield_now();
        }
        good.unbind(&channel);
        good.bind(&channel);
        good.list(&[channel.id]);
    }
    assert!(pending.is_set(bad.guest.rd(pfifo::PREEMPT::OFFSET)), "the channel is still on the engine");
    bad.unbind(&hung);
    assert_eq!(bad.guest.rd(pfifo::PREEMPT::OFFSET), id);
    works(&mut good, &mut channel, 6);
    let mut channel = bad.channel(2);
    works(&mut bad, &mut channel, 7);
}

#[test]
fn fault_during_fault_of_other_vm_is_still_reported() {
    // Let two VMs work at the same time, without clearing PGRAPH between them.
    let sharing = card_manager::Sharing { clear: false, ..rig::sharing() };
    let rig = Rig::made(&simgpu::Config { vram_mib: CARD_MIB, ..Default::default() }, &sharing, |card| card);
    let mut limits = rig::settings(super::VM_MIB, 4);
    limits.share.hang_limit = Some(std::time::Duration::from_millis(200));
    let mut drivers: Vec<Driver> = (0..2)
        .map(|vm| {
            let mut guest = rig.guest_with(vm, &limits);
            assert!(guest.map_ram(0, super::MIB, true));
            Driver::new(guest)
        })
        .collect();
    let mut channels: Vec<Channel> = drivers.iter_mut().map(|driver| driver.channel(1)).collect();
    // These methods are at an unmapped address.
    let nowhere = nvspec::fifo::GpEntry::new().with_address_dwords(0x7000_0000 >> 2).with_dwords(4);
    let mut rings: Vec<Ring> = (0..2).map(|_| Ring(u64::from(nowhere).to_le_bytes())).collect();
    {
        // Holding this lock stops the card's interrupt thread until both VMs have faulted.
        let state = &mut *rig.host.lock();
        for (vm, ring) in (0..).zip(&mut rings) {
            let vm = channels::TenantId(vm);
            let (vram, all) = state.parts();
            let parts = &mut channels::Parts { card: &mut vram.memory, guest: ring };
            let doorbell = all.doorbell(parts, vm, VirtualChannelId(1), 1).unwrap();
            let pulled = all.pull(parts, doorbell, 0).unwrap();
            assert!(all.start(parts, doorbell.channel, pulled.submission.unwrap()));
        }
        let faults = || rig.card.counters().fifo.faults;
        while faults() < 2 {
            std::thread::yield_now();
        }
    }
    for (driver, channel) in drivers.iter_mut().zip(&channels) {
        let fault = driver.wait_fault();
        assert_eq!((fault.instance, fault.unit), (channel.instance, nvspec::mmu::fault::unit::FIFO));
        driver.unbind(channel);
    }
    for (driver, channel) in drivers.iter_mut().zip(&mut channels) {
        *channel = driver.channel(2);
        works(driver, channel, 9);
    }
}
