//! Reasons why a file cannot be written or read.

use crate::format::{FORMAT, SECTIONS_MAX};
use crate::part::Invalid;

/// Reason why a part cannot be written.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum WriteError {
    /// Two parts have the same name and owner.
    #[error("the state of `{name}` of {of} is written twice")]
    Twice {
        /// Name of the part.
        name: &'static str,
        /// Owner of the part.
        of: u32,
    },
    /// The file would have too many parts.
    #[error("a file of saved state has at most {SECTIONS_MAX} sections")]
    Sections,
    /// The reader does not support the part, or it supports only versions that this program cannot write.
    #[error(
        "the reader supports version {reads:?} of `{name}`, but this program writes {version} and the previous one: replace the \
         daemon by one that is at most one version away"
    )]
    Version {
        /// Name of the part.
        name: &'static str,
        /// Version in which this program writes the part.
        version: u32,
        /// Newest version that the reader accepts, or `None` if it does not support the part. It also accepts the
        /// previous version.
        reads: Option<u32>,
    },
    /// The previous version cannot represent the part's state.
    #[error("the state of `{name}` of {of} cannot be written in version {version}: {why}")]
    Before {
        /// Name of the part.
        name: &'static str,
        /// Owner of the part.
        of: u32,
        /// The previous version.
        version: u32,
        /// Reason for the error.
        why: Invalid,
    },
    /// The encoding failed.
    #[error("the state of `{name}` of {of} cannot be encoded")]
    Encoding {
        /// Name of the part.
        name: &'static str,
        /// Owner of the part.
        of: u32,
    },
}

/// Reason why a file is rejected.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ReadError {
    /// The magic bytes do not match.
    #[error("this is not a saved state of a vGPU: its first bytes differ")]
    Magic,
    /// The version of the file format is not supported.
    #[error("the saved state has format {0}; this program reads format {FORMAT}")]
    Format(u32),
    /// The file is truncated.
    #[error("the saved state ends after {at} bytes, within {what}: it was truncated")]
    Cut {
        /// Size of the file in bytes.
        at: usize,
        /// Value within which the file ends.
        what: &'static str,
    },
    /// The file has more sections than permitted.
    #[error("the saved state claims to have {0} sections; the maximum is {SECTIONS_MAX}")]
    Sections(u32),
    /// A section's name is invalid.
    #[error("section {0} of the saved state has an invalid name")]
    Name(u32),
    /// Bytes follow the last section.
    #[error("{0} bytes follow the last section of the saved state")]
    Behind(usize),
    /// A section's checksum is wrong.
    #[error("section `{name}` of {of} is corrupt, or comes from another file: its checksum is wrong")]
    Sum {
        /// Name of the part.
        name: String,
        /// Owner of the part.
        of: u32,
    },
    /// A section's name is unknown.
    #[error(
        "section `{name}` of {of} is unknown to this program: it was saved by a newer program or by one with other parts"
    )]
    Unknown {
        /// Name of the part.
        name: String,
        /// Owner of the part.
        of: u32,
    },
    /// A section's version is not supported.
    #[error("section `{name}` of {of} has version {version}; this program reads {known} and the previous version")]
    Version {
        /// Name of the part.
        name: String,
        /// Owner of the part.
        of: u32,
        /// Version of the section in the file.
        version: u32,
        /// Newest version that this program supports.
        known: u32,
    },
    /// A section occurs twice.
    #[error("section `{name}` of {of} occurs twice")]
    Twice {
        /// Name of the part.
        name: String,
        /// Owner of the part.
        of: u32,
    },
    /// A section is missing, or was already read.
    #[error("section `{name}` of {of} is missing or was already read")]
    Missing {
        /// Name of the part.
        name: &'static str,
        /// Owner of the part.
        of: u32,
    },
    /// A section has not been read.
    #[error("section `{name}` of {of} has no matching part in the saved state")]
    Left {
        /// Name of the part.
        name: String,
        /// Owner of the part.
        of: u32,
    },
    /// The contents are not a valid encoding in this version.
    #[error("section `{name}` of {of} cannot be decoded")]
    Encoding {
        /// Name of the part.
        name: &'static str,
        /// Owner of the part.
        of: u32,
    },
    /// The contents are not a valid state.
    #[error("section `{name}` of {of} is invalid: {why}")]
    Invalid {
        /// Name of the part.
        name: &'static str,
        /// Owner of the part.
        of: u32,
        /// Reason for the error.
        why: Invalid,
    },
}
