//! Moves the guest's programs to another card. The worker of each program saves the program's state and waits, and a
//! worker on the other card restores this state. When all programs have such a worker, the workers on the first card
//! are killed. If a step fails before that, these workers resume their programs.
//!
//! One program is saved at a time, so the host stores a copy of only one program's memory.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::os::fd::{AsFd as _, OwnedFd};
use std::sync::mpsc::Sender;
use std::time::{Duration, Instant};

use worker_link::{FromWorker, Reason, ToWorker};

use super::restart::{MAX_STATE_BYTES, state_file};
use super::{Executor, is_readable, report};
use crate::core::WorkerId;
use crate::moving::{Carried, MoveRequest};
use crate::worker::{Launcher, Worker};

/// Time limit for killed workers to exit before their programs continue on the other card.
// TIMEOUT: a killed process exits immediately, unless the driver prevents it.
const END_LIMIT: Duration = Duration::from_secs(30);

/// A program that is being moved.
enum Step {
    /// The program's worker is saving the state to this file.
    Saving(OwnedFd),
    /// The next worker is restoring the state. Contains this worker, and the reason that it reports for exiting.
    Restoring(Worker, Option<Reason>),
}

/// A move of all programs.
pub(super) struct Moving {
    /// Starts workers on the other card.
    launcher: Box<dyn Launcher>,
    /// Workers whose programs have not begun to move.
    waiting: VecDeque<WorkerId>,
    current: Option<(WorkerId, Step)>,
    /// Workers on the other card that have restored the states of their programs.
    arrived: BTreeMap<WorkerId, Worker>,
    /// Workers that were requested to save their programs' states.
    held: BTreeSet<WorkerId>,
    /// Workers to start after the move, on the card that the programs use by then.
    late: Vec<WorkerId>,
    state_bytes: u64,
    /// Time at which the first program began to wait.
    begin: Instant,
    /// Deadline for all programs to have a worker on the other card.
    until: Instant,
    /// Deadline for the previous workers to exit, once they have been killed.
    ending: Option<Instant>,
    reply: Sender<Result<Carried, String>>,
}

impl Executor {
    /// Begins the move that the daemon has requested.
    pub(super) fn begin_move(&mut self) {
        let Some(request) = self.shared.state.lock().carry.take() else { return };
        let MoveRequest { launcher, state_bytes, until, reply } = request;
        if self.moving.is_some() || !self.restarting.is_empty() {
            // The requester may have stopped waiting.
            let _ = reply.send(Err("its programs are being moved or restarted: retry".to_owned()));
            return;
        }
        let served = self.core.served().into_iter().map(|(id, ..)| id).filter(|id| self.core.is_serving(*id));
        self.moving = Some(Moving {
            launcher,
            waiting: served.collect(),
            current: None,
            arrived: BTreeMap::new(),
            held: BTreeSet::new(),
            late: Vec::new(),
            state_bytes: state_bytes.min(MAX_STATE_BYTES),
            begin: Instant::now(),
            until,
            ending: None,
            reply,
        });
    }

    /// Continues the move.
    pub(super) fn continue_move(&mut self) {
        self.dismissed.retain_mut(|worker| {
            let has_ended = is_readable(worker);
            if has_ended {
                worker.reap();
            }
            !has_ended
        });
        if let Err(why) = self.advance_move() {
            self.fail_move(&why);
        }
    }

    fn advance_move(&mut self) -> Result<(), String> {
        let Some(moving) = &mut self.moving else { return Ok(()) };
        let now = Instant::now();
        if let Some(limit) = moving.ending {
            let is_pending = |id: &WorkerId| self.workers.contains_key(id);
            if !moving.arrived.keys().any(is_pending) || now >= limit {
                self.finish_move();
            }
            return Ok(());
        }
        if now >= moving.until {
            return Err("its programs have not continued on the other card in time".to_owned());
        }
        self.read_arriving()?;
        self.begin_next()
    }

