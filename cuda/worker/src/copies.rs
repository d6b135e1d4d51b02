//! Copies between pageable memory of the guest and the card: bytes in the message, or in pieces of the staging blob.

use cuda_calls::own::{self, MAX_INLINE_BYTES};
use cuda_calls::{Fault, Handles as _, Kind};
use cuda_ring::staging;

use crate::driver::{INVALID_VALUE, Needed};
use crate::executor::{Broken, Executor};
use crate::pending::{Origin, Wait};

/// `CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED`.
const CAPTURE_UNSUPPORTED: i32 = 900;

impl Executor {
    /// Executes one of the copies.
    pub(crate) fn copy(&mut self, origin: Origin, words: &[u64]) -> Result<(), Broken> {
        let (piece, rest) = match (origin.header.op, words) {
            (own::COPY_INLINE, rest) => (None, rest),
            (_, [piece, rest @ ..]) if *piece < staging::PIECE_COUNT => (Some(*piece), rest),
            _ => return Err(Broken::Malformed),
        };
        let [address, bytes, stream, data @ ..] = rest else { return Err(Broken::Malformed) };
        let (address, bytes) = (*address, *bytes);
        let memory = match piece {
            None if data.len() as u64 == bytes.div_ceil(8) && bytes <= MAX_INLINE_BYTES as u64 => {
                data.as_ptr().addr() as u64
            }
            Some(piece) if data.is_empty() && bytes <= staging::PIECE_BYTES => {
                let blob = self.staging.and_then(|id| self.window.blob(id)).ok_or(Broken::Malformed)?;
                self.window.address(&blob) + piece * staging::PIECE_BYTES
            }
            _ => return Err(Broken::Malformed),
        };
        let is_out = origin.header.op == own::COPY_OUT;
        let result = match self.objects.find(Kind::Stream, *stream) {
            Ok(_) if !self.objects.has_range(address, bytes) => Err(INVALID_VALUE),
            Ok(real) => {
                let (to, from) = if is_out { (memory, address) } else { (address, memory) };
                self.submit_copy(to, from, bytes, real).map(|()| real)
            }
            Err(Fault::Refused(code)) => Err(code),
            Err(Fault::Malformed) => return Err(Broken::Malformed),
        };
        match (result, piece) {
            (Ok(real), Some(piece)) if !is_out => {
                self.use_piece(piece, real, origin.route.context);
                if origin.header.flags & own::flags::ANSWER != 0 {
                    return self.begin_wait(origin, Wait::Stream(real));
                }
            }
            (Ok(real), _) if origin.header.flags & own::flags::ANSWER != 0 => {
                return self.begin_wait(origin, Wait::Stream(real));
            }
            (Ok(_), _) => {}
            (Err(code), piece) => {
                if let (Some(piece), false) = (piece, is_out) {
                    self.release_piece(piece);
                }
                self.finish(origin, code, &[]);
            }
        }
        Ok(())
    }

    /// Returns true if work in a stream becomes part of a graph.
    pub(crate) fn is_capturing(&self, stream: u64) -> bool {
        let mut status = 0i32;
        self.driver.invoke(Needed::IsCapturing, &[stream, (&raw mut status).addr() as u64]);
        status != 0
    }

    fn submit_copy(&self, to: u64, from: u64, bytes: u64, stream: u64) -> Result<(), i32> {
        // A graph would read or write the shared memory at each launch.
        if self.is_capturing(stream) {
            return Err(CAPTURE_UNSUPPORTED);
        }
        match self.driver.invoke(Needed::Copy, &[to, from, bytes, stream]) {
            0 => Ok(()),
            code => Err(code),
        }
    }
}
