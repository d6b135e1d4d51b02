//! Fermi's shader instruction set (NVIDIA's sm_20): decoder, encoder, assembler, disassembler.
//!
//! - [`decode`] and [`encode`] convert machine words to [`Instruction`] and back. Both use one table of encodings in
//!   `codec`, which has one module per family. Decoding is strict: a set bit outside all fields of the encoding is an
//!   error, so [`encode`] restores every decoded word.
//! - [`assemble`] converts text to a [`Program`], and `Display` of [`Instruction`] converts each instruction back.
//!   `syntax` describes each operation's suffixes and operands for both directions. The language is described in
//!   `docs/reference/sm20-assembly.md`.
//! - [`cubin`] reads kernels from NVIDIA's ELF files.
//!
//! No input causes a panic, and the time and memory needed are at most linear in the length of the input. This crate
//! does not contain the semantics of operations.
//!
//! The facts are from envytools' public GF100 tables and from Mesa's compiler for the same hardware. Mnemonics are
//! NVIDIA's own.

#![forbid(unsafe_code)]
#![cfg_attr(
    not(test),
    deny(clippy::indexing_slicing, clippy::arithmetic_side_effects, clippy::cast_possible_truncation)
)]

mod asm;
mod codec;
pub mod cubin;
mod ir;
mod syntax;

#[cfg(test)]
mod tests;

pub use asm::{AsmError, Kernel, Parameter, Program, assemble};
pub use codec::{DecodeError, EncodeError, decode, encode, size};
pub use ir::*;

/// Reads a program in any form: a cubin, or a source text, which may end in NUL bytes.
///
/// # Errors
/// Returns an error if the cubin is rejected or the text does not assemble. For a source text, the message contains the
/// first errors.
pub fn read(image: &[u8]) -> Result<Program, String> {
    if cubin::is_elf(image) {
        return cubin::read(image);
    }
    let source = std::str::from_utf8(image).map_err(|_| "neither a cubin nor sm_20 assembly text")?;
    assemble(source.trim_end_matches('\0')).map_err(|errors| {
        let lines: Vec<String> = errors.iter().take(5).map(ToString::to_string).collect();
        format!("the text does not assemble: {}", lines.join("; "))
    })
}
