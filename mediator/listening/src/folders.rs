//! Folders of sockets. A container mounts the folder of its socket, so that it finds the next daemon's socket there.
//! Therefore, such a folder must be exclusive to one tenant or VM.
//!
//! The daemon creates and removes each folder that is named after its tenant or VM (`config::own_folder`). Programs
//! with more privileges than the daemon must not access the folder.

use std::io;
use std::os::unix::fs::{FileTypeExt, symlink};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};

use config::{TENANTS, own_folder};
use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;

/// Mode of an exclusive folder: only the daemon may modify the folder. The mode of the socket in it controls
/// connections.
const MODE: Mode = Mode::from_raw_mode(0o755);

/// Reason why the folder for a tenant's or VM's socket cannot be created.
#[derive(Debug, thiserror::Error)]
#[error("`{name}`: socket: {what}")]
pub struct FolderError {
    name: String,
    what: String,
}

/// Creates the exclusive folder for a tenant's or VM's socket, if the socket's path has such a folder.
///
/// # Errors
/// Returns an error if the folder cannot be created or belongs to another user.
pub fn make(name: &str, socket: &Path, socket_dir: &Path) -> Result<(), FolderError> {
    let Some(own) = own_folder(name, socket, socket_dir) else { return Ok(()) };
    let failed = |what| FolderError { name: name.to_owned(), what };
    let all = socket_dir.join(TENANTS);
    let is_default = own.parent() == Some(&all);
    if is_default {
        ensure(&all, true).map_err(failed)?;
    }
    ensure(own, is_default).map_err(failed)?;
    if is_default {
        link_earlier(name, socket_dir);
    }
    Ok(())
}

/// Removes the exclusive folder of a tenant's or VM's socket, together with sockets that a killed process left there.
pub fn remove(name: &str, socket: &Path, socket_dir: &Path) {
    let Some(own) = own_folder(name, socket, socket_dir) else { return };
    let (earlier, target) = earlier(name, socket_dir);
    if std::fs::read_link(&earlier).is_ok_and(|to| to == target) {
        let _ = std::fs::remove_file(&earlier);
    }
    for path in [socket.to_owned(), socket.with_extension("new")] {
        if is_socket(&path) {
            let _ = std::fs::remove_file(&path);
        }
    }
    // Keep a folder that contains other files.
    let _ = std::fs::remove_dir(own);
}

/// Creates a folder, or checks an existing one. If `enforced` is true, also sets the mode of an existing folder.
fn ensure(folder: &Path, enforced: bool) -> Result<(), String> {
    let shown = folder.display();
    let made = match rustix::fs::mkdir(folder, MODE) {
        Ok(()) => true,
        Err(Errno::EXIST) => false,
        Err(error) => return Err(format!("the folder {shown} cannot be created: {error}")),
    };
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let opened = rustix::fs::open(folder, flags, Mode::empty());
    let opened = opened.map_err(|error| format!("{shown} cannot be used as a folder: {error}; remove it"))?;
    let there = rustix::fs::fstat(&opened).map_err(|error| format!("{shown}: {error}"))?;
    let user = rustix::process::geteuid().as_raw();
    if ![0, user].contains(&there.st_uid) {
        return Err(format!("the folder {shown} belongs to user {}, expected the daemon's; remove it", there.st_uid));
    }
    // The process's umask may have removed permissions.
    if made || (enforced && there.st_uid == user) {
        rustix::fs::fchmod(&opened, MODE).map_err(|error| format!("the mode of {shown} cannot be set: {error}"))?;
    }
    Ok(())
}

/// Returns the path that earlier versions used for a tenant's socket, and the relative path from there to the current
/// socket.
fn earlier(name: &str, socket_dir: &Path) -> (PathBuf, PathBuf) {
    (socket_dir.join(format!("{name}.cuda")), Path::new(TENANTS).join(name).join("cuda.sock"))
}

/// Creates a link at the path that earlier versions used for a tenant's socket, for programs that were started under
/// these versions.
fn link_earlier(name: &str, socket_dir: &Path) {
    let (earlier, target) = earlier(name, socket_dir);
    if is_socket(&earlier) {
        let dead =
            matches!(UnixStream::connect(&earlier), Err(error) if error.kind() == io::ErrorKind::ConnectionRefused);
        if !dead {
            return;
        }
        let _ = std::fs::remove_file(&earlier);
    }
    match symlink(&target, &earlier) {
        Err(error) if error.kind() != io::ErrorKind::AlreadyExists => {
            let path = earlier.display();
            tracing::warn!(tenant = name, %path, %error, "cannot create a link for programs of an earlier version");
        }
        _ => {}
    }
}

fn is_socket(path: &Path) -> bool {
    std::fs::symlink_metadata(path).is_ok_and(|there| there.file_type().is_socket())
}

