//! The reason for which a tenant waits.

use super::Core;
use vram::TenantId;

/// Reason for which a tenant's work waits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Wait {
    /// The tenant is quarantined.
    Quarantine,
    /// The tenant's processes are stopped.
    Stopped,
    /// Another tenant has the quantum of the card's memory.
    MemoryQuantum {
        /// That tenant.
        holder: TenantId,
        /// Time left of the quantum, in ns; `None` while memory moves for it.
        left_ns: Option<u64>,
    },
    /// The tenant's own memory is being moved.
    Move,
    /// The tenant has requested memory that it has not received.
    Memory {
        /// Number of missing chunks.
        chunks: u64,
    },
    /// Another tenant has the card.
    Slice {
        /// That tenant, if it is known.
        holder: Option<TenantId>,
    },
}

impl Core {
    /// Returns the reason for which a tenant waits; `None` if it has the card, or has no work.
    pub(super) fn wait(&self, id: TenantId) -> Option<Wait> {
        let tenant = self.tenants.get(&id)?;
        let mut sessions = self.sessions.values().filter(|session| session.tenant == Some(id));
        let quarantined = self.turns.scheduler().strikes(id).is_some_and(|(_, state)| state != sched::Quarantine::Free);
        if quarantined {
            return Some(Wait::Quarantine);
        }
        if let Some((holder, left_ns)) = self.residency.wait(id, self.clock).filter(|_| self.turns.is_busy(id)) {
            let others = Wait::MemoryQuantum { holder, left_ns };
            return Some(if holder == id { Wait::Move } else { others });
        }
        if self.relocations.is_moving(id) {
            return Some(Wait::Move);
        }
        if self.waits_for_memory(id) {
            return Some(Wait::Memory { chunks: tenant.wanted });
        }
        if self.turns.has_turn(id) {
            return None;
        }
        if self.turns.is_busy(id) {
            return Some(Wait::Slice { holder: self.turns.holders().find(|holder| *holder != id) });
        }
        sessions.any(|session| session.stopped_in.is_some()).then_some(Wait::Stopped)
    }
}
