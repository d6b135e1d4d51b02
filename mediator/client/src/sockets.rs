//! Lets a privileged program transfer the daemon's sockets and folders to a user.
//!
//! The daemon has fewer privileges than such a program, and owns the folder, so it may replace files in the folder at
//! any time. Therefore, no operation uses a path: each path component is opened without following links, the file is
//! opened once, and only the opened file is checked and changed.

use std::fs::Permissions;
use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::fs::PermissionsExt;
use std::path::{Component, Path};

use rustix::fs::{AtFlags, FileType, Gid, Mode, OFlags, Stat, Uid};

/// Flags that open a path's last component itself, without following a link and without side effects on devices or
/// pipes.
const NAMED: OFlags = OFlags::PATH.union(OFlags::NOFOLLOW).union(OFlags::CLOEXEC);

fn refused(what: String) -> io::Error {
    io::Error::new(io::ErrorKind::PermissionDenied, what)
}

fn named(folder: impl AsFd, name: &Path) -> io::Result<(OwnedFd, Stat)> {
    let file = rustix::fs::openat(folder, name, NAMED, Mode::empty())?;
    let stat = rustix::fs::fstat(&file)?;
    Ok((file, stat))
}

fn is(stat: &Stat, kind: FileType) -> bool {
    FileType::from_raw_mode(stat.st_mode) == kind
}

/// Opens the file at `path`, and its folder. `within` is a folder that the operator controls, so its path may contain
/// links.
fn opened(within: &Path, path: &Path) -> io::Result<((OwnedFd, Stat), (OwnedFd, Stat))> {
    let beneath = path.strip_prefix(within).ok().filter(|beneath| !beneath.as_os_str().is_empty());
    let beneath = beneath.ok_or_else(|| refused(format!("it is not in the folder {}", within.display())))?;
    let root = rustix::fs::open(within, OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty())?;
    let stat = rustix::fs::fstat(&root)?;
    let mut folder = (root, stat);
    let mut parts = beneath.components().peekable();
    while let Some(part) = parts.next() {
        let Component::Normal(name) = part else {
            return Err(refused(format!("it is not in the folder {}", within.display())));
        };
        let next = named(&folder.0, Path::new(name))?;
        if parts.peek().is_none() {
            return Ok((folder, next));
        }
        if !is(&next.1, FileType::Directory) {
            return Err(refused(format!("`{}` in its path is not a folder", name.display())));
        }
        folder = next;
    }
    Err(refused("it is not a file".to_owned()))
}

/// Transfers one of the daemon's sockets to a user. Afterwards, only this user can connect.
///
/// # Errors
/// Returns an error, and changes nothing, if the path is outside the folder `within`, is not a socket, contains a link,
/// or belongs neither to its folder's owner (the daemon's user) nor to user `uid`. Also returns an error if this
/// program lacks the permission.
pub fn give(within: &Path, socket: &Path, uid: u32) -> io::Result<()> {
    let ((_, folder), (file, stat)) = opened(within, socket)?;
    if !is(&stat, FileType::Socket) {
        return Err(refused("expected a socket".to_owned()));
    }
    if stat.st_uid != folder.st_uid && stat.st_uid != uid {
        return Err(refused(format!(
            "it belongs to user {}, expected the owner of its folder, user {}",
            stat.st_uid, folder.st_uid
        )));
    }
    // Set the mode first, so that no third user can ever connect. The descriptor's path refers to this file even if it
    // has been renamed.
    std::fs::set_permissions(format!("/proc/self/fd/{}", file.as_raw_fd()), Permissions::from_mode(0o600))?;
    Ok(rustix::fs::chownat(&file, "", Some(Uid::from_raw(uid)), None, AtFlags::EMPTY_PATH)?)
}

/// Creates a folder, unless it exists. Sets the folder's mode, and changes its owner to the owner of `like`. The daemon
/// can then create folders in it.
///
/// # Errors
/// Returns an error, and changes nothing, if the path is another kind of file, or if the folder belongs to a third
/// user.
pub fn folder(path: &Path, like: &Path, mode: u32) -> io::Result<()> {
    let owner = rustix::fs::stat(like)?;
    let (Some(parent), Some(name)) = (path.parent(), path.file_name()) else {
        return Err(refused("it has no parent folder".to_owned()));
    };
    std::fs::create_dir_all(parent)?;
    let parent = rustix::fs::open(parent, OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty())?;
    match rustix::fs::mkdirat(&parent, name, Mode::from_raw_mode(0o700)) {
        Ok(()) | Err(rustix::io::Errno::EXIST) => {}
        Err(error) => return Err(error.into()),
    }
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let folder = rustix::fs::openat(&parent, name, flags, Mode::empty())?;
    let stat = rustix::fs::fstat(&folder)?;
    if stat.st_uid != owner.st_uid {
        let own = rustix::process::geteuid().as_raw();
        if stat.st_uid != own {
            return Err(refused(format!("it belongs to user {}, expected user {}", stat.st_uid, owner.st_uid)));
        }
        rustix::fs::fchown(&folder, Some(Uid::from_raw(owner.st_uid)), Some(Gid::from_raw(owner.st_gid)))?;
    }
    if stat.st_mode & 0o7777 != mode {
        rustix::fs::fchmod(&folder, Mode::from_raw_mode(mode))?;
    }
    Ok(())
}

