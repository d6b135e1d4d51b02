//! Converts the division and the usage history of a card's time.

use api::{WaitKind, WaitReason};
use sched::{Account, Config, History, Nanos, Quarantine, Sample};
use tenancy::{EngineTime, Entitled, TenantTime, TimeView, Wait, Window};
use vram::TenantId;

use super::{MS, Names};

/// Returns the division of a card's time, including the shares that tenants received in the last complete intervals,
/// which total `window_ms` milliseconds.
#[must_use]
pub fn scheduler(card: &str, settings: Config, window_ms: u64, view: &TimeView, names: &Names) -> api::CardScheduler {
    let window = Window::last(view.now, window_ms * MS);
    let mut vms: Vec<_> = named(view, names).map(|(name, one)| share(name, one, &window, view.now, names)).collect();
    vms.sort_by(|one, other| one.vm.cmp(&other.vm));
    let engine = |(&engine, &busy_ns)| {
        let there = vms.iter().filter_map(|vm| vm.engines.get(&engine));
        let (used, received) = there.fold((0u64, 0u32), |(used, received), one| {
            (used.saturating_add(one.used_ns), received.saturating_add(one.received_permille))
        });
        (engine, api::EngineUse { busy_ns, departed_ns: busy_ns.saturating_sub(used), busy_permille: received })
    };
    api::CardScheduler {
        card: card.to_owned(),
        settings,
        window_ms,
        queued: view.queued as u64,
        in_flight: view.in_flight as u64,
        engines: view.busy.iter().map(engine).collect(),
        vms,
    }
}

/// Returns the usage history of a card's time for the last `since_ms` milliseconds.
#[must_use]
pub fn history(card: &str, since_ms: u64, view: &TimeView, names: &Names) -> api::SchedulerHistory {
    let window = Window { from: Nanos(view.now.0.saturating_sub(since_ms * MS)), end: Nanos(u64::MAX) };
    let sample = |sample: &Sample| {
        let used_ns = view.busy.keys().map(|&engine| (engine, sample.used[engine.index()])).collect();
        api::UseSample { from_ns: sample.from.0, used_ns }
    };
    let vms = named(view, names).map(|(name, one)| {
        let Entitled { compute, copies } = one.entitled;
        let samples = window.of(&one.recent).map(sample).collect();
        api::VmHistory { vm: name.to_owned(), entitled_permille: compute, copies_entitled_permille: copies, samples }
    });
    let mut vms: Vec<_> = vms.collect();
    vms.sort_by(|one, other| one.vm.cmp(&other.vm));
    api::SchedulerHistory {
        card: card.to_owned(),
        now_ns: view.now.0,
        since_ms,
        interval_ms: History::INTERVAL_NS / MS,
        vms,
    }
}

fn named<'a>(view: &'a TimeView, names: &'a Names) -> impl Iterator<Item = (&'a str, &'a TenantTime)> + 'a {
    names.iter().filter_map(|(id, name)| Some((name.as_str(), view.tenants.get(id)?)))
}

fn share(name: &str, time: &TenantTime, window: &Window, now: Nanos, names: &Names) -> api::VmShare {
    let engine = |(&engine, used): (&sched::Engine, &EngineTime)| {
        let Account { arrived, started, completed, dropped, killed, used: used_ns, longest, ref waits } = used.account;
        let shown = api::VmEngine {
            used_ns,
            received_permille: time.received_permille(engine, window),
            arrived,
            started,
            completed,
            dropped,
            killed,
            longest_ns: longest,
            credit_ns: used.standing.credit,
            beyond_ns: used.standing.beyond,
            wait: waits.into(),
        };
        (engine, shown)
    };
    let quarantine = match time.quarantine {
        Quarantine::Free => None,
        Quarantine::Held => Some(api::Quarantine { ends_in_ms: None }),
        Quarantine::Until(until) => Some(api::Quarantine { ends_in_ms: Some(until.since(now).div_ceil(MS)) }),
    };
    api::VmShare {
        vm: name.to_owned(),
        time: time.params.into(),
        entitled_permille: time.entitled.compute,
        copies_entitled_permille: time.entitled.copies,
        queued: time.queued as u64,
        in_flight: time.in_flight as u64,
        strikes: time.strikes,
        overdue: Vec::new(),
        state: state(time),
        waits_for: waits_for(time, names),
        wait_reason: time.wait.map(|wait| wait_reason(wait, names)),
        quarantine,
        engines: time.engines.iter().map(engine).collect(),
    }
}

