//! A VM that goes to another card of the host.
//!
//! There it is made as any other is ([`MediatedVm::build`]), and takes in the client's memory while the first still serves its guest
//! ([`MediatedVm::await_arrival`]). Then it becomes what the first was ([`MediatedVm::move_to`]); or the first goes on as if
//! nothing had been. What goes from one to the other is [`Travelling`], and the memory; in a stream of bytes they are a VM that
//! is saved (`saving`).

use super::backend::SavedBackend;
use super::device::{Core, MediatedVm, Settings};
use card_state::SavedVm;
use channels::Channels;
use devmodel::{SavedVGpu, VGpu};
use nvspec::addr::GuestVramAddr;
use nvspec::fifo::{CHANNELS, VirtualChannelId};
use owner::{Departing, Halted, HostCard, HostError};
use pv::{SavedTables, Tables};
use saved_state::Invalid;
use shadow_pt::SavedSpaces;
use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::{Duration, Instant};
use vram::VmId;

/// Time between two tries at what has not come to rest.
const AGAIN: Duration = Duration::from_millis(1);

/// A VM as it was on the card that it leaves, but for its memory.
#[derive(Debug)]
pub(super) struct Travelling {
    pub(super) gpu: SavedVGpu,
    pub(super) spaces: SavedSpaces,
    pub(super) tables: Option<SavedTables>,
    pub(super) side: SavedBackend,
    pub(super) departing: Departing,
    /// The card's time then, if it is to go on with another client, or in another time.
    pub(super) since_ns: Option<u64>,
}

/// A VM that has gone to another card, which goes on there already. When this is dropped, the other card copies what it has borrowed of
/// its memory, and the card that it has left releases what it still has of it, which takes long: memory is scrubbed.
#[must_use = "the card that was left scrubs the VM's memory when this is dropped"]
pub struct Left<'a> {
    vm: &'a MediatedVm,
    /// Its new card, and its number there, if that has borrowed memory.
    there: Option<(Arc<HostCard>, VmId)>,
    /// Nothing of it runs here any more.
    halted: Option<Halted>,
    /// Bytes of memory that were copied.
    pub bytes: u64,
    /// Parts of the time for which it stood still.
    pub parts: Parts,
}

/// Parts of the time for which a VM stood still.
#[derive(Clone, Copy, Debug, Default)]
pub struct Parts {
    /// Its work left the engines, and was written down.
    pub still: Duration,
    /// Memory that the other card has not borrowed was compared, and copied.
    pub memory: Duration,
    /// It was made anew, with its page tables.
    pub anew: Duration,
}

impl<'a> Left<'a> {
    /// Of a VM whose place another has taken, and whose work stands still.
    pub(super) fn of(vm: &'a MediatedVm, halted: Halted, bytes: u64) -> Self {
        vm.core().gone = true;
        Self { vm, there: None, halted: Some(halted), bytes, parts: Parts::default() }
    }
}

impl Drop for Left<'_> {
    fn drop(&mut self) {
        let settled = self.there.take().map_or(Ok(()), |(host, vm)| host.settle(vm));
        match settled {
            Ok(()) => self.vm.give_back(),
            Err(error) => {
                tracing::error!(vm = %self.vm.vm, %error, "memory of a VM that has left a card stays out of use there");
                self.halted.take().into_iter().for_each(Halted::stays);
            }
        }
    }
}

