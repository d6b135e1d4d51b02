//! Checks tenants on one card and on several cards.

use super::super::refusal::{Refusal, RefusalKind};
use super::super::{CardKind, CardSpec};
use super::place::unplaced;
use super::{OnStuck, TenantSpec, gang_number};

/// Maximum length of a share group's name, in bytes.
const MAX_GROUP_NAME: usize = 64;

/// Maximum number of cards of one tenant, limited by the programs' message format.
pub(super) const MAX_CARDS: usize = 16;

/// Returns the refusal for a card that does not exist or is not a CUDA card.
fn unknown_card(tenant: &TenantSpec, name: &str, cards: &[CardSpec]) -> Refusal {
    let known = cards.iter().filter(|card| card.kind == CardKind::Cuda);
    let known: Vec<_> = known.map(|card| format!("`{}`", card.name)).collect();
    let known = if known.is_empty() { "a [[card]] table of that kind first".to_owned() } else { known.join(" or ") };
    let field = if tenant.cards.is_empty() { "card" } else { "cards" };
    let what = match (field, name) {
        ("card", "") => format!("this host has no card of kind = \"cuda\", expected {known}"),
        (_, name) => format!("`{name}` is not a card of kind = \"cuda\", expected {known}"),
    };
    Refusal { kind: RefusalKind::UnknownCard, field, what }
}

/// Returns the reasons to reject a tenant with several cards, except for those that concern a single card.
fn several(tenant: &TenantSpec, others: &[&TenantSpec]) -> Vec<(&'static str, String)> {
    let cards = &tenant.cards;
    let mut wrong = Vec::new();
    let mut say = |field, what: String| wrong.push((field, what));
    match &**cards {
        [] if cards.is_absent() => return wrong,
        [] => {}
        [card] => say("cards", format!("only `{card}`, expected at least two cards; for one card, set `card`")),
        _ if cards.len() > MAX_CARDS => say("cards", format!("{} cards, expected at most {MAX_CARDS}", cards.len())),
        _ => {}
    }
    if !tenant.card.is_empty() {
        say("card", format!("`{}`, expected no such key with `cards`: add the card to the list", tenant.card));
    }
    for (at, card) in cards.iter().enumerate() {
        let before = cards.iter().take(at);
        if before.clone().any(|other| other == card) {
            say("cards", format!("`{card}` is listed twice, expected each card once"));
        } else if let Some(other) = before.clone().find(|other| gang_number(other) == gang_number(card)) {
            say(
                "cards",
                format!("`{other}` and `{card}` have the same gang number, expected another name for one of them"),
            );
        }
    }
    if !tenant.share_group.is_empty() {
        let what = format!("`{}`, expected no such key with `cards`: groups share one card", tenant.share_group);
        say("share_group", what);
    }
    if tenant.on_stuck == OnStuck::Suspend {
        let what = "`suspend`, expected `kill` with `cards`: the driver suspends a program on all its cards, and the \
                    owner of one card cannot do this for the others";
        say("on_stuck", what.to_owned());
    }
    let number = gang_number(&tenant.name);
    let same = |other: &&&TenantSpec| !other.cards.is_absent() && gang_number(&other.name) == number;
    if let Some(other) = others.iter().filter(|other| other.name != tenant.name).find(same) {
        say("name", format!("its gang number is that of tenant `{}`, expected another name", other.name));
    }
    wrong
}

