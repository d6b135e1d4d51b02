//! The interrupt line: converts the units' pending bits to MSI messages or an INTx level.
//!
//! The card sends one MSI message and then stays silent until the driver re-arms MSI. If a unit is still pending when
//! the driver re-arms MSI or re-enables the line, the card signals again. INTx is level-triggered.

use crate::backend::{Backend, InterruptLine};
use serde::{Deserialize, Serialize};

/// State of the interrupt line.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Interrupts {
    /// True if the next rising edge of the line sends a message.
    armed: bool,
    /// The INTx level last reported to the backend.
    intx: bool,
    /// Number of messages sent.
    pub messages: u64,
    /// Number of rising edges of INTx.
    pub intx_rises: u64,
}

impl Default for Interrupts {
    fn default() -> Self {
        Self { armed: true, intx: false, messages: 0, intx_rises: 0 }
    }
}

/// Signalling mode set by the guest in configuration space.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Signalling {
    /// True if MSI is enabled.
    pub msi: bool,
    /// True if INTx is disabled.
    pub intx_disabled: bool,
}

impl Interrupts {
    /// Re-arms MSI, at the guest's request.
    pub fn rearm(&mut self) {
        self.armed = true;
    }

    /// Signals the level `line` of the card's interrupt line through MSI or INTx, as configured.
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

    /// Handles a change of the MSI enable bit, which re-arms MSI.
    pub fn mode_changed(&mut self) {
        // GUESS: no public source says whether enabling MSI re-arms it. A driver that enables MSI while the line is
        // asserted must receive a message.
        self.armed = true;
    }

    /// Discards the record of earlier signals, which may have been lost, so that pending interrupts are signalled
    /// again.
    pub fn forgotten(&mut self) {
        let Self { armed, intx, messages: _, intx_rises: _ } = self;
        *armed = true;
        *intx = false;
    }

    /// Returns true if the next rising edge of the line sends a message.
    #[must_use]
    pub fn armed(&self) -> bool {
        self.armed
    }

    /// Returns true if the INTx level is asserted.
    #[must_use]
    pub fn intx(&self) -> bool {
        self.intx
    }

    /// Restores the power-on state, which deasserts INTx. Preserves the counters.
    pub fn reset(&mut self, backend: &mut dyn Backend) {
        if self.intx {
            backend.interrupt(InterruptLine::Intx(false));
        }
        let Self { armed, intx, messages: _, intx_rises: _ } = self;
        *armed = true;
        *intx = false;
    }
}
