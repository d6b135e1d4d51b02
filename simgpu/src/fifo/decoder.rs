//! Decodes push buffer dwords into methods. The decoder is a pure function from its state and a word to its next state
//! and an event, so that a word whose method cannot be executed yet can be decoded again later.

use nvspec::Field;
use nvspec::fifo::{HeaderOp, MethodHeader, OldMethodHeader, sub_op};
use nvspec::instance::ramfc::pb_header;

/// Fields of RAMFC's subdevice word.
mod subdevice {
    use super::Field;
    /// Subdevice mask of this channel's device.
    pub(super) const ID: Field = Field::new(11, 0);
    /// Set if the device executes methods.
    pub(super) const ACTIVE: Field = Field::new(28, 28);
    /// The mask that a header stores for later headers.
    // GUESS: drivers write only ID, ACTIVE and bit 29.
    pub(super) const STORED: Field = Field::new(27, 16);
}

/// Rule for distributing a header's data over methods.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Run {
    Increasing,
    NonIncreasing,
    IncreaseOnce,
}

/// A method and its data.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Method {
    pub(crate) subchannel: u8,
    /// Byte address of the method in the class.
    pub(crate) address: u32,
    pub(crate) data: u32,
}

/// Result of decoding a word.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Event {
    /// No method: the word is a header, or data for another subdevice.
    Nothing,
    /// A method to execute.
    Method(Method),
    /// Skip the rest of the segment.
    EndSegment,
    /// The header is invalid.
    BadHeader,
}

/// Position of the stream within a header's data, which persists across segments.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Decoder {
    run: Run,
    first: bool,
    subchannel: u8,
    method_dwords: u16,
    count: u32,
    subdevice: u32,
}

/// Mask of a method number, which has 12 bits.
const METHOD_MASK: u16 = 0xfff;

impl Decoder {
    /// Restores the decoder from the words saved in RAMFC.
    pub(crate) fn restore(header: u32, count: u32, subdevice: u32) -> Self {
        let run = match MethodHeader::from(pb_header::TYPE.get(header) << 29).op() {
            HeaderOp::NonIncreasing | HeaderOp::OldNonIncreasing => Run::NonIncreasing,
            HeaderOp::IncreaseOnce => Run::IncreaseOnce,
            _ => Run::Increasing,
        };
        Self {
            run,
            first: pb_header::FIRST.is_set(header),
            subchannel: pb_header::SUBCHANNEL.get(header) as u8,
            method_dwords: pb_header::METHOD.get(header) as u16,
            count: count & 0x1fff,
            subdevice,
        }
    }

    /// Returns the words to save in RAMFC: header, count, subdevice.
    pub(crate) fn save(&self) -> (u32, u32, u32) {
        let opcode = match self.run {
            Run::Increasing => 1,
            Run::NonIncreasing => 3,
            Run::IncreaseOnce => 5,
        };
        let header = pb_header::TYPE.encode(opcode)
            | pb_header::FIRST.encode(u32::from(self.first))
            | pb_header::SUBCHANNEL.encode(u32::from(self.subchannel))
            | pb_header::METHOD.encode(u32::from(self.method_dwords));
        (header, self.count, self.subdevice)
    }

    /// Decodes the next word of the stream.
    pub(crate) fn feed(mut self, word: u32) -> (Self, Event) {
        let event = if self.count > 0 { self.datum(word) } else { self.header(word) };
        (self, event)
    }

    fn datum(&mut self, data: u32) -> Event {
        let method = Method { subchannel: self.subchannel, address: u32::from(self.method_dwords) << 2, data };
        self.count -= 1;
        let next = match self.run {
            Run::Increasing => true,
            Run::NonIncreasing => false,
            Run::IncreaseOnce => self.first,
        };
        if next {
            self.method_dwords = (self.method_dwords + 1) & METHOD_MASK;
        }
        self.first = false;
        self.event(method)
    }

    fn event(&self, method: Method) -> Event {
        if subdevice::ACTIVE.is_set(self.subdevice) { Event::Method(method) } else { Event::Nothing }
    }

