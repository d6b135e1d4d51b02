//! NVML, NVIDIA's management library, for programs in a VM. The guest's CUDA library also exports these functions.
//! Programs find the library through the symbolic link `libnvidia-ml.so.1`.
//!
//! - `forwarded`: device properties, which the worker queries from its own NVML. That library reports the tenant's
//!   memory.
//! - `answers`: functions that the guest implements itself: initialization, handles, process lists, error names.
//! - All other functions in NVML's header return "not supported".
//!
//! A device handle is a [`cuda_calls::handle`], which programs must not dereference. The crate sends requests to the
//! worker through the trait [`Worker`]. It does not connect to the device or encode messages.
//!
//! UNSAFETY: declares a function that dereferences pointer arguments.
#![allow(unsafe_code, reason = "see UNSAFETY")]

mod answers;
mod devices;
mod forwarded;
mod refused;
mod result;

use std::sync::OnceLock;

pub use result::DRIVER_NOT_LOADED;

/// Reason why a call has no NVML result.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Failure {
    /// The arguments are invalid.
    Arguments,
    /// The worker's library lacks the function.
    Missing,
    /// The worker has exited, or cannot be started.
    Lost,
}

/// The connection between the guest's library and its worker.
pub trait Worker: Sync {
    /// Starts this process's worker if it is not running. A child process gets its own worker.
    ///
    /// # Errors
    /// Returns an error if no worker can be started.
    fn start(&self) -> Result<(), Failure>;

    /// Calls the function with this index in [`cuda_calls::CALLS`]. Returns the result code of the worker's NVML.
    /// `handle` is the handle of the object that the call creates, if any.
    ///
    /// # Errors
    /// Returns an error if the worker did not call its NVML.
    ///
    /// # Safety
    /// The arguments must match the described function.
    unsafe fn call(&self, number: usize, arguments: &[u64], handle: u64) -> Result<i32, Failure>;
}

/// The connection. Static, because exported functions cannot receive state as an argument.
static WORKER: OnceLock<&'static dyn Worker> = OnceLock::new();

/// Sets the connection. Only the first call has an effect.
pub fn install(worker: &'static dyn Worker) {
    let _ = WORKER.set(worker);
}

/// Returns the connection.
fn worker() -> Result<&'static dyn Worker, Failure> {
    WORKER.get().copied().ok_or(Failure::Lost)
}

#[cfg(test)]
mod tests;
