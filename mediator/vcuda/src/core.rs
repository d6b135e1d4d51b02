//! The state machine: contexts, blobs, workers and waits of one device. Its inputs are commands and events, and its
//! outputs are responses and actions. It performs no I/O, and receives the time as an argument.
//!
//! One worker serves one context. The worker is started when the context's first blob is mapped, so a program that only
//! probes the device costs nothing. A blob owns its range of the window from its mapping until the worker has
//! unregistered the blob. The range is zeroed at the mapping and after the unregistration.

use std::collections::BTreeMap;

use crate::command::{Answer, CAPSET, CAPSET_VERSION, Command, Header, Submission};

mod ranges;
mod saved;
mod status;
#[cfg(test)]
mod tests;

pub use ranges::Range;
use ranges::Ranges;
pub use saved::{SavedCore, SavedWait};
pub use status::ProgramStatus;

/// Allocation granularity of the window in bytes. The driver rounds sizes up to it.
pub const PAGE_BYTES: u64 = 4096;
/// Kind of a control blob. The kind is the lowest byte of a blob ID.
const KIND_CONTROL: u8 = 1;
/// Maximum number of contexts. A context without blobs costs only its entry.
const MAX_CONTEXTS: usize = 1024;
/// Maximum number of resources.
const MAX_RESOURCES: usize = 16 << 10;
/// Maximum number of blobs per context.
const MAX_BLOBS: usize = 1024;
/// Maximum number of waits per context: one for each ring, plus a reserve for threads that share a ring.
const MAX_WAITS: usize = 256;
/// Time limit for a worker to exit, in ns.
// TIMEOUT: a worker that exits frees its card memory, which takes milliseconds.
const LEAVE_NS: u64 = 2_000_000_000;

/// ID of one of the device's workers. Never reused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct WorkerId(pub u64);

/// ID of a command that has no response yet.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Ticket(pub u64);

/// Limits of a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Size of the window in bytes.
    pub window_bytes: u64,
    /// Maximum number of workers, including exiting workers.
    pub workers: usize,
}

/// Access to the words of the window.
pub trait Words {
    /// Loads the 64-bit word at `offset` in the window. `offset` must be a multiple of 8.
    fn load(&self, offset: u64) -> u64;
}

/// An action of the executor. Actions must be executed in order.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Action {
    /// Starts a worker for a context.
    Start {
        /// ID of the worker.
        worker: WorkerId,
    },
    /// Announces a new blob to a worker.
    Blob {
        /// ID of the worker.
        worker: WorkerId,
        /// Blob number, chosen by the program.
        blob: u32,
        /// Kind of the blob.
        kind: u8,
        /// Serial number that distinguishes uses of the same blob number.
        serial: u32,
        /// The blob's range of the window.
        range: Range,
    },
    /// Requests that a worker unregister a blob.
    Remove {
        /// ID of the worker.
        worker: WorkerId,
        /// Blob number, chosen by the program.
        blob: u32,
        /// Serial number of the blob's mapping.
        serial: u32,
    },
    /// Wakes a worker.
    Doorbell {
        /// ID of the worker.
        worker: WorkerId,
    },
    /// Requests that a worker exit.
    Leave {
        /// ID of the worker.
        worker: WorkerId,
    },
    /// Kills a worker.
    Kill {
        /// ID of the worker.
        worker: WorkerId,
    },
    /// Zeroes a range of the window.
    Zero {
        /// Range to zero.
        range: Range,
    },
    /// Marks the context of a control blob as lost.
    Lost {
        /// Range of the control blob.
        control: Range,
    },
    /// Responds to a command.
    Answer {
        /// ID of the command.
        ticket: Ticket,
        /// The response.
        answer: Answer,
    },
}

/// State of a context's worker.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Service {
    /// No blob has been mapped yet.
    Unused,
    /// A worker is running.
    Worker(WorkerId),
    /// The worker has exited, or the context has violated the protocol.
    Lost,
}

