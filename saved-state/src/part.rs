//! A part of a saved state.

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use std::fmt;

/// Plain data that a crate saves. It is created from the crate's state by a pattern that names each field, so that no
/// field is forgotten.
pub trait Part: Serialize + DeserializeOwned {
    /// The crate's name. If the crate has several parts, it is followed by a dot and this part's name.
    const NAME: &'static str;
    /// Increases with each change of the encoding, starting at 1. Each list element must take at least one byte;
    /// otherwise a short file could claim a list of any length.
    const VERSION: u32;
    /// The part's previous version; [`Unversioned`] if the reader does not accept one.
    type Before: Serialize + DeserializeOwned;

    /// Converts from the previous version.
    ///
    /// # Errors
    /// If the state no longer exists.
    fn from_before(before: Self::Before) -> Result<Self, Invalid>;

    /// Converts to the previous version, for an older program.
    ///
    /// # Errors
    /// If the previous version cannot express the state.
    fn to_before(&self) -> Result<Self::Before, Invalid>;
}

/// Stands for the version before the first version that is read; it has no values.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub enum Unversioned {}

/// Declares a type as the first version of a part.
#[macro_export]
macro_rules! first_version {
    ($part:ty, $name:literal) => {
        $crate::only_version!($part, $name, 1);
    };
}

/// Declares a type as the only version of a part that is read and written. Its number stays above the numbers of all
/// earlier encodings: a program with an earlier encoding must not accept this encoding as its own.
#[macro_export]
macro_rules! only_version {
    ($part:ty, $name:literal, $version:literal) => {
        impl $crate::Part for $part {
            const NAME: &'static str = $name;
            const VERSION: u32 = $version;
            type Before = $crate::Unversioned;

            fn from_before(before: $crate::Unversioned) -> Result<Self, $crate::Invalid> {
                match before {}
            }

            fn to_before(&self) -> Result<$crate::Unversioned, $crate::Invalid> {
                Err($crate::Invalid::new("no earlier version is written"))
            }
        }
    };
}

/// A part that a program reads, in this and the previous version.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Known {
    /// The part's name.
    pub name: String,
    /// The newest supported version.
    pub version: u32,
}

impl Known {
    /// Returns the part with the versions that this program supports.
    #[must_use]
    pub fn for_part<P: Part>() -> Self {
        Self { name: P::NAME.to_owned(), version: P::VERSION }
    }
}

/// Reason that saved values are not a valid state.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct Invalid(String);

impl Invalid {
    /// Creates the error with a reason.
    pub fn new(why: impl fmt::Display) -> Self {
        Self(why.to_string())
    }

    /// Returns `Ok` if `holds`, otherwise an error that names the violated condition.
    ///
    /// # Errors
    /// If the condition does not hold.
    pub fn unless(holds: bool, why: impl FnOnce() -> String) -> Result<(), Self> {
        if holds { Ok(()) } else { Err(Self(why())) }
    }
}

/// Returns true if keys are strictly ascending, as in a saved map.
pub fn ascend<K: Ord>(keys: impl IntoIterator<Item = K>) -> bool {
    let mut last: Option<K> = None;
    keys.into_iter().all(|key| {
        let above = last.as_ref().is_none_or(|last| *last < key);
        last = Some(key);
        above
    })
}
