//! The workers of a VM's CUDA programs on one card: their program, environment, sandbox, user and sockets.
//!
//! [`CudaVm`] is a VM with its function and its current card. The crate does not start workers: the VM's device does.

#![forbid(unsafe_code)]

mod vm;

pub use vm::{CudaVm, HomeCard};

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::time::Duration;

use config::{CardSpec, FunctionSpec};
use cuda_protocol::{DRIVER_VARIABLE, SOCKET_VARIABLE, TENANT_VARIABLE};
use cuda_ring::{ADDRESSES, PINNED_ADDRESSES};
use owner_process::beside;
use vcuda::users::User;
use vcuda::{Limits, ProgramLauncher};
use worker_link::{Rejoin, Restrictions, WorkerOptions};

/// Name of the program that calls CUDA on behalf of a guest's program.
const WORKER: &str = "cuda-worker";
/// Name of the library, next to the daemon's program, that a worker loads as the driver.
const LIBRARY: &str = "libcuda.so";
/// Path of this library in the folder of the package.
const INSTALLED_LIBRARY: &str = "cuda/libcuda.so.1";
/// Name of the environment variable for the range of device addresses that a worker's library uses.
const ADDRESSES_VARIABLE: &str = "GPU_MEDIATOR_CUDA_ADDRESSES";
/// Name of the socket in the VM's folder through which workers find the next daemon.
const REJOIN_SOCKET: &str = "workers.sock";
/// Bytes per MiB.
const MIB: u64 = 1 << 20;

/// Returns the path of the socket through which the workers of a VM find the next daemon. It is in the folder of the
/// owner's socket.
fn rejoin_socket(socket: &Path) -> PathBuf {
    socket.with_file_name(REJOIN_SOCKET)
}

/// Returns the limits of a VM's device.
#[must_use]
pub fn limits(FunctionSpec { window_mib, programs }: FunctionSpec) -> Limits {
    Limits { window_bytes: window_mib.saturating_mul(MIB), workers: programs as usize }
}

/// Logs the host permissions of a VM's workers.
pub fn report(vm: &str, is_sandboxed: bool, user: Option<u32>) {
    if !is_sandboxed {
        tracing::warn!(vm, "workers have no sandbox (`cuda.sandbox`): a guest can do what the daemon's user can");
    }
    match user {
        Some(user) => tracing::info!(vm, user, "the VM's workers run as a dedicated user"),
        None => tracing::info!(
            vm,
            "only the sandbox confines the VM's workers, which run as the daemon's user; `cuda.worker_users` sets dedicated users"
        ),
    }
}

/// Returns the launcher of a VM's workers on a card, whose owner listens on `socket`.
#[must_use]
pub fn launcher(card: &CardSpec, vm: &str, socket: &Path, user: Option<&User>) -> ProgramLauncher {
    let cuda = card.cuda();
    let program = cuda.worker.unwrap_or_else(|| beside(WORKER, WORKER));
    // Device addresses are the same in the guest and in the worker; pinned memory uses the rest of the range.
    let addresses = format!("{:#x}-{:#x}", ADDRESSES.start, PINNED_ADDRESSES);
    let variables: [(&str, OsString); 4] = [
        (SOCKET_VARIABLE, socket.into()),
        (TENANT_VARIABLE, vm.into()),
        (DRIVER_VARIABLE, cuda.driver.into()),
        (ADDRESSES_VARIABLE, addresses.into()),
    ];
    let group = rustix::process::getegid().as_raw();
    let user = user.map(|user| (user.number(), group));
    let restrictions = Restrictions { is_off: !cuda.sandbox, user, ..Restrictions::default() };
    let environment = variables.map(|(name, value)| (name.into(), value)).to_vec();
    let limit = Duration::from_secs(cuda.orphan_timeout_s);
    let rejoin = Some(Rejoin { socket: rejoin_socket(socket), limit });
    let library = Some(beside(LIBRARY, INSTALLED_LIBRARY));
    let options = WorkerOptions { program, environment, library, restrictions, rejoin };
    ProgramLauncher { card: card.name.clone(), options }
}
