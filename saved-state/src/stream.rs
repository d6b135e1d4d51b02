//! Saved state followed by memory, as a stream. Neither the writer nor the reader buffers more than the head or one
//! piece.
//!
//! All numbers are little-endian. The head is a file of parts ([`Writer`](crate::Writer)).
//!
//! | bytes | contents |
//! |---|---|
//! | 8 | [`MAGIC`] |
//! | 4 | [`FORMAT`] |
//! | 8 | length of the head, at most [`HEAD_MAX`] |
//! | n | the head |
//! | 32 | SHA-256 of all of the above |
//!
//! The head is followed by the nonzero pieces of memory, in address order, and an end marker, which is an empty piece
//! at the highest address:
//!
//! | bytes | contents |
//! |---|---|
//! | 8 | address of the first byte |
//! | 4 | number of bytes, at most [`PIECE_MAX`] |
//! | n | the bytes |
//! | 32 | SHA-256 of the previous checksum, and all of the above |
//!
//! Each checksum covers the previous one, so that a missing, swapped or foreign piece is detected where it occurs. As
//! in [files](crate), this detects corruption but not tampering.

use sha2::{Digest, Sha256};

/// Magic bytes at the start of each stream.
pub const MAGIC: [u8; 8] = *b"GPUMVMST";
/// Version of the stream format.
pub const FORMAT: u32 = 1;
/// Maximum size of a head in bytes. A head contains the contexts of all channels on a card, and the page tables kept
/// for a guest.
pub const HEAD_MAX: usize = 64 << 20;
/// Maximum size of a piece in bytes.
pub const PIECE_MAX: usize = 256 << 10;

/// Size of a checksum in bytes.
const SUM: usize = 32;
/// Number of bytes before the head.
const START: usize = 20;
/// Number of bytes before the data of a piece.
const PIECE_HEAD: usize = 12;
/// Address of the end marker.
const END: u64 = u64::MAX;

type Sum = [u8; SUM];

/// Reason for rejecting a stream.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum StreamError {
    /// The magic bytes do not match.
    #[error("this is not a saved VM: its first bytes differ")]
    Magic,
    /// The version of the format is not supported.
    #[error("the saved VM has format {0}; this program reads format {FORMAT}")]
    Format(u32),
    /// The head is too long.
    #[error("the saved VM claims a header of {0} bytes; the maximum is {HEAD_MAX}")]
    Head(u64),
    /// A checksum is wrong.
    #[error("the saved VM is corrupt, or combined from two files: the checksum at byte {0} is wrong")]
    Sum(u64),
    /// A piece is too long or empty.
    #[error("the saved VM claims a piece of {0} bytes of memory; must be from 1 to {PIECE_MAX}")]
    Piece(u32),
    /// A piece's address is not above the end of the previous piece.
    #[error("the saved VM has memory at {0:#x} after memory at a higher address")]
    Order(u64),
    /// Bytes follow the end marker.
    #[error("bytes follow the end of the saved VM")]
    Behind,
    /// Bytes are missing.
    #[error("the saved VM ends after {0} bytes: it was truncated")]
    Cut(u64),
}

/// An encoder for a stream. The caller must send the returned bytes in order.
#[derive(Debug)]
pub struct StreamWriter {
    sum: Sum,
}

impl StreamWriter {
    /// Creates a stream with this head. Also returns the first bytes of the stream.
    #[must_use]
    pub fn new(head: &[u8]) -> (Self, Vec<u8>) {
        let mut bytes = MAGIC.to_vec();
        bytes.extend(FORMAT.to_le_bytes());
        bytes.extend((head.len() as u64).to_le_bytes());
        bytes.extend(head);
        let sum: Sum = Sha256::digest(&bytes).into();
        bytes.extend(sum);
        (Self { sum }, bytes)
    }

    /// Encodes a piece of 1 to [`PIECE_MAX`] bytes. The address `at` of its first byte must not be below the end of the
    /// previous piece.
    pub fn piece(&mut self, at: u64, data: &[u8]) -> Vec<u8> {
        debug_assert!((1..=PIECE_MAX).contains(&data.len()), "a piece of {} bytes", data.len());
        let mut bytes = at.to_le_bytes().to_vec();
        bytes.extend(u32::try_from(data.len()).unwrap_or(u32::MAX).to_le_bytes());
        bytes.extend(data);
        self.sum = next(&self.sum, &bytes);
        bytes.extend(self.sum);
        bytes
    }

    /// Returns the last bytes of the stream.
    #[must_use]
    pub fn end(self) -> Vec<u8> {
        let mut bytes = END.to_le_bytes().to_vec();
        bytes.extend(0u32.to_le_bytes());
        let sum = next(&self.sum, &bytes);
        bytes.extend(sum);
        bytes
    }
}

fn next(before: &Sum, bytes: &[u8]) -> Sum {
    Sha256::new().chain_update(before).chain_update(bytes).finalize().into()
}