    /// Handles messages and exits of the workers on the other card.
    fn read_arriving(&mut self) -> Result<(), String> {
        let Some(moving) = &mut self.moving else { return Ok(()) };
        if let Some((id, Step::Restoring(worker, reason))) = &mut moving.current {
            let (id, has_ended) = (*id, is_readable(worker));
            let mut is_restored = false;
            while let Some(message) = worker.receive() {
                match message {
                    FromWorker::Restored => is_restored = true,
                    FromWorker::Failed { reason: why } => *reason = Some(why),
                    _ => {}
                }
            }
            if has_ended {
                let why = match reason.take() {
                    Some(reason) => {
                        report(reason);
                        format!("its worker on the other card has failed ({reason:?}); the log has the step")
                    }
                    None => "its worker on the other card has ended".to_owned(),
                };
                return Err(self.named(id, &why));
            }
            if is_restored && let Some((id, Step::Restoring(worker, _))) = moving.current.take() {
                moving.arrived.insert(id, worker);
            }
        }
        let ended = moving.arrived.iter_mut().find_map(|(id, worker)| {
            while worker.receive().is_some() {}
            is_readable(worker).then_some(*id)
        });
        ended.map_or(Ok(()), |id| Err(self.named(id, "its worker on the other card has ended")))
    }

    /// Makes the next program's worker save the program's state. If no program is left, kills the previous workers.
    fn begin_next(&mut self) -> Result<(), String> {
        loop {
            let Some(moving) = self.moving.as_mut().filter(|moving| moving.current.is_none()) else { return Ok(()) };
            let Some(id) = moving.waiting.pop_front() else {
                for id in moving.arrived.keys() {
                    if let Some(worker) = self.workers.get_mut(id) {
                        worker.kill();
                    }
                }
                moving.ending = Instant::now().checked_add(END_LIMIT);
                return Ok(());
            };
            if !self.core.is_serving(id) {
                continue;
            }
            if moving.held.is_empty() {
                moving.begin = Instant::now();
            }
            let worker = self.workers.get_mut(&id);
            let asked = match state_file(moving.state_bytes) {
                Err(error) => Err(format!("the host has no file for its state: {error}")),
                Ok(file) => match worker.is_some_and(|worker| worker.send_save(ToWorker::Hold, file.as_fd())) {
                    true => Ok(file),
                    false => Err("its worker does not read its messages: retry".to_owned()),
                },
            };
            let file = asked.map_err(|why| self.named(id, &why))?;
            let Some(moving) = &mut self.moving else { return Ok(()) };
            moving.held.insert(id);
            moving.current = Some((id, Step::Saving(file)));
            return Ok(());
        }
    }

    /// Returns a reason with the name of the program to which it applies.
    fn named(&self, id: WorkerId, why: &str) -> String {
        let (_, pid, name) =
            self.core.served().into_iter().find(|(of, ..)| *of == id).unwrap_or((id, None, String::new()));
        let process = pid.map_or_else(String::new, |pid| format!(" (process {pid} in the guest)"));
        format!("program {name:?}{process}: {why}")
    }

    /// Handles a worker's report that its state is saved: starts the next worker on the other card.
    pub(super) fn move_saved(&mut self, id: WorkerId) {
        let Some(moving) = &mut self.moving else { return };
        let Some((_, Step::Saving(file))) =
            moving.current.take_if(|(of, step)| *of == id && matches!(step, Step::Saving(_)))
        else {
            return;
        };
        let window = self.window.file().try_clone().map_err(|error| error.to_string());
        match window.and_then(|window| moving.launcher.launch_next(window, file, true)) {
            Ok(started) => moving.current = Some((id, Step::Restoring(Worker::new(started), None))),
            Err(why) => {
                let why = self.named(id, &format!("no worker starts on the other card: {why}"));
                self.fail_move(&why);
            }
        }
    }

