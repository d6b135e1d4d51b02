//! Lines, comments and statements.

use super::AsmError;
use super::cursor::Cursor;

/// Returns the source lines with comments and unsupported characters replaced by spaces, so that columns do not change.
pub(super) fn without_comments(source: &str, errors: &mut Vec<AsmError>) -> Vec<String> {
    let mut in_block = None;
    let mut lines = Vec::new();
    for (number, line) in (1_u32..).zip(source.lines()) {
        lines.push(blank(line, number, &mut in_block, errors));
    }
    if let Some((line, column)) = in_block {
        errors.push(AsmError { line, column, message: "the comment does not end".to_owned() });
    }
    lines
}

/// Replaces comments in a line by spaces. `in_block` is the start of an open comment.
fn blank(line: &str, number: u32, in_block: &mut Option<(u32, u32)>, errors: &mut Vec<AsmError>) -> String {
    let mut result = String::with_capacity(line.len());
    let mut characters = line.chars().peekable();
    let mut column = 0_u32;
    let mut to_the_end = false;
    let mut foreign = None;
    while let Some(c) = characters.next() {
        column = column.saturating_add(1);
        let next = characters.peek().copied();
        if to_the_end {
            result.push(' ');
        } else if in_block.is_some() {
            result.push(' ');
            if c == '*' && next == Some('/') {
                characters.next();
                column = column.saturating_add(1);
                result.push(' ');
                *in_block = None;
            }
        } else {
            match (c, next) {
                ('/', Some('/')) | ('#', _) => {
                    to_the_end = true;
                    result.push(' ');
                }
                ('/', Some('*')) => {
                    *in_block = Some((number, column));
                    characters.next();
                    column = column.saturating_add(1);
                    result.push_str("  ");
                }
                ('\t', _) => result.push(' '),
                _ if c.is_ascii_graphic() || c == ' ' => result.push(c),
                _ => {
                    foreign = foreign.or(Some((c, column)));
                    result.push(' ');
                }
            }
        }
    }
    if let Some((c, column)) = foreign {
        errors.push(AsmError {
            line: number,
            column,
            message: format!("the character {c:?} is not part of the language"),
        });
    }
    result
}

/// Returns the semicolon-separated statements of a line.
pub(super) fn statements(line: &str, number: u32) -> impl Iterator<Item = Cursor<'_>> {
    let mut start = 0_usize;
    line.split(';').map(move |part| {
        let end = start.saturating_add(part.len());
        let cursor = Cursor::new(line, number, start, end);
        start = end.saturating_add(1);
        cursor
    })
}
