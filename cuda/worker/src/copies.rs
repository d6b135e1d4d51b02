//! Copies between the guest's pageable memory and the card. The data is in the message or in a staging buffer.

use cuda_calls::boxes::{BoxCopy, End, HOST, WORDS_3D};
use cuda_calls::own::{self, MAX_INLINE_BYTES};
use cuda_calls::{Fault, Handles as _, Kind, checked_end};
use cuda_ring::staging;

use crate::driver::{INVALID_VALUE, Needed};
use crate::executor::{Broken, Executor};
use crate::pending::{Origin, Wait};

/// `CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED`.
const CAPTURE_UNSUPPORTED: i32 = 900;

/// Location of a copy's data: a staging buffer, or the message if `piece` is `None`. `is_out` is set if the copy reads
/// from the card.
#[derive(Clone, Copy)]
struct Use {
    piece: Option<u64>,
    is_out: bool,
}

impl Executor {
    /// Executes a copy message.
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
        self.end_copy(origin, result, Use { piece, is_out })
    }

    /// Replies when a submitted copy completes, if a reply was requested, or immediately with the error of a failed
    /// submission. Releases the staging buffer that the copy reads.
    fn end_copy(&mut self, origin: Origin, submitted: Result<u64, i32>, used: Use) -> Result<(), Broken> {
        let read_piece = used.piece.filter(|_| !used.is_out);
        match submitted {
            Ok(stream) => {
                if let Some(piece) = read_piece {
                    self.use_piece(piece, stream, origin.route.context);
                }
                if origin.header.flags & own::flags::ANSWER != 0 {
                    return self.begin_wait(origin, Wait::Stream(stream));
                }
            }
            Err(code) => {
                if let Some(piece) = read_piece {
                    self.release_piece(piece);
                }
                if used.is_out {
                    // The reply for a later part may overwrite this reply before the guest reads it.
                    self.defer(origin, code);
                }
                self.finish(origin, code, &[]);
            }
        }
        Ok(())
    }

    /// Executes a copy of a box between pageable memory and the card.
    pub(crate) fn copy_box(&mut self, origin: Origin, words: &[u64]) -> Result<(), Broken> {
        let [piece, stream, is_out, rest @ ..] = words else { return Err(Broken::Malformed) };
        let (copy, data) = rest.split_first_chunk::<WORDS_3D>().ok_or(Broken::Malformed)?;
        let (piece, is_out) = (Some(*piece).filter(|piece| *piece != own::INLINE), *is_out != 0);
        let mut copy = BoxCopy::from_3d(copy);
        let bytes = copy.bytes().filter(|bytes| *bytes > 0).ok_or(Broken::Malformed)?;
        let address = match piece {
            None if !is_out && data.len() as u64 == bytes.div_ceil(8) && bytes <= MAX_INLINE_BYTES as u64 => {
                data.as_ptr().addr() as u64
            }
            Some(piece) if piece < staging::PIECE_COUNT && data.is_empty() && bytes <= staging::PIECE_BYTES => {
                let blob = self.staging.and_then(|id| self.window.blob(id)).ok_or(Broken::Malformed)?;
                self.window.address(&blob) + piece * staging::PIECE_BYTES
            }
            _ => return Err(Broken::Malformed),
        };
        // The guest's end of the copy is in worker memory. The address in the message is ignored.
        let own_end = End { kind: HOST, address, pitch: copy.width, rows: copy.height, ..End::default() };
        *(if is_out { &mut copy.to } else { &mut copy.from }) = own_end;
        let submitted = match self.objects.find(Kind::Stream, *stream).and_then(|stream| {
            let mut copy = copy.spread().ok_or(Fault::Refused(INVALID_VALUE))?;
            let end = checked_end(&copy, if is_out { copy.from } else { copy.to }, &self.objects)?;
            *(if is_out { &mut copy.from } else { &mut copy.to }) = end;
            Ok((copy, stream))
        }) {
            Ok((copy, stream)) => self.submit_box(copy, stream).map(|()| stream),
            Err(Fault::Refused(code)) => Err(code),
            Err(Fault::Malformed) => return Err(Broken::Malformed),
        };
        self.end_copy(origin, submitted, Use { piece, is_out })
    }

    fn submit_box(&self, copy: BoxCopy, stream: u64) -> Result<(), i32> {
        if self.is_capturing(stream) {
            return Err(CAPTURE_UNSUPPORTED);
        }
        let words = copy.to_3d();
        match self.driver.invoke(Needed::CopyBox, &[words.as_ptr().addr() as u64, stream]) {
            0 => Ok(()),
            code => Err(code),
        }
    }

    /// Returns true if work in a stream is captured into a graph.
    pub(crate) fn is_capturing(&self, stream: u64) -> bool {
        // Streams join captures through events, so query the driver while any capture is open.
        if self.captures == 0 {
            return false;
        }
        let mut status = 0i32;
        self.driver.invoke(Needed::IsCapturing, &[stream, (&raw mut status).addr() as u64]);
        status != 0
    }

    fn submit_copy(&self, to: u64, from: u64, bytes: u64, stream: u64) -> Result<(), i32> {
        // A captured copy would access the staging memory at each launch of the graph.
        if self.is_capturing(stream) {
            return Err(CAPTURE_UNSUPPORTED);
        }
        match self.driver.invoke(Needed::Copy, &[to, from, bytes, stream]) {
            0 => Ok(()),
            code => Err(code),
        }
    }
}
