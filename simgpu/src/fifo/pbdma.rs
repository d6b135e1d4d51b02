//! One PBDMA: selects a channel, then fetches and dispatches its methods.

use super::channel::Health;
use super::context::{Context, Fetched, LoadError};
use super::decoder::{Event, Method};
use super::fault::{Client, Report};
use super::slot::{self, Condition, Done};
use super::{Fifo, Progress};
use crate::clock::CardNs;
use crate::cx::Cx;
use crate::faults::EngineId;
use nvspec::addr::GpuVa;
use nvspec::fifo::{CHANNELS, GpEntry, host_method};
use nvspec::mmu::fault::{hub_client, unit};
use nvspec::regs::pbdma::{DATA_0, INTR_0, METHOD_0};
use nvspec::regs::{pfifo, pmc};
use saved_state::Invalid;
use serde::{Deserialize, Serialize};
use simgpu_engines::engines;
use simgpu_memory::mmu::{Access, MmuFault};

/// Maximum number of words executed per step.
const WORDS_PER_STEP: u32 = 512;
/// Time for which a channel may keep a PBDMA while others wait, in ns. The time slices in RAMFC are ignored.
const TIME_SLICE_NS: u64 = 2_000_000;
/// Initial and maximum retry interval of an acquire, in ns.
pub(super) const RETRY_NS: (u64, u64) = (10_000, 500_000);
/// Retry time of a channel that waits for an event instead of a deadline.
pub(super) const NEVER: CardNs = CardNs::MAX;
/// Polling interval of a USERD page in host memory, in ns.
const POLL_NS: u64 = 500_000;

/// Maximum time in a saved card, in ns. The sum of this time and any cost still fits in 64 bits.
const TIME_MAX: CardNs = 1 << 62;

#[derive(Debug)]
pub(crate) struct Pbdma {
    pub(crate) context: Option<Box<Context>>,
    /// Card time at which the PBDMA's current work ends. It is ahead of the clock while an engine is busy.
    pub(crate) time: CardNs,
    pub(super) slice_end: CardNs,
    /// Set if the channel waits for a semaphore but keeps the PBDMA until its time slice ends.
    holds: bool,
    /// The channel that ran last, for round-robin selection.
    last: Option<u8>,
    /// Set if the PBDMA is idle, so that the idle time is not charged to the next work.
    idle: bool,
    /// The interrupt that stops the PBDMA until the driver clears it.
    trap: Option<Trap>,
    /// Push buffer position of a method that is known to wait for the engine.
    pub(super) waits_at: Option<u64>,
}

/// Reason why a PBDMA stopped.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Trap {
    /// Pending bits of INTR_0.
    bits: u32,
    channel: u8,
    /// Contents of METHOD_0 if the driver may replace the method.
    method: Option<u32>,
}

/// Result of executing a method.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Outcome {
    /// The method was executed.
    Done(Done),
    /// The engine is not ready. Retry later.
    Later,
    /// The semaphore has not been released yet. Retry later. The value is true if other channels may use the PBDMA in
    /// the meantime.
    NotAcquired(bool),
    /// Another PBDMA serves the engine.
    Elsewhere(usize),
    /// The method was executed, and yields the rest of the time slice.
    Yield,
    /// The PBDMA must raise its interrupt with these bits. The driver may replace the method.
    Trap(u32),
    /// A memory access by the host unit itself faulted.
    HostFault(MmuFault),
    /// The engine has stopped. The engine and its channel wait for the driver.
    EngineFault,
}

impl Pbdma {
    pub(crate) fn new() -> Self {
        Self { context: None, time: 0, slice_end: 0, holds: false, last: None, idle: true, trap: None, waits_at: None }
    }

    /// Returns true if a pending interrupt stops the PBDMA.
    pub(super) fn trapped(&self) -> bool {
        self.trap.is_some()
    }
}

/// Saved state of a PBDMA that has no channel.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub(crate) struct SavedPbdma {
    time: CardNs,
    slice_end: CardNs,
    holds: bool,
    last: Option<u8>,
    idle: bool,
    trap: Option<Trap>,
}

impl Pbdma {
    pub(super) fn save(&self) -> SavedPbdma {
        // The omitted fields were cleared when the channel left the PBDMA.
        let Self { context: _, time, slice_end, holds, last, idle, trap, waits_at: _ } = self;
        let (time, slice_end, holds, last, idle, trap) = (*time, *slice_end, *holds, *last, *idle, *trap);
        SavedPbdma { time, slice_end, holds, last, idle, trap }
    }

