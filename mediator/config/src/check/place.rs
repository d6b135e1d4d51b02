//! Placement: the card of a virtual machine that names none, and which virtual machines are never on one card.
//!
//! A card that is chosen here passes [`vm`](super::vm). What a card must have for a virtual machine is said there and nowhere else;
//! here is only which of several it is.

use std::cmp::Reverse;

use serde::{Deserialize, Serialize};

use super::{CardKind, CardSpec, DaemonSpec, Refusal, RefusalKind, VmSpec};

/// A policy by which a virtual machine that names no card gets one, of those that can have it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Placement {
    /// The card of which most is promised to no one.
    #[default]
    Room,
    /// The fullest card: others stay empty as long as can be.
    Pack,
    /// The card with the fewest virtual machines, and of these the one with most room.
    Spread,
}

/// MiB that are sure to no one; of cards that promise nothing, MiB that virtual machines do not believe to have.
type Room = (u64, u64);

fn room(card: &CardSpec, others: &[&VmSpec]) -> Room {
    let there = others.iter().filter(|other| other.card == card.name);
    let (sure, seen) = there.fold((0u64, 0u64), |(sure, seen), other| {
        let vram = other.vram_mib.unwrap_or(card.vram_mib);
        (sure.saturating_add(other.memory.guaranteed_mib(vram, card)), seen.saturating_add(vram))
    });
    (card.shared_mib().saturating_sub(sure), u64::MAX - seen)
}

/// Says why two virtual machines are never on one card; nothing if they may be.
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

/// Says that a card takes nobody new.
#[must_use]
pub fn drained(card: &CardSpec) -> Option<Refusal> {
    let what = format!(
        "card `{}` is drained, expected another card; `mediatorctl card undrain {}` lets it take VMs and tenants again",
        card.name, card.name
    );
    card.drained.then_some(Refusal { kind: RefusalKind::Conflict, field: "card", what })
}

/// Says whether a virtual machine that another wants to be near to is on a card.
fn is_near(vm: &VmSpec, card: &CardSpec, others: &[&VmSpec]) -> bool {
    let there = others.iter().filter(|other| other.card == card.name && other.name != vm.name);
    there.into_iter().any(|other| vm.near.iter().any(|label| label.is_among(&other.labels)))
}

/// Says why a policy does not give a virtual machine a card; nothing if it may.
fn against(
    vm: &VmSpec,
    card: &CardSpec,
    daemon: &DaemonSpec,
    cards: &[CardSpec],
    others: &[&VmSpec],
) -> Option<Refusal> {
    let here = VmSpec { card: card.name.clone(), ..vm.clone() };
    // What is wrong with its name or its socket is told by itself, and is so on every card.
    let mut refusals = super::vm(&here, daemon, cards, others).into_iter();
    let refusal = refusals.find(|refusal| !["name", "socket"].contains(&refusal.field));
    if let Some(refusal) = refusal.or_else(|| drained(card)) {
        return Some(refusal);
    }
    let near = cards.iter().find(|card| !card.drained && is_near(vm, card, others))?;
    let what = format!("card `{}` has a VM that it is to be near to, expected that card", near.name);
    (!is_near(vm, card, others)).then_some(Refusal { kind: RefusalKind::Conflict, field: "near", what })
}

/// Chooses one of `cards` for a virtual machine beside `others`, by the daemon's policy; whatever card it names counts for nothing.
#[must_use]
pub fn chosen<'a>(vm: &VmSpec, daemon: &DaemonSpec, cards: &'a [CardSpec], others: &[&VmSpec]) -> Option<&'a CardSpec> {
    let fits = |card: &&CardSpec| against(vm, card, daemon, cards, others).is_none();
    let count = |card: &CardSpec| others.iter().filter(|other| other.card == card.name).count();
    // Of equals, the first.
    let fitting = cards.iter().rev().filter(fits);
    match daemon.placement {
        Placement::Room => fitting.max_by_key(|card| room(card, others)),
        // A small card that is empty is not fuller than a large one that is not.
        Placement::Pack => fitting.max_by_key(|card| (count(card) > 0, Reverse(room(card, others)))),
        Placement::Spread => fitting.max_by_key(|card| (Reverse(count(card)), room(card, others))),
    }
}

/// Says why no card can have a virtual machine that names none, and what each lacks; nothing if one can.
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
            CardKind::Cuda => format!("`{}` is of kind = \"cuda\", for tenants", card.name),
            CardKind::Simgpu | CardKind::Vfio => format!("`{}` ({field}: {what})", card.name),
        });
    }
    Some(Refusal { kind, field: "card", what: format!("no card has room: {}", each.join(", ")) })
}

impl VmSpec {
    /// Gives a virtual machine that names no card the one that the policy says, of those that can have it beside `others`.
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
