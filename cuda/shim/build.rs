//! Generates one exported function for each symbol of the driver API and of NVML from the table.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::path::Path;
use std::{env, fs};

use cuda_table::{Class, Family, NVML, families, symbols};

fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    // The loader finds a library by its file name, and programs that are linked find it by this one.
    println!("cargo:rustc-cdylib-link-arg=-Wl,-soname,libcuda.so.1");
    // A program may close the library, whose thread runs on.
    println!("cargo:rustc-cdylib-link-arg=-Wl,-z,nodelete");
    let out = env::var("OUT_DIR").expect("cargo names a folder");
    for (name, text) in [("symbols.rs", symbol_tables()), ("stubs.rs", stubs())] {
        fs::write(Path::new(&out).join(name), text).expect("the folder can be written");
    }
}

/// Names, properties and forms of all symbols.
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

/// The exported functions, and the tables of functions behind them.
fn stubs() -> String {
    let all: Vec<_> = symbols().collect();
    let names: Vec<&str> = all.iter().map(|(name, ..)| name.as_str()).chain(NVML.iter().copied()).collect();
    let mut text = String::new();
    for (table, stub) in [("GATES", "gate"), ("PRESENTS", "present")] {
        let _ = writeln!(text, "pub static {table}: [unsafe extern \"C\" fn(); COUNT] = [");
        for index in 0..all.len() {
            let _ = writeln!(text, "    {stub}_{index},");
        }
        let _ = writeln!(text, "];");
    }
    let _ = writeln!(text, "/// Entries of this library alone, whatever other libraries export.");
    let _ = writeln!(text, "pub static ENTRIES: [unsafe extern \"C\" fn(); COUNT] = [");
    for index in 0..all.len() {
        let _ = writeln!(text, "    entry_{index},");
    }
    let _ = writeln!(text, "];\npub static SLOTS: [AtomicPtr<()>; ALL] = [");
    for index in 0..names.len() {
        let _ = writeln!(text, "    AtomicPtr::new(lazy_{index} as *mut ()),");
    }
    let _ = writeln!(text, "];");
    for (index, name) in names.iter().enumerate() {
        // A child of the process finds the page empty.
        let code = format!(
            "cmp dword ptr [rip + {{page}}], 0\", \"je {{lazy}}\", \"jmp qword ptr [rip + {{slots}} + 8 * {index}]"
        );
        let operands = format!("page = sym crate::fork::PAGE, lazy = sym lazy_{index}, slots = sym SLOTS");
        stub(&mut text, "#[unsafe(no_mangle)] pub", name, &code, &operands);
        if index < all.len() {
            stub(&mut text, "", &format!("entry_{index}"), &code, &operands);
        }
        stub(
            &mut text,
            "",
            &format!("lazy_{index}"),
            &format!("push {index}\", \"jmp {{common}}"),
            "common = sym lazy_common",
        );
        if index >= all.len() {
            continue;
        }
        for kind in ["gate", "present"] {
            stub(
                &mut text,
                "",
                &format!("{kind}_{index}"),
                &format!("push {index}\", \"jmp {{common}}"),
                &format!("common = sym {kind}_common"),
            );
        }
    }
    text
}

fn stub(text: &mut String, visibility: &str, name: &str, code: &str, operand: &str) {
    let _ = writeln!(
        text,
        "#[unsafe(naked)] {visibility} unsafe extern \"C\" fn {name}() {{ core::arch::naked_asm!(\"{code}\", {operand}) }}"
    );
}

/// Names without endings, sorted by their bytes, each with its forms.
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
