//! State shared by the server's thread, the executor and the daemon.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, AtomicU64, Ordering};

use locks::{Mutex, rank};
use vmm_glue::link::Wake;

use crate::adoption::Adoption;
use crate::core::ProgramStatus;
use crate::journal::Journal;
use crate::moving::MoveRequest;
use crate::pci::CONFIG_BYTES;
use crate::queue::ControlQueue;
use crate::registers::Registers;
use crate::restart::RestartRequest;
use crate::window::Window;

/// State under the lock. A thread holds the lock for one access or one command, and never while it blocks.
#[derive(Debug)]
pub(crate) struct State {
    pub(crate) registers: Registers,
    pub(crate) queue: Option<ControlQueue>,
    /// Generation number of the queue. Responses to commands of an earlier generation are dropped.
    pub(crate) generation: u64,
    pub(crate) is_bus_master: bool,
    /// The window of the current client, or `None` if its memory could not be allocated.
    pub(crate) window: Option<Arc<Window>>,
    /// The PCI configuration space after the server thread's last write.
    pub(crate) config: [u8; CONFIG_BYTES],
    pub(crate) journal: Arc<Journal>,
    /// Restarts of workers that the executor has not begun yet.
    pub(crate) restarts: Vec<RestartRequest>,
    /// A move to another card that the executor has not begun yet.
    pub(crate) carry: Option<MoveRequest>,
    /// State of an earlier process, which the executor must take over first.
    pub(crate) adoption: Option<Box<Adoption>>,
}

impl State {
    pub(crate) fn new(window: Arc<Window>, journal: Arc<Journal>) -> Self {
        let state = Self {
            registers: Registers::default(),
            queue: None,
            generation: 0,
            is_bus_master: false,
            window: Some(window),
            config: [0; CONFIG_BYTES],
            journal,
            restarts: Vec::new(),
            carry: None,
            adoption: None,
        };
        state.record_registers();
        state
    }

    /// Writes the registers to the journal.
    pub(crate) fn record_registers(&self) {
        self.journal.put_registers(&self.registers.save());
    }

    pub(crate) fn drop_queue(&mut self) {
        self.queue = None;
        self.generation = self.generation.wrapping_add(1);
    }
}

/// Reasons why the executor's thread stops.
pub(crate) mod stop {
    pub(crate) const NONE: u8 = 0;
    /// The function is dropped.
    pub(crate) const END: u8 = 1;
    /// Another thread or another daemon will resume execution.
    pub(crate) const SUSPEND: u8 = 2;
}

/// State that the server's thread, the executor and the daemon share.
#[derive(Debug)]
pub(crate) struct Shared {
    pub(crate) state: Mutex<rank::CudaFunction, State>,
    /// Wakes the executor.
    pub(crate) wake: Wake,
    stop: AtomicU8,
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
            stop: AtomicU8::new(stop::NONE),
            programs: Mutex::new(Vec::new()),
            kicks: AtomicU64::new(0),
            commands: AtomicU64::new(0),
            interrupts: AtomicU64::new(0),
            workers_started: AtomicU64::new(0),
            workers_lost: AtomicU64::new(0),
        })
    }

    /// Returns true if the executor's thread must stop.
    pub(crate) fn is_stopped(&self) -> bool {
        self.stop.load(Ordering::Acquire) != stop::NONE
    }

    /// Returns true if the function is being dropped together with its workers.
    pub(crate) fn is_ending(&self) -> bool {
        self.stop.load(Ordering::Acquire) == stop::END
    }

    /// Sets or clears the reason why the executor's thread must stop.
    pub(crate) fn set_stop(&self, reason: u8) {
        self.stop.store(reason, Ordering::Release);
        self.wake.wake();
    }
}
