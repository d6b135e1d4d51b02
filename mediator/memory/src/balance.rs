//! Division of a card's memory: the inputs of its balancer and thrash detector, and the moves that they request.

use super::chaos::{Chaos, Dice};
use super::moved::{Holds, Moved, Plan, Planned, Relocated};
use super::{Memory, accesses};
use card::AccessCounts;
use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;
use vram::balance::{ActiveVms, By, Config, PinError, Request};
use vram::victim::VictimPolicy;
use vram::{Balancer, Change, Done, GuestVramAddr, Lookup, Mode, Place, Quanta, QuantaConfig, Step, TenantId, Turn};

/// Settings of the division of a card's memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Division {
    /// The balancer's settings.
    pub balance: Config,
    /// The settings of quanta.
    pub quanta: QuantaConfig,
    /// Chunks of the card that are reserved for immediate evictions.
    pub reserve: u32,
    /// Random moves, for tests.
    pub chaos: Chaos,
}

/// A hint about a range of a VM's memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Hint {
    /// Pins the range to the card, or unpins it.
    Pinned(bool),
    /// Eviction priority: the lowest is evicted first.
    Priority(u8),
    /// Number of accesses, relative to the rest of the VM's memory.
    Accesses(u32),
}

/// Divides a card's memory.
pub struct Divider {
    /// Decides which VMs gain and lose memory.
    pub balancer: Balancer,
    /// Quanta of memory.
    pub quanta: Quanta,
    /// The operator's settings.
    division: Division,
    /// VMs that are stopped during another VM's quantum.
    waiting: BTreeSet<TenantId>,
    /// Memory moves for a quantum that is about to begin. Its holder waits, too: its work would use chunks in host
    /// memory, and the return of each such chunk would have to wait for that work.
    settling: bool,
    /// Quanta that have begun.
    turns: u64,
    /// The card's counts, and the copies since.
    bus: Bus,
}

/// Traffic on the bus, as the card counts it.
#[derive(Clone, Copy, Debug, Default)]
struct Bus {
    /// Time at which the counts were last taken, in ns.
    since: Option<u64>,
    /// Bytes that the mediator itself has copied since then, which the counts include.
    copied: u64,
}

impl Divider {
    /// Creates a divider with these settings, without VMs.
    pub fn new(division: &Division) -> Self {
        Self {
            balancer: Balancer::new(division.balance),
            quanta: Quanta::new(division.quanta),
            division: *division,
            waiting: BTreeSet::new(),
            settling: false,
            turns: 0,
            bus: Bus::default(),
        }
    }

    /// Restores the divider, with new settings. `waiting`: VMs that are stopped during another VM's quantum.
    pub fn restored(
        division: &Division,
        balancer: Balancer,
        quanta: Quanta,
        turns: u64,
        waiting: BTreeSet<TenantId>,
    ) -> Self {
        // The holder waits only while memory moves for the quantum.
        let settling = quanta.turn().is_some_and(|turn| waiting.contains(&turn.holder));
        Self { balancer, quanta, waiting, settling, turns, ..Self::new(division) }
    }

    /// Returns the operator's settings.
    #[must_use]
    pub fn division(&self) -> Division {
        self.division
    }

    /// Returns the current quantum, if there is one.
    #[must_use]
    pub fn turn(&self) -> Option<&Turn> {
        self.quanta.turn()
    }

    /// Returns the holder of the quantum for which a VM waits, and the time left of the quantum in ns: `None` while
    /// memory moves for it.
    #[must_use]
    pub fn quantum_wait(&self, vm: TenantId, now_ns: u64) -> Option<(TenantId, Option<u64>)> {
        let turn = self.quanta.turn().filter(|_| self.waiting.contains(&vm))?;
        Some((turn.holder, self.quanta.left_ns(now_ns)))
    }

    /// Returns the number of quanta that have begun since the card was taken over.
    #[must_use]
    pub fn turns(&self) -> u64 {
        self.turns
    }

    /// Returns the balancer.
    #[must_use]
    pub fn balancer(&self) -> &Balancer {
        &self.balancer
    }
}

