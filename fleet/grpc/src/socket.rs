//! A UNIX socket that serves gRPC.

use std::fs::Permissions;
use std::io;
use std::os::unix::fs::{FileTypeExt, PermissionsExt};
use std::os::unix::net::UnixStream as Blocking;
use std::path::{Path, PathBuf};

use tokio::net::{UnixListener, UnixStream};
use tokio_stream::wrappers::UnixListenerStream;
use tokio_stream::{Stream, StreamExt};

use crate::authority::Localhost;

/// Maximum number of concurrent requests per connection. The kubelet sends only a few.
pub const MAX_STREAMS: u32 = 64;

/// An error while creating the socket.
#[derive(Debug, thiserror::Error)]
#[expect(missing_docs, reason = "the messages name the fields")]
pub enum SocketError {
    #[error("{} is not a socket; remove it, or name another path", .0.display())]
    Other(PathBuf),
    #[error("another process already serves {}; end it, or name another path", .0.display())]
    Served(PathBuf),
    #[error("{} cannot be created", path.display())]
    Io {
        path: PathBuf,
        #[source]
        source: io::Error,
    },
}

/// A socket in the file system. The file is removed on drop.
#[derive(Debug)]
pub struct Socket {
    path: PathBuf,
}

impl Socket {
    /// Creates a socket at `path` to which only this user can connect. Replaces an existing socket if no process
    /// listens on it. Returns the incoming connections for a server.
    ///
    /// # Errors
    /// Returns an error if `path` is not a socket or is a socket in use, or if a system call fails.
    pub fn bind(
        path: &Path,
    ) -> Result<(Self, impl Stream<Item = io::Result<Localhost<UnixStream>>> + use<>), SocketError> {
        let failed = |source| SocketError::Io { path: path.to_owned(), source };
        match std::fs::symlink_metadata(path) {
            Ok(there) if !there.file_type().is_socket() => return Err(SocketError::Other(path.to_owned())),
            Ok(_) if Blocking::connect(path).is_ok() => return Err(SocketError::Served(path.to_owned())),
            Ok(_) => std::fs::remove_file(path).map_err(failed)?,
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            Err(error) => return Err(failed(error)),
        }
        // Until the socket's mode is set, its name begins with a dot. The kubelet ignores such names, but connects to
        // any other socket as soon as it detects the file.
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        let beside = path.with_file_name(format!(".{name}.new"));
        let _ = std::fs::remove_file(&beside);
        let listener = UnixListener::bind(&beside).map_err(failed)?;
        std::fs::set_permissions(&beside, Permissions::from_mode(0o600)).map_err(failed)?;
        std::fs::rename(&beside, path).map_err(failed)?;
        let connections = UnixListenerStream::new(listener).map(|connection| connection.map(Localhost::new));
        Ok((Self { path: path.to_owned() }, connections))
    }
}

impl Drop for Socket {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.path);
    }
}