/// Returns the state of a tenant's work.
pub(crate) fn state(time: &TenantTime) -> api::WorkState {
    match (time.quarantine, time.wait) {
        (Quarantine::Held | Quarantine::Until(_), _) => api::WorkState::Quarantined,
        (Quarantine::Free, Some(Wait::Stopped)) => api::WorkState::Stopped,
        (Quarantine::Free, Some(_)) => api::WorkState::Waiting,
        (Quarantine::Free, None) if time.in_flight > 0 => api::WorkState::Working,
        (Quarantine::Free, None) => api::WorkState::Idle,
    }
}

/// Describes why a tenant's work waits. Returns `None` if it does not wait.
pub(crate) fn waits_for(time: &TenantTime, names: &Names) -> Option<String> {
    let name = |id: TenantId| names.get(&id).cloned().unwrap_or_else(|| "another tenant".to_owned());
    time.wait.map(|wait| wait.in_words(name))
}

/// Converts a wait reason to its machine-readable form.
pub(crate) fn wait_reason(wait: Wait, names: &Names) -> WaitReason {
    let with = |kind, holder: TenantId| WaitReason { kind, holder: names.get(&holder).cloned() };
    match wait {
        Wait::Quarantine => WaitKind::Quarantine.into(),
        Wait::Stopped => WaitKind::Stopped.into(),
        Wait::MemoryQuantum { holder, .. } => with(WaitKind::MemoryQuantum, holder),
        Wait::Move => WaitKind::MemoryMove.into(),
        Wait::Memory { .. } => WaitKind::Memory.into(),
        Wait::Slice { holder: Some(holder) } => with(WaitKind::Slice, holder),
        Wait::Slice { holder: None } => WaitKind::Slice.into(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use sched::{Engine, Event, Scheduler, VgpuParams};
    use std::collections::BTreeMap;

    const ONE: TenantId = TenantId(1);
    const TWO: TenantId = TenantId(2);

    fn view(engines: &[Engine]) -> (TimeView, Names) {
        let mut scheduler = Scheduler::new(Config::default(), Nanos(0)).expect("defaults");
        for vgpu in [ONE, TWO] {
            let params = VgpuParams::default();
            scheduler.event(Nanos(0), Event::Added { vgpu, params }, &mut Vec::new());
        }
        let names = BTreeMap::from([(ONE, "b".to_owned()), (TWO, "a".to_owned())]);
        (TimeView::new(&scheduler, engines, Nanos(0), Nanos(0)), names)
    }

    #[test]
    fn tenants_are_listed_by_name_with_the_card_s_engines() {
        let (view, names) = view(&[Engine::Compute]);
        let shown = scheduler("card", Config::default(), 1000, &view, &names);
        let listed: Vec<_> = shown.vms.iter().map(|vm| (vm.vm.as_str(), vm.entitled_permille)).collect();
        assert_eq!(listed, [("a", 500), ("b", 500)]);
        let engines = |of: &BTreeMap<Engine, api::VmEngine>| of.keys().copied().collect::<Vec<_>>();
        assert_eq!(engines(&shown.vms[0].engines), [Engine::Compute]);
        assert_eq!(shown.engines.keys().copied().collect::<Vec<_>>(), [Engine::Compute]);
    }

    #[test]
    fn wait_decides_the_state_and_names_the_holder() {
        let (mut view, names) = view(&Engine::ALL);
        let mut shown = |wait, in_flight| {
            let time = view.tenants.get_mut(&ONE).expect("there");
            (time.wait, time.in_flight) = (wait, in_flight);
            let all = scheduler("card", Config::default(), 1000, &view, &names);
            let one = all.vms.into_iter().find(|vm| vm.vm == "b").expect("there");
            (one.state, one.waits_for, one.wait_reason.and_then(|reason| reason.holder))
        };
        assert_eq!(shown(None, 0), (api::WorkState::Idle, None, None));
        assert_eq!(shown(None, 1), (api::WorkState::Working, None, None));
        let slice = Some(Wait::Slice { holder: Some(TWO) });
        let held = ("slice of `a`".to_owned(), "a".to_owned());
        assert_eq!(shown(slice, 0), (api::WorkState::Waiting, Some(held.0), Some(held.1)));
        let unknown = Some(Wait::MemoryQuantum { holder: TenantId(9), left_ns: None });
        let words = "memory quantum of `another tenant`, whose memory is being moved".to_owned();
        assert_eq!(shown(unknown, 1), (api::WorkState::Waiting, Some(words), None));
        assert_eq!(shown(Some(Wait::Stopped), 0).0, api::WorkState::Stopped);
    }
}
