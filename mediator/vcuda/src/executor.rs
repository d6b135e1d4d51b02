//! The thread that executes the guest's commands and communicates with the workers.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use cuda_ring::{control, state};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use vmm_glue::memory::MemoryTable;
use vmm_glue::{Link, worth_logging};
use worker_link::{FromWorker, Reason, ToWorker};

use crate::command::{Answer, Command, Header, Submission};
use crate::core::{Action, Core, Limits, Ticket, WorkerId};
use crate::journal::Journal;
use crate::queue::{ControlQueue, QueueError, Request};
use crate::rejoin::RejoinSocket;
use crate::saved::{Progress, ReadyAnswer, Reply};
use crate::shared::{Shared, State};
use crate::window::Window;
use crate::worker::{Launcher, Worker};

/// Maximum number of commands executed before workers' messages are handled.
const MAX_BATCH: usize = 256;
/// Time after a command during which the queue is polled with doorbells suppressed.
const LINGER: Duration = Duration::from_micros(20);
/// Time limit for killed workers to exit when the function is dropped.
// TIMEOUT: a killed process exits immediately, unless it is stuck in the driver.
const KILLED: Duration = Duration::from_secs(2);
/// Interval at which killed workers are checked.
const REAP_INTERVAL: Duration = Duration::from_millis(2);
/// Maximum number of messages received from all workers before they are handled. Each further worker then provides at
/// most one message, unless it has exited.
const MAX_MESSAGES: usize = 64;
/// Time limit for receiving the journal of a killed daemon, in ns.
// TIMEOUT: the daemon provides the journal within milliseconds of its start, unless the host is busy.
const ADOPTION_NS: u64 = 5_000_000_000;
/// Interval for polling words that the card writes, in ns. No worker reports these writes.
const POLL_WAITS_NS: u64 = 5_000_000;

mod moving;
mod restart;
mod saved;

/// Executes the guest's commands, and communicates with the workers.
pub(crate) struct Executor {
    name: String,
    core: Core,
    shared: Arc<Shared>,
    link: Link,
    window: Arc<Window>,
    launcher: Box<dyn Launcher>,
    workers: BTreeMap<WorkerId, Worker>,
    /// Commands of the current queue without a response.
    outstanding: BTreeMap<Ticket, (Header, Request)>,
    generation: u64,
    /// Command counts of the current queue when it was last used.
    progress: Progress,
    /// Set if the counts may lack the last response of an earlier process.
    is_resuming: bool,
    /// The recorded command to which the earlier process may have responded last.
    answering: Option<Ticket>,
    /// Commands with known responses that wait until the queue can be used.
    ready: Vec<(Ticket, Answer)>,
    tickets: u64,
    journal: Arc<Journal>,
    /// Set if the journal is incomplete and is no longer written.
    is_journal_void: bool,
    rejoin: Option<RejoinSocket>,
    /// Deadline in ns for the state of an earlier process to arrive. Until then, the workers that may connect are
    /// unknown.
    adoption_until: Option<u64>,
    failures: u64,
    /// Set if the published list of programs may be outdated.
    has_news: bool,
    /// Workers that are being replaced.
    restarting: BTreeMap<WorkerId, restart::Restarting>,
    /// The move to another card that is in progress, if any.
    moving: Option<moving::Moving>,
    /// Killed workers that no longer serve a program, until they have exited.
    dismissed: Vec<Worker>,
}

/// Result of a poll of the queue.
enum Found {
    /// A command.
    Request(Request),
    /// No command.
    Nothing,
    /// The queue is not set up, or belongs to a later generation.
    NoQueue,
}

impl Executor {
    pub(crate) fn new(
        name: &str,
        limits: Limits,
        shared: Arc<Shared>,
        link: Link,
        window: Arc<Window>,
        launcher: Box<dyn Launcher>,
    ) -> Self {
        let journal = Arc::clone(&shared.state.lock().journal);
        Self {
            name: name.to_owned(),
            core: Core::new(limits),
            shared,
            link,
            window,
            launcher,
            workers: BTreeMap::new(),
            outstanding: BTreeMap::new(),
            generation: 0,
            progress: Progress::default(),
            is_resuming: false,
            answering: None,
            ready: Vec::new(),
            tickets: 0,
            journal,
            is_journal_void: false,
            rejoin: None,
            adoption_until: None,
            failures: 0,
            has_news: false,
            restarting: BTreeMap::new(),
            moving: None,
            dismissed: Vec::new(),
        }
    }

