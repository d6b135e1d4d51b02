//! Moves guest VRAM pages to and from the slots that the guest's aperture tables require. `remap` records the locations
//! of the pages.

use super::VmBackend;
use crate::memory::{MappedWindow, Moves, PageTarget, Slot, ranges};
use devmodel::backend::{Aperture, Backend};
use nvspec::addr::{GuestVramAddr, Place, SMALL_PAGE};
use nvspec::fifo::VirtualChannelId;
use nvspec::instance::userd;
use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

/// Time for which work may continue while its pages wait to be moved, in ns of the card's clock.
// TIMEOUT: twice the limit of the watchdog, which kills hung work unless the operator has disabled it.
const WORK_LIMIT_NS: u64 = 2 * ::channels::HANG_LIMIT_NS;
/// Additional time for the work to leave after an engine reset was requested, in ns.
const RESET_LIMIT_NS: u64 = 1_000_000_000;
/// Offsets of the USERD words that are copied from the card to the page that the guest sees.
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

/// Interval at which a thread polls for the VM's work to leave the card. The VM's lock is released between polls.
pub(crate) const MOVE_POLL_INTERVAL: Duration = Duration::from_micros(100);

/// A page of zeros.
const BLANK: [u8; SMALL_PAGE as usize] = [0; SMALL_PAGE as usize];

/// State of moves of pages under mapped apertures that wait until the VM's work has left the card, or until the move
/// budget permits them.
#[derive(Debug)]
pub(super) struct Stop {
    /// Channels that had work when the work was stopped.
    busy: Vec<VirtualChannelId>,
    /// Time at which the work was stopped, in ns of the card's clock.
    since_ns: u64,
    /// Windows whose mappings must change.
    due: Vec<MappedWindow>,
    /// Time until which the moves wait because the VM's move budget is used up, in ns of the card's clock.
    until_ns: Option<u64>,
}

impl VmBackend {
    /// Handles a guest's TLB flush of `directory`, or of all directories if `None`. Mapped apertures that use the
    /// directory then expose the pages in its current tables.
    pub(super) fn refresh_flushed(&mut self, directory: Option<Place>) {
        for aperture in [Aperture::Bar1, Aperture::Bar3] {
            if self.remap().extent(aperture.into()).is_some()
                && (directory.is_none() || self.memory.aperture_directory(aperture) == directory)
            {
                self.refresh(aperture.into());
            }
        }
    }

    /// Handles a new PRAMIN base. PRAMIN exposes the pages at the new base once [`Self::look_at_moves`] has moved them.
    pub(super) fn move_window(&mut self, base: Option<GuestVramAddr>) {
        self.memory.place_window(base);
        self.refresh(MappedWindow::Pramin);
    }

    /// Maps the pages at `base` into PRAMIN immediately. The VM must have no work on the card.
    pub(crate) fn show_window(&mut self, base: Option<GuestVramAddr>) {
        self.memory.place_window(base);
        self.refresh_at_once(MappedWindow::Pramin);
    }

    /// Makes PRAMIN expose no pages until it is [placed](Self::show_window) again. The VM must have no work on the
    /// card.
    pub(crate) fn hide_window(&mut self) {
        self.show_window(None);
    }

    /// Makes mapped apertures expose the pages in the VM's tables, after its arrival or a reset. Pages without memory
    /// appear as zeros. The VM must have no work on the card.
    pub(crate) fn show_apertures(&mut self) {
        if self.remap().pages() == 0 {
            self.remap().blank(&self.host);
        }
        MappedWindow::ALL.into_iter().for_each(|showing| self.refresh_at_once(showing));
        self.choose_polled();
    }

    /// Makes a mapped window expose the pages that the guest currently maps there. Defers the update to
    /// [`Self::look_at_moves`] if the VM's work uses pages that must move or the VM's move budget is used up.
    pub(super) fn refresh(&mut self, showing: MappedWindow) {
        let changes = self.memory.changes(showing);
        if changes.is_empty() {
            return;
        }
        let now = self.now_ns();
        let until_ns = self.pace.wait_until(now);
        if self.stop.is_none() && until_ns.is_some() {
            self.remap_mut().counts.waits += 1;
            self.stop = Some(Stop { busy: Vec::new(), since_ns: now, due: Vec::new(), until_ns });
        }
        self.refresh_changes(showing, &changes);
    }

    /// Same as [`Self::refresh`], but ignores the budget. Used for changes that the guest did not request.
    fn refresh_at_once(&mut self, showing: MappedWindow) {
        if let Some(Stop { until_ns, .. }) = &mut self.stop {
            *until_ns = until_ns.map(|_| 0);
        }
        self.look_at_moves();
        let changes = self.memory.changes(showing);
        if !changes.is_empty() {
            self.refresh_changes(showing, &changes);
        }
    }

