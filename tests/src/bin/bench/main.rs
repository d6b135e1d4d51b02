//! `cargo xtask bench [NAME] [--json FILE] [--seconds N] [--only PART] [--resume]`: measures, beside a baseline in the same run.
//! Without a name, all of them; a name is that of one, or what stands before the `-` of several.

mod bars;
mod compute;
mod fv;
mod isolation;
mod lockhold;
mod pv;
mod sched;
mod sched_guests;
mod shadow;
mod swap;
mod transport;
mod xen;

use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::{Result, bail};
use tests::bench::{Metric, report};

/// Wishes of the caller.
#[derive(Default)]
struct Request {
    /// File for the figures; what else is written goes beside it.
    file: Option<PathBuf>,
    /// Time that each part is measured, where that can be chosen.
    seconds: Option<u64>,
    /// Leaves out the parts whose name contains none of these, with commas between, where there are such.
    only: Option<String>,
    /// Keeps the figures that the file has, where parts can be told apart.
    resume: bool,
}

impl Request {
    /// Returns whether a part is to be measured.
    fn wants(&self, part: &str) -> bool {
        self.only.as_deref().is_none_or(|only| only.split(',').any(|only| part.contains(only.trim())))
    }
}

/// A benchmark by name.
type Benchmark = (&'static str, fn(&Request) -> Result<Vec<Metric>>);

const BENCHMARKS: [Benchmark; 16] = [
    ("transport", |_| transport::run()),
    ("shadow", |_| shadow::run()),
    ("compute", |_| compute::run()),
    ("sched-sim", |request| sched::run(request.only.as_deref())),
    ("sched-guests", |_| sched_guests::run()),
    ("swap", |request| swap::run(request.file.as_deref())),
    ("fv", |_| fv::run()),
    ("lockhold", |_| lockhold::run()),
    ("pv", |request| pv::run(request.file.as_deref())),
    ("xen", |_| xen::run()),
    (isolation::ALL, |request| isolation::run(&isolation::POLICIES, request)),
    ("isolation-direct", |request| isolation::run(&["direct"], request)),
    ("isolation-fifo", |request| isolation::run(&["fifo"], request)),
    ("isolation-credit", |request| isolation::run(&["credit"], request)),
    ("isolation-band", |request| isolation::run(&["band"], request)),
    ("isolation-disengaged", |request| isolation::run(&["disengaged"], request)),
];

/// Whether a benchmark is one of those that `name` asks for.
fn is_of(known: &str, name: Option<&str>) -> bool {
    // One of them does what several do together, in one boot.
    let together = |of: &str| of == isolation::ALL || !of.starts_with(isolation::ALL);
    match name {
        None => together(known),
        Some(name) => {
            let rest = known.strip_prefix(name);
            rest.is_some_and(|rest| rest.is_empty() || (rest.starts_with('-') && name != isolation::ALL))
        }
    }
}

fn main() -> ExitCode {
    if let Err(error) = tests::children::end_with_parent() {
        eprintln!("bench: it goes on when whoever has started it is killed: {error}");
    }
    let mut name = None;
    let mut request = Request::default();
    let mut args = std::env::args().skip(1);
    while let Some(arg) = args.next() {
        match arg.as_str() {
            "--json" => request.file = args.next().map(PathBuf::from),
            "--seconds" => request.seconds = args.next().and_then(|seconds| seconds.parse().ok()),
            "--only" => request.only = args.next(),
            "--resume" => request.resume = true,
            _ => name = Some(arg),
        }
    }
    let run = || -> Result<()> {
        let chosen: Vec<_> = BENCHMARKS.iter().filter(|(known, _)| is_of(known, name.as_deref())).collect();
        if chosen.is_empty() {
            let names: Vec<_> = BENCHMARKS.iter().map(|(name, _)| *name).collect();
            bail!("there is no benchmark {:?}; there are: {}", name.unwrap_or_default(), names.join(" "));
        }
        let mut metrics = Vec::new();
        for (_, benchmark) in chosen {
            metrics.extend(benchmark(&request)?);
        }
        report(&metrics, request.file.as_deref())
    };
    match run() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("bench: {error:#}");
            ExitCode::FAILURE
        }
    }
}
