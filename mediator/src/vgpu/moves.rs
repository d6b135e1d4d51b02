//! Moves pages of guest VRAM to where the guest's aperture tables put them, and back: what the books (`remap`) say.

use super::backend::VmBackend;
use super::remap::{Moves, Remap, Slot, Want, ranges};
use super::spaces::{Owned, Tables};
use crate::host::HostState;
use devmodel::backend::{Aperture, Backend};
use nvspec::addr::{GuestVramAddr, Place, SMALL_PAGE};
use nvspec::fifo::VirtualChannelId;
use nvspec::instance::userd;
use shadow_pt::ApertureTlb;
use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};

/// How long work may go on while pages under it are to move.
// TIMEOUT: twice the watchdog's own limit, which ends what hangs unless the operator has switched it off.
const WORK_LIMIT: Duration = Duration::from_nanos(2 * ::channels::HANG_LIMIT_NS);
/// Time between two looks whether it has ended.
const LOOK: Duration = Duration::from_micros(100);
/// Words of a USERD page that the card writes and a driver reads.
const PROGRESS: [u64; 9] = [
    userd::PUT,
    userd::GET,
    userd::REF,
    userd::PUT_HI,
    userd::TOP_LEVEL_GET,
    userd::TOP_LEVEL_GET_HI,
    userd::GET_HI,
    userd::GP_GET,
    userd::GP_PUT,
];

impl VmBackend {
    /// The guest has flushed the TLB of `directory` (of all, for `None`): mapped apertures that use it show what their
    /// tables say now.
    pub(super) fn refresh_flushed(&mut self, directory: Option<Place>) {
        for aperture in [Aperture::Bar1, Aperture::Bar3] {
            if self.remap.extent(aperture).is_some()
                && (directory.is_none() || self.aperture_directory(aperture) == directory)
            {
                self.refresh(aperture);
            }
        }
    }

    /// Makes a mapped aperture show what its tables say now.
    pub(super) fn refresh(&mut self, aperture: Aperture) {
        let Some((start, pages)) = self.remap.extent(aperture) else { return };
        let changes = self.changes(aperture, start, pages);
        if changes.is_empty() {
            return;
        }
        let concerned = self.remap.concerned(aperture, &changes);
        let stopped = concerned.iter().any(|range| self.spaces.names(*range)) && self.stop_work();
        let moves = self.remap.book(aperture, &changes);
        self.carry_out(&moves);
        let moved = moves.outs.iter().chain(&moves.ins).map(|(page, _)| *page).collect();
        self.relocated(moved);
        if stopped {
            let paused = self.blocked != 0;
            self.with_channels(|channels, card, _, vm| channels.pause(card, vm, ::channels::Pause::Guest, paused));
        }
        self.choose_polled();
    }

    /// Pages of a mapped aperture behind which the guest's tables have something else than before.
    fn changes(&mut self, aperture: Aperture, start: u64, pages: u64) -> Vec<(u32, Want)> {
        let vram_bytes = self.vram_bytes;
        let mut changes = Vec::new();
        self.with_aperture(aperture, |tlb, guest, remap| {
            tlb.survey(start, pages, guest, |page, place| {
                changes.extend(remap.difference(aperture, page, place, vram_bytes));
            });
        });
        changes
    }

    fn carry_out(&mut self, moves: &Moves) {
        let Self { host, vm, spaces, remap, .. } = self;
        let address = |page: u32| GuestVramAddr(u64::from(page) * SMALL_PAGE);
        let mut data = [0; SMALL_PAGE as usize];
        for (page, slot) in &moves.outs {
            remap.read(*slot, 0, &mut data);
            // The card's lock is taken for each page: others wait for it.
            if host.lock().vram.guest_write(*vm, address(*page), &data).is_none() {
                tracing::error!(%vm, page, "a page of guest memory is lost: it has no place on the card");
            }
            spaces.unseen(address(*page), false);
        }
        let blank = [0; SMALL_PAGE as usize];
        moves.blanks.iter().for_each(|slot| remap.write(*slot, 0, &blank));
        for (page, slot) in &moves.ins {
            if host.lock().vram.guest_read(*vm, address(*page), &mut data).is_none() {
                data.fill(0);
            }
            remap.write(*slot, 0, &data);
            spaces.unseen(address(*page), true);
        }
    }

    /// Pages live elsewhere than before: shadows, and the card's TLBs.
    fn relocated(&mut self, pages: BTreeSet<u32>) {
        let Self { host, vm, link, ram, spaces, remap, bus_master, pv, .. } = self;
        let tables = pv.as_deref().map(|pv| &pv.tables);
        let owned = Owned { vm: *vm, ram, link, bus_master: *bus_master, remap, tables };
        if let Err(error) = spaces.relocated(&mut host.lock(), &owned, &ranges(pages)) {
            tracing::error!(%vm, %error, "the card may use guest memory where it does not live any more");
            self.remap.stale = true;
        }
    }

