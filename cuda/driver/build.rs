//! Generates tables of the symbols in the driver API and in NVML.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::path::Path;
use std::{env, fs};

use cuda_table::{Class, Family, NVML, families, symbols};

fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    let out = env::var("OUT_DIR").expect("cargo names a folder");
    fs::write(Path::new(&out).join("symbols.rs"), symbol_tables()).expect("the folder can be written");
}

/// Generates the tables of names, properties and forms.
fn symbol_tables() -> String {
    let all: Vec<_> = symbols().collect();
    let names: Vec<&str> = all.iter().map(|(name, ..)| name.as_str()).chain(NVML.iter().copied()).collect();
    let mut text = format!("pub const COUNT: usize = {};\npub const ALL: usize = {};\n", all.len(), names.len());
    let _ = writeln!(text, "pub static NAMES: [&CStr; ALL] = [");
    for name in &names {
        let _ = writeln!(text, "    c\"{name}\",");
    }
    let _ = writeln!(text, "];\npub static GATED: [bool; COUNT] = [");
    for (_, class, _) in &all {
        let _ = writeln!(text, "    {},", matches!(class, Class::Submit | Class::Copy));
    }
    let _ = writeln!(text, "];\npub static COPIES: [bool; COUNT] = [");
    for (_, class, _) in &all {
        let _ = writeln!(text, "    {},", matches!(class, Class::Copy));
    }
    let _ = writeln!(text, "];\npub static PER_THREAD: [bool; COUNT] = [");
    for (name, ..) in &all {
        let _ = writeln!(text, "    {},", name.ends_with("_ptsz") || name.ends_with("_ptds"));
    }
    let _ = writeln!(text, "];\npub static NAMES_MEMORY: [bool; COUNT] = [");
    for (_, class, _) in &all {
        let _ = writeln!(text, "    {},", matches!(class, Class::Graph | Class::Texture | Class::Pointer));
    }
    let _ = writeln!(text, "];\npub mod at {{");
    for (index, name) in names.iter().enumerate() {
        let _ = writeln!(text, "    pub const {name}: usize = {index};");
    }
    let _ = writeln!(text, "}}");
    text + &forms(&all.iter().enumerate().map(|(index, (name, ..))| (name.as_str(), index)).collect())
}

/// Generates the table of names without suffixes and their forms, sorted by the names' bytes.
fn forms(index: &BTreeMap<&str, usize>) -> String {
    let mut sorted: Vec<&Family> = families().map(|(_, family)| family).collect();
    sorted.sort_by_key(|family| family.name);
    let mut text =
        "pub type Forms = &'static [(u32, bool, usize)];\npub static FAMILIES: &[(&[u8], Forms)] = &[\n".to_owned();
    for family in sorted {
        let _ = write!(text, "    (b\"{}\", &[", family.name);
        for form in family.forms() {
            let at = index[format!("{}{}", family.name, form.suffix).as_str()];
            let _ = write!(text, "({}, {}, {at}), ", form.version, form.per_thread());
        }
        let _ = writeln!(text, "]),");
    }
    text + "];\n"
}
