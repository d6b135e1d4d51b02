//! Converts the tenants of a CUDA card, and other processes on it.

use std::collections::BTreeMap;
use std::path::Path;

use api::WaitKind;
use config::TenantSpec;
use cuda_control::{ServerState, TenantView};
use cuda_status::Seen;
use sched::Engine;
use tenancy::Window;

use super::time::{state, wait_reason, waits_for};

mod gang;

/// Engine that slices are charged to. A slice actually grants the whole card.
const ENGINE: Engine = Engine::Compute;

/// Returns the API object for a process that uses a card without the card's owner.
#[must_use]
pub fn stranger((pid, program, bytes): &(u32, String, Option<u64>)) -> api::Stranger {
    api::Stranger { pid: *pid, program: program.clone(), bytes: *bytes }
}

/// Returns the API object for an unresponsive program that was killed or suspended.
fn given_up(cuda_control::GivenUp { pid, program, why }: cuda_control::GivenUp) -> api::GivenUp {
    api::GivenUp { pid, program, why }
}

/// Converts a tenant's process with unaccounted memory to an API object.
fn unaccounted((pid, program, bytes): &(u32, String, u64)) -> api::Unaccounted {
    api::Unaccounted { pid: *pid, program: program.clone(), bytes: *bytes }
}

/// Converts a tenant's program to an API object.
fn program((pid, name): (u32, String)) -> api::Program {
    api::Program { pid, name, guest: None }
}

/// Adds the guest program that each worker serves to a VM tenant's list of programs.
pub fn add_guest_programs(tenant: &mut api::Tenant, served: &[api::GuestProgram]) {
    for program in &mut tenant.programs {
        let found = served.iter().find(|one| one.worker == Some(program.pid));
        program.guest = found.map(|one| api::ServedProgram { name: one.name.clone(), pid: one.pid });
    }
}

/// Converts a tenant to an API object. `seen_on` returns `None` for a card whose owner does not respond.
#[must_use]
pub fn tenant<'a>(
    spec: &TenantSpec,
    socket_dir: &Path,
    seen_on: impl Fn(&str) -> Option<&'a Seen>,
    window_ns: u64,
) -> api::Tenant {
    let mut shown = on_card(spec, spec.first_card(), socket_dir, seen_on(spec.first_card()), window_ns);
    if !spec.cards.is_empty() {
        gang::add_cards(&mut shown, spec, socket_dir, seen_on, window_ns);
    }
    shown
}

/// Converts a tenant to an API object, with its state on one of its cards.
fn on_card(spec: &TenantSpec, card: &str, socket_dir: &Path, seen: Option<&Seen>, window_ns: u64) -> api::Tenant {
    let view = seen.and_then(|seen| Some((&seen.card, seen.tenant(&spec.name)?)));
    let shown = view.map_or_else(TenantView::default, |(_, (_, view))| view.clone());
    let time = view.and_then(|(card, (id, _))| card.time.tenants.get(&id));
    let account = time.and_then(|time| time.engines.get(&ENGINE)).map(|engine| engine.account.clone());
    let account = account.unwrap_or_default();
    let memory = view.and_then(|(card, (id, _))| card.memory.summary.vms.get(&id)).copied().unwrap_or_default();
    let bytes = |chunks: u32| u64::from(chunks) * view.map_or(0, |(card, _)| card.memory.summary.chunk_bytes);
    let held_ns = view.and_then(|(card, (id, _))| card.memory.held_ns.get(&id)).copied().unwrap_or(0);
    let names = seen.map_or_else(BTreeMap::new, Seen::names);
    let received = |seen: &Seen| {
        time.map_or(0, |time| time.received_permille(ENGINE, &Window::last(seen.card.time.now, window_ns)))
    };
    api::Tenant {
        name: spec.name.clone(),
        card: card.to_owned(),
        cards: spec.cards.to_vec(),
        profile: spec.profile.clone(),
        served: view.is_some(),
        socket: spec.socket_on(card, socket_dir),
        sockets: spec.cards.iter().map(|card| spec.socket_on(card, socket_dir)).collect(),
        card_states: Vec::new(),
        vram_mib: spec.vram_mib,
        memory: spec.memory.clone(),
        time: spec.time.params(None).into(),
        share_group: spec.share_group.clone(),
        sharing: spec.sharing,
        group_state: shown.sharing.map(|state| api::GroupState {
            mps: mps_state(&state.server),
            mps_error: match state.server {
                ServerState::Unavailable(why) => Some(why),
                ServerState::Unused | ServerState::Starting | ServerState::Serves => None,
            },
            mps_pipes: state.pipes,
            sharing: state.mode,
            together: state.is_together,
            takes_part: state.takes_part,
            not_clients: state.not_clients.into_iter().map(program).collect(),
        }),
        on_stuck: spec.on_stuck,
        on_remove: spec.on_remove,
        programs: shown.programs.into_iter().map(program).collect(),
        on_card_bytes: bytes(memory.placed),
        in_host_bytes: bytes(memory.host),
        used_ns: account.used,
        busy_ns: shown.busy_ns,
        copy_ns: shown.copy_ns,
        received_permille: seen.map_or(0, received),
        entitled_permille: time.map_or(0, |time| time.entitled.compute),
        launches: shown.launches,
        wait_p99_ns: account.waits.quantile(990),
        state: time.map_or(api::WorkState::Unserved, state),
        waits_for: time.map_or_else(|| Some("the owner of its card".to_owned()), |time| waits_for(time, &names)),
        wait_reason: time.map_or_else(|| Some(WaitKind::Owner.into()), |time| Some(wait_reason(time.wait?, &names))),
        quantum_wait_ns: held_ns,
        killed: shown.killed,
        kill_failures: shown.kill_failures,
        suspended: shown.suspended,
        given_up: shown.given_up.into_iter().map(given_up).collect(),
        overrun_ns: shown.overrun_ns,
        unaccounted: shown.unaccounted.iter().map(unaccounted).collect(),
        kept_bytes: shown.kept_bytes,
        over_quota_bytes: shown.over_quota_bytes,
        strikes: time.map_or(0, |time| time.strikes),
        quarantined: time.is_some_and(|time| time.quarantine != sched::Quarantine::Free),
        labels: spec.labels.clone(),
    }
}
/// Returns the state of a group's MPS server in API form.
fn mps_state(state: &ServerState) -> api::MpsState {
    match state {
        ServerState::Unused => api::MpsState::Unused,
        ServerState::Starting => api::MpsState::Starting,
        ServerState::Serves => api::MpsState::Serves,
        ServerState::Unavailable(_) => api::MpsState::Unavailable,
    }
}
