//! The engines that a submission's methods are for: read from its push buffers when it is taken over.
//!
//! The guest can change the words afterwards. So nothing that protects others rests on the answer: see `owner::Needs`.
#![cfg_attr(
    not(test),
    deny(clippy::indexing_slicing, clippy::arithmetic_side_effects, clippy::cast_possible_truncation)
)]

use nvspec::fifo::{HeaderOp, MethodHeader, OldMethodHeader, SUBCHANNELS, engine, host_method, sub_op};
use owner::Needs;

/// Words of a submission that are read. A longer submission counts as work for PGRAPH.
const WORDS: usize = 4096;
/// Words that are read at once: most work for PGRAPH shows in its first few words.
const PIECE: usize = 64;

/// Engines that a channel's subchannels are bound to: as far as that was seen.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Bindings([Option<u32>; SUBCHANNELS as usize]);

/// State of a push buffer between two words.
#[derive(Clone, Copy, Debug)]
enum State {
    /// A header comes.
    Header,
    /// Data come: subchannel, method of the next one, step after that, and after the others; how many.
    Data { subchannel: u8, method: u32, step: u32, then: u32, count: u32 },
}

/// A submission that is read while it is taken over.
#[derive(Debug)]
pub(crate) struct Reader<'a> {
    bindings: &'a mut Bindings,
    state: State,
    /// Words that may still be read.
    left: usize,
    needs: Needs,
}

impl<'a> Reader<'a> {
    /// Of a submission of the channel with these bindings.
    pub(crate) fn new(bindings: &'a mut Bindings) -> Self {
        Self { bindings, state: State::Header, left: WORDS, needs: Needs::Host }
    }

