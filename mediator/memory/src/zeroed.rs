//! Chunks that are being zeroed.

use vram::ScrubWork;

/// Chunks that are being zeroed.
#[derive(Debug, Default)]
pub struct Zeroing {
    /// The chunk that the CPU is at, and how much of it is zeroed.
    pub(crate) begun: Option<(ScrubWork, u64)>,
    /// Chunks that the engines are at.
    pub(crate) engines: Vec<ScrubWork>,
    /// Chunks that they have failed at.
    pub(crate) left: Vec<ScrubWork>,
    /// Chunks that they have zeroed since the beginning.
    pub(crate) by_engines: u64,
}
