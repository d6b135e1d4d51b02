//! Makes untrusted text safe for a terminal: process names, text from requests, and messages that contain either.
//!
//! Terminals interpret control characters as commands, and characters that change the text direction can make a line
//! misleading.

use std::borrow::Cow;
use std::fmt::Write;

/// Returns true if a terminal would do more than display the character.
fn is_odd(c: char) -> bool {
    c.is_control()
        || matches!(c, '\u{200b}'..='\u{200f}' | '\u{2028}'..='\u{202e}' | '\u{2060}'..='\u{206f}' | '\u{feff}' | '\u{e0000}'..='\u{e007f}')
}

fn escaped_except(text: &str, kept: impl Fn(char) -> bool) -> Cow<'_, str> {
    let escapes = |c: char| is_odd(c) && !kept(c);
    if !text.chars().any(escapes) {
        return Cow::Borrowed(text);
    }
    let mut shown = String::with_capacity(text.len() + 16);
    for c in text.chars() {
        if escapes(c) {
            let _ = write!(shown, "{}", c.escape_unicode());
        } else {
            shown.push(c);
        }
    }
    Cow::Owned(shown)
}

/// Escapes a word or table cell, so that no character acts as a terminal command or starts a new line.
#[must_use]
pub fn word(text: &str) -> Cow<'_, str> {
    escaped_except(text, |_| false)
}

/// Escapes whole lines printed by this project's programs. Keeps line breaks and tabs.
#[must_use]
pub fn lines(text: &str) -> Cow<'_, str> {
    escaped_except(text, |c| c == '\n' || c == '\t')
}

/// Escapes JSON. Strings keep their values: non-ASCII characters that a terminal would interpret as commands become
/// JSON escapes.
#[must_use]
pub fn json(text: &str) -> Cow<'_, str> {
    if !text.chars().any(|c| is_odd(c) && c != '\n') {
        return Cow::Borrowed(text);
    }
    let mut shown = String::with_capacity(text.len() + 16);
    for c in text.chars() {
        if is_odd(c) && c != '\n' {
            let mut units = [0; 2];
            for unit in c.encode_utf16(&mut units) {
                let _ = write!(shown, "\\u{unit:04x}");
            }
        } else {
            shown.push(c);
        }
    }
    Cow::Owned(shown)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn commands_to_a_terminal_are_shown_and_not_done() {
        for (text, shown) in [
            ("python3", "python3"),
            ("größe 漢字", "größe 漢字"),
            ("\x1b]0;root\x07", "\\u{1b}]0;root\\u{7}"),
            ("a\u{9b}2J", "a\\u{9b}2J"),
            ("a\nb\tc\rd\x7f", "a\\u{a}b\\u{9}c\\u{d}d\\u{7f}"),
            ("a\u{202e}b\u{200b}", "a\\u{202e}b\\u{200b}"),
        ] {
            assert_eq!(word(text), shown, "{text:?}");
        }
        assert_eq!(lines("a\tb\nc\x1b[2J\r\n"), "a\tb\nc\\u{1b}[2J\\u{d}\n");
    }

    #[test]
    fn json_keeps_its_values() {
        let value = serde_json::json!({ "name": "a\u{9b}2J\u{202e}\x1b\u{e0001}ß" });
        let text = serde_json::to_string_pretty(&value).unwrap();
        let shown = json(&text);
        assert!(!shown.chars().any(|c| is_odd(c) && c != '\n'), "{shown}");
        assert_eq!(serde_json::from_str::<serde_json::Value>(&shown).unwrap(), value);
    }
}
