//! Saved form of interrupts. The client's descriptors are handed over separately.

use std::sync::Arc;

use saved_state::Invalid;
use serde::{Deserialize, Serialize};

use super::{Interrupts, Line, Signal, State};
use crate::event::ClientEvent;
use vmm_memory::descriptors::{Given, Giving, ParkError};

/// Saved interrupts of a device.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct SavedInterrupts {
    /// Interrupts, grouped by type.
    lines: Vec<Vec<SavedLine>>,
    level: bool,
    masked: bool,
    unmask: Option<u32>,
}

/// Saved state of an interrupt.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct SavedLine {
    event: Option<u32>,
    pending: bool,
}

impl SavedInterrupts {
    /// Clears the pending interrupts, the INTx level and the INTx mask, as on a reset. A redundant unmask by the client
    /// is harmless.
    pub(crate) fn quiet(&mut self) {
        self.lines.iter_mut().flatten().for_each(|line| line.pending = false);
        (self.level, self.masked) = (false, false);
    }
}

impl Interrupts {
    /// Saves the interrupts.
    pub(crate) fn save(&self, giving: &mut Giving<'_>) -> Result<SavedInterrupts, ParkError> {
        let State { lines, intx_level, intx_masked, unmask } = &*self.state.lock();
        let mut line = |Line { event, pending }: &Line| {
            let event = match event {
                None => None,
                Some(Signal::Event(event)) => Some(giving.give(event.fd())?),
                Some(Signal::Deliver(_)) => return Err(ParkError::Stays("interrupts")),
            };
            Ok::<_, ParkError>(SavedLine { event, pending: *pending })
        };
        let mut saved = Vec::new();
        for kind in lines {
            saved.push(kind.iter().map(&mut line).collect::<Result<Vec<_>, _>>()?);
        }
        let unmask = unmask.as_ref().map(|event| giving.give(event.fd())).transpose()?;
        Ok(SavedInterrupts { lines: saved, level: *intx_level, masked: *intx_masked, unmask })
    }

    /// Restores the interrupts without signalling any. Pending interrupts remain pending.
    pub(crate) fn restore(&self, saved: SavedInterrupts, given: &Given) -> Result<(), ParkError> {
        let SavedInterrupts { lines, level, masked, unmask } = saved;
        let event = |name: u32| {
            let event = ClientEvent::new(given.take(name)?);
            event.ok_or_else(|| ParkError::from(Invalid::new(format_args!("descriptor {name} is not an eventfd"))))
        };
        let mut state = self.state.lock();
        let same = lines.iter().map(Vec::len).eq(state.lines.iter().map(Vec::len));
        Invalid::unless(same, || "the device's interrupts differ".into())?;
        for (line, SavedLine { event: name, pending }) in
            state.lines.iter_mut().flatten().zip(lines.into_iter().flatten())
        {
            *line = Line { event: name.map(event).transpose()?.map(Signal::Event), pending };
        }
        (state.intx_level, state.intx_masked) = (level, masked);
        state.unmask = unmask.map(event).transpose()?.map(Arc::new);
        Ok(())
    }
}
