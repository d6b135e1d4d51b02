//! The interrupt line: from the units' pending bits to MSI messages or the INTx level.
//!
//! The card signals by MSI once and then stays silent until the driver re-arms it; a unit that is still pending when
//! the driver re-arms, or re-enables the line, signals again. INTx is a plain level.

use crate::backend::{Backend, InterruptLine};
use serde::{Deserialize, Serialize};

/// The state of the signalling.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Interrupts {
    /// The next rise of the line sends a message.
    armed: bool,
    /// The INTx level as last told to the backend.
    intx: bool,
    /// Messages sent.
    pub messages: u64,
    /// Rises of the INTx level.
    pub intx_rises: u64,
}

impl Default for Interrupts {
    fn default() -> Self {
        Self { armed: true, intx: false, messages: 0, intx_rises: 0 }
    }
}

/// Signalling as the guest has set it up in configuration space.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Signalling {
    /// MSI is on.
    pub msi: bool,
    /// INTx is forbidden.
    pub intx_disabled: bool,
}

impl Interrupts {
    /// The guest allows the next message.
    pub fn rearm(&mut self) {
        self.armed = true;
    }

    /// Signals what `line`, the level of the card's interrupt line, asks for.
    pub fn evaluate(&mut self, line: bool, how: Signalling, backend: &mut dyn Backend) {
        let intx = line && !how.msi && !how.intx_disabled;
        if intx != self.intx {
            self.intx = intx;
            if intx {
                self.intx_rises = self.intx_rises.saturating_add(1);
            }
            backend.interrupt(InterruptLine::Intx(intx));
        }
        if line && how.msi && self.armed {
            self.armed = false;
            self.messages = self.messages.saturating_add(1);
            backend.interrupt(InterruptLine::Msi);
        }
    }

    /// The guest turned MSI on or off: nothing sent before counts.
    pub fn mode_changed(&mut self) {
        // GUESS: whether enabling MSI re-arms is not public; a driver that finds the line pending must get a message.
        self.armed = true;
    }

    /// Nobody knows what was signalled before: what is pending is to be signalled again.
    pub fn forgotten(&mut self) {
        let Self { armed, intx, messages: _, intx_rises: _ } = self;
        *armed = true;
        *intx = false;
    }

    /// Returns whether the next rise of the line sends a message.
    #[must_use]
    pub fn armed(&self) -> bool {
        self.armed
    }

    /// Returns whether the INTx level is asserted.
    #[must_use]
    pub fn intx(&self) -> bool {
        self.intx
    }

    /// Power-on state; lowers INTx. The counters stay.
    pub fn reset(&mut self, backend: &mut dyn Backend) {
        if self.intx {
            backend.interrupt(InterruptLine::Intx(false));
        }
        let Self { armed, intx, messages: _, intx_rises: _ } = self;
        *armed = true;
        *intx = false;
    }
}
