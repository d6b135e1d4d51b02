//! Generates an exported function for each NVML symbol that the crate does not implement.

use std::collections::BTreeSet;
use std::fmt::Write as _;
use std::path::Path;
use std::{env, fs};

fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    let mut own = BTreeSet::new();
    for file in ["src/answers.rs", "src/forwarded.rs"] {
        println!("cargo:rerun-if-changed={file}");
        let text = fs::read_to_string(file).expect("a file of this crate");
        own.extend(text.split(|c: char| !c.is_ascii_alphanumeric() && c != '_').map(str::to_owned));
    }
    let mut text = String::new();
    for name in cuda_table::NVML.iter().filter(|name| !own.contains(**name)) {
        let _ = writeln!(text, "#[unsafe(no_mangle)] pub extern \"C\" fn {name}() -> i32 {{ refuse() }}");
    }
    let out = env::var("OUT_DIR").expect("cargo names a folder");
    fs::write(Path::new(&out).join("refused.rs"), text).expect("the folder can be written");
}
