//! A part of saved state.

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use std::fmt;

/// Plain data saved by a crate. The crate creates it by destructuring its state with a pattern that names each field,
/// so that no field is forgotten.
pub trait Part: Serialize + DeserializeOwned {
    /// Name of the crate. If the crate has several parts, a dot and the name of this part follow.
    const NAME: &'static str;
    /// Version of the encoding. It starts at 1 and increases with each change. The encoding of each element of a list
    /// must be at least one byte long. Otherwise, a short file could claim to contain a list of arbitrary length.
    const VERSION: u32;
    /// The part's previous version, or [`Unversioned`] if no previous version is accepted.
    type Before: Serialize + DeserializeOwned;

    /// Converts from the previous version.
    ///
    /// # Errors
    /// Returns an error if the state can no longer be represented.
    fn from_before(before: Self::Before) -> Result<Self, Invalid>;

    /// Converts to the previous version, for an older program.
    ///
    /// # Errors
    /// Returns an error if the previous version cannot represent the state.
    fn to_before(&self) -> Result<Self::Before, Invalid>;
}

/// The previous version of a part that has only one version. This type has no values.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub enum Unversioned {}

/// Declares a type as the first version of a part.
#[macro_export]
macro_rules! first_version {
    ($part:ty, $name:literal) => {
        $crate::only_version!($part, $name, 1);
    };
}

/// Declares a type as the only version of a part that is read and written. `$version` must exceed the versions of all
/// earlier encodings, because a program with an earlier encoding must not accept this part as its own.
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

/// A part that a program can read, in [`Self::version`] and the previous version.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Known {
    /// Name of the part.
    pub name: String,
    /// Newest supported version.
    pub version: u32,
}

impl Known {
    /// Returns the part with the versions supported by this program.
    #[must_use]
    pub fn for_part<P: Part>() -> Self {
        Self { name: P::NAME.to_owned(), version: P::VERSION }
    }
}

/// Reason why saved values are not a valid state.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct Invalid(String);

impl Invalid {
    /// Creates the error with a reason.
    pub fn new(why: impl fmt::Display) -> Self {
        Self(why.to_string())
    }

    /// Checks a condition. `why` describes its violation.
    ///
    /// # Errors
    /// Returns an error if the condition is false.
    pub fn unless(holds: bool, why: impl FnOnce() -> String) -> Result<(), Self> {
        if holds { Ok(()) } else { Err(Self(why())) }
    }
}

/// Returns true if the keys are strictly ascending, as in a saved map.
pub fn ascend<K: Ord>(keys: impl IntoIterator<Item = K>) -> bool {
    let mut last: Option<K> = None;
    keys.into_iter().all(|key| {
        let above = last.as_ref().is_none_or(|last| *last < key);
        last = Some(key);
        above
    })
}
