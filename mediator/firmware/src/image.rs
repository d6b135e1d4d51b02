//! A falcon firmware image, and a card's set of images.

use nvspec::falcon::{CODE_PAGE_WORDS, CODE_WORDS_MAX, DATA_WORDS_MAX, Falcon};
use sha2::{Digest as _, Sha256};
use std::sync::Arc;

/// Magic number of a file, which identifies the format and its version.
const MAGIC: [u8; 8] = *b"GMFALC01";
/// Size of a file header in bytes: magic number, falcon, and the lengths of code and data in words.
const HEADER_BYTES: usize = 20;
/// Maximum size of a file in bytes.
pub(crate) const FILE_BYTES_MAX: u64 = (HEADER_BYTES + 4 * (CODE_WORDS_MAX + DATA_WORDS_MAX)) as u64;

/// Reason why bytes are not a valid image.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ImageError {
    /// The bytes do not start with the magic number.
    #[error("this is not an image of falcon firmware: it does not begin with {:?}", String::from_utf8_lossy(&MAGIC))]
    Form,
    /// The falcon is unknown.
    #[error("the image is for falcon {0}, expected falcon 0 to 3")]
    Falcon(u32),
    /// A section is too long, or the code is missing.
    #[error(
        "the image has {code} words of code and {data} words of data, expected 1 to {CODE_WORDS_MAX} and at most {DATA_WORDS_MAX}"
    )]
    Size {
        /// Code length in words.
        code: usize,
        /// Data length in words.
        data: usize,
    },
    /// The file length does not match the header.
    #[error("the image has {found} bytes, but its header says {wanted}")]
    Length {
        /// Actual length in bytes.
        found: usize,
        /// Expected length in bytes.
        wanted: usize,
    },
}

/// SHA-256 digest of an image file, which an operator uses to approve the image.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Digest([u8; 32]);

impl std::fmt::Display for Digest {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

impl std::fmt::Debug for Digest {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{self}")
    }
}

/// Code and data of one falcon.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Image {
    falcon: Falcon,
    code: Vec<u32>,
    data: Vec<u32>,
}

impl Image {
    /// Creates an image from `code` and `data`. Removes trailing zeros from the code, because drivers pad the last page
    /// with zeros.
    ///
    /// # Errors
    /// Returns [`ImageError::Size`] if a section is too long, or the code is missing.
    pub fn new(falcon: Falcon, code: &[u32], data: &[u32]) -> Result<Self, ImageError> {
        let used = code.iter().rposition(|word| *word != 0).map_or(0, |last| last + 1);
        let code = code.get(..used).unwrap_or_default();
        if code.is_empty() || code.len() > CODE_WORDS_MAX || data.len() > DATA_WORDS_MAX {
            return Err(ImageError::Size { code: code.len(), data: data.len() });
        }
        Ok(Self { falcon, code: code.to_vec(), data: data.to_vec() })
    }

    /// Creates a placeholder image for cards that do not execute firmware.
    #[must_use]
    pub fn stand_in(falcon: Falcon) -> Self {
        let word = |index: usize| 0x5157_0000 | (falcon as u32) << 12 | index as u32;
        Self { falcon, code: (0..CODE_PAGE_WORDS).map(word).collect(), data: (0..16).map(word).collect() }
    }

    /// Returns the falcon that executes the image.
    #[must_use]
    pub fn falcon(&self) -> Falcon {
        self.falcon
    }

    /// Returns the code as 32-bit words.
    #[must_use]
    pub fn code(&self) -> &[u32] {
        &self.code
    }

    /// Returns the data as 32-bit words.
    #[must_use]
    pub fn data(&self) -> &[u32] {
        &self.data
    }

    /// Serializes the image to its file format.
    #[must_use]
    pub fn to_bytes(&self) -> Vec<u8> {
        let head = [self.falcon as u32, self.code.len() as u32, self.data.len() as u32];
        let words = head.iter().chain(&self.code).chain(&self.data).flat_map(|word| word.to_le_bytes());
        MAGIC.into_iter().chain(words).collect()
    }

