//! The driver's memory functions, implemented by the `memory` module.

mod calls;
mod fixed;
mod graphs;
mod opened;
mod own;
mod ranges;

pub fn ours(index: usize) -> Option<*mut ()> {
    let of_chunks = || calls::ours(index).or_else(|| own::ours(index)).or_else(|| opened::ours(index));
    of_chunks().or_else(|| fixed::ours(index)).or_else(|| graphs::ours(index))
}
