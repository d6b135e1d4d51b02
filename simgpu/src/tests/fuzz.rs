//! Sends arbitrary writes to the card. The card must keep working and become idle.

use super::driver::{Channel, Driver, PUSH_VA, methods, small};
use crate::fifo::Progress;
use card::{Aperture, Card};
use nvspec::regs;
use proptest::prelude::*;

/// A driver operation, often with valid values.
#[derive(Clone, Debug)]
enum Op {
    /// Writes a register: its index in the table, its array index, and the value.
    Write(usize, u32, u32),
    Read(usize, u32),
    AnyWrite(u32, u32),
    Aperture(bool, u64, Vec<u8>),
    /// Writes a dword of the channel's instance block, ring, push buffer or context image, or of the page tables.
    Poke(u8, u32, u32),
    Push(Vec<u32>),
    Doorbell(u32),
    Step,
    Advance(u64),
    Reset,
}

fn value() -> impl Strategy<Value = u32> {
    prop_oneof![
        any::<u32>(),
        Just(0),
        Just(u32::MAX),
        (0u32..32).prop_map(|bit| 1 << bit),
        // Generate addresses of existing pages, with flag bits.
        (0u32..0x400, 0u32..16).prop_map(|(page, flags)| page << 4 | flags),
        (0u32..0x400).prop_map(|page| 0xc000_0000 | page),
    ]
}

fn push() -> impl Strategy<Value = Vec<u32>> {
    let method = prop_oneof![0u32..0x40, 0x300u32..0x330, any::<u32>().prop_map(|any| any & 0xfff)];
    prop_oneof![
        proptest::collection::vec(any::<u32>(), 1..20),
        (0u32..8, method, proptest::collection::vec(value(), 1..12)).prop_map(|(subchannel, method, data)| methods(
            subchannel,
            method << 2,
            &data
        )),
        prop_oneof![Just(0x9039), Just(0x4_90b5), Just(0x5_90b8), Just(0x9097), Just(0x1f_906e), any::<u32>()]
            .prop_map(|object| methods(2, 0, &[object])),
        (0u32..4, 0u32..0x4000, any::<bool>()).prop_map(|(how, offset, linear)| {
            let at = PUSH_VA as u32 + offset;
            let mut words = methods(2, 0x238, &[0, at]);
            words.extend(methods(2, 0x30c, &[0, PUSH_VA as u32, 0x40, 0x40, 0x33, how]));
            words.extend(methods(2, 0x300, &[if linear { 0x0010_0110 } else { 0x0010_0111 }]));
            words
        }),
    ]
}

fn op() -> impl Strategy<Value = Op> {
    prop_oneof![
        6 => (any::<usize>(), any::<u32>(), value()).prop_map(|(which, index, value)| Op::Write(which, index, value)),
        1 => (any::<usize>(), any::<u32>()).prop_map(|(which, index)| Op::Read(which, index)),
        1 => (any::<u32>(), value()).prop_map(|(offset, value)| Op::AnyWrite(offset, value)),
        2 => (any::<bool>(), 0u64..0x900_0000, proptest::collection::vec(any::<u8>(), 0..20))
            .prop_map(|(first, offset, data)| Op::Aperture(first, offset, data)),
        6 => (0u8..6, any::<u32>(), value()).prop_map(|(what, offset, value)| Op::Poke(what, offset, value)),
        8 => push().prop_map(Op::Push),
        1 => value().prop_map(Op::Doorbell),
        4 => Just(Op::Step),
        1 => any::<u64>().prop_map(|ns| Op::Advance(ns >> 24)),
        1 => Just(Op::Reset),
    ]
}

fn register(which: usize, index: u32) -> u32 {
    let all = regs::blocks().map(|(_, _, _, info)| info.len()).sum::<usize>();
    let info = regs::blocks().flat_map(|(_, _, _, info)| *info).nth(which % all).expect("index is within the table");
    info.offset + index % info.count * info.stride
}

fn apply(driver: &Driver, channel: &mut Channel, op: Op) {
    match op {
        Op::Write(which, index, value) => driver.wr(register(which, index), value),
        Op::Read(which, index) => {
            driver.rd(register(which, index));
        }
        Op::AnyWrite(offset, value) => driver.wr(offset, value),
        Op::Aperture(first, offset, mut data) => {
            let aperture = if first { Aperture::Bar1 } else { Aperture::Bar3 };
            driver.card.aperture_write(aperture, offset, &data);
            driver.card.aperture_read(aperture, offset, &mut data);
        }
        Op::Poke(what, offset, value) => {
            let base = match what {
                0 => channel.instance,
                1 => channel.ring,
                2 => channel.push,
                3 => channel.image,
                4 => channel.space.directory,
                _ => channel.space.table + (PUSH_VA >> 12) * 8,
            };
            driver.poke(base + u64::from((offset % 0x1000) & !3), value);
        }
        Op::Push(words) => driver.push(channel, &words),
        Op::Doorbell(put) => driver.ring_doorbell(channel, put),
        Op::Step => {
            driver.card.gpu().step();
        }
        Op::Advance(ns) => driver.card.gpu().advance(ns),
        Op::Reset => driver.card.reset(),
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 192, ..ProptestConfig::default() })]

    #[test]
    fn card_survives_any_driver_and_comes_to_rest(ops in proptest::collection::vec(op(), 1..120)) {
        let mut driver = Driver::new(&small());
        let mut channel = driver.only_channel(1);
        for op in ops {
            apply(&driver, &mut channel, op);
        }
        // This loop must end, because push buffers are finite. Afterwards, only waits for a later time may remain.
        let mut gpu = driver.card.gpu();
        let rested = (0..200_000).any(|_| gpu.step() != Progress::Ran);
        prop_assert!(rested);
    }
}
