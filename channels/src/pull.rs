//! Copies entries from a guest's ring to the host's ring.

use crate::entry::Entry;
use crate::pool::Bound;
use crate::ring::{Record, Ring};
use crate::state::Permit;
use crate::work::{
    ENTRY_BYTES, RAISES, RING_ENTRIES, SEMAPHORE_BYTES, Span, entry_offset, push_offset, raises_nothing, record_entry,
    record_push, semaphore_offset,
};
use crate::{
    Channels, Doorbell, GuestRing, Host, Layout, PullError, Pulled, RingFault, RunState, Submission, TenantId,
};
use nvspec::addr::{GpuVa, SMALL_PAGE};
use nvspec::fifo::{ChannelId, GpEntry, VirtualChannelId};
use nvspec::instance::userd;
use nvspec::mmu::HOST_VA_BASE;

/// Maximum number of guest entries per read.
const CHUNK: usize = 64;
/// Minimum number of free entries that justifies a pull even if not all guest entries fit.
const WORTHWHILE: u32 = RING_ENTRIES / 4;

impl Channels {
    /// Copies as many of the guest's ring entries up to a doorbell as fit in the host's ring, as one submission, and
    /// appends a completion record. The card does not fetch the submission before [`Self::start`]. `now` is the time in
    /// ns. Pulls nothing if a later doorbell was already pulled, if the channel has ended or was unbound since the
    /// doorbell was validated, or while changed context pointers wait for work in flight.
    ///
    /// # Errors
    /// Returns a [`PullError`] if an entry is unreadable or invalid. The channel then returns the same fault until it
    /// is bound again.
    pub fn pull(
        &mut self,
        card: &mut (impl Host + GuestRing),
        doorbell: Doorbell,
        now: u64,
    ) -> Result<Pulled, PullError> {
        let layout = self.layout;
        let physical = doorbell.channel;
        let submission = Submission(self.submissions);
        let Some(bound) =
            self.bound_mut(physical).filter(|bound| bound.serial == doorbell.serial && bound.permit != Permit::Ended)
        else {
            return Ok(Pulled::default());
        };
        let ring = &mut bound.ring;
        ring.allow(doorbell.gp_put, doorbell.order);
        if let Some(fault) = ring.fault {
            return Err(PullError { fault, pulled: Pulled::default() });
        }
        if ring.left() == 0 {
            return Ok(Pulled::default());
        }
        if !self.renew_contexts(card, physical) {
            let left = self.bound(physical).map_or(0, |bound| bound.ring.left());
            return Ok(Pulled { left, ..Pulled::default() });
        }
        let Some(Bound { ring, span, .. }) = self.bound_mut(physical) else { return Ok(Pulled::default()) };
        ring.observe(card.userd_read(physical, userd::GP_GET));
        let (entries, fault) = take(ring, card, ring.left().min(ring.room()));
        if !entries.is_empty() {
            let at = ring.host_index();
            let record = ring.submit(submission, &entries, now);
            give(card, &layout, physical, *span, at, &entries, record);
            for entry in entries.iter().filter(|entry| entry.end.is_some()) {
                let entry = GpEntry::from(entry.raw);
                card.taken(GpuVa(entry.address()), entry.dwords());
            }
        }
        ring.fault = fault;
        let taken = u32::try_from(entries.len()).unwrap_or(u32::MAX);
        let words = entries.iter().fold(0u32, |sum, entry| sum.saturating_add(GpEntry::from(entry.raw).dwords()));
        let pulled = Pulled { submission: (taken > 0).then_some(submission), taken, words, left: ring.left() };
        if taken > 0 {
            self.submissions = self.submissions.wrapping_add(1);
        }
        fault.map_or(Ok(pulled), |fault| Err(PullError { fault, pulled }))
    }

    /// Suppresses the interrupt of a submission's record. The end of the submission is then detected by a poll or when
    /// the next submission ends. If the card has already fetched the record, the interrupt is still raised. Returns
    /// `false` if the submission does not exist.
    pub fn suppress_completion_irq(
        &mut self,
        host: &mut impl Host,
        physical: ChannelId,
        submission: Submission,
    ) -> bool {
        let area = self.layout.work_area(physical);
        let Some(bound) = self.bound(physical) else { return false };
        let Some(record) = bound.ring.records.iter().find(|record| record.submission == submission) else {
            return false;
        };
        host.vram_write(area.offset(push_offset(record.slot)).offset(RAISES), &raises_nothing());
        true
    }

    /// Returns true if few submissions of a channel are in flight and no entry waits for free space, so completions are
    /// not urgent.
    #[must_use]
    pub fn is_shallow(&self, physical: ChannelId) -> bool {
        self.bound(physical).is_some_and(|bound| bound.ring.is_shallow())
    }

    /// Lets the card fetch a submission of a physical channel, together with the channel's earlier ones. Returns
    /// `false` if the card may already fetch it, if it does not exist, or if the channel has ended.
    pub fn start(&mut self, host: &mut impl Host, physical: ChannelId, submission: Submission) -> bool {
        let Some(bound) = self.bound_mut(physical).filter(|bound| bound.permit != Permit::Ended) else { return false };
        let Some(put) = bound.ring.start(submission) else { return false };
        host.vram_flush();
        host.userd_write(physical, userd::GP_PUT, put);
        true
    }

