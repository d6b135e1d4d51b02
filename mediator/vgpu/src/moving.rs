//! Moves a VM to another card of the host.
//!
//! The VM on the other card is built like any other ([`MediatedVm::build`]). That VM maps the client's memory while the
//! first VM still serves its guest ([`MediatedVm::await_arrival`]). Then it either replaces the first VM
//! ([`MediatedVm::move_to`]), or the first VM continues unchanged. A move transfers [`Migrating`] and the memory.
//! `saving` serializes the same state.

use super::backend::SavedBackend;
use super::device::{Core, MediatedVm, Settings};
use card_manager::{Departing, Halted, ManagedCard, ManagerError};
use card_state::SavedVm;
use channels::Channels;
use devmodel::{SavedVGpu, VGpu};
use nvspec::addr::GuestVramAddr;
use nvspec::fifo::{CHANNELS, VirtualChannelId};
use pv::{SavedTables, Tables};
use saved_state::Invalid;
use shadow_pt::SavedSpaces;
use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::{Duration, Instant};
use vram::TenantId;

/// Interval between attempts to save a VM while operations are in progress.
const POLL_INTERVAL: Duration = Duration::from_millis(1);

/// State of a VM on its old card, excluding the VM's memory.
#[derive(Debug)]
pub(super) struct Migrating {
    pub(super) gpu: SavedVGpu,
    pub(super) spaces: SavedSpaces,
    pub(super) tables: Option<SavedTables>,
    pub(super) side: SavedBackend,
    pub(super) departing: Departing,
    /// Card time at which the state was saved, in ns. Set only if the VM resumes with another client or later.
    pub(super) since_ns: Option<u64>,
}

/// A VM that has moved to another card and already runs there. Dropping this value copies the memory that the new card
/// has borrowed, and then releases the VM's resources on the old card. This takes a long time, because the memory is
/// scrubbed.
#[must_use = "the old card scrubs the VM's memory when this is dropped"]
pub struct Left<'a> {
    vm: &'a MediatedVm,
    /// New card and the VM's number on it, if this card has borrowed memory.
    there: Option<(Arc<ManagedCard>, TenantId)>,
    /// Keeps the VM's work on the old card stopped.
    halted: Option<Halted>,
    /// Number of bytes of memory copied.
    pub bytes: u64,
    /// Parts of the VM's downtime.
    pub parts: Parts,
}

/// Parts of a moved VM's downtime.
#[derive(Clone, Copy, Debug, Default)]
pub struct Parts {
    /// Time for the VM's work to leave the engines and for its state to be saved.
    pub still: Duration,
    /// Time for comparing and copying memory that the new card has not borrowed.
    pub memory: Duration,
    /// Time for building the VM and its page tables on the new card.
    pub anew: Duration,
}

impl<'a> Left<'a> {
    /// Creates the value for a replaced VM, whose work is stopped.
    pub(super) fn for_vm(vm: &'a MediatedVm, halted: Halted, bytes: u64) -> Self {
        vm.core().gone = true;
        Self { vm, there: None, halted: Some(halted), bytes, parts: Parts::default() }
    }
}

impl Drop for Left<'_> {
    fn drop(&mut self) {
        let copied = self.there.take().map_or(Ok(()), |(host, vm)| host.copy_borrowed_memory(vm));
        match copied {
            Ok(()) => self.vm.give_back(),
            Err(error) => {
                tracing::error!(vm = %self.vm.vm, %error, "memory of a VM that has left the card stays unusable");
                self.halted.take().into_iter().for_each(Halted::stays);
            }
        }
    }
}

