//! Writer for the `newc` cpio format, which the kernel unpacks as its initramfs.

/// File type bits of a mode.
const FOLDER: u32 = 0o040_000;
const FILE: u32 = 0o100_000;
const LINK: u32 = 0o120_000;
const CHARACTER_DEVICE: u32 = 0o020_000;

/// An archive that is being written.
#[derive(Default)]
pub struct Archive {
    bytes: Vec<u8>,
    inode: u32,
}

impl Archive {
    /// Adds a folder that everybody may read; `name` has no leading slash.
    pub fn folder(&mut self, name: &str) {
        self.folder_with(name, 0o755);
    }

    /// Adds a folder with permission bits `mode`.
    pub fn folder_with(&mut self, name: &str, mode: u32) {
        self.entry(name, FOLDER | mode, (0, 0), &[]);
    }

    /// Adds a symbolic link to `target`.
    pub fn link(&mut self, name: &str, target: &str) {
        self.entry(name, LINK | 0o777, (0, 0), target.as_bytes());
    }

    /// Adds a file with permission bits `mode`.
    pub fn file(&mut self, name: &str, mode: u32, contents: &[u8]) {
        self.entry(name, FILE | mode, (0, 0), contents);
    }

    /// Adds a character device node.
    pub fn device(&mut self, name: &str, mode: u32, major: u32, minor: u32) {
        self.entry(name, CHARACTER_DEVICE | mode, (major, minor), &[]);
    }

    /// Ends the archive.
    pub fn finish(mut self) -> Vec<u8> {
        self.inode = 0;
        self.entry("TRAILER!!!", 0, (0, 0), &[]);
        self.bytes
    }

    fn entry(&mut self, name: &str, mode: u32, (major, minor): (u32, u32), contents: &[u8]) {
        let size = u32::try_from(contents.len()).expect("a file of an initramfs is smaller than 4 GiB");
        let name_size = u32::try_from(name.len() + 1).expect("names are short");
        self.inode += 1;
        // Magic, then: inode, mode, uid, gid, links, mtime, size, device (2), rdevice (2), name size, checksum.
        self.bytes.extend_from_slice(b"070701");
        for field in [self.inode, mode, 0, 0, 1, 0, size, 0, 0, major, minor, name_size, 0] {
            self.bytes.extend_from_slice(format!("{field:08x}").as_bytes());
        }
        self.bytes.extend_from_slice(name.as_bytes());
        self.bytes.push(0);
        self.pad();
        self.bytes.extend_from_slice(contents);
        self.pad();
    }

    fn pad(&mut self) {
        self.bytes.resize(self.bytes.len().next_multiple_of(4), 0);
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
    fn folders_and_links_have_their_type_and_rights() {
        let mut archive = Archive::default();
        archive.folder_with("tmp", 0o1777);
        archive.link("bin", "usr/bin");
        let bytes = archive.finish();
        assert_eq!(&bytes[14..22], b"000043ff");
        // The first entry takes 110 bytes and its name, filled up to 116.
        let link = &bytes[116..];
        assert_eq!((&link[14..22], &link[54..62]), (&b"0000a1ff"[..], &b"00000007"[..]));
        assert_eq!(&link[110..124], b"bin\0\0\0usr/bin\0");
    }
}
