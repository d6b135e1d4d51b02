//! Two jobs that fit on the card separately, but not together (unified-memory thesis, chapters 11 to 13). The jobs run
//! without quanta, with quanta, and with quanta only while they thrash.
//!
//! In each pass, a job's engine copies every block of its working set to the next block. The duration of a pass is
//! modelled for data on the card and in host memory, so the result does not depend on the speed of kernels.

use std::sync::Barrier;
use std::time::Instant;

use anyhow::{Context, Result, ensure};
use rig::Rig;
use rig::driver::{At, Channel, Driver, M2MF, PAGE, m2mf_copy, object, pattern};
use vram::{Limits, Mode, TenantId};

use super::{BUS_RATE, LANES, division, time};
use crate::report::{Metric, Target};
use rig::in_process_vm::{CardConfig, MIB, account, guest, wait};

/// Chunk size in bytes. It is small, so that a switch between quanta is short, and several switches occur within
/// seconds.
const CHUNK: u64 = 512 << 10;
/// VRAM size of the card in chunks.
const CARD: u64 = 22;
/// Size of a block in bytes.
const PIECE_BYTES: u64 = CHUNK / 2;
/// Number of blocks in a job's working set, excluding the spare block.
const PIECES_PER_JOB: u64 = 32;
/// First guest VRAM address that the driver does not use.
const FIRST_FREE_AT: u64 = 4 * MIB;
/// GPU virtual address of the working set.
const VA: u64 = 0x100_0000;
/// Number of passes of a job over its working set.
const PASSES: u64 = 500;
/// Number of passes in modes that are much slower.
const FEW_PASSES: u64 = PASSES / 20;
/// Number of passes in flight. With several passes in flight, late wake-ups on this machine affect the mean less.
const QUEUED: u64 = 5;

/// A job and its guest.
struct Job {
    driver: Driver,
    channel: Channel,
    seed: u32,
}

impl Job {
    fn new(rig: &Rig, vm: u32) -> Result<Self> {
        let bytes = (PIECES_PER_JOB + 1) * PIECE_BYTES;
        let mut driver = guest(rig, vm, (FIRST_FREE_AT + bytes).div_ceil(MIB).max(16), Limits::default())?;
        let channel = driver.channel(1);
        driver.map(channel.space, VA, At::Vram(FIRST_FREE_AT), bytes / PAGE);
        let seed = vm + 50;
        for page in 0..PIECES_PER_JOB * PIECE_BYTES / PAGE {
            driver.guest.vram_write(FIRST_FREE_AT + page * PAGE, &pattern(seed, page));
        }
        Ok(Self { driver, channel, seed })
    }

    /// Executes passes over the working set.
    fn run(&mut self, passes: u64) -> Result<()> {
        let hand_on =
            |from: u64, to: u64| m2mf_copy(VA + from * PIECE_BYTES, VA + to * PIECE_BYTES, PIECE_BYTES as u32);
        // Copy the last block to the spare block, every other block to the next block, and the spare block to the first
        // block.
        let order = (0..=PIECES_PER_JOB).rev().map(|to| if to == 0 { (PIECES_PER_JOB, 0) } else { (to - 1, to) });
        let words = [object(M2MF)].into_iter().chain(order.map(|(from, to)| hand_on(from, to)));
        let words = words.collect::<Vec<_>>().concat();
        for pass in 1..=passes {
            self.driver.submit(&mut self.channel, &words);
            if pass % QUEUED == 0 || pass == passes {
                wait(&mut self.driver, &self.channel)?;
            }
        }
        Ok(())
    }

    /// Verifies all bytes of the working set after `passes` passes.
    fn verify(&self, passes: u64) -> Result<()> {
        for piece in 0..PIECES_PER_JOB {
            let began_as = (piece + PIECES_PER_JOB - passes % PIECES_PER_JOB) % PIECES_PER_JOB;
            for page in 0..PIECE_BYTES / PAGE {
                let mut found = vec![0; PAGE as usize];
                self.driver.guest.vram_read(FIRST_FREE_AT + piece * PIECE_BYTES + page * PAGE, &mut found);
                let expected = pattern(self.seed, began_as * PIECE_BYTES / PAGE + page);
                ensure!(found == expected, "seed {}: page {page} of chunk {piece} has wrong contents", self.seed);
            }
        }
        Ok(())
    }
}

