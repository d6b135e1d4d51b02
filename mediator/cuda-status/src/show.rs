//! Describes a CUDA card for the admin API, with tenants in place of virtual machines.

use std::collections::BTreeMap;

use api::{WaitKind, WaitReason};
use cuda_control::{TenantView, Wait};
use sched::{Engine, History};

use crate::Seen;
use config::{CardSpec, TenantSpec};
use overrides::Tuning;

/// Engine to which slices are charged; a slice is a grant of the whole card.
const ENGINE: Engine = Engine::Compute;
/// Number of nanoseconds in a millisecond.
const MS: u64 = 1_000_000;
/// Size of a MiB in bytes.
const MIB: u64 = 1 << 20;

/// Returns the state of a card's scheduler as an API object.
#[must_use]
pub fn scheduler(
    spec: &CardSpec,
    tuning: &Tuning,
    tenants: &[TenantSpec],
    seen: &Seen,
    window_ms: u64,
) -> api::CardScheduler {
    let (card, window_ns) = (&seen.card, window_ms * MS);
    let part = |name: &str| seen.received_permille(name, window_ns);
    let vms: Vec<_> = pairs(tenants, seen).map(|(spec, view)| share(spec, view, part(&spec.name))).collect();
    let used = card.tenants.iter().map(|tenant| tenant.used_ns).fold(0, u64::saturating_add);
    let received = card.tenants.iter().map(|tenant| part(&tenant.name)).fold(0, u32::saturating_add);
    let busy = api::EngineUse {
        busy_ns: card.busy_ns,
        departed_ns: card.busy_ns.saturating_sub(used),
        busy_permille: received,
    };
    api::CardScheduler {
        card: spec.name.clone(),
        settings: tuning.scheduler,
        window_ms,
        queued: 0,
        in_flight: card.tenants.iter().filter(|tenant| tenant.runs).count() as u64,
        engines: BTreeMap::from([(ENGINE, busy)]),
        vms,
    }
}

/// Returns the history of a card's use as an API object.
#[must_use]
pub fn history(spec: &CardSpec, tenants: &[TenantSpec], seen: &Seen, since_ms: u64) -> api::SchedulerHistory {
    let sample = |(from_ns, used)| api::UseSample { from_ns, used_ns: BTreeMap::from([(ENGINE, used)]) };
    let vms = pairs(tenants, seen).map(|(tenant, view)| api::VmHistory {
        vm: tenant.name.clone(),
        entitled_permille: view.entitled_permille,
        copies_entitled_permille: None,
        samples: seen.uses(&tenant.name, since_ms * MS).map(sample).collect(),
    });
    api::SchedulerHistory {
        card: spec.name.clone(),
        now_ns: seen.card.now_ns,
        since_ms,
        interval_ms: History::INTERVAL_NS / MS,
        vms: vms.collect(),
    }
}

fn share(spec: &TenantSpec, view: &TenantView, received_permille: u32) -> api::VmShare {
    let wait = api::Durations {
        count: view.turns,
        p50_ns: view.wait_p50_ns,
        p99_ns: view.wait_p99_ns,
        max_ns: view.wait_max_ns,
        ..api::Durations::default()
    };
    let engine = api::VmEngine {
        used_ns: view.used_ns,
        received_permille,
        started: view.turns,
        arrived: view.turns,
        completed: view.turns.saturating_sub(u64::from(view.runs)),
        killed: view.killed,
        wait,
        ..api::VmEngine::default()
    };
    api::VmShare {
        vm: spec.name.clone(),
        time: spec.time.params(None).into(),
        entitled_permille: view.entitled_permille,
        copies_entitled_permille: None,
        queued: 0,
        in_flight: u64::from(view.runs),
        strikes: view.strikes,
        overdue: Vec::new(),
        quarantine: view.quarantined.then_some(api::Quarantine { ends_in_ms: None }),
        state: state(view),
        waits_for: view.waits_for.clone(),
        wait_reason: view.wait.as_ref().map(wait_reason),
        engines: BTreeMap::from([(ENGINE, engine)]),
    }
}

/// Returns the reason for a wait as an API object.
fn wait_reason(wait: &Wait) -> WaitReason {
    match wait {
        Wait::Quarantine => WaitKind::Quarantine.into(),
        Wait::Stopped => WaitKind::Stopped.into(),
        Wait::MemoryQuantum(holder) => WaitReason { kind: WaitKind::MemoryQuantum, holder: Some(holder.clone()) },
        Wait::Move => WaitKind::MemoryMove.into(),
        Wait::Memory => WaitKind::Memory.into(),
        Wait::Slice => WaitKind::Slice.into(),
    }
}

/// Returns the state of a tenant's work.
fn state(view: &TenantView) -> api::WorkState {
    match (&view.waits_for, view.runs) {
        _ if view.quarantined => api::WorkState::Quarantined,
        _ if view.wait == Some(cuda_control::Wait::Stopped) => api::WorkState::Stopped,
        (Some(_), _) => api::WorkState::Waiting,
        (None, true) => api::WorkState::Working,
        (None, false) => api::WorkState::Idle,
    }
}

/// Returns a process that uses a card without its owner as an API object.
#[must_use]
pub fn stranger((pid, program, bytes): &(u32, String, Option<u64>)) -> api::Stranger {
    api::Stranger { pid: *pid, program: program.clone(), bytes: *bytes }
}

/// Returns a program that was given up as an API object.
fn given_up(cuda_control::GivenUp { pid, program, why }: cuda_control::GivenUp) -> api::GivenUp {
    api::GivenUp { pid, program, why }
}