    /// Handles a worker's reply that its state cannot be saved.
    pub(super) fn move_refused(&mut self, id: WorkerId, why: &str) {
        let current = self.moving.as_ref().and_then(|moving| moving.current.as_ref());
        if current.is_some_and(|(of, step)| *of == id && matches!(step, Step::Saving(_))) {
            let why = self.named(id, why);
            self.fail_move(&why);
        }
    }

    /// Handles the exit of a worker on the first card. Returns true if its program continues on the other card.
    pub(super) fn move_ended(&mut self, id: WorkerId) -> bool {
        let Some(moving) = &mut self.moving else { return false };
        if moving.ending.is_some() {
            return moving.arrived.contains_key(&id);
        }
        // The program has exited, or its worker has failed, which can also happen without a move.
        self.dismissed.extend(moving.arrived.remove(&id));
        if let Some((_, Step::Restoring(worker, _))) = moving.current.take_if(|(of, _)| *of == id) {
            self.dismissed.push(worker);
        }
        self.dismissed.iter_mut().for_each(Worker::kill);
        moving.held.remove(&id);
        moving.waiting.retain(|waiting| *waiting != id);
        false
    }

    /// Starts a worker. If a move is in progress, starts it after the move.
    pub(super) fn start_after_move(&mut self, id: WorkerId) {
        match &mut self.moving {
            Some(moving) => moving.late.push(id),
            None => self.start(id),
        }
    }

    /// Forgets a worker that was to start after the move, because its program has exited.
    pub(super) fn forget_late(&mut self, id: WorkerId) {
        let Some(moving) = &mut self.moving else { return };
        let before = moving.late.len();
        moving.late.retain(|late| *late != id);
        if moving.late.len() < before {
            self.lose(id);
        }
    }

    /// Continues the programs on the other card. The previous workers have exited, or their time limit has expired.
    fn finish_move(&mut self) {
        let Some(moving) = self.moving.take() else { return };
        let Moving { launcher, arrived, late, begin, reply, .. } = moving;
        self.launcher = launcher;
        let mut ids = Vec::new();
        for (id, mut worker) in arrived {
            // If the previous worker is still running, two workers would execute the program.
            if self.workers.contains_key(&id) {
                tracing::error!("a worker does not end, and its program does not continue on the other card");
                worker.kill();
                self.dismissed.push(worker);
                continue;
            }
            self.workers.insert(id, worker);
            ids.push(id);
        }
        // The next daemon must find the new processes, and their card.
        self.record();
        self.has_news = true;
        for id in &ids {
            if !self.core.repeat(*id)
                && let Some(worker) = self.workers.get_mut(id)
            {
                worker.kill();
            }
        }
        self.perform();
        ids.iter().for_each(|id| self.send(*id, ToWorker::Resume));
        let (programs, pause) = (ids.len(), if ids.is_empty() { Duration::ZERO } else { begin.elapsed() });
        tracing::info!(programs, card = self.launcher.card(), "CUDA programs continue on another card");
        // The requester may have stopped waiting.
        let _ = reply.send(Ok(Carried { programs, pause }));
        self.start_late(late);
    }

    /// Cancels the move, if any. The programs continue in their workers on the first card.
    pub(super) fn fail_move(&mut self, why: &str) {
        let Some(moving) = self.moving.take() else { return };
        let Moving { current, arrived, held, late, reply, .. } = moving;
        self.dismissed.extend(arrived.into_values());
        if let Some((_, Step::Restoring(worker, _))) = current {
            self.dismissed.push(worker);
        }
        self.dismissed.iter_mut().for_each(Worker::kill);
        held.into_iter().for_each(|id| self.send(id, ToWorker::Resume));
        tracing::info!(why, "CUDA programs do not move to another card");
        // The requester may have stopped waiting.
        let _ = reply.send(Err(why.to_owned()));
        self.start_late(late);
    }

    fn start_late(&mut self, late: Vec<WorkerId>) {
        for id in late {
            self.start(id);
            self.core.repeat(id);
        }
        self.perform();
    }
}
