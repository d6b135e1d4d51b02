//! Saved form of client memory. Files are handed over as descriptors.

use std::sync::Arc;

use saved_state::Invalid;
use serde::{Deserialize, Serialize};

use super::mapping::Source;
use super::{AddError, AddRegion, DmaRegion, GuestMemory, Mapping, MemoryLimits, Sharing};
use crate::descriptors::{Given, Giving, ParkError};
use crate::wake::Wake;

/// Saved form of a region.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct SavedRegion {
    gpa: u64,
    size: u64,
    readable: bool,
    writable: bool,
    file: Option<SavedFile>,
}

/// Saved form of a region's file.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct SavedFile {
    descriptor: u32,
    offset: u64,
    /// True if the client shares the memory, false if it uses a private copy, or `None` if this is unknown.
    shared: Option<bool>,
}

impl GuestMemory {
    /// Saves the regions. All mappings of a file share one descriptor.
    pub fn save(&self, giving: &mut Giving<'_>) -> Result<Vec<SavedRegion>, ParkError> {
        let table = self.snapshot();
        let mut files: Vec<(*const (), u32)> = Vec::new();
        let mut saved = Vec::new();
        for DmaRegion { gpa, size, readable, writable, mapping } in table.regions() {
            let file = mapping.as_ref().map(|mapping| file_of(mapping, &mut files, giving)).transpose()?;
            saved.push(SavedRegion { gpa: *gpa, size: *size, readable: *readable, writable: *writable, file });
        }
        Ok(saved)
    }

    /// Maps the saved regions again. If a file can no longer be mapped because the client has truncated or sealed it,
    /// marks the region as withdrawn, so that only this client loses its device.
    pub fn restore(
        &self,
        saved: Vec<SavedRegion>,
        given: &Given,
        limits: &MemoryLimits,
        wake: &Arc<Wake>,
    ) -> Result<(), ParkError> {
        // The client keeps memory that is already mapped, even if the limit on files is now lower.
        let limits = &MemoryLimits { files: usize::MAX, ..*limits };
        for SavedRegion { gpa, size, readable, writable, file } in saved {
            let offset = file.map_or(0, |file| file.offset);
            let request = || {
                let fd = file.map(|file| given.take(file.descriptor)).transpose()?;
                Ok::<_, ParkError>(AddRegion { gpa, size, offset, readable, writable, fd })
            };
            let added = match self.add(request()?, limits, wake) {
                Err(AddError::File(error)) => {
                    let gpa = format_args!("{gpa:#x}");
                    tracing::warn!(gpa, size, %error, "memory of a VMM cannot be mapped again; closing its connection");
                    self.add_withdrawn(request()?, limits, wake)
                }
                added => added,
            };
            let region = added.map_err(|error| {
                let why = std::error::Error::source(&error).map_or_else(String::new, |source| format!(": {source}"));
                Invalid::new(format_args!("memory at {gpa:#x} of {size:#x} bytes: {error}{why}"))
            })?;
            if let (Some(mapping), Some(shared)) = (&region.mapping, file.and_then(|file| file.shared)) {
                mapping.set_sharing(if shared { Sharing::Shared } else { Sharing::Private });
            }
        }
        Ok(())
    }
}

/// Saves the file of a mapping, once for all of the file's mappings, and returns the saved form.
fn file_of(
    mapping: &Mapping,
    files: &mut Vec<(*const (), u32)>,
    giving: &mut Giving<'_>,
) -> Result<SavedFile, ParkError> {
    let Mapping { base: _, mapped: _, skip: _, len: _, offset, writable: _, guard: _, source } = mapping;
    let Source::File { backing, looked: _ } = source else { return Err(ParkError::Stays("memory")) };
    let place = Arc::as_ptr(backing).cast::<()>();
    let known = files.iter().find(|(file, _)| *file == place).map(|(_, name)| *name);
    let descriptor = match known {
        Some(name) => name,
        None => {
            let name = giving.give(&backing.fd)?;
            files.push((place, name));
            name
        }
    };
    let shared = match mapping.sharing() {
        Sharing::Unknown => None,
        Sharing::Shared => Some(true),
        Sharing::Private => Some(false),
    };
    Ok(SavedFile { descriptor, offset: *offset, shared })
}
