//! Restarts workers: a worker saves its state to a file and exits, and a new worker continues the program.

use std::os::fd::{AsFd as _, OwnedFd};
use std::sync::mpsc::Sender;
use std::time::Instant;

use rustix::fs::{MemfdFlags, SealFlags};
use worker_link::ToWorker;

use super::Executor;
use crate::core::WorkerId;
use crate::restart::{Restart, RestartRequest};
use crate::worker::Worker;

/// Maximum total size of one program's memory and images, in bytes. The host stores a copy of both while the program's
/// worker is restarted.
pub(super) const MAX_STATE_BYTES: u64 = 8 << 30;

/// Phase of a restart.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Phase {
    /// The worker waits until the program's work is complete, and saves the program's state.
    Saving,
    /// The state is in the file, and the worker is exiting.
    Saved,
    /// The new worker restores the state.
    Restoring,
}

/// A restart in progress.
#[derive(Debug)]
pub(super) struct Restarting {
    phase: Phase,
    file: OwnedFd,
    name: String,
    pid: Option<u32>,
    begin: Instant,
    /// Time until which the restart prevents a handover.
    until: Instant,
    results: Sender<Restart>,
}

/// Creates a file of a fixed size. Memory is allocated only for the parts that a worker writes.
pub(super) fn state_file(bytes: u64) -> rustix::io::Result<OwnedFd> {
    let file = rustix::fs::memfd_create("cuda-state", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)?;
    rustix::fs::ftruncate(&file, bytes)?;
    rustix::fs::fcntl_add_seals(&file, SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL)?;
    Ok(file)
}

impl Executor {
    /// Begins the restarts requested by the daemon.
    pub(super) fn begin_restarts(&mut self) {
        let requests = std::mem::take(&mut self.shared.state.lock().restarts);
        for request in requests {
            let RestartRequest { pid, counts, results, .. } = &request;
            let mut programs = self.core.served();
            programs.retain(|(_, of, _)| pid.is_none() || of == pid);
            // The requester may have stopped waiting.
            let _ = counts.send(programs.len());
            for (id, pid, name) in programs {
                if let Err(why) = self.begin_restart(id, pid, &name, &request) {
                    let _ = results.send(Restart { name, pid, result: Err(why) });
                }
            }
        }
    }

    fn begin_restart(
        &mut self,
        id: WorkerId,
        pid: Option<u32>,
        name: &str,
        request: &RestartRequest,
    ) -> Result<(), String> {
        if self.restarting.contains_key(&id) {
            return Err("another restart of its worker is in progress: retry".to_owned());
        }
        if self.moving.is_some() {
            return Err("it is being moved to another card: retry".to_owned());
        }
        let file =
            state_file(MAX_STATE_BYTES).map_err(|error| format!("cannot create a file for its state: {error}"))?;
        let worker = self.workers.get_mut(&id).filter(|_| self.core.is_serving(id));
        let worker = worker.ok_or("its worker is exiting")?;
        if !worker.send_save(ToWorker::Save, file.as_fd()) {
            return Err("its worker does not read its messages: retry".to_owned());
        }
        let (phase, name) = (Phase::Saving, name.to_owned());
        let RestartRequest { begin, until, ref results, .. } = *request;
        let restarting = Restarting { phase, file, name, pid, begin, until, results: results.clone() };
        self.restarting.insert(id, restarting);
        Ok(())
    }

    /// Returns true if a worker is being replaced, or the programs are being moved. Meanwhile, the function cannot be
    /// handed over. Ignores workers that have not responded in time, so that they cannot prevent upgrades.
    pub(super) fn is_restarting(&self) -> bool {
        self.moving.is_some() || self.restarting.values().any(|restart| Instant::now() < restart.until)
    }

    /// Handles a worker's report that its state is saved.
    pub(super) fn restart_saved(&mut self, id: WorkerId) {
        if let Some(restarting) = self.restarting.get_mut(&id).filter(|it| it.phase == Phase::Saving) {
            restarting.phase = Phase::Saved;
        }
    }

    /// Completes a restart: the new worker continues the program, or the old one has refused to save.
    pub(super) fn restart_done(&mut self, id: WorkerId, result: Result<(), String>) {
        // Only the old worker can refuse to save, and only the new one can restore.
        let expected = if result.is_ok() { Phase::Restoring } else { Phase::Saving };
        if self.restarting.get(&id).is_some_and(|it| it.phase == expected) {
            self.report_restart(id, result);
        }
    }

    fn report_restart(&mut self, id: WorkerId, result: Result<(), String>) {
        let Some(Restarting { name, pid, begin, results, .. }) = self.restarting.remove(&id) else { return };
        match &result {
            Ok(()) => tracing::info!(program = ?name, pid, "a CUDA program continues in a new worker"),
            Err(why) => tracing::info!(program = ?name, pid, why, "a CUDA program's worker is not restarted"),
        }
        // The requester may have stopped waiting.
        let _ = results.send(Restart { name, pid, result: result.map(|()| begin.elapsed()) });
    }

    /// Starts the new worker of a program whose worker has exited. Returns false if the program is lost.
    pub(super) fn replace(&mut self, id: WorkerId) -> bool {
        let Some(restarting) = self.restarting.get_mut(&id) else { return false };
        if restarting.phase != Phase::Saved || !self.core.is_serving(id) {
            let why = match restarting.phase {
                Phase::Restoring => "the new worker could not continue the program, which has lost its context",
                Phase::Saving | Phase::Saved => "its worker has exited",
            };
            self.report_restart(id, Err(why.to_owned()));
            return false;
        }
        restarting.phase = Phase::Restoring;
        let state = restarting.file.try_clone().map_err(|error| error.to_string());
        let window = self.window.file().try_clone().map_err(|error| error.to_string());
        let started = state.and_then(|state| self.launcher.launch_next(window?, state, false));
        match started {
            Ok(started) => {
                self.workers.insert(id, Worker::new(started));
                self.core.repeat(id);
                // If this daemon is killed, the next one must find the new process.
                self.record();
                true
            }
            Err(why) => {
                self.report_restart(id, Err(format!("the new worker cannot start: {why}")));
                false
            }
        }
    }
}