/// Returns the reasons to reject a tenant on one of its cards.
fn on_card(tenant: &TenantSpec, card: &CardSpec, others: &[&TenantSpec]) -> Vec<Refusal> {
    let mut refusals = Vec::new();
    let mut say = |kind, field, what| refusals.push(Refusal { kind, field, what });
    let chunk = card.cuda().chunk_mib.max(1);
    if tenant.vram_mib < chunk || tenant.vram_mib > 16 << 20 || !tenant.vram_mib.is_multiple_of(chunk) {
        let what = match tenant.vram_mib {
            0 => "missing, expected MiB of memory or a `profile` that contains it".to_owned(),
            mib => format!("{mib} MiB, expected a multiple of the chunk of {chunk} MiB"),
        };
        say(RefusalKind::Invalid, "vram_mib", what);
    }
    let whole = card.vram_mib.saturating_add(card.memory.host_mib);
    if tenant.vram_mib > whole {
        let what = format!(
            "{} MiB, expected at most {whole}: card `{}` has {} MiB, and `memory.host_mib` of it is {}",
            tenant.vram_mib, card.name, card.vram_mib, card.memory.host_mib
        );
        say(RefusalKind::Quota, "vram_mib", what);
    }
    let as_cut = CardSpec { chunk_kib: chunk << 10, ..card.clone() };
    for (field, what) in tenant.memory.check(&as_cut) {
        say(RefusalKind::Invalid, field, what);
    }
    let beside = others.iter().filter(|other| other.uses(&card.name));
    let promised: u64 = beside.map(|other| other.memory.guarantee_mib.unwrap_or(0)).fold(0, u64::saturating_add);
    let left = card.vram_mib.saturating_sub(promised);
    if let Some(guarantee) = tenant.memory.guarantee_mib.filter(|&guarantee| guarantee > left) {
        let what = format!(
            "{guarantee} MiB, expected at most the {left} MiB of card `{}` that are not guaranteed to others",
            card.name
        );
        say(RefusalKind::Quota, "memory.guarantee_mib", what);
    }
    refusals
}

/// Returns all reasons to reject a tenant, given the names of virtual machines and the tenants `others`.
#[must_use]
pub fn tenant(tenant: &TenantSpec, cards: &[CardSpec], vms: &[&str], others: &[&TenantSpec]) -> Vec<Refusal> {
    let mut refusals = Vec::new();
    let mut say = |kind, field, what| refusals.push(Refusal { kind, field, what });
    if others.iter().any(|other| other.name == tenant.name) || vms.contains(&tenant.name.as_str()) {
        let what = format!("`{}` is the name of another tenant or VM, expected a new one", tenant.name);
        say(RefusalKind::Conflict, "name", what);
    }
    for (field, what) in several(tenant, others) {
        say(RefusalKind::Invalid, field, what);
    }
    if let Some(count) = tenant.cards.to_choose() {
        let new = unplaced(tenant, count, cards, vms, others).into_iter();
        let new = new.filter(|refusal| !refusals.contains(refusal));
        refusals.extend(new.collect::<Vec<_>>());
    }
    for name in tenant.card_names().into_iter().filter(|_| tenant.cards.to_choose().is_none()) {
        match cards.iter().find(|card| card.name == name && card.kind == CardKind::Cuda) {
            // Report a value that is wrong on every card only once.
            Some(card) => {
                let new = on_card(tenant, card, others).into_iter().filter(|refusal| !refusals.contains(refusal));
                refusals.extend(new.collect::<Vec<_>>());
            }
            None => refusals.push(unknown_card(tenant, name, cards)),
        }
    }
    let mut say = |kind, field, what| refusals.push(Refusal { kind, field, what });
    if !tenant.memory.ram.is_silent() {
        let what = "expected no such table: a tenant of a CUDA card does not lend RAM".to_owned();
        say(RefusalKind::Invalid, "memory.ram", what);
    }
    let group = &tenant.share_group;
    if group.len() > MAX_GROUP_NAME || group.chars().any(|c| c.is_control() || c.is_whitespace()) {
        let what = format!("{group:?}, expected a name of at most {MAX_GROUP_NAME} bytes without spaces");
        say(RefusalKind::Invalid, "share_group", what);
    }
    if let Err(error) = tenant.time.params(None).check() {
        say(RefusalKind::Invalid, "time", error.to_string());
    }
    if !tenant.time.copies.is_silent() {
        let what = "expected no such table: a tenant has one share for all engines of its card".to_owned();
        say(RefusalKind::Invalid, "time.copies", what);
    }
    refusals
}
