//! Two jobs each of which fits the card, and which do not fit together (unified-memory thesis, chapters 11 to 13): as they
//! come, by turns, and by turns only when they thrash. Jobs whose copies name what they use, jobs whose kernels reach it by pointers
//! on a card that counts that and on one that does not, and jobs that leave the GPU alone half of the time (table 12.2).
//!
//! The time of one after the other is measured with the same number of passes.

use std::sync::Barrier;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use rig::Rig;
use tests::bench::{Metric, Target};
use tests::light::{CardConfig, account};
use vram::{Mode, VmId};

use super::jobs::{Amount, Job, Reach};
use super::{BUS_RATE, division, time};

/// Bytes of a chunk: small, so that a change of turns is short and there are several within seconds.
const CHUNK: u64 = 512 << 10;
/// Passes of a job, and where all is far slower.
const PASSES: Amount = Amount::passes(400);
const FEW: Amount = Amount::passes(20);
/// Bursts of a job that leaves the GPU alone half of the time.
const BURSTS: u64 = 4;
const BURST: u64 = 60;
/// Lengths of a turn.
const QUANTA_MS: [u64; 4] = [100, 300, 1000, 3000];
/// Both copy engines.
const LANES: f64 = 2.0;

/// A kind of jobs, and the card that two of them share.
#[derive(Clone, Copy)]
struct Kind {
    name: &'static str,
    reach: Reach,
    /// The card counts accesses.
    counts: bool,
    /// Chunks that one has on a card.
    used: u64,
}

impl Kind {
    fn new(name: &'static str, reach: Reach, counts: bool) -> Result<Self> {
        let kind = Self { name, reach, counts, used: 64 };
        let rig = kind.config(kind.used, Mode::Off, None).open()?;
        let _job = Job::new(&rig, 0, reach)?;
        Ok(Self { used: account(&rig, 0)?.placed.into(), ..kind })
    }

    /// Chunks of a card on which one fits and two do not.
    fn short(&self) -> u64 {
        self.used * 5 / 4
    }

    /// The same on which both fit.
    fn plenty(&self) -> u64 {
        self.used * 2 + 8
    }

    fn config(&self, chunks: u64, mode: Mode, quantum: Option<Duration>) -> CardConfig {
        let mut division = division();
        division.quanta.mode = mode;
        if let Some(quantum) = quantum {
            division.quanta.min_ns = quantum.as_nanos() as u64;
            division.quanta.max_ns = division.quanta.min_ns;
        }
        let config = CardConfig::new(chunks * CHUNK >> 20, 64);
        CardConfig { division, time: time(), chunk_bytes: CHUNK, counts: self.counts, ..config }
    }

    /// Seconds of one job alone.
    fn alone(&self, amount: Amount) -> Result<f64> {
        let mut alone = f64::INFINITY;
        for vm in 0..2 {
            let rig = self.config(self.short(), Mode::Off, None).open()?;
            let mut job = Job::new(&rig, vm, self.reach)?;
            let began = Instant::now();
            job.run(amount)?;
            // The jobs are alike: what makes one slower is other work on this machine.
            alone = alone.min(began.elapsed().as_secs_f64());
            job.verify(amount.all())?;
        }
        Ok(alone)
    }

    /// Two at once.
    fn together(&self, config: CardConfig, amount: Amount) -> Result<Outcome> {
        let rig = config.open()?;
        let moved = || moved(&rig);
        let turns = || rig.host.lock().memory().divider().turns();
        let mut jobs = [Job::new(&rig, 0, self.reach)?, Job::new(&rig, 1, self.reach)?];
        let before = (moved(), turns());
        let outside = u64::from(account(&rig, 0)?.host + account(&rig, 1)?.host) * CHUNK;
        let ready = Barrier::new(jobs.len());
        let began = Instant::now();
        std::thread::scope(|scope| -> Result<()> {
            let run = |job: &mut Job| {
                ready.wait();
                job.run(amount)
            };
            let threads: Vec<_> = jobs.iter_mut().map(|job| scope.spawn(move || run(job))).collect();
            threads.into_iter().try_for_each(|job| job.join().ok().context("a job panicked")?)
        })?;
        let makespan = began.elapsed().as_secs_f64();
        let (moved, turns) = (moved() - before.0, turns() - before.1);
        jobs.iter_mut().try_for_each(|job| job.verify(amount.all()))?;
        Ok(Outcome { makespan, outside, moved, turns })
    }

    /// Figures of two jobs in a mode, beside `alone` of one.
    fn row(&self, what: &str, config: CardConfig, amount: Amount, alone: f64) -> Result<Vec<Metric>> {
        let outcome = self.together(config, amount).with_context(|| format!("thrash: {} {what}", self.name))?;
        let Outcome { makespan, outside, moved, turns } = outcome;
        let (name, serial) = (format!("swap.thrash.{}.{what}", self.name), 2.0 * alone);
        let against =
            |what: &str, baseline: f64| Metric::ratio(format!("{name}.{what}"), makespan, "s", baseline, Target::None);
        // What lay outside has to come once, and as much to go.
        let bound = serial + 2.0 * outside as f64 / (LANES * BUS_RATE as f64);
        Ok(vec![
            against("makespan_to_serial", serial),
            against("makespan_to_copy_bound", bound),
            Metric::plain(format!("{name}.moved"), moved as f64 / (1 << 20) as f64, "MiB"),
            Metric::plain(format!("{name}.turns"), turns as f64, "turns"),
        ])
    }
}