    pub(super) fn restored(saved: SavedPbdma) -> Result<Self, Invalid> {
        let SavedPbdma { time, slice_end, holds, last, idle, trap } = saved;
        let trapped = trap.is_none_or(|trap| u32::from(trap.channel) < CHANNELS);
        Invalid::unless(trapped && time.max(slice_end) <= TIME_MAX, || {
            "a PBDMA has stopped for a channel that does not exist, or is busy forever".into()
        })?;
        Ok(Self { context: None, time, slice_end, holds, last, idle, trap, waits_at: None })
    }
}

fn method_word(method: Method) -> u32 {
    METHOD_0::VALID.encode(1)
        | METHOD_0::SUBCHANNEL.encode(u32::from(method.subchannel))
        | METHOD_0::METHOD.encode(method.address >> 2)
}

impl Fifo {
    /// Runs a PBDMA for a short time.
    pub(super) fn run_pbdma(&mut self, index: usize, cx: &mut Cx) -> Progress {
        let now = cx.clock.now();
        if self.pbdmas[index].time > now {
            let ahead = self.run_ahead(index, cx);
            return Progress::WaitUntil(self.pbdmas[index].time).or(ahead);
        }
        // Finish the engine's work before any other step, because the engine cannot be interrupted.
        if let Some(progress) = self.work_on(index, cx) {
            return progress.or(self.run_ahead(index, cx));
        }
        if self.pbdmas[index].trapped() {
            return Progress::Idle;
        }
        if self.blocked(index, cx) {
            return Progress::Idle;
        }
        if !self.choose(index, now, cx) {
            return Progress::Ran;
        }
        let Some(mut context) = self.pbdmas[index].context.take() else {
            self.pbdmas[index].idle = true;
            return self.next_retry(index, cx);
        };
        let channel = usize::from(context.channel);
        if !self.channels[channel].ready(now) {
            self.pbdmas[index].context = Some(context);
            self.pbdmas[index].idle = true;
            return self.next_retry(index, cx);
        }
        let begins = self.begins(context.channel, now);
        self.channels[channel].rung_at = None;
        if std::mem::take(&mut self.pbdmas[index].idle) || cx.time.is_none() {
            self.pbdmas[index].time = self.pbdmas[index].time.max(begins);
        }
        if self.pbdmas[index].time > now {
            self.pbdmas[index].context = Some(context);
            return Progress::WaitUntil(self.pbdmas[index].time);
        }
        let progress = self.run_channel(index, &mut context, cx);
        context.fetched = Fetched::empty();
        context.publish(&cx.memory);
        let channel = &self.channels[channel];
        let gone = channel.health == Health::Faulted || channel.home.is_some_and(|home| home != index);
        self.pbdmas[index].context = Some(context);
        self.pbdmas[index].idle = progress != Progress::Ran;
        if gone {
            self.unload(index, cx);
        }
        progress
    }

    /// Returns true if the PBDMA is disabled, or if the scheduler must not use any of its engines.
    pub(super) fn blocked(&self, index: usize, cx: &Cx) -> bool {
        let enabled = cx.storage.peek(pmc::PBDMA_ENABLE::OFFSET) & cx.storage.peek(pfifo::PBDMA_PRESENT::OFFSET);
        if enabled & (1 << index) == 0 {
            return true;
        }
        let engines = self.engines_of(index, cx);
        let disabled = cx.storage.peek(pfifo::SCHED_DISABLE::OFFSET);
        engines != 0 && engines & disabled == engines
    }

    /// Continues pending work of the engine that the PBDMA's channel uses. Returns `None` if no work is pending.
    fn work_on(&mut self, index: usize, cx: &mut Cx) -> Option<Progress> {
        let id = self.pbdmas[index].context.as_ref()?.engine?;
        let slot = self.slot(id);
        if !slot.pending() {
            return None;
        }
        match slot.condition {
            Condition::Good => {}
            Condition::Hung => return Some(Progress::Idle),
            Condition::Failed | Condition::Trapped | Condition::Down => return None,
        }
        let stamp = self.stamp(index, cx);
        match self.slot(id).step(stamp, cx) {
            Ok((engines::Progress::Elsewhere, done)) => {
                self.account(index, id, done, cx);
                return Some(Progress::Idle);
            }
            Ok((_, done)) => self.account(index, id, done, cx),
            Err(error) => {
                let channel = self.pbdmas[index].context.as_ref().map(|context| context.channel);
                self.engine_error(id, channel, None, error, cx);
                if channel.is_some_and(|channel| self.channels[usize::from(channel)].health == Health::Faulted) {
                    self.unload(index, cx);
                }
            }
        }
        Some(Progress::Ran)
    }

