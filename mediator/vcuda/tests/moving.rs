//! Tests moves of programs to another card, with threads as workers.

mod support;

use std::sync::atomic::Ordering;
use std::time::Duration;

use support::{BEHAVIOUR, Event, Guest, behaviour, blob, destroy, doorbell, map, wait};
use vm_memory::{Bytes, VolatileMemory};
use worker_link::{Rejoin, ToWorker};

const FIRST: u64 = 0x10_0000;
const SECOND: u64 = 0x40_0000;
/// Maximum size of a program's saved memory in bytes.
const STATE_BYTES: u64 = 1 << 20;

fn store(guest: &Guest, offset: u64, value: u64) {
    guest.window().as_volatile_slice().store(value, offset as usize, Ordering::Release).unwrap();
}

fn load(guest: &Guest, offset: u64) -> u64 {
    guest.window().as_volatile_slice().load(offset as usize, Ordering::Acquire).unwrap()
}

/// Rings the doorbell of a program, and waits until the program's worker has handled it.
fn ring(guest: &mut Guest, context: u32, control: u64) {
    let before = load(guest, control);
    guest.done(&doorbell(context));
    guest.until(|guest| load(guest, control) > before);
}

/// Returns a guest with two programs that are served.
fn guest_with(change: impl FnOnce(&mut support::Threads)) -> Guest {
    let mut guest = Guest::with(change);
    for (context, control) in [(3, FIRST), (4, SECOND)] {
        guest.program(context, control);
        ring(&mut guest, context, control);
    }
    guest
}

fn guest() -> Guest {
    guest_with(|_| {})
}

fn state(guest: &Guest, control: u64) -> u64 {
    load(guest, control + cuda_ring::control::STATE)
}

/// Moves all programs to card `two`.
fn carry(guest: &Guest) -> Result<usize, String> {
    carry_within(guest, vcuda::CARRY_LIMIT)
}

fn carry_within(guest: &Guest, limit: Duration) -> Result<usize, String> {
    guest.function.carry(guest.threads_on("two"), STATE_BYTES, limit).map(|carried| carried.programs)
}

/// Returns the number of events that are equal to `kind`.
fn count(events: &[Event], kind: &Event) -> usize {
    events.iter().filter(|event| *event == kind).count()
}

#[test]
fn all_programs_continue_with_their_blobs_on_the_other_card() {
    let mut guest = guest();
    guest.post(1, &wait(3, (7, 1), 43));
    guest.events.try_iter().for_each(drop);
    assert_eq!(carry(&guest), Ok(2));
    guest.until(|guest| guest.function.programs().iter().all(|program| program.is_served));
    let events: Vec<_> = guest.events.try_iter().collect();
    assert_eq!(count(&events, &Event::Message(ToWorker::Hold)), 2, "{events:?}");
    assert_eq!((count(&events, &Event::Started), count(&events, &Event::Ended)), (2, 2), "{events:?}");
    for (round, (context, control)) in [(3, FIRST), (4, SECOND)].into_iter().enumerate() {
        ring(&mut guest, context, control);
        let number = 20 + round as u32;
        guest.done(&blob(context, number, u64::from(number) << 32 | 4, 0x1_0000));
        guest.done(&map(number, 0x80_0000 + 0x10_0000 * round as u64));
        assert_ne!(state(&guest, control), cuda_ring::state::LOST);
    }
    assert_eq!(guest.answers(), 0);
    store(&guest, FIRST, 43);
    guest.post(2, &doorbell(3));
    let mut slots = [guest.answer().0, guest.answer().0];
    slots.sort_unstable();
    assert_eq!(slots, [1, 2], "the wait from before is answered");
    guest.done(&destroy(3));
    guest.until(|guest| guest.events.try_iter().any(|event| event == Event::Ended));
    // A function without programs needs no worker on the other card.
    guest.done(&destroy(4));
    guest.until(|guest| guest.function.programs().is_empty());
    assert_eq!(carry(&guest), Ok(0));
}

#[test]
fn program_that_cannot_move_keeps_all_on_their_card() {
    for (behaviour, reason) in [
        (behaviour::REFUSES, "program \"prog\": a stream captures a graph"),
        (behaviour::NEXT_ENDS, "program \"prog\": its worker on the other card has ended"),
    ] {
        let mut guest = guest();
        store(&guest, SECOND + BEHAVIOUR, behaviour);
        for _ in 0..2 {
            guest.events.try_iter().for_each(drop);
            let why = carry(&guest).unwrap_err();
            assert!(why.contains(reason), "{why}");
            ring(&mut guest, 3, FIRST);
            ring(&mut guest, 4, SECOND);
        }
        store(&guest, SECOND + BEHAVIOUR, behaviour::SAVES);
        assert_eq!(carry(&guest), Ok(2));
        ring(&mut guest, 4, SECOND);
    }
}

#[test]
fn card_on_which_no_worker_starts_changes_nothing() {
    let mut guest = guest();
    let mut threads = guest.threads_on("two");
    threads.refuses = true;
    let why = guest.function.carry(threads, STATE_BYTES, vcuda::CARRY_LIMIT).unwrap_err();
    assert!(why.contains("no worker starts on the other card: refused"), "{why}");
    ring(&mut guest, 3, FIRST);
    ring(&mut guest, 4, SECOND);
    assert_eq!(carry(&guest), Ok(2));
}

