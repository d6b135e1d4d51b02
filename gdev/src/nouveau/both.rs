//! Executes two copies concurrently, each on its own copy engine.
//!
//! Each engine has a channel, which is created on first use. The kernel driver orders the channels' accesses to a
//! buffer, so copies that share a buffer are executed sequentially.

use std::sync::Arc;

use super::device::{Channel, Device, Use};
use super::push::{Engine, Push, STAMP_AT, linear};
use super::{Nouveau, Spot};
use crate::{Backend, Copy, Error, Result};

/// Number of push buffers of a copy channel. One push buffer can hold a copy of 100 GiB, so a copy rarely needs a
/// second one.
const PUSHBUFFERS: usize = 2;

/// A channel on a copy engine.
#[derive(Debug)]
pub(super) struct CopyChannel {
    engine: Engine,
    channel: Channel,
}

impl CopyChannel {
    fn new(device: &Arc<Device>, engine: Engine) -> Result<Self> {
        let channel = Channel::with_ring(device, PUSHBUFFERS)?;
        channel.add(engine.object())?;
        Ok(Self { engine, channel })
    }

    fn submit(&self, mut push: Push, uses: &[Use<'_>]) -> Result<()> {
        let pushbuffer = self.channel.next_pushbuffer()?;
        push.release_when_idle(pushbuffer.address() + STAMP_AT, self.channel.submitted() as u32 + 1);
        let list: Vec<Use<'_>> = uses.iter().copied().chain([Use::write(pushbuffer)]).collect();
        self.channel.submit(&push, &list).map(drop)
    }

    /// Submits a copy. Returns the number of engine copies into which it was split.
    fn copy(&self, from: Spot<'_>, to: Spot<'_>, bytes: u64) -> Result<u64> {
        let uses: Vec<Use<'_>> = from.buffer.map(Use::read).into_iter().chain(to.buffer.map(Use::write)).collect();
        let rects = linear(from.address, to.address, bytes, self.engine.most_lines());
        let mut push = Push::default();
        for rect in &rects {
            if !push.has_room() {
                self.submit(std::mem::take(&mut push), &uses)?;
            }
            push.copy(self.engine, rect);
        }
        self.submit(push, &uses)?;
        Ok(rects.len() as u64)
    }

    fn wait(&self) -> Result<()> {
        let number = self.channel.submitted();
        self.channel.wait(number)?;
        if self.channel.stamp(number)? == Some(number as u32) {
            return Ok(());
        }
        Err(Error::Lost(format!("a copy on {} did not complete: see the kernel log", self.engine.name())))
    }
}

impl Nouveau {
    /// Executes two copies concurrently, and waits for both.
    ///
    /// # Errors
    /// Returns an error if the memory is unknown, a copy was lost, or the driver fails. Neither copy is then in flight.
    pub(super) fn on_both_engines(&mut self, copies: [&Copy; 2]) -> Result<()> {
        let mut engines = match self.engines.take() {
            Some(engines) => engines,
            None => [CopyChannel::new(&self.device, Engine::Ce0)?, CopyChannel::new(&self.device, Engine::Ce1)?],
        };
        let submitted: Vec<Result<u64>> = engines
            .iter_mut()
            .zip(copies)
            .map(|(engine, copy)| {
                let (from, to) = (self.spot(copy.from, copy.from_offset)?, self.spot(copy.to, copy.to_offset)?);
                engine.copy(from, to, copy.bytes)
            })
            .collect();
        // Wait for both copies, even after an error, because the caller may free the memory.
        let ended: Vec<Result<()>> = engines.iter().map(CopyChannel::wait).collect();
        let ended = ended.into_iter().collect::<Result<()>>();
        for (number, copy) in submitted.into_iter().zip(copies) {
            self.done.copies += number?;
            if self.place(copy.from)? != self.place(copy.to)? {
                self.done.link_bytes += copy.bytes;
            }
        }
        // Do not reuse channels that have lost work.
        ended.map(|()| self.engines = Some(engines))
    }
}
