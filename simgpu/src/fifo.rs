//! PFIFO: channels, the runlist, the PBDMAs, and the engines that they feed.
//!
//! Modules:
//! - [`channel`]: the channel table
//! - [`runlist`]: submission of runlists
//! - [`pbdma`]: one PBDMA, with [`decoder`], [`host`] (methods that the host unit executes itself), [`ahead`] (host
//!   methods while an engine is busy) and [`context`] (RAMFC)
//! - [`slot`]: an engine and its context
//! - [`userd`]: detection of submissions
//! - [`fault`]: error reports
//!
//! [`Fifo::step`] performs all work: each call does a small amount, and returns the time of the next call.
//!
//! An engine is served by the first enabled PBDMA that `ENGINE_PBDMA_MASK` permits. A channel runs in the PBDMA of the
//! engine that it used last, and migrates when it uses an engine of another PBDMA. A new channel may run in any PBDMA.
//! Within a PBDMA, the runlist's channels take turns, each for a time slice.

mod ahead;
pub(crate) mod channel;
pub(crate) mod context;
pub(crate) mod decoder;
pub(crate) mod fault;
pub(crate) mod host;
pub(crate) mod pbdma;
pub(crate) mod runlist;
mod saved;
pub(crate) mod slot;
pub(crate) mod userd;

pub(crate) use saved::SavedFifo;

use crate::clock::CardNs;
use crate::cx::Cx;
use crate::faults::EngineId;
use channel::Channel;
use nvspec::fifo::CHANNELS;
use nvspec::regs::{pbdma as pbdma_regs, pfifo, pmc};
use pbdma::Pbdma;
use serde::{Deserialize, Serialize};
use simgpu_engines::compute::Compute;
use simgpu_engines::engines::copy::ce::CopyEngine;
use simgpu_engines::engines::graph::GraphClasses;
use slot::{Condition, Slot};

/// Result of a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Progress {
    /// The step did work, and there may be more.
    Ran,
    /// No work can be done before this card time, unless another event occurs.
    WaitUntil(CardNs),
    /// No work can be done until an event occurs.
    Idle,
}

impl Progress {
    /// Returns the result whose next call is due first.
    pub(crate) fn or(self, other: Self) -> Self {
        match (self, other) {
            (Self::Ran, _) | (_, Self::Ran) => Self::Ran,
            (Self::WaitUntil(a), Self::WaitUntil(b)) => Self::WaitUntil(a.min(b)),
            (Self::WaitUntil(at), Self::Idle) | (Self::Idle, Self::WaitUntil(at)) => Self::WaitUntil(at),
            (Self::Idle, Self::Idle) => Self::Idle,
        }
    }
}

/// Counters of the channels' work.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct FifoCounters {
    /// Number of fetched GPFIFO entries.
    pub entries: u64,
    /// Number of methods executed by the host unit or an engine. A retried method may be counted several times.
    pub methods: u64,
    /// Number of times a channel was loaded into a PBDMA.
    pub switches: u64,
    /// Number of MMU faults caused by channels.
    pub faults: u64,
}

pub(crate) struct Fifo {
    pub(crate) channels: Vec<Channel>,
    /// The runlist: channel numbers in the submitted order.
    pub(crate) order: Vec<u8>,
    /// Set if a runlist was submitted, but channels that it no longer contains are still running.
    pub(crate) runlist_pending: bool,
    /// The channel being preempted, until it has left its PBDMA.
    pub(crate) preempting: Option<u8>,
    pub(crate) pbdmas: Vec<Pbdma>,
    pub(crate) slots: [Slot; 3],
    /// Earliest card time at which newly found work may start, which is the time of the driver's last change to the set
    /// of runnable channels.
    not_before: CardNs,
    pub(crate) counters: FifoCounters,
}

impl Fifo {
    pub(crate) fn new(pbdmas: u32, compute: Compute) -> Self {
        Self {
            channels: (0..CHANNELS).map(|_| Channel::default()).collect(),
            order: Vec::with_capacity(CHANNELS as usize),
            runlist_pending: false,
            preempting: None,
            pbdmas: (0..pbdmas).map(|_| Pbdma::new()).collect(),
            slots: [
                Slot::new(EngineId::Graph, Box::new(GraphClasses::new(compute))),
                Slot::new(EngineId::Copy0, Box::new(CopyEngine::default())),
                Slot::new(EngineId::Copy1, Box::new(CopyEngine::default())),
            ],
            not_before: 0,
            counters: FifoCounters::default(),
        }
    }

    /// Restores the power-on state. The engines lose their contexts and work, but keep their firmware, and a trapped
    /// engine resumes.
    pub(crate) fn reset(&mut self, cx: &mut Cx) {
        for (channel, number) in self.channels.iter_mut().zip(0u8..) {
            *channel = Channel::default();
            cx.doorbells.set_page(number, None);
        }
        cx.doorbells.take();
        self.order.clear();
        self.runlist_pending = false;
        self.preempting = None;
        self.pbdmas.iter_mut().for_each(|pbdma| *pbdma = Pbdma::new());
        for slot in &mut self.slots {
            slot.abandon();
            slot.resume();
        }
        cx.storage.reset_range(pfifo::BASE, pfifo::END);
        cx.storage.reset_range(pbdma_regs::BASE, pbdma_regs::END);
    }

