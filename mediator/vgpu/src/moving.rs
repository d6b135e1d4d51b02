//! A VM that moves to another card of the host.
//!
//! The VM on the other card is built as any other ([`MediatedVm::build`]), and maps the client's memory while the first
//! VM still serves its guest ([`MediatedVm::await_arrival`]). Then it replaces the first VM ([`MediatedVm::move_to`]),
//! or the first VM continues unchanged. [`Migrating`] and the memory are transferred; as a stream of bytes they are a
//! saved VM (`saving`).

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

/// Poll interval for a VM that is not quiescent yet.
const POLL_INTERVAL: Duration = Duration::from_millis(1);

/// State of a VM on the card that it leaves, without its memory.
#[derive(Debug)]
pub(super) struct Migrating {
    pub(super) gpu: SavedVGpu,
    pub(super) spaces: SavedSpaces,
    pub(super) tables: Option<SavedTables>,
    pub(super) side: SavedBackend,
    pub(super) departing: Departing,
    /// The card's time at this point, if the VM will continue with another client, or later.
    pub(super) since_ns: Option<u64>,
}

/// A VM that has moved to another card and already runs there. When this value is dropped, the other card copies the
/// memory that it has borrowed, and the old card releases the rest. This takes long, because memory is scrubbed.
#[must_use = "the card that was left scrubs the VM's memory when this is dropped"]
pub struct Left<'a> {
    vm: &'a MediatedVm,
    /// The new card, and the VM's number on it, if that card has borrowed memory.
    there: Option<(Arc<ManagedCard>, TenantId)>,
    /// Keeps the VM's work on the old card stopped.
    halted: Option<Halted>,
    /// Size of the copied memory in bytes.
    pub bytes: u64,
    /// Parts of the VM's downtime.
    pub parts: Parts,
}

/// Parts of the downtime of a VM that moved.
#[derive(Clone, Copy, Debug, Default)]
pub struct Parts {
    /// Time in which its work left the engines and its state was saved.
    pub still: Duration,
    /// Time in which the memory that the other card has not borrowed was compared and copied.
    pub memory: Duration,
    /// Time in which the VM was built on the other card, with its page tables.
    pub anew: Duration,
}

impl<'a> Left<'a> {
    /// Creates the value for a replaced VM whose work is stopped.
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
                tracing::error!(vm = %self.vm.vm, %error, "memory of a VM that has left a card stays out of use there");
                self.halted.take().into_iter().for_each(Halted::stays);
            }
        }
    }
}

impl MediatedVm {
    /// Moves this VM to `there`, which waits for it on another card. Neither VM is served meanwhile. A channel that
    /// does not leave its engines within `limit` is killed as hung. `there` may be served before the result is dropped.
    ///
    /// # Errors
    /// If the VM cannot move: in this case it continues on this card, and `there` must be released.
    pub fn move_to(&self, there: &Arc<Self>, settings: &Settings, limit: Duration) -> Result<Left<'_>, ManagerError> {
        self.check_movable()?;
        let mut last = Instant::now();
        let mut lap = || {
            let before = std::mem::replace(&mut last, Instant::now());
            last.duration_since(before)
        };
        let suspended = self.host().suspend(self.vm, limit)?;
        // The client may have lent different memory since.
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

    /// Releases the resources of a VM that has left its card.
    fn give_back(&self) {
        if let Err(error) = self.release() {
            tracing::error!(vm = %self.vm, %error, "the card keeps something of a VM that has left it");
        }
    }

    /// Saves the VM, which is halted and not served. Operations in flight may end within `limit`.
    ///
    /// # Errors
    /// [`ManagerError::Unsettled`] if operations remain in flight; see also [`Self::check_movable`].
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
        // One lock covers both parts: otherwise work that arrives in between would be in neither part.
        let core = self.core();
        if core.backend.has_segments() {
            return Err(ManagerError::Stays("it has mapped a segment that VMs share"));
        }
        let (SavedVm { vm: _, gpu, spaces, tables, pool: _ }, side) = core.write_down()?;
        let departing = halted.depart()?;
        Ok(Migrating { gpu, spaces, tables, side, departing, since_ns: None })
    }

    /// Prepares a newly built VM to receive a VM from another card: holds it, and maps the client's memory. May be
    /// called again when that memory may have changed.
    ///
    /// # Errors
    /// If the client's memory cannot be mapped for this card.
    pub fn await_arrival(&self) -> Result<(), ManagerError> {
        {
            let mut state = self.host().lock();
            state.hold_still(self.vm, true);
            state.travels(self.vm, true);
        }
        self.core().backend.lend_all()
    }

    /// Takes over the apertures' memory that the client of `old` has mapped, either with all its pages or empty. The
    /// bytes stay unchanged, because `old` may have to resume with them.
    ///
    /// # Errors
    /// If the card rejects the memory.
    pub(super) fn take_windows(&self, old: &Self, inhabited: bool) -> Result<(), ManagerError> {
        let theirs = old.core().backend.remap().on(self.host(), inhabited)?;
        let mut own = {
            let core = &mut *self.core();
            std::mem::replace(core.backend.remap_mut(), theirs)
        };
        own.close(self.host());
        Ok(())
    }

    /// Becomes the arrived VM, whose memory is already on this card, and resumes.
    ///
    /// # Errors
    /// Same as [`Self::become_one`]. After an error, this VM must be [released](Self::release).
    pub(super) fn arrive(self: &Arc<Self>, travelling: Migrating, settings: &Settings) -> Result<(), ManagerError> {
        self.become_one(travelling, settings)?;
        self.host().lock().hold_still(self.vm, false);
        self.go_on();
        self.host().look_again();
        Ok(())
    }

    /// Becomes the arrived VM, whose memory is already on this card. This VM stays held.
    ///
    /// # Errors
    /// If the state is invalid on this card, or the card lacks resources for the VM.
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
            // Moves the pages named by the VM's tables into mapped apertures.
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

/// Checks that the guest's bound channels are on the card or were refused.
fn check_channels(gpu: &VGpu, channels: &Channels, vm: TenantId) -> Result<(), Invalid> {
    let seen: BTreeSet<VirtualChannelId> = gpu.bound_channels().collect();
    let known =
        |channel: VirtualChannelId| channels.physical(vm, channel).is_some() || channels.refused(vm, channel).is_some();
    let mut numbers = (0u8..).take(CHANNELS as usize).map(VirtualChannelId);
    let other = numbers.find(|channel| seen.contains(channel) != known(*channel));
    other.map_or(Ok(()), |channel| {
        Err(Invalid::new(format_args!("its guest sees channel {} otherwise than it is", channel.0)))
    })
}
