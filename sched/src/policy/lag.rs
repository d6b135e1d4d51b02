//! Lags, which track the deviation of each vGPU's use from its share over any length of time.
//!
//! Whenever a vGPU uses the engine, all current competitors become entitled to time in proportion to their shares. A
//! vGPU's lag is its use minus its entitlement, so the sum of all lags does not change while vGPUs compete. A vGPU
//! later pays in full for a long submission that could not be preempted. Time that no other vGPU wants is free of
//! charge.

use super::{Member, View};
use crate::checks::of_members;
use crate::config::MS;
use crate::shares::{WHOLE_SHARE_PPM, shares};
use crate::types::{Nanos, TenantId};
use saved_state::Invalid;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// Maximum absolute value of a lag, in ns. It equals the default run time limit of a submission.
const MAX_LAG_NS: i64 = 10_000 * MS as i64;

#[derive(Clone, Copy, Debug, Default, Serialize, Deserialize)]
struct Lag {
    /// The vGPU's use in excess of its share, in ns.
    beyond: i64,
    /// Time up to which [`Self::rest`] has updated the lag, if the vGPU does not compete.
    away: Option<Nanos>,
}

/// Lags of all vGPUs in a lane.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub(crate) struct Lags {
    lags: BTreeMap<TenantId, Lag>,
}

impl Lags {
    pub(crate) fn join(&mut self, vgpu: TenantId) {
        self.lags.insert(vgpu, Lag::default());
    }

    pub(crate) fn leave(&mut self, vgpu: TenantId) {
        self.lags.remove(&vgpu);
    }

    /// Checks that deserialized lags match `members` and are within their bounds.
    pub(crate) fn check(&self, members: &[&TenantId]) -> Result<(), Invalid> {
        of_members(self.lags.keys(), members.iter().copied())?;
        let within = self.lags.values().all(|lag| (-MAX_LAG_NS..=MAX_LAG_NS).contains(&lag.beyond));
        Invalid::unless(within, || "a vGPU is further from its share than it can be".into())
    }

    /// Returns a vGPU's use in excess of its share, in ns.
    pub(crate) fn beyond(&self, vgpu: TenantId) -> i64 {
        self.lags.get(&vgpu).map_or(0, |lag| lag.beyond)
    }

    /// Charges a vGPU `used` ns. The vGPUs that have work, or had work within `near` ns, compete. The other vGPUs
    /// [rest](Lag::rest), which limits their credit by `keep`.
    pub(crate) fn charge(&mut self, vgpu: TenantId, used: u64, near: u64, keep: u64, view: &View<'_>) {
        let now = view.now;
        let competes = |id: &TenantId, member: &Member| *id == vgpu || member.active(now, near);
        let weight = |member: &Member| u64::from(member.params.weight);
        // Shares are relative to the competitors' weights, so idle VMs do not change them.
        let theirs: u64 = view.members.iter().filter(|(id, member)| competes(id, member)).map(|(_, m)| weight(m)).sum();
        let mut competing = Vec::with_capacity(self.lags.len());
        let mut params = Vec::with_capacity(self.lags.len());
        for (id, member) in view.members {
            let Some(lag) = self.lags.get_mut(id) else { continue };
            if competes(id, member) {
                lag.away = None;
                competing.push(*id);
                params.push(member.params);
            } else {
                let own = weight(member);
                lag.rest(now, keep, WHOLE_SHARE_PPM * own / (theirs + own).max(1));
            }
        }
        if used == 0 {
            return;
        }
        let used_signed = i64::try_from(used).unwrap_or(i64::MAX);
        if let [alone] = competing[..] {
            // No other vGPU wanted the engine, so the use only reduces the vGPU's debt or credit.
            self.change(alone, |beyond| beyond - beyond.signum() * used_signed.min(beyond.saturating_abs()));
            return;
        }
        let mut rest = used_signed;
        for (id, share) in competing.iter().zip(shares(&params)) {
            let entitled =
                i64::try_from(u128::from(used) * u128::from(share) / u128::from(WHOLE_SHARE_PPM)).unwrap_or(i64::MAX);
            rest -= entitled;
            self.change(*id, |beyond| beyond.saturating_sub(entitled));
        }
        // Shares do not add up to the whole because of rounding and caps. Do not charge the remainder to any vGPU, so
        // that the sum of lags does not change.
        self.change(vgpu, |beyond| beyond.saturating_add(used_signed).saturating_sub(rest));
    }

    fn change(&mut self, vgpu: TenantId, to: impl FnOnce(i64) -> i64) {
        if let Some(lag) = self.lags.get_mut(&vgpu) {
            lag.beyond = to(lag.beyond).clamp(-MAX_LAG_NS, MAX_LAG_NS);
        }
    }
}

impl Lag {
    /// Credits a vGPU that does not compete with its share of the time, up to its share of `keep` ns. If its credit is
    /// already larger, it keeps at most `keep` ns.
    fn rest(&mut self, now: Nanos, keep: u64, share: u64) {
        let of = |ns: u64| {
            i64::try_from(u128::from(ns) * u128::from(share) / u128::from(WHOLE_SHARE_PPM)).unwrap_or(i64::MAX)
        };
        let since = self.away.replace(now).unwrap_or(now);
        let least = -of(keep);
        if self.beyond > least {
            self.beyond = self.beyond.saturating_sub(of(now.since(since))).max(least);
        } else {
            self.beyond = self.beyond.max(-i64::try_from(keep).unwrap_or(i64::MAX));
        }
    }
}
