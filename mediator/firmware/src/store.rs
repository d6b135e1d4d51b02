//! A folder of candidate and approved images.
//!
//! Each image is a file named after its digest. The file `approved` has one line per falcon, with the digest of the
//! approved image. Files are replaced atomically, by renaming a temporary file. The daemon reads the folder and adds
//! candidates. `mediatorctl` performs all other operations, and does not need the daemon.

use crate::image::{Digest, FILE_BYTES_MAX, Image, ImageError, Set};
use nvspec::falcon::Falcon;
use std::collections::BTreeMap;
use std::io::{ErrorKind, Read, Write};
use std::path::{Path, PathBuf};

/// Maximum number of unapproved images, which are limited because guests determine their contents.
const CANDIDATES_MAX: usize = 32;
/// Suffix of image file names.
const SUFFIX: &str = ".falcon";
/// Name of the file that lists the approved digests.
const APPROVED: &str = "approved";
/// Maximum size of the file [`APPROVED`] in bytes.
const APPROVED_BYTES_MAX: u64 = 4096;

/// Reason why a store operation failed.
#[derive(Debug, thiserror::Error)]
pub enum StoreError {
    /// A file or the folder could not be accessed.
    #[error("{}: {error}; check that it exists and that this user has access to it", path.display())]
    File {
        /// Path of the file or the folder.
        path: PathBuf,
        /// I/O error.
        error: std::io::Error,
    },
    /// A file is not a valid image.
    #[error("{}: {error}", path.display())]
    Image {
        /// Path of the file.
        path: PathBuf,
        /// Reason why the file is invalid.
        error: ImageError,
    },
    /// A file's name does not match the digest of its contents.
    #[error("{}: the file was modified: its digest is {digest}; remove it", path.display())]
    Changed {
        /// Path of the file.
        path: PathBuf,
        /// Digest of the file's contents.
        digest: Digest,
    },
    /// A digest prefix does not identify exactly one image.
    #[error("{found} images have a digest that begins with `{prefix}`; see `mediatorctl card firmware list`")]
    Which {
        /// The requested prefix.
        prefix: String,
        /// Number of matching images.
        found: usize,
    },
    /// The store contains the maximum number of candidates.
    #[error(
        "there are already {CANDIDATES_MAX} unapproved images; remove some with `mediatorctl card firmware remove`"
    )]
    Full,
}

/// No firmware is approved for these falcons.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "no firmware is approved for {}; approve some of `mediatorctl card firmware list` with `mediatorctl card firmware approve`, \
     or import some (a guest with the stock driver provides it, also on a card of kind \"simgpu\")",
    .0.iter().map(|falcon| falcon.name()).collect::<Vec<_>>().join(", ")
)]
pub struct Missing(pub Vec<Falcon>);

/// An image in a store.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Entry {
    /// Digest of the image.
    pub digest: Digest,
    /// Falcon that executes the image.
    pub falcon: Falcon,
    /// Code length in words.
    pub code_words: usize,
    /// Data length in words.
    pub data_words: usize,
    /// True if the image is approved for its falcon.
    pub approved: bool,
}

/// A folder of images.
#[derive(Clone, Debug)]
pub struct Store(PathBuf);

impl Store {
    /// Returns the store of the daemon whose state folder is `state_dir`. The store's folder is created on the first
    /// write.
    #[must_use]
    pub fn within(state_dir: &Path) -> Self {
        Self(state_dir.join("firmware"))
    }

    /// Returns all images, ordered by falcon. Logs and skips invalid files.
    ///
    /// # Errors
    /// Returns [`StoreError::File`] if the folder cannot be read.
    pub fn list(&self) -> Result<Vec<Entry>, StoreError> {
        let approved = self.approvals()?;
        let mut entries = Vec::new();
        for path in self.files()? {
            match self.read(&path) {
                Ok(image) => {
                    let (falcon, digest) = (image.falcon(), image.digest());
                    let approved = approved.get(&falcon).is_some_and(|name| *name == digest.to_string());
                    let (code_words, data_words) = (image.code().len(), image.data().len());
                    entries.push(Entry { digest, falcon, code_words, data_words, approved });
                }
                Err(error) => tracing::warn!(%error, "skipping an invalid firmware image"),
            }
        }
        entries.sort_by_key(|entry| (entry.falcon, entry.digest));
        Ok(entries)
    }

    /// Adds a candidate image. Returns true if the image is new.
    ///
    /// # Errors
    /// Returns [`StoreError::Full`] if the store contains the maximum number of candidates, or [`StoreError::File`] if
    /// a file cannot be accessed.
    pub fn add(&self, image: &Image) -> Result<bool, StoreError> {
        let name = format!("{}{SUFFIX}", image.digest());
        let files = self.files()?;
        if files.iter().any(|path| path.file_name().is_some_and(|of| of.to_str() == Some(&name))) {
            return Ok(false);
        }
        if files.len().saturating_sub(self.approvals()?.len()) >= CANDIDATES_MAX {
            return Err(StoreError::Full);
        }
        self.write(&name, &image.to_bytes())?;
        Ok(true)
    }

