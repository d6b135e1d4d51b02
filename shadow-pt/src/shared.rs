//! State that all address spaces of a VM share.

use crate::pages::{FrameRun, PageIndex};
use crate::reverse::ReverseMap;
use crate::table::Tables;

/// Limits that a guest cannot exceed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Maximum size of the shadow tables in card memory in bytes, for all spaces of the VM together, without
    /// directories. The mirrors need twice as much host memory, and the state of the referenced pages at most about
    /// three times as much. Tables for split large pages may need as much card memory again.
    pub table_bytes: u64,
}

/// State that all address spaces of a VM share.
#[derive(Debug)]
pub(crate) struct Shared {
    pub(crate) limits: Limits,
    pub(crate) tables: Tables,
    pub(crate) pages: PageIndex,
    pub(crate) reverse: ReverseMap,
    /// Pages of VRAM that entries have made writable and that the index does not count yet.
    pub(crate) gained: Vec<FrameRun>,
    /// Size in bytes of all linked tables in card memory.
    pub(crate) table_bytes: u64,
    /// Number of writes by the guest's CPU to pages that hold tables.
    pub(crate) writes: u64,
    /// Number of events after which a refused table may fit.
    pub(crate) rooms: u64,
    /// Number of large entries that may still be split.
    pub(crate) splits_left: u64,
    /// True if the card must not access the VM's RAM. Tables that map RAM are then not linked.
    pub(crate) ram_barred: bool,
}
