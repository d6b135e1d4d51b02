//! Reason that a file is not written, or not read.

use crate::format::{FORMAT, SECTIONS_MAX};
use crate::part::Invalid;

/// Reason that a part cannot be written.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum WriteError {
    /// Two parts of one name and owner.
    #[error("the state of `{name}` of {of} is written twice")]
    Twice {
        /// The part.
        name: &'static str,
        /// Its owner.
        of: u32,
    },
    /// More parts than a file has.
    #[error("a file of saved state has at most {SECTIONS_MAX} sections")]
    Sections,
    /// The reader does not support the part, or supports only versions that cannot be written.
    #[error(
        "the reader takes `{name}` in version {reads:?}, and it can be written in {version} and the one before: replace the \
         daemon by one that is at most one version away"
    )]
    Version {
        /// The part.
        name: &'static str,
        /// The version in which it is written here.
        version: u32,
        /// Versions that the reader accepts: this one and the previous one.
        reads: Option<u32>,
    },
    /// The previous version cannot express it.
    #[error("the state of `{name}` of {of} cannot be written in version {version}: {why}")]
    Before {
        /// The part.
        name: &'static str,
        /// Its owner.
        of: u32,
        /// The version before.
        version: u32,
        /// Reason.
        why: Invalid,
    },
    /// The encoding failed.
    #[error("the state of `{name}` of {of} cannot be encoded")]
    Encoding {
        /// The part.
        name: &'static str,
        /// Its owner.
        of: u32,
    },
}

/// Reason that a file is refused.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ReadError {
    /// The magic bytes do not match.
    #[error("this is no saved state of a vGPU: it begins with other bytes")]
    Magic,
    /// The file's own format is another.
    #[error("the saved state has format {0}; this program reads format {FORMAT}")]
    Format(u32),
    /// The file ends early.
    #[error("the saved state ends after {at} bytes, within {what}: it was cut")]
    Cut {
        /// Bytes before that.
        at: usize,
        /// The value that should be there.
        what: &'static str,
    },
    /// More sections than a file may have.
    #[error("the saved state claims to have {0} sections; {SECTIONS_MAX} are the most")]
    Sections(u32),
    /// The name of a section is invalid.
    #[error("section {0} of the saved state has no proper name")]
    Name(u32),
    /// Bytes after the last section.
    #[error("{0} bytes follow the last section of the saved state")]
    Behind(usize),
    /// The checksum of a section is wrong.
    #[error("section `{name}` of {of} is damaged, or comes from another file: its sum is wrong")]
    Sum {
        /// The part.
        name: String,
        /// Its owner.
        of: u32,
    },
    /// A section with an unknown name.
    #[error(
        "section `{name}` of {of} is unknown to this program: it was saved by a newer one, or one with other parts"
    )]
    Unknown {
        /// The part.
        name: String,
        /// Its owner.
        of: u32,
    },
    /// A section in a version that is not read.
    #[error("section `{name}` of {of} has version {version}; this program reads {known} and the one before")]
    Version {
        /// The part.
        name: String,
        /// Its owner.
        of: u32,
        /// Its version in the file.
        version: u32,
        /// The version of this program.
        known: u32,
    },
    /// A section twice.
    #[error("section `{name}` of {of} is there twice")]
    Twice {
        /// The part.
        name: String,
        /// Its owner.
        of: u32,
    },
    /// A missing section.
    #[error("section `{name}` of {of} is missing, or was read already")]
    Missing {
        /// The part.
        name: &'static str,
        /// Its owner.
        of: u32,
    },
    /// An unread section.
    #[error("section `{name}` of {of} belongs to nothing else in the saved state")]
    Left {
        /// The part.
        name: String,
        /// Its owner.
        of: u32,
    },
    /// The contents are not a part of this version.
    #[error("section `{name}` of {of} cannot be decoded")]
    Encoding {
        /// The part.
        name: &'static str,
        /// Its owner.
        of: u32,
    },
    /// The contents make no sense.
    #[error("section `{name}` of {of} makes no sense: {why}")]
    Invalid {
        /// The part.
        name: &'static str,
        /// Its owner.
        of: u32,
        /// Reason.
        why: Invalid,
    },
}
