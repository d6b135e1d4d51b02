//! Tests the device with a simulated driver, a real queue in memory, and threads as workers.

mod support;

use std::sync::atomic::Ordering;
use std::sync::mpsc::channel;

use support::{CONTROL_BYTES, Event, Guest, TABLE, blob, command, context, destroy, doorbell, map, unref, wait};
use vm_memory::{Bytes, VolatileMemory};
use vmm_glue::{Device, RegionIndex};
use worker_link::ToWorker;

#[test]
fn driver_finds_one_capset_and_no_display() {
    let mut guest = Guest::new();
    let (kind, info) = guest.send(&command(0x108, 0, &[0, 0]));
    assert_eq!((kind, &info[24..36]), (0x1102, &[24, 0, 0, 0, 1, 0, 0, 0, 16, 0, 0, 0][..]));
    assert_eq!(guest.send(&command(0x109, 0, &[24, 1])).0, 0x1103);
    assert_eq!(guest.send(&command(0x109, 0, &[24, 2])).0, 0x1205);
    let (kind, displays) = guest.send(&command(0x100, 0, &[]));
    assert_eq!((kind, displays.len()), (0x1101, 408));
    assert!(displays[24..].iter().all(|&byte| byte == 0));
    assert_eq!(guest.send(&command(0x777, 0, &[])).0, 0x1200);
    assert_eq!(guest.send(&[1, 2, 3]).0, 0x1205);
}

#[test]
fn program_shares_blob_with_its_worker_and_waits() {
    let mut guest = Guest::new();
    guest.program(3, 0x10_0000);
    assert_eq!(guest.event(), Event::Started);
    let message = ToWorker::Blob { id: 0, kind: 1, serial: 1, offset: 0x10_0000, size: CONTROL_BYTES };
    assert_eq!(guest.event(), Event::Message(message));
    let window = guest.window();
    window.as_volatile_slice().store(41u64, 0x10_0000, Ordering::Release).unwrap();
    // The guest submits two waits. The second wait, on its own ring, completes first.
    guest.post(1, &wait(3, (7, 1), 43));
    guest.post(2, &wait(3, (8, 2), 42));
    guest.done(&doorbell(3));
    let (slot, bytes) = guest.answer();
    assert_eq!((slot, u32::from_le_bytes(bytes[..4].try_into().unwrap())), (2, 0x1100));
    assert_eq!((bytes[4], bytes[8], bytes[16], bytes[20]), (3, 8, 3, 2), "the response contains the fence");
    assert_eq!(guest.answers(), 0);
    // The device also detects words that change without a message from the worker.
    window.as_volatile_slice().store(43u64, 0x10_0000, Ordering::Release).unwrap();
    assert_eq!(guest.answer().0, 1);
    guest.until(|guest| guest.function.programs().len() == 1);
    let [program] = &guest.function.programs()[..] else { panic!("one program") };
    assert_eq!((program.name.as_str(), program.window_bytes), ("prog", CONTROL_BYTES));
}

#[test]
fn dropped_blob_is_zeroed_after_its_worker_has_removed_it() {
    let mut guest = Guest::new();
    guest.program(1, 0);
    guest.done(&blob(1, 9, 5 << 32 | 4, 0x1_0000));
    guest.done(&map(9, 0x40_0000));
    let window = guest.window();
    window.as_volatile_slice().store(7u64, 0x40_0008, Ordering::Release).unwrap();
    guest.done(&command(0x209, 0, &[9, 0]));
    guest.done(&unref(9));
    let events: Vec<_> = guest.events.try_iter().collect();
    assert!(events.contains(&Event::Message(ToWorker::Remove { id: 5, serial: 2 })), "{events:?}");
    assert_eq!(window.as_volatile_slice().load::<u64>(0x40_0008, Ordering::Acquire).unwrap(), 0);
    // A range that the program has never used is also zeroed.
    window.as_volatile_slice().store(7u64, 0x80_0008, Ordering::Release).unwrap();
    guest.done(&blob(1, 10, 6 << 32 | 4, 0x1_0000));
    guest.done(&map(10, 0x80_0000));
    assert_eq!(window.as_volatile_slice().load::<u64>(0x80_0008, Ordering::Acquire).unwrap(), 0);
}

#[test]
fn killed_program_frees_its_worker_and_other_goes_on() {
    let mut guest = Guest::new();
    guest.program(1, 0);
    guest.program(2, 0x20_0000);
    guest.post(3, &wait(1, (1, 1), 100));
    guest.done(&doorbell(2));
    guest.post(4, &destroy(1));
    let slots = [guest.answer().0, guest.answer().0];
    assert_eq!(slots, [3, 4], "the wait is completed when its context is destroyed");
    guest.done(&unref(1));
    guest.until(|guest| guest.events.try_iter().any(|event| event == Event::Ended));
    guest.post(5, &wait(2, (1, 1), 1));
    assert_eq!(guest.answer().0, 5);
    guest.until(|guest| guest.function.programs().len() == 1);
}

#[test]
fn ended_worker_is_reported_in_the_control_blob() {
    let mut guest = Guest::with(|threads| threads.refuses = true);
    guest.program(1, 0x10_0000);
    let window = guest.window();
    let state = || window.as_volatile_slice().load::<u64>(0x10_0040, Ordering::Acquire).unwrap();
    guest.until(|_| state() == cuda_ring::state::LOST);
    guest.post(1, &wait(1, (1, 1), 100));
    assert_eq!(guest.answer().0, 1, "no word will change");
    guest.done(&blob(1, 9, 1 << 32 | 4, 0x1_0000));
    assert_eq!(guest.send(&map(9, 0)).0, 0x1205);
    guest.done(&unref(1));
}

