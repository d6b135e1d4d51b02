//! The card's I/O virtual addresses, shared by all VMs: who has which range.
//!
//! A Fermi page table entry holds 40 bits of bus address, so guest-physical addresses of several VMs cannot be used as
//! they are; each lent memory region gets a range of its own.

use nvspec::addr::{BUS_BITS, Iova};
use std::collections::BTreeMap;

/// First address that is handed out: address 0 stays unused, so that a null pointer names nothing.
const FIRST: u64 = 2 << 20;
/// Regions begin at multiples of this, so that large pages stay large whatever the guest aligns.
const ALIGN: u64 = 2 << 20;

/// First-fit allocator over the 40-bit space.
#[derive(Debug, Default)]
pub struct IovaSpace {
    /// Start and length of what is taken.
    taken: BTreeMap<u64, u64>,
}

impl IovaSpace {
    /// Takes `len` bytes whose address has the same offset within 2 MiB as `like`, so that alignment is kept.
    /// `None` when no gap is large enough.
    pub fn allocate(&mut self, len: u64, like: u64) -> Option<Iova> {
        let skew = like % ALIGN;
        let mut candidate = FIRST + skew;
        for (&start, &size) in &self.taken {
            if candidate.checked_add(len)? <= start {
                break;
            }
            candidate = candidate.max((start + size).next_multiple_of(ALIGN) + skew);
        }
        let end = candidate.checked_add(len)?;
        if len == 0 || end > 1 << BUS_BITS {
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
