//! The seam between the daemon and what a virtual machine's device is: mediated, passed through, or a test's.

use std::collections::BTreeMap;
use std::sync::Arc;

use sched::VgpuParams;
use vmm_glue::{Device, IrqCounts, Link};
use vram::VmId;

use api::{Denied, Driver};
use config::{CardMemory, CardSpec, VmSpec};
use owner::HostCard;
use owner::shortage::Shortage;
use owner::usage::SchedulerUsage;
use physical::GoingCard;
use vgpu::{MediatedVm, Settings};

/// Status of a virtual machine's device, for the operator.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct BackendStatus {
    /// MiB of VRAM that the guest sees.
    pub vram_mib: u64,
    /// Channels that the guest has on the card.
    pub channels_used: u32,
    /// State of the guest's driver, by what it has made of the device.
    pub driver: Driver,
    /// Accesses that were denied, by place and reason.
    pub denied: Vec<Denied>,
    /// Counts, by names that are good for metrics (`snake_case`).
    pub counters: BTreeMap<String, u64>,
}

/// A virtual machine's side of a card, as the daemon sees it while the device is with its thread.
pub trait VmBackend: Send + Sync {
    /// Returns how it does; called from any thread, must not wait for a guest.
    fn status(&self) -> BackendStatus;

    /// Its number in the scheduler of its card; `None` when nothing stands between its guest and the card.
    fn scheduled_as(&self) -> Option<VmId> {
        None
    }

    /// The mediated virtual machine, which another daemon can go on with; `None` when it is none.
    fn mediated(&self) -> Option<&MediatedVm> {
        None
    }

    /// Does `act` while the virtual machine is at work for long.
    #[cfg(test)]
    fn while_locked(&self, act: &mut (dyn FnMut() + Send)) {
        act();
    }

    /// Gives back all that the virtual machine has on the card. Called once, when its device has been dropped.
    ///
    /// # Errors
    /// When the card keeps something; the operator is told.
    fn release(&self) -> Result<(), BackendError> {
        Ok(())
    }
}

/// A device and its status.
pub struct Built {
    /// The side that the vfio-user server calls.
    pub device: Box<dyn Device>,
    /// The side that the daemon asks.
    pub backend: Arc<dyn VmBackend>,
}

/// Why a device or a card could not be made.
#[derive(Debug, thiserror::Error)]
#[error("{what}")]
pub(crate) struct BackendError {
    /// The error.
    pub what: String,
    /// Remedy for the operator, when it is for want of memory.
    pub lacks: Option<String>,
}

impl BackendError {
    /// A failure of any other kind.
    pub fn failed(what: impl ToString) -> Self {
        Self { what: what.to_string(), lacks: None }
    }

    /// A lack of memory.
    #[must_use]
    pub fn lacking(Shortage { what, what_to_do }: Shortage) -> Self {
        Self { what, lacks: Some(what_to_do) }
    }
}

/// Status of a card, for the operator.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct CardStatus {
    /// Why it is out of service with all that use it, if it is.
    pub failed: Option<String>,
    /// Reason why it does not serve for now, if it is expected back by itself.
    pub trouble: Option<String>,
    /// PCI vendor and device, as `10de:06d8`.
    pub pci_id: String,
    /// Chip or model, where that is known.
    pub model: String,
    /// MiB of BAR1 and BAR3, if they are not what the configuration says.
    pub apertures_mib: Option<[u64; 2]>,
    /// Channels of the card that virtual machines can have.
    pub channels: u32,
    /// MiB of VRAM that have no owner, if the mediator has the card. What the configuration promises may be less.
    pub vram_free_mib: Option<u64>,
    /// MiB of VRAM in which memory of virtual machines lies; what a guest has never used lies nowhere.
    pub vram_placed_mib: u64,
    /// MiB of VRAM that the mediator uses itself.
    pub vram_mediator_mib: u64,
    /// Processes that use the card past its owner.
    pub strangers: Vec<api::Stranger>,
    /// Bytes of the card in use for which neither a process nor a tenant can be charged.
    pub unexplained_bytes: u64,
}

