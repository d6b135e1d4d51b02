//! `cargo xtask bench [NAME] [--json FILE]`: measures, beside a baseline in the same run. Without a name, all of them; a
//! name is that of one, or what stands before the `-` of several.

mod bars;
mod compute;
mod fv;
mod pv;
mod sched;
mod sched_guests;
mod shadow;
mod swap;
mod transport;

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::{Result, bail};
use tests::bench::{Metric, report};

/// A benchmark by name. It is told where its figures go, for what it writes beside them.
type Benchmark = (&'static str, fn(Option<&Path>) -> Result<Vec<Metric>>);

const BENCHMARKS: [Benchmark; 8] = [
    ("transport", |_| transport::run()),
    ("shadow", |_| shadow::run()),
    ("compute", |_| compute::run()),
    ("sched-sim", |_| sched::run()),
    ("sched-guests", |_| sched_guests::run()),
    ("swap", swap::run),
    ("fv", |_| fv::run()),
    ("pv", pv::run),
];

/// Whether a benchmark is one of those that `name` asks for.
fn is_of(known: &str, name: &str) -> bool {
    known.strip_prefix(name).is_some_and(|rest| rest.is_empty() || rest.starts_with('-'))
}

fn main() -> ExitCode {
    let mut name = None;
    let mut file = None;
    let mut args = std::env::args().skip(1);
    while let Some(arg) = args.next() {
        match arg.as_str() {
            "--json" => file = args.next().map(PathBuf::from),
            _ => name = Some(arg),
        }
    }
    let run = || -> Result<()> {
        let chosen: Vec<_> =
            BENCHMARKS.iter().filter(|(known, _)| name.as_deref().is_none_or(|name| is_of(known, name))).collect();
        if chosen.is_empty() {
            let names: Vec<_> = BENCHMARKS.iter().map(|(name, _)| *name).collect();
            bail!("there is no benchmark {:?}; there are: {}", name.unwrap_or_default(), names.join(" "));
        }
        let mut metrics = Vec::new();
        for (_, benchmark) in chosen {
            metrics.extend(benchmark(file.as_deref())?);
        }
        report(&metrics, file.as_deref())
    };
    match run() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("bench: {error:#}");
            ExitCode::FAILURE
        }
    }
}
