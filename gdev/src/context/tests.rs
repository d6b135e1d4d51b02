//! Tests chunked copies on a device that executes work as late as possible.

use std::collections::{HashMap, VecDeque};

use proptest::prelude::*;

use super::*;

/// A device that executes a copy only when the caller waits for it, so that a missing wait results in wrong data.
#[derive(Default)]
struct Late {
    memory: Vec<Option<(Place, Vec<u8>)>>,
    queue: VecDeque<Copy>,
    submitted: u64,
    /// Number of direct CPU accesses to card memory.
    direct: u64,
    /// Maximum number of copies that were in flight at the same time.
    most_in_flight: usize,
    segments: HashMap<u64, u32>,
    /// True if no RAM can be allocated.
    lacks_ram: bool,
}

impl Late {
    fn range(&mut self, memory: Memory, offset: u64, bytes: usize) -> Result<&mut [u8]> {
        let held = self.memory.get_mut(memory.index).and_then(Option::as_mut).ok_or(Error::Memory(memory.index))?;
        Ok(&mut held.1[offset as usize..][..bytes])
    }

    fn ended(&self) -> u64 {
        self.submitted - self.queue.len() as u64
    }
}

impl Backend for Late {
    fn name(&self) -> &'static str {
        "late"
    }

    fn allocate(&mut self, place: Place, bytes: u64) -> Result<Memory> {
        if self.lacks_ram && place == Place::Ram {
            return Err(Error::Allocation { place, bytes, why: "no memory".to_owned() });
        }
        self.memory.push(Some((place, vec![0xee; bytes as usize])));
        Ok(Memory { index: self.memory.len() - 1, address: 0, bytes })
    }

    fn free(&mut self, memory: Memory) -> Result<()> {
        assert!(self.queue.iter().all(|copy| copy.from != memory && copy.to != memory), "memory in use is freed");
        self.memory[memory.index].take().map(drop).ok_or(Error::Memory(memory.index))
    }

    fn place(&self, memory: Memory) -> Result<Place> {
        let held = self.memory.get(memory.index).and_then(Option::as_ref);
        held.map(|held| held.0).ok_or(Error::Memory(memory.index))
    }

    fn write_by_cpu(&mut self, memory: Memory, offset: u64, bytes: &[u8]) -> Result<()> {
        self.direct += u64::from(self.place(memory)? == Place::Vram);
        self.range(memory, offset, bytes.len())?.copy_from_slice(bytes);
        Ok(())
    }

    fn read_by_cpu(&mut self, memory: Memory, offset: u64, bytes: &mut [u8]) -> Result<()> {
        self.direct += u64::from(self.place(memory)? == Place::Vram);
        bytes.copy_from_slice(self.range(memory, offset, bytes.len())?);
        Ok(())
    }

    fn copy(&mut self, copy: &Copy) -> Result<Fence> {
        self.queue.push_back(*copy);
        self.most_in_flight = self.most_in_flight.max(self.queue.len());
        self.submitted += 1;
        Ok(Fence::new(self.submitted))
    }

    fn load(&mut self, _: Image<'_>) -> Result<Module> {
        Ok(Module { index: 0 })
    }

    fn launch(&mut self, _: Module, _: &str, _: Grid, _: &Params, _: &[Memory]) -> Result<Fence> {
        Ok(Fence::new(self.submitted))
    }

    fn last(&self) -> Option<Fence> {
        Some(self.submitted).filter(|number| *number > 0).map(Fence::new)
    }

    fn is_done(&mut self, fence: Fence) -> Result<bool> {
        Ok(fence.number() <= self.ended())
    }

    fn wait(&mut self, fence: Fence) -> Result<()> {
        while self.ended() < fence.number() {
            let Some(Copy { from, from_offset, to, to_offset, bytes }) = self.queue.pop_front() else { break };
            let data = self.range(from, from_offset, bytes as usize)?.to_vec();
            self.range(to, to_offset, bytes as usize)?.copy_from_slice(&data);
        }
        Ok(())
    }

    fn host_address(&mut self, _: Memory) -> Result<NonNull<u8>> {
        Err(Error::Unsupported { device: self.name(), what: "addresses" })
    }

    fn share(&mut self, _: Memory) -> Result<Shared> {
        Err(Error::Unsupported { device: self.name(), what: "references" })
    }

    fn reference(&mut self, _: &Shared) -> Result<Memory> {
        Err(Error::Unsupported { device: self.name(), what: "references" })
    }

    fn segment(&mut self, request: SegmentRequest) -> Result<Segment> {
        let next = self.segments.len() as u32;
        Ok(Segment { id: *self.segments.entry(request.key).or_insert(next), bytes: request.bytes })
    }

    fn attach(&mut self, segment: Segment, _: bool) -> Result<Memory> {
        self.allocate(Place::Vram, segment.bytes)
    }

    fn detach(&mut self, memory: Memory) -> Result<()> {
        self.free(memory)
    }

    fn remove(&mut self, segment: Segment) -> Result<()> {
        self.segments.retain(|_, id| *id != segment.id);
        Ok(())
    }

    fn attached(&mut self, _: Segment) -> Result<u64> {
        Ok(0)
    }
}