    /// Returns the name of the VM.
    pub(crate) fn name(&self) -> &str {
        &self.name
    }

    /// Runs until the function is suspended or dropped.
    pub(crate) fn run(mut self: Box<Self>) -> Box<Self> {
        if let Some(rejoin) = self.launcher.rejoin().filter(|_| self.rejoin.is_none()) {
            self.rejoin = RejoinSocket::listen(&rejoin.socket)
                .inspect_err(|error| tracing::error!(%error, "workers of CUDA programs cannot outlive this daemon"))
                .ok();
            self.adoption_until = Some(self.now().saturating_add(ADOPTION_NS));
        }
        self.record();
        loop {
            // Clear first, so that a request to stop that arrives after the check ends the next wait.
            self.shared.wake.clear();
            if self.shared.is_stopped() {
                break;
            }
            let is_busy = self.serve();
            if std::mem::take(&mut self.has_news) {
                let process = |id| u32::try_from(self.workers.get(&id)?.id()?.pid).ok();
                *self.shared.programs.lock() = self.core.programs(process);
            }
            if let Err(error) = self.wait(is_busy) {
                tracing::error!(%error, "CUDA programs of this VM are no longer served: cannot wait for events");
                break;
            }
        }
        if self.shared.is_ending() {
            self.end();
        }
        self
    }

    /// Kills all workers, and waits at most [`KILLED`] for them to exit.
    fn end(&mut self) {
        self.fail_move("its VM ends");
        self.core.reset();
        self.perform();
        // Reap the killed processes here. Otherwise, they would remain zombies.
        let since = Instant::now();
        let left = |executor: &Self| executor.workers.len().saturating_add(executor.dismissed.len());
        while left(self) > 0 && since.elapsed() < KILLED {
            locks::sleep(REAP_INTERVAL);
            self.serve_workers();
            self.continue_move();
        }
        if left(self) > 0 {
            tracing::error!(count = left(self), "killed workers do not exit");
        }
    }

    /// Returns the time of the host's monotonic clock in ns, which all processes share.
    fn now(&self) -> u64 {
        let now = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
        let seconds = u64::try_from(now.tv_sec).unwrap_or(0);
        seconds.saturating_mul(1_000_000_000).saturating_add(u64::try_from(now.tv_nsec).unwrap_or(0))
    }

    /// Waits for the guest, a worker, or the next deadline.
    fn wait(&self, is_busy: bool) -> Result<(), Errno> {
        let rejoins = self.workers.values().filter_map(|worker| worker.rejoins_until).min();
        let adoption = self.adoption_until.filter(|_| self.rejoin.is_some());
        let next = self.core.next_tick().into_iter().chain(rejoins).chain(adoption).min();
        let mut limit = next.map(|at| at.saturating_sub(self.now()));
        if self.core.has_waits() || self.moving.is_some() || !self.dismissed.is_empty() {
            limit = Some(limit.map_or(POLL_WAITS_NS, |limit| limit.min(POLL_WAITS_NS)));
        }
        if is_busy {
            limit = Some(0);
        }
        let limit = limit.map(|ns| Timespec {
            tv_sec: i64::try_from(ns / 1_000_000_000).unwrap_or(i64::MAX),
            tv_nsec: i64::try_from(ns % 1_000_000_000).unwrap_or(0),
        });
        let mut fds = vec![PollFd::from_borrowed_fd(self.shared.wake.fd(), PollFlags::IN)];
        let rejoin = self.rejoin.iter().filter(|_| adoption.is_none());
        fds.extend(rejoin.map(|socket| PollFd::new(socket, PollFlags::IN)));
        for worker in self.workers.values() {
            fds.push(PollFd::from_borrowed_fd(worker.ended(), PollFlags::IN));
            if let Some(link) = worker.link() {
                let output = if worker.has_output() { PollFlags::OUT } else { PollFlags::empty() };
                fds.push(PollFd::from_borrowed_fd(link, PollFlags::IN | output));
            }
        }
        match poll(&mut fds, limit.as_ref()) {
            Ok(_) | Err(Errno::INTR) => Ok(()),
            Err(error) => Err(error),
        }
    }