    /// Returns PTIMER's value at the time of the PBDMA's current work.
    pub(super) fn stamp(&self, index: usize, cx: &Cx) -> u64 {
        if cx.time.is_some() { cx.clock.timer_at(self.pbdmas[index].time) } else { cx.clock.timer() }
    }

    fn account(&mut self, index: usize, id: EngineId, done: Done, cx: &mut Cx) {
        let until = self.pbdmas[index].time.saturating_add(done.ns);
        self.pbdmas[index].time = until;
        if done.ns > 0 {
            self.slot(id).until = until;
        }
        if done.non_stall {
            self.raise_non_stall(slot::number(id), cx);
        }
        if done.released {
            self.retry_waiting();
        }
    }

    /// Returns the next channel that the PBDMA may run, in round-robin order.
    pub(super) fn candidate(&self, index: usize, now: CardNs) -> Option<u8> {
        let here = |channel: u8| self.channels[usize::from(channel)].home.is_none_or(|home| home == index);
        let elsewhere = |channel: u8| {
            self.pbdmas.iter().enumerate().any(|(other, pbdma)| {
                other != index && pbdma.context.as_ref().is_some_and(|context| context.channel == channel)
            })
        };
        let wants =
            |channel: &u8| self.channels[usize::from(*channel)].ready(now) && here(*channel) && !elsewhere(*channel);
        let start = self.pbdmas[index]
            .last
            .and_then(|last| self.order.iter().position(|channel| *channel == last))
            .map_or(0, |position| position + 1);
        let (before, after) = self.order.split_at(start.min(self.order.len()));
        after.iter().chain(before).copied().find(wants)
    }

    /// Selects and loads a channel for the PBDMA. Returns false if loading failed and another channel must be tried.
    fn choose(&mut self, index: usize, now: CardNs, cx: &mut Cx) -> bool {
        let current = self.pbdmas[index].context.as_ref().map(|context| context.channel);
        let keeps = current.is_some_and(|channel| {
            let channel = &self.channels[usize::from(channel)];
            channel.ready(now) || (self.pbdmas[index].holds && channel.runnable())
        });
        if keeps && now < self.pbdmas[index].slice_end {
            return true;
        }
        let Some(next) = self.candidate(index, now) else { return true };
        if current == Some(next) {
            self.pbdmas[index].slice_end = now.saturating_add(TIME_SLICE_NS);
            return true;
        }
        self.unload(index, cx);
        self.load(index, next, cx);
        self.pbdmas[index].context.is_some()
    }

    fn load(&mut self, index: usize, number: u8, cx: &mut Cx) {
        let now = cx.clock.now();
        let begins = self.begins(number, now);
        let pbdma = &mut self.pbdmas[index];
        pbdma.last = Some(number);
        pbdma.holds = false;
        pbdma.waits_at = None;
        pbdma.slice_end = now.saturating_add(TIME_SLICE_NS);
        if let Some(model) = cx.time {
            // The switch starts when the PBDMA is free and another channel has work.
            let begin = if std::mem::take(&mut pbdma.idle) { pbdma.time.max(begins) } else { pbdma.time };
            pbdma.time = begin.saturating_add(model.switch_ns);
        }
        let channel = &mut self.channels[usize::from(number)];
        let Some(instance) = channel.instance() else { return };
        match Context::load(number, instance, &cx.memory) {
            Ok(context) => {
                cx.storage.poke(nvspec::regs::pbdma::CHANNEL::at(index as u32), u32::from(number));
                self.pbdmas[index].context = Some(Box::new(context));
                self.counters.switches += 1;
            }
            Err(LoadError::Unbound(fault)) => {
                let what = Report { unit: unit::FIFO, client: Client::Hub(hub_client::FIFO), instance, fault };
                self.channel_fault(number, what, cx);
            }
            Err(LoadError::Signature) => self.bad_channel(index, number, INTR_0::SIGNATURE.mask(), cx),
            Err(LoadError::Ring) => self.bad_channel(index, number, INTR_0::GP_FIFO_CRC.mask(), cx),
        }
    }

    fn bad_channel(&mut self, index: usize, number: u8, bits: u32, cx: &mut Cx) {
        self.channels[usize::from(number)].health = Health::Faulted;
        self.raise(index, number, bits, None, cx);
    }

