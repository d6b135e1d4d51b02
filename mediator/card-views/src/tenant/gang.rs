//! Combines the states of a tenant on several cards.

use std::path::Path;

use api::{Tenant, TenantCard, WaitKind, WaitReason, WorkState};
use config::TenantSpec;
use config::cuda::gang_number;
use cuda_control::GangView;
use cuda_status::Seen;

/// Adds the state of each card to a tenant. Memory sizes and counters are summed over the cards. Uses the smallest of
/// the time shares and the longest of the waits, because the slowest card determines progress.
pub(super) fn add_cards<'a>(
    tenant: &mut Tenant,
    spec: &TenantSpec,
    socket_dir: &Path,
    seen_on: impl Fn(&str) -> Option<&'a Seen>,
    window_ns: u64,
) {
    let mut views = Vec::new();
    for (at, card) in spec.cards.iter().enumerate() {
        let seen = seen_on(card);
        let there = super::on_card(spec, card, socket_dir, seen, window_ns);
        let view = seen.and_then(|seen| seen.tenant(&spec.name)?.1.gang.clone());
        tenant.card_states.push(card_state(card, &there, view.as_ref(), spec));
        views.push((card.as_str(), view, there.state));
        if at > 0 {
            merge(tenant, there);
        }
    }
    tenant.programs.sort_by_key(|program| program.pid);
    tenant.programs.dedup_by_key(|program| program.pid);
    (tenant.state, tenant.waits_for, tenant.wait_reason) = wait(tenant, &views);
}

/// Adds the tenant's state on another card.
fn merge(tenant: &mut Tenant, other: Tenant) {
    tenant.served &= other.served;
    tenant.programs.extend(other.programs);
    tenant.given_up.extend(other.given_up);
    tenant.unaccounted.extend(other.unaccounted);
    let sums = [
        (&mut tenant.on_card_bytes, other.on_card_bytes),
        (&mut tenant.in_host_bytes, other.in_host_bytes),
        (&mut tenant.used_ns, other.used_ns),
        (&mut tenant.busy_ns, other.busy_ns),
        (&mut tenant.copy_ns, other.copy_ns),
        (&mut tenant.launches, other.launches),
        (&mut tenant.quantum_wait_ns, other.quantum_wait_ns),
        (&mut tenant.killed, other.killed),
        (&mut tenant.kill_failures, other.kill_failures),
        (&mut tenant.suspended, other.suspended),
        (&mut tenant.kept_bytes, other.kept_bytes),
        (&mut tenant.over_quota_bytes, other.over_quota_bytes),
    ];
    sums.into_iter().for_each(|(sum, more)| *sum = sum.saturating_add(more));
    tenant.received_permille = tenant.received_permille.min(other.received_permille);
    tenant.entitled_permille = tenant.entitled_permille.min(other.entitled_permille);
    tenant.wait_p99_ns = tenant.wait_p99_ns.max(other.wait_p99_ns);
    tenant.overrun_ns = tenant.overrun_ns.max(other.overrun_ns);
    tenant.strikes = tenant.strikes.saturating_add(other.strikes);
    tenant.quarantined |= other.quarantined;
}

fn card_state(card: &str, there: &Tenant, view: Option<&GangView>, spec: &TenantSpec) -> TenantCard {
    let view = view.cloned().unwrap_or_default();
    let named = |card: &&String| view.missing.iter().any(|missing| missing.0 == gang_number(card));
    TenantCard {
        card: card.to_owned(),
        served: there.served,
        unreachable: spec.cards.iter().filter(named).cloned().collect(),
        has_work: view.has_work,
        is_ready: view.runs || view.is_offered,
        on_card_bytes: there.on_card_bytes,
        in_host_bytes: there.in_host_bytes,
        used_ns: there.used_ns,
        received_permille: there.received_permille,
        turns: view.turns,
        cancelled: view.cancelled,
        gather_ns: view.gather_ns,
        longest_gather_ns: view.longest_gather_ns,
        rest_ns: view.rest_ns,
        wait_p99_ns: view.wait_p99_ns,
    }
}