#[test]
fn reset_ends_workers_and_the_next_boot_sees_zeros() {
    let mut guest = Guest::new();
    // The worker may exit between any two steps of the reset.
    for _ in 0..200 {
        guest.program(1, 0);
        let window = guest.window();
        let word = || window.as_volatile_slice().load::<u64>(0x18, Ordering::Acquire).unwrap();
        assert_eq!(word(), 0);
        window.as_volatile_slice().store(7u64, 0x18, Ordering::Release).unwrap();
        guest.post(1, &wait(1, (1, 1), 100));
        guest.write(RegionIndex::Bar0, 0x14, &[0]);
        guest.until(|guest| guest.status() == 0);
        guest.until(|guest| guest.events.try_iter().any(|event| event == Event::Ended));
        assert_eq!(word(), 0);
        assert_eq!(guest.answers(), 0, "the wait belongs to the previous boot");
        assert!(guest.function.programs().is_empty());
        guest.drive();
    }
}

#[test]
fn function_stops_at_any_moment() {
    for round in 0..3000 {
        let mut guest = Guest::new();
        for _ in 0..round % 3 {
            guest.write(RegionIndex::Bar0, 0x10, &[0, 0]);
        }
        // A lost request to stop would block this thread forever.
        drop(guest);
    }
}

#[test]
fn next_vmm_gets_another_window() {
    let mut guest = Guest::new();
    guest.program(1, 0);
    let window = guest.window();
    guest.device.disconnected();
    guest.until(|guest| guest.status() == 0);
    let next = guest.window();
    window.as_volatile_slice().store(7u64, 8, Ordering::Release).unwrap();
    assert_eq!(next.as_volatile_slice().load::<u64>(8, Ordering::Acquire).unwrap(), 0);
    guest.drive();
    guest.program(1, 0);
    next.as_volatile_slice().store(1u64, 0, Ordering::Release).unwrap();
    guest.done(&doorbell(1));
    guest.post(1, &wait(1, (1, 1), 2));
    assert_eq!(guest.answer().0, 1, "the worker uses the new window");
}

#[test]
fn registers_answer_while_a_worker_does_not_start() {
    let (open, gate) = channel();
    let mut guest = Guest::with(|threads| threads.gate = Some(gate));
    guest.done(&context(1));
    guest.done(&blob(1, 1, 1, CONTROL_BYTES));
    guest.post(0, &map(1, 0));
    // The executor is blocked in the launcher. An access that waited for the executor would block this test forever.
    guest.until(|guest| guest.function.counters()[1].1 == 3);
    for _ in 0..100 {
        assert_eq!(guest.status(), 0xf);
        guest.write(RegionIndex::Bar0, 0x3000, &[0, 0]);
    }
    guest.device.dma_unmap(0x1000_0000, 0x1000);
    assert_eq!(guest.answers(), 0);
    open.send(()).unwrap();
    assert_eq!(guest.answer().0, 0);
}

#[test]
fn long_indirect_chain_is_answered() {
    let mut guest = Guest::new();
    let bytes = context(1);
    guest.poke(TABLE - 0x1000, &bytes);
    let parts = 16_384u16;
    for part in 0..parts {
        let (address, len) = if part == 0 { (TABLE - 0x1000, bytes.len() as u32) } else { (0x1000, 4096) };
        guest.describe(TABLE + u64::from(part) * 16, address, len, 1, part + 1);
    }
    guest.describe(TABLE + u64::from(parts) * 16, 0x2_0000, 0x200, 2, 0);
    guest.describe(0x1000, TABLE, (u32::from(parts) + 1) * 16, 4, 0);
    guest.offer(0);
    let (_, bytes) = guest.answer();
    assert_eq!(u32::from_le_bytes(bytes[..4].try_into().unwrap()), 0x1100);
}

#[test]
fn broken_rings_stop_the_device_until_reset() {
    let mut guest = Guest::new();
    // This index is ahead by more than the queue's number of entries.
    guest.poke(0x2002, &5000u16.to_le_bytes());
    guest.write(RegionIndex::Bar0, 0x3000, &[0, 0]);
    guest.until(|guest| guest.status() & 0x40 != 0);
    guest.write(RegionIndex::Bar0, 0x14, &[0]);
    guest.until(|guest| guest.status() == 0);
    guest.drive();
    guest.program(1, 0);
}

#[test]
fn queue_in_withdrawn_memory_is_not_used() {
    let mut guest = Guest::new();
    guest.program(1, 0);
    guest.link.take_back(0).unwrap();
    guest.device.dma_unmap(0, support::RAM);
    guest.write(RegionIndex::Bar0, 0x3000, &[0, 0]);
    guest.until(|guest| guest.status() & 0x40 != 0);
}

#[test]
fn no_doorbell_is_lost_under_suppression() {
    let mut guest = Guest::new();
    guest.program(1, 0);
    for _ in 0..2000 {
        guest.done(&doorbell(1));
    }
    guest.post(1, &wait(1, (1, 1), 1));
    assert_eq!(guest.answer().0, 1);
    let [(_, kicks), (_, commands), ..] = guest.function.counters();
    assert_eq!(commands, 2004);
    assert!(kicks <= commands);
    guest.until(|guest| !guest.kicks_are_suppressed());
}

#[test]
fn dropped_device_ends_its_workers() {
    let mut guest = Guest::new();
    guest.program(1, 0);
    guest.program(2, 0x20_0000);
    let Guest { device, events, sender, .. } = guest;
    drop((device, sender));
    // The threads have exited, so the channel is closed after their last events.
    let ended = events.iter().filter(|event| *event == Event::Ended).count();
    assert_eq!(ended, 2);
}
