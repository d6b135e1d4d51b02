//! The function as the daemon sees it: its programs, its thread, and its suspension for another daemon.

use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use locks::{Mutex, rank};

use crate::core::ProgramStatus;
use crate::executor::Executor;
use crate::saved::SavedFunction;
use crate::shared::{Shared, stop};

/// Interval at which the end of a thread is checked.
const SUSPEND_INTERVAL: Duration = Duration::from_micros(200);

/// The executor and its thread.
#[derive(Debug, Default)]
enum Thread {
    /// It does not run now.
    Idle(Box<Executor>),
    /// It runs.
    Running(JoinHandle<Box<Executor>>),
    /// Another daemon has its state, or it has panicked.
    #[default]
    Gone,
}

/// The thread of a function's executor, and the state that both share with the server's thread.
#[derive(Debug)]
pub(crate) struct ExecutorThread {
    shared: Arc<Shared>,
    thread: Mutex<rank::Threads, Thread>,
}

impl ExecutorThread {
    /// Creates the thread of an executor, which does not run yet.
    pub(crate) fn new(shared: Arc<Shared>, executor: Executor) -> Self {
        Self { shared, thread: Mutex::new(Thread::Idle(Box::new(executor))) }
    }

    /// Starts the executor's thread, unless it runs.
    pub(crate) fn start(&self) -> io::Result<()> {
        let mut thread = self.thread.lock();
        self.shared.set_stop(stop::NONE);
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
        self.shared.set_stop(stop::SUSPEND);
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
                self.shared.set_stop(stop::NONE);
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
        self.shared.set_stop(stop::END);
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

/// The operator's view of a function.
#[derive(Clone, Debug)]
pub struct CudaFunction(pub(crate) Arc<ExecutorThread>);

impl CudaFunction {
    /// Returns the programs that use it.
    #[must_use]
    pub fn programs(&self) -> Vec<ProgramStatus> {
        self.0.shared.programs.lock().clone()
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
        self.0.shared.state.lock().is_bus_master
    }

    /// Returns counts, with names that are valid for metrics.
    #[must_use]
    pub fn counters(&self) -> [(&'static str, u64); 5] {
        let load = |count: &AtomicU64| count.load(Ordering::Relaxed);
        [
            ("doorbells", load(&self.0.shared.kicks)),
            ("commands", load(&self.0.shared.commands)),
            ("interrupts", load(&self.0.shared.interrupts)),
            ("workers_started", load(&self.0.shared.workers_started)),
            ("workers_lost", load(&self.0.shared.workers_lost)),
        ]
    }
}

/// A suspended function. Dropping it resumes the function.
#[derive(Debug)]
pub struct SuspendedFunction {
    thread: Arc<ExecutorThread>,
    is_left: bool,
}

impl SuspendedFunction {
    pub(crate) fn new(thread: Arc<ExecutorThread>) -> Self {
        Self { thread, is_left: false }
    }

    /// Saves the function, with duplicates of its descriptors.
    ///
    /// # Errors
    /// The reason that it cannot be handed over.
    pub fn save(&self) -> Result<(SavedFunction, Vec<OwnedFd>), String> {
        let saved = self.thread.with_idle(|executor| executor.save());
        saved.unwrap_or_else(|| Err("its thread has ended".to_owned()))
    }

    /// Leaves the workers to another daemon, which has the saved function.
    pub fn leave(mut self) {
        self.is_left = true;
        self.thread.leave();
    }
}

impl Drop for SuspendedFunction {
    fn drop(&mut self) {
        if self.is_left {
            return;
        }
        if let Err(error) = self.thread.start() {
            tracing::error!(%error, "CUDA programs of this VM are no longer served: no thread");
        }
    }
}
