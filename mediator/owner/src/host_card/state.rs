//! Requests of others to a card's state.

use super::HostState;
use crate::Feeder;
use crate::work::usage::SchedulerUsage;
use card_memory::balance::{Divider, Division, Hint};
use card_memory::holdings::Holdings;
use card_memory::iova::{IovaSpace, RamShare};
use card_memory::segments::{Party, Wanted};
use card_memory::shortage::Shortage;
use card_memory::{CardVram, Moved, Plan, Planned, Relocated};
use channels::{Channels, Pause};
use nvspec::addr::VramAddr;
use pv::Control;
use pv::abi::Status;
use sched::Scheduler;
use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;
use vram::balance::PinError;
use vram::{GuestAddr, VmId};

/// Memory.
impl HostState {
    /// Guests' memory wherever it lies.
    #[must_use]
    pub fn vram(&self) -> &CardVram {
        self.memory.vram()
    }

    /// As [`Self::vram`], to change it.
    pub fn vram_mut(&mut self) -> &mut CardVram {
        self.memory.vram_mut()
    }

    /// I/O virtual addresses.
    #[must_use]
    pub fn iova(&self) -> &IovaSpace {
        self.memory.iova()
    }

    /// As [`Self::iova`], to change them.
    pub fn iova_mut(&mut self) -> &mut IovaSpace {
        self.memory.iova_mut()
    }

    /// Memory and physical channels, both to change.
    pub fn parts(&mut self) -> (&mut CardVram, &mut Channels) {
        (self.memory.vram_mut(), self.work.channels_mut())
    }

    /// Returns the divider of the card's memory.
    #[must_use]
    pub fn divider(&self) -> &Divider {
        self.memory.divider()
    }

    /// Sets how much of its RAM a VM may lend, from now on; what is lent stays lent.
    ///
    /// # Errors
    /// When what is guaranteed is not there; nothing has changed then.
    pub fn set_ram(&mut self, vm: VmId, share: RamShare) -> Result<(), Shortage> {
        self.iova_mut().set_share(vm, share).map_err(|most| Shortage::of_ram(share.guarantee, most))
    }

    /// Returns what lies where now.
    #[must_use]
    pub fn holdings(&self) -> Holdings {
        self.memory.holdings(self.now_ns())
    }

    /// Returns what is to move now, what the mediator itself needs first.
    pub(super) fn plan(&mut self) -> Planned {
        let now = self.now_ns();
        let working = self.work.schedule().counts().into_keys();
        let mut planned = self.memory.plan(now, working);
        self.hold(std::mem::take(&mut planned.holds));
        planned
    }

    /// Returns what is to move for the mediator's own structures, if anything.
    pub(super) fn plan_own(&mut self) -> Plan {
        let now = self.now_ns();
        self.memory.plan_own(now)
    }

    /// Returns what is to move so that `chunks` more of the card can be promised.
    pub(super) fn plan_promise(&mut self, chunks: u32) -> Plan {
        let now = self.now_ns();
        self.memory.plan_promise(now, chunks)
    }

    /// Returns what is to move at random, if it is time to.
    pub(super) fn stir(&mut self) -> Plan {
        self.memory.stir()
    }

    /// Returns when there may be more to move, if nothing happens before.
    pub(super) fn next_plan(&self) -> Option<Duration> {
        self.memory.next_plan()
    }

    /// The mover has looked: `waiting` waited for it all the while, and something was moved for `served`. Returns who
    /// waits now.
    pub(super) fn looked(&mut self, waiting: &BTreeSet<VmId>, served: &BTreeSet<VmId>) -> BTreeSet<VmId> {
        let now = self.now_ns();
        self.memory.looked(now, waiting, served)
    }

    /// Nothing moves any more for now: a turn that memory was moved for begins.
    pub(super) fn begin_turn(&mut self) {
        let now = self.now_ns();
        let holds = self.memory.begin_turn(now);
        self.hold(holds);
    }

    /// Memory was moved.
    pub(super) fn has_moved(&mut self, vm: VmId, done: &Relocated) {
        let now = self.now_ns();
        self.memory.has_moved(now, vm, done);
    }

    /// Keeps VMs from running while another one has its turn, or lets them run again.
    fn hold(&mut self, holds: Vec<(VmId, bool)>) {
        for (vm, waits) in holds {
            self.work.channels_mut().pause(self.memory.card_mut(), vm, Pause::Turn, waits);
            self.work.channels_mut().vacate(self.memory.card_mut(), vm);
            self.look_at_waits(Some(vm));
        }
    }

    /// Changes how the card's memory is divided, from now on.
    ///
    /// # Errors
    /// When the reserve cannot be had; nothing has changed then.
    pub fn set_division(&mut self, division: &Division) -> Result<(), vram::Error> {
        self.memory.set_division(division)
    }

    /// Changes what a VM may have, from now on. What it has beyond that goes; nothing of it is lost.
    ///
    /// # Errors
    /// When that cannot be promised; nothing has changed then.
    pub fn set_limits(&mut self, vm: VmId, limits: vram::Limits) -> Result<(), vram::Error> {
        self.memory.set_limits(vm, limits)
    }

