//! The export tables of the guests' CUDA library: tables of functions that `cuGetExportTable` returns for a UUID.
//! NVIDIA's runtime and libraries call the driver through these tables in addition to the driver API. The guest library
//! implements the tables inside the guest process, because most results depend on that process. The UUIDs, the slots
//! and their behaviour were determined by experiments with NVIDIA's runtimes 11.8, 12.9 and 13.5, and on a card with
//! driver 580.
//!
//! - [`table`] returns the table for a UUID, or `None` for an unknown UUID.
//! - [`integrity_table_beside`] returns the table of the integrity query for a program that gets all other tables from
//!   the driver.
//! - `runtime` contains the functions that the runtime needs during initialisation: primary contexts, modules, and
//!   buffers for tools.
//! - `store` stores libraries' values for each context. Nearly every runtime call reads such a value.
//! - `integrity` computes the result of the runtime's integrity query about the driver ([decision
//!   143](../../../docs/decisions/143-integrity-answer.md)).
//! - `refusal` fills slots of unknown meaning. Calls to them fail with "not supported", and the first call to each slot
//!   is reported.
//!
//! The crate calls the guest library through the trait [`Driver`]. It does not create contexts or send messages.

mod integrity;
mod refusal;
mod runtime;
mod store;
mod tables;
#[cfg(test)]
mod tests;
mod uuids;

pub use store::forget as forget_context;
pub use tables::{integrity_table_beside, table};
pub use uuids::{INTEGRITY_UUID, RUNTIME_UUID};

use std::ffi::c_void;
use std::sync::OnceLock;

/// Result codes of calls, as in NVIDIA's headers.
pub mod result {
    /// The call succeeded.
    pub const SUCCESS: i32 = 0;
    /// An argument is invalid.
    pub const INVALID_VALUE: i32 = 1;
    /// A limit has been reached.
    pub const OUT_OF_MEMORY: i32 = 2;
    /// The process has not called `cuInit`.
    pub const NOT_INITIALIZED: i32 = 3;
    /// The object does not exist.
    pub const INVALID_HANDLE: i32 = 400;
    /// The function is not available.
    pub const NOT_SUPPORTED: i32 = 801;
}

/// Identity of a device, as included in the integrity hash.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Device {
    /// UUID from `cuDeviceGetUuid`.
    pub uuid: [u8; 16],
    /// PCI domain (attribute 50).
    pub domain: i32,
    /// PCI bus (attribute 33).
    pub bus: i32,
    /// PCI device (attribute 34).
    pub device: i32,
}

/// Functions of the guest library that the tables need. Errors are result codes of the driver API.
pub trait Driver: Sync {
    /// Fails with code 3 before `cuInit` and in children of the process that called `cuInit`.
    fn ready(&self) -> Result<(), i32>;

    /// Returns the result of `cuDriverGetVersion`.
    fn version(&self) -> u32;

    /// Returns all of the process's devices, ordered by number.
    fn devices(&self) -> Vec<Device>;

    /// Returns the handle of the device's primary context, even if the context is inactive.
    fn primary_context(&self, device: i32) -> Result<u64, i32>;

    /// Returns the calling thread's current context. Nearly every runtime call needs it.
    fn current_context(&self) -> Result<u64, i32>;

    /// Returns the result of `cuCtxGetId` for a non-null context. cuBLASLt calls this before each matrix product.
    fn context_id(&self, context: u64) -> Result<u64, i32>;

    /// Loads an image into the current context, like `cuModuleLoadData`. `image` points to a fat binary or to its
    /// wrapper.
    fn load_module(&self, image: *const c_void) -> Result<u64, i32>;

    /// Reports the first call to an unsupported slot, given the table's UUID and the slot number.
    fn refused(&self, table: &str, slot: usize);
}

/// The guest library. Static, because the functions in the static tables use it.
static DRIVER: OnceLock<&'static dyn Driver> = OnceLock::new();

/// Sets the library that the tables use. Only the first call has an effect.
pub fn install(driver: &'static dyn Driver) {
    let _ = DRIVER.set(driver);
}

/// Returns the installed guest library.
///
/// # Errors
///
/// Fails with code 3 before [`install`] is called.
fn driver() -> Result<&'static dyn Driver, i32> {
    DRIVER.get().copied().ok_or(result::NOT_INITIALIZED)
}

/// Converts the outcome of a call to a result code.
fn code(outcome: Result<(), i32>) -> i32 {
    outcome.err().unwrap_or(result::SUCCESS)
}