/// A complete unit of a stream.
#[derive(Debug, PartialEq, Eq)]
pub enum Item<'a> {
    /// The head, which occurs once, at the start.
    Head(&'a [u8]),
    /// A piece of memory, with its address and contents.
    Piece(u64, &'a [u8]),
}

/// A decoder for a stream, which accepts portions of any length.
#[derive(Debug, Default)]
pub struct StreamReader {
    /// Bytes of an incomplete unit.
    rest: Vec<u8>,
    /// Number of stream bytes before `rest`.
    before: u64,
    at: Expects,
}

/// The unit that must come next in a stream.
#[derive(Clone, Copy, Debug, Default)]
enum Expects {
    #[default]
    Head,
    /// A piece at this address or above. The first value is the checksum of the previous unit.
    Piece(Sum, u64),
    Nothing,
}

impl StreamReader {
    /// Accepts the next bytes. Verifies the checksum of each complete unit before passing it to `sink`.
    ///
    /// # Errors
    /// Returns an error if the bytes are not a valid stream, or if `sink` fails. After an error, no more data may be
    /// fed.
    pub fn feed<E: From<StreamError>>(
        &mut self,
        mut bytes: &[u8],
        sink: &mut impl FnMut(Item<'_>) -> Result<(), E>,
    ) -> Result<(), E> {
        while !bytes.is_empty() {
            let wanted = self.wanted()?.saturating_sub(self.rest.len());
            let (taken, left) = bytes.split_at_checked(wanted).unwrap_or((bytes, &[]));
            self.rest.extend(taken);
            bytes = left;
            self.deal(sink)?;
        }
        Ok(())
    }

    /// Ends the stream after all bytes have been fed.
    ///
    /// # Errors
    /// Returns an error if the end marker is missing.
    pub fn finish(self) -> Result<(), StreamError> {
        match self.at {
            Expects::Nothing => Ok(()),
            Expects::Head | Expects::Piece(..) => Err(StreamError::Cut(self.position())),
        }
    }

    fn position(&self) -> u64 {
        self.before.saturating_add(self.rest.len() as u64)
    }

    /// Returns the size of the next unit in bytes, or of the unit's header if the length of the unit is not yet known.
    fn wanted(&self) -> Result<usize, StreamError> {
        let long = |start: usize, length: usize| start.saturating_add(length).saturating_add(SUM);
        match self.at {
            Expects::Head => match self.head_length()? {
                None => Ok(START),
                Some(length) => Ok(long(START, length)),
            },
            Expects::Piece(_, least) => match self.piece_head(least)? {
                None => Ok(PIECE_HEAD),
                Some((_, length)) => Ok(long(PIECE_HEAD, length)),
            },
            Expects::Nothing => Err(StreamError::Behind),
        }
    }

    /// Returns the length of the head, if known.
    fn head_length(&self) -> Result<Option<usize>, StreamError> {
        let Some((magic, rest)) = self.rest.split_at_checked(MAGIC.len()) else { return Ok(None) };
        if magic != MAGIC {
            return Err(StreamError::Magic);
        }
        let Some((format, rest)) = rest.split_first_chunk() else { return Ok(None) };
        let format = u32::from_le_bytes(*format);
        if format != FORMAT {
            return Err(StreamError::Format(format));
        }
        let Some(length) = rest.first_chunk() else { return Ok(None) };
        let length = u64::from_le_bytes(*length);
        let within = usize::try_from(length).ok().filter(|length| *length <= HEAD_MAX);
        within.map(Some).ok_or(StreamError::Head(length))
    }

    /// Returns the address and length of the next piece, if known.
    fn piece_head(&self, least: u64) -> Result<Option<(u64, usize)>, StreamError> {
        let Some((at, rest)) = self.rest.split_first_chunk() else { return Ok(None) };
        let Some(length) = rest.first_chunk() else { return Ok(None) };
        let (at, length) = (u64::from_le_bytes(*at), u32::from_le_bytes(*length));
        if at == END && length == 0 {
            return Ok(Some((at, 0)));
        }
        if at < least || at.checked_add(length.into()).is_none() {
            return Err(StreamError::Order(at));
        }
        let within = usize::try_from(length).ok().filter(|length| (1..=PIECE_MAX).contains(length));
        within.map(|length| Some((at, length))).ok_or(StreamError::Piece(length))
    }

    /// Verifies the next unit and passes it to `sink`, if all of its bytes have arrived.
    fn deal<E: From<StreamError>>(&mut self, sink: &mut impl FnMut(Item<'_>) -> Result<(), E>) -> Result<(), E> {
        let wanted = self.wanted()?;
        if self.rest.len() < wanted {
            return Ok(());
        }
        let Some((bytes, said)) = self.rest.split_last_chunk::<SUM>() else { return Ok(()) };
        let wrong = || StreamError::Sum(self.before.saturating_add(bytes.len() as u64));
        self.at = match self.at {
            Expects::Head => {
                let Some(length) = self.head_length()? else { return Ok(()) };
                let Some(head) = bytes.get(START..).filter(|head| head.len() == length) else { return Ok(()) };
                if Sum::from(Sha256::digest(bytes)) != *said {
                    return Err(wrong().into());
                }
                sink(Item::Head(head))?;
                Expects::Piece(*said, 0)
            }
            Expects::Piece(before, least) => {
                let Some((at, length)) = self.piece_head(least)? else { return Ok(()) };
                let Some(data) = bytes.get(PIECE_HEAD..).filter(|data| data.len() == length) else { return Ok(()) };
                if next(&before, bytes) != *said {
                    return Err(wrong().into());
                }
                if data.is_empty() {
                    Expects::Nothing
                } else {
                    sink(Item::Piece(at, data))?;
                    Expects::Piece(*said, at.saturating_add(length as u64))
                }
            }
            Expects::Nothing => Expects::Nothing,
        };
        self.before = self.position();
        self.rest.clear();
        Ok(())
    }
}

#[cfg(test)]
mod tests;
