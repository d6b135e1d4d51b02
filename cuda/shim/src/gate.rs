//! Submission gate: closed while another tenant has the slice or chunks are relocated.
//!
//! A submission that finds the gate open costs two additions to a counter that few threads share. Closing it waits
//! until no thread is within the real driver's submit functions.
//!
//! UNSAFETY: reads arguments of calls by their positions.
#![allow(unsafe_code, reason = "see UNSAFETY")]

use std::cell::Cell;
use std::ffi::c_int;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::{Condvar, Mutex, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use crate::driver::SUCCESS;
use crate::streams::{self, stream};
use crate::symbols::{Arguments, COPIES, at};
use crate::{captures, fences, memory, pace, solo_backlog, tenant};

/// Reason to be closed: the slice is over, or has not begun.
pub const NO_SLICE: u32 = 1;
/// Reason to be closed: chunks move.
pub const ORDER: u32 = 2;
/// Reason to be closed: memory is copied so that it can be exported.
pub const EXPORT: u32 = 4;

/// Counters of threads within the driver, each in a cache line of its own.
const STRIPES: usize = 32;

#[repr(align(64))]
struct Stripe(AtomicU32);

static STRIPE: [Stripe; STRIPES] = [const { Stripe(AtomicU32::new(0)) }; STRIPES];
static CLOSED: AtomicU32 = AtomicU32::new(0);
/// Threads that the gate blocks.
static HELD: AtomicU32 = AtomicU32::new(0);
/// The owner has been notified that a submission waits.
static TOLD: AtomicBool = AtomicBool::new(false);
/// Deadline until which one thread spins for the next slice, in ns of [`clock`].
static SOON: AtomicU64 = AtomicU64::new(0);
static LOOKS: AtomicBool = AtomicBool::new(false);
static LOCK: Mutex<()> = Mutex::new(());
static OPENED: Condvar = Condvar::new();

/// Tokens from [`enter`] to [`leave`].
const UNGATED_TOKEN: u64 = u64::MAX;

thread_local! {
    static THREAD_STRIPE: Cell<usize> = const { Cell::new(usize::MAX) };
}

fn stripe() -> usize {
    static NEXT: AtomicU32 = AtomicU32::new(0);
    THREAD_STRIPE
        .try_with(|mine| {
            if mine.get() == usize::MAX {
                mine.set(NEXT.fetch_add(1, Ordering::Relaxed) as usize % STRIPES);
            }
            mine.get()
        })
        .unwrap_or(0)
}

/// Mixes a function with the size of its grid.
fn shaped(function: u64, grid: [u32; 3]) -> u64 {
    let mix = |key: u64, size: u32| (key.rotate_left(23) ^ u64::from(size)).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    grid.into_iter().fold(function, mix)
}

/// Returns a key that repeated submissions of the same work share, for estimates of its length.
fn key(index: usize, arguments: Arguments) -> u64 {
    // SAFETY: the positions are those in the headers' declarations.
    let get = |n| unsafe { arguments.get(n) };
    match index {
        at::cuLaunchKernel
        | at::cuLaunchKernel_ptsz
        | at::cuLaunchCooperativeKernel
        | at::cuLaunchCooperativeKernel_ptsz => shaped(get(0), [get(1) as u32, get(2) as u32, get(3) as u32]),
        at::cuLaunchKernelEx | at::cuLaunchKernelEx_ptsz => {
            let config = get(0) as *const [u32; 3];
            // SAFETY: `CUlaunchConfig` begins with the three sizes of the grid.
            let grid = if config.is_null() { [0; 3] } else { unsafe { config.read_unaligned() } };
            shaped(get(1), grid)
        }
        _ if COPIES.get(index).copied().unwrap_or(false) => ((index as u64) << 8) | u64::from(get(2).leading_zeros()),
        _ => get(0),
    }
}

/// Before a submission. Waits while the gate is closed, and while too much of this program's work is in flight.
pub fn enter(index: usize, arguments: Arguments) -> u64 {
    if captures::any() && stream(index, arguments).is_capturing() {
        // The driver checks addresses when it records a copy.
        memory::present();
        return UNGATED_TOKEN;
    }
    let measured = pace::active();
    if measured {
        pace::wait(stream(index, arguments), closed);
    } else {
        solo_backlog::wait(|| stream(index, arguments), closed);
    }
    let held = !measured || closed();
    let stripe = pass();
    // The slice that begins while this thread is blocked may have the other mode.
    if pace::active() {
        pace::begin(stream(index, arguments), held);
    }
    stripe as u64
}

/// After a submission.
pub fn leave(index: usize, arguments: Arguments, token: u64, result: c_int) {
    if token == UNGATED_TOKEN {
        return;
    }
    if pace::active() {
        let copy = COPIES.get(index).copied().unwrap_or(false);
        match result {
            SUCCESS => pace::submitted(stream(index, arguments), key(index, arguments), copy),
            _ => pace::failed(stream(index, arguments)),
        }
        if !streams::is_known(index) {
            pace::unmeasured();
            fences::submitted_anywhere();
        }
    } else if result == SUCCESS {
        let stream = stream(index, arguments);
        if streams::is_known(index) {
            fences::submitted(stream);
        } else {
            fences::submitted_anywhere();
        }
        solo_backlog::submitted(|| stream);
    }
    done(token as usize);
}

fn closed() -> bool {
    CLOSED.load(Ordering::SeqCst) != 0
}

/// Waits until the gate is open and counts this thread as within; the stripe for [`done`].
pub fn pass() -> usize {
    let mine = stripe();
    loop {
        STRIPE[mine].0.fetch_add(1, Ordering::SeqCst);
        if !closed() {
            return mine;
        }
        STRIPE[mine].0.fetch_sub(1, Ordering::SeqCst);
        hold();
    }
}

/// The thread is no longer within.
pub fn done(stripe: usize) {
    if let Some(stripe) = STRIPE.get(stripe) {
        stripe.0.fetch_sub(1, Ordering::Release);
    }
}

#[cold]
fn hold() {
    HELD.fetch_add(1, Ordering::SeqCst);
    let mut guard = LOCK.lock().unwrap_or_else(PoisonError::into_inner);
    while closed() {
        // The slice may end while a relocation holds this thread: report waiting threads at its end.
        if CLOSED.load(Ordering::SeqCst) & NO_SLICE != 0 && !TOLD.swap(true, Ordering::SeqCst) {
            drop(guard);
            tenant::waiting();
            guard = LOCK.lock().unwrap_or_else(PoisonError::into_inner);
        } else if is_soon() && !LOOKS.swap(true, Ordering::SeqCst) {
            drop(guard);
            while closed() && is_soon() {
                std::thread::yield_now();
            }
            LOOKS.store(false, Ordering::SeqCst);
            guard = LOCK.lock().unwrap_or_else(PoisonError::into_inner);
        } else {
            guard = OPENED.wait(guard).unwrap_or_else(PoisonError::into_inner);
        }
    }
    drop(guard);
    HELD.fetch_sub(1, Ordering::SeqCst);
}

/// Nanoseconds since this was asked first.
fn clock() -> u64 {
    static START: OnceLock<Instant> = OnceLock::new();
    START.get_or_init(Instant::now).elapsed().as_nanos() as u64
}

fn is_soon() -> bool {
    clock() < SOON.load(Ordering::SeqCst)
}

/// Records that a slice is expected to begin within `time`: one waiting thread then spins instead of sleeping.
pub fn soon(time: Duration) {
    SOON.store(clock() + time.as_nanos() as u64, Ordering::SeqCst);
    let _guard = LOCK.lock().unwrap_or_else(PoisonError::into_inner);
    OPENED.notify_all();
}

/// Returns true if a submission is blocked, for any reason.
pub fn held() -> bool {
    HELD.load(Ordering::SeqCst) > 0
}

/// Returns true if a submission waits, and the owner knows.
pub fn told() -> bool {
    TOLD.load(Ordering::SeqCst)
}

/// Closes the gate for `reason` and waits until no thread is inside, at most until `deadline`. Returns true if none is.
pub fn close(reason: u32, deadline: Option<Instant>) -> bool {
    CLOSED.fetch_or(reason, Ordering::SeqCst);
    if held() {
        let _guard = LOCK.lock().unwrap_or_else(PoisonError::into_inner);
        OPENED.notify_all();
    }
    loop {
        if STRIPE.iter().all(|stripe| stripe.0.load(Ordering::SeqCst) == 0) {
            return true;
        }
        if deadline.is_some_and(|deadline| Instant::now() >= deadline) {
            return false;
        }
        std::thread::sleep(Duration::from_micros(20));
    }
}

/// Removes `reason`; the gate opens if none is left.
pub fn open(reason: u32) {
    let _guard = LOCK.lock().unwrap_or_else(PoisonError::into_inner);
    if reason & NO_SLICE != 0 {
        TOLD.store(false, Ordering::SeqCst);
    }
    CLOSED.fetch_and(!reason, Ordering::SeqCst);
    if !closed() {
        OPENED.notify_all();
    }
}

/// Returns true if the gate is open to work without `reason`, apart from closures by the program's own threads.
pub fn opens_without(reason: u32) -> bool {
    CLOSED.load(Ordering::SeqCst) & !reason & (NO_SLICE | ORDER) == 0
}

#[cfg(test)]
pub mod tests;
