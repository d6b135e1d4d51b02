//! Programs that were given up, with the reason, and actions on tenants, for operators.

use super::Core;
use super::types::SessionId;
use std::collections::{BTreeMap, VecDeque};
use vram::TenantId;

/// Number of programs that are kept for each tenant.
const MAX_KEPT: usize = 4;
/// Number of incidents that are kept until they are read.
const MAX_INCIDENTS: usize = 256;

/// Reason for which a program is given up.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reason {
    /// The program's work did not end within the limit of a turn.
    Turn,
    /// The program did not answer an order about its memory in time.
    Order,
    /// The program declined all orders about its memory.
    Declined,
    /// The program did not report its memory to this owner after the end of the previous one.
    Adoption,
    /// The driver did not suspend the program in time.
    Unsuspended,
    /// The program occupied the card without a turn for longer than its limit.
    Occupied,
    /// The program occupied the card for all of another tenant's turn.
    HeldUp,
    /// The program has memory in excess of its tenant's account.
    Memory,
    /// The program's tenant was removed.
    Removed,
}

impl Reason {
    /// Returns true if work on the card exceeded a limit, which counts towards quarantine.
    const fn is_strike(self) -> bool {
        match self {
            Self::Turn | Self::Occupied | Self::HeldUp => true,
            Self::Order | Self::Declined | Self::Adoption | Self::Unsuspended | Self::Memory | Self::Removed => false,
        }
    }

    /// Describes the reason.
    #[must_use]
    pub const fn in_words(self) -> &'static str {
        match self {
            Self::Turn => "its work did not end within the limit of a turn",
            Self::Order => "it did not answer an order about its memory in time",
            Self::Declined => "it declined all orders about its memory",
            Self::Adoption => "it did not report its memory to the next owner of the card",
            Self::Unsuspended => "the driver did not suspend it in time",
            Self::Occupied => "it occupied the card without a turn for longer than its limit",
            Self::HeldUp => "it occupied the card for all of another tenant's turn",
            Self::Memory => "it has memory past its tenant's account, beyond the limit",
            Self::Removed => "its tenant was removed",
        }
    }
}

/// A program that was given up.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GivenUp {
    /// Process number of the program.
    pub pid: u32,
    /// Name of the program.
    pub program: String,
    /// Reason that the program was given up.
    pub reason: Reason,
}

/// An action on a tenant.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Incident {
    /// Name of the tenant.
    pub tenant: String,
    /// The action.
    pub action: TenantAction,
}

/// An action on a tenant or one of its programs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum TenantAction {
    /// A program was killed.
    Killed(GivenUp),
    /// A program was given up, but could not be killed.
    KillFailed(GivenUp),
    /// A program was suspended.
    Suspended(GivenUp),
    /// A turn ran beyond its limit; the number of such turns.
    Struck(u32),
    /// The tenant was quarantined.
    Quarantined,
}

/// Actions on tenants that no reader has had yet.
#[derive(Debug, Default)]
pub(super) struct Incidents {
    unread: VecDeque<Incident>,
    forgotten: u64,
    /// Programs to be killed, by tenant, oldest first, each with the tenant's name.
    to_kill: BTreeMap<TenantId, VecDeque<(String, GivenUp)>>,
}

impl Incidents {
    fn add(&mut self, tenant: &str, action: TenantAction) {
        if self.unread.len() >= MAX_INCIDENTS {
            self.unread.pop_front();
            self.forgotten += 1;
        }
        self.unread.push_back(Incident { tenant: tenant.to_owned(), action });
    }
}

impl Core {
    /// Returns the actions on tenants since the last call, oldest first, and the number of those that are forgotten.
    pub fn take_incidents(&mut self) -> (Vec<Incident>, u64) {
        (self.incidents.unread.drain(..).collect(), std::mem::take(&mut self.incidents.forgotten))
    }

    /// Records that the program of a session is about to be killed.
    pub(super) fn record_kill(&mut self, id: SessionId, reason: Reason) {
        let Some(session) = self.sessions.get(&id) else { return };
        let Some(tenant) = session.tenant else { return };
        let Some(known) = self.tenants.get(&tenant) else { return };
        let program = GivenUp { pid: session.pid, program: session.program.clone(), reason };
        self.incidents.to_kill.entry(tenant).or_default().push_back((known.spec.name.clone(), program));
    }

    /// Records that the oldest program of a tenant that was to be killed was sent SIGKILL, or could not be.
    pub(super) fn record_signal(&mut self, tenant: TenantId, done: bool) {
        let Some(programs) = self.incidents.to_kill.get_mut(&tenant) else { return };
        let first = programs.pop_front();
        if programs.is_empty() {
            self.incidents.to_kill.remove(&tenant);
        }
        let Some((name, program)) = first else { return };
        let action = if done { TenantAction::Killed(program) } else { TenantAction::KillFailed(program) };
        self.incidents.add(&name, action);
    }

    /// Records that the driver has suspended a process of a tenant.
    pub(super) fn record_suspension(&mut self, tenant: TenantId, pid: u32) {
        let Some(known) = self.tenants.get(&tenant) else { return };
        let program = known.given_up.iter().rev().find(|program| program.pid == pid).cloned();
        program.into_iter().for_each(|program| {
            self.incidents.add(&known.spec.name, TenantAction::Suspended(program));
        });
    }

    /// Records that a tenant was quarantined.
    pub(super) fn record_quarantine(&mut self, tenant: TenantId) {
        tracing::warn!(tenant = tenant.0, "tenant is quarantined");
        let Some(known) = self.tenants.get(&tenant) else { return };
        self.incidents.add(&known.spec.name, TenantAction::Quarantined);
    }

    fn strikes(&self, tenant: TenantId) -> u32 {
        self.turns.scheduler().strikes(sched::TenantId(tenant.0)).map_or(0, |(strikes, _)| strikes)
    }

    /// Records that the program of a session is given up.
    pub(super) fn record_given_up(&mut self, id: SessionId, reason: Reason) {
        let Some(session) = self.sessions.get(&id) else { return };
        let Some(tenant_id) = session.tenant else { return };
        let Some(tenant) = self.tenants.get_mut(&tenant_id) else { return };
        tenant.given_up.push_back(GivenUp { pid: session.pid, program: session.program.clone(), reason });
        if tenant.given_up.len() > MAX_KEPT {
            tenant.given_up.pop_front();
        }
        let name = tenant.spec.name.clone();
        if reason.is_strike() {
            let before = self.strikes(tenant_id);
            self.turns.strike(tenant_id, self.now());
            let strikes = self.strikes(tenant_id);
            if strikes > before {
                self.incidents.add(&name, TenantAction::Struck(strikes));
            }
        }
    }
}
