//! Generates an exported function for each driver API symbol, and the tables that these functions use.

use std::fmt::Write as _;
use std::path::Path;
use std::{env, fs};

use cuda_table::{families, symbols};

fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    // Do not set a soname: it would make ldconfig omit the NVML symbolic links from the loader's cache. The loader
    // finds the library by file name, and loads it only once, even if it is opened under several names. Never unload
    // the library, because its threads keep running after a program closes it.
    println!("cargo:rustc-cdylib-link-arg=-Wl,-z,nodelete");
    let out = env::var("OUT_DIR").expect("cargo names a folder");
    fs::write(Path::new(&out).join("stubs.rs"), stubs()).expect("the folder can be written");
}

fn stubs() -> String {
    let all: Vec<_> = symbols().collect();
    let mut text = String::new();
    let _ = writeln!(text, "/// Exported functions, in symbol order.");
    let _ = writeln!(text, "pub static ENTRIES: [unsafe extern \"C\" fn(); {}] = [", all.len());
    for index in 0..all.len() {
        let _ = writeln!(text, "    entry_{index},");
    }
    let _ = writeln!(text, "];\n/// Name, call index or -1, and a flag that is set for per-thread variants.");
    let _ = writeln!(text, "pub static SYMBOLS: [(&str, i32, bool); {}] = [", all.len());
    for (name, _, form) in &all {
        let call = cuda_calls::find(name).map_or(-1, |index| index as i32);
        let _ = writeln!(text, "    (\"{name}\", {call}, {}),", form.per_thread());
    }
    let _ = writeln!(text, "];\n/// Families, sorted by name: name, and version, kind and symbol of each variant.");
    let mut sorted: Vec<_> = families().map(|(_, family)| family).collect();
    sorted.sort_by_key(|family| family.name);
    let _ = writeln!(text, "pub static FAMILIES: &[crate::lookup::Family] = &[");
    for family in sorted {
        let _ = write!(text, "    (\"{}\", &[", family.name);
        for form in family.forms() {
            let symbol = format!("{}{}", family.name, form.suffix);
            let index = all.iter().position(|(name, ..)| *name == symbol).expect("a symbol of the table");
            let _ = write!(text, "({}, {}, {index}), ", form.version, form.per_thread());
        }
        let _ = writeln!(text, "]),");
    }
    let _ = writeln!(text, "];");
    for (index, (name, ..)) in all.iter().enumerate() {
        for (visibility, name) in [("#[unsafe(no_mangle)] pub", name.clone()), ("", format!("entry_{index}"))] {
            let _ = writeln!(
                text,
                "#[unsafe(naked)] {visibility} unsafe extern \"C\" fn {name}() {{ core::arch::naked_asm!(\"mov eax, \
                 {index}\", \"jmp {{common}}\", common = sym common) }}"
            );
        }
    }
    text
}