    /// Performs the pending work. Returns true if more work may be pending.
    fn serve(&mut self) -> bool {
        let adoption = self.shared.state.lock().adoption.take();
        if let Some(adoption) = adoption {
            self.adopt(*adoption);
        }
        self.take_workers();
        self.serve_workers();
        // A reset completes only here, so no later step may handle the exit of the last worker.
        if self.shared.state.lock().registers.is_resetting() {
            self.reset();
        }
        self.begin_restarts();
        self.begin_move();
        self.continue_move();
        let now = self.now();
        self.core.tick(now);
        self.core.check_all(&*self.window);
        self.perform();
        self.answer_ready();
        self.serve_queue()
    }

    /// Continues a reset, which completes once no worker is left and the window is zeroed.
    fn reset(&mut self) {
        let generation = self.shared.state.lock().generation;
        self.has_news = true;
        self.outstanding.clear();
        self.ready.clear();
        self.fail_move("its guest has reset the device");
        self.core.reset();
        self.perform();
        self.serve_workers();
        if !self.core.is_quiet() {
            return;
        }
        let mut state = self.shared.state.lock();
        if let Some(window) = state.window.clone() {
            self.window = window;
        }
        drop(state);
        if let Err(error) = self.window.zero_all() {
            tracing::error!(%error, "the window cannot be zeroed; the device remains in reset");
            return;
        }
        // If this process is killed before the registers report completion, the next process repeats the reset.
        (self.progress, self.is_resuming, self.answering) = Default::default();
        if std::mem::take(&mut self.is_journal_void) {
            self.journal.revalidate();
        }
        self.journal.clear();
        self.record();
        state = self.shared.state.lock();
        if state.generation == generation {
            self.generation = generation;
            state.registers.reset();
            state.record_registers();
        }
    }

    /// Handles messages and exits of workers.
    fn serve_workers(&mut self) {
        let mut ended = Vec::new();
        let mut messages = Vec::new();
        for (&id, worker) in &mut self.workers {
            worker.flush();
            // The exit of a worker is handled after its earlier messages.
            let has_ended = is_readable(&*worker);
            while let Some(message) = worker.receive() {
                messages.push((id, message));
                if messages.len() >= MAX_MESSAGES && !has_ended {
                    break;
                }
            }
            if has_ended {
                worker.reap();
                ended.push(id);
            }
        }
        for (id, message) in messages {
            match message {
                FromWorker::Check => self.core.check(id, &*self.window),
                FromWorker::Removed { id: blob, serial } => self.core.removed(id, blob, serial),
                FromWorker::Failed { reason } => {
                    self.failures = self.failures.saturating_add(1);
                    if worth_logging(self.failures) {
                        report(reason);
                    }
                }
                FromWorker::Saved => {
                    self.restart_saved(id);
                    self.move_saved(id);
                }
                FromWorker::Restored => self.restart_done(id, Ok(())),
                FromWorker::Refused { obstacle } => {
                    let why = object_log::describe(obstacle);
                    self.move_refused(id, &why);
                    self.restart_done(id, Err(why));
                }
            }
        }
        for id in ended {
            self.workers.remove(&id);
            if !self.move_ended(id) && !self.replace(id) {
                self.lose(id);
            }
        }
        self.perform();
    }

    fn lose(&mut self, id: WorkerId) {
        self.has_news = true;
        self.shared.workers_lost.fetch_add(1, Ordering::Relaxed);
        self.core.exited(id);
    }

