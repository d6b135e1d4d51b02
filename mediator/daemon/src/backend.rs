//! Interface between the daemon and a virtual machine's device: mediated, passed through, or for tests.

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
use guest_workers::CudaVm;
use physical::GoingCard;
use vgpu::{MediatedVm, Settings};

/// Device status of a virtual machine, for operators.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct BackendStatus {
    /// Size of the VRAM visible to the guest, in MiB.
    pub vram_mib: u64,
    /// Number of channels that the guest uses on the card.
    pub channels_used: u32,
    /// State of the guest's driver, derived from its configuration of the device.
    pub driver: Driver,
    /// Denied accesses, by register and reason.
    pub denied: Vec<Denied>,
    /// Counters, with names in `snake_case` that are valid for metrics.
    pub counters: BTreeMap<String, u64>,
    /// CUDA programs in the guest.
    pub programs: Vec<api::GuestProgram>,
}

/// The daemon's interface to a virtual machine on a card, used while the VM's thread owns the device.
pub trait VmBackend: Send + Sync {
    /// Returns the status. Any thread may call this function, so it must not wait for a guest.
    fn status(&self) -> BackendStatus;

    /// Returns the virtual machine's ID in the card's scheduler, or `None` if the mediator does not schedule its work.
    fn scheduled_as(&self) -> Option<TenantId> {
        None
    }

    /// Returns the mediated virtual machine, which another daemon can take over; `None` for other kinds of devices.
    fn mediated(&self) -> Option<&MediatedVm> {
        None
    }

    /// Returns the virtual machine whose programs use CUDA, or `None` for other devices.
    fn cuda(&self) -> Option<&CudaVm> {
        None
    }

    /// Starts a device taken over from another daemon. Called before its client is served.
    ///
    /// # Errors
    /// Returns an error if the host cannot create a thread.
    fn begin(&self) -> std::io::Result<()> {
        Ok(())
    }

    /// Calls `act` with the virtual machine's lock held, if it has one.
    #[cfg(test)]
    fn while_locked(&self, act: &mut (dyn FnMut() + Send)) {
        act();
    }

    /// Releases all card resources of the virtual machine. Called once, after its device has been dropped.
    ///
    /// # Errors
    /// Returns an error, for the operator, if resources stay allocated on the card.
    fn release(&self) -> Result<(), BackendError> {
        Ok(())
    }
}

/// A virtual machine's new device, in two parts.
pub struct Built {
    /// Part used by the vfio-user server.
    pub device: Box<dyn Device>,
    /// Part used by the daemon.
    pub backend: Arc<dyn VmBackend>,
}

/// Reason why a device or card could not be created.
#[derive(Debug, thiserror::Error)]
#[error("{what}")]
pub(crate) struct BackendError {
    /// Error message.
    pub what: String,
    /// Remedy for the operator, if the cause is a memory shortage.
    pub lacks: Option<String>,
}

impl BackendError {
    /// Creates an error for a cause other than a memory shortage.
    pub fn failed(what: impl ToString) -> Self {
        Self { what: what.to_string(), lacks: None }
    }

    /// Creates an error for a memory shortage.
    #[must_use]
    pub fn lacking(Shortage { what, what_to_do }: Shortage) -> Self {
        Self { what, lacks: Some(what_to_do) }
    }
}

/// Status of a card, for operators.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct CardStatus {
    /// Reason why the card is permanently out of service for all users; `None` if it has not failed.
    pub failed: Option<String>,
    /// Reason why the card is temporarily out of service; `None` otherwise.
    pub trouble: Option<String>,
    /// PCI vendor and device ID, such as `10de:06d8`.
    pub pci_id: String,
    /// Chip or model of the card, if known.
    pub model: String,
    /// UUID in NVML's format; only for a CUDA card.
    pub uuid: Option<String>,
    /// Number of restarts of the card's owner; only for a CUDA card.
    pub owner_restarts: Option<u64>,
    /// Sizes of the card's BAR1 and BAR3 in MiB, if known.
    pub apertures_mib: Option<[u64; 2]>,
    /// Number of channels available to virtual machines.
    pub channels: u32,
    /// VRAM that is neither used nor guaranteed, in MiB; `None` if unknown, for example because the mediator does not
    /// own the card. The configuration may limit VMs to less VRAM.
    pub vram_free_mib: Option<u64>,
    /// VRAM that backs virtual machines' memory, in MiB. Memory that a guest has never used is not backed.
    pub vram_placed_mib: u64,
    /// VRAM that the mediator itself uses, in MiB.
    pub vram_mediator_mib: u64,
    /// Processes that use the card directly, bypassing its owner.
    pub strangers: Vec<api::Stranger>,
    /// Used card memory that cannot be attributed to a process or tenant, in bytes.
    pub unexplained_bytes: u64,
}

