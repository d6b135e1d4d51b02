//! State common to all address spaces of a VM.

use crate::pages::{FrameRun, PageIndex};
use crate::reverse::ReverseMap;
use crate::table::Tables;

/// Limits on a VM's page tables.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Maximum total size of the shadow tables of all spaces in card memory, in bytes, excluding directories. The
    /// mirrors need twice as much host memory, and the state of the referenced pages up to about three times as much.
    /// Tables for split large pages may need the same amount of card memory again.
    pub table_bytes: u64,
}

/// State common to all address spaces of a VM.
#[derive(Debug)]
pub(crate) struct Shared {
    pub(crate) limits: Limits,
    pub(crate) tables: Tables,
    pub(crate) pages: PageIndex,
    pub(crate) reverse: ReverseMap,
    /// VRAM pages that entries have made writable but that are not in the index yet.
    pub(crate) gained: Vec<FrameRun>,
    /// Total size of the linked tables in card memory, in bytes.
    pub(crate) table_bytes: u64,
    /// Number of writes by the guest's CPU to pages that contain tables.
    pub(crate) writes: u64,
    /// Counter that is incremented whenever a rejected table may now fit.
    pub(crate) rooms: u64,
    /// Number of large entries that may still be split.
    pub(crate) splits_left: u64,
    /// True if the card must not access the VM's RAM. Tables that map RAM are then unlinked.
    pub(crate) ram_barred: bool,
}
