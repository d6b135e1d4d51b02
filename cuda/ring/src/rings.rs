//! Rings with one producer and one consumer. A message consists of whole 64-bit words without gaps.
//!
//! Positions are byte counts since the start of the program, and never wrap. Messages are contiguous. A message of type
//! [`PAD`] fills the end of the ring. The consumer copies each message before checking it, because the producer can
//! change it at any time.

use crate::layout::{control, ring};
use crate::words::Words;

/// Type of messages that fill the end of the ring.
pub const PAD: u16 = u16::MAX;
/// Maximum number of words in a message, including its header.
pub const MAX_WORDS: usize = 4096;

/// Maximum total size of unread messages in bytes, enough for a few hundred launches. If a program could run further
/// ahead than with the real driver, its next synchronous call could take seconds.
const MAX_AHEAD: u64 = 64 << 10;

/// First word of a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Header {
    /// Type of the message.
    pub op: u16,
    /// Flags of the message.
    pub flags: u16,
    /// Number of words, including this word.
    pub words: u32,
}

impl Header {
    /// Encodes the header.
    pub const fn word(self) -> u64 {
        self.op as u64 | (self.flags as u64) << 16 | (self.words as u64) << 32
    }

    /// Decodes a header.
    pub const fn from_word(word: u64) -> Self {
        Self { op: word as u16, flags: (word >> 16) as u16, words: (word >> 32) as u32 }
    }
}

/// Location of a ring and of its positions.
#[derive(Clone, Copy, Debug)]
pub struct Geometry {
    /// Offset of the producer's position in the control blob.
    pub head: u64,
    /// Offset of the consumer's position in the control blob.
    pub tail: u64,
    /// Offset of the first byte in the ring blob.
    pub base: u64,
    /// Size in bytes. Must be a power of two.
    pub bytes: u64,
}

impl Geometry {
    /// The ring for calls that must be executed in order.
    pub const ORDERED: Self =
        Self { head: control::HEAD, tail: control::TAIL, base: ring::ORDERED, bytes: ring::ORDERED_BYTES };
    /// The ring for calls that never wait for work on the card.
    pub const SIDE: Self =
        Self { head: control::SIDE_HEAD, tail: control::SIDE_TAIL, base: ring::SIDE, bytes: ring::SIDE_BYTES };
}

/// The guest's end of a ring.
#[derive(Debug)]
pub struct Producer<C, R> {
    control: C,
    ring: R,
    geometry: Geometry,
    head: u64,
    /// Last known position of the consumer.
    tail: u64,
}

/// The ring has no space for a message. The caller must wait until the tail has reached this position.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Full(pub u64);

impl<C: Words, R: Words> Producer<C, R> {
    /// Returns the producer of an unused ring.
    pub fn new(control: C, ring: R, geometry: Geometry) -> Self {
        Self { control, ring, geometry, head: 0, tail: 0 }
    }

    /// Publishes a message of up to [`MAX_WORDS`] words, including its header. Returns true if the worker sleeps. In
    /// this case, the caller must ring the doorbell.
    ///
    /// # Errors
    /// Returns an error if the ring has no space.
    pub fn publish(&mut self, message: &[u64]) -> Result<bool, Full> {
        let size = message.len() as u64 * 8;
        let offset = self.head & (self.geometry.bytes - 1);
        let rest = self.geometry.bytes - offset;
        let pad = if rest < size { rest } else { 0 };
        let end = self.head + pad + size;
        let room = self.geometry.bytes.min(MAX_AHEAD + pad);
        if end - self.tail > room {
            self.tail = self.control.load(self.geometry.tail).min(self.head);
            if end - self.tail > room {
                return Err(Full(end - room));
            }
        }
        if pad > 0 {
            let header = Header { op: PAD, flags: 0, words: (pad / 8) as u32 };
            self.ring.store(self.geometry.base + offset, header.word());
        }
        let first = (self.head + pad) & (self.geometry.bytes - 1);
        for (at, word) in (self.geometry.base + first..).step_by(8).zip(message) {
            self.ring.store(at, *word);
        }
        self.head = end;
        self.control.store(self.geometry.head, end);
        // Without the fence, the load could be reordered before the store, and both sides could wait for each other.
        self.control.fence();
        Ok(self.control.load(control::ASLEEP) != 0)
    }
}

/// The worker's end of a ring.
#[derive(Debug)]
pub struct Consumer<C, R> {
    control: C,
    ring: R,
    geometry: Geometry,
    tail: u64,
}

/// The ring contains invalid positions or headers. The program that uses the ring loses its context.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Broken;

impl<C: Words, R: Words> Consumer<C, R> {
    /// Returns the consumer of an unused ring.
    pub fn new(control: C, ring: R, geometry: Geometry) -> Self {
        Self::resume(control, ring, geometry, 0)
    }

    /// Returns a consumer that continues at the position of a previous consumer ([`Self::position`]).
    pub fn resume(control: C, ring: R, geometry: Geometry, tail: u64) -> Self {
        Self { control, ring, geometry, tail }
    }

    /// Returns the read position.
    pub fn position(&self) -> u64 {
        self.tail
    }

    /// Returns true if the ring contains messages.
    pub fn has_messages(&self) -> bool {
        self.control.load(self.geometry.head) != self.tail
    }

    /// Copies the next message to `into` and frees its space. Returns false if the ring is empty.
    ///
    /// # Errors
    /// Returns an error if the ring contains an invalid position or header.
    pub fn next(&mut self, into: &mut Vec<u64>) -> Result<bool, Broken> {
        loop {
            let head = self.control.load(self.geometry.head);
            let filled = head.wrapping_sub(self.tail);
            if filled == 0 {
                return Ok(false);
            }
            if filled > self.geometry.bytes || !filled.is_multiple_of(8) {
                return Err(Broken);
            }
            let offset = self.tail & (self.geometry.bytes - 1);
            let at = self.geometry.base + offset;
            let first = self.ring.load(at);
            let header = Header::from_word(first);
            let (words, size) = (header.words as usize, u64::from(header.words) * 8);
            if words == 0 || size > filled.min(self.geometry.bytes - offset) {
                return Err(Broken);
            }
            if header.op != PAD {
                if words > MAX_WORDS {
                    return Err(Broken);
                }
                into.clear();
                into.push(first);
                into.extend((1..words as u64).map(|index| self.ring.load(at + 8 * index)));
            }
            self.tail += size;
            self.control.store(self.geometry.tail, self.tail);
            if header.op != PAD {
                return Ok(true);
            }
        }
    }
}