    /// Removes the channel from a PBDMA and saves its state.
    pub(super) fn unload(&mut self, index: usize, cx: &mut Cx) {
        if let Some(context) = self.pbdmas[index].context.take() {
            context.save(&cx.memory);
        }
    }

    /// Returns the earliest time at which to poll a channel of this PBDMA again.
    fn next_retry(&self, index: usize, cx: &Cx) -> Progress {
        let now = cx.clock.now();
        let mut progress = Progress::Idle;
        for channel in self.order.iter().map(|number| &self.channels[usize::from(*number)]) {
            if channel.runnable()
                && channel.has_work
                && channel.home.unwrap_or(index) == index
                && let Some(at) = channel.retry_at.filter(|at| *at != NEVER)
            {
                progress = progress.or(Progress::WaitUntil(at.max(now)));
            }
            if channel.runnable() && !channel.has_work && channel.polled() {
                progress = progress.or(Progress::WaitUntil(now.saturating_add(POLL_NS)));
            }
        }
        progress
    }

    /// Runs the loaded channel for up to [`WORDS_PER_STEP`] words.
    fn run_channel(&mut self, index: usize, context: &mut Context, cx: &mut Cx) -> Progress {
        let number = usize::from(context.channel);
        self.channels[number].retry_at = None;
        self.pbdmas[index].holds = false;
        self.pbdmas[index].waits_at = None;
        for words in 0..WORDS_PER_STEP {
            if words > 0 && self.must_stop(index, context, cx) {
                return Progress::Ran;
            }
            let word = match self.next_word(index, context, cx) {
                Ok(Some(word)) => word,
                Ok(None) => return self.pause(index, words, cx),
                Err(()) => return Progress::Ran,
            };
            let (decoder, event) = context.decoder.feed(word);
            let outcome = match event {
                Event::Nothing => Outcome::Done(Done::default()),
                Event::EndSegment => {
                    context.pb_get = context.pb_end.wrapping_sub(4);
                    Outcome::Done(Done::default())
                }
                Event::BadHeader => {
                    // Skip this word. It is not a method, so the driver cannot replace it.
                    context.pb_get += 4;
                    cx.storage.poke(DATA_0::at(index as u32), word);
                    self.raise(index, context.channel, INTR_0::PB_HEADER.mask(), None, cx);
                    return Progress::Ran;
                }
                Event::Method(method) => {
                    self.counters.methods += 1;
                    self.method(index, context, method, cx)
                }
            };
            match outcome {
                Outcome::Done(done) => {
                    context.decoder = decoder;
                    context.pb_get += 4;
                    self.channels[number].retry_ns = RETRY_NS.0;
                    if let Some(id) = context.engine {
                        self.account(index, id, done, cx);
                    }
                }
                Outcome::Yield => {
                    context.decoder = decoder;
                    context.pb_get += 4;
                    self.pbdmas[index].slice_end = 0;
                    return Progress::Ran;
                }
                Outcome::Later => {
                    // The method is retried when an event makes the engine ready.
                    self.channels[number].retry_at = Some(NEVER);
                    return self.pause(index, words, cx);
                }
                Outcome::NotAcquired(switch) => {
                    self.postpone(number, cx);
                    self.pbdmas[index].holds = !switch;
                    return self.pause(index, words, cx);
                }
                Outcome::Elsewhere(other) => {
                    self.channels[number].home = Some(other);
                    return Progress::Ran;
                }
                Outcome::Trap(bits) => {
                    // Do not consume the word, because the driver may replace the method.
                    let Event::Method(method) = event else { return Progress::Ran };
                    cx.storage.poke(DATA_0::at(index as u32), method.data);
                    self.raise(index, context.channel, bits, Some(method_word(method)), cx);
                    return Progress::Ran;
                }
                Outcome::HostFault(fault) => {
                    self.host_fault(context, fault, cx);
                    return Progress::Ran;
                }
                Outcome::EngineFault => {
                    context.decoder = decoder;
                    context.pb_get += 4;
                    return Progress::Ran;
                }
            }
        }
        Progress::Ran
    }

    /// Returns the progress of a channel that pauses after `words` words.
    fn pause(&self, index: usize, words: u32, cx: &Cx) -> Progress {
        let others = !self.pbdmas[index].holds && self.candidate(index, cx.clock.now()).is_some();
        if words > 0 || others { Progress::Ran } else { self.next_retry(index, cx) }
    }

