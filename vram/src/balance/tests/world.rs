//! A chunk table and a balancer. Each plan is checked and executed immediately.

use super::CHUNK;
use crate::balance::{Balancer, By, Config, Request};
use crate::{ChunkTable, Contents, Ended, Error, GuestVramAddr, Place, Placed, Step, TenantId, Tier, To};
use std::collections::BTreeMap;

pub(super) const MS: u64 = 1_000_000;

pub(super) struct World {
    pub(super) table: ChunkTable,
    pub(super) balancer: Balancer,
    pub(super) now: u64,
    /// Time in ns and destination of each chunk's last move.
    sent: BTreeMap<(TenantId, u32), (u64, To)>,
}

impl World {
    pub(super) fn new(chunks: u32, host: u32, config: Config) -> Self {
        let mut table = ChunkTable::new(u64::from(chunks) * CHUNK, CHUNK, Contents::Zeroed).unwrap();
        table.set_host_budget(host);
        Self { table, balancer: Balancer::new(config), now: 0, sent: BTreeMap::new() }
    }

    /// Returns true if a plan may currently contain steps.
    fn is_pressed(&self, request: Option<Request>) -> bool {
        let missing = request.is_some_and(|request| match request.by {
            By::Vm(vm) => {
                let owed = self
                    .table
                    .vms()
                    .find(|(id, _)| *id == vm)
                    .map_or(0, |(_, vm)| vm.guarantee.saturating_sub(vm.placed));
                request.chunks > owed + self.table.spare()
            }
            By::Mediator => request.chunks > self.table.for_mediator(),
            By::Guarantee => request.chunks > self.table.spare(),
        });
        missing || self.table.vms().any(|(_, vm)| vm.host + vm.parked > 0 || vm.placed > vm.limits.quota)
    }

    /// Creates and executes a plan, and returns its steps.
    pub(super) fn plan(&mut self, request: Option<Request>) -> Vec<Step> {
        let pressed = self.is_pressed(request);
        let (now, config) = (self.now, *self.balancer.config());
        let steps = self.balancer.plan(&self.table, now, request);
        assert!(pressed || steps.is_empty(), "invariant 7: steps without a reason: {steps:?}");
        assert!(steps.len() <= config.steps_max);
        for &step in &steps {
            let back = step.to == To::Card;
            if let Some(&(when, to)) = self.sent.get(&(step.vm, step.index)).filter(|_| request.is_none()) {
                let unsettled = now - when < config.settle_ns && (to == To::Card) != back;
                assert!(!unsettled, "{step:?} {} ns after a move to {to:?}", now - when);
            }
            if let (Some(Request { by: By::Vm(requester), .. }), false) = (request, back)
                && requester != step.vm
                && let Some(&(when, To::Card)) = self.sent.get(&(step.vm, step.index))
            {
                let placed = |vm: TenantId| self.table.vms().find(|(id, _)| *id == vm).map(|(_, account)| account);
                let beyond = placed(step.vm).is_some_and(|account| account.placed > account.limits.quota);
                let last = self.balancer.last_active(step.vm);
                let idle = last.is_none_or(|last| now.saturating_sub(last) >= config.idle_after_ns);
                let resident = now - when < config.residency_ns;
                assert!(!resident || idle || beyond, "{step:?} for {requester:?} {} ns after its arrival", now - when);
            }
            self.sent.insert((step.vm, step.index), (now, step.to));
            self.carry_out(step);
        }
        steps
    }

    fn carry_out(&mut self, step: Step) {
        loop {
            match self.table.start(step) {
                Ok(None) => break,
                Ok(Some(begun)) => {
                    assert_eq!(self.table.commit_move(begun.id), Ended::Committed);
                    break;
                }
                Err(Error::NeedsScrub { tier, .. }) => self.scrub(tier),
                Err(error) => panic!("{step:?} cannot be executed: {error}"),
            }
        }
    }

    fn scrub(&mut self, tier: Tier) {
        let work = self.table.take_scrub_work_in(tier).expect("a chunk or slot waits to be scrubbed");
        self.table.scrubbed(work.place);
    }

    /// Uses a guest chunk. If it is unplaced, first requests a card chunk from the balancer.
    pub(super) fn ask(&mut self, vm: u32, index: u64) -> Result<Placed, Error> {
        let (vm, address) = (TenantId(vm), GuestVramAddr(index * CHUNK));
        if self.table.is_placed(vm, address) == Some(false) {
            self.plan(Some(Request { by: By::Vm(vm), chunks: 1 }));
        }
        loop {
            match self.table.place(vm, address) {
                Err(Error::NeedsScrub { tier, .. }) => self.scrub(tier),
                result => return result,
            }
        }
    }

    /// Uses guest chunks for the first time. Returns the number of these chunks that are placed in host memory.
    pub(super) fn use_chunks(&mut self, vm: u32, chunks: std::ops::Range<u64>) -> usize {
        chunks.filter(|&index| matches!(self.ask(vm, index).unwrap().place, Place::Host(_))).count()
    }

    /// Advances the time in intervals until no more moves are planned. VMs in `busy` keep submitting work. Returns the
    /// number of steps.
    pub(super) fn rest(&mut self, busy: &[u32]) -> usize {
        let config = *self.balancer.config();
        let long = (config.settle_ns.max(config.idle_after_ns) / config.return_interval_ns) as usize + 2;
        let (mut quiet, mut moved) = (0, 0);
        for _ in 0..10_000 {
            self.now += config.return_interval_ns;
            busy.iter().for_each(|&vm| self.balancer.active(TenantId(vm), self.now));
            let steps = self.plan(None).len();
            quiet = if steps == 0 { quiet + 1 } else { 0 };
            moved += steps;
            if quiet > long {
                return moved;
            }
        }
        panic!("the balancer does not converge");
    }

    /// Destroys a VM as the mediator does. Returns the number of its placed chunks.
    pub(super) fn destroy(&mut self, vm: u32) -> Result<u32, Error> {
        let freed = self.table.destroy_vm(TenantId(vm))?;
        self.balancer.forget_vm(TenantId(vm));
        Ok(freed)
    }

    /// Returns the number of a VM's chunks that are counted as card chunks.
    pub(super) fn card(&self, vm: u32) -> u32 {
        self.table.vms().find(|(id, _)| id.0 == vm).map_or(0, |(_, vm)| vm.placed)
    }

    /// Records a change of limits or of the quantum's holder. Chunks may then move before they have settled.
    pub(super) fn unsettle(&mut self) {
        self.sent.clear();
    }
}
