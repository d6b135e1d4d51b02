//! PGRAPH's classes: M2MF, compute, and the 2D and 3D classes, which can only be bound.

use nvspec::class::{id, m2mf9039};

use super::copy::m2mf::M2mf;
use super::{ContextState, Engine, EngineCx, EngineError, Progress, State};
use crate::compute::{self, Compute};

/// M2MF, compute, and the 2D and 3D classes. The latter two support only the two methods common to all classes. Work of
/// one class completes before the next method of any class.
#[derive(Debug)]
pub struct GraphClasses {
    m2mf: M2mf,
    compute: Compute,
}

impl GraphClasses {
    /// Creates the classes from `compute` and a new M2MF.
    #[must_use]
    pub fn new(compute: Compute) -> Self {
        Self { m2mf: M2mf::default(), compute }
    }
}

impl Engine for GraphClasses {
    fn class_supported(&self, class: u32) -> bool {
        matches!(class, id::FERMI_TWOD_A | id::FERMI_A | id::FERMI_COMPUTE_A) || self.m2mf.class_supported(class)
    }

    fn method(
        &mut self,
        subchannel: u8,
        class: u32,
        method: u32,
        data: u32,
        cx: &mut EngineCx<'_>,
    ) -> Result<(), EngineError> {
        match class {
            id::FERMI_COMPUTE_A => self.compute.method(method, data, cx),
            id::FERMI_TWOD_A | id::FERMI_A => match method {
                m2mf9039::NOP | m2mf9039::SERIALIZE => Ok(()),
                _ => Err(EngineError::IllegalMethod),
            },
            _ => self.m2mf.method(subchannel, class, method, data, cx),
        }
    }

    fn pending(&self) -> bool {
        self.m2mf.pending() || self.compute.pending()
    }

    fn step(&mut self, cx: &mut EngineCx<'_>, budget_bytes: u64) -> Result<Progress, EngineError> {
        if self.compute.pending() { self.compute.step(cx) } else { self.m2mf.step(cx, budget_bytes) }
    }

    fn save(&mut self) -> ContextState {
        let compute = Box::new(self.compute.save());
        match self.m2mf.save().0 {
            State::M2mf(m2mf) => ContextState(State::Graph(m2mf, compute)),
            other => ContextState(other),
        }
    }

    fn load(&mut self, state: ContextState) {
        match state.0 {
            State::Graph(m2mf, compute) => {
                self.m2mf.load(ContextState(State::M2mf(m2mf)));
                self.compute.load(*compute);
            }
            other => {
                self.m2mf.load(ContextState(other));
                self.compute.load(compute::Registers::default());
            }
        }
    }

    fn reset(&mut self) {
        self.m2mf.reset();
        self.compute.reset();
    }
}
