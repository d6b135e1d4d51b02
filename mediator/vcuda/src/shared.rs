//! State that the server's thread, the executor and the daemon share.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, AtomicU64, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use locks::{Mutex, rank};
use vmm_glue::link::Wake;

use crate::core::ProgramStatus;
use crate::executor::{Adoption, Executor};
use crate::journal::Journal;
use crate::pci::CONFIG_BYTES;
use crate::queue::ControlQueue;
use crate::registers::Registers;
use crate::suspended::SuspendedFunction;
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
    /// The PCI configuration space, as the server's thread last wrote it.
    pub(crate) config: [u8; CONFIG_BYTES],
    pub(crate) journal: Arc<Journal>,
    /// State of an earlier process, which the executor takes over first.
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

/// Reason that the executor's thread ends.
mod stop {
    pub(super) const NONE: u8 = 0;
    /// The function ends.
    pub(super) const END: u8 = 1;
    /// Another thread, or another daemon, continues.
    pub(super) const SUSPEND: u8 = 2;
}

/// The executor and its thread.
#[derive(Debug, Default)]
pub(crate) enum Thread {
    /// It does not run now.
    Idle(Box<Executor>),
    /// It runs.
    Running(JoinHandle<Box<Executor>>),
    /// Another daemon has its state, or it has panicked.
    #[default]
    Gone,
}

/// The shared state.
#[derive(Debug)]
pub(crate) struct Shared {
    pub(crate) state: Mutex<rank::CudaFunction, State>,
    /// Wakes the executor.
    pub(crate) wake: Wake,
    stop: AtomicU8,
    thread: Mutex<rank::Threads, Thread>,
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
            thread: Mutex::new(Thread::Gone),
            programs: Mutex::new(Vec::new()),
            kicks: AtomicU64::new(0),
            commands: AtomicU64::new(0),
            interrupts: AtomicU64::new(0),
            workers_started: AtomicU64::new(0),
            workers_lost: AtomicU64::new(0),
        })
    }

    /// Returns true if the executor's thread must end.
    pub(crate) fn is_stopped(&self) -> bool {
        self.stop.load(Ordering::Acquire) != stop::NONE
    }

    /// Returns true if the function ends, and its workers with it.
    pub(crate) fn is_ending(&self) -> bool {
        self.stop.load(Ordering::Acquire) == stop::END
    }

    /// Sets the executor, which does not run yet.
    pub(crate) fn put(&self, executor: Executor) {
        *self.thread.lock() = Thread::Idle(Box::new(executor));
    }

    /// Starts the executor's thread, unless it runs.
    pub(crate) fn start(&self) -> io::Result<()> {
        let mut thread = self.thread.lock();
        self.stop.store(stop::NONE, Ordering::Release);
        match std::mem::take(&mut *thread) {
            Thread::Idle(executor) => {
                let span = tracing::info_span!(parent: None, "vm", name = executor.name());
                let builder = std::thread::Builder::new().name(format!("cuda-{}", executor.name()));
                *thread = Thread::Running(builder.spawn(move || span.in_scope(|| executor.run()))?);
            }
            other => *thread = other,
        }
        Ok(())
    }

    /// Stops the executor's thread without an effect on workers, at most until a time. Returns false if it does not
    /// stop; it then continues.
    fn suspend(&self, until: Instant) -> bool {
        self.stop.store(stop::SUSPEND, Ordering::Release);
        self.wake.wake();
        loop {
            let running = std::mem::take(&mut *self.thread.lock());
            match running {
                Thread::Running(handle) if handle.is_finished() => {
                    let Ok(executor) = handle.join() else { return false };
                    *self.thread.lock() = Thread::Idle(executor);
                    return true;
                }
                Thread::Running(handle) => *self.thread.lock() = Thread::Running(handle),
                other => {
                    let is_idle = matches!(other, Thread::Idle(_));
                    *self.thread.lock() = other;
                    return is_idle;
                }
            }
            if Instant::now() >= until {
                self.stop.store(stop::NONE, Ordering::Release);
                return false;
            }
            locks::sleep(SUSPEND_INTERVAL);
        }
    }

    /// Calls a function with the executor, if its thread does not run.
    pub(crate) fn with_idle<T>(&self, act: impl FnOnce(&mut Executor) -> T) -> Option<T> {
        let mut thread = std::mem::take(&mut *self.thread.lock());
        let done = match &mut thread {
            Thread::Idle(executor) => Some(act(executor)),
            Thread::Running(_) | Thread::Gone => None,
        };
        *self.thread.lock() = thread;
        done
    }

    /// Drops the executor without an effect on its workers, which another daemon has.
    pub(crate) fn leave(&self) {
        let thread = std::mem::take(&mut *self.thread.lock());
        if let Thread::Idle(mut executor) = thread {
            executor.leave();
        }
    }

    /// Ends the executor and its workers, unless another daemon has them.
    pub(crate) fn end(&self) {
        self.stop.store(stop::END, Ordering::Release);
        self.wake.wake();
        let thread = std::mem::take(&mut *self.thread.lock());
        match thread {
            Thread::Running(handle) => {
                if handle.join().is_err() {
                    tracing::error!("the thread that executes commands for CUDA programs had panicked");
                }
            }
            // It has never run here, or is suspended: the workers may be another daemon's.
            Thread::Idle(mut executor) => executor.leave(),
            Thread::Gone => {}
        }
    }
}

/// Interval at which the end of a thread is checked.
const SUSPEND_INTERVAL: Duration = Duration::from_micros(200);

/// The operator's view of a function.
#[derive(Clone, Debug)]
pub struct CudaFunction(pub(crate) Arc<Shared>);

impl CudaFunction {
    /// Returns the programs that use it.
    #[must_use]
    pub fn programs(&self) -> Vec<ProgramStatus> {
        self.0.programs.lock().clone()
    }

    /// Starts to execute commands, in a function that another daemon had.
    ///
    /// # Errors
    /// If the host refuses a thread.
    pub fn start(&self) -> io::Result<()> {
        self.0.start()
    }

    /// Suspends the function, whose server is suspended, for another daemon. Its workers continue to run.
    ///
    /// # Errors
    /// The reason that it does not come to rest until the time `until`; it then continues.
    pub fn suspend(&self, until: Instant) -> Result<SuspendedFunction, &'static str> {
        match self.0.suspend(until) {
            true => Ok(SuspendedFunction::new(Arc::clone(&self.0))),
            false => Err("the thread of its CUDA function does not come to rest"),
        }
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
