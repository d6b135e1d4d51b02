//! Division of a card's memory among VMs: collects the inputs of the balancer and the thrash detector, and returns the
//! moves that they request.

use super::chaos::{Chaos, Dice};
use super::moved::{Moved, Plan, Planned, Relocated};
use super::relocation::{self, Machine};
use super::{Memory, accesses};
use card::AccessCounts;
use sched::Scheduler;
use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;
use tenancy::{Changes, Demand, Report, Residency, Traffic};
use vram::balance::{By, Config, PinError, Request};
use vram::victim::VictimPolicy;
use vram::{GuestVramAddr, Lookup, Place, QuantaConfig, Step, TenantId};

/// Settings for dividing a card's memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Division {
    /// Settings of the balancer.
    pub balance: Config,
    /// Settings of quanta.
    pub quanta: QuantaConfig,
    /// Number of card chunks reserved for immediate evictions.
    pub reserve: u32,
    /// Settings of random moves, for tests.
    pub chaos: Chaos,
}

/// A hint about a range of a VM's memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Hint {
    /// Pins the range to the card, or unpins it.
    Pinned(bool),
    /// Sets the eviction priority of the range. Memory with the lowest priority is evicted first.
    Priority(u8),
    /// Sets the relative number of accesses to the range, compared with the rest of the VM's memory.
    Accesses(u32),
}

/// Divides a card's memory among VMs.
pub struct Divider {
    /// State machine that decides which VMs' memory is on the card, and controls its moves.
    pub(super) machine: Machine,
    /// Operator's settings for the division of memory.
    division: Division,
    /// Bus traffic counted by the card.
    bus: Bus,
}

/// Bus traffic, as counted by the card.
#[derive(Clone, Copy, Debug, Default)]
struct Bus {
    /// Time at which the counts were last polled, in ns.
    since: Option<u64>,
    /// Number of bytes that the mediator itself has copied since then. The card's counts include them.
    copied: u64,
}

impl Divider {
    /// Creates a divider without VMs.
    pub fn new(division: &Division, chunk_bytes: u64) -> Self {
        Self::restored(division, Residency::new(division.balance, division.quanta), chunk_bytes)
    }

    /// Restores a divider with new settings.
    pub fn restored(division: &Division, residency: Residency, chunk_bytes: u64) -> Self {
        Self { machine: relocation::machine(residency, chunk_bytes), division: *division, bus: Bus::default() }
    }

    /// Returns the settings for dividing the memory.
    #[must_use]
    pub fn division(&self) -> Division {
        self.division
    }

    /// Returns the state machine for the card's memory.
    #[must_use]
    pub fn machine(&self) -> &Machine {
        &self.machine
    }

    /// Returns the part of the state machine that decides which VMs' memory is on the card.
    #[must_use]
    pub fn residency(&self) -> &Residency {
        &self.machine.residency
    }
}

impl Memory {
    /// Returns the moves that are due, beginning with those for the mediator itself. `working` yields the VMs with
    /// incomplete work, queued or not.
    pub fn plan(&mut self, now: u64, working: impl Iterator<Item = TenantId>, scheduler: &Scheduler) -> Planned {
        let working = working.chain(self.vram.waiting()).collect();
        let (counts, traffic) = self.take_counts(now);
        let report = Report { working, traffic, scheduler, counts_work: true };
        self.divider.machine.begin_round(&self.vram.chunks, now, &report);
        self.tell_balancer(counts.as_ref());
        let mut served = BTreeSet::new();
        let mut steps = self.own_steps(now);
        if !steps.is_empty() {
            served.extend(self.vram.wants.of_tables());
        }
        let Self { vram, divider, promising, .. } = self;
        // A chunk that was denied card memory counts as a request, because another VM may have more than its share.
        let mut unmet: BTreeMap<TenantId, u32> = BTreeMap::new();
        let bytes = vram.chunks.chunk_bytes();
        for (vm, index) in std::mem::take(&mut vram.unmet) {
            let address = GuestVramAddr(index.saturating_mul(bytes));
            let _ = divider.machine.residency.balancer_mut().wanted(&vram.chunks, vm, address);
            *unmet.entry(vm).or_default() += 1;
        }
        let only_requests = !steps.is_empty() || *promising != 0;
        let demand = Demand { unmet, guarantee: None, only_requests, is_undisturbed: false };
        let planned = divider.machine.residency.plan(&vram.chunks, now, demand);
        steps.extend(planned.steps);
        served.extend(planned.served);
        Planned { plan: by_vm(self.possible(steps, now)), served }
    }

    /// Returns the moves for the mediator's own structures, if any.
    pub fn plan_own(&mut self, now: u64) -> Plan {
        let steps = self.own_steps(now);
        by_vm(self.possible(steps, now))
    }

