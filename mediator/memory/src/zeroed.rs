//! Progress of zeroing chunks.

use vram::ScrubWork;

/// Chunks that are being zeroed.
#[derive(Debug, Default)]
pub struct Zeroing {
    /// Chunk that the CPU is zeroing, and the number of bytes zeroed so far.
    pub(crate) begun: Option<(ScrubWork, u64)>,
    /// Chunks that the engines are zeroing.
    pub(crate) engines: Vec<ScrubWork>,
    /// Chunks that the engines failed to zero.
    pub(crate) left: Vec<ScrubWork>,
    /// Total number of chunks that the engines have zeroed.
    pub(crate) by_engines: u64,
}
