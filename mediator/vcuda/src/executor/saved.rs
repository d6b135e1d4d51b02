//! Saves the executor's state for another process, and restores it.

use std::collections::BTreeMap;
use std::os::fd::{AsFd as _, OwnedFd};
use std::sync::Arc;
use std::time::Duration;

use vmm_glue::memory::MemoryTable;
use worker_link::{Link, ToWorker};

use super::Executor;
use crate::adoption::Adoption;
use crate::command::{Answer, Header};
use crate::core::{Ticket, WorkerId};
use crate::journal::{Contents, is_before};
use crate::queue::{ControlQueue, QueueError, Request};
use crate::saved::{Reply, SavedCommand, SavedFunction, SavedProcess, SavedStructure};
use crate::worker::Worker;

/// Maximum number of worker connections accepted per pass of the executor.
const MAX_ACCEPTED: usize = 16;

impl std::fmt::Debug for Executor {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Executor").field("name", &self.name).field("core", &self.core).finish_non_exhaustive()
    }
}

impl Executor {
    /// Continues with the state of an earlier process.
    pub(super) fn adopt(&mut self, adoption: Adoption) {
        let Adoption { core, contents, window, journal, is_journal_written, mut links, generation } = adoption;
        let Contents { registers: _, progress, outstanding, structure } = contents;
        let SavedStructure { core: _, processes, popped: _, last_ticket, card } = structure;
        (self.core, self.window, self.journal) = (core, window, journal);
        (self.progress, self.generation, self.is_resuming, self.has_news) = (progress, generation, true, true);
        self.adoption_until = None;
        self.outstanding.clear();
        self.ready.clear();
        self.tickets = last_ticket;
        for mut command in outstanding {
            let ticket = Ticket(command.ticket);
            self.tickets = self.tickets.max(command.ticket);
            if command.answering.is_some_and(|number| is_before(number, progress.answered)) {
                // The command already has a response.
                self.journal.remove_command(command.head);
                continue;
            }
            let header = command.header();
            let answer = match command.reply {
                Reply::Word(wait) => (!self.core.restore_wait(header.context(), ticket, wait)).then_some(Answer::Ok),
                Reply::Removal => (!self.core.awaits_removal(ticket)).then_some(Answer::Ok),
                Reply::Ready(answer) => Some(answer.answer()),
            };
            if command.answering == Some(progress.answered) {
                self.answering = Some(ticket);
            }
            if !is_journal_written {
                (command.index, command.answering) = (progress.popped.wrapping_sub(1), None);
                self.journal.put_command(&command);
            }
            self.outstanding.insert(ticket, (header, Request::restored(&command)));
            self.ready.extend(answer.map(|answer| (ticket, answer)));
        }
        // If the workers use another card, the daemon was killed between the move of the programs and the record of the
        // VM's new card.
        let is_elsewhere = card.as_ref().is_some_and(|card| card != self.launcher.card());
        if is_elsewhere && !processes.is_empty() {
            let (programs, expected) = (processes.len(), self.launcher.card());
            tracing::error!(programs, card, expected, "CUDA programs end: the daemon was killed during their move");
        }
        let processes: BTreeMap<_, _> =
            processes.iter().filter(|_| !is_elsewhere).map(|process| (process.worker, process.id)).collect();
        // TIMEOUT: a worker tries to connect for as long as it runs without a daemon, and then exits. This time began
        // when the earlier daemon exited, so only stopped workers remain afterwards.
        let limit = self.launcher.rejoin().map_or(Duration::ZERO, |rejoin| rejoin.limit);
        let until = self.now().saturating_add(u64::try_from(limit.as_nanos()).unwrap_or(u64::MAX));
        for (id, is_killed) in self.core.workers() {
            let process = processes.get(&id.0).and_then(|process| self.launcher.adopt(*process));
            let Some(process) = process else {
                self.lose(id);
                continue;
            };
            let link = links.remove(&id);
            let is_linked = link.is_some();
            let mut worker = Worker::adopted(process, link, until);
            if is_killed {
                worker.kill();
            }
            self.workers.insert(id, worker);
            if is_linked {
                self.core.repeat(id);
            }
        }
        tracing::info!(
            workers = self.workers.len(),
            commands = self.outstanding.len(),
            "CUDA programs of the previous daemon continue"
        );
        if !is_journal_written {
            self.journal.put_progress(self.progress);
            self.record();
        }
        self.perform();
    }

