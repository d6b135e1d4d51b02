//! Finds the variable declarations in PTX text.

use crate::{Code, Unreadable};

/// A token of PTX text.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Token<'a> {
    /// A name, a directive, an instruction or a number.
    Word(&'a [u8]),
    Sign(u8),
}

fn is_word(byte: u8) -> bool {
    byte.is_ascii_alphanumeric() || matches!(byte, b'_' | b'$' | b'%' | b'.')
}

/// The remaining text, as an iterator over tokens. Skips comments and strings.
struct Tokens<'a>(&'a [u8]);

impl Tokens<'_> {
    /// Skips the text up to and including `end`. Skips all text if it does not contain `end`.
    fn skip(&mut self, end: &[u8]) {
        let at = self.0.windows(end.len()).position(|window| window == end);
        self.0 = at.and_then(|at| self.0.get(at + end.len()..)).unwrap_or_default();
    }
}

impl<'a> Iterator for Tokens<'a> {
    type Item = Token<'a>;

    fn next(&mut self) -> Option<Token<'a>> {
        loop {
            match self.0 {
                // The text is NUL-terminated.
                [] | [0, ..] => return None,
                [b'/', b'/', ..] => self.skip(b"\n"),
                [b'/', b'*', rest @ ..] => {
                    self.0 = rest;
                    self.skip(b"*/");
                }
                [b'"', rest @ ..] => {
                    self.0 = rest;
                    self.skip(b"\"");
                }
                [first, rest @ ..] if first.is_ascii_whitespace() => self.0 = rest,
                [first, ..] if is_word(*first) => {
                    let end = self.0.iter().position(|byte| !is_word(*byte)).unwrap_or(self.0.len());
                    let (word, rest) = self.0.split_at(end);
                    self.0 = rest;
                    return Some(Token::Word(word));
                }
                [sign, rest @ ..] => {
                    self.0 = rest;
                    return Some(Token::Sign(*sign));
                }
            }
        }
    }
}

fn is_name(word: &[u8]) -> bool {
    word.first().is_some_and(|first| !first.is_ascii_digit() && *first != b'.')
}

/// Part of a declaration being read.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Part {
    Type,
    /// The name is known, and an initial value may follow.
    Named,
    Value,
}

/// Adds the properties of PTX text to `code`.
pub fn read(text: &[u8], code: &mut Code) -> Result<(), Unreadable> {
    let mut tokens = Tokens(text);
    let mut before = Token::Sign(b';');
    while let Some(token) = tokens.next() {
        code.allocates |= token == Token::Word(b"malloc");
        let is_declaration = matches!(token, Token::Word(b".global" | b".const"));
        // After `.ptr` in a kernel parameter, these words are the state space of a pointer.
        if is_declaration && before != Token::Word(b".ptr") {
            declaration(&mut tokens, code)?;
            before = Token::Sign(b';');
        } else {
            before = token;
        }
    }
    Ok(())
}

/// Reads a declaration up to its semicolon.
fn declaration(tokens: &mut Tokens<'_>, code: &mut Code) -> Result<(), Unreadable> {
    let (mut part, mut depth, mut is_reference) = (Part::Type, 0usize, false);
    for token in tokens {
        match (part, token) {
            (_, Token::Sign(b';')) if depth == 0 => {
                // A declaration without a name is malformed.
                return if part == Part::Type { Err(Unreadable::Malformed) } else { Ok(()) };
            }
            (_, Token::Sign(b'(' | b'[' | b'{')) => depth += 1,
            (_, Token::Sign(b')' | b']' | b'}')) => depth = depth.checked_sub(1).ok_or(Unreadable::Malformed)?,
            (Part::Type, Token::Word(b".texref" | b".samplerref" | b".surfref")) => is_reference = true,
            (Part::Type, Token::Word(word)) if depth == 0 && is_name(word) => {
                if !is_reference {
                    code.add(word)?;
                }
                part = Part::Named;
            }
            (Part::Named, Token::Sign(b'=')) => part = Part::Value,
            (_, Token::Sign(b',')) if depth == 0 => part = Part::Type,
            // Texture and surface references have attributes instead of a value.
            (Part::Value, Token::Word(word)) if is_name(word) && !is_reference => code.has_addresses = true,
            _ => {}
        }
    }
    Err(Unreadable::Malformed)
}
