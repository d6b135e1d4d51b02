//! Methods for other modules that query or change a card's state.

use super::CardState;
use crate::work::usage::SchedulerUsage;
use card_memory::holdings::Holdings;
use card_memory::iova::RamShare;
use card_memory::shortage::Shortage;
use card_memory::{Accesses, CardVram, Memory, Plan, Planned, Relocated};
use channels::{Channels, Pause};
use sched::trace::MemoryMove;
use sched::{Event, Quarantine, Scheduler};
use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;
use tenancy::{Changes, Standing};
use vram::TenantId;

/// Methods for the card's memory.
impl CardState {
    /// Returns the state of the card's memory: the VMs' shares, the division, and RAM lent to the card.
    #[must_use]
    pub fn memory(&self) -> &Memory {
        &self.memory
    }

    /// Like [`Self::memory`], but mutable.
    pub fn memory_mut(&mut self) -> &mut Memory {
        &mut self.memory
    }

    /// Returns the guests' memory, on the card and on the host.
    #[must_use]
    pub fn vram(&self) -> &CardVram {
        self.memory.vram()
    }

    /// Like [`Self::vram`], but mutable.
    pub fn vram_mut(&mut self) -> &mut CardVram {
        self.memory.vram_mut()
    }

    /// Returns mutable references to the memory and the physical channels.
    pub fn parts(&mut self) -> (&mut CardVram, &mut Channels) {
        (self.memory.vram_mut(), self.work.channels_mut())
    }

    /// Sets the amount of RAM that a VM may lend from now on. RAM that was already lent stays lent.
    ///
    /// # Errors
    /// Returns an error if the guaranteed part is not available. In this case, nothing is changed.
    pub fn set_ram(&mut self, vm: TenantId, share: RamShare) -> Result<(), Shortage> {
        self.memory.iova_mut().set_share(vm, share).map_err(|most| Shortage::of_ram(share.guarantee, most))
    }

    /// Returns the current use of the memory.
    #[must_use]
    pub fn holdings(&self) -> Holdings {
        self.memory.holdings(self.now_ns())
    }

    /// Returns the moves that are due, starting with those for the mediator's own structures.
    pub(super) fn plan(&mut self) -> Planned {
        let now = self.now_ns();
        let schedule = self.work.schedule();
        let planned = self.memory.plan(now, schedule.counts().into_keys(), schedule.scheduler());
        self.carry_out_changes();
        planned
    }

    /// Returns the moves for the mediator's own structures, if any.
    pub(super) fn plan_own(&mut self) -> Plan {
        let now = self.now_ns();
        self.memory.plan_own(now)
    }

    /// Returns the moves that free enough card chunks to guarantee `chunks` more.
    pub(super) fn plan_promise(&mut self, chunks: u32) -> Plan {
        let now = self.now_ns();
        self.memory.plan_promise(now, chunks)
    }

    /// Returns random moves for tests, if due.
    pub(super) fn inject_random_moves(&mut self) -> Plan {
        self.memory.inject_random_moves()
    }

    /// Returns the time until more moves may be due unless an event occurs earlier.
    pub(super) fn next_plan(&self) -> Option<Duration> {
        self.memory.next_plan()
    }

    /// Records that the mover has finished a round. `waiting` contains the VMs that waited for memory throughout the
    /// round, and `served` those for which memory was moved. Returns the VMs that wait now.
    pub(super) fn looked(&mut self, waiting: &BTreeSet<TenantId>, served: &BTreeSet<TenantId>) -> BTreeSet<TenantId> {
        let now = self.now_ns();
        self.memory.looked(now, waiting, served)
    }

    /// Ends a planning round. Starts the quantum for which memory was moved, unless memory is still moving.
    pub(super) fn round_ended(&mut self) {
        let now = self.now_ns();
        self.memory.round_ended(now);
        self.carry_out_changes();
    }

    /// Records the moves of a VM's memory.
    pub(super) fn has_moved(&mut self, vm: TenantId, done: &Relocated) {
        let now = self.now_ns();
        self.memory.has_moved(now, vm, done);
    }

