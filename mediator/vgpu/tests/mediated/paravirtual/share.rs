//! Tests segments shared between a VM's channels, or between VMs.

use super::*;
use crate::handover::edited::{edit_one, length, zero_one};
use crate::oversubscribe::{WAIT_TIMEOUT, driver_with, fast, rig_with};
use fastrand::Rng;
use pv::abi::share::{ABROAD, CREATE, EXCLUSIVE, READ_ONLY, control, mode};

/// Copies two pages from `from` to `to` in a channel's address space.
fn transfer(driver: &mut Driver, channel: &mut Channel, from: u64, to: u64) {
    driver.submit(channel, &[object(CE0), ce_copy(from, to, 2)].concat());
    driver.wait(channel);
}

fn get(driver: &mut Driver, interface: &mut Interface, key: u64, flags: u32, mode: u32) -> Reply {
    interface.call(&mut driver.guest, &Ops::new().share_get(key, 2 * PAGE, flags, mode))
}

fn attach(driver: &mut Driver, interface: &mut Interface, id: u64, channel: u8, flags: u32) -> Reply {
    interface.call(&mut driver.guest, &Ops::new().attach(id as u32, channel.into(), flags))
}

#[test]
fn two_address_spaces_share_segment_writes() {
    let rig = rig();
    let (mut driver, mut interface) = guest(&rig, 0, None);
    // The guest keeps the page tables of one address space, and the mediator keeps those of the other.
    let mut first = driver.channel(0);
    let mut second = channel(&mut driver, &mut interface, 1, 1);
    driver.list(&[0, 1]);
    let own = driver.buffer(&first, A, 2, 0x33);
    let to = driver.vram(2);
    assert_eq!(
        interface.call(&mut driver.guest, &Ops::new().run(2, (B / PAGE) as u32, 2, pte(to), 16).flush(1)).status,
        0
    );
    let id = get(&mut driver, &mut interface, 42, CREATE, 0).value();
    assert_eq!(get(&mut driver, &mut interface, 42, 0, 0).value(), id);
    refused(&get(&mut driver, &mut interface, 42, CREATE | EXCLUSIVE, 0), 0, Status::Exists);
    refused(&get(&mut driver, &mut interface, 43, 0, 0), 0, Status::NoObject);
    let here = attach(&mut driver, &mut interface, id, 0, 0).value();
    let there = attach(&mut driver, &mut interface, id, 1, READ_ONLY).value();
    let count = interface.call(&mut driver.guest, &Ops::new().control(id as u32, control::ATTACHED, 0)).value();
    assert_eq!(count, 2);
    transfer(&mut driver, &mut first, A, here);
    transfer(&mut driver, &mut second, there, B);
    assert!(driver.vram_holds(own, 2, 0x33) && driver.vram_holds(to, 2, 0x33));
    // A channel that has attached the segment read-only faults when it writes.
    driver.submit(&mut second, &[object(CE0), ce_copy(B, there, 1)].concat());
    assert_eq!(driver.wait_fault().va, there);
}

#[test]
fn detached_segment_is_unreachable_and_last_detach_frees_memory() {
    let rig = rig();
    let (mut driver, mut interface) = guest(&rig, 0, None);
    let before = rig.usage().0.mediator;
    let mut work = driver.channel(0);
    driver.buffer(&work, A, 2, 1);
    let id = get(&mut driver, &mut interface, 1, CREATE, 0).value();
    let va = attach(&mut driver, &mut interface, id, 0, 0).value();
    transfer(&mut driver, &mut work, A, va);
    let with = rig.usage().0.mediator;
    assert!(with > before);
    assert_eq!(interface.call(&mut driver.guest, &Ops::new().control(id as u32, control::REMOVE, 0)).status, 0);
    refused(&get(&mut driver, &mut interface, 1, 0, 0), 0, Status::NoObject);
    transfer(&mut driver, &mut work, A, va);
    // Even a segment that was in use is inaccessible after the reply.
    assert_eq!(interface.call(&mut driver.guest, &Ops::new().detach(id as u32, 0)).status, 0);
    refused(&interface.call(&mut driver.guest, &Ops::new().detach(id as u32, 0)), 0, Status::NoObject);
    driver.submit(&mut work, &[object(CE0), ce_copy(A, va, 1)].concat());
    assert_eq!(driver.wait_fault().va, va);
    driver.unbind(&work);
    let gone = rig.usage().0.mediator;
    assert!(gone < with, "{gone} of {with} chunks");
}

