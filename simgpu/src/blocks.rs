//! Register blocks, in the order of the address map. Each implements behaviour beyond storing: `read` and `write` match
//! every register of the block, and `plain` registers go to the storage.

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

/// Effect of a register write outside its block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Effect {
    /// No effect.
    None,
    /// Units (bits of PMC's enable register) were disabled, which resets them.
    ResetUnits(u32),
    /// The driver allows the next MSI.
    Rearm,
}
