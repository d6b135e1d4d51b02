//! `cargo xtask test`: runs the suites, and reports the counts and times of each suite.

use std::ops::AddAssign;
use std::process::Command;
use std::thread::available_parallelism;
use std::time::{Duration, Instant};

use anyhow::{Result, ensure};
use clap::ValueEnum;

use crate::background::{Background, Priority};
use crate::load::BusyLoops;
use crate::programs::{self, Group, Program};
use crate::run::{cargo, lines};
use crate::runner::{self, Load, Manner, Outcome, Test, cpu_of_children, is_full_scale};
use crate::tally::{Reader, Tally};
use crate::{TestArgs, cuda, fuzz, guests, times};

/// Package with the suites' integration tests.
const PACKAGE: &str = "tests";

/// A test suite. To add a suite, add a variant here and a line in [`Suite::runner`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Suite {
    /// Tests without guests: unit, property and integration tests of all crates except for those in `cuda` and `fleet`.
    Unit,
    /// The crates in `cuda`: programs with the library, on the fake driver. This suite runs before the suites with
    /// guests, which wait for images.
    Cuda,
    /// Workload manager integrations: the crates in `fleet`, as processes, and libvirt, Slurm and podman on a Debian
    /// host in namespaces.
    Fleet,
    /// Well-behaved real guests.
    Guest,
    /// Hostile guests and clients.
    Hostile,
    /// Faults, kills and restarts at random moments.
    Chaos,
    /// A card behind VFIO, in a machine that runs its own VMs.
    Nested,
    /// Xen domains with vGPUs, in a machine that is a Xen host.
    Xen,
    /// Guests with CUDA programs, on the fake driver.
    Vcuda,
    /// Fuzz targets, each for a limited time.
    Fuzz,
}

/// A way to run a suite.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Runner {
    /// The integration test in the `tests` crate that is named after the suite, with guest images.
    Integration,
    /// All test programs that do not belong to another suite, and the documentation examples.
    Rest,
    /// The test programs of the crates in `cuda`, with NVIDIA's headers.
    Cuda,
    /// The test programs of the crates in `fleet`, and then the integration test `fleet`.
    Fleet,
    /// The fuzz targets.
    Fuzz,
}

impl Suite {
    fn runner(self) -> Runner {
        match self {
            Self::Unit => Runner::Rest,
            Self::Guest | Self::Hostile | Self::Chaos | Self::Nested | Self::Xen | Self::Vcuda => Runner::Integration,
            Self::Cuda => Runner::Cuda,
            Self::Fleet => Runner::Fleet,
            Self::Fuzz => Runner::Fuzz,
        }
    }

    /// Returns the CPU load of one of the suite's tests with guests.
    fn load(self, test: &str) -> Load {
        match self {
            // The guests in these tests compete for a card's time. A guest without a CPU stalls, and gets less card
            // time.
            _ if test.starts_with("rogues::") => Load::Processors(usize::MAX),
            // Batch systems' daemons poll and sleep.
            Self::Fleet => Load::Waits,
            // Usually, a single guest boots on one CPU. This also applies to machines that are Xen hosts or run VMs.
            _ => Load::Processors(1),
        }
    }

    /// Returns true if the suite's integration test needs guest images.
    fn has_guests(self) -> bool {
        matches!(self.runner(), Runner::Integration | Runner::Fleet)
    }

    /// Returns the time limit of the suite's tests, which is several times the longest duration under busy loops.
    fn limit(self) -> Duration {
        Duration::from_secs(match self {
            Self::Unit | Self::Cuda | Self::Fuzz => 600,
            Self::Fleet | Self::Guest | Self::Hostile | Self::Chaos | Self::Nested | Self::Xen | Self::Vcuda => 1500,
        })
    }

    fn name(self) -> String {
        self.to_possible_value().map(|v| v.get_name().to_owned()).unwrap_or_default()
    }
}

/// Result of a suite.
pub struct Ran {
    pub name: String,
    pub outcome: Outcome,
    /// Elapsed time, including builds for the suite. If suites ran concurrently, this is the sum of the tests' times.
    pub elapsed: Duration,
    /// CPU time of all the suite's processes.
    pub cpu: Duration,
}

