//! A VM's map from guest chunks to their places, and its accounts.

mod saved;

pub use saved::SavedVm;

use super::account::VmSummary;
use super::limits::Limits;
use super::state::{Spot, Tier};
use crate::GuestVramAddr;
use std::collections::BTreeSet;

/// Place of each guest chunk, and totals for each memory.
#[derive(Debug)]
pub(super) struct VmMap {
    /// End of the guest's address range, in bytes. The last chunk may extend beyond it. Addresses stay valid if the
    /// VRAM shrinks.
    bytes: u64,
    /// Log2 of the chunk size in bytes.
    shift: u32,
    /// Place of each guest chunk, or `None` if the chunk is unplaced.
    chunks: Vec<Option<Spot>>,
    /// Chunks in the reserve, which are on the card but are counted as host memory.
    parked: BTreeSet<u32>,
    /// Totals maintained by this map, except for `parked`, `unbacked`, and `guarantee`, which are set by
    /// [`Self::account`].
    sums: VmSummary,
    /// Number of moves in flight to the card.
    arriving: u32,
    /// Number of moves in flight to host memory.
    leaving: u32,
}

impl VmMap {
    /// Creates a map of `count` unplaced chunks of `1 << shift` bytes. The last chunk may be partial.
    pub(super) fn new(bytes: u64, count: u32, shift: u32, limits: Limits) -> Self {
        let sums = VmSummary { advertised: count, limits, ..VmSummary::default() };
        let (chunks, parked) = (vec![None; count as usize], BTreeSet::new());
        Self { bytes, shift, chunks, parked, sums, arriving: 0, leaving: 0 }
    }

    pub(super) fn bytes(&self) -> u64 {
        self.bytes
    }

    pub(super) fn limits(&self) -> Limits {
        self.sums.limits
    }

    pub(super) fn set_limits(&mut self, limits: Limits) {
        self.sums.limits = limits;
    }

    /// Changes the VM's maximum number of chunks, and adds addresses if `bytes` exceeds the current size.
    pub(super) fn resize(&mut self, bytes: u64, count: u32) {
        self.bytes = self.bytes.max(bytes);
        self.sums.advertised = count;
        self.chunks.resize(self.chunks.len().max(count as usize), None);
    }

    pub(super) fn account(&self) -> VmSummary {
        let parked = self.parked.len() as u32;
        // A VM that has shrunk may have more chunks than its current size permits.
        let unbacked = self.sums.advertised.saturating_sub(self.placed());
        VmSummary { parked, unbacked, guarantee: self.guarantee(), ..self.sums }
    }

    /// Returns the number of placed chunks.
    fn placed(&self) -> u32 {
        self.sums.placed + self.parked.len() as u32 + self.sums.host
    }

    /// Returns true if the VM has the maximum number of chunks for its VRAM size.
    pub(super) fn is_full(&self) -> bool {
        self.placed() >= self.sums.advertised
    }

    pub(super) fn advertised(&self) -> u32 {
        self.sums.advertised
    }

    /// Returns the number of chunks guaranteed to the VM.
    pub(super) fn guarantee(&self) -> u32 {
        self.sums.limits.guarantee.min(self.sums.advertised)
    }

    /// Returns the number of guaranteed chunks that the VM lacks.
    pub(super) fn owed(&self) -> u32 {
        self.guarantee().saturating_sub(self.used(Tier::Card))
    }

    /// Returns the number of chunks that count towards the limits of `tier`: the chunks in this memory and those moving
    /// to it.
    pub(super) fn used(&self, tier: Tier) -> u32 {
        match tier {
            Tier::Card => self.sums.placed + self.arriving,
            Tier::Host => self.sums.host + self.parked.len() as u32 + self.leaving,
        }
    }

    /// Returns the index of the guest chunk that contains `address`, if the guest has that address.
    pub(super) fn index(&self, address: GuestVramAddr) -> Option<u32> {
        u32::try_from(address.0 >> self.shift).ok().filter(|_| address.0 < self.bytes)
    }

    /// Returns the place of guest chunk `index`.
    pub(super) fn get(&self, index: u32) -> Option<Spot> {
        self.chunks.get(index as usize).copied().flatten()
    }

    /// Sets the place of guest chunk `index`, which must exist and be unplaced.
    pub(super) fn set(&mut self, index: u32, spot: Spot) {
        let old = self.chunks[index as usize].replace(spot);
        assert_eq!(old, None, "guest chunk {index} is already placed");
        *self.count(spot) += 1;
        self.sums.born_in_host += u64::from(spot.tier() == Tier::Host);
        self.note_peaks();
    }