#[test]
fn worker_that_ends_during_the_move_ends_only_its_program() {
    let mut guest = guest();
    store(&guest, FIRST + BEHAVIOUR, behaviour::ENDS);
    assert_eq!(carry(&guest), Ok(1));
    guest.until(|guest| state(guest, FIRST) == cuda_ring::state::LOST);
    ring(&mut guest, 4, SECOND);
    guest.done(&destroy(3));
    guest.program(5, 0x70_0000);
    ring(&mut guest, 5, 0x70_0000);
}

#[test]
fn move_ends_in_time_and_programs_of_meanwhile_start_after_it() {
    let mut guest = guest();
    store(&guest, SECOND + BEHAVIOUR, behaviour::IS_SILENT);
    std::thread::scope(|scope| {
        let function = guest.function.clone();
        let threads = guest.threads_on("two");
        let moving = scope.spawn(move || function.carry(threads, STATE_BYTES, Duration::from_millis(400)));
        guest.until(|guest| guest.events.try_iter().any(|event| event == Event::Message(ToWorker::Hold)));
        // Meanwhile, an upgrade, a restart and another move are rejected.
        assert!(guest.function.restart(None, vcuda::RESTART_LIMIT).unwrap().iter().all(|restart| {
            restart.result.as_ref().is_err_and(|why| why.contains("it is being moved to another card"))
        }));
        let why = carry(&guest).unwrap_err();
        assert!(why.contains("are being moved or restarted"), "{why}");
        guest.program(5, 0x70_0000);
        guest.program(6, 0xa0_0000);
        guest.done(&destroy(6));
        let why = moving.join().unwrap().unwrap_err();
        assert!(why.contains("have not continued on the other card in time"), "{why}");
    });
    ring(&mut guest, 3, FIRST);
    ring(&mut guest, 4, SECOND);
    ring(&mut guest, 5, 0x70_0000);
    store(&guest, SECOND + BEHAVIOUR, behaviour::SAVES);
    assert_eq!(carry(&guest), Ok(3));
    for (context, control) in [(3, FIRST), (4, SECOND), (5, 0x70_0000)] {
        ring(&mut guest, context, control);
    }
}

#[test]
fn reset_during_a_move_ends_it() {
    let mut guest = guest();
    store(&guest, SECOND + BEHAVIOUR, behaviour::IS_SILENT);
    std::thread::scope(|scope| {
        let (function, threads) = (guest.function.clone(), guest.threads_on("two"));
        let moving = scope.spawn(move || function.carry(threads, STATE_BYTES, vcuda::CARRY_LIMIT));
        guest.until(|guest| guest.events.try_iter().any(|event| event == Event::Message(ToWorker::Hold)));
        guest.write(vmm_glue::RegionIndex::Bar0, 0x14, &[0]);
        let why = moving.join().unwrap().unwrap_err();
        assert!(why.contains("its guest has reset the device"), "{why}");
    });
    guest.until(|guest| guest.status() == 0);
    guest.drive();
    guest.program(3, FIRST);
    ring(&mut guest, 3, FIRST);
}

#[test]
fn next_daemon_finds_programs_on_their_new_card_only() {
    let folder = tempfile::tempdir().unwrap();
    let socket = folder.path().join("workers");
    let rejoin = Rejoin { socket, limit: Duration::from_secs(60) };
    let start = || guest_with(|threads| threads.rejoin = Some(rejoin.clone()));
    // The next daemon expects the programs on their new card.
    let mut guest = start();
    assert_eq!(carry(&guest), Ok(2));
    guest.card = "two";
    guest.kill(|_| ());
    ring(&mut guest, 3, FIRST);
    guest.upgrade(|_| ());
    ring(&mut guest, 4, SECOND);
    // If a daemon is killed before it has recorded the new card, the next daemon ends the programs.
    guest.card = "one";
    guest.kill(|_| ());
    for control in [FIRST, SECOND] {
        guest.until(|guest| state(guest, control) == cuda_ring::state::LOST);
    }
    guest.done(&destroy(3));
    guest.program(5, 0x70_0000);
    ring(&mut guest, 5, 0x70_0000);
}

#[test]
fn daemon_killed_during_a_move_leaves_programs_on_their_card() {
    let folder = tempfile::tempdir().unwrap();
    let rejoin = Rejoin { socket: folder.path().join("workers"), limit: Duration::from_secs(60) };
    let mut guest = guest_with(|threads| threads.rejoin = Some(rejoin));
    store(&guest, SECOND + BEHAVIOUR, behaviour::IS_SILENT);
    std::thread::scope(|scope| {
        let (function, threads) = (guest.function.clone(), guest.threads_on("two"));
        scope.spawn(move || function.carry(threads, STATE_BYTES, Duration::from_millis(300)));
        guest.until(|guest| guest.events.try_iter().any(|event| event == Event::Message(ToWorker::Hold)));
        guest.kill(|_| ());
        ring(&mut guest, 3, FIRST);
        ring(&mut guest, 4, SECOND);
    });
    store(&guest, SECOND + BEHAVIOUR, behaviour::SAVES);
    assert_eq!(carry(&guest), Ok(2));
}
