//! VMs whose programs use a CUDA card: the VM's device, and the VM's role as a tenant of the card's owner.

use std::ffi::OsString;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use cuda_control::{Answer, Request};
use cuda_protocol::{DRIVER_VARIABLE, SOCKET_VARIABLE, TENANT_VARIABLE};
use cuda_ring::{ADDRESSES, PINNED_ADDRESSES};
use vcuda::users::{self, NoUser, User};
use vcuda::{BuildError, CudaDevice, CudaFunction, Limits, ProgramLauncher, SavedFunction};
use vmm_glue::Link;
use worker_link::{Rejoin, Restrictions, WorkerOptions};

use config::{FunctionSpec, SocketMode, TenantSpec, VmSpec};
use listening::folders;

use super::{CudaCard, MIB, tenant};
use crate::backend::{BackendError, BackendStatus, Built, VmBackend};
use crate::error::DaemonError;
use owner_process::beside;

/// Name of the program that calls CUDA on behalf of a guest's programs.
const WORKER: &str = "cuda-worker";
/// Name of the library, next to the daemon's program, that a worker loads as the driver.
const LIBRARY: &str = "libcuda.so";
/// Path of this library in the package's directory.
const INSTALLED_LIBRARY: &str = "cuda/libcuda.so.1";
/// Name of the environment variable for the range of device addresses that a worker's library uses.
const ADDRESSES_VARIABLE: &str = "GPU_MEDIATOR_CUDA_ADDRESSES";
/// Time limit for a VM's workers to exit when the VM is removed.
// TIMEOUT: a killed process exits immediately, unless the driver prevents it.
const LEAVING: Duration = Duration::from_secs(10);
/// Interval at which the daemon polls for the workers' exit.
const POLL_INTERVAL: Duration = Duration::from_millis(20);
/// Name of the socket in the VM's directory through which workers find the next daemon.
const REJOIN_SOCKET: &str = "workers.sock";

