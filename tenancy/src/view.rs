//! Views of a card's memory and time for operators, in the same form for both kinds of card.

use crate::{Residency, Wait};
use sched::{Account, Engine, Nanos, PERMILLE, Quarantine, Queues, Sample, Scheduler, VgpuParams, WHOLE_SHARE_PPM};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use vram::balance::Entitlement;
use vram::{ChunkTable, Summary, TenantId, Turn};

/// Snapshot of the division of a card's memory.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct MemoryView {
    /// Accounts of the chunk table, in chunks.
    pub summary: Summary,
    /// Card memory to which each tenant is entitled, in chunks.
    pub entitled: BTreeMap<TenantId, Entitlement>,
    /// Number of chunks of each tenant that are pinned to the card.
    pub pinned: BTreeMap<TenantId, u32>,
    /// Time for which each tenant has waited for quanta, in ns.
    pub held_ns: BTreeMap<TenantId, u64>,
    /// Current quantum, if tenants take turns.
    pub turn: Option<Turn>,
    /// Number of quanta that have begun.
    pub quanta: u64,
    /// Measured copy rate between the card and the host in bytes per second, or 0 before the first copy.
    pub bytes_per_second: u64,
}

impl Residency {
    /// Returns a snapshot of the division of the memory.
    #[must_use]
    pub fn view(&self, table: &ChunkTable, now: u64) -> MemoryView {
        let summary = table.summary();
        let tenants = || summary.vms.keys().copied();
        MemoryView {
            entitled: self.balancer().entitlements(table, now),
            pinned: tenants().map(|tenant| (tenant, self.balancer().pinned(tenant))).collect(),
            held_ns: tenants().map(|tenant| (tenant, self.held_ns(tenant, now))).collect(),
            turn: self.turn().cloned(),
            quanta: self.begun(),
            bytes_per_second: self.quanta().bandwidth(),
            summary,
        }
    }
}

/// Snapshot of the division of a card's time.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct TimeView {
    /// Time on the card's clock.
    pub now: Nanos,
    /// Number of submissions that wait for a slice.
    pub queued: usize,
    /// Number of submissions on the card.
    pub in_flight: usize,
    /// Busy time of each engine whose time is divided, in ns.
    pub busy: BTreeMap<Engine, u64>,
    /// Each tenant's share and use.
    pub tenants: BTreeMap<TenantId, TenantTime>,
}

/// A tenant's share of a card's time.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct TenantTime {
    /// Configured scheduling settings.
    pub params: VgpuParams,
    /// Shares to which the tenant is entitled while all tenants have work.
    pub entitled: Entitled,
    /// Number of submissions or turns that exceeded their run time limit.
    pub strikes: u32,
    /// State of the tenant's quarantine.
    pub quarantine: Quarantine,
    /// Number of submissions that wait for a slice.
    pub queued: usize,
    /// Number of submissions on the card.
    pub in_flight: usize,
    /// True if the tenant has unfinished work, except for work that it has stopped itself.
    pub has_work: bool,
    /// The tenant's use of each engine.
    pub engines: BTreeMap<Engine, EngineTime>,
    /// Recent engine time, by interval.
    pub recent: Vec<Sample>,
    /// Reason why the tenant's work waits, if it does.
    pub wait: Option<Wait>,
}

/// A tenant's entitlement to engine time, in permille.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Entitled {
    /// Share of the compute engine.
    pub compute: u32,
    /// Share of each copy engine, or `None` if it equals `compute`.
    pub copies: Option<u32>,
}

/// A tenant's use of an engine.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct EngineTime {
    /// Account of the tenant's submissions and engine time.
    pub account: Account,
    /// The tenant's account in the policy.
    pub standing: sched::Standing,
}

/// A time window of a history.
#[derive(Clone, Copy, Debug)]
pub struct Window {
    /// Start of the window, on the card's clock.
    pub from: Nanos,
    /// End of the window.
    pub end: Nanos,
}

impl Window {
    /// Returns the window that consists of the last complete intervals of a history, with a total length of `ns` ns.
    #[must_use]
    pub fn last(now: Nanos, ns: u64) -> Self {
        let end = Nanos(now.0 - now.0 % sched::History::INTERVAL_NS);
        Self { from: Nanos(end.0.saturating_sub(ns)), end }
    }

    /// Returns the samples of a history that are within the window.
    pub fn of<'a>(&self, recent: &'a [Sample]) -> impl Iterator<Item = &'a Sample> + use<'a> {
        let Self { from, end } = *self;
        recent.iter().filter(move |sample| (from..end).contains(&sample.from))
    }
}