    /// Returns true if the channel must stop between two methods.
    fn must_stop(&self, index: usize, context: &Context, cx: &Cx) -> bool {
        let channel = &self.channels[usize::from(context.channel)];
        let working = context.engine.is_some_and(|id| {
            let slot = &self.slots[id.index()];
            slot.pending() || slot.condition != Condition::Good
        });
        working || !channel.runnable() || self.pbdmas[index].trap.is_some() || self.pbdmas[index].time > cx.clock.now()
    }

    /// Delays the next poll of an unreleased semaphore. The interval grows with each poll.
    pub(super) fn postpone(&mut self, number: usize, cx: &Cx) {
        let channel = &mut self.channels[number];
        channel.retry_ns = channel.retry_ns.clamp(RETRY_NS.0, RETRY_NS.1);
        channel.retry_at = Some(cx.clock.now().saturating_add(channel.retry_ns));
        channel.retry_ns = (channel.retry_ns * 2).min(RETRY_NS.1);
    }

    /// Returns the next word of the push buffer, `Ok(None)` at the end, or `Err` if the channel was stopped.
    pub(super) fn next_word(&mut self, index: usize, context: &mut Context, cx: &mut Cx) -> Result<Option<u32>, ()> {
        while !context.in_segment() {
            if !self.next_segment(index, context, cx)? {
                return Ok(None);
            }
        }
        let at = context.pb_get;
        let ahead = at.wrapping_sub(context.fetched.first) / 4;
        if at >= context.fetched.first && ahead < context.fetched.count as u64 {
            return Ok(Some(context.fetched.words[ahead as usize]));
        }
        self.fetch(context, cx).map(Some)
    }

