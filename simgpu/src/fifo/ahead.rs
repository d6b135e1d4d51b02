//! Executes a channel's host methods while an engine is busy with the channel.
//!
//! A PBDMA does not wait for its engine: it continues to fetch, and executes host methods up to the next engine method.
//! A channel may therefore wait for a semaphore while its engine is busy, and
//! [`ACQUIRE_PENDING`](nvspec::regs::pfifo::CHANNEL_STATE::ACQUIRE_PENDING) does not mean that the engine is idle.
//! GUESS: other host methods do not run ahead. Drivers can observe that references, and releases that wait for the
//! engine, remain in order.

use super::context::Fetched;
use super::decoder::{Event, Method};
use super::pbdma::{NEVER, Outcome};
use super::{Fifo, Progress};
use crate::cx::Cx;
use nvspec::fifo::host_method as host;

/// Maximum number of words executed per step.
const WORDS_PER_STEP: u32 = 64;

/// Returns true if the host unit executes the method without waiting for the engine.
fn runs_ahead(method: Method) -> bool {
    use host::semaphore_d as d;
    match method.address {
        host::NOP | host::SEMAPHORE_A | host::SEMAPHORE_B | host::SEMAPHORE_C => true,
        host::SEMAPHORE_D => d::OPERATION.get(method.data) != d::RELEASE || d::RELEASE_WFI_DISABLE.is_set(method.data),
        _ => false,
    }
}

impl Fifo {
    /// Executes further words of a channel whose engine is busy. Returns the time of the next semaphore poll.
    pub(super) fn run_ahead(&mut self, index: usize, cx: &mut Cx) -> Progress {
        let now = cx.clock.now();
        if self.pbdmas[index].trapped() || self.blocked(index, cx) {
            return Progress::Idle;
        }
        let pbdma = &mut self.pbdmas[index];
        let Some(mut context) = pbdma.context.take() else { return Progress::Idle };
        let number = usize::from(context.channel);
        let works = context.engine.is_some_and(|id| self.slots[id.index()].works(now));
        let before = self.pbdmas[index].waits_at;
        if works && self.channels[number].ready(now) && before != Some(context.pb_get) {
            self.channels[number].retry_at = None;
            let waits = (0..WORDS_PER_STEP).any(|_| !self.word_ahead(index, &mut context, cx));
            self.pbdmas[index].waits_at = (waits && context.in_segment()).then_some(context.pb_get);
            context.fetched = Fetched::empty();
            context.publish(&cx.memory);
        }
        self.pbdmas[index].context = Some(context);
        let channel = &self.channels[number];
        match channel.retry_at.filter(|at| *at != NEVER && channel.runnable() && channel.has_work) {
            Some(at) => {
                // Resume polling the semaphore, even if the PBDMA is known to wait at this position.
                self.pbdmas[index].waits_at = None;
                Progress::WaitUntil(at.max(now))
            }
            None => Progress::Idle,
        }
    }

    /// Executes the next word if it does not need the engine. Returns true if the caller may continue after this word.
    fn word_ahead(&mut self, index: usize, context: &mut super::context::Context, cx: &mut Cx) -> bool {
        let Ok(Some(word)) = self.next_word(index, context, cx) else { return false };
        let (decoder, event) = context.decoder.feed(word);
        let outcome = match event {
            Event::Nothing => None,
            Event::Method(method) if runs_ahead(method) => Some(self.host_method(index, context, method, cx)),
            Event::Method(_) | Event::EndSegment | Event::BadHeader => return false,
        };
        match outcome {
            None | Some(Outcome::Done(_)) => {
                context.decoder = decoder;
                context.pb_get += 4;
                self.counters.methods += u64::from(outcome.is_some());
                self.channels[usize::from(context.channel)].retry_ns = super::pbdma::RETRY_NS.0;
                true
            }
            Some(Outcome::NotAcquired(_)) => {
                self.postpone(usize::from(context.channel), cx);
                false
            }
            // The error recurs after the engine has finished, and is then reported.
            Some(_) => false,
        }
    }
}