#[test]
fn a_channel_that_ends_lets_go() {
    let rig = rig();
    let (mut driver, mut interface) = guest(&rig, 0, None);
    let work = driver.channel(0);
    let id = get(&mut driver, &mut interface, 1, CREATE, 0).value();
    assert_ne!(attach(&mut driver, &mut interface, id, 0, 0).value(), 0);
    assert_eq!(driver.guest.counter("pv_attachments"), 1);
    driver.unbind(&work);
    assert_eq!(driver.guest.counter("pv_attachments"), 0);
    assert_eq!(interface.call(&mut driver.guest, &Ops::new().control(id as u32, control::ATTACHED, 0)).value(), 0);
    refused(&attach(&mut driver, &mut interface, id, 0, 0), 0, Status::NoObject);
}

#[test]
fn other_vms_see_segments_that_group_and_mode_allow() {
    let rig = rig();
    let (mut one, mut of_one) = guest(&rig, 0, Some("team"));
    let (mut two, mut of_two) = guest(&rig, 1, Some("team"));
    let (mut three, mut of_three) = guest(&rig, 2, Some("others"));
    let mut writer = one.channel(0);
    let mut reader = two.channel(0);
    three.channel(0);
    one.buffer(&writer, A, 2, 0x77);
    let to = two.buffer(&reader, A, 2, 0);
    // Keys of the VM are separate from keys of the group.
    let private = get(&mut one, &mut of_one, 5, CREATE, mode::READ | mode::WRITE).value();
    refused(&get(&mut two, &mut of_two, 5, 0, 0), 0, Status::NoObject);
    refused(&get(&mut two, &mut of_two, 5, ABROAD, 0), 0, Status::NoObject);
    refused(&attach(&mut two, &mut of_two, private, 0, 0), 0, Status::NoObject);
    let shared = get(&mut one, &mut of_one, 5, CREATE | ABROAD, mode::READ).value();
    assert_eq!(get(&mut two, &mut of_two, 5, ABROAD, 0).value(), shared);
    refused(&get(&mut three, &mut of_three, 5, ABROAD, 0), 0, Status::NoObject);
    for ops in [Ops::new().attach(shared as u32, 0, 0), Ops::new().control(shared as u32, control::SIZE, 0)] {
        refused(&of_three.call(&mut three.guest, &ops), 0, Status::NoObject);
    }
    // Other VMs can use the segment only in the mode that its owner has set.
    refused(&attach(&mut two, &mut of_two, shared, 0, 0), 0, Status::Denied);
    let set = Ops::new().control(shared as u32, control::SET_MODE, mode::READ | mode::WRITE);
    refused(&of_two.call(&mut two.guest, &set), 0, Status::Denied);
    refused(&of_two.call(&mut two.guest, &Ops::new().control(shared as u32, control::REMOVE, 0)), 0, Status::Denied);
    let here = attach(&mut one, &mut of_one, shared, 0, 0).value();
    let there = attach(&mut two, &mut of_two, shared, 0, READ_ONLY).value();
    transfer(&mut one, &mut writer, A, here);
    transfer(&mut two, &mut reader, there, A);
    assert!(two.vram_holds(to, 2, 0x77));
    // Remove the owner. VMs that have attached the segment keep it, but it can no longer be found.
    one.guest.remove().expect("the VM can be removed");
    two.guest.vram_write(to, &[0; 2 * PAGE as usize]);
    transfer(&mut two, &mut reader, there, A);
    assert!(two.vram_holds(to, 2, 0x77));
    refused(&get(&mut two, &mut of_two, 5, ABROAD, 0), 0, Status::NoObject);
    let taken = rig.usage().0.mediator;
    assert_eq!(of_two.call(&mut two.guest, &Ops::new().detach(shared as u32, 0)).status, 0);
    assert!(rig.usage().0.mediator < taken);
}

