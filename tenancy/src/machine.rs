//! State machine of a card's memory, which combines the division of the memory among tenants ([`Residency`]) and the
//! moves in progress ([`Relocations`]).
//!
//! The executor divides its work into *rounds*: [`Machine::begin_round`] with its report, the plans of
//! [`Residency::plan`] and their moves, and [`Machine::round_ended`]. After each call, it applies the changes returned
//! by [`Machine::take_changes`].

use crate::relocation::{Config, Relocations};
use crate::{Holds, Residency, Standing, Wait};
use sched::{Engine, Scheduler, VgpuParams};
use std::collections::BTreeSet;
use std::fmt::Debug;
use vram::{ChunkTable, Done, Mode, TenantId};

/// Traffic on the bus since the last report, caused by tenants' work that accesses host memory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Traffic {
    /// The number of bytes is not known.
    Unknown,
    /// Number of bytes.
    Bytes(u64),
    /// The card does not count accesses. The work of these tenants is running, and is assumed to read all of their host
    /// memory.
    Assumed(BTreeSet<TenantId>),
}

/// The executor's report at the beginning of a round.
pub struct Report<'a> {
    /// Tenants with unfinished work, and tenants that wait for memory.
    pub working: BTreeSet<TenantId>,
    /// Traffic on the bus since the last report.
    pub traffic: Traffic,
    /// Scheduler with the tenants' weights and accounts.
    pub scheduler: &'a Scheduler,
    /// True if the scheduler's submissions are those of the tenants, so that their number shows the tenants' progress.
    pub counts_work: bool,
}

/// Consequences of memory quanta for the tenants' time.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Changes {
    /// Tenants to hold or to release.
    pub holds: Holds,
    /// Tenants whose settings for sharing the time change, and the new settings, where `None` restores their own
    /// settings.
    pub competitors: Vec<(TenantId, Option<VgpuParams>)>,
}

/// A card's memory. `U` identifies users of memory, and `P` identifies backing memory.
#[derive(Debug)]
pub struct Machine<U, P> {
    /// Decides which tenants have their memory on the card.
    pub residency: Residency,
    /// Moves in progress.
    pub relocations: Relocations<U, P>,
    /// Holds that the executor has not applied yet.
    holds: Holds,
}

impl<U: Copy + Ord + Debug, P: Copy + Ord + Debug> Machine<U, P> {
    /// Creates the machine of a card on which no memory is moving.
    #[must_use]
    pub fn new(residency: Residency, limits: Config) -> Self {
        Self { residency, relocations: Relocations::new(limits), holds: Holds::new() }
    }

    /// Begins a round. Records the tenants that have work and their bus traffic, and starts, changes or ends memory
    /// quanta.
    pub fn begin_round(&mut self, table: &ChunkTable, now: u64, report: &Report<'_>) {
        // The holder of a quantum cannot work while its own memory is moving, but keeps its quantum.
        let loading =
            self.residency.turn().map(|turn| turn.holder).filter(|holder| self.relocations.is_moving(*holder));
        report.working.iter().copied().chain(loading).for_each(|tenant| self.residency.worked(tenant, now));
        self.add_traffic(table, now, &report.traffic);
        let weight = |tenant| report.scheduler.params(tenant).map_or(1, |params| params.weight);
        let done = |tenant| work_done(report.scheduler, tenant);
        let done = report.counts_work.then_some(&done as &dyn Fn(TenantId) -> Done);
        self.holds.extend(self.residency.tick(table, now, weight, done));
    }

    /// Records traffic on the bus since the last report.
    pub fn add_traffic(&mut self, table: &ChunkTable, now: u64, traffic: &Traffic) {
        match traffic {
            Traffic::Unknown => {}
            Traffic::Bytes(bytes) => self.residency.accessed(now, *bytes),
            Traffic::Assumed(running) => self.residency.accessed(now, readable_bytes(table, running)),
        }
    }

    /// Returns true if a tenant gets no time, because its memory is moving or it is waiting for its quantum.
    #[must_use]
    pub fn is_paused(&self, tenant: TenantId) -> bool {
        self.residency.is_held(tenant) || self.relocations.is_moving(tenant)
    }

