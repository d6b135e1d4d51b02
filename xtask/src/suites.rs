//! `cargo xtask test`: the suites, one after the other, each with its counts and times.

use std::process::Command;
use std::thread::available_parallelism;
use std::time::{Duration, Instant};

use anyhow::{Result, ensure};
use clap::ValueEnum;

use crate::background::{Background, Priority};
use crate::load::BusyLoops;
use crate::programs::{self, Group, Program};
use crate::run::{cargo, lines};
use crate::runner::{self, Manner, Outcome, Test, cpu_of_children};
use crate::tally::{Reader, Tally};
use crate::{TestArgs, cuda, fuzz, guests, times};

/// The package with a suite's integration test.
const PACKAGE: &str = "tests";

/// A test suite. A further one is a variant here and a line in [`Suite::runner`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Suite {
    /// Tests that need no guest: unit, property and integration tests of every crate but those of `cuda` and `fleet`.
    Unit,
    /// The crates of `cuda`: programs under the library, on the fake driver. Before the suites with guests, which wait for
    /// images.
    Cuda,
    /// Parts that engines which place work on hosts are given: the crates of `fleet`, as processes, and libvirt, Slurm and podman on a
    /// Debian host in namespaces.
    Fleet,
    /// Real guests that behave.
    Guest,
    /// Guests and clients that do not.
    Hostile,
    /// Faults, kills and restarts at any time.
    Chaos,
    /// A card behind VFIO, in a machine that has machines of its own.
    Nested,
    /// Domains of Xen with vGPUs, in a machine that is a host of Xen.
    Xen,
    /// Fuzz targets, each for a bounded time.
    Fuzz,
}

/// Runner of a suite.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Runner {
    /// The integration test of the crate `tests` that has the suite's name; with the images of guests, or without.
    Integration { guests: bool },
    /// All test programs but those, and the examples in documentation.
    Rest,
    /// The test programs of the crates of `cuda`, with NVIDIA's headers.
    Cuda,
    /// The test programs of the crates of `fleet`, then the integration test `fleet`.
    Fleet,
    /// The fuzz targets.
    Fuzz,
}

impl Suite {
    fn runner(self) -> Runner {
        match self {
            Self::Unit => Runner::Rest,
            Self::Guest | Self::Hostile | Self::Chaos | Self::Nested | Self::Xen => {
                Runner::Integration { guests: true }
            }
            Self::Cuda => Runner::Cuda,
            Self::Fleet => Runner::Fleet,
            Self::Fuzz => Runner::Fuzz,
        }
    }

    /// Returns how many of its tests with guests run at the same time on so many CPUs, but for those that are to be
    /// [alone](is_alone).
    fn guests_at_once(self, cpus: usize) -> usize {
        match self {
            // Much of such a test is one guest's boot, which takes one CPU, as a machine that is a host of Xen does.
            Self::Guest | Self::Hostile | Self::Chaos | Self::Fleet | Self::Xen => cpus.clamp(1, 8),
            // A machine that has machines of its own takes several CPUs by itself.
            _ => (cpus / 2).clamp(1, 8),
        }
    }

    /// Limit of one of its tests: several times what the longest takes beside busy loops.
    fn limit(self) -> Duration {
        Duration::from_secs(match self {
            Self::Unit | Self::Cuda | Self::Fuzz => 600,
            Self::Fleet | Self::Guest | Self::Hostile | Self::Chaos | Self::Nested | Self::Xen => 1500,
        })
    }

    fn name(self) -> String {
        self.to_possible_value().map(|v| v.get_name().to_owned()).unwrap_or_default()
    }
}

/// A suite that has run.
pub struct Ran {
    pub name: String,
    pub outcome: Outcome,
    /// From start to end, with what had to be built for it.
    pub elapsed: Duration,
    /// CPU time of all that was started for it.
    pub cpu: Duration,
}

/// Runs the suite that was asked for, or all; says whether nothing failed.
pub fn run(args: &TestArgs) -> Result<bool> {
    let suites: Vec<Suite> = args.suite.map_or_else(|| Suite::value_variants().to_vec(), |suite| vec![suite]);
    let mut session = Session::start(args, &suites);
    if args.beside_load > 0 {
        // It is tests that run beside a load, and what they need is made before.
        session.make()?;
    }
    let _loops = BusyLoops::start(args.beside_load);
    let mut ran = Vec::new();
    for suite in &suites {
        println!("suite {}", suite.name());
        let (began, cpu) = (Instant::now(), cpu_of_children());
        // What keeps one suite from running is its failure, and the others go on.
        let outcome = session.run(*suite).unwrap_or_else(|error| {
            eprintln!("error: suite {}: {error:#}", suite.name());
            Outcome { tally: Tally::one(false), ..Outcome::default() }
        });
        println!("suite {}: {}", suite.name(), outcome.tally);
        let (elapsed, cpu) = (began.elapsed(), cpu_of_children().saturating_sub(cpu));
        ran.push(Ran { name: suite.name(), outcome, elapsed, cpu });
    }
    times::print(&ran);
    let mut total = Tally::default();
    ran.iter().for_each(|ran| total += ran.outcome.tally);
    println!("{total}");
    Ok(total.good())
}

/// One run of suites, and what they share.
struct Session<'a> {
    args: &'a TestArgs,
    /// Built when they are first asked for.
    programs: Option<Vec<Program>>,
    /// Images for guests, if any suite has guests.
    images: Option<Background>,
    /// NVIDIA's headers, if the crates of `cuda` are tested.
    headers: Option<Background>,
    /// Set when the fuzz suite is to come.
    fuzzes: bool,
    /// The fuzz targets, once they are being built beside another suite.
    targets: Option<Background>,
}