#[test]
fn segments_have_limits_and_start_empty() {
    let rig = rig();
    let (mut driver, mut interface) = guest(&rig, 0, None);
    let mut work = driver.channel(0);
    let to = driver.buffer(&work, A, 2, 1);
    // All segments of a VM together can have 4 MiB.
    refused(&interface.call(&mut driver.guest, &Ops::new().share_get(1, 8 * MIB, CREATE, 0)), 0, Status::Limit);
    refused(&interface.call(&mut driver.guest, &Ops::new().share_get(1, 1 << 40, CREATE, 0)), 0, Status::Range);
    refused(&interface.call(&mut driver.guest, &Ops::new().share_get(1, 0, CREATE, 0)), 0, Status::Range);
    refused(
        &interface.call(&mut driver.guest, &Ops::new().share_get(1, PAGE, CREATE | ABROAD, 0)),
        0,
        Status::Unsupported,
    );
    let mut ids = Vec::new();
    for key in 1..=2 {
        let id = interface.call(&mut driver.guest, &Ops::new().share_get(key, 2 * MIB, CREATE, 0)).value();
        let va = attach(&mut driver, &mut interface, id, 0, 0).value();
        transfer(&mut driver, &mut work, va, A);
        let mut data = [1; 2 * PAGE as usize];
        driver.guest.vram_read(to, &mut data);
        assert!(data.iter().all(|byte| *byte == 0), "segment {key}");
        driver.guest.vram_write(to, &[7; 2 * PAGE as usize]);
        transfer(&mut driver, &mut work, A, va);
        ids.push((id as u32, va));
    }
    assert_eq!(ids[1].1 - ids[0].1, 2 * MIB);
    refused(&interface.call(&mut driver.guest, &Ops::new().share_get(3, PAGE, CREATE, 0)), 0, Status::Limit);
    let gone = Ops::new().detach(ids[0].0, 0).control(ids[0].0, control::REMOVE, 0);
    assert_eq!(interface.call(&mut driver.guest, &gone).status, 0);
    let id = interface.call(&mut driver.guest, &Ops::new().share_get(3, 2 * MIB, CREATE, 0)).value();
    let va = attach(&mut driver, &mut interface, id, 0, 0).value();
    assert_eq!(va, ids[0].1, "the addresses of the detached segment are reused");
    transfer(&mut driver, &mut work, va, A);
    let mut data = [1; 2 * PAGE as usize];
    driver.guest.vram_read(to, &mut data);
    assert!(data.iter().all(|byte| *byte == 0));
}

#[test]
fn segment_attach_waits_until_card_has_memory() {
    let rig = rig_with(64, 256, fast());
    let greedy = driver_with(&rig, 0, 96, Limits::default());
    let mut settings = knowing(None);
    (settings.share.memory, settings.share.channels, settings.queue_limit) = (Limits::default(), 100, WAIT_TIMEOUT);
    settings.share.vram_bytes = 96 * MIB;
    let (mut driver, mut interface) = guest_with(&rig, 1, &settings);
    let id = get(&mut driver, &mut interface, 1, CREATE, 0).value();
    let stopped = rig.host.hold_moves();
    let ones = vec![0xff; MIB as usize];
    (4..96).for_each(|mib| greedy.guest.vram_write(mib * MIB, &ones));
    let waits = |driver: &Driver| driver.guest.counter("memory_waits");
    let last = (2..100).find(|channel| {
        driver.channel(*channel);
        waits(&driver) > 0
    });
    let last = last.expect("address spaces need more memory than the card has");
    let (begun, has_begun) = std::sync::mpsc::channel();
    let reply = std::thread::scope(|scope| {
        let attaches = scope.spawn(|| {
            begun.send(()).expect("the thread is still running");
            attach(&mut driver, &mut interface, id, last, 0)
        });
        has_begun.recv().expect("the thread starts");
        // After this delay, the request has been rejected or is waiting. On a slow host, the test could miss a
        // rejection.
        std::thread::sleep(std::time::Duration::from_millis(100));
        drop(stopped);
        attaches.join().expect("the thread does not panic")
    });
    assert_ne!(reply.value(), 0);
    assert_eq!(["faults", "channel_binds_refused"].map(|name| driver.guest.counter(name)), [0; 2]);
}

