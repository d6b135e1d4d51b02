//! Simulates a hostile program: puts arbitrary bytes into the ring, and executes them on a driver that accepts
//! everything.
//!
//! UNSAFETY: unmaps the window at the end of the run.
#![allow(unsafe_code, reason = "see UNSAFETY")]

use cuda_calls::own::{self, Route};
use cuda_calls::{CALLS, Kind, handle};
use cuda_ring::{BlobKind, Consumer, Geometry, Header, PINNED_ADDRESSES, Words as _, control, ring, slots, staging};
use rustix::fs::MemfdFlags;

use crate::driver::Driver;
use crate::executor::{Broken, Executor};
use crate::window::Window;

/// Size of the program's pinned memory in bytes.
const PINNED_BYTES: u64 = 64 << 10;
/// Blobs in the order of their identifiers, which start at 1.
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

/// Executes the input as the words of a ring. Returns the number of executed messages.
///
/// # Panics
/// Panics if the system has no memory for the window, or if the worker has a bug.
pub fn execute(input: &[u8]) -> usize {
    run(input).executed
}

/// Effects of a ring.
struct Effects {
    /// Number of executed messages.
    executed: usize,
    /// Result in the last reply.
    #[cfg_attr(not(test), expect(dead_code, reason = "for tests"))]
    result: i32,
}

fn run(input: &[u8]) -> Effects {
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
        executor.execute(message).expect("a valid message");
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
    let result = control.load(slots::result(1)) as i32;
    // SAFETY: neither the consumer nor the executor is used any longer.
    unsafe { executor.window().unmap() };
    Effects { executed, result }
}

#[cfg(test)]
mod tests {
    use super::*;
    use cuda_calls::boxes::{BoxCopy, DEVICE, End, HOST};

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
    fn names_are_read_of_known_functions_only() {
        let name = |words: &[u64]| run(&bytes(&[message(own::FUNCTION_NAME, words)]));
        let unknown = handle(Kind::Function, 9);
        let Effects { executed, result } = name(&[unknown, 0]);
        assert_eq!((executed, result), (1, crate::driver::INVALID_HANDLE));
        for broken in [&[unknown][..], &[unknown, 2], &[handle(Kind::Stream, 1), 0], &[0, 1]] {
            assert_eq!(name(broken).executed, 0, "{broken:x?}");
        }
    }

    fn copy_box(piece: u64, is_out: u64, copy: BoxCopy, data: &[u64]) -> Vec<u64> {
        message(own::COPY_BOX, &[&[piece, handle(Kind::Stream, 1), is_out], &copy.to_3d()[..], data].concat())
    }

    #[test]
    fn box_reaches_the_cards_and_the_guests_memory_alone() {
        let card = End { kind: DEVICE, address: PINNED_ADDRESSES, pitch: 64, ..End::default() };
        let copy = BoxCopy { from: End { kind: HOST, ..End::default() }, to: card, width: 8, height: 2, depth: 1 };
        let out = BoxCopy { from: copy.to, to: copy.from, ..copy };
        let last = |message: Vec<u64>| {
            let Effects { executed, result } = run(&bytes(&[message]));
            (executed, result)
        };
        assert_eq!(last(copy_box(own::INLINE, 0, copy, &[1, 2])), (1, 0));
        assert_eq!(last(copy_box(3, 0, copy, &[])), (1, 0));
        assert_eq!(last(copy_box(3, 1, out, &[])), (1, 0));
        // The guest's end is in the message or in the piece. The address in the message has no effect.
        let elsewhere = End { kind: DEVICE, address: 0x7fff_0000_0000, ..End::default() };
        assert_eq!(last(copy_box(own::INLINE, 0, BoxCopy { from: elsewhere, ..copy }, &[1, 2])), (1, 0));
        for wrong in [
            End { address: 0x7fff_0000_0000, ..card },
            End { address: PINNED_ADDRESSES + PINNED_BYTES - 8, ..card },
            End { y: 1 << 50, ..card },
            End { pitch: 4, ..card },
            End { kind: 9, ..card },
        ] {
            assert_eq!(last(copy_box(own::INLINE, 0, BoxCopy { to: wrong, ..copy }, &[1, 2])), (1, 1), "{wrong:?}");
            assert_eq!(last(copy_box(3, 1, BoxCopy { from: wrong, ..out }, &[])), (1, 1), "{wrong:?}");
        }
        let large = BoxCopy { height: staging::PIECE_BYTES, ..copy };
        for broken in [
            copy_box(own::INLINE, 0, copy, &[1]),
            copy_box(own::INLINE, 1, out, &[1, 2]),
            copy_box(staging::PIECE_COUNT, 0, copy, &[]),
            copy_box(3, 0, large, &[]),
            copy_box(3, 0, BoxCopy { depth: 0, ..copy }, &[]),
            copy_box(3, 0, BoxCopy { depth: u64::MAX, ..copy }, &[]),
        ] {
            assert_eq!(run(&bytes(&[broken])).executed, 0);
        }
    }

    #[test]
    fn nodes_and_links_of_missing_objects_are_refused() {
        let [graph, node] = [handle(Kind::Graph, 1), handle(Kind::Node, 1)];
        let host = |edit, graph, count: u64, before: &[u64]| {
            message(own::GRAPH_HOST, &[&[edit, graph, node, 7, count], before].concat())
        };
        let refused = |message: Vec<u64>| run(&bytes(&[message])).result;
        assert_eq!(refused(host(own::edit::ADD, graph, 0, &[])), 400);
        assert_eq!(refused(host(own::edit::SET, 0, 0, &[])), 400);
        assert_eq!(refused(message(own::LINK_COMPLETE, &[handle(Kind::Link, 1)])), 400);
        for broken in [
            host(3, graph, 0, &[]),
            host(own::edit::ADD, graph, 2, &[node]),
            host(own::edit::ADD, graph, u64::MAX, &[node]),
            host(own::edit::SET, graph, 0, &[]),
            message(own::LINK_READ, &[handle(Kind::Link, 1), 0]),
            message(own::GRAPH_KERNEL, &[0, graph, node, 0, 0, 0, handle(Kind::Function, 1)]),
        ] {
            assert_eq!(run(&bytes(&[broken])).executed, 0);
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
                        if random() % 2 == 0 { own::FIRST + (random() % 20) as u16 } else { (random() % 320) as u16 };
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
