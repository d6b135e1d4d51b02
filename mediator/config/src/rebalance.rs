//! The `[daemon.rebalance]` table: automatic moves of virtual machines from busy cards to idle ones.

use serde::{Deserialize, Serialize};

/// A `[daemon.rebalance]` table. Without it, virtual machines are not moved automatically.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, Serialize, schemars::JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct RebalanceSpec {
    /// Interval between checks of the cards, in seconds.
    pub every_s: u64,
    /// Minimum difference between the fullest and the emptiest card that triggers a move, in percent of a card.
    pub above_percent: u64,
    /// Number of consecutive checks that must find such a difference before a move.
    pub for_rounds: u32,
    /// Time that a virtual machine stays on a card after a move, in seconds.
    pub rest_s: u64,
}

impl Default for RebalanceSpec {
    fn default() -> Self {
        Self { every_s: 60, above_percent: 25, for_rounds: 3, rest_s: 600 }
    }
}

impl RebalanceSpec {
    /// Returns the keys that are out of range, each with its value and the expected range.
    pub(crate) fn check(&self) -> Vec<(&'static str, String)> {
        let Self { every_s, above_percent, for_rounds, rest_s } = *self;
        let bounds = [
            ("rebalance.every_s", every_s, 5, 86_400),
            ("rebalance.above_percent", above_percent, 1, 100),
            ("rebalance.for_rounds", u64::from(for_rounds), 1, 1000),
            ("rebalance.rest_s", rest_s, 0, 2_592_000),
        ];
        let wrong = bounds.into_iter().filter(|(_, value, least, most)| !(*least..=*most).contains(value));
        wrong.map(|(key, value, least, most)| (key, format!("{value}, expected {least} to {most}"))).collect()
    }
}