impl<'a> Session<'a> {
    fn start(args: &'a TestArgs, suites: &[Suite]) -> Self {
        let any = |runner: Runner| suites.iter().any(|suite| suite.runner() == runner);
        // Fetched and made beside the first build and the suites without guests.
        let guests = any(Runner::Integration { guests: true }) || any(Runner::Fleet);
        let images = guests.then(guests::images);
        let headers = any(Runner::Cuda).then(|| Background::start(Priority::Behind, || cuda::headers().map(drop)));
        Self { args, programs: None, images, headers, fuzzes: any(Runner::Fuzz), targets: None }
    }

    /// Makes now what is made otherwise when it is first asked for, but for the fuzz targets.
    fn make(&mut self) -> Result<()> {
        self.programs(|_| false)?;
        self.headers.iter_mut().chain(&mut self.images).try_for_each(Background::wait)
    }

    fn run(&mut self, suite: Suite) -> Result<Outcome> {
        let cpus = available_parallelism().map_or(1, usize::from);
        let manner = Manner { at_once: cpus, limit: suite.limit(), variables: &[] };
        match suite.runner() {
            Runner::Rest => {
                let programs = self.programs(|program| suite_of(program).is_none() && program.group == Group::Rest)?;
                let mut outcome = self.run_tests(&programs, &manner)?;
                outcome.tally += self.documentation()?;
                Ok(outcome)
            }
            Runner::Integration { guests } => {
                let programs = self.programs(|program| suite_of(program) == Some(suite))?;
                ensure!(!programs.is_empty(), "tests/tests/{}.rs does not exist", suite.name());
                self.integration(suite, &programs, manner, guests)
            }
            Runner::Fleet => {
                let programs = self.programs(|program| program.group == Group::Fleet)?;
                let mut outcome = self.run_tests(&programs, &manner)?;
                let hosts = self.programs(|program| suite_of(program) == Some(suite))?;
                outcome += self.integration(suite, &hosts, manner, true)?;
                Ok(outcome)
            }
            Runner::Cuda => {
                let programs = self.programs(|program| program.group == Group::Cuda)?;
                if let Some(headers) = &mut self.headers {
                    headers.wait()?;
                }
                let headers = cuda::headers()?;
                let variables = [(cuda::HEADERS_VARIABLE, headers.as_os_str())];
                self.run_tests(&programs, &Manner { variables: &variables, ..manner })
            }
            Runner::Fuzz => {
                match &mut self.targets {
                    Some(targets) => targets.wait()?,
                    None => fuzz::build(None)?,
                }
                Ok(Outcome { tally: fuzz::run(self.args)?, ..Outcome::default() })
            }
        }
    }

    /// Runs an integration test of the crate `tests`; with the images of guests, or without.
    fn integration(&mut self, suite: Suite, programs: &[Program], manner: Manner<'_>, guests: bool) -> Result<Outcome> {
        if let Some(images) = self.images.as_mut().filter(|_| guests) {
            images.wait()?;
        }
        if self.fuzzes && self.targets.is_none() {
            // A guest that boots alone leaves a part of the processors.
            self.targets = Some(Background::start(Priority::Behind, || fuzz::build(Some(1))));
        }
        let at_once = if guests { suite.guests_at_once(manner.at_once) } else { manner.at_once };
        let at_once = self.args.guest_threads.unwrap_or(at_once);
        let (alone, beside): (Vec<_>, Vec<_>) =
            self.tests(programs)?.into_iter().partition(|test| guests && is_alone(&test.name));
        let mut outcome = runner::run(&beside, &Manner { at_once, ..manner })?;
        outcome += runner::run(&alone, &Manner { at_once: 1, ..manner })?;
        Ok(outcome)
    }

    /// The test programs that are `wanted`.
    fn programs(&mut self, wanted: impl Fn(&Program) -> bool) -> Result<Vec<Program>> {
        if self.programs.is_none() {
            self.programs = Some(programs::build()?);
        }
        Ok(self.programs.iter().flatten().filter(|program| wanted(program)).cloned().collect())
    }

    /// Those tests of some programs that were asked for.
    fn tests<'p>(&self, programs: &'p [Program]) -> Result<Vec<Test<'p>>> {
        let filter = self.args.filter.as_deref().unwrap_or_default();
        let wanted = |name: &String| name.contains(filter);
        let mut tests = Vec::new();
        for program in programs {
            let names = program.tests()?.into_iter().filter(&wanted);
            tests.extend(names.map(|name| Test { program, name }));
        }
        Ok(tests)
    }

    fn run_tests(&self, programs: &[Program], manner: &Manner<'_>) -> Result<Outcome> {
        runner::run(&self.tests(programs)?, manner)
    }

    /// Runs the examples in documentation.
    fn documentation(&self) -> Result<Tally> {
        let mut command = cargo(&["test", "--workspace", "--doc", "--no-fail-fast", "--features", programs::FEATURES]);
        cargo_test(command.args(&self.args.filter))
    }
}

fn cargo_test(command: &mut Command) -> Result<Tally> {
    let mut reader = Reader::default();
    let status = lines(command, |line| reader.line(line))?;
    Ok(reader.finish(status.success()))
}

/// Says whether a test with guests is to have the processors for itself: guests compete in it for a card's time, and one that
/// stands still because its processor is another's has less of it.
fn is_alone(test: &str) -> bool {
    test.starts_with("rogues::")
}

/// The suite that a program is, if it is one.
fn suite_of(program: &Program) -> Option<Suite> {
    let whole = |runner: Runner| matches!(runner, Runner::Integration { .. } | Runner::Fleet);
    let is = |suite: &Suite| whole(suite.runner()) && suite.name() == program.target;
    let mut suites = Suite::value_variants().iter().copied();
    if program.integration && program.package == PACKAGE { suites.find(is) } else { None }
}
