//! Register blocks, in address order. Each block implements those registers that do more than store a value. Its `read`
//! and `write` functions match every register of the block, and pass plain registers to the storage.

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
    /// No effect on other blocks.
    None,
    /// The write disabled these units (bits of PMC's enable register), which resets them.
    ResetUnits(u32),
    /// The driver has rearmed MSI.
    Rearm,
}
