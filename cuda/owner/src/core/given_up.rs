//! Records abandoned programs, the reasons, and actions on tenants, for operators.

use super::Core;
use super::types::SessionId;
use cuda_control::{Action, Incident};
use std::collections::VecDeque;
use vram::TenantId;

/// Maximum number of abandoned programs recorded per tenant.
const MAX_KEPT: usize = 4;
/// Maximum number of incidents that are stored until they are read.
const MAX_INCIDENTS: usize = 256;

/// Reason for abandoning a program.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reason {
    /// The program's work did not complete within the turn limit.
    Turn,
    /// The program did not reply to an order about its memory in time.
    Order,
    /// The program declined every order to move its memory.
    Declined,
    /// The program did not report its memory to this owner after the previous owner had exited.
    Adoption,
    /// The driver could not suspend the program in time.
    Unsuspended,
    /// The program occupied the card without a turn for longer than its limit.
    Occupied,
    /// The program occupied the card throughout another tenant's turn.
    HeldUp,
    /// The program uses memory in excess of its tenant's account.
    Memory,
    /// The program's tenant was removed.
    Removed,
}

impl Reason {
    /// Returns true if the reason counts toward quarantine: the program's work occupied the card for too long.
    const fn is_strike(self) -> bool {
        match self {
            Self::Turn | Self::Occupied | Self::HeldUp => true,
            Self::Order | Self::Declined | Self::Adoption | Self::Unsuspended | Self::Memory | Self::Removed => false,
        }
    }

    /// Returns a description of the reason for the operator.
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
            Self::Memory => "it has memory beyond its tenant's account and limit",
            Self::Removed => "its tenant was removed",
        }
    }
}

/// A program that the owner has abandoned.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GivenUp {
    /// Process ID of the program.
    pub pid: u32,
    /// Name of the program.
    pub program: String,
    /// Reason for abandoning the program.
    pub reason: Reason,
}

impl From<GivenUp> for cuda_control::GivenUp {
    fn from(GivenUp { pid, program, reason }: GivenUp) -> Self {
        Self { pid, program, why: reason.in_words().to_owned() }
    }
}

/// Unread actions on tenants.
#[derive(Debug, Default)]
pub(super) struct Incidents {
    unread: VecDeque<Incident>,
    forgotten: u64,
    /// Programs to be killed, oldest first, each with its tenant and the tenant's name.
    to_kill: VecDeque<(TenantId, String, GivenUp)>,
}

impl Incidents {
    fn add(&mut self, tenant: &str, action: Action) {
        self.add_incident(Incident { tenant: tenant.to_owned(), action });
    }

    pub(super) fn add_incident(&mut self, incident: Incident) {
        self.unread.push_back(incident);
        let excess = self.unread.len().saturating_sub(MAX_INCIDENTS);
        self.forgotten += self.unread.drain(..excess).count() as u64;
    }
}

impl Core {
    /// Removes and returns the unread actions on tenants, oldest first. If some were dropped, their number precedes
    /// them.
    pub fn take_incidents(&mut self) -> Vec<Incident> {
        let forgotten = std::mem::take(&mut self.incidents.forgotten);
        let forgotten = Incident { tenant: String::new(), action: Action::Forgotten(forgotten) };
        let forgotten = Some(forgotten).filter(|incident| incident.action != Action::Forgotten(0));
        forgotten.into_iter().chain(self.incidents.unread.drain(..)).collect()
    }

    /// Records that the program of a session is about to be killed.
    pub(super) fn record_kill(&mut self, id: SessionId, reason: Reason) {
        let Some(session) = self.sessions.get(&id) else { return };
        let Some((tenant, known)) = session.tenant.and_then(|id| Some((id, self.tenants.get(&id)?))) else { return };
        let program = GivenUp { pid: session.pid, program: session.program.clone(), reason };
        self.incidents.to_kill.push_back((tenant, known.spec.name.clone(), program));
    }

    /// Records whether SIGKILL was sent to the tenant's oldest program that is to be killed.
    pub(super) fn signalled(&mut self, tenant: TenantId, done: bool) {
        if let Some(known) = self.tenants.get_mut(&tenant) {
            *(if done { &mut known.killed } else { &mut known.kill_failures }) += 1;
        }
        let Some(at) = self.incidents.to_kill.iter().position(|(of, ..)| *of == tenant) else { return };
        let Some((_, name, program)) = self.incidents.to_kill.remove(at) else { return };
        let action = if done { Action::Killed(program.into()) } else { Action::KillFailed(program.into()) };
        self.incidents.add(&name, action);
    }

    /// Records that the driver has suspended an abandoned process of a tenant.
    pub(super) fn record_suspension(&mut self, tenant: TenantId, pid: u32) {
        let Some(known) = self.tenants.get(&tenant) else { return };
        if let Some(program) = known.given_up.iter().rev().find(|program| program.pid == pid) {
            self.incidents.add(&known.spec.name, Action::Suspended(program.clone().into()));
        }
    }

    /// Records that a tenant was quarantined.
    pub(super) fn record_quarantine(&mut self, tenant: TenantId) {
        tracing::warn!(tenant = tenant.0, "tenant is quarantined");
        let Some(known) = self.tenants.get(&tenant) else { return };
        self.incidents.add(&known.spec.name, Action::Quarantined);
    }

    /// Records that a session's program was abandoned, and adds a strike to its tenant if the reason is one.
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
            let before = self.turns.turns().scheduler().strikes(tenant_id);
            let now = self.now();
            self.turns.with_turns(now, |turns| turns.strike(tenant_id, now));
            let after = self.turns.turns().scheduler().strikes(tenant_id).filter(|after| Some(*after) != before);
            after.into_iter().for_each(|(strikes, _)| self.incidents.add(&name, Action::Struck(strikes)));
        }
    }
}
