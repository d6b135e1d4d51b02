//! Reads the `.modinfo` sections of kernel modules, and orders modules after their dependencies.
//!
//! The packages do not contain `modules.dep`, so the dependencies are read from the modules. A dependency without a
//! module file is assumed to be built into the kernel.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::io::Read;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, anyhow, bail};
use liblzma::read::XzDecoder;
use object::{Object, ObjectSection};

/// Maximum size of an uncompressed module in bytes.
const MAX_MODULE_BYTES: u64 = 256 << 20;

/// A module in a dependency closure.
pub struct Module {
    /// Name of the module, with underscores.
    pub name: String,
    /// The uncompressed ELF file.
    pub bytes: Vec<u8>,
}

/// Reads `modules` and all their dependencies, dependencies first. Searches `folder` for `*.ko` and `*.ko.xz`.
pub fn closure(folder: &Path, modules: &[&str]) -> Result<Vec<Module>> {
    let mut files = BTreeMap::new();
    collect(folder, &mut files)?;
    let (mut seen, mut order) = (BTreeSet::new(), Vec::new());
    for module in modules {
        visit(&normal(module), &files, &mut seen, &mut order)?;
        if !order.iter().any(|found| found.name == normal(module)) {
            bail!("the kernel package contains no module {module}");
        }
    }
    Ok(order)
}

fn visit(
    name: &str,
    files: &BTreeMap<String, PathBuf>,
    seen: &mut BTreeSet<String>,
    order: &mut Vec<Module>,
) -> Result<()> {
    if !seen.insert(name.to_owned()) {
        return Ok(());
    }
    let Some(path) = files.get(name) else { return Ok(()) };
    let bytes = read(path)?;
    for dependency in dependencies(&bytes).with_context(|| format!("module {}", path.display()))? {
        visit(&dependency, files, seen, order)?;
    }
    order.push(Module { name: name.to_owned(), bytes });
    Ok(())
}

fn collect(folder: &Path, files: &mut BTreeMap<String, PathBuf>) -> Result<()> {
    for entry in fs::read_dir(folder).with_context(|| format!("cannot read {}", folder.display()))? {
        let path = entry?.path();
        if path.is_dir() {
            collect(&path, files)?;
            continue;
        }
        let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        if let Some(stem) = name.strip_suffix(".ko").or_else(|| name.strip_suffix(".ko.xz")) {
            files.insert(normal(stem), path);
        }
    }
    Ok(())
}

fn read(path: &Path) -> Result<Vec<u8>> {
    let name = || format!("cannot read {}", path.display());
    let raw = fs::read(path).with_context(name)?;
    if path.extension().is_none_or(|e| e != "xz") {
        return Ok(raw);
    }
    let mut bytes = Vec::new();
    XzDecoder::new(&raw[..]).take(MAX_MODULE_BYTES).read_to_end(&mut bytes).with_context(name)?;
    Ok(bytes)
}

/// Returns a module's name with underscores, because the kernel does not distinguish between `-` and `_`.
pub fn normal(name: &str) -> String {
    name.replace('-', "_")
}

fn dependencies(elf: &[u8]) -> Result<Vec<String>> {
    let file = object::File::parse(elf).context("not an ELF file")?;
    let section = file.section_by_name(".modinfo").ok_or_else(|| anyhow!("no .modinfo section"))?;
    Ok(parse(section.data().context("unreadable .modinfo section")?))
}

/// Returns the dependencies in a section of NUL-terminated strings: the modules in `depends=`, and those in
/// `softdep=pre:` before `post:`.
fn parse(modinfo: &[u8]) -> Vec<String> {
    let mut names = Vec::new();
    for entry in modinfo.split(|b| *b == 0) {
        let entry = String::from_utf8_lossy(entry);
        if let Some(list) = entry.strip_prefix("depends=") {
            names.extend(list.split(',').filter(|n| !n.is_empty()).map(normal));
        } else if let Some(list) = entry.strip_prefix("softdep=") {
            let before = list.split("post:").next().unwrap_or_default();
            if let Some((_, before)) = before.split_once("pre:") {
                names.extend(before.split_whitespace().map(normal));
            }
        }
    }
    names
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn depends_and_soft_dependencies_are_found() {
        let section = b"license=GPL\0depends=drm,mxm-wmi\0softdep=pre: a b post: c\0depends=\0";
        assert_eq!(parse(section), ["drm", "mxm_wmi", "a", "b"]);
        assert!(parse(b"softdep=post: c\0").is_empty());
    }

    #[test]
    fn invalid_module_is_rejected() {
        assert!(dependencies(b"not an elf file").is_err());
    }

    #[test]
    fn an_absent_module_is_named() {
        let folder = tempfile::tempdir().unwrap();
        let error = closure(folder.path(), &["nouveau"]).err().unwrap();
        assert!(error.to_string().contains("no module nouveau"));
    }
}
