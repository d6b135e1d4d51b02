//! Splits a file into its parts.

use crate::error::ReadError;
use crate::format::{FORMAT, IDENTITY, MAGIC, SECTIONS_MAX, SUM, is_name, sum};
use crate::part::{Invalid, Known, Part};
use std::collections::BTreeMap;

/// The unread sections of a file, which have been verified and are indexed by name and owner.
#[derive(Debug)]
pub struct SavedState<'a> {
    sections: BTreeMap<(&'a str, u32), (u32, &'a [u8])>,
}

impl<'a> SavedState<'a> {
    /// Parses a file. `known` lists the supported parts.
    ///
    /// # Errors
    /// Returns a [`ReadError`] if the file is invalid. No section is decoded before all have been verified.
    pub fn parse(file: &'a [u8], known: &[Known]) -> Result<Self, ReadError> {
        let mut bytes = Bytes { file, at: 0 };
        if file.get(..MAGIC.len()) != Some(MAGIC.as_slice()) {
            return Err(ReadError::Magic);
        }
        bytes.skip(MAGIC.len());
        let format = u32::from_le_bytes(bytes.array("the format")?);
        if format != FORMAT {
            return Err(ReadError::Format(format));
        }
        let identity: [u8; IDENTITY] = bytes.array("the identity")?;
        let count = u32::from_le_bytes(bytes.array("the number of sections")?);
        if count > SECTIONS_MAX {
            return Err(ReadError::Sections(count));
        }
        let mut sections = BTreeMap::new();
        for number in 0..count {
            let section = bytes.section(number)?;
            section.check(&identity, known)?;
            let Section { name, of, version, contents, .. } = section;
            if sections.insert((name, of), (version, contents)).is_some() {
                return Err(ReadError::Twice { name: name.to_owned(), of });
            }
        }
        match bytes.rest() {
            0 => Ok(Self { sections }),
            behind => Err(ReadError::Behind(behind)),
        }
    }

    /// Decodes a part and removes it from the state.
    ///
    /// # Errors
    /// Returns a [`ReadError`] if the part is missing or invalid.
    pub fn take<P: Part>(&mut self, of: u32) -> Result<P, ReadError> {
        let name = P::NAME;
        let (version, contents) = self.sections.remove(&(name, of)).ok_or(ReadError::Missing { name, of })?;
        let encoding = ReadError::Encoding { name, of };
        // `parse` rejects all other versions.
        if version == P::VERSION {
            return decode(contents).ok_or(encoding);
        }
        let before = decode(contents).ok_or(encoding)?;
        P::from_before(before).map_err(|why| ReadError::Invalid { name, of, why })
    }

    /// Calls [`Self::take`], and converts the part to its crate's type.
    ///
    /// # Errors
    /// Returns the same errors as [`Self::take`], or an error if the conversion fails.
    pub fn restore<P: Part, T: TryFrom<P, Error = Invalid>>(&mut self, of: u32) -> Result<T, ReadError> {
        let part: P = self.take(of)?;
        T::try_from(part).map_err(|why| ReadError::Invalid { name: P::NAME, of, why })
    }

    /// Returns the owners of unread parts with this name, in order.
    #[must_use]
    pub fn owners<P: Part>(&self) -> Vec<u32> {
        self.sections.range((P::NAME, 0)..=(P::NAME, u32::MAX)).map(|((_, of), _)| *of).collect()
    }

    /// Checks that every section has been read.
    ///
    /// # Errors
    /// Returns [`ReadError::Left`] if any sections are unread.
    pub fn finish(self) -> Result<(), ReadError> {
        match self.sections.into_keys().next() {
            None => Ok(()),
            Some((name, of)) => Err(ReadError::Left { name: name.to_owned(), of }),
        }
    }
}

/// Decodes all of `contents`.
fn decode<T: serde::de::DeserializeOwned>(contents: &[u8]) -> Option<T> {
    let (value, rest) = postcard::take_from_bytes(contents).ok()?;
    rest.is_empty().then_some(value)
}

/// A section as stored in the file.
struct Section<'a> {
    name: &'a str,
    of: u32,
    version: u32,
    sum: [u8; SUM],
    contents: &'a [u8],
}

impl Section<'_> {
    fn check(&self, identity: &[u8; IDENTITY], known: &[Known]) -> Result<(), ReadError> {
        let Self { name, of, version, sum: said, contents } = *self;
        let Some(known) = known.iter().find(|known| known.name == name) else {
            return Err(ReadError::Unknown { name: name.to_owned(), of });
        };
        // Version 0 is invalid.
        if version == 0 || (version != known.version && version.checked_add(1) != Some(known.version)) {
            return Err(ReadError::Version { name: name.to_owned(), of, version, known: known.version });
        }
        if sum(identity, name, of, version, contents) != said {
            return Err(ReadError::Sum { name: name.to_owned(), of });
        }
        Ok(())
    }
}

/// The bytes of a file, and the current read position.
struct Bytes<'a> {
    file: &'a [u8],
    at: usize,
}

impl<'a> Bytes<'a> {
    fn rest(&self) -> usize {
        self.file.len().saturating_sub(self.at)
    }

    fn skip(&mut self, bytes: usize) {
        self.at = self.at.saturating_add(bytes);
    }

    fn take(&mut self, bytes: usize, what: &'static str) -> Result<&'a [u8], ReadError> {
        let end = self.at.checked_add(bytes);
        let taken =
            end.and_then(|end| self.file.get(self.at..end)).ok_or(ReadError::Cut { at: self.file.len(), what })?;
        self.skip(bytes);
        Ok(taken)
    }

    fn array<const N: usize>(&mut self, what: &'static str) -> Result<[u8; N], ReadError> {
        let taken = self.take(N, what)?;
        taken.try_into().map_err(|_| ReadError::Cut { at: self.at, what })
    }

    fn section(&mut self, number: u32) -> Result<Section<'a>, ReadError> {
        let [length] = self.array("a section's name")?;
        let name = self.take(length.into(), "a section's name")?;
        let name = std::str::from_utf8(name).ok().filter(|name| is_name(name)).ok_or(ReadError::Name(number))?;
        let of = u32::from_le_bytes(self.array("a section's head")?);
        let version = u32::from_le_bytes(self.array("a section's head")?);
        let length = u64::from_le_bytes(self.array("a section's head")?);
        let sum = self.array("a section's sum")?;
        // A length that overflows `usize` exceeds the size of any file.
        let length = usize::try_from(length).unwrap_or(usize::MAX);
        let contents = self.take(length, "a section's contents")?;
        Ok(Section { name, of, version, sum, contents })
    }
}

#[cfg(test)]
mod tests;
