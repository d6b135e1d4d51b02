//! Memory of the program.
//!
//! - [`chunks`]: allocations at addresses that never change, backed by the owner's chunks ([`region`], [`arena`]);
//! - [`ordered`]: memory that streams free in the order of their work;
//! - [`calls`]: the driver's functions that allocate, free and report memory, answered from there;
//! - [`own`]: virtual memory that the program manages itself, by [`handles`] that chunks back;
//! - [`opened`]: memory that processes of a tenant share;
//! - [`fixed`], [`foreign`], [`graphs`]: memory that the driver allocates itself, counted.

mod arena;
mod calls;
mod chunks;
mod fixed;
mod foreign;
mod graphs;
mod handles;
#[cfg(test)]
mod model;
mod opened;
mod ordered;
mod own;
mod pages;
mod region;

pub use chunks::{
    adopted, arriving, begin_to_empty, bring, context_ends, contexts_end, give_up_empty, present, redirect,
    stream_ends, tidy,
};

/// Functions of this module by symbol.
pub fn ours(index: usize) -> Option<*mut ()> {
    let of_chunks = || calls::ours(index).or_else(|| own::ours(index)).or_else(|| opened::ours(index));
    of_chunks().or_else(|| fixed::ours(index)).or_else(|| graphs::ours(index))
}
