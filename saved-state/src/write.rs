//! Combines parts into a file.

use crate::error::WriteError;
use crate::format::{FORMAT, IDENTITY, MAGIC, SECTIONS_MAX, is_name, sum};
use crate::part::{Known, Part};
use std::collections::BTreeSet;

/// A file under construction.
#[derive(Debug)]
pub struct Writer {
    identity: [u8; IDENTITY],
    /// Parts that the reader supports. If it is `None`, all parts are written in their newest versions.
    reader: Option<Vec<Known>>,
    written: BTreeSet<(&'static str, u32)>,
    sections: Vec<u8>,
}

impl Writer {
    /// Creates a file for a program of this version. `identity` must be unique, because sections could be exchanged
    /// between files with the same identity without being detected.
    #[must_use]
    pub fn new(identity: [u8; IDENTITY]) -> Self {
        Self { identity, reader: None, written: BTreeSet::new(), sections: Vec::new() }
    }

    /// Creates a file for a program that supports the versions in `reader`.
    #[must_use]
    pub fn for_reader(identity: [u8; IDENTITY], reader: Vec<Known>) -> Self {
        Self { reader: Some(reader), ..Self::new(identity) }
    }

    /// Appends a part owned by `of`.
    ///
    /// # Errors
    /// Returns a [`WriteError`] if the part cannot be written. The file is then unchanged.
    pub fn put<P: Part>(&mut self, of: u32, part: &P) -> Result<(), WriteError> {
        let name = P::NAME;
        debug_assert!(is_name(name), "`{name}` is not a part name");
        if self.written.contains(&(name, of)) {
            return Err(WriteError::Twice { name, of });
        }
        if self.written.len() >= SECTIONS_MAX as usize {
            return Err(WriteError::Sections);
        }
        let version = self.version::<P>()?;
        let encoded = if version == P::VERSION {
            postcard::to_allocvec(part)
        } else {
            let before = part.to_before().map_err(|why| WriteError::Before { name, of, version, why })?;
            postcard::to_allocvec(&before)
        };
        let contents = encoded.map_err(|_| WriteError::Encoding { name, of })?;
        // A name has at most 64 bytes, so its length fits in one byte.
        self.sections.push(u8::try_from(name.len()).unwrap_or(u8::MAX));
        self.sections.extend(name.as_bytes());
        self.sections.extend(of.to_le_bytes());
        self.sections.extend(version.to_le_bytes());
        self.sections.extend((contents.len() as u64).to_le_bytes());
        self.sections.extend(sum(&self.identity, name, of, version, &contents));
        self.sections.extend(contents);
        self.written.insert((name, of));
        Ok(())
    }

    /// Returns the bytes of the file.
    #[must_use]
    pub fn finish(self) -> Vec<u8> {
        let count = u32::try_from(self.written.len()).unwrap_or(u32::MAX);
        let mut file = MAGIC.to_vec();
        file.extend(FORMAT.to_le_bytes());
        file.extend(self.identity);
        file.extend(count.to_le_bytes());
        file.extend(self.sections);
        file
    }

    /// Returns the version in which a part is written for the reader.
    fn version<P: Part>(&self) -> Result<u32, WriteError> {
        let Some(reader) = &self.reader else { return Ok(P::VERSION) };
        let reads = reader.iter().find(|known| known.name == P::NAME).map(|known| known.version);
        let before = P::VERSION.saturating_sub(1);
        match reads {
            // The reader supports its own version and the previous one.
            Some(newest) if newest == P::VERSION || newest.checked_sub(1) == Some(P::VERSION) => Ok(P::VERSION),
            Some(newest) if newest == before && before > 0 => Ok(before),
            _ => Err(WriteError::Version { name: P::NAME, version: P::VERSION, reads }),
        }
    }
}
