//! Saved form of a VM's paravirtual interface. The page tables that the mediator keeps are saved separately.

use super::queue::Setup;
use super::{Counts, Interface, PvSettings};
use card_manager::ManagerError;
use pv::abi::{MAX_QUEUE, status};
use saved_state::Invalid;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use virtio_queue::{Queue, QueueState, QueueT};
use vmm_glue::memory::MemoryTable;

/// Saved form of an [`Interface`].
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct SavedInterface {
    accepted: u32,
    status: u32,
    /// Queue size in entries, and addresses of the three rings.
    setup: (u16, [u64; 3]),
    /// Positions in the available and the used ring, if the queue is in use.
    queue: Option<(u16, u16)>,
    ended: u32,
    interrupt: bool,
    interrupt_enabled: bool,
    channels: Vec<u8>,
    /// Names and values of the counters.
    counts: Vec<(String, u64)>,
}

impl Interface {
    /// Saves the interface. Returns an error if a batch is in progress.
    pub(crate) fn save(&self) -> Result<SavedInterface, ManagerError> {
        let Self {
            // These fields follow from the VM's number and settings.
            party: _,
            table_bytes: _,
            offered: _,
            channel_cap: _,
            accepted,
            status,
            setup: Setup { size, descriptors, available, used },
            queue,
            ongoing,
            ended,
            interrupt,
            interrupt_enabled,
            channels,
            // Attachments are saved separately.
            attachments: _,
            counts,
            // The next process may log errors of the guest again.
            complaints: _,
        } = self;
        if ongoing.is_some() {
            return Err(ManagerError::Unsettled("a batch of a paravirtual driver is in progress"));
        }
        Ok(SavedInterface {
            accepted: *accepted,
            status: *status,
            setup: (*size, [*descriptors, *available, *used]),
            queue: queue.as_ref().map(|queue| (queue.next_avail(), queue.next_used())),
            ended: *ended,
            interrupt: *interrupt,
            interrupt_enabled: *interrupt_enabled,
            channels: channels.iter().copied().collect(),
            counts: counts.named().map(|(name, count)| (name.to_owned(), count)).collect(),
        })
    }
}

impl SavedInterface {
    /// Restores the interface of a VM whose RAM is `memory`. Returns an error if the saved state is invalid.
    pub(crate) fn restored(
        self,
        settings: &PvSettings,
        vm: vram::TenantId,
        channel_cap: u32,
        memory: &MemoryTable,
    ) -> Result<Interface, Invalid> {
        let Self { accepted, status, setup, queue, ended, interrupt, interrupt_enabled, channels, counts } = self;
        let mut interface = Interface::new(settings, vm, channel_cap);
        let (size, [descriptors, available, used]) = setup;
        let known = [status::RESET, status::READY, status::FAILED].contains(&status);
        Invalid::unless(known && queue.is_some() == (status == status::READY), || {
            format!("a paravirtual interface of status {status:#x} has a queue: {}", queue.is_some())
        })?;
        Invalid::unless(accepted & !interface.offered == 0 || status != status::READY, || {
            format!("the driver uses features {accepted:#x}, but only {:#x} are offered", interface.offered)
        })?;
        let queue = queue.map(|(next_avail, next_used)| QueueState {
            max_size: MAX_QUEUE,
            next_avail,
            next_used,
            event_idx_enabled: false,
            size,
            ready: true,
            desc_table: descriptors,
            avail_ring: available,
            used_ring: used,
        });
        let queue = queue.map(Queue::try_from).transpose().map_err(Invalid::new)?;
        Invalid::unless(queue.as_ref().is_none_or(|queue| queue.is_valid(memory)), || {
            "a paravirtual queue is outside the VM's memory".into()
        })?;
        interface.channels = channels.into_iter().collect();
        Invalid::unless(interface.channels.len() <= channel_cap as usize, || {
            format!("{} channels are reserved; the maximum is {channel_cap}", interface.channels.len())
        })?;
        let counts: BTreeMap<String, u64> = counts.into_iter().collect();
        interface.counts = Counts::restore(|name| counts.get(name).copied());
        interface.setup = Setup { size, descriptors, available, used };
        (interface.accepted, interface.status, interface.queue) = (accepted, status, queue);
        (interface.ended, interface.interrupt, interface.interrupt_enabled) = (ended, interrupt, interrupt_enabled);
        Ok(interface)
    }
}
