//! The paravirtual interface of one VM: what is beside the chip on its function.
//!
//! Parts: `registers` (set-up, doorbell, interrupt), `queue` (batches out of the guest's memory and answers into it),
//! `execute` (what each operation means for the vGPU and the card), `share` (segments in address spaces).
//! The binary form, and the page tables that the guest has us keep, are the crate [`pv`]'s.
//!
//! Nothing here is a second way to the card: a channel's operations are the register accesses that they stand for, and page
//! tables are read and checked by `shadow-pt` like those that a guest keeps itself
//! ([decision 015](../../../../docs/decisions/015-paravirtual-tables.md)).

mod execute;
mod queue;
mod registers;
mod share;

pub(super) use queue::Progress;
pub(super) use registers::After;

use nvspec::addr::{GuestVramAddr, Place};
use owner::segments::Party;
use pv::Tables;
use pv::abi::{self, Capability, feature, register, status};
use std::collections::BTreeSet;
use std::sync::Arc;
use virtio_queue::Queue;
use zerocopy::IntoBytes;

/// BAR that the registers are in.
const BAR: u8 = 0;
/// Their offset in it: the last page, where a GF100 has nothing.
pub const OFFSET: u32 = 0xff_f000;

/// What the operator lets a guest have of the interface.
#[derive(Clone, Debug)]
pub struct PvSettings {
    /// Bytes of host memory for page tables.
    pub table_bytes: u64,
    /// Bytes of card memory for segments.
    pub segment_bytes: u64,
    /// Whose segments it may find.
    pub group: Option<Arc<str>>,
}

impl PvSettings {
    /// Returns what the vGPU offers.
    fn features(&self) -> u32 {
        let share = if self.segment_bytes != 0 || self.group.is_some() { feature::SHARE } else { 0 };
        let abroad = if self.group.is_some() { feature::SHARE_ABROAD } else { 0 };
        let always = feature::TABLES | feature::CHANNELS | feature::MEMORY | feature::PRIORITY | feature::QUERY;
        always | feature::INTERRUPT | share | abroad
    }

    /// The capability by which a guest finds it.
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

/// Events since the VM was created.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Counts {
    /// Times that the doorbell was rung.
    pub(super) doorbells: u64,
    /// Batches that have ended.
    pub(super) batches: u64,
    /// Times that the VM's lock was held for a batch, or for a part of one.
    pub(super) holds: u64,
    /// Operations that were done.
    pub(super) operations: u64,
    /// Page table entries that they wrote.
    pub(super) entries: u64,
    /// Operations, and batches that cannot be read, that were refused.
    pub(super) refused: u64,
}

/// One VM's interface.
#[derive(Debug)]
pub(super) struct Interface {
    pub(super) party: Party,
    pub(super) tables: Tables,
    offered: u32,
    accepted: u32,
    status: u32,
    setup: queue::Setup,
    queue: Option<Queue>,
    /// The batch that has begun and not ended.
    ongoing: Option<Box<queue::Ongoing>>,
    /// Batches since the queue was set up.
    ended: u32,
    /// It asks for an interrupt.
    pub(super) interrupt: bool,
    interrupt_enabled: bool,
    /// Channels that the guest has set aside.
    channels: BTreeSet<u8>,
    /// How many there may be.
    channel_cap: u32,
    attachments: share::Attachments,
    pub(super) counts: Counts,
    /// What the guest did wrong with its queue, since the VM was created.
    complaints: u64,
}

impl Interface {
    /// Nothing set up. `vram_bytes`: where guest VRAM ends.
    pub(super) fn new(settings: &PvSettings, vm: vram::VmId, vram_bytes: u64, channel_cap: u32) -> Self {
        let party = Party { vm, group: settings.group.clone(), limit: settings.segment_bytes };
        Self {
            party,
            tables: Tables::new(GuestVramAddr(vram_bytes), settings.table_bytes),
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
            attachments: share::Attachments::default(),
            counts: Counts::default(),
            complaints: 0,
        }
    }

    /// Returns what an operator sees of it.
    pub(super) fn counters(&self) -> [(&'static str, u64); 9] {
        let Counts { doorbells, batches, holds, operations, entries, refused } = self.counts;
        let tables = self.tables.counts();
        [
            ("pv_doorbells", doorbells),
            ("pv_batches", batches),
            ("pv_holds", holds),
            ("pv_operations", operations),
            ("pv_entries", entries),
            ("pv_refused", refused),
            ("pv_tables", tables.directories + tables.small + tables.large),
            ("pv_table_bytes", tables.bytes),
            ("pv_attachments", self.attachments.count()),
        ]
    }

    /// The directory that the guest has bound to an instance block.
    pub(super) fn directory_of(&self, instance: Place) -> Option<Place> {
        match instance {
            Place::Vram(at) => self.tables.directory_of(at).map(Place::Vram),
            Place::Ram(_) => None,
        }
    }

    /// Returns whether a byte offset of BAR0 is one of the interface's.
    pub(super) fn covers(offset: u64) -> bool {
        (u64::from(OFFSET)..u64::from(OFFSET + register::BYTES)).contains(&offset)
    }
}
