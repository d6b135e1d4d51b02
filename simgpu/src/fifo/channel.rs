//! The channel table.

use super::Fifo;
use super::context::{read_gp_put, userd_page};
use super::slot::Condition;
use crate::clock::CardNs;
use crate::cx::Cx;
use nvspec::addr::{Target, VramAddr};
use nvspec::instance::{ramfc, userd};
use nvspec::regs::pfifo::{CHANNEL, CHANNEL_STATE};
use saved_state::Invalid;
use serde::{Deserialize, Serialize};
use simgpu_memory::memory::{BusAddr, Memory};

/// Error state of a channel. The driver's settings are stored separately.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum Health {
    /// The channel has no error.
    #[default]
    Good,
    /// A fault stopped the channel. Binding or enabling the channel clears the fault.
    Faulted,
}

#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub(crate) struct Channel {
    /// Last value written to the channel's instance register.
    bind: u32,
    control: u32,
    pub(crate) on_runlist: bool,
    pub(crate) health: Health,
    /// Set if the channel may have entries to fetch.
    pub(crate) has_work: bool,
    /// Card time of the doorbell whose work has not started yet.
    #[serde(skip)]
    pub(crate) rung_at: Option<CardNs>,
    /// Card time at which the channel retries a method that could not be executed.
    pub(crate) retry_at: Option<CardNs>,
    /// Interval before the next retry, in ns.
    pub(crate) retry_ns: u64,
    /// The PBDMA in which the channel runs. `None` until the channel has used an engine, because it may run in any
    /// PBDMA.
    pub(crate) home: Option<usize>,
    userd: Option<BusAddr>,
    /// GP_PUT when the ring was last empty.
    pub(crate) seen_put: Option<u32>,
}

impl Channel {
    /// Returns the bound instance block, if any.
    pub(crate) fn instance(&self) -> Option<(Target, u64)> {
        CHANNEL::VALID.is_set(self.bind).then(|| {
            (Target::from_bits(CHANNEL::TARGET.get(self.bind)), u64::from(CHANNEL::ADDRESS.get(self.bind)) << 12)
        })
    }

    pub(crate) fn enabled(&self) -> bool {
        CHANNEL_STATE::ENABLED.is_set(self.control)
    }

    /// Returns true if a PBDMA may load the channel.
    pub(crate) fn runnable(&self) -> bool {
        self.on_runlist && self.enabled() && self.health == Health::Good && self.instance().is_some()
    }

    /// Returns true if a PBDMA may load the channel, and the channel has work that may start at card time `now`.
    pub(crate) fn ready(&self, now: CardNs) -> bool {
        self.runnable() && self.has_work && self.retry_at.is_none_or(|at| at <= now)
    }

    /// Returns true if the channel's owner has submitted work since the ring was last empty.
    pub(crate) fn submitted(&self, memory: &Memory) -> bool {
        self.userd.is_some_and(|userd| read_gp_put(userd, memory).is_some_and(|put| Some(put) != self.seen_put))
    }

    /// Validates saved data, for a card with `pbdmas` PBDMAs.
    pub(crate) fn check(&self, pbdmas: usize) -> Result<(), Invalid> {
        let home = self.home.is_none_or(|home| home < pbdmas);
        let waits = self.retry_ns <= super::pbdma::RETRY_NS.1;
        Invalid::unless(home && waits && self.userd.is_none_or(|at| at.is_page()), || {
            "the PBDMA of a channel does not exist, or its USERD is not page-aligned".into()
        })
    }

    /// Returns the channel's USERD page if it is in VRAM.
    pub(crate) fn page(&self) -> Option<VramAddr> {
        match self.userd {
            Some(BusAddr::Vram(at)) if at.checked_add(userd::BYTES).is_some() => Some(at),
            _ => None,
        }
    }

    /// Returns true if the channel's USERD page must be polled, because CPU writes to host memory are not trapped.
    pub(crate) fn polled(&self) -> bool {
        matches!(self.userd, Some(BusAddr::System(_)))
    }
}

