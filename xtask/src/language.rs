//! The language lint: for each package, counts words that make comments hard to read, and compares the counts with
//! budgets that may only fall.
//!
//! `cargo xtask check` fails if a package has more of these words than `language.toml` permits. `cargo xtask language`
//! prints the counts of each package. With `--lower`, it writes lower counts to that file. It never raises a budget.

use std::collections::BTreeMap;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::path::Path;

use anyhow::{Context, Result};
use cargo_metadata::Metadata;
use serde::{Deserialize, Serialize};

use crate::lints::File;
use crate::run::root;

/// Path of the file with the budgets, relative to the root of the workspace.
const BUDGETS: &str = "xtask/language.toml";

/// Relative and interrogative pronouns that often replace a precise noun. They are concatenated from halves, because
/// the lint also reads this file.
const PRONOUNS: [&str; 4] = [concat!("w", "ho"), concat!("w", "hoever"), concat!("w", "hom"), concat!("w", "hat")];

/// Archaic connectives.
const ARCHAIC: [&str; 6] = [
    concat!("in va", "in"),
    concat!("an", "ew"),
    concat!("no", "body"),
    concat!("goes ", "on"),
    concat!("but ", "for"),
    concat!("be", "side"),
];

/// Counts of one package.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Counts {
    /// Number of lines with a comment.
    #[serde(skip)]
    lines: usize,
    /// Number of occurrences of [`PRONOUNS`].
    pronouns: usize,
    /// Number of occurrences of [`ARCHAIC`].
    archaic: usize,
}

impl Counts {
    fn add(&mut self, comment: &str) {
        let text = comment.to_ascii_lowercase();
        self.lines += 1;
        self.pronouns += PRONOUNS.iter().map(|word| occurrences(&text, word)).sum::<usize>();
        self.archaic += ARCHAIC.iter().map(|word| occurrences(&text, word)).sum::<usize>();
    }

    /// Converts a number of occurrences to a rate per 1,000 lines.
    fn rate(self, count: usize) -> f64 {
        count as f64 * 1000.0 / self.lines.max(1) as f64
    }
}

/// Returns the number of whole-word occurrences of `word` in `text`, which must be in lower case.
fn occurrences(text: &str, word: &str) -> usize {
    let is_letter = |character: Option<char>| character.is_some_and(|c| c.is_alphanumeric() || c == '_');
    let whole = |at: &usize| {
        let (before, after) = (&text[..*at], &text[at + word.len()..]);
        !is_letter(before.chars().next_back()) && !is_letter(after.chars().next())
    };
    text.match_indices(word).map(|(at, _)| at).filter(whole).count()
}

/// Returns the comment on a line: the text after `//`, unless the `//` is in a string such as a URL.
fn comment(line: &str) -> Option<&str> {
    let (before, after) = line.split_once("//")?;
    (!before.ends_with(':') && before.matches('"').count() % 2 == 0).then_some(after)
}

/// Counts the comment lines and the listed words in the comments of each package.
fn counts(metadata: &Metadata, files: &[File]) -> BTreeMap<String, Counts> {
    let folders: Vec<(String, &Path)> = metadata
        .workspace_packages()
        .iter()
        .filter_map(|package| {
            let folder = package.manifest_path.parent()?.as_std_path();
            Some((package.name.to_string(), folder.strip_prefix(&metadata.workspace_root).unwrap_or(folder)))
        })
        .collect();
    let mut all: BTreeMap<String, Counts> = BTreeMap::new();
    for file in files {
        let owners = folders.iter().filter(|(_, folder)| file.path.starts_with(folder));
        // Packages can be nested. A file belongs to the package with the deepest folder.
        let Some((name, _)) = owners.max_by_key(|(_, folder)| folder.components().count()) else { continue };
        let of_package = all.entry(name.clone()).or_default();
        file.text.lines().filter_map(comment).for_each(|text| of_package.add(text));
    }
    all
}

fn budgets() -> Result<BTreeMap<String, Counts>> {
    let path = root().join(BUDGETS);
    let text = std::fs::read_to_string(&path).with_context(|| format!("cannot read {}", path.display()))?;
    toml::from_str(&text).with_context(|| format!("{BUDGETS} is not valid"))
}

/// Returns a message for each package that exceeds its budget. Packages without an entry have a budget of zero.
pub fn problems(metadata: &Metadata, files: &[File]) -> Result<Vec<String>> {
    Ok(over(&counts(metadata, files), &budgets()?))
}

fn over(counts: &BTreeMap<String, Counts>, budgets: &BTreeMap<String, Counts>) -> Vec<String> {
    let mut problems = Vec::new();
    for (name, found) in counts {
        let budget = budgets.get(name).copied().unwrap_or_default();
        let kinds = [("pronouns", found.pronouns, budget.pronouns), ("archaic", found.archaic, budget.archaic)];
        for (kind, found, most) in kinds.into_iter().filter(|(_, found, most)| found > most) {
            let words = if kind == "pronouns" { PRONOUNS.join(", ") } else { ARCHAIC.join(", ") };
            problems.push(format!(
                "{name}: {found} of the words \"{words}\" in comments, and its budget in {BUDGETS} is {most}: name the actor, \
                 and use the field's term"
            ));
        }
    }
    problems
}