    /// Changes what is known of ranges of a VM's memory.
    ///
    /// # Errors
    /// When the range is not the VM's, or more would be pinned than is guaranteed.
    pub fn hint(&mut self, vm: VmId, address: GuestAddr, len: u64, hint: Hint) -> Result<(), PinError> {
        self.memory.hint(vm, address, len, hint)
    }

    /// Chunks of a VM that lie on the card (or do not) and could move, in a range of its VRAM, in ascending order.
    #[must_use]
    pub fn movable(&self, vm: VmId, address: GuestAddr, len: u64, on_card: bool) -> Vec<u32> {
        self.memory.movable(vm, address, len, on_card)
    }

    /// Returns what was moved of a VM's memory, if anything was.
    #[must_use]
    pub fn moved(&self, vm: VmId) -> Option<&Moved> {
        self.memory.moved(vm)
    }

    /// Finds or makes a segment; its id.
    ///
    /// # Errors
    /// See [`Status`].
    pub fn share_get(&mut self, party: &Party, wanted: Wanted) -> Result<u32, Status> {
        self.memory.share_get(party, wanted)
    }

    /// Zeroes a piece of a segment that is new. Whether there may be more: the card's lock is held for one piece only.
    ///
    /// # Errors
    /// See [`Status`].
    pub fn share_zero(&mut self, party: &Party, id: u32) -> Result<bool, Status> {
        self.memory.share_zero(party, id)
    }

    /// One more address space of `party`'s maps the segment, which is zeroed: where it lies, and how many bytes it has.
    ///
    /// # Errors
    /// See [`Status`].
    pub fn share_attach(&mut self, party: &Party, id: u32, write: bool) -> Result<(VramAddr, u64), Status> {
        self.memory.share_attach(party, id, write)
    }

    /// One address space of the VM less maps the segment; the card's TLBs have forgotten it.
    pub fn share_detach(&mut self, vm: VmId, id: u32) {
        self.memory.share_detach(vm, id);
    }

    /// Asks about a segment, or changes it.
    ///
    /// # Errors
    /// See [`Status`].
    pub fn share_control(&mut self, party: &Party, id: u32, control: Control) -> Result<u64, Status> {
        self.memory.share_control(party, id, control)
    }

    /// No key finds a VM's segments any more. Those that others have attached stay until these let go.
    pub fn forget_segments(&mut self, vm: VmId) {
        self.memory.forget_segments(vm);
    }
}

/// Work.
impl HostState {
    /// Physical channels.
    #[must_use]
    pub fn channels(&self) -> &Channels {
        self.work.channels()
    }

    /// As [`Self::channels`], to change them.
    pub fn channels_mut(&mut self) -> &mut Channels {
        self.work.channels_mut()
    }

    /// The scheduler, to look at.
    #[must_use]
    pub fn scheduler(&self) -> &Scheduler {
        self.work.schedule().scheduler()
    }

    /// A VM has submitted work.
    pub fn worked(&mut self, vm: VmId) {
        let now = self.now_ns();
        self.memory.worked(now, vm);
    }

    /// Nanoseconds since the card was taken over, by the host's clock.
    #[must_use]
    pub fn now_ns(&self) -> u64 {
        self.clock.host_ns()
    }

    /// Looks how far the card's clock is ahead of the host's.
    pub(super) fn set_clock(&mut self) {
        self.clock.set(&**self.memory.vram().memory.card());
    }

    /// Has [`GuestEvent::Alarm`](crate::GuestEvent::Alarm) delivered to a VM in `in_ns` ns, or a little later; not any more,
    /// for `None`.
    pub fn arm_guest_alarm(&mut self, vm: VmId, in_ns: Option<u64>) {
        let now = self.now_ns();
        self.guest_alarms.arm(vm, now, in_ns);
    }

    /// Interrupts that a VM has caused beyond those that tell of the end of its work, and how often its channels were paused
    /// since there were too many.
    #[must_use]
    pub fn noise_of(&self, vm: VmId) -> (u64, u64) {
        self.work.noise().of(vm)
    }

    /// The part of the card's time that a VM is entitled to when all others want theirs, in millionths.
    #[must_use]
    pub fn time_share(&self, vm: VmId) -> u64 {
        self.work.time_share(vm)
    }

    /// Returns what the scheduler knows, with uses of the last `recent_ns` nanoseconds.
    #[must_use]
    pub fn scheduler_usage(&self, recent_ns: u64) -> SchedulerUsage {
        self.work.usage(self.card_time(), recent_ns)
    }

    /// Begins a record of the scheduler of at most `limit` bytes; `names` are those of the VMs. `false` when one is being
    /// made already, or when not even the scheduler as it is now fits.
    pub fn start_record(&mut self, names: &BTreeMap<VmId, String>, limit: usize) -> bool {
        let at = self.card_time();
        self.work.start_record(at, names, limit)
    }

    /// Ends the record and returns it; `None` when none is being made.
    pub fn end_record(&mut self) -> Option<Vec<u8>> {
        self.work.end_record()
    }
}
