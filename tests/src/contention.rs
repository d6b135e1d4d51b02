//! Runs guests that compete for a card's time, and measures each guest's share according to the mediator's accounting.

use std::thread::sleep;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use sched::Engine;
use sched::sim::{ShareError, Uses, jain};

use crate::Pending;
use crate::guest::{self, Smoke};
use crate::many_vms::{Account, Crowd, History, SIDE};

/// Prefix of the kernels' end times in a load's output.
const ENDS: &str = "ENDS ";
/// Line that a load prints once it has started.
const BEGUN: &str = "LOOPING";
/// Time limit for a load to start.
const BEGIN_LIMIT: Duration = Duration::from_secs(60);
/// Maximum duration of a load in seconds. Tests end loads earlier.
const LASTS_S: u64 = 600;

/// A guest's load.
#[derive(Clone, Debug)]
pub struct Load {
    /// Index of the VM.
    pub vm: usize,
    /// Arguments of `gpu-workloads`, excluding `--duration`.
    pub words: String,
    /// Delay from the start of the first load to the start of this load.
    pub after: Duration,
}

impl Load {
    fn new(vm: usize, words: String) -> Self {
        Self { vm, words, after: Duration::ZERO }
    }

    /// Creates a load of successive kernels with `rounds` [rounds](crate::many_vms::ROUND_NS) each, and up to
    /// `in_flight` kernels in flight. More kernels in flight tolerate longer submission delays without idle time, for
    /// example on a host with more guests than CPUs.
    pub fn kernels(vm: usize, rounds: u32, in_flight: u32) -> Self {
        Self::kernels_of(vm, SIDE, rounds, in_flight)
    }

    /// Creates a load like [`Self::kernels`] for matrices with side length `side`, which determines [the length of a
    /// round](crate::many_vms::round_ns).
    pub fn kernels_of(vm: usize, side: u32, rounds: u32, in_flight: u32) -> Self {
        let kernel = format!("workload --name long-madd --side {side} --rounds {rounds}");
        Self::new(vm, format!("{kernel} --in-flight {in_flight}"))
    }

    /// Makes the load report the end time of each kernel.
    #[must_use]
    pub fn telling_ends(mut self) -> Self {
        self.words += " --ends";
        self
    }

    /// Creates a load that alternates between a kernel and a pause.
    pub fn bursts(vm: usize, side: u32, rounds: u32, pause_ms: u32) -> Self {
        let kernel = format!("workload --name long-madd --side {side} --rounds {rounds}");
        Self::new(vm, format!("{kernel} --pause-ms {pause_ms}"))
    }

    /// Creates a load that repeatedly copies `bytes` bytes to VRAM with the first copy engine.
    pub fn copies(vm: usize, bytes: u64) -> Self {
        Self::new(vm, format!("stream --engine ce0 --size {bytes}"))
    }

    /// Creates a load that runs one of the attacks of `gpu-workloads rogue`.
    pub fn rogue(vm: usize, what: &str) -> Self {
        Self::new(vm, format!("rogue --what {what}"))
    }

    /// Delays the start of the load by `after`.
    #[must_use]
    pub fn after(self, after: Duration) -> Self {
        Self { after, ..self }
    }
}

/// A measurement of competing guests.
#[derive(Clone, Debug)]
pub struct Contest {
    /// Loads, one per guest.
    pub loads: Vec<Load>,
    /// Duration of the warm-up before the measurement.
    pub warm: Duration,
    /// Duration of the measurement.
    pub measured: Duration,
}

/// Result of a measurement.
#[derive(Clone, Debug)]
pub struct Outcome {
    /// Index of each load's VM. The other lists are in the same order.
    pub vms: Vec<usize>,
    /// Charges of each VM since the start of the measurement.
    pub uses: Uses,
    /// Start time of each load, in ns since the start of the measurement, or 0 if it started earlier.
    pub marks: Vec<u64>,
    /// Start of the measurement, in ns of the card's clock.
    pub from: u64,
    /// Measured time, in ns of the card's clock.
    pub length: u64,
    /// PGRAPH accounts at the start of the measurement.
    pub before: Vec<Account>,
    /// PGRAPH accounts at the end of the measurement.
    pub after: Vec<Account>,
    /// Final reports of the loads.
    pub reports: Vec<Smoke>,
    /// End times of kernels in ns of the card's clock, for the loads that report them.
    pub ends: Vec<Vec<u64>>,
}

/// Interval at which the charges are read.
const CHARGE_READ_INTERVAL: Duration = Duration::from_secs(30);

impl Contest {
    /// Runs the loads. Calls `meanwhile` when the measurement begins. The measured time includes this call.
    ///
    /// Fails if a load ends too early or produces a wrong result.
    pub fn run(&self, crowd: &Crowd, meanwhile: impl FnOnce(&Crowd) -> Result<()>) -> Result<Outcome> {
        self.run_until(crowd, meanwhile, |_| Ok(()))
    }