    /// Removes the steps of VMs that are moving between cards, and of VMs whose last move failed recently. Retrying the
    /// latter each time would delay the moves of all other VMs.
    fn possible(&self, mut steps: Vec<Step>, now: u64) -> Vec<Step> {
        steps.retain(|step| {
            !self.travelling.contains(&step.vm) && !self.divider.machine.relocations.is_left_alone(step.vm, now)
        });
        steps
    }

    /// Returns moves that free chunks for the mediator, and evictions that return borrowed chunks to the reserve.
    fn own_steps(&mut self, now: u64) -> Vec<Step> {
        let Self { vram, divider, .. } = self;
        if !vram.has_host_memory() {
            return Vec::new();
        }
        vram.chunks.repay();
        vram.chunks.claim(vram.wants.chunks());
        if !vram.is_tight() {
            return Vec::new();
        }
        let request = Request { by: By::Mediator, chunks: vram.own_chunks() };
        divider.machine.residency.balancer_mut().plan(&vram.chunks, now, Some(request))
    }

    /// Records that the mover has finished a scan. `waiting` contains the VMs that waited during the whole scan, and
    /// `served` those for which it moved memory. Returns the VMs that are currently waiting.
    pub fn looked(
        &mut self,
        now: u64,
        waiting: &BTreeSet<TenantId>,
        served: &BTreeSet<TenantId>,
    ) -> BTreeSet<TenantId> {
        let wait = self.vram.waiting();
        for vm in wait.intersection(waiting) {
            self.vram.wants.looked(*vm, served.contains(vm), now);
        }
        wait
    }

    /// Ends a round of plans. Starts the quantum for which memory was moved, unless memory is still moving.
    pub fn round_ended(&mut self, now: u64) {
        let Self { vram, divider, .. } = self;
        divider.machine.round_ended(&vram.chunks, now, None);
    }

    /// Returns the consequences of memory quanta that the VMs' channels and the scheduler do not reflect yet.
    pub fn take_changes(&mut self, scheduler: &Scheduler) -> Changes {
        self.divider.machine.take_changes(scheduler)
    }

    /// Returns the moves that free enough card chunks to guarantee `chunks` more chunks.
    pub fn plan_promise(&mut self, now: u64, chunks: u32) -> Plan {
        let Self { vram, divider, .. } = self;
        // Chunks that the mediator claims count as available for a guarantee. Plan for more chunks, so that the
        // mediator keeps them.
        let chunks = chunks.saturating_add(vram.chunks.uncommitted());
        let steps = divider.machine.residency.plan_guarantee(&vram.chunks, now, chunks);
        by_vm(self.possible(steps, now))
    }

    /// Returns the time until the next moves may be due, unless an event makes moves due earlier.
    pub fn next_plan(&self) -> Option<Duration> {
        self.divider.machine.next_round_ns(&self.vram.chunks).map(Duration::from_nanos)
    }

    /// Changes the settings for dividing the card's memory.
    ///
    /// # Errors
    /// Returns an error if the reserve is not available. In this case, nothing is changed.
    pub fn set_division(&mut self, division: &Division) -> Result<(), vram::Error> {
        self.vram.chunks.set_reserve(division.reserve)?;
        self.vram.watches = division.balance.policy == VictimPolicy::Clock;
        self.divider.machine.residency.configure(division.balance, division.quanta);
        self.divider.division = *division;
        self.dice = Dice::new(division.chaos);
        self.vram.wakeup.ring();
        Ok(())
    }

    /// Changes a VM's limits. Memory above the new limits is evicted, not lost.
    ///
    /// # Errors
    /// Returns an error if the limits cannot be guaranteed. In this case, nothing is changed.
    pub fn set_limits(&mut self, vm: TenantId, limits: vram::Limits) -> Result<(), vram::Error> {
        self.vram.chunks.set_limits(vm, limits)?;
        self.vram.wakeup.ring();
        Ok(())
    }

    /// Sets a hint about a range of a VM's memory.
    ///
    /// # Errors
    /// Returns an error if the range does not belong to the VM, or if the guarantee is too low for the pinned memory.
    pub fn hint(&mut self, vm: TenantId, address: GuestVramAddr, len: u64, hint: Hint) -> Result<(), PinError> {
        let Self { vram, divider, .. } = self;
        let (balancer, chunks) = (divider.machine.residency.balancer_mut(), &vram.chunks);
        match hint {
            Hint::Pinned(pinned) => balancer.pin(chunks, vm, address, len, pinned)?,
            Hint::Priority(priority) => balancer.set_priority(chunks, vm, address, len, priority)?,
            Hint::Accesses(count) => balancer.set_accesses(chunks, vm, address, len, count)?,
        }
        self.vram.wakeup.ring();
        Ok(())
    }

