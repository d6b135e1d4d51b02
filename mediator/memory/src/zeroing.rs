//! Zeroes free chunks before they are assigned to an owner, with the CPU or the copy engines.
//!
//! The CPU writes eight bytes at a time through an uncached aperture. This takes milliseconds per chunk on hardware, or
//! one message per word if the card is in another process. The engines take microseconds and do not need the card's
//! lock. A VM that needs a chunk while the engines are zeroing all free ones waits for the mover.

use crate::ManagerError;
use crate::vram::CardVram;
use crate::zeroed::Zeroing;
use nvspec::addr::VramAddr;
use vram::{HostAddr, Place, ScrubWork, Tier};

/// Number of bytes zeroed per critical section of the card's lock. A chunk may be much larger. Zeroing this many bytes
/// takes about 5 us through a hardware window. On first use of a software card's memory, the host must allocate four
/// pages.
pub const SCRUB_PIECE: u64 = 16 << 10;
/// Number of card chunks to keep zeroed if enough are free. Otherwise, an urgent request would have to zero a whole
/// chunk under the card's lock.
const ZEROED_AHEAD_CHUNKS: u32 = 8;
/// Amount of free memory to keep zeroed if the engines zero memory, in bytes.
const AHEAD_BY_ENGINES: u64 = 16 << 20;
/// Number of bytes that the engines zero per request.
const AT_ONCE: u64 = 4 << 20;

impl CardVram {
    /// Wakes the mover when too few free chunks are zeroed.
    pub(crate) fn ring_for_zeroed(&self) {
        let (zeroed, to_scrub) = self.chunks.zeroed();
        if to_scrub > 0 && zeroed < ZEROED_AHEAD_CHUNKS / 2 {
            self.wakeup.ring();
        }
    }

    /// Same as [`Self::scrub_piece`], but does nothing if enough free chunks are zeroed.
    ///
    /// # Errors
    /// Returns an error if the card does not respond.
    pub fn scrub_ahead(&mut self) -> Result<bool, ManagerError> {
        let (zeroed, to_scrub) = self.chunks.zeroed();
        if to_scrub == 0 || zeroed >= ZEROED_AHEAD_CHUNKS { Ok(false) } else { self.scrub_piece() }
    }

    /// Scrubs one dirty chunk, or finishes the current one. Returns false if no chunk is dirty.
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

    /// Zeroes a part of a dirty chunk. Returns false if no chunk is dirty.
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

    /// Claims dirty chunks for the engines to zero in one request: the maximum number per request if `all` is true,
    /// otherwise only those needed to restore the number of zeroed chunks. If the previous request is not complete,
    /// returns its chunks instead.
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

    /// Records that the engines have zeroed their chunks.
    pub fn engines_have_zeroed(&mut self) {
        self.zeroing.by_engines += self.zeroing.engines.len() as u64;
        self.engines_keep();
    }

    /// Ends the zeroing of the engines' chunks. Chunks that were quarantined in the meantime, because the engines may
    /// still write to them, stay unusable.
    pub fn engines_keep(&mut self) {
        for work in std::mem::take(&mut self.zeroing.engines) {
            self.chunks.scrubbed(work.place);
        }
    }

    /// Passes the engines' chunks to the CPU after the engines have failed. The engines no longer write to the chunks.
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
