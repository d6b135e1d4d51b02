//! Checkpoints: one process removes another process from the card, following the rules observed with driver 580 on an
//! H100.
//!
//! A thread of each process with a context listens for orders in the first card's folder. A stopped process does not
//! reply, as with NVIDIA's driver. A process that has imported another process's memory can be suspended, but cannot be
//! resumed.
//!
//! A restore can contain pairs of cards (driver 580): the process then continues on another card, and its devices keep
//! their numbers. As documented by NVIDIA, the pairs must contain all of the process's cards, and the new card needs
//! enough memory. The fake is stricter in two respects: the pairs must be a permutation of known cards, and a process
//! with contexts on several cards cannot change its cards. A restore that fails can be repeated, unless the reason is
//! imported memory or contexts on several cards.
//!
//! As observed with driver 580, a process that was restored on another card can import memory only if both cards were
//! visible to it from its start (`cuda/rig/gpu/restore.py`).

use std::collections::BTreeSet;
use std::io::{Read as _, Write as _};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::PathBuf;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};

use crate::card::{self, Card};
use crate::result::{ECC_UNCORRECTABLE, ILLEGAL_STATE, INVALID_VALUE, NOT_SUPPORTED, OUT_OF_MEMORY, SUCCESS};
use crate::{further, memory, work};

/// `CU_PROCESS_STATE_*`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    Running = 0,
    Locked = 1,
    Checkpointed = 2,
    Failed = 3,
}

/// An order to a process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Order {
    /// Blocks further driver calls, and waits until all work has completed.
    Lock,
    /// Moves the process's memory off the card.
    Checkpoint,
    /// Moves the process's memory back to the card.
    Restore,
    /// Unblocks driver calls.
    Unlock,
    /// Queries the process's state.
    Ask,
}

/// `CUcheckpointGpuPair`: the UUIDs of the old and the new card.
pub type Pair = [[u8; 16]; 2];

/// Maximum number of pairs in a restore.
const MAX_PAIRS: usize = 16;

const ORDERS: [Order; 5] = [Order::Lock, Order::Checkpoint, Order::Restore, Order::Unlock, Order::Ask];

static STATE: Mutex<State> = Mutex::new(State::Running);
static CHANGED: Condvar = Condvar::new();

fn lock() -> MutexGuard<'static, State> {
    STATE.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Waits while this process is locked. Called before each driver call.
pub fn pass() {
    let mut state = lock();
    while *state != State::Running {
        state = CHANGED.wait(state).unwrap_or_else(PoisonError::into_inner);
    }
}

fn path(pid: u32) -> PathBuf {
    card::root().join(format!("checkpoint-{pid}"))
}

/// Returns true if a system call filter restricts this process. Such a filter may forbid the fake's socket.
fn is_filtered() -> bool {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    status.lines().any(|line| line.strip_prefix("Seccomp:").is_some_and(|mode| mode.trim() == "2"))
}

/// Starts to listen for orders on the first call. A process with a system call filter cannot be suspended.
pub fn listen() {
    static ONCE: std::sync::Once = std::sync::Once::new();
    ONCE.call_once(|| {
        if is_filtered() {
            return;
        }
        let path = path(std::process::id());
        let _ = std::fs::remove_file(&path);
        let Ok(listener) = UnixListener::bind(path) else { return };
        let serve = move || listener.incoming().flatten().for_each(answer);
        // If the thread cannot be started, this process cannot be suspended.
        crate::spawn("fake-checkpoint", serve);
    });
}

fn answer(mut stream: UnixStream) {
    let mut order = [0];
    let order = stream.read_exact(&mut order).ok().and_then(|()| ORDERS.get(usize::from(order[0])));
    let Some(&order) = order else { return };
    let mut count = [0];
    if stream.read_exact(&mut count).is_err() || usize::from(count[0]) > MAX_PAIRS {
        return;
    }
    let mut pairs = vec![[[0; 16]; 2]; usize::from(count[0])];
    if pairs.as_flattened_mut().iter_mut().any(|uuid| stream.read_exact(uuid).is_err()) {
        return;
    }
    let (result, state) = obey(order, &pairs);
    let mut text = result.to_le_bytes().to_vec();
    text.extend((state as i32).to_le_bytes());
    let _ = stream.write_all(&text);
}

