//! The guest programs and their workers. Each program has a supervising thread.

use std::collections::BTreeMap;
use std::io::Write as _;
use std::os::fd::{AsFd as _, OwnedFd};
use std::process::{Child, Stdio};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use anyhow::{Context as _, Result};
use rustix::event::{PollFd, PollFlags, poll};
use rustix::fs::{MemfdFlags, SealFlags};
use worker_link::{FromWorker, Link, LinkError, ToWorker, WorkerFiles, WorkerOptions};

/// Result of a restart: the new worker's process ID, or the reason why the restart failed.
pub type Restarted = Result<u32, String>;

/// A requested restart: the file for the worker's state, and the channel for the result.
struct Pending {
    file: OwnedFd,
    reply: Sender<Restarted>,
}

/// State of a running guest program.
struct Program {
    link: Arc<Link>,
    pending: Option<Pending>,
    /// Channel for the result of a restart, present until the new worker has restored the program.
    restoring: Option<Sender<Restarted>>,
}

/// The programs, keyed by their workers' process IDs.
pub struct Programs {
    options: WorkerOptions,
    restart_bytes: u64,
    programs: Mutex<BTreeMap<u32, Program>>,
}

/// A program's descriptors, which are passed to each of its workers.
struct Files {
    window: OwnedFd,
    guest: OwnedFd,
}

/// Creates a file of a fixed size. Holders of its descriptor can neither shrink nor grow it.
fn sized_file(bytes: u64) -> Result<OwnedFd> {
    let file = rustix::fs::memfd_create("cuda-restart", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)?;
    rustix::fs::ftruncate(&file, bytes)?;
    rustix::fs::fcntl_add_seals(&file, SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL)?;
    Ok(file)
}

impl Programs {
    /// Creates an empty list. Workers start with `options`; a restart copies at most `restart_bytes` bytes.
    pub fn new(options: WorkerOptions, restart_bytes: u64) -> Self {
        Self { options, restart_bytes, programs: Mutex::default() }
    }

    fn lock(&self) -> MutexGuard<'_, BTreeMap<u32, Program>> {
        self.programs.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Starts the first worker of a program, and a thread that supervises the program.
    pub fn start(self: &Arc<Self>, window: OwnedFd, guest: OwnedFd) -> Result<()> {
        let files = Files { window, guest };
        let (child, link) = self.start_worker(&files, None)?;
        let programs = Arc::clone(self);
        std::thread::spawn(move || programs.supervise(&files, child, link));
        Ok(())
    }

    /// Starts a worker, and adds it to the list. With `restart`, the worker continues the program of another one.
    fn start_worker(&self, files: &Files, restart: Option<Pending>) -> Result<(Child, Arc<Link>)> {
        let (own, starter) = Link::pair()?;
        let (restore, restoring) = restart.map(|Pending { file, reply }| (file, reply)).unzip();
        let files = WorkerFiles {
            window: files.window.try_clone()?,
            link: Link::new(files.guest.try_clone()?),
            starter: Some(starter),
            restore,
            is_held: false,
        };
        let child = self.options.start_of(files, Stdio::inherit())?;
        let link = Arc::new(own);
        self.lock().insert(child.id(), Program { link: Arc::clone(&link), pending: None, restoring });
        // Ignore errors, because the reader of standard output may have exited.
        let _ = writeln!(std::io::stdout(), "worker {}", child.id());
        Ok((child, link))
    }

    /// Handles the replies of a program's workers until the last one has exited.
    fn supervise(&self, files: &Files, mut child: Child, mut link: Arc<Link>) {
        loop {
            let is_saved = self.until_end(child.id(), &link);
            // The worker has closed the connection. Kill it in case it has not exited.
            let _ = child.kill();
            let _ = child.wait();
            let Some(program) = self.lock().remove(&child.id()) else { return };
            if let Some(reply) = program.restoring {
                let _ = reply.send(Err("the new worker could not continue the program".to_owned()));
            }
            match program.pending {
                Some(pending) if is_saved => match self.start_worker(files, Some(pending)) {
                    Ok(next) => (child, link) = next,
                    Err(error) => return eprintln!("cuda-loopback: cannot start the next worker: {error:#}"),
                },
                Some(Pending { reply, .. }) => {
                    let _ = reply.send(Err("the worker has ended before its state was saved".to_owned()));
                    return;
                }
                None => return,
            }
        }
    }

    /// Reads a worker's replies until the worker closes the connection. Returns true if the worker has saved its state.
    fn until_end(&self, process: u32, link: &Link) -> bool {
        let mut is_saved = false;
        loop {
            match link.receive_from_worker() {
                Ok(FromWorker::Saved) => is_saved = true,
                Ok(FromWorker::Restored) => {
                    let reply = self.lock().get_mut(&process).and_then(|program| program.restoring.take());
                    reply.into_iter().for_each(|reply| drop(reply.send(Ok(process))));
                }
                Ok(FromWorker::Refused { obstacle }) => {
                    let pending = self.lock().get_mut(&process).and_then(|program| program.pending.take());
                    if let Some(Pending { reply, .. }) = pending {
                        let _ = reply.send(Err(object_log::describe(obstacle)));
                    }
                }
                Ok(_) | Err(LinkError::Malformed(_)) => {}
                Err(LinkError::WouldBlock) => {
                    let mut descriptors = [PollFd::new(link, PollFlags::IN)];
                    let _ = poll(&mut descriptors, None);
                }
                Err(LinkError::Closed | LinkError::Socket(_)) => return is_saved,
            }
        }
    }

    /// Requests the restart of a worker. The result is sent to the returned receiver.
    pub fn restart(&self, process: u32) -> Result<Receiver<Restarted>> {
        let file = sized_file(self.restart_bytes)?;
        let mut programs = self.lock();
        let program = programs.get_mut(&process).with_context(|| format!("no worker has the process ID {process}"))?;
        let is_free = program.pending.is_none() && program.restoring.is_none();
        anyhow::ensure!(is_free, "another restart of worker {process} is in progress");
        program.link.send_save(ToWorker::Save, file.as_fd())?;
        let (reply, result) = channel();
        program.pending = Some(Pending { file, reply });
        Ok(result)
    }
}