    /// Rewrites the card's fetch limit for each ring, because an earlier owner that was still running may have changed
    /// it after this state was saved.
    pub fn allow_again(&self, host: &mut impl Host) {
        for physical in self.vms.values().flat_map(|vm| vm.channels.values().copied()) {
            if let Some(bound) = self.bound(physical) {
                host.userd_write(physical, userd::GP_PUT, bound.ring.allowed_index());
            }
        }
    }

    /// Returns the channels with entries that may be pulled and that fit. Call this after completions, and after
    /// enabling a channel that had work when its guest unbound it. Omits channels that the card does not schedule. Also
    /// omits channels if only a few of many entries fit, because each pull costs a record and an interrupt.
    #[must_use]
    pub fn pending_pull(&self) -> Vec<Doorbell> {
        let bounds = self.vms.values().flat_map(|vm| vm.channels.values());
        bounds
            .filter_map(|physical| Some((*physical, self.bound(*physical)?)))
            .filter(|(_, bound)| bound.told == RunState::Running && bound.ring.fault.is_none())
            .filter(|(_, bound)| bound.next_contexts.is_none() || bound.ring.records.is_empty())
            .filter(|(_, bound)| bound.ring.left() > 0 && bound.ring.room() >= bound.ring.left().min(WORTHWHILE))
            .map(|(physical, bound)| {
                let (gp_put, order) = bound.ring.allowed();
                let (vm, virtual_channel, serial) = (bound.vm, bound.channel, bound.serial);
                Doorbell { vm, virtual_channel, channel: physical, gp_put, serial, order }
            })
            .collect()
    }

    /// Returns the number of a channel's entries that may be pulled but have not been pulled.
    #[must_use]
    pub fn backlog(&self, vm: TenantId, channel: VirtualChannelId) -> u32 {
        let bound = self.physical(vm, channel).and_then(|physical| self.bound(physical));
        bound.map_or(0, |bound| bound.ring.left())
    }
}

/// Reads and validates at most `count` guest entries, starting at the next one.
fn take(ring: &Ring, guest: &mut impl GuestRing, count: u32) -> (Vec<Entry>, Option<RingFault>) {
    let mut entries = Vec::with_capacity(count as usize);
    let mut bytes = [0; CHUNK * ENTRY_BYTES];
    while entries.len() < count as usize {
        let index = ring.wrap(ring.next, u32::try_from(entries.len()).unwrap_or(0));
        let va = ring.gp_base.offset(u64::from(index).wrapping_mul(ENTRY_BYTES as u64));
        let wanted = (count as usize).saturating_sub(entries.len());
        let run = chunk(va, wanted, ring.entries.saturating_sub(index) as usize);
        let unmapped = Some(RingFault::Unmapped { va });
        let Some(data) = bytes.get_mut(..run.saturating_mul(ENTRY_BYTES)) else { return (entries, unmapped) };
        // Entries are aligned, so no entry straddles the start of the host's addresses.
        if va >= HOST_VA_BASE || guest.read(va, data).is_err() {
            return (entries, unmapped);
        }
        for (raw, index) in data.chunks_exact(ENTRY_BYTES).zip(index..) {
            let raw = raw.first_chunk().map_or(0, |raw| u64::from_le_bytes(*raw));
            let Some(entry) = Entry::check(raw) else { return (entries, Some(RingFault::Entry { index, raw })) };
            entries.push(entry);
        }
    }
    (entries, None)
}

/// Returns the number of the `wanted` entries at `va` that fit in a single read. A read has at most [`CHUNK`] entries,
/// and ends at the page boundary or after `to_end` entries, at the end of the ring. Returns at least 1, because a page
/// contains a whole number of entries and the ring is aligned to an entry.
fn chunk(va: GpuVa, wanted: usize, to_end: usize) -> usize {
    let in_page = SMALL_PAGE.saturating_sub(va.0 % SMALL_PAGE).checked_div(ENTRY_BYTES as u64).unwrap_or(1);
    wanted.min(to_end).min(CHUNK).min(usize::try_from(in_page).unwrap_or(1)).max(1)
}

/// Writes a submission to the work area: the entries (starting at ring index `at`), the record's entry, and the record.
fn give(
    host: &mut impl Host,
    layout: &Layout,
    physical: ChannelId,
    span: Span,
    at: u32,
    entries: &[Entry],
    record: Record,
) {
    let area = layout.work_area(physical);
    let raws = entries.iter().map(|entry| entry.raw).chain([record_entry(span, record.slot)]);
    let bytes: Vec<u8> = raws.flat_map(u64::to_le_bytes).collect();
    let to_end = RING_ENTRIES.saturating_sub(at) as usize;
    let (before, after) = bytes.split_at(bytes.len().min(to_end.saturating_mul(ENTRY_BYTES)));
    host.vram_write(area.offset(entry_offset(at)), before);
    if !after.is_empty() {
        host.vram_write(area, after);
    }
    let push = record_push(span, record.slot, record.sequence);
    host.vram_write(area.offset(push_offset(record.slot)), &push);
    host.vram_write(area.offset(semaphore_offset(record.slot)), &[0; SEMAPHORE_BYTES]);
}

#[cfg(test)]
mod tests;
