//! The daemon's process: a child of this process, or a successor of such a child.

use std::io;
use std::os::unix::process::ExitStatusExt;
use std::process::{Child, ExitStatus};

use rustix::process::{Pid, Signal, WaitOptions, getpid, kill_process, set_child_subreaper, waitpid};

/// A process that this process can wait for.
#[derive(Debug)]
pub(crate) enum Process {
    /// A child process that this process has started.
    Started(Child),
    /// An orphan adopted by this process, and its exit status after it has exited.
    Adopted(Pid, Option<ExitStatus>),
}

impl Process {
    /// Makes this process the parent of orphaned descendants (subreaper).
    ///
    /// # Errors
    /// Returns an error if the kernel rejects the request.
    pub fn adopt_orphans() -> io::Result<()> {
        Ok(set_child_subreaper(Some(getpid()))?)
    }

    /// Returns the adopted process with this ID.
    ///
    /// # Errors
    /// Returns an error if the number is invalid.
    pub fn adopted(pid: u32) -> io::Result<Self> {
        let pid = i32::try_from(pid).ok().and_then(Pid::from_raw);
        pid.map(|pid| Self::Adopted(pid, None)).ok_or_else(|| io::ErrorKind::InvalidInput.into())
    }

    /// Returns the process ID.
    pub fn id(&self) -> Pid {
        match self {
            Self::Started(child) => Pid::from_child(child),
            Self::Adopted(pid, _) => *pid,
        }
    }

    /// Returns the exit status if the process has exited.
    ///
    /// # Errors
    /// Returns an error if the process is not a child of this process.
    pub fn try_wait(&mut self) -> io::Result<Option<ExitStatus>> {
        match self {
            Self::Started(child) => child.try_wait(),
            Self::Adopted(pid, ended) => {
                if ended.is_none() {
                    let found = waitpid(Some(*pid), WaitOptions::NOHANG)?;
                    *ended = found.map(|(_, status)| ExitStatus::from_raw(status.as_raw()));
                }
                Ok(*ended)
            }
        }
    }

    /// Kills the process, and waits until it has exited.
    ///
    /// # Errors
    /// Returns an error if the process is not a child of this process.
    pub fn end(&mut self) -> io::Result<()> {
        match self {
            Self::Started(child) => child.kill().and_then(|()| child.wait()).map(drop),
            Self::Adopted(pid, ended) => {
                if ended.is_none() {
                    kill_process(*pid, Signal::KILL)?;
                    let found = waitpid(Some(*pid), WaitOptions::empty())?;
                    *ended = found.map(|(_, status)| ExitStatus::from_raw(status.as_raw()));
                }
                Ok(())
            }
        }
    }
}
