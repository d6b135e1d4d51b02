//! `cargo xtask check`: all that can be found without running anything.

use anyhow::Result;

use crate::run::{cargo, root, shown};
use crate::tally::Tally;
use crate::{layers, lints, orphans};

/// Runs every check, also after one has failed; says whether all passed.
pub fn run() -> Result<bool> {
    let metadata = layers::metadata("Cargo.toml")?;
    let mut tally = Tally::default();
    let mut report = |name: &str, problems: &[String]| {
        for problem in problems {
            eprintln!("{name}: {problem}");
        }
        println!("check {name} ... {}", if problems.is_empty() { "ok" } else { "FAILED" });
        tally += Tally::one(problems.is_empty());
    };
    let mut tool = |name: &str, command: &mut std::process::Command| -> Result<()> {
        let problems = if shown(command)? { Vec::new() } else { vec![format!("{command:?} failed")] };
        report(name, &problems);
        Ok(())
    };

    tool("format", &mut cargo(&["fmt", "--all", "--check"]))?;
    let fuzz = root().join("tests/fuzz/Cargo.toml").exists();
    if fuzz {
        tool(
            "format of the fuzz targets",
            &mut cargo(&["fmt", "--manifest-path", "tests/fuzz/Cargo.toml", "--check"]),
        )?;
    }
    let mut clippy = cargo(&["clippy", "--workspace", "--all-targets", "--all-features", "--", "-D", "warnings"]);
    tool("clippy", &mut clippy)?;
    let mut doc = cargo(&["doc", "--workspace", "--no-deps"]);
    tool("rustdoc", doc.env("RUSTDOCFLAGS", "-D warnings"))?;

    let files = lints::files(&root())?;
    report("file sizes", &lints::sizes(&files));
    report("literal offsets", &lints::offsets(&files));
    report("comment tags", &lints::tags(&files, &lints::todo_codes(&root())));
    report("crate headers", &lints::headers(&metadata));
    report("orphaned files", &orphans::find(&metadata, &root(), &files)?);
    report("crate layers", &layers::layers(&metadata));
    let mut licences = layers::licences(&metadata);
    if fuzz {
        licences.extend(layers::licences(&layers::metadata("tests/fuzz/Cargo.toml")?));
    }
    report("licences", &licences);
    println!("{tally}");
    Ok(tally.good())
}
