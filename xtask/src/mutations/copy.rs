//! A copy of the sources in which mistakes are made.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail};

use crate::run::{root, target};

/// Makes the copy match the files of the working tree that git does not ignore, with the given texts for `changed`
/// files. Returns the copy's folder. Does not write unchanged files, so that a second run compiles only the changes.
/// Also repairs files that a killed run has written only partially.
pub fn bring_all(changed: &[(PathBuf, String)]) -> Result<PathBuf> {
    let copy = target().join("mutations");
    let listed = Command::new("git")
        .args(["ls-files", "-z", "--cached", "--others", "--exclude-standard"])
        .current_dir(root())
        .output()
        .context("git ls-files")?;
    if !listed.status.success() {
        bail!("git ls-files: {}", String::from_utf8_lossy(&listed.stderr));
    }
    let mut names = BTreeSet::new();
    for name in listed.stdout.split(|byte| *byte == 0).filter(|name| !name.is_empty()) {
        let name = Path::new(std::str::from_utf8(name).context("a file name that is not UTF-8")?);
        let (from, to) = (root().join(name), copy.join(name));
        // The list also contains deleted files whose deletion is not staged.
        if from.is_file() {
            let changed = changed.iter().find(|(file, _)| file == name);
            let text = || changed.map_or_else(|| fs::read(&from), |(_, text)| Ok(text.clone().into_bytes()));
            text()
                .and_then(|text| bring(&text, &from, &to))
                .with_context(|| format!("cannot copy {}", from.display()))?;
            names.insert(name.to_owned());
        }
    }
    remove_others(&copy, &copy, &names)?;
    Ok(copy)
}

/// Writes a file with the permissions of `like`, unless the file already contains `text`.
fn bring(text: &[u8], like: &Path, to: &Path) -> std::io::Result<()> {
    if fs::read(to).is_ok_and(|copied| copied == text) {
        return Ok(());
    }
    to.parent().map_or(Ok(()), fs::create_dir_all)?;
    fs::write(to, text)?;
    fs::set_permissions(to, fs::metadata(like)?.permissions())
}

/// Removes the files in a folder of the copy that are not in `names`.
fn remove_others(copy: &Path, folder: &Path, names: &BTreeSet<PathBuf>) -> Result<()> {
    for entry in fs::read_dir(folder).with_context(|| format!("cannot read {}", folder.display()))? {
        let path = entry?.path();
        if path.is_dir() {
            remove_others(copy, &path, names)?;
        } else if path.strip_prefix(copy).is_ok_and(|name| !names.contains(name)) {
            fs::remove_file(&path).with_context(|| format!("cannot remove {}", path.display()))?;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn identical_copy_is_left_alone_and_different_one_is_replaced() {
        let folder = tempfile::tempdir().unwrap();
        let (from, copy) = (folder.path().join("from"), folder.path().join("copy"));
        let to = copy.join("a/b.rs");
        fs::write(&from, "good").unwrap();
        bring(b"good", &from, &to).unwrap();
        let before = fs::metadata(&to).unwrap().modified().unwrap();
        bring(b"good", &from, &to).unwrap();
        assert_eq!(fs::metadata(&to).unwrap().modified().unwrap(), before);
        fs::write(&to, "a mistake that a killed run has left").unwrap();
        fs::write(copy.join("gone.rs"), "").unwrap();
        bring(b"good", &from, &to).unwrap();
        remove_others(&copy, &copy, &BTreeSet::from(["a/b.rs".into()])).unwrap();
        assert_eq!(fs::read_to_string(&to).unwrap(), "good");
        assert!(!copy.join("gone.rs").exists());
    }
}
