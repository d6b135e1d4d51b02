//! Guest CPU accesses to VRAM through BAR1, BAR3 or PRAMIN.
//!
//! A guest VRAM page that contains the USERD of a bound channel is special, because the card uses the mediator's USERD
//! page instead. Reads of the guest's page return the contents of the mediator's page, and writes forward only the
//! doorbell word. All accesses use [`VmBackend::guest_read`] and [`VmBackend::guest_write`], so aliased mappings are
//! covered.

use super::VmBackend;
use devmodel::backend::{Aperture, Denied, NoMemory, WriteFailure};
use nvspec::addr::{GuestVramAddr, Place};
use nvspec::fifo::VirtualChannelId;
use nvspec::instance::userd;

/// Page size for this module, in bytes.
const PAGE: u64 = 4096;

/// A doorbell that a CPU access has rung.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct RungDoorbell {
    pub(crate) channel: VirtualChannelId,
    pub(crate) gp_put: u32,
}

impl VmBackend {
    /// Reads guest VRAM for the CPU.
    pub(crate) fn guest_read(&mut self, address: GuestVramAddr, data: &mut [u8]) -> Result<(), Denied> {
        self.by_page(address, data.len(), |this, at, range| {
            let data = &mut data[range];
            if let Some(channel) = this.work.userd_of(at.0 / PAGE) {
                this.userd_read(channel, at.0 % PAGE, data);
                return Ok(());
            }
            if let Some(slot) = this.remap().home(at.0 / PAGE) {
                this.remap().read(slot, at.0 % PAGE, data);
                return Ok(());
            }
            this.host.lock().vram_mut().guest_read(this.vm, at, data).ok_or(Denied)
        })
    }

    /// Writes guest VRAM for the CPU. If the write rings a doorbell, the doorbell is submitted later
    /// ([`Self::submit_doorbell`]).
    pub(crate) fn guest_write(&mut self, address: GuestVramAddr, data: &[u8]) -> Result<(), WriteFailure> {
        self.by_page(address, data.len(), |this, at, range| {
            let data = &data[range];
            if let Some(channel) = this.work.userd_of(at.0 / PAGE) {
                this.userd_write(channel, at.0 % PAGE, data);
                return Ok(());
            }
            if let Some(slot) = this.remap().home(at.0 / PAGE) {
                this.remap().write(slot, at.0 % PAGE, data);
                return Ok(());
            }
            let written = this.host.lock().vram_mut().guest_write(this.vm, at, data);
            if written.is_none() {
                return Err(this.unwritten(at, data.len() as u64));
            }
            this.memory.written(at, data.len() as u64);
            Ok(())
        })
    }

    /// Returns the error for a failed write: lack of memory if the range is within the guest's VRAM, or a denied
    /// access.
    fn unwritten(&self, at: GuestVramAddr, len: u64) -> WriteFailure {
        let is_its = at.checked_add(len).is_some_and(|end| end.0 <= self.memory.grants().vram_bytes());
        if is_its && self.host.lock().vram().is_short(self.vm) { NoMemory.into() } else { Denied.into() }
    }

    /// Handles a guest CPU write for which no memory is free. Returns true if the write must be retried, false if it is
    /// lost.
    pub(crate) fn write_waits(&mut self) -> bool {
        let first = self.writes.is_first();
        if self.writes.waits(&self.host.lock(), self.vm) {
            self.counts.writes_waited += u64::from(first);
            return true;
        }
        self.counts.writes_lost += 1;
        if vmm_glue::worth_logging(self.counts.writes_lost) {
            let lost = self.counts.writes_lost;
            tracing::error!(
                vm = %self.vm,
                lost,
                "a VM's CPU writes to VRAM are lost because no memory is available; raise the VM's guarantee, or the \
                 card's host memory"
            );
        }
        false
    }

    /// Returns true if the current write has not waited yet.
    pub(crate) fn is_first_try(&self) -> bool {
        self.writes.is_first()
    }

    /// Ends the wait of a write that was executed or lost.
    pub(crate) fn write_ends(&mut self) {
        self.writes.end();
    }

