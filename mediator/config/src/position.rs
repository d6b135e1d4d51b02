//! Maps errors to lines and keys in the file.

use std::ops::Range;

use toml::Spanned;
use toml::de::{DeTable, DeValue};

use super::check::{Key, Mistake};

/// Positions of all keys in a file.
pub struct Positions<'a> {
    text: &'a str,
    tree: Option<Spanned<DeTable<'a>>>,
}

impl<'a> Positions<'a> {
    /// Parses `text` to find the positions of its keys.
    #[must_use]
    pub fn new(text: &'a str) -> Self {
        Self::of_part(text, text)
    }

    /// Like [`Self::new`], for a text that is only partly TOML. `part` is the same text with everything else blanked.
    pub(super) fn of_part(text: &'a str, part: &'a str) -> Self {
        Self { text, tree: DeTable::parse(part).ok() }
    }

    /// Formats an error as one line: `FILE:LINE:COLUMN: KEY: what`.
    #[must_use]
    pub fn describe(&self, file: &str, mistake: &Mistake) -> String {
        let Mistake { key, what } = mistake;
        match self.find(key) {
            Some(span) => format!("{file}:{}: {key}: {what}", line_column(self.text, span.start)),
            None => format!("{file}: {key}: {what}"),
        }
    }

    /// Formats a parser error as one line, as in [`Self::describe`].
    pub(super) fn describe_error(&self, file: &str, error: &toml::de::Error) -> String {
        let what = error.message().replace("unknown field", "unknown key").replace("missing field", "missing key");
        let Some(span) = error.span() else {
            return format!("{file}: {what}");
        };
        let at = line_column(self.text, span.start);
        match self.key_at(&span) {
            Some(key) => format!("{file}:{at}: {key}: {what}"),
            None => format!("{file}:{at}: {what}"),
        }
    }

    /// Returns the span of a key's value, or of the innermost existing table on the key's path.
    fn find(&self, key: &Key) -> Option<Range<usize>> {
        let table = self.tree.as_ref()?.get_ref().get(key.table)?;
        let table = match (table.get_ref(), key.index) {
            (DeValue::Array(tables), Some(index)) => tables.get(index)?,
            _ => table,
        };
        let mut place = table;
        for name in key.field.split('.').filter(|name| !name.is_empty()) {
            match place.get_ref().as_table().and_then(|table| table.get(name)) {
                Some(value) => place = value,
                None => break,
            }
        }
        Some(place.span())
    }

    /// Returns the offset of the wrong value, or the end of the text if the file lacks its table.
    pub(super) fn start(&self, mistake: &Mistake) -> usize {
        self.find(&mistake.key).map_or(self.text.len(), |span| span.start)
    }

    /// Returns the path of the innermost key that contains `span`.
    pub(super) fn key_at(&self, span: &Range<usize>) -> Option<String> {
        let mut path = String::new();
        in_table(self.tree.as_ref()?.get_ref(), span, &mut path);
        (!path.is_empty()).then_some(path)
    }
}

fn contains(outer: &Range<usize>, inner: &Range<usize>) -> bool {
    outer.start <= inner.start && inner.end <= outer.end
}

fn in_table(table: &DeTable<'_>, span: &Range<usize>, path: &mut String) {
    for (key, value) in table {
        let named = contains(&key.span(), span);
        if named || contains(&value.span(), span) || reaches(value, span) {
            if !path.is_empty() {
                path.push('.');
            }
            path.push_str(key.get_ref());
            if !named {
                in_value(value, span, path);
            }
            return;
        }
    }
}

fn in_value(value: &Spanned<DeValue<'_>>, span: &Range<usize>, path: &mut String) {
    match value.get_ref() {
        DeValue::Table(table) => in_table(table, span, path),
        DeValue::Array(items) => {
            let hit = |item: &Spanned<DeValue<'_>>| contains(&item.span(), span) || reaches(item, span);
            if let Some(index) = items.iter().position(hit) {
                path.push_str(&format!("[{index}]"));
                if let Some(item) = items.get(index) {
                    in_value(item, span, path);
                }
            }
        }
        _ => {}
    }
}

/// Returns true if a value inside a table or array contains the span. The span of a `[table]` is only its header.
fn reaches(value: &Spanned<DeValue<'_>>, span: &Range<usize>) -> bool {
    match value.get_ref() {
        DeValue::Table(table) => table
            .iter()
            .any(|(key, value)| contains(&key.span(), span) || contains(&value.span(), span) || reaches(value, span)),
        DeValue::Array(items) => items.iter().any(|item| contains(&item.span(), span) || reaches(item, span)),
        _ => false,
    }
}

/// Formats a parser error as one line: `FILE:LINE:COLUMN: KEY: what`.
#[must_use]
pub fn describe(text: &str, file: &str, error: &toml::de::Error) -> String {
    Positions::new(text).describe_error(file, error)
}

/// Returns the line and column of a byte offset. Both count from 1, and columns are in characters.
fn line_column(text: &str, byte: usize) -> String {
    let before = text.get(..byte).unwrap_or(text);
    let line = before.matches('\n').count() + 1;
    let column = before.rsplit('\n').next().unwrap_or_default().chars().count() + 1;
    format!("{line}:{column}")
}
