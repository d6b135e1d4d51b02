//! Finds the body of the function that contains a mistake, using a minimal lexer for comments, literals, brackets, and
//! `fn`.

use std::ops::Range;

/// A function with a body.
struct Function {
    /// Range from the start of the function's line to the body.
    head: Range<usize>,
    /// Range between the body's braces.
    body: Range<usize>,
}

/// Returns the body of the innermost function that contains a location, excluding its braces.
///
/// Returns `None` outside functions, and if the correct and the mistaken body cannot be branches of an `if`. This
/// applies to const functions, and to functions with an unnamed return type, where the branches would have different
/// types.
pub fn body_around(text: &str, place: &Range<usize>) -> Option<Range<usize>> {
    let around = |function: &Function| function.body.start <= place.start && place.end <= function.body.end;
    let function = functions(text).into_iter().filter(around).max_by_key(|function| function.body.start)?;
    let head = text.get(function.head)?;
    let constant = head.split_whitespace().take_while(|word| *word != "fn").any(|word| word == "const");
    let unnamed = head.rsplit_once("->").is_some_and(|(_, result)| result.contains("impl "));
    (!constant && !unnamed).then_some(function.body)
}

fn functions(text: &str) -> Vec<Function> {
    let bytes = text.as_bytes();
    // Offsets of the open brackets, each with the start of the function head if the bracket opens a function body.
    let mut open: Vec<(usize, Option<usize>)> = Vec::new();
    let mut head: Option<(usize, usize)> = None;
    let mut found = Vec::new();
    let mut at = 0;
    while let Some(&byte) = bytes.get(at) {
        if let Some(end) = literal_or_comment(text, at) {
            at = end;
            continue;
        }
        let word = word_at(bytes, at);
        if word == b"fn" && bytes.get(at + 2).is_some_and(u8::is_ascii_whitespace) {
            let line = bytes.iter().take(at).rposition(|byte| *byte == b'\n').map_or(0, |end| end + 1);
            head = Some((line, open.len()));
        }
        match byte {
            b'{' | b'(' | b'[' => {
                let of = head.filter(|(_, depth)| byte == b'{' && *depth == open.len()).map(|(line, _)| line);
                open.push((at, of));
                head = head.filter(|_| of.is_none());
            }
            b'}' | b')' | b']' => {
                if let Some((start, Some(line))) = open.pop() {
                    found.push(Function { head: line..start, body: start + 1..at });
                }
            }
            // This function has no body.
            b';' => head = head.filter(|(_, depth)| *depth != open.len()),
            _ => {}
        }
        at += word.len().max(1);
    }
    found
}

/// Returns the word that begins at an offset, or an empty string.
fn word_at(bytes: &[u8], at: usize) -> &[u8] {
    let rest = bytes.get(at..).unwrap_or_default();
    let length = rest.iter().take_while(|byte| byte.is_ascii_alphanumeric() || **byte == b'_').count();
    rest.get(..length).unwrap_or_default()
}

/// Returns the end of the comment or literal that begins at an offset. Except for raw literals, the prefix of a
/// literal, as in `b"x"`, is not part of it.
fn literal_or_comment(text: &str, at: usize) -> Option<usize> {
    let bytes = text.as_bytes();
    let rest = bytes.get(at..)?;
    let behind = |from: usize, end: &str| find(bytes, from, end.as_bytes()).unwrap_or(bytes.len());
    match rest {
        [b'/', b'/', ..] => Some(behind(at, "\n")),
        [b'/', b'*', ..] => Some(behind(at + 2, "*/")),
        [b'"', ..] => {
            let mut end = at + 1;
            loop {
                match bytes.get(end) {
                    Some(b'\\') => end += 2,
                    Some(b'"') | None => return Some(end + 1),
                    Some(_) => end += 1,
                }
            }
        }
        [b'\'', b'\\', ..] => Some(behind(at + 3, "'")),
        [b'\'', ..] => {
            let end = at + 1 + text.get(at + 1..)?.chars().next()?.len_utf8();
            (bytes.get(end) == Some(&b'\'')).then_some(end + 1)
        }
        _ => {
            let word = word_at(bytes, at);
            if ![&b"r"[..], b"br", b"cr"].contains(&word) {
                return None;
            }
            let hashes = rest.iter().skip(word.len()).take_while(|byte| **byte == b'#').count();
            let quote = at + word.len() + hashes;
            (bytes.get(quote) == Some(&b'"')).then(|| behind(quote + 1, &format!("\"{}", "#".repeat(hashes))))
        }
    }
}

/// Returns the offset after the next occurrence of `what`.
fn find(bytes: &[u8], from: usize, what: &[u8]) -> Option<usize> {
    let at = bytes.get(from..)?.windows(what.len()).position(|window| window == what)?;
    Some(from + at + what.len())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn body<'a>(text: &'a str, place: &str) -> Option<&'a str> {
        let at = text.find(place).unwrap();
        text.get(body_around(text, &(at..at + place.len()))?)
    }

    #[test]
    fn the_innermost_function_is_found() {
        let text = "trait T { fn none(&self, x: [u8; 4]); fn of(x: fn(u32) -> u32) { x(1) } }\n\
                    fn outer<const N: usize>() where [u8; N]: Sized { fn inner() { 2 } let y = 3; }\nconst C: u8 = 4;\n";
        assert_eq!(body(text, "1"), Some(" x(1) "));
        assert_eq!(body(text, "{ 2 }"), Some(" fn inner() { 2 } let y = 3; "), "the braces are none of the inner body");
        assert_eq!(body(text, " 2 "), Some(" 2 "));
        assert_eq!(body(text, "= 3"), Some(" fn inner() { 2 } let y = 3; "));
        assert_eq!(body(text, "4;\n"), None);
        assert_eq!(body(text, "u8; 4"), None);
    }

    #[test]
    fn brackets_in_comments_and_literals_are_none() {
        for noise in [
            "// {\n",
            "/* { */",
            "\"{\\\"{\"",
            "'{'",
            "'\\''",
            "'\\u{7d}'",
            "b'{'",
            "b\"{\"",
            "r\"{\\\"",
            "br##\"{\"#\"##",
            "'é'",
            "\"é{\"",
            "&'a x",
            "fn_{}",
            "r#fn",
        ] {
            let text = format!("fn a() {{ {noise}; here }}\nfn b() {{}}");
            assert_eq!(body(&text, "here"), Some(format!(" {noise}; here ").as_str()), "{noise}");
        }
    }

    #[test]
    fn functions_without_two_possible_bodies_are_skipped() {
        assert_eq!(body("pub const fn a() -> u8 { 1 }", "1"), None);
        assert_eq!(body("fn a() -> impl Iterator<Item = u8> { once(1) }", "1"), None);
        assert_eq!(body("fn a(f: impl Fn() -> u8) -> u8 { 1 }", "1"), Some(" 1 "));
        assert_eq!(body("const fn c() {}\npub async fn a() { 1 }", "1"), Some(" 1 "));
    }
}