impl Memory {
    /// Returns the moves that are due now, first those for the mediator itself. `done`: work of a VM completed since it
    /// was added. `weight`: the weight of its time.
    pub fn plan(
        &mut self,
        now: u64,
        working: impl Iterator<Item = TenantId>,
        done: impl Fn(TenantId) -> Done,
        weight: impl Fn(TenantId) -> u32,
    ) -> Planned {
        // VMs with unfinished work, even queued work, are active; so are VMs that wait for memory.
        let working: BTreeSet<TenantId> = working.chain(self.vram.waiting()).collect();
        working.into_iter().for_each(|vm| self.divider.balancer.active(vm, now));
        self.tell_working_sets(now, done, weight);
        let counts = self.take_counts(now);
        let holds = self.take_turns(now);
        self.tell_balancer(counts.as_ref());
        let mut served = BTreeSet::new();
        let mut steps = self.own_steps(now);
        if !steps.is_empty() {
            served.extend(self.vram.wants.of_tables());
        }
        let Self { vram, divider, promising, .. } = self;
        let balancer = &mut divider.balancer;
        if divider.settling {
            balancer.hurry();
        }
        // A chunk without room on the card is a request: another VM may have more than its share.
        let mut requests: BTreeMap<TenantId, u32> = BTreeMap::new();
        let bytes = vram.chunks.chunk_bytes();
        for (vm, index) in std::mem::take(&mut vram.unmet) {
            let _ = balancer.wanted(&vram.chunks, vm, GuestVramAddr(index.saturating_mul(bytes)));
            *requests.entry(vm).or_default() += 1;
        }
        for (vm, chunks) in requests {
            let for_it = balancer.plan(&vram.chunks, now, Some(Request { by: By::Vm(vm), chunks }));
            if !for_it.is_empty() {
                served.insert(vm);
            }
            steps.extend(for_it);
        }
        if steps.is_empty() && divider.quanta.wants_bandwidth() {
            // Measures the bandwidth with an eviction and a return.
            let chunks = vram.chunks.spare() + 1;
            steps = balancer.plan(&vram.chunks, now, Some(Request { by: By::Guarantee, chunks }));
        }
        if steps.is_empty() && *promising == 0 {
            steps = balancer.plan(&vram.chunks, now, None);
        }
        Planned { plan: by_vm(self.without_travellers(steps)), served, holds }
    }

    /// Returns the moves for the mediator's own structures, if any.
    pub fn plan_own(&mut self, now: u64) -> Plan {
        let steps = self.own_steps(now);
        by_vm(self.without_travellers(steps))
    }

    /// Removes steps of VMs that are moving to or from another card.
    fn without_travellers(&self, mut steps: Vec<Step>) -> Vec<Step> {
        steps.retain(|step| !self.travelling.contains(&step.vm));
        steps
    }

