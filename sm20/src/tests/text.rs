//! Checks that assembling the disassembler's output restores the original words, and that no text causes a panic.

use proptest::prelude::*;

use crate::codec::tests::samples;
use crate::{Form, Instruction, Op, assemble, decode};
use fastrand::Rng;

/// Assembles one instruction and returns its word.
pub(crate) fn word_of(text: &str) -> Result<u64, String> {
    let program = assemble(text).map_err(|errors| errors[0].to_string())?;
    Ok(match program.words[..] {
        [low] => low.into(),
        [low, high] => u64::from(high) << 32 | u64::from(low),
        _ => panic!("{text}: {} words", program.words.len()),
    })
}

#[test]
fn every_encoding_through_text() {
    for word in samples(&mut Rng::with_seed(3), 200) {
        let instruction = decode(word).unwrap();
        let text = instruction.to_string();
        assert_eq!(word_of(&text), Ok(word), "{text}\n{instruction:?}");
    }
}

#[test]
fn unmodelled_instruction_is_written_as_data() {
    let instruction = decode(0x8010_0000_0000_1c06).unwrap();
    assert_eq!(instruction.to_string(), ".quad 0x8010000000001c06 // TEX");
    assert_eq!(word_of(&instruction.to_string()), Ok(0x8010_0000_0000_1c06));
    let short = Instruction { form: Form::Short, ..Instruction::new(Op::Unsupported { name: "IPA", word: 0x09 }) };
    assert_eq!(short.to_string(), ".word 0x00000009 // IPA");
}

#[test]
fn a_program_through_text() {
    let words = samples(&mut Rng::with_seed(4), 20);
    let source: String = words.iter().map(|word| format!("    {};\n", decode(*word).unwrap())).collect();
    let mut expected = Vec::new();
    for word in words {
        expected.push(word as u32);
        if decode(word).unwrap().form == Form::Long {
            expected.push((word >> 32) as u32);
        }
    }
    assert_eq!(assemble(&source).unwrap().words, expected);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(4000))]

    #[test]
    fn any_text_gives_a_program_or_errors(source in "[ -~\\n\u{e9}]{0,200}") {
        if let Err(errors) = assemble(&source) {
            prop_assert!(!errors.is_empty());
            for error in errors {
                let line = source.lines().nth(error.line as usize - 1).unwrap_or("");
                prop_assert!(error.column as usize <= line.chars().count() + 1, "{error} in {line:?}");
            }
        }
    }

    /// Checks that assembling valid parts of the language in any order results in a program or in errors, without a
    /// panic.
    #[test]
    fn any_mixture_gives_a_program_or_errors(pieces in prop::collection::vec(0..PIECES.len(), 0..40)) {
        let source: String = pieces.iter().map(|n| PIECES[*n]).collect();
        _ = assemble(&source);
    }
}

const PIECES: [&str; 40] = [
    "IADD",
    "MOV32I",
    "LD.E.64",
    "BRA",
    "BAR.RED",
    ".AND",
    ".CC",
    "ISETP.LT",
    " R0",
    " RZ",
    " P0",
    " PT",
    ",",
    ", ",
    "\n",
    ";",
    "[",
    "]",
    "c[0x0]",
    "(",
    ")",
    "-",
    "~",
    "|",
    "0x10",
    "4096",
    "1.5",
    "1e",
    "@",
    "!",
    ".kernel k",
    ".reg x",
    ".equ y",
    ".align 8",
    ".word ",
    ":",
    "pc+",
    "x",
    "y",
    "9999999999999999999",
];
