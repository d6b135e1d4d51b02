//! Interrupt line: converts pending interrupts of all units to MSI messages or an INTx level.
//!
//! After an MSI message, the card sends no further message until the driver rearms MSI. If an interrupt is still
//! pending when the driver rearms MSI or unmasks the line, the card sends another message. INTx is level-triggered.

use crate::backend::{Backend, InterruptLine};
use serde::{Deserialize, Serialize};

/// State of the interrupt line, with counters of its signals.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Interrupts {
    /// True if MSI is armed, so that an asserted line sends a message.
    armed: bool,
    /// Level of INTx, as last reported to the backend.
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

/// Interrupt mode that the guest has configured in configuration space.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Signalling {
    /// True if MSI is enabled.
    pub msi: bool,
    /// True if INTx is disabled.
    pub intx_disabled: bool,
}

impl Interrupts {
    /// Rearms MSI.
    pub fn rearm(&mut self) {
        self.armed = true;
    }

    /// Signals level `line` of the interrupt line through MSI or INTx.
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

    /// Rearms MSI after a change of the MSI enable bit.
    pub fn mode_changed(&mut self) {
        // GUESS: no public source specifies that enabling MSI rearms it. A driver that enables MSI while the line is
        // asserted must receive a message.
        self.armed = true;
    }

    /// Makes the next evaluation signal pending interrupts again, because previous signals may have been lost.
    pub fn forgotten(&mut self) {
        let Self { armed, intx, messages: _, intx_rises: _ } = self;
        *armed = true;
        *intx = false;
    }

    /// Returns true if MSI is armed, so that an asserted line sends a message.
    #[must_use]
    pub fn armed(&self) -> bool {
        self.armed
    }

    /// Returns true if the INTx level is asserted.
    #[must_use]
    pub fn intx(&self) -> bool {
        self.intx
    }

    /// Restores the initial state, in which INTx is deasserted. Does not reset the counters.
    pub fn reset(&mut self, backend: &mut dyn Backend) {
        if self.intx {
            backend.interrupt(InterruptLine::Intx(false));
        }
        let Self { armed, intx, messages: _, intx_rises: _ } = self;
        *armed = true;
        *intx = false;
    }
}
