//! Data that kernels leave in the multiprocessors. Registers and shared memory keep their contents until a kernel
//! overwrites them, even across kernels of different VMs.
//!
//! Blocks are assigned to multiprocessors round-robin, by number. A block's warps occupy the first rows of the register
//! file in order, and the block occupies the first bytes of shared memory. If several blocks run concurrently on a
//! multiprocessor, the residue is that of the last block to end. GUESS: the hardware places warps in the same way.
//! Predicates and condition codes are cleared when a warp starts.

use super::warp::Lanes;
use parking_lot::{Mutex, MutexGuard};

/// Number of rows in a multiprocessor's register file, which has 32,768 registers. A row has one register per lane.
pub(super) const ROWS: usize = 1024;
/// Allocation unit of a warp's registers, in rows.
const ROWS_AT_ONCE: u32 = 2;

/// Residue of one multiprocessor. It grows on demand.
#[derive(Debug, Default)]
pub(super) struct Sm {
    pub(super) rows: Vec<Lanes>,
    pub(super) shared: Vec<u8>,
}

/// Residue of all multiprocessors.
#[derive(Debug)]
pub(crate) struct Residue(Vec<Mutex<Sm>>);

impl Residue {
    /// Creates `sms` multiprocessors without residue.
    pub(crate) fn new(sms: u32) -> Self {
        Self((0..sms.max(1)).map(|_| Mutex::default()).collect())
    }

    /// Locks the residue of the multiprocessor that runs a block.
    pub(super) fn lock_for_block(&self, block: u64) -> MutexGuard<'_, Sm> {
        self.0[(block % self.0.len() as u64) as usize].lock()
    }
}

/// Returns the row of a warp's first register.
pub(super) fn first_row(warp: usize, registers: u32) -> usize {
    warp * registers.next_multiple_of(ROWS_AT_ONCE) as usize
}
