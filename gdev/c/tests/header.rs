//! Checks that the committed header is up to date.

use std::process::Command;

#[test]
fn header_is_the_one_of_the_functions() {
    let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/");
    let config = cbindgen::Config::from_file(format!("{folder}cbindgen.toml")).expect("its settings");
    let bindings = cbindgen::Builder::new().with_config(config).with_crate(folder).generate().expect("a header");
    let mut made = Vec::new();
    bindings.write(&mut made);
    let committed = std::fs::read_to_string(format!("{folder}include/gdev.h")).expect("the header");
    let advice = "cargo run -p gdev-c --example gdev_header > gdev/c/include/gdev.h";
    assert!(String::from_utf8_lossy(&made) == committed, "the header is stale: {advice}");
}

#[test]
fn header_compiles_as_c_and_cpp() {
    let header = concat!(env!("CARGO_MANIFEST_DIR"), "/include/gdev.h");
    for language in ["c", "c++"] {
        let mut compiler = Command::new("cc");
        compiler.args(["-fsyntax-only", "-Wall", "-Wextra", "-Werror", "-x", language, header]);
        let output = compiler.output().expect("a C compiler");
        assert!(output.status.success(), "{language}: {}", String::from_utf8_lossy(&output.stderr));
    }
}

#[test]
fn kernel_of_the_example_assembles() {
    let program = sm20::assemble(include_str!("../examples/c/add.sm20")).expect("a program");
    assert_eq!(program.kernel("add").expect("add").params, 24);
    let raw = sm20::Program::from_raw(&program.bytes(), program.kernels.clone()).expect("whole");
    assert_eq!(raw, program);
}
