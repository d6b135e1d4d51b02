//! Generates an exported function for each driver API and NVML symbol in the table.

use std::fmt::Write as _;
use std::path::Path;
use std::{env, fs};

use cuda_table::{NVML, symbols};

fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    // Programs that link to the library refer to it by its soname, which the loader uses as a file name.
    println!("cargo:rustc-cdylib-link-arg=-Wl,-soname,libcuda.so.1");
    // A program may close the library while its threads still run.
    println!("cargo:rustc-cdylib-link-arg=-Wl,-z,nodelete");
    let out = env::var("OUT_DIR").expect("cargo names a folder");
    fs::write(Path::new(&out).join("stubs.rs"), stubs()).expect("the folder can be written");
}

/// Returns the source code of the exported functions and of their dispatch tables.
fn stubs() -> String {
    let all: Vec<_> = symbols().collect();
    let names: Vec<&str> = all.iter().map(|(name, ..)| name.as_str()).chain(NVML.iter().copied()).collect();
    let mut text = String::new();
    for (table, stub) in [("GATES", "gate"), ("PRESENTS", "present"), ("DEVICES", "device")] {
        let _ = writeln!(text, "pub static {table}: [unsafe extern \"C\" fn(); COUNT] = [");
        for index in 0..all.len() {
            let _ = writeln!(text, "    {stub}_{index},");
        }
        let _ = writeln!(text, "];");
    }
    let _ = writeln!(text, "/// This library's own entry points, even if another library exports the same symbols.");
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
        // In a forked child, the page is zero, and the stub takes the lazy path.
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
        for kind in ["gate", "present", "device"] {
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