    /// Runs the loads like [`Self::run`], but also calls `finally` after the measured time and before the loads end.
    pub fn run_until(
        &self,
        crowd: &Crowd,
        meanwhile: impl FnOnce(&Crowd) -> Result<()>,
        finally: impl FnOnce(&Crowd) -> Result<()>,
    ) -> Result<Outcome> {
        let vms: Vec<usize> = self.loads.iter().map(|load| load.vm).collect();
        let accounts = || -> Result<Vec<Account>> {
            let all = crowd.accounts(Engine::Compute.name())?;
            vms.iter().map(|vm| all.get(*vm).cloned().context("a VM without accounts")).collect()
        };
        let now = || Ok::<_, anyhow::Error>(crowd.history(100)?.now_ns);
        let (first, later): (Vec<_>, Vec<_>) = self.loads.iter().partition(|load| load.after.is_zero());
        let mut running = first.iter().map(|load| start(crowd, load)).collect::<Result<Vec<_>>>()?;
        running.iter().try_for_each(|pending| pending.wait_line(BEGUN, BEGIN_LIMIT).map(drop))?;
        let begun = Instant::now();
        let mut marks = vec![now()?; running.len()];
        sleep(self.warm);
        let (before, from) = (accounts()?, now()?);
        let began = Instant::now();
        meanwhile(crowd)?;
        for load in later {
            sleep(load.after.saturating_sub(begun.elapsed()));
            let pending = start(crowd, load)?;
            pending.wait_line(BEGUN, BEGIN_LIMIT)?;
            marks.push(now()?);
            running.push(pending);
        }
        let (mut history, mut asked) = (History::default(), began);
        let mut ask = || -> Result<()> {
            let since = asked.elapsed() + Duration::from_secs(1);
            asked = Instant::now();
            history.append(crowd.history(u64::try_from(since.as_millis())?)?);
            Ok(())
        };
        while self.measured.saturating_sub(began.elapsed()) > CHARGE_READ_INTERVAL {
            sleep(CHARGE_READ_INTERVAL);
            ask()?;
        }
        sleep(self.measured.saturating_sub(began.elapsed()));
        let after = accounts()?;
        ask()?;
        let early = running.iter().find(|pending| pending.ended());
        ensure!(early.is_none(), "a load ended before the others were measured: {:?}", early.map(Pending::lines));
        finally(crowd)?;
        // Count only whole intervals.
        let interval = history.interval_ns;
        let begin = from.next_multiple_of(interval);
        let length = (history.now_ns - history.now_ns % interval).saturating_sub(begin);
        let mut uses = Uses::new(vms.len(), interval, length);
        for (place, vm) in vms.iter().enumerate() {
            for (at, used) in history.samples.get(*vm).into_iter().flatten().filter(|(at, _)| *at >= begin) {
                for engine in Engine::ALL {
                    uses.add_at(place, engine, at - begin, used[engine.name()].as_u64().unwrap_or(0));
                }
            }
        }
        marks.iter_mut().for_each(|mark| *mark = mark.saturating_sub(begin));
        running.iter().try_for_each(Pending::terminate)?;
        let reported = running.into_iter().map(report).collect::<Result<Vec<_>>>()?;
        let (reports, ends) = reported.into_iter().unzip();
        Ok(Outcome { vms, uses, marks, from: begin, length, before, after, reports, ends })
    }
}

fn start<'a>(crowd: &'a Crowd, load: &Load) -> Result<Pending<'a>> {
    crowd.vm(load.vm)?.start(&format!("run /bin/gpu-workloads {} --duration {LASTS_S}", load.words))
}

fn report(pending: Pending<'_>) -> Result<(Smoke, Vec<u64>)> {
    let output = pending.wait_within(guest::SMOKE_LIMIT)?;
    let smoke = guest::parse_smoke(&output)?;
    ensure!(smoke.ok, "{}", output.text());
    // The workload prints its result before the command's own last line.
    let line = output.lines.iter().find(|line| line.starts_with("RESULT ")).cloned();
    let ends =
        output.lines.iter().filter_map(|line| line.strip_prefix(ENDS)).map(ends_in).collect::<Result<Vec<_>>>()?;
    Ok((Smoke { line: line.unwrap_or_default(), ..smoke }, ends.concat()))
}

/// Parses a line with the end times of kernels. Returns them in ns.
fn ends_in(line: &str) -> Result<Vec<u64>> {
    let (first, rest) =
        line.strip_prefix("at_us=").and_then(|line| line.split_once(" after_us=")).context("no times")?;
    let words = std::iter::once(first).chain(rest.split(',').filter(|word| !word.is_empty()));
    let mut at = 0u64;
    let times = words.map(|word| {
        at = at
            .checked_add(word.parse().with_context(|| format!("ENDS {line}: {word}"))?)
            .context("a time beyond the last interval")?;
        at.checked_mul(1000).context("a time beyond the last interval")
    });
    times.collect()
}

