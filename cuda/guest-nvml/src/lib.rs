//! NVML, NVIDIA's management library, for programs in a VM. The guests' CUDA library also exports these functions, and
//! its link `libnvidia-ml.so.1` provides NVML to programs.
//!
//! - `forwarded`: facts about devices, which the worker queries from its own NVML. The reported memory is therefore the
//!   tenant's memory.
//! - `answers`: functions that the guest answers itself: initialisation, handles, lists of processes, names of errors.
//! - All other functions in NVML's header return "not supported".
//!
//! A device's handle is a [`cuda_calls::handle`], which programs must not use as a pointer. The crate sends requests to
//! the worker through the trait [`Worker`]. It does not connect to the device and does not encode messages.
//!
//! UNSAFETY: declares a function that dereferences its pointer arguments.
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
    /// The arguments are wrong.
    Arguments,
    /// The worker's library lacks the function.
    Missing,
    /// The worker has ended, or cannot be started.
    Lost,
}

/// The connection between the guest's library and its worker.
pub trait Worker: Sync {
    /// Starts the worker of this process if it is not running. A child of the process gets its own worker.
    ///
    /// # Errors
    /// Returns an error if no worker can be started.
    fn start(&self) -> Result<(), Failure>;

    /// Calls the function with this number in [`cuda_calls::CALLS`], and returns the result of the worker's NVML.
    /// `handle` is the handle of the object that the call creates, if it creates one.
    ///
    /// # Errors
    /// Returns an error if the worker's NVML was not called.
    ///
    /// # Safety
    /// The arguments must match the described function.
    unsafe fn call(&self, number: usize, arguments: &[u64], handle: u64) -> Result<i32, Failure>;
}

/// The connection. NVML's functions are static, so they need a static connection.
static WORKER: OnceLock<&'static dyn Worker> = OnceLock::new();

/// Names the connection. Later calls have no effect.
pub fn install(worker: &'static dyn Worker) {
    let _ = WORKER.set(worker);
}

/// The connection.
fn worker() -> Result<&'static dyn Worker, Failure> {
    WORKER.get().copied().ok_or(Failure::Lost)
}

#[cfg(test)]
mod tests;
