//! Simulates a hostile program: puts arbitrary bytes into the ring, and executes them on a driver that accepts all
//! calls.
//!
//! UNSAFETY: unmaps the window at the end of the run.
#![allow(unsafe_code, reason = "see UNSAFETY")]

use std::sync::{Mutex, MutexGuard, PoisonError};

use cuda_calls::own::{self, Route};
use cuda_calls::{CALLS, Kind, handle};
use cuda_ring::{BlobKind, Consumer, Geometry, Header, PINNED_ADDRESSES, Words as _, control, ring, slots, staging};
use rustix::fs::MemfdFlags;

use crate::driver::Driver;
use crate::executor::{Broken, Executor};
use crate::restore::read_state;
use crate::window::Window;

/// Size of the program's pinned memory in bytes.
const PINNED_BYTES: u64 = 64 << 10;
/// Kinds and sizes in bytes of the blobs, in the order of their identifiers, which start at 1.
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

/// Executes the input as words in a ring. Returns the number of executed messages.
///
/// # Panics
/// Panics if the system is out of memory for the window, or if the worker has a bug.
pub fn execute(input: &[u8]) -> usize {
    run(input).executed
}

/// Effects of executing a ring.
struct Effects {
    /// Number of executed messages.
    executed: usize,
    /// Result code in the last reply.
    #[cfg_attr(not(test), expect(dead_code, reason = "for tests"))]
    result: i32,
}

/// Waits until no other thread runs a program, because all programs in a process use the same addresses.
fn alone() -> MutexGuard<'static, ()> {
    /// Held by the thread that runs a program. A static variable, because the addresses belong to the process.
    static ADDRESSES: Mutex<()> = Mutex::new(());
    ADDRESSES.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Returns a window with a program's blobs.
fn window() -> Window {
    let total = BLOBS.iter().map(|(_, bytes)| bytes).sum();
    let descriptor = rustix::fs::memfd_create("fuzz", MemfdFlags::CLOEXEC).expect("memory");
    rustix::fs::ftruncate(&descriptor, total).expect("memory");
    let mut window = Window::map(descriptor).expect("mapped");
    let mut offset = 0;
    for (id, (kind, bytes)) in (1..).zip(BLOBS) {
        window.add(id, kind.number(), 0, (offset, bytes)).expect("fits");
        offset += bytes;
    }
    window
}

/// Restores a program from a file that contains `input`. Returns true if all steps were executed.
///
/// # Panics
/// Panics if the system is out of memory for the window, or if the worker has a bug.
pub fn restore(input: &[u8]) -> bool {
    let _alone = alone();
    let file = rustix::fs::memfd_create("fuzz", MemfdFlags::CLOEXEC).expect("memory");
    let mut written = 0;
    while written < input.len() {
        written += rustix::io::pwrite(&file, &input[written..], written as u64).expect("memory");
    }
    let Ok((state, contents)) = read_state(&file) else { return false };
    let mut window = window();
    for blob in &state.blobs {
        // The window rejects invalid blobs.
        let _ = window.add(blob.id, blob.kind, blob.serial, (blob.offset, blob.bytes));
    }
    let control = window.first(BlobKind::Control).expect("added");
    let mut executor = Executor::new(Driver::accepting(), control, window);
    let is_restored = executor.restore(&state, &file, contents).is_ok();
    executor.poll_waits();
    // SAFETY: the executor is no longer used.
    unsafe { executor.window().unmap() };
    is_restored
}

fn run(input: &[u8]) -> Effects {
    let _alone = alone();
    let window = window();
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
    // SAFETY: neither the consumer nor the executor is used after this.
    unsafe { executor.window().unmap() };
    Effects { executed, result }
}

#[cfg(test)]
mod tests {
    use std::os::fd::OwnedFd;

    use cuda_calls::boxes::{BoxCopy, DEVICE, End, HOST};
    use cuda_ring::ADDRESSES;
    use object_log::{SavedState, Step, StepKind};
    use worker_link::Obstacle;

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
    fn names_are_read_of_known_functions_only() {
        let name = |words: &[u64]| run(&bytes(&[message(own::FUNCTION_NAME, words)]));
        let unknown = handle(Kind::Function, 9);
        let Effects { executed, result } = name(&[unknown, 0]);
        assert_eq!((executed, result), (1, crate::driver::INVALID_HANDLE));
        for broken in [&[unknown][..], &[unknown, 2], &[handle(Kind::Stream, 1), 0], &[0, 1]] {
            assert_eq!(name(broken).executed, 0, "{broken:x?}");
        }
    }

