//! Who gives memory, and who gets it: what the card's balancer and thrash detector are told, and what they want.

use super::Feeder;
use super::chaos::{Chaos, Dice};
use super::mover::{Moved, Plan};
use super::registry::HostState;
use super::relocate::Relocated;
use super::vram::KEPT;
use card::AccessCounts;
use channels::Pause;
use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;
use vram::balance::{By, Config, PinError, Request};
use vram::victim::VictimPolicy;
use vram::{Balancer, Change, GuestAddr, Lookup, Mode, Place, Quanta, QuantaConfig, Step, Turn, VmId};

/// How a card's memory is divided.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Division {
    /// Who gives, who gets.
    pub balance: Config,
    /// When VMs take turns.
    pub quanta: QuantaConfig,
    /// Chunks of the card that take evictions at once.
    pub reserve: u32,
    /// What moves without a reason, for tests.
    pub chaos: Chaos,
}

/// What somebody knows of a range of a VM's memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Hint {
    /// It stays on the card, or not any more.
    Pinned(bool),
    /// The lowest goes first.
    Priority(u8),
    /// How often it is accessed, against the rest of the VM's.
    Accesses(u32),
}

/// What divides a card's memory.
pub struct Divider {
    pub(super) balancer: Balancer,
    pub(super) quanta: Quanta,
    /// What an operator has set.
    division: Division,
    /// VMs that do not run, since it is another one's turn.
    waiting: BTreeSet<VmId>,
}

impl Divider {
    pub(super) fn new(division: &Division) -> Self {
        Self {
            balancer: Balancer::new(division.balance),
            quanta: Quanta::new(division.quanta),
            division: *division,
            waiting: BTreeSet::new(),
        }
    }

    /// What an operator has set.
    #[must_use]
    pub fn division(&self) -> Division {
        self.division
    }

    /// Whose turn it is, if VMs take turns.
    #[must_use]
    pub fn turn(&self) -> Option<&Turn> {
        self.quanta.turn()
    }

    /// What decides who gives and who gets.
    #[must_use]
    pub fn balancer(&self) -> &Balancer {
        &self.balancer
    }
}

impl HostState {
    /// What is to move now.
    pub(super) fn plan(&mut self) -> Plan {
        let now = self.now_ns();
        // Who has work that has not ended is at work, if only in a queue.
        let working: BTreeSet<VmId> = self.schedule.counts().into_keys().collect();
        working.into_iter().for_each(|vm| self.divider.balancer.active(vm, now));
        self.take_turns(now);
        self.tell_balancer();
        let Self { vram, divider, .. } = self;
        let balancer = &mut divider.balancer;
        // Whoever found no room on the card stands for a request: somebody may have more than its share.
        let mut steps = Vec::new();
        let mut requests: BTreeMap<VmId, u32> = BTreeMap::new();
        for (vm, _) in std::mem::take(&mut vram.unmet) {
            *requests.entry(vm).or_default() += 1;
        }
        for (vm, chunks) in requests {
            steps.extend(balancer.plan(&vram.chunks, now, Some(Request { by: By::Vm(vm), chunks })));
        }
        if vram.is_tight() {
            let used = vram.chunks.summary().mediator;
            // What has no room yet makes some, and is asked for again behind that.
            if vram.chunks.set_aside(used + KEPT).is_err() {
                steps.extend(balancer.plan(&vram.chunks, now, Some(Request { by: By::Mediator, chunks: KEPT })));
            }
        }
        if steps.is_empty() {
            steps = balancer.plan(&vram.chunks, now, None);
        }
        by_vm(steps)
    }

    /// What is to move so that `chunks` more of the card can be promised.
    pub(super) fn plan_promise(&mut self, chunks: u32) -> Plan {
        let now = self.now_ns();
        let Self { vram, divider, .. } = self;
        let chunks = chunks.saturating_add(vram.chunks.spare());
        by_vm(divider.balancer.plan(&vram.chunks, now, Some(Request { by: By::Guarantee, chunks })))
    }

    /// When there may be more to move, if nothing happens before.
    pub(super) fn next_plan(&self) -> Option<Duration> {
        let summary = self.vram.chunks.summary();
        let swapped = summary.host.used != 0 || summary.vms.values().any(|vm| vm.parked != 0);
        // In forced mode turns begin whether or not anything has to move.
        let forced = self.divider.division.quanta.mode == Mode::Forced && summary.vms.len() > 1;
        let often = swapped || forced || self.divider.turn().is_some();
        often.then(|| Duration::from_nanos(self.divider.balancer.config().return_interval_ns))
    }

    /// Changes how the card's memory is divided, from now on.
    ///
    /// # Errors
    /// When the reserve cannot be had; nothing has changed then.
    pub fn set_division(&mut self, division: &Division) -> Result<(), vram::Error> {
        self.vram.chunks.set_reserve(division.reserve)?;
        self.vram.watches = division.balance.policy == VictimPolicy::Clock;
        self.divider.balancer.set_config(division.balance);
        self.divider.quanta.set_config(division.quanta);
        self.divider.division = *division;
        self.dice = Dice::new(division.chaos);
        self.vram.bell.ring();
        Ok(())
    }

    /// Changes what a VM may have, from now on. What it has beyond that goes; nothing of it is lost.
    ///
    /// # Errors
    /// When that cannot be promised; nothing has changed then.
    pub fn set_limits(&mut self, vm: VmId, limits: vram::Limits) -> Result<(), vram::Error> {
        self.vram.chunks.set_limits(vm, limits)?;
        self.vram.bell.ring();
        Ok(())
    }