impl TimeView {
    /// Returns the use of the given engines, with the history since `since`. The executor adds the work in progress and
    /// the wait reasons.
    #[must_use]
    pub fn new(scheduler: &Scheduler, engines: &[Engine], now: Nanos, since: Nanos) -> Self {
        let mut entitled = entitled(scheduler);
        let tenant = |id: TenantId| {
            let (strikes, quarantine) = scheduler.strikes(id)?;
            let engine = |&engine: &Engine| {
                let account = scheduler.account(id, engine).cloned().unwrap_or_default();
                (engine, EngineTime { account, standing: scheduler.standing(id, engine) })
            };
            let time = TenantTime {
                params: *scheduler.params(id)?,
                entitled: entitled.remove(&id).unwrap_or_default(),
                strikes,
                quarantine,
                queued: 0,
                in_flight: 0,
                has_work: false,
                engines: engines.iter().map(engine).collect(),
                recent: scheduler.history(id)?.since(since).copied().collect(),
                wait: None,
            };
            Some((id, time))
        };
        Self {
            now,
            queued: scheduler.queued(),
            in_flight: scheduler.in_flight(),
            busy: engines.iter().map(|&engine| (engine, scheduler.busy(engine))).collect(),
            tenants: scheduler.vgpus().filter_map(tenant).collect(),
        }
    }

    /// Keeps only the tenants with settings of their own, and divides the time among them. The scheduler of a card with
    /// groups also contains the groups, with the sums of their members' settings.
    pub fn divide_among(&mut self, settings: impl Fn(TenantId) -> Option<VgpuParams>, queues: Queues) {
        self.tenants.retain(|&id, time| settings(id).map(|settings| time.params = settings).is_some());
        let free = self.tenants.iter().filter(|(_, time)| time.quarantine == Quarantine::Free);
        let mut entitled = divide(free.map(|(&id, time)| (id, time.params)), queues);
        for (id, time) in &mut self.tenants {
            time.entitled = entitled.remove(id).unwrap_or_default();
        }
    }
}

impl TenantTime {
    /// Returns the fraction of a window for which the tenant used an engine, in permille.
    #[must_use]
    pub fn received_permille(&self, engine: Engine, window: &Window) -> u32 {
        let used = window.of(&self.recent).map(|sample| sample.used[engine.index()]).fold(0, u64::saturating_add);
        let permille = u128::from(used) * u128::from(PERMILLE) / u128::from(window.end.since(window.from).max(1));
        u32::try_from(permille).unwrap_or(u32::MAX)
    }
}

/// Returns each tenant's entitlement while all tenants have work. Quarantined tenants get no time, which goes to the
/// other tenants.
fn entitled(scheduler: &Scheduler) -> BTreeMap<TenantId, Entitled> {
    let is_free = |id: &TenantId| scheduler.strikes(*id).is_some_and(|(_, state)| state == Quarantine::Free);
    let free = scheduler.vgpus().filter(is_free).filter_map(|id| Some((id, *scheduler.params(id)?)));
    divide(free, scheduler.config().queues)
}

