//! A VM's paravirtual interface, a part of the VM's PCI function that the real chip lacks.
//!
//! Modules: `registers` (setup, doorbell, interrupt), `queue` (reads batches from the guest's memory and writes
//! replies), `attachments` (segments in address spaces), `saved` (saved state). The crate [`pv`] defines the binary
//! format, and contains the page tables that the mediator keeps for the guest. `batches` implements the effects of
//! batches.

mod attachments;
mod queue;
mod registers;
mod saved;

pub(crate) use attachments::{Around, Attachment, Attachments, SavedAttachments, segment_va};
pub(super) use queue::{Progress, QueueError};
pub(super) use registers::RegisterEffect;
pub(super) use saved::SavedInterface;

use super::counts::counts;
use card_manager::segments::Party;
use nvspec::fifo::VirtualChannelId;
use pv::Tables;
use pv::abi::{self, Capability, Status, feature, register, status};
use std::collections::BTreeSet;
use std::sync::Arc;
use virtio_queue::Queue;
use zerocopy::IntoBytes;

/// Index of the BAR that contains the registers.
const BAR: u8 = 0;
/// Offset of the registers in the BAR. This is its last page, which GF100 does not use.
pub const OFFSET: u32 = 0xff_f000;

/// Operator's settings for the interface.
#[derive(Clone, Debug)]
pub struct PvSettings {
    /// Maximum host memory for the guest's page tables, in bytes.
    pub table_bytes: u64,
    /// Maximum card memory for segments, in bytes.
    pub segment_bytes: u64,
    /// Group whose segments the guest can see.
    pub group: Option<Arc<str>>,
}

impl PvSettings {
    /// Returns the features that the interface offers.
    fn features(&self) -> u32 {
        let share = if self.segment_bytes != 0 || self.group.is_some() { feature::SHARE } else { 0 };
        let abroad = if self.group.is_some() { feature::SHARE_ABROAD } else { 0 };
        let always = feature::TABLES | feature::CHANNELS | feature::MEMORY | feature::PRIORITY | feature::QUERY;
        always | feature::INTERRUPT | share | abroad
    }

    /// Returns the PCI capability through which a guest finds the interface.
    #[must_use]
    pub fn capability(&self) -> Vec<u8> {
        let capability = Capability {
            id: abi::CAPABILITY_ID,
            next: 0,
            length: size_of::<Capability>() as u8,
            bar: BAR,
            signature: abi::SIGNATURE,
            version_major: abi::VERSION_MAJOR,
            version_minor: abi::VERSION_MINOR,
            reserved: 0,
            offset: OFFSET,
            features: self.features(),
        };
        capability.as_bytes().to_vec()
    }
}

counts! {
    /// Events since the VM was created.
    Counts {
        /// Doorbells rung.
        doorbells: "pv_doorbells",
        /// Batches that were answered, including those that could not be read.
        batches: "pv_batches",
        /// Number of times that the VM was locked to execute a batch or a part of one.
        holds: "pv_holds",
        /// Operations that succeeded.
        operations: "pv_operations",
        /// Page table entries written by operations.
        entries: "pv_entries",
        /// Operations that were rejected, and batches that could not be read.
        refused: "pv_refused",
    }
}

/// A VM's paravirtual interface.
#[derive(Debug)]
pub(super) struct Interface {
    party: Party,
    /// Maximum host memory for the guest's page tables, in bytes.
    table_bytes: u64,
    offered: u32,
    accepted: u32,
    status: u32,
    setup: queue::Setup,
    queue: Option<Queue>,
    /// The batch in progress.
    ongoing: Option<Box<queue::Ongoing>>,
    /// Number of batches completed since the queue was set up.
    ended: u32,
    /// Set while the interface asserts its interrupt.
    interrupt: bool,
    interrupt_enabled: bool,
    /// Channels that the guest has created.
    channels: BTreeSet<u8>,
    /// Maximum number of channels that the guest may create.
    channel_cap: u32,
    attachments: Attachments,
    counts: Counts,
    /// Number of errors in the guest's queue since the VM was created.
    complaints: u64,
}

