//! Events from the card's interrupt thread for a VM whose lock is held.
//!
//! One thread serves the interrupts of all VMs of a card, so it must never wait for a VM. Otherwise, a guest that keeps
//! its own vGPU busy with a large flush would delay its neighbours' interrupts. Instead, the thread adds the event to
//! the inbox, and `mailbox` handles it later.

use super::GuestEvent;
use std::collections::VecDeque;

/// Number of queued events at which the inbox is full, so that errors are only counted. Engines continue after an
/// error, so a guest can cause any number of errors.
const MAX_QUEUED_ERRORS: usize = 256;

/// Events waiting for a VM.
#[derive(Debug, Default)]
pub(crate) struct Inbox {
    events: VecDeque<GuestEvent>,
    lost: u64,
}

impl Inbox {
    /// Appends an event unless an equal one is queued. A doorbell replaces the channel's queued one, and an error is
    /// only counted if the inbox is full.
    pub(crate) fn push(&mut self, event: GuestEvent) {
        if self.events.contains(&event) {
            return;
        }
        match event {
            // Keep only a channel's last doorbell, up to which its ring is read.
            GuestEvent::Resume(doorbell) => {
                let same = |old: &GuestEvent| matches!(old, GuestEvent::Resume(old) if old.channel == doorbell.channel);
                self.events.retain(|old| !same(old));
            }
            // A fault or hang ends its channel, which stays bound until the event is handled, so each channel has at
            // most one. The other events are queued at most once, or once per engine.
            GuestEvent::MmuFault { .. }
            | GuestEvent::Hang { .. }
            | GuestEvent::NonStall { .. }
            | GuestEvent::Alarm
            | GuestEvent::Runlist
            | GuestEvent::Left
            | GuestEvent::Memory => {}
            GuestEvent::Pbdma { .. } | GuestEvent::Graph { .. } | GuestEvent::Copy { .. } => {
                if self.events.len() >= MAX_QUEUED_ERRORS {
                    self.lost += 1;
                    return;
                }
            }
        }
        self.events.push_back(event);
    }

    /// Removes and returns the oldest event.
    pub(crate) fn pop(&mut self) -> Option<GuestEvent> {
        self.events.pop_front()
    }

    /// Returns true if no event is queued.
    pub(crate) fn is_empty(&self) -> bool {
        self.events.is_empty()
    }

    /// Returns the number of errors dropped since the VM was created, because the inbox was full.
    pub(crate) fn lost(&self) -> u64 {
        self.lost
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use nvspec::fifo::VirtualChannelId;

    #[test]
    fn full_inbox_drops_events_but_never_channel_ends() {
        let mut inbox = Inbox::default();
        for data in 0..1000 {
            inbox.push(GuestEvent::Pbdma { channel: VirtualChannelId(1), unit: 0, intr: 1, method: 0, data });
            inbox.push(GuestEvent::NonStall { engine: 0 });
        }
        let hang = GuestEvent::Hang { engine: 0, channel: VirtualChannelId(3) };
        inbox.push(hang);
        let mut events = Vec::new();
        while let Some(event) = inbox.pop() {
            events.push(event);
        }
        assert_eq!(events.len(), MAX_QUEUED_ERRORS + 1);
        assert_eq!(events.last(), Some(&hang));
        assert_eq!(inbox.lost(), 1000 - MAX_QUEUED_ERRORS as u64 + 1);
    }
}
