//! Errors of the library.

use std::io;

use crate::Place;

/// Result of a call of this library.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// An error. After every error except [`Error::Lost`], the context can be used as before the call.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The name of a target is not in any known form.
    #[error("{0:?} is not a target; use nouveau, nouveau:/dev/dri/renderD128, vgpu:/SOCKET, cuda, or cuda:NUMBER")]
    Target(String),
    /// A device cannot be opened.
    #[error("{device}: {why}; {remedy}")]
    Open {
        /// The device or library.
        device: String,
        /// The system's or the driver's reason.
        why: String,
        /// Advice to the user.
        remedy: &'static str,
    },
    /// A request to the kernel's driver failed.
    #[error("{what}: {source}")]
    Driver {
        /// The purpose of the request.
        what: String,
        /// The system's reason.
        source: io::Error,
    },
    /// A function of the CUDA driver API failed.
    #[error("{function} returned {name} ({code})")]
    Cuda {
        /// Name of the function.
        function: &'static str,
        /// Name of the result.
        name: String,
        /// Number of the result.
        code: i32,
    },
    /// Memory cannot be allocated.
    #[error("{bytes} bytes of {place} cannot be allocated: {why}")]
    Allocation {
        /// The requested memory.
        place: Place,
        /// The requested size in bytes.
        bytes: u64,
        /// The driver's reason.
        why: String,
    },
    /// A range is not within its memory.
    #[error("{bytes} bytes at offset {offset:#x} are not within memory of {size} bytes")]
    Range {
        /// Offset of the range in bytes.
        offset: u64,
        /// Size of the range in bytes.
        bytes: u64,
        /// Size of the memory in bytes.
        size: u64,
    },
    /// Two concurrent copies have a range in common, and one of them writes it.
    #[error("two copies at the same time overlap in memory {0}")]
    Overlap(usize),
    /// The context does not have this memory: the memory was freed or detached, or belongs to another context.
    #[error("memory {0} does not belong to this context, or was freed")]
    Memory(usize),
    /// The context does not have this module.
    #[error("module {0} does not belong to this context, or was unloaded")]
    Module(usize),
    /// The context does not have this segment attached.
    #[error("segment {0} is not attached to this context")]
    Segment(u32),
    /// A module has no kernel with this name.
    #[error("the module has no kernel {0:?}")]
    Kernel(String),
    /// Parameters do not have the kernel's size.
    #[error("kernel {kernel:?} has {expected} bytes of parameters, not {given}")]
    Parameters {
        /// Name of the kernel.
        kernel: String,
        /// Size that the kernel declares, in bytes.
        expected: u64,
        /// Size of the given parameters, in bytes.
        given: u64,
    },
    /// A grid has no threads, or more than the card supports.
    #[error("a grid of {blocks:?} blocks of {threads:?} threads is outside the card's limits")]
    Grid {
        /// Number of blocks in x, y and z.
        blocks: [u32; 3],
        /// Number of threads of a block in x, y and z.
        threads: [u32; 3],
    },
    /// An image is not one that this device can load.
    #[error("the image cannot be loaded: {0}")]
    Image(String),
    /// A value of [`crate::Tuning`] is outside its limits.
    #[error("{what} of {value} bytes is outside its limits, {least} to {most} bytes")]
    Tuning {
        /// The value's name.
        what: &'static str,
        /// The given value in bytes.
        value: u64,
        /// The minimum in bytes.
        least: u64,
        /// The maximum in bytes.
        most: u64,
    },
    /// The device does not have this function.
    #[error("{device} does not support {what}")]
    Unsupported {
        /// Name of the device's kind.
        device: &'static str,
        /// The function.
        what: &'static str,
    },
    /// The device stopped executing the context's work: a kernel faulted or ran too long. Create a new context.
    #[error("work was cut short: {0}")]
    Lost(String),
}
