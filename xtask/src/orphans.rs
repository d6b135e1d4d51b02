//! Rust files that no crate compiles.

use std::collections::{BTreeSet, VecDeque};
use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use cargo_metadata::Metadata;
use serde::Deserialize;

use crate::lints::File;

/// The files among `files` that no target of the workspace or of the fuzz crate reaches by `mod`.
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
    /// Its name.
    pub name: String,
    /// The file with its entry.
    pub source: PathBuf,
}

/// The fuzz targets, as `tests/fuzz/Cargo.toml` lists them; none if there is no such file.
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

fn reach(roots: Vec<PathBuf>) -> BTreeSet<PathBuf> {
    let mut reached = BTreeSet::new();
    // A crate root looks for its modules beside itself, whatever its name.
    let mut queue: VecDeque<_> = roots.into_iter().map(|r| (r, true)).collect();
    while let Some((path, is_root)) = queue.pop_front() {
        let Ok(text) = fs::read_to_string(&path) else { continue };
        if !reached.insert(path.clone()) {
            continue;
        }
        let beside = path.parent().unwrap_or(Path::new(""));
        let owns_folder = is_root || path.file_name().is_some_and(|n| n == "mod.rs");
        let within = if owns_folder { beside.to_path_buf() } else { path.with_extension("") };
        for module in modules(&text) {
            match module {
                Module::At(place) => queue.push_back((beside.join(place), false)),
                Module::Named(name) => {
                    queue.push_back((within.join(format!("{name}.rs")), false));
                    queue.push_back((within.join(&name).join("mod.rs"), false));
                }
            }
        }
    }
    reached
}

#[derive(Debug, PartialEq, Eq)]
enum Module {
    Named(String),
    At(String),
}

/// The modules that `text` declares without a body. One `mod` to a line, as rustfmt leaves them.
fn modules(text: &str) -> Vec<Module> {
    let mut found = Vec::new();
    let mut place = None;
    for line in text.lines().map(str::trim) {
        if let Some(quoted) = line.strip_prefix("#[path = \"").and_then(|l| l.strip_suffix("\"]")) {
            place = Some(quoted.to_owned());
            continue;
        }
        if line.starts_with("#[") {
            continue;
        }
        let words: Vec<_> = line.split_whitespace().collect();
        let declared = match words.as_slice() {
            ["mod", name] => Some(name),
            [visibility, "mod", name] if visibility.starts_with("pub") => Some(name),
            _ => None,
        };
        if let Some(name) = declared.and_then(|n| n.strip_suffix(';')) {
            found.push(place.take().map_or_else(|| Module::Named(name.to_owned()), Module::At));
        }
        place = None;
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn module_declarations_are_read() {
        let text = "mod a;\npub(crate) mod b;\nmod c { }\n#[path = \"x/d.rs\"]\n#[cfg(test)]\nmod d;\n// mod e;\n";
        let named = |n: &str| Module::Named(n.to_owned());
        assert_eq!(modules(text), [named("a"), named("b"), Module::At("x/d.rs".to_owned())]);
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
