//! A context: checks arguments, splits copies into chunks, and waits.

use std::fmt;
use std::ptr::NonNull;

use crate::{
    Backend, Copy, Error, Fence, Grid, Image, Memory, Module, Params, Place, Result, Segment, SegmentRequest, Shared,
    Target, Tuning,
};

/// Minimum size of a bounce buffer in bytes, unless chunks are smaller.
const MIN_BOUNCE_BYTES: u64 = 64 << 10;

/// A pinned bounce buffer for large copies, and the fence of the last copy that uses it.
#[derive(Clone, Copy, Debug)]
struct Bounce {
    memory: Memory,
    busy_until: Option<Fence>,
}

/// A context on a device: an address space with memory and modules, and an in-order work queue.
///
/// ```no_run
/// # fn main() -> gdev::Result<()> {
/// let mut context = gdev::open(&"nouveau".parse()?)?;
/// let source = "
/// .kernel twice
/// .params 8
///     MOV R0, c[0][0x20]
///     MOV R1, c[0][0x24]
///     LD.E R2, [R0]
///     IADD R2, R2, R2
///     ST.E [R0], R2
///     EXIT";
/// let module = context.load(gdev::Image::Sm20(&sm20::assemble(source).expect("a program")))?;
/// let memory = context.allocate(gdev::Place::Vram, 4)?;
/// context.write(memory, 0, &21u32.to_le_bytes())?;
/// let params = gdev::Params::new().buffer(memory);
/// context.launch(module, "twice", gdev::Grid::line(1, 1), &params, &[memory])?;
/// let mut answer = [0; 4];
/// context.read(memory, 0, &mut answer)?;
/// assert_eq!(u32::from_le_bytes(answer), 42);
/// # Ok(())
/// # }
/// ```
pub struct Context<B: Backend + ?Sized = dyn Backend> {
    tuning: Tuning,
    bounces: Vec<Bounce>,
    next_bounce: usize,
    backend: Box<B>,
}

impl<B: Backend + ?Sized> fmt::Debug for Context<B> {
    fn fmt(&self, to: &mut fmt::Formatter<'_>) -> fmt::Result {
        to.debug_struct("Context").field("backend", &self.backend.name()).field("tuning", &self.tuning).finish()
    }
}

/// Opens a device and creates a context on it.
///
/// # Errors
/// Returns an error if the device cannot be opened, or on a driver error.
pub fn open(target: &Target) -> Result<Context> {
    Ok(match target {
        Target::Nouveau(node) => {
            let backend = crate::nouveau::Nouveau::new(&crate::nouveau::Device::open(node)?)?;
            Context::erased(Box::new(backend), crate::nouveau::TUNING)
        }
        #[cfg(feature = "vgpu")]
        Target::Vgpu(socket) => Context::erased(Box::new(crate::vgpu::Vgpu::open(socket)?), crate::vgpu::TUNING),
        #[cfg(not(feature = "vgpu"))]
        Target::Vgpu(_) => return Err(Error::Unsupported { device: "this build of gdev", what: "vGPUs without a VM" }),
        #[cfg(feature = "cuda")]
        Target::Cuda(number) => Context::erased(Box::new(crate::cuda::Cuda::open(*number)?), crate::cuda::TUNING),
        #[cfg(not(feature = "cuda"))]
        Target::Cuda(_) => return Err(Error::Unsupported { device: "this build of gdev", what: "CUDA" }),
    })
}

/// Returns the size of a device's memory in bytes.
///
/// # Errors
/// Returns an error if the device cannot be opened, or on a driver error.
pub fn memory_bytes(target: &Target) -> Result<u64> {
    match target {
        Target::Nouveau(node) => crate::nouveau::Device::open(node)?.parameter(crate::nouveau::uapi::param::FB_SIZE),
        #[cfg(feature = "vgpu")]
        Target::Vgpu(socket) => crate::vgpu::memory_bytes(socket),
        #[cfg(not(feature = "vgpu"))]
        Target::Vgpu(_) => Err(Error::Unsupported { device: "this build of gdev", what: "vGPUs without a VM" }),
        #[cfg(feature = "cuda")]
        Target::Cuda(number) => crate::cuda::memory_bytes(*number),
        #[cfg(not(feature = "cuda"))]
        Target::Cuda(_) => Err(Error::Unsupported { device: "this build of gdev", what: "CUDA" }),
    }
}

impl Context {
    fn erased(backend: Box<dyn Backend>, tuning: Tuning) -> Self {
        Self { tuning, bounces: Vec::new(), next_bounce: 0, backend }
    }
}

impl<B: Backend> Context<B> {
    /// Creates a context on a backend.
    pub fn new(backend: B, tuning: Tuning) -> Self {
        Self { tuning, bounces: Vec::new(), next_bounce: 0, backend: Box::new(backend) }
    }
}