/// A card that another daemon can take over.
pub(crate) struct Movable {
    /// Mediator state of the card.
    pub host: Arc<ManagedCard>,
    /// The card to hand over.
    pub card: GoingCard,
    /// ID of the next virtual machine.
    pub next_vm: u32,
}

/// Virtual machine created on a card to receive the state of a virtual machine on another card.
pub(crate) struct Awaiting {
    /// Part that the vfio-user server uses later.
    pub device: Box<dyn Device>,
    /// Virtual machine that receives the state.
    pub vm: Arc<MediatedVm>,
    /// Settings of the virtual machine on this card.
    pub settings: Settings,
}

/// An available card, which creates the devices of its virtual machines.
pub(crate) trait CardBackend: Send + Sync {
    /// Returns the status of the card.
    fn status(&self) -> CardStatus;

    /// Returns the number of interrupt vectors of a virtual machine's device, by type.
    fn irqs(&self) -> IrqCounts {
        IrqCounts { intx: 1, msi: 1, ..IrqCounts::default() }
    }

    /// Returns the shares of the card's time, with the time used in the last `recent_ns` ns, or `None` without a
    /// scheduler.
    fn scheduler(&self, _recent_ns: u64) -> Option<SchedulerUsage> {
        None
    }

    /// Changes the card's scheduler settings, which the caller has validated. Existing work continues.
    fn set_scheduler(&self, _config: sched::Config) {}

    /// Changes a virtual machine's share of the card's time. The caller has validated the share.
    fn set_share(&self, _vm: TenantId, _params: VgpuParams) {}

    /// Releases a virtual machine from quarantine, and clears its strikes.
    fn release_vm(&self, _vm: TenantId) {}

    /// Starts recording the card's scheduler, up to `limit` bytes. `names` maps the card's virtual machines to their
    /// names. Returns false if the card currently has no scheduler, or is already being recorded.
    fn start_record(&self, _names: &BTreeMap<TenantId, String>, _limit: usize) -> bool {
        false
    }

    /// Stops the recording and returns it. Returns `None` if no recording is running.
    fn end_record(&self) -> Option<Vec<u8>> {
        None
    }

    /// Returns the card's mediator state, or `None` if the mediator does not own the card.
    fn mediated(&self) -> Option<Arc<ManagedCard>> {
        None
    }

    /// Returns the card in a form that another daemon can take over, or `None` if the mediator does not own the card.
    ///
    /// # Errors
    /// Returns an error if the card cannot be handed over.
    fn movable(&self) -> Result<Option<Movable>, BackendError> {
        Err(BackendError::failed(
            "cards of this kind do not support a handover to another daemon; stop the VMs of the card, and restart the daemon",
        ))
    }

    /// Like [`Self::build`], but creates a virtual machine that will receive the state of a virtual machine on another
    /// card. Its guest sees `vram_bytes` bytes of VRAM.
    ///
    /// # Errors
    /// Returns an error if the card cannot serve the virtual machine.
    fn await_vm(&self, _vm: &VmSpec, _vram_bytes: u64, _link: &Link) -> Result<Awaiting, BackendError> {
        Err(BackendError::failed("cards of this kind do not accept VMs from other cards"))
    }

    /// Changes the card's memory settings, which the caller has validated.
    ///
    /// # Errors
    /// Returns an error, and changes nothing, if the card currently cannot change the settings.
    fn set_memory(&self, _memory: CardMemory) -> Result<(), BackendError> {
        Ok(())
    }

    /// Creates the device of a virtual machine. The daemon creates one device at a time. The daemon has checked that
    /// names are unique, that the configured memory suffices, and that a passthrough card has no other VM.
    ///
    /// # Errors
    /// Returns an error if the card cannot serve the virtual machine.
    fn build(&self, vm: &VmSpec, link: &Link) -> Result<Built, BackendError>;
}

/// Opens the cards in a configuration.
pub(crate) trait OpenCard: Send + Sync {
    /// Opens a card.
    ///
    /// # Errors
    /// Returns an error if the card is not available.
    fn open(&self, card: &CardSpec) -> Result<Box<dyn CardBackend>, BackendError>;
}
