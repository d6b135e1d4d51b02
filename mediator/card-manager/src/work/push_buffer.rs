//! Determines which engines a submission's methods are for, by parsing its push buffers while it is pulled.
//!
//! The guest can change the push buffers afterwards, so the protection of other VMs does not depend on the result. See
//! [`Needs`].
#![cfg_attr(
    not(test),
    deny(clippy::indexing_slicing, clippy::arithmetic_side_effects, clippy::cast_possible_truncation)
)]

use super::needs::Needs;
use nvspec::fifo::{HeaderOp, MethodHeader, OldMethodHeader, SUBCHANNELS, engine, host_method, sub_op};

/// Maximum number of dwords to read per submission. A longer submission counts as PGRAPH work.
const WORDS: usize = 4096;
/// Number of dwords to read at a time. The first few usually show whether the work is for PGRAPH.
const DWORDS_PER_READ: usize = 64;

/// Engine number bound to each of a channel's subchannels, if known.
#[derive(Clone, Copy, Debug, Default)]
pub struct Bindings([Option<u32>; SUBCHANNELS as usize]);

/// Parser state between two dwords.
#[derive(Clone, Copy, Debug)]
enum State {
    /// The next dword is a header.
    Header,
    /// The next dwords are data. The fields are the subchannel, the method of the next dword, the increments of the
    /// method after this dword and after each later one, and the number of dwords left.
    Data { subchannel: u8, method: u32, step: u32, then: u32, count: u32 },
}

/// Parses a submission's push buffers while it is pulled.
#[derive(Debug)]
pub struct Reader<'a> {
    bindings: &'a mut Bindings,
    state: State,
    /// Number of dwords that may still be read.
    left: usize,
    needs: Needs,
}

impl<'a> Reader<'a> {
    /// Creates a reader for a submission on the channel with these bindings.
    #[must_use]
    pub const fn new(bindings: &'a mut Bindings) -> Self {
        Self { bindings, state: State::Header, left: WORDS, needs: Needs::Host }
    }

    /// Parses a push buffer of `dwords` dwords in parts. `read` fills a buffer with the dwords that start at an index,
    /// and returns `None` if they cannot be read.
    pub fn range(&mut self, dwords: u32, mut read: impl FnMut(usize, &mut [u8]) -> Option<()>) {
        let dwords = dwords as usize;
        if dwords > self.left {
            return self.give_up();
        }
        self.left = self.left.saturating_sub(dwords);
        let mut bytes = [0; DWORDS_PER_READ * 4];
        for first in (0..dwords).step_by(DWORDS_PER_READ) {
            if self.needs == Needs::Graphics {
                return;
            }
            let count = dwords.saturating_sub(first).min(DWORDS_PER_READ);
            let Some(piece) = bytes.get_mut(..count.saturating_mul(4)) else { return };
            if read(first, piece).is_none() {
                return self.give_up();
            }
            let mut words = piece.chunks_exact(4).filter_map(<[u8]>::first_chunk).map(|word| u32::from_le_bytes(*word));
            if !words.all(|word| self.word(word)) {
                return;
            }
        }
    }

    /// Returns the engines that the submission needs.
    #[must_use]
    pub fn needs(self) -> Needs {
        self.needs
    }

    /// Marks the submission as PGRAPH work, and clears the bindings, because the rest is not read.
    fn give_up(&mut self) {
        self.needs = Needs::Graphics;
        *self.bindings = Bindings::default();
    }

    /// Parses one dword. Returns false if the rest of the range need not be read.
    fn word(&mut self, word: u32) -> bool {
        let State::Data { subchannel, method, step, then, count } = self.state else { return self.header(word) };
        let next = State::Data {
            subchannel,
            method: method.saturating_add(step),
            step: then,
            then,
            count: count.saturating_sub(1),
        };
        self.state = if count > 1 { next } else { State::Header };
        self.method(subchannel, method, word)
    }

    fn header(&mut self, word: u32) -> bool {
        let (header, old) = (MethodHeader::from(word), OldMethodHeader::from(word));
        let (subchannel, method, count) = match header.op() {
            HeaderOp::OldIncreasing | HeaderOp::OldNonIncreasing if old.sub_op() == sub_op::METHODS => {
                (old.subchannel(), old.method(), u32::from(old.count()))
            }
            // This header sets a subdevice mask. The card has only one subdevice.
            HeaderOp::OldIncreasing | HeaderOp::OldNonIncreasing => return true,
            HeaderOp::Immediate => {
                return self.method(header.subchannel(), header.method(), header.count().into());
            }
            HeaderOp::EndSegment => return false,
            HeaderOp::Reserved => {
                self.give_up();
                return false;
            }
            HeaderOp::Increasing | HeaderOp::NonIncreasing | HeaderOp::IncreaseOnce => {
                (header.subchannel(), header.method(), u32::from(header.count()))
            }
        };
        let (step, then) = match header.op() {
            HeaderOp::NonIncreasing | HeaderOp::OldNonIncreasing => (0, 0),
            HeaderOp::IncreaseOnce => (4, 0),
            _ => (4, 4),
        };
        if count > 0 {
            self.state = State::Data { subchannel, method, step, then, count };
        }
        true
    }

    /// Adds the needs of a method. Returns false if the rest need not be read.
    fn method(&mut self, subchannel: u8, method: u32, datum: u32) -> bool {
        let Some(bound) = self.bindings.0.get_mut(usize::from(subchannel)) else {
            self.give_up();
            return false;
        };
        let needs = if method == host_method::SET_OBJECT {
            let number = host_method::set_object::ENGINE.get(datum);
            *bound = Some(number);
            // Binding a class of PGRAPH may load the PGRAPH context.
            if number == engine::GR { Needs::Graphics } else { Needs::Host }
        } else if method < host_method::ENGINE_FIRST {
            Needs::Host
        } else {
            bound.map_or(Needs::Graphics, Needs::of_engine)
        };
        self.needs = self.needs.and(needs);
        if self.needs == Needs::Graphics {
            self.give_up();
        }
        self.needs != Needs::Graphics
    }
}
