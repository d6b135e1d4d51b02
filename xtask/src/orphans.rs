//! Finds Rust files that do not belong to any crate.

use std::collections::{BTreeSet, VecDeque};
use std::fs;
use std::path::{Component, Path, PathBuf};

use anyhow::{Context, Result};
use cargo_metadata::Metadata;
use serde::Deserialize;

use crate::lints::File;

/// Returns the files in `files` that no target in the workspace or the fuzz crate includes through `mod`.
pub fn find(metadata: &Metadata, root: &Path, files: &[File]) -> Result<Vec<String>> {
    let targets = metadata.workspace_packages().into_iter().flat_map(|p| p.targets.clone());
    let mut roots: Vec<_> = targets.map(|t| t.src_path.into_std_path_buf()).collect();
    roots.extend(fuzz_targets(root)?.into_iter().map(|t| t.source));
    let reached = reach(roots);
    let lost = files.iter().filter(|f| !reached.contains(&root.join(&f.path)));
    Ok(lost.map(|f| format!("{}: no `mod` leads to this file", f.path.display())).collect())
}

/// A fuzz target.
pub struct FuzzTarget {
    /// Name of the target.
    pub name: String,
    /// Path of the target's root file.
    pub source: PathBuf,
}

/// Returns the fuzz targets in `tests/fuzz/Cargo.toml`, or an empty list if the file does not exist.
pub fn fuzz_targets(root: &Path) -> Result<Vec<FuzzTarget>> {
    #[derive(Deserialize)]
    struct Manifest {
        #[serde(default)]
        bin: Vec<Bin>,
    }
    #[derive(Deserialize)]
    struct Bin {
        name: String,
        path: PathBuf,
    }
    let folder = root.join("tests/fuzz");
    let Ok(text) = fs::read_to_string(folder.join("Cargo.toml")) else { return Ok(Vec::new()) };
    let manifest: Manifest = toml::from_str(&text).context("tests/fuzz/Cargo.toml")?;
    Ok(manifest.bin.into_iter().map(|b| FuzzTarget { name: b.name, source: folder.join(b.path) }).collect())
}

/// Returns the path without `..` components, as in the file list.
fn without_turns(path: &Path) -> PathBuf {
    let mut plain = PathBuf::new();
    for part in path.components() {
        if part == Component::ParentDir {
            plain.pop();
        } else {
            plain.push(part);
        }
    }
    plain
}

fn reach(roots: Vec<PathBuf>) -> BTreeSet<PathBuf> {
    let mut reached = BTreeSet::new();
    // The modules of a crate root are in the root's folder, regardless of the root's file name.
    let mut queue: VecDeque<_> = roots.into_iter().map(|r| (r, true)).collect();
    while let Some((path, is_root)) = queue.pop_front() {
        let path = without_turns(&path);
        let Ok(text) = fs::read_to_string(&path) else { continue };
        if !reached.insert(path.clone()) {
            continue;
        }
        let beside = path.parent().unwrap_or(Path::new(""));
        let owns_folder = is_root || path.file_name().is_some_and(|n| n == "mod.rs");
        let within = if owns_folder { beside.to_path_buf() } else { path.with_extension("") };
        for module in modules(&text) {
            let inline: PathBuf = module.inside.iter().collect();
            match module.path {
                // Within an inline module, a path is relative to that module's folder. The file at the path has its
                // modules in the same folder.
                Some(place) if module.inside.is_empty() => queue.push_back((beside.join(place), true)),
                Some(place) => queue.push_back((within.join(inline).join(place), true)),
                None => {
                    let folder = within.join(inline);
                    queue.push_back((folder.join(format!("{}.rs", module.name)), false));
                    queue.push_back((folder.join(&module.name).join("mod.rs"), false));
                }
            }
        }
    }
    reached
}

/// A module declaration without a body.
#[derive(Debug, Default, PartialEq, Eq)]
struct Module {
    name: String,
    /// Names of the enclosing inline modules, outermost first.
    inside: Vec<String>,
    /// Value of the module's `path` attribute, if any.
    path: Option<String>,
}

/// Returns the modules that `text` declares without a body. Expects one `mod` per line, as formatted by rustfmt.
fn modules(text: &str) -> Vec<Module> {
    let mut found = Vec::new();
    let mut path = None;
    // Enclosing inline modules, each with its indentation.
    let mut open: Vec<(usize, String)> = Vec::new();
    for full in text.lines() {
        let (line, indent) = (full.trim(), full.len() - full.trim_start().len());
        if let Some(quoted) = line.strip_prefix("#[path = \"").and_then(|l| l.strip_suffix("\"]")) {
            path = Some(quoted.to_owned());
            continue;
        }
        if line.starts_with("#[") {
            continue;
        }
        if line == "}" && open.last().is_some_and(|(at, _)| *at == indent) {
            open.pop();
        }
        let words: Vec<_> = line.split_whitespace().collect();
        let declared = match words.as_slice() {
            ["mod", rest @ ..] => rest,
            [visibility, "mod", rest @ ..] if visibility.starts_with("pub") => rest,
            _ => &[],
        };
        match declared {
            [name] if name.ends_with(';') => {
                let name = name.trim_end_matches(';').to_owned();
                let inside = open.iter().map(|(_, name)| name.clone()).collect();
                found.push(Module { name, inside, path: path.take() });
            }
            [name, "{"] => open.push((indent, (*name).to_owned())),
            _ => {}
        }
        path = None;
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn module_declarations_are_read() {
        let text = "mod a;\npub(crate) mod b;\nmod c {}\n#[path = \"x/d.rs\"]\n#[cfg(test)]\nmod d;\n// mod e;\n\
                    mod f {\n    pub mod g;\n    fn h() {\n    }\n    mod i;\n}\nmod j;\n";
        let module = |name: &str, inside: &[&str], path: Option<&str>| Module {
            name: name.to_owned(),
            inside: inside.iter().map(|i| (*i).to_owned()).collect(),
            path: path.map(str::to_owned),
        };
        let expected = [
            module("a", &[], None),
            module("b", &[], None),
            module("d", &[], Some("x/d.rs")),
            module("g", &["f"], None),
            module("i", &["f"], None),
            module("j", &[], None),
        ];
        assert_eq!(modules(text), expected);
    }

    #[test]
    fn files_are_reached_through_folders() {
        let folder = tempfile::tempdir().unwrap();
        let at = |name: &str| folder.path().join(name);
        fs::create_dir(at("a")).unwrap();
        fs::write(at("lib.rs"), "mod a;\n").unwrap();
        fs::write(at("a.rs"), "mod b;\n").unwrap();
        fs::write(at("a/b.rs"), "").unwrap();
        fs::write(at("b.rs"), "").unwrap();
        let reached = reach(vec![at("lib.rs")]);
        assert_eq!(reached, [at("a.rs"), at("a/b.rs"), at("lib.rs")].into());
    }
}
