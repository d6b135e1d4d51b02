//! Memory of the program.
//!
//! - [`chunks`]: allocations at addresses that never change, backed by the owner's chunks ([`region`], [`arena`]);
//! - [`ordered`]: memory that streams free in the order of their work;
//! - [`handles`]: virtual memory that the program manages itself, backed by chunks;
//! - [`opened`]: memory that processes of a tenant share;
//! - [`fixed`], [`foreign`], [`graphs`]: memory that the driver allocates itself, counted.

use std::sync::atomic::{AtomicBool, AtomicU32, AtomicUsize};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::captures::Captures;
use crate::contexts::Contexts;
use crate::link::Link;

mod arena;
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
    /// Chunks that are mapped nowhere.
    away: Arc<AtomicUsize>,
    /// Held by the thread that requests chunks.
    grows: Mutex<()>,
    /// Answers with chunks that are delivered and not yet mapped.
    arriving: AtomicU32,
    /// Memory was allocated since this was looked at last.
    touched: AtomicBool,
    fixed: Fixed,
    graphs: Graphs,
    /// Held by the thread that makes a handle exportable.
    pub exports: Mutex<()>,
}

/// The memory, with the parts of the library that work on it needs.
#[derive(Clone, Copy, Debug)]
pub struct Operations<'a> {
    /// The memory.
    pub memory: &'a Memory,
    /// Captures that the program has open.
    pub captures: &'a Captures,
    /// Contexts of the program.
    pub contexts: &'a Contexts,
    /// The link to the owner.
    pub link: &'a Link,
}

impl Memory {
    /// Returns no memory.
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