const PIECE: u64 = Tuning::PIECE_BYTES_MIN;

fn context(direct: u64, overlap: bool) -> Context<Late> {
    let tuning = Tuning { direct_write_bytes: direct, direct_read_bytes: direct, piece_bytes: PIECE, overlap };
    Context::new(Late::default(), tuning)
}

proptest! {
    #[test]
    fn copies_of_any_size_keep_every_byte(
        direct in prop_oneof![Just(0u64), 1..3 * PIECE],
        overlap: bool,
        in_ram: bool,
        writes in prop::collection::vec((0..5 * PIECE, 0..5 * PIECE, any::<u8>()), 1..6),
    ) {
        let size = 10 * PIECE;
        let mut context = context(direct, overlap);
        let memory = context.allocate(if in_ram { Place::Ram } else { Place::Vram }, size).expect("room");
        let mut expected = vec![0xee; size as usize];
        for (offset, bytes, seed) in writes {
            let data: Vec<u8> = (0..bytes).map(|at| (at as u8).wrapping_mul(31) ^ seed).collect();
            context.write(memory, offset, &data).expect("a write");
            expected[offset as usize..][..bytes as usize].copy_from_slice(&data);
            let mut found = vec![0; bytes as usize];
            context.read(memory, offset, &mut found).expect("a read");
            prop_assert_eq!(found, data);
        }
        let mut found = vec![0; size as usize];
        context.read(memory, 0, &mut found).expect("a read");
        prop_assert!(found == expected);
    }
}

#[test]
fn copy_with_overlap_keeps_two_pieces_in_flight() {
    for (overlap, most) in [(true, 2), (false, 1)] {
        let mut context = context(0, overlap);
        let memory = context.allocate(Place::Vram, 8 * PIECE).expect("room");
        context.write(memory, 0, &vec![1; 8 * PIECE as usize]).expect("a write");
        context.finish().expect("done");
        context.read(memory, 0, &mut vec![0; 8 * PIECE as usize]).expect("a read");
        assert_eq!(context.backend().most_in_flight, most);
    }
}

#[test]
fn bounce_buffers_grow_with_copies_and_keep_data() {
    const LARGE: u64 = 1 << 20;
    let mut context = context(0, true);
    context.tune(Tuning { piece_bytes: LARGE, ..context.tuning() }).expect("valid");
    let memory = context.allocate(Place::Vram, 4 * LARGE).expect("room");
    let held = |context: &Context<Late>| -> u64 {
        let all = context.backend().memory.iter().flatten().filter(|held| held.0 == Place::Ram);
        all.map(|held| held.1.len() as u64).sum()
    };
    let min = MIN_BOUNCE_BYTES;
    for (bytes, expected) in [(1, min), (min, 2 * min), (min + 1, 3 * min), (4 * LARGE, 2 * LARGE), (1, 2 * LARGE)] {
        let written: Vec<u8> = (0..bytes).map(|at| (at % 251) as u8 ^ bytes as u8).collect();
        context.write(memory, 0, &written).expect("a write");
        assert_eq!(held(&context), expected, "after a copy of {bytes} bytes");
        let before = context.next_bounce;
        let mut found = vec![0; bytes as usize];
        context.read(memory, 0, &mut found).expect("a read");
        assert!(found == written, "{bytes} bytes differ");
        // The next write uses the same buffer as if there had been no read.
        context.next_bounce = before;
    }
}

#[test]
fn copies_work_again_after_failed_allocations_of_bounce_buffers() {
    let mut context = context(0, true);
    let memory = context.allocate(Place::Vram, 2 * PIECE).expect("room");
    for failures in 1..4 {
        context.backend_mut().lacks_ram = true;
        for _ in 0..failures {
            assert!(matches!(context.write(memory, 0, &[1; 8]), Err(Error::Allocation { .. })));
        }
        context.backend_mut().lacks_ram = false;
        let written = [failures; 2 * PIECE as usize];
        context.write(memory, 0, &written).expect("a write");
        let mut found = [0; 2 * PIECE as usize];
        context.read(memory, 0, &mut found).expect("a read");
        assert!(found == written, "after {failures} failures");
        context.finish().expect("done");
        let tuning = context.tuning();
        context.tune(Tuning { piece_bytes: 2 * PIECE, ..tuning }).expect("valid");
        context.tune(tuning).expect("valid");
    }
}

