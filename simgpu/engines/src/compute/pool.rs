//! The worker threads that execute grids.

use super::grid::{Grid, Outcome, Worker};
use super::launch::Launch;
use super::residue::Residue;
use parking_lot::{Condvar, Mutex};
use simgpu_memory::memory::Memory;
use simgpu_memory::mmu::{AddressSpace, Mmu};
use std::sync::Arc;
use std::thread::JoinHandle;

/// Maximum number of worker threads per card.
const WORKERS_MAX: usize = 64;

/// Callback invoked when a grid on the pool's threads ends.
#[derive(Clone)]
pub(crate) struct Wake(pub(crate) Arc<dyn Fn() + Send + Sync>);

impl std::fmt::Debug for Wake {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Wake")
    }
}

/// State shared between the threads and the pool's owner.
#[derive(Debug, Default)]
struct Queue {
    task: Mutex<Task>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct Task {
    /// Number of the current grid, which lets threads detect a new grid.
    number: u64,
    grid: Option<Arc<Grid>>,
    end: bool,
}

/// Executes grids, one at a time.
#[derive(Debug)]
pub(crate) struct Pool {
    memory: Arc<Memory>,
    mmu: Arc<Mmu>,
    residue: Arc<Residue>,
    wake: Wake,
    queue: Arc<Queue>,
    wanted: usize,
    threads: Vec<JoinHandle<()>>,
    /// Worker for the caller's thread, or `None` if the pool has threads.
    own: Option<Box<Worker>>,
    grid: Option<Arc<Grid>>,
}

/// Progress of a grid.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Advance {
    /// [`Pool::advance`] must be called again.
    More,
    /// The grid runs on the pool's threads, which wake the caller when the grid ends. Also returned for a deadlocked
    /// grid if the pool has no threads.
    Elsewhere,
    /// The grid has ended.
    Ended(Outcome),
}

impl Pool {
    /// Creates a pool of `workers` threads, which are spawned for the first grid. Without threads, [`Self::advance`]
    /// executes the grid.
    pub(crate) fn new(memory: Arc<Memory>, mmu: Arc<Mmu>, wake: Wake, workers: usize, sms: u32) -> Self {
        Self {
            memory,
            mmu,
            residue: Arc::new(Residue::new(sms)),
            wake,
            queue: Arc::default(),
            wanted: workers.min(WORKERS_MAX),
            threads: Vec::new(),
            own: None,
            grid: None,
        }
    }

    pub(crate) fn is_busy(&self) -> bool {
        self.grid.is_some()
    }

    /// Starts a grid. No other grid may be running.
    pub(crate) fn start(&mut self, launch: Launch, space: AddressSpace) {
        self.start_threads();
        let (memory, mmu) = (Arc::clone(&self.memory), Arc::clone(&self.mmu));
        let grid = Arc::new(Grid::new(launch.clone(), space, memory, mmu, Arc::clone(&self.residue)));
        if self.threads.is_empty() {
            self.own.get_or_insert_with(|| Box::new(Worker::new())).begin(&launch);
        } else {
            let mut task = self.queue.task.lock();
            task.number += 1;
            task.grid = Some(Arc::clone(&grid));
            self.queue.changed.notify_all();
        }
        self.grid = Some(grid);
    }

    fn start_threads(&mut self) {
        while self.threads.len() < self.wanted {
            let (queue, wake, index) = (Arc::clone(&self.queue), self.wake.clone(), self.threads.len() as u32);
            let builder = std::thread::Builder::new().name(format!("simgpu-sm{index}"));
            match builder.spawn(move || serve(&queue, &wake, index)) {
                Ok(thread) => self.threads.push(thread),
                Err(error) => {
                    tracing::warn!(%error, "the software card could not start a thread for kernels");
                    self.wanted = self.threads.len();
                }
            }
        }
    }

    /// Polls the grid, and executes part of it if the pool has no threads.
    pub(crate) fn advance(&mut self) -> Option<Advance> {
        let grid = self.grid.as_ref()?;
        if self.threads.is_empty()
            && let Some(worker) = &mut self.own
        {
            match grid.slice(worker, 0) {
                super::block::Slice::More => return Some(Advance::More),
                super::block::Slice::Stuck => return Some(Advance::Elsewhere),
                // This worker is the only one.
                super::block::Slice::Ended => grid.close(),
            }
        }
        let Some(outcome) = grid.outcome() else { return Some(Advance::Elsewhere) };
        self.forget();
        Some(Advance::Ended(outcome))
    }

    /// Abandons the running grid, if any. No further instructions execute after this call.
    pub(crate) fn stop(&mut self) {
        if let Some(grid) = &self.grid {
            grid.stop();
        }
        self.forget();
    }

    fn forget(&mut self) {
        self.grid = None;
        self.queue.task.lock().grid = None;
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        self.stop();
        self.queue.task.lock().end = true;
        self.queue.changed.notify_all();
        for thread in self.threads.drain(..) {
            if thread.join().is_err() {
                tracing::error!("a thread of the software card panicked");
            }
        }
    }
}

/// Main loop of a worker thread.
fn serve(queue: &Queue, wake: &Wake, index: u32) {
    let mut worker = Worker::new();
    let mut seen = 0;
    loop {
        let grid = {
            let mut task = queue.task.lock();
            loop {
                if task.end {
                    return;
                }
                if task.number != seen {
                    seen = task.number;
                    if let Some(grid) = &task.grid {
                        break Arc::clone(grid);
                    }
                }
                queue.changed.wait(&mut task);
            }
        };
        grid.work(&mut worker, index);
        if grid.outcome().is_some() {
            (wake.0)();
        }
    }
}
