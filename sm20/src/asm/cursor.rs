//! Parses a statement character by character.

use super::AsmError;

/// An error and its column.
#[derive(Debug)]
pub(super) struct Failure {
    column: u32,
    message: String,
}

impl Failure {
    pub(super) fn new(column: u32, message: impl Into<String>) -> Self {
        Self { column, message: message.into() }
    }

    pub(super) fn at(self, line: u32) -> AsmError {
        AsmError { line, column: self.column, message: self.message }
    }
}

/// A position in a line. The line is ASCII without comments, so each byte is a column.
#[derive(Clone, Copy)]
pub(super) struct Cursor<'a> {
    /// Line number, starting at 1.
    pub(super) line: u32,
    text: &'a str,
    at: usize,
}

/// Returns true for characters that may occur in names. A dot starts a suffix. Otherwise, it occurs only in labels,
/// directives and special registers.
const fn in_name(c: char) -> bool {
    c.is_ascii_alphanumeric() || c == '_' || c == '$'
}

impl<'a> Cursor<'a> {
    /// Creates a cursor over bytes `at` to `end` of a line.
    pub(super) fn new(text: &'a str, line: u32, at: usize, end: usize) -> Self {
        Self { line, text: text.get(..end).unwrap_or(text), at }
    }

    fn rest(&self) -> &'a str {
        self.text.get(self.at..).unwrap_or("")
    }

    /// Returns the column, starting at 1.
    pub(super) fn column(&self) -> u32 {
        u32::try_from(self.at).unwrap_or(u32::MAX).saturating_add(1)
    }

    pub(super) fn fail<T>(&self, message: impl Into<String>) -> Result<T, Failure> {
        Err(Failure::new(self.column(), message))
    }

    pub(super) fn skip_spaces(&mut self) {
        let rest = self.rest();
        let spaces = rest.len().saturating_sub(rest.trim_start().len());
        self.at = self.at.saturating_add(spaces);
    }

    /// Returns the next character, which may be a space.
    pub(super) fn peek(&self) -> Option<char> {
        self.rest().chars().next()
    }

    /// Returns true if only spaces remain.
    pub(super) fn at_end(&mut self) -> bool {
        self.skip_spaces();
        self.rest().is_empty()
    }

    /// Skips this text and any preceding spaces, if the text comes next.
    pub(super) fn eat(&mut self, text: &str) -> bool {
        let before = self.at;
        self.skip_spaces();
        if self.rest().starts_with(text) {
            self.at = self.at.saturating_add(text.len());
            return true;
        }
        self.at = before;
        false
    }

    /// Skips this text, or fails if other text comes next.
    pub(super) fn expect(&mut self, text: &str) -> Result<(), Failure> {
        if self.eat(text) {
            return Ok(());
        }
        self.skip_spaces();
        match self.peek() {
            Some(found) => self.fail(format!("`{text}` is needed here, not `{found}`")),
            None => self.fail(format!("`{text}` is missing")),
        }
    }

    /// Consumes characters while `wanted` returns true.
    pub(super) fn take(&mut self, wanted: impl Fn(char) -> bool) -> &'a str {
        let rest = self.rest();
        let length = rest.find(|c| !wanted(c)).unwrap_or(rest.len());
        self.at = self.at.saturating_add(length);
        rest.get(..length).unwrap_or("")
    }

    /// Consumes a name, or returns an empty text.
    pub(super) fn name(&mut self) -> &'a str {
        self.skip_spaces();
        self.take(in_name)
    }

    /// Consumes a name that may contain dots: a mnemonic, label, directive or special register.
    pub(super) fn dotted(&mut self) -> &'a str {
        self.skip_spaces();
        self.take(|c| in_name(c) || c == '.')
    }

    /// Fails if any text remains.
    pub(super) fn finish(&mut self) -> Result<(), Failure> {
        if self.at_end() { Ok(()) } else { self.fail("the statement must end here") }
    }
}

impl<'a> Cursor<'a> {
    /// Returns the text between this position and a later position in the same statement.
    pub(super) fn between(&self, other: &Self) -> &'a str {
        self.text.get(self.at..other.at).unwrap_or("")
    }
}
