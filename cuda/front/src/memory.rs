//! Memory of the program.
//!
//! - [`chunks`]: allocations at addresses that never change, backed by the owner's chunks;
//! - [`calls`]: the driver's functions that allocate, free and tell, answered from there;
//! - [`own`]: virtual memory that the program manages itself, by [`handles`] that chunks back;
//! - [`opened`]: memory that processes of a tenant share;
//! - [`fixed`], [`graphs`]: what the driver allocates itself, counted.

mod arena;
mod calls;
mod chunks;
mod fixed;
mod graphs;
mod handles;
mod kept;
mod opened;
mod own;
mod pages;

pub use chunks::{adopted, arriving, redirect, trim};
pub use kept::{forked, raise_limit};

/// Functions of this module by symbol.
pub fn ours(index: usize) -> Option<*mut ()> {
    let of_chunks = || calls::ours(index).or_else(|| own::ours(index)).or_else(|| opened::ours(index));
    of_chunks().or_else(|| fixed::ours(index)).or_else(|| graphs::ours(index))
}
