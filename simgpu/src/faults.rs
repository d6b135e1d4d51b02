//! Fault injection: simulates a failing card on demand, to test recovery.

use saved_state::Invalid;
use serde::{Deserialize, Serialize};

/// An engine that can be made to fail.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum EngineId {
    /// PGRAPH, including M2MF.
    Graph,
    /// Copy engine 0.
    Copy0,
    /// Copy engine 1.
    Copy1,
}

impl EngineId {
    /// All engines.
    pub const ALL: [Self; 3] = [Self::Graph, Self::Copy0, Self::Copy1];

    pub(crate) const fn index(self) -> usize {
        self as usize
    }
}

/// Kind of fault.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum FaultKind {
    /// The engine starts the operation but never completes it. Only a reset ends the hang.
    Hang,
    /// The operation takes longer than usual.
    Delay {
        /// Additional time in nanoseconds.
        ns: u64,
    },
    /// One byte of the operation's output is inverted.
    Corrupt,
    /// The engine's next non-stall interrupt is lost.
    DropInterrupt,
    /// The card permanently falls off the bus: reads return all ones, and writes are ignored.
    Vanish,
}

/// An armed fault.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Fault {
    /// The engine that fails.
    pub engine: EngineId,
    /// Kind of fault.
    pub kind: FaultKind,
    /// Number of successful operations before the fault: launches, or interrupts for [`FaultKind::DropInterrupt`].
    pub after: u32,
    /// Number of subsequent operations that fail, or `u32::MAX` for all.
    pub count: u32,
}

#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub(crate) struct Faults {
    armed: Vec<Fault>,
}

impl Faults {
    /// Maximum number of armed faults. The card rejects any more, which exposes mistakes in tests.
    const MAX: usize = 64;

    pub(crate) fn new(faults: &[Fault]) -> Self {
        Self { armed: faults.iter().take(Self::MAX).copied().collect() }
    }

    /// Validates saved data.
    pub(crate) fn check(&self) -> Result<(), Invalid> {
        let Self { armed } = self;
        Invalid::unless(armed.len() <= Self::MAX, || "too many faults are armed".into())
    }

    pub(crate) fn arm(&mut self, fault: Fault) -> bool {
        let room = self.armed.len() < Self::MAX;
        if room {
            self.armed.push(fault);
        }
        room
    }

    pub(crate) fn clear(&mut self) {
        self.armed.clear();
    }

    /// Counts an event of `engine` for the faults for which `applies` returns true. Returns the faults that trigger.
    fn strike(&mut self, engine: EngineId, applies: impl Fn(FaultKind) -> bool) -> Vec<FaultKind> {
        let mut struck = Vec::new();
        if self.armed.is_empty() {
            return struck;
        }
        for fault in self.armed.iter_mut().filter(|fault| fault.engine == engine && applies(fault.kind)) {
            if fault.after > 0 {
                fault.after -= 1;
            } else {
                struck.push(fault.kind);
                if fault.count != u32::MAX {
                    fault.count = fault.count.saturating_sub(1);
                }
            }
        }
        self.armed.retain(|fault| fault.count > 0 || fault.after > 0);
        struck
    }

    /// Returns the faults that apply to an operation that is about to start.
    pub(crate) fn on_launch(&mut self, engine: EngineId) -> Vec<FaultKind> {
        self.strike(engine, |kind| kind != FaultKind::DropInterrupt)
    }

    /// Returns true if a fault drops the interrupt that is about to be raised.
    pub(crate) fn drops_interrupt(&mut self, engine: EngineId) -> bool {
        !self.strike(engine, |kind| kind == FaultKind::DropInterrupt).is_empty()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fault_hits_after_n_launches_count_times_on_its_engine_only() {
        let fault = Fault { engine: EngineId::Copy0, kind: FaultKind::Hang, after: 2, count: 1 };
        let mut faults = Faults::new(&[fault]);
        assert_eq!(faults.on_launch(EngineId::Copy0), []);
        assert_eq!(faults.on_launch(EngineId::Copy1), []);
        assert_eq!(faults.on_launch(EngineId::Copy0), []);
        assert_eq!(faults.on_launch(EngineId::Copy0), [FaultKind::Hang]);
        assert_eq!(faults.on_launch(EngineId::Copy0), []);
    }

    #[test]
    fn dropped_interrupts_do_not_count_launches() {
        let fault = Fault { engine: EngineId::Graph, kind: FaultKind::DropInterrupt, after: 0, count: 1 };
        let mut faults = Faults::new(&[fault]);
        assert_eq!(faults.on_launch(EngineId::Graph), []);
        assert!(faults.drops_interrupt(EngineId::Graph));
        assert!(!faults.drops_interrupt(EngineId::Graph));
    }
}
