//! Selection of the card that a tenant moves to.

use config::check::Refusal;
use config::{CardKind, CardSpec, TenantSpec};

/// A card, and its model name if its owner has reported one.
type KnownCard<'a> = (&'a CardSpec, Option<&'a str>);

/// Returns the reason why a tenant cannot move to any card.
fn bound(spec: &TenantSpec) -> Option<&'static str> {
    match () {
        () if !spec.cards.is_empty() => Some("it has several cards: end its programs, and change its list of cards"),
        () if !spec.share_group.is_empty() => {
            Some("it is in a share group, whose members share one card: remove it from the group first")
        }
        () => None,
    }
}

/// Returns the reason why a tenant cannot move to a card. `refusals` returns the card's reasons to reject a tenant.
fn unsuitable(
    spec: &TenantSpec,
    to: KnownCard<'_>,
    from: KnownCard<'_>,
    refusals: impl Fn(&TenantSpec) -> Vec<Refusal>,
) -> Option<String> {
    let ((card, model), (here, model_here)) = (to, from);
    let chunks = (card.cuda().chunk_mib, here.cuda().chunk_mib);
    match () {
        () if card.name == here.name => Some("it already has that card".to_owned()),
        () if card.kind != CardKind::Cuda => Some("the card is not of kind `cuda`".to_owned()),
        () if card.drained => Some("the card is drained: `mediatorctl card undrain` lets it accept tenants".to_owned()),
        () if model != model_here => {
            let name = |model: Option<&str>| model.unwrap_or("unknown").to_owned();
            Some(format!("the card is a different model ({}, expected {})", name(model), name(model_here)))
        }
        () if chunks.0 != chunks.1 => Some(format!("its `cuda.chunk_mib` is {}, expected {}", chunks.0, chunks.1)),
        () if card.cuda().driver != here.cuda().driver => Some("the card has a different `cuda.driver`".to_owned()),
        () => {
            let there = TenantSpec { card: card.name.clone(), ..spec.clone() };
            refusals(&there).into_iter().next().map(|refusal| format!("{}: {}", refusal.field, refusal.what))
        }
    }
}

/// Returns the card that a tenant moves to: the requested one, or a suitable card selected by `place`.
///
/// # Errors
/// Returns the reason why the tenant cannot move to this card, or to any card.
pub fn chosen(
    spec: &TenantSpec,
    named: Option<&str>,
    cards: &[(CardSpec, Option<String>)],
    refusals: impl Fn(&TenantSpec) -> Vec<Refusal>,
    place: impl FnOnce(TenantSpec, &[CardSpec]) -> TenantSpec,
) -> Result<String, String> {
    if let Some(why) = bound(spec) {
        return Err(why.to_owned());
    }
    let known = || cards.iter().map(|(card, model)| (card, model.as_deref()));
    let from = known().find(|(card, _)| card.name == spec.first_card()).ok_or("its card does not exist")?;
    let (mut suitable, mut reasons) = (Vec::new(), Vec::new());
    for (card, model) in known().filter(|(card, _)| named.is_none_or(|named| card.name == named)) {
        match unsuitable(spec, (card, model), from, &refusals) {
            None => suitable.push(card.clone()),
            Some(why) if named.is_some() => return Err(why),
            Some(why) if card.name != spec.first_card() => reasons.push(format!("`{}`: {why}", card.name)),
            Some(_) => {}
        }
    }
    match place(TenantSpec { card: String::new(), ..spec.clone() }, &suitable).first_card() {
        "" if reasons.is_empty() => Err("there is no other card".to_owned()),
        "" => Err(reasons.join("; ")),
        card => Ok(card.to_owned()),
    }
}
