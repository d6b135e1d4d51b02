//! State that the server's thread, the executor and the daemon share.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use locks::{Mutex, rank};
use vmm_glue::link::Wake;

use crate::core::ProgramStatus;
use crate::queue::ControlQueue;
use crate::registers::Registers;
use crate::window::Window;

/// State under the lock. It is held for single accesses and single commands, never while anything waits.
#[derive(Debug)]
pub(crate) struct State {
    pub(crate) registers: Registers,
    pub(crate) queue: Option<ControlQueue>,
    /// Differs for each queue: answers to commands of an earlier one are dropped.
    pub(crate) generation: u64,
    pub(crate) is_bus_master: bool,
    /// The window of the present client; `None` if the host refused one.
    pub(crate) window: Option<Arc<Window>>,
}

impl State {
    pub(crate) fn new(window: Arc<Window>) -> Self {
        let registers = Registers::default();
        Self { registers, queue: None, generation: 0, is_bus_master: false, window: Some(window) }
    }

    pub(crate) fn drop_queue(&mut self) {
        self.queue = None;
        self.generation = self.generation.wrapping_add(1);
    }
}

/// The shared state.
#[derive(Debug)]
pub(crate) struct Shared {
    pub(crate) state: Mutex<rank::CudaFunction, State>,
    /// Wakes the executor.
    pub(crate) wake: Wake,
    stop: AtomicBool,
    pub(crate) programs: Mutex<rank::CudaPrograms, Vec<ProgramStatus>>,
    pub(crate) kicks: AtomicU64,
    pub(crate) commands: AtomicU64,
    pub(crate) interrupts: AtomicU64,
    pub(crate) workers_started: AtomicU64,
    pub(crate) workers_lost: AtomicU64,
}

impl Shared {
    pub(crate) fn new(state: State) -> io::Result<Self> {
        Ok(Self {
            state: Mutex::new(state),
            wake: Wake::new()?,
            stop: AtomicBool::new(false),
            programs: Mutex::new(Vec::new()),
            kicks: AtomicU64::new(0),
            commands: AtomicU64::new(0),
            interrupts: AtomicU64::new(0),
            workers_started: AtomicU64::new(0),
            workers_lost: AtomicU64::new(0),
        })
    }

    /// Ends the executor.
    pub(crate) fn stop(&self) {
        self.stop.store(true, Ordering::Release);
        self.wake.wake();
    }

    pub(crate) fn is_stopped(&self) -> bool {
        self.stop.load(Ordering::Acquire)
    }
}

/// The operator's view of a function.
#[derive(Clone, Debug)]
pub struct CudaFunction(pub(crate) Arc<Shared>);

impl CudaFunction {
    /// Returns the programs that use it.
    #[must_use]
    pub fn programs(&self) -> Vec<ProgramStatus> {
        self.0.programs.lock().clone()
    }

    /// Returns true if the guest lets the device access its memory.
    #[must_use]
    pub fn is_bus_master(&self) -> bool {
        self.0.state.lock().is_bus_master
    }

    /// Returns counts, with names that are valid for metrics.
    #[must_use]
    pub fn counters(&self) -> [(&'static str, u64); 5] {
        let load = |count: &AtomicU64| count.load(Ordering::Relaxed);
        [
            ("doorbells", load(&self.0.kicks)),
            ("commands", load(&self.0.commands)),
            ("interrupts", load(&self.0.interrupts)),
            ("workers_started", load(&self.0.workers_started)),
            ("workers_lost", load(&self.0.workers_lost)),
        ]
    }
}
