//! Memory, modules, grids and parameters.

use std::fmt;

/// The memory in which an allocation lies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Place {
    /// The card's memory.
    Vram,
    /// The machine's RAM, pinned: the card accesses it by DMA, and the CPU directly.
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

/// Memory of a context. A copy of this value refers to the same memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Memory {
    /// The context's index of the memory. The context never reuses an index.
    pub index: usize,
    /// The virtual address for the GPU, which may be 2^32 or more.
    pub address: u64,
    /// Size in bytes.
    pub bytes: u64,
}

/// A module: kernels that are ready to launch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Module {
    /// The context's index of the module.
    pub index: usize,
}

/// A point in the work of a context. Work is executed in order, so the fence of an operation also covers all earlier
/// operations of the context.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Fence(pub(crate) u64);

impl Fence {
    /// Returns the fence with this number. Backends number the operations of a context from 1 on.
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

/// A copy between two memories of a context.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Copy {
    /// Memory to read.
    pub from: Memory,
    /// Offset of the first byte to read, in bytes.
    pub from_offset: u64,
    /// Memory to write.
    pub to: Memory,
    /// Offset of the first byte to write, in bytes.
    pub to_offset: u64,
    /// Number of bytes. The ranges must not overlap.
    pub bytes: u64,
}

/// Number of blocks, and of threads of a block, in x, y and z.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Grid {
    /// Number of blocks.
    pub blocks: [u32; 3],
    /// Number of threads of a block.
    pub threads: [u32; 3],
}

impl Grid {
    /// Returns a grid of one dimension, with at least `count` threads.
    #[must_use]
    pub fn line(count: u32, threads: u32) -> Self {
        Self { blocks: [count.div_ceil(threads), 1, 1], threads: [threads, 1, 1] }
    }

    /// Returns a grid of two dimensions.
    #[must_use]
    pub fn plane(blocks: [u32; 2], threads: [u32; 2]) -> Self {
        Self { blocks: [blocks[0], blocks[1], 1], threads: [threads[0], threads[1], 1] }
    }
}

/// A kernel's parameters: consecutive bytes, with each value aligned to its size. A kernel of a Fermi card reads the
/// parameters from `c[0x0][0x20]` on.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Params {
    bytes: Vec<u8>,
    /// Offset of each value.
    offsets: Vec<usize>,
}

impl Params {
    /// Creates an empty list of parameters.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Creates parameters from all bytes, laid out as the kernel declares them.
    #[must_use]
    pub fn from_bytes(bytes: &[u8]) -> Self {
        Self { bytes: bytes.to_vec(), offsets: Vec::new() }
    }

    /// Appends a word.
    #[must_use]
    pub fn word(mut self, value: u32) -> Self {
        self.push(&value.to_le_bytes());
        self
    }

    /// Appends a float.
    #[must_use]
    pub fn float(self, value: f32) -> Self {
        self.word(value.to_bits())
    }

    /// Appends the address of memory: 64 bits at a multiple of eight bytes.
    #[must_use]
    pub fn buffer(self, memory: Memory) -> Self {
        self.address(memory.address)
    }

    /// Appends an address, or another number of 64 bits, at a multiple of eight bytes.
    #[must_use]
    pub fn address(mut self, address: u64) -> Self {
        self.push(&address.to_le_bytes());
        self
    }

    /// Appends a value of any size, aligned to `align` bytes, a power of two.
    #[must_use]
    pub fn value(mut self, bytes: &[u8], align: usize) -> Self {
        self.pad(align);
        self.offsets.push(self.bytes.len());
        self.bytes.extend_from_slice(bytes);
        self
    }

    /// Returns all bytes.
    #[must_use]
    pub fn bytes(&self) -> &[u8] {
        &self.bytes
    }

    /// Returns the offset of each appended value in [`Self::bytes`].
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
    /// A program for Fermi cards, from the crate `sm20`'s assembler or from a description of raw code.
    Sm20(&'a sm20::Program),
    /// PTX text, a cubin or a fat binary for the CUDA driver.
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