    /// Counts a response that the earlier process has sent but not counted, if any.
    pub(super) fn count_last_answer(
        &mut self,
        queue: &mut ControlQueue,
        memory: &MemoryTable,
    ) -> Result<(), QueueError> {
        let mut progress = queue.progress();
        match (queue.answers_beyond(memory)?, self.answering) {
            (0, None) => {}
            (0, Some(ticket)) => {
                // Other commands may be answered before this one.
                if let Some((_, request)) = self.outstanding.get(&ticket) {
                    self.journal.put_answering(request.head(), None);
                }
            }
            (1, Some(ticket)) => {
                progress.answered = progress.answered.wrapping_add(1);
                if let Some((_, request)) = self.outstanding.remove(&ticket) {
                    self.journal.remove_command(request.head());
                }
            }
            // The command is counted together with its response.
            (1, None) => {
                progress.popped = progress.popped.wrapping_add(1);
                progress.answered = progress.answered.wrapping_add(1);
            }
            _ => return Err(QueueError::Changed),
        }
        queue.set_progress(progress);
        self.journal.put_progress(progress);
        (self.progress, self.is_resuming, self.answering) = (progress, false, None);
        Ok(())
    }

    /// Responds to commands with known responses once the queue can be used.
    pub(super) fn answer_ready(&mut self) {
        let was_resuming = self.is_resuming;
        if self.ready.is_empty() && !was_resuming || self.with_queue(|_, _| Ok(())).is_none() {
            return;
        }
        if was_resuming {
            // The earlier process may not have signaled an interrupt for its last response.
            let vector = self.shared.state.lock().registers.interrupt();
            if let Some(vector) = vector {
                self.link.interrupts().trigger_msix(vector.into());
            }
        }
        // The next process must not find a state older than the responses.
        self.record_changes();
        for (ticket, answer) in std::mem::take(&mut self.ready) {
            if let Some((header, request)) = self.outstanding.remove(&ticket) {
                self.answer(&header, &request, answer, true);
            }
        }
    }

    /// Accepts workers that reconnect after their daemon has exited, and kills workers that do not reconnect in time.
    pub(super) fn take_workers(&mut self) {
        let now = self.now();
        self.adoption_until = self.adoption_until.filter(|until| now < *until);
        for _ in 0..MAX_ACCEPTED {
            // Until the earlier process's state has arrived, its workers wait in the socket's backlog.
            let Some(socket) = self.rejoin.as_ref().filter(|_| self.adoption_until.is_none()) else { break };
            match socket.accept() {
                Ok(Some((pid, link))) => self.take_worker(pid, link),
                Ok(None) => break,
                Err(error) => {
                    // If no descriptor is free, the socket would stay readable.
                    tracing::error!(%error, "no more workers can connect to this daemon");
                    self.rejoin = None;
                }
            }
        }
        for worker in self.workers.values_mut() {
            if worker.rejoins_until.is_some_and(|until| until <= now) {
                tracing::warn!("killing a worker that does not reconnect to this daemon");
                worker.rejoins_until = None;
                worker.kill();
            }
        }
    }

    fn take_worker(&mut self, pid: i32, link: Link) {
        let mut link = Some(link);
        for (&id, worker) in &mut self.workers {
            let Some(offered) = link.take() else { break };
            match worker.rejoin(pid, offered) {
                Ok(()) => {
                    tracing::info!(pid, "a worker has connected to this daemon");
                    self.core.repeat(id);
                }
                Err(offered) => link = Some(offered),
            }
        }
        if let Some(link) = link {
            // Without this message, the worker would reconnect.
            let _ = link.send_to_worker(ToWorker::Goodbye);
        }
        self.perform();
    }

