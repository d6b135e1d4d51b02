//! A card's memory as one state machine: the tenants whose memory is on the card, and the moves in progress.

use crate::relocation::Relocations;
use crate::{Holds, Residency, Standing, Wait};
use sched::{Scheduler, VgpuParams};
use std::fmt::Debug;
use vram::{ChunkTable, Mode, TenantId};

/// A card's memory. `U` identifies users of memory, and `P` identifies backing memory.
#[derive(Debug)]
pub struct Machine<U, P> {
    /// Decides which tenants' memory is on the card.
    pub residency: Residency,
    /// Moves in progress.
    pub relocations: Relocations<U, P>,
}

impl<U: Copy + Ord + Debug, P: Copy + Ord + Debug> Machine<U, P> {
    /// Returns true if a tenant gets no time because its memory is being moved or it waits for its quantum.
    #[must_use]
    pub fn is_paused(&self, tenant: TenantId) -> bool {
        self.residency.is_held(tenant) || self.relocations.is_moving(tenant)
    }

    /// Ends a planning round. If no memory is moving, starts the quantum for which memory was moved in. For `fixed`,
    /// see [`Residency::is_still`].
    pub fn round_ended(&mut self, table: &ChunkTable, now: u64, fixed: Option<&dyn Fn(TenantId) -> u32>) -> Holds {
        if self.relocations.is_idle() {
            return self.residency.is_still(table, now, fixed);
        }
        self.residency.moves();
        Holds::new()
    }

    /// Returns the time in ns until the next planning round unless an event occurs earlier, or `None` if only events
    /// cause moves.
    #[must_use]
    pub fn next_round_ns(&self, table: &ChunkTable) -> Option<u64> {
        let (residency, mut tenants) = (&self.residency, table.vms());
        // In forced mode, quanta start even if no memory has to move.
        let is_forced = residency.quanta().config().mode == Mode::Forced && table.vms().count() > 1;
        let is_evicted = tenants.any(|(_, account)| account.host != 0 || account.parked != 0);
        let is_due = is_evicted || is_forced || residency.turn().is_some() || !self.relocations.is_idle();
        is_due.then(|| residency.balancer().config().return_interval_ns)
    }

    /// Returns the tenants whose settings for time competition must change, with the new settings, or `None` to restore
    /// their own settings. See [`Residency::competing`].
    #[must_use]
    pub fn changed_competitors(&self, scheduler: &Scheduler) -> Vec<(TenantId, Option<VgpuParams>)> {
        let own = |tenant| scheduler.params(tenant).copied();
        let settings = scheduler.vgpus().map(|tenant| (tenant, self.residency.competing(tenant, own)));
        settings.filter(|(tenant, settings)| settings.as_ref() != scheduler.competing(*tenant)).collect()
    }

