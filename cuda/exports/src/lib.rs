//! The export tables of the guests' CUDA library: tables of functions that `cuGetExportTable` returns for a UUID.
//!
//! NVIDIA's runtime and the libraries above it call the driver through these tables in addition to the driver API. The
//! guest's library implements them in the guest's process, because most answers are about that process. The UUIDs, the
//! slots and their behaviour are facts that were measured with NVIDIA's runtimes 11.8, 12.9 and 13.5, and on a card
//! with driver 580.
//!
//! - [`table`] returns the table for a UUID, or `None` for a UUID that this crate does not know.
//! - `runtime` contains the functions that the runtime needs to start: primary contexts, modules, and buffers for
//!   tools.
//! - `store` keeps libraries' values for each context. Nearly every runtime call reads such a value.
//! - `integrity` answers the runtime's integrity query about the driver ([decision
//!   143](../../../docs/decisions/143-integrity-answer.md)).
//! - `refusal` fills the slots whose meaning is unknown. It fails with "not supported", and reports the first call of
//!   each slot.
//!
//! The crate queries the guest library through the trait [`Driver`]. The crate does not create contexts and does not
//! send messages.

mod integrity;
mod refusal;
mod runtime;
mod store;
mod tables;
#[cfg(test)]
mod tests;
mod uuids;

pub use store::forget as forget_context;
pub use tables::table;

use std::ffi::c_void;
use std::sync::OnceLock;

/// Result codes of calls, as in NVIDIA's headers.
pub mod result {
    /// The call succeeded.
    pub const SUCCESS: i32 = 0;
    /// An argument is not valid.
    pub const INVALID_VALUE: i32 = 1;
    /// A limit is reached.
    pub const OUT_OF_MEMORY: i32 = 2;
    /// The process has not called `cuInit`.
    pub const NOT_INITIALIZED: i32 = 3;
    /// The object does not exist.
    pub const INVALID_HANDLE: i32 = 400;
    /// The function is not available.
    pub const NOT_SUPPORTED: i32 = 801;
}

/// Identity of a device in the form that the integrity answer covers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Device {
    /// The answer of `cuDeviceGetUuid`.
    pub uuid: [u8; 16],
    /// Attribute 50, the PCI domain.
    pub domain: i32,
    /// Attribute 33, the PCI bus.
    pub bus: i32,
    /// Attribute 34, the PCI device.
    pub device: i32,
}

/// The functions of the guest library that the tables need. Errors are results of the driver API.
pub trait Driver: Sync {
    /// Fails with code 3 before `cuInit`, and in children of the process that called `cuInit`.
    fn ready(&self) -> Result<(), i32>;

    /// Returns the result of `cuDriverGetVersion`.
    fn version(&self) -> u32;

    /// Returns all devices of the process, in the order of their numbers.
    fn devices(&self) -> Vec<Device>;

    /// Returns the handle of the device's primary context, even if the context is inactive.
    fn primary_context(&self, device: i32) -> Result<u64, i32>;

    /// Returns the calling thread's current context. Nearly every runtime call uses this function.
    fn current_context(&self) -> Result<u64, i32>;

    /// Returns the result of `cuCtxGetId` for a context that is not null. cuBLASLt calls this before each matrix
    /// product.
    fn context_id(&self, context: u64) -> Result<u64, i32>;

    /// Loads an image into the current context, as `cuModuleLoadData` does. `image` points to a fat binary or to its
    /// wrapper.
    fn load_module(&self, image: *const c_void) -> Result<u64, i32>;

    /// Reports the first refused call of each slot: the table's UUID and the number of the slot.
    fn refused(&self, table: &str, slot: usize);
}

/// The guest library. Static, because the functions in the static tables use it.
static DRIVER: OnceLock<&'static dyn Driver> = OnceLock::new();

/// Sets the library for the tables. Later calls have no effect.
pub fn install(driver: &'static dyn Driver) {
    let _ = DRIVER.set(driver);
}

/// Returns the library.
///
/// # Errors
///
/// Fails with code 3 before [`install`].
fn driver() -> Result<&'static dyn Driver, i32> {
    DRIVER.get().copied().ok_or(result::NOT_INITIALIZED)
}

/// Returns the result of a call as a number.
fn code(outcome: Result<(), i32>) -> i32 {
    outcome.err().unwrap_or(result::SUCCESS)
}
