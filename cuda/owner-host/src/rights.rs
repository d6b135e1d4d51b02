//! Sockets with configurable access rights.

use cuda_protocol::{Link, LinkError};
use rustix::fs::{AtFlags, FileType, Gid, Mode, OFlags, Uid};
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};

/// Error returned if a socket cannot be created.
#[derive(Debug, thiserror::Error)]
#[error("cannot listen at {path}: {source}")]
pub struct ListenError {
    /// Path of the socket.
    pub path: PathBuf,
    /// Underlying error.
    pub source: LinkError,
}

/// Access rights of a socket. Unset rights keep the system's default.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Rights {
    /// Permission bits.
    pub mode: Option<u32>,
    /// User ID of the owner.
    pub uid: Option<u32>,
    /// Group ID.
    pub gid: Option<u32>,
}

/// Socket file that this owner has created.
#[derive(Debug)]
pub struct Bound {
    path: PathBuf,
    /// Device and inode of the file.
    id: (u64, u64),
}

impl Bound {
    fn from_path(path: &Path) -> io::Result<Self> {
        Ok(Self { path: path.to_owned(), id: id(path)? })
    }

    /// Returns the path of the file.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Removes the file, unless the next owner has replaced it: an owner whose daemon was killed may exit after the
    /// next owner has started.
    pub fn remove(&self) {
        if id(&self.path).is_ok_and(|id| id == self.id) {
            let _ = std::fs::remove_file(&self.path);
        }
    }
}

fn id(path: &Path) -> io::Result<(u64, u64)> {
    std::fs::symlink_metadata(path).map(|metadata| (metadata.dev(), metadata.ino()))
}

impl Rights {
    /// Listens at `path`, replacing an existing file. Processes cannot connect before the rights are set.
    ///
    /// # Errors
    /// Returns an error if the socket cannot be created, or its rights cannot be set.
    pub fn listen(&self, path: &Path) -> Result<(OwnedFd, Bound), ListenError> {
        let failed = |source| ListenError { path: path.to_owned(), source };
        let hidden = path.with_extension("new");
        let _ = std::fs::remove_file(&hidden);
        let listener = Link::listen(&hidden).map_err(failed)?;
        let bound = self.give(&hidden).and_then(|()| Bound::from_path(&hidden));
        let renamed = bound.and_then(|bound| std::fs::rename(&hidden, path).map(|()| bound));
        let bound = renamed.map_err(|error| {
            let _ = std::fs::remove_file(&hidden);
            failed(LinkError::Socket(error))
        })?;
        Ok((listener, Bound { path: path.to_owned(), ..bound }))
    }

    /// Sets the rights of the socket at `path`. Uses one descriptor for all steps, because another user with write
    /// access to the folder could replace the file between them.
    fn give(&self, path: &Path) -> io::Result<()> {
        let file = rustix::fs::open(path, OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC, Mode::empty())?;
        let there = rustix::fs::fstat(&file)?;
        let is_ours = there.st_uid == rustix::process::geteuid().as_raw();
        if FileType::from_raw_mode(there.st_mode) != FileType::Socket || !is_ours {
            return Err(io::Error::other("another file has replaced the socket"));
        }
        if self.uid.is_some() || self.gid.is_some() {
            let (uid, gid) = (self.uid.map(Uid::from_raw), self.gid.map(Gid::from_raw));
            rustix::fs::chownat(&file, "", uid, gid, AtFlags::EMPTY_PATH)?;
        }
        if let Some(mode) = self.mode {
            let own = format!("/proc/self/fd/{}", file.as_raw_fd());
            std::fs::set_permissions(own, std::fs::Permissions::from_mode(mode & 0o777))?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn replaced_socket_path_gets_no_rights() {
        let folder = tempfile::tempdir().expect("a folder");
        let (file, link) = (folder.path().join("file"), folder.path().join("link"));
        std::fs::write(&file, "theirs").expect("written");
        std::fs::set_permissions(&file, std::fs::Permissions::from_mode(0o600)).expect("set");
        let socket = folder.path().join("socket");
        let _listener = Link::listen(&socket).expect("listens");
        std::fs::set_permissions(&socket, std::fs::Permissions::from_mode(0o600)).expect("set");
        std::os::unix::fs::symlink(&socket, &link).expect("linked");
        for path in [&file, &link] {
            assert!(Rights { mode: Some(0o666), ..Rights::default() }.give(path).is_err());
        }
        for path in [&file, &socket] {
            assert_eq!(std::fs::metadata(path).expect("there").permissions().mode() & 0o777, 0o600);
        }
    }

    #[test]
    fn socket_has_its_mode_and_replaces_leftover_file() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("socket");
        std::fs::write(&path, "left").expect("written");
        let _listener = Rights { mode: Some(0o620), ..Rights::default() }.listen(&path).expect("listens");
        assert_eq!(std::fs::metadata(&path).expect("there").permissions().mode() & 0o777, 0o620);
        assert!(Link::connect(&path).is_ok());
        assert_eq!(std::fs::read_dir(folder.path()).expect("readable").count(), 1, "no other file is left");
    }
    #[test]
    fn an_owner_that_ends_late_leaves_the_socket_of_the_next() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("socket");
        let (_old, first) = Rights::default().listen(&path).expect("listens");
        let (_new, second) = Rights::default().listen(&path).expect("listens");
        first.remove();
        assert!(Link::connect(&path).is_ok(), "the next owner's socket still exists");
        second.remove();
        assert!(!path.exists());
    }
}
