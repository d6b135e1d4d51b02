//! Replays traces on a card that is too small for them. Each step needs all of its chunks on the card, and the
//! mediator's victim policies choose the chunks to evict.
//!
//! A chunk is created on the card at its first use, at no cost. A returning chunk is copied in. An evicted chunk is
//! copied out if it was written since its arrival. Otherwise, it is dropped, because host memory still has a copy.
//! GPUswap's rule chooses the VM from which to evict: the one with the most chunks, including the request. For equal
//! weights, this is also the balancer's rule.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet};

use vram::victim::{Choose, Hints, PRIORITY_DEFAULT, VictimPolicy};

use super::trace::{Step, Submission, Trace};

/// Maximum number of chunks per VM.
const CHUNKS_MAX: u32 = 1024;

/// Uses that a policy can observe.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Sees {
    /// The uses that the mediator can observe: memory referenced by submissions, and CPU accesses.
    Named,
    /// Every access, as on a card with reference bits.
    All,
}

/// A policy under test.
#[derive(Clone, Copy, Debug)]
pub(super) struct Contender {
    pub(super) name: &'static str,
    /// A policy of the mediator. `None` evicts the newest chunk, which no real policy does, to show the possible gain.
    pub(super) policy: Option<VictimPolicy>,
    pub(super) sees: Sees,
}

/// Profile of a program, recorded with a different input.
#[derive(Clone, Debug, Default)]
pub(super) struct Known {
    /// Number of bytes transferred from or to each chunk.
    accesses: BTreeMap<u32, u64>,
    /// Priorities that a guest would assign to its buffers: accesses relative to size.
    priorities: BTreeMap<u32, u8>,
}

impl Known {
    pub(super) fn from_profile(profile: &Trace) -> Self {
        let accesses: BTreeMap<u32, u64> =
            profile.sums().into_iter().map(|(chunk, used)| (chunk, used.read + used.written)).collect();
        let density = |&(first, last): &(u32, u32)| {
            let sum: u64 = accesses.range(first..=last).map(|(_, bytes)| bytes).sum();
            sum / u64::from(last - first + 1)
        };
        let mut buffers = profile.buffers.clone();
        buffers.sort_by_key(density);
        let step = 255 / buffers.len().max(1);
        let mut priorities = BTreeMap::new();
        for (rank, &(first, last)) in (1..).zip(&buffers) {
            // If a chunk belongs to two buffers, the higher priority is used.
            (first..=last).for_each(|chunk| _ = priorities.insert(chunk, (rank * step).min(255) as u8));
        }
        Self { accesses, priorities }
    }

    pub(super) fn hints(&self) -> Hints {
        let mut hints = Hints::new(CHUNKS_MAX);
        for (&chunk, &bytes) in &self.accesses {
            hints.set_accesses(chunk..=chunk, u32::try_from(bytes / 128).unwrap_or(u32::MAX));
        }
        for chunk in 0..CHUNKS_MAX {
            let priority = self.priorities.get(&chunk).copied().unwrap_or(PRIORITY_DEFAULT);
            hints.set_priority(chunk..=chunk, priority);
        }
        hints
    }
}

/// A program's run and profile.
#[derive(Clone, Copy, Debug)]
pub(super) struct Instance<'a> {
    pub(super) trace: &'a Trace,
    pub(super) known: &'a Known,
}

/// A step of one of several VMs.
#[derive(Clone, Copy, Debug)]
pub(super) struct Piece<'a> {
    pub(super) vm: usize,
    /// Chunks whose use the mediator had observed when it received the step's submission. Set only for the first step
    /// of a submission.
    pub(super) seen: Option<&'a BTreeSet<u32>>,
    pub(super) step: &'a Step,
}

/// Interleaves the submissions of several VMs round-robin.
pub(super) fn interleave<'a>(instances: &[Instance<'a>]) -> Vec<Piece<'a>> {
    let pieces = |vm: usize, submission: &'a Submission| {
        submission.steps.iter().enumerate().map(move |(index, step)| Piece {
            vm,
            seen: (index == 0).then_some(&submission.seen),
            step,
        })
    };
    let mut queues: Vec<_> = instances.iter().map(|instance| instance.trace.submissions.iter()).collect();
    let mut all = Vec::new();
    loop {
        let before = all.len();
        for (vm, queue) in queues.iter_mut().enumerate() {
            all.extend(queue.next().into_iter().flat_map(|submission| pieces(vm, submission)));
        }
        if all.len() == before {
            return all;
        }
    }
}

/// Numbers of copied chunks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Copied {
    /// Number of copies to the card.
    pub(super) ins: u64,
    /// Number of copies of written chunks to host memory.
    pub(super) outs: u64,
}

impl Copied {
    pub(super) fn sum(self) -> u64 {
        self.ins + self.outs
    }
}

/// State of the VMs' chunks, on the card and in host memory.
#[derive(Debug, Default)]
pub(super) struct Memory {
    on_card: Vec<BTreeSet<u32>>,
    dirty: BTreeSet<(usize, u32)>,
    born: BTreeSet<(usize, u32)>,
    /// Index of the step at which each chunk arrived.
    came: BTreeMap<(usize, u32), u64>,
    pieces: u64,
    copied: Copied,
}

