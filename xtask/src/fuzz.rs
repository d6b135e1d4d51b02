//! The fuzz suite: runs each target in `tests/fuzz` with its seed corpus for a limited time.
//!
//! The targets have the layout of cargo-fuzz, but need neither cargo-fuzz nor a nightly toolchain: the flags below
//! enable an LLVM coverage pass, and the `libfuzzer-sys` crate provides the driver.

use std::num::NonZero;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::{fs, thread};

use anyhow::{Context, Result, anyhow, bail};

use crate::TestArgs;
use crate::orphans::{FuzzTarget, fuzz_targets};
use crate::run::{cargo, root, shown, target};
use crate::tally::Tally;

/// Target triple, passed explicitly so that the flags do not apply to build scripts and procedural macros.
const TRIPLE: &str = "x86_64-unknown-linux-gnu";

/// Flags that enable coverage for libFuzzer, and all checks that release builds omit.
const RUSTFLAGS: [&str; 8] = [
    "-Cpasses=sancov-module",
    "-Cllvm-args=-sanitizer-coverage-level=4",
    "-Cllvm-args=-sanitizer-coverage-inline-8bit-counters",
    "-Cllvm-args=-sanitizer-coverage-pc-table",
    "-Cllvm-args=-sanitizer-coverage-trace-compares",
    "--cfg=fuzzing",
    "-Cdebug-assertions=yes",
    "-Coverflow-checks=yes",
];

/// Memory limit in MiB. A target that exceeds it probably allocates as much memory as its input requests.
const MEMORY_LIMIT_MIB: u32 = 2048;
/// Time limit per input in seconds. An input that takes longer counts as a hang.
const INPUT_LIMIT: u32 = 25;

/// Builds all targets. `jobs` limits the number of parallel compilers.
pub fn build(jobs: Option<usize>) -> Result<()> {
    let mut build = cargo(&["build", "--release", "--manifest-path", "tests/fuzz/Cargo.toml", "--bins"]);
    build.args(["--target", TRIPLE]).arg("--target-dir").arg(folder());
    build.env("RUSTFLAGS", RUSTFLAGS.join(" ")).env_remove("CARGO_ENCODED_RUSTFLAGS");
    if let Some(jobs) = jobs {
        // Build quietly, because tests print their output concurrently.
        build.arg(format!("--jobs={jobs}")).arg("--quiet");
    }
    if !shown(&mut build)? {
        bail!("the fuzz targets do not build");
    }
    Ok(())
}

/// Runs the requested targets, which must have been built. Each target counts as one test.
pub fn run(args: &TestArgs) -> Result<Tally> {
    let mut targets = fuzz_targets(&root())?;
    if let Some(filter) = &args.filter {
        targets.retain(|t| t.name.contains(filter));
    }
    if targets.is_empty() {
        bail!("tests/fuzz/Cargo.toml lists no such target");
    }
    let folder = folder();
    // Run one target per CPU at a time. All targets take the same time.
    let workers = thread::available_parallelism().map_or(1, NonZero::get);
    let work = |first: usize| -> Result<Tally> {
        let mut tally = Tally::default();
        for one in targets.iter().skip(first).step_by(workers) {
            tally += Tally::one(run_target(one, &folder, args.fuzz_seconds)?);
        }
        Ok(tally)
    };
    thread::scope(|scope| {
        let workers: Vec<_> = (0..workers).map(|first| scope.spawn(move || work(first))).collect();
        let mut tally = Tally::default();
        for worker in workers {
            tally += worker.join().map_err(|_| anyhow!("a thread that runs fuzz targets has panicked"))??;
        }
        Ok(tally)
    })
}

fn folder() -> PathBuf {
    target().join("fuzz")
}

fn run_target(one: &FuzzTarget, folder: &Path, seconds: u32) -> Result<bool> {
    // Write new inputs to a separate corpus, so that the seeds in the repository do not change.
    let found = folder.join("corpus").join(&one.name);
    let crashes = folder.join("artifacts").join(&one.name);
    for path in [&found, &crashes] {
        fs::create_dir_all(path).with_context(|| format!("cannot create {}", path.display()))?;
    }
    let mut command = Command::new(folder.join(TRIPLE).join("release").join(&one.name));
    command.current_dir(root()).arg(format!("-max_total_time={seconds}")).arg(format!("-timeout={INPUT_LIMIT}"));
    command.arg(format!("-rss_limit_mb={MEMORY_LIMIT_MIB}")).arg("-print_final_stats=1").arg("-verbosity=0");
    command.arg(format!("-artifact_prefix={}/", crashes.display())).arg(found);
    let seeds = root().join("tests/fuzz/corpus").join(&one.name);
    if seeds.is_dir() {
        command.arg(seeds);
    }
    println!("fuzz {} for {seconds} s", one.name);
    let ended = command.stdin(Stdio::null()).output().with_context(|| format!("cannot start {}", one.name))?;
    let passed = ended.status.success();
    // Print with a single write, because other targets run concurrently. libFuzzer prints all output to standard error.
    let text = String::from_utf8_lossy(&ended.stderr);
    let advice = if passed { String::new() } else { format!("the failing input is in {}\n", crashes.display()) };
    println!("{text}{advice}fuzz {} ... {}", one.name, if passed { "ok" } else { "FAILED" });
    Ok(passed)
}
