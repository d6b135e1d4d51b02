//! Selects the columns that fit on a screen. Numbers are never truncated; less important columns are omitted.

/// A column of a table.
pub(super) struct Column {
    pub(super) head: &'static str,
    pub(super) kind: Kind,
    /// Columns with a higher rank are omitted first.
    pub(super) rank: u8,
}

/// Content type of a column.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    /// Text, which may be truncated.
    Text,
    /// Numbers with units, right-aligned and never truncated.
    Number,
    /// A chart, shown only on terminals and never truncated.
    Picture,
}

/// Width to which text is truncated before a column is omitted, in characters.
const MIN_TEXT: usize = 8;
/// Number of spaces between columns.
pub(super) const SPACING: usize = 2;

/// Returns the indices and widths of the columns that fit on a screen of `width` characters.
pub(super) fn fit(columns: &[Column], rows: &[Vec<String>], width: usize) -> Vec<(usize, usize)> {
    let natural = |index: usize| {
        let cells = rows.iter().filter_map(|row| row.get(index)).map(|cell| cell.chars().count());
        cells.chain([columns[index].head.chars().count()]).max().unwrap_or(0)
    };
    let least = |index: usize, natural: usize| match columns[index].kind {
        Kind::Text => natural.min(MIN_TEXT),
        Kind::Number | Kind::Picture => natural,
    };
    let mut kept: Vec<(usize, usize)> = (0..columns.len()).map(|index| (index, natural(index))).collect();
    let spaces = |count: usize| SPACING * count.saturating_sub(1);
    loop {
        let sum = kept.iter().map(|&(index, natural)| least(index, natural)).sum::<usize>() + spaces(kept.len());
        if sum <= width || kept.len() == 1 {
            break;
        }
        if let Some(last) = (0..kept.len()).max_by_key(|&at| columns[kept[at].0].rank) {
            kept.remove(last);
        }
    }
    let sum = kept.iter().map(|&(index, natural)| least(index, natural)).sum::<usize>() + spaces(kept.len());
    let mut left = width.saturating_sub(sum);
    let mut by_rank: Vec<usize> = (0..kept.len()).collect();
    by_rank.sort_by_key(|&at| columns[kept[at].0].rank);
    for at in by_rank {
        let (index, natural) = kept[at];
        let least = least(index, natural);
        let more = left.min(natural - least);
        left -= more;
        kept[at].1 = (least + more).min(width);
    }
    kept
}

/// Truncates text to a width, and marks the truncation. Numbers are omitted instead of truncated.
pub(super) fn shortened(text: &str, width: usize) -> String {
    if text.chars().count() <= width {
        return text.to_owned();
    }
    let mut short: String = text.chars().take(width.saturating_sub(1)).collect();
    if text.contains(' ') {
        let is_whole = text.get(short.len()..).is_some_and(|rest| rest.starts_with(' '));
        let mut words: Vec<&str> = short.split(' ').collect();
        if !is_whole && words.len() > 1 {
            words.pop();
        }
        while words.last().is_some_and(|word| word.is_empty() || word.contains(|c: char| c.is_ascii_digit())) {
            words.pop();
        }
        short = words.join(" ");
    }
    short.push('…');
    short
}

/// Wraps a line between words. Splits only words that are longer than a line.
pub(super) fn wrapped(text: &str, width: usize) -> Vec<String> {
    let mut lines = vec![String::new()];
    for word in text.split(' ') {
        let mut rest: Vec<char> = word.chars().collect();
        let last = lines.last_mut();
        if let Some(last) = last.filter(|last| {
            let blank = usize::from(!last.is_empty());
            last.chars().count() + blank + rest.len() <= width
        }) {
            if !last.is_empty() {
                last.push(' ');
            }
            last.extend(rest);
            continue;
        }
        while rest.len() > width.max(1) {
            lines.push(rest.drain(..width.max(1)).collect());
        }
        lines.push(rest.into_iter().collect());
    }
    lines.retain(|line| !line.is_empty());
    lines
}

#[cfg(test)]
mod tests {
    use super::*;

    const COLUMNS: [Column; 3] = [
        Column { head: "VM", kind: Kind::Text, rank: 0 },
        Column { head: "MIB", kind: Kind::Number, rank: 1 },
        Column { head: "STATE", kind: Kind::Text, rank: 2 },
    ];

    #[test]
    fn columns_are_left_out_by_rank_and_numbers_stay_whole() {
        let rows = [vec!["a-long-name-of-a-vm".to_owned(), "256 MiB".to_owned(), "has its turn".to_owned()]];
        assert_eq!(fit(&COLUMNS, &rows, 60), [(0, 19), (1, 7), (2, 12)]);
        assert_eq!(fit(&COLUMNS, &rows, 30), [(0, 11), (1, 7), (2, 8)]);
        assert_eq!(fit(&COLUMNS, &rows, 20), [(0, 11), (1, 7)]);
        assert_eq!(fit(&COLUMNS, &rows, 10), [(0, 10)]);
        assert_eq!(shortened("a-long-name", 6), "a-lon…");
        assert_eq!(shortened("QUARANTINED for 1.5 s", 20), "QUARANTINED for…");
        assert_eq!((&*shortened("12 WITHOUT MEMORY", 8), &*shortened("12345 MiB move", 4)), ("…", "…"));
    }

    #[test]
    fn lines_are_broken_between_words() {
        assert_eq!(wrapped("busy: compute 61.0 %, queued 8", 16), ["busy: compute", "61.0 %, queued 8"]);
        assert_eq!(wrapped("abcdefgh i", 4), ["abcd", "efgh", "i"]);
        assert_eq!(wrapped("", 4), [""; 0]);
    }
}
