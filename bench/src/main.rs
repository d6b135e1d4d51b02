//! `cargo xtask bench [NAME] [--json FILE] [--seconds N] [--rounds N] [--only PART] [--resume]`: runs benchmarks, each
//! together with a baseline in the same run. Without a name, all benchmarks run. A name selects one benchmark, or all
//! benchmarks with this prefix before a `-`. Results are written to the file immediately, and `--resume` continues an
//! interrupted run after the last complete benchmark.
//!
//! `--all --json FOLDER` creates one file per benchmark, as in `bench/results`. The command continues with the next
//! benchmark after a failure, and skips complete benchmarks with `--resume`. `pictures --json FOLDER` draws charts from
//! the files in the folder.
//!
//! [`report`] contains metrics with baseline and target, their file, and the measurement conditions. [`model`] contains
//! the costs of operations on a real host. [`rig::in_process_vm`] provides guests without a VMM. The harness in `tests`
//! provides real VMs and daemons.

mod bars;
mod compute;
mod costs;
mod doorbells;
mod evict;
mod fv;
mod gdev;
mod isolation;
mod lockhold;
mod model;
mod moves;
mod nested;
mod pv;
mod report;
mod sched;
mod sched_guests;
mod shadow;
mod swap;
mod transport;
mod xen;

use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Instant;

use anyhow::{Context, Result, bail, ensure};

use report::{Metric, Record, conditions, print};

/// Options set by the caller.
#[derive(Clone, Default)]
struct Request {
    /// File for the results. Other output is written next to it.
    file: Option<PathBuf>,
    /// Measured time in seconds, for parts with a configurable time.
    seconds: Option<u64>,
    /// Number of rounds, for parts with a configurable number of rounds.
    rounds: Option<usize>,
    /// Comma-separated words. In benchmarks with parts, only parts whose name contains one of the words run.
    only: Option<String>,
}

impl Request {
    /// Returns true if a part is selected.
    fn wants(&self, part: &str) -> bool {
        self.only.as_deref().is_none_or(|only| only.split(',').any(|only| part.contains(only.trim())))
    }
}

/// A benchmark and its name.
type Benchmark = (&'static str, fn(&Request, &mut Record) -> Result<Vec<Metric>>);

const BENCHMARKS: [Benchmark; 24] = [
    ("transport", |_, _| transport::run()),
    ("shadow", |_, _| shadow::run()),
    ("compute", |_, _| compute::run()),
    ("sched-sim", |request, _| sched::run(request.only.as_deref())),
    ("sched-guests", |request, record| sched_guests::run(request, record)),
    ("swap", |request, _| swap::run(request)),
    ("evict", |request, _| evict::run(request.only.as_deref())),
    ("fv", |request, _| fv::run(request)),
    ("doorbells", |_, _| doorbells::run()),
    ("lockhold", |_, _| lockhold::run()),
    ("move", |_, _| moves::run()),
    ("pv", |request, _| pv::run(request)),
    ("pv-contexts", |request, _| pv::contexts::run(request)),
    ("pv-dataflow", |request, _| pv::dataflow::run(request)),
    ("gdev", |request, _| gdev::run(request)),
    ("costs", |_, _| costs::run()),
    ("xen", |_, _| xen::run()),
    ("nested", |request, _| nested::run(request)),
    (isolation::ALL, |request, record| isolation::run(&isolation::POLICIES, request, record)),
    ("isolation-direct", |request, record| isolation::run(&["direct"], request, record)),
    ("isolation-fifo", |request, record| isolation::run(&["fifo"], request, record)),
    ("isolation-credit", |request, record| isolation::run(&["credit"], request, record)),
    ("isolation-band", |request, record| isolation::run(&["band"], request, record)),
    ("isolation-disengaged", |request, record| isolation::run(&["disengaged"], request, record)),
];

/// Returns true if `name` selects the benchmark `known`.
fn is_of(known: &str, name: Option<&str>) -> bool {
    // `ALL` runs several benchmarks with a single boot.
    let together = |of: &str| of == isolation::ALL || !of.starts_with(isolation::ALL);
    match name {
        None => together(known),
        Some(name) => {
            let rest = known.strip_prefix(name);
            rest.is_some_and(|rest| rest.is_empty() || (rest.starts_with('-') && name != isolation::ALL))
        }
    }
}

/// Name of the command that only draws charts.
const PICTURES: &str = "pictures";

/// Arguments of the program.
#[derive(Default)]
struct Arguments {
    name: Option<String>,
    resume: bool,
    all: bool,
    request: Request,
}

impl Arguments {
    fn parse(mut args: impl Iterator<Item = String>) -> Self {
        let mut parsed = Self::default();
        while let Some(arg) = args.next() {
            let request = &mut parsed.request;
            match arg.as_str() {
                "--json" => request.file = args.next().map(PathBuf::from),
                "--seconds" => request.seconds = args.next().and_then(|seconds| seconds.parse().ok()),
                "--rounds" => request.rounds = args.next().and_then(|rounds| rounds.parse().ok()),
                "--only" => request.only = args.next(),
                "--resume" => parsed.resume = true,
                "--all" => parsed.all = true,
                _ => parsed.name = Some(arg),
            }
        }
        parsed
    }
}

/// Runs a benchmark, unless the record already contains all of its figures.
fn make((known, benchmark): &Benchmark, request: &Request, record: &mut Record) -> Result<()> {
    // If this run covers only some parts, a later run may request the others.
    let whole = request.only.is_none();
    if whole && record.has_ended(known) {
        return Ok(());
    }
    let found = benchmark(request, record)?;
    record.put(found)?;
    if whole {
        record.end(known)?;
    }
    match &request.file {
        Some(file) => pv::picture::draw(file, record.metrics()),
        None => Ok(()),
    }
}

/// Runs all benchmarks, each with its own file in `folder`. Reports failures at the end.
fn all(benchmarks: &[Benchmark], folder: &Path, request: &Request, resume: bool) -> Result<()> {
    std::fs::create_dir_all(folder).with_context(|| format!("folder {}", folder.display()))?;
    let mut failed = Vec::new();
    for benchmark in benchmarks.iter().filter(|(known, _)| is_of(known, None)) {
        let (known, began) = (benchmark.0, Instant::now());
        let request = Request { file: Some(folder.join(format!("{known}.json"))), ..request.clone() };
        let made = Record::open(request.file.clone(), resume).and_then(|mut record| {
            make(benchmark, &request, &mut record)?;
            Ok(record)
        });
        eprintln!("bench: {known}: {:.0} s", began.elapsed().as_secs_f64());
        match made {
            Ok(record) => print(record.metrics()),
            Err(error) => {
                eprintln!("bench: {known}: {error:#}");
                failed.push(known);
            }
        }
    }
    ensure!(failed.is_empty(), "failed: {}; --resume runs these and keeps the other results", failed.join(" "));
    Ok(())
}

fn run(arguments: Arguments) -> Result<()> {
    let Arguments { name, resume, all: everything, request } = arguments;
    if everything {
        ensure!(
            name.is_none() && request.only.is_none(),
            "--all runs all benchmarks with all of their parts, and takes no names"
        );
        let folder = request.file.clone().context("--all needs --json FOLDER")?;
        return all(&BENCHMARKS, &folder, &request, resume);
    }
    if name.as_deref() == Some(PICTURES) {
        let folder = request.file.context("pictures needs --json FOLDER")?;
        for file in ["pv", "pv-contexts"].map(|name| folder.join(format!("{name}.json"))) {
            pv::picture::draw(&file, Record::open(Some(file.clone()), true)?.metrics())?;
        }
        return Ok(());
    }
    let chosen: Vec<_> = BENCHMARKS.iter().filter(|(known, _)| is_of(known, name.as_deref())).collect();
    if chosen.is_empty() {
        let names: Vec<_> = BENCHMARKS.iter().map(|(name, _)| *name).collect();
        bail!("there is no benchmark {:?}, expected one of: {}", name.unwrap_or_default(), names.join(" "));
    }
    let mut record = Record::open(request.file.clone(), resume)?;
    for benchmark in chosen {
        make(benchmark, &request, &mut record)?;
    }
    print(record.metrics());
    Ok(())
}

fn main() -> ExitCode {
    if let Err(error) = tests::children::end_with_parent() {
        eprintln!("bench: it continues if its parent process is killed: {error}");
    }
    conditions::note();
    match run(Arguments::parse(std::env::args().skip(1))) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("bench: {error:#}");
            ExitCode::FAILURE
        }
    }
}

