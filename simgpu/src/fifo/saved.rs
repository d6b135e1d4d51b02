//! PFIFO as it is saved: with nothing loaded.

use super::channel::Channel;
use super::pbdma::{Pbdma, SavedPbdma};
use super::slot::{Condition, SavedSlot};
use super::{Fifo, FifoCounters};
use crate::cx::Cx;
use crate::saved::Unrest;
use nvspec::fifo::CHANNELS;
use saved_state::Invalid;
use serde::{Deserialize, Serialize};
use std::collections::BTreeSet;

/// PFIFO with its engines.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct SavedFifo {
    pub(crate) channels: Vec<Channel>,
    pub(crate) order: Vec<u8>,
    pub(crate) pbdmas: Vec<SavedPbdma>,
    slots: [SavedSlot; 3],
    counters: FifoCounters,
}

impl Fifo {
    /// Takes all channels off PBDMAs and engines. Some may be off when it fails.
    pub(crate) fn clear_out(&mut self, cx: &mut Cx) -> Result<(), Unrest> {
        // What is rung later is seen when the card next has nothing to do.
        self.take_doorbells(cx);
        let loaded = self.pbdmas.iter().filter_map(|pbdma| pbdma.context.as_ref()).map(|context| context.channel);
        let current = self.slots.iter().filter_map(|slot| slot.resident?.channel);
        let channels: BTreeSet<u8> = loaded.chain(current).collect();
        for slot in &self.slots {
            if matches!(slot.condition, Condition::Failed | Condition::Hung) {
                return Err(Unrest::Stopped(slot.number()));
            }
        }
        for channel in channels {
            if !self.leave(channel, cx) {
                return Err(Unrest::Working(Some(channel)));
            }
        }
        for index in 0..self.slots.len() {
            // What the driver loaded without a channel, or works on what a channel has left.
            if self.slots[index].works(cx.clock.now()) {
                return Err(Unrest::Working(None));
            }
            if !self.evict(index, cx) {
                return Err(Unrest::Stopped(self.slots[index].number()));
            }
            self.slots[index].switch = None;
        }
        self.complete_departures(cx);
        Ok(())
    }

    /// Writes it down, with nothing loaded.
    pub(crate) fn save(&self) -> SavedFifo {
        let Self {
            channels,
            order,
            // Nothing has to leave any more.
            runlist_pending: _,
            preempting: _,
            pbdmas,
            slots,
            // What is found later begins then: nothing says any more when it was rung.
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

    /// Makes a new one what it was.
    pub(crate) fn restore(&mut self, saved: SavedFifo, cx: &Cx) -> Result<(), Invalid> {
        let SavedFifo { channels, order, pbdmas, slots, counters } = saved;
        let count = self.pbdmas.len();
        let numbers = channels.len() == CHANNELS as usize && pbdmas.len() == count;
        Invalid::unless(numbers, || "the card has other channels or PBDMAs".into())?;
        for channel in &channels {
            channel.check(count)?;
        }
        let listed: BTreeSet<u8> = order.iter().copied().collect();
        let marked = (0u8..).zip(&channels).filter(|(_, channel)| channel.on_runlist).map(|(number, _)| number);
        Invalid::unless(listed.len() == order.len() && listed.into_iter().eq(marked), || {
            "the runlist names others than those that are on it".into()
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