impl Memory {
    pub(super) fn new(vms: usize) -> Self {
        Self { on_card: vec![BTreeSet::new(); vms], ..Self::default() }
    }

    /// Returns the number of chunks on the card.
    pub(super) fn count(&self) -> usize {
        self.on_card.iter().map(BTreeSet::len).sum()
    }

    pub(super) fn copied(&self) -> Copied {
        self.copied
    }

    pub(super) fn is_dirty(&self, vm: usize, chunk: u32) -> bool {
        self.dirty.contains(&(vm, chunk))
    }

    /// Returns all chunks on the card.
    pub(super) fn all(&self) -> impl Iterator<Item = (usize, u32)> + '_ {
        self.on_card.iter().enumerate().flat_map(|(vm, chunks)| chunks.iter().map(move |&chunk| (vm, chunk)))
    }

    /// Returns the chunks of a step that are not on the card.
    pub(super) fn missing(&self, piece: &Piece<'_>) -> impl Iterator<Item = u32> {
        piece.step.keys().filter(|chunk| !self.on_card[piece.vm].contains(chunk)).copied()
    }

    pub(super) fn evict(&mut self, vm: usize, chunk: u32) {
        self.on_card[vm].remove(&chunk);
        self.copied.outs += u64::from(self.dirty.remove(&(vm, chunk)));
    }

    /// Executes a step. The caller must have freed enough memory for it.
    pub(super) fn run(&mut self, piece: &Piece<'_>) {
        self.pieces += 1;
        for (&chunk, used) in piece.step {
            if !self.on_card[piece.vm].contains(&chunk) {
                self.came.insert((piece.vm, chunk), self.pieces);
            }
            let (came, new) = (self.on_card[piece.vm].insert(chunk), self.born.insert((piece.vm, chunk)));
            self.copied.ins += u64::from(came && !new);
            if used.written > 0 {
                self.dirty.insert((piece.vm, chunk));
            }
        }
    }

    /// Returns a VM's chunks that may be evicted for a step.
    fn candidates(&self, vm: usize, piece: &Piece<'_>) -> Vec<u32> {
        let is_free = |chunk: &&u32| vm != piece.vm || !piece.step.contains_key(chunk);
        self.on_card[vm].iter().filter(is_free).copied().collect()
    }
}

/// Replays steps on a card of `capacity` chunks, with the profile of each VM's program.
pub(super) fn replay(
    pieces: &[Piece<'_>],
    instances: &[Instance<'_>],
    capacity: usize,
    contender: Contender,
    seed: u64,
) -> Copied {
    let mut policy = contender.policy.map(|policy| policy.build(seed));
    let mut memory = Memory::new(instances.len());
    let mut hints: Vec<Hints> = instances.iter().map(|instance| instance.known.hints()).collect();
    for piece in pieces {
        let known = &mut hints[piece.vm];
        match (contender.sees, piece.seen) {
            (Sees::Named, Some(seen)) => seen.iter().for_each(|&chunk| known.touch(chunk..=chunk)),
            (Sees::Named, None) => {}
            (Sees::All, _) => piece.step.keys().for_each(|&chunk| known.touch(chunk..=chunk)),
        }
        let wanted: Vec<u32> = memory.missing(piece).collect();
        wanted.iter().for_each(|&chunk| hints[piece.vm].wants(chunk));
        make_room(&mut memory, piece, capacity, &mut hints, policy.as_deref_mut());
        wanted.iter().for_each(|&chunk| hints[piece.vm].arrived(chunk..=chunk));
        memory.run(piece);
    }
    memory.copied()
}

/// Evicts chunks until a step fits.
fn make_room(
    memory: &mut Memory,
    piece: &Piece<'_>,
    capacity: usize,
    hints: &mut [Hints],
    mut policy: Option<&mut (dyn Choose + 'static)>,
) {
    let missing = memory.missing(piece).count();
    let excess = (memory.count() + missing).saturating_sub(capacity);
    if excess == 0 {
        return;
    }
    let mut candidates: Vec<Vec<u32>> = (0..hints.len()).map(|vm| memory.candidates(vm, piece)).collect();
    let mut counts = vec![0; hints.len()];
    for _ in 0..excess {
        let has = |vm: usize| {
            let wanted = if vm == piece.vm { missing } else { 0 };
            memory.on_card[vm].len() + wanted - counts[vm]
        };
        let givers = (0..hints.len()).filter(|&vm| candidates[vm].len() > counts[vm]);
        // If several VMs have the same number of chunks, choose the first one.
        let Some(sender) = givers.rev().max_by_key(|&vm| has(vm)) else { break };
        counts[sender] += 1;
    }
    for (vm, count) in counts.into_iter().enumerate().filter(|(_, count)| *count > 0) {
        let chosen = &mut candidates[vm];
        match &mut policy {
            Some(policy) => policy.victims(&mut hints[vm], chosen, count),
            None => {
                chosen.sort_by_key(|&chunk| Reverse(memory.came.get(&(vm, chunk)).copied()));
                chosen.truncate(count);
            }
        }
        chosen.iter().for_each(|&chunk| memory.evict(vm, chunk));
    }
}
