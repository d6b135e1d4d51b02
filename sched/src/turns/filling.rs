//! Longer slices for two tenants that both fill the card.
//!
//! A change of turns takes up to 0.3 ms of the card's time, which is two percent of a slice. If two tenants of the same
//! latency class always have queued work, neither of them waits for a result, so their slices have twice the length.
//! Each of them then waits no longer than one of three tenants would.
//!
//! Near the end of a slice, while one other tenant waits, the holder is asked to return its turn when its program waits
//! for a result ([`Order::Yield`]). A holder that keeps its turn until the end of the slice *fills* the card.

use super::{Nanos, Order, Slice, TenantId, Turns};

/// The holder is asked to return the turn in the final `1 / ASKED_FRACTION` of a slice: about 2 ms of 15 ms.
const ASKED_FRACTION: u64 = 7;
/// Length of the slices of tenants that fill the card, as a multiple of [`super::TurnsConfig::slice_ns`].
const LONG_SLICE: u64 = 2;

/// State of the check that determines whether the holder of a slice fills the card.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum Filling {
    #[default]
    Unknown,
    /// The holder was asked to return the turn when its program waits for a result.
    Asked,
    /// The holder is a group of several members, which is not asked and keeps its slices.
    Several,
}

impl Turns {
    /// Returns the tenant that waits, if it is the only one and has the holder's latency class.
    fn only_waiting(&self, holder: TenantId) -> Option<TenantId> {
        let mut queued = self.members.iter().filter(|(_, member)| member.queued.is_some());
        let (&tenant, member) = queued.next()?;
        let is_only = queued.next().is_none() && self.reserved.is_none() && !member.offers;
        (is_only && self.class(tenant) == self.class(holder)).then_some(tenant)
    }

    /// Returns the end of a slice.
    pub(super) fn slice_end(&self, holder: TenantId, slice: &Slice) -> Nanos {
        let fills = |waiting: TenantId| self.members.get(&waiting).is_some_and(|member| member.fills);
        let is_long = slice.filling == Filling::Asked && self.only_waiting(holder).is_some_and(fills);
        slice.since.after(self.config.slice_ns * if is_long { LONG_SLICE } else { 1 })
    }

    /// Returns the time at which a holder is asked to return its turn, or `None` if it has been asked or need not be
    /// asked.
    pub(super) fn asks_at(&self, holder: TenantId, slice: &Slice) -> Option<Nanos> {
        let is_due = slice.filling == Filling::Unknown && slice.continues() && self.only_waiting(holder).is_some();
        let slice_ns = self.config.slice_ns;
        is_due.then(|| slice.since.after(slice_ns - slice_ns / ASKED_FRACTION))
    }

    /// Asks holders near the end of their slices to return their turns.
    pub(super) fn ask_near_end(&mut self, now: Nanos) {
        let is_over = |slice: &Slice| now.since(slice.since) >= self.config.slice_ns;
        let at = |holder: TenantId, slice: &Slice| {
            !is_over(slice) && self.asks_at(holder, slice).is_some_and(|at| at <= now)
        };
        let slices = self.members.iter().filter_map(|(&holder, member)| Some((holder, member.slice?)));
        let due: Vec<TenantId> =
            slices.filter(|(holder, slice)| at(*holder, slice)).map(|(holder, _)| holder).collect();
        for holder in due {
            let Some(slice) = self.members.get_mut(&holder).and_then(|member| member.slice.as_mut()) else { continue };
            slice.filling = Filling::Asked;
            if !std::mem::replace(&mut slice.yields, true) {
                self.orders.push(Order::Yield(holder));
            }
        }
    }

    /// Records that a holder consists of several members that use the card together. They do not return the turn when
    /// one of them waits for a result, so the turn does not show whether they fill the card.
    pub fn has_several_members(&mut self, holder: TenantId) {
        if let Some(slice) = self.members.get_mut(&holder).and_then(|member| member.slice.as_mut()) {
            slice.filling = Filling::Several;
        }
    }

    /// Returns true if the holder of a slice that ends now fills the card. `before` is the result for the holder's
    /// previous slice, and also applies to a slice that was recalled early.
    pub(super) fn fills(&self, slice: &Slice, before: bool, now: Nanos) -> bool {
        let Some(recalled) = slice.recalled else { return false };
        let is_whole = recalled.since(slice.since) >= self.config.slice_ns && now >= recalled;
        if is_whole { slice.filling == Filling::Asked } else { before }
    }
}
