//! Zeroes free chunks before they get an owner, with the CPU or with the copy engines.
//!
//! The CPU writes through an aperture eight bytes at a time, uncached. This takes milliseconds per chunk on hardware,
//! and one message per word if the card is in another process. The engines take microseconds and do not need the card's
//! lock. A VM that needs a chunk while the engines are zeroing all free ones waits for the mover.

use crate::ManagerError;
use crate::vram::CardVram;
use crate::zeroed::Zeroing;
use nvspec::addr::VramAddr;
use vram::{HostAddr, Place, ScrubWork, Tier};

/// Number of bytes to zero while the card's lock is held once, because a chunk may be far larger. This takes about 5 us
/// through a window of hardware. When the software card's memory is first used, the host must allocate four pages.
pub const SCRUB_PIECE: u64 = 16 << 10;
/// Number of card chunks to keep free and zeroed, if enough chunks are free. Without them, an urgent request would zero
/// a whole chunk under the card's lock.
const ZEROED_AHEAD_CHUNKS: u32 = 8;
/// The same limit in bytes, for engines that zero memory.
const AHEAD_BY_ENGINES: u64 = 16 << 20;
/// Number of bytes per request that the engines zero.
const AT_ONCE: u64 = 4 << 20;

impl CardVram {
    /// Wakes the mover when few of the free chunks are zeroed.
    pub(crate) fn ring_for_zeroed(&self) {
        let (zeroed, to_scrub) = self.chunks.zeroed();
        if to_scrub > 0 && zeroed < ZEROED_AHEAD_CHUNKS / 2 {
            self.wakeup.ring();
        }
    }

    /// Same as [`Self::scrub_piece`], unless enough chunks are free and zeroed.
    ///
    /// # Errors
    /// Returns an error if the card does not respond.
    pub fn scrub_ahead(&mut self) -> Result<bool, ManagerError> {
        let (zeroed, to_scrub) = self.chunks.zeroed();
        if to_scrub == 0 || zeroed >= ZEROED_AHEAD_CHUNKS { Ok(false) } else { self.scrub_piece() }
    }

    /// Scrubs one waiting chunk, or finishes the current one. Returns false if no chunk waits.
    ///
    /// # Errors
    /// Returns an error if the card does not respond.
    pub(crate) fn scrub_one(&mut self) -> Result<bool, ManagerError> {
        let mut any = false;
        while self.scrub_piece()? {
            any = true;
            if self.zeroing.begun.is_none() {
                break;
            }
        }
        Ok(any)
    }

    /// Zeroes part of a chunk that waits for it. Returns false if no chunk waits.
    ///
    /// # Errors
    /// Returns an error if the card does not respond.
    pub fn scrub_piece(&mut self) -> Result<bool, ManagerError> {
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
            Place::Card(VramAddr(at)) => self.memory.zero(VramAddr(at + done), piece)?,
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

    /// Takes chunks for the engines to zero: all waiting chunks if `all` is true, and otherwise as many as are kept
    /// zeroed in advance. Returns at most one request. The previous request must be complete.
    #[must_use]
    pub fn take_for_engines(&mut self, all: bool) -> Vec<ScrubWork> {
        let chunks = |bytes: u64| u32::try_from(bytes / self.chunks.chunk_bytes()).unwrap_or(u32::MAX);
        let (at_once, ahead) = (chunks(AT_ONCE).max(1), chunks(AHEAD_BY_ENGINES).max(ZEROED_AHEAD_CHUNKS));
        let (zeroed, _) = self.chunks.zeroed();
        let wanted = if all { at_once } else { at_once.min(ahead.saturating_sub(zeroed)) };
        if self.zeroing.engines.is_empty() {
            let work = (0..wanted).map_while(|_| self.chunks.take_scrub_work_in(Tier::Card));
            self.zeroing.engines = work.collect();
        }
        self.zeroing.engines.clone()
    }

    /// Records that the engines have zeroed the chunks that were taken for them.
    pub fn engines_have_zeroed(&mut self) {
        self.zeroing.by_engines += self.zeroing.engines.len() as u64;
        self.engines_keep();
    }

    /// Ends the wait for the engines. Chunks that the engines may still write to are quarantined and stay out of use.
    pub fn engines_keep(&mut self) {
        for work in std::mem::take(&mut self.zeroing.engines) {
            self.chunks.scrubbed(work.place);
        }
    }

    /// Assigns the engines' chunks to the CPU, because the engines have failed and no longer write to them.
    pub fn engines_have_failed(&mut self) {
        let Zeroing { engines, left, .. } = &mut self.zeroing;
        left.append(engines);
    }

    /// Returns the total number of chunks that the engines have zeroed.
    #[must_use]
    pub fn zeroed_by_engines(&self) -> u64 {
        self.zeroing.by_engines
    }
}
