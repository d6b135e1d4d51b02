//! Saved state of PFIFO, which never includes a loaded channel.

use super::channel::Channel;
use super::pbdma::{Pbdma, SavedPbdma};
use super::slot::{Condition, SavedSlot};
use super::{Fifo, FifoCounters};
use crate::cx::Cx;
use crate::saved::NotQuiescent;
use nvspec::fifo::CHANNELS;
use saved_state::Invalid;
use serde::{Deserialize, Serialize};
use std::collections::BTreeSet;

#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct SavedFifo {
    pub(crate) channels: Vec<Channel>,
    pub(crate) order: Vec<u8>,
    pub(crate) pbdmas: Vec<SavedPbdma>,
    slots: [SavedSlot; 3],
    counters: FifoCounters,
}

impl Fifo {
    /// Removes all channels from the PBDMAs and engines. On failure, some channels may already have been removed.
    pub(crate) fn clear_out(&mut self, cx: &mut Cx) -> Result<(), NotQuiescent> {
        // Doorbells that ring after this point are handled when the card is next idle.
        self.take_doorbells(cx);
        let loaded = self.pbdmas.iter().filter_map(|pbdma| pbdma.context.as_ref()).map(|context| context.channel);
        let current = self.slots.iter().filter_map(|slot| slot.resident?.channel);
        let channels: BTreeSet<u8> = loaded.chain(current).collect();
        for slot in &self.slots {
            if matches!(slot.condition, Condition::Failed | Condition::Hung) {
                return Err(NotQuiescent::Stopped(slot.number()));
            }
        }
        for channel in channels {
            if !self.leave(channel, cx) {
                return Err(NotQuiescent::Working(Some(channel)));
            }
        }
        for index in 0..self.slots.len() {
            // The engine may contain a context that the driver loaded without a channel, or work left by a channel.
            if self.slots[index].works(cx.clock.now()) {
                return Err(NotQuiescent::Working(None));
            }
            if !self.evict(index, cx) {
                return Err(NotQuiescent::Stopped(self.slots[index].number()));
            }
            self.slots[index].switch = None;
        }
        self.complete_departures(cx);
        Ok(())
    }

    /// Saves the state. No channel may be loaded.
    pub(crate) fn save(&self) -> SavedFifo {
        let Self {
            channels,
            order,
            // No channel is being switched out.
            runlist_pending: _,
            preempting: _,
            pbdmas,
            slots,
            // The time of an unhandled doorbell is lost: its work starts when the restored card detects it.
            not_before: _,
            counters,
        } = self;
        SavedFifo {
            channels: channels.clone(),
            order: order.clone(),
            pbdmas: pbdmas.iter().map(Pbdma::save).collect(),
            slots: slots.each_ref().map(super::slot::Slot::save),
            counters: *counters,
        }
    }

    /// Restores the state to a newly created PFIFO.
    pub(crate) fn restore(&mut self, saved: SavedFifo, cx: &Cx) -> Result<(), Invalid> {
        let SavedFifo { channels, order, pbdmas, slots, counters } = saved;
        let count = self.pbdmas.len();
        let numbers = channels.len() == CHANNELS as usize && pbdmas.len() == count;
        Invalid::unless(numbers, || "the number of channels or PBDMAs differs".into())?;
        for channel in &channels {
            channel.check(count)?;
        }
        let listed: BTreeSet<u8> = order.iter().copied().collect();
        let marked = (0u8..).zip(&channels).filter(|(_, channel)| channel.on_runlist).map(|(number, _)| number);
        Invalid::unless(listed.len() == order.len() && listed.into_iter().eq(marked), || {
            "the runlist does not match the channels on it".into()
        })?;
        for (number, channel) in (0u8..).zip(&channels) {
            cx.doorbells.set_page(number, channel.page());
        }
        for (pbdma, saved) in self.pbdmas.iter_mut().zip(pbdmas) {
            *pbdma = Pbdma::restored(saved)?;
        }
        for (slot, saved) in self.slots.iter_mut().zip(&slots) {
            slot.restore(saved)?;
        }
        (self.channels, self.order, self.counters) = (channels, order, counters);
        Ok(())
    }
}
