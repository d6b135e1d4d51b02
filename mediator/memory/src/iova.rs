//! Allocates ranges of the card's I/O virtual addresses, which all VMs share.
//!
//! A Fermi page table entry contains a 40-bit bus address, so the guest-physical addresses of several VMs cannot be
//! used directly. Each region of lent memory is assigned its own range.
//!
//! A VMM may lend any number of regions. Therefore, each VM has its own window, as large as its guarantee, which other
//! VMs can neither fill nor fragment. Regions beyond the guarantee use addresses outside all windows, up to a quota.
//! The mediator uses the lowest addresses.

mod saved;

pub use saved::Claims;
pub(super) use saved::SavedIova;

use nvspec::addr::{BUS_BITS, Iova};
use std::collections::BTreeMap;
use std::ops::Range;
use vram::TenantId;

/// First address that can be allocated. Address 0 stays unused, so that a null pointer is never valid.
const FIRST_IOVA: u64 = 2 << 20;
/// Alignment of regions in bytes. It preserves large pages for any alignment that the guest chooses.
const ALIGN: u64 = 2 << 20;
/// Part of the address space that is available to VMs. VMs' ranges are never below it. It may also contain ranges of
/// the mediator.
const SHARED: Range<u64> = 128 << 30..1 << BUS_BITS;
/// Size in bytes of the part of the address space that is available to VMs.
pub const SHARED_BYTES: u64 = SHARED.end - SHARED.start;

/// Limits of the RAM that a VM may lend. The size of each region is rounded up to 2 MiB.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RamShare {
    /// Maximum number of bytes of RAM that the VM may lend.
    pub quota: u64,
    /// Size of the VM's own address window in bytes.
    pub guarantee: u64,
}

impl Default for RamShare {
    /// Returns a share that leaves space for the windows of 64 VMs, with a quarter of the rest as additional quota.
    fn default() -> Self {
        let guarantee = 4 << 30;
        Self { quota: guarantee + (SHARED_BYTES - 64 * guarantee) / 4, guarantee }
    }
}

/// A VM's account of I/O addresses.
#[derive(Debug, Default)]
struct Part {
    share: RamShare,
    /// Addresses reserved for the VM, if any.
    window: Option<Range<u64>>,
    /// Number of bytes charged to the VM's quota.
    charged: u64,
}

/// Reason why a VM's request for a range is denied.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NoIova {
    /// The request exceeds the VM's quota, which is this number of bytes.
    Quota(u64),
    /// Neither the VM's window nor the shared part has a gap that is large enough.
    Full,
}

/// First-fit allocator for the 40-bit address space.
#[derive(Debug, Default)]
pub struct IovaSpace {
    /// Length in bytes of each range in use, by start address.
    taken: BTreeMap<u64, u64>,
    vms: BTreeMap<TenantId, Part>,
}

/// Returns the number of bytes to charge for a range of `len` bytes.
fn charge(len: u64) -> Option<u64> {
    len.checked_next_multiple_of(ALIGN)
}

impl IovaSpace {
    /// Creates an address space that excludes the ranges that the host cannot map for the card.
    #[must_use]
    pub fn without(unmappable: &[Range<u64>]) -> Self {
        let within = unmappable.iter().map(|range| (range.start, range.end.saturating_sub(range.start)));
        Self { taken: within.filter(|(start, len)| *len != 0 && *start < 1 << BUS_BITS).collect(), ..Self::default() }
    }

    /// Sets or changes a VM's share. RAM that is already lent stays lent.
    ///
    /// # Errors
    /// Returns the largest possible guarantee in bytes if not enough addresses are free. In this case, nothing is
    /// changed.
    pub fn set_share(&mut self, vm: TenantId, share: RamShare) -> Result<(), u64> {
        let before = self.vms.get_mut(&vm).and_then(|part| part.window.take());
        let kept = before.as_ref().is_some_and(|window| window.end - window.start == share.guarantee);
        let window = if kept { before.clone() } else { self.window(share.guarantee) };
        let most = if window.is_some() || share.guarantee == 0 { None } else { Some(self.largest_window()) };
        let part = self.vms.entry(vm).or_default();
        match most {
            None => {
                part.window = window;
                part.share = share;
                Ok(())
            }
            Some(most) => {
                part.window = before;
                Err(most)
            }
        }
    }

    /// Finds addresses for a window. They are as high as possible, because the mediator's ranges grow upwards.
    fn window(&self, len: u64) -> Option<Range<u64>> {
        let gap = self.gaps().into_iter().rev().find(|gap| gap.end - gap.start >= len)?;
        (len != 0).then(|| gap.end - len..gap.end)
    }

    /// Returns the size of the largest possible window in bytes.
    fn largest_window(&self) -> u64 {
        self.gaps().into_iter().map(|gap| gap.end - gap.start).max().unwrap_or(0)
    }