    /// Parses an image file.
    ///
    /// # Errors
    /// Returns an [`ImageError`] if the bytes are not a valid image.
    pub fn from_bytes(bytes: &[u8]) -> Result<Self, ImageError> {
        let rest = bytes.strip_prefix(&MAGIC).ok_or(ImageError::Form)?;
        let mut words = rest.as_chunks().0.iter().map(|word| u32::from_le_bytes(*word));
        let (Some(number), Some(code), Some(data)) = (words.next(), words.next(), words.next()) else {
            return Err(ImageError::Length { found: bytes.len(), wanted: HEADER_BYTES });
        };
        let falcon = Falcon::ALL.into_iter().find(|falcon| *falcon as u32 == number);
        let falcon = falcon.ok_or(ImageError::Falcon(number))?;
        let (code, data) = (code as usize, data as usize);
        if code == 0 || code > CODE_WORDS_MAX || data > DATA_WORDS_MAX {
            return Err(ImageError::Size { code, data });
        }
        let wanted = HEADER_BYTES + 4 * (code + data);
        if bytes.len() != wanted {
            return Err(ImageError::Length { found: bytes.len(), wanted });
        }
        let code: Vec<u32> = words.by_ref().take(code).collect();
        Ok(Self { falcon, code, data: words.collect() })
    }

    /// Returns the digest of the image file.
    #[must_use]
    pub fn digest(&self) -> Digest {
        Digest(Sha256::digest(self.to_bytes()).into())
    }
}

/// One image for each falcon of a card.
#[derive(Clone, Debug)]
pub struct Set([Arc<Image>; 4]);

impl Set {
    /// Creates a set from `images`. Returns `None` if a falcon has no image.
    #[must_use]
    pub fn new(mut images: Vec<Image>) -> Option<Self> {
        images.sort_by_key(Image::falcon);
        let whole = images.iter().map(Image::falcon).eq(Falcon::ALL);
        let images: [Arc<Image>; 4] = images.into_iter().map(Arc::new).collect::<Vec<_>>().try_into().ok()?;
        whole.then_some(Self(images))
    }

    /// Creates a set of [placeholder images](Image::stand_in).
    #[must_use]
    pub fn stand_in() -> Self {
        Self(Falcon::ALL.map(|falcon| Arc::new(Image::stand_in(falcon))))
    }

    /// Returns a falcon's image.
    #[must_use]
    pub fn image(&self, falcon: Falcon) -> &Image {
        &self.0[falcon as usize]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn firmware_image_round_trips_through_bytes() {
        let image = Image::new(Falcon::Gpccs, &[1, 2, 0, 3, 0, 0], &[0, 5, 0]).unwrap();
        assert_eq!((image.code(), image.data()), (&[1, 2, 0, 3][..], &[0, 5, 0][..]));
        let bytes = image.to_bytes();
        let read = Image::from_bytes(&bytes).unwrap();
        assert_eq!((&read, read.digest()), (&image, image.digest()));
        assert_ne!(Image::stand_in(Falcon::Fecs).digest(), Image::stand_in(Falcon::Gpccs).digest());
    }

    #[test]
    fn invalid_firmware_image_is_rejected_with_cause() {
        let good = Image::stand_in(Falcon::Fecs).to_bytes();
        let with = |at: usize, value: u32| {
            let mut bytes = good.clone();
            bytes[at..at + 4].copy_from_slice(&value.to_le_bytes());
            Image::from_bytes(&bytes).unwrap_err()
        };
        assert_eq!(Image::from_bytes(b"\x7fELF"), Err(ImageError::Form));
        assert_eq!(with(8, 4), ImageError::Falcon(4));
        assert_eq!(with(12, 0), ImageError::Size { code: 0, data: 16 });
        assert_eq!(with(12, u32::MAX), ImageError::Size { code: u32::MAX as usize, data: 16 });
        assert_eq!(with(16, 17), ImageError::Length { found: good.len(), wanted: good.len() + 4 });
        for cut in 0..good.len() {
            assert!(Image::from_bytes(&good[..cut]).is_err());
        }
        assert!(matches!(Image::new(Falcon::Fecs, &[0; 64], &[1]), Err(ImageError::Size { code: 0, .. })));
        assert!(Image::new(Falcon::Fecs, &vec![1; CODE_WORDS_MAX + 1], &[]).is_err());
    }

    #[test]
    fn set_has_one_image_for_each_falcon() {
        let all = || Falcon::ALL.map(Image::stand_in).to_vec();
        assert_eq!(Set::new(all()).unwrap().image(Falcon::Copy1), &Image::stand_in(Falcon::Copy1));
        assert!(Set::new(all()[1..].to_vec()).is_none());
        let mut twice = all();
        twice[0] = Image::stand_in(Falcon::Gpccs);
        assert!(Set::new(twice).is_none());
    }
}
