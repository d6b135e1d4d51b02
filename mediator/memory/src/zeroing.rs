//! Chunks that nobody has are zeroed before somebody gets them: by the CPU, or by the copy engines.
//!
//! Through an aperture the CPU writes eight bytes at a time, uncached: a chunk takes milliseconds of a card that is hardware, and as many
//! messages as it has words where that card is another process. The engines do it in microseconds, while nobody holds the card's
//! lock. Who needs a chunk at once and finds none but those that they zero waits for the mover.

use crate::HostError;
use crate::vram::CardVram;
use crate::zeroed::Zeroing;
use nvspec::addr::VramAddr;
use vram::{CardAddr, HostAddr, Place, ScrubWork, Tier};

/// Bytes that are zeroed with the card's lock held, when there is time: a chunk may be far larger. Some 5 us through a window
/// of hardware, and where the software card's memory is touched for the first time, four pages that the host has to find.
pub const SCRUB_PIECE: u64 = 16 << 10;
/// Chunks of the card that are kept free and zeroed, if there are as many: who needs one at once would have it zeroed whole with
/// the card's lock held.
const AHEAD: u32 = 8;
/// The same in bytes, where the engines zero.
const AHEAD_BY_ENGINES: u64 = 16 << 20;
/// Bytes that the engines zero for one request.
const AT_ONCE: u64 = 4 << 20;

impl CardVram {
    /// Wakes the mover when few of the chunks that are free are zeroed.
    pub(crate) fn ring_for_zeroed(&self) {
        let (zeroed, to_scrub) = self.chunks.zeroed();
        if to_scrub > 0 && zeroed < AHEAD / 2 {
            self.wakeup.ring();
        }
    }

    /// As [`Self::scrub_piece`], unless enough chunks are free and zeroed.
    ///
    /// # Errors
    /// When the card does not answer.
    pub fn scrub_ahead(&mut self) -> Result<bool, HostError> {
        let (zeroed, to_scrub) = self.chunks.zeroed();
        if to_scrub == 0 || zeroed >= AHEAD { Ok(false) } else { self.scrub_piece() }
    }

    /// Scrubs one chunk that waits for it, or ends what was begun with; false when there is none.
    ///
    /// # Errors
    /// When the card does not answer.
    pub(crate) fn scrub_one(&mut self) -> Result<bool, HostError> {
        let mut any = false;
        while self.scrub_piece()? {
            any = true;
            if self.zeroing.begun.is_none() {
                break;
            }
        }
        Ok(any)
    }

    /// Zeroes a piece of what is to be scrubbed, for who has time; false when nothing is.
    ///
    /// # Errors
    /// When the card does not answer.
    pub fn scrub_piece(&mut self) -> Result<bool, HostError> {
        let (work, done) = match self.zeroing.begun.take() {
            Some(begun) => begun,
            None => {
                let work = self.zeroing.left.pop().or_else(|| self.chunks.take_scrub_work());
                let Some(work) = work else { return Ok(false) };
                let zeroed = match work.place {
                    Place::Host(at) if !self.pinned.leave(at)? => work.bytes,
                    _ => 0,
                };
                (work, zeroed)
            }
        };
        let piece = (work.bytes - done).min(SCRUB_PIECE);
        match work.place {
            Place::Card(CardAddr(at)) => self.memory.zero(VramAddr(at + done), piece)?,
            Place::Host(HostAddr(at)) if piece != 0 => {
                self.pinned.write(HostAddr(at + done), &vec![0; piece as usize]);
            }
            Place::Host(_) => {}
        }
        if done + piece < work.bytes {
            self.zeroing.begun = Some((work, done + piece));
        } else {
            self.chunks.scrubbed(work.place);
        }
        Ok(true)
    }

    /// Takes chunks of the card that wait to be zeroed, for the engines: `all`, or those that are kept zeroed ahead. No more than they
    /// do at once, and only when they have done what they took before.
    #[must_use]
    pub fn take_for_engines(&mut self, all: bool) -> Vec<ScrubWork> {
        let chunks = |bytes: u64| u32::try_from(bytes / self.chunks.chunk_bytes()).unwrap_or(u32::MAX);
        let (at_once, ahead) = (chunks(AT_ONCE).max(1), chunks(AHEAD_BY_ENGINES).max(AHEAD));
        let (zeroed, _) = self.chunks.zeroed();
        let wanted = if all { at_once } else { at_once.min(ahead.saturating_sub(zeroed)) };
        if self.zeroing.engines.is_empty() {
            let work = (0..wanted).map_while(|_| self.chunks.take_scrub_work_in(Tier::Card));
            self.zeroing.engines = work.collect();
        }
        self.zeroing.engines.clone()
    }

    /// The engines have done what was taken for them.
    pub fn engines_have_zeroed(&mut self) {
        self.zeroing.by_engines += self.zeroing.engines.len() as u64;
        self.engines_keep();
    }

    /// Nobody waits for the engines any more. What was taken for them and is quarantined, since they may still write to it, stays out of
    /// use.
    pub fn engines_keep(&mut self) {
        for work in std::mem::take(&mut self.zeroing.engines) {
            self.chunks.scrubbed(work.place);
        }
    }

    /// The engines do not do it, and write nothing there any more: the CPU does.
    pub fn engines_have_failed(&mut self) {
        let Zeroing { engines, left, .. } = &mut self.zeroing;
        left.append(engines);
    }

    /// Chunks that the engines have zeroed since the beginning.
    #[must_use]
    pub fn zeroed_by_engines(&self) -> u64 {
        self.zeroing.by_engines
    }
}
