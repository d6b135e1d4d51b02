//! The balancer selects the chunks to evict from a full card, and the chunks to return to it.
//!
//! # Entitlement
//! The card's chunks are divided among VMs by weighted max-min fairness. Each VM is entitled to at least its guarantee,
//! and at most the lower of its quota and its use (on the card and elsewhere). Within these bounds, chunks are divided
//! in proportion to the VMs' weights: first among active VMs, and the rest among VMs that have been inactive for
//! [`Config::idle_after_ns`]. Entitlements do not depend on the locations of chunks, so moves do not change them.
//!
//! # Evictions
//! A request that does not fit on the card evicts a chunk of the VM that exceeds its entitlement the most. For this
//! comparison, the requested chunks count as used by the requester. GPUswap (section 4.3) uses the same rule. If the
//! requester itself exceeds its entitlement the most, its new chunk is placed in host memory. Chunks that exceed a
//! quota are evicted first. The mediator can also request chunks, for itself or for a new guarantee.
//!
//! # Returns
//! Every [`Config::return_interval_ns`], the balancer assigns spare card chunks to VMs with chunks in host memory,
//! starting with the VM that lacks the largest part of its entitlement. If no chunk is spare, a VM above its
//! entitlement exchanges a chunk with a VM below its entitlement. At least one of the two must differ from its
//! entitlement by a chunk or more. As a result, every VM stays within one chunk of its entitlement, and no exchange
//! undoes an earlier one. [`Config::settle_ns`] prevents frequent moves of the same chunk when demand changes.

mod active;
mod config;
mod plan;
mod saved;
mod share;

pub use active::ActiveVms;
pub use config::Config;
pub use saved::SavedBalancer;

use crate::quanta::Turn;
use crate::victim::{Choose, Hints, VictimPolicy};
use crate::{ChunkTable, Error, GuestVramAddr, TenantId, To};
use plan::Round;
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, BTreeSet};
use std::ops::RangeInclusive;

/// A request for card chunks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Request {
    /// Origin of the request.
    pub by: By,
    /// Number of requested chunks.
    pub chunks: u32,
}

/// Origin of a request for card chunks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum By {
    /// A VM that uses guest chunks for the first time.
    Vm(TenantId),
    /// The mediator, which needs more chunks than its share for its own structures.
    Mediator,
    /// A guarantee that cannot be met yet ([`Error::Promise`]). The requested number of additional chunks must become
    /// spare.
    Guarantee,
}

/// Entitlement of a VM, in card chunks. The exact share lies between the two values, which differ by at most one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Entitlement {
    /// Exact share, rounded down.
    pub floor: u32,
    /// Exact share, rounded up.
    pub ceil: u32,
}

/// Reason why chunks cannot be pinned.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum PinError {
    /// The range does not belong to the VM.
    #[error(transparent)]
    Range(#[from] Error),
    /// The guarantee is too low. Pinned chunks count towards it.
    #[error(
        "VM {vm} would have {pinned} pinned chunks, and its guarantee is {guarantee}: raise its guarantee, or unpin \
         other chunks"
    )]
    Guarantee {
        /// VM to which the chunks belong.
        vm: TenantId,
        /// Number of chunks of the VM that would be pinned.
        pinned: u32,
        /// Guarantee of the VM, in chunks.
        guarantee: u32,
    },
}

/// Information about a VM that the chunk table does not contain.
#[derive(Debug)]
struct Known {
    advertised: u32,
    hints: Hints,
    pins: BTreeSet<u32>,
}

/// Plans moves of chunks. [`Self::plan`] only returns steps. The caller executes them with [`ChunkTable::start`] and
/// copies the chunks. A failed step is planned again later if it is still needed.
#[derive(Debug)]
pub struct Balancer {
    config: Config,
    policy: Box<dyn Choose>,
    known: BTreeMap<TenantId, Known>,
    /// Time of each VM's last submission or memory request, in ns.
    active: BTreeMap<TenantId, u64>,
    /// Time in ns and destination of each chunk's last planned step. Entries are removed when the chunk has settled.
    moved: BTreeMap<(TenantId, u32), (u64, To)>,
    /// Time of the next returns, in ns.
    due_ns: u64,
    turn: Option<Turn>,
}

impl Balancer {
    /// Creates a balancer without VMs.
    #[must_use]
    pub fn new(config: Config) -> Self {
        Self {
            config,
            policy: config.policy.build(config.seed),
            known: BTreeMap::new(),
            active: BTreeMap::new(),
            moved: BTreeMap::new(),
            due_ns: 0,
            turn: None,
        }
    }

