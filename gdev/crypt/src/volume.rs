//! A file with encrypted sectors.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::{FileExt, FileTypeExt};
use std::path::Path;
use std::sync::Arc;

use anyhow::{Context, Result, ensure};

use crate::SECTOR_BYTES;
use crate::cipher::Cipher;
use crate::tables::Direction;

/// An encrypted volume.
pub struct Volume {
    file: File,
    bytes: u64,
    cipher: Arc<Cipher>,
}

impl Volume {
    /// Opens a file or block device.
    ///
    /// # Errors
    /// Returns an error if the file cannot be opened for reading and writing, or is not a whole number of sectors.
    pub fn open(path: &Path, cipher: Arc<Cipher>) -> Result<Self> {
        let name = path.display();
        let file = OpenOptions::new().read(true).write(true).open(path).with_context(|| format!("the file {name}"))?;
        let kind = file.metadata()?.file_type();
        ensure!(kind.is_file() || kind.is_block_device(), "{name} is neither a file nor a block device");
        let bytes = io::Seek::seek(&mut &file, io::SeekFrom::End(0)).with_context(|| format!("the size of {name}"))?;
        ensure!(
            bytes > 0 && bytes.is_multiple_of(SECTOR_BYTES as u64),
            "{name} has {bytes} bytes: use a multiple of {SECTOR_BYTES}, for example with `truncate -s 1G {name}`"
        );
        Ok(Self { file, bytes, cipher })
    }

    /// Returns the size of the volume in bytes.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Reads and decrypts whole sectors.
    ///
    /// # Errors
    /// Returns an error if the range is not within the volume, or the file cannot be read.
    pub fn read(&self, offset: u64, data: &mut [u8]) -> io::Result<()> {
        let sector = self.sector(offset, data.len())?;
        self.file.read_exact_at(data, offset)?;
        self.cipher.run(Direction::Decrypt, sector, data);
        Ok(())
    }

    /// Encrypts and writes whole sectors. The data is encrypted in place.
    ///
    /// # Errors
    /// Returns an error if the range is not within the volume, or the file cannot be written.
    pub fn write(&self, offset: u64, data: &mut [u8]) -> io::Result<()> {
        let sector = self.sector(offset, data.len())?;
        self.cipher.run(Direction::Encrypt, sector, data);
        self.file.write_all_at(data, offset)
    }

    /// Waits until all earlier writes are on stable storage.
    ///
    /// # Errors
    /// Returns an error if the disk reports an error.
    pub fn flush(&self) -> io::Result<()> {
        self.file.sync_data()
    }

    /// Returns the number of the first sector of a range, which must consist of whole sectors within the volume.
    fn sector(&self, offset: u64, bytes: usize) -> io::Result<u64> {
        let sector = SECTOR_BYTES as u64;
        let is_whole = offset.is_multiple_of(sector) && bytes.is_multiple_of(SECTOR_BYTES);
        let is_inside = offset.checked_add(bytes as u64).is_some_and(|end| end <= self.bytes);
        if is_whole && is_inside { Ok(offset / sector) } else { Err(io::ErrorKind::InvalidInput.into()) }
    }
}
