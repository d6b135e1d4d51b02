//! Accesses the card through its BARs, with or without a bound driver: single accesses, their cost, and attacks.

mod alarm;
mod attack;
mod bench;
pub mod card;
mod channel;
mod holes;
mod hostile;
pub mod layout;

pub use holes::queue;

use std::process::ExitCode;

use anyhow::{Context, Result, bail, ensure};

use crate::options::{Options, number};
use crate::report;
use crate::rig::Counts;
use crate::tests::Facts;
use card::Card;
use gdev::mapping::Width;

/// Help text of the command.
pub const USAGE: &str = "  bar read32 BAR OFFSET | write32 BAR OFFSET VALUE | read32-loop BAR OFFSET [--count=]
  bar bench reads|writes [--count= --bar= --offset= --value=]
  bar alarm [--count=]
  bar hole N | holes [--pattern= --share=]
  bar hostile [--pattern= --probes= --share= --channels= --no-writes --fresh --mapped]
  (all bar commands: [--pci=ADDRESS])
";

const OPTIONS: [&str; 12] = [
    "share=",
    "pci=",
    "count=",
    "bar=",
    "offset=",
    "value=",
    "pattern=",
    "probes=",
    "channels=",
    "no-writes",
    "fresh",
    "mapped",
];

/// Function that implements a command.
type Command = fn(&Card, &Options) -> Result<(Counts, Facts)>;

/// Runs the `bar` command with its arguments.
pub fn main(arguments: &[String]) -> ExitCode {
    let options = match Options::parse(arguments, &OPTIONS) {
        Ok(options) => options,
        Err(error) => return usage(&format!("{error:#}")),
    };
    let words: Vec<&str> = options.words().iter().map(String::as_str).collect();
    let (name, command): (&str, Command) = match words[..] {
        ["bench", "reads"] => ("bar-bench-reads", bench::reads),
        ["bench", "writes"] => ("bar-bench-writes", bench::writes),
        ["alarm"] => ("bar-alarm", alarm::run),
        ["hole", _] | ["holes"] => ("bar-holes", holes::run),
        ["hostile"] => ("bar-hostile", hostile::run),
        ["read32", _, _] | ["read32-loop", _, _] | ["write32", _, _, _] => ("bar-access", single),
        _ => return usage(&format!("no such command: bar {}", words.join(" "))),
    };
    let began = std::time::Instant::now();
    let outcome = Card::open(options.text("pci")).and_then(|card| command(&card, &options));
    let seconds = began.elapsed().as_secs_f64();
    let good = outcome.is_ok();
    match outcome {
        Ok((counts, facts)) => report::print(name, counts, seconds, &Ok(facts)),
        Err(error) => report::print(name, Counts::default(), seconds, &Err(error)),
    }
    if good { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

fn usage(problem: &str) -> ExitCode {
    eprint!("gpu-workloads bar: {problem}\n\nusage: gpu-workloads\n{USAGE}");
    ExitCode::from(2)
}

/// Runs `read32`, `read32-loop` and `write32`.
fn single(card: &Card, options: &Options) -> Result<(Counts, Facts)> {
    let [command, bar, offset, value @ ..] = options.words() else { bail!("a region and an offset are needed") };
    let bar = card.region(number(bar).with_context(|| format!("region {bar}"))?)?;
    let offset = usize::try_from(number(offset).with_context(|| format!("offset {offset}"))?)?;
    let inside = offset.checked_add(4).is_some_and(|end| end <= bar.bytes());
    ensure!(inside, "offset {offset:#x} is beyond the region of {:#x} bytes", bar.bytes());
    let mut found = 0;
    match command.as_str() {
        "write32" => bar.store(offset, Width::Dword, number(value.first().map_or("", String::as_str))?),
        "read32" => found = bar.load(offset, Width::Dword),
        _ => {
            found = bar.load(offset, Width::Dword);
            println!("{found:#010x}");
            for read in 1..options.number("count", 1000)? {
                let now = bar.load(offset, Width::Dword);
                if now != found {
                    println!("read {read}: {now:#010x}");
                }
                found = now;
            }
        }
    }
    Ok((Counts::default(), vec![("value", format!("{found:#010x}"))]))
}
