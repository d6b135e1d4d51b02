//! Saved state: the parts of a vGPU or card, serialized so that the vGPU or card can resume elsewhere.
//!
//! Each crate saves its own part of the state as a [`Part`], which is plain data with the crate's name and a version.
//! This crate combines parts into a file, and splits a file into its parts.
//!
//! # The file
//! All numbers are little-endian.
//!
//! | bytes | contents |
//! |---|---|
//! | 8 | [`MAGIC`] |
//! | 4 | [`FORMAT`], the version of this table |
//! | 16 | the file's identity, which is unique |
//! | 4 | number of sections that follow, at most [`SECTIONS_MAX`] |
//!
//! The sections follow consecutively:
//!
//! | bytes | contents |
//! |---|---|
//! | 1 + n | length of the name, and the name: ASCII letters, digits, `-` and `.` |
//! | 4 | owner of the part: a number that the writer chooses, such as a tenant's |
//! | 4 | the part's version |
//! | 8 | length of the contents |
//! | 32 | SHA-256 of the file's identity, all of the above, and the contents |
//! | n | the contents, in the encoding of `postcard` |
//!
//! The file ends with the last section. A section's checksum covers the file's identity, so that sections of other
//! files are rejected.
//!
//! # Versions
//! A program reads and writes each part in its current version and its previous version ([`Part::Before`]). The newer
//! of two consecutive programs therefore performs all conversions, in both directions, and the older program need not
//! know later versions. The older program announces the versions that it reads ([`Known`]).
//!
//! # Trust
//! A file is untrusted input, because checksums detect corruption but not tampering. This crate never allocates more
//! memory than the length of the file. Each crate must validate its part, value by value ([`Invalid`]), before using
//! it.
//!
//! A VM's memory can follow its state in a [`stream`].
//!
//! Not included: the contents of parts, card memory (which is passed by reference), guest RAM, and encryption.

#![forbid(unsafe_code)]
#![cfg_attr(
    not(test),
    deny(clippy::indexing_slicing, clippy::arithmetic_side_effects, clippy::cast_possible_truncation)
)]

mod error;
mod format;
mod part;
mod read;
pub mod stream;
mod write;

pub use error::{ReadError, WriteError};
pub use format::{FORMAT, MAGIC, SECTIONS_MAX};
pub use part::{Invalid, Known, Part, Unversioned, ascend};
pub use read::SavedState;
pub use write::Writer;