impl Interface {
    /// Creates the interface in its initial state.
    pub(super) fn new(settings: &PvSettings, vm: vram::TenantId, channel_cap: u32) -> Self {
        let party = Party { vm, group: settings.group.clone(), limit: settings.segment_bytes };
        Self {
            party,
            table_bytes: settings.table_bytes,
            offered: settings.features(),
            accepted: 0,
            status: status::RESET,
            setup: queue::Setup::default(),
            queue: None,
            ongoing: None,
            ended: 0,
            interrupt: false,
            interrupt_enabled: false,
            channels: BTreeSet::new(),
            channel_cap,
            attachments: Attachments::default(),
            counts: Counts::default(),
            complaints: 0,
        }
    }

    /// Returns the maximum host memory for the guest's page tables, in bytes.
    pub(super) fn table_bytes(&self) -> u64 {
        self.table_bytes
    }

    /// Returns the VM's identity as a user of segments, which determines the segments that the guest can see.
    pub(super) fn party(&self) -> &Party {
        &self.party
    }

    /// Returns the features that the guest has accepted.
    pub(super) fn accepted(&self) -> u32 {
        self.accepted
    }

    /// Returns true if the interface asserts its interrupt.
    pub(super) fn interrupts(&self) -> bool {
        self.interrupt
    }

    pub(super) fn attachments(&self) -> &Attachments {
        &self.attachments
    }

    pub(super) fn attachments_mut(&mut self) -> &mut Attachments {
        &mut self.attachments
    }

    /// Counts page table entries that an operation writes.
    pub(super) fn count_entries(&mut self, count: u32) {
        self.counts.entries = self.counts.entries.saturating_add(count.into());
    }

    /// Returns the channels created by the guest.
    pub(super) fn channels(&self) -> Vec<u8> {
        self.channels.iter().copied().collect()
    }

    /// Returns true if the guest has created this channel.
    pub(super) fn has_channel(&self, channel: VirtualChannelId) -> bool {
        self.channels.contains(&channel.0)
    }

    /// Creates a channel. `known` contains all channels that the guest has bound.
    pub(super) fn create_channel(
        &mut self,
        channel: VirtualChannelId,
        known: &[VirtualChannelId],
    ) -> Result<(), Status> {
        if self.has_channel(channel) || known.contains(&channel) {
            return Err(Status::Exists);
        }
        let others = known.iter().filter(|bound| !self.has_channel(**bound)).count();
        if self.channels.len().saturating_add(others) >= self.channel_cap as usize {
            return Err(Status::Limit);
        }
        self.channels.insert(channel.0);
        Ok(())
    }

    /// Removes a channel that the guest has created.
    pub(super) fn forget_channel(&mut self, channel: VirtualChannelId) {
        self.channels.remove(&channel.0);
    }

    /// Resets the interface to its initial state, but keeps the attachments and the counters.
    pub(super) fn reset(&mut self) {
        (self.accepted, self.status, self.setup) = (0, status::RESET, queue::Setup::default());
        (self.queue, self.ongoing) = (None, None);
        (self.ended, self.interrupt, self.interrupt_enabled) = (0, false, false);
        self.channels.clear();
    }

    /// Returns the counters of the interface and of its `tables`, for the operator.
    pub(super) fn counters(&self, tables: &Tables) -> impl Iterator<Item = (&'static str, u64)> + use<> {
        let tables = tables.counts();
        self.counts.named().chain([
            ("pv_tables", tables.directories + tables.small + tables.large),
            ("pv_table_bytes", tables.bytes),
            ("pv_attachments", self.attachments.count()),
        ])
    }

    /// Returns true if the byte offset in BAR0 belongs to the interface.
    pub(super) fn covers(offset: u64) -> bool {
        (u64::from(OFFSET)..u64::from(OFFSET + register::BYTES)).contains(&offset)
    }
}
