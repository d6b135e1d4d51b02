//! The package to hand over: a file and named file descriptors.

use crate::Error;
use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, fcntl_get_seals, fstat, memfd_create};
use rustix::io::{pread, write};
use std::os::fd::OwnedFd;

/// Maximum size of the file in bytes.
pub(crate) const FILE_MAX: u64 = 1 << 30;
/// Maximum number of file descriptors.
pub(crate) const DESCRIPTORS_MAX: usize = 1 << 16;
/// Maximum length of a file descriptor's name in bytes.
pub(crate) const NAME_MAX: usize = 128;
/// Seals that make a file immutable.
const SEALS: SealFlags = SealFlags::SHRINK.union(SealFlags::GROW).union(SealFlags::WRITE);

/// A file and file descriptors that are handed over together.
#[derive(Debug, Default)]
pub struct Package {
    /// Saved state.
    pub file: Vec<u8>,
    /// Named file descriptors. The order of descriptors with the same name is preserved.
    pub descriptors: Vec<(String, OwnedFd)>,
}

impl Package {
    /// Removes and returns all file descriptors with this name, in order.
    pub fn take(&mut self, name: &str) -> Vec<OwnedFd> {
        self.descriptors.extract_if(.., |(of, _)| of == name).map(|(_, fd)| fd).collect()
    }

    /// Checks that the package is within the limits.
    pub(crate) fn check(&self) -> Result<(), Error> {
        let Self { file, descriptors } = self;
        let bytes = file.len() as u64;
        if bytes > FILE_MAX {
            return Err(Error::TooMuch("bytes of state", bytes, FILE_MAX));
        }
        if descriptors.len() > DESCRIPTORS_MAX {
            return Err(Error::TooMuch("file descriptors", descriptors.len() as u64, DESCRIPTORS_MAX as u64));
        }
        let longest = descriptors.iter().map(|(name, _)| name.len()).max().unwrap_or(0);
        if longest > NAME_MAX {
            return Err(Error::TooMuch("bytes in a name", longest as u64, NAME_MAX as u64));
        }
        Ok(())
    }
}

/// Creates an anonymous, immutable file with these contents.
pub(crate) fn sealed(bytes: &[u8]) -> Result<OwnedFd, Error> {
    let failed = || Error::io("cannot create a file for the handed-over state");
    let file = memfd_create("handover", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING).map_err(failed())?;
    let mut rest = bytes;
    while !rest.is_empty() {
        let written = write(&file, rest).map_err(failed())?;
        rest = rest.get(written..).unwrap_or_default();
    }
    fcntl_add_seals(&file, SEALS).map_err(failed())?;
    Ok(file)
}

/// Returns the contents of a sealed file, which must contain `bytes` bytes.
pub(crate) fn unsealed(file: &OwnedFd, bytes: u64) -> Result<Vec<u8>, Error> {
    let failed = || Error::io("cannot read the handed-over state");
    let seals = fcntl_get_seals(file).map_err(failed())?;
    let length = u64::try_from(fstat(file).map_err(failed())?.st_size).unwrap_or(u64::MAX);
    if !seals.contains(SEALS) || length != bytes || bytes > FILE_MAX {
        return Err(Error::Protocol(format!("a mutable file, or one of {length} bytes instead of {bytes}")));
    }
    let mut data = vec![0; usize::try_from(bytes).unwrap_or(usize::MAX)];
    let mut done = 0;
    while done < data.len() {
        let read = pread(file, data.get_mut(done..).unwrap_or_default(), done as u64).map_err(failed())?;
        if read == 0 {
            return Err(Error::Protocol("a truncated file".into()));
        }
        done = done.saturating_add(read);
    }
    Ok(data)
}
