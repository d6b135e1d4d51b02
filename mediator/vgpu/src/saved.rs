//! Saved form of a VM's use of the card, excluding its registers and address spaces.
//!
//! The VMM's connection is saved separately. The process that restores the VM provides a link to the same client.

use super::backend::{Description, SavedBackend, VmBackend};
use super::device::{Client, Core, MediatedDevice, MediatedVm, Settings, StatusCell};
use super::memory::{POOL_BYTES, Restored, SavedRemap};
use super::pv::SavedAttachments;
use card::Identity;
use card_manager::{CardInfo, ManagerError, Reopened};
use card_state::{RestoredVm, SavedVm, VmSurroundings};
use devmodel::VGpuConfig;
use saved_state::{Invalid, Known, ReadError, SavedState, WriteError, Writer, first_version};
use serde::{Deserialize, Serialize};
use shadow_pt::Limits;
use std::os::fd::OwnedFd;
use std::sync::{Arc, Weak};
use vm_device::DeviceError;
use vmm_glue::Link;
use vram::TenantId;

/// Saved form of the VM's own state, excluding segments.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct SavedOwn(SavedBackend);

first_version!(SavedOwn, "vgpu");

impl SavedOwn {
    pub(super) fn new(side: SavedBackend) -> Self {
        Self(side)
    }

    pub(super) fn into_inner(self) -> SavedBackend {
        self.0
    }
}

/// Saved form of the VM's own state, for another process.
#[derive(Debug)]
pub struct SavedSide {
    own: SavedOwn,
    /// Segments that the VM has mapped, if any. Programs that do not support segments can take over VMs that have none.
    segments: Option<SavedAttachments>,
    /// Apertures that the VMM maps, if any.
    apertures: Option<SavedRemap>,
    /// Files that contain the memory under these apertures.
    files: Vec<OwnedFd>,
}

impl SavedSide {
    /// Returns the parts of the file, each with the versions that this code can read.
    #[must_use]
    pub fn known() -> [Known; 3] {
        [Known::for_part::<SavedOwn>(), Known::for_part::<SavedAttachments>(), Known::for_part::<SavedRemap>()]
    }

    /// Returns and clears the files that contain the memory under the apertures, for [`Self::read`].
    pub fn take_files(&mut self) -> Vec<OwnedFd> {
        std::mem::take(&mut self.files)
    }

    /// Appends the parts to a file, with `vm` as their owner.
    ///
    /// # Errors
    /// Returns a [`WriteError`] if the parts cannot be written.
    pub fn write(&self, vm: TenantId, file: &mut Writer) -> Result<(), WriteError> {
        let Self { own, segments, apertures, files: _ } = self;
        file.put(vm.0, own)?;
        segments.as_ref().map_or(Ok(()), |segments| file.put(vm.0, segments))?;
        apertures.as_ref().map_or(Ok(()), |apertures| file.put(vm.0, apertures))
    }

    /// Reads the parts of VM `vm` from a file. `files` contains the memory under the VM's apertures.
    ///
    /// # Errors
    /// Returns a [`ReadError`] if the parts cannot be read.
    pub fn read(vm: TenantId, file: &mut SavedState<'_>, files: Vec<OwnedFd>) -> Result<Self, ReadError> {
        let own = file.take(vm.0)?;
        let any = file.owners::<SavedAttachments>().contains(&vm.0);
        let segments = if any { Some(file.take(vm.0)?) } else { None };
        let any = file.owners::<SavedRemap>().contains(&vm.0);
        let apertures = if any { Some(file.take(vm.0)?) } else { None };
        Ok(Self { own, segments, apertures, files })
    }
}

impl Settings {
    /// Returns the environment for restoring a VM with these settings on this card.
    #[must_use]
    pub fn surroundings(&self, info: &CardInfo, card: Identity) -> VmSurroundings {
        let limits = Limits { table_bytes: POOL_BYTES };
        let table_bytes = self.paravirtual.as_ref().map_or(0, |pv| pv.table_bytes);
        VmSurroundings { config: self.origin(info, card), mode: self.shadow, limits, table_bytes }
    }

    /// Returns the configuration of a vGPU with these settings.
    pub(super) fn origin(&self, info: &CardInfo, card: Identity) -> VGpuConfig {
        let mut config = VGpuConfig::of_chip(info.chip, self.share.vram_bytes, Arc::clone(&info.vbios));
        // The guest may use any channel number. The number of bound channels is checked at bind.
        config.channels = nvspec::fifo::CHANNELS;
        config.pci.bar1_bytes = card.bar1_size;
        config.pci.bar3_bytes = card.bar3_size;
        config.vendor_capability = self.paravirtual.as_ref().map(super::PvSettings::capability).unwrap_or_default();
        config
    }
}

impl MediatedVm {
    /// Checks that the VM can be handed over, moved or saved. The caller must do this before it quiesces anything.
    ///
    /// # Errors
    /// Returns an error with the reason if the VM cannot be handed over, moved or saved.
    pub fn check_movable(&self) -> Result<(), ManagerError> {
        match self.core().client {
            Client { stopped: true, .. } => Err(ManagerError::Stays("its VMM has stopped it for a migration")),
            Client { logs: true, .. } => Err(ManagerError::Stays("its VMM logs writes to guest RAM")),
            Client { stopped: false, logs: false } => Ok(()),
        }
    }