#[test]
fn attached_segments_survive_hand_over() {
    let handover = handover(0);
    let mut rig = handover.rig();
    let (mut one, mut of_one) = guest(&rig, 0, Some("team"));
    let (mut two, mut of_two) = guest(&rig, 1, Some("team"));
    let mut writer = one.channel(0);
    let mut reader = two.channel(0);
    one.buffer(&writer, A, 2, 0x77);
    one.buffer(&writer, B, 2, 0x99);
    let to = two.buffer(&reader, A, 2, 0);
    let shared = get(&mut one, &mut of_one, 5, CREATE | ABROAD, mode::READ).value();
    let private = get(&mut two, &mut of_two, 6, CREATE, 0).value();
    let here = attach(&mut one, &mut of_one, shared, 0, 0).value();
    let there = attach(&mut two, &mut of_two, shared, 0, READ_ONLY).value();
    assert_ne!(attach(&mut two, &mut of_two, private, 0, 0).value(), 0);
    for round in 0..4 {
        let (from, seed) = if round % 2 == 0 { (A, 0x77) } else { (B, 0x99) };
        transfer(&mut one, &mut writer, from, here);
        handover.hand_over(&mut rig, &mut [&mut one.guest, &mut two.guest]);
        transfer(&mut two, &mut reader, there, A);
        assert!(two.vram_holds(to, 2, seed), "round {round}");
        // The segment must be found again at the same address.
        assert_eq!(get(&mut two, &mut of_two, 5, ABROAD, 0).value(), shared);
        assert_eq!(attach(&mut one, &mut of_one, shared, 0, 0).value(), here);
        let count = of_one.call(&mut one.guest, &Ops::new().control(shared as u32, control::ATTACHED, 0)).value();
        assert_eq!((count, two.guest.counter("pv_attachments")), (2, 2));
        refused(&attach(&mut two, &mut of_two, shared, 0, 0), 0, Status::Exists);
    }
    // Modified segment data must be rejected or be valid, and must not change the running VMs.
    let mut dice = Rng::with_seed(5);
    let mut denied = 0;
    for _ in 0..80 {
        let edit = |file: &mut Vec<u8>| drop(edit_one(file, &mut dice, |name| name.ends_with(".segments")));
        denied += u32::from(handover.offer(&rig, &mut [&mut one.guest, &mut two.guest], edit).is_err());
    }
    assert!(denied > 20, "{denied} were refused");
    // Zeroing any nonzero byte must cause a rejection, except in the access mode of a mapping. One of these changes
    // moves a mapping over another one.
    let of_segments = |name: &str| name == "vgpu.segments";
    let mut bytes = 0;
    let measured = |file: &mut Vec<u8>| bytes = length(file, of_segments);
    handover.offer(&rig, &mut [&mut one.guest, &mut two.guest], measured).unwrap();
    let mut accepted = 0;
    for at in 0..bytes {
        let mut changes = false;
        let edit = |file: &mut Vec<u8>| changes = zero_one(file, of_segments, at);
        let offered = handover.offer(&rig, &mut [&mut one.guest, &mut two.guest], edit);
        accepted += u32::from(changes && offered.is_ok());
    }
    assert_eq!(accepted, 1, "of {bytes} bytes only the `read-only` flag may differ");
    transfer(&mut one, &mut writer, A, here);
    transfer(&mut two, &mut reader, there, A);
    assert!(two.vram_holds(to, 2, 0x77));
    // The segment can be released as usual.
    let taken = rig.usage().0.mediator;
    assert_eq!(of_one.call(&mut one.guest, &Ops::new().control(shared as u32, control::REMOVE, 0)).status, 0);
    assert_eq!(of_one.call(&mut one.guest, &Ops::new().detach(shared as u32, 0)).status, 0);
    for segment in [shared, private] {
        assert_eq!(of_two.call(&mut two.guest, &Ops::new().detach(segment as u32, 0)).status, 0);
    }
    two.submit(&mut reader, &[object(CE0), ce_copy(there, A, 1)].concat());
    assert_eq!(two.wait_fault().va, there);
    assert_eq!(of_two.call(&mut two.guest, &Ops::new().control(private as u32, control::REMOVE, 0)).status, 0);
    assert!(rig.usage().0.mediator < taken);
}
