//! Two jobs each of which fits the card, and which do not fit together (unified-memory thesis, chapters 11 to 13): as they
//! come, by turns, and by turns only when they thrash.
//!
//! A job's engine copies every buffer of its working set to the next, pass after pass. What a pass takes on the card and
//! from host memory is modelled, so nothing here depends on how fast kernels are executed.

use std::time::Instant;

use anyhow::{Context, Result, ensure};
use mediator::vgpu::rig::Rig;
use mediator::vgpu::rig::driver::{At, Channel, Driver, M2MF, PAGE, m2mf_copy, object, pattern};
use tests::bench::{Metric, Target};
use tests::light::{CardConfig, MIB, guest, wait};
use vram::{Limits, Mode, VmId};

use super::{BUS_RATE, CHUNK, division, time};

/// MiB of the card.
const CARD_MIB: u64 = 40;
/// Chunks of a job's working set.
const SET: u64 = 16;
/// First chunk of guests' VRAM that the driver itself has nothing in.
const FIRST: u64 = 2;
/// Where the set is for the GPU.
const VA: u64 = 0x100_0000;
/// Times that a job goes through its set.
const PASSES: u32 = 30;
/// Both copy engines.
const LANES: f64 = 2.0;

/// A job and its guest.
struct Job {
    driver: Driver,
    channel: Channel,
    vm: u32,
}

impl Job {
    fn new(rig: &Rig, vm: u32) -> Result<Self> {
        let mut driver = guest(rig, vm, (SET + FIRST + 2) * CHUNK / MIB, Limits::default())?;
        let channel = driver.channel(1);
        driver.map(channel.space, VA, At::Vram(FIRST * CHUNK), SET * CHUNK / PAGE);
        Ok(Self { driver, channel, vm })
    }

    /// Seconds that the job takes; every byte is verified.
    fn run(&mut self, passes: u32) -> Result<f64> {
        let Self { driver, channel, vm } = self;
        let seed = *vm + 50;
        for page in 0..SET * CHUNK / PAGE {
            driver.guest.vram_write(FIRST * CHUNK + page * PAGE, &pattern(seed, page));
        }
        let began = Instant::now();
        for _ in 0..passes {
            // Each pass copies what is at the end of a chunk to its begin and back: the bytes stay what they are.
            for chunk in 0..SET {
                let (from, half) = (VA + chunk * CHUNK, CHUNK / 2);
                let there = m2mf_copy(from, from + half, half as u32);
                driver.submit(channel, &[object(M2MF), there].concat());
                wait(driver, channel)?;
            }
        }
        let took = began.elapsed().as_secs_f64();
        for chunk in 0..SET {
            for page in 0..CHUNK / PAGE {
                let first = chunk * CHUNK / PAGE;
                let mut found = vec![0; PAGE as usize];
                driver.guest.vram_read((FIRST * CHUNK) + (first + page) * PAGE, &mut found);
                let expected = pattern(seed, first + page % (CHUNK / 2 / PAGE));
                ensure!(found == expected, "VM {vm}: page {page} of chunk {chunk} holds something else");
            }
        }
        Ok(took)
    }
}

/// What a mode made of the two jobs.
struct Outcome {
    makespan: f64,
    bytes: u64,
    turns: bool,
}

fn together(mode: Mode, card_mib: u64) -> Result<Outcome> {
    let mut division = division();
    division.quanta.mode = mode;
    (division.quanta.window_ns, division.quanta.min_ns) = (1_000_000_000, 100_000_000);
    let rig = CardConfig { division, time: time(), ..CardConfig::new(card_mib, 128) }.open()?;
    let mut jobs = [Job::new(&rig, 0)?, Job::new(&rig, 1)?];
    let (began, mut turns) = (Instant::now(), false);
    std::thread::scope(|scope| -> Result<()> {
        let jobs: Vec<_> = jobs.iter_mut().map(|job| scope.spawn(|| job.run(PASSES))).collect();
        while !jobs.iter().all(std::thread::ScopedJoinHandle::is_finished) {
            turns |= rig.host.lock().divider.turn().is_some();
            std::thread::sleep(std::time::Duration::from_millis(2));
        }
        jobs.into_iter().try_for_each(|job| job.join().ok().context("a job panicked")?.map(drop))
    })?;
    let makespan = began.elapsed().as_secs_f64();
    let bytes = [0, 1].map(|vm| rig.host.lock().moved(VmId(vm)).map_or(0, |moved| moved.sum.bytes)).iter().sum();
    Ok(Outcome { makespan, bytes, turns })
}

/// Measures.
pub fn run() -> Result<Vec<Metric>> {
    let config = CardConfig { division: division(), time: time(), ..CardConfig::new(CARD_MIB, 128) };
    let mut serial = 0.0;
    for vm in 0..2 {
        let rig = config.open()?;
        serial += Job::new(&rig, vm)?.run(PASSES)?;
    }
    let mut metrics = vec![Metric::plain("swap.thrash.serial", serial, "s")];
    // One set goes out and one comes in at least, once.
    let bound = serial + 2.0 * (SET * CHUNK) as f64 / (LANES * BUS_RATE as f64);
    for (name, mode, card_mib) in [
        ("off", Mode::Off, CARD_MIB),
        ("auto", Mode::Auto, CARD_MIB),
        ("forced", Mode::Forced, CARD_MIB),
        // Where both fit, turns are a loss, and the detector does not take them.
        ("both_fit.auto", Mode::Auto, 3 * CARD_MIB),
        ("both_fit.forced", Mode::Forced, 3 * CARD_MIB),
    ] {
        let Outcome { makespan, bytes, turns } = together(mode, card_mib)?;
        let name = format!("swap.thrash.{name}");
        let against =
            |what: &str, baseline: f64| Metric::ratio(format!("{name}.{what}"), makespan, "s", baseline, Target::None);
        let peer = match mode {
            Mode::Off => "thesis: 8.5x serial when thrashing",
            Mode::Auto => "thesis (its lock): 1.06x serial",
            Mode::Forced => "thesis: its lock costs 14 % when jobs would fit",
        };
        metrics.push(against("makespan_to_serial", serial).beside(peer));
        if card_mib == CARD_MIB {
            metrics.push(against("makespan_to_copy_bound", bound));
        }
        metrics.push(Metric::plain(format!("{name}.moved"), bytes as f64 / MIB as f64, "MiB"));
        metrics.push(Metric::plain(format!("{name}.took_turns"), f64::from(u8::from(turns)), "bool"));
    }
    Ok(metrics)
}