impl Fifo {
    /// Returns the value of the channel's instance register.
    pub(crate) fn channel_bind(&self, number: u32) -> u32 {
        self.channels.get(number as usize).map_or(0, |channel| channel.bind)
    }

    /// Returns the value of the channel's state register.
    pub(crate) fn channel_state(&self, number: u32) -> u32 {
        let Some(channel) = self.channels.get(number as usize) else { return 0 };
        let loaded = self
            .pbdmas
            .iter()
            .any(|pbdma| pbdma.context.as_ref().is_some_and(|context| u32::from(context.channel) == number));
        let stored = CHANNEL_STATE::ENGINES.mask() | CHANNEL_STATE::ENABLED.mask();
        (channel.control & stored)
            | CHANNEL_STATE::LOADED.encode(u32::from(loaded))
            | CHANNEL_STATE::ACQUIRE_PENDING.encode(u32::from(channel.retry_at.is_some_and(|at| at != CardNs::MAX)))
            | CHANNEL_STATE::PENDING.encode(u32::from(channel.runnable() && channel.has_work))
    }

    /// Binds or unbinds the channel, as specified by the value written to its instance register.
    pub(crate) fn bind(&mut self, number: u32, value: u32, cx: &mut Cx) {
        let Ok(id) = u8::try_from(number) else { return };
        // A new binding replaces the previous one. The previous channel's state is lost unless it was saved.
        for pbdma in &mut self.pbdmas {
            if pbdma.context.as_ref().is_some_and(|context| context.channel == id) {
                pbdma.context = None;
            }
        }
        for index in 0..self.slots.len() {
            // An engine that hangs, or that was stopped by a fault, ignores the channel table.
            let slot = &self.slots[index];
            let looks = !matches!(slot.condition, Condition::Failed | Condition::Hung);
            if looks && slot.resident.is_some_and(|resident| resident.channel == Some(id)) {
                self.abandon(index, cx);
            }
        }
        let Some(channel) = self.channels.get_mut(number as usize) else { return };
        *channel =
            Channel { bind: value, control: channel.control, on_runlist: channel.on_runlist, ..Channel::default() };
        self.find_userd(id, cx);
        self.wake(id);
    }

    /// Enables or disables the channel, as specified by the value written to its state register.
    pub(crate) fn control(&mut self, number: u32, value: u32, cx: &Cx) {
        let Some(channel) = self.channels.get_mut(number as usize) else { return };
        let started = CHANNEL_STATE::ENABLED.is_set(value) && !channel.enabled();
        channel.control = value;
        if started && let Ok(id) = u8::try_from(number) {
            channel.health = Health::Good;
            self.find_userd(id, cx);
            self.wake(id);
        }
    }

    /// Reads the location of the channel's USERD from RAMFC. A driver may write RAMFC before or after it binds the
    /// channel, but always before it enables the channel.
    pub(crate) fn find_userd(&mut self, id: u8, cx: &Cx) {
        let channel = &mut self.channels[usize::from(id)];
        let page = channel.instance().and_then(|(target, address)| {
            let block = BusAddr::from_target(target, address)?;
            let low = cx.memory.read32(block.offset(ramfc::USERD_LO)).ok()?;
            let high = cx.memory.read32(block.offset(ramfc::USERD_HI)).ok()?;
            userd_page(low, high)
        });
        channel.userd = page;
        cx.doorbells.set_page(id, channel.page());
    }

    /// Marks the channel as possibly having work.
    pub(crate) fn wake(&mut self, id: u8) {
        if let Some(channel) = self.channels.get_mut(usize::from(id)) {
            channel.has_work = true;
            channel.retry_at = None;
            channel.seen_put = None;
        }
    }

    /// Retries all methods that could not be executed, after an event that may unblock them.
    pub(crate) fn retry_waiting(&mut self) {
        for channel in self.channels.iter_mut().filter(|channel| channel.retry_at.is_some()) {
            channel.retry_at = Some(0);
        }
    }
}
