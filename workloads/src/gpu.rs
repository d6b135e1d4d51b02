//! The interface of workloads to a device.

use anyhow::Result;

/// Memory in which a buffer is allocated.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Place {
    /// The card's memory.
    Vram,
    /// The machine's RAM, which the card accesses through DMA and the CPU accesses directly.
    Ram,
}

/// A buffer on a device. A copy of this value refers to the same buffer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Buffer {
    /// The device's index of the buffer.
    pub index: usize,
    /// The virtual address for the GPU, which may be 2^32 or more.
    pub address: u64,
    /// Size in bytes.
    pub bytes: u64,
}

/// A program on the device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Module {
    /// The device's index of the module.
    pub index: usize,
}

/// Number of blocks, and number of threads per block, in x, y and z.
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

/// A kernel's parameters: bytes that start at `c[0x0][0x20]`, with each value aligned to its size.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Params(Vec<u8>);

impl Params {
    /// Creates an empty list of parameters.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Appends a word.
    #[must_use]
    pub fn word(mut self, value: u32) -> Self {
        self.0.extend(value.to_le_bytes());
        self
    }

    /// Appends a float.
    #[must_use]
    pub fn float(self, value: f32) -> Self {
        self.word(value.to_bits())
    }

    /// Appends a buffer's address, 64 bits at a multiple of eight bytes.
    #[must_use]
    pub fn buffer(self, buffer: Buffer) -> Self {
        self.address(buffer.address)
    }

    /// Appends an address, 64 bits at a multiple of eight bytes.
    #[must_use]
    pub fn address(mut self, address: u64) -> Self {
        self.0.resize(self.0.len().next_multiple_of(8), 0);
        self.0.extend(address.to_le_bytes());
        self
    }

    /// Returns all bytes.
    #[must_use]
    pub fn bytes(&self) -> &[u8] {
        &self.0
    }
}

/// A device with a channel. Transfers and launches take effect in the order of the calls.
pub trait Gpu {
    /// Creates a buffer with undefined contents.
    ///
    /// # Errors
    /// If no memory is left, or on a driver error.
    fn allocate(&mut self, place: Place, bytes: u64) -> Result<Buffer>;

    /// Frees a buffer once the launched work no longer needs it.
    ///
    /// # Errors
    /// On a driver error.
    fn free(&mut self, buffer: Buffer) -> Result<()>;

    /// Copies from the CPU into a buffer, with the GPU's copy engine if the buffer is in VRAM.
    ///
    /// # Errors
    /// If the range is outside the buffer, or on a driver error.
    fn upload(&mut self, buffer: Buffer, at: u64, bytes: &[u8]) -> Result<()>;

    /// Waits for all earlier work and copies from a buffer to the CPU, with the GPU's copy engine if the buffer is in
    /// VRAM.
    ///
    /// # Errors
    /// If the range is outside the buffer, or on a driver error.
    fn download(&mut self, buffer: Buffer, at: u64, bytes: &mut [u8]) -> Result<()>;

    /// Copies the first `bytes` of a buffer to the start of another with the GPU's copy engine; does not wait.
    ///
    /// # Errors
    /// If the range is outside a buffer, or on a driver error.
    fn copy(&mut self, from: Buffer, to: Buffer, bytes: u64) -> Result<()>;

    /// Makes a program ready to launch.
    ///
    /// # Errors
    /// If no memory is left, or on a driver error.
    fn load(&mut self, program: &sm20::Program) -> Result<Module>;

    /// Launches the kernel `name` of a module; does not wait. `uses` are the buffers that the kernel reads or writes:
    /// other buffers may not be resident.
    ///
    /// # Errors
    /// If the kernel is unknown, the parameters do not have the size that the kernel declares, or on a driver error.
    fn launch(&mut self, module: Module, name: &str, grid: Grid, params: &Params, uses: &[Buffer]) -> Result<()>;

    /// Waits for all work.
    ///
    /// # Errors
    /// If a kernel faulted, or on a driver error.
    fn finish(&mut self) -> Result<()>;
}
