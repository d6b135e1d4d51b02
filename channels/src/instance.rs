//! What is taken from a guest's instance block, and what the card gets.

use crate::Place;
use nvspec::addr::{GpuVa, GuestVramAddr};

/// Why a guest's instance block is refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum InstanceError {
    /// Fewer bytes than an instance block has.
    #[error("an instance block has 4096 bytes")]
    Short,
    /// USERD in host memory or in no memory.
    #[error("the channel's USERD is not in VRAM")]
    Userd,
    /// A GPFIFO ring larger than the host takes.
    #[error("the channel's GPFIFO ring has 2^{0} entries")]
    RingSize(u32),
    /// The directory's target means nothing.
    #[error("the channel's page directory is in no memory")]
    Directory,
}

/// The fields of a guest's instance block that the host honours, decoded and checked. All else is the host's.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GuestInstance {
    /// Where the guest believes USERD to be; a multiple of 512 bytes.
    pub userd: GuestVramAddr,
    /// The GPFIFO ring.
    pub gp_base: GpuVa,
    /// Log2 of the ring's entries.
    pub gp_entries_log2: u32,
    /// The guest's page directory.
    pub directory: Place,
    /// Last valid virtual address, below 2^40.
    pub limit: u64,
    /// Engine context pointers: PGRAPH, CE0, CE1.
    pub contexts: [Option<GpuVa>; 3],
}

impl GuestInstance {
    /// Decodes the bytes of a guest's instance block, which the caller has copied.
    ///
    /// # Errors
    /// See [`InstanceError`].
    pub fn parse(bytes: &[u8]) -> Result<Self, InstanceError> {
        let _ = bytes;
        todo!()
    }
}