/// Result of the two jobs in a mode.
struct Outcome {
    makespan: f64,
    /// Number of bytes in host memory at the start.
    outside: u64,
    moved: u64,
    /// Number of quantum switches.
    turns: u64,
}

fn together(mode: Mode, chunks: u64, passes: u64) -> Result<Outcome> {
    let mut division = division();
    division.quanta.mode = mode;
    let config = CardConfig { division, time: time(), chunk_bytes: CHUNK, ..CardConfig::new(chunks * CHUNK / MIB, 64) };
    let rig = config.open()?;
    let moved = || -> u64 {
        let state = rig.host.lock();
        [0, 1].map(|vm| state.memory().moved(TenantId(vm)).map_or(0, |moved| moved.sum.bytes)).iter().sum()
    };
    let mut jobs = [Job::new(&rig, 0)?, Job::new(&rig, 1)?];
    let turns = || rig.host.lock().memory().divider().residency().begun();
    let before = (moved(), turns());
    let outside = u64::from(account(&rig, 0)?.host + account(&rig, 1)?.host) * CHUNK;
    let ready = Barrier::new(jobs.len());
    let began = Instant::now();
    std::thread::scope(|scope| -> Result<()> {
        let run = |job| {
            ready.wait();
            Job::run(job, passes)
        };
        let threads: Vec<_> = jobs.iter_mut().map(|job| scope.spawn(move || run(job))).collect();
        threads.into_iter().try_for_each(|job| job.join().ok().context("a job panicked")?)
    })?;
    let makespan = began.elapsed().as_secs_f64();
    jobs.iter().try_for_each(|job| job.verify(passes))?;
    Ok(Outcome { makespan, outside, moved: moved() - before.0, turns: turns() - before.1 })
}

/// Runs the benchmark.
pub fn run() -> Result<Vec<Metric>> {
    let config = CardConfig {
        division: division(),
        time: time(),
        chunk_bytes: CHUNK,
        ..CardConfig::new(CARD * CHUNK / MIB, 64)
    };
    // Run the jobs in sequence, with the same number of passes per job as when they run together.
    let serial = |passes: u64| -> Result<f64> {
        let mut alone = f64::INFINITY;
        for vm in 0..2 {
            let rig = config.open()?;
            let mut job = Job::new(&rig, vm)?;
            let began = Instant::now();
            job.run(passes)?;
            // The jobs are identical, so differences between their times are caused by other work on this machine.
            alone = alone.min(began.elapsed().as_secs_f64());
            job.verify(passes)?;
        }
        Ok(2.0 * alone)
    };
    let (serial, serial_of_few) = (serial(PASSES)?, serial(FEW_PASSES)?);
    let mut metrics = vec![Metric::plain("swap.thrash.serial", serial, "s")];
    for (name, mode, chunks, passes) in [
        ("off", Mode::Off, CARD, FEW_PASSES),
        ("auto", Mode::Auto, CARD, PASSES),
        ("forced", Mode::Forced, CARD, PASSES),
        // If both jobs fit, quanta have only a cost, so the detector must not enable them.
        ("both_fit.auto", Mode::Auto, 3 * CARD, PASSES),
        ("both_fit.forced", Mode::Forced, 3 * CARD, PASSES),
    ] {
        let Outcome { makespan, outside, moved, turns } = together(mode, chunks, passes)?;
        let name = format!("swap.thrash.{name}");
        let serial = if passes == FEW_PASSES { serial_of_few } else { serial };
        let against =
            |what: &str, baseline: f64| Metric::ratio(format!("{name}.{what}"), makespan, "s", baseline, Target::None);
        let peer = match mode {
            Mode::Off => "thesis: 8.5x serial when thrashing",
            Mode::Auto => "thesis (its lock): 1.06x serial",
            Mode::Forced => "thesis: its lock costs 14 % when jobs would fit",
        };
        metrics.push(against("makespan_to_serial", serial).beside(peer));
        // Memory that is not on the card must be copied in once, and the same amount of memory must be copied out.
        let bound = serial + 2.0 * outside as f64 / (LANES * BUS_RATE as f64);
        metrics.push(against("makespan_to_copy_bound", bound));
        metrics.push(Metric::plain(format!("{name}.moved"), moved as f64 / MIB as f64, "MiB"));
        metrics.push(Metric::plain(format!("{name}.turns"), turns as f64, "turns"));
    }
    Ok(metrics)
}