    #[test]
    fn output_is_taken_in_parts_and_restored_in_another_worker() {
        const SIZE: usize = 100_000;
        let text: Vec<u8> = (0..SIZE).map(|at| at as u8).collect();
        let mut words = vec![SIZE as u64];
        words.extend(text.chunks(8).map(|part| part.iter().rev().fold(0, |word, byte| word << 8 | u64::from(*byte))));
        let step = |words: &[u64]| Step { kind: StepKind::Output, op: 0, route: 0, words: words.to_vec(), image: None };
        let _alone = alone();
        let window = window();
        let control = window.first(BlobKind::Control).expect("added");
        let mut executor = Executor::new(Driver::accepting(), control, window);
        executor.execute(&message(own::START, &[cuda_ring::VERSION, CALLS.len() as u64, 7])).expect("valid");
        for wrong in [&[][..], &[8], &[1, 2, 3], &[u64::MAX, 1]] {
            assert_eq!(executor.output.restore(&step(wrong)), Err(0), "{wrong:?}");
        }
        let mut too_much = vec![0; 1 + (9 << 17)];
        too_much[0] = 9 << 20;
        assert_eq!(executor.output.restore(&step(&too_much)), Err(0));
        assert_eq!(executor.output.step(), None, "no kernel has printed");
        executor.output.restore(&step(&words)).expect("valid");
        assert_eq!(executor.output.step(), Some(step(&words)));
        // The steps of a state together are bounded, too.
        let mut rest = vec![0; 1 + (8 << 17)];
        rest[0] = 8 << 20;
        assert_eq!(executor.output.restore(&step(&rest)), Err(0));
        let take = |flags| [Header { op: own::OUTPUT, flags, words: 2 }.word(), 1 << 32].to_vec();
        // Without an area, the reply has no room.
        assert_eq!(executor.execute(&take(own::flags::ANSWER)), Err(Broken::Malformed));
        let mut taken = Vec::new();
        for count in [control::AREA_BYTES as usize - 16, SIZE - (control::AREA_BYTES as usize - 16), 0] {
            executor.execute(&take(own::flags::ANSWER | own::flags::AREA | 2)).expect("valid");
            let mut reply = vec![0; 2 + count.div_ceil(8)];
            let place = if reply.len() > slots::INLINE_WORDS { slots::area(2) } else { slots::data(1) };
            control.read(place, &mut reply);
            taken.extend(reply[2..].iter().flat_map(|word| word.to_le_bytes()).take(count));
            assert_eq!(reply[..2], [(SIZE - taken.len()) as u64, count as u64]);
            assert_eq!(control.load(control::OUTPUT), reply[0]);
        }
        assert!(taken == text, "the bytes are those of the kernels");
        assert_eq!(executor.output.step(), Some(step(&[0])), "the next worker expects output");
        // SAFETY: the executor is no longer used.
        unsafe { executor.window().unmap() };
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
        // The guest's end of the copy is in the message or in the staging buffer. The address in the message is
        // ignored.
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

    /// An image with a variable.
    const TEXT: &[u8] = b".global .u64 sum;";

    /// Returns the words of a message that contains an image.
    fn image(text: &[u8]) -> Vec<u64> {
        let word = |part: &[u8]| part.iter().rev().fold(0, |word, byte| word << 8 | u64::from(*byte));
        [1, text.len() as u64].into_iter().chain(text.chunks(8).map(word)).collect()
    }

    /// Saves a program that has executed each kind of step to a file of `size` bytes. Returns the file.
    fn saved(size: u64) -> Result<OwnedFd, Obstacle> {
        let _alone = alone();
        let window = window();
        let control = window.first(BlobKind::Control).expect("added");
        let mut executor = Executor::new(Driver::accepting(), control, window);
        let find = |name: &str| CALLS.iter().position(|call| call.name == name).expect("described") as u16;
        let context = handle(Kind::Context, 1);
        let in_context = |op: u16, words: &[u64]| {
            let mut message = message(op, words);
            message[1] = Route { context: 1, slot: 1, capture_mode: 0 }.word();
            message
        };
        let node = [0, handle(Kind::Graph, 1), handle(Kind::Node, 1), 7, 0];
        for message in [
            message(own::START, &[cuda_ring::VERSION, CALLS.len() as u64, 7]),
            message(find("cuInit"), &[0]),
            message(find("cuDevicePrimaryCtxRetain+"), &[context, 0]),
            in_context(own::STAGING, &[3]),
            in_context(own::PIN, &[4, PINNED_ADDRESSES]),
            in_context(find("cuStreamCreate"), &[handle(Kind::Stream, 1), 0]),
            in_context(find("cuGraphCreate"), &[handle(Kind::Graph, 1), 0]),
            in_context(own::GRAPH_HOST, &node),
            in_context(own::IMAGE_PART, &image(TEXT)),
            in_context(find("cuModuleLoadData+"), &[handle(Kind::Module, 1), 1]),
        ] {
            executor.execute(&message).expect("a valid message");
        }
        // Add the memory to the log here, because this driver's allocations return the address 0.
        let words = vec![ADDRESSES.start + 512, 20 << 20];
        let route = Route { context: 1, slot: 0, capture_mode: 0 }.word();
        executor.log.restored(&Step { kind: StepKind::Memory, op: find("cuMemAlloc_v2+"), route, words, image: None });
        let file = rustix::fs::memfd_create("test", MemfdFlags::CLOEXEC).expect("memory");
        rustix::fs::ftruncate(&file, size).expect("memory");
        let done = executor.save(&file, 4096);
        // SAFETY: the executor is no longer used.
        unsafe { executor.window().unmap() };
        done.map(|()| file)
    }

    fn contents(file: &OwnedFd) -> Vec<u8> {
        let mut bytes = vec![0; rustix::fs::fstat(file).expect("a file").st_size as usize];
        let mut filled = 0;
        while filled < bytes.len() {
            filled += rustix::io::pread(file, &mut bytes[filled..], filled as u64).expect("read");
        }
        bytes
    }

    fn with_state(state: &SavedState, memory: usize) -> Vec<u8> {
        let words = state.encode();
        let words = [&[words.len() as u64][..], &words].concat();
        let mut bytes: Vec<u8> = words.iter().flat_map(|word| word.to_le_bytes()).collect();
        bytes.resize(bytes.len() + memory, 0);
        bytes
    }

    const MEMORY: usize = 20 << 20;
    /// Total size of the memory and the variable, in bytes.
    const CONTENTS: usize = MEMORY + 8;

    #[test]
    fn saved_program_is_restored_with_the_same_steps() {
        let file = saved(64 << 20).expect("no obstacle");
        let (state, offset) = read_state(&file).expect("a state");
        assert_eq!((state.process, state.tail, state.replies.len()), (7, 4096, 1));
        assert_eq!(state.blobs.len(), BLOBS.len());
        let alone = alone();
        let window = window();
        let control = window.first(BlobKind::Control).expect("added");
        let mut executor = Executor::new(Driver::accepting(), control, window);
        executor.restore(&state, &file, offset).expect("restored");
        let (variable, steps) = state.steps.split_last().expect("steps");
        let expected = [handle(Kind::Module, 1), 8, 3, u64::from(u32::from_le_bytes(*b"sum\0"))];
        assert_eq!((variable.kind, &variable.words[..]), (StepKind::Variable, &expected[..]));
        assert_eq!(executor.steps().as_deref(), Ok(steps));
        assert!(executor.is_started() && executor.staging == Some(3));
        // SAFETY: the executor is no longer used.
        unsafe { executor.window().unmap() };
        drop(alone);
        assert!(restore(&contents(&file)));
    }

    #[test]
    fn file_that_is_too_small_is_an_obstacle_and_has_no_state() {
        let Err(Obstacle::Size(bytes)) = saved(1 << 20) else { panic!("an obstacle") };
        assert!(bytes > MEMORY as u64 && saved(bytes).is_ok());
        assert_eq!(saved(bytes - 8).err(), Some(Obstacle::Size(bytes)));
    }

    #[test]
    fn restore_fails_at_each_step_that_cannot_be_executed() {
        let file = saved(64 << 20).expect("no obstacle");
        let (state, _) = read_state(&file).expect("a state");
        assert!(restore(&with_state(&state, CONTENTS)));
        for number in 0..state.steps.len() {
            let mut other = state.clone();
            other.steps[number].words.push(1);
            assert!(!restore(&with_state(&other, CONTENTS)), "step {number} with another word");
            let mut other = state.clone();
            other.steps[number].op = own::START;
            let is_memory = other.steps[number].kind != StepKind::Message;
            assert_eq!(restore(&with_state(&other, CONTENTS)), is_memory, "step {number} with another message");
            let mut other = state.clone();
            let step = other.steps[number].clone();
            other.steps.insert(number, step);
            let restored = restore(&with_state(&other, 2 * CONTENTS));
            // This driver accepts any address, and repeated calls that do not create a handle.
            let op = state.steps[number].op;
            let makes = CALLS.get(usize::from(op)).is_some_and(|call| cuda_calls::replay::created(call).is_some());
            let is_once = makes || matches!(op, own::PIN | own::STAGING | own::GRAPH_HOST);
            assert_eq!(restored, !is_once, "step {number} twice");
        }
        assert!(!restore(&with_state(&state, CONTENTS - 8)), "a part of the contents is missing");
    }

    #[test]
    fn variables_that_do_not_match_are_not_restored() {
        let file = saved(64 << 20).expect("no obstacle");
        let (state, _) = read_state(&file).expect("a state");
        let at = state.steps.len() - 1;
        let module = handle(Kind::Module, 1);
        for words in [
            &[][..],
            &[module, 8],
            &[module, 16, 1, 0x61],
            &[module, 0, 1, 0x61],
            &[module, u64::MAX, 1, 0x61],
            &[module, 8, 9, 0x61],
            &[module, 8, u64::MAX, 0x61],
            &[module, 8, 2, 0x61],
            &[module + 16, 8, 1, 0x61],
            &[handle(Kind::Library, 1), 8, 1, 0x61],
            &[handle(Kind::Stream, 1), 8, 1, 0x61],
            &[0, 8, 1, 0x61],
        ] {
            let mut other = state.clone();
            other.steps[at].words = words.to_vec();
            assert!(!restore(&with_state(&other, 2 * CONTENTS)), "{words:x?}");
        }
        let mut other = state.clone();
        other.steps[at].route = 2;
        assert!(!restore(&with_state(&other, CONTENTS)), "another context");
        let mut other = state;
        other.steps.rotate_right(1);
        assert!(restore(&with_state(&other, CONTENTS)), "contents are written after all objects exist");
    }

    #[test]
    fn memory_outside_the_cards_addresses_is_not_restored() {
        let file = saved(64 << 20).expect("no obstacle");
        let (state, _) = read_state(&file).expect("a state");
        let at = state.steps.iter().position(|step| step.kind == StepKind::Memory).expect("memory");
        for words in [
            [0x7fff_0000_0000, 4096],
            [PINNED_ADDRESSES, 4096],
            [PINNED_ADDRESSES - 4096, 8192],
            [u64::MAX, 8],
            [ADDRESSES.start, 0],
            [ADDRESSES.start, u64::MAX],
        ] {
            let mut other = state.clone();
            other.steps[at].words = words.to_vec();
            assert!(!restore(&with_state(&other, MEMORY)), "{words:x?}");
        }
    }

    #[test]
    fn changed_bytes_of_a_file_cause_no_fault() {
        let file = saved(64 << 20).expect("no obstacle");
        let (state, offset) = read_state(&file).expect("a state");
        let bytes = with_state(&state, 0);
        assert_eq!(bytes.len() as u64, offset);
        for at in 0..bytes.len() {
            for value in [0, 1, 0x7f, 0xff] {
                let mut changed = bytes.clone();
                changed[at] = value;
                restore(&changed);
            }
        }
    }

    #[test]
    fn seed_of_the_fuzz_target_is_a_whole_program() {
        let file = saved(64 << 20).expect("no obstacle");
        let (mut state, _) = read_state(&file).expect("a state");
        let memory = state.steps.iter_mut().find(|step| step.kind == StepKind::Memory).expect("memory");
        memory.words = vec![ADDRESSES.start + 512, 4096];
        let bytes = with_state(&state, 4096 + 8);
        assert!(restore(&bytes));
        let seed =
            std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/fuzz/corpus/cuda_restore/program");
        if std::env::var_os("UPDATE_SEEDS").is_some() {
            std::fs::create_dir_all(seed.parent().expect("a folder")).expect("a folder");
            std::fs::write(&seed, &bytes).expect("written");
        }
        assert!(std::fs::read(&seed).expect("a seed") == bytes, "UPDATE_SEEDS=1 writes the seed again");
    }
}
