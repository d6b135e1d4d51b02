//! Errors of the library.

use std::io;

use crate::Place;

/// Result type of this library.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// An error. The context remains usable after every error except [`Error::Lost`].
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The name of a target does not have a known form.
    #[error("{0:?} is not a target; use nouveau, nouveau:/dev/dri/renderD128, vgpu:/SOCKET, cuda, or cuda:NUMBER")]
    Target(String),
    /// A device cannot be opened.
    #[error("{device}: {why}; {remedy}")]
    Open {
        /// Name of the device or library.
        device: String,
        /// Reason reported by the system or the driver.
        why: String,
        /// Advice to the user.
        remedy: &'static str,
    },
    /// A request to the kernel driver failed.
    #[error("{what}: {source}")]
    Driver {
        /// Purpose of the request.
        what: String,
        /// Error reported by the system.
        source: io::Error,
    },
    /// A function of the CUDA driver API failed.
    #[error("{function} returned {name} ({code})")]
    Cuda {
        /// Name of the function.
        function: &'static str,
        /// Name of the result code.
        name: String,
        /// Value of the result code.
        code: i32,
    },
    /// Memory cannot be allocated.
    #[error("{bytes} bytes of {place} cannot be allocated: {why}")]
    Allocation {
        /// Requested location.
        place: Place,
        /// Requested size in bytes.
        bytes: u64,
        /// Reason reported by the driver.
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
    /// Two concurrent copies overlap in a range that one of them writes.
    #[error("two concurrent copies overlap in memory {0}")]
    Overlap(usize),
    /// The memory does not belong to the context: it was freed or detached, or belongs to another context.
    #[error("memory {0} does not belong to this context, or was freed")]
    Memory(usize),
    /// The module does not belong to the context.
    #[error("module {0} does not belong to this context, or was unloaded")]
    Module(usize),
    /// The segment is not attached to the context.
    #[error("segment {0} is not attached to this context")]
    Segment(u32),
    /// A module has no kernel with this name.
    #[error("the module has no kernel {0:?}")]
    Kernel(String),
    /// The size of the parameters differs from the size that the kernel declares.
    #[error("kernel {kernel:?} has {expected} bytes of parameters, not {given}")]
    Parameters {
        /// Name of the kernel.
        kernel: String,
        /// Size that the kernel declares, in bytes.
        expected: u64,
        /// Size of the given parameters, in bytes.
        given: u64,
    },
    /// A grid is empty, or exceeds the card's limits.
    #[error("a grid of {blocks:?} blocks of {threads:?} threads is outside the card's limits")]
    Grid {
        /// Grid dimensions in blocks.
        blocks: [u32; 3],
        /// Block dimensions in threads.
        threads: [u32; 3],
    },
    /// The device cannot load an image.
    #[error("the image cannot be loaded: {0}")]
    Image(String),
    /// A [`crate::Tuning`] value is outside its limits.
    #[error("{what} of {value} bytes is outside its limits, {least} to {most} bytes")]
    Tuning {
        /// Name of the value.
        what: &'static str,
        /// Given value in bytes.
        value: u64,
        /// Minimum in bytes.
        least: u64,
        /// Maximum in bytes.
        most: u64,
    },
    /// The device does not support this function.
    #[error("{device} does not support {what}")]
    Unsupported {
        /// Name of the device type.
        device: &'static str,
        /// Description of the function.
        what: &'static str,
    },
    /// The device stopped executing the context's work: a kernel faulted or ran too long. Create a new context.
    #[error("work was aborted: {0}")]
    Lost(String),
}
