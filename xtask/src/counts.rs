//! Checks the operators' counters: the code must increment or set every declared counter.
//!
//! The check works on the source text. A counter is a field in a `counts!` block. It counts as used if product code of
//! the same crate increments or sets it.

use crate::lints::File;
use std::path::Path;

/// Returns the fields declared in the `counts!` blocks of a text.
fn declared(text: &str) -> Vec<&str> {
    let blocks = text.split("\ncounts! {").skip(1);
    let body = |block: &'_ str| block.split("\n}").next().unwrap_or_default().to_owned();
    let mut fields = Vec::new();
    for block in blocks {
        let len = body(block).len();
        let lines = block.get(..len).unwrap_or_default().lines().map(str::trim);
        fields.extend(lines.filter_map(|line| {
            let (field, metric) = line.split_once(": \"")?;
            let plain =
                !field.is_empty() && field.chars().all(|c| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '_');
            (plain && metric.ends_with("\",")).then_some(field)
        }));
    }
    fields
}

/// Returns true if a text increments or sets a counter.
fn counts(text: &str, field: &str) -> bool {
    let product = text.split("#[cfg(test)]\nmod tests {").next().unwrap_or(text);
    product.match_indices(field).any(|(at, _)| {
        let before = product.get(..at).and_then(|before| before.chars().next_back());
        let after = product.get(at + field.len()..).unwrap_or_default().trim_start();
        before == Some('.') && (after.starts_with("+=") || after.starts_with("= "))
    })
}

/// Returns a file's crate, which is the part of its path before `src`.
fn of_crate(path: &Path) -> Option<&Path> {
    path.ancestors().find(|folder| folder.file_name().is_some_and(|name| name == "src")).and_then(Path::parent)
}

/// Returns the counters that are declared but never incremented or set.
pub fn never_counted(files: &[File]) -> Vec<String> {
    let mut problems = Vec::new();
    for file in files {
        for field in declared(&file.text) {
            let own = of_crate(&file.path);
            let mut others = files.iter().filter(|other| own.is_some() && of_crate(&other.path) == own);
            if !others.any(|other| counts(&other.text, field)) {
                problems.push(format!("{}: no code counts `{field}`", file.path.display()));
            }
        }
    }
    problems
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn never_incremented_count_is_reported() {
        let block = "\ncounts! {\n    /// Events.\n    Counts {\n        /// Doorbells.\n        bells: \"bells\",\n        \
                     /// Others.\n        others: \"others\",\n    }\n}\n";
        let file = |path: &str, text: &str| File { path: path.into(), text: text.to_owned() };
        let declares = file("mediator/x/src/a.rs", block);
        let counts =
            file("mediator/x/src/b.rs", "fn f() {\n    self.counts.bells += 1;\n    let a = self.others;\n}\n");
        assert_eq!(never_counted(&[declares, counts]), ["mediator/x/src/a.rs: no code counts `others`"]);
        let elsewhere = file("mediator/y/src/b.rs", "self.counts.bells += 1; self.counts.others = 3;");
        assert_eq!(never_counted(&[file("mediator/x/src/a.rs", block), elsewhere]).len(), 2);
    }
}
