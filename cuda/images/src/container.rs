//! Containers with several images.
//!
//! ```text
//! magic (4) | version (2) | size of this header (2) | size of all entries (8)
//! entries: kind (2) | version (2) | size of this header (4) | size of the data with padding (8)
//!          | compressed size (4) | 4 bytes | version (4) | architecture (4) | 8 bytes | flags (8)
//!          | 8 bytes | uncompressed size (8) | further fields | the data
//! ```

use std::borrow::Cow;
use std::io::Read as _;

use crate::{Unreadable, length, lz4, number};

/// First bytes of a container.
const MAGIC: [u8; 4] = 0xba55_ed50_u32.to_le_bytes();
/// First bytes of Zstandard data.
const ZSTD_MAGIC: [u8; 4] = 0xfd2f_b528_u32.to_le_bytes();
/// Kind of an entry with PTX.
pub const PTX_KIND: u16 = 1;
/// Flag of entries compressed with LZ4.
const LZ4: u64 = 0x2000;
/// Flag of entries compressed with Zstandard.
const ZSTD: u64 = 0x8000;
/// Maximum number of entries.
const MAX_ENTRIES: usize = 4096;
/// Size of an entry header up to its flags, in bytes.
const FLAGS_END: usize = 48;
/// Minimum size of an entry header with an uncompressed size, in bytes.
const HEADER_BYTES: usize = 64;

/// An entry of a container.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Entry<'a> {
    /// Kind of the code.
    pub kind: u16,
    /// Architecture: ten times the major number plus the minor number.
    pub architecture: u32,
    flags: u64,
    packed_bytes: usize,
    unpacked_bytes: usize,
    data: &'a [u8],
}

/// Returns true if an image is a container.
pub fn is_container(image: &[u8]) -> bool {
    image.starts_with(&MAGIC)
}

/// Returns the entries of a container.
///
/// # Errors
/// Returns an error if the container is malformed or has too many entries.
pub fn entries(image: &[u8]) -> Result<Vec<Entry<'_>>, Unreadable> {
    let bounds = || {
        let first = length(image, 6, 2)?;
        Some((first, first.checked_add(length(image, 8, 8)?)?))
    };
    let (mut at, end) = bounds().filter(|(_, end)| *end <= image.len()).ok_or(Unreadable::Malformed)?;
    let mut found = Vec::new();
    while at < end {
        if found.len() >= MAX_ENTRIES {
            return Err(Unreadable::Limit);
        }
        let (entry, next) = entry(image.get(..end).unwrap_or_default(), at).ok_or(Unreadable::Malformed)?;
        found.push(entry);
        at = next;
    }
    Ok(found)
}

/// Returns the entry at an offset, and the offset of the next one.
fn entry(image: &[u8], at: usize) -> Option<(Entry<'_>, usize)> {
    let header = length(image, at.checked_add(4)?, 4)?;
    // Reject an empty header, because parsing would not advance.
    if header < FLAGS_END {
        return None;
    }
    let fields = image.get(at..at.checked_add(header)?)?;
    let first = at + header;
    let next = first.checked_add(length(fields, 8, 8)?)?;
    let entry = Entry {
        kind: number(fields, 0, 2)? as u16,
        architecture: number(fields, 28, 4)? as u32,
        flags: number(fields, 40, 8)?,
        packed_bytes: length(fields, 16, 4)?,
        unpacked_bytes: if header < HEADER_BYTES { 0 } else { length(fields, 56, 8)? },
        data: image.get(first..next)?,
    };
    Some((entry, next))
}

impl<'a> Entry<'a> {
    /// Returns the decompressed code, which must not exceed `room` bytes.
    ///
    /// # Errors
    /// Returns an error if the code is larger, or cannot be decompressed.
    pub fn unpack(&self, room: usize) -> Result<Cow<'a, [u8]>, Unreadable> {
        if self.flags & (LZ4 | ZSTD) == 0 {
            return if self.data.len() > room { Err(Unreadable::Limit) } else { Ok(Cow::Borrowed(self.data)) };
        }
        if self.unpacked_bytes > room {
            return Err(Unreadable::Limit);
        }
        let packed = self.data.get(..self.packed_bytes).ok_or(Unreadable::Malformed)?;
        if self.flags & ZSTD == 0 && !packed.starts_with(&ZSTD_MAGIC) {
            return lz4::unpack(packed, self.unpacked_bytes).map(Cow::Owned);
        }
        let decoder = ruzstd::decoding::StreamingDecoder::new(packed).map_err(|_| Unreadable::Malformed)?;
        let mut unpacked = Vec::new();
        // Read one more byte, to detect that the code is longer than specified in its header.
        let limit = self.unpacked_bytes as u64 + 1;
        decoder.take(limit).read_to_end(&mut unpacked).map_err(|_| Unreadable::Malformed)?;
        if unpacked.len() == self.unpacked_bytes { Ok(Cow::Owned(unpacked)) } else { Err(Unreadable::Malformed) }
    }
}
