//! Register blocks, in the order of the address map. Each block implements its registers that do more than store a
//! value. Its functions `read` and `write` match every register of the block, and pass plain registers to the storage.

pub(crate) mod board;
pub(crate) mod falcon;
pub(crate) mod fecs;
pub(crate) mod memory;
pub(crate) mod pbus;
pub(crate) mod pfifo;
pub(crate) mod pgraph;
pub(crate) mod pmc;
pub(crate) mod pmu;
pub(crate) mod ptimer;

/// Effect of a register write on other blocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Effect {
    /// The write has no effect elsewhere.
    None,
    /// The write disabled these units (bits of PMC's enable register), which resets them.
    ResetUnits(u32),
    /// The driver permits the next MSI.
    Rearm,
}