    /// What is known of ranges of a VM's memory changes.
    ///
    /// # Errors
    /// When the range is not the VM's, or more would be pinned than is guaranteed.
    pub fn hint(&mut self, vm: VmId, address: GuestAddr, len: u64, hint: Hint) -> Result<(), PinError> {
        let Self { vram, divider, .. } = self;
        let (balancer, chunks) = (&mut divider.balancer, &vram.chunks);
        match hint {
            Hint::Pinned(pinned) => balancer.pin(chunks, vm, address, len, pinned)?,
            Hint::Priority(priority) => balancer.set_priority(chunks, vm, address, len, priority)?,
            Hint::Accesses(count) => balancer.set_accesses(chunks, vm, address, len, count)?,
        }
        self.vram.bell.ring();
        Ok(())
    }

    /// Chunks of a VM that lie on the card (or do not) and could move, in a range of its VRAM, in ascending order.
    #[must_use]
    pub fn movable(&self, vm: VmId, address: GuestAddr, len: u64, on_card: bool) -> Vec<u32> {
        let chunks = &self.vram.chunks;
        let pieces = chunks.pieces(address, len.min(chunks.vm_bytes(vm).unwrap_or(0).saturating_sub(address.0)));
        let here = |at: GuestAddr| match chunks.lookup(vm, at, 1) {
            Lookup::Placed(place) => {
                let index = chunks.index(vm, at)?;
                let counts = place.card().is_some() && !chunks.is_parked(vm, index);
                (counts == on_card && !chunks.is_moving(vm, index)).then_some(index)
            }
            Lookup::Unplaced | Lookup::Split | Lookup::Outside => None,
        };
        pieces.filter_map(|(at, _)| here(at)).collect()
    }

    /// What was moved of a VM's memory, if anything was.
    #[must_use]
    pub fn moved(&self, vm: VmId) -> Option<&Moved> {
        self.moved.get(&vm)
    }

    /// A VM has submitted work.
    pub fn worked(&mut self, vm: VmId) {
        let now = self.now_ns();
        self.divider.balancer.active(vm, now);
        if self.dice.submitted() {
            self.vram.bell.ring();
        }
    }

    /// Memory was moved.
    pub(super) fn has_moved(&mut self, vm: VmId, done: &Relocated) {
        let now = self.now_ns();
        self.divider.quanta.relocated(now, done.bytes, done.copied_ns);
        self.moved.entry(vm).or_default().add(done);
    }

    /// What was seen used, and what the card counts.
    fn tell_balancer(&mut self) {
        let Self { vram, divider, .. } = self;
        let (balancer, chunks) = (&mut divider.balancer, &vram.chunks);
        let bytes = chunks.chunk_bytes();
        for (vm, index) in std::mem::take(&mut vram.touched) {
            // Of a VM that has gone meanwhile nothing is to be known.
            let _ = balancer.touched(chunks, vm, GuestAddr(index * bytes), 1);
        }
        if balancer.config().policy != VictimPolicy::Profiled {
            return;
        }
        let Some(counts) = vram.memory.card().access_counts(true) else { return };
        let accesses = |place: Place| -> u64 {
            let blocks = |start: u64| (start..start + bytes).step_by(AccessCounts::BLOCK_BYTES as usize);
            match place {
                Place::Card(at) => blocks(at.0)
                    .filter_map(|at| counts.vram.get((at / AccessCounts::BLOCK_BYTES) as usize))
                    .fold(0, |sum, count| sum.saturating_add(*count)),
                Place::Host(at) => {
                    let first = vram.pinned.iova(at).0;
                    counts.system.range(first..first + bytes).fold(0, |sum, (_, count)| sum.saturating_add(*count))
                }
            }
        };
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

    /// Has VMs take turns when their memory does not fit together.
    fn take_turns(&mut self, now: u64) {
        let Self { vram, divider, .. } = self;
        let (chunks, idle_after) = (&vram.chunks, divider.balancer.config().idle_after_ns);
        let bytes = chunks.chunk_bytes();
        let sets: BTreeMap<VmId, u64> = chunks
            .vms()
            .filter(|(vm, _)| divider.balancer.last_active(*vm).is_some_and(|at| now.saturating_sub(at) < idle_after))
            .map(|(vm, account)| (vm, u64::from(account.placed + account.host + account.parked) * bytes))
            .collect();
        divider.quanta.set_working_sets(u64::from(chunks.for_vms()) * bytes, sets);
        let turn = match divider.quanta.tick(now) {
            None => return,
            Some(Change::Off) => {
                tracing::info!("the VMs' memory fits together: none has to wait for its turn any more");
                None
            }
            Some(Change::On(turn)) => {
                tracing::info!(?turn, "the VMs' memory does not fit together: they take turns");
                Some(turn)
            }
            Some(Change::Next(turn)) => Some(turn),
        };
        divider.balancer.set_turn(turn.clone());
        let waits = |vm: &VmId| turn.as_ref().is_some_and(|turn| turn.holder != *vm);
        let members = turn.as_ref().map(|turn| turn.members.clone()).unwrap_or_default();
        let waiting: BTreeSet<VmId> = members.into_iter().filter(waits).collect();
        let before = std::mem::replace(&mut divider.waiting, waiting.clone());
        for vm in before.symmetric_difference(&waiting).copied() {
            let id = channels::VmId(vm.0);
            self.channels.pause(&mut self.vram.memory, id, Pause::Turn, waiting.contains(&vm));
            self.channels.vacate(&mut self.vram.memory, id);
            self.look_at_waits(Some(vm));
        }
    }
}

/// Steps that follow one another of the same VM, together.
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