    /// Takes the VM's channels off the engines, if any may be at work, and keeps them off. Says whether it did.
    fn stop_work(&mut self) -> bool {
        let busy: Vec<VirtualChannelId> = {
            let Self { host, spaces, bound, .. } = self;
            let mut guard = host.lock();
            let HostState { vram, channels, .. } = &mut *guard;
            let mut busy = |space| {
                let directory = spaces.directory(space);
                directory.is_some_and(|directory| channels.busy_directory(&mut vram.memory, directory))
            };
            bound.iter().filter(|(_, bound)| busy(bound.space)).map(|(channel, _)| *channel).collect()
        };
        if busy.is_empty() {
            return false;
        }
        self.remap.counts.stops += 1;
        self.pause(true);
        for channel in &busy {
            self.preempt(*channel);
        }
        // Work that cannot be interrupted goes on to its end. Only this VM waits for it; if it hangs, the watchdog ends it.
        let began = Instant::now();
        while let Some(channel) = busy.iter().copied().find(|channel| self.preempting(*channel)) {
            if began.elapsed() < WORK_LIMIT {
                std::thread::sleep(LOOK);
            } else if let Err(error) = self.host.lock().clear_engines(self.vm, channel) {
                tracing::error!(vm = %self.vm, ?channel, %error, "a channel stays on the card while its memory moves");
                break;
            }
        }
        true
    }

    /// The guest's driver is gone: nothing of its memory lives under the apertures, and what did is lost. Its channels
    /// are off the card, but for those that the card does not let go of.
    pub(super) fn forget_homes(&mut self) {
        let pages = self.remap.forget();
        for page in &pages {
            self.spaces.unseen(GuestVramAddr(u64::from(*page) * SMALL_PAGE), false);
        }
        self.polled.clear();
        if !pages.is_empty() && self.spaces.usage().0 != 0 {
            self.relocated(pages);
        }
    }

    /// Finds the channels whose USERD lives under a mapped aperture: their doorbells are no messages.
    pub(super) fn choose_polled(&mut self) {
        let polled: BTreeMap<VirtualChannelId, Slot> = if self.remap.pages() == 0 {
            BTreeMap::new()
        } else {
            self.userd.iter().filter_map(|(page, channel)| Some((*channel, self.remap.home(*page)?))).collect()
        };
        let before = std::mem::replace(&mut self.polled, polled);
        for (channel, slot) in self.polled.clone() {
            if before.get(&channel) != Some(&slot) {
                PROGRESS.iter().for_each(|offset| self.show(channel, slot, *offset));
            }
        }
    }

    /// Looks for doorbells that were no messages, and shows how far the card is.
    pub(super) fn poll(&mut self) {
        for (channel, slot) in self.polled.clone() {
            let mut word = [0; 4];
            self.remap.read(slot, userd::GP_PUT, &mut word);
            let put = u32::from_le_bytes(word);
            if self.rung.insert(channel, put) != Some(put) {
                self.ring(channel, put);
            }
            let shown = PROGRESS.iter().filter(|offset| **offset != userd::GP_PUT);
            shown.for_each(|offset| self.show(channel, slot, *offset));
        }
    }

    /// Copies a word of the channel's USERD to where the guest sees it.
    fn show(&mut self, channel: VirtualChannelId, slot: Slot, offset: u64) {
        let mut word = [0; 4];
        self.userd_read(channel, offset, &mut word);
        self.remap.write(slot, offset, &word);
        if offset == userd::GP_PUT {
            self.rung.insert(channel, u32::from_le_bytes(word));
        }
    }

    fn aperture_directory(&mut self, aperture: Aperture) -> Option<Place> {
        self.with_aperture(aperture, |tlb, guest, _| tlb.directory(guest))
    }

    /// Calls `each` with the translation of an aperture, and the guest's memory.
    pub(super) fn with_aperture<T>(
        &mut self,
        aperture: Aperture,
        each: impl FnOnce(&mut ApertureTlb, &mut Tables<'_, '_, '_>, &Remap) -> T,
    ) -> T {
        let Self { host, vm, link, ram, bar1, bar3, remap, bus_master, pv, .. } = self;
        let tables = pv.as_deref().map(|pv| &pv.tables);
        let owned = Owned { vm: *vm, ram, link, bus_master: *bus_master, remap, tables };
        let mut guard = host.lock();
        let state = RefCell::new(&mut guard.vram);
        let mut guest = Tables { state: &state, owned: &owned };
        let tlb = match aperture {
            Aperture::Bar1 => bar1,
            Aperture::Bar3 => bar3,
        };
        each(tlb, &mut guest, remap)
    }
}
