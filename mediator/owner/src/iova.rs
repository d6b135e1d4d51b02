//! The card's I/O virtual addresses, shared by all VMs: who has which range.
//!
//! A Fermi page table entry holds 40 bits of bus address, so guest-physical addresses of several VMs cannot be used as
//! they are; each lent memory region gets a range of its own.
//!
//! A VMM lends as many regions as it likes, so each VM has a window of its own at the top of the space, which nobody else can
//! fill or fragment; what does not fit there comes from a part that VMs share, up to a quota. The bottom is the mediator's.

use nvspec::addr::{BUS_BITS, Iova};
use std::collections::BTreeMap;
use std::ops::Range;
use vram::VmId;

/// First address that is handed out: address 0 stays unused, so that a null pointer names nothing.
const FIRST: u64 = 2 << 20;
/// Regions begin at multiples of this, so that large pages stay large whatever the guest aligns.
const ALIGN: u64 = 2 << 20;
/// Bytes of a VM's own window.
pub const WINDOW: u64 = 4 << 30;
/// Windows: as many as a daemon may have VMs.
const WINDOWS: u64 = 64;
/// What VMs share beside their windows. The mediator's own ranges may lie there, too, but no VM's below it.
const SHARED: Range<u64> = 128 << 30..(1 << BUS_BITS) - WINDOWS * WINDOW;
/// Most bytes that one VM can have, in steps of 2 MiB for each region: its window, and a quarter of what VMs share.
pub const QUOTA: u64 = WINDOW + (SHARED.end - SHARED.start) / 4;

/// What a VM has.
#[derive(Debug, Default)]
struct Part {
    /// Which window is its own; `None` for a VM beyond the last.
    window: Option<u64>,
    /// Bytes that count against its quota.
    charged: u64,
}

/// Why a VM gets no range.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NoIova {
    /// It would have more than [`QUOTA`].
    Quota,
    /// Neither its window nor the shared part has such a gap.
    Full,
}

/// First-fit allocator over the 40-bit space.
#[derive(Debug, Default)]
pub struct IovaSpace {
    /// Start and length of what is taken.
    taken: BTreeMap<u64, u64>,
    vms: BTreeMap<VmId, Part>,
}

/// Returns what a range of `len` bytes counts.
fn charge(len: u64) -> Option<u64> {
    len.checked_next_multiple_of(ALIGN)
}

impl IovaSpace {
    /// A space without what the host cannot map for the card.
    #[must_use]
    pub fn without(unmappable: &[Range<u64>]) -> Self {
        let within = unmappable.iter().map(|range| (range.start, range.end.saturating_sub(range.start)));
        Self { taken: within.filter(|(start, len)| *len != 0 && *start < 1 << BUS_BITS).collect(), ..Self::default() }
    }

    /// Gives a VM its window.
    pub fn admit(&mut self, vm: VmId) {
        let window = (0..WINDOWS).find(|window| self.vms.values().all(|part| part.window != Some(*window)));
        self.vms.insert(vm, Part { window, charged: 0 });
    }

    /// Takes a VM's window back. Ranges that it has not given back stay taken.
    pub fn dismiss(&mut self, vm: VmId) {
        self.vms.remove(&vm);
    }

    /// Takes `len` bytes for a VM, as [`Self::allocate`]: of its window, or of what VMs share.
    ///
    /// # Errors
    /// When its quota or the space is used up.
    pub fn allocate_for(&mut self, vm: VmId, len: u64, like: u64) -> Result<Iova, NoIova> {
        let part = self.vms.get(&vm);
        let charged = part.map_or(0, |part| part.charged);
        let charged = charge(len).and_then(|bytes| charged.checked_add(bytes)).filter(|sum| *sum <= QUOTA);
        let charged = charged.ok_or(NoIova::Quota)?;
        let window = part.and_then(|part| part.window).map(|window| {
            let start = SHARED.end + window * WINDOW;
            start..start + WINDOW
        });
        let own = window.and_then(|window| self.allocate_in(window, len, like));
        let iova = own.or_else(|| self.allocate_in(SHARED, len, like)).ok_or(NoIova::Full)?;
        self.vms.entry(vm).or_default().charged = charged;
        Ok(iova)
    }

    /// Gives back what [`Self::allocate_for`] returned.
    pub fn free_for(&mut self, vm: VmId, iova: Iova) {
        let bytes = self.taken.get(&iova.0).copied().and_then(charge).unwrap_or(0);
        self.free(iova);
        if let Some(part) = self.vms.get_mut(&vm) {
            part.charged = part.charged.saturating_sub(bytes);
        }
    }

    /// Takes `len` bytes for the mediator, whose address has the same offset within 2 MiB as `like`, so that alignment is
    /// kept. `None` when no gap is large enough.
    pub fn allocate(&mut self, len: u64, like: u64) -> Option<Iova> {
        self.allocate_in(FIRST..SHARED.end, len, like)
    }

    fn allocate_in(&mut self, range: Range<u64>, len: u64, like: u64) -> Option<Iova> {
        let skew = like % ALIGN;
        let mut candidate = range.start + skew;
        let before = self.taken.range(..=range.start).next_back().map_or(range.start, |(&start, _)| start);
        for (&start, &size) in self.taken.range(before..range.end) {
            if candidate.checked_add(len)? <= start {
                break;
            }
            if start + size > range.start {
                candidate = candidate.max((start + size).next_multiple_of(ALIGN) + skew);
            }
        }
        let end = candidate.checked_add(len)?;
        if len == 0 || end > range.end {
            return None;
        }
        self.taken.insert(candidate, len);
        Some(Iova(candidate))
    }