/// Returns a tenant's process that uses memory outside its account as an API object.
fn unaccounted((pid, program, bytes): &(u32, String, u64)) -> api::Unaccounted {
    api::Unaccounted { pid: *pid, program: program.clone(), bytes: *bytes }
}

/// Returns the state of a card's memory as an API object.
#[must_use]
pub fn memory(spec: &CardSpec, tuning: &Tuning, tenants: &[TenantSpec], seen: &Seen) -> api::CardMemory {
    let card = &seen.card;
    let vms = pairs(tenants, seen).map(|(tenant, view)| holdings(tenant, view)).collect();
    let turn = card.memory_turn.clone();
    api::CardMemory {
        card: spec.name.clone(),
        settings: tuning.memory,
        chunk_bytes: spec.cuda().chunk_mib * MIB,
        card_bytes: spec.vram_mib * MIB,
        mediator_bytes: 0,
        spare_bytes: card.spare_bytes,
        to_scrub_bytes: 0,
        quarantined_bytes: 0,
        scrubbed_bytes: 0,
        reserve_used_bytes: 0,
        host_budget_bytes: tuning.memory.host_mib * MIB,
        host_used_bytes: card.host_used_bytes,
        moved_out_bytes: card.moved_out_bytes,
        moved_in_bytes: card.moved_in_bytes,
        turns: card.turns,
        copy_bytes_per_second: 0,
        turn: turn.map(|(holder, members, ns)| api::Turn { holder, members, quantum_ms: ns / 1_000_000 }),
        vms,
    }
}

fn holdings(spec: &TenantSpec, view: &TenantView) -> api::VmMemory {
    let advertised = spec.vram_mib * MIB;
    api::VmMemory {
        vm: spec.name.clone(),
        settings: spec.memory.clone(),
        advertised_bytes: advertised,
        on_card_bytes: view.on_card_bytes,
        in_host_bytes: view.in_host_bytes,
        unbacked_bytes: view.unbacked_bytes,
        moving_bytes: view.moving_bytes,
        entitled_bytes: view.entitled_bytes,
        memory_waited_ns: view.quantum_wait_ns,
        guarantee_bytes: spec.memory.guarantee_mib.unwrap_or(0) * MIB,
        quota_bytes: spec.memory.quota_mib.map_or(advertised, |mib| (mib * MIB).min(advertised)),
        on_card_peak_bytes: view.on_card_peak_bytes,
        in_host_peak_bytes: view.in_host_peak_bytes,
        born_in_host_bytes: view.born_in_host_bytes,
        moved_out_bytes: view.moved_out_bytes,
        moved_in_bytes: view.moved_in_bytes,
        ..api::VmMemory::default()
    }
}

/// Returns a tenant as an API object. `seen` is `None` if the owner does not answer.
#[must_use]
pub fn tenant(spec: &TenantSpec, socket: std::path::PathBuf, seen: Option<&Seen>, window_ns: u64) -> api::Tenant {
    let view = seen.and_then(|seen| seen.tenant(&spec.name));
    let shown = view.cloned().unwrap_or_default();
    api::Tenant {
        name: spec.name.clone(),
        card: spec.card.clone(),
        profile: spec.profile.clone(),
        served: view.is_some(),
        socket,
        vram_mib: spec.vram_mib,
        memory: spec.memory.clone(),
        time: spec.time.params(None).into(),
        share_group: spec.share_group.clone(),
        sharing: spec.sharing,
        group_state: shown.sharing.map(|state| api::GroupState {
            sharing: state.mode,
            together: state.is_together,
            takes_part: state.takes_part,
            not_clients: state.not_clients.into_iter().map(|(pid, name)| api::Program { pid, name }).collect(),
        }),
        on_stuck: spec.on_stuck,
        on_remove: spec.on_remove,
        programs: shown.programs.into_iter().map(|(pid, name)| api::Program { pid, name }).collect(),
        on_card_bytes: shown.on_card_bytes,
        in_host_bytes: shown.in_host_bytes,
        used_ns: shown.used_ns,
        busy_ns: shown.busy_ns,
        copy_ns: shown.copy_ns,
        received_permille: seen.map_or(0, |seen| seen.received_permille(&spec.name, window_ns)),
        entitled_permille: shown.entitled_permille,
        launches: shown.launches,
        wait_p99_ns: shown.wait_p99_ns,
        state: view.map_or(api::WorkState::Unserved, state),
        waits_for: view.map_or_else(|| Some("the owner of its card".to_owned()), |view| view.waits_for.clone()),
        wait_reason: view.map_or_else(|| Some(WaitKind::Owner.into()), |view| view.wait.as_ref().map(wait_reason)),
        quantum_wait_ns: shown.quantum_wait_ns,
        killed: shown.killed,
        kill_failures: shown.kill_failures,
        suspended: shown.suspended,
        given_up: shown.given_up.into_iter().map(given_up).collect(),
        overrun_ns: shown.overrun_ns,
        unaccounted: shown.unaccounted.iter().map(unaccounted).collect(),
        kept_bytes: shown.kept_bytes,
        over_quota_bytes: shown.over_quota_bytes,
        strikes: shown.strikes,
        quarantined: shown.quarantined,
        labels: spec.labels.clone(),
    }
}

fn pairs<'a>(tenants: &'a [TenantSpec], seen: &'a Seen) -> impl Iterator<Item = (&'a TenantSpec, &'a TenantView)> + 'a {
    tenants.iter().filter_map(|spec| Some((spec, seen.tenant(&spec.name)?)))
}
