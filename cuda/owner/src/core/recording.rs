//! A record of the card's turns and moves of memory, on an operator's request.

use super::Core;
use crate::driver::Memory;
use sched::Nanos;
use sched::trace::MemoryMove;
use std::collections::BTreeMap;
use vram::TenantId;

impl Core {
    /// Begins a record of at most `limit` bytes. Returns false if one is being made, or the current state does not fit.
    pub fn start_record(&mut self, limit: usize) -> bool {
        let names: BTreeMap<TenantId, String> =
            self.tenants.iter().map(|(&id, tenant)| (id, tenant.spec.name.clone())).collect();
        self.turns.start_record(&names, limit, Nanos(self.clock))
    }

    /// Ends the record and returns it; `None` if none is being made.
    pub fn end_record(&mut self) -> Option<Vec<u8>> {
        self.turns.end_record()
    }

    /// Adds copies of a tenant's memory that took `ns` to the record.
    pub(super) fn note_copies(&mut self, tenant: TenantId, bytes: u64, to: Memory, ns: u64) {
        let (from, until) = (Nanos(self.clock.saturating_sub(ns)), Nanos(self.clock));
        let to_card = to == Memory::Device;
        self.turns.note_move(MemoryMove { from, until, vgpu: tenant, bytes, to_card });
    }
}