    fn refresh_changes(&mut self, showing: MappedWindow, changes: &[(u32, PageTarget)]) {
        if self.stop.is_none() {
            let concerned = self.remap().concerned(showing, changes);
            if concerned.iter().any(|range| self.memory.names(*range)) {
                self.stop_work();
            }
        }
        match &mut self.stop {
            Some(stop) => stop.due.extend((!stop.due.contains(&showing)).then_some(showing)),
            None => self.show_changes(showing, changes),
        }
        self.look_at_moves();
    }

    /// Returns true if moves of pages wait for work to leave the card.
    pub(crate) fn moves_wait(&self) -> bool {
        self.stop.is_some()
    }

    /// Moves pages if the move budget permits it and the VM's work has left the card or exceeded its time limits.
    /// Returns true if pages still wait. In this case, the caller must release the VM's lock, and call this function
    /// again after [`MOVE_POLL_INTERVAL`].
    pub(crate) fn look_at_moves(&mut self) -> bool {
        let Some(Stop { busy, since_ns, until_ns, .. }) = &self.stop else { return false };
        let (busy, since_ns) = (busy.clone(), *since_ns);
        if let Some(until_ns) = *until_ns {
            return self.now_ns() < until_ns || self.take_up_due();
        }
        // Work that cannot be preempted runs to completion, and the watchdog kills it if it hangs.
        if let Some(channel) = busy.into_iter().find(|channel| self.preempting(*channel)) {
            let waited_ns = self.now_ns().saturating_sub(since_ns);
            if waited_ns < WORK_LIMIT_NS {
                return true;
            }
            if waited_ns < WORK_LIMIT_NS + RESET_LIMIT_NS {
                // Reset the engine that runs the channel.
                self.host.lock().clear_engines(self.vm, channel);
                return true;
            }
            tracing::error!(vm = %self.vm, ?channel, "a channel does not leave the card before its memory is moved");
        }
        let due = self.stop.as_mut().map(|stop| std::mem::take(&mut stop.due)).unwrap_or_default();
        for showing in due {
            let changes = self.memory.changes(showing);
            self.show_changes(showing, &changes);
        }
        self.stop = None;
        // Resume the channels that were paused only for the moves.
        self.pause(self.work.blocks());
        false
    }

    /// Starts moves that were deferred because the VM's move budget was used up. Returns true if they must wait for
    /// work to leave the card.
    fn take_up_due(&mut self) -> bool {
        for showing in self.stop.take().map(|stop| stop.due).unwrap_or_default() {
            let changes = self.memory.changes(showing);
            if !changes.is_empty() {
                self.refresh_changes(showing, &changes);
            }
        }
        if self.stop.is_none() {
            self.pause(self.work.blocks());
        }
        self.stop.is_some()
    }

    fn show_changes(&mut self, showing: MappedWindow, changes: &[(u32, PageTarget)]) {
        let moves = self.remap_mut().book(showing, changes);
        let now = self.now_ns();
        self.pace.charge(now, (moves.outs.len() + moves.ins.len()) as u64);
        self.look_at_strays(&moves.strays);
        self.carry_out(&moves);
        let moved = moves.outs.iter().chain(&moves.ins).map(|(page, _)| *page).collect();
        self.relocated(moved);
        self.choose_polled();
    }

    /// Counts pages that the guest has written while PRAMIN did not expose their VRAM.
    fn look_at_strays(&mut self, strays: &[Slot]) {
        let mut data = BLANK;
        for slot in strays {
            self.remap().read(*slot, 0, &mut data);
            if data != BLANK {
                self.remap_mut().count_alias();
            }
        }
    }

    fn carry_out(&mut self, moves: &Moves) {
        let Self { host, vm, memory, .. } = self;
        let address = |page: u32| GuestVramAddr(u64::from(page) * SMALL_PAGE);
        let mut data = [0; SMALL_PAGE as usize];
        // An unplaced page reads as zeros until its chunk is placed and written. Reading a word from a real card takes
        // a round trip, so release the card's lock to waiting threads after each page.
        let mut state = host.lock();
        let mut zeros = BTreeSet::new();
        for (page, _) in moves.outs.iter().chain(&moves.ins) {
            if state.vram().chunks.is_placed(*vm, GuestVramAddr(address(*page).0)) == Some(false) {
                zeros.insert(*page);
            }
            state.give_way();
        }
        if let Err(error) = state.vram().memory.barrier() {
            tracing::error!(%vm, %error, "the last writes of work may be lost");
        }
        for (page, slot) in &moves.outs {
            state.give_way();
            memory.grants().remap().read(*slot, 0, &mut data);
            memory.unseen(address(*page), false);
            if data == BLANK && zeros.contains(page) {
                continue;
            }
            zeros.remove(page);
            if state.vram_mut().guest_write(*vm, address(*page), &data).is_none() {
                tracing::error!(%vm, page, "a page of guest memory is lost because no card memory is available for it");
            }
        }
        drop(state);
        moves.blanks.iter().for_each(|slot| memory.grants().remap().write(*slot, 0, &BLANK));
        let mut state = host.lock();
        for (page, slot) in &moves.ins {
            state.give_way();
            memory.unseen(address(*page), true);
            if zeros.contains(page) {
                memory.grants().remap().write(*slot, 0, &BLANK);
                continue;
            }
            if state.vram_mut().guest_read(*vm, address(*page), &mut data).is_none() {
                data.fill(0);
            }
            memory.grants().remap().write(*slot, 0, &data);
        }
    }

