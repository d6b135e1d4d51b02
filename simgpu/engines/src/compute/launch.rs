//! A launch: the parameters of a grid, captured by the launch method.

use nvspec::addr::GpuVa;
use nvspec::class::compute90c0::{limit, warp_error};
use simgpu_memory::mmu::MmuFault;

/// Reason why a grid ended early.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Failure {
    /// A memory access faulted.
    Fault(MmuFault),
    /// A warp raised an error with this code ([`warp_error`]).
    Warp(u32),
}

impl From<MmuFault> for Failure {
    fn from(fault: MmuFault) -> Self {
        Self::Fault(fault)
    }
}

/// The instruction does not exist or is not modelled.
pub(crate) const ILLEGAL: Failure = Failure::Warp(warp_error::ILLEGAL_ENCODING);

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Bank {
    pub(crate) base: u64,
    /// Size in bytes, or 0 if unbound.
    pub(crate) bytes: u32,
}

pub(crate) type Banks = [Bank; limit::CONSTANT_BANKS as usize];

/// Mapping of the upper byte of global addresses.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct GlobalMap(pub(crate) Box<[u16; 256]>);

impl GlobalMap {
    /// Set if stores are permitted.
    pub(crate) const WRITE: u16 = 0x200;
    /// Set if loads are permitted.
    pub(crate) const READ: u16 = 0x100;
}

impl Default for GlobalMap {
    fn default() -> Self {
        Self(Box::new(std::array::from_fn(|upper| upper as u16 | Self::READ | Self::WRITE)))
    }
}

/// A grid and its parameters.
#[derive(Clone, Debug)]
pub(crate) struct Launch {
    /// Grid dimensions in blocks (x, y, z). Never 0.
    pub(crate) grid: [u32; 3],
    /// Block dimensions in threads (x, y, z). Never 0.
    pub(crate) block: [u32; 3],
    pub(crate) code: GpuVa,
    /// Byte offset of the first instruction in the code segment.
    pub(crate) entry: u32,
    /// Number of registers per thread.
    pub(crate) registers: u32,
    /// Shared memory per block in bytes.
    pub(crate) shared_bytes: u32,
    pub(crate) shared_window: u64,
    pub(crate) barriers: u32,
    /// Size of the lower part of a thread's local memory, in bytes.
    pub(crate) local_low: u32,
    /// Size of the upper part of a thread's local memory, in bytes.
    pub(crate) local_high: u32,
    pub(crate) local_window: u64,
    /// GPU virtual address of local memory.
    pub(crate) local_base: GpuVa,
    /// Size of local memory in bytes.
    pub(crate) local_bytes: u64,
    /// Maximum number of entries on a warp's stack.
    pub(crate) stack_limit: usize,
    pub(crate) banks: Banks,
    /// Mapping of global addresses, or `None` if global addresses are not remapped.
    pub(crate) global_map: Option<GlobalMap>,
    /// Value of SR_CTAPARAM.
    pub(crate) cta_param: u32,
    /// Value of SR_GRIDPARAM.
    pub(crate) grid_param: u32,
    /// Number of multiprocessors on the card.
    pub(crate) sms: u32,
}

impl Launch {
    /// Returns the number of blocks in the grid.
    pub(crate) fn blocks(&self) -> u64 {
        self.grid.iter().map(|count| u64::from(*count)).product()
    }

    /// Returns the number of threads per block.
    pub(crate) fn threads(&self) -> u32 {
        self.block.iter().product()
    }

    /// Returns a block's position in the grid.
    pub(crate) fn position(&self, block: u64) -> [u32; 3] {
        let [x, y, _] = self.grid.map(u64::from);
        [(block % x) as u32, (block / x % y) as u32, (block / x / y) as u32]
    }

    /// Returns the size of a warp's local memory in bytes.
    pub(crate) fn warp_local_bytes(&self) -> u64 {
        (u64::from(self.local_low) + u64::from(self.local_high)).next_multiple_of(16) * 32
    }
}