    fn header(&mut self, word: u32) -> Event {
        let header = MethodHeader::from(word);
        self.first = true;
        match header.op() {
            HeaderOp::Increasing => self.begin(Run::Increasing, header),
            HeaderOp::NonIncreasing => self.begin(Run::NonIncreasing, header),
            HeaderOp::IncreaseOnce => self.begin(Run::IncreaseOnce, header),
            HeaderOp::Immediate => {
                self.begin(Run::Increasing, header);
                self.count = 0;
                let data = u32::from(header.count());
                self.event(Method { subchannel: header.subchannel(), address: header.method(), data })
            }
            HeaderOp::OldIncreasing => self.old_header(Run::Increasing, word),
            HeaderOp::OldNonIncreasing => self.old_header(Run::NonIncreasing, word),
            HeaderOp::EndSegment => Event::EndSegment,
            HeaderOp::Reserved => Event::BadHeader,
        }
    }

    fn begin(&mut self, run: Run, header: MethodHeader) -> Event {
        self.run = run;
        self.subchannel = header.subchannel();
        self.method_dwords = header.method_dwords();
        self.count = u32::from(header.count());
        Event::Nothing
    }

    fn old_header(&mut self, run: Run, word: u32) -> Event {
        let header = OldMethodHeader::from(word);
        let mask = (word >> 4) & subdevice::ID.mask();
        match (run, header.sub_op()) {
            (_, sub_op::METHODS) => {
                self.run = run;
                self.subchannel = header.subchannel();
                self.method_dwords = header.method_dwords();
                self.count = u32::from(header.count());
                Event::Nothing
            }
            (Run::Increasing, sub_op::SET_MASK) => self.select(mask),
            (Run::Increasing, sub_op::STORE_MASK) => {
                self.subdevice = subdevice::STORED.with(self.subdevice, mask);
                Event::Nothing
            }
            (Run::Increasing, sub_op::USE_MASK) => self.select(subdevice::STORED.get(self.subdevice)),
            _ => Event::BadHeader,
        }
    }

    fn select(&mut self, mask: u32) -> Event {
        let active = mask & subdevice::ID.get(self.subdevice) != 0;
        self.subdevice = subdevice::ACTIVE.with(self.subdevice, u32::from(active));
        Event::Nothing
    }
}

#[cfg(test)]
mod tests {
    //! Tests the decoder against an independent encoder, which was written from the header formats. The encoder
    //! converts a list of packets to words and the corresponding methods, using its own shifts and masks.

    use super::*;
    use proptest::prelude::*;

    #[derive(Clone, Debug)]
    enum Packet {
        Inc { subc: u8, mthd: u16, data: Vec<u32> },
        NonInc { subc: u8, mthd: u16, data: Vec<u32> },
        Once { subc: u8, mthd: u16, data: Vec<u32> },
        Imm { subc: u8, mthd: u16, value: u16 },
        OldInc { subc: u8, mthd: u16, data: Vec<u32> },
        OldNonInc { subc: u8, mthd: u16, data: Vec<u32> },
        Nop,
    }

    fn packet() -> impl Strategy<Value = Packet> {
        let data = || proptest::collection::vec(any::<u32>(), 0..20);
        let (subc, mthd) = (0u8..8, 0u16..0x1000);
        prop_oneof![
            (subc.clone(), mthd.clone(), data()).prop_map(|(subc, mthd, data)| Packet::Inc { subc, mthd, data }),
            (subc.clone(), mthd.clone(), data()).prop_map(|(subc, mthd, data)| Packet::NonInc { subc, mthd, data }),
            (subc.clone(), mthd.clone(), data()).prop_map(|(subc, mthd, data)| Packet::Once { subc, mthd, data }),
            (subc.clone(), mthd, 0u16..0x2000).prop_map(|(subc, mthd, value)| Packet::Imm { subc, mthd, value }),
            (subc.clone(), 0u16..0x800, data()).prop_map(|(subc, mthd, data)| Packet::OldInc { subc, mthd, data }),
            (subc, 0u16..0x800, data()).prop_map(|(subc, mthd, data)| Packet::OldNonInc { subc, mthd, data }),
            Just(Packet::Nop),
        ]
    }

    fn word(op: u32, count: usize, subc: u8, mthd: u16) -> u32 {
        (op << 29) | ((count as u32) << 16) | (u32::from(subc) << 13) | u32::from(mthd)
    }

    fn old_word(op: u32, count: usize, subc: u8, mthd: u16) -> u32 {
        (op << 29) | ((count as u32) << 18) | (u32::from(subc) << 13) | (u32::from(mthd) << 2)
    }

