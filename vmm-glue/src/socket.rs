//! UNIX sockets: binds a path with permissions, and sends and receives messages with file descriptors.

use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::net::Shutdown;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::fs::{FileTypeExt, MetadataExt, PermissionsExt};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};

use rustix::fs::{AtFlags, FileType, Gid, Mode, OFlags, Uid};
use rustix::io::Errno;
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, SocketAddrUnix, SocketFlags, SocketType,
};
use thiserror::Error;

use crate::connection::MAX_FDS;
use crate::link::ClientInfo;

/// Maximum number of connections waiting to be accepted.
const BACKLOG: i32 = 16;
/// Maximum number of receive calls that drain a closed socket. A socket buffers far less data.
const MAX_UNREAD: u32 = 1 << 16;

/// Ownership and permissions of a socket's path.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SocketOptions {
    /// Permission bits. `None` applies the process's umask.
    pub mode: Option<u32>,
    /// User ID of the owner. Setting it requires privileges.
    pub uid: Option<u32>,
    /// Group ID. Setting it requires membership or privileges.
    pub gid: Option<u32>,
}

/// Reasons why a path cannot be bound.
#[derive(Debug, Error)]
#[expect(missing_docs, reason = "the messages document the variants")]
pub enum BindError {
    #[error("{} is in use by {owner}; choose another path or stop that process", path.display())]
    InUse { path: PathBuf, owner: String },
    #[error("{} exists and is not a socket; choose another path or remove the file", path.display())]
    NotASocket { path: PathBuf },
    #[error("{} is too long for a socket path: the maximum is 107 bytes", path.display())]
    TooLong { path: PathBuf },
    #[error("{} cannot be bound: the directory {} does not exist; create it", path.display(), parent.display())]
    NoDirectory { path: PathBuf, parent: PathBuf },
    #[error("{} cannot be bound: no permission to write to {}", path.display(), parent.display())]
    NotPermitted { path: PathBuf, parent: PathBuf },
    #[error("cannot {action} {}", path.display())]
    System {
        action: &'static str,
        path: PathBuf,
        #[source]
        source: io::Error,
    },
}

/// The path of a listening socket. The socket file is removed on drop, if it is still the same file.
#[derive(Debug)]
pub struct BoundPath {
    path: PathBuf,
    device: u64,
    inode: u64,
}

impl Drop for BoundPath {
    fn drop(&mut self) {
        if std::fs::symlink_metadata(&self.path).is_ok_and(|it| it.dev() == self.device && it.ino() == self.inode) {
            let _ = std::fs::remove_file(&self.path);
        }
    }
}

impl BoundPath {
    /// Returns the path.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Sets the path's ownership and permissions.
    ///
    /// # Errors
    /// Returns an error if they cannot be set.
    pub fn set_rights(&self, options: &SocketOptions) -> Result<(), BindError> {
        set_rights(&self.path, options)
    }

    /// Leaves the path in place, because another process serves the socket.
    pub fn leave(mut self) {
        // No file has inode number 0.
        self.inode = 0;
    }
}

/// Takes over the path of an earlier process's listening socket. Returns `None` if the socket has no path, or the path
/// is no longer a socket.
#[must_use]
pub fn adopt(listener: &UnixListener) -> Option<BoundPath> {
    let path = listener.local_addr().ok()?.as_pathname()?.to_owned();
    let metadata = std::fs::symlink_metadata(&path).ok().filter(|metadata| metadata.file_type().is_socket())?;
    Some(BoundPath { path, device: metadata.dev(), inode: metadata.ino() })
}

fn set_rights(path: &Path, options: &SocketOptions) -> Result<(), BindError> {
    let system = |action| {
        let path = path.to_owned();
        move |source: io::Error| BindError::System { action, path, source }
    };
    // Use one descriptor for all steps, because another user with write access to the folder could replace the file in
    // the meantime.
    let flags = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let file = rustix::fs::open(path, flags, Mode::empty()).map_err(|errno| system("open")(errno.into()))?;
    let there = rustix::fs::fstat(&file).map_err(|errno| system("look at")(errno.into()))?;
    // An earlier process's socket may already belong to the configured user.
    let is_ours = there.st_uid == rustix::process::geteuid().as_raw() || Some(there.st_uid) == options.uid;
    if FileType::from_raw_mode(there.st_mode) != FileType::Socket || !is_ours {
        let source =
            io::Error::other("another file has replaced it; choose a folder that only the daemon's user can write to");
        return Err(system("change the rights of")(source));
    }
    if options.uid.is_some() || options.gid.is_some() {
        let (uid, gid) = (options.uid.map(Uid::from_raw), options.gid.map(Gid::from_raw));
        let given = rustix::fs::chownat(&file, "", uid, gid, AtFlags::EMPTY_PATH);
        given.map_err(|errno| system("change the owner of")(errno.into()))?;
    }
    if let Some(mode) = options.mode {
        let permissions = std::fs::Permissions::from_mode(mode & 0o777);
        let own = format!("/proc/self/fd/{}", file.as_raw_fd());
        std::fs::set_permissions(own, permissions).map_err(system("change the mode of"))?;
    }
    Ok(())
}

