//! Saves and restores the state machine. Waits are saved with the waiting commands.

use std::collections::BTreeMap;

use saved_state::{Invalid, ascend};
use serde::{Deserialize, Serialize};

use super::{
    Action, Context, Core, Limits, MAX_BLOBS, MAX_CONTEXTS, MAX_RESOURCES, MAX_WAITS, PAGE_BYTES, Range, Removal,
    Resource, Service, Ticket, Wait, Worker, WorkerId,
};

/// Maximum number of workers in a saved state.
const MAX_WORKERS: usize = 1024;
/// Maximum length of a program's name in characters.
const MAX_NAME: usize = 64;

/// Saved contexts, resources and workers.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct SavedCore {
    contexts: Vec<SavedContext>,
    resources: Vec<SavedResource>,
    workers: Vec<SavedWorker>,
    last_worker: u64,
    last_serial: u32,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct SavedContext {
    id: u32,
    capset: u8,
    name: String,
    pid: Option<u32>,
    service: SavedService,
    blobs: Vec<(u32, u32)>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
enum SavedService {
    Unused,
    Worker(u64),
    Lost,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct SavedResource {
    id: u32,
    context: u32,
    blob: u32,
    kind: u8,
    size: u64,
    serial: u32,
    offset: Option<u64>,
    worker: Option<u64>,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct SavedWorker {
    id: u64,
    context: Option<u32>,
    /// Time at which the worker will be killed, in ns of the host's monotonic clock.
    deadline: Option<u64>,
    killed: bool,
    removing: Vec<SavedRemoval>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct SavedRemoval {
    blob: u32,
    serial: u32,
    resource: u32,
    ticket: u64,
}

/// A command that waits for a word.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct SavedWait {
    /// Blob number, chosen by the program.
    pub blob: u32,
    /// Offset of the word in the window, in bytes.
    pub word: u64,
    /// The value that the command waits for.
    pub value: u64,
}

impl Core {
    /// Returns true if the state to save has changed since the last call.
    pub(crate) fn take_changed(&mut self) -> bool {
        std::mem::take(&mut self.is_changed)
    }

    /// Returns true if the state to save has changed since the last call of [`Self::take_changed`].
    #[must_use]
    pub(crate) fn is_changed(&self) -> bool {
        self.is_changed
    }

    /// Saves the state, excluding the waits.
    #[must_use]
    pub fn save(&self) -> SavedCore {
        let Self {
            // The settings contain the limits.
            limits: _,
            contexts,
            resources,
            // The resources determine the ranges.
            ranges: _,
            workers,
            last_worker,
            last_serial,
            // All actions are executed before the state is saved.
            actions: _,
            is_changed: _,
        } = self;
        let contexts = contexts.iter().map(|(&id, context)| {
            let Context { capset, name, pid, service, blobs, waits: _ } = context;
            let service = match service {
                Service::Unused => SavedService::Unused,
                Service::Worker(WorkerId(id)) => SavedService::Worker(*id),
                Service::Lost => SavedService::Lost,
            };
            let blobs = blobs.iter().map(|(&blob, &resource)| (blob, resource)).collect();
            SavedContext { id, capset: *capset, name: name.clone(), pid: *pid, service, blobs }
        });
        let resources = resources.iter().map(|(&id, resource)| {
            let Resource { context, blob, kind, size, serial, range, worker } = *resource;
            let offset = range.map(|range| range.offset);
            SavedResource { id, context, blob, kind, size, serial, offset, worker: worker.map(|worker| worker.0) }
        });
        let workers = workers.iter().map(|(&WorkerId(id), worker)| {
            let Worker { context, deadline, killed, removing } = worker;
            let removing = removing.iter().map(|removal| {
                let Removal { blob, serial, resource, ticket: Ticket(ticket) } = *removal;
                SavedRemoval { blob, serial, resource, ticket }
            });
            let (context, deadline, killed) = (*context, *deadline, *killed);
            SavedWorker { id, context, deadline, killed, removing: removing.collect() }
        });
        SavedCore {
            contexts: contexts.collect(),
            resources: resources.collect(),
            workers: workers.collect(),
            last_worker: *last_worker,
            last_serial: *last_serial,
        }
    }

    /// Restores a saved state.
    ///
    /// # Errors
    /// Returns an error if a value is invalid.
    pub fn restored(limits: Limits, saved: SavedCore) -> Result<Self, Invalid> {
        let SavedCore { contexts, resources, workers, last_worker, last_serial } = saved;
        let bounded =
            contexts.len() <= MAX_CONTEXTS && resources.len() <= MAX_RESOURCES && workers.len() <= MAX_WORKERS;
        Invalid::unless(bounded, || "too many contexts, resources or workers".into())?;
        let in_order = ascend(contexts.iter().map(|context| context.id))
            && ascend(resources.iter().map(|resource| resource.id))
            && ascend(workers.iter().map(|worker| worker.id));
        Invalid::unless(in_order, || "contexts, resources or workers are not in order".into())?;
        let mut core = Self { last_worker, last_serial, ..Self::new(limits) };
        for resource in resources {
            core.restore_resource(resource)?;
        }
        for worker in workers {
            core.restore_worker(worker)?;
        }
        for context in contexts {
            core.restore_context(context)?;
        }
        let contexts = core.workers.values().filter_map(|worker| worker.context);
        let known = contexts.into_iter().all(|context| core.contexts.contains_key(&context));
        Invalid::unless(known, || "a worker serves a context that does not exist".into())?;
        Ok(core)
    }

    fn restore_resource(&mut self, saved: SavedResource) -> Result<(), Invalid> {
        let SavedResource { id, context, blob, kind, size, serial, offset, worker } = saved;
        let wrong = || format!("resource {id} is invalid");
        let fits = id != 0 && size != 0 && size.is_multiple_of(PAGE_BYTES) && size <= self.limits.window_bytes;
        let range = offset.map(|offset| Range { offset, size });
        Invalid::unless(fits && range.is_none_or(|range| self.ranges.insert(range)), wrong)?;
        Invalid::unless(serial <= self.last_serial || offset.is_none(), wrong)?;
        let worker = worker.map(WorkerId);
        self.resources.insert(id, Resource { context, blob, kind, size, serial, range, worker });
        Ok(())
    }

    fn restore_worker(&mut self, saved: SavedWorker) -> Result<(), Invalid> {
        let SavedWorker { id, context, deadline, killed, removing } = saved;
        let known = removing.iter().all(|removal| self.resources.contains_key(&removal.resource));
        Invalid::unless(known && id <= self.last_worker && removing.len() <= MAX_RESOURCES, || {
            format!("worker {id} is invalid")
        })?;
        let removing = removing.into_iter().map(|removal| {
            let SavedRemoval { blob, serial, resource, ticket } = removal;
            Removal { blob, serial, resource, ticket: Ticket(ticket) }
        });
        let removing = removing.collect();
        self.workers.insert(WorkerId(id), Worker { context, deadline, killed, removing });
        Ok(())
    }

    fn restore_context(&mut self, saved: SavedContext) -> Result<(), Invalid> {
        let SavedContext { id, capset, name, pid, service, blobs } = saved;
        let is_mapped = |&(blob, resource): &(u32, u32)| {
            self.resources.get(&resource).is_some_and(|it| it.blob == blob && it.range.is_some())
        };
        let served = match service {
            SavedService::Worker(worker) => {
                self.workers.get(&WorkerId(worker)).is_some_and(|worker| worker.context == Some(id))
            }
            SavedService::Unused => blobs.is_empty(),
            SavedService::Lost => true,
        };
        let fits = id != 0 && name.chars().count() <= MAX_NAME && blobs.len() <= MAX_BLOBS;
        let blobs_fit = ascend(blobs.iter().map(|(blob, _)| *blob)) && blobs.iter().all(is_mapped);
        Invalid::unless(fits && blobs_fit && served, || format!("context {id} is invalid"))?;
        let service = match service {
            SavedService::Unused => Service::Unused,
            SavedService::Worker(worker) => Service::Worker(WorkerId(worker)),
            SavedService::Lost => Service::Lost,
        };
        let blobs: BTreeMap<u32, u32> = blobs.into_iter().collect();
        self.contexts.insert(id, Context { capset, name, pid, service, blobs, waits: Vec::new() });
        Ok(())
    }

    /// Returns the wait of a context's command if the command waits for a word.
    #[must_use]
    pub fn wait(&self, context: u32, ticket: Ticket) -> Option<SavedWait> {
        let waits = &self.contexts.get(&context)?.waits;
        // Callers usually request the newest wait.
        let wait = waits.iter().rev().find(|wait| wait.ticket == ticket)?;
        Some(SavedWait { blob: wait.blob, word: wait.word, value: wait.value })
    }

    /// Restores the wait of a command. Returns false if its context has no worker or too many waits, or if its word is
    /// outside the blob.
    pub(crate) fn restore_wait(&mut self, context: u32, ticket: Ticket, saved: SavedWait) -> bool {
        let SavedWait { blob, word, value } = saved;
        let Some(context) = self.contexts.get_mut(&context) else { return false };
        let range = context.blobs.get(&blob).and_then(|id| self.resources.get(id)?.range);
        let inside = range.and_then(|range| range.word(word.checked_sub(range.offset)?)).is_some();
        let fits = inside && context.waits.len() < MAX_WAITS && matches!(context.service, Service::Worker(_));
        if fits {
            context.waits.push(Wait { ticket, blob, word, value });
        }
        fits
    }

    /// Returns true if a command waits for a worker to remove a blob.
    #[must_use]
    pub(crate) fn awaits_removal(&self, ticket: Ticket) -> bool {
        self.workers.values().any(|worker| worker.removing.iter().any(|removal| removal.ticket == ticket))
    }

    /// Returns the workers, oldest first, each with true if it was killed.
    #[must_use]
    pub fn workers(&self) -> Vec<(WorkerId, bool)> {
        self.workers.iter().map(|(&id, worker)| (id, worker.killed)).collect()
    }

    /// Repeats all messages that an earlier process may have sent to a worker. Returns false if the worker does not
    /// exist or was killed.
    pub fn repeat(&mut self, id: WorkerId) -> bool {
        let Some(worker) = self.workers.get(&id).filter(|worker| !worker.killed) else { return false };
        let removing = worker.removing.iter();
        let removals = removing.map(|it| Action::Remove { worker: id, blob: it.blob, serial: it.serial });
        self.actions.extend(removals);
        let Some(context) = worker.context.and_then(|context| self.contexts.get(&context)) else {
            self.actions.push(Action::Leave { worker: id });
            return true;
        };
        let resources = context.blobs.values().filter_map(|id| self.resources.get(id));
        let blobs = resources.filter_map(|resource| {
            let Resource { blob, kind, serial, range, .. } = *resource;
            range.map(|range| Action::Blob { worker: id, blob, kind, serial, range })
        });
        self.actions.extend(blobs);
        self.actions.push(Action::Doorbell { worker: id });
        true
    }

    /// Returns the serial number of a worker's first pending removal of a blob with this number, or 0 if there is none.
    #[cfg(any(test, feature = "fuzz"))]
    pub(crate) fn removing_serial(&self, worker: WorkerId, blob: u32) -> u32 {
        let removal = self.workers.get(&worker).and_then(|it| it.removing.iter().find(|it| it.blob == blob));
        removal.map_or(0, |removal| removal.serial)
    }
}