/// Prints the counts of each package. If `lower` is true, writes decreased counts to the budget file.
pub fn report(metadata: &Metadata, files: &[File], lower: bool) -> Result<()> {
    let counts = counts(metadata, files);
    println!("{:24} {:>8} {:>10} {:>8} {:>10} {:>8}", "package", "comments", "pronouns", "/1,000", "archaic", "/1,000");
    let mut sum = Counts::default();
    for (name, found) in &counts {
        line(name, *found);
        sum.lines += found.lines;
        sum.pronouns += found.pronouns;
        sum.archaic += found.archaic;
    }
    line("all", sum);
    if lower {
        let path = root().join(BUDGETS);
        let lowered = lowered(&counts, &if path.exists() { budgets()? } else { counts.clone() });
        std::fs::write(&path, toml::to_string(&lowered)?)
            .with_context(|| format!("cannot write {}", path.display()))?;
    }
    Ok(())
}

/// Returns the minimum of each count and its budget. Omits packages that no longer exist.
fn lowered(counts: &BTreeMap<String, Counts>, budgets: &BTreeMap<String, Counts>) -> BTreeMap<String, Counts> {
    let lower = |(name, found): (&String, &Counts)| {
        let budget = budgets.get(name).copied().unwrap_or_default();
        let (pronouns, archaic) = (found.pronouns.min(budget.pronouns), found.archaic.min(budget.archaic));
        (name.clone(), Counts { lines: 0, pronouns, archaic })
    };
    counts.iter().map(lower).collect()
}

fn line(name: &str, counts: Counts) {
    let Counts { lines, pronouns, archaic } = counts;
    let rates = (counts.rate(pronouns), counts.rate(archaic));
    println!("{name:24} {lines:8} {pronouns:10} {:8.1} {archaic:10} {:8.1}", rates.0, rates.1);
}

/// Returns a sample of sentences in comments, with their locations. These are the sentences with the smallest hashes of
/// seed and sentence.
pub fn sample(files: &[File], count: usize, seed: u64) -> Vec<String> {
    let order = |text: &str| {
        let mut hasher = DefaultHasher::new();
        (seed, text).hash(&mut hasher);
        hasher.finish()
    };
    let mut all: Vec<(u64, String)> = Vec::new();
    for file in files {
        let place = file.path.display();
        let found = sentences(&file.text).into_iter();
        all.extend(found.map(|(line, text)| (order(&text), format!("{place}:{line}: {text}"))));
    }
    all.sort();
    all.into_iter().take(count).map(|(_, sentence)| sentence).collect()
}

/// Returns the sentences with at least four words in a file's comments, each with the line number of its paragraph.
fn sentences(text: &str) -> Vec<(usize, String)> {
    let mut paragraphs: Vec<(usize, String)> = Vec::new();
    let mut continues = false;
    for (index, line) in text.lines().enumerate() {
        let whole = line.trim_start().starts_with("//");
        let words =
            comment(line).map(|text| text.trim_start_matches(['/', '!']).trim()).filter(|text| !text.is_empty());
        match (words, paragraphs.last_mut()) {
            (Some(words), Some((_, paragraph))) if continues && whole => *paragraph = format!("{paragraph} {words}"),
            (Some(words), _) => paragraphs.push((index + 1, words.to_owned())),
            (None, _) => {}
        }
        continues = whole && words.is_some();
    }
    let parts = |(line, paragraph): (usize, String)| {
        let parts = paragraph.split_inclusive(". ").map(|part| (line, part.trim().to_owned())).collect::<Vec<_>>();
        parts.into_iter().filter(|(_, part)| part.split_whitespace().count() >= 4)
    };
    paragraphs.into_iter().flat_map(parts).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn whole_words_in_comments_count() {
        let mut counts = Counts::default();
        let source =
            concat!("// W", "ho waits, and w", "hat for; somew", "hat.\nlet a = 1; // an", "ew\n\"https://w", "ho\"\n");
        source.lines().filter_map(comment).for_each(|text| counts.add(text));
        assert_eq!(counts, Counts { lines: 2, pronouns: 2, archaic: 1 });
    }

    #[test]
    fn sentences_of_a_paragraph_are_separate() {
        let text = "/// Moves the chunk away. It stays\n/// mapped until then.\n\nlet a = 1; // Too short.\n// Begins a new paragraph here.\n";
        let found = sentences(text);
        let expected =
            [(1, "Moves the chunk away."), (1, "It stays mapped until then."), (5, "Begins a new paragraph here.")];
        assert_eq!(found, expected.map(|(line, text)| (line, text.to_owned())));
    }

    #[test]
    fn budgets_only_fall() {
        let of = |pronouns, archaic| BTreeMap::from([("a".to_owned(), Counts { lines: 0, pronouns, archaic })]);
        assert_eq!(over(&of(3, 1), &of(3, 1)), Vec::<String>::new());
        assert_eq!(over(&of(4, 2), &of(3, 1)).len(), 2);
        assert_eq!(over(&of(1, 0), &BTreeMap::new()).len(), 1);
        assert_eq!(lowered(&of(4, 0), &of(3, 1)), of(3, 0));
    }
}
