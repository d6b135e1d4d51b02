//! The file format, excluding the contents of parts.

use sha2::{Digest, Sha256};

/// Magic bytes at the start of each file.
pub const MAGIC: [u8; 8] = *b"GPUMSTAT";
/// Version of the file format.
pub const FORMAT: u32 = 1;
/// Maximum number of sections in a file. Each VM on a card needs a few.
pub const SECTIONS_MAX: u32 = 4096;
/// Maximum length of a part's name in bytes.
pub(crate) const NAME_MAX: usize = 64;
/// Size of a file's identity in bytes.
pub(crate) const IDENTITY: usize = 16;
/// Size of a section's checksum in bytes.
pub(crate) const SUM: usize = 32;

/// Returns true if a string is a valid part name.
pub(crate) fn is_name(name: &str) -> bool {
    let allowed = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'.');
    (1..=NAME_MAX).contains(&name.len()) && name.bytes().all(allowed)
}

/// Returns the checksum of a section in a file with this identity.
pub(crate) fn sum(identity: &[u8; IDENTITY], name: &str, of: u32, version: u32, contents: &[u8]) -> [u8; SUM] {
    // A name has at most 64 bytes, so its length fits in one byte.
    let length = u8::try_from(name.len()).unwrap_or(u8::MAX);
    Sha256::new()
        .chain_update(identity)
        .chain_update([length])
        .chain_update(name)
        .chain_update(of.to_le_bytes())
        .chain_update(version.to_le_bytes())
        .chain_update((contents.len() as u64).to_le_bytes())
        .chain_update(contents)
        .finalize()
        .into()
}
