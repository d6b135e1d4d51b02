//! Delivers the card's interrupt to the host, as an MSI or as an INTx level.

use card::InterruptMode;
use saved_state::Invalid;
use serde::{Deserialize, Serialize};
use vmm_sys_util::eventfd::EventFd;

#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub(crate) struct SavedLine {
    level: bool,
    unarmed: bool,
    signals: u64,
}

#[derive(Debug, Default)]
pub(crate) struct Line {
    mode: Option<InterruptMode>,
    event: Option<EventFd>,
    /// Level of PMC's interrupt line.
    level: bool,
    /// Set if the card has sent an MSI, and the driver has not rearmed MSI since.
    unarmed: bool,
    /// Set if the card has signalled INTx and the host has not unmasked it.
    masked: bool,
    signals: u64,
}

impl Line {
    /// Sets the mode and event for subsequent signals.
    pub(crate) fn connect(&mut self, mode: InterruptMode, event: Option<EventFd>) {
        self.mode = event.is_some().then_some(mode);
        self.event = event;
        self.masked = false;
        // Send a message that became due while no event was connected. The level has not changed.
        self.update();
    }

    /// Sets the level of PMC's interrupt line.
    pub(crate) fn set_level(&mut self, level: bool) {
        self.level = level;
        self.update();
    }

    /// Rearms MSI, at the driver's request.
    pub(crate) fn rearm(&mut self) {
        self.unarmed = false;
        self.update();
    }

    /// Permits the next INTx signal, at the host's request.
    pub(crate) fn unmask(&mut self) {
        self.masked = false;
        self.update();
    }

    /// Returns the level of PMC's interrupt line.
    pub(crate) fn level(&self) -> bool {
        self.level
    }

    /// Returns the number of signals sent since the card was created.
    pub(crate) fn signals(&self) -> u64 {
        self.signals
    }

    /// Restores the power-on state, in which no event is connected.
    pub(crate) fn reset(&mut self) {
        let signals = self.signals;
        *self = Self { signals, ..Self::default() };
    }

    pub(crate) fn save(&self) -> SavedLine {
        let Self {
            // The card's next user connects its own event.
            mode: _,
            event: _,
            level,
            unarmed,
            // A new connection unmasks INTx.
            masked: _,
            signals,
        } = self;
        SavedLine { level: *level, unarmed: *unarmed, signals: *signals }
    }

    /// Restores the state to a newly created, disconnected line.
    pub(crate) fn restore(&mut self, saved: &SavedLine) -> Result<(), Invalid> {
        let SavedLine { level, unarmed, signals } = *saved;
        Invalid::unless(signals <= 1 << 62, || "the number of sent interrupts is too large".into())?;
        *self = Self { level, unarmed, signals, ..Self::default() };
        Ok(())
    }

    fn update(&mut self) {
        if !self.level {
            return;
        }
        let blocked = match self.mode {
            Some(InterruptMode::Msi) => &mut self.unarmed,
            Some(InterruptMode::Intx) => &mut self.masked,
            None => return,
        };
        if *blocked {
            return;
        }
        *blocked = true;
        self.signals += 1;
        if let Some(event) = &self.event
            && let Err(error) = event.write(1)
        {
            tracing::warn!(%error, "the card's interrupt could not be signalled");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn connected(mode: InterruptMode) -> (Line, EventFd) {
        let event = EventFd::new(vmm_sys_util::eventfd::EFD_NONBLOCK).expect("event descriptor");
        let mut line = Line::default();
        line.connect(mode, Some(event.try_clone().expect("clone")));
        (line, event)
    }

    #[test]
    fn msi_is_sent_once_until_rearmed_and_again_if_still_pending() {
        let (mut line, event) = connected(InterruptMode::Msi);
        line.set_level(true);
        line.set_level(false);
        line.set_level(true);
        assert_eq!(event.read().expect("one message"), 1);
        line.rearm();
        assert_eq!(event.read().expect("still pending"), 1);
        line.set_level(false);
        line.rearm();
        assert!(event.read().is_err(), "nothing pending, nothing sent");
    }

    #[test]
    fn intx_is_masked_by_its_signal_until_unmasked() {
        let (mut line, event) = connected(InterruptMode::Intx);
        line.set_level(true);
        line.set_level(true);
        assert_eq!(event.read().expect("one signal"), 1);
        line.unmask();
        assert_eq!(event.read().expect("still asserted"), 1);
        line.set_level(false);
        line.unmask();
        assert!(event.read().is_err());
    }
}
