//! Checks the size and the circular imports of all crates. In crates under `mediator/`, also checks the direction of
//! imports, and finds public items that no other crate names.
//!
//! Also checks which files use the software card. All checks work on the source text instead of the compiler's data, so
//! a name counts as used if it occurs anywhere.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Component, Path};

use crate::lints::File;

/// Maximum number of product code lines per crate, excluding tests.
const MAX_CRATE_LINES: usize = 8000;

/// Crates that may be larger, with their maximum number of lines. These limits may only fall.
const LARGE_CRATES: [(&str, usize); 3] = [("cuda/owner", 8_200), ("mediator/ctl", 8_058), ("mediator/daemon", 8_413)];

/// Maximum number of modules in import cycles, for crates outside `mediator/`. These numbers may only fall.
const MODULES_IN_CIRCLES: [(&str, usize); 4] = [("simgpu", 8), ("simgpu/engines", 2), ("vmm-glue", 2), ("xtask", 4)];

/// Returns the crate folder of a source file, and the file's module path starting at `src`.
fn place(path: &Path) -> Option<(String, Vec<String>)> {
    let parts: Vec<_> = path
        .components()
        .filter_map(|part| if let Component::Normal(part) = part { part.to_str().map(str::to_owned) } else { None })
        .collect();
    let at = parts.iter().position(|part| part == "src")?;
    let (folder, modules) = (parts.get(..at)?.join("/"), parts.get(at + 1..)?);
    let mut modules = modules.to_vec();
    let last = modules.pop()?;
    match last.trim_end_matches(".rs") {
        "lib" | "main" if modules.is_empty() => {}
        "mod" => {}
        other => modules.push(other.to_owned()),
    }
    Some((folder, modules))
}

/// Works like [`place`], but only for crates under `mediator/`, and omits this prefix.
fn room(path: &Path) -> Option<(String, Vec<String>)> {
    let (folder, modules) = place(path)?;
    folder.strip_prefix("mediator/").map(|name| (name.to_owned(), modules))
}

/// Returns true if a file contains only tests.
fn is_test(modules: &[String]) -> bool {
    modules.iter().any(|module| module == "tests" || module == "interleavings" || module == "fixture")
}

/// Returns the text up to the unit tests at its end.
fn product(text: &str) -> &str {
    text.split("#[cfg(test)]\nmod tests {").next().unwrap_or(text)
}

/// Returns the path component after each `prefix` in the text. If a group in braces follows, returns the first
/// component of each of its paths.
fn named_after(text: &str, prefix: &str) -> BTreeSet<String> {
    let mut names = BTreeSet::new();
    for (at, _) in text.match_indices(prefix) {
        let before = text.get(..at).and_then(|text| text.chars().next_back());
        if before.is_some_and(|c| c.is_alphanumeric() || c == '_' || c == ':') {
            continue;
        }
        let rest = text.get(at + prefix.len()..).unwrap_or_default();
        if let Some(group) = rest.strip_prefix('{') {
            let (mut depth, mut fresh) = (0_u32, true);
            let mut name = String::new();
            for c in group.chars() {
                match c {
                    '}' if depth == 0 => break,
                    '{' => depth += 1,
                    '}' => depth -= 1,
                    ',' if depth == 0 => {
                        names.insert(std::mem::take(&mut name));
                        fresh = true;
                        continue;
                    }
                    c if fresh && (c.is_alphanumeric() || c == '_') => name.push(c),
                    c if c.is_whitespace() && name.is_empty() => {}
                    _ => fresh = false,
                }
            }
            names.insert(name);
        } else {
            names.insert(rest.chars().take_while(|c| c.is_alphanumeric() || *c == '_').collect());
        }
    }
    names
}

/// Modules imported by each top-level module of a crate.
type Imports = BTreeMap<String, BTreeSet<String>>;

/// Returns the imports between the top-level modules of each crate, and the set of modules that are folders.
fn imports(files: &[File]) -> BTreeMap<String, (Imports, BTreeSet<String>)> {
    let mut crates: BTreeMap<String, (Imports, BTreeSet<String>)> = BTreeMap::new();
    for file in files {
        let Some((name, modules)) = place(&file.path).filter(|(_, modules)| !is_test(modules)) else { continue };
        let Some(top) = modules.first() else { continue };
        let (imports, folders) = crates.entry(name).or_default();
        if modules.len() > 1 {
            folders.insert(top.clone());
        }
        let text = product(&file.text);
        let mut names = named_after(text, "crate::");
        names.extend(named_after(text, &"super::".repeat(modules.len())));
        imports.entry(top.clone()).or_default().extend(names);
    }
    for (imports, _) in crates.values_mut() {
        let known: BTreeSet<String> = imports.keys().cloned().collect();
        for (module, named) in &mut *imports {
            named.retain(|name| name != module && known.contains(name));
        }
    }
    crates
}

/// Returns all modules that a module reaches through imports.
fn reached<'a>(imports: &'a Imports, from: &'a str) -> BTreeSet<&'a str> {
    let mut found = BTreeSet::new();
    let mut left = vec![from];
    while let Some(module) = left.pop() {
        for next in imports.get(module).into_iter().flatten() {
            if found.insert(next.as_str()) {
                left.push(next);
            }
        }
    }
    found
}