impl<B: Backend + ?Sized> Context<B> {
    /// Returns the backend.
    #[must_use]
    pub fn backend(&self) -> &B {
        &self.backend
    }

    /// Returns the backend, for functions specific to this device type.
    pub fn backend_mut(&mut self) -> &mut B {
        &mut self.backend
    }

    /// Returns the copy settings.
    #[must_use]
    pub fn tuning(&self) -> Tuning {
        self.tuning
    }

    /// Sets the copy settings for later copies.
    ///
    /// # Errors
    /// Returns an error if a value is outside its limits, or if the driver fails. The old settings then remain in
    /// effect.
    pub fn tune(&mut self, tuning: Tuning) -> Result<()> {
        tuning.check()?;
        if tuning.piece_bytes != self.tuning.piece_bytes {
            self.finish()?;
            while let Some(bounce) = self.bounces.pop() {
                self.backend.free(bounce.memory)?;
            }
            self.next_bounce = 0;
        }
        self.tuning = tuning;
        Ok(())
    }

    /// Allocates `bytes` bytes of memory with undefined contents.
    ///
    /// # Errors
    /// Returns an error if no memory is left, or on a driver error.
    pub fn allocate(&mut self, place: Place, bytes: u64) -> Result<Memory> {
        self.backend.allocate(place, bytes)
    }

    /// Frees memory once the submitted work no longer needs it.
    ///
    /// # Errors
    /// Returns an error if the memory does not belong to the context, or on a driver error.
    pub fn free(&mut self, memory: Memory) -> Result<()> {
        self.backend.free(memory)
    }

    /// Copies `bytes` into memory, after all earlier work. `bytes` may be reused on return. The copy to card memory may
    /// still be in progress, but later operations see its result.
    ///
    /// # Errors
    /// Returns an error if the range is outside the memory, or on a driver error.
    pub fn write(&mut self, memory: Memory, offset: u64, bytes: &[u8]) -> Result<()> {
        let length = bytes.len() as u64;
        within(memory, offset, length)?;
        if self.backend.place(memory)? == Place::Ram {
            self.finish()?;
            return self.backend.write_by_cpu(memory, offset, bytes);
        }
        if length <= self.tuning.direct_write_bytes && self.is_idle()? {
            match self.backend.write_by_cpu(memory, offset, bytes) {
                // The CPU cannot access this memory, so use bounce buffers.
                Err(Error::Unsupported { .. }) => {}
                result => return result,
            }
        }
        for (at, piece) in self.offsets(length).zip(bytes.chunks(self.piece())) {
            let slot = self.take_bounce(piece.len())?;
            let from = self.bounces[slot].memory;
            self.backend.write_by_cpu(from, 0, piece)?;
            let copy = Copy { from, from_offset: 0, to: memory, to_offset: offset + at, bytes: piece.len() as u64 };
            let fence = self.backend.copy(&copy)?;
            self.bounces[slot].busy_until = Some(fence);
            if !self.tuning.overlap {
                self.backend.wait(fence)?;
            }
        }
        Ok(())
    }

    /// Copies memory to `bytes`, after all earlier work.
    ///
    /// # Errors
    /// Returns an error if the range is outside the memory, if earlier work was lost, or on a driver error.
    pub fn read(&mut self, memory: Memory, offset: u64, bytes: &mut [u8]) -> Result<()> {
        let length = bytes.len() as u64;
        within(memory, offset, length)?;
        if self.backend.place(memory)? == Place::Ram {
            self.finish()?;
            return self.backend.read_by_cpu(memory, offset, bytes);
        }
        if length <= self.tuning.direct_read_bytes {
            self.finish()?;
            match self.backend.read_by_cpu(memory, offset, bytes) {
                Err(Error::Unsupported { .. }) => {}
                result => return result,
            }
        }
        // The last chunk whose copy to a bounce buffer was submitted.
        let mut under_way: Option<(usize, &mut [u8])> = None;
        for (at, piece) in self.offsets(length).zip(bytes.chunks_mut(self.piece())) {
            let slot = self.take_bounce(piece.len())?;
            let to = self.bounces[slot].memory;
            let copy = Copy { from: memory, from_offset: offset + at, to, to_offset: 0, bytes: piece.len() as u64 };
            self.bounces[slot].busy_until = Some(self.backend.copy(&copy)?);
            if !self.tuning.overlap {
                self.collect(slot, piece)?;
                continue;
            }
            if let Some((slot, piece)) = under_way.replace((slot, piece)) {
                self.collect(slot, piece)?;
            }
        }
        match under_way {
            Some((slot, piece)) => self.collect(slot, piece),
            None => Ok(()),
        }
    }