impl MediatedVm {
    /// Has `there`, which awaits it on another card, go on as this VM. Nobody serves either. A channel that does not leave its engines
    /// within `limit` is killed, as a hang is. `there` may be served before what is returned is dropped.
    ///
    /// # Errors
    /// What is in the way: this VM goes on here then, and `there` is to be released.
    pub fn move_to(&self, there: &Arc<Self>, settings: &Settings, limit: Duration) -> Result<Left<'_>, HostError> {
        self.check_movable()?;
        let mut last = Instant::now();
        let mut lap = || {
            let before = std::mem::replace(&mut last, Instant::now());
            last.duration_since(before)
        };
        let suspended = self.host().suspend(self.vm, limit)?;
        // The client may have lent other memory since.
        there.await_arrival()?;
        let travelling = self.travel(&suspended, limit)?;
        there.take_windows(self, true)?;
        let still = lap();
        let bytes = suspended.copy_memory(there.host(), there.vm)?;
        let memory = lap();
        there.arrive(travelling, settings)?;
        let mut left = Left::of(self, suspended.gone(), bytes);
        left.there = Some((Arc::clone(there.host()), there.vm));
        left.parts = Parts { still, memory, anew: lap() };
        Ok(left)
    }

    /// Releases a VM that has left its card.
    fn give_back(&self) {
        if let Err(error) = self.release() {
            tracing::error!(vm = %self.vm, %error, "the card keeps something of a VM that has left it");
        }
    }

    /// Writes the VM down, which is halted, and which nobody serves. What is under way may end within `limit`.
    ///
    /// # Errors
    /// [`HostError::Unsettled`] when it has not; see also [`Self::check_movable`].
    pub(super) fn travel(&self, halted: &Halted, limit: Duration) -> Result<Travelling, HostError> {
        let began = Instant::now();
        loop {
            match self.try_travel(halted) {
                Err(HostError::Unsettled(_)) if began.elapsed() < limit => locks::sleep(AGAIN),
                travelling => return travelling,
            }
        }
    }

    fn try_travel(&self, halted: &Halted) -> Result<Travelling, HostError> {
        halted.settle();
        // What has come for it is taken up when the lock is let go.
        drop(self.core());
        // In one hold: work that comes in between would be in neither part.
        let core = self.core();
        if core.backend.has_segments() {
            return Err(HostError::Stays("it has mapped a segment that VMs share"));
        }
        let (SavedVm { vm: _, gpu, spaces, tables, pool: _ }, side) = core.write_down()?;
        let departing = halted.depart()?;
        Ok(Travelling { gpu, spaces, tables, side, departing, since_ns: None })
    }

    /// Makes a VM that was just built await one from another card: it is held, and has the client's memory mapped. May be called again
    /// when that may have changed.
    ///
    /// # Errors
    /// When the client's memory cannot be mapped for this card.
    pub fn await_arrival(&self) -> Result<(), HostError> {
        {
            let mut state = self.host().lock();
            state.hold_still(self.vm, true);
            state.travels(self.vm, true);
        }
        self.core().backend.lend_all()
    }

    /// Has the apertures' memory that the client of `old` has mapped: with all that lives there, or with nothing. Its bytes stay, since `old`
    /// may have to go on with them.
    ///
    /// # Errors
    /// When the card does not take it.
    pub(super) fn take_windows(&self, old: &Self, inhabited: bool) -> Result<(), HostError> {
        let theirs = old.core().backend.remap().on(self.host(), inhabited)?;
        let mut own = {
            let core = &mut *self.core();
            std::mem::replace(core.backend.remap_mut(), theirs)
        };
        own.close(self.host());
        Ok(())
    }

    /// Becomes the VM that has come, whose memory is here already, and goes on.
    ///
    /// # Errors
    /// As [`Self::become_one`]. It is to be [released](Self::release) then.
    pub(super) fn arrive(self: &Arc<Self>, travelling: Travelling, settings: &Settings) -> Result<(), HostError> {
        self.become_one(travelling, settings)?;
        self.host().lock().hold_still(self.vm, false);
        self.go_on();
        self.host().look_again();
        Ok(())
    }

    /// Becomes the VM that has come, whose memory is here already. It is held as before.
    ///
    /// # Errors
    /// When it is none that there can be on this card, or the card lacks something for it.
    pub(super) fn become_one(&self, travelling: Travelling, settings: &Settings) -> Result<(), HostError> {
        let Travelling { gpu: registers, spaces, tables, side, departing, since_ns } = travelling;
        {
            let core = &mut *self.core();
            let Core { gpu, backend, rung, .. } = core;
            let config = gpu.config().clone();
            let base = GuestVramAddr(config.vram_bytes);
            let table_bytes = settings.paravirtual.as_ref().map_or(0, |pv| pv.table_bytes);
            let tables = tables.map(|tables| Tables::restored(tables, base, table_bytes)).transpose()?;
            let made = VGpu::restored(registers, config)?;
            let pv = settings.paravirtual.as_ref().map(|pv| (pv, settings.share.channels));
            *rung = backend.arrive(side, (spaces, tables), departing, pv)?;
            check_channels(&made, self.host().lock().channels(), self.vm)?;
            *gpu = made;
            backend.prepare_all()?;
            // Pages that its tables have in mapped apertures are there from now on.
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

/// A guest sees the channels bound that are, or were refused.
fn check_channels(gpu: &VGpu, channels: &Channels, vm: VmId) -> Result<(), Invalid> {
    let seen: BTreeSet<VirtualChannelId> = gpu.bound_channels().collect();
    let known =
        |channel: VirtualChannelId| channels.physical(vm, channel).is_some() || channels.refused(vm, channel).is_some();
    let mut numbers = (0u8..).take(CHANNELS as usize).map(VirtualChannelId);
    let other = numbers.find(|channel| seen.contains(channel) != known(*channel));
    other.map_or(Ok(()), |channel| {
        Err(Invalid::new(format_args!("its guest sees channel {} otherwise than it is", channel.0)))
    })
}
