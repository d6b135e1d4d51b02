//! The project's own lints on the source text.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use cargo_metadata::{Metadata, TargetKind};

/// Maximum number of lines per file. Split longer files into one module per concept.
const MAX_LINES: usize = 800;

/// Crates that must not contain numeric hardware offsets, because `nvspec` defines all of them.
const NO_OFFSETS: [&str; 5] =
    ["devmodel/src", "channels/src", "shadow-pt/src", "mediator/card-manager/src", "mediator/vgpu/src"];

/// Functions with a register or field offset as the first argument.
const ACCESSES: [&str; 10] =
    ["read32", "write32", "read64", "write64", "rd32", "wr32", "read_u32", "write_u32", "mask32", "poll32"];

/// Tag that marks a task, concatenated from halves so that this file does not match itself.
const TASK: &str = concat!("TO", "DO");
const REFUSED: [&str; 3] = [concat!("FIX", "ME"), concat!("X", "XX"), concat!("HA", "CK")];

/// One source file.
pub struct File {
    /// Path relative to the workspace root.
    pub path: PathBuf,
    /// Contents of the file.
    pub text: String,
}

/// Returns all Rust sources in the workspace, including fuzz targets.
pub fn files(root: &Path) -> Result<Vec<File>> {
    let mut files = Vec::new();
    collect(root, root, &mut files)?;
    files.sort_by(|a, b| a.path.cmp(&b.path));
    Ok(files)
}

fn collect(root: &Path, folder: &Path, files: &mut Vec<File>) -> Result<()> {
    for entry in fs::read_dir(folder).with_context(|| format!("cannot read {}", folder.display()))? {
        let path = entry?.path();
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        if path.is_dir() {
            if !name.starts_with('.') && !name.starts_with("target") {
                collect(root, &path, files)?;
            }
        } else if name.ends_with(".rs") {
            let text = fs::read_to_string(&path).with_context(|| format!("cannot read {}", path.display()))?;
            let path = path.strip_prefix(root).unwrap_or(&path).to_path_buf();
            files.push(File { path, text });
        }
    }
    Ok(())
}

/// Returns files that are too long.
pub fn sizes(files: &[File]) -> Vec<String> {
    let long = files.iter().map(|f| (f, f.text.lines().count())).filter(|(_, lines)| *lines > MAX_LINES);
    long.map(|(f, lines)| format!("{}: {lines} lines; split it by noun (at most {MAX_LINES})", f.path.display()))
        .collect()
}

/// Returns numeric hardware offsets outside `nvspec`. Test modules may contain such numbers.
pub fn offsets(files: &[File]) -> Vec<String> {
    let mut problems = Vec::new();
    for file in files.iter().filter(|f| NO_OFFSETS.iter().any(|c| f.path.starts_with(c))) {
        let in_tests = file.path.components().any(|c| c.as_os_str() == "tests")
            || file.path.file_name().is_some_and(|n| n == "tests.rs");
        if in_tests {
            continue;
        }
        let end = file.text.find("#[cfg(test)]\nmod ").unwrap_or(file.text.len());
        for (number, line) in file.text[..end].lines().enumerate() {
            if has_literal_offset(line.split("//").next().unwrap_or_default()) {
                problems.push(format!(
                    "{}:{}: an offset as a number; name it in nvspec: {}",
                    file.path.display(),
                    number + 1,
                    line.trim()
                ));
            }
        }
    }
    problems
}

fn has_literal_offset(line: &str) -> bool {
    ACCESSES.iter().any(|access| {
        line.match_indices(access).any(|(at, _)| {
            let rest = line[at + access.len()..].trim_start();
            rest.strip_prefix('(').is_some_and(|r| r.trim_start().starts_with("0x"))
        })
    })
}

/// Returns the codes listed in `docs/todo.md`, which are words in square brackets.
pub fn todo_codes(root: &Path) -> Vec<String> {
    let text = fs::read_to_string(root.join("docs/todo.md")).unwrap_or_default();
    let codes = text.split('[').skip(1).filter_map(|t| t.split_once(']')).map(|(code, _)| code.to_owned());
    codes
        .filter(|c| !c.is_empty() && c.chars().all(|c| c.is_ascii_uppercase() || c.is_ascii_digit() || c == '-'))
        .collect()
}