#[cfg(test)]
mod unit {
    use std::cell::Cell;

    use super::*;

    thread_local! {
        static MADE: Cell<u32> = const { Cell::new(0) };
        static FAILS: Cell<bool> = const { Cell::new(true) };
    }

    fn works(_: &Request, _: &mut Record) -> Result<Vec<Metric>> {
        MADE.set(MADE.get() + 1);
        Ok(vec![Metric::plain("works", f64::from(MADE.get()), "times")])
    }

    /// Records one figure, and then fails if `FAILS` is set.
    fn breaks(_: &Request, record: &mut Record) -> Result<Vec<Metric>> {
        record.put(vec![Metric::plain("first", 1.0, "times")])?;
        ensure!(!FAILS.get(), "no host for it");
        Ok(vec![Metric::plain("second", 2.0, "times")])
    }

    #[test]
    fn failed_benchmark_does_not_stop_others_and_alone_is_resumed() {
        let folder = tempfile::tempdir().unwrap();
        let benchmarks: [Benchmark; 2] = [("breaks", breaks), ("works", works)];
        let request = Request::default();
        let error = all(&benchmarks, folder.path(), &request, false).unwrap_err().to_string();
        assert!(error.contains("breaks") && !error.contains("works"), "{error}");
        let of = |name: &str| Record::open(Some(folder.path().join(format!("{name}.json"))), true).unwrap();
        assert!(of("works").has_ended("works") && !of("breaks").has_ended("breaks"));
        assert_eq!(of("breaks").metrics().len(), 1, "its earlier results are kept");
        FAILS.set(false);
        all(&benchmarks, folder.path(), &request, true).unwrap();
        assert!(of("breaks").has_ended("breaks") && of("breaks").metrics().len() == 2);
        assert_eq!(of("works").metrics()[0].value, 1.0, "it was not measured again");
        all(&benchmarks, folder.path(), &request, false).unwrap();
        assert_eq!(of("works").metrics()[0].value, 2.0, "it is without --resume");
    }

    #[test]
    fn arguments_are_those_of_the_command_line() {
        let words = ["--all", "--json", "docs", "--resume"].map(str::to_owned);
        let Arguments { name, resume, all, request } = Arguments::parse(words.into_iter());
        assert_eq!((name, resume, all, request.file), (None, true, true, Some("docs".into())));
        assert!(run(Arguments { all: true, ..Arguments::default() }).is_err(), "no folder");
    }

    #[test]
    fn every_benchmark_is_a_part_of_a_night_or_of_another() {
        let alone = BENCHMARKS.iter().filter(|(known, _)| !is_of(known, None));
        assert!(alone.clone().count() > 0);
        assert!(alone.into_iter().all(|(known, _)| known.starts_with(isolation::ALL)));
        assert!(["pv", "pv-contexts", "pv-dataflow"].iter().all(|known| is_of(known, Some("pv"))));
    }
}
