//! Drives a GPU through nouveau's raw ioctls or through its PCI regions, and checks every byte.
//!
//! The driver is the `gdev` library: whole computations use contexts, and tests of single requests use device files,
//! buffers, channels and push buffers. Only [`raw`] computes without the library, for comparison.
//!
//! Parts: [`compute`] (contexts), [`raw`] (a driver without the library), [`pattern`] (test data), [`rig`] (fills,
//! checks, counts), [`ending`] (time limits), [`marks`] (pauses during which the host reads its counters), [`tests`]
//! (one file per command), [`bar`] (accesses without the driver), [`report`] (result lines that the host reads).
//!
//! The program supports the stock drivers of Debian's 6.1 and 6.12 kernels on a Fermi card. Other drivers, relocations,
//! tiled buffers, `VM_BIND` and graphics are not supported.
//!
//! Exit status: 0 if all data was correct, 1 if any data was incorrect or a request failed, and 2 if the command line
//! was invalid.

mod bar;
mod compute;
mod ending;
mod marks;
mod options;
mod pattern;
mod raw;
mod report;
mod rig;
mod tests;

use std::path::Path;
use std::process::ExitCode;
use std::time::{SystemTime, UNIX_EPOCH};

use anyhow::Result;

use crate::options::Options;
use crate::rig::{Counts, Rig};
use crate::tests::Facts;

/// Path of the first render node.
pub const DEFAULT_NODE: &str = "/dev/dri/renderD128";

/// A command that uses the DRM device.
pub struct Test {
    /// Name of the command.
    pub name: &'static str,
    /// Options of the command. Names that end in `=` take a value.
    pub options: &'static [&'static str],
    /// One-line help text.
    pub help: &'static str,
    /// Function that runs the command.
    pub run: fn(&Rig, &Options) -> Result<Facts>,
}

const COPY: [&str; 9] =
    ["engine=", "from=", "to=", "size=", "count=", "lines=", "pitch=", "source-offset=", "target-offset="];
const STREAM: [&str; 4] = ["engine=", "size=", "in-flight=", "duration="];
const DATAFLOW: [&str; 6] = ["shape=", "kernel=", "side=", "contexts=", "share", "marks"];
const TUNING: [&str; 7] = ["direction=", "bytes=", "count=", "direct", "piece=", "serial", "pinned"];
const SHARE: [&str; 4] = ["what=", "key=", "channel=", "duration="];
const COMPARE: [&str; 3] = ["name=", "scale=", "count="];
const WORKLOAD: [&str; 10] =
    ["name=", "scale=", "rounds=", "side=", "working-set=", "duration=", "in-flight=", "pause-ms=", "ends", "json"];

#[rustfmt::skip]
const TESTS: [Test; 25] = [
    Test { name: "query", options: &[], help: "the kernel's description of the card", run: tests::query::run },
    Test { name: "copy", options: &COPY, help: "one type of copy", run: tests::copy::run },
    Test { name: "sweep", options: &["quick"], help: "copies with all engines, domains, sizes and shapes", run: tests::sweep::run },
    Test { name: "map", options: &["quick"], help: "CPU accesses through BAR1", run: tests::map::run },
    Test { name: "move", options: &["quick", "pressure"], help: "buffers that the kernel migrates", run: tests::moves::run },
    Test { name: "fences", options: &["quick", "count="], help: "many small submissions", run: tests::fences::run },
    Test { name: "channels", options: &["quick", "n=", "rounds="], help: "concurrent channels", run: tests::channels::run },
    Test { name: "procs", options: &["quick", "n="], help: "concurrent processes", run: tests::procs::run },
    Test { name: "fill", options: &["pattern="], help: "all VRAM filled with a pattern", run: tests::residue::fill },
    Test { name: "scan", options: &["pattern="], help: "all VRAM searched for a pattern", run: tests::residue::scan },
    Test { name: "stress", options: &["seconds=", "max="], help: "random copies for a given time", run: tests::stress::run },
    Test { name: "stream", options: &STREAM, help: "repeated copies for a given time", run: tests::stream::run },
    Test { name: "timed", options: &["what=", "count="], help: "one workload, for benchmarks", run: tests::timed::run },
    Test { name: "workload", options: &WORKLOAD, help: "compute kernels", run: tests::workload::run },
    Test { name: "compare", options: &COMPARE, help: "times of workloads with the library and with raw ioctls", run: tests::compare::run },
    Test { name: "dataflow", options: &DATAFLOW, help: "graphs of kernels with one context per kernel", run: tests::dataflow::run },
    Test { name: "gdev", options: &["quick"], help: "the library: copies, fences, references, errors", run: tests::library::run },
    Test { name: "tuning", options: &TUNING, help: "times of the library's copies", run: tests::library::tuning },
    Test { name: "share", options: &SHARE, help: "segments of device memory", run: tests::share::run },
    Test { name: "faulty", options: &["what="], help: "work that the card rejects", run: tests::faulty::run },
    Test { name: "rogue", options: &["what=", "duration="], help: "work intended to harm other VMs", run: tests::rogue::run },
    Test { name: "phases", options: &["name=", "marks"], help: "a workload that stops between its phases", run: tests::counted::phases },
    Test { name: "launches", options: &["name=", "count=", "side="], help: "a given number of launches", run: tests::counted::launches },
    Test { name: "yardstick", options: &[], help: "speed of the CPU", run: tests::counted::yardstick },
    Test { name: "all", options: &["quick"], help: "all of these except fill, stress, stream, timed, workload, compare, dataflow, tuning, share, faulty, rogue, phases, launches, yardstick", run: tests::all::run },
];

impl Test {
    /// Returns the test with this command name.
    pub fn named(name: &str) -> Option<Self> {
        TESTS.into_iter().find(|test| test.name == name)
    }
}

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let Some((name, rest)) = arguments.split_first() else {
        return usage("a command is required");
    };
    if name == "bar" {
        return bar::main(rest);
    }
    let Some(test) = Test::named(name) else {
        return usage(&format!("{name}: no such command"));
    };
    let options = match Options::parse(rest, test.options) {
        Ok(options) if options.words().is_empty() => options,
        Ok(options) => return usage(&format!("{name} takes no arguments, found {:?}", options.words())),
        Err(error) => return usage(&format!("{name}: {error:#}")),
    };
    let node = options.text("node").unwrap_or(DEFAULT_NODE).to_owned();
    let seed = match options.number("seed", new_seed()) {
        Ok(seed) => seed,
        Err(error) => return usage(&format!("{name}: {error:#}")),
    };
    ending::take_note();
    println!("{name}: seed {seed}");
    let good = match Rig::open(Path::new(&node), seed) {
        Ok(rig) => report::run(&rig, &options, &test),
        Err(error) => {
            report::print(name, Counts::default(), 0.0, &Err(error));
            false
        }
    };
    if good { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

/// Returns a different seed for every run, so that a check never accepts data from an earlier run.
fn new_seed() -> u64 {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    pattern::mix(now.as_nanos() as u64 ^ u64::from(std::process::id()) << 48)
}

fn usage(problem: &str) -> ExitCode {
    eprintln!("gpu-workloads: {problem}\n\nusage: gpu-workloads COMMAND [--node PATH] [--seed N] [options]");
    for Test { name, options, help, .. } in TESTS {
        let options: Vec<String> = options.iter().map(|option| format!("--{option}")).collect();
        eprintln!("  {name:9} {help} [{}]", options.join(" "));
    }
    eprint!("{}", bar::USAGE);
    ExitCode::from(2)
}