#[derive(Debug)]
struct Wait {
    ticket: Ticket,
    blob: u32,
    /// Offset of the word in the window.
    word: u64,
    value: u64,
}

#[derive(Debug)]
struct Context {
    capset: u8,
    name: String,
    pid: Option<u32>,
    service: Service,
    /// Mapped resources, keyed by the program's blob number.
    blobs: BTreeMap<u32, u32>,
    waits: Vec<Wait>,
}

#[derive(Clone, Copy, Debug)]
struct Resource {
    context: u32,
    blob: u32,
    kind: u8,
    size: u64,
    /// Serial number of the mapping, or 0 if the blob was not mapped.
    serial: u32,
    /// The blob's range of the window, once the blob is mapped.
    range: Option<Range>,
    /// ID of the worker that has registered the blob.
    worker: Option<WorkerId>,
}

#[derive(Debug)]
struct Worker {
    /// ID of the worker's context, until the context is destroyed.
    context: Option<u32>,
    /// Time at which the worker will be killed, in ns.
    deadline: Option<u64>,
    killed: bool,
    /// Blobs that the worker is unregistering, oldest first.
    removing: Vec<Removal>,
}

#[derive(Clone, Copy, Debug)]
struct Removal {
    /// Blob number, which the program may reuse.
    blob: u32,
    serial: u32,
    resource: u32,
    /// The command that waits for the removal.
    ticket: Ticket,
}

/// The state of one device.
#[derive(Debug)]
pub struct Core {
    limits: Limits,
    contexts: BTreeMap<u32, Context>,
    resources: BTreeMap<u32, Resource>,
    ranges: Ranges,
    workers: BTreeMap<WorkerId, Worker>,
    last_worker: u64,
    last_serial: u32,
    actions: Vec<Action>,
    /// Set if the state returned by [`Self::save`] has changed.
    is_changed: bool,
}

impl Core {
    /// Creates a device without contexts.
    #[must_use]
    pub fn new(limits: Limits) -> Self {
        Self {
            limits,
            contexts: BTreeMap::new(),
            resources: BTreeMap::new(),
            ranges: Ranges::new(limits.window_bytes),
            workers: BTreeMap::new(),
            last_worker: 0,
            last_serial: 0,
            actions: Vec::new(),
            is_changed: false,
        }
    }

    /// Returns the actions since the last call.
    pub fn take_actions(&mut self) -> Vec<Action> {
        std::mem::take(&mut self.actions)
    }

    /// Returns true if no worker exists.
    #[must_use]
    pub fn is_quiet(&self) -> bool {
        self.workers.is_empty()
    }

    /// Returns true if any command waits for a word.
    #[must_use]
    pub fn has_waits(&self) -> bool {
        self.contexts.values().any(|context| !context.waits.is_empty())
    }

    /// Executes a command. Returns the response, which must be sent after the actions, or `None` if a later action
    /// sends it.
    pub fn command(
        &mut self,
        header: &Header,
        command: Command,
        ticket: Ticket,
        words: &dyn Words,
        now: u64,
    ) -> Option<Answer> {
        let context = header.context();
        Some(match command {
            Command::DisplayInfo => Answer::NoDisplays,
            Command::CapsetInfo { index: 0 } => Answer::CapsetInfo,
            Command::CapsetInfo { .. } => Answer::Invalid,
            Command::Capset { id: CAPSET, version } if version <= CAPSET_VERSION => {
                Answer::Capset { window_bytes: self.limits.window_bytes }
            }
            Command::Capset { .. } => Answer::Invalid,
            Command::CreateContext { capset, name } => self.create_context(context, capset, name),
            Command::DestroyContext => self.destroy_context(context, now),
            Command::Attach => Answer::Ok,
            Command::CreateBlob { resource, blob, size } => self.create_blob(context, resource, blob, size),
            Command::MapBlob { resource, offset } => self.map_blob(resource, offset),
            // The guest has unmapped the blob, but the worker may still have it mapped. `Unref` frees the range.
            Command::UnmapBlob { .. } => Answer::Ok,
            Command::Unref { resource } => return self.unref(resource, ticket),
            Command::Submit(submission) => return self.submit(context, submission, ticket, words),
            Command::Unknown(_) => Answer::Unspecified,
        })
    }

