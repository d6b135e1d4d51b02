//! Requests of others to a card's state.

use super::HostState;
use crate::Feeder;
use crate::work::usage::SchedulerUsage;
use card_memory::holdings::Holdings;
use card_memory::iova::RamShare;
use card_memory::shortage::Shortage;
use card_memory::{Accesses, CardVram, Memory, Plan, Planned, Relocated};
use channels::{Channels, Pause};
use sched::{Engine, Scheduler};
use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;
use vram::{Done, VmId};

/// Memory.
impl HostState {
    /// The card's memory: what VMs have of it, how it is divided, what is lent to it.
    #[must_use]
    pub fn memory(&self) -> &Memory {
        &self.memory
    }

    /// As [`Self::memory`], to change it.
    pub fn memory_mut(&mut self) -> &mut Memory {
        &mut self.memory
    }

    /// Guests' memory wherever it lies.
    #[must_use]
    pub fn vram(&self) -> &CardVram {
        self.memory.vram()
    }

    /// As [`Self::vram`], to change it.
    pub fn vram_mut(&mut self) -> &mut CardVram {
        self.memory.vram_mut()
    }

    /// Memory and physical channels, both to change.
    pub fn parts(&mut self) -> (&mut CardVram, &mut Channels) {
        (self.memory.vram_mut(), self.work.channels_mut())
    }

    /// Sets how much of its RAM a VM may lend, from now on; what is lent stays lent.
    ///
    /// # Errors
    /// When what is guaranteed is not there; nothing has changed then.
    pub fn set_ram(&mut self, vm: VmId, share: RamShare) -> Result<(), Shortage> {
        self.memory.iova_mut().set_share(vm, share).map_err(|most| Shortage::of_ram(share.guarantee, most))
    }

    /// Returns what lies where now.
    #[must_use]
    pub fn holdings(&self) -> Holdings {
        self.memory.holdings(self.now_ns())
    }

    /// Returns what is to move now, what the mediator itself needs first.
    pub(super) fn plan(&mut self) -> Planned {
        let now = self.now_ns();
        let schedule = self.work.schedule();
        let working = schedule.counts().into_keys();
        let done = |vm: VmId| {
            let accounts = Engine::ALL.into_iter().filter_map(|engine| schedule.scheduler().account(vm, engine));
            accounts.fold(Done::default(), |sum, account| Done {
                used_ns: sum.used_ns.saturating_add(account.used),
                ended: sum.ended.saturating_add(account.completed),
            })
        };
        let mut planned = self.memory.plan(now, working, done);
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

    /// Begins a record of how often a VM's memory is accessed. `false` if there is no such VM, or it has one already.
    pub fn start_accesses(&mut self, vm: VmId) -> bool {
        let now = self.now_ns();
        self.memory.start_accesses(now, vm)
    }

    /// Ends it; `None` when none is being made, as when the VM has gone.
    pub fn end_accesses(&mut self, vm: VmId) -> Option<Accesses> {
        let now = self.now_ns();
        self.memory.end_accesses(now, vm)
    }

    /// Ends the record and returns it; `None` when none is being made.
    pub fn end_record(&mut self) -> Option<Vec<u8>> {
        self.work.end_record()
    }
}