/// Returns modules in forbidden import cycles, and limits in [`MODULES_IN_CIRCLES`] that are too high.
pub fn circles(files: &[File]) -> Vec<String> {
    circles_beyond(files, &MODULES_IN_CIRCLES)
}

fn circles_beyond(files: &[File], allowed: &[(&str, usize)]) -> Vec<String> {
    let mut problems = Vec::new();
    for (folder, (imports, folders)) in imports(files) {
        let circle: BTreeSet<&str> =
            imports.keys().map(String::as_str).filter(|module| reached(&imports, module).contains(module)).collect();
        if folder.starts_with("mediator/") {
            problems.extend(circle.iter().filter(|module| folders.contains(**module)).map(|module| {
                let back = imports
                    .get(*module)
                    .into_iter()
                    .flatten()
                    .filter(|other| reached(&imports, other).contains(module));
                let back: Vec<_> = back.map(String::as_str).collect();
                format!("{folder}: folder `{module}` imports modules that import it: {}", back.join(", "))
            }));
        }
        let most = allowed_for(allowed, &folder);
        let names: Vec<_> = circle.iter().copied().collect();
        if names.len() > most {
            let (count, names) = (names.len(), names.join(", "));
            problems.push(format!(
                "{folder}: {count} modules import each other in a circle, at most {most} are allowed: {names}"
            ));
        } else if names.len() < most {
            problems.push(format!(
                "{folder}: {} modules are in circles, {most} are allowed: lower the number",
                names.len()
            ));
        }
    }
    problems
}

fn allowed_for(allowed: &[(&str, usize)], folder: &str) -> usize {
    allowed.iter().find(|(name, _)| *name == folder).map_or(0, |(_, count)| *count)
}

/// Returns crates that are too large.
pub fn sizes(files: &[File]) -> Vec<String> {
    let mut lines: BTreeMap<String, usize> = BTreeMap::new();
    for file in files {
        if let Some((name, modules)) = place(&file.path)
            && !is_test(&modules)
        {
            *lines.entry(name).or_default() += product(&file.text).lines().count();
        }
    }
    let most = |folder: &str| allowed_for(&LARGE_CRATES, folder).max(MAX_CRATE_LINES);
    let large = lines.into_iter().filter(|(folder, lines)| *lines > most(folder));
    large.map(|(folder, lines)| format!("{folder}: {lines} lines of product code; at most {}", most(&folder))).collect()
}

/// Patterns of references to the software card's types. Messages and configuration keys do not count.
const SOFTWARE_CARD: [&str; 2] = ["use simgpu", "simgpu::"];
/// Crates under `mediator/` that may use the software card: for card descriptions, for the configuration, and for
/// tests.
const KNOWS_KINDS: [&str; 3] = ["physical", "config", "rig"];

/// Returns files in other crates under `mediator/` that use the software card outside of tests.
pub fn knowing(files: &[File]) -> Vec<String> {
    let above = files.iter().filter(|file| {
        let room = room(&file.path);
        room.is_some_and(|(name, modules)| !is_test(&modules) && !KNOWS_KINDS.contains(&name.as_str()))
    });
    let knows = above.filter(|file| {
        let text = product(&file.text);
        SOFTWARE_CARD.iter().any(|name| text.contains(name))
    });
    knows
        .map(|file| format!("{}: names the software card, which only `physical` may do", file.path.display()))
        .collect()
}

fn words(text: &str) -> impl Iterator<Item = &str> {
    text.split(|c: char| !c.is_alphanumeric() && c != '_').filter(|word| !word.is_empty())
}

/// A public item: its name, or `None` if it is public through another item, and the words in its declaration.
type Declared<'a> = (Option<&'a str>, BTreeSet<&'a str>);

/// Returns the public items declared in a text, except for modules, and their public parts: fields, trait methods, and
/// associated types.
fn declared(text: &str) -> Vec<Declared<'_>> {
    const KINDS: [&str; 8] = ["fn ", "const fn ", "struct ", "enum ", "trait ", "type ", "const ", "static "];
    let mut found = Vec::new();
    let mut lines = text.lines().map(str::trim_start);
    while let Some(line) = lines.next() {
        let of_trait = line.starts_with("type ") || (line.starts_with("fn ") && line.ends_with(';'));
        let public = line.strip_prefix("pub ").filter(|rest| !rest.starts_with("use "));
        let Some(rest) = public.or(of_trait.then_some(line)) else { continue };
        let item = KINDS.iter().find_map(|kind| rest.strip_prefix(kind)).filter(|_| !of_trait);
        let ends: &[char] = if item.is_some() { &['{', '}', ';'] } else { &[',', ';'] };
        let mut all: BTreeSet<&str> = words(rest).collect();
        let mut last = line;
        while !last.ends_with(ends) {
            let Some(next) = lines.next() else { break };
            all.extend(words(next));
            last = next;
        }
        found.push((item.and_then(|rest| words(rest).next()), all));
    }
    found
}

