//! Residue of kernels in multiprocessors: registers and shared memory keep their contents until something is written there,
//! whoever runs next.
//!
//! Blocks go to multiprocessors in turn, by their number. A block of so many warps has the first rows of its
//! multiprocessor's register file, warp by warp, and the first bytes of its shared memory; of blocks that run on one
//! multiprocessor at the same time the last to end is seen.
//! GUESS: how hardware places warps. Predicates and condition codes are cleared when a warp starts.

use super::warp::Lanes;
use parking_lot::{Mutex, MutexGuard};

/// Rows of a multiprocessor's register file: 32,768 registers, one of each lane in a row.
pub(super) const ROWS: usize = 1024;
/// Rows that registers of a warp are given by.
const ROWS_AT_ONCE: u32 = 2;

/// One multiprocessor's. It grows to what was used.
#[derive(Debug, Default)]
pub(super) struct Sm {
    pub(super) rows: Vec<Lanes>,
    pub(super) shared: Vec<u8>,
}

/// All multiprocessors'.
#[derive(Debug)]
pub(crate) struct Residue(Vec<Mutex<Sm>>);

impl Residue {
    /// Of so many multiprocessors, in which nothing was left yet.
    pub(crate) fn new(sms: u32) -> Self {
        Self((0..sms.max(1)).map(|_| Mutex::default()).collect())
    }

    /// The multiprocessor that a block runs on.
    pub(super) fn of(&self, block: u64) -> MutexGuard<'_, Sm> {
        self.0[(block % self.0.len() as u64) as usize].lock()
    }
}

/// The row of a warp's first register.
pub(super) fn first_row(warp: usize, registers: u32) -> usize {
    warp * registers.next_multiple_of(ROWS_AT_ONCE) as usize
}
