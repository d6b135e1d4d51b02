//! The tables: consistent with themselves, and the same in both directions over the whole space of words.

use proptest::prelude::*;

use super::*;
use crate::tests::random::Random;

fn tables() -> impl Iterator<Item = (Form, &'static Row)> {
    let long = LONG_TABLES.iter().flat_map(|table| table.iter()).map(|row| (Form::Long, row));
    long.chain(SHORT_TABLES.iter().flat_map(|table| table.iter()).map(|row| (Form::Short, row)))
}

/// The word that encoding gives for a word that decodes: the same, or without a guard that has no meaning.
fn canonical(word: u64) -> u64 {
    let index = if word & SHORT != 0 { &SHORT_INDEX } else { &LONG_INDEX };
    match index.find(word) {
        Some(row) if row.guarding == Guarding::Ignored => word & !GUARD.mask(),
        _ => word,
    }
}

/// Words of every row that decode: `each` of a row, with random operands.
pub(crate) fn samples(random: &mut Random, each: usize) -> Vec<u64> {
    let mut words = Vec::new();
    for (_, row) in tables() {
        let free = covered(row) & !row.mask;
        let tries = (0..each * 100).map(|_| canonical(row.value | random.next() & free));
        words.extend(tries.filter(|word| decode(*word).is_ok()).take(each));
    }
    words
}

fn round_trip(word: u64) -> bool {
    let Ok(instruction) = decode(word) else { return false };
    assert_eq!(encode(&instruction), Ok(canonical(word)), "{word:#018x} {instruction:?}");
    assert_eq!(decode(canonical(word)), Ok(instruction), "{word:#018x}");
    assert_eq!(instruction.size(), size(u32::try_from(word & 0xffff_ffff).unwrap()));
    true
}

#[test]
fn rows_are_consistent() {
    for (form, row) in tables() {
        let (fields, twice) = (row.fields)();
        assert_eq!(twice, 0, "{}: fields share bits {twice:#x}", row.name);
        assert_eq!(row.value & !row.mask & !fields, 0, "{}: value outside of mask", row.name);
        assert_eq!(row.mask & fields, 0, "{}: fields in the opcode, {:#x}", row.name, row.mask & fields);
        let guard = if row.guarding == Guarding::Absent { 0 } else { GUARD.mask() };
        let join = if row.joins { JOIN.mask() } else { 0 };
        assert_eq!((row.mask | fields) & (guard | join), 0, "{}: guard in other fields", row.name);
        assert_eq!(row.mask & SHORT, SHORT, "{}: does not tell its size", row.name);
        assert_eq!(row.value & SHORT != 0, form == Form::Short, "{}: of the wrong size", row.name);
        if form == Form::Short {
            assert_eq!(bits::take(covered(row), 32, 32), 0, "{}: more than 32 bits", row.name);
        }
    }
}

#[test]
fn no_word_matches_two_rows() {
    let plain = tables().map(|(_, row)| (row.name, row.value, row.mask));
    let unsupported = special::UNSUPPORTED.iter().chain(short::UNSUPPORTED).copied();
    let all: Vec<_> = plain.chain(unsupported).collect();
    for (n, a) in all.iter().enumerate() {
        assert!(all[n + 1..].iter().all(|b| (a.1 ^ b.1) & a.2 & b.2 != 0), "{a:x?} overlaps another row");
    }
}

#[test]
fn every_row_is_the_same_in_both_directions() {
    let mut random = Random(1);
    for (_, row) in tables() {
        let (fields, _) = (row.fields)();
        let free = covered(row) & !row.mask;
        assert_eq!(free & fields, fields);
        // A field of five bits with eight meanings, next to one of four types, makes one word in sixteen valid.
        let valid = (0..4000).filter(|_| round_trip(row.value | random.next() & free)).count();
        assert!(valid >= 50, "{}: only {valid} of 4000 words decode", row.name);
    }
}

#[test]
fn single_bits_that_no_field_covers_are_refused() {
    let mut random = Random(2);
    for (_, row) in tables() {
        let free = covered(row) & !row.mask;
        let word = (0..4000).map(|_| row.value | random.next() & free).find(|word| decode(*word).is_ok()).unwrap();
        for bit in (0..64).map(|n| 1 << n).filter(|bit| covered(row) & bit == 0) {
            assert!(decode(word | bit).is_err(), "{}: {:#x} with {bit:#x}", row.name, word);
        }
    }
}

#[test]
fn every_operation_has_an_encoding() {
    for (name, template) in Op::TEMPLATES {
        let op = match template() {
            // A default target is relative.
            Op::Jmp { test, uniform, limit, .. } => {
                Op::Jmp { target: crate::Target::Absolute(0), test, uniform, limit }
            }
            Op::Jmx { index, test, limit, .. } => Op::Jmx { target: crate::Target::Absolute(0), index, test, limit },
            Op::Jcal { limit, .. } => Op::Jcal { target: crate::Target::Absolute(0), limit },
            op => op,
        };
        let instruction = Instruction::new(op);
        let word = encode(&instruction).unwrap_or_else(|error| panic!("{name}: {error}"));
        assert_eq!(decode(word), Ok(instruction), "{name}");
    }
}

#[test]
fn guards_that_mean_nothing() {
    // SSY with the two guards that compilers write, and with one that would be a mistake.
    assert_eq!(decode(0x6000_0000_0000_0007), decode(0x6000_0000_0000_1c07));
    assert!(matches!(decode(0x6000_0000_0000_0407), Err(DecodeError::Field { field: "guard", .. })));
}

#[test]
fn what_is_not_modelled_has_a_name() {
    let texture = decode(0x8010_0000_0000_1c06).unwrap();
    assert_eq!(texture.op, Op::Unsupported { name: "TEX", word: 0x8010_0000_0000_1c06 });
    assert_eq!(encode(&texture), Ok(0x8010_0000_0000_1c06));
    let forged = Instruction::new(Op::Unsupported { name: "TEX", word: 0x8000_0000_0000_1de7 });
    assert!(encode(&forged).is_err());
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(20_000))]

    #[test]
    fn any_word(word: u64) {
        round_trip(word);
    }

    #[test]
    fn any_short_word(word: u32) {
        round_trip(u64::from(word) | SHORT);
    }
}
