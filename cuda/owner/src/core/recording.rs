//! A record of the card's turns and moves of memory, on an operator's request.

use super::Core;
use sched::Nanos;

impl Core {
    /// Begins a record of at most `limit` bytes. Returns false if one is being made, or the current state does not fit.
    pub fn start_record(&mut self, limit: usize) -> bool {
        let names = self.tenants.iter().map(|(&id, tenant)| (id, tenant.spec.name.clone())).collect();
        self.turns.start_record(&names, limit, Nanos(self.clock))
    }

    /// Ends the record and returns it; `None` if none is being made.
    pub fn end_record(&mut self) -> Option<Vec<u8>> {
        self.turns.end_record()
    }
}