    /// Returns the settings.
    #[must_use]
    pub fn config(&self) -> &Config {
        &self.config
    }

    /// Changes the settings, but keeps the information about VMs and chunks.
    pub fn set_config(&mut self, config: Config) {
        if (config.policy, config.seed) != (self.config.policy, self.config.seed) {
            self.policy = config.policy.build(config.seed);
        }
        self.due_ns = 0;
        self.config = config;
    }

    /// Changes the victim policy.
    pub fn set_policy(&mut self, policy: VictimPolicy) {
        self.set_config(Config { policy, ..self.config });
    }

    /// Records that a VM has submitted work.
    pub fn active(&mut self, vm: TenantId, now_ns: u64) {
        self.active.insert(vm, now_ns);
    }

    /// Returns the time of a VM's last submission or memory request, in ns.
    #[must_use]
    pub fn last_active(&self, vm: TenantId) -> Option<u64> {
        self.active.get(&vm).copied()
    }

    /// Sets the current quantum from [`Quanta`](crate::Quanta). All members of `turn` except for the holder are treated
    /// as idle, so their chunks can be evicted immediately. `None` ends the quantum.
    pub fn set_turn(&mut self, turn: Option<Turn>) {
        if turn != self.turn {
            self.moved.clear();
            self.due_ns = 0;
        }
        self.turn = turn;
    }

    /// Makes the next returns due immediately.
    pub fn hurry(&mut self) {
        self.due_ns = 0;
    }

    /// Sets the eviction priority of the chunks in a range of guest VRAM. Chunks with the lowest priority are evicted
    /// first.
    ///
    /// # Errors
    /// Returns [`Error::OutOfRange`] or [`Error::NoSuchVm`].
    pub fn set_priority(
        &mut self,
        table: &ChunkTable,
        vm: TenantId,
        address: GuestVramAddr,
        len: u64,
        priority: u8,
    ) -> Result<(), Error> {
        let chunks = indices(table, vm, address, len)?;
        self.known(table, vm).hints.set_priority(chunks, priority);
        Ok(())
    }

    /// Sets the access frequency of the chunks in a range of guest VRAM, in the unit of the VM's profile.
    ///
    /// # Errors
    /// Returns [`Error::OutOfRange`] or [`Error::NoSuchVm`].
    pub fn set_accesses(
        &mut self,
        table: &ChunkTable,
        vm: TenantId,
        address: GuestVramAddr,
        len: u64,
        count: u32,
    ) -> Result<(), Error> {
        let chunks = indices(table, vm, address, len)?;
        self.known(table, vm).hints.set_accesses(chunks, count);
        Ok(())
    }

    /// Records that a submission or a copy has used a range of guest VRAM.
    ///
    /// # Errors
    /// Returns [`Error::OutOfRange`] or [`Error::NoSuchVm`].
    pub fn touched(&mut self, table: &ChunkTable, vm: TenantId, address: GuestVramAddr, len: u64) -> Result<(), Error> {
        let chunks = indices(table, vm, address, len)?;
        self.known(table, vm).hints.touch(chunks);
        Ok(())
    }

    /// Records that the chunk at an address was placed on the card at its first use.
    ///
    /// # Errors
    /// Returns [`Error::OutOfRange`] or [`Error::NoSuchVm`].
    pub fn arrived(&mut self, table: &ChunkTable, vm: TenantId, address: GuestVramAddr) -> Result<(), Error> {
        let chunks = indices(table, vm, address, 1)?;
        self.known(table, vm).hints.arrived(chunks);
        Ok(())
    }

    /// Records that the chunk at an address is needed on the card but is not there.
    ///
    /// # Errors
    /// Returns [`Error::OutOfRange`] or [`Error::NoSuchVm`].
    pub fn wanted(&mut self, table: &ChunkTable, vm: TenantId, address: GuestVramAddr) -> Result<(), Error> {
        let chunks = indices(table, vm, address, 1)?;
        self.known(table, vm).hints.wants(*chunks.start());
        Ok(())
    }