/// Binds `path` and listens. Sets the permissions before the first client can connect.
pub fn bind(path: &Path, options: &SocketOptions) -> Result<(UnixListener, BoundPath), BindError> {
    let path = path.to_owned();
    let parent = match path.parent() {
        Some(parent) if !parent.as_os_str().is_empty() => parent.to_owned(),
        _ => PathBuf::from("."),
    };
    let system = |action| {
        let path = path.clone();
        move |source: io::Error| BindError::System { action, path, source }
    };
    make_free(&path)?;
    let address = SocketAddrUnix::new(&path).map_err(|_| BindError::TooLong { path: path.clone() })?;
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = rustix::net::socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)
        .map_err(|errno| system("create a socket for")(errno.into()))?;
    rustix::net::bind(&socket, &address).map_err(|errno| match errno {
        Errno::NOENT => BindError::NoDirectory { path: path.clone(), parent },
        Errno::ACCESS | Errno::PERM | Errno::ROFS => BindError::NotPermitted { path: path.clone(), parent },
        _ => system("bind")(errno.into()),
    })?;
    let metadata = std::fs::symlink_metadata(&path).map_err(system("look at"))?;
    let bound = BoundPath { path: path.clone(), device: metadata.dev(), inode: metadata.ino() };
    set_rights(&path, options)?;
    // Listen last, because clients can connect as soon as the socket listens.
    rustix::net::listen(&socket, BACKLOG).map_err(|errno| system("listen on")(errno.into()))?;
    Ok((UnixListener::from(socket), bound))
}

/// Removes the socket file at `path` if no process serves it. Fails if the path is in use or not a socket.
fn make_free(path: &Path) -> Result<(), BindError> {
    let Ok(metadata) = std::fs::symlink_metadata(path) else { return Ok(()) };
    let path = path.to_owned();
    if !metadata.file_type().is_socket() {
        return Err(BindError::NotASocket { path });
    }
    match UnixStream::connect(&path) {
        Ok(stream) => {
            let owner = match peer(&stream) {
                ClientInfo { pid: 0, .. } => "another process".to_owned(),
                ClientInfo { pid, .. } => format!("process {pid}"),
            };
            Err(BindError::InUse { path, owner })
        }
        Err(error) if error.kind() == io::ErrorKind::ConnectionRefused => {
            tracing::info!(path = %path.display(), "removing a socket that no process serves");
            std::fs::remove_file(&path).map_err(|source| BindError::System {
                action: "remove the stale socket",
                path,
                source,
            })
        }
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        Err(source) => Err(BindError::System { action: "find the process that serves", path, source }),
    }
}

/// Returns the process at the other end of a connection, with process ID 0 if it is unknown.
pub(crate) fn peer(stream: &UnixStream) -> ClientInfo {
    match rustix::net::sockopt::socket_peercred(stream) {
        Ok(credentials) => ClientInfo {
            pid: rustix::process::Pid::as_raw(Some(credentials.pid)),
            uid: credentials.uid.as_raw(),
            domain: None,
        },
        Err(_) => ClientInfo { pid: 0, uid: u32::MAX, domain: None },
    }
}

/// Closes a connection so that the peer reads end-of-file.
///
/// If a socket is closed with unread data, the peer gets an error instead (`ECONNRESET`). QEMU 11.1 then fails an
/// assertion and terminates, together with the virtual machine.
pub fn end(stream: &UnixStream) {
    if stream.shutdown(Shutdown::Both).is_err() {
        return;
    }
    // No more data can arrive, and a socket buffers only a limited amount.
    let mut buffer = [0; 4096];
    (0..MAX_UNREAD).take_while(|_| receive(stream, &mut buffer).is_ok_and(|it| it.len != 0)).count();
}

/// The result of one receive call.
#[derive(Debug)]
pub struct Received {
    /// Number of received bytes, or 0 if the peer has closed the connection.
    pub len: usize,
    /// Received file descriptors: up to [`MAX_FDS`], or a few more.
    pub fds: Vec<OwnedFd>,
    /// Set if more descriptors arrived than fit, or than the process may open.
    pub truncated: bool,
}

/// Receives available data, up to `buffer.len()` bytes. Fails with `WouldBlock` if no data is available.
pub fn receive(socket: impl AsFd, buffer: &mut [u8]) -> io::Result<Received> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_FDS))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let flags = RecvFlags::DONTWAIT | RecvFlags::CMSG_CLOEXEC;
    let result = rustix::net::recvmsg(socket, &mut [IoSliceMut::new(buffer)], &mut control, flags)?;
    let mut fds = Vec::new();
    for message in control.drain() {
        if let RecvAncillaryMessage::ScmRights(rights) = message {
            fds.extend(rights);
        }
    }
    Ok(Received { len: result.bytes, fds, truncated: result.flags.contains(ReturnFlags::CTRUNC) })
}

/// Sends as many bytes as fit, with descriptors. Returns the number of bytes sent. Fails with `WouldBlock` if no byte
/// fits.
pub fn send(socket: impl AsFd, bytes: &[u8], fds: &[std::os::fd::BorrowedFd<'_>]) -> io::Result<usize> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_FDS))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    if !fds.is_empty() && !control.push(SendAncillaryMessage::ScmRights(fds)) {
        return Err(io::Error::new(io::ErrorKind::InvalidInput, "too many file descriptors for one message"));
    }
    let flags = SendFlags::DONTWAIT | SendFlags::NOSIGNAL;
    Ok(rustix::net::sendmsg(socket, &[IoSlice::new(bytes)], &mut control, flags)?)
}
