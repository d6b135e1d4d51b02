//! Parses lists of nodes in Slurm's form: `n1`, `n[1-3,07]`, `rack[0-1]n[1-9]x,login`.

/// Maximum length of a list in bytes.
const MAX_LIST: usize = 1 << 20;

/// Returns true if a list contains a node.
#[must_use]
pub fn contains(list: &str, node: &str) -> bool {
    if list.len() > MAX_LIST {
        return false;
    }
    let (mut depth, mut begin) = (0usize, 0);
    let mut names = Vec::new();
    for (at, byte) in list.bytes().enumerate() {
        match byte {
            b'[' => depth += 1,
            b']' => depth = depth.saturating_sub(1),
            b',' if depth == 0 => {
                names.extend(list.get(begin..at));
                begin = at + 1;
            }
            _ => {}
        }
    }
    names.extend(list.get(begin..));
    !node.is_empty() && names.into_iter().any(|name| fits(name, node))
}

/// Returns true if a name with ranges includes a node.
fn fits(name: &str, node: &str) -> bool {
    let Some((before, rest)) = name.split_once('[') else { return name == node };
    let Some((ranges, behind)) = rest.split_once(']') else { return false };
    let Some(node) = node.strip_prefix(before) else { return false };
    // Try each possible end of the number, because the next part of the name may begin with a digit.
    let digits = node.bytes().take_while(u8::is_ascii_digit).count();
    (1..=digits.min(18)).any(|length| {
        let (number, end) = node.split_at(length);
        ranges.split(',').any(|range| is_in(range, number)) && fits(behind, end)
    })
}

/// Returns true if the text of a number is in a range such as `7` or `007-120`.
fn is_in(range: &str, number: &str) -> bool {
    let (first, last) = range.split_once('-').unwrap_or((range, range));
    let (Ok(from), Ok(to), Ok(at)) = (first.parse::<u64>(), last.parse::<u64>(), number.parse::<u64>()) else {
        return false;
    };
    // Slurm pads numbers with zeros to the width of the first number.
    (from..=to).contains(&at) && format!("{at:0width$}", width = first.len()) == number
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nodes_are_found_in_lists() {
        for (list, node) in [
            ("n1", "n1"),
            ("a,b", "b"),
            ("n[1-3]", "n2"),
            ("n[1,07-09]", "n08"),
            ("n[8-12]", "n10"),
            ("rack[0-1]n[1-9]x,login", "rack1n7x"),
            ("rack[0-1]n[1-9]x,login", "login"),
            ("a[1-2]5", "a25"),
        ] {
            assert!(contains(list, node), "{list} {node}");
        }
        for (list, node) in [
            ("n1", "n10"),
            ("n[1-3]", "n4"),
            ("n[1-3]", "n01"),
            ("n[01-03]", "n1"),
            ("n[1-3", "n1"),
            ("n[1-3]x", "n1"),
            ("", "n1"),
            ("n[]", "n"),
            ("n[x-y]", "n1"),
            ("n[1-3]", "n"),
            ("n[1-3]", "n18446744073709551617"),
        ] {
            assert!(!contains(list, node), "{list} {node}");
        }
        assert!(!contains("", ""), "a node without a name is in no list");
    }
}