fn moved(rig: &Rig) -> u64 {
    let state = rig.host.lock();
    [0, 1].map(|vm| state.memory().moved(VmId(vm)).map_or(0, |moved| moved.sum.bytes)).iter().sum()
}

/// Outcome of the two jobs in a mode.
struct Outcome {
    makespan: f64,
    /// Bytes that lay in host memory when they began.
    outside: u64,
    moved: u64,
    /// Number of changes of turn.
    turns: u64,
}

/// Jobs that always have work for the GPU.
fn busy(kind: &Kind, metrics: &mut Vec<Metric>) -> Result<()> {
    let (whole, few) = (kind.alone(PASSES)?, kind.alone(FEW)?);
    let (short, plenty) = (kind.short(), kind.plenty());
    for (what, mode, chunks, amount, alone, peer) in [
        ("off", Mode::Off, short, FEW, few, "thesis: 8.5x serial when thrashing"),
        ("auto", Mode::Auto, short, PASSES, whole, "thesis (its lock): 1.06x serial"),
        ("forced", Mode::Forced, short, PASSES, whole, ""),
        // Where both fit, turns are a loss, and the detector does not take them.
        ("both_fit.auto", Mode::Auto, plenty, PASSES, whole, ""),
        ("both_fit.forced", Mode::Forced, plenty, PASSES, whole, "thesis: its lock costs 14 % when jobs would fit"),
    ] {
        // A card that does not count sees nothing of pointers: it never takes turns by itself, so that few passes are enough.
        let blind = kind.reach == Reach::Pointers && !kind.counts && what == "auto";
        let (amount, alone) = if blind { (FEW, few) } else { (amount, alone) };
        let mut rows = kind.row(what, kind.config(chunks, mode, None), amount, alone)?;
        if let Some(first) = rows.first_mut() {
            *first = first.clone().beside(peer);
        }
        metrics.extend(rows);
    }
    Ok(())
}

/// Jobs that compute on the CPU for as long as on the GPU (`big_50`, and `small_50` where both fit).
fn halves(kind: &Kind, metrics: &mut Vec<Metric>) -> Result<()> {
    let burst = kind.alone(Amount::passes(BURST))?;
    let amount = Amount { bursts: BURSTS, passes: BURST, cpu: Duration::from_secs_f64(burst) };
    let few = Amount {
        bursts: 1,
        passes: FEW.passes,
        cpu: Duration::from_secs_f64(burst * FEW.passes as f64 / BURST as f64),
    };
    let (whole, little) = (kind.alone(amount)?, kind.alone(few)?);
    for (what, mode, chunks, amount, alone, peer) in [
        ("half.off", Mode::Off, kind.short(), few, little, ""),
        ("half.auto", Mode::Auto, kind.short(), amount, whole, "thesis, big_50: 0.78 with jobs of 1,400 s"),
        ("half.forced", Mode::Forced, kind.short(), amount, whole, ""),
        ("half.both_fit.off", Mode::Off, kind.plenty(), amount, whole, ""),
        ("half.both_fit.auto", Mode::Auto, kind.plenty(), amount, whole, "thesis, small_50: 1.14 of no lock"),
    ] {
        let mut rows = kind.row(what, kind.config(chunks, mode, None), amount, alone)?;
        if let Some(first) = rows.first_mut() {
            *first = first.clone().beside(peer);
        }
        metrics.extend(rows);
    }
    Ok(())
}

/// Turns of set lengths.
fn lengths(kind: &Kind, metrics: &mut Vec<Metric>) -> Result<()> {
    let alone = kind.alone(PASSES)?;
    for ms in QUANTA_MS {
        let config = kind.config(kind.short(), Mode::Forced, Some(Duration::from_millis(ms)));
        let mut rows = kind.row(&format!("quantum_{ms}ms"), config, PASSES, alone)?;
        if let Some(first) = rows.first_mut() {
            *first = first.clone().beside("thesis: 1.94, 1.27, 1.10, 1.06 at 5, 10, 20, 30 s");
        }
        metrics.extend(rows);
    }
    Ok(())
}

/// Measures.
pub fn run() -> Result<Vec<Metric>> {
    let copies = Kind::new("copies", Reach::Copies, false)?;
    let counted = Kind::new("pointers_counted", Reach::Pointers, true)?;
    let unseen = Kind::new("pointers_unseen", Reach::Pointers, false)?;
    for kind in [copies, counted, unseen] {
        ensure!(kind.short() > kind.used && kind.short() < 2 * kind.used, "{}: {} chunks", kind.name, kind.used);
    }
    let mut metrics = Vec::new();
    busy(&copies, &mut metrics)?;
    busy(&counted, &mut metrics)?;
    busy(&unseen, &mut metrics)?;
    halves(&copies, &mut metrics)?;
    lengths(&copies, &mut metrics)?;
    Ok(metrics)
}
