//! An unnamed file that buffers a saved virtual machine while a client reads or sends it, so that no VM waits for the
//! client.

use std::fs::File;
use std::io::{self, Read, Seek, Write};
use std::path::{Path, PathBuf};

/// Size of each read, in bytes.
const BYTES_PER_READ: usize = 256 << 10;

/// A temporary file, deleted when this value is dropped or the process exits.
#[derive(Debug)]
pub struct Spool {
    file: File,
    folder: PathBuf,
    /// Remaining capacity in bytes.
    left: u64,
}

impl Spool {
    /// Creates an empty file of at most `most` bytes in `folder`, or in the directory for temporary files if `folder`
    /// is `None`.
    ///
    /// # Errors
    /// Returns an error if the file cannot be created.
    pub fn new(folder: Option<&Path>, most: u64) -> Result<Self, String> {
        let folder = folder.map_or_else(std::env::temp_dir, Path::to_owned);
        let file = tempfile::tempfile_in(&folder).map_err(|error| io_error(&folder, &error))?;
        Ok(Self { file, folder, left: most })
    }

    /// Appends bytes.
    ///
    /// # Errors
    /// Returns an error if the disk is full, or if the limit would be exceeded.
    pub fn write(&mut self, bytes: &[u8]) -> Result<(), String> {
        let len = u64::try_from(bytes.len()).unwrap_or(u64::MAX);
        let left = self.left.checked_sub(len);
        self.left = left.ok_or("it is larger than the saved state of this VM can be")?;
        self.file.write_all(bytes).map_err(|error| io_error(&self.folder, &error))
    }

    /// Switches to reading, from the first byte.
    ///
    /// # Errors
    /// Returns an error if the file cannot be read.
    pub fn rewind(mut self) -> Result<Spooled, String> {
        self.file.rewind().map_err(|error| io_error(&self.folder, &error))?;
        Ok(Spooled(self))
    }
}

/// A [`Spool`] that is being read.
#[derive(Debug)]
pub struct Spooled(Spool);

impl Spooled {
    /// Returns the next chunk, which is empty at the end.
    ///
    /// # Errors
    /// Returns an error if the file cannot be read.
    pub fn next_piece(&mut self) -> Result<Vec<u8>, String> {
        let mut piece = vec![0; BYTES_PER_READ];
        let len = loop {
            match self.0.file.read(&mut piece) {
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                read => break read.map_err(|error| io_error(&self.0.folder, &error))?,
            }
        };
        piece.truncate(len);
        Ok(piece)
    }
}

fn io_error(folder: &Path, error: &io::Error) -> String {
    format!("temporary file in {}: {error}", folder.display())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_come_back_in_order_and_no_more_go_in_than_may() {
        let folder = tempfile::tempdir().unwrap();
        let mut spool = Spool::new(Some(folder.path()), 600_000).unwrap();
        let all: Vec<u8> = (0..600_000u32).map(|at| (at % 251) as u8).collect();
        all.chunks(7_001).for_each(|part| spool.write(part).unwrap());
        assert!(spool.write(&[1]).unwrap_err().contains("larger"));
        assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 0, "the file is unnamed");
        let mut spool = spool.rewind().unwrap();
        let mut back = Vec::new();
        loop {
            let part = spool.next_piece().unwrap();
            if part.is_empty() {
                break;
            }
            back.extend(part);
        }
        assert!(back == all);
        let gone = folder.path().join("gone");
        assert!(Spool::new(Some(&gone), 1).unwrap_err().contains("gone"));
    }
}
