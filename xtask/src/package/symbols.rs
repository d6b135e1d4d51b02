//! Debug symbols of a package's programs, in a separate package.
//!
//! A debugger finds the symbols by the program's build ID, under the path that Debian and Fedora share.

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;
use std::process::Command;

use anyhow::{Context, Result};

use super::output;
use super::recipe::Recipe;
use super::spec::Spec;
use super::tree::Tree;

/// Returns the name of a package's debug symbol package.
pub(super) fn name(spec: &Spec) -> String {
    format!("{}-dbgsym", spec.name)
}

/// Build IDs of the programs whose symbols were extracted.
#[derive(Default)]
pub(super) struct Symbols(BTreeSet<String>);

impl Symbols {
    /// Moves a program's symbols, which make up nine tenths of its size, to the symbol tree. Skips scripts.
    pub fn take(&mut self, program: &Path, symbols: &Tree) -> Result<()> {
        let bytes = fs::read(program).with_context(|| format!("cannot read {}", program.display()))?;
        if !bytes.starts_with(b"\x7fELF") {
            return Ok(());
        }
        if let Some(id) = build_id(program)?
            && let Some((folder, file)) = id.split_at_checked(2)
        {
            let path = format!("usr/lib/debug/.build-id/{folder}/{file}.debug");
            // An empty file creates the folders.
            symbols.write(&path, b"", 0o644)?;
            let mut keep = Command::new("objcopy");
            keep.args(["--only-keep-debug", "--compress-debug-sections"]).arg(program).arg(symbols.path(&path));
            output(&mut keep).context("the package binutils has objcopy")?;
            symbols.set_mode(&path, 0o644)?;
            self.0.insert(id);
        }
        let mut command = Command::new("strip");
        output(command.args(["--remove-section=.comment", "--remove-section=.note"]).arg(program))
            .context("the package binutils has strip")
            .map(drop)
    }

    /// Adds the documentation link and the control file to the symbol tree.
    pub fn finish(self, recipe: &Recipe, spec: &Spec, symbols: &Tree) -> Result<()> {
        // In Debian, a debug symbol package links to the documentation folder of its program's package.
        symbols.link(&format!("usr/share/doc/{}", name(spec)), spec.name)?;
        let ids: Vec<String> = self.0.into_iter().collect();
        let fields = format!(
            "Depends: {} (= {})\nSection: debug\nAuto-Built-Package: debug-symbols\nBuild-Ids: {}\n",
            spec.name,
            recipe.version,
            ids.join(" ")
        );
        let description = format!("debug symbols for {}\n", spec.name);
        recipe.write_control(symbols, &name(spec), &fields, &description)
    }
}

/// Returns the build ID of a program, if it has one.
fn build_id(program: &Path) -> Result<Option<String>> {
    let notes =
        output(Command::new("readelf").args(["--notes"]).arg(program)).context("the package binutils has readelf")?;
    let notes = String::from_utf8_lossy(&notes).into_owned();
    Ok(notes.lines().find_map(|line| Some(line.trim().strip_prefix("Build ID: ")?.to_owned())))
}
