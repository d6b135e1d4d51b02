//! The key file.

use std::fs::File;
use std::io::Read;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use anyhow::{Context, Result, ensure};
use zeroize::{Zeroize, Zeroizing};

/// Size of the key in bytes: two AES-256 keys.
pub const KEY_BYTES: usize = 64;
/// Permission bits that a key file must not grant to other users.
const RIGHTS_OF_OTHERS: u32 = 0o077;

/// A key for AES-256-XTS. The first half encrypts data, the second half encrypts tweaks. The key cannot be printed, and
/// its memory is zeroed on drop.
pub struct Key(Zeroizing<[u8; KEY_BYTES]>);

impl Key {
    /// Creates a key.
    ///
    /// # Errors
    /// Returns an error if both halves are equal, which makes XTS weak.
    pub fn new(bytes: [u8; KEY_BYTES]) -> Result<Self> {
        let key = Self(Zeroizing::new(bytes));
        ensure!(key.data() != key.tweak(), "both halves of the key are equal");
        Ok(key)
    }

    /// Reads a key from a file, which contains 64 bytes, or 128 hexadecimal digits and a line end.
    ///
    /// # Errors
    /// Returns an error if the file cannot be read, is accessible to other users, or is malformed.
    pub fn read(path: &Path) -> Result<Self> {
        let name = path.display();
        let mut file = File::open(path).with_context(|| format!("the key file {name}"))?;
        let mode = file.metadata().with_context(|| format!("the key file {name}"))?.mode();
        ensure!(mode & RIGHTS_OF_OTHERS == 0, "other users may access the key file {name}: use chmod 600 {name}");
        let mut text = Zeroizing::new(Vec::with_capacity(2 * KEY_BYTES + 2));
        file.by_ref().take(2 * KEY_BYTES as u64 + 2).read_to_end(&mut text).with_context(|| format!("{name}"))?;
        let mut bytes = [0; KEY_BYTES];
        let found = if text.len() == KEY_BYTES {
            bytes.copy_from_slice(&text);
            true
        } else {
            decode(text.trim_ascii_end(), &mut bytes)
        };
        let key = if found { Self::new(bytes) } else { Err(anyhow::anyhow!("not a key")) };
        bytes.zeroize();
        key.with_context(|| format!("{name} must have 64 bytes or 128 hexadecimal digits: two different halves"))
    }

    /// Returns the key for data.
    pub fn data(&self) -> &[u8] {
        &self.0[..KEY_BYTES / 2]
    }

    /// Returns the key for tweaks.
    pub fn tweak(&self) -> &[u8] {
        &self.0[KEY_BYTES / 2..]
    }
}

fn decode(digits: &[u8], bytes: &mut [u8; KEY_BYTES]) -> bool {
    let value = |digit: u8| (digit as char).to_digit(16).map(|value| value as u8);
    let (pairs, rest) = digits.as_chunks::<2>();
    rest.is_empty()
        && pairs.len() == KEY_BYTES
        && pairs.iter().zip(bytes.iter_mut()).all(|([high, low], byte)| match (value(*high), value(*low)) {
            (Some(high), Some(low)) => {
                *byte = high << 4 | low;
                true
            }
            _ => false,
        })
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs::{Permissions, set_permissions, write};
    use std::os::unix::fs::PermissionsExt;

    #[test]
    fn key_files_of_both_forms_are_read_and_others_refused() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("key");
        let store = |bytes: &[u8], mode| {
            write(&path, bytes).expect("a file");
            set_permissions(&path, Permissions::from_mode(mode)).expect("rights");
            Key::read(&path).map(|key| [key.data(), key.tweak()].concat()).map_err(|error| format!("{error:#}"))
        };
        let bytes: Vec<u8> = (0..64).map(|index| index * 3 + 1).collect();
        let digits: String = bytes.iter().map(|byte| format!("{byte:02X}")).collect();
        assert_eq!(store(&bytes, 0o600).as_ref(), Ok(&bytes));
        assert_eq!(store(format!("{digits}\n").as_bytes(), 0o400).as_ref(), Ok(&bytes));
        for wrong in [&bytes[..63], &[7; 64], &digits.as_bytes()[..126], "g".repeat(128).as_bytes()] {
            let error = store(wrong, 0o600).expect_err("not a key");
            assert!(error.contains("128 hexadecimal digits") && !error.contains(&digits[..8]), "{error}");
        }
        assert!(store(&bytes, 0o640).expect_err("readable by the group").contains("chmod 600"));
    }
}
