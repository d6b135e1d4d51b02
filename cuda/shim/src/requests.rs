//! Requests of the program's threads to the owner, and the fixed memory that is counted for the program.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use cuda_protocol::{Chunk, FixedKind, FromTenant, MAX_PENDING, Refusal, Share};

use crate::descriptors::ChunkDescriptor;
use crate::tenant;

/// Time for which an allocation waits for an absent owner.
// TIMEOUT: a service is restarted within seconds; a program whose owner stays away must get an error.
const OWNER_TIMEOUT: Duration = Duration::from_secs(20);

static NEXT: AtomicU32 = AtomicU32::new(1);
static ANSWERS: Mutex<Option<HashMap<u32, Answer>>> = Mutex::new(None);
/// An answer has arrived, or a connection was made.
static ANSWERED: Condvar = Condvar::new();
/// Bytes of fixed memory that the program has, by card and kind. Locked while a change is reported to an owner.
static FIXED: Mutex<Option<HashMap<(u8, FixedKind), u64>>> = Mutex::new(None);

/// An answer to a request, gathered until its last part.
#[derive(Debug)]
pub enum Answer {
    /// The last part is missing; with the parts so far.
    Waiting(Vec<(Chunk, ChunkDescriptor)>),
    /// Chunks.
    Granted(Vec<(Chunk, ChunkDescriptor)>),
    /// Counted.
    Fixed,
    /// Free and all bytes.
    Memory(u64, u64),
    /// A token.
    Shared(Share),
    /// Refused, with the chunks that arrived before.
    Refused(Refusal, Vec<(Chunk, ChunkDescriptor)>),
    /// The owner is absent, or ended before it answered.
    Away,
}

fn answers() -> MutexGuard<'static, Option<HashMap<u32, Answer>>> {
    ANSWERS.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Requests of the program's threads that are in flight at a time. Further threads wait: an owner refuses requests
/// beyond [`MAX_PENDING`], and a program that reports its fixed memory again adds its own requests.
const PLACES: usize = MAX_PENDING / 2;
static REQUESTS_IN_FLIGHT: Mutex<usize> = Mutex::new(0);
static LEFT: Condvar = Condvar::new();

/// A reservation among the requests in progress.
struct Place;

impl Place {
    fn take() -> Self {
        let mut taken = REQUESTS_IN_FLIGHT.lock().unwrap_or_else(PoisonError::into_inner);
        while *taken >= PLACES {
            taken = LEFT.wait(taken).unwrap_or_else(PoisonError::into_inner);
        }
        *taken += 1;
        Self
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        *REQUESTS_IN_FLIGHT.lock().unwrap_or_else(PoisonError::into_inner) -= 1;
        LEFT.notify_one();
    }
}

/// Sends the request that `make` makes and waits for its answer.
pub fn request(make: impl FnOnce(u32) -> FromTenant) -> Answer {
    let _place = Place::take();
    begin(make).map_or(Answer::Away, wait)
}

/// Sends a request. Returns its number, unless the owner is absent.
fn begin(make: impl FnOnce(u32) -> FromTenant) -> Option<u32> {
    let number = NEXT.fetch_add(1, Ordering::SeqCst);
    answers().get_or_insert_default().insert(number, Answer::Waiting(Vec::new()));
    if tenant::send(&make(number)) {
        return Some(number);
    }
    answers().as_mut()?.remove(&number);
    None
}

fn wait(number: u32) -> Answer {
    let mut guard = answers();
    loop {
        match guard.as_mut().and_then(|answers| answers.remove(&number)) {
            Some(Answer::Waiting(parts)) => {
                guard.get_or_insert_default().insert(number, Answer::Waiting(parts));
                guard = ANSWERED.wait(guard).unwrap_or_else(PoisonError::into_inner);
            }
            Some(answer) => return answer,
            None => return Answer::Away,
        }
    }
}

/// Waits for an absent owner, at most [`OWNER_TIMEOUT`]. Returns true if it is there.
pub fn wait_for_owner() -> bool {
    let limit = Instant::now() + OWNER_TIMEOUT;
    let mut guard = answers();
    while !tenant::connected() {
        let left = limit.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return false;
        }
        guard = ANSWERED.wait_timeout(guard, left).unwrap_or_else(PoisonError::into_inner).0;
    }
    true
}

/// Returns true if requests wait for answers.
pub fn any() -> bool {
    answers().as_ref().is_some_and(|answers| !answers.is_empty())
}

