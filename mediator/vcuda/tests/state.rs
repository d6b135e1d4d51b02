//! Tests that the function outlives its daemon, in upgrades and after kills.

mod support;

use std::sync::atomic::Ordering;
use std::time::Duration;

use support::{CONTROL_BYTES, Event, Guest, blob, command, context, destroy, doorbell, map, unref, wait};
use vm_memory::{Bytes, VolatileMemory};
use vmm_glue::{Device, RegionIndex};
use worker_link::{Rejoin, ToWorker};

fn store(guest: &Guest, offset: usize, value: u64) {
    guest.window().as_volatile_slice().store(value, offset, Ordering::Release).unwrap();
}

fn load(guest: &Guest, offset: usize) -> u64 {
    guest.window().as_volatile_slice().load(offset, Ordering::Acquire).unwrap()
}

/// Returns a guest whose workers find the next device through a socket in this folder.
fn guest(folder: &tempfile::TempDir) -> Guest {
    guest_with(folder, Duration::from_secs(60))
}

/// Returns a guest whose workers try to connect to the next device for up to `limit`.
fn guest_with(folder: &tempfile::TempDir, limit: Duration) -> Guest {
    let socket = folder.path().join("workers.sock");
    Guest::with(|threads| threads.rejoin = Some(Rejoin { socket, limit }))
}

/// A way for another device to continue the function.
type Way = fn(&mut Guest, fn(&mut Guest));
const WAYS: [Way; 3] = [
    |guest, meanwhile| guest.upgrade(meanwhile),
    |guest, meanwhile| guest.upgrade_from(1, meanwhile),
    |guest, meanwhile| guest.kill(meanwhile),
];

#[test]
fn program_continues_with_its_worker_in_next_device() {
    for way in WAYS {
        let folder = tempfile::tempdir().unwrap();
        let mut guest = guest(&folder);
        guest.program(3, 0x10_0000);
        store(&guest, 0x10_0000, 41);
        guest.post(1, &wait(3, (7, 1), 43));
        guest.until(|guest| guest.function.programs().first().is_some_and(|it| it.waits <= 1));
        guest.done(&doorbell(3));
        guest.until(|guest| load(guest, 0x10_0000) == 42);
        let started = guest.events.try_iter().filter(|event| *event == Event::Started).count();
        assert_eq!(started, 1);
        // The guest does not notice that no device serves it: its commands wait in the queue.
        way(&mut guest, |guest| guest.post(2, &command(0x777, 0, &[])));
        // After a kill, the next daemon rings the doorbell, so the word may already have its value.
        let mut slots = Vec::new();
        while !slots.contains(&2) {
            slots.push(guest.answer().0);
        }
        assert_eq!(guest.status(), 0xf);
        while !slots.contains(&1) {
            guest.post(3, &doorbell(3));
            let others = std::iter::repeat_with(|| guest.answer().0).take_while(|slot| *slot != 3);
            slots.extend(others);
            let before = load(&guest, 0x10_0000);
            guest.until(|guest| guest.answers() > 0 || load(guest, 0x10_0000) != before || before >= 43);
            slots.extend((guest.answers() > 0).then(|| guest.answer().0));
        }
        let events: Vec<_> = guest.events.try_iter().collect();
        assert!(!events.contains(&Event::Started) && !events.contains(&Event::Ended), "{events:?}");
        guest.until(|guest| matches!(&guest.function.programs()[..], [program] if program.is_served));
        // New programs can start, and the old program can exit.
        guest.program(4, 0x40_0000);
        guest.done(&destroy(3));
        guest.until(|guest| guest.events.try_iter().any(|event| event == Event::Ended));
    }
}

#[test]
fn commands_are_answered_once_across_many_devices() {
    for way in WAYS {
        let folder = tempfile::tempdir().unwrap();
        let mut guest = guest(&folder);
        guest.program(1, 0);
        // After a kill, the next device repeats the doorbell. On a busy host, the worker may handle it after the test's
        // store, and add 1 to the word more than once. The word must not overflow.
        let last = 1 << 63;
        for round in 0..40u64 {
            guest.done(&context(2));
            guest.post(1, &wait(1, (1, 1), last));
            way(&mut guest, |guest| guest.post(2, &blob(2, 9, 1, CONTROL_BYTES)));
            assert_eq!(guest.answer().0, 2, "round {round}");
            guest.done(&map(9, 0x40_0000));
            assert_eq!(guest.send(&map(9, 0x60_0000)).0, 0x1205, "it is already mapped");
            guest.done(&destroy(2));
            guest.done(&unref(9));
            assert_eq!(guest.answers(), 0);
            store(&guest, 0, last);
            assert_eq!(guest.answer().0, 1);
            store(&guest, 0, round);
        }
    }
}

