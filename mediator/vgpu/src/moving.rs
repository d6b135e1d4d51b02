//! A VM that goes to another card of the host.
//!
//! There it is made as any other is ([`MediatedVm::build`]), and takes in the client's memory while the first still serves its guest
//! ([`MediatedVm::await_arrival`]). Then it becomes what the first was ([`MediatedVm::move_to`]); or the first goes on as if
//! nothing had been.

use super::backend::SavedBackend;
use super::device::{Core, MediatedVm, Settings};
use card_state::SavedVm;
use devmodel::VGpu;
use nvspec::addr::GuestVramAddr;
use owner::{Departing, HostError, Suspended};
use pv::Tables;
use std::time::{Duration, Instant};

/// Time between two tries at what has not come to rest.
const AGAIN: Duration = Duration::from_millis(1);

/// A VM as it was on the card that it leaves, but for its memory.
#[derive(Debug)]
struct Travelling {
    vm: SavedVm,
    side: SavedBackend,
    departing: Departing,
}

/// A VM that has gone to another card, which goes on there already. When this is dropped, the card that it has left releases what it
/// still has of it, which takes long: memory is scrubbed.
#[must_use = "the card that was left scrubs the VM's memory when this is dropped"]
pub struct Left<'a> {
    vm: &'a MediatedVm,
    /// Nothing of it runs here any more.
    _suspended: Suspended<'a>,
    /// Bytes of memory that were copied.
    pub bytes: u64,
}

impl Drop for Left<'_> {
    fn drop(&mut self) {
        if let Err(error) = self.vm.release() {
            tracing::error!(vm = %self.vm.vm, %error, "the card keeps something of a VM that has left it");
        }
    }
}

impl MediatedVm {
    /// Has `there`, which awaits it on another card, go on as this VM. Nobody serves either. A channel that does not leave its engines
    /// within `limit` is killed, as a hang is. `there` may be served before what is returned is dropped.
    ///
    /// # Errors
    /// What is in the way: this VM goes on here then, and `there` is to be released.
    pub fn move_to(&self, there: &Self, settings: &Settings, limit: Duration) -> Result<Left<'_>, HostError> {
        self.check_movable()?;
        let suspended = self.host().suspend(self.vm, limit)?;
        // The client may have lent other memory since.
        there.await_arrival()?;
        let began = Instant::now();
        let travelling = loop {
            match self.travel(&suspended) {
                Err(HostError::Unsettled(_)) if began.elapsed() < limit => locks::sleep(AGAIN),
                travelling => break travelling?,
            }
        };
        let bytes = suspended.copy_memory(there.host(), there.vm)?;
        there.arrive(travelling, settings)?;
        self.core().gone = true;
        Ok(Left { vm: self, _suspended: suspended, bytes })
    }

    /// Writes the VM down, which is suspended, and which nobody serves.
    ///
    /// # Errors
    /// [`HostError::Unsettled`] when something of it is under way; see also [`Self::check_movable`].
    fn travel(&self, suspended: &Suspended<'_>) -> Result<Travelling, HostError> {
        suspended.settle();
        // What has come for it is taken up when the lock is let go.
        drop(self.core());
        // In one hold: work that comes in between would be in neither part.
        let core = self.core();
        let (vm, side) = core.write_down()?;
        let departing = suspended.depart()?;
        Ok(Travelling { vm, side, departing })
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

    /// Becomes the VM that has come, whose memory is here already, and goes on.
    ///
    /// # Errors
    /// When it is none that there can be on this card, or the card lacks something for it. It is to be [released](Self::release)
    /// then.
    fn arrive(&self, Travelling { vm, side, departing }: Travelling, settings: &Settings) -> Result<(), HostError> {
        {
            let core = &mut *self.core();
            let Core { gpu, backend, rung, .. } = core;
            let config = gpu.config().clone();
            let base = GuestVramAddr(config.vram_bytes);
            let table_bytes = settings.paravirtual.as_ref().map_or(0, |pv| pv.table_bytes);
            let SavedVm { vm: _, gpu: registers, spaces, tables, pool: _ } = vm;
            let tables = tables.map(|tables| Tables::restored(tables, base, table_bytes)).transpose()?;
            let made = VGpu::restored(registers, config)?;
            let pv = settings.paravirtual.as_ref().map(|pv| (pv, settings.share.channels));
            *rung = backend.arrive(side, (spaces, tables), departing, pv)?;
            *gpu = made;
            backend.prepare_all()?;
            core.arm();
        }
        {
            let mut state = self.host().lock();
            state.travels(self.vm, false);
            state.hold_still(self.vm, false);
        }
        self.go_on();
        self.host().look_again();
        Ok(())
    }
}