    /// Gives back what [`Self::allocate`] returned.
    pub fn free(&mut self, iova: Iova) {
        let known = self.taken.remove(&iova.0);
        debug_assert!(known.is_some(), "an I/O address range was given back twice");
    }

    /// Ranges in use.
    #[must_use]
    pub fn ranges(&self) -> usize {
        self.taken.len()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn alignment_within_two_mebibytes_is_kept() {
        let mut space = IovaSpace::default();
        let a = space.allocate(0x3000, 0xc_0000).unwrap();
        let b = space.allocate(0x10_0000, 0x10_0000).unwrap();
        assert_eq!((a.0 % ALIGN, b.0 % ALIGN), (0xc_0000, 0x10_0000));
    }

    #[test]
    fn request_beyond_the_space_is_refused() {
        assert_eq!(IovaSpace::default().allocate(1 << BUS_BITS, 0), None);
        assert_eq!(IovaSpace::default().allocate(u64::MAX - 4096, 0), None);
    }

    #[test]
    fn vm_that_takes_all_it_can_leaves_its_neighbours_their_part() {
        let mut space = IovaSpace::default();
        let vms: Vec<_> = (0..WINDOWS as u32).map(VmId).collect();
        vms.iter().for_each(|vm| space.admit(*vm));
        // Regions of all sizes, until nothing more fits.
        let mut had = 0;
        for len in [1 << 39, 1 << 34, 1 << 30, ALIGN, 1] {
            while space.allocate_for(vms[0], len, 0).is_ok() {
                had += len;
            }
        }
        assert!(had <= QUOTA, "{had:#x}");
        assert_eq!(space.allocate_for(vms[0], 1, 0), Err(NoIova::Quota));
        // The others take turns to take the rest; what is theirs alone is left to each.
        for vm in &vms[1..] {
            (0..36).take_while(|_| space.allocate_for(*vm, WINDOW + ALIGN, 0).is_ok()).count();
        }
        for vm in &vms[1..] {
            assert!(space.allocate_for(*vm, WINDOW, 0).is_ok(), "{vm}");
        }
        assert!(space.allocate(64 << 30, 0).is_some(), "the mediator's part is left, too");
    }

    #[test]
    fn quota_comes_back_with_the_range_and_the_window_with_the_vm() {
        let mut space = IovaSpace::default();
        space.admit(VmId(1));
        let all = space.allocate_for(VmId(1), QUOTA - WINDOW, 0).unwrap();
        assert_eq!(space.allocate_for(VmId(1), WINDOW + 1, 0), Err(NoIova::Quota));
        space.free_for(VmId(1), all);
        let first = space.allocate_for(VmId(1), WINDOW, 0).unwrap();
        space.free_for(VmId(1), first);
        space.dismiss(VmId(1));
        space.admit(VmId(2));
        assert_eq!(space.allocate_for(VmId(2), WINDOW, 0), Ok(first));
        assert_eq!(space.ranges(), 1);
    }

    #[test]
    fn what_the_host_cannot_map_is_given_to_nobody() {
        // As an IOMMU with 39 bits, and the interrupts' addresses.
        let holes = [0xfee0_0000..0xfef0_0000, 1 << 39..1 << BUS_BITS];
        let mut space = IovaSpace::without(&holes);
        space.admit(VmId(1));
        let beside = |start: u64, len: u64| holes.iter().all(|hole| start + len <= hole.start || hole.end <= start);
        let (low, below) = (space.allocate(0xff00_0000, 0).unwrap(), space.allocate(0x8000_0000, 0).unwrap());
        assert!(beside(low.0, 0xff00_0000) && beside(below.0, 0x8000_0000), "{low:?} {below:?}");
        // The VM's window is out of reach, so it has its RAM where VMs share.
        let ram = space.allocate_for(VmId(1), WINDOW, 0).unwrap();
        assert!(beside(ram.0, WINDOW) && SHARED.contains(&ram.0), "{ram:?}");
        space.free_for(VmId(1), ram);
        let all =
            std::iter::from_fn(|| space.allocate(1 << 30, 0)).inspect(|at| assert!(beside(at.0, 1 << 30))).count();
        assert!((500..512).contains(&all), "{all} GiB");
    }

    proptest! {
        #[test]
        fn ranges_never_overlap(ops in prop::collection::vec((1u64..0x800_0000, 0u64..1 << 40, any::<bool>()), 1..60)) {
            let mut space = IovaSpace::default();
            let mut held: Vec<(u64, u64)> = Vec::new();
            for (len, like, free) in ops {
                if free && !held.is_empty() {
                    let (start, _) = held.swap_remove(like as usize % held.len());
                    space.free(Iova(start));
                } else if let Some(Iova(start)) = space.allocate(len, like) {
                    prop_assert!(held.iter().all(|&(s, l)| start + len <= s || s + l <= start));
                    held.push((start, len));
                }
            }
            prop_assert_eq!(space.ranges(), held.len());
        }
    }
}