impl Outcome {
    /// Returns Jain's fairness index of the shares in the whole measured time, relative to `wanted`.
    pub fn jain(&self, wanted: &[f64]) -> f64 {
        jain(&self.uses.shares(Engine::Compute, 0, self.length), wanted)
    }

    /// Returns the deviation of the shares from `wanted`, in windows of `window_ns` ns.
    pub fn share_error(&self, window_ns: u64, wanted: &[f64]) -> ShareError {
        self.uses.share_error(Engine::Compute, window_ns, 0, self.length, wanted)
    }

    /// Returns the time of an engine that was charged to VMs, as a fraction of the measured time.
    pub fn utilisation(&self, engine: Engine) -> f64 {
        let used: u64 = (0..self.vms.len()).map(|place| self.uses.used(place, engine, 0, self.length)).sum();
        used as f64 / self.length.max(1) as f64
    }

    /// Returns the PGRAPH time charged to a load, as a fraction of the measured time.
    pub fn received(&self, place: usize) -> f64 {
        self.uses.used(place, Engine::Compute, 0, self.length) as f64 / self.length.max(1) as f64
    }

    /// Computes the work of the loads from the guests' reports, in intervals of `step` ns. Counts completed kernels.
    /// `lengths` contains each load's kernel duration in ns.
    pub fn counted(&self, lengths: &[u64], step: u64) -> Uses {
        let mut uses = Uses::new(self.vms.len(), step, self.length);
        for ((place, ends), length) in self.ends.iter().enumerate().zip(lengths) {
            for end in ends.iter().filter(|end| **end > self.from) {
                let began = end.saturating_sub(*length).max(self.from);
                uses.add(place, Engine::Compute, began - self.from, end - self.from);
            }
        }
        uses
    }

    /// Returns the number of a load's PGRAPH submissions that ended during the measurement.
    pub fn completed(&self, place: usize) -> u64 {
        self.after[place].completed - self.before[place].completed
    }

    /// Returns the `permille` quantile of the wait times of some loads' submissions in ns, rounded up to the mediator's
    /// bucket bounds.
    pub fn wait_ns(&self, places: impl Iterator<Item = usize> + Clone, permille: u64) -> u64 {
        let sum = |of: &dyn Fn(&Account) -> u64| -> u64 {
            places.clone().map(|place| of(&self.after[place]) - of(&self.before[place])).sum()
        };
        let wanted = (sum(&|account| account.started) * permille).div_ceil(1000);
        let ends = self.after.first().map(|account| account.waits.keys().copied().collect::<Vec<_>>());
        let ends = ends.unwrap_or_default();
        let within = |end: u64| sum(&|account| account.waits.get(&end).copied().unwrap_or(0));
        ends.into_iter().find(|end| within(*end) >= wanted).unwrap_or(u64::MAX)
    }

    /// Returns the number that a load reported under `key`.
    pub fn reported(&self, place: usize, key: &str) -> Result<f64> {
        let line = &self.reports.get(place).context("a load without a report")?.line;
        let value = line.split_whitespace().find_map(|word| word.strip_prefix(key)?.strip_prefix('='));
        Ok(value.with_context(|| format!("no {key} in {line}"))?.parse()?)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ends_are_parsed_as_guests_report_them() {
        assert_eq!(ends_in("at_us=5000 after_us=1,1999").unwrap(), [5_000_000, 5_001_000, 7_000_000]);
        assert_eq!(ends_in("at_us=1 after_us=").unwrap(), [1000]);
        for wrong in ["", "at_us=1", "at_us=1 after_us=x", "at_us=18446744073709551615 after_us=1"] {
            assert!(ends_in(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn kernels_count_in_the_intervals_in_which_they_ran() {
        let ends = vec![vec![95, 130, 160], vec![145, 190]];
        let outcome = Outcome {
            vms: vec![0, 1],
            uses: Uses::new(2, 10, 80),
            marks: Vec::new(),
            from: 100,
            length: 80,
            before: Vec::new(),
            after: Vec::new(),
            reports: Vec::new(),
            ends,
        };
        let counted = outcome.counted(&[20, 40], 20);
        let used = |vm| [0, 20, 40, 60].map(|at| counted.used(vm, Engine::Compute, at, at + 20));
        // Kernels that ended before the measurement are omitted. The time of each remaining kernel is split among the
        // intervals.
        assert_eq!([used(0), used(1)], [[10, 10, 20, 0], [15, 20, 15, 20]]);
    }
}
