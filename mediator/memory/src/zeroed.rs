//! Chunks that are being zeroed.

use vram::ScrubWork;

/// Chunks that are being zeroed.
#[derive(Debug, Default)]
pub struct Zeroing {
    /// Chunk that the CPU is zeroing, and the number of bytes already zeroed.
    pub(crate) begun: Option<(ScrubWork, u64)>,
    /// Chunks being zeroed by the engines.
    pub(crate) engines: Vec<ScrubWork>,
    /// Chunks that the engines failed to zero.
    pub(crate) left: Vec<ScrubWork>,
    /// Total number of chunks zeroed by the engines.
    pub(crate) by_engines: u64,
}
