//! Tests that each table is consistent, and that decoding and encoding agree for words of all kinds.

use super::*;
use crate::tests::text::word_of;
use fastrand::Rng;

fn tables() -> impl Iterator<Item = (Form, &'static Row)> {
    let long = LONG_TABLES.iter().flat_map(|table| table.iter()).map(|row| (Form::Long, row));
    long.chain(SHORT_TABLES.iter().flat_map(|table| table.iter()).map(|row| (Form::Short, row)))
}

/// Returns the canonical encoding of a valid word: the same word, without a guard that has no effect.
fn canonical(word: u64) -> u64 {
    let index = if word & SHORT_FORM_BIT != 0 { &SHORT_INDEX } else { &LONG_INDEX };
    match index.find(word) {
        Some(row) if row.guarding == Guarding::Ignored => word & !GUARD.mask(),
        _ => word,
    }
}

/// Returns valid words. For every row, there are up to `each` words with random operands.
pub(crate) fn samples(random: &mut Rng, each: usize) -> Vec<u64> {
    let mut words = Vec::new();
    for (_, row) in tables() {
        let free = covered(row) & !row.mask;
        let tries = (0..each * 100).map(|_| canonical(row.value | random.u64(..) & free));
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
        assert_eq!(row.mask & SHORT_FORM_BIT, SHORT_FORM_BIT, "{}: size bit is not fixed", row.name);
        assert_eq!(row.value & SHORT_FORM_BIT != 0, form == Form::Short, "{}: wrong size", row.name);
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
    let mut random = Rng::with_seed(1);
    for (_, row) in tables() {
        let (fields, _) = (row.fields)();
        let free = covered(row) & !row.mask;
        assert_eq!(free & fields, fields);
        // In the sparsest row, one word in sixteen is valid: eight of the 32 values of one field, and one of the four
        // values of an adjacent field.
        let valid = (0..4000).filter(|_| round_trip(row.value | random.u64(..) & free)).count();
        assert!(valid >= 50, "{}: only {valid} of 4000 words decode", row.name);
    }
}

#[test]
fn single_bits_that_no_field_covers_are_refused() {
    let mut random = Rng::with_seed(2);
    for (_, row) in tables() {
        let free = covered(row) & !row.mask;
        let word = (0..4000).map(|_| row.value | random.u64(..) & free).find(|word| decode(*word).is_ok()).unwrap();
        for bit in (0..64).map(|n| 1 << n).filter(|bit| covered(row) & bit == 0) {
            assert!(decode(word | bit).is_err(), "{}: {:#x} with {bit:#x}", row.name, word);
        }
    }
}

#[test]
fn every_operation_has_an_encoding() {
    for (name, template) in Op::TEMPLATES {
        let op = match template() {
            // Use an absolute target, because this operation does not support the default, a relative one.
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
    // Decode SSY with the two guards that compilers emit, and with an invalid guard.
    assert_eq!(decode(0x6000_0000_0000_0007), decode(0x6000_0000_0000_1c07));
    assert!(matches!(decode(0x6000_0000_0000_0407), Err(DecodeError::Field { field: "guard", .. })));
}

#[test]
fn unmodelled_instruction_has_a_name() {
    let texture = decode(0x8010_0000_0000_1c06).unwrap();
    assert_eq!(texture.op, Op::Unsupported { name: "TEX", word: 0x8010_0000_0000_1c06 });
    assert_eq!(encode(&texture), Ok(0x8010_0000_0000_1c06));
    let forged = Instruction::new(Op::Unsupported { name: "TEX", word: 0x8000_0000_0000_1de7 });
    assert!(encode(&forged).is_err());
}

/// Returns words of all kinds: random words, short words, words with few bits set, and words close to valid words.
/// Random words alone are not sufficient, because only about one in a hundred is an instruction.
fn any_word(random: &mut Rng, last: u64) -> u64 {
    let bits = random.u64(..);
    let word = random.u64(..);
    match bits % 8 {
        0 => word & !SHORT_FORM_BIT,
        1 => word & bits::ones(32) | SHORT_FORM_BIT,
        2 => word & random.u64(..) & !SHORT_FORM_BIT | word & 0xfc00_0000_0000_0007,
        3 => word & random.u64(..) & bits::ones(32) | SHORT_FORM_BIT,
        _ => last ^ (0..=bits >> 8 & 3).fold(0, |flips, n| flips | 1 << (bits >> (16 + 6 * n) & 63)),
    }
}

#[test]
fn a_million_words_through_instructions_and_text() {
    let mut random = Rng::with_seed(5);
    let beginnings = samples(&mut random, 2);
    let (mut good, mut last) = (0, 0);
    let mut seen = std::collections::HashSet::new();
    for round in 0..1_000_000usize {
        // Start a walk from every row, so that no walk remains in an area in which most words are valid.
        if round % 64 == 0 {
            last = beginnings[round / 64 % beginnings.len()];
        }
        let word = any_word(&mut random, last);
        if !round_trip(word) {
            continue;
        }
        (good, last) = (good + 1, word);
        let instruction = decode(word).unwrap();
        seen.insert(instruction.op.mnemonic());
        // Test the text less often, because this takes longer and does not depend on undefined bits.
        if good % 8 == 0 {
            let text = instruction.to_string();
            assert_eq!(word_of(&text), Ok(canonical(word)), "{text}");
        }
    }
    assert!(good > 300_000, "only {good} words decode");
    for (name, _) in Op::TEMPLATES {
        assert!(seen.contains(name), "no {name} came up");
    }
}
