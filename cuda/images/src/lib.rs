//! Examines images of CUDA code: finds the names of their variables, and the properties that prevent a replay.
//!
//! An image is a cubin (ELF), PTX text, or a container with several of them, whose entries may be compressed with LZ4
//! or Zstandard. Public tools document the layout and compression of containers. The driver selects one entry of a
//! container. [`examine`] reads all entries that the driver may select.
//!
//! Images come from guests, so all work is bounded. A result is either complete or an error. The crate does not decode
//! instructions, and does not check whether the driver would load the image.

#![forbid(unsafe_code)]

mod container;
mod elf;
mod lz4;
mod ptx;

use std::collections::BTreeSet;

pub use container::{Entry, PTX_KIND, entries, is_container};

/// Maximum number of variables in an image.
const MAX_VARIABLES: usize = 1 << 16;
/// Maximum length of a variable's name in bytes.
const MAX_NAME_BYTES: usize = 16 << 10;
/// Maximum total size of an image's decompressed entries in bytes.
const MAX_UNPACKED_BYTES: usize = 512 << 20;

/// Properties of an image.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Code {
    /// Names of all variables.
    pub variables: BTreeSet<Vec<u8>>,
    /// Set if initial values of variables contain addresses of functions or variables.
    pub has_addresses: bool,
    /// Set if kernels may allocate memory (`malloc`).
    pub allocates: bool,
}

/// Reason why an image cannot be examined.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Unreadable {
    /// The image violates its format.
    #[error("the image is malformed")]
    Malformed,
    /// The image contains code of an unknown kind.
    #[error("the image contains code of an unknown kind")]
    Kind,
    /// A variable has no name, for example because the symbol table has been stripped.
    #[error("the image contains variables without names")]
    Names,
    /// The image exceeds a limit.
    #[error("the image is too large, or contains too many variables")]
    Limit,
}

impl Code {
    fn add(&mut self, name: &[u8]) -> Result<(), Unreadable> {
        if name.is_empty() {
            return Err(Unreadable::Names);
        }
        if name.len() > MAX_NAME_BYTES || self.variables.len() >= MAX_VARIABLES {
            return Err(Unreadable::Limit);
        }
        self.variables.insert(name.to_vec());
        Ok(())
    }

    fn read(&mut self, bytes: &[u8]) -> Result<(), Unreadable> {
        if elf::is_elf(bytes) { elf::read(bytes, self) } else { ptx::read(bytes, self) }
    }
}

/// Returns true if the compiler has generated this name for a literal. Kernels do not change literals.
pub fn is_literal(name: &[u8]) -> bool {
    name.starts_with(b"$str") || name.starts_with(b"__unnamed_")
}

/// Examines an image for a card with this compute capability (major and minor).
///
/// # Errors
/// Returns an error if the image may contain undetected variables.
pub fn examine(image: &[u8], capability: (u32, u32)) -> Result<Code, Unreadable> {
    let mut code = Code::default();
    if !is_container(image) {
        code.read(image)?;
        return Ok(code);
    }
    let entries = entries(image)?;
    if entries.is_empty() {
        return Ok(code);
    }
    let (major, minor) = capability;
    let runs = |entry: &&Entry<'_>| {
        entry.kind != PTX_KIND && entry.architecture / 10 == major && entry.architecture % 10 <= minor
    };
    // The driver compiles PTX only if no machine code is suitable.
    let mut chosen: Vec<&Entry<'_>> = entries.iter().filter(runs).collect();
    if chosen.is_empty() {
        chosen = entries.iter().filter(|entry| entry.kind == PTX_KIND).collect();
    }
    let is_known = !chosen.is_empty();
    let mut room = MAX_UNPACKED_BYTES;
    let mut found = false;
    for entry in chosen {
        let bytes = entry.unpack(room)?;
        room = room.saturating_sub(bytes.len());
        if entry.kind == PTX_KIND || elf::is_elf(&bytes) {
            code.read(&bytes)?;
            found = true;
        }
    }
    if is_known && found { Ok(code) } else { Err(Unreadable::Kind) }
}

/// Returns the little-endian number of `size` bytes at an offset.
fn number(bytes: &[u8], at: usize, size: usize) -> Option<u64> {
    let part = bytes.get(at..at.checked_add(size)?)?;
    Some(part.iter().rev().fold(0, |value, byte| value << 8 | u64::from(*byte)))
}

/// Like [`number`], for a length or an offset.
fn length(bytes: &[u8], at: usize, size: usize) -> Option<usize> {
    usize::try_from(number(bytes, at, size)?).ok()
}

#[cfg(test)]
mod tests;
