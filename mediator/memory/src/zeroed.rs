//! Chunks that are being zeroed, and the engines' marks by which others see that they are.

use nvspec::addr::VramAddr;
use vram::ScrubWork;

/// A word of the card's memory that an engine sets to `count` when it has done all that it was given by then.
#[derive(Clone, Copy, Debug)]
pub struct Mark {
    pub(crate) at: VramAddr,
    pub(crate) count: u32,
}

/// Chunks that are being zeroed.
#[derive(Debug, Default)]
pub struct Zeroing {
    /// The chunk that the CPU is at, and how much of it is zeroed.
    pub(crate) begun: Option<(ScrubWork, u64)>,
    /// Chunks that the engines are at.
    pub(crate) engines: Vec<ScrubWork>,
    /// Marks that they set when they are done, once they were given them.
    pub(crate) marks: Option<Vec<Mark>>,
    /// Chunks that they have failed at.
    pub(crate) left: Vec<ScrubWork>,
    /// Chunks that they have zeroed since the beginning.
    pub(crate) by_engines: u64,
}
