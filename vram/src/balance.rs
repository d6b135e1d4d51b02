//! The balancer. When the card is full, it chooses the VM that gives up a chunk, the chunk, and the VM that gets chunks
//! back.
//!
//! # Entitlement
//! The card's chunks for VMs are divided by weighted max-min fairness. Each VM is entitled to at least its guarantee,
//! and to at most its quota or its use (on the card and elsewhere), whichever is lower. Within these bounds, a level
//! rises for all VMs in proportion to their weights until the card is full. VMs that have not submitted work for a
//! while ([`Config::idle_after_ns`]) share the rest. Entitlements do not depend on where chunks are, so moving chunks
//! does not change them.
//!
//! # Evictions
//! A request that does not fit on the card takes a chunk from the VM that is furthest above its entitlement, counting
//! the request, as in GPUswap (section 4.3). If the requester is furthest above its entitlement, its new chunk is
//! initially placed in host memory. Chunks above a quota are evicted before that. The mediator's own needs and new
//! guarantees are requests as well.
//!
//! # Returns
//! Every [`Config::return_interval_ns`], spare chunks are returned, first to the VM that lacks the largest part of its
//! entitlement. If no chunk is spare, a VM above its entitlement gives a chunk to a VM below its entitlement, but only
//! if one of them is off by at least a chunk. Therefore, no VM ends up off by more than one chunk, and the next
//! exchange does not undo the previous one. [`Config::settle_ns`] keeps single chunks from moving back and forth when
//! demands change.

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

/// A request for chunks of the card.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Request {
    /// The requester.
    pub by: By,
    /// Number of chunks.
    pub chunks: u32,
}

/// Origin of a request for chunks of the card.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum By {
    /// A VM that needs chunks for the first use of its guest chunks.
    Vm(TenantId),
    /// The mediator, which needs chunks for its own structures beyond its share.
    Mediator,
    /// A guarantee that cannot be given now ([`Error::Promise`]). This number of additional chunks must become spare.
    Guarantee,
}

/// Entitlement of a VM, in chunks of the card. The exact share is between the two bounds, which differ by at most one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Entitlement {
    /// Rounded down.
    pub floor: u32,
    /// Rounded up.
    pub ceil: u32,
}

/// Reasons why a chunk cannot be pinned.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum PinError {
    /// The range does not belong to the VM.
    #[error(transparent)]
    Range(#[from] Error),
    /// The guarantee is too low, because pinned chunks count towards it.
    #[error(
        "VM {vm} would have {pinned} pinned chunks, and its guarantee is {guarantee}: raise its guarantee, or unpin \
         other chunks"
    )]
    Guarantee {
        /// The VM.
        vm: TenantId,
        /// Number of chunks that would be pinned.
        pinned: u32,
        /// The VM's guarantee.
        guarantee: u32,
    },
}

/// Information about a VM, in addition to the VM's accounts.
#[derive(Debug)]
struct Known {
    advertised: u32,
    hints: Hints,
    pins: BTreeSet<u32>,
}

/// Decides which chunks move. [`Self::plan`] only returns steps. The caller executes the steps with
/// [`ChunkTable::start`] and copies. A step that fails is planned again later if it is still due.
#[derive(Debug)]
pub struct Balancer {
    config: Config,
    policy: Box<dyn Choose>,
    known: BTreeMap<TenantId, Known>,
    /// Time at which each VM last submitted work or requested memory, in ns.
    active: BTreeMap<TenantId, u64>,
    /// Time of the last planned step for each chunk, in ns, and the destination of the step. An entry is dropped when
    /// its chunk has settled.
    moved: BTreeMap<(TenantId, u32), (u64, To)>,
    /// Time of the next return of chunks, in ns.
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

    /// Returns the operator's settings.
    #[must_use]
    pub fn config(&self) -> &Config {
        &self.config
    }

    /// Changes the settings. Keeps the information about VMs and chunks.
    pub fn set_config(&mut self, config: Config) {
        if (config.policy, config.seed) != (self.config.policy, self.config.seed) {
            self.policy = config.policy.build(config.seed);
        }
        self.due_ns = 0;
        self.config = config;
    }

    /// Changes the policy that chooses victims.
    pub fn set_policy(&mut self, policy: VictimPolicy) {
        self.set_config(Config { policy, ..self.config });
    }

    /// Records that the VM has submitted work.
    pub fn active(&mut self, vm: TenantId, now_ns: u64) {
        self.active.insert(vm, now_ns);
    }

    /// Returns the time of the VM's last submission, in ns.
    #[must_use]
    pub fn last_active(&self, vm: TenantId) -> Option<u64> {
        self.active.get(&vm).copied()
    }

