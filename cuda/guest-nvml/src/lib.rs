//! NVML, the management library, for programs in a VM. The CUDA library of guests has these functions too, and its link
//! `libnvidia-ml.so.1` makes it NVML for programs.
//!
//! - `forwarded`: facts about devices, which the worker asks its NVML for. So the memory is that of the tenant.
//! - `answers`: functions that the guest answers itself: start, handles, lists of processes, names of errors.
//! - All other functions of NVML's header return "not supported".
//!
//! A device's handle is one of [`cuda_calls::handle`], which no program may follow as a pointer. The crate asks the
//! worker through the trait [`Worker`]. It neither connects to the device nor encodes messages.
//!
//! UNSAFETY: declares a function that follows the pointers of its arguments.
#![allow(unsafe_code, reason = "see UNSAFETY")]

mod answers;
mod devices;
mod forwarded;
mod refused;
mod result;

use std::sync::OnceLock;

pub use result::DRIVER_NOT_LOADED;

/// A call that has no result of NVML.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Failure {
    /// The arguments are wrong.
    Arguments,
    /// The worker's library lacks the function.
    Missing,
    /// The worker has gone, or none can be started.
    Lost,
}

/// The connection of the guest's library to its worker.
pub trait Worker: Sync {
    /// Starts the worker of this process, unless it runs. A child of the process gets one of its own.
    ///
    /// # Errors
    /// If no worker can be started.
    fn start(&self) -> Result<(), Failure>;

    /// Calls the function of [`cuda_calls::CALLS`] with this number, and returns the result of the worker's NVML.
    /// `handle` is that of the object that the call makes, if it makes one.
    ///
    /// # Errors
    /// If the worker's NVML has not been called.
    ///
    /// # Safety
    /// The arguments are those of the described function.
    unsafe fn call(&self, number: usize, arguments: &[u64], handle: u64) -> Result<i32, Failure>;
}

/// The connection. NVML's functions are static, so they find it here.
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