    /// Pins the chunks in a range of guest VRAM to the card, or unpins them. Pinned chunks are never evicted, are
    /// returned before others, and count towards the guarantee. If the guarantee is lowered later, the chunks at the
    /// highest addresses are unpinned.
    ///
    /// # Errors
    /// Returns a [`PinError`], and changes nothing.
    pub fn pin(
        &mut self,
        table: &ChunkTable,
        vm: TenantId,
        address: GuestVramAddr,
        len: u64,
        pinned: bool,
    ) -> Result<(), PinError> {
        let chunks = indices(table, vm, address, len)?;
        let guarantee = table.limits(vm).map_or(0, |limits| limits.guarantee);
        let pins = &mut self.known(table, vm).pins;
        if !pinned {
            pins.retain(|index| !chunks.contains(index));
            return Ok(());
        }
        let outside = pins.iter().filter(|index| !chunks.contains(index)).count() as u32;
        let all = (chunks.end() - chunks.start()).saturating_add(1).saturating_add(outside);
        if all > guarantee {
            return Err(PinError::Guarantee { vm, pinned: all, guarantee });
        }
        pins.extend(chunks);
        Ok(())
    }

    /// Returns the number of a VM's pinned chunks.
    #[must_use]
    pub fn pinned(&self, vm: TenantId) -> u32 {
        self.known.get(&vm).map_or(0, |known| known.pins.len() as u32)
    }

    /// Returns each VM's current entitlement.
    #[must_use]
    pub fn entitlements(&self, table: &ChunkTable, now_ns: u64) -> BTreeMap<TenantId, Entitlement> {
        let round = Round::new(table, 0);
        let shares = self.shares(&round, table.for_vms(), None, now_ns);
        let of = |at| Entitlement { floor: shares.floor(at), ceil: shares.ceil(at) };
        round.ids().enumerate().map(|(at, vm)| (vm, of(at))).collect()
    }

    /// Removes all information about a destroyed VM, so that another VM with the same number does not inherit it.
    pub fn forget_vm(&mut self, vm: TenantId) {
        self.known.remove(&vm);
        self.active.remove(&vm);
        self.moved.retain(|&(of, _), _| of != vm);
    }

    /// Removes information about removed VMs and settled moves, and pins that exceed a guarantee.
    fn forget(&mut self, table: &ChunkTable, now_ns: u64) {
        self.known.retain(|&vm, known| {
            table.limits(vm).is_some_and(|limits| {
                while known.pins.len() > limits.guarantee as usize {
                    known.pins.pop_last();
                }
                true
            })
        });
        self.active.retain(|&vm, _| table.limits(vm).is_some());
        let settle = self.config.settle_ns.max(self.config.residency_ns);
        self.moved.retain(|_, &mut (when, _)| now_ns.saturating_sub(when) < settle);
    }

    /// Returns the information about a VM in the table, creating it if necessary.
    fn known(&mut self, table: &ChunkTable, vm: TenantId) -> &mut Known {
        let advertised = table.vm_bytes(vm).unwrap_or(0).div_ceil(table.chunk_bytes()) as u32;
        let new = || Known { advertised, hints: Hints::new(advertised), pins: BTreeSet::new() };
        let known = self.known.entry(vm).or_insert_with(new);
        // Another VM has reused the number, or the VM has grown.
        if known.advertised != advertised {
            *known = new();
        }
        known
    }

    fn is_idle(&self, vm: TenantId, now_ns: u64) -> bool {
        let waits = self.turn.as_ref().is_some_and(|turn| turn.holder != vm && turn.members.contains(&vm));
        waits || self.has_rested(vm, now_ns)
    }

    /// Returns true if a VM has been inactive for at least [`Config::idle_after_ns`].
    fn has_rested(&self, vm: TenantId, now_ns: u64) -> bool {
        self.active.get(&vm).is_none_or(|&last| now_ns.saturating_sub(last) >= self.config.idle_after_ns)
    }
}

/// Returns the indices of the chunks in a range of guest VRAM. A length of 0 is treated as 1.
fn indices(table: &ChunkTable, vm: TenantId, address: GuestVramAddr, len: u64) -> Result<RangeInclusive<u32>, Error> {
    let bytes = table.vm_bytes(vm).ok_or(Error::NoSuchVm(vm))?;
    let last = address.0.checked_add(len.max(1) - 1).filter(|&last| last < bytes);
    let (first, last) = (table.index(vm, address), last.and_then(|last| table.index(vm, GuestVramAddr(last))));
    first.zip(last).map(|(first, last)| first..=last).ok_or(Error::OutOfRange { vm, address })
}

#[cfg(test)]
mod tests;
