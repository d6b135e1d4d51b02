//! State that all address spaces of a VM share.

use crate::pages::{FrameRun, PageIndex};
use crate::reverse::ReverseMap;
use crate::table::Tables;

/// Bounds that a guest cannot exceed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Bytes of shadow tables in card memory, over all spaces of the VM, without directories. The mirrors take twice as
    /// much host memory, and the state of the named pages at most about three times as much. Tables for split large
    /// pages take as much again.
    pub table_bytes: u64,
}

/// State that the spaces of a VM share.
#[derive(Debug)]
pub(crate) struct Shared {
    pub(crate) limits: Limits,
    pub(crate) tables: Tables,
    pub(crate) pages: PageIndex,
    pub(crate) reverse: ReverseMap,
    /// Pages of VRAM that entries have made writable and that the index does not count yet.
    pub(crate) gained: Vec<FrameRun>,
    /// Card memory of all tables that are linked.
    pub(crate) table_bytes: u64,
    /// Counts writes of the guest's CPU to pages that hold tables.
    pub(crate) writes: u64,
    /// Counts events that may make room for a refused table.
    pub(crate) rooms: u64,
    /// Large entries that may still be split.
    pub(crate) splits_left: u64,
    /// The card may not reach RAM of the VM: tables that map any are not linked.
    pub(crate) ram_barred: bool,
}