    /// Updates the shadows and the card's TLBs after pages have moved.
    fn relocated(&mut self, pages: BTreeSet<u32>) {
        let host = Arc::clone(&self.host);
        let moved = self.memory.relocated(&mut host.lock(), &ranges(pages));
        if let Err(error) = moved {
            tracing::error!(vm = %self.vm, %error, "the card may still use guest memory at its old location");
            self.remap_mut().stale = true;
        }
    }

    /// Removes the VM's channels from the engines if any of them may be running, and keeps them off the engines.
    fn stop_work(&mut self) {
        let busy: Vec<VirtualChannelId> = {
            let mut guard = self.host.lock();
            let (vram, channels) = guard.parts();
            let mut busy = |space| {
                let directory = self.memory.directory(space);
                directory.is_some_and(|directory| channels.busy_directory(&mut vram.memory, directory))
            };
            self.work.all_bound().filter(|(_, bound)| busy(bound.space)).map(|(channel, _)| channel).collect()
        };
        if busy.is_empty() {
            return;
        }
        self.remap_mut().counts.stops += 1;
        self.pause(true);
        for channel in &busy {
            self.preempt(*channel);
        }
        self.stop = Some(Stop { busy, since_ns: self.now_ns(), due: Vec::new(), until_ns: None });
    }

    /// Removes the records of pages under the apertures after the guest's driver state was removed. The pages' contents
    /// are lost. The VM's channels have left the card, except for those that the card does not release.
    pub(super) fn forget_homes(&mut self) {
        self.stop = None;
        let pages = self.remap_mut().forget();
        for page in &pages {
            self.memory.unseen(GuestVramAddr(u64::from(*page) * SMALL_PAGE), false);
        }
        self.work.choose_polled(|_| None);
        if !pages.is_empty() && self.memory.usage().0 != 0 {
            self.relocated(pages);
        }
    }

    /// Selects the channels to poll: those whose USERD is under a mapped aperture, where doorbells cause no messages.
    pub(super) fn choose_polled(&mut self) {
        let remap = self.memory.grants().remap();
        for (channel, slot) in self.work.choose_polled(|page| remap.home(page)) {
            PROGRESS.iter().for_each(|offset| self.show(channel, slot, *offset));
        }
    }

    /// Same as [`Self::choose_polled`] for a VM that was taken over. A GP_PUT in such a USERD counts as new if it
    /// differs from the card's.
    pub(crate) fn poll_again(&mut self) {
        let remap = self.memory.grants().remap();
        for (channel, _) in self.work.choose_polled(|page| remap.home(page)) {
            let mut word = [0; 4];
            self.userd_read(channel, userd::GP_PUT, &mut word);
            self.work.see_put(channel, u32::from_le_bytes(word));
        }
    }

    /// Polls for doorbells that cause no messages, and updates the progress that the guest sees. Returns true if a
    /// doorbell was rung.
    pub(crate) fn poll(&mut self) -> bool {
        let mut found = false;
        for (channel, slot) in self.work.polled().collect::<Vec<_>>() {
            let mut word = [0; 4];
            self.remap().read(slot, userd::GP_PUT, &mut word);
            let put = u32::from_le_bytes(word);
            if self.work.see_put(channel, put) {
                found = true;
                self.ring(channel, put);
            }
            let shown = PROGRESS.iter().filter(|offset| **offset != userd::GP_PUT);
            shown.for_each(|offset| self.show(channel, slot, *offset));
        }
        found
    }

    /// Copies a word of a channel's USERD to the page that the guest sees.
    pub(super) fn show(&mut self, channel: VirtualChannelId, slot: Slot, offset: u64) {
        let mut word = [0; 4];
        self.userd_read(channel, offset, &mut word);
        self.remap().write(slot, offset, &word);
        if offset == userd::GP_PUT {
            self.work.see_put(channel, u32::from_le_bytes(word));
        }
    }
}
