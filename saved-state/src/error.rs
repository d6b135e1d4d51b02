//! Reasons why a file cannot be written or read.

use crate::format::{FORMAT, SECTIONS_MAX};
use crate::part::Invalid;

/// Reason why a part cannot be written.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum WriteError {
    /// Two parts have the same name and owner.
    #[error("the state of `{name}` of {of} is written twice")]
    Twice {
        /// The part.
        name: &'static str,
        /// Owner of the part.
        of: u32,
    },
    /// A file cannot contain this many parts.
    #[error("a file of saved state has at most {SECTIONS_MAX} sections")]
    Sections,
    /// The reader does not support the part, or supports only versions in which this program cannot write the part.
    #[error(
        "the reader takes `{name}` in version {reads:?}, and it can be written in {version} and the one before: replace the \
         daemon by one that is at most one version away"
    )]
    Version {
        /// The part.
        name: &'static str,
        /// The version in which this program writes the part.
        version: u32,
        /// The newest version that the reader accepts. The reader also accepts the previous version.
        reads: Option<u32>,
    },
    /// The previous version cannot express the part's state.
    #[error("the state of `{name}` of {of} cannot be written in version {version}: {why}")]
    Before {
        /// The part.
        name: &'static str,
        /// Owner of the part.
        of: u32,
        /// The previous version.
        version: u32,
        /// Reason.
        why: Invalid,
    },
    /// The encoding failed.
    #[error("the state of `{name}` of {of} cannot be encoded")]
    Encoding {
        /// The part.
        name: &'static str,
        /// Owner of the part.
        of: u32,
    },
}

/// Reason why a file is refused.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ReadError {
    /// The magic bytes do not match.
    #[error("this is not a saved state of a vGPU: its first bytes differ")]
    Magic,
    /// The file's own format has a different version.
    #[error("the saved state has format {0}; this program reads format {FORMAT}")]
    Format(u32),
    /// The file ends early.
    #[error("the saved state ends after {at} bytes, within {what}: it was truncated")]
    Cut {
        /// Number of bytes up to the end of the file.
        at: usize,
        /// The value that is missing.
        what: &'static str,
    },
    /// The file has more sections than permitted.
    #[error("the saved state claims to have {0} sections; the maximum is {SECTIONS_MAX}")]
    Sections(u32),
    /// The name of a section is invalid.
    #[error("section {0} of the saved state has an invalid name")]
    Name(u32),
    /// Bytes follow the last section.
    #[error("{0} bytes follow the last section of the saved state")]
    Behind(usize),
    /// The checksum of a section is wrong.
    #[error("section `{name}` of {of} is damaged, or comes from another file: its checksum is wrong")]
    Sum {
        /// The part.
        name: String,
        /// Owner of the part.
        of: u32,
    },
    /// The name of a section is not known.
    #[error(
        "section `{name}` of {of} is unknown to this program: it was saved by a newer one, or one with other parts"
    )]
    Unknown {
        /// The part.
        name: String,
        /// Owner of the part.
        of: u32,
    },
    /// The version of a section is not supported.
    #[error("section `{name}` of {of} has version {version}; this program reads {known} and the one before")]
    Version {
        /// The part.
        name: String,
        /// Owner of the part.
        of: u32,
        /// The section's version in the file.
        version: u32,
        /// The version that this program supports.
        known: u32,
    },
    /// A section occurs twice.
    #[error("section `{name}` of {of} occurs twice")]
    Twice {
        /// The part.
        name: String,
        /// Owner of the part.
        of: u32,
    },
    /// A section is missing.
    #[error("section `{name}` of {of} is missing, or was read already")]
    Missing {
        /// The part.
        name: &'static str,
        /// Owner of the part.
        of: u32,
    },
    /// A section has not been read.
    #[error("section `{name}` of {of} belongs to no other part of the saved state")]
    Left {
        /// The part.
        name: String,
        /// Owner of the part.
        of: u32,
    },
    /// The contents are not a valid encoding in this version.
    #[error("section `{name}` of {of} cannot be decoded")]
    Encoding {
        /// The part.
        name: &'static str,
        /// Owner of the part.
        of: u32,
    },
    /// The contents are not a valid state.
    #[error("section `{name}` of {of} is invalid: {why}")]
    Invalid {
        /// The part.
        name: &'static str,
        /// Owner of the part.
        of: u32,
        /// Reason.
        why: Invalid,
    },
}
