//! Tests VMs with mapped apertures that continue under a new owner. The client keeps the same memory mapped, and guest
//! CPUs use it in the meantime.

use super::super::handover::handover;
use super::*;
use ::rig::Handover;
use fastrand::Rng;
use std::time::Duration;

/// Creates a card that can be handed over, and a VM whose client maps its apertures.
fn made() -> (Handover, Rig, Driver) {
    let handover = handover(16);
    let rig = handover.rig();
    let driver = driver(&rig, 0);
    (handover, rig, driver)
}

#[test]
fn aperture_contents_stay_in_place_after_hand_over() {
    let (handover, mut rig, mut driver) = made();
    let (cpu, cpu3) = (Cpu::for_region(&driver.guest, Bar1), Cpu::for_region(&driver.guest, Bar3));
    let mut channel = driver.channel(1);
    let from = driver.buffer(&channel, A, 4, 1);
    let to = driver.buffer(&channel, B, 4, 2);
    show(&mut driver, 0, BAR1_MAPPED_AT, from, 4);
    // Map one page twice. The first mapping is its home.
    show(&mut driver, 0, BAR1_MAPPED_AT + 0x10_0000, from, 1);
    // This page of the channel's table contains the entry for B.
    let entry = channel.space.table + (B >> 12) * 8;
    show(&mut driver, 1, HIGH3, entry & !0xfff, 1);
    for round in 0..4u32 {
        cpu.write(BAR1_MAPPED_AT, &pages(10 + round, 4));
        driver.submit(&mut channel, &[object(CE0), ce_copy(A, B, 4)].concat());
        handover.hand_over(&mut rig, &mut [&mut driver.guest]);
        driver.wait(&channel);
        assert!(driver.vram_holds(to, 4, 10 + round), "round {round}");
        assert_eq!(cpu.read(BAR1_MAPPED_AT, 4 * PAGE), pages(10 + round, 4));
        assert!(cpu.is_zero(BAR1_MAPPED_AT + 0x10_0000, PAGE), "the page has one home");
        // Page tables that the guest's CPU changes through an aperture are read at the next flush.
        let other = driver.vram(1);
        cpu3.write(HIGH3 + (entry & 0xfff), &((other >> 8) | 1).to_le_bytes());
        driver.flush();
        copy(&mut driver, &mut channel, A, B, 4);
        assert!(driver.vram_holds(other, 1, 10 + round));
        cpu3.write(HIGH3 + (entry & 0xfff), &((to >> 8) | 1).to_le_bytes());
        driver.flush();
    }
    hide(&mut driver, 0, BAR1_MAPPED_AT, 4);
    assert!(driver.vram_holds(from, 4, 13) && cpu.is_zero(BAR1_MAPPED_AT, 4 * PAGE));
    assert_eq!(cpu.read(BAR1_MAPPED_AT + 0x10_0000, PAGE), pattern(13, 0), "the other slot waited for the page");
    assert_eq!(driver.guest.counter("faults"), 0);
    driver.guest.remove().unwrap();
}

#[test]
fn doorbells_through_mapping_during_hand_over_are_seen() {
    let (handover, mut rig, mut driver) = made();
    // BAR3 shows USERD at offset 0.
    let (cpu, base) = (Cpu::for_region(&driver.guest, Bar3), 2 * PAGE);
    let mut channel = driver.channel(2);
    let mut dice = Rng::with_seed(5);
    for round in 1..20u32 {
        driver.buffer(&channel, A, 1, round);
        let to = driver.buffer(&channel, B, 1, 50);
        let put = driver.queue_fenced(&mut channel, &[object(CE0), ce_copy(A, B, 1)].concat());
        let late = Duration::from_micros(dice.u64(..3000));
        std::thread::scope(|scope| {
            scope.spawn(|| {
                std::thread::sleep(late);
                cpu.write(base + userd::GP_PUT, &put.to_le_bytes());
            });
            handover.hand_over(&mut rig, &mut [&mut driver.guest]);
        });
        driver.wait(&channel);
        assert!(driver.vram_holds(to, 1, round), "round {round}");
        while cpu.read(base + userd::GP_GET, 4) != put.to_le_bytes() {
            std::thread::yield_now();
        }
    }
    assert_eq!(driver.guest.counter("faults"), 0);
}

