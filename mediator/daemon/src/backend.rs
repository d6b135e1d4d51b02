//! The interface between the daemon and a virtual machine's device: a mediated, passed-through or test device.

use std::collections::BTreeMap;
use std::sync::Arc;

use sched::VgpuParams;
use vmm_glue::{Device, IrqCounts, Link};
use vram::TenantId;

use api::{Denied, Driver};
use card_manager::ManagedCard;
use card_manager::shortage::Shortage;
use card_manager::usage::SchedulerUsage;
use config::{CardMemory, CardSpec, VmSpec};
use physical::GoingCard;
use vcuda::CudaFunction;
use vgpu::{MediatedVm, Settings};

/// Status of a virtual machine's device, for the operator.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct BackendStatus {
    /// Guest-visible VRAM in MiB.
    pub vram_mib: u64,
    /// Channels that the guest uses on the card.
    pub channels_used: u32,
    /// State of the guest's driver, derived from how it has set up the device.
    pub driver: Driver,
    /// Denied accesses, by register and reason.
    pub denied: Vec<Denied>,
    /// Counters, with names that are valid for metrics (`snake_case`).
    pub counters: BTreeMap<String, u64>,
    /// Programs of the guest that use CUDA.
    pub programs: Vec<api::GuestProgram>,
}

/// The daemon's interface to a virtual machine on a card. The daemon uses it while the VM's thread owns the device.
pub trait VmBackend: Send + Sync {
    /// Returns the status. Any thread may call this function, so it must not wait for a guest.
    fn status(&self) -> BackendStatus;

    /// Returns the virtual machine's number in the scheduler of its card; `None` if its guest uses the card directly.
    fn scheduled_as(&self) -> Option<TenantId> {
        None
    }

    /// Returns the mediated virtual machine, which another daemon can take over; `None` for other kinds.
    fn mediated(&self) -> Option<&MediatedVm> {
        None
    }

    /// Returns the function through which the guest's programs use CUDA; `None` for other devices.
    fn cuda(&self) -> Option<&CudaFunction> {
        None
    }

    /// Starts the work of a device that another daemon owned, before its client is served.
    ///
    /// # Errors
    /// Returns an error if the host cannot create a thread.
    fn begin(&self) -> std::io::Result<()> {
        Ok(())
    }

    /// Calls `act` while the virtual machine's lock is held.
    #[cfg(test)]
    fn while_locked(&self, act: &mut (dyn FnMut() + Send)) {
        act();
    }

    /// Releases all resources of the virtual machine on the card. Called once, after its device has been dropped.
    ///
    /// # Errors
    /// Returns an error if resources stay allocated on the card. The operator is informed.
    fn release(&self) -> Result<(), BackendError> {
        Ok(())
    }
}

/// A device and its status.
pub struct Built {
    /// The part that the vfio-user server calls.
    pub device: Box<dyn Device>,
    /// The part that the daemon queries.
    pub backend: Arc<dyn VmBackend>,
}

/// Reason why a device or a card could not be created.
#[derive(Debug, thiserror::Error)]
#[error("{what}")]
pub(crate) struct BackendError {
    /// The error.
    pub what: String,
    /// Remedy for the operator, if memory is insufficient.
    pub lacks: Option<String>,
}

impl BackendError {
    /// Creates an error for a cause other than a lack of memory.
    pub fn failed(what: impl ToString) -> Self {
        Self { what: what.to_string(), lacks: None }
    }

    /// Creates an error for a lack of memory.
    #[must_use]
    pub fn lacking(Shortage { what, what_to_do }: Shortage) -> Self {
        Self { what, lacks: Some(what_to_do) }
    }
}

/// Status of a card, for the operator.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct CardStatus {
    /// Reason why the card is permanently out of service for all its users; `None` if it is in service.
    pub failed: Option<String>,
    /// Reason why the card is out of service until it recovers by itself; `None` if it is in service.
    pub trouble: Option<String>,
    /// PCI vendor and device, such as `10de:06d8`.
    pub pci_id: String,
    /// Chip or model, if known.
    pub model: String,
    /// UUID of a CUDA card, in NVML's form.
    pub uuid: Option<String>,
    /// Number of times that the owner of a CUDA card was restarted.
    pub owner_restarts: Option<u64>,
    /// Sizes of BAR1 and BAR3 in MiB, if they differ from the configuration.
    pub apertures_mib: Option<[u64; 2]>,
    /// Number of the card's channels that are available to virtual machines.
    pub channels: u32,
    /// VRAM that belongs to no VM, in MiB, if the mediator owns the card. The configuration may permit less.
    pub vram_free_mib: Option<u64>,
    /// VRAM in MiB that backs memory of virtual machines. Memory that a guest has never used has no backing.
    pub vram_placed_mib: u64,
    /// VRAM that the mediator uses itself, in MiB.
    pub vram_mediator_mib: u64,
    /// Processes that use the card without going through its owner.
    pub strangers: Vec<api::Stranger>,
    /// Used memory of the card that cannot be charged to a process or a tenant, in bytes.
    pub unexplained_bytes: u64,
}