    /// Submits a copy between two allocations of this context, without waiting. If one of them is in RAM, the copy is
    /// an asynchronous transfer to or from the card.
    ///
    /// # Errors
    /// Returns an error if a range is outside its memory, or on a driver error.
    pub fn copy(&mut self, copy: &Copy) -> Result<Fence> {
        within(copy.from, copy.from_offset, copy.bytes)?;
        within(copy.to, copy.to_offset, copy.bytes)?;
        self.backend.copy(copy)
    }

    /// Executes two copies concurrently on both copy engines, after all earlier work, and waits for both. Usually, one
    /// copies to the card and the other from it. A device with a single copy engine executes the copies sequentially.
    ///
    /// # Errors
    /// Returns an error if a range is outside its memory, if a written range overlaps another range, if work was lost,
    /// or on a driver error.
    pub fn copy_both(&mut self, copies: [&Copy; 2]) -> Result<()> {
        let [one, other] = copies;
        for copy in copies {
            within(copy.from, copy.from_offset, copy.bytes)?;
            within(copy.to, copy.to_offset, copy.bytes)?;
        }
        let [reads, writes] = [[one, other].map(source), [one, other].map(target)];
        let conflicts = [(&writes[0], &writes[1]), (&writes[0], &reads[1]), (&writes[1], &reads[0])];
        if let Some(((memory, _), _)) = conflicts.iter().find(|(one, other)| overlap(one, other)) {
            return Err(Error::Overlap(memory.index));
        }
        self.finish()?;
        self.backend.copy_both(copies)
    }

    /// Loads the kernels of an image.
    ///
    /// # Errors
    /// Returns an error if the image is for another device type, if no memory is left, or on a driver error.
    pub fn load(&mut self, image: Image<'_>) -> Result<Module> {
        self.backend.load(image)
    }

    /// Submits a kernel without waiting. `uses` lists the memory that the kernel accesses. Other memory is not
    /// guaranteed to be resident.
    ///
    /// # Errors
    /// Returns an error if the kernel is unknown, if the grid is invalid, if the parameters have the wrong size, or if
    /// the driver fails.
    pub fn launch(
        &mut self,
        module: Module,
        name: &str,
        grid: Grid,
        params: &Params,
        uses: &[Memory],
    ) -> Result<Fence> {
        let Grid { blocks, threads } = grid;
        let count = |sizes: [u32; 3]| sizes.iter().try_fold(1u32, |count, size| count.checked_mul(*size));
        let fits = count(threads).is_some_and(|count| (1..=1024).contains(&count));
        if !fits || blocks.contains(&0) {
            return Err(Error::Grid { blocks, threads });
        }
        self.backend.launch(module, name, grid, params, uses)
    }

    /// Returns true if all work up to a fence has completed.
    ///
    /// # Errors
    /// Returns an error if the driver fails.
    pub fn is_done(&mut self, fence: Fence) -> Result<bool> {
        self.backend.is_done(fence)
    }

    /// Waits for all work up to a fence.
    ///
    /// # Errors
    /// Returns an error if work was lost, or on a driver error.
    pub fn wait(&mut self, fence: Fence) -> Result<()> {
        self.backend.wait(fence)
    }

    /// Waits for all work.
    ///
    /// # Errors
    /// Returns an error if work was lost, or on a driver error.
    pub fn finish(&mut self) -> Result<()> {
        self.backend.last().map_or(Ok(()), |fence| self.backend.wait(fence))
    }

    /// Returns the address in this process of memory in RAM. The address is valid until the memory is freed. The caller
    /// must use fences to order its accesses with the card's.
    ///
    /// # Errors
    /// Returns an error if the memory is on the card.
    pub fn host_address(&mut self, memory: Memory) -> Result<NonNull<u8>> {
        self.backend.host_address(memory)
    }

    /// Exports memory for other contexts of this process, which map it with [`Self::reference`] (Gdev's `gref`).
    ///
    /// # Errors
    /// Returns an error if the context did not allocate the memory, or on a driver error.
    pub fn share(&mut self, memory: Memory) -> Result<Shared> {
        self.backend.share(memory)
    }

    /// Maps another context's memory into this context. The memory exists until all references are freed.
    /// [`Self::free`] frees this reference. The contexts' work is not ordered: wait for one context before the other
    /// uses the memory.
    ///
    /// # Errors
    /// Returns an error if the memory belongs to another device type, or on a driver error.
    pub fn reference(&mut self, shared: &Shared) -> Result<Memory> {
        self.backend.reference(shared)
    }

    /// Returns true if the device supports segments.
    pub fn has_segments(&mut self) -> bool {
        self.backend.has_segments()
    }