#[test]
fn small_copies_are_direct_only_when_the_context_is_idle() {
    let mut context = context(64, true);
    let memory = context.allocate(Place::Vram, 2 * PIECE).expect("room");
    context.write(memory, 0, &[1; 64]).expect("a write");
    assert_eq!(context.backend().direct, 1);
    context.write(memory, 0, &[2; 65]).expect("a write");
    // A copy is in flight, and would overwrite the result of a direct write.
    context.write(memory, 0, &[3; 64]).expect("a write");
    assert_eq!(context.backend().direct, 1);
    let mut found = [0; 64];
    context.read(memory, 0, &mut found).expect("a read");
    assert_eq!(found, [3; 64]);
    assert_eq!(context.backend().direct, 2);
}

#[test]
fn ranges_outside_memory_and_unknown_memory_are_refused() {
    let mut context = context(16, true);
    let memory = context.allocate(Place::Vram, 100).expect("room");
    for (offset, bytes) in [(0u64, 101usize), (100, 1), (101, 0), (u64::MAX, 2)] {
        assert!(matches!(context.write(memory, offset, &vec![0; bytes]), Err(Error::Range { .. })));
        assert!(matches!(context.read(memory, offset, &mut vec![0; bytes]), Err(Error::Range { .. })));
        let copy = Copy { from: memory, from_offset: offset, to: memory, to_offset: 0, bytes: bytes as u64 };
        assert!(matches!(context.copy(&copy), Err(Error::Range { .. })));
    }
    context.free(memory).expect("freed");
    assert!(matches!(context.write(memory, 0, &[1]), Err(Error::Memory(_))));
    assert!(matches!(context.free(memory), Err(Error::Memory(_))));
}

#[test]
fn grids_without_threads_or_with_too_many_are_refused() {
    let mut context = context(0, true);
    let module = context.load(Image::Cuda(&[])).expect("loaded");
    for (blocks, threads) in [([0, 1, 1], [1, 1, 1]), ([1, 1, 1], [1, 0, 1]), ([1, 1, 1], [1025, 1, 1])] {
        let result = context.launch(module, "k", Grid { blocks, threads }, &Params::new(), &[]);
        assert!(matches!(result, Err(Error::Grid { .. })));
    }
    let overflow = Grid { blocks: [1; 3], threads: [u32::MAX, u32::MAX, 2] };
    assert!(matches!(context.launch(module, "k", overflow, &Params::new(), &[]), Err(Error::Grid { .. })));
}

#[test]
fn new_size_of_pieces_applies_after_copies_in_flight() {
    let mut context = context(0, true);
    let memory = context.allocate(Place::Vram, 4 * PIECE).expect("room");
    context.write(memory, 0, &vec![7; 4 * PIECE as usize]).expect("a write");
    let tuning = Tuning { piece_bytes: 2 * PIECE, ..context.tuning() };
    context.tune(tuning).expect("within the limits");
    let mut found = vec![0; 4 * PIECE as usize];
    context.read(memory, 0, &mut found).expect("a read");
    assert!(found.iter().all(|byte| *byte == 7));
    assert!(matches!(context.tune(Tuning { piece_bytes: 1, ..tuning }), Err(Error::Tuning { .. })));
    assert_eq!(context.tuning(), tuning);
}

#[test]
fn two_copies_at_once_follow_earlier_work_and_do_not_overlap() {
    let mut context = context(0, true);
    let card = context.allocate(Place::Vram, 4 * PIECE).expect("room");
    let [source, target] = [(); 2].map(|()| context.allocate(Place::Ram, 2 * PIECE).expect("room"));
    context.write(source, 0, &[3; 2 * PIECE as usize]).expect("a write");
    // This copy is still in flight when the two copies begin.
    context.write(card, 2 * PIECE, &[5; 2 * PIECE as usize]).expect("a write");
    let write = Copy { from: source, from_offset: 0, to: card, to_offset: 0, bytes: 2 * PIECE };
    let read = Copy { from: card, from_offset: 2 * PIECE, to: target, to_offset: 0, bytes: 2 * PIECE };
    context.copy_both([&write, &read]).expect("both");
    let mut found = [0; 2 * PIECE as usize];
    context.read(target, 0, &mut found).expect("a read");
    assert_eq!(found, [5; 2 * PIECE as usize]);
    context.read(card, 0, &mut found).expect("a read");
    assert_eq!(found, [3; 2 * PIECE as usize]);

    let refused = |context: &mut Context<Late>, one: &Copy, other: &Copy| {
        matches!(context.copy_both([one, other]), Err(Error::Overlap(_)))
    };
    assert!(refused(&mut context, &write, &Copy { from_offset: 2 * PIECE - 1, ..read }), "reads what is written");
    assert!(refused(&mut context, &Copy { from_offset: 2 * PIECE - 1, ..read }, &write), "in the other order");
    assert!(refused(&mut context, &write, &Copy { to_offset: 1, bytes: 1, ..write }), "both write");
    let both_read = Copy { to: target, ..write };
    context.copy_both([&both_read, &Copy { to: card, ..write }]).expect("both may read the same bytes");
    let outside = Copy { from_offset: 2 * PIECE + 1, ..read };
    assert!(matches!(context.copy_both([&write, &outside]), Err(Error::Range { .. })));
}