    fn encode(packet: &Packet, words: &mut Vec<u32>, methods: &mut Vec<(u8, u32, u32)>) {
        let mut expect = |subc: u8, mthd: u16, data: &[u32], step: fn(usize) -> usize| {
            for (index, datum) in data.iter().enumerate() {
                methods.push((subc, ((u32::from(mthd) + step(index) as u32) % 0x1000) * 4, *datum));
            }
        };
        let (head, data): (u32, &[u32]) = match packet {
            Packet::Inc { subc, mthd, data } => {
                expect(*subc, *mthd, data, |index| index);
                (word(1, data.len(), *subc, *mthd), data)
            }
            Packet::NonInc { subc, mthd, data } => {
                expect(*subc, *mthd, data, |_| 0);
                (word(3, data.len(), *subc, *mthd), data)
            }
            Packet::Once { subc, mthd, data } => {
                expect(*subc, *mthd, data, |index| index.min(1));
                (word(5, data.len(), *subc, *mthd), data)
            }
            Packet::Imm { subc, mthd, value } => {
                expect(*subc, *mthd, &[u32::from(*value)], |_| 0);
                (word(4, usize::from(*value), *subc, *mthd), &[])
            }
            Packet::OldInc { subc, mthd, data } => {
                expect(*subc, *mthd, data, |index| index);
                (old_word(0, data.len(), *subc, *mthd), data)
            }
            Packet::OldNonInc { subc, mthd, data } => {
                expect(*subc, *mthd, data, |_| 0);
                (old_word(2, data.len(), *subc, *mthd), data)
            }
            Packet::Nop => (0, &[]),
        };
        words.push(head);
        words.extend_from_slice(data);
    }

    fn fresh() -> Decoder {
        Decoder::restore(0x2040_0000, 0, 0x3000_0001)
    }

    fn run(decoder: &mut Decoder, words: &[u32]) -> Vec<Event> {
        words
            .iter()
            .map(|word| {
                let (next, event) = decoder.feed(*word);
                *decoder = next;
                event
            })
            .filter(|event| *event != Event::Nothing)
            .collect()
    }

    proptest! {
        #[test]
        fn decoder_finds_methods_of_independent_encoder(packets in proptest::collection::vec(packet(), 0..30)) {
            let (mut words, mut methods) = (Vec::new(), Vec::new());
            packets.iter().for_each(|packet| encode(packet, &mut words, &mut methods));
            let found: Vec<_> = run(&mut fresh(), &words)
                .into_iter()
                .map(|event| match event {
                    Event::Method(Method { subchannel, address, data }) => (subchannel, address, data),
                    other => panic!("{other:?}"),
                })
                .collect();
            prop_assert_eq!(found, methods);
        }

        #[test]
        fn saving_and_restoring_anywhere_changes_nothing(
            packets in proptest::collection::vec(packet(), 0..10),
            at in any::<prop::sample::Index>(),
        ) {
            let (mut words, mut methods) = (Vec::new(), Vec::new());
            packets.iter().for_each(|packet| encode(packet, &mut words, &mut methods));
            let expected = run(&mut fresh(), &words);
            let (first, rest) = words.split_at(if words.is_empty() { 0 } else { at.index(words.len()) });
            let mut decoder = fresh();
            let mut found = run(&mut decoder, first);
            let (header, count, subdevice) = decoder.save();
            found.extend(run(&mut Decoder::restore(header, count, subdevice), rest));
            prop_assert_eq!(found, expected);
        }

        #[test]
        fn no_word_panics(words in proptest::collection::vec(any::<u32>(), 0..200)) {
            run(&mut fresh(), &words);
        }
    }

    #[test]
    fn methods_for_other_subdevices_are_skipped_until_reselected() {
        let words = [0x0001_0020, word(4, 7, 0, 0x40), 0x0001_0010, word(4, 8, 0, 0x40)];
        let method = Method { subchannel: 0, address: 0x100, data: 8 };
        assert_eq!(run(&mut fresh(), &words), [Event::Method(method)]);
    }

    #[test]
    fn end_of_segment_and_reserved_opcode_are_distinguished() {
        assert_eq!(run(&mut fresh(), &[0xe000_0000]), [Event::EndSegment]);
        assert_eq!(run(&mut fresh(), &[0xc000_0000]), [Event::BadHeader]);
    }
}
