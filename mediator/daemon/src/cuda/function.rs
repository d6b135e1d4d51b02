//! VMs whose programs use a CUDA card: the device, and the VM as a tenant of the card's owner.

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use cuda_control::{Answer, Request};
use cuda_protocol::{DRIVER_VARIABLE, SOCKET_VARIABLE, TENANT_VARIABLE};
use cuda_ring::{ADDRESSES, PINNED_ADDRESSES};
use vcuda::{CudaDevice, CudaFunction, Limits, ProgramLauncher};
use vmm_glue::Link;
use worker_link::{Restrictions, WorkerOptions};

use config::{FunctionSpec, SocketMode, VmSpec};
use listening::folders;

use super::users::User;
use super::{CudaCard, MIB, tenant};
use crate::backend::{BackendError, BackendStatus, Built, VmBackend};
use crate::error::DaemonError;
use owner_process::beside;

/// Name of the program that calls CUDA for a guest's program.
const WORKER: &str = "cuda-worker";
/// Name of the library that a worker loads as the driver, next to the daemon.
const LIBRARY: &str = "libcuda.so";
/// Same, below the folder of the package.
const INSTALLED_LIBRARY: &str = "cuda/libcuda.so.1";
/// Variable with the range of device addresses that the library of a worker uses.
const ADDRESSES_VARIABLE: &str = "GPU_MEDIATOR_CUDA_ADDRESSES";
/// Time that the workers of a VM have to end when it is removed.
// TIMEOUT: a killed process ends at once, unless the driver prevents it.
const LEAVING: Duration = Duration::from_secs(10);
/// Interval at which this is checked.
const POLL_INTERVAL: Duration = Duration::from_millis(20);

/// A VM's side of a CUDA card.
struct CudaVm {
    function: CudaFunction,
    card: Arc<CudaCard>,
    name: String,
    vram_mib: u64,
    socket: PathBuf,
    socket_dir: PathBuf,
    /// User of the workers, if it is their own.
    user: Option<User>,
}

/// Creates the device of a VM, and adds the VM to the tenants of the card's owner.
pub(super) fn build(card: &Arc<CudaCard>, vm: &VmSpec, link: &Link, dir: &Path) -> Result<Built, BackendError> {
    let mut spec = vm.as_tenant();
    let user = card.users.take().map_err(BackendError::failed)?;
    let group = rustix::process::getegid().as_raw();
    let ids = user.as_ref().map(|user| (user.number(), group));
    if ids.is_some() {
        // Workers are in the daemon's group, which owns the socket.
        spec.mode = SocketMode(0o660);
    }
    report(&vm.name, card.spec().cuda().sandbox, ids);
    let function = vm.cuda.unwrap_or_default();
    let socket = spec.socket_path(dir);
    let told = tenant(&spec, card.spec(), dir).map_err(BackendError::failed)?;
    folders::make(&vm.name, &socket, dir).map_err(DaemonError::from).map_err(BackendError::failed)?;
    let added = card.change().and_then(|turn| card.promise(turn, &format!("VM `{}`", vm.name), &Request::Add(told)));
    if let Err(error) = added.map(drop) {
        folders::remove(&vm.name, &socket, dir);
        return Err(BackendError::failed(error));
    }
    let FunctionSpec { window_mib, programs } = function;
    let limits = Limits { window_bytes: window_mib * MIB, workers: programs as usize };
    let launcher = Box::new(ProgramLauncher(worker(card, &vm.name, &socket, ids)));
    let device = CudaDevice::build(&vm.name, limits, link, launcher);
    let backend = |function, user| CudaVm {
        function,
        card: Arc::clone(card),
        name: vm.name.clone(),
        vram_mib: spec.vram_mib,
        socket: socket.clone(),
        socket_dir: dir.to_owned(),
        user,
    };
    match device {
        Ok((device, function)) => Ok(Built { device: Box::new(device), backend: Arc::new(backend(function, user)) }),
        Err(error) => {
            leave(card, &vm.name);
            folders::remove(&vm.name, &socket, dir);
            Err(BackendError::failed(error))
        }
    }
}

