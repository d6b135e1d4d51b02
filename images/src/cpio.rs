//! Writes archives in the `newc` cpio format, which the kernel unpacks as its initramfs. Also unpacks them into
//! folders.

use std::fs;
use std::io::{self, Read};
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::{Component, Path};

use ::cpio::newc::{Builder, Reader, trailer};
use anyhow::{Context, Result, bail, ensure};

/// Mode bits of a folder.
const FOLDER: u32 = 0o040_000;
/// Mode bits of a regular file.
const FILE: u32 = 0o100_000;
/// Mode bits of a symbolic link.
const LINK: u32 = 0o120_000;
/// Mode bits of a character device.
const CHARACTER_DEVICE: u32 = 0o020_000;

/// An archive under construction.
#[derive(Default)]
pub struct Archive {
    bytes: Vec<u8>,
    inode: u32,
}

impl Archive {
    /// Adds a folder that all users can read. `name` has no leading slash.
    pub fn folder(&mut self, name: &str) {
        self.folder_with(name, 0o755);
    }

    /// Adds a folder with permission bits `mode`.
    pub fn folder_with(&mut self, name: &str, mode: u32) {
        self.entry(name, FOLDER | mode, 0, 0, &[]);
    }

    /// Adds a symbolic link to `target`.
    pub fn link(&mut self, name: &str, target: &str) {
        self.entry(name, LINK | 0o777, 0, 0, target.as_bytes());
    }

    /// Adds a file with permission bits `mode`.
    pub fn file(&mut self, name: &str, mode: u32, contents: &[u8]) {
        self.entry(name, FILE | mode, 0, 0, contents);
    }

    /// Adds a character device node.
    pub fn device(&mut self, name: &str, mode: u32, major: u32, minor: u32) {
        self.entry(name, CHARACTER_DEVICE | mode, major, minor, &[]);
    }

    /// Finishes the archive and returns its bytes.
    pub fn finish(self) -> Vec<u8> {
        trailer(self.bytes).expect("writing to a vector cannot fail")
    }

    fn entry(&mut self, name: &str, mode: u32, major: u32, minor: u32, contents: &[u8]) {
        let size = u32::try_from(contents.len()).expect("initramfs files are smaller than 4 GiB");
        self.inode += 1;
        let entry = Builder::new(name).ino(self.inode).mode(mode).rdev_major(major).rdev_minor(minor);
        let mut writer = entry.write(&mut self.bytes, size);
        io::Write::write_all(&mut writer, contents).expect("writing to a vector cannot fail");
        writer.finish().expect("writing to a vector cannot fail");
    }
}

/// Unpacks an archive into a folder. Replaces existing files, as the kernel does for a second archive, and skips device
/// nodes.
///
/// # Errors
/// Returns an error if an entry is malformed, has an unsupported type, or is outside the folder.
pub fn unpack(archive: &[u8], folder: &Path) -> Result<()> {
    let folder = folder.canonicalize().with_context(|| format!("the folder {}", folder.display()))?;
    let mut left = archive;
    loop {
        let at = archive.len() - left.len();
        let mut reader = Reader::new(left).with_context(|| format!("no valid entry at byte {at} of the archive"))?;
        if reader.entry().is_trailer() {
            return Ok(());
        }
        let (name, mode) = (reader.entry().name().to_owned(), reader.entry().mode());
        let entry = Entry { name: &name, mode, contents: contents(&mut reader)? };
        entry.unpack(&folder).with_context(|| format!("the archive's entry {name}"))?;
        left = reader.finish().context("the archive is truncated")?;
    }
}

/// Reads the contents of an entry.
fn contents(reader: &mut Reader<&[u8]>) -> Result<Vec<u8>> {
    let size = reader.entry().file_size() as usize;
    let mut contents = Vec::new();
    reader.read_to_end(&mut contents).context("the archive is truncated")?;
    ensure!(contents.len() == size, "the archive is truncated");
    Ok(contents)
}

/// One entry of an archive that is being read.
struct Entry<'a> {
    name: &'a str,
    mode: u32,
    contents: Vec<u8>,
}