/// A card that another daemon can take over.
pub(crate) struct Movable {
    /// The mediator's state of the card.
    pub host: Arc<ManagedCard>,
    /// The card itself.
    pub card: GoingCard,
    /// Number of the next virtual machine.
    pub next_vm: u32,
}

/// A virtual machine that was created on a card to receive the state of a virtual machine on another card.
pub(crate) struct Awaiting {
    /// The part that the vfio-user server will call.
    pub device: Box<dyn Device>,
    /// The virtual machine.
    pub vm: Arc<MediatedVm>,
    /// Settings of the virtual machine on this card.
    pub settings: Settings,
}

/// An available card that creates the devices of its virtual machines.
pub(crate) trait CardBackend: Send + Sync {
    /// Returns the status of the card.
    fn status(&self) -> CardStatus;

    /// Returns the interrupts of a virtual machine's device.
    fn irqs(&self) -> IrqCounts {
        IrqCounts { intx: 1, msi: 1, ..IrqCounts::default() }
    }

    /// Returns the shares of the card's time, and the use in the last `recent_ns` ns; `None` without a scheduler.
    fn scheduler(&self, _recent_ns: u64) -> Option<SchedulerUsage> {
        None
    }

    /// Changes how the card's time is shared. The caller has validated the settings. Existing work continues.
    fn set_scheduler(&self, _config: sched::Config) {}

    /// Changes a virtual machine's share of the card's time. The caller has validated the share.
    fn set_share(&self, _vm: TenantId, _params: VgpuParams) {}

    /// Releases a virtual machine from quarantine, and forgets its strikes.
    fn release_vm(&self, _vm: TenantId) {}

    /// Starts a recording of the card's scheduler of at most `limit` bytes; `names` are the names of the card's virtual
    /// machines. Returns `false` if the card has no scheduler now, or if a recording is already running.
    fn start_record(&self, _names: &BTreeMap<TenantId, String>, _limit: usize) -> bool {
        false
    }

    /// Ends the recording and returns it; `None` if no recording is running.
    fn end_record(&self) -> Option<Vec<u8>> {
        None
    }

    /// Returns the mediator's state of the card, through which its memory is managed, if the mediator owns the card.
    fn mediated(&self) -> Option<Arc<ManagedCard>> {
        None
    }

    /// Returns the card in a form that another daemon can take over; `None` if the mediator does not own the card.
    ///
    /// # Errors
    /// Returns an error if the card cannot be handed over.
    fn movable(&self) -> Result<Option<Movable>, BackendError> {
        Err(BackendError::failed(
            "a card of this kind cannot be handed over to another daemon yet; stop its VMs, and restart the daemon",
        ))
    }

    /// Creates a virtual machine that will receive the state of a virtual machine on another card. Its guest sees
    /// `vram_bytes` bytes of VRAM. Otherwise, works like [`Self::build`].
    ///
    /// # Errors
    /// Returns an error if the card cannot serve the virtual machine.
    fn await_vm(&self, _vm: &VmSpec, _vram_bytes: u64, _link: &Link) -> Result<Awaiting, BackendError> {
        Err(BackendError::failed("cards of this kind accept no VMs from other cards"))
    }

    /// Changes how the card's memory is divided. The caller has validated the settings.
    ///
    /// # Errors
    /// Returns an error if the card cannot change the division now; in this case, nothing changes.
    fn set_memory(&self, _memory: CardMemory) -> Result<(), BackendError> {
        Ok(())
    }

    /// Creates the device of a virtual machine. The daemon creates one device at a time. The daemon has already checked
    /// that names are unique, that the configured memory suffices, and that a passthrough card has no other VM.
    ///
    /// # Errors
    /// Returns an error if the card cannot serve the virtual machine.
    fn build(&self, vm: &VmSpec, link: &Link) -> Result<Built, BackendError>;
}

/// Opens the cards of a configuration.
pub(crate) trait OpenCard: Send + Sync {
    /// Opens one card.
    ///
    /// # Errors
    /// Returns an error if the card is not available.
    fn open(&self, card: &CardSpec) -> Result<Box<dyn CardBackend>, BackendError>;
}
