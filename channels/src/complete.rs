//! Detects the end of submissions, and determines which VMs must be notified.
//!
//! A submission has ended when the card has fetched its record and the record's semaphore contains the submission's
//! sequence number. The first condition is based on the card's own GP_GET, which no guest can write. Both conditions
//! are needed: GP_GET is ahead of the card's work, and the guest's work can write the semaphore, because it is in the
//! guest's address space. If the caller does not trust the VM, a channel's last submission therefore does not count as
//! ended while an engine is running the channel. A guest can still make one of its submissions appear to end within
//! another. The protection of other VMs' memory must not rely on completions.

use crate::card;
use crate::pool::{Slot, Vm};
use crate::ring::{Record, Ring};
use crate::work::{SEMAPHORE_BYTES, Span, record_end, semaphore, semaphore_offset};
use crate::{Channels, Completion, Host, Layout, RunState, TenantId};
use nvspec::addr::VramAddr;
use nvspec::fifo::{ChannelId, VirtualChannelId, engine};
use nvspec::instance::userd;
use nvspec::regs::pfifo::CHANNEL_STATE;
use std::collections::{BTreeMap, BTreeSet};

/// Maximum number of channels polled per VM and interrupt. If a VM has more channels with work in flight, they are
/// polled in rotation, so that other VMs do not wait for all of them.
pub(crate) const MAX_POLLED_PER_VM: usize = 32;
/// Mask of all engines.
const ENGINES: u32 = (1 << engine::COUNT) - 1;

impl Channels {
    /// Returns the submissions that have ended since the last call, in order per channel. Channels without work in
    /// flight cause no register reads. If a VM has many channels, each call polls only some of them (see
    /// [`Self::is_deferred`]). If `doubt` is true, also polls the engines.
    pub fn completed(&mut self, host: &mut impl Host, now: u64, doubt: bool) -> Vec<Completion> {
        let Self { layout, slots, vms, deferred, .. } = self;
        *deferred = false;
        for vm in vms.values_mut().filter(|vm| vm.told) {
            // The VM has already been notified of these completions, so discard them for engines that raised no
            // interrupt.
            (vm.news, vm.told) = (0, false);
        }
        let mut completions = Vec::new();
        let (looked_at, left_out) = due(vms, slots);
        for (vm, next) in left_out {
            *deferred = true;
            if let Some(vm) = vms.get_mut(&vm) {
                vm.next_look = next;
            }
        }
        for physical in looked_at {
            let Some(Slot::Bound(bound)) = slots.get_mut(usize::from(physical.0)) else { continue };
            let ring = &mut bound.ring;
            ring.observe(host.userd_read(physical, userd::GP_GET));
            let vm = vms.get_mut(&bound.vm);
            let listed = vm.as_ref().is_some_and(|vm| vm.list.contains(&bound.channel.0));
            let mut ended = released(host, layout, physical, ring);
            if ended < ring.with_card()
                && bound.told == RunState::Running
                && listed
                && at_rest(host, physical, bound.span, ring)
            {
                ended = ring.with_card();
            }
            let doubt = doubt && vm.as_ref().is_none_or(|vm| !vm.trusted);
            if doubt && ended > 0 && ended == ring.with_card() && is_worked_for(host, physical) {
                ended = ended.saturating_sub(1);
                *deferred = true;
            }
            if let Some(vm) = vm.filter(|_| ended > 0) {
                vm.news = ENGINES;
            }
            for _ in 0..ended {
                let Some(record) = ring.complete() else { break };
                let (payload, time) = look(host, layout, physical, &record);
                completions.push(Completion {
                    vm: bound.vm,
                    channel: bound.channel,
                    physical,
                    submission: record.submission,
                    sequence: record.sequence,
                    entries: record.entries,
                    submitted_at: record.submitted_at,
                    completed_at: now,
                    card_time_ns: (payload == record.sequence).then_some(time),
                });
            }
        }
        completions
    }

    /// Returns true if [`Self::completed`] must be called again soon, without waiting for an interrupt. This is the
    /// case if the last call skipped channels, or found a record that reports an end while an engine is still running
    /// the channel.
    #[must_use]
    pub fn is_deferred(&self) -> bool {
        self.deferred
    }

    /// Returns the VMs with work in flight that has progressed since the last call, or is now in a PBDMA or on an
    /// engine. The work of such a VM may have raised the engine's non-stall interrupt in the middle of a submission.
    /// Work that starts later cannot have raised it, so call this before [`Self::completed`].
    pub fn at_work(&mut self, host: &mut impl Host, engine: u32) -> BTreeSet<TenantId> {
        let mut working = BTreeSet::new();
        if 1u32.checked_shl(engine).unwrap_or(0) & ENGINES != 0
            && let Some(physical) = card::working_for(host, engine)
            && let Some((vm, _)) = self.by_physical(physical)
            && CHANNEL_STATE::LOADED.is_set(card::state(host, physical))
        {
            working.insert(vm);
        }
        // Channels that are skipped here are polled at the next interrupt or at the next poll for completions.
        for physical in due(&self.vms, &self.slots).0 {
            let Some(Slot::Bound(bound)) = self.slots.get_mut(usize::from(physical.0)) else { continue };
            let moved = moved(host, physical, &mut bound.ring);
            if moved || !working.contains(&bound.vm) && CHANNEL_STATE::LOADED.is_set(card::state(host, physical)) {
                working.insert(bound.vm);
            }
        }
        working
    }

