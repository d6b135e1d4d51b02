//! Who gives memory, and who gets it.

use super::mover::Plan;
use super::registry::HostState;
use std::time::Duration;

impl HostState {
    /// What is to move now.
    pub(super) fn plan(&mut self) -> Plan {
        Plan::new()
    }

    /// When there may be more to move, if nothing happens before.
    pub(super) fn next_plan(&self) -> Option<Duration> {
        None
    }
}