/// Runs the requested suite, or all suites. Returns true if there were no failures.
pub fn run(args: &TestArgs) -> Result<bool> {
    let suites: Vec<Suite> = args.suite.map_or_else(|| Suite::value_variants().to_vec(), |suite| vec![suite]);
    let mut session = Session::start(args, &suites);
    if args.beside_load > 0 {
        // Only the tests should run under load, so create all files that they need first.
        session.make()?;
    }
    let _loops = BusyLoops::start(args.beside_load);
    let mut ran = Vec::new();
    let has_own_part = |suite: &Suite| suite.runner() != Runner::Integration;
    let (first, last): (Vec<Suite>, Vec<Suite>) =
        suites.iter().filter(|suite| has_own_part(suite)).partition(|suite| **suite != Suite::Fuzz);
    let with_guests: Vec<Suite> = suites.iter().copied().filter(|suite| suite.has_guests()).collect();
    first.into_iter().for_each(|suite| ran.push(measured(&suite.name(), || session.run(suite))));
    if !with_guests.is_empty() {
        // Run these suites together, so that no CPU is idle at the end of each suite.
        let names: Vec<String> = with_guests.iter().map(|suite| suite.name()).collect();
        let all = measured(&names.join(", "), || session.with_guests(&with_guests));
        for part in with_guests.iter().map(|suite| all.of_suite(*suite)) {
            match ran.iter_mut().find(|ran: &&mut Ran| ran.name == part.name) {
                Some(first) => *first += part,
                None => ran.push(part),
            }
        }
        if all.outcome.taken.is_empty() && !all.outcome.tally.good() {
            ran.push(all);
        }
    }
    last.into_iter().for_each(|suite| ran.push(measured(&suite.name(), || session.run(suite))));
    times::print(&ran);
    let mut total = Tally::default();
    ran.iter().for_each(|ran| total += ran.outcome.tally);
    println!("{total}");
    Ok(total.good())
}

impl AddAssign for Ran {
    fn add_assign(&mut self, more: Self) {
        self.outcome += more.outcome;
        self.elapsed += more.elapsed;
        self.cpu += more.cpu;
    }
}

impl Ran {
    /// Returns the part of a run for one suite. Its time is the sum of its tests' times.
    fn of_suite(&self, suite: Suite) -> Self {
        let outcome = self.outcome.of_target(&suite.name());
        let (elapsed, cpu) = (outcome.taken.iter().map(|taken| taken.elapsed).sum(), outcome.cpu());
        Self { name: suite.name(), outcome, elapsed, cpu }
    }
}

/// Runs and measures suites. An error that prevents the run counts as one failure, and the remaining suites still run.
fn measured(name: &str, run: impl FnOnce() -> Result<Outcome>) -> Ran {
    println!("suite {name}");
    let (began, cpu) = (Instant::now(), cpu_of_children());
    let outcome = run().unwrap_or_else(|error| {
        eprintln!("error: suite {name}: {error:#}");
        Outcome { tally: Tally::one(false), ..Outcome::default() }
    });
    let (elapsed, cpu) = (began.elapsed(), cpu_of_children().saturating_sub(cpu));
    println!("suite {name}: {} in {:.0} s", outcome.tally, elapsed.as_secs_f64());
    Ran { name: name.to_owned(), outcome, elapsed, cpu }
}

/// A run of suites, with their shared state.
struct Session<'a> {
    args: &'a TestArgs,
    /// Test programs, built on first use.
    programs: Option<Vec<Program>>,
    /// Preparation of the guest images, if any suite has guests.
    images: Option<Background>,
    /// Download of NVIDIA's headers and runtime libraries, if the crates in `cuda` are tested.
    headers: Option<Background>,
    /// Set if the fuzz suite is selected.
    fuzzes: bool,
    /// The build of the fuzz targets, if it runs in parallel with another suite.
    targets: Option<Background>,
}

impl<'a> Session<'a> {
    fn start(args: &'a TestArgs, suites: &[Suite]) -> Self {
        let any = |runner: Runner| suites.iter().any(|suite| suite.runner() == runner);
        // Prepare the images and headers during the first build and the suites without guests.
        let guests = suites.iter().any(|suite| suite.has_guests());
        let images = guests.then(guests::images);
        let headers = any(Runner::Cuda).then(|| Background::start(Priority::Behind, cuda::fetch_all));
        Self { args, programs: None, images, headers, fuzzes: any(Runner::Fuzz), targets: None }
    }

    /// Creates all files that are otherwise created on first use, except for the fuzz targets.
    fn make(&mut self) -> Result<()> {
        self.programs(|_| false)?;
        self.headers.iter_mut().chain(&mut self.images).try_for_each(Background::wait)
    }