/// Divides the time among tenants.
fn divide(tenants: impl Iterator<Item = (TenantId, VgpuParams)>, queues: Queues) -> BTreeMap<TenantId, Entitled> {
    let (tenants, params): (Vec<TenantId>, Vec<VgpuParams>) = tenants.unzip();
    // Round the share to the nearest permille.
    let part = WHOLE_SHARE_PPM / u64::from(PERMILLE);
    let permille = |share: u64| u32::try_from((share + part / 2) / part).unwrap_or(PERMILLE);
    let of = |engine| {
        let params: Vec<_> = params.iter().map(|params| params.for_engine(engine)).collect();
        sched::shares(&params).into_iter().map(permille)
    };
    // If all engines share one queue, copy time is divided in the same way as compute time.
    let copies = if queues == Queues::Separate { Engine::Copy0 } else { Engine::Compute };
    let parts = of(Engine::Compute).zip(of(copies));
    let parts = parts.map(|(compute, copies)| Entitled { compute, copies: (copies != compute).then_some(copies) });
    tenants.into_iter().zip(parts).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use sched::{Channel, Config, Event, Ticket};

    const ONE: TenantId = TenantId(1);
    const TWO: TenantId = TenantId(2);
    const MS: u64 = 1_000_000;

    /// Returns a scheduler with two tenants. By 250 ms, the first one has used 40 ms of compute time.
    fn used() -> Scheduler {
        let mut scheduler = Scheduler::new(Config::default(), Nanos(0)).expect("the defaults are valid");
        let mut decisions = Vec::new();
        let mut tell = |at, event| scheduler.event(Nanos(at), event, &mut decisions);
        for (vgpu, weight) in [(ONE, 300), (TWO, 100)] {
            tell(0, Event::Added { vgpu, params: VgpuParams { weight, ..VgpuParams::default() } });
        }
        let ticket = Ticket(1);
        tell(210 * MS, Event::Arrival { vgpu: ONE, channel: Channel(0), engine: Engine::Compute, ticket });
        tell(250 * MS, Event::Completed { ticket, ended: Some(Nanos(250 * MS)) });
        scheduler
    }

    #[test]
    fn time_is_divided_among_tenants_outside_quarantine() {
        let mut view = TimeView::new(&used(), &[Engine::Compute], Nanos(0), Nanos(0));
        let settings = |weight| VgpuParams { weight, ..VgpuParams::default() };
        // TWO is a group in the scheduler.
        view.divide_among(|id| (id == ONE).then(|| settings(50)), Queues::Single);
        assert_eq!(view.tenants.keys().collect::<Vec<_>>(), [&ONE]);
        assert_eq!((view.tenants[&ONE].params.weight, view.tenants[&ONE].entitled.compute), (50, 1000));
        let mut view = TimeView::new(&used(), &[Engine::Compute], Nanos(0), Nanos(0));
        view.divide_among(|_| Some(settings(100)), Queues::Single);
        assert_eq!([ONE, TWO].map(|id| view.tenants[&id].entitled.compute), [500, 500]);
        view.tenants.get_mut(&ONE).expect("the tenant exists").quarantine = Quarantine::Held;
        view.divide_among(|_| Some(settings(100)), Queues::Single);
        assert_eq!([ONE, TWO].map(|id| view.tenants[&id].entitled.compute), [0, 1000]);
    }

    #[test]
    fn received_part_counts_complete_intervals_only() {
        let scheduler = used();
        let view = |now| TimeView::new(&scheduler, &[Engine::Compute], Nanos(now), Nanos(0));
        let received = |now| {
            let window = Window::last(Nanos(now), 100 * MS);
            view(now).tenants[&ONE].received_permille(Engine::Compute, &window)
        };
        assert_eq!([received(260 * MS), received(310 * MS), received(410 * MS)], [0, 400, 0]);
        assert_eq!(view(310 * MS).tenants[&TWO].recent, []);
    }

    #[test]
    fn quarantined_tenant_is_entitled_to_no_time() {
        let mut scheduler = used();
        let parts = |scheduler: &Scheduler| {
            let view = TimeView::new(scheduler, &Engine::ALL, Nanos(0), Nanos(0));
            [ONE, TWO].map(|id| (view.tenants[&id].entitled.compute, view.tenants[&id].quarantine))
        };
        assert_eq!(parts(&scheduler), [(750, Quarantine::Free), (250, Quarantine::Free)]);
        for _ in 0..Config::default().strikes {
            scheduler.event(Nanos(0), Event::Struck { vgpu: ONE, engine: Engine::Compute }, &mut Vec::new());
        }
        let [(one, state), other] = parts(&scheduler);
        assert!(
            one == 0 && state != Quarantine::Free && other == (1000, Quarantine::Free),
            "{one} {state:?} {other:?}"
        );
    }

    #[test]
    fn views_are_unchanged_by_their_wire_form() {
        let mut time = TimeView::new(&used(), &Engine::ALL, Nanos(300 * MS), Nanos(0));
        let wait = Some(Wait::MemoryQuantum { holder: ONE, left_ns: Some(5) });
        time.tenants.get_mut(&TWO).expect("the tenant exists").wait = wait;
        let text = serde_json::to_string(&time).expect("the view can be serialized");
        assert_eq!(serde_json::from_str::<TimeView>(&text).expect("the text is a view"), time);
        let mut table = ChunkTable::new(8 << 20, 1 << 20, vram::Contents::Zeroed).expect("the sizes are valid");
        table.create_vm(TWO, 4 << 20, vram::Limits::default()).expect("the VM fits");
        let residency = Residency::new(vram::balance::Config::default(), vram::QuantaConfig::default());
        let memory = residency.view(&table, 0);
        assert_eq!(memory.summary.vms[&TWO].advertised, 4);
        let text = serde_json::to_string(&memory).expect("the view can be serialized");
        assert_eq!(serde_json::from_str::<MemoryView>(&text).expect("the text is a view"), memory);
    }
}
