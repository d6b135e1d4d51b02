//! Checks the state machine's accounts against each other, for tests and fuzzing.

use super::memory::MAKING_MOST;
use super::{Body, Core, OWN_NUMBERS, WORK_AT_ONCE};
use cuda_protocol::{MAX_EXPORTED, MAX_PENDING};
use std::collections::BTreeMap;

/// Maximum units of work per event: deferrable work, the message's own work, and checks of all connections.
const STEPS_MOST: u64 = WORK_AT_ONCE as u64 + 6 * MAX_EXPORTED as u64 + 2048;

impl Core {
    /// Checks that the totals, limits and owners of memory agree.
    ///
    /// # Panics
    /// Panics if the accounts disagree, or if the last event's `steps` units of work exceed the limit.
    pub(crate) fn audit(&self, steps: u64) {
        assert!(steps <= STEPS_MOST, "an event of {steps} steps");
        let mut owners = BTreeMap::new();
        let (mut on_card, mut in_host) = (0, 0);
        for (&id, tenant) in &self.tenants {
            let account = self.table.vms().find(|(vm, _)| *vm == id).map(|(_, account)| account).expect("in the table");
            (on_card, in_host) = (on_card + account.placed, in_host + account.host);
            assert!(tenant.bodies.len() as u64 <= self.most_ever(id), "{id}: more than the tenant's limit");
            assert!(self.may_use(id, 0), "{id}: {} users", tenant.users);
            let mut users = 0;
            for (&index, body) in &tenant.bodies {
                assert_eq!(self.table.is_placed(id, self.table.guest_address(index)), Some(true), "{id} {index}");
                let Body::Chunk { piece, users: own, .. } = body else { continue };
                assert!(!own.is_empty(), "{id} {index} has no user");
                assert_eq!(self.pieces.holder(*piece), Some(id), "{id} {index}: its piece belongs to another tenant");
                assert_eq!(owners.insert(*piece, (id, index)), None, "{piece:?} backs two chunks");
                users += own.len() as u64;
                for &(session, chunk) in own {
                    let known = self.sessions.get(&session);
                    let delivered = known.is_some_and(|known| known.chunks.get(&chunk) == Some(&index));
                    let pending =
                        || known.is_some_and(|known| known.pending.iter().any(|pending| pending.holds(chunk)));
                    let releasing = || self.releases.iter().any(|release| release.has(session, chunk, index));
                    assert!(delivered || pending() || releasing(), "{id} {index}: {session:?} does not know {chunk:?}");
                }
            }
            assert_eq!(users, tenant.users, "{id}: users");
            let fixed = tenant.bodies.values().filter(|body| body.is_fixed()).count();
            assert_eq!(fixed, tenant.fixed as usize, "{id}: chunks that never move");
            let sessions = || self.sessions.values().filter(|session| session.tenant == Some(id));
            let pending = || sessions().flat_map(|session| &session.pending);
            assert_eq!(pending().map(|pending| u64::from(pending.wanted)).sum::<u64>(), tenant.wanted, "{id}: wanted");
            let making = pending().map(|pending| pending.missing.len()).sum::<usize>();
            assert_eq!(making, tenant.making as usize, "{id}: pieces that are being made");
            assert!(tenant.making <= MAKING_MOST);
            assert!(sessions().count() <= self.config.connections_most);
            let _ = self.shares.count(id);
        }
        let summary = self.table.summary();
        assert!(on_card <= summary.total && in_host <= summary.host.budget.max(summary.host.used), "{summary:?}");
        for (id, session) in &self.sessions {
            assert!(session.pending.len() + session.fixing.len() <= MAX_PENDING, "{id:?}: requests");
            let Some(tenant) = session.tenant.and_then(|tenant| self.tenants.get(&tenant)) else { continue };
            for (chunk, index) in &session.chunks {
                let holds = match tenant.bodies.get(index) {
                    Some(Body::Chunk { users, .. }) => users.contains(&(*id, *chunk)),
                    Some(Body::Fixed) => true,
                    None => false,
                };
                assert!(holds, "{id:?} has {chunk:?}, which is not in the accounts");
            }
            for index in &session.fixed_indices {
                assert!(matches!(tenant.bodies.get(index), Some(Body::Fixed)), "{id:?}: fixed memory at {index}");
            }
        }
        for (piece, (session, _)) in &self.making {
            assert!(self.sessions.contains_key(session), "no request waits for {piece:?}");
        }
        for (piece, (session, chunk)) in &self.adopters {
            let adopting = self.sessions.get(session).and_then(|session| session.adopting.get(chunk));
            assert_eq!(adopting, Some(piece), "no process adopts {piece:?}");
        }
        assert!(self.next - self.first_number < OWN_NUMBERS);
    }

    /// Checks that no connection, request or chunk remains.
    ///
    /// # Panics
    /// Panics if any of these remains.
    pub(crate) fn audit_empty(&self) {
        assert!(self.sessions.is_empty() && self.machine.relocations.is_idle() && self.releases.is_empty());
        assert!(self.making.is_empty() && self.adopters.is_empty() && self.hungry.is_empty(), "a request still waits");
        for (id, tenant) in &self.tenants {
            assert!(tenant.bodies.is_empty(), "{id} has chunks without a program: {:?}", tenant.bodies);
            assert_eq!((tenant.users, tenant.wanted, tenant.making), (0, 0, 0), "{id}");
        }
        let summary = self.table.summary();
        assert_eq!((summary.free + summary.to_scrub, summary.host.used), (summary.total, 0), "{summary:?}");
    }
}