    /// Returns the free, aligned ranges in the shared part outside all windows.
    fn gaps(&self) -> Vec<Range<u64>> {
        let mut used: Vec<Range<u64>> = self.taken.iter().map(|(&start, &len)| start..start + len).collect();
        used.extend(self.vms.values().filter_map(|part| part.window.clone()));
        used.sort_by_key(|range| range.start);
        let mut gaps = Vec::new();
        let mut at = SHARED.start;
        for range in used.into_iter().chain(std::iter::once(SHARED.end..SHARED.end)) {
            let end = range.start.min(SHARED.end) / ALIGN * ALIGN;
            if end > at {
                gaps.push(at..end);
            }
            at = at.max(range.end.next_multiple_of(ALIGN));
        }
        gaps
    }

    /// Removes a VM's share and window. Ranges that the VM has not freed stay in use.
    pub fn dismiss(&mut self, vm: TenantId) {
        self.vms.remove(&vm);
    }

    /// Returns a VM's share and the number of bytes charged to its quota.
    #[must_use]
    pub fn share_and_charged(&self, vm: TenantId) -> (RamShare, u64) {
        self.vms.get(&vm).map_or((RamShare::default(), 0), |part| (part.share, part.charged))
    }

    /// Allocates `len` bytes for a VM, in its window or outside all windows. See [`Self::allocate`].
    ///
    /// # Errors
    /// Returns an error if the VM's quota or the address space is exhausted.
    pub fn allocate_for(&mut self, vm: TenantId, len: u64, like: u64) -> Result<Iova, NoIova> {
        let (share, charged) = self.share_and_charged(vm);
        let charged = charge(len).and_then(|bytes| charged.checked_add(bytes)).filter(|sum| *sum <= share.quota);
        let charged = charged.ok_or(NoIova::Quota(share.quota))?;
        let window = self.vms.get(&vm).and_then(|part| part.window.clone());
        let own = window.and_then(|window| self.allocate_in(window, len, like, Some(vm)));
        let iova = own.or_else(|| self.allocate_in(SHARED, len, like, None)).ok_or(NoIova::Full)?;
        self.vms.entry(vm).or_default().charged = charged;
        Ok(iova)
    }

    /// Frees a range that [`Self::allocate_for`] returned.
    pub fn free_for(&mut self, vm: TenantId, iova: Iova) {
        let bytes = self.taken.get(&iova.0).copied().and_then(charge).unwrap_or(0);
        self.free(iova);
        if let Some(part) = self.vms.get_mut(&vm) {
            part.charged = part.charged.saturating_sub(bytes);
        }
    }

    /// Allocates `len` bytes for the mediator, at the same offset within 2 MiB as `like`, to preserve the alignment.
    /// Returns `None` if no gap is large enough.
    pub fn allocate(&mut self, len: u64, like: u64) -> Option<Iova> {
        self.allocate_in(FIRST_IOVA..SHARED.end, len, like, None)
    }

    /// Allocates `len` bytes within `range` but outside all windows, except that of VM `of`.
    fn allocate_in(&mut self, range: Range<u64>, len: u64, like: u64, of: Option<TenantId>) -> Option<Iova> {
        let skew = like % ALIGN;
        let mut candidate = range.start + skew;
        let windows: Vec<Range<u64>> =
            self.vms.iter().filter(|(vm, _)| Some(**vm) != of).filter_map(|(_, part)| part.window.clone()).collect();
        loop {
            let end = candidate.checked_add(len)?;
            if len == 0 || end > range.end {
                return None;
            }
            let taken = self.taken.range(..end).next_back().map(|(&start, &len)| start + len);
            let window = windows.iter().filter(|window| window.start < end).map(|window| window.end).max();
            let Some(behind) = taken.max(window).filter(|behind| *behind > candidate) else { break };
            candidate = behind.next_multiple_of(ALIGN) + skew;
        }
        self.taken.insert(candidate, len);
        Some(Iova(candidate))
    }

    /// Frees a range that [`Self::allocate`] returned.
    pub fn free(&mut self, iova: Iova) {
        let known = self.taken.remove(&iova.0);
        debug_assert!(known.is_some(), "an I/O address range was freed twice");
    }

