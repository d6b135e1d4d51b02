//! The function's interface to the daemon: its programs, its thread, and its handover to another daemon.

use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use locks::{Mutex, rank};

use crate::core::ProgramStatus;
use crate::executor::Executor;
use crate::moving::{Carried, MoveRequest};
use crate::restart::{Restart, RestartError, RestartRequest};
use crate::saved::SavedFunction;
use crate::shared::{Shared, stop};
use crate::worker::Launcher;

/// Interval at which the thread is checked until it has stopped.
const SUSPEND_INTERVAL: Duration = Duration::from_micros(200);

/// Additional time for the reply to a move request, after the time limit of the move.
// TIMEOUT: covers the exit of killed workers.
const REPLY_LIMIT: Duration = Duration::from_secs(60);

/// The executor and its thread.
#[derive(Debug, Default)]
enum Thread {
    /// The thread is stopped.
    Idle(Box<Executor>),
    /// The thread is running.
    Running(JoinHandle<Box<Executor>>),
    /// Another daemon has the executor's state, or the executor has panicked.
    #[default]
    Gone,
}

/// The thread of a function's executor, and the state that the executor shares with the server thread.
#[derive(Debug)]
pub(crate) struct ExecutorThread {
    shared: Arc<Shared>,
    thread: Mutex<rank::Threads, Thread>,
}

impl ExecutorThread {
    /// Creates the thread of an executor in the stopped state.
    pub(crate) fn new(shared: Arc<Shared>, executor: Executor) -> Self {
        Self { shared, thread: Mutex::new(Thread::Idle(Box::new(executor))) }
    }

    /// Starts the executor's thread, unless it is running.
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

    /// Stops the executor's thread without affecting its workers. Returns false if the executor is gone, or if the
    /// thread does not stop by `until`. In the latter case, the thread continues.
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

    /// Calls a function with the executor if its thread is stopped.
    pub(crate) fn with_idle<T>(&self, act: impl FnOnce(&mut Executor) -> T) -> Option<T> {
        let mut thread = std::mem::take(&mut *self.thread.lock());
        let done = match &mut thread {
            Thread::Idle(executor) => Some(act(executor)),
            Thread::Running(_) | Thread::Gone => None,
        };
        *self.thread.lock() = thread;
        done
    }

    /// Drops the executor without affecting its workers, which belong to another daemon.
    pub(crate) fn leave(&self) {
        let thread = std::mem::take(&mut *self.thread.lock());
        if let Thread::Idle(mut executor) = thread {
            executor.leave();
        }
    }

    /// Stops the executor. Kills its workers if its thread is running; otherwise, they may belong to another daemon.
    pub(crate) fn end(&self) {
        self.shared.set_stop(stop::END);
        let thread = std::mem::take(&mut *self.thread.lock());
        match thread {
            Thread::Running(handle) => {
                if handle.join().is_err() {
                    tracing::error!("the thread that executes commands for CUDA programs has panicked");
                }
            }
            // The executor has never run in this process, or was suspended. The workers may belong to another daemon.
            Thread::Idle(mut executor) => executor.leave(),
            Thread::Gone => {}
        }
    }
}

/// Handle of a function, for operators and upgrades.
#[derive(Clone, Debug)]
pub struct CudaFunction(pub(crate) Arc<ExecutorThread>);

impl CudaFunction {
    /// Returns the programs that use the function.
    #[must_use]
    pub fn programs(&self) -> Vec<ProgramStatus> {
        self.0.shared.programs.lock().clone()
    }

    /// Starts executing commands of a function that belonged to another daemon.
    ///
    /// # Errors
    /// Returns an error if the thread cannot be created.
    pub fn start(&self) -> io::Result<()> {
        self.0.start()
    }

    /// Suspends the function for another daemon. Its server must already be suspended. The workers keep running.
    ///
    /// # Errors
    /// Returns an error if the function does not stop by `until`. In this case, the function continues.
    pub fn suspend(&self, until: Instant) -> Result<SuspendedFunction, &'static str> {
        match self.0.suspend(until) {
            true => Ok(SuspendedFunction::new(Arc::clone(&self.0))),
            false => Err("the thread of its CUDA function does not stop"),
        }
    }

    /// Restarts the workers of the guest's programs. With `pid`, restarts only programs with this process ID in the
    /// guest. Returns one result per program.
    ///
    /// # Errors
    /// Returns an error if a result is not available within `limit`. A worker that responds later is still restarted,
    /// unless the function has been handed over by then.
    pub fn restart(&self, pid: Option<u32>, limit: Duration) -> Result<Vec<Restart>, RestartError> {
        let begin = Instant::now();
        let until = begin.checked_add(limit).unwrap_or(begin);
        let ((counts, count), (results, result)) = (channel(), channel());
        self.0.shared.state.lock().restarts.push(RestartRequest { pid, begin, until, counts, results });
        self.0.shared.wake.wake();
        let rest = || until.saturating_duration_since(Instant::now());
        let failed = |error| match error {
            RecvTimeoutError::Timeout => RestartError::TimedOut(limit),
            RecvTimeoutError::Disconnected => RestartError::NotServed,
        };
        let count = count.recv_timeout(rest()).map_err(failed)?;
        (0..count).map(|_| result.recv_timeout(rest()).map_err(failed)).collect()
    }

    /// Makes all programs of the guest continue in workers that `launcher` starts on another card. Each worker saves at
    /// most `state_bytes` bytes. Programs that start in the meantime use the same card as the others after the move.
    ///
    /// # Errors
    /// Returns the reason if a program cannot continue there within `limit`. All programs then continue on their card.
    pub fn carry(&self, launcher: Box<dyn Launcher>, state_bytes: u64, limit: Duration) -> Result<Carried, String> {
        let now = Instant::now();
        let (reply, result) = channel();
        let request = MoveRequest { launcher, state_bytes, until: now.checked_add(limit).unwrap_or(now), reply };
        let earlier = self.0.shared.state.lock().carry.replace(request);
        if let Some(earlier) = earlier {
            let _ = earlier.reply.send(Err("another move has begun".to_owned()));
        }
        self.0.shared.wake.wake();
        // The executor replies within `limit`, or after the workers that it has killed have exited.
        let result = result.recv_timeout(limit.saturating_add(REPLY_LIMIT));
        result.unwrap_or_else(|_| Err("its CUDA function is not served now".to_owned()))
    }

    /// Returns true if the guest allows the device to access guest memory.
    #[must_use]
    pub fn is_bus_master(&self) -> bool {
        self.0.shared.state.lock().is_bus_master
    }

    /// Returns the counters and their metric names.
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

    /// Saves the function and duplicates its descriptors.
    ///
    /// # Errors
    /// Returns an error if the function cannot be handed over. The error contains the reason.
    pub fn save(&self) -> Result<(SavedFunction, Vec<OwnedFd>), String> {
        let saved = self.thread.with_idle(|executor| executor.save());
        saved.unwrap_or_else(|| Err("its thread has exited".to_owned()))
    }

    /// Releases the workers to another daemon, which continues with the saved function.
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
            tracing::error!(%error, "CUDA programs of this VM are no longer served: cannot create a thread");
        }
    }
}
