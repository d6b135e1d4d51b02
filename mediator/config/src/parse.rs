//! Reads a file, and collects all mistakes in it: wrong types as well as broken rules, in the order of their lines.
//!
//! The parser stops at the first value of a wrong type. Such a value is therefore recorded, its lines are blanked,
//! which keeps all positions, and the rest is parsed again. Rules are checked afterwards for tables that do not
//! depend on a blanked one.

use std::collections::BTreeSet;
use std::ops::Range;

use super::check::{self, Mistake};
use super::position::{self, Positions};
use super::{Config, ConfigError, profile};

/// Maximum number of wrong types that are collected.
const MAX_WRONG: usize = 64;

impl Config {
    /// Reads and checks the text of a file that is named `file` in messages.
    ///
    /// # Errors
    /// When it has mistakes; all are reported, in the order of their lines.
    pub fn parse(text: &str, file: &str) -> Result<Self, ConfigError> {
        let positions = Positions::new(text);
        let mut typed = Typed { text, positions: &positions, left: text.to_owned(), wrong: Vec::new() };
        let config = typed.config();
        let (left, wrong) = (typed.left, typed.wrong);
        let mut lines: Vec<(usize, String)> =
            wrong.iter().map(|wrong| (wrong.at, position::describe(text, file, &wrong.error))).collect();
        if let Some(config) = config {
            let (config, mut mistakes) = config.with_profiles(&left);
            // A table whose profile is wrong lacks keys.
            let unread: BTreeSet<_> = mistakes.iter().map(|one| (one.key.table, one.key.index)).collect();
            let others = [check::config(&config), profile::mistakes(&config)].concat();
            mistakes.extend(others.into_iter().filter(|one| !unread.contains(&(one.key.table, one.key.index))));
            mistakes.retain(|mistake| wrong.iter().all(|wrong| !wrong.affects(mistake)));
            if mistakes.is_empty() && wrong.is_empty() {
                return Ok(config);
            }
            lines.extend(mistakes.iter().map(|one| (positions.start(one), positions.describe(file, one))));
        }
        // Stable: mistakes of one key stay in the order of the checks.
        lines.sort_by_key(|(at, _)| *at);
        Err(ConfigError::Mistakes(lines.into_iter().map(|(_, line)| line).collect()))
    }
}

/// A mistake that the parser found.
struct Wrong {
    /// First byte of the value.
    at: usize,
    /// Path of the key, such as `vm[1].vram_mib`; empty if the text is no TOML.
    path: String,
    /// The whole table is left out, because it lacks a key.
    table_is_out: bool,
    error: toml::de::Error,
}

impl Wrong {
    /// Returns the table's name, and its number if several are possible.
    fn table(&self) -> (&str, Option<usize>) {
        let table = self.path.split('.').next().unwrap_or_default();
        match table.strip_suffix(']').and_then(|table| table.split_once('[')) {
            Some((name, index)) => (name, index.parse().ok()),
            None => (table, None),
        }
    }

    /// Returns true if a broken rule may be only a consequence of this mistake.
    fn affects(&self, mistake: &Mistake) -> bool {
        let (table, index) = self.table();
        let other = mistake.key.table;
        match table {
            // Without a whole table, the others of its name have other numbers.
            _ if table == other => self.table_is_out || index == mistake.key.index,
            "daemon" | "card" => ["vm", "tenant", "profile"].contains(&other),
            "profile" => ["vm", "tenant"].contains(&other),
            _ => false,
        }
    }
}

/// Reading of a text whose mistakes are left out one by one.
struct Typed<'a> {
    text: &'a str,
    positions: &'a Positions<'a>,
    /// The text without the mistakes: blanks are in their place.
    left: String,
    wrong: Vec<Wrong>,
}

impl Typed<'_> {
    /// Returns the configuration without the values of a wrong type; `None` if too little of it is left.
    fn config(&mut self) -> Option<Config> {
        // Each round blanks at least one line.
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
                // The text is no TOML, or lacks a whole table.
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
            if self.wrong.len() > MAX_WRONG || !self.blank(&lines) {
                return None;
            }
        }
        None
    }

    fn note(&mut self, at: usize, path: String, error: toml::de::Error) {
        self.wrong.push(Wrong { at, path, table_is_out: false, error });
    }

    /// Returns true if a byte is in the header of a table.
    fn is_header(&self, at: usize) -> bool {
        let before = self.text.get(..at).unwrap_or_default();
        before.rsplit('\n').next().is_some_and(|line| line.trim_start().starts_with('['))
    }

    /// Blanks all lines that a span touches; returns whether they had text.
    fn blank(&mut self, span: &Range<usize>) -> bool {
        let begin = self.left.get(..span.start).and_then(|before| before.rfind('\n')).map_or(0, |at| at + 1);
        let last = span.end.saturating_sub(1).max(span.start);
        let end = self.left.get(last..).and_then(|rest| rest.find('\n')).map_or(self.left.len(), |at| last + at);
        let Some(lines) = self.left.get(begin..end).filter(|lines| !lines.trim().is_empty()) else { return false };
        let blanks: String = lines.bytes().map(|byte| if byte == b'\n' { '\n' } else { ' ' }).collect();
        self.left.replace_range(begin..end, &blanks);
        true
    }

    /// Returns the span of a table that begins at `start`, with the tables in it.
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
