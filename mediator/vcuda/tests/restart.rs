//! Tests restarts of workers, with threads as workers.

mod support;

use std::sync::atomic::Ordering;
use std::time::Duration;

use support::{BEHAVIOUR, Event, Guest, behaviour, blob, destroy, doorbell, map, wait};
use vm_memory::{Bytes, VolatileMemory};
use worker_link::ToWorker;

const CONTROL: u64 = 0x10_0000;

fn store(guest: &Guest, offset: u64, value: u64) {
    guest.window().as_volatile_slice().store(value, offset as usize, Ordering::Release).unwrap();
}

fn load(guest: &Guest, offset: u64) -> u64 {
    guest.window().as_volatile_slice().load(offset as usize, Ordering::Acquire).unwrap()
}

/// Returns a guest with one served program.
fn guest() -> Guest {
    let mut guest = Guest::new();
    guest.program(3, CONTROL);
    guest.done(&doorbell(3));
    guest.until(|guest| load(guest, CONTROL) == 1);
    guest
}

fn state(guest: &Guest) -> u64 {
    load(guest, CONTROL + cuda_ring::control::STATE)
}

/// Restarts the worker of the only program. Returns the reason if it was not restarted.
fn restart(guest: &Guest) -> Option<String> {
    let mut restarts = guest.function.restart(None, vcuda::RESTART_LIMIT).unwrap();
    let restart = restarts.pop().unwrap();
    assert!(restarts.is_empty());
    assert_eq!(restart.name, "prog");
    restart.result.err()
}

#[test]
fn program_continues_with_its_blobs_in_the_next_worker() {
    let mut guest = guest();
    guest.post(1, &wait(3, (7, 1), 43));
    for round in 0..3 {
        guest.events.try_iter().for_each(drop);
        assert_eq!(restart(&guest), None);
        let events: Vec<_> = guest.events.try_iter().collect();
        assert!(events.contains(&Event::Message(ToWorker::Save)), "{events:?}");
        assert!(events.contains(&Event::Started) && events.contains(&Event::Ended), "{events:?}");
        let has_blob =
            |event: &Event| matches!(event, Event::Message(ToWorker::Blob { id: 0, kind: 1, serial: 1, .. }));
        assert!(events.iter().any(has_blob), "{events:?}");
        assert_ne!(state(&guest), cuda_ring::state::LOST);
        // Doorbells to the new worker and the program's blobs still work.
        let before = load(&guest, CONTROL);
        guest.done(&doorbell(3));
        guest.until(|guest| load(guest, CONTROL) > before);
        guest.done(&blob(3, 20 + round, u64::from(4 + round) << 32 | 4, 0x1_0000));
        guest.done(&map(20 + round, 0x80_0000 + 0x10_0000 * u64::from(round)));
    }
    assert_eq!(guest.answers(), 0);
    store(&guest, CONTROL, 43);
    guest.post(2, &doorbell(3));
    let mut slots = [guest.answer().0, guest.answer().0];
    slots.sort_unstable();
    assert_eq!(slots, [1, 2], "the earlier wait gets its response");
    guest.done(&destroy(3));
    guest.until(|guest| guest.events.try_iter().any(|event| event == Event::Ended));
    assert!(guest.function.restart(None, vcuda::RESTART_LIMIT).unwrap().is_empty(), "no program");
}

#[test]
fn worker_that_refuses_continues_its_program() {
    let mut guest = guest();
    store(&guest, CONTROL + BEHAVIOUR, behaviour::REFUSES);
    for _ in 0..2 {
        assert!(restart(&guest).unwrap().contains("captures a graph"));
        let before = load(&guest, CONTROL);
        guest.done(&doorbell(3));
        guest.until(|guest| load(guest, CONTROL) > before);
    }
    assert!(!guest.events.try_iter().any(|event| event == Event::Ended));
    store(&guest, CONTROL + BEHAVIOUR, behaviour::SAVES);
    assert_eq!(restart(&guest), None);
    assert!(guest.function.restart(Some(5), vcuda::RESTART_LIMIT).unwrap().is_empty(), "no program has this ID");
}

#[test]
fn worker_that_fails_during_a_restart_ends_only_its_program() {
    for (behaviour, reason) in [
        (behaviour::ENDS, "its worker has exited"),
        (behaviour::NEXT_ENDS, "the new worker could not continue the program"),
        (behaviour::LIES, "its worker has exited"),
    ] {
        let mut guest = guest();
        guest.program(4, 0x40_0000);
        guest.done(&doorbell(4));
        guest.until(|guest| load(guest, 0x40_0000) == 1);
        store(&guest, 0x40_0000 + BEHAVIOUR, behaviour::REFUSES);
        store(&guest, CONTROL + BEHAVIOUR, behaviour);
        let restarts = guest.function.restart(None, vcuda::RESTART_LIMIT).unwrap();
        let reasons: Vec<_> = restarts.into_iter().map(|restart| restart.result.unwrap_err()).collect();
        assert_eq!(reasons.len(), 2);
        assert!(reasons.iter().any(|found| found.contains(reason)), "{reasons:?}");
        guest.until(|guest| state(guest) == cuda_ring::state::LOST);
        let before = load(&guest, 0x40_0000);
        guest.done(&doorbell(4));
        guest.until(|guest| load(guest, 0x40_0000) > before);
        // The lost program's context can be destroyed, and the other program's worker restarted.
        guest.done(&destroy(3));
        store(&guest, 0x40_0000 + BEHAVIOUR, behaviour::SAVES);
        assert_eq!(restart(&guest), None);
    }
}

#[test]
fn worker_that_does_not_respond_does_not_prevent_an_upgrade() {
    let mut guest = guest();
    store(&guest, CONTROL + BEHAVIOUR, behaviour::IS_SILENT);
    let limit = Duration::from_millis(50);
    assert_eq!(guest.function.restart(None, limit).unwrap_err(), vcuda::RestartError::TimedOut(limit));
    guest.upgrade(|_| ());
    let before = load(&guest, CONTROL);
    guest.done(&doorbell(3));
    guest.until(|guest| load(guest, CONTROL) > before);
    assert_ne!(state(&guest), cuda_ring::state::LOST);
}
