//! Adds hooks to the driver by applying semantic patches with Coccinelle, and checks that each patch matches.
//!
//! The header of a patch names the file to patch, the hooks that this file must contain afterwards, and the kernel,
//! unless the patch applies to every kernel:
//! ```text
//! // kernel: 6.1
//! // file: nvkm/subdev/mmu/base.c
//! // hook: gmpv_nv_table_get
//! ```

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail};

use crate::exec;
use crate::progress::Step;

/// The unpacked `spatch`, which applies semantic patches.
pub struct Coccinelle {
    root: PathBuf,
}

/// Header of a patch.
#[derive(Debug, PartialEq, Eq)]
struct Head {
    kernel: Option<String>,
    file: String,
    hooks: Vec<String>,
}

impl Coccinelle {
    /// Uses the program from the packages that are unpacked below `root`.
    pub fn at(root: &Path) -> Self {
        Self { root: root.to_owned() }
    }

    /// Applies every patch in `patches` for `kernel` (such as `6.1`) to the driver's sources in `tree`.
    ///
    /// Returns an error with the hook's name if its patch does not match.
    pub fn apply(&self, patches: &Path, kernel: &str, tree: &Path, step: &mut Step<'_>) -> Result<()> {
        let entries = fs::read_dir(patches).with_context(|| format!("cannot read {}", patches.display()))?;
        let mut files: Vec<_> = entries.flatten().map(|entry| entry.path()).collect();
        files.retain(|path| path.extension().is_some_and(|extension| extension == "cocci"));
        files.sort();
        for patch in files {
            let name = patch.file_name().unwrap_or_default().to_string_lossy().into_owned();
            let text = fs::read_to_string(&patch).with_context(|| format!("cannot read {}", patch.display()))?;
            let head = parse(&text).with_context(|| format!("the semantic patch {name}"))?;
            if head.kernel.as_deref().is_some_and(|only| only != kernel) {
                continue;
            }
            let source = tree.join(&head.file);
            let mut command = self.command()?;
            command.args(["--very-quiet", "--no-includes", "--in-place", "--sp-file"]).arg(&patch).arg(&source);
            exec::run(&mut command, "coccinelle", step, || name.clone())?;
            let patched = fs::read_to_string(&source).with_context(|| format!("cannot read {}", source.display()))?;
            if let Some(absent) = head.hooks.iter().find(|hook| !patched.contains(*hook)) {
                bail!(
                    "the hook {absent} does not match {} of Linux {kernel}: the driver has changed; adapt {name} in {}",
                    head.file,
                    patches.display()
                );
            }
        }
        Ok(())
    }

    /// Returns a command that runs the program with the dynamic loader from the unpacked packages, because nothing is
    /// installed.
    fn command(&self) -> Result<Command> {
        let libraries = library_folders(&self.root);
        let mut command = Command::new(loader(&libraries)?);
        command.arg("--library-path").arg(std::env::join_paths(&libraries).context("library folders")?);
        command.arg(self.root.join("usr/bin/spatch"));
        command.env("COCCINELLE_HOME", self.root.join("usr/lib/coccinelle"));
        Ok(command)
    }
}

/// Returns the existing folders below `root` in which Debian installs libraries.
pub fn library_folders(root: &Path) -> Vec<PathBuf> {
    ["usr/lib/x86_64-linux-gnu", "lib/x86_64-linux-gnu"].iter().map(|f| root.join(f)).filter(|f| f.is_dir()).collect()
}

/// Returns the dynamic loader in one of `folders`.
pub fn loader(folders: &[PathBuf]) -> Result<PathBuf> {
    let found = folders.iter().map(|folder| folder.join("ld-linux-x86-64.so.2")).find(|path| path.is_file());
    found.context("the packages contain no dynamic loader")
}

fn parse(text: &str) -> Result<Head> {
    let value =
        |line: &str, key: &str| Some(line.strip_prefix("// ")?.strip_prefix(key)?.strip_prefix(": ")?.to_owned());
    let one = |key: &str| text.lines().find_map(|line| value(line, key));
    let hooks: Vec<_> = text.lines().filter_map(|line| value(line, "hook")).collect();
    if hooks.is_empty() {
        bail!("its header has no hook");
    }
    Ok(Head { kernel: one("kernel"), file: one("file").context("its header has no file")?, hooks })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn heads_name_file_hooks_and_kernel() {
        let text = "// x\n// kernel: 6.1\n// file: a/b.c\n// hook: f\n// hook: g\n\n@@\n@@\n";
        let hooks = vec!["f".to_owned(), "g".to_owned()];
        assert_eq!(parse(text).unwrap(), Head { kernel: Some("6.1".into()), file: "a/b.c".into(), hooks });
        assert!(parse("// file: a\n").unwrap_err().to_string().contains("no hook"));
        assert!(parse("// hook: a\n").unwrap_err().to_string().contains("no file"));
    }

    #[test]
    fn every_patch_of_ours_has_a_head() {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../guest/pv-module/nouveau");
        let patches: Vec<_> = fs::read_dir(folder).unwrap().flatten().map(|e| e.path()).collect();
        let patches: Vec<_> = patches.iter().filter(|p| p.extension().is_some_and(|e| e == "cocci")).collect();
        assert!(patches.len() > 5);
        for patch in patches {
            parse(&fs::read_to_string(patch).unwrap()).unwrap_or_else(|e| panic!("{}: {e}", patch.display()));
        }
    }
}