/// Checks that other users cannot replace files in the folder of sockets. Warns if they can create files.
///
/// # Errors
/// Returns an error if other users can replace files in the folder, such as sockets of the daemon and of other users.
pub fn check(socket_dir: &Path) -> Result<(), String> {
    use std::os::unix::fs::MetadataExt;
    // A missing folder is reported when the first socket is created.
    let Ok(there) = std::fs::metadata(socket_dir) else { return Ok(()) };
    let shown = socket_dir.display();
    if there.mode() & 0o002 == 0 {
        return Ok(());
    }
    if there.mode() & 0o1000 == 0 {
        return Err(format!(
            "daemon.socket_dir: all users may replace files in {shown}; choose a folder that only the daemon's user can write, such \
             as /run/gpu-mediator"
        ));
    }
    tracing::warn!(
        folder = %shown,
        "daemon.socket_dir: all users may create files here, and block the sockets of tenants and VMs; choose a folder that only \
         the daemon's user can write"
    );
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::{MetadataExt, PermissionsExt};
    use std::os::unix::net::UnixListener;

    use super::*;

    fn mode(path: &Path) -> u32 {
        fs::symlink_metadata(path).unwrap().mode() & 0o7777
    }

    #[test]
    fn tenant_has_own_folder_and_old_socket_path_links_to_it() {
        let folder = tempfile::tempdir().unwrap();
        let socket = folder.path().join("tenants/a/cuda.sock");
        // A daemon of an earlier version left a socket.
        drop(UnixListener::bind(folder.path().join("a.cuda")).unwrap());
        make("a", &socket, folder.path()).unwrap();
        assert_eq!((mode(&folder.path().join("tenants")), mode(socket.parent().unwrap())), (0o755, 0o755));
        let _served = UnixListener::bind(&socket).unwrap();
        assert!(UnixStream::connect(folder.path().join("a.cuda")).is_ok());
        // The folder outlives the daemon, because a container still has it mounted.
        let before = fs::metadata(socket.parent().unwrap()).unwrap().ino();
        make("a", &socket, folder.path()).unwrap();
        assert_eq!(fs::metadata(socket.parent().unwrap()).unwrap().ino(), before);
        remove("a", &socket, folder.path());
        assert!(!socket.parent().unwrap().exists());
        assert!(fs::symlink_metadata(folder.path().join("a.cuda")).is_err());
    }

    #[test]
    fn folders_of_other_names_and_other_files_stay() {
        let folder = tempfile::tempdir().unwrap();
        let socket = folder.path().join("all/a.sock");
        make("a", &socket, folder.path()).unwrap();
        assert!(!folder.path().join("all").exists(), "a folder that others may use belongs to the operator");
        let own = folder.path().join("a/a.sock");
        make("a", &own, folder.path()).unwrap();
        fs::write(folder.path().join("a/notes"), "").unwrap();
        remove("a", &own, folder.path());
        assert!(folder.path().join("a/notes").exists());
        // The daemon's folder may have the same name as a VM.
        let all = folder.path().join("b");
        fs::create_dir(&all).unwrap();
        remove("b", &all.join("b.sock"), &all);
        assert!(all.exists());
        // An existing folder keeps its mode.
        fs::set_permissions(folder.path().join("a"), fs::Permissions::from_mode(0o700)).unwrap();
        make("a", &own, folder.path()).unwrap();
        assert_eq!(mode(&folder.path().join("a")), 0o700);
    }

    #[test]
    fn links_and_files_in_the_place_of_a_folder_are_refused() {
        let (folder, other) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        fs::create_dir(other.path().join("a")).unwrap();
        fs::set_permissions(other.path().join("a"), fs::Permissions::from_mode(0o700)).unwrap();
        symlink(other.path(), folder.path().join("tenants")).unwrap();
        let socket = folder.path().join("tenants/a/cuda.sock");
        let error = make("a", &socket, folder.path()).unwrap_err().to_string();
        assert!(error.contains("cannot be used as a folder"), "{error}");
        fs::remove_file(folder.path().join("tenants")).unwrap();
        fs::create_dir(folder.path().join("tenants")).unwrap();
        symlink(other.path().join("a"), folder.path().join("tenants/a")).unwrap();
        assert!(make("a", &socket, folder.path()).is_err());
        assert_eq!(mode(&other.path().join("a")), 0o700, "a link's target is not changed");
    }

    #[test]
    fn a_live_socket_at_the_earlier_path_stays() {
        let folder = tempfile::tempdir().unwrap();
        let earlier = folder.path().join("a.cuda");
        let _served = UnixListener::bind(&earlier).unwrap();
        make("a", &folder.path().join("tenants/a/cuda.sock"), folder.path()).unwrap();
        assert!(is_socket(&earlier));
    }

    #[test]
    fn world_writable_folder_without_sticky_bit_is_rejected() {
        let folder = tempfile::tempdir().unwrap();
        for (mode, good) in [(0o755, true), (0o770, true), (0o777, false), (0o1777, true)] {
            fs::set_permissions(folder.path(), fs::Permissions::from_mode(mode)).unwrap();
            assert_eq!(check(folder.path()).is_ok(), good, "{mode:o}");
        }
    }
}