    /// Returns the VMs that have not been notified of ended work for `engine`. Its interrupt may also be for them. Call
    /// this after [`Self::completed`].
    pub fn news(&mut self, engine: u32) -> BTreeSet<TenantId> {
        let bit = 1u32.checked_shl(engine).unwrap_or(0) & ENGINES;
        let mut told = BTreeSet::new();
        for (id, vm) in self.vms.iter_mut().filter(|(_, vm)| vm.news & bit != 0) {
            vm.news &= !bit;
            vm.told = true;
            told.insert(*id);
        }
        told
    }

    /// Returns the number of a channel's submissions in flight, including those that have not started.
    #[must_use]
    pub fn in_flight(&self, vm: TenantId, channel: VirtualChannelId) -> u32 {
        let bound = self.physical(vm, channel).and_then(|physical| self.bound(physical));
        bound.and_then(|bound| u32::try_from(bound.ring.records.len()).ok()).unwrap_or(0)
    }

    /// Returns true if a channel of the shadow `directory` has work in flight or entries to be pulled. Reads the card
    /// only if work is in flight. A guest can make this function return false too early, as with completions, but only
    /// for its own channels.
    pub fn busy_directory(&self, host: &mut impl Host, directory: VramAddr) -> bool {
        let bounds = self.slots.iter().zip(0..).filter_map(|(slot, number)| match slot {
            Slot::Bound(bound) if bound.directory == directory => Some((bound, ChannelId(number))),
            _ => None,
        });
        for (bound, physical) in bounds {
            let ring = &bound.ring;
            if ring.left() > 0 && ring.fault.is_none() {
                return true;
            }
            let Some(last) = ring.records.back() else { continue };
            let reached = ring.position(host.userd_read(physical, userd::GP_GET));
            if reached < last.end() || look(host, &self.layout, physical, last).0 != last.sequence {
                return true;
            }
        }
        false
    }
}

/// Returns the channels with work in flight that must be polled now: at most [`MAX_POLLED_PER_VM`] per VM, starting
/// with the first channel that the last call skipped. Also returns each VM's first skipped channel, if any.
fn due(vms: &BTreeMap<TenantId, Vm>, slots: &[Slot]) -> (Vec<ChannelId>, Vec<(TenantId, u8)>) {
    let is_busy = |physical: &ChannelId| {
        let slot = slots.get(usize::from(physical.0));
        matches!(slot, Some(Slot::Bound(bound)) if !bound.ring.records.is_empty())
    };
    let (mut due, mut left_out) = (Vec::new(), Vec::new());
    for (id, vm) in vms {
        let busy = vm.channels.values().copied().filter(is_busy);
        let (first, later): (Vec<_>, Vec<_>) = busy.partition(|physical| physical.0 >= vm.next_look);
        let mut busy = first.into_iter().chain(later);
        due.extend(busy.by_ref().take(MAX_POLLED_PER_VM));
        left_out.extend(busy.next().map(|next| (*id, next.0)));
    }
    (due, left_out)
}

/// Returns the number of oldest records that have certainly ended: all up to the newest one with a released semaphore.
/// The card executes a channel's methods in order, so earlier records have ended even if the card did not execute their
/// own release.
fn released(host: &mut impl Host, layout: &Layout, physical: ChannelId, ring: &Ring) -> usize {
    let fetched = ring.fetched();
    let mut newest = ring.records.iter().take(fetched).enumerate().rev();
    let found = newest.find(|(_, record)| look(host, layout, physical, record).0 == record.sequence);
    found.map_or(0, |(index, _)| index.saturating_add(1))
}

/// Returns the payload and the time in ns of a record's semaphore.
fn look(host: &mut impl Host, layout: &Layout, physical: ChannelId, record: &Record) -> (u32, u64) {
    let mut bytes = [0; SEMAPHORE_BYTES];
    host.vram_read(layout.work_area(physical).offset(semaphore_offset(record.slot)), &mut bytes);
    semaphore(&bytes)
}

/// Returns true if the card has no work left for a channel that it may schedule. This check is needed because a guest
/// can turn the last record's methods into the data of its own method, in which case the card never executes them.
// GUESS: if GET is at the end of the last range, all earlier work has been executed or passed to an engine.
fn at_rest(host: &mut impl Host, physical: ChannelId, span: Span, ring: &Ring) -> bool {
    let last = ring.with_card().checked_sub(1).and_then(|last| ring.records.get(last));
    let Some(last) = last.filter(|_| ring.drained()) else { return false };
    let busy = CHANNEL_STATE::PENDING.mask() | CHANNEL_STATE::ACQUIRE_PENDING.mask();
    card::userd_wide(host, physical, userd::GET, userd::GET_HI) == record_end(span, last.slot)
        && card::state(host, physical) & busy == 0
        && !is_worked_for(host, physical)
}

/// Returns true if an engine is running a channel.
pub(crate) fn is_worked_for(host: &mut impl Host, physical: ChannelId) -> bool {
    (0..engine::COUNT).any(|unit| card::working_for(host, unit) == Some(physical))
}

/// Returns true if a channel has progressed since the last poll.
fn moved(host: &mut impl Host, physical: ChannelId, ring: &mut Ring) -> bool {
    ring.observe(host.userd_read(physical, userd::GP_GET));
    let (before, get_before) = ring.seen;
    let position = ring.reached();
    if position == before && get_before.is_none() {
        return false;
    }
    let get = host.userd_read(physical, userd::GET);
    ring.seen = (position, Some(get));
    position != before || get_before != Some(get)
}

#[cfg(test)]
mod tests;