    /// Returns a VM's movable chunks in a range of its VRAM, in ascending order: only those on the card if `on_card` is
    /// true, or only the others.
    pub fn movable(&self, vm: TenantId, address: GuestVramAddr, len: u64, on_card: bool) -> Vec<u32> {
        let chunks = &self.vram.chunks;
        let pieces = chunks.pieces(address, len.min(chunks.vm_bytes(vm).unwrap_or(0).saturating_sub(address.0)));
        let here = |at: GuestVramAddr| match chunks.lookup(vm, at, 1) {
            Lookup::Placed(place) => {
                let index = chunks.index(vm, at)?;
                let counts = place.card().is_some() && !chunks.is_parked(vm, index);
                (counts == on_card && !chunks.is_moving(vm, index)).then_some(index)
            }
            Lookup::Unplaced | Lookup::Split | Lookup::Outside => None,
        };
        pieces.filter_map(|(at, _)| here(at)).collect()
    }

    /// Returns the totals of the moves of a VM's memory, if any.
    pub fn moved(&self, vm: TenantId) -> Option<&Moved> {
        self.moved.get(&vm)
    }

    /// Records that a VM has submitted work.
    pub fn worked(&mut self, now: u64, vm: TenantId) {
        self.divider.machine.residency.worked(vm, now);
        if self.dice.submitted() {
            self.vram.wakeup.ring();
        }
    }

    /// Records the moves of a VM's memory.
    pub fn has_moved(&mut self, now: u64, vm: TenantId, done: &Relocated) {
        self.divider.machine.residency.moved(now, done.bytes, done.copied_ns);
        self.divider.bus.copied += done.bytes;
        self.moved.entry(vm).or_default().add(done);
    }

    /// Reports new chunks, used chunks, and the card's access counts to the balancer.
    pub(super) fn tell_balancer(&mut self, counts: Option<&AccessCounts>) {
        let Self { vram, divider, .. } = self;
        let touched = std::mem::take(&mut vram.touched);
        let (balancer, chunks) = (divider.machine.residency.balancer_mut(), &vram.chunks);
        let bytes = chunks.chunk_bytes();
        let mut born: Vec<_> = std::mem::take(&mut vram.born).into_iter().collect();
        born.sort_by_key(|(_, number)| *number);
        for ((vm, index), _) in born {
            let _ = balancer.arrived(chunks, vm, GuestVramAddr(index * bytes));
        }
        for (vm, index) in touched {
            // Ignore VMs that were removed in the meantime.
            let _ = balancer.touched(chunks, vm, GuestVramAddr(index * bytes), 1);
        }
        let Some(counts) = counts else { return };
        let accesses = |place: Place| accesses::at(counts, place, bytes, |host| vram.pinned.iova(host).0);
        vram.records.counted(chunks, accesses);
        if balancer.config().policy != VictimPolicy::Profiled {
            return;
        }
        for (vm, account) in chunks.vms() {
            for index in 0..account.advertised {
                let at = chunks.guest_address(index);
                if let Lookup::Placed(place) = chunks.lookup(vm, at, 1) {
                    let count = u32::try_from(accesses(place)).unwrap_or(u32::MAX);
                    let _ = balancer.set_accesses(chunks, vm, at, 1, count);
                }
            }
        }
    }

    /// Returns the card's access counts if the balancer, the thrash detector or a record needs them, and the measured
    /// bus traffic.
    pub(super) fn take_counts(&mut self, now: u64) -> (Option<AccessCounts>, Traffic) {
        let Self { vram, divider, .. } = self;
        let profiles = divider.machine.residency.balancer().config().policy == VictimPolicy::Profiled;
        let detects = divider.machine.residency.quanta().detects();
        let wanted = profiles || detects || vram.records.any();
        let counts = wanted.then(|| vram.memory.card().access_counts(true)).flatten();
        let Bus { since, copied } = std::mem::take(&mut divider.bus);
        let Some(counts) = counts else {
            // The card's counts are unavailable or not needed, so use the memory to which work refers. Work can be
            // recorded long before it executes, so start recording as soon as any chunk is in host memory.
            let watches = divider.machine.residency.quanta().watches() && vram.chunks.summary().host.used != 0;
            let named = std::mem::replace(&mut vram.over_bus, watches.then_some(0));
            return (None, Traffic::Bytes(named.unwrap_or(0)));
        };
        divider.bus.since = Some(now);
        // Counts over a longer period do not describe the last window.
        let window = divider.machine.residency.quanta().config().window_ns;
        let mut traffic = Traffic::Unknown;
        if detects && since.is_some_and(|since| now.saturating_sub(since) < window) {
            let (first, bytes) = (vram.pinned.range().0.0, vram.pinned.range().1);
            let bursts = counts.system.range(first..first + bytes).fold(0, |sum: u64, (_, bursts)| sum + bursts);
            let moved = bursts.saturating_mul(AccessCounts::BURST_BYTES);
            traffic = Traffic::Bytes(moved.saturating_sub(copied));
        }
        (Some(counts), traffic)
    }
}

/// Groups consecutive steps of the same VM.
fn by_vm(steps: Vec<Step>) -> Plan {
    let mut plan = Plan::new();
    for step in steps {
        match plan.last_mut() {
            Some((vm, of_it)) if *vm == step.vm => of_it.push(step),
            _ => plan.push((step.vm, vec![step])),
        }
    }
    plan
}
