//! A copy of a card's scheduler: it is looked at without holding up the card.

use super::Work;
use super::overdue::Overdue;
use sched::{Account, Config, Engine, Nanos, Quarantine, Sample, Standing, VgpuParams};
use std::collections::BTreeMap;
use vram::TenantId;

/// A card's scheduler at one moment.
#[derive(Clone, Debug)]
pub struct SchedulerUsage {
    /// Its settings.
    pub config: Config,
    /// The card's clock.
    pub now: Nanos,
    /// Submissions that wait for their turn.
    pub queued: usize,
    /// Submissions on the card.
    pub in_flight: usize,
    /// Time that each engine has been busy, in ns.
    pub busy: [u64; Engine::COUNT],
    /// The participating VMs.
    pub vms: BTreeMap<TenantId, VmUsage>,
}

/// A VM's part of the card's use.
#[derive(Clone, Debug)]
pub struct VmUsage {
    /// Its share.
    pub params: VgpuParams,
    /// Its submissions that ran for too long.
    pub strikes: u32,
    /// Its quarantine, if it is in one.
    pub quarantine: Quarantine,
    /// Its submissions that wait for their turn.
    pub queued: usize,
    /// Its submissions on the card.
    pub in_flight: usize,
    /// Some of its old submissions, oldest first.
    pub overdue: Vec<Overdue>,
    /// Submissions and use, by engine.
    pub accounts: [Account; Engine::COUNT],
    /// Its standing with the policy, by engine.
    pub standings: [Standing; Engine::COUNT],
    /// Its use of late.
    pub recent: Vec<Sample>,
}

impl SchedulerUsage {
    /// Usage of a card without any work yet.
    #[must_use]
    pub fn idle(config: Config) -> Self {
        Self { config, now: Nanos(0), queued: 0, in_flight: 0, busy: [0; Engine::COUNT], vms: BTreeMap::new() }
    }
}

impl Work {
    /// The part of the card's time that a VM is entitled to when all VMs have work, in millionths.
    pub(crate) fn time_share(&self, vm: TenantId) -> u64 {
        let scheduler = self.schedule.scheduler();
        let (ids, params): (Vec<_>, Vec<_>) =
            scheduler.vgpus().filter_map(|id| Some((id, *scheduler.params(id)?))).unzip();
        let own = ids.iter().position(|id| *id == vm);
        own.and_then(|at| sched::shares(&params).get(at).copied()).unwrap_or(0)
    }

    /// Returns the scheduler's accounts, with uses of the last `recent_ns` nanoseconds.
    pub(crate) fn usage(&self, now: Nanos, recent_ns: u64) -> SchedulerUsage {
        let scheduler = self.schedule.scheduler();
        let since = Nanos(now.0.saturating_sub(recent_ns));
        let counts = self.schedule.counts();
        let usage = |vm: TenantId| {
            let (strikes, quarantine) = scheduler.strikes(vm)?;
            let (queued, in_flight) = counts.get(&vm).copied().unwrap_or_default();
            Some(VmUsage {
                params: *scheduler.params(vm)?,
                strikes,
                quarantine,
                queued,
                in_flight,
                overdue: self.overdue(vm, now),
                accounts: Engine::ALL.map(|engine| scheduler.account(vm, engine).cloned().unwrap_or_default()),
                standings: Engine::ALL.map(|engine| scheduler.standing(vm, engine)),
                recent: scheduler.history(vm)?.since(since).copied().collect(),
            })
        };
        SchedulerUsage {
            config: *scheduler.config(),
            now,
            queued: scheduler.queued(),
            in_flight: scheduler.in_flight(),
            busy: Engine::ALL.map(|engine| scheduler.busy(engine)),
            vms: scheduler.vgpus().filter_map(|vm| Some((vm, usage(vm)?))).collect(),
        }
    }
}
