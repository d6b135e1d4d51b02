//! Memory of the program.
//!
//! - [`chunks`]: allocations at addresses that never change, backed by the owner's chunks ([`region`]);
//! - [`ordered`]: memory that is freed in the order of a stream's work;
//! - [`handles`]: virtual memory that the program manages itself, backed by chunks;
//! - [`opened`]: memory that processes of a tenant share;
//! - [`fixed`], [`foreign`], [`graphs`]: memory that the driver allocates itself, and that this library counts.

use std::sync::atomic::{AtomicBool, AtomicU32, AtomicUsize};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::captures::Captures;
use crate::contexts::Contexts;
use crate::link::Link;

pub mod chunks;
pub mod fixed;
#[cfg(test)]
mod fixture;
pub mod foreign;
pub mod graphs;
pub mod handles;
pub mod opened;
mod ordered;
pub mod pages;
mod region;

use chunks::ChunkMemory;
use fixed::Fixed;
use graphs::Graphs;

/// Memory of the program.
#[derive(Debug)]
pub struct Memory {
    chunks: Mutex<ChunkMemory>,
    /// Number of evicted chunks, which are not mapped.
    away: Arc<AtomicUsize>,
    /// Locked by the thread that requests chunks.
    grows: Mutex<()>,
    /// Number of delivered answers whose chunks are not mapped yet.
    arriving: AtomicU32,
    /// Set if memory has been allocated since the last check.
    touched: AtomicBool,
    fixed: Fixed,
    graphs: Graphs,
    /// Locked by the thread that makes a handle exportable.
    pub exports: Mutex<()>,
}

/// The memory, with the parts of the library that operations on it need.
#[derive(Clone, Copy, Debug)]
pub struct Operations<'a> {
    pub memory: &'a Memory,
    /// Captures that the program has open.
    pub captures: &'a Captures,
    pub contexts: &'a Contexts,
    pub link: &'a Link,
}

impl Memory {
    /// Creates a value without memory.
    pub fn new() -> Self {
        let away = Arc::<AtomicUsize>::default();
        Self {
            chunks: Mutex::new(ChunkMemory::new(Arc::clone(&away))),
            away,
            grows: Mutex::new(()),
            arriving: AtomicU32::new(0),
            touched: AtomicBool::new(false),
            fixed: Fixed::default(),
            graphs: Graphs::default(),
            exports: Mutex::new(()),
        }
    }
}

impl<'a> Operations<'a> {
    fn lock(self) -> MutexGuard<'a, ChunkMemory> {
        self.memory.chunks.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