    /// Reads a push buffer of `dwords` words, in pieces: `read` fills one from a word on, and returns `None` where
    /// nothing can be read.
    pub(crate) fn range(&mut self, dwords: u32, mut read: impl FnMut(usize, &mut [u8]) -> Option<()>) {
        let dwords = dwords as usize;
        if dwords > self.left {
            return self.give_up();
        }
        self.left = self.left.saturating_sub(dwords);
        let mut bytes = [0; PIECE * 4];
        for first in (0..dwords).step_by(PIECE) {
            if self.needs == Needs::Graphics {
                return;
            }
            let count = dwords.saturating_sub(first).min(PIECE);
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
    pub(crate) fn needs(self) -> Needs {
        self.needs
    }

    /// Counts the submission as work for PGRAPH, and forgets the bindings: the rest is not read.
    fn give_up(&mut self) {
        self.needs = Needs::Graphics;
        *self.bindings = Bindings::default();
    }

    /// Takes a word. Returns false at the end of the range.
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
            // A mask of subdevices, of which there is one.
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

    /// Takes a method. Returns false if the rest need not be read.
    fn method(&mut self, subchannel: u8, method: u32, datum: u32) -> bool {
        let Some(bound) = self.bindings.0.get_mut(usize::from(subchannel)) else {
            self.give_up();
            return false;
        };
        let needs = if method == host_method::SET_OBJECT {
            let number = host_method::set_object::ENGINE.get(datum);
            *bound = Some(number);
            // Binding a class of PGRAPH may load PGRAPH's context.
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

#[cfg(test)]
mod tests {
    use super::*;
    use rig::driver::{CE0, CE1, M2MF, ce_copy, m2mf_copy, methods, object};
    use sched::Engine;

    /// Needs of a submission of these push buffers.
    fn needs(bindings: &mut Bindings, ranges: &[&[u32]]) -> Needs {
        let mut reader = Reader::new(bindings);
        for words in ranges {
            reader.range(words.len() as u32, |first, bytes| {
                let words = words[first..].iter().flat_map(|word| word.to_le_bytes());
                bytes.iter_mut().zip(words).for_each(|(to, byte)| *to = byte);
                Some(())
            });
        }
        reader.needs()
    }

    fn of(words: &[u32]) -> Needs {
        needs(&mut Bindings::default(), &[words])
    }

    const CE0_ONLY: Needs = Needs::Copies(Engine::Copy0);

    #[test]
    fn copies_need_the_copy_engine_that_their_subchannel_is_bound_to() {
        let copy = ce_copy(0x1000, 0x2000, 1);
        assert_eq!(of(&[object(CE0), copy.repeat(100)].concat()), CE0_ONLY);
        assert_eq!(of(&[object(CE1), copy.clone()].concat()), Needs::Copies(Engine::Copy1));
        assert_eq!(of(&copy), Needs::Graphics, "nobody knows what its subchannel is bound to");
        // A binding holds from one submission to the next.
        let mut bindings = Bindings::default();
        assert_eq!(needs(&mut bindings, &[&object(CE0)]), Needs::Host);
        assert_eq!(needs(&mut bindings, &[&copy]), CE0_ONLY);
        // Until work that was not read to its end may have changed it.
        assert_eq!(needs(&mut bindings, &[&object(M2MF)]), Needs::Graphics);
        assert_eq!(needs(&mut bindings, &[&copy]), Needs::Graphics);
    }

    #[test]
    fn work_with_one_method_for_pgraph_needs_pgraph() {
        let copies = [object(CE0), ce_copy(0x1000, 0x2000, 1)].concat();
        for graphics in [[object(M2MF), m2mf_copy(0x1000, 0x2000, 16)].concat(), methods(2, 0x100, &[0])] {
            assert_eq!(of(&[copies.clone(), graphics.clone()].concat()), Needs::Graphics);
            assert_eq!(of(&[graphics, copies.clone()].concat()), Needs::Graphics);
        }
        // The same by one datum that goes to the subchannel's object, and by a header that has no meaning.
        assert_eq!(of(&[copies.clone(), vec![4 << 29 | 1 << 16 | 2 << 13 | 0x100 >> 2]].concat()), Needs::Graphics);
        assert_eq!(of(&[copies, vec![6 << 29]].concat()), Needs::Graphics);
    }

    #[test]
    fn methods_of_the_host_need_no_engine() {
        assert_eq!(of(&[methods(0, 0x10, &[0, 0x3000, 7, 1]), methods(5, 0x20, &[0])].concat()), Needs::Host);
        assert_eq!(of(&[]), Needs::Host);
    }

    #[test]
    fn data_of_a_method_may_lie_in_the_next_range() {
        let mut bindings = Bindings::default();
        let [header, datum] = object(CE0)[..] else { panic!("a header and its datum") };
        let copy = ce_copy(0x1000, 0x2000, 1);
        assert_eq!(needs(&mut bindings, &[&[header], &[datum], &copy[..3], &copy[3..]]), CE0_ONLY);
        // Data that look like a header do not count, nor does a header after the end of a segment.
        let graphics = methods(2, 0x300, &[0]);
        let data = methods(4, 0x310, &[graphics[0]]);
        assert_eq!(needs(&mut bindings, &[&[data, vec![7 << 29], graphics.clone()].concat()]), CE0_ONLY);
        assert_eq!(needs(&mut bindings, &[&[7 << 29], &graphics]), Needs::Graphics);
    }

    #[test]
    fn work_that_is_too_long_or_cannot_be_read_needs_pgraph() {
        let long = [object(CE0), vec![0; WORDS]].concat();
        assert_eq!(of(&long[..WORDS]), Needs::Host);
        assert_eq!(of(&long), Needs::Graphics);
        let mut bindings = Bindings::default();
        let mut reader = Reader::new(&mut bindings);
        reader.range(3, |_, _| None);
        assert_eq!(reader.needs(), Needs::Graphics);
        for word in (0..=u32::MAX).step_by(0x1_0001) {
            of(&[word, word, !word]);
        }
    }
}
