//! Fermi's shader instruction set (NVIDIA's sm_20): decoder, encoder, assembler, disassembler.
//!
//! - [`decode`] and [`encode`] convert machine words to [`Instruction`] and back. Both come from one table of encodings
//!   in `codec`, one file for each family. Decoding is strict: a word with a set bit that does not belong to a field of
//!   its encoding is an error, so that [`encode`] restores every decoded word.
//! - [`assemble`] and `Display` of [`Instruction`] convert text to a [`Program`] and back; `syntax` has one description
//!   of each operation's suffixes and operands for both. The language is described in
//!   `docs/reference/sm20-assembly.md`.
//!
//! No input causes a panic, and the time and memory for an input are at most linear in its length. Not in this crate:
//! the semantics of operations.
//!
//! Facts come from the public GF100 tables of envytools and from Mesa's compiler for the same hardware; mnemonics are
//! NVIDIA's own.

#![forbid(unsafe_code)]
#![cfg_attr(
    not(test),
    deny(clippy::indexing_slicing, clippy::arithmetic_side_effects, clippy::cast_possible_truncation)
)]

mod asm;
mod codec;
mod ir;
mod syntax;

#[cfg(test)]
mod tests;

pub use asm::{AsmError, Kernel, Program, assemble};
pub use codec::{DecodeError, EncodeError, decode, encode, size};
pub use ir::*;
