//! Engines that a submission needs, as far as its push buffers show.
//!
//! The result is only a hint, because the guest can change a push buffer after it was read. Work that counts as copies
//! runs on a channel without a PGRAPH context, where a PGRAPH method faults and ends the channel.

use super::engine_numbered;
use sched::Engine;

/// Engines that a submission needs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Needs {
    /// PGRAPH, or the engines are unknown.
    #[default]
    Graphics,
    /// Only copy engines, starting with this one.
    Copies(Engine),
    /// No engine, because all methods are for the host interface.
    Host,
}

impl Needs {
    /// Returns the needs of a method for the engine with the given number on the card.
    #[must_use]
    pub(crate) fn of_engine(number: u32) -> Self {
        match engine_numbered(number) {
            Some(engine @ (Engine::Copy0 | Engine::Copy1)) => Self::Copies(engine),
            Some(Engine::Compute) | None => Self::Graphics,
        }
    }

    /// Returns the combined needs of this work and of later work with the needs `other`.
    #[must_use]
    pub fn and(self, other: Self) -> Self {
        match (self, other) {
            (Self::Host, needs) | (needs, Self::Host) => needs,
            (Self::Copies(engine), Self::Copies(_)) => Self::Copies(engine),
            (Self::Graphics, _) | (_, Self::Graphics) => Self::Graphics,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn work_that_needs_pgraph_at_any_place_needs_pgraph() {
        let [ce0, ce1] = [Engine::Copy0, Engine::Copy1].map(Needs::Copies);
        assert_eq!([ce0.and(ce1), ce1.and(ce0)], [ce0, ce1]);
        for (one, other) in [(ce0, Needs::Graphics), (Needs::Graphics, ce1), (Needs::Host, Needs::Graphics)] {
            assert_eq!(one.and(other), Needs::Graphics);
        }
        assert_eq!([Needs::Host.and(ce0), ce0.and(Needs::Host), Needs::Host.and(Needs::Host)], [ce0, ce0, Needs::Host]);
    }
}