    /// Saves the mediator's records of the VM, and the VM's own state. The card must be
    /// [quiescent](card_manager::ManagedCard::stand_still), and the VM must not be served.
    ///
    /// # Errors
    /// Returns [`ManagerError::Unsettled`] if any of the VM's work is in progress, an error if no file descriptor is
    /// free, and the errors of [`Self::check_movable`].
    pub fn save(&self) -> Result<(SavedVm, SavedSide), ManagerError> {
        self.check_movable()?;
        self.complete_deferred();
        let core = self.core();
        let (saved, side) = core.write_down()?;
        let (apertures, files) = core.backend.remap().save()?.unzip();
        let (own, segments) = (SavedOwn::new(side), core.backend.save_attachments());
        Ok((saved, SavedSide { own, segments, apertures, files: files.unwrap_or_default() }))
    }
}

impl Core {
    /// Saves the VM, except for the apertures that its VMM maps. Returns [`ManagerError::Unsettled`] if any of its work
    /// is in progress.
    pub(super) fn write_down(&self) -> Result<(SavedVm, SavedBackend), ManagerError> {
        let Self {
            gpu,
            backend,
            // The next process starts its own polling.
            polls: _,
            // The next process arms the alarm.
            alarm: _,
            deferred,
            rung,
            gone: _,
            // These flags are set only during a migration by the client, which sets the flags of the receiving device
            // itself.
            client: _,
            board: _,
        } = self;
        if deferred.is_some() {
            return Err(ManagerError::Unsettled("a VM's deferred doorbell has not been submitted"));
        }
        if !rung.is_empty() {
            return Err(ManagerError::Unsettled("the card was only just taken over"));
        }
        let side = backend.save_side()?;
        Ok((backend.memory().save(gpu.save()), side))
    }
}

impl MediatedVm {
    /// Creates a VM from its saved state on a card that has not been taken over yet, with a `link` to the VM's client.
    /// The client must lend the same memory.
    ///
    /// # Errors
    /// Returns an error if the state is invalid or does not match the settings, or if the client's memory cannot be
    /// mapped.
    pub fn reopen(
        card: &mut Reopened,
        vm: TenantId,
        SavedSide { own, segments, apertures: remap, files }: SavedSide,
        settings: &Settings,
        link: &Link,
    ) -> Result<(MediatedDevice, Arc<Self>), DeviceError> {
        // The current client keeps its apertures, trapped or mapped. The setting applies only to the next client.
        let Settings { share, shadow, apertures: _, queue_limit, paravirtual } = settings;
        let host = Arc::clone(card.host());
        let RestoredVm { gpu, spaces, tables, pool } = card.take_vm(vm)?;
        let pci = gpu.config().pci;
        let (vram_bytes, queue_limit) = (share.vram_bytes, *queue_limit);
        let description = Description { vm, link: link.clone(), shadow: *shadow, vram_bytes, queue_limit };
        let pv = paravirtual.as_ref().map(|settings| (settings, share.channels));
        let of_vm = |why: Invalid| ManagerError::from(Invalid::new(format_args!("VM {vm}: {why}")));
        let bars = (pci.bar1_bytes, pci.bar3_bytes);
        let remap = remap.map(|remap| remap.restored(&host, bars, files, vram_bytes)).transpose();
        let remap = remap.map_err(|error| match error {
            ManagerError::Saved(why) => of_vm(why),
            other => other,
        })?;
        let restored = Restored { spaces, tables, pool, remap: remap.unwrap_or_default() };
        let made = VmBackend::restored(Arc::clone(&host), description, pv, own.into_inner(), segments, restored);
        let (mut backend, rung) = made.map_err(|error| match error {
            ManagerError::Saved(why) => of_vm(why),
            other => other,
        })?;
        backend.set_window(gpu.window_base());
        let board = Arc::<StatusCell>::default();
        let core = Core { rung, ..Core::new(gpu, backend, &board) };
        let this = Arc::new(Self::from_parts(core, board, &host, vm, link));
        let events: Weak<Self> = Arc::downgrade(&this);
        {
            let mut core = this.core();
            card.claim(core.backend.memory().under_apertures())?;
            let (ram, held) = core.backend.memory().held();
            card.readmit(vm, events, ram, held)?;
            core.arm();
        }
        Ok((MediatedDevice::for_vm(&this, pci, settings), this))
    }

    /// Resumes a VM that was handed over, moved or stopped: resubmits work that waited for memory, and starts polling
    /// doorbells.
    pub fn go_on(self: &Arc<Self>) {
        self.core().backend.poll_again();
        self.ring_again();
        Self::start_polling(self, &mut self.core());
    }

    /// Resubmits work that waited for memory.
    pub(super) fn ring_again(&self) {
        let core = &mut *self.core();
        for (channel, gp_put) in std::mem::take(&mut core.rung) {
            core.backend.ring(channel, gp_put);
        }
        core.finish_access();
    }
}
