//! A running grid. Workers start its blocks in ascending order.
//!
//! If blocks fail, the lowest-numbered failed block is reported, regardless of the number of workers: workers still
//! execute all lower-numbered blocks, but start no higher-numbered ones.

use super::block::{Block, Caches, Slice};
use super::code::Code;
use super::constants::Constants;
use super::launch::{Failure, Launch};
use super::locks::Locks;
use super::memory::Counts;
use super::residue::Residue;
use super::warp::LANES;
use parking_lot::{Condvar, Mutex};
use simgpu_memory::memory::Memory;
use simgpu_memory::mmu::{Access, AddressSpace, Client, Mmu};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

/// Number of instructions after which a worker ends its session, so that TLB flushes can proceed.
const INSTRUCTIONS_PER_FLUSH: u32 = 2048;

/// Properties of the shaders' memory accesses.
pub(crate) const ACCESS: Access = Access { privileged: false, client: Client::Gpc };

/// Result of a grid.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Outcome {
    pub(crate) counts: Counts,
    pub(crate) failure: Option<Failure>,
}

#[derive(Debug, Default)]
struct State {
    /// Number of the next block to start.
    next: u64,
    workers: u32,
    /// Set when no more blocks may start and none is running.
    closed: bool,
    counts: Counts,
    failure: Option<(u64, Failure)>,
}

#[derive(Debug)]
pub(crate) struct Grid {
    launch: Launch,
    locks: Locks,
    space: AddressSpace,
    memory: Arc<Memory>,
    mmu: Arc<Mmu>,
    residue: Arc<Residue>,
    /// Maximum number of concurrent blocks.
    slots: u32,
    stop: AtomicBool,
    /// Number of the lowest-numbered failed block.
    failed: AtomicU64,
    state: Mutex<State>,
    changed: Condvar,
}

impl Grid {
    pub(crate) fn new(
        launch: Launch,
        space: AddressSpace,
        memory: Arc<Memory>,
        mmu: Arc<Mmu>,
        residue: Arc<Residue>,
    ) -> Self {
        let block_local = launch.warp_local_bytes() * u64::from(launch.threads().div_ceil(LANES as u32));
        // Each running block needs its own part of local memory. If local memory is too small even for one block, one
        // block still runs, and fails.
        let slots =
            launch.local_bytes.checked_div(block_local).map_or(u32::MAX, |slots| slots.clamp(1, 1 << 16) as u32);
        Self {
            launch,
            locks: Locks::default(),
            space,
            memory,
            mmu,
            residue,
            slots,
            stop: AtomicBool::new(false),
            failed: AtomicU64::new(u64::MAX),
            state: Mutex::new(State::default()),
            changed: Condvar::new(),
        }
    }

    /// Returns the grid's outcome once it has ended.
    pub(crate) fn outcome(&self) -> Option<Outcome> {
        let state = self.state.lock();
        state.closed.then(|| Outcome { counts: state.counts, failure: state.failure.map(|(_, failure)| failure) })
    }

    /// Abandons the grid. No further instructions execute after this call.
    pub(crate) fn stop(&self) {
        self.stop.store(true, Ordering::Release);
        let mut state = self.state.lock();
        self.changed.notify_all();
        while state.workers > 0 {
            self.changed.wait(&mut state);
        }
        state.closed = true;
    }

    /// Closes the grid. No work may be left, and no worker may be active.
    pub(crate) fn close(&self) {
        self.state.lock().closed = true;
    }

    /// Executes blocks as worker `index` until no work is left for this worker.
    pub(crate) fn work(&self, worker: &mut Worker, index: u32) {
        let Some(_working) = self.join(index) else { return };
        worker.begin(&self.launch);
        loop {
            match self.slice(worker, index) {
                Slice::More => {}
                Slice::Ended => break,
                Slice::Stuck => self.wait_for_the_end(worker),
            }
        }
    }