    /// Prefetches up to [`Fetched::MAX`] words of the segment, all in one page, and returns the first word.
    fn fetch(&mut self, context: &mut Context, cx: &mut Cx) -> Result<u32, ()> {
        let at = context.pb_get;
        let to_page_end = 0x1000 - (at & 0xfff);
        let bytes = (context.pb_end - at).min(to_page_end).min(4 * Fetched::MAX as u64) as usize;
        let mut data = [0u8; 4 * Fetched::MAX];
        let data = &mut data[..bytes];
        if let Err(fault) = cx.mmu.read(&cx.memory, &context.space, GpuVa(at), data, Access::USER) {
            self.host_fault(context, fault, cx);
            return Err(());
        }
        for (word, bytes) in context.fetched.words.iter_mut().zip(data.chunks_exact(4)) {
            *word = u32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]);
        }
        context.fetched.first = at;
        context.fetched.count = bytes / 4;
        Ok(context.fetched.words[0])
    }

    /// Reads the next GPFIFO entry. Returns `Ok(false)` if the ring is empty.
    fn next_segment(&mut self, index: usize, context: &mut Context, cx: &mut Cx) -> Result<bool, ()> {
        let number = usize::from(context.channel);
        let Some(put) = context.gp_put(&cx.memory) else {
            self.channels[number].has_work = false;
            self.channels[number].seen_put = super::context::read_gp_put(context.userd, &cx.memory);
            self.raise(index, context.channel, INTR_0::GP_PTR.mask(), None, cx);
            return Err(());
        };
        if put == context.gp_get {
            self.channels[number].has_work = false;
            self.channels[number].seen_put = Some(put);
            return Ok(false);
        }
        let mut data = [0; 8];
        if let Err(fault) = cx.mmu.read(&cx.memory, &context.space, context.gp_entry(), &mut data, Access::USER) {
            self.host_fault(context, fault, cx);
            return Err(());
        }
        let entry = GpEntry::from(u64::from_le_bytes(data));
        context.advance_gp();
        self.counters.entries += 1;
        context.pb_get = entry.address();
        context.pb_end = entry.address() + 4 * u64::from(entry.dwords());
        if !entry.not_main() {
            context.top_level_get = context.pb_get;
        }
        context.fetched = Fetched::empty();
        context.publish(&cx.memory);
        Ok(true)
    }

    fn host_fault(&mut self, context: &Context, fault: MmuFault, cx: &mut Cx) {
        let what =
            Report { unit: unit::FIFO, client: Client::Hub(hub_client::FIFO), instance: context.instance, fault };
        self.channel_fault(context.channel, what, cx);
    }

    /// Raises a PBDMA interrupt and stops the PBDMA until the driver clears it.
    fn raise(&mut self, index: usize, channel: u8, bits: u32, method: Option<u32>, cx: &mut Cx) {
        self.pbdmas[index].trap = Some(Trap { bits, channel, method });
        let unit = index as u32;
        if let Some(method) = method {
            cx.storage.poke(METHOD_0::at(unit), method);
        }
        cx.storage.poke(nvspec::regs::pbdma::CHANNEL::at(unit), u32::from(channel));
        cx.storage.poke(INTR_0::at(unit), cx.storage.peek(INTR_0::at(unit)) | bits);
    }

    /// Resumes a PBDMA whose interrupts the driver has cleared.
    pub(crate) fn pbdma_cleared(&mut self, unit: u32, cx: &mut Cx) {
        let index = unit as usize;
        let Some(trap) = self.pbdmas.get(index).and_then(|pbdma| pbdma.trap) else { return };
        if cx.storage.peek(INTR_0::at(unit)) & trap.bits != 0 {
            return;
        }
        self.pbdmas[index].trap = None;
        let Some(method) = trap.method else { return };
        // Drivers replace a method with a NOP, so skip a replaced method. Execute an unchanged method again.
        if cx.storage.peek(METHOD_0::at(unit)) == method {
            return;
        }
        let Some(context) = &mut self.pbdmas[index].context else { return };
        if context.channel != trap.channel || !context.in_segment() {
            return;
        }
        let va = GpuVa(context.pb_get);
        if let Ok(word) = cx.mmu.read32(&cx.memory, &context.space, va, Access::USER) {
            context.decoder = context.decoder.feed(word).0;
            context.pb_get += 4;
        }
    }

    fn method(&mut self, index: usize, context: &mut Context, method: Method, cx: &mut Cx) -> Outcome {
        let object = context.objects[usize::from(method.subchannel & 7)];
        if method.address < host_method::ENGINE_FIRST {
            return self.host_method(index, context, method, cx);
        }
        let number = host_method::set_object::ENGINE.get(object);
        let Some(id) = slot::by_number(number).filter(|_| object != 0) else {
            // The subchannel has no object, or has a software object.
            return Outcome::Trap(INTR_0::EMPTY_SUBC.mask());
        };
        if let Some(not_now) = self.use_engine(index, context, id, cx) {
            return not_now;
        }
        let class = host_method::set_object::CLASS.get(object);
        let stamp = self.stamp(index, cx);
        match self.slot(id).method(method.subchannel, class, method.address, method.data, stamp, cx) {
            Ok(done) => Outcome::Done(done),
            Err(error) => {
                self.engine_error(id, Some(context.channel), Some((class, method)), error, cx);
                Outcome::EngineFault
            }
        }
    }

    /// Makes an engine ready for the channel. Returns the method's outcome if the engine is not ready.
    pub(super) fn use_engine(
        &mut self,
        index: usize,
        context: &mut Context,
        id: EngineId,
        cx: &mut Cx,
    ) -> Option<Outcome> {
        let number = slot::number(id);
        match Self::pbdma_of(number, self.pbdmas.len(), cx) {
            Some(server) if server == index => {}
            Some(server) => return Some(Outcome::Elsewhere(server)),
            None => return Some(Outcome::Later),
        }
        let disabled = cx.storage.peek(pfifo::SCHED_DISABLE::OFFSET) | cx.storage.peek(pfifo::SCHED_ENABLE_ACK::OFFSET);
        let slot = &mut self.slots[id.index()];
        if slot.condition != Condition::Good || disabled & (1 << number) != 0 {
            if slot.condition == Condition::Down {
                tracing::debug!(engine = ?id, channel = context.channel, "the engine's firmware has not been started");
            }
            return Some(Outcome::Later);
        }
        context.engine = Some(id);
        let another = slot.resident.is_some_and(|resident| resident.instance != context.instance);
        self.channels[usize::from(context.channel)].home = Some(index);
        if another && !self.evict(id.index(), cx) {
            return Some(Outcome::Later);
        }
        let slot = &mut self.slots[id.index()];
        match slot.make_current(Some(context.channel), context.instance, cx) {
            Ok(true) => {
                if let Some(model) = cx.time {
                    self.pbdmas[index].time = self.pbdmas[index].time.saturating_add(model.switch_ns);
                }
                crate::graph::loaded(&self.slots[id.index()], cx);
                // FECS must write the registers that the image lists before the engine executes a method.
                (!cx.context_writes.is_empty()).then_some(Outcome::Later)
            }
            Ok(false) => None,
            Err(fault) => {
                let client = self.slots[id.index()].context_client();
                self.engine_fault(id.index(), Some(context.channel), fault, client, cx);
                Some(Outcome::Later)
            }
        }
    }
}