impl MediatedVm {
    /// Moves this VM to `there`, a VM on another card that awaits its arrival. Neither VM may be served during the
    /// move. Channels that do not leave their engines within `limit` are killed. `there` may be served before the
    /// result is dropped.
    ///
    /// # Errors
    /// Returns an error if the VM cannot move. In this case, the VM continues on this card, and the caller must release
    /// `there`.
    pub fn move_to(&self, there: &Arc<Self>, settings: &Settings, limit: Duration) -> Result<Left<'_>, ManagerError> {
        self.check_movable()?;
        let mut last = Instant::now();
        let mut lap = || {
            let before = std::mem::replace(&mut last, Instant::now());
            last.duration_since(before)
        };
        let suspended = self.host().suspend(self.vm, limit)?;
        // The client may lend different memory than before.
        there.await_arrival()?;
        let travelling = self.migrate_out(&suspended, limit)?;
        there.take_windows(self, true)?;
        let still = lap();
        let bytes = suspended.copy_memory(there.host(), there.vm)?;
        let memory = lap();
        there.arrive(travelling, settings)?;
        let mut left = Left::for_vm(self, suspended.gone(), bytes);
        left.there = Some((Arc::clone(there.host()), there.vm));
        left.parts = Parts { still, memory, anew: lap() };
        Ok(left)
    }

    /// Releases the resources of a VM that has left the card.
    fn give_back(&self) {
        if let Err(error) = self.release() {
            tracing::error!(vm = %self.vm, %error, "cannot release the resources of a VM that has left the card");
        }
    }

    /// Saves the VM, which must be halted and not served. Waits up to `limit` for operations in progress to end.
    /// Returns [`ManagerError::Unsettled`] if operations are still in progress, or another error if the VM has mapped a
    /// shared segment or cannot be saved.
    pub(super) fn migrate_out(&self, halted: &Halted, limit: Duration) -> Result<Migrating, ManagerError> {
        let began = Instant::now();
        loop {
            match self.try_travel(halted) {
                Err(ManagerError::Unsettled(_)) if began.elapsed() < limit => locks::sleep(POLL_INTERVAL),
                travelling => return travelling,
            }
        }
    }

    fn try_travel(&self, halted: &Halted) -> Result<Migrating, ManagerError> {
        halted.notify_ended_work();
        self.complete_deferred();
        // Save both parts under the same lock. Otherwise, work that arrives in between would be in neither part.
        let core = self.core();
        if core.backend.has_segments() {
            return Err(ManagerError::Stays("the VM has mapped a shared segment"));
        }
        let (SavedVm { vm: _, gpu, spaces, tables, pool: _ }, side) = core.write_down()?;
        let departing = halted.depart()?;
        Ok(Migrating { gpu, spaces, tables, side, departing, since_ns: None })
    }

    /// Prepares a newly built VM for the arrival of a VM from another card: holds it, and maps the client's memory.
    /// Must be called again if that memory may have changed.
    ///
    /// # Errors
    /// Returns an error if the client's memory cannot be mapped for this card.
    pub fn await_arrival(&self) -> Result<(), ManagerError> {
        {
            let mut state = self.host().lock();
            state.hold_still(self.vm, true);
            state.travels(self.vm, true);
        }
        self.core().backend.lend_all()
    }

    /// Takes over the memory of the apertures that the client of `old` has mapped. If `inhabited` is true, the memory
    /// keeps its pages; otherwise, it is treated as empty. Its contents do not change, so that `old` can resume.
    /// Returns an error if the card rejects the memory.
    pub(super) fn take_windows(&self, old: &Self, inhabited: bool) -> Result<(), ManagerError> {
        let theirs = old.core().backend.remap().on(self.host(), inhabited)?;
        let mut own = {
            let core = &mut *self.core();
            std::mem::replace(core.backend.remap_mut(), theirs)
        };
        own.close(self.host());
        Ok(())
    }

    /// Takes over the state of the arriving VM, whose memory is already on this card, and resumes. Returns the errors
    /// of [`Self::become_one`]. After an error, this VM must be [released](Self::release).
    pub(super) fn arrive(self: &Arc<Self>, travelling: Migrating, settings: &Settings) -> Result<(), ManagerError> {
        self.become_one(travelling, settings)?;
        self.host().lock().hold_still(self.vm, false);
        self.go_on();
        self.host().look_again();
        Ok(())
    }

    /// Takes over the state of the arriving VM, whose memory is already on this card. This VM stays held. Returns an
    /// error if the state is invalid on this card or the card has too few resources for the VM.
    pub(super) fn become_one(&self, travelling: Migrating, settings: &Settings) -> Result<(), ManagerError> {
        let Migrating { gpu: registers, spaces, tables, side, departing, since_ns } = travelling;
        {
            let core = &mut *self.core();
            let Core { gpu, backend, rung, .. } = core;
            let config = gpu.config().clone();
            let base = GuestVramAddr(config.vram_bytes);
            let table_bytes = settings.paravirtual.as_ref().map_or(0, |pv| pv.table_bytes);
            let tables = tables.map(|tables| Tables::restored(tables, base, table_bytes)).transpose()?;
            let made = VGpu::restored(registers, config)?;
            let pv = settings.paravirtual.as_ref().map(|pv| (pv, settings.share.channels));
            *rung = backend.arrive(side, spaces, tables, departing, pv)?;
            check_channels(&made, self.host().lock().channels(), self.vm)?;
            *gpu = made;
            backend.prepare_all()?;
            // Move the pages that the VM's tables map into the mapped apertures.
            backend.set_window(gpu.window_base());
            backend.show_apertures();
            if let Some(then) = since_ns {
                gpu.resumed(then, backend);
            }
            core.arm();
        }
        self.host().lock().travels(self.vm, false);
        Ok(())
    }
}

/// Checks that the guest has bound exactly the channels that are on the card or were rejected.
fn check_channels(gpu: &VGpu, channels: &Channels, vm: TenantId) -> Result<(), Invalid> {
    let seen: BTreeSet<VirtualChannelId> = gpu.bound_channels().collect();
    let known =
        |channel: VirtualChannelId| channels.physical(vm, channel).is_some() || channels.refused(vm, channel).is_some();
    let mut numbers = (0u8..).take(CHANNELS as usize).map(VirtualChannelId);
    let other = numbers.find(|channel| seen.contains(channel) != known(*channel));
    other.map_or(Ok(()), |channel| {
        Err(Invalid::new(format_args!("its guest's state of channel {} differs from the card's", channel.0)))
    })
}
