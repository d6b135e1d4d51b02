//! The start of a worker.

use std::ffi::OsString;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::process::CommandExt as _;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};

use command_fds::{CommandFdExt as _, FdMapping};

use crate::link::Link;

/// Numbers of the descriptors in the worker.
const WINDOW_FD: i32 = 3;
const LINK_FD: i32 = 4;

/// A worker that could not be started.
#[derive(Debug, thiserror::Error)]
pub enum StartError {
    /// The descriptors cannot be passed.
    #[error("cannot pass the worker's descriptors")]
    Descriptors,
    /// The program cannot be started.
    #[error("cannot start {0}: {1}")]
    Program(PathBuf, io::Error),
}

/// Program, environment and user of a worker.
#[derive(Clone, Debug)]
pub struct WorkerOptions {
    /// The program `cuda-worker`.
    pub program: PathBuf,
    /// The whole environment: location of the driver's library, the owner's socket and the tenant's name.
    pub environment: Vec<(OsString, OsString)>,
    /// The driver's library that the worker loads; by default the loader finds `libcuda.so.1`.
    pub library: Option<PathBuf>,
    /// User and group, if the caller may change them.
    pub user: Option<(u32, u32)>,
}

impl WorkerOptions {
    /// Starts a worker that uses `window` and communicates over `link`. Only these two descriptors and standard error
    /// are open in the worker.
    ///
    /// # Errors
    /// If the program does not start.
    pub fn start(&self, window: OwnedFd, link: Link) -> Result<Child, StartError> {
        let mut command = Command::new(&self.program);
        command.args(["--window-fd", &WINDOW_FD.to_string(), "--link-fd", &LINK_FD.to_string()]);
        if let Some(library) = &self.library {
            command.arg("--library").arg(library);
        }
        command.env_clear().envs(self.environment.iter().map(|(name, value)| (name, value)));
        command.stdin(Stdio::null()).stdout(Stdio::null());
        if let Some((user, group)) = self.user {
            command.uid(user).gid(group);
        }
        let mappings = [(window, WINDOW_FD), (link.into_fd(), LINK_FD)];
        let mappings = mappings.map(|(parent_fd, child_fd)| FdMapping { parent_fd, child_fd });
        command.fd_mappings(mappings.into()).map_err(|_| StartError::Descriptors)?;
        command.spawn().map_err(|error| StartError::Program(self.program.clone(), error))
    }
}