impl Entry<'_> {
    fn unpack(&self, folder: &Path) -> Result<()> {
        let name = Path::new(self.name);
        ensure!(name.components().all(|part| matches!(part, Component::Normal(_))), "it is outside the folder");
        let path = folder.join(name);
        // A link from an earlier entry may point outside the folder.
        let parent = path.parent().context("it has no name")?.canonicalize()?;
        ensure!(parent.starts_with(folder), "it is outside the folder");
        match self.mode & 0o170_000 {
            FOLDER => {
                if !path.is_dir() {
                    fs::create_dir_all(&path)?;
                }
            }
            FILE => {
                remove(&path)?;
                fs::write(&path, &self.contents)?;
            }
            LINK => {
                remove(&path)?;
                return Ok(symlink(std::str::from_utf8(&self.contents)?, &path)?);
            }
            CHARACTER_DEVICE => return Ok(()),
            kind => bail!("it has the unsupported type {kind:o}"),
        }
        Ok(fs::set_permissions(&path, fs::Permissions::from_mode(self.mode & 0o7777))?)
    }
}

/// Removes an existing file, link or empty folder that an entry replaces.
fn remove(path: &Path) -> Result<()> {
    match fs::symlink_metadata(path) {
        Ok(there) if there.is_dir() => Ok(fs::remove_dir(path)?),
        Ok(_) => Ok(fs::remove_file(path)?),
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(()),
        Err(error) => Err(error.into()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_entry_is_laid_out_as_newc() {
        let mut archive = Archive::default();
        archive.file("init", 0o755, b"hello");
        let bytes = archive.finish();
        assert_eq!(&bytes[..14], b"07070100000001");
        assert_eq!(&bytes[14..22], b"000081ed");
        assert_eq!(&bytes[54..62], b"00000005");
        assert_eq!(&bytes[94..102], b"00000005");
        assert_eq!(&bytes[110..115], b"init\0");
        assert_eq!(&bytes[116..124], b"hello\0\0\0");
        assert_eq!(&bytes[124..130], b"070701");
        assert_eq!(bytes.len() % 4, 0);
        assert!(bytes.windows(11).any(|w| w == b"TRAILER!!!\0"));
    }

    #[test]
    fn packed_archives_unpack_with_contents_and_modes() {
        let (mut first, mut second) = (Archive::default(), Archive::default());
        first.folder_with("tmp", 0o1777);
        first.folder("usr");
        first.folder("usr/bin");
        first.link("bin", "usr/bin");
        first.file("usr/bin/sh", 0o755, b"one");
        first.device("null", 0o666, 1, 3);
        first.folder("run");
        first.link("run", "/nowhere");
        // The second archive writes through a link of the first archive, and replaces one of its files.
        second.file("bin/ls", 0o644, b"");
        second.file("usr/bin/sh", 0o700, b"another");
        let folder = tempfile::tempdir().unwrap();
        unpack(&first.finish(), folder.path()).unwrap();
        unpack(&second.finish(), folder.path()).unwrap();
        let mode = |name: &str| fs::metadata(folder.path().join(name)).unwrap().permissions().mode() & 0o7777;
        assert_eq!((mode("tmp"), mode("usr/bin/sh"), mode("usr/bin/ls")), (0o1777, 0o700, 0o644));
        assert_eq!(fs::read(folder.path().join("bin/sh")).unwrap(), b"another");
        assert!(!folder.path().join("null").exists());
    }

    #[test]
    fn invalid_archive_is_rejected() {
        let folder = tempfile::tempdir().unwrap();
        let mut outside = Archive::default();
        outside.file("../x", 0o644, b"");
        let outside = outside.finish();
        let mut linked = Archive::default();
        linked.link("etc", "/etc");
        linked.file("etc/never-written-by-this-test", 0o644, b"");
        let linked = linked.finish();
        let mut good = Archive::default();
        good.file("a", 0o644, b"some bytes");
        let good = good.finish();
        for (bytes, told) in [
            (&outside[..], "outside the folder"),
            (&linked, "outside the folder"),
            (&good[..120], "truncated"),
            (&[&good[..116], &good[120..]].concat(), "entry"),
            (b"", "no valid entry at byte 0"),
        ] {
            let error = format!("{:#}", unpack(bytes, folder.path()).unwrap_err());
            assert!(error.contains(told), "{error}");
        }
    }

    #[test]
    fn folders_and_links_have_their_type_and_rights() {
        let mut archive = Archive::default();
        archive.folder_with("tmp", 0o1777);
        archive.link("bin", "usr/bin");
        let bytes = archive.finish();
        assert_eq!(&bytes[14..22], b"000043ff");
        // The first entry occupies 110 bytes plus its name, padded to 116 bytes.
        let link = &bytes[116..];
        assert_eq!((&link[14..22], &link[54..62]), (&b"0000a1ff"[..], &b"00000007"[..]));
        assert_eq!(&link[110..124], b"bin\0\0\0usr/bin\0");
    }
}