    fn run(&mut self, suite: Suite) -> Result<Outcome> {
        let cpus = available_parallelism().map_or(1, usize::from);
        let manner = Manner { at_once: cpus, limit: suite.limit(), variables: &[], full: self.args.full };
        match suite.runner() {
            Runner::Rest => {
                let programs = self.programs(|program| suite_of(program).is_none() && program.group == Group::Rest)?;
                let mut outcome = self.run_tests(&programs, &manner)?;
                outcome.tally += self.documentation()?;
                Ok(outcome)
            }
            Runner::Integration => self.with_guests(&[suite]),
            Runner::Fleet => {
                let programs = self.programs(|program| program.group == Group::Fleet)?;
                self.run_tests(&programs, &manner)
            }
            Runner::Cuda => {
                let programs = self.programs(|program| program.group == Group::Cuda)?;
                if let Some(headers) = &mut self.headers {
                    headers.wait()?;
                }
                let headers = cuda::headers()?;
                let runtimes = cuda::runtimes()?;
                let variables =
                    [(cuda::HEADERS_VARIABLE, headers.as_os_str()), (cuda::RUNTIMES_VARIABLE, runtimes.as_os_str())];
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

    /// Runs the integration tests of several suites with guests together.
    fn with_guests(&mut self, suites: &[Suite]) -> Result<Outcome> {
        let programs = self.programs(|program| suite_of(program).is_some_and(|suite| suites.contains(&suite)))?;
        for suite in suites {
            let exists = programs.iter().any(|program| suite_of(program) == Some(*suite));
            ensure!(exists, "tests/tests/{}.rs does not exist", suite.name());
        }
        if let Some(images) = self.images.as_mut() {
            images.wait()?;
        }
        if self.fuzzes && self.targets.is_none() {
            // Build the fuzz targets now, because some CPUs are idle while a single guest boots.
            self.targets = Some(Background::start(Priority::Behind, || fuzz::build(Some(1))));
        }
        let cpus = available_parallelism().map_or(1, usize::from).clamp(1, 8);
        let at_once = self.args.guest_threads.unwrap_or(cpus);
        let mut tests = self.tests(&programs)?;
        for test in &mut tests {
            test.load = suite_of(test.program).map_or(test.load, |suite| suite.load(&test.name));
        }
        // Start with the tests that use several CPUs. Otherwise, CPUs would be idle until enough of them are free for
        // such a test. The longest tests come next.
        tests.sort_by_key(|test| match (test.load, suite_of(test.program)) {
            (Load::Processors(2..), _) => 0,
            (_, Some(Suite::Xen | Suite::Nested)) => 1,
            _ => 2,
        });
        let limit = suites.iter().map(|suite| suite.limit()).max().unwrap_or_default();
        runner::run(&tests, &Manner { at_once, limit, variables: &[], full: self.args.full })
    }

    /// Returns the test programs that `wanted` accepts.
    fn programs(&mut self, wanted: impl Fn(&Program) -> bool) -> Result<Vec<Program>> {
        if self.programs.is_none() {
            self.programs = Some(programs::build()?);
        }
        Ok(self.programs.iter().flatten().filter(|program| wanted(program)).cloned().collect())
    }

    /// Returns the requested tests of some programs.
    fn tests<'p>(&self, programs: &'p [Program]) -> Result<Vec<Test<'p>>> {
        let filter = self.args.filter.as_deref().unwrap_or_default();
        let mut tests = Vec::new();
        let mut left_out = 0;
        for program in programs {
            for name in program.tests()?.into_iter().filter(|name| name.contains(filter)) {
                if is_full_scale(&name) && !self.args.full {
                    left_out += 1;
                } else {
                    tests.push(Test { program, name, load: Load::Processors(1) });
                }
            }
        }
        if left_out > 0 {
            println!("{left_out} full-scale tests are skipped; --full runs them");
        }
        Ok(tests)
    }

    fn run_tests(&self, programs: &[Program], manner: &Manner<'_>) -> Result<Outcome> {
        runner::run(&self.tests(programs)?, manner)
    }

    /// Runs the documentation examples.
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

/// Returns the suite that a program implements, if any.
fn suite_of(program: &Program) -> Option<Suite> {
    let is = |suite: &Suite| suite.has_guests() && suite.name() == program.target;
    let mut suites = Suite::value_variants().iter().copied();
    if program.integration && program.package == PACKAGE { suites.find(is) } else { None }
}
