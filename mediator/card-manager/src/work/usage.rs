//! A copy of a card's scheduler state, which can be read without blocking the card.

use super::Work;
use super::overdue::Overdue;
use sched::{
    Account, Config, Engine, Nanos, PERMILLE, Quarantine, Queues, Sample, Standing, VgpuParams, WHOLE_SHARE_PPM,
};
use std::collections::BTreeMap;
use vram::TenantId;

pub use tenancy::Wait;

/// State of a card's scheduler at one time.
#[derive(Clone, Debug)]
pub struct SchedulerUsage {
    /// Settings of the scheduler.
    pub config: Config,
    /// Time of the card's clock.
    pub now: Nanos,
    /// Number of submissions that wait for a slice.
    pub queued: usize,
    /// Number of submissions on the card.
    pub in_flight: usize,
    /// Time that each engine has been busy, in ns.
    pub busy: [u64; Engine::COUNT],
    /// The participating VMs.
    pub vms: BTreeMap<TenantId, VmUsage>,
}

/// A VM's part of the card's use.
#[derive(Clone, Debug)]
pub struct VmUsage {
    /// Share of the card's time.
    pub params: VgpuParams,
    /// Number of submissions that ran for too long.
    pub strikes: u32,
    /// State of quarantine.
    pub quarantine: Quarantine,
    /// Number of submissions that wait for a slice.
    pub queued: usize,
    /// Number of submissions on the card.
    pub in_flight: usize,
    /// Number of submissions whose channel is stopped because memory moves, or because of another VM's quantum.
    pub stopped: usize,
    /// Some overdue submissions, oldest first.
    pub overdue: Vec<Overdue>,
    /// Submissions and use, by engine.
    pub accounts: [Account; Engine::COUNT],
    /// Standing with the policy, by engine.
    pub standings: [Standing; Engine::COUNT],
    /// Recent use.
    pub recent: Vec<Sample>,
    /// Reason that the VM's work waits.
    pub wait: Option<Wait>,
}

impl SchedulerUsage {
    /// Returns the usage of a card without any work yet.
    #[must_use]
    pub fn idle(config: Config) -> Self {
        Self { config, now: Nanos(0), queued: 0, in_flight: 0, busy: [0; Engine::COUNT], vms: BTreeMap::new() }
    }
}

impl SchedulerUsage {
    /// Returns the part of each VM if all VMs have work. A quarantined VM has no share; its part goes to the other VMs.
    #[must_use]
    pub fn entitled(&self) -> BTreeMap<TenantId, Entitled> {
        let free = self.vms.iter().filter(|(_, vm)| vm.quarantine == Quarantine::Free);
        let (vms, params): (Vec<TenantId>, Vec<VgpuParams>) = free.map(|(id, vm)| (*id, vm.params)).unzip();
        // The part is rounded to the nearest thousandth.
        let part = WHOLE_SHARE_PPM / u64::from(PERMILLE);
        let permille = |share: u64| u32::try_from((share + part / 2) / part).unwrap_or(PERMILLE);
        let of = |engine| {
            let params: Vec<_> = params.iter().map(|params| params.for_engine(engine)).collect();
            sched::shares(&params).into_iter().map(permille)
        };
        // With one queue for all engines, copies are divided as compute is.
        let copies = if self.config.queues == Queues::Separate { Engine::Copy0 } else { Engine::Compute };
        let parts = of(Engine::Compute).zip(of(copies));
        let parts = parts.map(|(compute, copies)| Entitled { compute, copies: (copies != compute).then_some(copies) });
        vms.into_iter().zip(parts).collect()
    }
}

/// A VM's entitled parts of engines, in thousandths.
#[derive(Clone, Copy, Debug, Default)]
pub struct Entitled {
    /// The part of compute.
    pub compute: u32,
    /// The part of copies, if it differs.
    pub copies: Option<u32>,
}

/// A time window of a history.
#[derive(Clone, Copy, Debug)]
pub struct Window {
    /// Start of the window, on the card's clock.
    pub from: Nanos,
    /// End of the window.
    pub end: Nanos,
    /// Length of the window in ns.
    pub ns: u64,
}

impl VmUsage {
    /// Returns the part of a window that the VM used an engine, in thousandths.
    #[must_use]
    pub fn received_permille(&self, engine: Engine, window: &Window) -> u32 {
        let within = self.recent.iter().filter(|sample| (window.from..window.end).contains(&sample.from));
        let used: u64 = within.map(|sample| sample.used[engine.index()]).fold(0, u64::saturating_add);
        let permille = u128::from(used) * u128::from(PERMILLE) / u128::from(window.ns.max(1));
        u32::try_from(permille).unwrap_or(u32::MAX)
    }

    /// Returns true if the VM has work that has not ended, except work that its guest has stopped.
    #[must_use]
    pub fn has_work(&self) -> bool {
        self.queued + self.in_flight + self.stopped > 0
    }

    /// Returns the reason that the VM's work waits, in words; `None` if it does not wait. `name` returns a VM's name.
    #[must_use]
    pub fn waits_for(&self, name: impl Fn(TenantId) -> Option<String>) -> Option<String> {
        Some(self.wait?.in_words(|id| name(id).unwrap_or_else(|| "another VM".to_owned())))
    }
}

impl Work {
    /// Returns the part of the card's time that a VM is entitled to when all VMs have work, in millionths.
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
        let stopped = self.stopped_for_memory();
        let usage = |vm: TenantId| {
            let (strikes, quarantine) = scheduler.strikes(vm)?;
            let (queued, in_flight) = counts.get(&vm).copied().unwrap_or_default();
            Some(VmUsage {
                params: *scheduler.params(vm)?,
                strikes,
                quarantine,
                queued,
                in_flight,
                stopped: stopped.get(&vm).copied().unwrap_or(0),
                overdue: self.overdue(vm, now),
                accounts: Engine::ALL.map(|engine| scheduler.account(vm, engine).cloned().unwrap_or_default()),
                standings: Engine::ALL.map(|engine| scheduler.standing(vm, engine)),
                recent: scheduler.history(vm)?.since(since).copied().collect(),
                wait: None,
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
