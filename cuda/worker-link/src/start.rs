//! Starts workers.

use std::ffi::OsString;
use std::io;
use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use command_fds::{CommandFdExt as _, FdMapping};

use crate::link::Link;

/// Number of the window's descriptor in the worker.
const WINDOW_FD: i32 = 3;
/// Number of the link's descriptor in the worker.
const LINK_FD: i32 = 4;
/// Number of the starter's descriptor in the worker.
const STARTER_FD: i32 = 5;
/// Number of the restore file's descriptor in the worker.
const RESTORE_FD: i32 = 6;

/// Descriptors that a worker receives.
#[derive(Debug)]
pub struct WorkerFiles {
    /// File of the window.
    pub window: OwnedFd,
    /// Connection to the device.
    pub link: Link,
    /// Connection for [`Save`](crate::ToWorker::Save), if a process other than the device starts workers.
    pub starter: Option<Link>,
    /// File with the state of the program's previous worker, if any.
    pub restore: Option<OwnedFd>,
    /// Set if the previous worker still has the program: the worker waits for [`Resume`](crate::ToWorker::Resume).
    pub is_held: bool,
}

/// Reason why a worker could not be started.
#[derive(Debug, thiserror::Error)]
pub enum StartError {
    /// The descriptors cannot be passed.
    #[error("cannot pass the worker's descriptors")]
    Descriptors,
    /// The program cannot be started.
    #[error("cannot start {0}: {1}")]
    Program(PathBuf, io::Error),
}

/// Settings of a worker that survives its daemon.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Rejoin {
    /// Socket of the next daemon's device.
    pub socket: PathBuf,
    /// Time after which a worker without a daemon exits.
    pub limit: Duration,
}

/// A worker's individual restrictions.
#[derive(Clone, Debug, Default)]
pub struct Restrictions {
    /// Set to disable all restrictions, including those that apply to all workers.
    pub is_off: bool,
    /// User ID and group ID of the worker, if the caller may change them.
    pub user: Option<(u32, u32)>,
    /// Additional files and folders that the worker may read.
    pub readable: Vec<PathBuf>,
    /// Additional files and folders that the worker may modify.
    pub writable: Vec<PathBuf>,
}

/// Program, environment and restrictions of a worker.
#[derive(Clone, Debug)]
pub struct WorkerOptions {
    /// Path of `cuda-worker`.
    pub program: PathBuf,
    /// Complete environment of the worker: the location of the driver library, the owner's socket, and the tenant's
    /// name.
    pub environment: Vec<(OsString, OsString)>,
    /// Driver library that the worker loads. By default, the loader searches for `libcuda.so.1`.
    pub library: Option<PathBuf>,
    /// Restrictions that the worker applies to itself before it reads any guest data.
    pub restrictions: Restrictions,
    /// Settings to survive the daemon, or `None` if the worker exits with the daemon.
    pub rejoin: Option<Rejoin>,
}

impl Restrictions {
    /// Returns the worker's arguments.
    fn arguments(&self) -> Vec<OsString> {
        let mut arguments = Vec::new();
        if self.is_off {
            arguments.push("--no-sandbox".into());
        }
        if let Some((user, group)) = self.user {
            arguments.extend([format!("--user={user}").into(), format!("--group={group}").into()]);
        }
        for (name, paths) in [("--readable", &self.readable), ("--writable", &self.writable)] {
            arguments.extend(paths.iter().flat_map(|path| [name.into(), path.into()]));
        }
        arguments
    }
}

impl WorkerOptions {
    /// Starts a worker with the given window and link, and the caller's standard error. The worker has no other open
    /// descriptors.
    ///
    /// # Errors
    /// Returns an error if the program cannot be started.
    pub fn start(&self, window: OwnedFd, link: Link) -> Result<Child, StartError> {
        self.start_with(window, link, Stdio::inherit())
    }

    /// Like [`Self::start`], with a separate standard error.
    ///
    /// # Errors
    /// Returns an error if the program cannot be started.
    pub fn start_with(&self, window: OwnedFd, link: Link, errors: Stdio) -> Result<Child, StartError> {
        self.start_of(WorkerFiles { window, link, starter: None, restore: None, is_held: false }, errors)
    }

    /// Like [`Self::start_with`], with additional descriptors.
    ///
    /// # Errors
    /// Returns an error if the program cannot be started.
    pub fn start_of(&self, files: WorkerFiles, errors: Stdio) -> Result<Child, StartError> {
        let WorkerFiles { window, link, starter, restore, is_held } = files;
        let mut mappings = vec![(window, WINDOW_FD), (link.into_fd(), LINK_FD)];
        mappings.extend(starter.map(|starter| (starter.into_fd(), STARTER_FD)));
        mappings.extend(restore.map(|file| (file, RESTORE_FD)));
        let names = [(WINDOW_FD, "window"), (LINK_FD, "link"), (STARTER_FD, "starter"), (RESTORE_FD, "restore")];
        let mut command = Command::new(&self.program);
        for (number, name) in names.iter().filter(|(number, _)| mappings.iter().any(|(_, fd)| fd == number)) {
            command.args([format!("--{name}-fd"), number.to_string()]);
        }
        if is_held {
            command.arg("--held");
        }
        if let Some(library) = &self.library {
            command.arg("--library").arg(library);
        }
        if let Some(Rejoin { socket, limit }) = &self.rejoin {
            command.arg("--rejoin").arg(socket).arg("--rejoin-ms").arg(limit.as_millis().to_string());
        }
        command.env_clear().envs(self.environment.iter().map(|(name, value)| (name, value)));
        command.args(self.restrictions.arguments());
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(errors);
        let mappings = mappings.into_iter().map(|(parent_fd, child_fd)| FdMapping { parent_fd, child_fd });
        command.fd_mappings(mappings.collect()).map_err(|_| StartError::Descriptors)?;
        command.spawn().map_err(|error| StartError::Program(self.program.clone(), error))
    }
}