    /// Ends a round. If no memory is moving, starts the quantum for which memory was moved. For `fixed`, see
    /// [`Residency::is_still`].
    pub fn round_ended(&mut self, table: &ChunkTable, now: u64, fixed: Option<&dyn Fn(TenantId) -> u32>) {
        match self.relocations.is_idle() {
            true => self.holds.extend(self.residency.is_still(table, now, fixed)),
            false => self.residency.moves(),
        }
    }

    /// Returns the changes that the executor must apply now.
    #[must_use]
    pub fn take_changes(&mut self, scheduler: &Scheduler) -> Changes {
        Changes { holds: std::mem::take(&mut self.holds), competitors: self.changed_competitors(scheduler) }
    }

    /// Returns the time in ns until the next planning round if no event occurs earlier, or `None` if only events cause
    /// moves.
    #[must_use]
    pub fn next_round_ns(&self, table: &ChunkTable) -> Option<u64> {
        let (residency, mut tenants) = (&self.residency, table.vms());
        // In forced mode, quanta start even if no memory must be moved.
        let is_forced = residency.quanta().config().mode == Mode::Forced && table.vms().count() > 1;
        let is_evicted = tenants.any(|(_, account)| account.host != 0 || account.parked != 0);
        let is_due = is_evicted || is_forced || residency.turn().is_some() || !self.relocations.is_idle();
        is_due.then(|| residency.balancer().config().return_interval_ns)
    }

    /// Returns the tenants whose settings for sharing the time must change, and the new settings, where `None` restores
    /// their own settings. See [`Residency::competing`].
    fn changed_competitors(&self, scheduler: &Scheduler) -> Vec<(TenantId, Option<VgpuParams>)> {
        let own = |tenant| scheduler.params(tenant).copied();
        let settings = scheduler.vgpus().map(|tenant| (tenant, self.residency.competing(tenant, own)));
        settings.filter(|(tenant, settings)| settings.as_ref() != scheduler.competing(*tenant)).collect()
    }

    /// Returns the first reason why a tenant waits, or `None` if it does not wait.
    #[must_use]
    pub fn wait_reason(&self, tenant: TenantId, now: u64, standing: &Standing) -> Option<Wait> {
        let is_moving = standing.has_work && self.relocations.is_moving(tenant);
        self.residency.wait_reason(tenant, now, is_moving, standing)
    }
}

/// Returns the work that a tenant has completed on all engines since it was added.
fn work_done(scheduler: &Scheduler, tenant: TenantId) -> Done {
    let accounts = Engine::ALL.into_iter().filter_map(|engine| scheduler.account(tenant, engine));
    accounts.fold(Done::default(), |sum, account| Done {
        used_ns: sum.used_ns.saturating_add(account.used),
        ended: sum.ended.saturating_add(account.completed),
    })
}