    fn create_context(&mut self, id: u32, capset: u8, name: String) -> Answer {
        if id == 0 || self.contexts.contains_key(&id) {
            return Answer::Invalid;
        }
        if self.contexts.len() >= MAX_CONTEXTS {
            return Answer::OutOfMemory;
        }
        self.is_changed = true;
        let (blobs, waits) = (BTreeMap::new(), Vec::new());
        self.contexts.insert(id, Context { capset, name, pid: None, service: Service::Unused, blobs, waits });
        Answer::Ok
    }

    /// Destroys a context. The context's blobs persist until they are dropped.
    fn destroy_context(&mut self, id: u32, now: u64) -> Answer {
        let Some(mut context) = self.contexts.remove(&id) else { return Answer::Invalid };
        self.is_changed = true;
        self.actions.extend(answered(context.waits.drain(..)));
        if let Service::Worker(id) = context.service
            && let Some(worker) = self.workers.get_mut(&id)
        {
            worker.context = None;
            if !worker.killed {
                let deadline = now.saturating_add(LEAVE_NS);
                worker.deadline = Some(worker.deadline.map_or(deadline, |earlier| earlier.min(deadline)));
                self.actions.push(Action::Leave { worker: id });
            }
        }
        Answer::Ok
    }

    fn create_blob(&mut self, context: u32, resource: u32, id: u64, size: u64) -> Answer {
        let [kind, 0, 0, 0, number @ ..] = id.to_le_bytes() else { return Answer::Invalid };
        let is_taken = resource == 0 || self.resources.contains_key(&resource);
        if is_taken || size == 0 || !size.is_multiple_of(PAGE_BYTES) || size > self.limits.window_bytes {
            return Answer::Invalid;
        }
        if self.contexts.get(&context).is_none_or(|context| u32::from(context.capset) != CAPSET) {
            return Answer::Invalid;
        }
        if self.resources.len() >= MAX_RESOURCES {
            return Answer::OutOfMemory;
        }
        self.is_changed = true;
        let blob = u32::from_le_bytes(number);
        let new = Resource { context, blob, kind, size, serial: 0, range: None, worker: None };
        self.resources.insert(resource, new);
        Answer::Ok
    }

    /// Maps a blob at the offset chosen by the guest driver. A program is notified of errors of this command, but not
    /// of errors of earlier commands.
    fn map_blob(&mut self, id: u32, offset: u64) -> Answer {
        let Some(resource) = self.resources.get_mut(&id) else { return Answer::NoResource };
        // A blob outlives its context, whose ID can be reused.
        let Some(context) = self.contexts.get_mut(&resource.context) else { return Answer::Invalid };
        if u32::from(context.capset) != CAPSET
            || resource.range.is_some()
            || context.blobs.contains_key(&resource.blob)
            || context.service == Service::Lost
        {
            return Answer::Invalid;
        }
        if context.blobs.len() >= MAX_BLOBS {
            return Answer::OutOfMemory;
        }
        let worker = match context.service {
            Service::Worker(worker) => worker,
            _ if self.workers.len() >= self.limits.workers => return Answer::OutOfMemory,
            _ => WorkerId(self.last_worker.saturating_add(1)),
        };
        let range = Range { offset, size: resource.size };
        if !self.ranges.insert(range) {
            return Answer::Invalid;
        }
        self.is_changed = true;
        self.last_serial = self.last_serial.wrapping_add(1).max(1);
        self.actions.push(Action::Zero { range });
        if context.service == Service::Unused {
            self.last_worker = worker.0;
            context.service = Service::Worker(worker);
            let context = Some(resource.context);
            let new = Worker { context, deadline: None, killed: false, removing: Vec::new() };
            self.workers.insert(worker, new);
            self.actions.push(Action::Start { worker });
        }
        context.blobs.insert(resource.blob, id);
        let serial = self.last_serial;
        (resource.range, resource.worker, resource.serial) = (Some(range), Some(worker), serial);
        self.actions.push(Action::Blob { worker, blob: resource.blob, kind: resource.kind, serial, range });
        Answer::Mapped
    }