/// Reason why another daemon's VM cannot be resumed.
#[derive(Debug, thiserror::Error)]
pub(crate) enum RestoreError {
    /// The device's state is invalid.
    #[error(transparent)]
    Device(#[from] BuildError),
    /// The workers' user cannot be used.
    #[error(transparent)]
    User(#[from] NoUser),
}

/// A VM that uses a CUDA card.
struct CudaVm {
    function: CudaFunction,
    card: Arc<CudaCard>,
    name: String,
    socket: PathBuf,
    socket_dir: PathBuf,
    /// The workers' user, if it is not the daemon's user.
    user: Option<User>,
}

/// Converts a VM to a tenant of its card.
fn as_tenant(card: &CudaCard, vm: &VmSpec) -> TenantSpec {
    let mut spec = vm.as_tenant();
    if card.spec().cuda().worker_users.is_some() {
        // Workers belong to the daemon's group, which owns the socket.
        spec.mode = SocketMode(0o660);
    }
    spec
}

/// Returns the dedicated user of a VM's workers, if they have one.
fn user(card: &CudaCard, vm: &str, socket: &Path) -> Result<Option<User>, NoUser> {
    let user = socket.parent().map_or(Ok(None), |folder| card.users.take(folder))?;
    report(vm, card.spec().cuda().sandbox, user.as_ref().map(User::number));
    Ok(user)
}

/// Creates the device of a VM, and adds the VM to the tenants of the card's owner.
pub(super) fn build(card: &Arc<CudaCard>, vm: &VmSpec, link: &Link, dir: &Path) -> Result<Built, BackendError> {
    let spec = as_tenant(card, vm);
    let function = vm.cuda.unwrap_or_default();
    let socket = spec.socket_path(dir);
    let told = tenant(&spec, card.spec(), dir, Some(function)).map_err(BackendError::failed)?;
    folders::make(&vm.name, &socket, dir).map_err(DaemonError::from).map_err(BackendError::failed)?;
    let withdraw = || {
        socket.parent().into_iter().for_each(users::forget);
        folders::remove(&vm.name, &socket, dir);
    };
    let user = user(card, &vm.name, &socket).inspect_err(|_| withdraw()).map_err(BackendError::failed)?;
    let added = card.change().and_then(|turn| card.add(turn, &format!("VM `{}`", vm.name), told));
    if let Err(error) = added.map(drop) {
        withdraw();
        return Err(BackendError::failed(error));
    }
    let launcher = Box::new(ProgramLauncher(worker(card, &vm.name, &socket, user.as_ref())));
    match CudaDevice::build(&vm.name, limits(function), link, launcher) {
        Ok((device, function)) => Ok(built(card, vm, dir, user, device, function)),
        Err(error) => {
            leave(card, &vm.name);
            withdraw();
            Err(BackendError::failed(error))
        }
    }
}

fn limits(FunctionSpec { window_mib, programs }: FunctionSpec) -> Limits {
    Limits { window_bytes: window_mib * MIB, workers: programs as usize }
}

fn built(
    card: &Arc<CudaCard>,
    vm: &VmSpec,
    dir: &Path,
    user: Option<User>,
    device: CudaDevice,
    function: CudaFunction,
) -> Built {
    let spec = vm.as_tenant();
    let backend = CudaVm {
        function,
        card: Arc::clone(card),
        name: vm.name.clone(),
        socket: spec.socket_path(dir),
        socket_dir: dir.to_owned(),
        user,
    };
    Built { device: Box::new(device), backend: Arc::new(backend) }
}

/// Creates the device of a VM that another daemon suspended.
///
/// # Errors
/// Returns an error if the state is invalid or does not match the configuration, or if the workers' user cannot be
/// used.
pub(crate) fn restored(
    card: &Arc<CudaCard>,
    vm: &VmSpec,
    link: &Link,
    dir: &Path,
    saved: SavedFunction,
    descriptors: Vec<OwnedFd>,
) -> Result<Built, RestoreError> {
    let socket = vm.as_tenant().socket_path(dir);
    let user = user(card, &vm.name, &socket)?;
    let launcher = Box::new(ProgramLauncher(worker(card, &vm.name, &socket, user.as_ref())));
    let limits = limits(vm.cuda.unwrap_or_default());
    let (device, function) = CudaDevice::restore(&vm.name, limits, link, launcher, saved, descriptors)?;
    Ok(built(card, vm, dir, user, device, function))
}

/// Sends a VM's current settings to an owner that another daemon started, unless that owner already has them.
///
/// # Errors
/// Returns an error if the owner rejects the settings or does not respond.
pub(crate) fn confirm(card: &CudaCard, vm: &VmSpec, dir: &Path) -> Result<(), DaemonError> {
    let told = tenant(&as_tenant(card, vm), card.spec(), dir, vm.cuda)?;
    let turn = card.change()?;
    card.add(turn, &format!("VM `{}`", vm.name), told).map(drop)
}

fn rejoin_socket(socket: &Path) -> PathBuf {
    socket.with_file_name(REJOIN_SOCKET)
}

/// Logs the host permissions of a VM's workers.
fn report(vm: &str, is_sandboxed: bool, user: Option<u32>) {
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

impl crate::Daemon {
    /// Continues the guest's CUDA programs in new workers; with `pid`, only the program with this process ID in the
    /// guest.
    ///
    /// # Errors
    /// Returns an error if the virtual machine has no such program, or if its workers do not respond.
    pub fn restart_workers(&self, name: &str, pid: Option<u32>) -> Result<api::WorkerRestarts, DaemonError> {
        let failed = |why: &str| DaemonError::NotRestarted { vm: name.to_owned(), why: why.to_owned() };
        let state = self.state.lock();
        let entry = state.vms.get(name).ok_or_else(|| DaemonError::NoVm(name.to_owned()))?;
        let backend = entry.life.running().map(|running| Arc::clone(&running.backend));
        drop(state);
        let backend = backend.ok_or_else(|| DaemonError::Busy(name.to_owned(), "added"))?;
        let function = backend.cuda().ok_or_else(|| failed("it has no table `cuda`"))?;
        let restarts = function.restart(pid, vcuda::RESTART_LIMIT).map_err(|error| failed(&error.to_string()))?;
        if let (true, Some(pid)) = (restarts.is_empty(), pid) {
            return Err(failed(&format!("no program with process ID {pid} in the guest uses CUDA")));
        }
        let programs = restarts.into_iter().map(|vcuda::Restart { name, pid, result }| {
            let pause_ms = result.as_ref().ok().map(|time| u64::try_from(time.as_millis()).unwrap_or(u64::MAX));
            api::WorkerRestart { name, pid, pause_ms, why: result.err() }
        });
        Ok(api::WorkerRestarts { vm: name.to_owned(), programs: programs.collect() })
    }
}

/// Returns the options for starting a VM's workers.
fn worker(card: &CudaCard, vm: &str, socket: &Path, user: Option<&User>) -> WorkerOptions {
    let cuda = card.spec().cuda();
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
    WorkerOptions { program, environment, library, restrictions, rejoin }
}

/// Removes a VM from the tenants of the card's owner. Its workers have been killed; waits until they have exited.
/// Returns true if all have exited.
fn leave(card: &CudaCard, vm: &str) -> bool {
    let begin = Instant::now();
    loop {
        let request = Request::Remove { name: vm.to_owned(), kills: true };
        // Other changes to the card may run between two requests.
        let asked = card.change().and_then(|turn| turn.ask(&format!("VM `{vm}`"), request));
        match asked {
            Ok(Answer::Leaving(_)) if begin.elapsed() < LEAVING => locks::sleep(POLL_INTERVAL),
            Ok(Answer::Leaving(pids)) => {
                tracing::error!(vm, ?pids, "workers of a removed VM do not exit");
                return false;
            }
            Ok(_) => return true,
            Err(error) => {
                tracing::warn!(vm, %error, "the owner of the card was not notified that a VM was removed");
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
            worker: program.worker,
            window_bytes: program.window_bytes,
            waits: program.waits as u64,
            lost: !program.is_served,
        });
        let programs = programs.collect();
        BackendStatus { driver, counters, programs, ..BackendStatus::default() }
    }

    fn cuda(&self) -> Option<&CudaFunction> {
        Some(&self.function)
    }

    fn begin(&self) -> std::io::Result<()> {
        self.function.start()
    }

    fn release(&self) -> Result<(), BackendError> {
        // This removes the directory only if it is empty.
        let _ = std::fs::remove_file(rejoin_socket(&self.socket));
        let has_left = leave(&self.card, &self.name);
        if let Some(user) = self.user.as_ref().filter(|_| !has_left) {
            tracing::error!(user = user.number(), "no other VM gets this user until the daemon is restarted");
            user.keep();
        }
        self.socket.parent().into_iter().for_each(users::forget);
        folders::remove(&self.name, &self.socket, &self.socket_dir);
        Ok(())
    }
}