/// Reports the restrictions of a VM's workers.
fn report(vm: &str, is_sandboxed: bool, ids: Option<(u32, u32)>) {
    if !is_sandboxed {
        tracing::warn!(vm, "workers have no sandbox (`cuda.sandbox`): a guest can do what the daemon's user can");
    }
    match ids {
        Some((user, _)) => tracing::info!(vm, user, "the VM's workers have a user of their own"),
        None => tracing::info!(
            vm,
            "the VM's workers have the daemon's user, behind the sandbox alone; `cuda.worker_users` gives them others"
        ),
    }
}

/// Returns how the workers of a VM are started.
fn worker(card: &CudaCard, vm: &str, socket: &Path, user: Option<(u32, u32)>) -> WorkerOptions {
    let cuda = card.spec().cuda();
    let program = cuda.worker.unwrap_or_else(|| beside(WORKER, WORKER));
    // Device addresses are the same in the guest and in the worker; pinned memory has the rest of the range.
    let addresses = format!("{:#x}-{:#x}", ADDRESSES.start, PINNED_ADDRESSES);
    let variables: [(&str, OsString); 4] = [
        (SOCKET_VARIABLE, socket.into()),
        (TENANT_VARIABLE, vm.into()),
        (DRIVER_VARIABLE, cuda.driver.into()),
        (ADDRESSES_VARIABLE, addresses.into()),
    ];
    let restrictions = Restrictions { is_off: !cuda.sandbox, user, ..Restrictions::default() };
    let environment = variables.map(|(name, value)| (name.into(), value)).to_vec();
    WorkerOptions { program, environment, library: Some(beside(LIBRARY, INSTALLED_LIBRARY)), restrictions }
}

/// Removes a VM from the tenants of the card's owner. Its workers were killed; waits until they have left. Returns true
/// if none is left.
fn leave(card: &CudaCard, vm: &str) -> bool {
    let begin = Instant::now();
    loop {
        let request = Request::Remove { name: vm.to_owned(), kills: true };
        // Other changes of the card may run between two requests.
        let asked = card.change().and_then(|turn| turn.ask(&format!("VM `{vm}`"), request));
        match asked {
            Ok(Answer::Leaving(_)) if begin.elapsed() < LEAVING => locks::sleep(POLL_INTERVAL),
            Ok(Answer::Leaving(pids)) => {
                tracing::error!(vm, ?pids, "workers of a VM that was removed do not end");
                return false;
            }
            Ok(_) => return true,
            Err(error) => {
                tracing::warn!(vm, %error, "the owner of the card does not know that a VM was removed");
                return false;
            }
        }
    }
}

impl VmBackend for CudaVm {
    fn status(&self) -> BackendStatus {
        let driver = api::Driver {
            pci_id: "1af4:1050".to_owned(),
            bus_master: self.function.is_bus_master(),
            interrupts: api::InterruptKind::Msi,
            state: None,
        };
        let counters = self.function.counters().map(|(name, count)| (name.to_owned(), count)).into();
        let programs = self.function.programs().into_iter().map(|program| api::GuestProgram {
            name: program.name,
            pid: program.pid,
            window_bytes: program.window_bytes,
            waits: program.waits as u64,
            lost: !program.is_served,
        });
        let programs = programs.collect();
        BackendStatus { vram_mib: self.vram_mib, driver, counters, programs, ..BackendStatus::default() }
    }

    fn release(&self) -> Result<(), BackendError> {
        let has_left = leave(&self.card, &self.name);
        if let Some(user) = self.user.as_ref().filter(|_| !has_left) {
            tracing::error!(user = user.number(), "no other VM gets this user until the daemon is started again");
            user.keep();
        }
        folders::remove(&self.name, &self.socket, &self.socket_dir);
        Ok(())
    }
}
