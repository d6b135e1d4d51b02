//! Status of a device's programs for operators.

use super::{Context, Core, Service, WorkerId};

/// A guest program that uses the device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ProgramStatus {
    /// Name of the program, if the guest's kernel sends it.
    pub name: String,
    /// The program's process ID in the guest, if its library has sent the ID. The ID is not checked.
    pub pid: Option<u32>,
    /// Process ID of the program's worker on this host, while the worker runs.
    pub worker: Option<u32>,
    /// Total size of the program's ranges of the window, in bytes.
    pub window_bytes: u64,
    /// Number of commands that wait for a word.
    pub waits: usize,
    /// False if the program has lost its worker. Such a program cannot continue.
    pub is_served: bool,
}

impl Core {
    /// Returns the worker, process ID and name of each program that is being served.
    #[must_use]
    pub(crate) fn served(&self) -> Vec<(WorkerId, Option<u32>, String)> {
        let worker = |context: &Context| match context.service {
            Service::Worker(worker) => Some((worker, context.pid, context.name.clone())),
            Service::Unused | Service::Lost => None,
        };
        self.contexts.values().filter_map(worker).collect()
    }

    /// Returns true if a worker serves a program and was not killed.
    #[must_use]
    pub(crate) fn is_serving(&self, id: WorkerId) -> bool {
        self.workers.get(&id).is_some_and(|worker| worker.context.is_some() && !worker.killed)
    }

    /// Returns the programs that have or had a worker. `process` maps a worker to its process ID.
    #[must_use]
    pub fn programs(&self, process: impl Fn(WorkerId) -> Option<u32>) -> Vec<ProgramStatus> {
        let used = self.contexts.values().filter(|context| context.service != Service::Unused);
        used.map(|context| {
            let sizes = context.blobs.values().filter_map(|id| self.resources.get(id)).map(|resource| resource.size);
            ProgramStatus {
                name: context.name.clone(),
                pid: context.pid,
                worker: if let Service::Worker(id) = context.service { process(id) } else { None },
                window_bytes: sizes.fold(0, u64::saturating_add),
                waits: context.waits.len(),
                is_served: context.service != Service::Lost,
            }
        })
        .collect()
    }
}