    /// Returns moves that free chunks for the mediator; chunks borrowed from the reserve are then repaid by evictions.
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
        divider.balancer.plan(&vram.chunks, now, Some(request))
    }

    /// Records a scan of the mover: `waiting` waited during all of it, and memory was moved for `served`. Returns the
    /// VMs that wait now.
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

    /// Starts the quantum for which memory was moved; no memory moves for now.
    pub fn begin_turn(&mut self, now: u64) -> Holds {
        if !std::mem::take(&mut self.divider.settling) {
            return Holds::new();
        }
        self.divider.quanta.copies_done(now);
        self.hold_waiting()
    }

    /// Returns the moves that let `chunks` more chunks of the card be guaranteed.
    pub fn plan_promise(&mut self, now: u64, chunks: u32) -> Plan {
        let Self { vram, divider, .. } = self;
        // A guarantee counts chunks that the mediator claims as available; the plan does not, so that the mediator
        // keeps them.
        let chunks = chunks.saturating_add(vram.chunks.uncommitted());
        let steps = divider.balancer.plan(&vram.chunks, now, Some(Request { by: By::Guarantee, chunks }));
        by_vm(self.without_travellers(steps))
    }

    /// Returns the time until more moves may be due, unless an event comes first.
    pub fn next_plan(&self) -> Option<Duration> {
        let summary = self.vram.chunks.summary();
        let swapped = summary.host.used != 0 || summary.vms.values().any(|vm| vm.parked != 0);
        // In forced mode quanta begin even if no memory has to move.
        let forced = self.divider.division.quanta.mode == Mode::Forced && summary.vms.len() > 1;
        let often = swapped || forced || self.divider.turn().is_some();
        often.then(|| Duration::from_nanos(self.divider.balancer.config().return_interval_ns))
    }

    /// Changes how the card's memory is divided, from now on.
    ///
    /// # Errors
    /// If the reserve is not available; then nothing changes.
    pub fn set_division(&mut self, division: &Division) -> Result<(), vram::Error> {
        self.vram.chunks.set_reserve(division.reserve)?;
        self.vram.watches = division.balance.policy == VictimPolicy::Clock;
        self.divider.balancer.set_config(division.balance);
        self.divider.quanta.set_config(division.quanta);
        self.divider.division = *division;
        self.dice = Dice::new(division.chaos);
        self.vram.wakeup.ring();
        Ok(())
    }

    /// Changes the limits of a VM, from now on. Memory beyond them is evicted, not lost.
    ///
    /// # Errors
    /// If they cannot be guaranteed; then nothing changes.
    pub fn set_limits(&mut self, vm: TenantId, limits: vram::Limits) -> Result<(), vram::Error> {
        self.vram.chunks.set_limits(vm, limits)?;
        self.vram.wakeup.ring();
        Ok(())
    }

    /// Sets a hint about a range of a VM's memory.
    ///
    /// # Errors
    /// If the range does not belong to the VM, or more would be pinned than is guaranteed.
    pub fn hint(&mut self, vm: TenantId, address: GuestVramAddr, len: u64, hint: Hint) -> Result<(), PinError> {
        let Self { vram, divider, .. } = self;
        let (balancer, chunks) = (&mut divider.balancer, &vram.chunks);
        match hint {
            Hint::Pinned(pinned) => balancer.pin(chunks, vm, address, len, pinned)?,
            Hint::Priority(priority) => balancer.set_priority(chunks, vm, address, len, priority)?,
            Hint::Accesses(count) => balancer.set_accesses(chunks, vm, address, len, count)?,
        }
        self.vram.wakeup.ring();
        Ok(())
    }

    /// Returns the movable chunks of a VM that are on the card (or are not), in a range of its VRAM, in ascending
    /// order.
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

    /// Returns the moves of a VM's memory, if any.
    pub fn moved(&self, vm: TenantId) -> Option<&Moved> {
        self.moved.get(&vm)
    }

    /// Records that a VM has submitted work.
    pub fn worked(&mut self, now: u64, vm: TenantId) {
        self.divider.balancer.active(vm, now);
        if self.dice.submitted() {
            self.vram.wakeup.ring();
        }
    }

    /// Records moves of memory.
    pub fn has_moved(&mut self, now: u64, vm: TenantId, done: &Relocated) {
        self.divider.quanta.relocated(now, done.bytes, done.copied_ns);
        self.divider.bus.copied += done.bytes;
        self.moved.entry(vm).or_default().add(done);
    }

    /// Reports used chunks and the card's counts to the balancer.
    pub(super) fn tell_balancer(&mut self, counts: Option<&AccessCounts>) {
        let Self { vram, divider, .. } = self;
        let touched = std::mem::take(&mut vram.touched);
        let (balancer, chunks) = (&mut divider.balancer, &vram.chunks);
        let bytes = chunks.chunk_bytes();
        let mut born: Vec<_> = std::mem::take(&mut vram.born).into_iter().collect();
        born.sort_by_key(|(_, number)| *number);
        for ((vm, index), _) in born {
            let _ = balancer.arrived(chunks, vm, GuestVramAddr(index * bytes));
        }
        for (vm, index) in touched {
            // A VM that was removed in the meantime is ignored.
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

    /// Returns the card's counts, if they are needed: of chunks for the balancer, and of the bus for the thrash
    /// detector.
    pub(super) fn take_counts(&mut self, now: u64) -> Option<AccessCounts> {
        let Self { vram, divider, .. } = self;
        let profiles = divider.balancer.config().policy == VictimPolicy::Profiled;
        let detects = divider.quanta.detects();
        let wanted = profiles || detects || vram.records.any();
        let counts = wanted.then(|| vram.memory.card().access_counts(true)).flatten();
        let Bus { since, copied } = std::mem::take(&mut divider.bus);
        let Some(counts) = counts else {
            // The card does not count: use the memory that its work names. The work may name it long before it
            // executes, so it is recorded as soon as any chunk is in host memory.
            let watches = divider.quanta.watches() && vram.chunks.summary().host.used != 0;
            let named = std::mem::replace(&mut vram.over_bus, watches.then_some(0));
            divider.quanta.accessed(now, named.unwrap_or(0));
            return None;
        };
        divider.bus.since = Some(now);
        // Counts from a longer period do not describe the last window.
        let window = divider.quanta.config().window_ns;
        if detects && since.is_some_and(|since| now.saturating_sub(since) < window) {
            let (first, bytes) = (vram.pinned.range().0.0, vram.pinned.range().1);
            let bursts = counts.system.range(first..first + bytes).fold(0, |sum: u64, (_, bursts)| sum + bursts);
            let moved = bursts.saturating_mul(AccessCounts::BURST_BYTES);
            divider.quanta.accessed(now, moved.saturating_sub(copied));
        }
        Some(counts)
    }

    /// Reports active VMs to the thrash detector, with their working sets, completed work, and whether they are idle
    /// now.
    fn tell_working_sets(&mut self, now: u64, done: impl Fn(TenantId) -> Done, weight: impl Fn(TenantId) -> u32) {
        let Self { vram, divider, .. } = self;
        let chunks = &vram.chunks;
        let ActiveVms { sets, idle } = divider.balancer.active_vms(chunks, now, weight);
        divider.quanta.set_done(sets.keys().map(|vm| (*vm, done(*vm))).collect());
        divider.quanta.set_working_sets(u64::from(chunks.for_vms()) * chunks.chunk_bytes(), sets);
        divider.quanta.set_idle(idle);
    }

    /// Starts or ends quanta, depending on whether the VMs' memory fits together.
    fn take_turns(&mut self, now: u64) -> Holds {
        let divider = &mut self.divider;
        let before = divider.quanta.turn().map(|turn| turn.holder);
        let tried = divider.quanta.tries();
        let turn = match divider.quanta.tick(now) {
            None => return Holds::new(),
            Some(Change::Off) => {
                let why =
                    if tried { "turns do not help" } else { "the VMs' memory fits together, or it is to be seen anew" };
                tracing::info!(why, "none has to wait for its turn any more");
                None
            }
            Some(Change::On(turn)) => {
                let tried = divider.quanta.tries();
                tracing::info!(?turn, tried, "the VMs' memory does not fit together: they take turns");
                Some(turn)
            }
            Some(Change::Next(turn)) => Some(turn),
        };
        let holder = turn.as_ref().map(|turn| turn.holder);
        let begins = holder.is_some() && holder != before;
        divider.turns += u64::from(begins);
        divider.settling = begins || (holder.is_some() && divider.settling);
        divider.balancer.set_turn(turn);
        self.hold_waiting()
    }

    /// Returns the VMs to stop because it is not their quantum, and the VMs to resume.
    fn hold_waiting(&mut self) -> Holds {
        let divider = &mut self.divider;
        let waiting: BTreeSet<TenantId> = divider.quanta.turn().map_or_else(BTreeSet::new, |turn| {
            let waits = |vm: &TenantId| divider.settling || turn.holder != *vm;
            turn.members.iter().copied().filter(waits).collect()
        });
        let before = std::mem::replace(&mut divider.waiting, waiting.clone());
        before.symmetric_difference(&waiting).map(|vm| (*vm, waiting.contains(vm))).collect()
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