/// Returns the number of bytes in host memory that running work can read. Excludes memory in excess of the quota of its
/// tenant, which cannot return to the card with or without quanta.
fn readable_bytes(table: &ChunkTable, running: &BTreeSet<TenantId>) -> u64 {
    let accounts = table.vms().filter(|(tenant, _)| running.contains(tenant)).map(|(_, account)| account);
    let chunks = |account: vram::VmSummary| account.host.min(account.limits.quota.saturating_sub(account.placed));
    accounts.map(|account| u64::from(chunks(account)) * table.chunk_bytes()).sum()
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

    /// Returns a card with two tenants, which have one chunk each. They use quanta if `mode` is forced.
    fn two(mode: Mode) -> (ChunkTable, Machine<TenantId, u32>) {
        let mut table = ChunkTable::new(64 * MIB, MIB, Contents::Zeroed).expect("the sizes are valid");
        table.set_host_budget(64);
        let quanta = QuantaConfig { mode, min_ns: 100 * MS, max_ns: 100 * MS, ..QuantaConfig::default() };
        let mut residency = Residency::new(vram::balance::Config::default(), quanta);
        for tenant in [ONE, TWO] {
            table.create_vm(tenant, 64 * MIB, Limits::default()).expect("the VM fits");
            table.place(tenant, table.guest_address(0)).expect("a chunk is free");
            residency.worked(tenant, 0);
        }
        let limits = Config { batch_chunks: 1, batches_most: 9, batches_few: 9, answer_ns: 1000 * MS, force_ns: None };
        (table, Machine::new(residency, limits))
    }

    /// Returns the scheduler of two tenants with equal weights.
    fn scheduler() -> Scheduler {
        let mut scheduler = Scheduler::new(sched::Config::default(), Nanos(0)).expect("defaults");
        for vgpu in [ONE, TWO] {
            scheduler.event(Nanos(0), Event::Added { vgpu, params: VgpuParams::default() }, &mut Vec::new());
        }
        scheduler
    }

    /// Begins a round in which the tenants in `working` have work.
    fn begin_round(machine: &mut Machine<TenantId, u32>, table: &ChunkTable, now: u64, working: &[TenantId]) {
        let working = working.iter().copied().collect();
        let report = Report { working, traffic: Traffic::Unknown, scheduler: &scheduler(), counts_work: false };
        machine.begin_round(table, now, &report);
    }

    /// Returns the holds that have changed.
    fn holds(machine: &mut Machine<TenantId, u32>) -> Holds {
        machine.take_changes(&scheduler()).holds
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
        begin_round(&mut machine, &table, 0, &[]);
        assert_eq!(holds(&mut machine), [(ONE, true), (TWO, true)], "memory is moving for the quantum");
        let _ = machine.residency.plan(&table, 0, Demand::default());
        // Simulate a move of the other tenant's memory, as if requested by the operator.
        begin(&mut machine, &table, TWO);
        machine.round_ended(&table, MS, None);
        assert_eq!(holds(&mut machine), []);
        assert!(machine.residency.is_loading() && machine.is_paused(ONE) && machine.is_paused(TWO));
        machine.relocations.cancel(TWO);
        machine.round_ended(&table, 2 * MS, None);
        assert_eq!(holds(&mut machine), [(ONE, false)]);
        assert!(!machine.is_paused(ONE) && machine.is_paused(TWO));
    }

    #[test]
    fn rounds_repeat_while_moves_may_be_due() {
        let (mut table, machine) = two(Mode::Auto);
        assert_eq!(machine.next_round_ns(&table), None, "no pressure, no cost");
        let interval = machine.residency.balancer().config().return_interval_ns;
        let step = vram::Step { vm: ONE, index: 0, to: vram::To::Host };
        let moves = table.start(step).expect("a chunk is free").expect("the chunk must move");
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
        let mut scheduler = scheduler();
        assert_eq!(machine.take_changes(&scheduler), Changes::default());
        begin_round(&mut machine, &table, 0, &[]);
        let changed = machine.take_changes(&scheduler).competitors;
        let [(ONE, params @ Some(group))] = changed[..] else { panic!("{changed:?}") };
        assert_eq!(group.weight, 2 * VgpuParams::default().weight, "for both");
        scheduler.event(Nanos(0), Event::Competes { vgpu: ONE, params }, &mut Vec::new());
        assert_eq!(machine.take_changes(&scheduler), Changes::default());
    }

    #[test]
    fn holder_whose_memory_moves_is_not_idle() {
        let (table, mut machine) = two(Mode::Forced);
        begin_round(&mut machine, &table, 0, &[ONE, TWO]);
        begin(&mut machine, &table, ONE);
        let rested = machine.residency.balancer().config().idle_after_ns + MS;
        begin_round(&mut machine, &table, rested, &[TWO]);
        assert_eq!(machine.residency.turn().map(|turn| turn.holder), Some(ONE));
        machine.relocations.cancel(ONE);
        begin_round(&mut machine, &table, 2 * rested, &[TWO]);
        assert_eq!(machine.residency.turn(), None, "the other tenant does not take turns alone");
    }

    #[test]
    fn assumed_traffic_excludes_memory_beyond_quota() {
        let (mut table, _) = two(Mode::Auto);
        let step = vram::Step { vm: ONE, index: 0, to: vram::To::Host };
        let moves = table.start(step).expect("room").expect("a move");
        table.commit_move(moves.id);
        let running = BTreeSet::from([ONE, TWO]);
        assert_eq!(readable_bytes(&table, &running), MIB);
        assert_eq!(readable_bytes(&table, &BTreeSet::from([TWO])), 0, "its memory is on the card");
        table.set_limits(ONE, Limits { quota: 0, ..Limits::default() }).expect("no guarantee");
        assert_eq!(readable_bytes(&table, &running), 0);
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