    /// Reads through an aperture's page tables.
    pub(super) fn through_aperture_read(
        &mut self,
        aperture: Aperture,
        offset: u64,
        data: &mut [u8],
    ) -> Result<(), Denied> {
        // Accesses are aligned and have at most eight bytes, so they never cross a page.
        match self.memory.translate(aperture, offset, false).ok_or(Denied)? {
            Place::Vram(address) => self.guest_read(address, data),
            Place::Ram(address) => self.memory.grants().ram_read(address, data).map_err(|_| Denied),
        }
    }

    /// Writes through an aperture's page tables.
    pub(super) fn through_aperture_write(
        &mut self,
        aperture: Aperture,
        offset: u64,
        data: &[u8],
    ) -> Result<(), WriteFailure> {
        match self.memory.translate(aperture, offset, true).ok_or(Denied)? {
            Place::Vram(address) => self.guest_write(address, data),
            Place::Ram(address) => Ok(self.memory.grants().ram_write(address, data).map_err(|_| Denied)?),
        }
    }

    /// Reads a channel's USERD from the card, one dword at a time. A GP_PUT that waits for memory replaces the card's
    /// value.
    pub(super) fn userd_read(&mut self, channel: VirtualChannelId, offset: u64, data: &mut [u8]) {
        let mut guard = self.host.lock();
        let (vram, channels) = guard.parts();
        let pending = self.pending.gp_put(channel);
        let mut done = 0;
        while done < data.len() {
            let at = offset + done as u64;
            let word = match (at & !3, pending) {
                (userd::GP_PUT, Some(gp_put)) => gp_put,
                (at, _) => channels.userd_read(&mut vram.memory, self.vm, channel, at),
            };
            let lane = (at & 3) as usize;
            let run = (4 - lane).min(data.len() - done);
            data[done..done + run].copy_from_slice(&word.to_le_bytes()[lane..lane + run]);
            done += run;
        }
    }

    /// Forwards only the doorbell, because all other words are written by the card. The doorbell is complete when its
    /// last byte arrives, so several narrow stores ring it only once.
    fn userd_write(&mut self, channel: VirtualChannelId, offset: u64, data: &[u8]) {
        if let Some(gp_put) = self.work.store(channel, offset, data) {
            // A long write may span several channels' USERD pages, so submit the previous channel's doorbell.
            self.submit_doorbell();
            self.doorbell = Some(RungDoorbell { channel, gp_put });
        }
    }

    /// Returns and clears the doorbell that the current access has rung.
    pub(crate) fn take_doorbell(&mut self) -> Option<RungDoorbell> {
        self.doorbell.take()
    }

    /// Submits the doorbell that the current access has rung.
    pub(crate) fn submit_doorbell(&mut self) {
        if let Some(RungDoorbell { channel, gp_put }) = self.take_doorbell() {
            self.ring_shown(channel, gp_put);
        }
    }

    /// Like [`Self::ring`], for a GP_PUT that the guest has written in a message.
    pub(crate) fn ring_shown(&mut self, channel: VirtualChannelId, gp_put: u32) {
        self.ring(channel, gp_put);
        // The mapped page must contain the same value. Otherwise, a poll would mistake the old value for a doorbell.
        if let Some(slot) = self.work.polled_at(channel) {
            self.show(channel, slot, userd::GP_PUT);
        }
    }

    /// Splits `len` bytes at `address` at page boundaries, and calls `each` for each part.
    fn by_page<E: From<Denied>>(
        &mut self,
        address: GuestVramAddr,
        len: usize,
        mut each: impl FnMut(&mut Self, GuestVramAddr, std::ops::Range<usize>) -> Result<(), E>,
    ) -> Result<(), E> {
        let mut done = 0;
        while done < len {
            let at = address.checked_add(done as u64).ok_or(Denied)?;
            let run = ((PAGE - at.0 % PAGE) as usize).min(len - done);
            each(self, at, done..done + run)?;
            done += run;
        }
        Ok(())
    }
}
