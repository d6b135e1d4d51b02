//! The worker's own restrictions, which it sets before it loads the driver or reads anything from the guest.

use rustix::process::{Resource, Rlimit, setrlimit};

/// A restriction that the kernel refused.
#[derive(Debug, thiserror::Error)]
#[error("cannot restrict the worker: {0} failed: {1}")]
pub struct SandboxError(&'static str, rustix::io::Errno);

/// Maximum number of descriptors of a worker: the driver's device files, chunks and pipes.
const MAX_DESCRIPTORS: u64 = 16_384;

/// Restricts this process: no new privileges, no core dumps, and a limit on descriptors.
///
/// # Errors
/// If the kernel refuses a restriction.
pub fn enter() -> Result<(), SandboxError> {
    rustix::thread::set_no_new_privs(true).map_err(|error| SandboxError("no_new_privs", error))?;
    limit(Resource::Core, 0).map_err(|error| SandboxError("the limit of core dumps", error))?;
    limit(Resource::Nofile, MAX_DESCRIPTORS).map_err(|error| SandboxError("the limit of descriptors", error))
}

fn limit(resource: Resource, most: u64) -> Result<(), rustix::io::Errno> {
    let hard = rustix::process::getrlimit(resource).maximum.unwrap_or(most).min(most);
    setrlimit(resource, Rlimit { current: Some(hard), maximum: Some(hard) })
}