/// Processes a part of an answer. An answer without a request is dropped.
pub fn answer(request: u32, change: impl FnOnce(Vec<(Chunk, ChunkDescriptor)>) -> Answer) {
    let mut guard = answers();
    if let Some(Answer::Waiting(parts)) = guard.as_mut().and_then(|a| a.remove(&request)) {
        guard.get_or_insert_default().insert(request, change(parts));
    }
    ANSWERED.notify_all();
}

/// Records that the connection has ended, so no more answers arrive.
pub fn abandon() {
    for answer in answers().iter_mut().flat_map(|answers| answers.values_mut()) {
        if let Answer::Waiting(_) = answer {
            *answer = Answer::Away;
        }
    }
    ANSWERED.notify_all();
}

/// Counts bytes of fixed memory, added or taken away, and notifies the owner with `tell` before another thread counts.
fn change<T>(card: u8, kind: FixedKind, by: impl FnOnce(u64) -> u64, tell: impl FnOnce() -> T) -> T {
    let mut fixed = FIXED.lock().unwrap_or_else(PoisonError::into_inner);
    let bytes = fixed.get_or_insert_default().entry((card, kind)).or_default();
    *bytes = by(*bytes);
    tell()
}

/// Requests that fixed memory be counted. Returns true if the owner allows it.
pub fn fix(card: u8, kind: FixedKind, bytes: u64) -> bool {
    // Comes first, because a thread that waits for memory must not block other threads that return memory.
    let _place = Place::take();
    let add = |sum: u64| sum.saturating_add(bytes);
    let number = change(card, kind, add, || begin(|request| FromTenant::Fix { request, card, kind, bytes }));
    // An absent owner does not refuse; the next owner gets the report.
    let may = matches!(number.map_or(Answer::Away, wait), Answer::Fixed | Answer::Away);
    if !may {
        change(card, kind, |sum| sum.saturating_sub(bytes), || ());
    }
    may
}

/// Returns fixed memory.
pub fn unfix(card: u8, kind: FixedKind, bytes: u64) {
    let tell = || tenant::send(&FromTenant::Unfix { card, kind, bytes });
    change(card, kind, |sum| sum.saturating_sub(bytes), tell);
}

/// Calls `connect`, from which on requests go to a new owner, and reports all fixed memory to that owner.
pub fn recount(connect: impl FnOnce()) {
    let fixed = FIXED.lock().unwrap_or_else(PoisonError::into_inner);
    connect();
    for (&(card, kind), &bytes) in fixed.iter().flatten().filter(|(_, bytes)| **bytes > 0) {
        // The program has the memory regardless of the answer, so no thread waits for it.
        tenant::send(&FromTenant::Fix { request: 0, card, kind, bytes });
    }
    drop(fixed);
    // A thread that waits for the answers' lock has not seen the connection yet.
    drop(answers());
    ANSWERED.notify_all();
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn request_without_owner_fails_and_memory_is_still_counted() {
        assert!(matches!(request(|request| FromTenant::AskMemory { request, card: 0 }), Answer::Away));
        assert!(fix(7, FixedKind::Array, 100), "who is away refuses nothing");
        unfix(7, FixedKind::Array, 30);
        let fixed = FIXED.lock().unwrap_or_else(PoisonError::into_inner);
        assert_eq!(fixed.as_ref().and_then(|fixed| fixed.get(&(7, FixedKind::Array))), Some(&70));
    }

    #[test]
    fn concurrent_requests_stay_within_owner_limit() {
        use std::sync::atomic::AtomicUsize;
        static NOW: AtomicUsize = AtomicUsize::new(0);
        static MOST: AtomicUsize = AtomicUsize::new(0);
        std::thread::scope(|scope| {
            for _ in 0..4 * PLACES {
                scope.spawn(|| {
                    let _place = Place::take();
                    MOST.fetch_max(NOW.fetch_add(1, Ordering::SeqCst) + 1, Ordering::SeqCst);
                    // Long enough for all other threads to arrive.
                    std::thread::sleep(Duration::from_millis(5));
                    NOW.fetch_sub(1, Ordering::SeqCst);
                });
            }
        });
        assert_eq!(MOST.load(Ordering::SeqCst), PLACES);
    }

    #[test]
    fn pending_request_is_abandoned_when_connection_ends() {
        answers().get_or_insert_default().insert(u32::MAX, Answer::Waiting(Vec::new()));
        abandon();
        assert!(matches!(wait(u32::MAX), Answer::Away));
    }
}