    /// Records a command before its response is sent.
    pub(super) fn record_command(&self, ticket: Ticket, (header, request): (&Header, &Request), reply: Reply) {
        if !self.is_journal_void {
            self.journal.put_command(&self.command(ticket, header, request, reply));
        }
    }

    fn command(&self, Ticket(ticket): Ticket, header: &Header, request: &Request, reply: Reply) -> SavedCommand {
        SavedCommand {
            head: request.head(),
            index: self.progress.popped.wrapping_sub(1),
            answering: None,
            ticket,
            header: header.to_bytes(),
            reply,
            writable: request.writable(),
        }
    }

    /// Records the structure if it has changed.
    pub(super) fn record_changes(&mut self) {
        if self.core.take_changed() {
            self.record();
        }
    }

    /// Records the structure.
    pub(super) fn record(&mut self) {
        if self.is_journal_void {
            return;
        }
        if let Err(why) = self.journal.put_structure(&self.structure()) {
            tracing::warn!(why, "CUDA programs of this VM do not outlive this daemon");
            self.journal.void();
            self.is_journal_void = true;
        }
    }

    fn structure(&self) -> SavedStructure {
        let process = |(id, worker): (&WorkerId, &Worker)| Some(SavedProcess { worker: id.0, id: worker.id()? });
        SavedStructure {
            core: self.core.save(),
            processes: self.workers.iter().filter_map(process).collect(),
            popped: self.progress.popped,
            last_ticket: self.tickets,
            card: Some(self.launcher.card().to_owned()),
        }
    }

    /// Saves the function and duplicates its descriptors: the window, followed by the workers' links. The thread must
    /// be stopped.
    ///
    /// # Errors
    /// Returns an error if the function cannot be handed over. The error contains the reason.
    pub(crate) fn save(&mut self) -> Result<(SavedFunction, Vec<OwnedFd>), String> {
        let shared = Arc::clone(&self.shared);
        if shared.state.lock().adoption.is_some() {
            return Err("its CUDA function has not resumed yet".to_owned());
        }
        if self.is_restarting() {
            return Err("a worker of its CUDA function is being restarted".to_owned());
        }
        let copied = |fd: std::os::fd::BorrowedFd<'_>| fd.try_clone_to_owned().map_err(|error| error.to_string());
        let state = shared.state.lock();
        let window = state.window.as_ref().ok_or("it has no window")?;
        let mut descriptors = vec![copied(window.file().as_fd())?];
        let (config, registers) = (state.config.to_vec(), state.registers.save());
        drop(state);
        let mut links = Vec::new();
        for (id, worker) in &self.workers {
            if let Some(link) = worker.link() {
                descriptors.push(copied(link)?);
                links.push(id.0);
            }
        }
        let commands = self.outstanding.iter().map(|(&ticket, (header, request))| {
            let known = self.ready.iter().find(|(of, _)| *of == ticket).map(|(_, answer)| *answer);
            let reply = match (known.and_then(crate::saved::ReadyAnswer::new), self.core.wait(header.context(), ticket))
            {
                (Some(answer), _) => Reply::Ready(answer),
                (None, Some(wait)) => Reply::Word(wait),
                (None, None) => Reply::Removal,
            };
            self.command(ticket, header, request, reply)
        });
        let outstanding = commands.collect();
        let (progress, structure) = (self.progress, self.structure());
        Ok((SavedFunction { config, registers, progress, outstanding, structure, links }, descriptors))
    }

    /// Releases the workers to another daemon.
    pub(crate) fn leave(&mut self) {
        self.workers.values_mut().for_each(Worker::leave);
        // The next daemon does not know these workers. Dropping them kills them.
        self.dismissed.clear();
    }
}
