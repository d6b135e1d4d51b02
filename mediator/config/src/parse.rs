//! Reads a file and collects all errors in it: wrong types and broken rules, in line order.
//!
//! The parser stops at the first line that is not TOML, and at the first value of a wrong type. The line or value is
//! recorded and blanked, which preserves all positions, and the rest is parsed again. Rules are checked afterwards; a
//! broken rule is ignored only if it may be a consequence of a blanked value (`consequences`) or of an invalid profile.

use super::check;
use super::position::{self, Positions};
use super::{Config, ConfigError, profile};
use consequences::Wrong;
use std::ops::Range;

mod consequences;
#[cfg(test)]
mod tests;

/// Maximum number of blanked lines and values.
const MAX_WRONG: usize = 64;

impl Config {
    /// Parses and checks the text of a file, which is named `file` in messages.
    ///
    /// # Errors
    /// Returns all errors in the text, in line order.
    pub fn parse(text: &str, file: &str) -> Result<Self, ConfigError> {
        let (left, mut lines) = without_broken_lines(text, file);
        let is_toml = lines.is_empty();
        let positions = Positions::of_part(text, &left);
        let mut typed = Typed { text, positions: &positions, left: left.clone(), wrong: Vec::new() };
        let config = typed.config();
        let (left, wrong) = (typed.left, typed.wrong);
        lines.extend(wrong.iter().map(|wrong| (wrong.at, positions.describe_error(file, &wrong.error))));
        if let Some(config) = config {
            let (config, mut mistakes) = config.with_profiles(&left);
            let unread: Vec<_> = mistakes.iter().map(|one| (one.key.table, one.key.index)).collect();
            let mut others = [check::config(&config), profile::mistakes(&config)].concat();
            // Tables with invalid profiles lack the profiles' keys.
            others.retain(|one| {
                !(consequences::is_amount(one.key.field) && unread.contains(&(one.key.table, one.key.index)))
            });
            mistakes.extend(others);
            mistakes.iter_mut().for_each(|mistake| consequences::renumber(mistake, &wrong));
            mistakes.retain(|mistake| wrong.iter().all(|wrong| !wrong.affects(mistake)));
            if mistakes.is_empty() && wrong.is_empty() && is_toml {
                return Ok(config);
            }
            lines.extend(mistakes.iter().map(|one| (positions.start(one), positions.describe(file, one))));
        }
        // The sort is stable: errors in one key stay in the order of the checks.
        lines.sort_by_key(|(at, _)| *at);
        Err(ConfigError::Mistakes(lines.into_iter().map(|(_, line)| line).collect()))
    }
}

/// Returns the text with the lines that are not TOML blanked, and an error for each of them with its byte offset.
/// Blanks the whole text if a broken line is not a complete key-value pair, or if too many lines are broken.
fn without_broken_lines(text: &str, file: &str) -> (String, Vec<(usize, String)>) {
    let mut left = text.to_owned();
    let mut lines = Vec::new();
    while let Err(error) = toml::de::DeTable::parse(&left) {
        let at = error.span().map_or(0, |span| span.start);
        lines.push((at, position::describe(text, file, &error)));
        // A line with a key and its value can be omitted. After any other broken line, such as a header, the rest of
        // the file may have a different meaning.
        let line = line_at(&left, at);
        let is_pair = left.get(line.clone()).is_some_and(|line| {
            let line = line.trim_start();
            let is_multiline = ["\"\"\"", "'''"].iter().any(|quotes| line.contains(quotes));
            let depth = line.matches('[').count() != line.matches(']').count();
            line.contains('=') && !line.starts_with('[') && !is_multiline && !depth
        });
        if !is_pair || lines.len() > MAX_WRONG {
            left = " ".repeat(text.len());
            break;
        }
        blank(&mut left, &line);
    }
    (left, lines)
}

/// Returns the line at a byte offset, without its line break.
fn line_at(text: &str, at: usize) -> Range<usize> {
    let at = at.min(text.len());
    let begin = text.get(..at).and_then(|before| before.rfind('\n')).map_or(0, |at| at + 1);
    let end = text.get(at..).and_then(|rest| rest.find('\n')).map_or(text.len(), |len| at + len);
    begin..end
}

/// Blanks all lines that overlap a span. Returns false if these lines were already blank.
fn blank(text: &mut String, span: &Range<usize>) -> bool {
    let begin = line_at(text, span.start).start;
    let end = line_at(text, span.end.saturating_sub(1).max(span.start)).end;
    let Some(lines) = text.get(begin..end).filter(|lines| !lines.trim().is_empty()) else { return false };
    let blanks: String = lines.bytes().map(|byte| if byte == b'\n' { '\n' } else { ' ' }).collect();
    text.replace_range(begin..end, &blanks);
    true
}

/// Parser state. The text is parsed repeatedly, and each error is blanked before the next pass.
struct Typed<'a> {
    text: &'a str,
    positions: &'a Positions<'a>,
    /// The text, with errors blanked.
    left: String,
    wrong: Vec<Wrong>,
}

impl Typed<'_> {
    /// Returns the configuration without values of a wrong type; `None` if too little of it remains.
    fn config(&mut self) -> Option<Config> {
        // Each iteration blanks at least one line.
        for _ in 0..=2 * MAX_WRONG {
            let error = match toml::from_str(&self.left) {
                Ok(config) => return Some(config),
                Err(error) => error,
            };
            let Some(span) = error.span() else {
                self.note(0, String::new(), error);
                return None;
            };
            let Some(path) = self.positions.key_at(&span) else {
                // A whole table is missing from the text.
                if self.wrong.is_empty() {
                    self.note(span.start, String::new(), error);
                }
                return None;
            };
            let missing = error.message().strip_prefix("missing field `").and_then(|rest| rest.split('`').next());
            let lines = match missing {
                Some(field) => {
                    let key = format!("{path}.{field}");
                    let lines = self.table_lines(&path, span.start);
                    match self.wrong.iter_mut().find(|wrong| wrong.path == key) {
                        Some(blanked) => blanked.table_is_out = true,
                        None => {
                            self.note(span.start, path, error);
                            self.wrong.iter_mut().rev().take(1).for_each(|wrong| wrong.table_is_out = true);
                        }
                    }
                    lines
                }
                None => {
                    let lines = if self.is_header(span.start) { self.table_lines(&path, span.start) } else { span };
                    self.note(lines.start, path, error);
                    lines
                }
            };
            if self.wrong.len() > MAX_WRONG || !blank(&mut self.left, &lines) {
                return None;
            }
        }
        None
    }

    fn note(&mut self, at: usize, path: String, error: toml::de::Error) {
        self.wrong.push(Wrong { at, path, table_is_out: false, error });
    }

    /// Returns true if a byte offset is in a table header.
    fn is_header(&self, at: usize) -> bool {
        let before = self.text.get(..at).unwrap_or_default();
        before.rsplit('\n').next().is_some_and(|line| line.trim_start().starts_with('['))
    }

    /// Returns the span of the table that starts at `start`, including nested tables.
    fn table_lines(&self, path: &str, start: usize) -> Range<usize> {
        let name: String = path.split('[').next().unwrap_or_default().to_owned();
        let inner = [format!("[{name}."), format!("[[{name}.")];
        let mut end = start;
        for (number, line) in self.text.get(start..).unwrap_or_default().split_inclusive('\n').enumerate() {
            let line_start = line.trim_start();
            if number > 0 && line_start.starts_with('[') && !inner.iter().any(|inner| line_start.starts_with(inner)) {
                break;
            }
            end += line.len();
        }
        start..end
    }
}