    /// Removes the place of guest chunk `index`. Returns the place, and a flag that is true if the chunk was in the
    /// reserve.
    pub(super) fn take(&mut self, index: u32) -> Option<(Spot, bool)> {
        let spot = self.chunks.get_mut(index as usize)?.take()?;
        let parked = self.uncount(index, spot);
        Some((spot, parked))
    }

    /// Unplaces all chunks. Returns their previous places, in the order of guest chunks.
    pub(super) fn take_all(&mut self) -> Vec<Spot> {
        (self.sums.placed, self.sums.host) = (0, 0);
        self.parked.clear();
        self.chunks.iter_mut().filter_map(Option::take).collect()
    }

    /// Returns all placed guest chunks, in order.
    pub(super) fn iter(&self) -> impl Iterator<Item = (u32, Spot)> + '_ {
        (0u32..).zip(&self.chunks).filter_map(|(index, spot)| Some((index, (*spot)?)))
    }

    pub(super) fn is_parked(&self, index: u32) -> bool {
        self.parked.contains(&index)
    }

    pub(super) fn parked(&self) -> impl Iterator<Item = u32> + '_ {
        self.parked.iter().copied()
    }

    /// Adds guest chunk `index`, which is on the card, to the reserve. It is then counted as host memory.
    pub(super) fn park(&mut self, index: u32) {
        self.sums.placed -= 1;
        self.parked.insert(index);
        self.note_peaks();
    }

    /// Removes guest chunk `index` from the reserve. It is then counted as a card chunk again.
    pub(super) fn unpark(&mut self, index: u32) {
        self.sums.placed += 1;
        self.parked.remove(&index);
        self.note_peaks();
    }

    /// Starts a move of guest chunk `index` to `tier`.
    pub(super) fn begin(&mut self, index: u32, tier: Tier) {
        if !self.is_parked(index) {
            *self.on_the_way(tier) += 1;
        }
        self.sums.moving += 1;
        self.note_peaks();
    }

    /// Records that the chunk of a move was unplaced. The destination is still counted until the move ends.
    pub(super) fn lose(&mut self) {
        self.sums.moving -= 1;
    }

    /// Ends a move to `tier`. `drains` is true if the chunk was in the reserve. `alive` is true if the chunk is still
    /// placed.
    pub(super) fn end(&mut self, tier: Tier, drains: bool, alive: bool) {
        if !drains {
            *self.on_the_way(tier) -= 1;
        }
        self.sums.moving -= u32::from(alive);
    }

    /// Completes a move of guest chunk `index`, which is now at `spot`.
    pub(super) fn arrive(&mut self, index: u32, spot: Spot) {
        self.end(spot.tier(), self.is_parked(index), true);
        let old = self.chunks[index as usize].replace(spot).expect("a moving chunk is placed");
        self.uncount(index, old);
        *self.count(spot) += 1;
        match spot.tier() {
            Tier::Card => self.sums.moved_in += 1,
            Tier::Host => self.sums.moved_out += 1,
        }
    }

    /// Returns the number of chunks that are contiguous in memory, starting with guest chunk `index` at `spot`. Checks
    /// at most `limit` chunks.
    pub(super) fn neighbours(&self, index: u32, spot: Spot, limit: u64) -> u64 {
        let rest = self.chunks.get(index as usize..).unwrap_or(&[]);
        let follows = |&(step, at): &(u64, &Option<Spot>)| at.is_some() && *at == spot.after(step as u32);
        (0u64..limit).zip(rest).take_while(follows).count() as u64
    }

    /// Returns the number of placed chunks among `count` guest chunks, starting with `index`.
    pub(super) fn placed_among(&self, index: u32, count: u64) -> u64 {
        let rest = self.chunks.get(index as usize..).unwrap_or(&[]);
        (0u64..count).zip(rest).filter(|(_, at)| at.is_some()).count() as u64
    }

    /// Removes guest chunk `index` at `spot` from the totals. Returns true if the chunk was in the reserve.
    fn uncount(&mut self, index: u32, spot: Spot) -> bool {
        let parked = self.parked.remove(&index);
        if !parked {
            *self.count(spot) -= 1;
        }
        parked
    }

    fn count(&mut self, spot: Spot) -> &mut u32 {
        match spot.tier() {
            Tier::Card => &mut self.sums.placed,
            Tier::Host => &mut self.sums.host,
        }
    }

    fn on_the_way(&mut self, tier: Tier) -> &mut u32 {
        match tier {
            Tier::Card => &mut self.arriving,
            Tier::Host => &mut self.leaving,
        }
    }

    fn note_peaks(&mut self) {
        self.sums.peak = self.sums.peak.max(self.used(Tier::Card));
        self.sums.host_peak = self.sums.host_peak.max(self.used(Tier::Host));
    }
}
