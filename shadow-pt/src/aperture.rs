//! The guest's view through BAR1 and BAR3, walked by us.

use crate::{GuestMemory, Place};

/// What lies behind an aperture offset.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Mapping {
    /// The byte, in the guest's own terms: not checked against what the guest owns.
    pub place: Place,
    /// Bytes from there to the end of the 4 KiB page.
    pub bytes: u64,
    /// Writes are allowed.
    pub writable: bool,
}

/// Why an aperture access goes nowhere; the numbers are the hardware's fault reasons (`nvspec::mmu::fault`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WalkFault {
    /// The aperture has no instance block, or one that cannot be read.
    Unbound,
    /// The offset is beyond the instance block's limit.
    Limit,
    /// The directory entry names no table, or one that cannot be read.
    Pde,
    /// The offset is beyond a shortened table.
    PdeSize,
    /// The entry is not valid, or names what no guest has.
    Pte,
}

/// One aperture's translation, with a cache of fixed size.
#[derive(Debug)]
pub struct ApertureTlb {}

impl ApertureTlb {
    /// An aperture without an instance block.
    #[must_use]
    pub fn new() -> Self {
        todo!()
    }

    /// The guest has named an instance block, or taken it away.
    pub fn bind(&mut self, instance: Option<Place>) {
        let _ = instance;
        todo!()
    }

    /// Forgets all translations: the guest has flushed its TLB.
    pub fn flush(&mut self) {
        todo!()
    }

    /// The guest's directory for this aperture, if its instance block can be read.
    pub fn directory(&mut self, guest: &mut impl GuestMemory) -> Option<Place> {
        let _ = guest;
        todo!()
    }

    /// What lies at byte `offset` of the aperture.
    ///
    /// # Errors
    /// As the hardware would fault. Failures are not cached.
    pub fn translate(&mut self, offset: u64, guest: &mut impl GuestMemory) -> Result<Mapping, WalkFault> {
        let _ = (offset, guest);
        todo!()
    }
}