    /// Returns the reason why a tenant waits, or `None` if its work may run or it has no work.
    #[must_use]
    pub fn wait_reason(&self, tenant: TenantId, now: u64, standing: &Standing) -> Option<Wait> {
        let is_moving = standing.has_work && self.relocations.is_moving(tenant);
        self.residency.wait_reason(tenant, now, is_moving, standing)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Demand;
    use crate::relocation::{Action, Chunk, Config, User};
    use sched::{Event, Nanos};
    use vram::{Contents, Limits, QuantaConfig, Tier};

    const ONE: TenantId = TenantId(1);
    const TWO: TenantId = TenantId(2);
    const MIB: u64 = 1 << 20;
    const MS: u64 = 1_000_000;

    /// Returns two tenants with one chunk each. They use quanta if `mode` is forced.
    fn two(mode: Mode) -> (ChunkTable, Machine<TenantId, u32>) {
        let mut table = ChunkTable::new(64 * MIB, MIB, Contents::Zeroed).expect("sizes");
        table.set_host_budget(64);
        let quanta = QuantaConfig { mode, min_ns: 100 * MS, max_ns: 100 * MS, ..QuantaConfig::default() };
        let mut residency = Residency::new(vram::balance::Config::default(), quanta);
        for tenant in [ONE, TWO] {
            table.create_vm(tenant, 64 * MIB, Limits::default()).expect("room");
            table.place(tenant, table.guest_address(0)).expect("room");
            residency.worked(tenant, 0);
        }
        let limits = Config { batch_chunks: 1, batches_most: 9, batches_few: 9, answer_ns: 1000 * MS, force_ns: None };
        (table, Machine { residency, relocations: Relocations::new(limits) })
    }

    /// Starts moving a chunk of a tenant.
    fn begin(machine: &mut Machine<TenantId, u32>, table: &ChunkTable, tenant: TenantId) {
        let user = User { id: tenant, tenant, run_limit_ns: None };
        let chunk = Chunk { id: None, tenant, index: 0, position: 0, from: 1, to: 2 };
        machine.relocations.add(user, Tier::Host, chunk, false);
        assert!(machine.relocations.submit(table, 0));
    }

    #[test]
    fn quantum_does_not_begin_while_any_memory_moves() {
        let (table, mut machine) = two(Mode::Forced);
        let holds = machine.residency.tick(&table, 0, |_| 100, None);
        assert_eq!(holds, [(ONE, true), (TWO, true)], "memory is moving for the quantum");
        let _ = machine.residency.plan(&table, 0, Demand::default());
        // Simulate an operator who moves the other tenant's memory.
        begin(&mut machine, &table, TWO);
        assert_eq!(machine.round_ended(&table, MS, None), []);
        assert!(machine.residency.is_loading() && machine.is_paused(ONE) && machine.is_paused(TWO));
        machine.relocations.cancel(TWO);
        assert_eq!(machine.round_ended(&table, 2 * MS, None), [(ONE, false)]);
        assert!(!machine.is_paused(ONE) && machine.is_paused(TWO));
    }

    #[test]
    fn rounds_repeat_while_moves_may_be_due() {
        let (mut table, machine) = two(Mode::Auto);
        assert_eq!(machine.next_round_ns(&table), None, "no pressure, no cost");
        let interval = machine.residency.balancer().config().return_interval_ns;
        let step = vram::Step { vm: ONE, index: 0, to: vram::To::Host };
        let moves = table.start(step).expect("room").expect("a move");
        table.commit_move(moves.id);
        assert_eq!(machine.next_round_ns(&table), Some(interval), "evicted memory may return");
        let (table, machine) = two(Mode::Forced);
        assert_eq!(machine.next_round_ns(&table), Some(interval), "quanta start without pressure");
        let (table, mut machine) = two(Mode::Auto);
        begin(&mut machine, &table, ONE);
        assert_eq!(machine.next_round_ns(&table), Some(interval), "responses may be overdue");
    }

    #[test]
    fn competitors_are_reported_until_the_scheduler_has_them() {
        let (table, mut machine) = two(Mode::Forced);
        let mut scheduler = Scheduler::new(sched::Config::default(), Nanos(0)).expect("defaults");
        for vgpu in [ONE, TWO] {
            scheduler.event(Nanos(0), Event::Added { vgpu, params: VgpuParams::default() }, &mut Vec::new());
        }
        assert_eq!(machine.changed_competitors(&scheduler), []);
        machine.residency.tick(&table, 0, |_| 100, None);
        let changed = machine.changed_competitors(&scheduler);
        let [(ONE, params @ Some(group))] = changed[..] else { panic!("{changed:?}") };
        assert_eq!(group.weight, 2 * VgpuParams::default().weight, "for both");
        scheduler.event(Nanos(0), Event::Competes { vgpu: ONE, params }, &mut Vec::new());
        assert_eq!(machine.changed_competitors(&scheduler), []);
    }

    #[test]
    fn moving_memory_delays_only_tenants_with_work() {
        let (table, mut machine) = two(Mode::Auto);
        begin(&mut machine, &table, ONE);
        assert!(matches!(machine.relocations.take_action(), Some(Action::Quiesce { .. })));
        let working = Standing { has_work: true, runs: true, ..Standing::default() };
        assert_eq!(machine.wait_reason(ONE, 0, &working), Some(Wait::Move));
        assert_eq!(machine.wait_reason(ONE, 0, &Standing::default()), None);
        assert_eq!(machine.wait_reason(TWO, 0, &working), None);
    }
}
