//! The `[daemon.rebalance]` table: when virtual machines move from full cards to empty ones by themselves.

use serde::{Deserialize, Serialize};

/// A `[daemon.rebalance]` table. Where there is none, no virtual machine moves by itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, Serialize)]
#[serde(default, deny_unknown_fields)]
pub struct RebalanceSpec {
    /// Seconds between two looks at the cards.
    pub every_s: u64,
    /// Difference between the fullest and the emptiest card that is too much, in percent of a card.
    pub above_percent: u64,
    /// Looks in a row that must find such a difference before something moves.
    pub for_rounds: u32,
    /// Seconds for which a virtual machine that has moved stays where it is.
    pub rest_s: u64,
}

impl Default for RebalanceSpec {
    fn default() -> Self {
        Self { every_s: 60, above_percent: 25, for_rounds: 3, rest_s: 600 }
    }
}

impl RebalanceSpec {
    /// Returns the keys that are out of bounds, each with what was expected.
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
