//! Snapshot of a card's scheduler state, for readers that must not block the card.

use super::Work;
use super::overdue::Overdue;
use sched::{Config, Engine, Nanos};
use std::collections::BTreeMap;
use vram::TenantId;

pub use tenancy::{TenantTime, TimeView, Wait};

/// Snapshot of a card's scheduler state.
#[derive(Clone, Debug)]
pub struct SchedulerUsage {
    /// Settings of the scheduler.
    pub config: Config,
    /// Division of time, in the form common to all kinds of cards.
    pub time: TimeView,
    /// Oldest overdue submissions of each VM, oldest first.
    pub overdue: BTreeMap<TenantId, Vec<Overdue>>,
}

impl SchedulerUsage {
    /// Returns the usage of a card without any work yet.
    #[must_use]
    pub fn idle(config: Config) -> Self {
        Self { config, time: TimeView::default(), overdue: BTreeMap::new() }
    }
}

impl Work {
    /// Returns the share of the card's time to which a VM is entitled while all VMs have work, in millionths.
    pub(crate) fn time_share(&self, vm: TenantId) -> u64 {
        let scheduler = self.schedule.scheduler();
        let (ids, params): (Vec<_>, Vec<_>) =
            scheduler.vgpus().filter_map(|id| Some((id, *scheduler.params(id)?))).unzip();
        let own = ids.iter().position(|id| *id == vm);
        own.and_then(|at| sched::shares(&params).get(at).copied()).unwrap_or(0)
    }

    /// Returns the scheduler's usage data, including the use in the last `recent_ns` nanoseconds.
    pub(crate) fn usage(&self, now: Nanos, recent_ns: u64) -> SchedulerUsage {
        let scheduler = self.schedule.scheduler();
        let since = Nanos(now.0.saturating_sub(recent_ns));
        let mut time = TimeView::new(scheduler, &Engine::ALL, now, since);
        let (counts, stopped) = (self.schedule.counts(), self.stopped_for_memory());
        for (vm, of_it) in &mut time.tenants {
            (of_it.queued, of_it.in_flight) = counts.get(vm).copied().unwrap_or_default();
            of_it.has_work = of_it.queued + of_it.in_flight + stopped.get(vm).copied().unwrap_or(0) > 0;
        }
        let overdue = time.tenants.keys().map(|&vm| (vm, self.overdue(vm, now))).collect();
        SchedulerUsage { config: *scheduler.config(), time, overdue }
    }
}