/// A card that another daemon can go on with.
pub(crate) struct Movable {
    /// The mediator's side of it.
    pub host: Arc<HostCard>,
    /// The card itself.
    pub card: GoingCard,
    /// Number of the next virtual machine.
    pub next_vm: u32,
}

/// A virtual machine that was made on a card to become one that comes from another.
pub(crate) struct Awaiting {
    /// The side that the vfio-user server is to call.
    pub device: Box<dyn Device>,
    /// The virtual machine.
    pub vm: Arc<MediatedVm>,
    /// Its settings on this card.
    pub settings: Settings,
}

/// A card that is there, and makes the devices of its virtual machines.
pub(crate) trait CardBackend: Send + Sync {
    /// Returns how it does.
    fn status(&self) -> CardStatus;

    /// The interrupts of a virtual machine's device.
    fn irqs(&self) -> IrqCounts {
        IrqCounts { intx: 1, msi: 1, ..IrqCounts::default() }
    }

    /// Returns how its time is shared, with uses of the last `recent_ns` nanoseconds; `None` when it has no scheduler.
    fn scheduler(&self, _recent_ns: u64) -> Option<SchedulerUsage> {
        None
    }

    /// Changes how its time is shared, from now on; the settings are within their bounds. What waits and what runs
    /// goes on.
    fn set_scheduler(&self, _config: sched::Config) {}

    /// Changes what a virtual machine may have of its time, from now on; it is within its bounds.
    fn set_share(&self, _vm: VmId, _params: VgpuParams) {}

    /// Lets a virtual machine out of quarantine, and forgets its strikes.
    fn release_vm(&self, _vm: VmId) {}

    /// Begins a record of its scheduler of at most `limit` bytes, with the names of its virtual machines. `false` when it has
    /// no scheduler now, or one is being made already.
    fn start_record(&self, _names: &BTreeMap<VmId, String>, _limit: usize) -> bool {
        false
    }

    /// Ends the record and returns it; `None` when none is being made.
    fn end_record(&self) -> Option<Vec<u8>> {
        None
    }

    /// The card as the mediator has it, if it has; what is done with its memory is done there.
    fn mediated(&self) -> Option<Arc<HostCard>> {
        None
    }

    /// The card, for another daemon to go on with; `None` when the mediator does not have it, so that there is nothing to go on with.
    ///
    /// # Errors
    /// When it cannot go over.
    fn movable(&self) -> Result<Option<Movable>, BackendError> {
        Err(BackendError::failed(
            "a card of this kind cannot go over to another daemon yet; stop its VMs, and restart the daemon",
        ))
    }

    /// Makes a virtual machine that is to become one from another card, whose guest sees `vram_bytes` bytes of VRAM. As
    /// [`Self::build`] otherwise.
    ///
    /// # Errors
    /// When the card cannot serve it.
    fn await_vm(&self, _vm: &VmSpec, _vram_bytes: u64, _link: &Link) -> Result<Awaiting, BackendError> {
        Err(BackendError::failed("cards of this kind take no VMs from others"))
    }

    /// Changes how its memory is divided, from now on; the settings are within their bounds.
    ///
    /// # Errors
    /// When the card cannot do so now; nothing has changed then.
    fn set_memory(&self, _memory: CardMemory) -> Result<(), BackendError> {
        Ok(())
    }

    /// Makes the device of a virtual machine. The daemon calls it for one machine at a time and has made sure that names
    /// are unique, that memory suffices by the configuration, and that passthrough excludes others.
    ///
    /// # Errors
    /// When the card cannot serve it.
    fn build(&self, vm: &VmSpec, link: &Link) -> Result<Built, BackendError>;
}

/// Opens the cards of a configuration.
pub(crate) trait OpenCard: Send + Sync {
    /// Opens one.
    ///
    /// # Errors
    /// When it cannot be had.
    fn open(&self, card: &CardSpec) -> Result<Box<dyn CardBackend>, BackendError>;
}
