//! `cargo xtask check`: all checks that do not run tests.

use anyhow::Result;

use crate::run::{cargo, root, shown};
use crate::tally::Tally;
use crate::{counts, language, layers, lints, orphans, programs, rooms};

/// Manifest of the fuzz targets, which are a separate workspace.
const FUZZ: &str = "tests/fuzz/Cargo.toml";

/// Runs every check, even after a failure. Returns true if all checks passed. If `lints_only` is true, skips the checks
/// that run the toolchain's tools.
pub fn run(lints_only: bool) -> Result<bool> {
    let metadata = layers::metadata("Cargo.toml")?;
    let mut tally = Tally::default();
    let mut report = |name: &str, problems: &[String]| {
        for problem in problems {
            eprintln!("{name}: {problem}");
        }
        println!("check {name} ... {}", if problems.is_empty() { "ok" } else { "FAILED" });
        tally += Tally::one(problems.is_empty());
    };
    if !lints_only {
        for (name, passed) in tools()? {
            let problems = if passed { Vec::new() } else { vec!["see above".to_owned()] };
            report(name, &problems);
        }
    }

    let files = lints::files(&root())?;
    report("file sizes", &lints::sizes(&files));
    report("literal offsets", &lints::offsets(&files));
    report("unchecked waits", &lints::unchecked_waits(&files));
    report("comment tags", &lints::tags(&files, &lints::todo_codes(&root())));
    report("doc comments", &lints::openers(&files));
    report("test names", &lints::test_names(&files));
    report("wide comments", &lints::wide_comments(&files));
    report("module files", &lints::module_files(&files));
    report("crate headers", &lints::headers(&metadata));
    report("orphaned files", &orphans::find(&metadata, &root(), &files)?);
    report("crate layers", &layers::layers(&metadata));
    report("imports of modules", &rooms::circles(&files));
    report("crate sizes", &rooms::sizes(&files));
    report("public items", &rooms::unnamed(&files));
    report("the software card", &rooms::knowing(&files));
    report("counts", &counts::never_counted(&files));
    report("language", &language::problems(&metadata, &files)?);
    let mut licences = layers::licences(&metadata)?;
    if root().join(FUZZ).exists() {
        licences.extend(layers::licences(&layers::metadata(FUZZ)?)?);
    }
    report("licences", &licences);
    println!("{tally}");
    Ok(tally.good())
}

/// Folders of the packages with a test that generates part of the documentation.
const PACKAGES_WITH_PAGES: [&str; 4] = ["mediator/config", "mediator/ctl", "mediator/metrics", "xtask/pages"];

/// Runs the tests that generate parts of the documentation. They compare these parts with the code, or rewrite the
/// parts if `write` is true. Returns true if all tests passed.
pub fn generated_pages(write: bool) -> Result<bool> {
    let mut passed = true;
    for program in programs::build_libraries()? {
        if !PACKAGES_WITH_PAGES.iter().any(|folder| program.is_in(&root().join(folder))) {
            continue;
        }
        let mut command = program.command();
        if write {
            command.env(doc_pages::WRITE, "1");
        }
        passed &= shown(command.args(["--quiet", "generated_"]))?;
    }
    Ok(passed)
}

/// Runs rustfmt, clippy, rustdoc, and the tests of generated pages. Returns the name of each check, with a flag that is
/// true if it passed.
fn tools() -> Result<Vec<(&'static str, bool)>> {
    let mut results = vec![("format", shown(&mut cargo(&["fmt", "--all", "--check"]))?)];
    if root().join(FUZZ).exists() {
        let mut format = cargo(&["fmt", "--manifest-path", FUZZ, "--check"]);
        results.push(("format of the fuzz targets", shown(&mut format)?));
    }
    let mut clippy = cargo(&["clippy", "--workspace", "--all-targets", "--all-features", "--", "-D", "warnings"]);
    results.push(("clippy", shown(&mut clippy)?));
    let mut doc = cargo(&["doc", "--workspace", "--no-deps"]);
    results.push(("rustdoc", shown(doc.env("RUSTDOCFLAGS", "-D warnings"))?));
    results.push(("generated pages", generated_pages(false)?));
    Ok(results)
}