/// Returns task tags without a code from `docs/todo.md`, and forbidden tags.
pub fn tags(files: &[File], codes: &[String]) -> Vec<String> {
    let mut problems = Vec::new();
    for file in files {
        for (number, line) in file.text.lines().enumerate() {
            let place = || format!("{}:{}", file.path.display(), number + 1);
            if let Some(rest) = word(line, TASK) {
                let code = rest.strip_prefix('[').and_then(|r| r.split_once(']')).map(|(code, _)| code);
                if !code.is_some_and(|c| codes.iter().any(|known| known == c)) {
                    problems.push(format!("{}: {TASK} without a [CODE] that docs/todo.md lists", place()));
                }
            }
            if let Some(tag) = REFUSED.iter().find(|t| word(line, t).is_some()) {
                problems.push(format!("{}: {tag} is not a tag of this project; use {TASK}[CODE]", place()));
            }
        }
    }
    problems
}

/// Returns the text after `tag` in `line`, if the tag is a whole word.
fn word<'a>(line: &'a str, tag: &str) -> Option<&'a str> {
    let joins = |c: char| c.is_alphanumeric() || c == '_';
    line.match_indices(tag).find_map(|(at, _)| {
        let (before, after) = (&line[..at], &line[at + tag.len()..]);
        let alone = !before.ends_with(joins) && !after.starts_with(joins);
        alone.then_some(after)
    })
}

/// Crates with ranked locks, which must lock and wait through the crate that checks ranks.
const RANKED: [&str; 2] = ["mediator/card-manager/src", "mediator/vgpu/src"];
/// Locking and waiting functions that have a checked variant in the `locks` crate, with the name of that variant.
const UNCHECKED: [(&str, &str); 5] = [
    ("thread::sleep", "locks::sleep"),
    ("parking_lot::", "locks::Mutex"),
    ("sync::Mutex", "locks::Mutex"),
    ("sync::RwLock", "locks::Mutex"),
    ("sync::Condvar", "locks::Condvar"),
];

/// Returns uses of unchecked locking and waiting functions in product code.
pub fn unchecked_waits(files: &[File]) -> Vec<String> {
    let mut problems = Vec::new();
    let product = |file: &&File| {
        let path = &file.path;
        let tests = path.components().any(|part| part.as_os_str() == "tests" || part.as_os_str() == "interleavings");
        RANKED.iter().any(|folder| path.starts_with(folder)) && !tests && !path.ends_with("tests.rs")
    };
    for file in files.iter().filter(product) {
        let end = file.text.find("#[cfg(test)]\nmod tests {").unwrap_or(file.text.len());
        for (number, line) in file.text[..end].lines().enumerate() {
            let code = line.split("//").next().unwrap_or_default();
            for (found, instead) in UNCHECKED.iter().filter(|(found, _)| code.contains(found)) {
                problems.push(format!("{}:{}: {found} is not checked; use {instead}", file.path.display(), number + 1));
            }
        }
    }
    problems
}

/// Words that must not begin a doc comment. A doc comment must begin with a verb or a noun.
const OPENERS: [&str; 9] = ["What", "When", "How", "Whether", "Which", "Whose", "Who", "Where", "Whom"];

/// Returns doc comments that begin with a question word.
pub fn openers(files: &[File]) -> Vec<String> {
    let mut problems = Vec::new();
    for file in files {
        let mut inside = false;
        for (number, line) in file.text.lines().map(str::trim_start).enumerate() {
            let doc = line.strip_prefix("///").or_else(|| line.strip_prefix("//!"));
            if let (false, Some(doc)) = (inside, doc) {
                let word = doc.trim_start().split(|c: char| !c.is_alphabetic()).next().unwrap_or_default();
                if OPENERS.contains(&word) {
                    problems.push(format!(
                        "{}:{}: a doc comment begins with `{word}`; begin with a verb or the thing",
                        file.path.display(),
                        number + 1
                    ));
                }
            }
            inside = doc.is_some();
        }
    }
    problems
}

/// Maximum length of a test name, in characters.
const MAX_TEST_NAME_CHARS: usize = 60;