    /// Registers a worker if the grid has work for it.
    pub(crate) fn join(&self, index: u32) -> Option<Working<'_>> {
        let mut state = self.state.lock();
        let useful = index < self.slots && state.next < self.launch.blocks();
        if state.closed || !useful || self.stop.load(Ordering::Acquire) {
            return None;
        }
        state.workers += 1;
        Some(Working(self))
    }

    /// Executes a short slice of the worker's block. [`Slice::Ended`] means that this worker has no work left.
    pub(crate) fn slice(&self, worker: &mut Worker, index: u32) -> Slice {
        let number = match worker.number {
            Some(number) => number,
            None => match self.next() {
                Some(number) => {
                    worker.block.start(&self.launch, number, index, &self.residue);
                    worker.number = Some(number);
                    number
                }
                None => return Slice::Ended,
            },
        };
        if self.abandoned(number) {
            worker.block.leave(&self.launch, &self.residue);
            worker.number = None;
            return Slice::More;
        }
        let mut counts = Counts::default();
        let mut session = self.mmu.session(&self.memory, &self.space, ACCESS);
        let result = worker.block.run(
            &self.launch,
            &self.locks,
            &mut session,
            &mut worker.caches,
            &mut counts,
            INSTRUCTIONS_PER_FLUSH,
        );
        counts.bus_bytes += session.take_bus_bytes();
        drop(session);
        worker.counts.add(&counts);
        match result {
            Ok(slice @ (Slice::More | Slice::Stuck)) => return slice,
            Ok(Slice::Ended) => {}
            Err(failure) => self.fail(number, failure),
        }
        worker.block.leave(&self.launch, &self.residue);
        worker.number = None;
        self.state.lock().counts.add(&std::mem::take(&mut worker.counts));
        Slice::More
    }

    /// Takes the number of the next block to start, if any.
    fn next(&self) -> Option<u64> {
        let mut state = self.state.lock();
        let left = state.next < self.launch.blocks() && state.failure.is_none() && !self.stop.load(Ordering::Acquire);
        left.then(|| {
            state.next += 1;
            state.next - 1
        })
    }

    fn abandoned(&self, block: u64) -> bool {
        self.stop.load(Ordering::Acquire) || self.failed.load(Ordering::Acquire) < block
    }

    fn fail(&self, block: u64, failure: Failure) {
        let mut state = self.state.lock();
        if state.failure.is_none_or(|(lowest, _)| block < lowest) {
            state.failure = Some((block, failure));
            self.failed.store(block, Ordering::Release);
        }
        self.changed.notify_all();
    }

    /// Simulates a block that deadlocks on the card: waits until the grid is abandoned.
    fn wait_for_the_end(&self, worker: &Worker) {
        let mut state = self.state.lock();
        while worker.number.is_some_and(|number| !self.abandoned(number)) {
            self.changed.wait(&mut state);
        }
    }
}

pub(crate) struct Working<'a>(&'a Grid);

impl Drop for Working<'_> {
    fn drop(&mut self) {
        let mut state = self.0.state.lock();
        state.workers -= 1;
        if state.workers == 0 {
            // A worker exits when no block is left to start, and no block starts after that.
            state.closed = true;
            self.0.changed.notify_all();
        }
    }
}

/// State of a thread that executes blocks. A thread reuses its worker for all grids.
#[derive(Debug)]
pub(crate) struct Worker {
    block: Block,
    /// Number of the current block.
    number: Option<u64>,
    caches: Caches,
    counts: Counts,
}

impl Worker {
    pub(crate) fn new() -> Self {
        let caches = Caches { code: Code::new(), constants: Constants::new() };
        Self { block: Block::new(), number: None, caches, counts: Counts::default() }
    }

    /// Prepares the worker for a grid's blocks.
    pub(crate) fn begin(&mut self, launch: &Launch) {
        self.number = None;
        self.counts = Counts::default();
        self.caches.code.begin(launch.code);
        self.caches.constants.begin(&launch.banks);
    }
}
