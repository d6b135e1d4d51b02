//! The lists of mistakes. The file `mutations.toml` in a crate's folder lists the mistakes in that crate.

use std::fs;
use std::path::Path;

use anyhow::{Context, Result};
use cargo_metadata::Metadata;
use serde::Deserialize;

use super::Mutation;

/// Name of the file with a crate's list.
const LIST: &str = "mutations.toml";

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct List {
    /// The entries. Each entry is parsed separately, so that an error can name it.
    mutation: Vec<toml::Table>,
}

/// Reads the lists of all crates in the workspace.
pub(super) fn mutations(metadata: &Metadata) -> Result<Vec<Mutation>> {
    let mut all = Vec::new();
    for package in metadata.workspace_packages() {
        let folder = package.manifest_path.parent().context("a manifest without a folder")?;
        let path = folder.join(LIST);
        if path.exists() {
            let text = fs::read_to_string(&path).with_context(|| format!("cannot read {path}"))?;
            let folder = folder.strip_prefix(&metadata.workspace_root).unwrap_or(folder);
            all.extend(parse(&text, folder.as_std_path(), &package.name)?);
        }
    }
    Ok(all)
}

/// Parses the list of the `package` crate in `folder`.
fn parse(text: &str, folder: &Path, package: &str) -> Result<Vec<Mutation>> {
    let path = folder.join(LIST);
    let list: List = toml::from_str(text).with_context(|| format!("{} is not valid", path.display()))?;
    let mut mutations = Vec::new();
    for (entry, number) in list.mutation.into_iter().zip(1..) {
        let name = entry.get("name").and_then(toml::Value::as_str).unwrap_or("no name").to_owned();
        let mut mutation: Mutation =
            entry.try_into().with_context(|| format!("{}: entry {number} ({name}) is not valid", path.display()))?;
        mutation.file = format!("{}/{}", folder.display(), mutation.file);
        if mutation.package.is_empty() {
            package.clone_into(&mut mutation.package);
        }
        mutations.push(mutation);
    }
    Ok(mutations)
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;
    use std::path::PathBuf;

    use super::*;
    use crate::layers::metadata;
    use crate::run::root;

    const ENTRY: &str =
        "[[mutation]]\nname = \"a\"\nwhat = \"b\"\nfile = \"src/c.rs\"\nfrom = '''\nd\ne\n'''\nto = ''\n";

    fn error(text: &str) -> String {
        format!("{:#}", parse(text, Path::new("f/g"), "p").err().expect("an error"))
    }

    #[test]
    fn entry_belongs_to_its_crate_unless_it_names_another() {
        let text = format!("{ENTRY}{ENTRY}package = \"q\"\ntests = \"t\"\n");
        let list = parse(&text, Path::new("f/g"), "p").unwrap();
        let [own, other] = list.as_slice() else { panic!("{} entries", list.len()) };
        assert_eq!((own.name.as_str(), own.file.as_str(), own.from.as_str()), ("a", "f/g/src/c.rs", "d\ne\n"));
        assert_eq!((own.package.as_str(), own.tests.as_str()), ("p", ""));
        assert_eq!((other.package.as_str(), other.tests.as_str()), ("q", "t"));
    }

    #[test]
    fn invalid_list_is_reported_with_file_and_entry() {
        for (more, expected) in [
            ("too = \"x\"\n", "f/g/mutations.toml: entry 2 (a) is not valid: unknown field `too`"),
            ("[[mutation]]\nname = \"z\"\n", "f/g/mutations.toml: entry 3 (z) is not valid: missing field `what`"),
            ("[[mutation]]\n", "f/g/mutations.toml: entry 3 (no name) is not valid: missing field `name`"),
            ("tests = 1\n", "f/g/mutations.toml: entry 2 (a) is not valid: invalid type"),
            ("[[mutations]]\n", "f/g/mutations.toml is not valid: TOML parse error at line 19"),
            ("to = ''\n", "f/g/mutations.toml is not valid: TOML parse error at line 19"),
        ] {
            let said = error(&format!("{ENTRY}{ENTRY}{more}"));
            assert!(said.starts_with(expected), "{said}");
        }
    }

    fn lists(folder: &Path) -> BTreeSet<PathBuf> {
        let mut found = BTreeSet::new();
        for entry in fs::read_dir(folder).unwrap() {
            let path = entry.unwrap().path();
            let name = path.file_name().unwrap_or_default().to_string_lossy();
            if path.is_dir() && !name.starts_with('.') && !name.starts_with("target") {
                found.extend(lists(&path));
            } else if name == LIST {
                found.insert(path);
            }
        }
        found
    }

    #[test]
    fn every_list_is_in_the_folder_of_a_crate() {
        let metadata = metadata("Cargo.toml").unwrap();
        let folders = metadata.workspace_packages().into_iter().filter_map(|package| package.manifest_path.parent());
        let of_crates: BTreeSet<_> = folders.map(|folder| folder.join(LIST).into_std_path_buf()).collect();
        let lost: Vec<_> = lists(&root()).into_iter().filter(|path| !of_crates.contains(path)).collect();
        assert!(lost.is_empty(), "no crate reads {lost:?}");
    }
}
