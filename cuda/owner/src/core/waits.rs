//! The reason for which a tenant waits, and the time that it has waited for memory quanta.

use super::Core;
use vram::TenantId;

/// Reason for which a tenant's work waits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Wait {
    /// It is quarantined.
    Quarantine,
    /// Its processes are stopped.
    Stopped,
    /// Another tenant has the quantum of the card's memory.
    MemoryQuantum {
        /// That tenant.
        holder: TenantId,
        /// Time left of the quantum, in ns; `None` while memory moves for it.
        left_ns: Option<u64>,
    },
    /// Its own memory moves.
    Move,
    /// It has requested memory that it has not received.
    Memory {
        /// Chunks that are missing.
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
        let turn = self.quanta.turn().filter(|_| tenant.waits && self.turns.is_busy(id));
        if let Some(turn) = turn {
            let left_ns = self.quanta.left_ns(self.clock);
            let others = Wait::MemoryQuantum { holder: turn.holder, left_ns };
            return Some(if turn.holder == id { Wait::Move } else { others });
        }
        if !tenant.moving.is_empty() {
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

    /// Returns the time that a tenant with work has waited for its memory quanta, copies included, in ns.
    pub(super) fn quantum_wait_ns(&self, id: TenantId) -> u64 {
        let tenant = self.tenants.get(&id);
        tenant.map_or(0, |tenant| {
            let now = tenant.quantum_wait_since.map_or(0, |since| self.clock.saturating_sub(since));
            tenant.quantum_wait_ns.saturating_add(now)
        })
    }
}
