//! The interface between workloads and a device.

use anyhow::Result;
use gdev::{Backend, Context, Copy, Image};

pub use gdev::{Grid, Memory as Buffer, Module, Params, Place};

/// A device with a channel. Transfers and launches take effect in the order of the calls.
pub trait Gpu {
    /// Creates a buffer with undefined contents.
    ///
    /// # Errors
    /// Returns an error if no memory is left, or on a driver error.
    fn allocate(&mut self, place: Place, bytes: u64) -> Result<Buffer>;

    /// Frees a buffer once the launched work no longer needs it.
    ///
    /// # Errors
    /// Returns an error if the driver fails.
    fn free(&mut self, buffer: Buffer) -> Result<()>;

    /// Copies from the CPU into a buffer. Uses the GPU's copy engine if the buffer is in VRAM.
    ///
    /// # Errors
    /// Returns an error if the range is outside the buffer, or on a driver error.
    fn upload(&mut self, buffer: Buffer, at: u64, bytes: &[u8]) -> Result<()>;

    /// Waits for all earlier work, and copies from a buffer to the CPU. Uses the GPU's copy engine if the buffer is in
    /// VRAM.
    ///
    /// # Errors
    /// Returns an error if the range is outside the buffer, or on a driver error.
    fn download(&mut self, buffer: Buffer, at: u64, bytes: &mut [u8]) -> Result<()>;

    /// Copies the first `bytes` of a buffer to the start of another buffer with the GPU's copy engine. Does not wait.
    ///
    /// # Errors
    /// Returns an error if the range is outside a buffer, or on a driver error.
    fn copy(&mut self, from: Buffer, to: Buffer, bytes: u64) -> Result<()>;

    /// Loads a program.
    ///
    /// # Errors
    /// Returns an error if no memory is left, or on a driver error.
    fn load(&mut self, program: &sm20::Program) -> Result<Module>;

    /// Launches the kernel `name` of a module. Does not wait. `uses` lists the buffers that the kernel accesses. Other
    /// buffers need not be resident.
    ///
    /// # Errors
    /// Returns an error if the kernel is unknown, the parameters have the wrong size, or the driver fails.
    fn launch(&mut self, module: Module, name: &str, grid: Grid, params: &Params, uses: &[Buffer]) -> Result<()>;

    /// Waits for all work.
    ///
    /// # Errors
    /// Returns an error if a kernel faulted, or on a driver error.
    fn finish(&mut self) -> Result<()>;
}

impl<B: Backend + ?Sized> Gpu for Context<B> {
    fn allocate(&mut self, place: Place, bytes: u64) -> Result<Buffer> {
        Ok(Self::allocate(self, place, bytes)?)
    }

    fn free(&mut self, buffer: Buffer) -> Result<()> {
        Ok(Self::free(self, buffer)?)
    }

    fn upload(&mut self, buffer: Buffer, at: u64, bytes: &[u8]) -> Result<()> {
        Ok(self.write(buffer, at, bytes)?)
    }

    fn download(&mut self, buffer: Buffer, at: u64, bytes: &mut [u8]) -> Result<()> {
        Ok(self.read(buffer, at, bytes)?)
    }

    fn copy(&mut self, from: Buffer, to: Buffer, bytes: u64) -> Result<()> {
        Self::copy(self, &Copy { from, from_offset: 0, to, to_offset: 0, bytes })?;
        Ok(())
    }

    fn load(&mut self, program: &sm20::Program) -> Result<Module> {
        Ok(Self::load(self, Image::Sm20(program))?)
    }

    fn launch(&mut self, module: Module, name: &str, grid: Grid, params: &Params, uses: &[Buffer]) -> Result<()> {
        Self::launch(self, module, name, grid, params, uses)?;
        Ok(())
    }

    fn finish(&mut self) -> Result<()> {
        Ok(Self::finish(self)?)
    }
}
