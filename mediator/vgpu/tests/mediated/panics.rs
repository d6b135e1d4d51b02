//! Tests injected panics. An inconsistent VM or card is taken out of service, and all others continue.

use super::{A, B, CARD_MIB, driver, rig};
use card::Card;
use nvspec::regs::pmc;
use rig::altered::{Alter, Altered};
use rig::driver::{CE0, ce_copy, object};
use simgpu::SimGpu;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

/// A card that panics when its interrupt status is read while the flag is set.
struct Panicking(Arc<AtomicBool>);

impl Alter for Panicking {
    fn read32(&self, card: &SimGpu, offset: u32) -> u32 {
        assert!(offset != pmc::INTR_0::OFFSET || !self.0.load(Ordering::Relaxed), "injected");
        card.read32(offset)
    }
}

fn panics(act: impl FnOnce()) -> bool {
    catch_unwind(AssertUnwindSafe(act)).is_err()
}

/// Waits until the card's threads have made the VM's server disconnect its client.
fn wait_told(rig: &::rig::Rig, guest: &::rig::Guest) {
    while !guest.is_disconnected() {
        assert!(rig.host.failure().is_some());
        std::thread::sleep(Duration::from_millis(1));
    }
}

#[test]
fn panic_under_card_lock_fails_card_and_notifies_vms() {
    let (rig, other) = (rig(), rig());
    let mut victim = driver(&rig, 0);
    let mut neighbour = driver(&other, 0);
    assert!(panics(|| {
        let _state = rig.host.lock();
        panic!("injected");
    }));
    let why = rig.host.failure().expect("the card has failed").to_owned();
    assert!(why.contains("while it changed the card"), "{why}");
    wait_told(&rig, &victim.guest);
    // No thread may use state that was changed only partly.
    assert!(panics(|| drop(rig.host.lock())));
    assert!(panics(|| _ = victim.channel(1)));
    let told = victim.guest.remove().unwrap_err().to_string();
    assert!(told.contains("the card has failed"), "{told}");
    // The card was reset, so no engine runs.
    assert_eq!(rig.card.read32(nvspec::regs::pfifo::SCHED_EN::OFFSET), 0);
    let mut channel = neighbour.channel(1);
    super::stuck::works(&mut neighbour, &mut channel, 3);
}

#[test]
fn panic_of_interrupt_thread_fails_card_and_notifies_vms() {
    let armed = Arc::new(AtomicBool::new(false));
    let rig = ::rig::Rig::wrapped(CARD_MIB, |card| Altered::over(card, Panicking(Arc::clone(&armed))));
    let mut victim = driver(&rig, 0);
    let mut channel = victim.channel(1);
    victim.buffer(&channel, A, 1, 1);
    victim.buffer(&channel, B, 1, 2);
    armed.store(true, Ordering::Relaxed);
    // The interrupt may arrive, and make the card fail, before this call returns.
    panics(|| victim.submit(&mut channel, &[object(CE0), ce_copy(A, B, 1)].concat()));
    while rig.host.failure().is_none() {
        std::thread::sleep(Duration::from_millis(1));
    }
    wait_told(&rig, &victim.guest);
    assert!(panics(|| drop(rig.host.lock())));
}

#[test]
fn panic_in_one_vm_leaves_card_and_neighbours_in_service() {
    let rig = rig();
    let (bad, mut good) = (driver(&rig, 0), driver(&rig, 1));
    assert!(panics(|| bad.guest.while_locked(|| panic!("injected"))));
    assert_eq!(rig.host.failure(), None);
    let mut channel = good.channel(1);
    super::stuck::works(&mut good, &mut channel, 4);
    // The failed VM's status can still be read, and the VM can be removed.
    assert_eq!(bad.guest.status().vram_mib, super::VM_MIB);
    bad.guest.remove().unwrap();
    super::stuck::works(&mut good, &mut channel, 5);
}

#[test]
fn status_of_locked_vm_can_be_read() {
    let rig = rig();
    let mut driver = driver(&rig, 0);
    let before = driver.guest.counter("channel_binds");
    let _channel = driver.channel(1);
    driver.guest.while_locked(|| {
        // This returns the last published status, because the reader cannot acquire the VM's lock.
        let seen = driver.guest.status();
        assert_eq!(seen.counters["channel_binds"], before);
        assert_eq!(driver.guest.status().vram_mib, super::VM_MIB);
    });
    // The lock's holder has published the status, as requested.
    assert!(driver.guest.published().counters["channel_binds"] > before);
    assert!(driver.guest.counter("channel_binds") > before);
}