/// Returns tests with names that are too long for reports.
pub fn test_names(files: &[File]) -> Vec<String> {
    let mut problems = Vec::new();
    for file in files {
        let mut is_test = false;
        for (number, line) in (1..).zip(file.text.lines()) {
            let line = line.trim();
            is_test |= line == "#[test]" || line.starts_with("#[tokio::test");
            let Some(name) = line.split_once("fn ").and_then(|(_, rest)| rest.split('(').next()) else { continue };
            if std::mem::take(&mut is_test) && name.len() > MAX_TEST_NAME_CHARS {
                let (path, chars) = (file.path.display(), name.len());
                problems.push(format!(
                    "{path}:{number}: a test's name has {chars} characters, at most {MAX_TEST_NAME_CHARS}"
                ));
            }
        }
    }
    problems
}

/// Maximum number of columns per line. rustfmt enforces this limit for code, but not for comments.
const MAX_COLUMNS: usize = 120;

/// Returns comments that are too wide, except for those that consist of a single word, which cannot be broken.
pub fn wide_comments(files: &[File]) -> Vec<String> {
    let mut problems = Vec::new();
    for file in files {
        for (number, line) in (1..).zip(file.text.lines()) {
            let columns = line.chars().count();
            if columns > MAX_COLUMNS && line.trim_start().starts_with("//") && line.split_whitespace().count() > 2 {
                let path = file.path.display();
                problems.push(format!("{path}:{number}: a comment has {columns} columns, at most {MAX_COLUMNS}"));
            }
        }
    }
    problems
}

/// Returns modules below `src` in files named `x/mod.rs`. By convention, a module is in `x.rs`, with its parts in `x/`.
pub fn module_files(files: &[File]) -> Vec<String> {
    let in_sources = |file: &&File| file.path.components().any(|part| part.as_os_str() == "src");
    let named = files.iter().filter(in_sources).filter(|file| file.path.ends_with("mod.rs"));
    named.map(|file| format!("{}: a module is x.rs, with its parts in x/", file.path.display())).collect()
}

/// Returns crate roots without a header, and libraries whose header does not state their limits.
pub fn headers(metadata: &Metadata) -> Vec<String> {
    let mut problems = Vec::new();
    for package in metadata.workspace_packages() {
        for target in &package.targets {
            let library = target.kind.contains(&TargetKind::Lib);
            if !library && !target.kind.contains(&TargetKind::Bin) {
                continue;
            }
            let text = fs::read_to_string(&target.src_path).unwrap_or_default();
            if let Some(problem) = header_problem(&text, library) {
                problems.push(format!("{}: {problem}", target.src_path));
            }
        }
    }
    problems
}

