//! First pass: finds statements, their addresses, labels, constants, and kernels.

use super::cursor::{Cursor, Failure};
use super::statement::statements;
use super::symbols::{Symbols, usable};
use super::{AsmError, Kernel, MAX_BYTES, MAX_ERRORS, directive};
use crate::ir::Form;

/// Kind of a statement for the second pass.
#[derive(Clone, Copy)]
pub(super) enum Place {
    Instruction {
        address: u32,
        form: Form,
    },
    /// Values of `.word` and `.quad`.
    Data {
        form: Form,
    },
    /// NOPs that fill this number of words.
    Padding {
        words: u32,
    },
    /// A name defined by `.reg`.
    Name,
}

/// A statement for the second pass.
pub(super) struct Item<'a> {
    pub(super) place: Place,
    /// Position of the instruction, or of the directive's operands.
    pub(super) cursor: Cursor<'a>,
    pub(super) kernel: Option<usize>,
}

/// A kernel, and flags that are set if it declares its number of registers or barriers.
#[derive(Default)]
pub(super) struct Draft {
    pub(super) kernel: Kernel,
    pub(super) registers: bool,
    pub(super) barriers: bool,
}

/// Result of the first pass.
#[derive(Default)]
pub(super) struct Layout<'a> {
    pub(super) items: Vec<Item<'a>>,
    pub(super) kernels: Vec<Draft>,
    pub(super) symbols: Symbols,
    /// Offset of the next statement from the start of the code, in bytes.
    pub(super) address: u32,
}

impl<'a> Layout<'a> {
    /// Runs the first pass over a source without comments.
    pub(super) fn first_pass(lines: &'a [String], errors: &mut Vec<AsmError>) -> Self {
        let mut layout = Self::default();
        for (number, text) in (1..).zip(lines) {
            for cursor in statements(text, number) {
                if errors.len() >= MAX_ERRORS {
                    return layout;
                }
                if let Err(failure) = layout.statement(cursor) {
                    errors.push(failure.at(number));
                }
            }
        }
        layout.close_kernel();
        layout
    }

    /// Parses labels, and then a directive or an instruction.
    fn statement(&mut self, mut cursor: Cursor<'a>) -> Result<(), Failure> {
        loop {
            if cursor.at_end() {
                return Ok(());
            }
            let start = cursor;
            let word = cursor.dotted();
            if cursor.eat(":") {
                if !usable(word) {
                    return start.fail(format!("`{word}` cannot be a label"));
                }
                self.symbols.label(word, self.address, false, start.column())?;
                continue;
            }
            if word.starts_with('.') {
                return directive::first_pass(self, word, start, cursor);
            }
            let form = form_of(start);
            let size = if form == Form::Short { 4 } else { 8 };
            let place = Place::Instruction { address: self.address, form };
            self.push(place, start);
            return self.advance(size, start);
        }
    }

    pub(super) fn push(&mut self, place: Place, cursor: Cursor<'a>) {
        let kernel = self.symbols.scope;
        self.items.push(Item { place, cursor, kernel });
    }

    pub(super) fn advance(&mut self, bytes: u32, at: Cursor<'_>) -> Result<(), Failure> {
        match self.address.checked_add(bytes) {
            Some(address) if address <= MAX_BYTES => self.address = address,
            _ => return at.fail("the program is longer than 8 MiB"),
        }
        Ok(())
    }

    /// Pads with NOPs to a multiple of `alignment`, which is a power of two that is at least 4.
    pub(super) fn align(&mut self, alignment: u32, at: Cursor<'a>) -> Result<(), Failure> {
        let padding = self.address.wrapping_neg() & alignment.saturating_sub(1);
        if padding != 0 {
            self.push(Place::Padding { words: padding.wrapping_shr(2) }, at);
        }
        self.advance(padding, at)
    }

    /// Starts a kernel at the next multiple of 8 bytes.
    pub(super) fn open_kernel(&mut self, name: &str, at: Cursor<'a>) -> Result<(), Failure> {
        self.align(8, at)?;
        self.close_kernel();
        self.symbols.label(name, self.address, true, at.column())?;
        self.symbols.scope = Some(self.kernels.len());
        let kernel = Kernel { name: name.to_owned(), entry_offset: self.address, ..Kernel::default() };
        self.kernels.push(Draft { kernel, ..Draft::default() });
        Ok(())
    }

    fn close_kernel(&mut self) {
        let end = self.address;
        if let Some(Draft { kernel, .. }) = self.kernels.last_mut() {
            kernel.size = end.saturating_sub(kernel.entry_offset);
        }
    }
}

/// Returns an instruction's form, which is 32-bit if `.E32` is among its suffixes.
fn form_of(mut cursor: Cursor<'_>) -> Form {
    if cursor.eat("@") {
        _ = cursor.eat("!");
        cursor.name();
    }
    let short = cursor.dotted().split('.').skip(1).any(|suffix| suffix.eq_ignore_ascii_case("E32"));
    if short { Form::Short } else { Form::Long }
}
