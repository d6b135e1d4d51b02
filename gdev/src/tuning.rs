//! Limits that decide how a context copies.

use crate::{Error, Result};

/// Limits of copies between the CPU's memory and the card's (Gdev, section 4.1), in bytes. `bench gdev` measures them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Tuning {
    /// Maximum size of a write that the CPU does itself, through the aperture; 0 if the CPU never does.
    pub direct_write_bytes: u64,
    /// Maximum size of a read that the CPU does itself, through the aperture; 0 if the CPU never does.
    pub direct_read_bytes: u64,
    /// Size of the pieces of larger copies. While a copy engine copies one piece, the CPU copies the next.
    pub piece_bytes: u64,
    /// True to let the CPU and the copy engine work on larger copies at the same time. If false, both copies of a piece
    /// are complete before the next piece begins.
    pub overlap: bool,
}

impl Tuning {
    /// Maximum of the direct sizes in bytes.
    pub const DIRECT_BYTES_MAX: u64 = 1 << 20;
    /// Minimum of [`Self::piece_bytes`].
    pub const PIECE_BYTES_MIN: u64 = 4 << 10;
    /// Maximum of [`Self::piece_bytes`].
    pub const PIECE_BYTES_MAX: u64 = 64 << 20;

    /// Checks the values.
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
