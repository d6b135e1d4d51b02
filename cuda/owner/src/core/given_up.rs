//! Programs that were given up, with the reason, for operators.

use super::Core;
use super::types::SessionId;

/// Maximum number of given-up programs that are kept for each tenant.
const MAX_KEPT: usize = 4;

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

impl Core {
    /// Records that the program of a session is given up.
    pub(super) fn record_given_up(&mut self, id: SessionId, reason: Reason) {
        let Some(session) = self.sessions.get(&id) else { return };
        let Some(tenant_id) = session.tenant else { return };
        let Some(tenant) = self.tenants.get_mut(&tenant_id) else { return };
        tenant.given_up.push_back(GivenUp { pid: session.pid, program: session.program.clone(), reason });
        if tenant.given_up.len() > MAX_KEPT {
            tenant.given_up.pop_front();
        }
        if reason.is_strike() {
            self.turns.strike(tenant_id, self.now());
        }
    }
}
