//! `cargo xtask bench [NAME] [--json FILE] [--seconds N] [--only PART] [--resume]`: measures, beside a baseline in the same run.
//! Without a name, all of them; a name is that of one, or what stands before the `-` of several. What is known is in the file at
//! once, and a run that was cut short goes on with `--resume` behind the last benchmark that had ended.

mod bars;
mod compute;
mod doorbells;
mod evict;
mod fv;
mod isolation;
mod lockhold;
mod moves;
mod nested;
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
use tests::bench::{Metric, Record, conditions, print};

/// Wishes of the caller.
#[derive(Default)]
struct Request {
    /// File for the figures; what else is written goes beside it.
    file: Option<PathBuf>,
    /// Time that each part is measured, where that can be chosen.
    seconds: Option<u64>,
    /// Leaves out the parts whose name contains none of these, with commas between, where there are such.
    only: Option<String>,
}

impl Request {
    /// Returns whether a part is to be measured.
    fn wants(&self, part: &str) -> bool {
        self.only.as_deref().is_none_or(|only| only.split(',').any(|only| part.contains(only.trim())))
    }
}

/// A benchmark by name.
type Benchmark = (&'static str, fn(&Request, &mut Record) -> Result<Vec<Metric>>);

const BENCHMARKS: [Benchmark; 20] = [
    ("transport", |_, _| transport::run()),
    ("shadow", |_, _| shadow::run()),
    ("compute", |_, _| compute::run()),
    ("sched-sim", |request, _| sched::run(request.only.as_deref())),
    ("sched-guests", |request, record| sched_guests::run(request, record)),
    ("swap", |request, _| swap::run(request.file.as_deref())),
    ("evict", |request, _| evict::run(request.only.as_deref())),
    ("fv", |request, _| fv::run(request)),
    ("doorbells", |_, _| doorbells::run()),
    ("lockhold", |_, _| lockhold::run()),
    ("move", |_, _| moves::run()),
    ("pv", |request, _| pv::run(request.file.as_deref())),
    ("xen", |_, _| xen::run()),
    ("nested", |request, _| nested::run(request)),
    (isolation::ALL, |request, record| isolation::run(&isolation::POLICIES, request, record)),
    ("isolation-direct", |request, record| isolation::run(&["direct"], request, record)),
    ("isolation-fifo", |request, record| isolation::run(&["fifo"], request, record)),
    ("isolation-credit", |request, record| isolation::run(&["credit"], request, record)),
    ("isolation-band", |request, record| isolation::run(&["band"], request, record)),
    ("isolation-disengaged", |request, record| isolation::run(&["disengaged"], request, record)),
];

/// Returns whether a benchmark is one of those that `name` asks for.
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
    conditions::note();
    let (mut name, mut resume) = (None, false);
    let mut request = Request::default();
    let mut args = std::env::args().skip(1);
    while let Some(arg) = args.next() {
        match arg.as_str() {
            "--json" => request.file = args.next().map(PathBuf::from),
            "--seconds" => request.seconds = args.next().and_then(|seconds| seconds.parse().ok()),
            "--only" => request.only = args.next(),
            "--resume" => resume = true,
            _ => name = Some(arg),
        }
    }
    let run = || -> Result<()> {
        let chosen: Vec<_> = BENCHMARKS.iter().filter(|(known, _)| is_of(known, name.as_deref())).collect();
        if chosen.is_empty() {
            let names: Vec<_> = BENCHMARKS.iter().map(|(name, _)| *name).collect();
            bail!("there is no benchmark {:?}; there are: {}", name.unwrap_or_default(), names.join(" "));
        }
        let mut record = Record::open(request.file.clone(), resume)?;
        // Of one that measures parts only, another call may want others.
        let whole = request.only.is_none();
        for (known, benchmark) in chosen {
            if whole && record.has_ended(known) {
                continue;
            }
            let found = benchmark(&request, &mut record)?;
            record.put(found)?;
            if whole {
                record.end(known)?;
            }
        }
        print(record.metrics());
        Ok(())
    };
    match run() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("bench: {error:#}");
            ExitCode::FAILURE
        }
    }
}
