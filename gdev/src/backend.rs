//! The interface between [`crate::Context`] and a device type.

use std::ptr::NonNull;

use crate::{Copy, Fence, Grid, Image, Memory, Module, Params, Place, Result, Segment, SegmentRequest, Shared};

/// A context on a device. Operations execute in the order of the calls.
///
/// [`crate::Context`] checks ranges before it calls a backend. The backend checks that memory and modules belong to it.
pub trait Backend: Send {
    /// Returns the name of the device type, for messages.
    fn name(&self) -> &'static str;

    /// Allocates memory with undefined contents.
    ///
    /// # Errors
    /// Returns an error if no memory is left, or on a driver error.
    fn allocate(&mut self, place: Place, bytes: u64) -> Result<Memory>;

    /// Frees memory once the submitted work no longer needs it.
    ///
    /// # Errors
    /// Returns an error if the memory does not belong to the context, or on a driver error.
    fn free(&mut self, memory: Memory) -> Result<()>;

    /// Returns the location of an allocation. A segment is always reported as card memory.
    ///
    /// # Errors
    /// Returns an error if the memory does not belong to the context.
    fn place(&self, memory: Memory) -> Result<Place>;

    /// Writes memory with the CPU, without waiting for submitted work.
    ///
    /// # Errors
    /// Returns an error if the CPU cannot access the memory, or on a driver error.
    fn write_by_cpu(&mut self, memory: Memory, offset: u64, bytes: &[u8]) -> Result<()>;

    /// Reads memory with the CPU, without waiting for submitted work.
    ///
    /// # Errors
    /// Returns an error if the CPU cannot access the memory, or on a driver error.
    fn read_by_cpu(&mut self, memory: Memory, offset: u64, bytes: &mut [u8]) -> Result<()>;

    /// Submits a copy to a copy engine.
    ///
    /// # Errors
    /// Returns an error if the driver fails.
    fn copy(&mut self, copy: &Copy) -> Result<Fence>;

    /// Executes two copies concurrently, and waits for both. The context must have no other work in flight.
    ///
    /// A device with a single copy engine executes the copies sequentially.
    ///
    /// # Errors
    /// Returns [`crate::Error::Lost`] if a copy did not complete, or any other driver error.
    fn copy_both(&mut self, copies: [&Copy; 2]) -> Result<()> {
        for copy in copies {
            self.copy(copy)?;
        }
        self.last().map_or(Ok(()), |fence| self.wait(fence))
    }

    /// Loads the kernels of an image.
    ///
    /// # Errors
    /// Returns an error if the image is for another device type, if no memory is left, or on a driver error.
    fn load(&mut self, image: Image<'_>) -> Result<Module>;

    /// Submits a kernel. `uses` lists the memory that the kernel accesses. Other memory is not guaranteed to be
    /// resident.
    ///
    /// # Errors
    /// Returns an error if the kernel does not exist, if the parameters have the wrong size, or on a driver error.
    fn launch(&mut self, module: Module, name: &str, grid: Grid, params: &Params, uses: &[Memory]) -> Result<Fence>;

    /// Returns the fence of the last operation, or `None` if no operation was submitted.
    fn last(&self) -> Option<Fence>;

    /// Returns true if all operations up to a fence have completed. Does not wait.
    ///
    /// # Errors
    /// Returns an error if the driver fails.
    fn is_done(&mut self, fence: Fence) -> Result<bool>;

    /// Waits until all operations up to a fence have completed.
    ///
    /// # Errors
    /// Returns [`crate::Error::Lost`] if an operation did not complete, or any other driver error.
    fn wait(&mut self, fence: Fence) -> Result<()>;

    /// Returns the address in this process of memory in RAM. The address is valid until the memory is freed.
    ///
    /// # Errors
    /// Returns an error if the memory is on the card.
    fn host_address(&mut self, memory: Memory) -> Result<NonNull<u8>>;

    /// Exports memory for other contexts of this process.
    ///
    /// # Errors
    /// Returns an error if the context did not allocate the memory, or on a driver error.
    fn share(&mut self, memory: Memory) -> Result<Shared>;

    /// Maps shared memory into this context. The memory exists until all references are freed.
    ///
    /// # Errors
    /// Returns an error if the memory belongs to another device type, or on a driver error.
    fn reference(&mut self, shared: &Shared) -> Result<Memory>;

    /// Returns true if the device supports segments.
    fn has_segments(&mut self) -> bool {
        false
    }

    /// Finds or creates a segment.
    ///
    /// # Errors
    /// Returns an error if the key is not allowed, if no such segment exists, or if the device does not support
    /// segments.
    fn segment(&mut self, request: SegmentRequest) -> Result<Segment>;

    /// Maps a segment into the context.
    ///
    /// # Errors
    /// Returns an error if the segment does not exist, or does not permit the access.
    fn attach(&mut self, segment: Segment, read_only: bool) -> Result<Memory>;

    /// Unmaps a segment. Work in flight that uses the segment may be lost, so wait for it first.
    ///
    /// # Errors
    /// Returns an error if the memory is not an attached segment.
    fn detach(&mut self, memory: Memory) -> Result<()>;

    /// Removes the key of a segment. The segment is freed when the last context detaches it.
    ///
    /// # Errors
    /// Returns an error if the segment does not exist, or belongs to another user.
    fn remove(&mut self, segment: Segment) -> Result<()>;

    /// Returns the number of contexts that have a segment attached.
    ///
    /// # Errors
    /// Returns an error if the segment does not exist.
    fn attached(&mut self, segment: Segment) -> Result<u64>;
}
