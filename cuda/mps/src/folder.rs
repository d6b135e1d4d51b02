//! The folders of the groups' daemons.

use std::path::{Path, PathBuf};

/// Maximum length in bytes of a group name that is used as a folder name. Socket paths have a maximum length.
const MAX_FOLDER_NAME: usize = 24;

/// Returns the folder of a group's server. It has the group's name if the name is short and safe in a path.
#[must_use]
pub fn group_folder(folder: &Path, group: &str) -> PathBuf {
    let is_plain = |c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | '_');
    if group.len() <= MAX_FOLDER_NAME && group.chars().all(is_plain) {
        return folder.join(group);
    }
    // The name contains a 64-bit FNV-1a hash, and a dot, so that it differs from the names of other groups' folders.
    let hash = group
        .bytes()
        .fold(0xcbf2_9ce4_8422_2325_u64, |hash, byte| (hash ^ u64::from(byte)).wrapping_mul(0x100_0000_01b3));
    folder.join(format!(".{hash:016x}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn groups_have_folders_of_their_own_inside_the_cards_folder() {
        let of = |group: &str| group_folder(Path::new("/run/c.mps"), group);
        assert_eq!(of("decoders"), Path::new("/run/c.mps/decoders"));
        for group in ["..", ".", "a/b", "ü", &"x".repeat(64)] {
            let folder = of(group);
            assert_eq!(folder.parent(), Some(Path::new("/run/c.mps")), "{group}");
            assert_eq!(folder.file_name().map(std::ffi::OsStr::len), Some(17), "{group}");
        }
        assert_ne!(of("a/b"), of("a/c"));
    }
}
