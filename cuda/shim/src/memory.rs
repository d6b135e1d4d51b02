//! The program's memory.
//!
//! - [`chunks`]: allocations at addresses that never change, backed by the owner's chunks ([`region`]);
//! - [`handles`]: virtual memory that the program manages itself, backed by chunks;
//! - [`opened`]: memory shared between processes of a tenant;
//! - [`access`]: access from the program's other cards;
//! - [`fixed`], [`foreign`], [`graphs`]: memory that the driver allocates and this library accounts for.

use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, AtomicUsize};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use crate::captures::Captures;
use crate::contexts::Contexts;
use crate::link::Link;

mod access;
pub mod chunks;
pub mod fixed;
#[cfg(test)]
mod fixture;
pub mod foreign;
pub mod graphs;
pub mod handles;
pub mod opened;
pub mod pages;
mod region;

use chunks::ChunkMemory;
use fixed::Fixed;
use graphs::Graphs;

/// Interval at which threads check whether the program has arrived on another card.
// TIMEOUT: a move takes a fraction of a second, so polling costs little.
const DETACHED_POLL_INTERVAL: Duration = Duration::from_millis(1);

/// The program's memory on one card.
#[derive(Debug)]
pub struct Memory {
    chunks: Mutex<ChunkMemory>,
    /// Number of evicted chunks that are not mapped.
    away: Arc<AtomicUsize>,
    /// Held by the thread that requests chunks.
    grows: Mutex<()>,
    /// Number of received replies with chunks that are not mapped yet.
    arriving: AtomicU32,
    /// Set if memory has been allocated since the last check.
    touched: AtomicBool,
    fixed: Fixed,
    graphs: Graphs,
    /// Held by the thread that makes a handle exportable.
    pub exports: Mutex<()>,
    /// Start and end address of the chunk region.
    region: (AtomicU64, AtomicU64),
    /// Set once the program has memory outside the region.
    elsewhere: AtomicBool,
}

/// The memory, with the other parts of the library that its operations need.
#[derive(Clone, Copy, Debug)]
pub struct Operations<'a> {
    pub memory: &'a Memory,
    /// The program's open captures.
    pub captures: &'a Captures,
    pub contexts: &'a Contexts,
    pub link: &'a Link,
}

impl Memory {
    /// Creates the state of the program's memory on its card number `card`, without allocations.
    pub fn new(card: usize) -> Self {
        let away = Arc::<AtomicUsize>::default();
        Self {
            chunks: Mutex::new(ChunkMemory::new(card, Arc::clone(&away))),
            away,
            grows: Mutex::new(()),
            arriving: AtomicU32::new(0),
            touched: AtomicBool::new(false),
            fixed: Fixed::default(),
            graphs: Graphs::default(),
            exports: Mutex::new(()),
            region: Default::default(),
            elsewhere: AtomicBool::new(false),
        }
    }

    fn lock(&self) -> MutexGuard<'_, ChunkMemory> {
        self.chunks.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl<'a> Operations<'a> {
    /// Locks the memory, so that no part of it moves. Waits while the program moves between two cards, except in the
    /// thread that executes the owner's orders.
    pub fn lock(self) -> MutexGuard<'a, ChunkMemory> {
        loop {
            let guard = self.memory.lock();
            if guard.detached_by.is_none_or(|thread| thread == std::thread::current().id()) {
                return guard;
            }
            drop(guard);
            std::thread::sleep(DETACHED_POLL_INTERVAL);
        }
    }
}
