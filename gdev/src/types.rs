//! Memory, modules, grids and parameters.

use std::fmt;

/// Location of an allocation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Place {
    /// Card memory.
    Vram,
    /// Pinned system memory, which the card accesses by DMA.
    Ram,
}

impl fmt::Display for Place {
    fn fmt(&self, to: &mut fmt::Formatter<'_>) -> fmt::Result {
        to.write_str(match self {
            Self::Vram => "card memory",
            Self::Ram => "pinned RAM",
        })
    }
}

/// A handle to memory of a context. Copies of the handle refer to the same memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Memory {
    /// Index of the memory in its context, which never reuses indices.
    pub index: usize,
    /// GPU virtual address, which may exceed 32 bits.
    pub address: u64,
    /// Size in bytes.
    pub bytes: u64,
}

/// A module: a set of loaded kernels.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Module {
    /// Index of the module in its context.
    pub index: usize,
}

/// A point in a context's work. Work is executed in order, so an operation's fence also covers all earlier operations
/// of the context.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Fence(pub(crate) u64);

impl Fence {
    /// Creates the fence with this number. Backends number a context's operations from 1.
    #[must_use]
    pub const fn new(number: u64) -> Self {
        Self(number)
    }

    /// Returns the number of the operation.
    #[must_use]
    pub const fn number(self) -> u64 {
        self.0
    }
}

/// A copy between two allocations of a context.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Copy {
    /// Source memory.
    pub from: Memory,
    /// Offset in the source, in bytes.
    pub from_offset: u64,
    /// Target memory.
    pub to: Memory,
    /// Offset in the target, in bytes.
    pub to_offset: u64,
    /// Number of bytes. The ranges must not overlap.
    pub bytes: u64,
}

/// Grid and block dimensions in x, y and z.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Grid {
    /// Grid dimensions in blocks.
    pub blocks: [u32; 3],
    /// Block dimensions in threads.
    pub threads: [u32; 3],
}

impl Grid {
    /// Returns a one-dimensional grid of at least `count` threads.
    #[must_use]
    pub fn line(count: u32, threads: u32) -> Self {
        Self { blocks: [count.div_ceil(threads), 1, 1], threads: [threads, 1, 1] }
    }

    /// Returns a two-dimensional grid.
    #[must_use]
    pub fn plane(blocks: [u32; 2], threads: [u32; 2]) -> Self {
        Self { blocks: [blocks[0], blocks[1], 1], threads: [threads[0], threads[1], 1] }
    }
}

/// Kernel parameters: a byte buffer in which each value is aligned to its size. On a Fermi card, kernels read the
/// parameters from `c[0x0][0x20]`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Params {
    bytes: Vec<u8>,
    /// Offset of each value in bytes.
    offsets: Vec<usize>,
}

impl Params {
    /// Creates an empty list of parameters.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Creates parameters from bytes in the kernel's layout.
    #[must_use]
    pub fn from_bytes(bytes: &[u8]) -> Self {
        Self { bytes: bytes.to_vec(), offsets: Vec::new() }
    }

    /// Appends a 32-bit word.
    #[must_use]
    pub fn word(mut self, value: u32) -> Self {
        self.push(&value.to_le_bytes());
        self
    }

    /// Appends a 32-bit float.
    #[must_use]
    pub fn float(self, value: f32) -> Self {
        self.word(value.to_bits())
    }

    /// Appends the 64-bit GPU virtual address of memory, aligned to eight bytes.
    #[must_use]
    pub fn buffer(self, memory: Memory) -> Self {
        self.address(memory.address)
    }

    /// Appends an address or another 64-bit value, aligned to eight bytes.
    #[must_use]
    pub fn address(mut self, address: u64) -> Self {
        self.push(&address.to_le_bytes());
        self
    }

    /// Appends a value of any size, aligned to `align` bytes. `align` must be a power of two.
    #[must_use]
    pub fn value(mut self, bytes: &[u8], align: usize) -> Self {
        self.pad(align);
        self.offsets.push(self.bytes.len());
        self.bytes.extend_from_slice(bytes);
        self
    }

    /// Returns the parameters as bytes.
    #[must_use]
    pub fn bytes(&self) -> &[u8] {
        &self.bytes
    }

    /// Returns the offset of each appended value in [`Self::bytes`], in bytes.
    #[must_use]
    pub fn offsets(&self) -> &[usize] {
        &self.offsets
    }

    fn push(&mut self, value: &[u8]) {
        self.pad(value.len());
        self.offsets.push(self.bytes.len());
        self.bytes.extend_from_slice(value);
    }

    fn pad(&mut self, align: usize) {
        self.bytes.resize(self.bytes.len().next_multiple_of(align.max(1)), 0);
    }
}

/// Kernels to load.
#[derive(Clone, Copy, Debug)]
pub enum Image<'a> {
    /// A program for Fermi cards, created by the `sm20` crate from assembly, a cubin or raw code.
    Sm20(&'a sm20::Program),
    /// PTX, a cubin or a fat binary for the CUDA driver.
    Cuda(&'a [u8]),
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parameters_are_aligned_to_their_size() {
        let params = Params::new().word(1).address(2).word(3).value(&[9; 3], 1).value(&[7; 4], 16);
        assert_eq!(params.offsets(), [0, 8, 16, 20, 32]);
        assert_eq!(params.bytes().len(), 36);
        assert_eq!(params.bytes()[8..16], 2u64.to_le_bytes());
    }
}
