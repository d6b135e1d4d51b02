//! Settings that determine how a context copies.

use crate::{Error, Result};

/// Settings of copies between CPU memory and card memory (Gdev, section 4.1). `bench gdev` measures good values.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Tuning {
    /// Maximum size in bytes of a write that the CPU performs through the aperture. 0 disables such writes.
    pub direct_write_bytes: u64,
    /// Maximum size in bytes of a read that the CPU performs through the aperture. 0 disables such reads.
    pub direct_read_bytes: u64,
    /// Chunk size of larger copies in bytes. With [`Self::overlap`], the CPU copies the next chunk while a copy engine
    /// copies one.
    pub piece_bytes: u64,
    /// True if the CPU and the copy engine work on larger copies concurrently. If false, both copies of a chunk
    /// complete before the next chunk begins.
    pub overlap: bool,
}

impl Tuning {
    /// Maximum value of [`Self::direct_write_bytes`] and [`Self::direct_read_bytes`].
    pub const DIRECT_BYTES_MAX: u64 = 1 << 20;
    /// Minimum value of [`Self::piece_bytes`].
    pub const PIECE_BYTES_MIN: u64 = 4 << 10;
    /// Maximum value of [`Self::piece_bytes`].
    pub const PIECE_BYTES_MAX: u64 = 64 << 20;

    /// Checks that all values are within their limits.
    ///
    /// # Errors
    /// Returns an error if a value is outside its limits. The error names the first such value.
    pub fn check(&self) -> Result<()> {
        let within = |what, value, least, most| {
            if (least..=most).contains(&value) { Ok(()) } else { Err(Error::Tuning { what, value, least, most }) }
        };
        within("a direct write", self.direct_write_bytes, 0, Self::DIRECT_BYTES_MAX)?;
        within("a direct read", self.direct_read_bytes, 0, Self::DIRECT_BYTES_MAX)?;
        within("a piece", self.piece_bytes, Self::PIECE_BYTES_MIN, Self::PIECE_BYTES_MAX)
    }
}