    /// Stops VMs during another VM's memory quantum, or resumes them. The holder of the quantum competes for time with
    /// the combined settings of the VMs that take turns.
    fn carry_out_changes(&mut self) {
        let Changes { holds, competitors } = self.memory.take_changes(self.work.schedule().scheduler());
        for (vm, waits) in holds {
            self.work.channels_mut().pause(self.memory.card_mut(), vm, Pause::Turn, waits);
            self.work.channels_mut().vacate(self.memory.card_mut(), vm);
            self.feeder().look_at_waits(Some(vm));
        }
        self.feeder().feed(competitors.into_iter().map(|(vgpu, params)| Event::Competes { vgpu, params }));
    }
}

/// Methods for the card's work.
impl CardState {
    /// Returns the physical channels.
    #[must_use]
    pub fn channels(&self) -> &Channels {
        self.work.channels()
    }

    /// Like [`Self::channels`], but mutable.
    pub fn channels_mut(&mut self) -> &mut Channels {
        self.work.channels_mut()
    }

    /// Returns the scheduler.
    #[must_use]
    pub fn scheduler(&self) -> &Scheduler {
        self.work.schedule().scheduler()
    }

    /// Records that a VM has submitted work.
    pub fn worked(&mut self, vm: TenantId) {
        let now = self.now_ns();
        self.memory.worked(now, vm);
    }

    /// Returns the time since the card was taken over, on the host's clock, in ns.
    #[must_use]
    pub fn now_ns(&self) -> u64 {
        self.clock.host_ns()
    }

    /// Measures the offset of the card's clock from the host's clock.
    pub(super) fn set_clock(&mut self) {
        self.clock.set(&**self.memory.vram().memory.card());
    }

    /// Schedules [`GuestEvent::Alarm`](crate::GuestEvent::Alarm) for a VM in `in_ns` ns or slightly later. `None`
    /// cancels the alarm.
    pub fn arm_guest_alarm(&mut self, vm: TenantId, in_ns: Option<u64>) {
        let now = self.now_ns();
        self.guest_alarms.arm(vm, now, in_ns);
    }

    /// Returns the number of interrupts that a VM has caused in addition to those for completions, and the number of
    /// pauses due to them.
    #[must_use]
    pub fn noise_of(&self, vm: TenantId) -> (u64, u64) {
        self.work.noise().interrupts_and_pauses(vm)
    }

    /// Returns a VM's share of the card's time while all VMs have work, in millionths.
    #[must_use]
    pub fn time_share(&self, vm: TenantId) -> u64 {
        self.work.time_share(vm)
    }

    /// Returns the scheduler's usage data, including the use in the last `recent_ns` nanoseconds.
    #[must_use]
    pub fn scheduler_usage(&self, recent_ns: u64) -> SchedulerUsage {
        let mut usage = self.work.usage(self.card_time(), recent_ns);
        let (short, now) = (self.memory.vram().waiting(), self.now_ns());
        for (vm, one) in &mut usage.time.tenants {
            let has_work = one.has_work;
            let standing = Standing {
                is_quarantined: one.quarantine != Quarantine::Free,
                has_work,
                runs: one.in_flight > 0,
                lacks_memory: has_work && short.contains(vm),
                ..Standing::default()
            };
            one.wait = self.memory.divider().machine().wait_reason(*vm, now, &standing);
        }
        usage
    }

    /// Starts to record the scheduler's events and decisions, up to `limit` bytes. `names` contains the VMs' names.
    /// Returns `false` if a recording is already running or the scheduler's current state does not fit.
    pub fn start_record(&mut self, names: &BTreeMap<TenantId, String>, limit: usize) -> bool {
        let at = self.card_time();
        self.work.start_record(at, names, limit)
    }

    /// Adds a memory move of a VM to the recording of the scheduler.
    pub(super) fn note_move(&mut self, moved: MemoryMove) {
        self.work.note_move(moved);
    }

    /// Starts counting the accesses to a VM's memory. Returns `false` if the VM does not exist or its accesses are
    /// already being counted.
    pub fn start_accesses(&mut self, vm: TenantId) -> bool {
        let now = self.now_ns();
        self.memory.start_accesses(now, vm)
    }

    /// Stops counting the accesses to a VM's memory. Returns the counts, or `None` if no count is in progress, for
    /// example because the VM was removed.
    pub fn end_accesses(&mut self, vm: TenantId) -> Option<Accesses> {
        let now = self.now_ns();
        self.memory.end_accesses(now, vm)
    }

    /// Ends the recording of the scheduler and returns it, or `None` if none is running.
    pub fn end_record(&mut self) -> Option<Vec<u8>> {
        self.work.end_record()
    }
}