    /// Executes commands from the queue. Returns true if more commands may be pending.
    fn serve_queue(&mut self) -> bool {
        if !matches!(self.with_queue(ControlQueue::suppress_kicks), Some(())) {
            return false;
        }
        let mut idle_since = None;
        for _ in 0..MAX_BATCH {
            match self.next_request() {
                Found::Request(request) => {
                    idle_since = None;
                    self.execute(request);
                }
                Found::NoQueue => return false,
                Found::Nothing => {
                    // Guests often send several commands in sequence, and need no doorbells while this loop polls.
                    let since = *idle_since.get_or_insert_with(Instant::now);
                    while since.elapsed() < LINGER {
                        std::hint::spin_loop();
                    }
                    match self.with_queue(ControlQueue::allow_kicks) {
                        Some(true) => {
                            let _ = self.with_queue(ControlQueue::suppress_kicks);
                        }
                        Some(false) | None => return false,
                    }
                }
            }
        }
        true
    }

    fn next_request(&mut self) -> Found {
        match self.with_queue(ControlQueue::pop) {
            Some(Some(request)) => Found::Request(request),
            Some(None) => Found::Nothing,
            None => Found::NoQueue,
        }
    }

    /// Calls a function with the queue, if the device may use it. A queue that violates the standard is not used again.
    fn with_queue<T>(
        &mut self,
        act: impl FnOnce(&mut ControlQueue, &MemoryTable) -> Result<T, QueueError>,
    ) -> Option<T> {
        let shared = Arc::clone(&self.shared);
        let mut state = shared.state.lock();
        let memory = self.link.memory().snapshot();
        let State { registers, queue, generation, is_bus_master, .. } = &mut *state;
        if *generation != self.generation || !*is_bus_master || registers.is_resetting() {
            return None;
        }
        let setup = registers.control_queue()?;
        if queue.is_none() {
            *queue = ControlQueue::new(setup, self.progress, &memory);
        }
        let used = queue.as_mut().map(|queue| {
            if self.is_resuming {
                self.count_last_answer(queue, &memory)?;
            }
            let result = act(queue, &memory)?;
            self.progress = queue.progress();
            Ok(result)
        });
        let why = match used {
            Some(Ok(result)) => return Some(result),
            Some(Err::<_, QueueError>(error)) => error.to_string(),
            None => "its setup does not refer to guest memory".to_owned(),
        };
        *queue = None;
        let vector = registers.fail();
        state.record_registers();
        drop(state);
        self.failures = self.failures.saturating_add(1);
        if worth_logging(self.failures) {
            tracing::warn!(why, ?setup, "the control queue cannot be used; the guest must reset the device");
        }
        if let Some(vector) = vector {
            self.link.interrupts().trigger_msix(vector.into());
        }
        None
    }

    fn execute(&mut self, request: Request) {
        self.shared.commands.fetch_add(1, Ordering::Relaxed);
        let Some((header, command)) = Command::decode(&request.bytes) else {
            return self.answer(&Header::default(), &request, Answer::Invalid, false);
        };
        let is_routine = matches!(command, Command::Submit(Submission::Doorbell | Submission::Wait { .. }));
        self.has_news |= !is_routine;
        self.tickets = self.tickets.wrapping_add(1);
        let ticket = Ticket(self.tickets);
        let now = self.now();
        let answer = self.core.command(&header, command, ticket, &*self.window, now);
        let Some(answer) = answer else {
            let wait = self.core.wait(header.context(), ticket);
            self.record_command(ticket, (&header, &request), wait.map_or(Reply::Removal, Reply::Word));
            self.outstanding.insert(ticket, (header, request));
            self.perform();
            return self.journal.put_progress(self.progress);
        };
        // A command without an effect can be repeated, so it is counted together with its response.
        let ready = ReadyAnswer::new(answer).filter(|_| self.core.is_changed());
        if let Some(ready) = ready {
            self.record_command(ticket, (&header, &request), Reply::Ready(ready));
            self.perform();
        }
        self.answer(&header, &request, answer, ready.is_some());
        self.perform();
    }

