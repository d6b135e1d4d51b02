//! Descriptions of the CUDA driver API's functions for guests: their arguments and how they are handled.
//!
//! [`CALLS`] describes the functions that guests can call. [`REFUSED`] lists the other functions, which return 801. A
//! description controls the guest's encoder ([`encode`]), the worker's checking decoder ([`decode`]), and the return of
//! results ([`Prepared`], [`unpack`]). Functions whose arguments cannot be described in this way (launches, copies,
//! pinned memory) have separate messages: [`own`]. [`replay`] defines how each call is handled when a program continues
//! in another worker.
//!
//! The crate does not call the driver and does not use rings. It works on slices of words.

pub mod boxes;
mod decode;
mod describe;
mod encode;
pub mod own;
mod refused;
pub mod replay;
mod table;

pub use decode::{Arena, Fault, Handles, Prepared, checked_end, decode};
pub use describe::{Arg, Call, FIRST_HANDLE, Kind, MAX_ARGUMENTS, Numbered, Treatment, handle, index_of, kind_of};
pub use encode::{Encoded, encode, unpack};
pub use refused::REFUSED;
pub use table::CALLS;

/// Returns the index of a function in [`CALLS`] by its symbol, with or without the suffix of a per-thread variant.
pub fn find(symbol: &str) -> Option<usize> {
    let plain = symbol.trim_end_matches("_ptsz").trim_end_matches("_ptds");
    CALLS.iter().position(|call| call.name == plain)
}

#[cfg(test)]
mod tests;