    /// Drops a resource. The driver may reuse the range after the response, so the worker must unregister the blob
    /// first.
    fn unref(&mut self, id: u32, ticket: Ticket) -> Option<Answer> {
        let Some(resource) = self.resources.get(&id).copied() else { return Some(Answer::Ok) };
        self.is_changed = true;
        if let Some(context) = self.contexts.get_mut(&resource.context)
            && context.blobs.get(&resource.blob) == Some(&id)
        {
            context.blobs.remove(&resource.blob);
            self.actions.extend(answered(context.waits.extract_if(.., |wait| wait.blob == resource.blob)));
        }
        let Some((number, worker)) = resource.worker.and_then(|id| Some((id, self.workers.get_mut(&id)?))) else {
            self.free(id);
            return Some(Answer::Ok);
        };
        if worker.removing.iter().any(|removal| removal.resource == id) {
            return Some(Answer::Invalid);
        }
        let Resource { blob, serial, .. } = resource;
        worker.removing.push(Removal { blob, serial, resource: id, ticket });
        // A worker may wait for its tenant's slice for a long time. The removal therefore has no time limit. Only this
        // VM waits for it. The worker of a destroyed context has its own time limit.
        if !worker.killed {
            self.actions.push(Action::Remove { worker: number, blob, serial });
        }
        None
    }

    /// Frees a resource and its range.
    fn free(&mut self, id: u32) {
        let Some(resource) = self.resources.remove(&id) else { return };
        self.is_changed = true;
        if let Some(range) = resource.range {
            self.actions.push(Action::Zero { range });
            self.ranges.remove(range);
        }
    }

    fn submit(&mut self, id: u32, submission: Submission, ticket: Ticket, words: &dyn Words) -> Option<Answer> {
        let Some(context) = self.contexts.get_mut(&id).filter(|context| u32::from(context.capset) == CAPSET) else {
            return Some(Answer::Ok);
        };
        if let Submission::Identify { pid } = submission {
            self.is_changed |= context.pid.replace(pid) != Some(pid);
        }
        let Service::Worker(worker) = context.service else { return Some(Answer::Ok) };
        match submission {
            Submission::Empty | Submission::Identify { .. } => {}
            Submission::Doorbell => self.actions.push(Action::Doorbell { worker }),
            Submission::Wait { blob, offset, value } => {
                let range = context.blobs.get(&blob).and_then(|id| self.resources.get(id)?.range);
                let Some(word) = range.and_then(|range| range.word(offset)) else {
                    self.lose(id);
                    return Some(Answer::Ok);
                };
                if words.load(word) < value && context.waits.len() < MAX_WAITS {
                    context.waits.push(Wait { ticket, blob, word, value });
                    return None;
                }
            }
            Submission::Malformed => self.lose(id),
        }
        Some(Answer::Ok)
    }

    /// Stops serving a context that has violated the protocol.
    fn lose(&mut self, id: u32) {
        let Some(context) = self.contexts.get_mut(&id) else { return };
        if let Service::Worker(worker) = std::mem::replace(&mut context.service, Service::Lost) {
            self.kill(worker);
            // Another context may have this ID by the time the worker has exited.
            if let Some(worker) = self.workers.get_mut(&worker) {
                worker.context = None;
            }
        }
        self.report_lost(id);
    }

    /// Notifies a program that its context is lost, and responds to its waits.
    fn report_lost(&mut self, id: u32) {
        let Some(context) = self.contexts.get_mut(&id) else { return };
        self.is_changed = true;
        context.service = Service::Lost;
        let resources = context.blobs.values().filter_map(|id| self.resources.get(id));
        let control = resources.filter(|resource| resource.kind == KIND_CONTROL).filter_map(|resource| resource.range);
        self.actions.extend(control.map(|control| Action::Lost { control }));
        self.actions.extend(answered(context.waits.drain(..)));
    }