/// Returns the state of the tenant's work on all cards, and the reason for its wait.
fn wait(
    tenant: &Tenant,
    views: &[(&str, Option<GangView>, WorkState)],
) -> (WorkState, Option<String>, Option<WaitReason>) {
    let own = (tenant.state, tenant.waits_for.clone(), tenant.wait_reason.clone());
    let card = |kind, what: String, card: &str| {
        let reason = WaitReason { kind, holder: Some(card.to_owned()) };
        (WorkState::Waiting, Some(what), Some(reason))
    };
    let unreached = views.iter().find(|(_, view, _)| view.is_none()).map(|(card, ..)| *card);
    let unlinked = tenant.card_states.iter().find_map(|state| state.unreachable.first());
    if let Some(name) = unreached.or(unlinked.map(String::as_str)) {
        return card(WaitKind::Owner, format!("the owner of its card `{name}`"), name);
    }
    let views: Vec<_> = views.iter().filter_map(|(name, view, state)| Some((*name, view.as_ref()?, *state))).collect();
    if views.iter().any(|(_, view, _)| view.runs) {
        return (WorkState::Working, None, None);
    }
    if let WorkState::Quarantined | WorkState::Stopped = tenant.state {
        return own;
    }
    let works = views.iter().any(|(_, view, _)| view.has_work);
    // Cards that are not available to the tenant yet delay the others.
    match views.iter().find(|(_, view, _)| !view.is_offered).filter(|_| works) {
        Some((name, ..)) if views.iter().any(|(_, view, _)| view.is_offered) => {
            card(WaitKind::Card, format!("its card `{name}`"), name)
        }
        _ => own,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use cuda_control::{Card, TenantView};
    use gang::CardId;
    use sched::TenantId;
    use std::collections::BTreeMap;

    /// Returns tenant `a` of cards `x` and `y`, with the views of the owners that respond.
    fn shown(views: [Option<GangView>; 2]) -> Tenant {
        let card = |name: &str| format!("[[card]]\nname = \"{name}\"\nkind = \"cuda\"\nvram_mib = 64\n");
        let tenant = "[[tenant]]\nname = \"a\"\ncards = [\"x\", \"y\"]\nvram_mib = 16\n";
        let text = card("x") + &card("y") + tenant;
        let spec = config::Config::parse(&text, "m.toml").expect("the file is valid").tenants.remove(0);
        let seen = views.map(|view| {
            let of_it = TenantView { name: "a".to_owned(), killed: 1, gang: Some(view?), ..TenantView::default() };
            Some(Seen { card: Card { tenants: BTreeMap::from([(TenantId(1), of_it)]), ..Card::default() } })
        });
        let of_card = |card: &str| seen[usize::from(card == "y")].as_ref();
        super::super::tenant(&spec, "/run".as_ref(), of_card, 1)
    }

    fn view(has_work: bool, is_offered: bool, runs: bool) -> Option<GangView> {
        Some(GangView { has_work, is_offered, runs, turns: 3, ..GangView::default() })
    }

    #[test]
    fn gang_waits_for_the_card_that_is_not_offered() {
        let tenant = shown([view(true, true, false), view(true, false, false)]);
        let reason = WaitReason { kind: WaitKind::Card, holder: Some("y".to_owned()) };
        assert_eq!((tenant.waits_for.as_deref(), tenant.wait_reason), (Some("its card `y`"), Some(reason)));
        assert_eq!((tenant.state, tenant.killed), (WorkState::Waiting, 2));
        assert_eq!(tenant.card_states.iter().map(|state| state.turns).collect::<Vec<_>>(), [3, 3]);
        assert_eq!(tenant.sockets, ["/run/tenants/a/x.sock", "/run/tenants/a/y.sock"].map(std::path::PathBuf::from));
        let running = shown([view(true, false, true), view(false, false, false)]);
        assert_eq!((running.state, running.waits_for), (WorkState::Working, None));
    }

    #[test]
    fn gang_waits_for_the_owner_that_is_absent_or_unreachable() {
        let unlinked = GangView { missing: vec![CardId(gang_number("y"))], ..GangView::default() };
        for views in [[view(true, true, false), None], [Some(unlinked), view(true, false, false)]] {
            let tenant = shown(views);
            assert_eq!(tenant.waits_for.as_deref(), Some("the owner of its card `y`"));
            assert_eq!(tenant.state, WorkState::Waiting);
        }
        assert!(!shown([view(true, true, false), None]).served);
    }
}