    /// Finds or creates a segment (Gdev's `shmget`).
    ///
    /// # Errors
    /// Returns an error if the key is not allowed, if no such segment exists, or if the device does not support
    /// segments.
    pub fn segment(&mut self, request: SegmentRequest) -> Result<Segment> {
        self.backend.segment(request)
    }

    /// Maps a segment into this context (Gdev's `shmat`).
    ///
    /// # Errors
    /// Returns an error if the segment does not exist, or does not permit the access.
    pub fn attach(&mut self, segment: Segment, read_only: bool) -> Result<Memory> {
        self.backend.attach(segment, read_only)
    }

    /// Waits for all work and unmaps a segment (Gdev's `shmdt`).
    ///
    /// # Errors
    /// Returns an error if the memory is not an attached segment, or on a driver error.
    pub fn detach(&mut self, memory: Memory) -> Result<()> {
        self.finish()?;
        self.backend.detach(memory)
    }

    /// Removes the key of a segment (Gdev's `shmctl`). The segment is freed when the last context detaches it.
    ///
    /// # Errors
    /// Returns an error if the segment does not exist, or belongs to another user.
    pub fn remove(&mut self, segment: Segment) -> Result<()> {
        self.backend.remove(segment)
    }

    /// Returns the number of contexts that have a segment attached.
    ///
    /// # Errors
    /// Returns an error if the segment does not exist.
    pub fn attached(&mut self, segment: Segment) -> Result<u64> {
        self.backend.attached(segment)
    }

    /// Returns the fence of the last operation, or `None` if no operation was submitted.
    #[must_use]
    pub fn last(&self) -> Option<Fence> {
        self.backend.last()
    }

    fn is_idle(&mut self) -> Result<bool> {
        self.backend.last().map_or(Ok(true), |fence| self.backend.is_done(fence))
    }

    /// Returns the chunk size in bytes. [`Tuning::check`] limits it to 64 MiB.
    fn piece(&self) -> usize {
        self.tuning.piece_bytes as usize
    }

    /// Returns the chunk offsets of a copy.
    fn offsets(&self, bytes: u64) -> impl Iterator<Item = u64> + use<B> {
        (0..bytes).step_by(self.piece())
    }

    /// Waits until the next bounce buffer is free, and grows it to at least `bytes` bytes. Returns its index.
    fn take_bounce(&mut self, bytes: usize) -> Result<usize> {
        const BOUNCES: usize = 2;
        // After a failed allocation, the second buffer may be needed before the first one exists.
        let slot = (self.next_bounce % BOUNCES).min(self.bounces.len());
        self.next_bounce = slot + 1;
        if let Some(Bounce { memory, busy_until }) = self.bounces.get(slot).copied() {
            if let Some(fence) = busy_until {
                self.backend.wait(fence)?;
                self.bounces[slot].busy_until = None;
            }
            if memory.bytes >= bytes as u64 {
                return Ok(slot);
            }
        }
        // A buffer for the largest chunk would make the first copy of a short program take longer.
        let size = (bytes as u64).next_power_of_two().max(MIN_BOUNCE_BYTES).min(self.tuning.piece_bytes);
        let memory = self.backend.allocate(Place::Ram, size)?;
        let bounce = Bounce { memory, busy_until: None };
        match self.bounces.get_mut(slot) {
            Some(known) => {
                let old = std::mem::replace(known, bounce);
                self.backend.free(old.memory)?;
            }
            None => self.bounces.push(bounce),
        }
        Ok(slot)
    }

    /// Waits for a copy to a bounce buffer, and reads the buffer.
    fn collect(&mut self, slot: usize, piece: &mut [u8]) -> Result<()> {
        let Bounce { memory, busy_until } = self.bounces[slot];
        if let Some(fence) = busy_until {
            self.backend.wait(fence)?;
        }
        self.backend.read_by_cpu(memory, 0, piece)
    }
}

/// One side of a copy: the memory, and the byte range in this memory.
type Range = (Memory, std::ops::Range<u64>);

fn source(copy: &Copy) -> Range {
    (copy.from, copy.from_offset..copy.from_offset + copy.bytes)
}

fn target(copy: &Copy) -> Range {
    (copy.to, copy.to_offset..copy.to_offset + copy.bytes)
}

fn overlap((one, range): &Range, (other, others): &Range) -> bool {
    one.index == other.index && range.start < others.end && others.start < range.end
}

/// Checks that a range is within its memory.
fn within(memory: Memory, offset: u64, bytes: u64) -> Result<()> {
    let inside = offset.checked_add(bytes).is_some_and(|end| end <= memory.bytes);
    if inside { Ok(()) } else { Err(Error::Range { offset, bytes, size: memory.bytes }) }
}

#[cfg(test)]
mod tests;
