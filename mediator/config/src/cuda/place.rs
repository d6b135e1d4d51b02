//! Assigns cards to tenants whose configuration does not name any.
//!
//! Each card that this module considers passes [`tenant`](super::tenant). The crate `placement` chooses among them.

use placement::{Candidate, Links, Placement, choose};
use serde_json::{Map, Value};

use super::super::refusal::{Refusal, RefusalKind, drained};
use super::super::{CardKind, CardSpec};
use super::tenant::MAX_CARDS;
use super::{TenantCards, TenantSpec, tenant};

/// Start of the refusal if too few cards are suitable.
pub(crate) const TOO_FEW: &str = "fewer than";
/// Key of a tenant's table with the names or the number of its cards.
const CARDS: &str = "cards";

/// Returns the maximum amount of a tenant's memory on one card, in MiB.
fn demand_mib(tenant: &TenantSpec) -> u64 {
    tenant.memory.quota_mib.map_or(tenant.vram_mib, |quota| quota.min(tenant.vram_mib))
}

/// Converts a card to a candidate. `others` are the other tenants, including virtual machines on CUDA cards.
fn candidate<'a>(spec: &TenantSpec, card: &'a CardSpec, others: &[&TenantSpec]) -> Candidate<'a> {
    let there = || others.iter().filter(|other| other.uses(&card.name));
    let sum = |of: fn(&TenantSpec) -> u64| there().map(|other| of(other)).fold(of(spec), u64::saturating_add);
    Candidate {
        name: &card.name,
        total_mib: card.vram_mib,
        seen_mib: sum(|tenant| tenant.vram_mib),
        demand_mib: sum(demand_mib),
        tenants: there().count(),
    }
}

/// Returns the reason why a tenant must not be placed on a card; `None` if the card is suitable. Errors in the tenant's
/// name or socket are the same for all cards, and are not returned.
fn against(spec: &TenantSpec, card: &CardSpec, vms: &[&str], others: &[&TenantSpec]) -> Option<Refusal> {
    if card.kind != CardKind::Cuda {
        let what = format!("it is of kind = \"{}\", expected \"cuda\"", card.kind);
        return Some(Refusal { kind: RefusalKind::UnknownCard, field: "kind", what });
    }
    let here = TenantSpec { card: card.name.clone(), cards: TenantCards::default(), ..spec.clone() };
    let refusals = tenant(&here, std::slice::from_ref(card), vms, others);
    let mut refusals = refusals.into_iter().filter(|refusal| !["name", "socket"].contains(&refusal.field));
    refusals.next().or_else(|| drained(card))
}

/// Returns the reasons to reject a tenant whose `count` cards the daemon must choose: an invalid number, or each card's
/// reason if too few cards are suitable.
pub(super) fn unplaced(
    spec: &TenantSpec,
    count: u64,
    cards: &[CardSpec],
    vms: &[&str],
    others: &[&TenantSpec],
) -> Vec<Refusal> {
    let refusal = |kind, field, what| vec![Refusal { kind, field, what }];
    let there = cards.iter().filter(|card| card.kind == CardKind::Cuda).count();
    let invalid = |what| refusal(RefusalKind::Invalid, CARDS, what);
    match count {
        0 => return invalid("0, expected a number from 2, or the names of the cards".to_owned()),
        1 => return invalid("1, expected a number from 2; for one card, omit the key or set `card`".to_owned()),
        _ if count > MAX_CARDS as u64 => return invalid(format!("{count} cards, expected at most {MAX_CARDS}")),
        _ if there == 0 => {
            let what = "this host has no card of kind = \"cuda\", expected a [[card]] table of that kind first";
            return refusal(RefusalKind::UnknownCard, CARDS, what.to_owned());
        }
        _ if count > there as u64 => {
            let what = format!("{count}, expected at most the {there} cards of kind = \"cuda\" of this host");
            return refusal(RefusalKind::Quota, CARDS, what);
        }
        _ => {}
    }
    let against = |card: &CardSpec| (against(spec, card, vms, others), card.name.clone());
    let all: Vec<_> = cards.iter().map(against).collect();
    let suitable = all.iter().filter(|(refusal, _)| refusal.is_none()).count();
    if suitable as u64 >= count {
        return Vec::new();
    }
    // If all cards reject a value for the same reason, report the error for the value's key.
    let mut of_cuda = all.iter().filter_map(|(refusal, _)| refusal.as_ref()).filter(|refusal| refusal.field != "kind");
    if let Some(first) = of_cuda.next()
        && suitable == 0
        && first.kind == RefusalKind::Invalid
        && of_cuda.all(|other| (other.field, &other.what) == (first.field, &first.what))
    {
        return vec![first.clone()];
    }
    let each = all.into_iter().map(|(refusal, name)| match refusal {
        Some(Refusal { field, what, .. }) => format!("`{name}` ({field}: {what})"),
        None => format!("`{name}` (suitable)"),
    });
    let each: Vec<_> = each.collect();
    refusal(RefusalKind::Quota, CARDS, format!("{TOO_FEW} {count} cards are suitable: {}", each.join(", ")))
}

impl TenantSpec {
    /// Assigns cards to a tenant that does not name any, given the other tenants `others`, if enough cards are
    /// suitable. The tenant's own policy takes precedence over the `default`.
    #[must_use]
    pub fn placed(
        mut self,
        (default, links): (Placement, &Links),
        cards: &[CardSpec],
        vms: &[&str],
        others: &[&TenantSpec],
    ) -> Self {
        let count = match (self.cards.to_choose(), self.card.is_empty()) {
            // Both keys are set. The check reports this error, and a number that is out of range.
            (Some(_), false) => return self,
            (Some(count), true) => usize::try_from(count).unwrap_or(usize::MAX),
            (None, is_open) if is_open && self.cards.is_absent() => 1,
            (None, _) => return self,
        };
        let policy = self.placement.unwrap_or(default);
        let fits = |card: &&CardSpec| against(&self, card, vms, others).is_none();
        let suitable: Vec<&CardSpec> = cards.iter().filter(fits).collect();
        let candidates: Vec<_> = suitable.iter().map(|card| candidate(&self, card, others)).collect();
        let chosen = choose(policy, &candidates, count, links).unwrap_or_default();
        let names = || chosen.iter().map(|&at| suitable[at].name.clone());
        match (self.cards.to_choose(), names().next()) {
            (Some(0 | 1), _) | (Some(_), None) => {}
            (Some(_), Some(_)) => self.cards = names().collect::<Vec<_>>().into(),
            (None, Some(name)) => self.card = name,
            // If no card accepts the tenant, the first card's refusal is reported.
            (None, None) => {
                let first = cards.iter().find(|card| card.kind == CardKind::Cuda);
                self.card = first.map(|card| card.name.clone()).unwrap_or_default();
            }
        }
        self
    }

    /// Removes the number of cards from a document's table for this tenant, if the tenant has that many cards. Returns
    /// the table.
    #[must_use]
    pub fn without_number(&self, mut table: Map<String, Value>) -> Map<String, Value> {
        if table.get(CARDS).and_then(Value::as_u64) == Some(self.cards.len() as u64) {
            table.remove(CARDS);
        }
        table
    }
}

/// Returns the indices of the tenants in placement order. Tenants with configured cards come first, because their
/// memory there is already assigned.
#[must_use]
pub fn placement_order(tenants: &[TenantSpec]) -> Vec<usize> {
    let mut order: Vec<usize> = (0..tenants.len()).collect();
    order.sort_by_key(|&at| tenants[at].first_card().is_empty());
    order
}

#[cfg(test)]
mod tests;
