//! Records the card's turns and moves of memory at an operator's request.

use super::Core;
use sched::Nanos;

impl Core {
    /// Starts a recording of at most `limit` bytes. Returns false if a recording is in progress, or if the current
    /// state exceeds `limit`.
    pub fn start_record(&mut self, limit: usize) -> bool {
        let names = self.tenants.iter().map(|(&id, tenant)| (id, tenant.spec.name.clone())).collect();
        let now = Nanos(self.clock);
        self.turns.with_turns(now, |turns| turns.start_record(&names, limit, now))
    }

    /// Ends the recording and returns it, or returns `None` if no recording is in progress.
    pub fn end_record(&mut self) -> Option<Vec<u8>> {
        let now = Nanos(self.clock);
        self.turns.with_turns(now, sched::groups::GroupTurns::end_record)
    }
}
