//! Driver calls of a CUDA card's owner, and [`Users`], which polls NVML.
//!
//! [`Real`] loads the driver's library by path, so that a fake driver also works. `Model` is an in-process model of the
//! virtual memory functions for tests. [`Vault`] manages the allocations that an owner has created or received. Any
//! thread may make any call, but must not hold a lock during the call.
//!
//! This crate does not decide which memory to allocate, and does not keep accounts. `cuda-owner` does both.

mod functions;
mod links;
pub mod measure;
#[cfg(any(test, feature = "model"))]
mod model;
mod real;
mod speeds;
mod users;
mod vault;

pub use links::links;
#[cfg(any(test, feature = "model"))]
pub use model::Model;
pub use real::Real;
pub use speeds::Speeds;
pub use users::{CardUse, User, Users};
pub use vault::{New, PieceId, Vault};

use std::os::fd::{BorrowedFd, OwnedFd};

/// Kind of memory that a chunk can be in.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Memory {
    /// Card memory.
    Device,
    /// Pinned host memory on the card's NUMA node.
    Host,
}

/// Handle of a physical memory allocation.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Handle(pub u64);

/// Address in the owner's virtual address space on the card.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Address(pub u64);

impl Address {
    /// Returns the address `bytes` bytes after this one.
    #[must_use]
    pub const fn plus(self, bytes: u64) -> Self {
        Self(self.0 + bytes)
    }
}

/// A work queue. Each queue executes its work in order, concurrently with the other queues.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Queue {
    /// Copies from the card to host memory.
    Out,
    /// Copies from host memory to the card.
    In,
    /// Zeroing of large amounts of card memory with a kernel of the driver. If another process's kernels are running,
    /// both take turns in the hardware's time slices of about 2 ms.
    Zero,
    /// Zeroing of card memory with copies from host memory, which run next to other processes' kernels.
    ZeroByCopy,
    /// Zeroing of host memory, which is limited by the link bandwidth.
    ZeroHost,
}

impl Queue {
    /// All queues, by index.
    pub const ALL: [Self; 5] = [Self::Out, Self::In, Self::Zero, Self::ZeroByCopy, Self::ZeroHost];
}

/// The driver's description of a card.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Device {
    /// Product name.
    pub name: String,
    /// UUID from `cuDeviceGetUuid`.
    pub uuid: [u8; 16],
    /// Size of the card's memory in bytes.
    pub total_bytes: u64,
    /// Allocation granularity for sizes and addresses, in bytes.
    pub granularity: u64,
    /// Set if the driver can suspend a process and release its memory.
    pub suspends: bool,
    /// Set if the driver can restore a suspended process on another card.
    pub fetches: bool,
}

/// Formats a UUID in NVML's form: `GPU-` and the hex digits in five groups.
#[must_use]
pub fn nvml_uuid(uuid: [u8; 16]) -> String {
    let hex: String = uuid.iter().map(|byte| format!("{byte:02x}")).collect();
    format!("GPU-{}-{}-{}-{}-{}", &hex[..8], &hex[8..12], &hex[12..16], &hex[16..20], &hex[20..])
}

/// Parses a UUID in NVML's form.
#[must_use]
pub fn parse_uuid(text: &str) -> Option<[u8; 16]> {
    let digits: String = text.strip_prefix("GPU-")?.chars().filter(|digit| *digit != '-').collect();
    let is_complete = digits.len() == 32 && digits.bytes().all(|digit| digit.is_ascii_hexdigit());
    is_complete.then(|| u128::from_str_radix(&digits, 16).ok()).flatten().map(u128::to_be_bytes)
}

/// Times of the driver's calls for a process that moves to this card, in microseconds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct FetchTimes {
    /// Time for stopping the process's calls and copying its remaining memory from the other card.
    pub checkpoint_us: u64,
    /// Time for restoring the process's memory on this card and resuming its calls.
    pub restore_us: u64,
}

/// A failed call of the driver.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum DriverError {
    /// The library cannot be loaded.
    #[error("cannot load NVIDIA's driver library {path}: {reason}; set the card's `driver` to its path")]
    Library {
        /// Path of the library.
        path: String,
        /// Reason reported by the loader.
        reason: String,
    },
    /// A driver call failed.
    #[error("{call} failed: CUDA error {code}")]
    Call {
        /// Name of the function.
        call: &'static str,
        /// `CUresult`.
        code: i32,
    },
    /// A function of the driver, or an object or resource of the owner, is missing. Contains its name.
    #[error("this driver has no {0}")]
    Missing(&'static str),
}