    pub(crate) fn slot(&mut self, id: EngineId) -> &mut Slot {
        &mut self.slots[id.index()]
    }

    /// Returns the value of an engine's status register.
    pub(crate) fn engine_status(&self, number: u32, cx: &Cx) -> u32 {
        let now = cx.clock.now();
        self.slots.iter().find(|slot| slot.number() == number).map_or(0, |slot| slot.status(now))
    }

    /// Resets an engine immediately, even if its work has not ended according to the time model.
    pub(crate) fn reset_engine(&mut self, id: EngineId, cx: &Cx) {
        let until = self.slot(id).until;
        self.slot(id).reset();
        self.cut_short(until, cx);
    }

    /// Drops an engine's context and work immediately, even if the work has not ended according to the time model.
    pub(super) fn abandon(&mut self, slot: usize, cx: &Cx) {
        let until = self.slots[slot].until;
        self.slots[slot].abandon();
        self.cut_short(until, cx);
    }

    /// Ends the wait of the PBDMA whose engine would have been busy until `until`.
    fn cut_short(&mut self, until: CardNs, cx: &Cx) {
        let now = cx.clock.now();
        for pbdma in self.pbdmas.iter_mut().filter(|pbdma| until > now && pbdma.time == until) {
            pbdma.time = now;
        }
    }

    /// Returns true if PFIFO is enabled and may schedule.
    fn running(cx: &Cx) -> bool {
        pmc::ENABLE::PFIFO.is_set(cx.storage.peek(pmc::ENABLE::OFFSET))
            && pfifo::SCHED_EN::ENABLE.is_set(cx.storage.peek(pfifo::SCHED_EN::OFFSET))
    }

    /// Returns the PBDMA that serves an engine.
    pub(crate) fn pbdma_of(number: u32, pbdmas: usize, cx: &Cx) -> Option<usize> {
        let barred = if number < pfifo::ENGINE_PBDMA_MASK::COUNT {
            cx.storage.peek(pfifo::ENGINE_PBDMA_MASK::at(number))
        } else {
            0
        };
        let enabled = cx.storage.peek(pmc::PBDMA_ENABLE::OFFSET) & cx.storage.peek(pfifo::PBDMA_PRESENT::OFFSET);
        // A zero bit permits a PBDMA: drivers write `!(1 << n)` for PBDMA n, and the register resets to zero. The
        // lowest permitted PBDMA serves the engine.
        let usable = enabled & !barred & ((1u32 << pbdmas.min(31)) - 1);
        (usable != 0).then(|| usable.trailing_zeros() as usize)
    }

    /// Returns the engines that a PBDMA serves, as a bit mask of engine numbers.
    fn engines_of(&self, pbdma: usize, cx: &Cx) -> u32 {
        self.slots
            .iter()
            .map(Slot::number)
            .filter(|number| Self::pbdma_of(*number, self.pbdmas.len(), cx) == Some(pbdma))
            .fold(0, |mask, number| mask | 1 << number)
    }

    /// Performs a small part of the pending work.
    pub(crate) fn step(&mut self, cx: &mut Cx) -> Progress {
        self.take_doorbells(cx);
        let mut progress = self.complete_departures(cx);
        progress = progress.or(self.watch_switches(cx));
        if Self::running(cx) {
            for index in 0..self.pbdmas.len() {
                progress = progress.or(self.run_pbdma(index, cx));
            }
            if progress != Progress::Ran && self.poll_userd(cx) {
                progress = Progress::Ran;
            }
        }
        progress
    }

    fn take_doorbells(&mut self, cx: &Cx) {
        let mut rung = cx.doorbells.take();
        while rung != 0 {
            let number = rung.trailing_zeros() as usize;
            rung &= rung - 1;
            let since = cx.doorbells.take_since(number);
            if let Some(channel) = self.channels.get_mut(number) {
                if !channel.has_work {
                    channel.rung_at = since;
                }
                channel.has_work = true;
            }
        }
    }

    /// Records that the driver has changed the set of runnable channels. New work must not start before this time.
    pub(crate) fn changed(&mut self, cx: &Cx) {
        self.not_before = cx.clock.now();
    }

    /// Returns the card time at which an idle unit starts a channel's work found at `now`. A real card reacts to a
    /// doorbell immediately, so the scheduling delay of the card's thread is ignored.
    fn begins(&self, number: u8, now: CardNs) -> CardNs {
        let rung_at = self.channels[usize::from(number)].rung_at;
        rung_at.map_or(now, |at| at.max(self.not_before).min(now))
    }