/// Removes a socket's folder from the folder `all`, with the sockets in it. A missing folder is not an error.
///
/// # Errors
/// Returns an error if the path is another kind of file, or if the folder contains other files, which are kept.
pub fn remove_folder(all: &Path, name: &str, cards: &[&str]) -> io::Result<()> {
    let missing = |error: &rustix::io::Errno| *error == rustix::io::Errno::NOENT;
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let is_name = |name: &str| Path::new(name).components().collect::<Vec<_>>() == [Component::Normal(name.as_ref())];
    if !is_name(name) || !cards.iter().all(|card| is_name(card)) {
        return Err(refused("it is not a name".to_owned()));
    }
    let opened = rustix::fs::open(all, flags, Mode::empty())
        .and_then(|all| Ok((rustix::fs::openat(&all, name, flags, Mode::empty())?, all)));
    let (folder, all) = match opened {
        Ok(opened) => opened,
        Err(error) if missing(&error) => return Ok(()),
        Err(error) => return Err(error.into()),
    };
    let of_cards = cards.iter().flat_map(|card| [format!("{card}.sock"), format!("{card}.new")]);
    for socket in ["cuda.sock", "cuda.new", "vgpu.sock"].map(str::to_owned).into_iter().chain(of_cards) {
        match rustix::fs::unlinkat(&folder, socket, AtFlags::empty()) {
            Err(error) if !missing(&error) => return Err(error.into()),
            _ => {}
        }
    }
    match rustix::fs::unlinkat(&all, name, AtFlags::REMOVEDIR) {
        Err(error) if !missing(&error) => Err(error.into()),
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::{MetadataExt, symlink};
    use std::os::unix::net::UnixListener;
    use std::sync::atomic::{AtomicBool, Ordering};

    use super::*;

    const OTHER_UID: u32 = 65_534;

    fn uid(path: &Path) -> u32 {
        fs::symlink_metadata(path).unwrap().uid()
    }

    /// Returns true for root, because only root can change the owner of files.
    fn is_root() -> bool {
        let root = rustix::process::geteuid().is_root();
        if !root {
            println!("skipped in part: this user cannot change the owner of files");
        }
        root
    }

    #[test]
    fn socket_is_given_to_user_with_exclusive_access() {
        let folder = tempfile::tempdir().unwrap();
        let own = folder.path().join("a");
        fs::create_dir(&own).unwrap();
        let socket = own.join("cuda.sock");
        let _listener = UnixListener::bind(&socket).unwrap();
        give(folder.path(), &socket, uid(folder.path())).unwrap();
        assert_eq!(fs::metadata(&socket).unwrap().mode() & 0o777, 0o600);
        if is_root() {
            give(folder.path(), &socket, OTHER_UID).unwrap();
            assert_eq!(uid(&socket), OTHER_UID);
            // Another process of the same job may repeat the call.
            give(folder.path(), &socket, OTHER_UID).unwrap();
        }
    }

    #[test]
    fn only_sockets_of_the_daemon_in_the_folder_are_given_away() {
        let (folder, other) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        let elsewhere = other.path().join("s.sock");
        let _listener = UnixListener::bind(&elsewhere).unwrap();
        fs::write(other.path().join("secret"), "").unwrap();
        fs::write(folder.path().join("file"), "").unwrap();
        fs::create_dir(folder.path().join("d")).unwrap();
        symlink(&elsewhere, folder.path().join("link.sock")).unwrap();
        symlink(other.path(), folder.path().join("linked")).unwrap();
        let at = |name: &str| folder.path().join(name);
        let up = format!("../{}/s.sock", other.path().file_name().unwrap().display());
        let cases = [
            elsewhere.clone(),
            at("file"),
            at("d"),
            at("link.sock"),
            at("linked/s.sock"),
            at("linked/secret"),
            at(&up),
            at("."),
            folder.path().to_owned(),
            at("file/x"),
        ];
        let before = fs::metadata(&elsewhere).unwrap();
        for path in cases {
            assert!(give(folder.path(), &path, OTHER_UID).is_err(), "{}", path.display());
        }
        let after = fs::metadata(&elsewhere).unwrap();
        assert_eq!((before.uid(), before.mode()), (after.uid(), after.mode()));
        if is_root() {
            // A third user has created a socket in the folder.
            let theirs = at("theirs.sock");
            let _listener = UnixListener::bind(&theirs).unwrap();
            std::os::unix::fs::chown(&theirs, Some(1234), None).unwrap();
            assert!(give(folder.path(), &theirs, OTHER_UID).unwrap_err().to_string().contains("belongs to user 1234"));
            assert_eq!(uid(&theirs), 1234);
        }
    }

    /// The folder's owner keeps replacing the socket with a link. The function must never change the link's target.
    #[test]
    fn socket_swapped_for_link_leaves_link_target_unchanged() {
        let (folder, other) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        let victim = other.path().join("victim");
        let _listener = UnixListener::bind(&victim).unwrap();
        fs::set_permissions(&victim, Permissions::from_mode(0o640)).unwrap();
        let socket = folder.path().join("s.sock");
        let _mine = UnixListener::bind(&socket).unwrap();
        symlink(&victim, folder.path().join("link")).unwrap();
        let over = AtomicBool::new(false);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                let (link, spare) = (folder.path().join("link"), folder.path().join("spare"));
                while !over.load(Ordering::Relaxed) {
                    fs::rename(&socket, &spare).unwrap();
                    fs::rename(&link, &socket).unwrap();
                    fs::rename(&socket, &link).unwrap();
                    fs::rename(&spare, &socket).unwrap();
                }
            });
            let given = (0..20_000).filter(|_| give(folder.path(), &socket, uid(other.path())).is_ok()).count();
            over.store(true, Ordering::Relaxed);
            println!("given {given} times");
        });
        assert_eq!(fs::metadata(&victim).unwrap().mode() & 0o777, 0o640);
    }

    #[test]
    fn a_folder_is_made_and_another_thing_in_its_place_is_refused() {
        let (folder, other) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        let claims = folder.path().join("claims");
        super::folder(&claims, folder.path(), 0o700).unwrap();
        super::folder(&claims, folder.path(), 0o700).unwrap();
        assert_eq!(fs::metadata(&claims).unwrap().mode() & 0o7777, 0o700);
        fs::set_permissions(other.path(), Permissions::from_mode(0o755)).unwrap();
        let linked = folder.path().join("linked");
        symlink(other.path(), &linked).unwrap();
        assert!(super::folder(&linked, folder.path(), 0o700).is_err());
        assert_eq!(fs::metadata(other.path()).unwrap().mode() & 0o777, 0o755);
        if is_root() {
            // The daemon runs as another user, which owns the folder. A folder of a third user is rejected.
            std::os::unix::fs::chown(folder.path(), Some(OTHER_UID), Some(OTHER_UID)).unwrap();
            let own = folder.path().join("own");
            super::folder(&own, folder.path(), 0o700).unwrap();
            assert_eq!(uid(&own), OTHER_UID);
            std::os::unix::fs::chown(&own, Some(1234), None).unwrap();
            assert!(
                super::folder(&own, folder.path(), 0o700).unwrap_err().to_string().contains("belongs to user 1234")
            );
        }
    }

    #[test]
    fn only_the_folder_of_a_socket_is_removed() {
        let (folder, other) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        let own = folder.path().join("k8s-u-0");
        fs::create_dir(&own).unwrap();
        drop(UnixListener::bind(own.join("cuda.sock")).unwrap());
        remove_folder(folder.path(), "k8s-u-0", &["a"]).unwrap();
        remove_folder(folder.path(), "k8s-u-0", &["a"]).unwrap();
        assert!(!own.exists());
        fs::write(other.path().join("cuda.sock"), "").unwrap();
        symlink(other.path(), &own).unwrap();
        assert!(remove_folder(folder.path(), "k8s-u-0", &["a"]).is_err());
        for bad in ["..", ".", "", "a/b", "/"] {
            assert!(remove_folder(folder.path(), bad, &[]).is_err(), "{bad}");
        }
        assert!(other.path().join("cuda.sock").exists());
        fs::remove_file(&own).unwrap();
        fs::create_dir(&own).unwrap();
        fs::write(own.join("notes"), "").unwrap();
        assert!(remove_folder(folder.path(), "k8s-u-0", &["a"]).is_err());
        assert!(own.join("notes").exists());
    }
}
