//! Placement: chooses a card for a virtual machine without a configured card, and keeps certain virtual machines apart.
//!
//! Every card that this module chooses passes [`vm`](super::vm). That function contains all requirements; this module
//! only chooses among the suitable cards.

use std::cmp::Reverse;

pub use placement::Placement;

pub use super::super::refusal::drained;

use super::{CardKind, CardSpec, DaemonSpec, Refusal, RefusalKind, VmSpec};

/// Start of the refusal if no card is suitable.
pub(crate) const NO_ROOM: &str = "no card has enough free capacity";

/// A card's memory that is not guaranteed to any virtual machine, in MiB, and a tie-breaker that decreases with the
/// VRAM visible to virtual machines.
type Room = (u64, u64);

fn room(card: &CardSpec, others: &[&VmSpec]) -> Room {
    let there = others.iter().filter(|other| other.card == card.name);
    let (sure, seen) = there.fold((0u64, 0u64), |(sure, seen), other| {
        let vram = other.vram_mib.unwrap_or(card.vram_mib);
        (sure.saturating_add(other.memory.guaranteed_mib(vram, card)), seen.saturating_add(vram))
    });
    (card.shared_mib().saturating_sub(sure), u64::MAX - seen)
}

/// Returns the reason why two virtual machines must not share a card; `None` if they may share one.
pub(crate) fn apart(vm: &VmSpec, other: &VmSpec) -> Option<String> {
    let keeps_from = |one: &VmSpec, other: &VmSpec| {
        one.apart_from.iter().find(|label| label.is_among(&other.labels)).map(ToString::to_string)
    };
    if let Some(label) = keeps_from(vm, other) {
        return Some(format!("`{label}` is a label of VM `{}`", other.name));
    }
    let label = keeps_from(other, vm)?;
    Some(format!("VM `{}` is apart from `{label}`, a label of this one, and is", other.name))
}

/// Returns true if the card runs a virtual machine to which `vm` has an affinity.
fn is_near(vm: &VmSpec, card: &CardSpec, others: &[&VmSpec]) -> bool {
    let there = others.iter().filter(|other| other.card == card.name && other.name != vm.name);
    there.into_iter().any(|other| vm.near.iter().any(|label| label.is_among(&other.labels)))
}

/// Returns the reason why the policy must not assign a card to a virtual machine; `None` if the card is suitable.
fn against(
    vm: &VmSpec,
    card: &CardSpec,
    daemon: &DaemonSpec,
    cards: &[CardSpec],
    others: &[&VmSpec],
) -> Option<Refusal> {
    let here = VmSpec { card: card.name.clone(), ..vm.clone() };
    // Errors in the VM's name or socket are reported separately, because they are the same for every card.
    let refusals = super::vm(&here, daemon, cards, others).into_iter();
    let refusals = refusals.filter(|refusal| !["name", "socket"].contains(&refusal.field));
    if let Some(refusal) = refusals.reduce(both).or_else(|| drained(card)) {
        return Some(refusal);
    }
    let near = cards.iter().find(|card| !card.drained && is_near(vm, card, others))?;
    let what = format!("card `{}` has a VM to which this VM must be near, expected that card", near.name);
    (!is_near(vm, card, others)).then_some(Refusal { kind: RefusalKind::Conflict, field: "near", what })
}

/// Combines two refusals of a card.
fn both(first: Refusal, second: Refusal) -> Refusal {
    let kind = if second.kind == RefusalKind::Invalid { second.kind } else { first.kind };
    let Refusal { field, what, .. } = first;
    Refusal { kind, field, what: format!("{what}; {}: {}", second.field, second.what) }
}

/// Chooses one of `cards` for a virtual machine by the daemon's policy, given the other virtual machines `others`.
/// Ignores the virtual machine's configured card.
#[must_use]
pub fn chosen<'a>(vm: &VmSpec, daemon: &DaemonSpec, cards: &'a [CardSpec], others: &[&VmSpec]) -> Option<&'a CardSpec> {
    let fits = |card: &&CardSpec| against(vm, card, daemon, cards, others).is_none();
    let count = |card: &CardSpec| others.iter().filter(|other| other.card == card.name).count();
    // If several cards are equal, choose the first one.
    let fitting = cards.iter().rev().filter(fits);
    match daemon.placement {
        Placement::Room | Placement::Nvlink => fitting.max_by_key(|card| room(card, others)),
        // An empty small card does not count as fuller than a used large one.
        Placement::Pack => fitting.max_by_key(|card| (count(card) > 0, Reverse(room(card, others)))),
        Placement::Spread => fitting.max_by_key(|card| (Reverse(count(card)), room(card, others))),
    }
}

/// Returns the reason why no card is suitable for a virtual machine without a configured card, including the reason for
/// each card; `None` if a card is suitable.
#[must_use]
pub fn nowhere(vm: &VmSpec, daemon: &DaemonSpec, cards: &[CardSpec], others: &[&VmSpec]) -> Option<Refusal> {
    let mut kind = RefusalKind::Invalid;
    let mut each = Vec::new();
    for card in cards {
        let Refusal { kind: of_card, field, what } = against(vm, card, daemon, cards, others)?;
        if of_card != RefusalKind::Invalid {
            kind = RefusalKind::Quota;
        }
        each.push(match card.kind {
            CardKind::Cuda if vm.cuda.is_none() => {
                format!("`{}` is of kind = \"cuda\", for tenants and for VMs with a table `cuda`", card.name)
            }
            CardKind::Cuda | CardKind::Simgpu | CardKind::Vfio => format!("`{}` ({field}: {what})", card.name),
        });
    }
    Some(Refusal { kind, field: "card", what: format!("{NO_ROOM}: {}", each.join(", ")) })
}

impl VmSpec {
    /// Assigns a virtual machine without a card to the suitable card chosen by the policy, given the other virtual
    /// machines `others`.
    #[must_use]
    pub fn placed(mut self, daemon: &DaemonSpec, cards: &[CardSpec], others: &[&VmSpec]) -> Self {
        if self.card.is_empty()
            && let Some(card) = chosen(&self, daemon, cards, others)
        {
            self.card.clone_from(&card.name);
        }
        self
    }
}

#[cfg(test)]
mod tests;