    /// Adds an image file as a candidate.
    ///
    /// # Errors
    /// Returns a [`StoreError`] if the image cannot be added.
    pub fn import(&self, path: &Path) -> Result<Digest, StoreError> {
        let image = load(path)?;
        self.add(&image)?;
        Ok(image.digest())
    }

    /// Approves the image whose digest starts with `prefix` for its falcon. The approval affects only cards that are
    /// started afterwards.
    ///
    /// # Errors
    /// Returns a [`StoreError`] if the image cannot be approved.
    pub fn approve(&self, prefix: &str) -> Result<Entry, StoreError> {
        let mut entry = self.find(prefix)?;
        let mut approved = self.approvals()?;
        approved.insert(entry.falcon, entry.digest.to_string());
        self.write_approvals(&approved)?;
        entry.approved = true;
        Ok(entry)
    }

    /// Removes the image whose digest starts with `prefix`, and revokes its approval. If a guest provides the image
    /// again, it is a candidate.
    ///
    /// # Errors
    /// Returns a [`StoreError`] if the image cannot be removed.
    pub fn remove(&self, prefix: &str) -> Result<Entry, StoreError> {
        let entry = self.find(prefix)?;
        if entry.approved {
            let mut approved = self.approvals()?;
            approved.remove(&entry.falcon);
            self.write_approvals(&approved)?;
        }
        let path = self.0.join(format!("{}{SUFFIX}", entry.digest));
        std::fs::remove_file(&path).map_err(|error| StoreError::File { path, error })?;
        Ok(entry)
    }

    /// Loads the approved images.
    ///
    /// # Errors
    /// Returns a [`StoreError`] if the images cannot be loaded. The inner error is [`Missing`] if a falcon has no
    /// approved image.
    pub fn approved(&self) -> Result<Result<Set, Missing>, StoreError> {
        let approved = self.approvals()?;
        let mut images = Vec::new();
        for digest in approved.values() {
            let path = self.0.join(format!("{digest}{SUFFIX}"));
            if path.exists() {
                images.push(self.read(&path)?);
            }
        }
        let has = |falcon: &Falcon| images.iter().any(|image| image.falcon() == *falcon);
        let missing: Vec<Falcon> = Falcon::ALL.into_iter().filter(|falcon| !has(falcon)).collect();
        Ok(Set::new(images).ok_or(Missing(missing)))
    }

    fn find(&self, prefix: &str) -> Result<Entry, StoreError> {
        let mut found: Vec<Entry> = self.list()?;
        found.retain(|entry| entry.digest.to_string().starts_with(prefix));
        match (found.pop(), found.len()) {
            (Some(entry), 0) => Ok(entry),
            (last, others) => {
                Err(StoreError::Which { prefix: prefix.to_owned(), found: others + usize::from(last.is_some()) })
            }
        }
    }

    /// Reads the approved digest of each falcon. Ignores invalid lines.
    fn approvals(&self) -> Result<BTreeMap<Falcon, String>, StoreError> {
        let path = self.0.join(APPROVED);
        let text = match read_bounded(&path, APPROVED_BYTES_MAX) {
            Ok(bytes) => String::from_utf8_lossy(&bytes).into_owned(),
            Err(error) if error.kind() == ErrorKind::NotFound => return Ok(BTreeMap::new()),
            Err(error) => return Err(StoreError::File { path, error }),
        };
        let line = |line: &str| {
            let (name, digest) = line.split_once(' ')?;
            let falcon = Falcon::ALL.into_iter().find(|falcon| falcon.name() == name)?;
            let plain = digest.len() == 64 && digest.chars().all(|c| c.is_ascii_hexdigit());
            plain.then(|| (falcon, digest.to_owned()))
        };
        Ok(text.lines().filter_map(line).collect())
    }

    fn write_approvals(&self, approved: &BTreeMap<Falcon, String>) -> Result<(), StoreError> {
        let lines: String = approved.iter().map(|(falcon, digest)| format!("{falcon} {digest}\n")).collect();
        self.write(APPROVED, lines.as_bytes())
    }

    fn files(&self) -> Result<Vec<PathBuf>, StoreError> {
        let failed = |error| StoreError::File { path: self.0.clone(), error };
        let entries = match std::fs::read_dir(&self.0) {
            Ok(entries) => entries,
            Err(error) if error.kind() == ErrorKind::NotFound => return Ok(Vec::new()),
            Err(error) => return Err(failed(error)),
        };
        let mut files = Vec::new();
        for entry in entries {
            let path = entry.map_err(failed)?.path();
            if path.file_name().is_some_and(|name| name.to_string_lossy().ends_with(SUFFIX)) {
                files.push(path);
            }
        }
        Ok(files)
    }