fn obey(order: Order, pairs: &[Pair]) -> (i32, State) {
    let mut state = lock();
    let result = match (order, *state) {
        (Order::Ask, _) => SUCCESS,
        (Order::Lock, State::Running) => {
            *state = State::Locked;
            drop(state);
            work::finish_everything();
            state = lock();
            SUCCESS
        }
        (Order::Checkpoint, State::Locked) => {
            memory::take_off();
            *state = State::Checkpointed;
            SUCCESS
        }
        (Order::Restore, State::Checkpointed) => match restore(pairs) {
            Ok(()) => {
                *state = State::Locked;
                SUCCESS
            }
            Err(error) => {
                *state = if error == NOT_SUPPORTED { State::Failed } else { *state };
                error
            }
        },
        (Order::Unlock, State::Locked) => {
            *state = State::Running;
            CHANGED.notify_all();
            SUCCESS
        }
        _ => ILLEGAL_STATE,
    };
    (result, *state)
}

/// Returns this process's old and new card, or `None` if the process keeps its cards.
fn destination(pairs: &[Pair]) -> Result<Option<(&'static Card, &'static Card)>, i32> {
    let used: Vec<&Card> = card::all().iter().filter(|card| card.is_entered()).collect();
    if pairs.is_empty() {
        return Ok(None);
    }
    let known = |uuid: &[u8; 16]| card::all().iter().find(|card| card.uuid() == *uuid);
    let named = pairs.iter().map(|[old, new]| Some((known(old)?, known(new)?)));
    let named: Vec<_> = named.collect::<Option<_>>().ok_or(INVALID_VALUE)?;
    let [old, new] = [0, 1].map(|at| pairs.iter().map(|pair| pair[at]).collect::<BTreeSet<_>>());
    let seen = card::visible().iter().filter_map(|at| card::all().get(*at));
    let all_named = seen.chain(used.iter().copied()).all(|card| old.contains(&card.uuid()));
    if old.len() < pairs.len() || old != new || !all_named {
        return Err(INVALID_VALUE);
    }
    let changes = named.into_iter().filter(|(old, new)| old.is_entered() && old.number() != new.number());
    let changes: Vec<_> = changes.collect();
    match changes[..] {
        [] => Ok(None),
        [change] if used.len() == 1 => Ok(Some(change)),
        _ => Err(NOT_SUPPORTED),
    }
}

/// Restores this process on its old or new card. Changes nothing on failure.
fn restore(pairs: &[Pair]) -> Result<(), i32> {
    let Some((from, to)) = destination(pairs)? else { return memory::put_back(None) };
    if to.is_broken() {
        return Err(ECC_UNCORRECTABLE);
    }
    if !to.enter() {
        return Err(OUT_OF_MEMORY);
    }
    let moved = further::allocate_on(to).and_then(|new| memory::put_back(Some((from, to))).map(|()| new));
    match moved {
        Ok(new) => {
            further::replace(new);
            card::exchange(from.number(), to.number());
            from.leave();
            Ok(())
        }
        Err(error) => {
            to.leave();
            Err(error)
        }
    }
}

/// Sends an order to a process and waits for the reply. Returns the result and the process's state.
pub fn order(pid: i32, order: Order, pairs: &[Pair]) -> (i32, i32) {
    let none = (INVALID_VALUE, 0);
    let Ok(mut stream) = UnixStream::connect(path(pid as u32)) else { return none };
    let mut answer = [0; 8];
    let number = ORDERS.iter().position(|other| *other == order).unwrap_or(0) as u8;
    let count = u8::try_from(pairs.len()).ok().filter(|count| usize::from(*count) <= MAX_PAIRS);
    let Some(count) = count else { return none };
    let message = [&[number, count], pairs.as_flattened().as_flattened()].concat();
    if stream.write_all(&message).and_then(|()| stream.read_exact(&mut answer)).is_err() {
        return none;
    }
    let [result, state] =
        [0, 4].map(|at| i32::from_le_bytes([answer[at], answer[at + 1], answer[at + 2], answer[at + 3]]));
    (result, state)
}