/// Returns public items that are named neither by another crate nor by another public declaration in their own crate.
pub fn unnamed(files: &[File]) -> Vec<String> {
    let mut items: BTreeMap<String, Vec<Declared<'_>>> = BTreeMap::new();
    let mut named: Vec<(Option<String>, BTreeSet<&str>)> = Vec::new();
    for file in files {
        let room = room(&file.path);
        let name = room.as_ref().map(|(name, _)| name.clone());
        named.push((name, words(&file.text).collect()));
        if let Some((name, modules)) = room
            && !is_test(&modules)
            && name != "rig"
        {
            items.entry(name).or_default().extend(declared(product(&file.text)));
        }
    }
    let mut problems = Vec::new();
    for (name, items) in items {
        let used = |item: &str| {
            let elsewhere = || named.iter().any(|(of, all)| of.as_deref() != Some(name.as_str()) && all.contains(item));
            let shown = || items.iter().any(|(of, all)| *of != Some(item) && all.contains(item));
            elsewhere() || shown()
        };
        let unused: BTreeSet<_> = items.iter().filter_map(|(item, _)| *item).filter(|item| !used(item)).collect();
        if !unused.is_empty() {
            let unused = unused.into_iter().collect::<Vec<_>>().join(", ");
            problems.push(format!("mediator/{name}: public, and no other crate names it: {unused}"));
        }
    }
    problems
}

#[cfg(test)]
mod tests {
    use super::*;

    fn file(path: &str, text: &str) -> File {
        File { path: path.into(), text: text.to_owned() }
    }

    #[test]
    fn circles_outside_mediator_keep_their_number() {
        let files =
            [file("x/src/a.rs", "use crate::b;\n"), file("x/src/b.rs", "use crate::a;\n"), file("x/src/c.rs", "")];
        assert!(circles_beyond(&files, &[("x", 2)]).is_empty());
        let found = circles_beyond(&files, &[("x", 1)]);
        assert_eq!(found, ["x: 2 modules import each other in a circle, at most 1 are allowed: a, b"]);
        assert_eq!(
            circles_beyond(&files, &[("x", 3)]),
            ["x: 2 modules are in circles, 3 are allowed: lower the number"]
        );
    }

    #[test]
    fn folder_in_an_import_cycle_is_reported() {
        let files = [
            file("mediator/x/src/lib.rs", "mod a;\nmod b;\n"),
            file("mediator/x/src/a.rs", "use crate::b::Thing;\n"),
            file("mediator/x/src/b/mod.rs", "use super::{c::Other, a};\n"),
            file("mediator/x/src/b/inner.rs", ""),
            file("mediator/x/src/c.rs", ""),
        ];
        let told = circles(&files);
        assert_eq!(told.len(), 2, "{told:?}");
        assert!(told[0].contains("folder `b` imports modules that import it: a"), "{told:?}");
        let fine =
            [file("mediator/x/src/a.rs", "use super::b;\n"), file("mediator/x/src/b/mod.rs", "use super::Root;\n")];
        assert!(circles(&fine).is_empty());
    }

    #[test]
    fn imports_of_unit_tests_do_not_count() {
        let files = [
            file("mediator/x/src/a.rs", "use crate::b;\n"),
            file("mediator/x/src/b.rs", "#[cfg(test)]\nmod tests {\n    use crate::a;\n}\n"),
        ];
        assert!(circles(&files).is_empty());
    }

    #[test]
    fn public_items_unused_by_other_crates_are_reported() {
        let files = [
            file(
                "mediator/x/src/a.rs",
                "pub fn used(\n    by: Shown,\n) -> X {}\npub const fn lonely() {}\npub struct Shown;\n",
            ),
            file("mediator/y/src/a.rs", "use x::used;\n"),
        ];
        let told = unnamed(&files);
        assert_eq!(told, ["mediator/x: public, and no other crate names it: lonely"]);
    }

    #[test]
    fn code_that_uses_the_software_card_is_reported() {
        let text = "fn a(card: &simgpu::SimGpu) {}\n";
        let apart = "//! Cards of kind `simgpu` are software.\n#[cfg(test)]\nmod tests {\n    use simgpu::SimGpu;\n}\n";
        let allowed =
            ["mediator/physical/src/lib.rs", "mediator/rig/src/a.rs", "mediator/x/src/tests/b.rs", "simgpu/src/lib.rs"];
        assert!(knowing(&allowed.map(|path| file(path, text))).is_empty());
        assert!(knowing(&[file("mediator/x/src/a.rs", apart)]).is_empty());
        assert_eq!(knowing(&[file("mediator/x/src/a.rs", text)]).len(), 1);
    }

    #[test]
    fn oversized_crates_are_reported_without_counting_tests() {
        let line = "//\n".repeat(MAX_CRATE_LINES);
        assert!(sizes(&[file("mediator/x/src/a.rs", &line), file("mediator/x/src/tests/b.rs", &line)]).is_empty());
        assert_eq!(sizes(&[file("mediator/x/src/a.rs", &format!("{line}//\n"))]).len(), 1);
    }
}
