//! The card's own thread: a loop around [`Gpu::step`].
//!
//! Lock order: the card's state, then the alarm. A thread that changes state on which the scheduler may be waiting
//! calls [`Shared::wake`] after unlocking the state.

use crate::aperture::Apertures;
use crate::fifo::Progress;
use crate::fifo::userd::Doorbells;
use crate::gpu::Gpu;
use parking_lot::{Condvar, Mutex, MutexGuard};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

/// Niceness of the card's thread.
const NICE: i32 = -10;

/// State shared between the card's thread and its callers.
pub(crate) struct Shared {
    pub(crate) gpu: Mutex<Gpu>,
    pub(crate) apertures: Arc<Apertures>,
    pub(crate) doorbells: Arc<Doorbells>,
    alarm: Arc<Alarm>,
    stop: AtomicBool,
}

/// Alarm that wakes the card's thread. Callers of `wake` may hold any lock.
#[derive(Debug, Default)]
pub(crate) struct Alarm {
    /// Set if the state has changed since the thread last checked it. Set before `called`, so that most wakes need no
    /// lock.
    changed: AtomicBool,
    called: Mutex<bool>,
    condition: Condvar,
}

impl Alarm {
    /// Makes the thread check the state again.
    pub(crate) fn wake(&self) {
        if !self.changed.swap(true, Ordering::AcqRel) {
            *self.called.lock() = true;
            self.condition.notify_one();
        }
    }

    /// Sleeps until woken, for at most `limit`.
    fn sleep(&self, limit: Option<Duration>) {
        let mut called = self.called.lock();
        if !*called {
            match limit {
                Some(limit) => {
                    self.condition.wait_for(&mut called, limit);
                }
                None => self.condition.wait(&mut called),
            }
        }
        *called = false;
    }
}

impl Shared {
    pub(crate) fn new(gpu: Gpu) -> Self {
        Self {
            apertures: Arc::clone(&gpu.cx.apertures),
            doorbells: Arc::clone(&gpu.cx.doorbells),
            alarm: Arc::clone(&gpu.alarm),
            gpu: Mutex::new(gpu),
            stop: AtomicBool::new(false),
        }
    }

    pub(crate) fn wake(&self) {
        self.alarm.wake();
    }
}

/// The card's thread, which ends when this value is dropped.
pub(crate) struct Worker {
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
}

impl Worker {
    pub(crate) fn start(shared: &Arc<Shared>) -> std::io::Result<Self> {
        let of_thread = Arc::clone(shared);
        let thread = std::thread::Builder::new().name("simgpu".into()).spawn(move || run(&of_thread))?;
        Ok(Self { shared: Arc::clone(shared), thread: Some(thread) })
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        self.shared.stop.store(true, Ordering::Release);
        self.shared.alarm.changed.store(false, Ordering::Release);
        self.shared.wake();
        if let Some(thread) = self.thread.take()
            && thread.join().is_err()
        {
            tracing::error!("the software card's thread panicked");
        }
    }
}

/// Requests a higher priority for the card's thread, if permitted, because real hardware does not wait for a CPU.
fn run_first() {
    // `None` denotes the calling thread.
    if let Err(error) = rustix::process::setpriority_process(None, NICE) {
        tracing::debug!(%error, "the software card's thread keeps its default priority");
    }
}

fn run(shared: &Shared) {
    run_first();
    while !shared.stop.load(Ordering::Acquire) {
        shared.alarm.changed.store(false, Ordering::Release);
        let mut gpu = shared.gpu.lock();
        let progress = gpu.step();
        let now = gpu.cx.clock.now();
        // Before the next step, hand the lock to a waiting thread.
        MutexGuard::unlock_fair(gpu);
        match progress {
            Progress::Ran => {}
            Progress::WaitUntil(at) => shared.alarm.sleep(Some(Duration::from_nanos(at.saturating_sub(now)))),
            Progress::Idle => shared.alarm.sleep(None),
        }
    }
}