    /// Returns the number of ranges in use.
    #[must_use]
    pub fn ranges(&self) -> usize {
        self.taken.len()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const WINDOW_BYTES: u64 = 4 << 30;
    const QUOTA: u64 = 164 << 30;

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
        let vms: Vec<_> = (0..64).map(TenantId).collect();
        vms.iter().for_each(|vm| space.set_share(*vm, RamShare::default()).unwrap());
        // Allocate regions of decreasing size until none fits.
        let mut had = 0;
        for len in [1 << 39, 1 << 34, 1 << 30, ALIGN, 1] {
            while space.allocate_for(vms[0], len, 0).is_ok() {
                had += len;
            }
        }
        assert!(had <= QUOTA, "{had:#x}");
        assert_eq!(space.allocate_for(vms[0], 1, 0), Err(NoIova::Quota(QUOTA)));
        // The other VMs then exhaust the remaining addresses, one after the other, but each must keep its own window.
        for vm in &vms[1..] {
            (0..36).take_while(|_| space.allocate_for(*vm, WINDOW_BYTES + ALIGN, 0).is_ok()).count();
        }
        for vm in &vms[1..] {
            assert!(space.allocate_for(*vm, WINDOW_BYTES, 0).is_ok(), "{vm}");
        }
        assert!(space.allocate(64 << 30, 0).is_some(), "the mediator's part is still free");
    }

    #[test]
    fn freed_range_returns_quota_and_removed_vm_returns_window() {
        let mut space = IovaSpace::default();
        space.set_share(TenantId(1), RamShare::default()).unwrap();
        let all = space.allocate_for(TenantId(1), QUOTA - WINDOW_BYTES, 0).unwrap();
        assert_eq!(space.allocate_for(TenantId(1), WINDOW_BYTES + 1, 0), Err(NoIova::Quota(QUOTA)));
        space.free_for(TenantId(1), all);
        let first = space.allocate_for(TenantId(1), WINDOW_BYTES, 0).unwrap();
        space.free_for(TenantId(1), first);
        space.dismiss(TenantId(1));
        space.set_share(TenantId(2), RamShare::default()).unwrap();
        assert_eq!(space.allocate_for(TenantId(2), WINDOW_BYTES, 0), Ok(first));
        assert_eq!(space.ranges(), 1);
    }

    #[test]
    fn shares_change_while_memory_is_lent() {
        let mut space = IovaSpace::default();
        let share = |quota: u64, guarantee: u64| RamShare { quota: quota << 30, guarantee: guarantee << 30 };
        space.set_share(TenantId(1), share(8, 4)).unwrap();
        let lent = space.allocate_for(TenantId(1), 3 << 30, 0).unwrap();
        // A quota below the lent amount does not reclaim RAM, but prevents further lending.
        space.set_share(TenantId(1), share(2, 1)).unwrap();
        assert_eq!(space.share_and_charged(TenantId(1)), (share(2, 1), 3 << 30));
        assert_eq!(space.allocate_for(TenantId(1), ALIGN, 0), Err(NoIova::Quota(2 << 30)));
        space.free_for(TenantId(1), lent);
        space.allocate_for(TenantId(1), 2 << 30, 0).unwrap();
        // A VM whose guarantee cannot be raised keeps its window, so no other VM is assigned its addresses.
        space.set_share(TenantId(4), share(8, 8)).unwrap();
        let left = space.set_share(TenantId(5), share(1000, 1000));
        space.set_share(TenantId(4), share(900, 900)).unwrap_err();
        assert_eq!(space.set_share(TenantId(5), share(1000, 1000)), left);
        // Setting a guarantee either succeeds, or fails and keeps the old guarantee.
        space.set_share(TenantId(2), share(600, 600)).unwrap();
        let most = space.set_share(TenantId(1), share(512, 512)).unwrap_err();
        assert!(most < 300 << 30, "{most:#x}");
        assert_eq!(space.share_and_charged(TenantId(1)).0, share(2, 1));
        space.set_share(TenantId(1), RamShare { quota: most, guarantee: most }).unwrap();
        assert_eq!(space.set_share(TenantId(3), share(1, 0)), Ok(()), "a share without a guarantee needs no addresses");
        while space.allocate_for(TenantId(3), ALIGN, 0).is_ok() {}
        assert!(space.allocate_for(TenantId(2), 600 << 30, 0).is_ok(), "the guaranteed addresses are available");
    }

    #[test]
    fn iova_holes_of_host_are_never_allocated() {
        // The interrupt address range, and the addresses beyond a 39-bit IOMMU.
        let holes = [0xfee0_0000..0xfef0_0000, 1 << 39..1 << BUS_BITS];
        let mut space = IovaSpace::without(&holes);
        space.set_share(TenantId(1), RamShare::default()).unwrap();
        let beside = |start: u64, len: u64| holes.iter().all(|hole| start + len <= hole.start || hole.end <= start);
        let (low, below) = (space.allocate(0xff00_0000, 0).unwrap(), space.allocate(0x8000_0000, 0).unwrap());
        assert!(beside(low.0, 0xff00_0000) && beside(below.0, 0x8000_0000), "{low:?} {below:?}");
        let ram = space.allocate_for(TenantId(1), WINDOW_BYTES, 0).unwrap();
        assert!(beside(ram.0, WINDOW_BYTES) && SHARED.contains(&ram.0), "{ram:?}");
        space.free_for(TenantId(1), ram);
        space.dismiss(TenantId(1));
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
