//! Residue of kernels in multiprocessors: registers and shared memory keep their contents until they are overwritten,
//! also for the next VM's kernels.
//!
//! Blocks are assigned to multiprocessors in turn, by their number. A block's warps occupy the first rows of its
//! multiprocessor's register file, in order, and the block occupies the first bytes of its shared memory. Of concurrent
//! blocks on one multiprocessor, the last to end leaves its residue. GUESS: the hardware places warps in the same way.
//! Predicates and condition codes are cleared when a warp starts.

use super::warp::Lanes;
use parking_lot::{Mutex, MutexGuard};

/// Rows in a multiprocessor's register file of 32,768 registers; a row has one register per lane.
pub(super) const ROWS: usize = 1024;
/// Allocation unit of a warp's registers, in rows.
const ROWS_AT_ONCE: u32 = 2;

/// Residue of one multiprocessor. It grows with use.
#[derive(Debug, Default)]
pub(super) struct Sm {
    pub(super) rows: Vec<Lanes>,
    pub(super) shared: Vec<u8>,
}

/// Residue of all multiprocessors.
#[derive(Debug)]
pub(crate) struct Residue(Vec<Mutex<Sm>>);

impl Residue {
    /// Makes the residue of `sms` unused multiprocessors.
    pub(crate) fn new(sms: u32) -> Self {
        Self((0..sms.max(1)).map(|_| Mutex::default()).collect())
    }

    /// Returns the residue of the multiprocessor that a block runs on.
    pub(super) fn lock_for_block(&self, block: u64) -> MutexGuard<'_, Sm> {
        self.0[(block % self.0.len() as u64) as usize].lock()
    }
}

/// Returns the row of a warp's first register.
pub(super) fn first_row(warp: usize, registers: u32) -> usize {
    warp * registers.next_multiple_of(ROWS_AT_ONCE) as usize
}
