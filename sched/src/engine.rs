//! The engines of a card.

use serde::{Deserialize, Serialize};

/// An engine of the card. It executes its work in order.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum Engine {
    /// Compute and graphics.
    Compute,
    /// First copy engine.
    Copy0,
    /// Second copy engine.
    Copy1,
}

impl Engine {
    /// All engines, by index.
    pub const ALL: [Self; Self::COUNT] = [Self::Compute, Self::Copy0, Self::Copy1];
    /// Number of engines.
    pub const COUNT: usize = 3;

    /// Returns the engine's name in the configuration.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Compute => "compute",
            Self::Copy0 => "copy0",
            Self::Copy1 => "copy1",
        }
    }

    /// Returns the engine's index in [`Self::ALL`].
    #[must_use]
    pub const fn index(self) -> usize {
        match self {
            Self::Compute => 0,
            Self::Copy0 => 1,
            Self::Copy1 => 2,
        }
    }
}