    fn read(&self, path: &Path) -> Result<Image, StoreError> {
        let image = load(path)?;
        let digest = image.digest();
        if path.file_stem().is_some_and(|stem| stem.to_str() == Some(&digest.to_string())) {
            Ok(image)
        } else {
            Err(StoreError::Changed { path: path.to_owned(), digest })
        }
    }

    fn write(&self, name: &str, bytes: &[u8]) -> Result<(), StoreError> {
        let path = self.0.join(name);
        let write = || {
            std::fs::create_dir_all(&self.0)?;
            let mut file = tempfile::NamedTempFile::new_in(&self.0)?;
            file.write_all(bytes)?;
            file.as_file().sync_all()?;
            file.persist(&path)?;
            Ok(())
        };
        write().map_err(|error| StoreError::File { path: path.clone(), error })
    }
}

fn load(path: &Path) -> Result<Image, StoreError> {
    let bytes =
        read_bounded(path, FILE_BYTES_MAX).map_err(|error| StoreError::File { path: path.to_owned(), error })?;
    Image::from_bytes(&bytes).map_err(|error| StoreError::Image { path: path.to_owned(), error })
}

/// Reads at most `most` + 1 bytes of a file.
fn read_bounded(path: &Path, most: u64) -> std::io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    std::fs::File::open(path)?.take(most + 1).read_to_end(&mut bytes)?;
    Ok(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn store() -> (tempfile::TempDir, Store) {
        let folder = tempfile::tempdir().unwrap();
        let store = Store::within(folder.path());
        (folder, store)
    }

    fn numbered(number: u32) -> Image {
        Image::new(Falcon::Fecs, &[number, 1], &[]).unwrap()
    }

    #[test]
    fn firmware_store_gives_card_only_approved_images() {
        let (_folder, store) = store();
        assert_eq!(store.approved().unwrap().unwrap_err(), Missing(Falcon::ALL.to_vec()));
        for image in Falcon::ALL.map(Image::stand_in) {
            assert!(store.add(&image).unwrap() && !store.add(&image).unwrap());
            assert!(store.approved().unwrap().is_err());
            store.approve(&image.digest().to_string()[..12]).unwrap();
        }
        let set = store.approved().unwrap().unwrap();
        assert_eq!(set.image(Falcon::Gpccs), &Image::stand_in(Falcon::Gpccs));
        // A new approval replaces the previous one. After its image has been removed, the falcon has no approved image.
        store.add(&numbered(7)).unwrap();
        store.approve(&numbered(7).digest().to_string()).unwrap();
        assert_eq!(store.approved().unwrap().unwrap().image(Falcon::Fecs), &numbered(7));
        let approved = |entries: &[Entry]| entries.iter().filter(|entry| entry.approved).count();
        assert_eq!((store.list().unwrap().len(), approved(&store.list().unwrap())), (5, 4));
        store.remove(&numbered(7).digest().to_string()).unwrap();
        let missing = store.approved().unwrap().unwrap_err();
        assert!(missing.to_string().contains("for fecs;"), "{missing}");
        // A guest that provides the removed image again does not restore its approval.
        assert!(store.add(&numbered(7)).unwrap());
        assert!(store.approved().unwrap().is_err());
        assert_eq!(approved(&store.list().unwrap()), 3);
    }

    #[test]
    fn image_that_was_changed_runs_nowhere() {
        let (folder, store) = store();
        let image = numbered(1);
        store.add(&image).unwrap();
        store.approve(&image.digest().to_string()).unwrap();
        let path = folder.path().join(format!("firmware/{}{SUFFIX}", image.digest()));
        std::fs::write(&path, numbered(2).to_bytes()).unwrap();
        assert!(matches!(store.approved(), Err(StoreError::Changed { .. })));
        assert_eq!(store.list().unwrap(), []);
    }

    #[test]
    fn candidates_are_bounded_and_names_must_be_one() {
        let (folder, store) = store();
        for number in 0..CANDIDATES_MAX as u32 {
            assert!(store.add(&numbered(number)).unwrap());
        }
        assert!(matches!(store.add(&numbered(99)), Err(StoreError::Full)));
        assert!(matches!(store.approve(""), Err(StoreError::Which { found: CANDIDATES_MAX, .. })));
        assert!(matches!(store.approve("xyz"), Err(StoreError::Which { found: 0, .. })));
        // Approved images do not count as candidates.
        store.approve(&numbered(3).digest().to_string()).unwrap();
        assert!(store.add(&numbered(99)).unwrap());
        let file = folder.path().join("large");
        std::fs::write(&file, vec![0; FILE_BYTES_MAX as usize + 1]).unwrap();
        assert!(matches!(store.import(&file), Err(StoreError::Image { error: ImageError::Form, .. })));
        assert!(store.import(Path::new("/nowhere")).unwrap_err().to_string().starts_with("/nowhere: "));
    }
}