#[test]
fn removal_continues_and_late_answers_free_nothing() {
    for way in WAYS {
        let folder = tempfile::tempdir().unwrap();
        let mut guest = guest(&folder);
        guest.program(1, 0);
        guest.done(&blob(1, 9, 5 << 32 | 4, 0x1_0000));
        guest.done(&map(9, 0x40_0000));
        store(&guest, 0x40_0008, 7);
        guest.done(&command(0x209, 0, &[9, 0]));
        way(&mut guest, |guest| guest.post(4, &unref(9)));
        assert_eq!(guest.answer().0, 4);
        assert_eq!(load(&guest, 0x40_0008), 0);
        let events: Vec<_> = guest.events.try_iter().collect();
        assert!(events.contains(&Event::Message(ToWorker::Remove { id: 5, serial: 2 })), "{events:?}");
    }
}

#[test]
fn worker_that_ended_meanwhile_is_reported_as_lost() {
    for way in WAYS {
        let folder = tempfile::tempdir().unwrap();
        let mut guest = guest(&folder);
        guest.program(1, 0x10_0000);
        guest.post(1, &wait(1, (1, 1), 100));
        way(&mut guest, |guest| guest.known.lock().unwrap().clear());
        assert_eq!(guest.answer().0, 1, "no word will change");
        guest.until(|guest| load(guest, 0x10_0040) == cuda_ring::state::LOST);
        guest.done(&unref(1));
    }
}

#[test]
fn worker_that_stays_stopped_is_lost_after_its_own_limit() {
    let folder = tempfile::tempdir().unwrap();
    // A worker without a daemon exits after this time, so the next daemon does not wait longer.
    let mut guest = guest_with(&folder, Duration::from_millis(200));
    guest.program(1, 0x10_0000);
    guest.post(1, &wait(1, (1, 1), 100));
    guest.are_stopped.store(true, Ordering::Release);
    guest.kill(|_| {});
    assert_eq!(guest.answer().0, 1, "no word will change");
    guest.until(|guest| load(guest, 0x10_0040) == cuda_ring::state::LOST);
}

#[test]
fn worker_that_returns_within_its_limit_is_kept() {
    let folder = tempfile::tempdir().unwrap();
    let mut guest = guest_with(&folder, Duration::from_secs(3600));
    guest.program(1, 0x10_0000);
    guest.are_stopped.store(true, Ordering::Release);
    guest.kill(|_| {});
    guest.until(|guest| !guest.function.programs().is_empty());
    guest.are_stopped.store(false, Ordering::Release);
    guest.until(|guest| guest.events.try_iter().any(|event| matches!(event, Event::Message(ToWorker::Blob { .. }))));
    assert!(guest.function.programs().iter().all(|program| program.is_served));
}

#[test]
fn reset_in_progress_continues_in_next_device() {
    for way in WAYS {
        let folder = tempfile::tempdir().unwrap();
        let mut guest = guest(&folder);
        guest.program(1, 0);
        store(&guest, 8, 7);
        way(&mut guest, |guest| guest.write(RegionIndex::Bar0, 0x14, &[0]));
        // In an upgrade, the first write occurs after the state was saved, so the next device does not receive it.
        // Repeat the write.
        guest.write(RegionIndex::Bar0, 0x14, &[0]);
        guest.until(|guest| guest.status() == 0);
        assert_eq!(load(&guest, 8), 0);
        guest.drive();
        guest.program(1, 0);
    }
}

#[test]
fn failed_upgrade_continues_in_the_same_device() {
    let mut guest = Guest::new();
    guest.program(1, 0);
    let suspended = guest.function.suspend(std::time::Instant::now() + std::time::Duration::from_secs(60)).unwrap();
    let saved = suspended.save().unwrap();
    guest.post(2, &doorbell(1));
    assert_eq!(guest.answers(), 0);
    drop((suspended, saved));
    assert_eq!(guest.answer().0, 2);
    guest.until(|guest| load(guest, 0) == 1);
    assert!(guest.events.try_iter().all(|event| event != Event::Ended));
}

#[test]
fn unknown_process_at_the_workers_socket_is_sent_away() {
    let folder = tempfile::tempdir().unwrap();
    let mut guest = guest(&folder);
    guest.program(1, 0);
    // No worker is expected to connect, so this process is not a worker.
    let stranger = worker_link::Link::connect(&folder.path().join("workers.sock")).unwrap();
    assert_eq!(stranger.receive_in_worker().unwrap(), ToWorker::Goodbye);
    guest.done(&doorbell(1));
    guest.until(|guest| load(guest, 0) == 1);
}

