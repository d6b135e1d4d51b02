//! Parts of the documentation that are generated from code: whole files, and parts of pages between markers.
//!
//! A crate that generates text has a test whose name begins with `generated_`. The test generates the text and passes
//! it to [`file()`] or [`part`]. It fails if the committed text differs. If `cargo xtask docs` sets the variable
//! [`WRITE`], the test writes the text instead. [`architecture`] draws the picture in README.md.
//!
//! The crate does not interpret the contents of the parts.

use std::fs;
use std::path::{Path, PathBuf};

pub mod architecture;

/// Environment variable that makes the tests write the generated texts.
pub const WRITE: &str = "GPU_MEDIATOR_WRITE_PAGES";

/// Returns a path relative to the project's root folder.
fn root(path: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..").join(path)
}

/// Compares the file at `path`, relative to the project's root folder, with `text`, or writes the file.
///
/// # Panics
/// Panics if the file differs, or cannot be read or written.
#[expect(clippy::panic, reason = "called by tests only")]
pub fn file(path: &str, text: &str) {
    if std::env::var_os(WRITE).is_some() {
        fs::write(root(path), text).unwrap_or_else(|error| panic!("{path}: {error}"));
    }
    let there = fs::read_to_string(root(path)).unwrap_or_else(|error| panic!("{path}: {error}"));
    assert_same(path, &there, text);
}

/// Fails if a file's text differs from the generated text.
fn assert_same(path: &str, there: &str, text: &str) {
    assert!(there == text, "{path} differs from the generated text: run `cargo xtask docs`");
}

/// Compares the part of a page between `<!-- generated: NAME -->` and `<!-- end -->` with `text`, or writes the part.
///
/// # Panics
/// Panics if the page differs, has no such part, or cannot be read or written.
#[expect(clippy::panic, reason = "called by tests only")]
pub fn part(path: &str, name: &str, text: &str) {
    let page = fs::read_to_string(root(path)).unwrap_or_else(|error| panic!("{path}: {error}"));
    let page = replaced(&page, name, text).unwrap_or_else(|| panic!("{path} has no part {name}"));
    file(path, &page);
}

/// Returns a page with one of its parts replaced, or `None` if the page has no such part.
fn replaced(page: &str, name: &str, text: &str) -> Option<String> {
    let mark = format!("<!-- generated: {name} -->\n");
    let (before, rest) = page.split_once(&mark)?;
    let (_, after) = rest.split_once("<!-- end -->\n")?;
    Some(format!("{before}{mark}\n{}\n\n<!-- end -->\n{after}", text.trim()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn part_of_page_is_replaced_and_rest_is_kept() {
        let page = "a\n<!-- generated: x -->\nold\n<!-- end -->\nb\n<!-- generated: y -->\n<!-- end -->\n";
        let new = replaced(page, "x", "new\n").unwrap();
        assert!(
            new.starts_with("a\n<!-- generated: x -->\n\nnew\n\n<!-- end -->\nb\n<!-- generated: y -->\n"),
            "{new}"
        );
        assert_eq!(replaced(&new, "x", "new").as_ref(), Some(&new));
        assert_eq!(replaced(page, "z", "new"), None);
        assert_eq!(replaced("<!-- generated: x -->\nwithout end", "x", "new"), None);
    }

    #[test]
    fn file_with_other_text_is_reported() {
        assert_same("page", "old\n", "old\n");
        assert!(std::panic::catch_unwind(|| assert_same("page", "old\n", "new\n")).is_err());
    }
}