    fn kill(&mut self, id: WorkerId) {
        let Some(worker) = self.workers.get_mut(&id) else { return };
        self.is_changed = true;
        worker.deadline = None;
        if !std::mem::replace(&mut worker.killed, true) {
            self.actions.push(Action::Kill { worker: id });
        }
    }

    /// Responds to the completed waits of a worker's context: those whose word has reached the awaited value. Must be
    /// called after words have changed.
    pub fn check(&mut self, worker: WorkerId, words: &dyn Words) {
        let context = self.workers.get(&worker).and_then(|worker| self.contexts.get_mut(&worker.context?));
        if let Some(context) = context {
            self.actions.extend(answered(reached(context, words)));
        }
    }

    /// Calls [`Self::check`] for all contexts.
    pub fn check_all(&mut self, words: &dyn Words) {
        for context in self.contexts.values_mut() {
            self.actions.extend(answered(reached(context, words)));
        }
    }

    /// Records that a worker has unregistered a blob.
    pub fn removed(&mut self, id: WorkerId, blob: u32, serial: u32) {
        let Some(worker) = self.workers.get_mut(&id) else { return };
        let is_it = |removal: &Removal| (removal.blob, removal.serial) == (blob, serial);
        let Some(place) = worker.removing.iter().position(is_it) else { return };
        let Removal { resource, ticket, .. } = worker.removing.remove(place);
        self.free(resource);
        self.actions.push(Action::Answer { ticket, answer: Answer::Ok });
    }

    /// Records that a worker's process has exited, or did not start.
    pub fn exited(&mut self, id: WorkerId) {
        let Some(worker) = self.workers.remove(&id) else { return };
        self.is_changed = true;
        for Removal { resource, ticket, .. } in worker.removing {
            self.free(resource);
            self.actions.push(Action::Answer { ticket, answer: Answer::Ok });
        }
        if let Some(context) = worker.context {
            self.report_lost(context);
        }
    }

    /// Kills workers that have exceeded their time limit.
    pub fn tick(&mut self, now: u64) {
        let late = |worker: &Worker| worker.deadline.is_some_and(|deadline| deadline <= now);
        let late: Vec<_> = self.workers.iter().filter(|(_, worker)| late(worker)).map(|(&id, _)| id).collect();
        late.into_iter().for_each(|id| self.kill(id));
    }

    /// Returns the time of the next [`Self::tick`] in ns, or `None` if no worker has a time limit.
    #[must_use]
    pub(crate) fn next_tick(&self) -> Option<u64> {
        self.workers.values().filter_map(|worker| worker.deadline).min()
    }

    /// Drops all contexts and outstanding commands, and kills the workers. The device can be used again once
    /// [`Self::is_quiet`] returns true and the window is zeroed.
    pub fn reset(&mut self) {
        self.is_changed = true;
        self.contexts.clear();
        self.resources.clear();
        self.ranges = Ranges::new(self.limits.window_bytes);
        // Unsent responses belong to the previous queue.
        self.actions.retain(|action| !matches!(action, Action::Answer { .. }));
        let workers: Vec<_> = self.workers.keys().copied().collect();
        for id in workers {
            self.kill(id);
            if let Some(worker) = self.workers.get_mut(&id) {
                worker.context = None;
                worker.removing.clear();
            }
        }
    }
}

/// Removes and returns a context's completed waits: those whose word has reached the awaited value.
fn reached(context: &mut Context, words: &dyn Words) -> impl Iterator<Item = Wait> {
    context.waits.extract_if(.., |wait| words.load(wait.word) >= wait.value)
}

fn answered(waits: impl Iterator<Item = Wait>) -> impl Iterator<Item = Action> {
    waits.map(|wait| Action::Answer { ticket: wait.ticket, answer: Answer::Ok })
}