#[test]
fn journal_of_other_version_or_empty_file_is_refused() {
    let guest = Guest::new();
    let (mut device, other) = (Guest::new().device, Guest::new());
    let file = vmm_glue::mappable::region_memory("other", 4096).unwrap();
    assert!(device.take_journal(std::sync::Arc::new(file)).unwrap_err().0.contains("an invalid size"));
    let journal = guest.device.journal().unwrap();
    rustix::io::pwrite(&journal, &[0; 8], 0).unwrap();
    assert!(device.take_journal(journal).unwrap_err().0.contains("another version"));
    // The window alone is not enough to continue a function.
    let window = std::sync::Arc::clone(other.device.regions()[4].mappable().unwrap().file());
    assert!(device.take_file(RegionIndex::Bar4, window).unwrap_err().0.contains("journal is missing"));
}

/// Offset of the command counts in the journal.
const PROGRESS: u64 = 24;
/// Offset of descriptor 0's slot in the journal, which starts with the slot's state.
const SLOT: u64 = 8 << 10;

/// Subtracts `popped` and `answered` from the counts of popped commands and sent responses, to revert the last change.
fn uncount(journal: &std::os::fd::OwnedFd, popped: u32, answered: u32) {
    let mut bytes = [0; 8];
    rustix::io::pread(journal, &mut bytes, PROGRESS).unwrap();
    let counts = u64::from_le_bytes(bytes) - (u64::from(popped) << 32) - u64::from(answered);
    rustix::io::pwrite(journal, &counts.to_le_bytes(), PROGRESS).unwrap();
}

#[test]
fn kill_between_answer_and_count_answers_once() {
    for is_recorded in [false, true] {
        let folder = tempfile::tempdir().unwrap();
        let mut guest = guest(&folder);
        guest.program(1, 0);
        // The last command is in slot 0, and is either recorded or only counted.
        guest.done(&if is_recorded { context(2) } else { doorbell(1) });
        let journal = guest.device.journal().unwrap();
        guest.kill(|_| {
            uncount(&journal, u32::from(!is_recorded), 1);
            if is_recorded {
                rustix::io::pwrite(&journal, &1u64.to_le_bytes(), SLOT).unwrap();
            }
        });
        guest.done(&command(0x108, 0, &[0, 0]));
        assert_eq!(guest.answers(), 0, "the last command got one response");
        assert_eq!(guest.send(&context(2)).0, if is_recorded { 0x1205 } else { 0x1100 });
    }
}

#[test]
fn kill_before_recorded_answer_repeats_the_answer_only() {
    let folder = tempfile::tempdir().unwrap();
    let mut guest = guest(&folder);
    guest.program(1, 0);
    guest.done(&context(2));
    let journal = guest.device.journal().unwrap();
    guest.kill(|guest| {
        // Simulate that the response was not sent, and that the slot is still in use.
        guest.unanswer();
        uncount(&journal, 0, 1);
        rustix::io::pwrite(&journal, &1u64.to_le_bytes(), SLOT).unwrap();
    });
    let (slot, bytes) = guest.answer();
    // A second execution would fail, because the context already exists.
    assert_eq!((slot, u32::from_le_bytes(bytes[..4].try_into().unwrap())), (0, 0x1100));
    assert_eq!(guest.send(&context(2)).0, 0x1205);
}

#[test]
fn kill_before_a_command_is_counted_executes_it_again() {
    let folder = tempfile::tempdir().unwrap();
    let mut guest = guest(&folder);
    guest.program(1, 0);
    guest.done(&doorbell(1));
    let journal = guest.device.journal().unwrap();
    guest.kill(|guest| {
        guest.unanswer();
        uncount(&journal, 1, 1);
        // Simulate that the slot was written but not counted.
        rustix::io::pwrite(&journal, &1u64.to_le_bytes(), SLOT).unwrap();
        rustix::io::pwrite(&journal, &u64::from(u32::MAX / 4).to_le_bytes(), SLOT + 8).unwrap();
        // Without this number, an earlier response of the slot would count.
        rustix::io::pwrite(&journal, &0u64.to_le_bytes(), SLOT + 16).unwrap();
    });
    assert_eq!(guest.answer().0, 0);
    assert_eq!(guest.answers(), 0);
    guest.done(&doorbell(1));
}

#[test]
fn changed_ring_of_answers_stops_the_device_until_reset() {
    let folder = tempfile::tempdir().unwrap();
    let mut guest = guest(&folder);
    guest.program(1, 0);
    let journal = guest.device.journal().unwrap();
    guest.kill(|_| uncount(&journal, 0, 2));
    guest.until(|guest| guest.status() & 0x40 != 0);
    guest.write(RegionIndex::Bar0, 0x14, &[0]);
    guest.until(|guest| guest.status() == 0);
    guest.drive();
    guest.program(1, 0);
}