    /// Sets the quantum that [`Quanta`](crate::Quanta) has decided. The members of `turn`, except its holder, give up
    /// memory as if they were idle, as soon as possible. `None` ends the quantum.
    pub fn set_turn(&mut self, turn: Option<Turn>) {
        if turn != self.turn {
            self.moved.clear();
            self.due_ns = 0;
        }
        self.turn = turn;
    }

    /// Makes the next plan without a request start immediately, before the interval ends.
    pub fn hurry(&mut self) {
        self.due_ns = 0;
    }

    /// Sets the priority of the chunks in a range of guest VRAM. The lowest priorities are evicted first.
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

    /// Sets the access frequency of each chunk in a range of guest VRAM, in the unit that the VM's profile uses.
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

    /// Records that the chunk that contains an address was placed on the card at its first use.
    ///
    /// # Errors
    /// Returns [`Error::OutOfRange`] or [`Error::NoSuchVm`].
    pub fn arrived(&mut self, table: &ChunkTable, vm: TenantId, address: GuestVramAddr) -> Result<(), Error> {
        let chunks = indices(table, vm, address, 1)?;
        self.known(table, vm).hints.arrived(chunks);
        Ok(())
    }

    /// Records that the chunk that contains an address was needed on the card but did not fit there.
    ///
    /// # Errors
    /// Returns [`Error::OutOfRange`] or [`Error::NoSuchVm`].
    pub fn wanted(&mut self, table: &ChunkTable, vm: TenantId, address: GuestVramAddr) -> Result<(), Error> {
        let chunks = indices(table, vm, address, 1)?;
        self.known(table, vm).hints.wants(*chunks.start());
        Ok(())
    }

    /// Pins the chunks in a range of guest VRAM to the card, or unpins them. Pinned chunks are never victims, are
    /// returned first, and count towards the guarantee. If the guarantee is lowered later, the pins at the highest
    /// addresses are dropped.
    ///
    /// # Errors
    /// Returns a [`PinError`]. If the call fails, it has changed nothing.
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

    /// Returns the number of pinned chunks of a VM.
    #[must_use]
    pub fn pinned(&self, vm: TenantId) -> u32 {
        self.known.get(&vm).map_or(0, |known| known.pins.len() as u32)
    }

    /// Returns the current entitlement of each VM.
    #[must_use]
    pub fn entitlements(&self, table: &ChunkTable, now_ns: u64) -> BTreeMap<TenantId, Entitlement> {
        let round = Round::new(table, 0);
        let shares = self.shares(&round, table.for_vms(), None, now_ns);
        let of = |at| Entitlement { floor: shares.floor(at), ceil: shares.ceil(at) };
        round.ids().enumerate().map(|(at, vm)| (vm, of(at))).collect()
    }

    /// Forgets a destroyed VM, so that the next VM with the same number starts without a history.
    pub fn forget_vm(&mut self, vm: TenantId) {
        self.known.remove(&vm);
        self.active.remove(&vm);
        self.moved.retain(|&(of, _), _| of != vm);
    }

    /// Drops the information about removed VMs and settled moves.
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

    /// Returns the information about a VM in the table.
    fn known(&mut self, table: &ChunkTable, vm: TenantId) -> &mut Known {
        let advertised = table.vm_bytes(vm).unwrap_or(0).div_ceil(table.chunk_bytes()) as u32;
        let new = || Known { advertised, hints: Hints::new(advertised), pins: BTreeSet::new() };
        let known = self.known.entry(vm).or_insert_with(new);
        // The number now belongs to another VM.
        if known.advertised != advertised {
            *known = new();
        }
        known
    }

    fn is_idle(&self, vm: TenantId, now_ns: u64) -> bool {
        let waits = self.turn.as_ref().is_some_and(|turn| turn.holder != vm && turn.members.contains(&vm));
        waits || self.has_rested(vm, now_ns)
    }

    /// Returns true if the VM has not submitted work for a while.
    fn has_rested(&self, vm: TenantId, now_ns: u64) -> bool {
        self.active.get(&vm).is_none_or(|&last| now_ns.saturating_sub(last) >= self.config.idle_after_ns)
    }
}

/// Returns the guest chunks of a range of guest VRAM. A length of 0 is treated as 1.
fn indices(table: &ChunkTable, vm: TenantId, address: GuestVramAddr, len: u64) -> Result<RangeInclusive<u32>, Error> {
    let bytes = table.vm_bytes(vm).ok_or(Error::NoSuchVm(vm))?;
    let last = address.0.checked_add(len.max(1) - 1).filter(|&last| last < bytes);
    let (first, last) = (table.index(vm, address), last.and_then(|last| table.index(vm, GuestVramAddr(last))));
    first.zip(last).map(|(first, last)| first..=last).ok_or(Error::OutOfRange { vm, address })
}

#[cfg(test)]
mod tests;