#[test]
fn doorbells_that_were_messages_are_not_rung_again() {
    let (handover, mut rig, mut driver) = made();
    // BAR3 shows USERD at offset 0. A stock driver rings doorbells through BAR1.
    let cpu = Cpu::for_region(&driver.guest, Bar3);
    let (mut channel, mut other) = (driver.channel(2), driver.channel(3));
    let work = [object(CE0), ce_copy(A, B, 1)].concat();
    for channel in [&channel, &other] {
        driver.buffer(channel, A, 1, 1);
        driver.buffer(channel, B, 1, 50);
    }
    for round in 1..5 {
        for _ in 0..3 {
            driver.submit(&mut channel, &work);
        }
        driver.wait(&channel);
        let entries = driver.guest.counter("ring_entries");
        handover.hand_over(&mut rig, &mut [&mut driver.guest]);
        // The next owner must poll both channels to find this doorbell.
        let put = driver.queue_fenced(&mut other, &work);
        cpu.write(3 * PAGE + userd::GP_PUT, &put.to_le_bytes());
        driver.wait(&other);
        assert_eq!(driver.guest.counter("ring_entries"), entries + 1, "round {round}");
    }
    assert_eq!(driver.guest.counter("faults"), 0);
}

#[test]
fn next_client_gets_other_memory_and_removed_vm_frees_all() {
    let (handover, mut rig, mut driver) = made();
    let before = rig.usage().2;
    let cpu = Cpu::for_region(&driver.guest, Bar1);
    let channel = driver.channel(1);
    let at = driver.buffer(&channel, A, 1, 1);
    show(&mut driver, 0, BAR1_MAPPED_AT, at, 1);
    handover.hand_over(&mut rig, &mut [&mut driver.guest]);
    driver.guest.reconnect();
    cpu.write(BAR1_MAPPED_AT, &pattern(3, 0));
    assert!(Cpu::for_region(&driver.guest, Bar1).is_zero(BAR1_MAPPED_AT, PAGE));
    driver.guest.remove().unwrap();
    assert!(rig.usage().2 <= before, "I/O addresses are left");
}

#[test]
fn other_settings_are_the_next_clients() {
    let (handover, mut rig, mut driver) = made();
    let cpu = Cpu::for_region(&driver.guest, Bar1);
    let channel = driver.channel(1);
    let at = driver.buffer(&channel, A, 1, 1);
    show(&mut driver, 0, BAR1_MAPPED_AT, at, 1);
    driver.guest.configured(|settings| settings.apertures = Apertures::Trapped);
    handover.hand_over(&mut rig, &mut [&mut driver.guest]);
    assert_eq!(cpu.read(BAR1_MAPPED_AT, PAGE), pattern(1, 0), "this VM's client still maps the aperture");
    copy_is_right(&mut driver, channel);
    driver.guest.reconnect();
    assert!([Bar0, Bar1, Bar3].map(|region| driver.guest.mapped(region)).iter().all(Option::is_none));
    // The opposite change must also work.
    driver.guest.configured(|settings| settings.apertures = Apertures::Remapped);
    driver.bring_up();
    handover.hand_over(&mut rig, &mut [&mut driver.guest]);
    assert!(driver.guest.mapped(Bar1).is_none(), "this VM has no mapping");
    driver.guest.reconnect();
    assert!([Bar0, Bar1, Bar3].map(|region| driver.guest.mapped(region)).iter().all(Option::is_some));
}

/// Checks that the VM works after the handover.
fn copy_is_right(driver: &mut Driver, mut channel: Channel) {
    let to = driver.buffer(&channel, B, 1, 7);
    copy(driver, &mut channel, A, B, 1);
    assert!(driver.vram_holds(to, 1, 1));
}
