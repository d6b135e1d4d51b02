//! Metrics of CUDA cards' tenants. Sizes are in bytes, times in seconds, and fractions are ratios.

use super::scheduler::Seconds;
use super::{Metric, described, escaped, samples};
use api::{Tenant, TenantCard, WorkState};

const TENANT: [Metric<Tenant, String>; 17] = [
    ("gpu_mediator_tenant_served", "gauge", "1 while the owner of a tenant's card responds", |tenant| {
        one(u8::from(tenant.served))
    }),
    ("gpu_mediator_tenant_programs", "gauge", "Programs of a tenant", |tenant| one(tenant.programs.len())),
    ("gpu_mediator_tenant_memory_bytes", "gauge", "Memory of a tenant, by `place`: `card`, `host`", |tenant| {
        let places = [("card", tenant.on_card_bytes), ("host", tenant.in_host_bytes)];
        places.map(|(place, bytes)| (format!("place=\"{place}\""), bytes.to_string())).into()
    }),
    ("gpu_mediator_tenant_used_seconds_total", "counter", "Card time charged to a tenant", |tenant| {
        one(Seconds(tenant.used_ns))
    }),
    (
        "gpu_mediator_tenant_busy_seconds_total",
        "counter",
        "Time in which work of a tenant was in flight, by `kind`: its `kernels`, or only its `copies`",
        |tenant| {
            let copies = tenant.copy_ns.min(tenant.busy_ns);
            let kinds = [("copies", copies), ("kernels", tenant.busy_ns - copies)];
            kinds.map(|(kind, ns)| (format!("kind=\"{kind}\""), Seconds(ns).to_string())).into()
        },
    ),
    (
        "gpu_mediator_tenant_share_ratio",
        "gauge",
        "Share of the card's time, by `part`: `entitled`, and `received` in the last second",
        |tenant| {
            let parts = [("entitled", tenant.entitled_permille), ("received", tenant.received_permille)];
            let ratio = |permille: u32| format!("{}", f64::from(permille) / 1000.0);
            parts.map(|(part, permille)| (format!("part=\"{part}\""), ratio(permille))).into()
        },
    ),
    ("gpu_mediator_tenant_wait_p99_seconds", "gauge", "99th percentile of a tenant's waits for a slice", |tenant| {
        one(Seconds(tenant.wait_p99_ns))
    }),
    (
        "gpu_mediator_tenant_quantum_wait_seconds_total",
        "counter",
        "Time that a tenant's work has waited for quanta of the card's memory, copies included",
        |tenant| one(Seconds(tenant.quantum_wait_ns)),
    ),
    (
        "gpu_mediator_tenant_state",
        "gauge",
        "1 for the state of a tenant's work, by `state`: `idle`, `working`, `waiting`, `stopped`, `quarantined`, `unserved`",
        |tenant| {
            let states = WorkState::ALL.into_iter();
            states
                .map(|state| (format!("state=\"{}\"", state.name()), u8::from(state == tenant.state).to_string()))
                .collect()
        },
    ),
    (
        "gpu_mediator_tenant_killed_total",
        "counter",
        "Programs of a tenant that were killed because they did not respond",
        |tenant| one(tenant.killed),
    ),
    (
        "gpu_mediator_tenant_kill_failures_total",
        "counter",
        "Programs of a tenant that could not be killed, and run without a connection, slices and memory",
        |tenant| one(tenant.kill_failures),
    ),
    (
        "gpu_mediator_tenant_suspended_total",
        "counter",
        "Programs of a tenant that were suspended because they did not respond",
        |tenant| one(tenant.suspended),
    ),
    (
        "gpu_mediator_tenant_unaccounted_bytes",
        "gauge",
        "Memory of the card outside a tenant's account, by `part`: `processes` (used outside their accounts), `kept` (freed, but still in use), `over_quota` (the part of both that exceeds the tenant's quota)",
        |tenant| {
            let processes = tenant.unaccounted.iter().fold(0u64, |sum, one| sum.saturating_add(one.bytes));
            let parts =
                [("processes", processes), ("kept", tenant.kept_bytes), ("over_quota", tenant.over_quota_bytes)];
            parts.map(|(part, bytes)| (format!("part=\"{part}\""), bytes.to_string())).into()
        },
    ),
    (
        "gpu_mediator_tenant_quarantined",
        "gauge",
        "1 while a tenant is quarantined, and gets no slices until it is released",
        |tenant| one(u8::from(tenant.quarantined)),
    ),
    (
        "gpu_mediator_tenant_gang_turns_total",
        "counter",
        "Turns of a tenant with several cards, by `of` (the card) and `outcome`: `begun`, or `cancelled` because its other cards were not available in time",
        |tenant| {
            let counts = |state: &TenantCard| {
                let sample = |(outcome, count): (&str, u64)| {
                    (format!("of=\"{}\",outcome=\"{outcome}\"", escaped(&state.card)), count.to_string())
                };
                [("begun", state.turns), ("cancelled", state.cancelled)].map(sample)
            };
            tenant.card_states.iter().flat_map(counts).collect()
        },
    ),
    (
        "gpu_mediator_tenant_gang_loss_seconds_total",
        "counter",
        "Time charged to a tenant with several cards in which a card had none of its work, by `of` (the card) and `reason`: `gather` (waited for its other cards), `rest` (its programs had no work on the card)",
        |tenant| {
            let times = |state: &TenantCard| {
                let sample = |(reason, ns): (&str, u64)| {
                    (format!("of=\"{}\",reason=\"{reason}\"", escaped(&state.card)), Seconds(ns).to_string())
                };
                [("gather", state.gather_ns), ("rest", state.rest_ns)].map(sample)
            };
            tenant.card_states.iter().flat_map(times).collect()
        },
    ),
    (
        "gpu_mediator_tenant_labels",
        "gauge",
        "1 for a tenant with labels, each of which becomes a label `label_KEY` of the sample",
        |tenant| described(&tenant.labels).into_iter().map(|labels| (labels, "1".to_owned())).collect(),
    ),
];

fn one(value: impl ToString) -> Vec<(String, String)> {
    vec![(String::new(), value.to_string())]
}

/// Returns the samples of all tenants.
#[must_use]
pub fn text(tenants: &[Tenant]) -> String {
    let mut text = String::new();
    samples(&mut text, &TENANT, tenants, |tenant| {
        // The values of a tenant with several cards are those of all cards.
        format!("tenant=\"{}\",card=\"{}\"", escaped(&tenant.name), escaped(&tenant.all_cards()))
    });
    text
}