    /// Responds to a command if its queue still exists. `is_recorded` is true if the journal contains the command.
    fn answer(&mut self, header: &Header, request: &Request, answer: Answer, is_recorded: bool) {
        let bytes = answer.encode(header);
        let journal = Arc::clone(&self.journal);
        let interrupt = self.with_queue(|queue, memory| {
            if is_recorded {
                journal.put_answering(request.head(), Some(queue.progress().answered));
            }
            let interrupt = queue.answer(memory, request, &bytes)?;
            journal.put_progress(queue.progress());
            if is_recorded {
                journal.remove_command(request.head());
            }
            Ok(interrupt)
        });
        if interrupt == Some(true) {
            let vector = self.shared.state.lock().registers.interrupt();
            if let Some(vector) = vector {
                self.shared.interrupts.fetch_add(1, Ordering::Relaxed);
                self.link.interrupts().trigger_msix(vector.into());
            }
        }
    }

    /// Executes the actions of the state machine.
    fn perform(&mut self) {
        loop {
            let actions = self.core.take_actions();
            if actions.is_empty() {
                return self.record_changes();
            }
            actions.into_iter().for_each(|action| self.perform_one(action));
        }
    }

    fn perform_one(&mut self, action: Action) {
        match action {
            Action::Start { worker } => self.start_after_move(worker),
            Action::Blob { worker, blob, kind, serial, range } => {
                let (offset, size) = (range.offset, range.size);
                self.send(worker, ToWorker::Blob { id: blob, kind: kind.into(), serial, offset, size });
            }
            Action::Remove { worker, blob, serial } => self.send(worker, ToWorker::Remove { id: blob, serial }),
            Action::Doorbell { worker } => self.send(worker, ToWorker::Doorbell),
            Action::Leave { worker } => {
                self.forget_late(worker);
                self.send(worker, ToWorker::Goodbye);
            }
            Action::Kill { worker } => {
                self.forget_late(worker);
                if let Some(worker) = self.workers.get_mut(&worker) {
                    worker.kill();
                }
            }
            Action::Zero { range } => {
                if let Err(error) = self.window.zero(range) {
                    tracing::error!(%error, ?range, "a range of the window cannot be zeroed");
                }
            }
            Action::Lost { control } => {
                if control.size >= control::BYTES {
                    self.window.store(control.offset.saturating_add(control::STATE), state::LOST);
                }
            }
            Action::Answer { ticket, answer } => {
                if self.is_resuming || self.with_queue(|_, _| Ok(())).is_none() {
                    // For example, a worker can exit before the VMM has shared guest memory with this daemon.
                    self.ready.push((ticket, answer));
                    return;
                }
                if let Some((header, request)) = self.outstanding.remove(&ticket) {
                    // The next process must not find a state older than the response.
                    self.record_changes();
                    self.answer(&header, &request, answer, true);
                }
            }
        }
    }

    fn start(&mut self, id: WorkerId) {
        let window = self.window.file().try_clone().map_err(|error| error.to_string());
        match window.and_then(|window| self.launcher.launch(window)) {
            Ok(started) => {
                self.shared.workers_started.fetch_add(1, Ordering::Relaxed);
                self.workers.insert(id, Worker::new(started));
            }
            Err(why) => {
                self.failures = self.failures.saturating_add(1);
                if worth_logging(self.failures) {
                    tracing::error!(why, "a CUDA program has no worker");
                }
                self.lose(id);
            }
        }
    }

    fn send(&mut self, worker: WorkerId, message: ToWorker) {
        if let Some(worker) = self.workers.get_mut(&worker) {
            worker.send(message);
        }
    }
}

/// Logs the reason that a worker reports for exiting.
fn report(reason: Reason) {
    match reason {
        Reason::Forbidden(number) => {
            let call = worker_link::call_name(number);
            tracing::warn!(call, number, "the worker of a CUDA program has made a forbidden system call, and exits");
        }
        other => tracing::warn!(reason = ?other, "the worker of a CUDA program exits"),
    }
}

/// Returns true if a worker's process has exited.
fn is_readable(worker: &Worker) -> bool {
    let mut fds = [PollFd::from_borrowed_fd(worker.ended(), PollFlags::IN)];
    poll(&mut fds, Some(&Timespec::default())).is_ok_and(|ready| ready > 0)
}
