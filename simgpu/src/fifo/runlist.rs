//! Runlist submission.

use super::slot::Switch;
use super::{Fifo, Progress};
use crate::clock::CardNs;
use crate::cx::Cx;
use nvspec::addr::Target;
use nvspec::fifo::sched_error::CTXSW_TIMEOUT;
use nvspec::fifo::{CHANNELS, RunlistEntry};
use nvspec::regs::pfifo;
use simgpu_memory::memory::BusAddr;

/// Time limit in ns for an engine to release a channel that must be switched out.
const CTXSW_TIMEOUT_NS: u64 = 1_000_000_000;

/// Scheduler error code for a runlist entry with an invalid channel.
// GUESS: except for the context switch timeout, the scheduler error codes of GF100 are not public.
const BAD_RUNLIST: u32 = 0x05;

impl Fifo {
    /// Loads the runlist at the base address, after a write to the runlist length register.
    pub(crate) fn submit_runlist(&mut self, cx: &mut Cx) {
        let base = cx.storage.peek(pfifo::RUNLIST_BASE::OFFSET);
        let list = cx.storage.peek(pfifo::RUNLIST::OFFSET);
        let target = Target::from_bits(pfifo::RUNLIST_BASE::TARGET.get(base));
        let address = u64::from(pfifo::RUNLIST_BASE::ADDRESS.get(base)) << 12;
        // The field width limits the list to 4095 entries. A repeated channel counts once.
        let length = pfifo::RUNLIST::LENGTH.get(list);
        for channel in &mut self.channels {
            channel.on_runlist = false;
        }
        self.order.clear();
        let mut bad = false;
        for index in 0..u64::from(length) {
            let entry = BusAddr::from_target(target, address.wrapping_add(8 * index))
                .and_then(|at| cx.memory.read64(at).map_err(|error| cx.memory.count_lost(error)).ok())
                .map(RunlistEntry::from);
            match entry.map(|entry| u32::from(entry.channel())) {
                Some(number) if number < CHANNELS => {
                    let channel = &mut self.channels[number as usize];
                    if !channel.on_runlist {
                        channel.on_runlist = true;
                        self.order.push(number as u8);
                    }
                }
                _ => bad = true,
            }
        }
        for index in 0..self.order.len() {
            let id = self.order[index];
            self.find_userd(id, cx);
            self.wake(id);
        }
        // One runlist serves all engines, so the runlist registers of all engines have the same value.
        for engine in 0..pfifo::ENG_RUNLIST_BASE::COUNT {
            cx.storage.poke(pfifo::ENG_RUNLIST_BASE::at(engine), base);
            cx.storage.poke(pfifo::ENG_RUNLIST::at(engine), list);
        }
        if bad {
            tracing::debug!("a runlist of {length} entries contains an invalid channel number");
            self.scheduler_error(BAD_RUNLIST, cx);
        }
        self.runlist_pending = true;
        self.complete_departures(cx);
    }

    /// Reports that all channels omitted from a new runlist have left their PBDMAs.
    pub(crate) fn runlist_done(&mut self, cx: &mut Cx) {
        let at = pfifo::RUNLIST_INTR::OFFSET;
        cx.storage.poke(at, cx.storage.peek(at) | pfifo::RUNLIST_INTR::DONE.mask());
    }

    /// Reports a scheduler error.
    pub(crate) fn scheduler_error(&mut self, code: u32, cx: &mut Cx) {
        cx.storage.poke(pfifo::SCHED_ERROR_REASON::OFFSET, pfifo::SCHED_ERROR_REASON::CODE.encode(code));
        let at = pfifo::INTR::OFFSET;
        cx.storage.poke(at, cx.storage.peek(at) | pfifo::INTR::SCHED_ERROR.mask());
    }

    /// Returns true if the channel of a busy engine must be switched out: the driver preempted it, the runlist no
    /// longer contains it, or its time slice is over and another channel waits.
    fn switch_is_wanted(&self, slot: usize, now: CardNs) -> bool {
        let slot = &self.slots[slot];
        let Some(channel) = slot.resident.and_then(|resident| resident.channel).filter(|_| slot.works(now)) else {
            return false;
        };
        let kicked = self.preempting == Some(channel);
        let removed = self.runlist_pending && !self.order.contains(&channel);
        kicked
            || removed
            || self.pbdmas.iter().enumerate().any(|(index, pbdma)| {
                pbdma.context.as_ref().is_some_and(|context| context.channel == channel)
                    && now >= pbdma.slice_end
                    && self.candidate(index, now).is_some()
            })
    }

    /// Reports, once, each engine that exceeds the context switch time limit.
    pub(super) fn watch_switches(&mut self, cx: &mut Cx) -> Progress {
        let now = cx.clock.now();
        let mut progress = Progress::Idle;
        for slot in 0..self.slots.len() {
            if !self.switch_is_wanted(slot, now) {
                self.slots[slot].switch = None;
                continue;
            }
            let Switch::Since(since) = *self.slots[slot].switch.get_or_insert(Switch::Since(now)) else { continue };
            let limit = since.saturating_add(CTXSW_TIMEOUT_NS);
            if now < limit {
                progress = progress.or(Progress::WaitUntil(limit));
            } else {
                self.slots[slot].switch = Some(Switch::Reported);
                self.scheduler_error(CTXSW_TIMEOUT, cx);
            }
        }
        progress
    }

    /// Starts to preempt the channel that was written to the preempt register.
    pub(crate) fn preempt(&mut self, value: u32, cx: &mut Cx) {
        let channel = pfifo::PREEMPT::CHANNEL.get(value);
        cx.storage.poke(pfifo::PREEMPT::OFFSET, pfifo::PREEMPT::CHANNEL.encode(channel));
        self.preempting = u8::try_from(channel).ok().filter(|channel| u32::from(*channel) < CHANNELS);
        self.complete_departures(cx);
    }

    /// Returns the value of the preempt register.
    pub(crate) fn preempt_state(&self, cx: &Cx) -> u32 {
        let pending = u32::from(self.preempting.is_some());
        pfifo::PREEMPT::PENDING.with(cx.storage.peek(pfifo::PREEMPT::OFFSET), pending)
    }
}
