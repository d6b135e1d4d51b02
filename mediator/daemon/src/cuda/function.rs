//! VMs whose programs use a CUDA card: the VM's device, and the VM's role as a tenant of the card's owner.

use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use cuda_control::{Answer, Request};
use guest_workers::{CudaVm, HomeCard, launcher, limits, report};
use vcuda::users::{self, NoUser, User, Users};
use vcuda::{BuildError, CudaDevice, CudaFunction, SavedFunction};
use vmm_glue::Link;

use config::{CardSpec, VmSpec, workers_socket};
use listening::folders;

use super::{CudaCard, tenant};
use crate::backend::{BackendError, BackendStatus, Built, VmBackend};
use crate::error::DaemonError;

/// Time limit for a removed VM's workers to exit.
// TIMEOUT: a killed process exits immediately, unless the driver prevents it.
const LEAVING: Duration = Duration::from_secs(10);
/// Interval at which the daemon polls for the workers' exit.
const POLL_INTERVAL: Duration = Duration::from_millis(20);

/// Reason why a VM taken over from another daemon cannot resume.
#[derive(Debug, thiserror::Error)]
pub(crate) enum RestoreError {
    /// The device's state is invalid.
    #[error(transparent)]
    Device(#[from] BuildError),
    /// The workers' user account cannot be used.
    #[error(transparent)]
    User(#[from] NoUser),
}

/// A VM that uses a CUDA card.
struct Backend(CudaVm);

impl HomeCard for CudaCard {
    fn spec(&self) -> &CardSpec {
        self.spec()
    }

    fn users(&self) -> &Users {
        &self.users
    }

    fn leave(&self, vm: &str) -> bool {
        leave(self, vm)
    }
}

/// Returns the dedicated user account of a VM's workers, if they have one.
fn user(card: &CudaCard, vm: &str, socket: &Path) -> Result<Option<User>, NoUser> {
    let user = socket.parent().map_or(Ok(None), |folder| card.users.take(folder))?;
    report(vm, card.spec().cuda().sandbox, user.as_ref().map(User::number));
    Ok(user)
}

/// Creates the device of a VM, and adds the VM to the tenants of the card's owner.
pub(super) fn build(card: &Arc<CudaCard>, vm: &VmSpec, link: &Link, dir: &Path) -> Result<Built, BackendError> {
    let function = vm.cuda.unwrap_or_default();
    let socket = workers_socket(&vm.name, &vm.card, dir);
    let told = tenant(&vm.as_tenant(), card.spec(), dir, Some(function)).map_err(BackendError::failed)?;
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
    let launcher = Box::new(launcher(card.spec(), &vm.name, &socket, user.as_ref()));
    match CudaDevice::build(&vm.name, limits(function), link, launcher) {
        Ok((device, function)) => Ok(built(card, vm, (socket, dir.to_owned()), user, device, function)),
        Err(error) => {
            leave(card, &vm.name);
            withdraw();
            Err(BackendError::failed(error))
        }
    }
}

fn built(
    card: &Arc<CudaCard>,
    vm: &VmSpec,
    sockets: (PathBuf, PathBuf),
    user: Option<User>,
    device: CudaDevice,
    function: CudaFunction,
) -> Built {
    let backend = CudaVm::new(function, &vm.name, Arc::<CudaCard>::clone(card), sockets, user);
    Built { device: Box::new(device), backend: Arc::new(Backend(backend)) }
}

/// Creates the device of a VM that another daemon suspended. Returns an error if the state is invalid or does not match
/// the configuration, or if the workers' user account cannot be used.
pub(crate) fn restored(
    card: &Arc<CudaCard>,
    vm: &VmSpec,
    link: &Link,
    dir: &Path,
    saved: SavedFunction,
    descriptors: Vec<OwnedFd>,
) -> Result<Built, RestoreError> {
    let socket = card.known_socket(&vm.name).unwrap_or_else(|| workers_socket(&vm.name, &vm.card, dir));
    let user = user(card, &vm.name, &socket)?;
    let launcher = Box::new(launcher(card.spec(), &vm.name, &socket, user.as_ref()));
    let limits = limits(vm.cuda.unwrap_or_default());
    let (device, function) = CudaDevice::restore(&vm.name, limits, link, launcher, saved, descriptors)?;
    Ok(built(card, vm, (socket, dir.to_owned()), user, device, function))
}

/// Sends a VM's current settings to an owner that another daemon started, unless that owner already has them. Returns
/// an error if the owner rejects the settings or does not respond.
pub(crate) fn confirm(card: &CudaCard, vm: &VmSpec, dir: &Path) -> Result<(), DaemonError> {
    let told = tenant(&vm.as_tenant(), card.spec(), dir, vm.cuda)?;
    let turn = card.change()?;
    card.add(turn, &format!("VM `{}`", vm.name), told).map(drop)
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
        let function = &backend.cuda().ok_or_else(|| failed("it has no table `cuda`"))?.function;
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

/// Removes a VM from the tenants of the card's owner, which kills the VM's workers, and waits until they have exited.
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

impl VmBackend for Backend {
    fn status(&self) -> BackendStatus {
        let driver = api::Driver {
            pci_id: "1af4:1050".to_owned(),
            bus_master: self.0.function.is_bus_master(),
            interrupts: api::InterruptKind::Msi,
            state: None,
        };
        let counters = self.0.function.counters().map(|(name, count)| (name.to_owned(), count)).into();
        let programs = self.0.function.programs().into_iter().map(|program| api::GuestProgram {
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

    fn cuda(&self) -> Option<&CudaVm> {
        Some(&self.0)
    }

    fn begin(&self) -> std::io::Result<()> {
        self.0.function.start()
    }

    fn release(&self) -> Result<(), BackendError> {
        self.0.release();
        Ok(())
    }
}