fn header_problem(text: &str, library: bool) -> Option<&'static str> {
    let header: Vec<_> = text.lines().map_while(|l| l.strip_prefix("//!")).map(str::trim).collect();
    let first: Vec<_> = header.iter().take_while(|l| !l.is_empty()).copied().collect();
    let Some(last) = first.last() else { return Some("no crate header (`//!`)") };
    if first[0] == "To be written." || !last.ends_with(['.', ':']) {
        return Some("the header does not begin with a sentence that describes the crate");
    }
    let leaves_out =
        header.iter().any(|l| l.to_lowercase().split(|c: char| !c.is_alphabetic()).any(|w| w == "not" || w == "no"));
    (library && !leaves_out).then_some("the header does not state the crate's limits (`does not` or `Not`)")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn file(path: &str, text: &str) -> File {
        File { path: path.into(), text: text.into() }
    }

    #[test]
    fn a_long_file_is_found() {
        let files = [file("a/src/lib.rs", &"\n".repeat(801)), file("b/src/lib.rs", &"\n".repeat(800))];
        let problems = sizes(&files);
        assert_eq!(problems.len(), 1);
        assert!(problems[0].starts_with("a/src/lib.rs: 801 lines"));
    }

    #[test]
    fn waits_and_locks_without_a_rank_are_found_in_product_code() {
        let text = "fn f() {\n    std::thread::sleep(LOOK);\n    locks::sleep(LOOK); // thread::sleep\n}\n#[cfg(test)]\nmod tests {\n    use parking_lot::Mutex;\n}\n";
        let found =
            unchecked_waits(&[file("mediator/card-manager/src/a.rs", text), file("mediator/daemon/src/a.rs", text)]);
        assert_eq!(found, ["mediator/card-manager/src/a.rs:2: thread::sleep is not checked; use locks::sleep"]);
        assert!(unchecked_waits(&[file("mediator/card-manager/src/interleavings/a.rs", text)]).is_empty());
        assert_eq!(unchecked_waits(&[file("mediator/vgpu/src/a.rs", "use parking_lot::Mutex;\n")]).len(), 1);
    }

    #[test]
    fn literal_offsets_are_found_outside_tests_only() {
        let text = "fn f() {\n    card.read32(0x100);\n    card.write32(PMC.into(), 0x1);\n}\n#[cfg(test)]\nmod tests { fn f() { read32(0x1); } }\n";
        let problems = offsets(&[file("devmodel/src/a.rs", text), file("simgpu/src/a.rs", text)]);
        assert_eq!(problems.len(), 1);
        assert!(problems[0].starts_with("devmodel/src/a.rs:2:"), "{problems:?}");
        assert!(offsets(&[file("channels/src/tests/a.rs", text)]).is_empty());
        assert!(!has_literal_offset("// see 0x100"));
    }

    #[test]
    fn tags_need_a_listed_code() {
        let text = format!("// {TASK}: x\n// {TASK}[PV] y\n// {TASK}[NO] z\n// {} w\nMAS{TASK}N\n", REFUSED[0]);
        let problems = tags(&[file("a/src/lib.rs", &text)], &["PV".to_owned()]);
        let places: Vec<_> = problems.iter().map(|p| p.split(": ").next().unwrap()).collect();
        assert_eq!(places, ["a/src/lib.rs:1", "a/src/lib.rs:3", "a/src/lib.rs:4"]);
    }

    #[test]
    fn wide_comments_are_found() {
        let wide = format!("// {} b", "a".repeat(117));
        let text = format!("{wide}\n    {wide}\n// {}\nlet a = \"{}\"; // b\n", "a".repeat(150), "c".repeat(150));
        let found = wide_comments(&[file("a/src/a.rs", &text)]);
        assert_eq!(
            found,
            [
                "a/src/a.rs:1: a comment has 122 columns, at most 120",
                "a/src/a.rs:2: a comment has 126 columns, at most 120"
            ]
        );
    }

    #[test]
    fn long_test_names_and_mod_files_are_found() {
        let long = format!("#[test]\nfn {}() {{}}\n", "a".repeat(61));
        let text = format!("{long}#[test]\nfn b() {{\n    fn {}() {{}}\n}}\n", "c".repeat(61));
        let found = test_names(&[file("a/src/a.rs", &text)]);
        assert_eq!(found, ["a/src/a.rs:2: a test's name has 61 characters, at most 60"]);
        let files = ["a/src/b/mod.rs", "a/tests/support/mod.rs", "a/src/b.rs"].map(|path| file(path, ""));
        assert_eq!(module_files(&files), ["a/src/b/mod.rs: a module is x.rs, with its parts in x/"]);
    }

    #[test]
    fn headers_must_state_exclusions() {
        assert_eq!(header_problem("//! A thing.\n//!\n//! Not here: others.\n", true), None);
        assert_eq!(header_problem("//! A tool.\n", false), None);
        assert!(header_problem("//! A thing.\n", true).is_some());
        assert!(header_problem("//! To be written.\n", false).is_some());
        assert!(header_problem("use a;\n", false).is_some());
    }

    #[test]
    fn comments_that_begin_with_a_question_word_are_found_once() {
        let text =
            "/// What it is.\n/// When it is so.\nfn a() {}\n    /// Returns what it is.\n//! Who.\n\n//! Whole.\n";
        let problems = openers(&[file("a/src/lib.rs", text)]);
        assert_eq!(problems.len(), 1, "{problems:?}");
        assert!(problems[0].starts_with("a/src/lib.rs:1: a doc comment begins with `What`"), "{problems:?}");
        assert_eq!(openers(&[file("a/src/lib.rs", "fn a() {}\n//! Who.\n")]).len(), 1);
    }
}