    /// Completes requests that were waiting for channels to leave their PBDMAs.
    pub(crate) fn complete_departures(&mut self, cx: &mut Cx) -> Progress {
        let mut progress = Progress::Idle;
        if let Some(channel) = self.preempting
            && self.leave(channel, cx)
        {
            self.preempting = None;
            progress = Progress::Ran;
        }
        if self.runlist_pending {
            let gone: Vec<u8> = self
                .pbdmas
                .iter()
                .filter_map(|pbdma| pbdma.context.as_ref().map(|context| context.channel))
                .chain(self.slots.iter().filter_map(|slot| slot.resident.and_then(|resident| resident.channel)))
                .filter(|channel| !self.order.contains(channel))
                .collect();
            let mut all_left = true;
            for channel in gone {
                all_left &= self.leave(channel, cx);
            }
            if all_left {
                self.runlist_pending = false;
                self.runlist_done(cx);
                progress = Progress::Ran;
            }
        }
        progress
    }

    /// Removes a channel from its PBDMA and engines unless it has work in progress. Returns true if it was removed.
    pub(crate) fn leave(&mut self, channel: u8, cx: &mut Cx) -> bool {
        let holds = |slot: &Slot| slot.resident.is_some_and(|resident| resident.channel == Some(channel));
        let now = cx.clock.now();
        let busy = |slot: &Slot| holds(slot) && slot.works(now) && slot.condition != Condition::Failed;
        if self.slots.iter().any(busy) {
            return false;
        }
        for index in 0..self.pbdmas.len() {
            if self.pbdmas[index].context.as_ref().is_some_and(|context| context.channel == channel) {
                self.unload(index, cx);
            }
        }
        for index in 0..self.slots.len() {
            if holds(&self.slots[index]) && self.slots[index].condition != Condition::Failed {
                self.evict(index, cx);
            }
        }
        true
    }

    /// Detects submissions without a doorbell: writes by engines, and writes to USERD pages in host memory. Returns
    /// true if it found any.
    fn poll_userd(&mut self, cx: &Cx) -> bool {
        let mut found = false;
        for number in &self.order {
            let channel = &mut self.channels[usize::from(*number)];
            if channel.runnable() && !channel.has_work && channel.submitted(&cx.memory) {
                channel.has_work = true;
                found = true;
            }
        }
        found
    }

    /// Returns PFIFO's pending interrupts.
    pub(crate) fn interrupts(cx: &Cx) -> u32 {
        use pfifo::INTR;
        let own = INTR::INTR_0.mask()
            | INTR::SCHED_ERROR.mask()
            | INTR::INTR_16.mask()
            | INTR::INTR_23.mask()
            | INTR::INTR_24.mask();
        (cx.storage.peek(INTR::OFFSET) & own)
            | INTR::MMU_FAULT.encode(u32::from(cx.storage.peek(pfifo::MMU_FAULT_ID::OFFSET) != 0))
            | INTR::PBDMA.encode(u32::from(Self::pbdma_interrupts(cx) != 0))
            | INTR::RUNLIST.encode(u32::from(cx.storage.peek(pfifo::RUNLIST_INTR::OFFSET) != 0))
            | INTR::NON_STALL.encode(u32::from(Self::non_stall_engines(cx) != 0))
    }

    /// Returns the PBDMAs with an enabled pending interrupt.
    pub(crate) fn pbdma_interrupts(cx: &Cx) -> u32 {
        (0..pbdma_regs::INTR_0::COUNT)
            .filter(|index| {
                cx.storage.peek(pbdma_regs::INTR_0::at(*index)) & cx.storage.peek(pbdma_regs::INTR_EN_0::at(*index))
                    != 0
            })
            .fold(0, |mask, index| mask | 1 << index)
    }

    /// Returns the engines with an enabled pending non-stall interrupt.
    pub(crate) fn non_stall_engines(cx: &Cx) -> u32 {
        let enabled = pfifo::NON_STALL_EN::NIBBLE.get(cx.storage.peek(pfifo::NON_STALL_EN::OFFSET));
        let nibbles = enabled * 0x1111_1111;
        (0..pfifo::NON_STALL_INTR::COUNT)
            .filter(|engine| cx.storage.peek(pfifo::NON_STALL_INTR::at(*engine)) & nibbles != 0)
            .fold(0, |mask, engine| mask | 1 << engine)
    }

    /// Returns true if PFIFO asserts its interrupt line to PMC.
    pub(crate) fn asserts(cx: &Cx) -> bool {
        Self::interrupts(cx) & cx.storage.peek(pfifo::INTR_EN::OFFSET) != 0
    }

    /// Raises an engine's non-stall interrupt.
    pub(crate) fn raise_non_stall(&mut self, number: u32, cx: &mut Cx) {
        if number < pfifo::NON_STALL_INTR::COUNT {
            let at = pfifo::NON_STALL_INTR::at(number);
            cx.storage.poke(at, cx.storage.peek(at) | 1);
        }
    }
}
