//! A hostile program: arbitrary bytes in the ring, executed on a driver that accepts everything.
//!
//! UNSAFETY: unmaps the window at the end.
#![allow(unsafe_code, reason = "see UNSAFETY")]

use cuda_calls::own::{self, Route};
use cuda_calls::{CALLS, Kind, handle};
use cuda_ring::{BlobKind, Consumer, Geometry, Header, PINNED_ADDRESSES, Words as _, control, ring, staging};
use rustix::fs::MemfdFlags;

use crate::driver::Driver;
use crate::executor::{Broken, Executor};
use crate::window::Window;

/// Size of the program's pinned memory in bytes.
const PINNED_BYTES: u64 = 64 << 10;
/// Blobs in the order of their identifiers, from 1 on.
const BLOBS: [(BlobKind, u64); 4] = [
    (BlobKind::Control, control::BYTES),
    (BlobKind::Ring, ring::BYTES),
    (BlobKind::Staging, staging::BYTES),
    (BlobKind::Pinned, PINNED_BYTES),
];

fn message(op: u16, words: &[u64]) -> Vec<u64> {
    let header = Header { op, flags: own::flags::ANSWER, words: words.len() as u32 + 2 };
    let route = Route { context: 0, slot: 1, capture_mode: 0 };
    [&[header.word(), route.word()][..], words].concat()
}

/// Executes a ring whose words are the input. Returns the number of executed messages.
///
/// # Panics
/// If the system has no memory for the window, or the worker has a fault.
pub fn execute(input: &[u8]) -> usize {
    let total = BLOBS.iter().map(|(_, bytes)| bytes).sum();
    let descriptor = rustix::fs::memfd_create("fuzz", MemfdFlags::CLOEXEC).expect("memory");
    rustix::fs::ftruncate(&descriptor, total).expect("memory");
    let mut window = Window::map(descriptor).expect("mapped");
    let mut offset = 0;
    for (id, (kind, bytes)) in (1..).zip(BLOBS) {
        window.add(id, kind.number(), 0, (offset, bytes)).expect("fits");
        offset += bytes;
    }
    let control = window.first(BlobKind::Control).expect("added");
    let memory = window.first(BlobKind::Ring).expect("added");
    let mut executor = Executor::new(Driver::accepting(), control, window);
    let known = [
        message(own::START, &[cuda_ring::VERSION, CALLS.len() as u64, 7]),
        message(own::STAGING, &[3]),
        message(own::PIN, &[4, PINNED_ADDRESSES]),
        message(cuda_calls::find("cuStreamCreate").expect("described") as u16, &[handle(Kind::Stream, 1), 0]),
    ];
    for message in &known {
        executor.execute(message).expect("an honest message");
    }
    let words: Vec<u64> =
        input.chunks_exact(8).map(|b| b.iter().rev().fold(0, |w, b| w << 8 | u64::from(*b))).collect();
    memory.write(ring::ORDERED, &words);
    control.store(control::HEAD, words.len() as u64 * 8);
    let mut consumer = Consumer::new(control, memory, Geometry::ORDERED);
    let (mut copy, mut executed) = (Vec::new(), 0);
    while let Ok(true) = consumer.next(&mut copy) {
        if let Err(Broken::Malformed | Broken::Limit) = executor.execute(&copy) {
            break;
        }
        executor.poll_waits();
        executed += 1;
    }
    // SAFETY: neither the consumer nor the executor is used any longer.
    unsafe { executor.window().unmap() };
    executed
}

#[cfg(test)]
mod tests {
    use super::*;

    fn bytes(messages: &[Vec<u64>]) -> Vec<u8> {
        messages.iter().flatten().flat_map(|word| word.to_le_bytes()).collect()
    }

    #[test]
    fn honest_messages_are_executed_and_broken_ones_end_the_program() {
        let stream = handle(Kind::Stream, 1);
        let wait = message(own::WAIT_STREAM, &[stream]);
        let copy = message(own::COPY_INLINE, &[PINNED_ADDRESSES, 8, stream, 77]);
        assert_eq!(execute(&bytes(&[wait.clone(), copy, wait.clone()])), 3);
        for broken in [
            message(own::FIRST + 500, &[]),
            message(CALLS.len() as u16, &[]),
            message(own::COPY_IN, &[staging::PIECE_COUNT, PINNED_ADDRESSES, 8, stream]),
            message(own::COPY_INLINE, &[PINNED_ADDRESSES, 1 << 40, stream]),
            message(own::LAUNCH, &[handle(Kind::Function, 9)]),
            message(own::IMAGE_PART, &[1, u64::MAX]),
            message(own::WAIT_STREAM, &[handle(Kind::Event, 1)]),
        ] {
            assert_eq!(execute(&bytes(&[wait.clone(), broken, wait.clone()])), 1);
        }
    }

    #[test]
    fn random_rings_cause_no_fault_in_the_worker() {
        let mut state = 1u64;
        let mut random = move || {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            state >> 20
        };
        for _ in 0..300 {
            let messages: Vec<Vec<u64>> = (0..20)
                .map(|_| {
                    let op =
                        if random() % 2 == 0 { own::FIRST + (random() % 16) as u16 } else { (random() % 300) as u16 };
                    let words: Vec<u64> = (0..random() % 12)
                        .map(|_| match random() % 5 {
                            0 => handle(Kind::Stream, 1),
                            1 => PINNED_ADDRESSES + random() % 70_000,
                            2 => u64::MAX - random() % 3,
                            _ => random() % 40,
                        })
                        .collect();
                    message(op, &words)
                })
                .collect();
            execute(&bytes(&messages));
        }
    }
}
