//! Checks that the owners of a gang's other cards respond before the gang's program is killed.
//!
//! A kernel of a collective operation spins until its peers on other cards run. If the owner of another card is stopped
//! or restarts, the peer's gate may stay closed, and the kernel exceeds its time limit through no fault of its program.
//! Therefore, the owner of this card first sends a probe to the other owners. If one of them responds late, the time
//! limit is restarted. No probe protects a program for longer than [`SILENCE_NS`], because the kernel occupies this
//! card.

use gang::CardId;
use std::collections::{BTreeMap, BTreeSet};
use vram::TenantId;

/// Maximum delay in ns between a probe and its reply for the other owner to count as running.
// TIMEOUT: a running owner replies within milliseconds, or tens of milliseconds on a busy host.
const PROMPT_NS: u64 = 250_000_000;
/// Time in ns after which a missing reply no longer protects a program.
// TIMEOUT: the next owner of a card starts within a few seconds.
const SILENCE_NS: u64 = 30_000_000_000;

/// Result of [`Probes::check`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Check {
    /// Send a probe to the owners of these cards. Check again when they respond or after [`Probes::RECHECK_NS`].
    Ask(Vec<CardId>),
    /// Some replies are missing: check again as after `Ask`.
    Wait,
    /// The limit applies: no probe protects the program.
    Applies,
}

/// Outcome of a tenant's probe.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// All owners responded promptly: check again now.
    Prompt(TenantId),
    /// An owner responded late, or its connection was lost or opened: the limit for the tenant's work starts again.
    Late(TenantId),
}

#[derive(Clone, Debug)]
struct Probe {
    since: u64,
    missing: BTreeSet<CardId>,
}

/// Probes of one owner, one for each tenant whose work exceeds its limit.
#[derive(Debug, Default)]
pub struct Probes(BTreeMap<TenantId, Probe>);

impl Probes {
    /// Time in ns after which [`Self::check`] is called again without a reply.
    pub const RECHECK_NS: u64 = 500_000_000;

    /// Checks whether a tenant that has exceeded its limit must be stopped, or the other owners must be probed first.
    /// `others` are the tenant's other cards.
    pub fn check(&mut self, tenant: TenantId, others: impl Iterator<Item = CardId>, now: u64) -> Check {
        let Some(probe) = self.0.get(&tenant) else {
            let missing: BTreeSet<CardId> = others.collect();
            let asked = missing.iter().copied().collect();
            self.0.insert(tenant, Probe { since: now, missing });
            return Check::Ask(asked);
        };
        if !probe.missing.is_empty() && now.saturating_sub(probe.since) < SILENCE_NS {
            return Check::Wait;
        }
        self.0.remove(&tenant);
        Check::Applies
    }

    /// Records that the owner of a card has replied, or that a connection to it was lost or opened. Returns the
    /// outcomes of the probes that this completes.
    pub fn replied(&mut self, card: CardId, was_connected: bool, now: u64) -> Vec<Outcome> {
        let mut outcomes = Vec::new();
        self.0.retain(|&tenant, probe| {
            if !probe.missing.remove(&card) || !probe.missing.is_empty() && was_connected {
                return true;
            }
            let is_prompt = was_connected && now.saturating_sub(probe.since) <= PROMPT_NS;
            outcomes.push(if is_prompt { Outcome::Prompt(tenant) } else { Outcome::Late(tenant) });
            is_prompt
        });
        outcomes
    }

    /// Drops a tenant's probe, because its turn has ended.
    pub fn forget(&mut self, tenant: TenantId) {
        self.0.remove(&tenant);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const OTHERS: [CardId; 2] = [CardId(1), CardId(2)];
    const TENANT: TenantId = TenantId(7);

    fn asked() -> Probes {
        let mut probes = Probes::default();
        assert_eq!(probes.check(TENANT, OTHERS.into_iter(), 5), Check::Ask(OTHERS.into()));
        assert_eq!(probes.check(TENANT, OTHERS.into_iter(), 5), Check::Wait);
        probes
    }

    #[test]
    fn limit_applies_once_after_all_owners_reply_promptly() {
        let mut probes = asked();
        assert_eq!(probes.replied(OTHERS[0], true, 6), []);
        assert_eq!(probes.replied(OTHERS[0], true, 7), []);
        assert_eq!(probes.replied(OTHERS[1], true, 5 + PROMPT_NS), [Outcome::Prompt(TENANT)]);
        assert_eq!(probes.check(TENANT, OTHERS.into_iter(), 8), Check::Applies);
        assert_eq!(probes.check(TENANT, OTHERS.into_iter(), 9), Check::Ask(OTHERS.into()));
    }

    #[test]
    fn late_reply_or_lost_connection_restarts_the_limit() {
        let mut probes = asked();
        assert_eq!(probes.replied(OTHERS[0], true, 6), []);
        assert_eq!(probes.replied(OTHERS[1], true, 6 + PROMPT_NS), [Outcome::Late(TENANT)]);
        let mut probes = asked();
        assert_eq!(probes.replied(OTHERS[0], false, 6), [Outcome::Late(TENANT)]);
        assert_eq!(probes.check(TENANT, OTHERS.into_iter(), 9), Check::Ask(OTHERS.into()));
    }

    #[test]
    fn silent_owner_protects_a_program_for_a_bounded_time() {
        let mut probes = asked();
        assert_eq!(probes.check(TENANT, OTHERS.into_iter(), 4 + SILENCE_NS), Check::Wait);
        assert_eq!(probes.check(TENANT, OTHERS.into_iter(), 5 + SILENCE_NS), Check::Applies);
        let mut probes = asked();
        probes.forget(TENANT);
        assert_eq!(probes.replied(OTHERS[0], true, 6), []);
    }
}