impl DriverError {
    /// Returns true if the card was reset or has failed. The context is then lost permanently, and only a new process
    /// can use the card.
    ///
    /// The owner does not run kernels on the card, so it cannot have caused any kernel error among these codes.
    #[must_use]
    pub const fn is_card_lost(&self) -> bool {
        // CUDA_ERROR_DEVICE_UNAVAILABLE, ECC_UNCORRECTABLE, NVLINK_UNCORRECTABLE, CONTAINED, ILLEGAL_ADDRESS,
        // LAUNCH_TIMEOUT, CONTEXT_IS_DESTROYED, HARDWARE_STACK_ERROR to LAUNCH_FAILED.
        matches!(self, Self::Call { code: 46 | 214 | 220 | 226 | 700 | 702 | 709 | 714..=719, .. })
    }

    /// Returns true if the call failed for lack of memory.
    #[must_use]
    pub const fn is_out_of_memory(&self) -> bool {
        matches!(self, Self::Call { code: 2, .. })
    }
}

/// Driver calls.
///
/// # Errors
/// Every method returns a [`DriverError`] if the driver call fails.
pub trait Driver: Send + Sync {
    /// Returns the card.
    fn device(&self) -> &Device;

    /// Returns the amount of free card memory in bytes.
    fn free_bytes(&self) -> Result<u64, DriverError>;

    /// Allocates physical memory that can be exported. Its contents are undefined.
    fn create(&self, memory: Memory, bytes: u64) -> Result<Handle, DriverError>;

    /// Exports a file descriptor from which this or another process can import the allocation.
    fn export(&self, handle: Handle) -> Result<OwnedFd, DriverError>;

    /// Imports the allocation that a file descriptor refers to. Other processes may share the allocation.
    fn import(&self, descriptor: BorrowedFd<'_>) -> Result<Handle, DriverError>;

    /// Releases a handle. The memory is freed once no handle, descriptor or mapping of it remains.
    fn release(&self, handle: Handle) -> Result<(), DriverError>;

    /// Reserves a range of virtual addresses.
    fn reserve(&self, bytes: u64) -> Result<Address, DriverError>;

    /// Maps a whole allocation at reserved, unmapped addresses, with read and write access for the card.
    fn map(&self, at: Address, bytes: u64, handle: Handle) -> Result<(), DriverError>;

    /// Returns the kind of memory mapped at an address.
    fn memory_at(&self, at: Address) -> Result<Memory, DriverError>;

    /// Unmaps whole mappings.
    fn unmap(&self, at: Address, bytes: u64) -> Result<(), DriverError>;

    /// Queues a copy.
    fn copy(&self, queue: Queue, to: Address, from: Address, bytes: u64) -> Result<(), DriverError>;

    /// Queues the zeroing of a range.
    fn zero(&self, queue: Queue, at: Address, bytes: u64) -> Result<(), DriverError>;

    /// Waits until all work in the queue has completed.
    fn finish(&self, queue: Queue) -> Result<(), DriverError>;

    /// Suspends a process: waits for its work, and moves its card memory to host memory.
    fn suspend(&self, pid: u32) -> Result<(), DriverError>;

    /// Moves a process from the card with the UUID `from` to this card. Also resumes a process after an interrupted
    /// move; the process may then be on either card. `sees` contains the UUIDs of the cards that are visible to the
    /// process. If the call fails, the process continues on its card.
    fn fetch(&self, pid: u32, from: [u8; 16], sees: &[[u8; 16]]) -> Result<FetchTimes, DriverError>;

    /// Returns the UUID of another card if it is of the same model. `device` is its index, its UUID with the prefix
    /// `GPU-`, or its PCI address. Creates no context on that card.
    fn uuid_of(&self, device: &str) -> Option<[u8; 16]>;

    /// Resumes a suspended process.
    fn resume(&self, pid: u32) -> Result<(), DriverError>;
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn uuid_in_form_of_nvml_has_five_groups() {
        let uuid = 0x1234_5678_9abc_def0_0123_4567_89ab_cdef_u128.to_be_bytes();
        assert_eq!(nvml_uuid(uuid), "GPU-12345678-9abc-def0-0123-456789abcdef");
        assert_eq!(parse_uuid(&nvml_uuid(uuid)), Some(uuid));
        for text in ["", "GPU-", "GPU-+2345678-9abc-def0-0123-456789abcdef", "MIG-12345678-9abc-def0-0123-456789abcdef"]
        {
            assert_eq!(parse_uuid(text), None, "{text}");
        }
    }

    #[test]
    fn card_loss_errors_differ_from_call_errors() {
        let is_lost = |code| DriverError::Call { call: "cuMemGetInfo", code }.is_card_lost();
        assert!([46, 214, 709, 719].into_iter().all(is_lost));
        assert!(![1, 2, 201, 400, 801, 900].into_iter().any(is_lost));
        assert!(!DriverError::Missing("cuMemGetInfo").is_card_lost());
    }
}
