//! Measures the speed of moving chunks in comparison with plain copies between the same memories by the same engines,
//! and the effect of the chunk size (GPUswap's figures 7 to 9).

use std::time::Instant;

use anyhow::{Context, Result, ensure};
use nvspec::instance::context;
use rig::Rig;
use rig::driver::{At, CE0, CE1, Channel, Driver, PAGE, methods, object, pattern};
use simgpu::TimeModel;
use vram::{Limits, Step, TenantId, To};

use super::{CHUNK, WAIT_TIMEOUT, division, time};
use crate::report::{Metric, Target, median};
use rig::in_process_vm::{CardConfig, MIB, account, guest, wait};

/// Number of bytes copied or moved per measurement.
pub(super) const BYTES: u64 = 32 * MIB;
/// Guest VRAM address of the buffer, which is a chunk boundary for every chunk size.
pub(super) const BUFFER_AT: u64 = 64 * MIB;
/// GPU virtual address of the buffer.
pub(super) const VRAM_VA: u64 = 0x100_0000;
/// GPU virtual address of the RAM.
pub(super) const RAM_VA: u64 = VRAM_VA + BYTES;
/// Guest-physical address of RAM.
const GPA: u64 = 64 * MIB;
/// Number of measurements of each kind. The report contains the median.
const ROUNDS: usize = 5;
/// Line length of a copy in bytes.
const LINE: u64 = 16 << 10;
/// Number of bytes per copy.
const COPY_BYTES: u64 = MIB;

/// A card with one guest that has a filled buffer.
pub(super) struct Scene {
    pub(super) rig: Rig,
    driver: Driver,
    /// A channel on each copy engine.
    lanes: [Channel; 2],
}

impl Scene {
    pub(super) fn new(chunk_bytes: u64, time: Option<TimeModel>) -> Result<Self> {
        // Prevent the mover from moving chunks back, even if a busy host delays this benchmark.
        let mut division = division();
        division.balance.return_interval_ns = u64::try_from(WAIT_TIMEOUT.as_nanos())?;
        let config = CardConfig { chunk_bytes, time, division, ..CardConfig::new(192, 192) };
        let rig = config.open()?;
        let mut driver = guest(&rig, 0, 128, Limits::default())?;
        ensure!(driver.guest.map_ram(GPA, BYTES, true), "no RAM");
        let mut lane = |id: u8, others: [u64; 2]| {
            let channel = driver.prepare(id);
            others.into_iter().for_each(|pointer| driver.guest.poke(channel.instance + pointer, 0));
            driver.bind(&channel);
            driver.map(channel.space, VRAM_VA, At::Vram(BUFFER_AT), BYTES / PAGE);
            driver.map(channel.space, RAM_VA, At::Ram(GPA), BYTES / PAGE);
            channel
        };
        let lanes = [lane(1, [context::GR, context::CE1]), lane(2, [context::GR, context::CE0])];
        driver.list(&[1, 2]);
        let mut scene = Self { rig, driver, lanes };
        scene.fill(1);
        Ok(scene)
    }

    fn fill(&mut self, seed: u32) {
        for page in 0..BYTES / PAGE {
            self.driver.guest.vram_write(BUFFER_AT + page * PAGE, &pattern(seed, page));
        }
    }

    /// Returns the speed of plain copies with both engines, in bytes per second.
    pub(super) fn plain(&mut self, from: u64, to: u64) -> Result<f64> {
        let began = Instant::now();
        for (lane, (channel, engine)) in (0..).zip(self.lanes.iter_mut().zip([CE0, CE1])) {
            let half = lane * BYTES / 2;
            let pieces = (half..half + BYTES / 2).step_by(COPY_BYTES as usize);
            let words = [object(engine)].into_iter().chain(pieces.map(|at| rectangle(from + at, to + at)));
            self.driver.submit(channel, &words.collect::<Vec<_>>().concat());
        }
        for channel in &self.lanes {
            wait(&mut self.driver, channel)?;
        }
        Ok(BYTES as f64 / began.elapsed().as_secs_f64())
    }

    /// Returns the speed of moving chunks in bytes per second, and the VM's suspension time in milliseconds.
    pub(super) fn relocate(&mut self, chunks: std::ops::Range<u64>, to: To) -> Result<(f64, f64)> {
        let steps: Vec<_> = chunks.map(|index| Step { vm: TenantId(0), index: index as u32, to }).collect();
        let began = Instant::now();
        let done = self.rig.host.relocate(TenantId(0), &steps);
        let took = began.elapsed().as_secs_f64();
        ensure!(done.moved as usize == steps.len(), "{done:?} of {} chunks", steps.len());
        Ok((done.bytes as f64 / took, done.suspended_ns as f64 / 1e6))
    }

    pub(super) fn verify(&self, seed: u32) -> Result<()> {
        ensure!(self.driver.vram_holds(BUFFER_AT, BYTES / PAGE, seed), "the buffer contains wrong data");
        Ok(())
    }
}

fn rectangle(from: u64, to: u64) -> Vec<u32> {
    let (line, lines) = (LINE as u32, (COPY_BYTES / LINE) as u32);
    let halves = |va: u64| [(va >> 32) as u32, va as u32];
    let ([from_high, from], [to_high, to]) = (halves(from), halves(to));
    let mut words = methods(4, 0x30c, &[from_high, from, to_high, to, line, line, line, lines]);
    words.extend(methods(4, 0x300, &[0x110]));
    words
}

fn middle(values: &[f64]) -> Result<f64> {
    median(values).context("no measurement")
}

/// Speeds in both directions, in bytes per second. Each one was measured in alternation with its baseline.
struct Rates {
    /// Relocation speed, and suspension time in milliseconds, if the target is unused host memory, which the host must
    /// first allocate.
    out_fresh: (f64, f64),
    plain_out_fresh: f64,
    out: f64,
    back: f64,
    plain_out: f64,
    plain_back: f64,
    /// Scrubbing speed of vacated card chunks.
    scrub: f64,
}

fn rates(scene: &mut Scene, chunk_bytes: u64) -> Result<Rates> {
    let chunks = BUFFER_AT / chunk_bytes..(BUFFER_AT + BYTES).div_ceil(chunk_bytes);
    let mut all: [Vec<f64>; 5] = Default::default();
    let mut fresh = ((0.0, 0.0), 0.0);
    for round in 0..=ROUNDS {
        let (out, suspended) = scene.relocate(chunks.clone(), To::Host)?;
        scene.verify(1)?;
        let scrubbing = Instant::now();
        scene.rig.host.scrub();
        let scrub = scrubbing.elapsed().as_secs_f64();
        let back = scene.relocate(chunks.clone(), To::Card)?.0;
        scene.verify(1)?;
        scene.rig.host.scrub();
        let plain_out = scene.plain(VRAM_VA, RAM_VA)?;
        let plain_back = scene.plain(RAM_VA, VRAM_VA)?;
        scene.verify(1)?;
        if round == 0 {
            fresh = ((out, suspended), plain_out);
        } else {
            for (values, value) in all.iter_mut().zip([out, back, plain_out, plain_back, BYTES as f64 / scrub]) {
                values.push(value);
            }
        }
    }
    let [out, back, plain_out, plain_back, scrub] = all;
    Ok(Rates {
        out_fresh: fresh.0,
        plain_out_fresh: fresh.1,
        out: middle(&out)?,
        back: middle(&back)?,
        plain_out: middle(&plain_out)?,
        plain_back: middle(&plain_back)?,
        scrub: middle(&scrub)?,
    })
}

/// Compares relocation with plain copies, on the modelled bus and at this machine's full speed.
pub fn throughput() -> Result<Vec<Metric>> {
    let mut metrics = Vec::new();
    for (kind, time) in [("modelled", time()), ("unbound", None)] {
        let mut scene = Scene::new(CHUNK, time)?;
        let Rates { out_fresh, plain_out_fresh, out, back, plain_out, plain_back, scrub } = rates(&mut scene, CHUNK)?;
        let mib = MIB as f64;
        let target = Target::AtLeast(0.9);
        let row = |way: &str, rate: f64, plain: f64| {
            Metric::ratio(format!("swap.throughput.{kind}.{way}"), rate / mib, "MiB/s", plain / mib, target)
        };
        metrics.extend([row("out", out, plain_out), row("back", back, plain_back)]);
        let (fresh, suspended) = out_fresh;
        metrics.push(row("out_to_fresh_memory", fresh, plain_out_fresh));
        let copy = BYTES as f64 / plain_out * 1e3;
        let name = format!("swap.throughput.{kind}.suspension_to_fresh_memory");
        metrics.push(Metric::ratio(name, suspended, "ms", copy, Target::None));
        metrics.push(Metric::plain(format!("swap.throughput.{kind}.scrub"), scrub / mib, "MiB/s"));
    }
    Ok(metrics)
}

/// Measures the effect of the chunk size.
pub fn chunk_sizes() -> Result<Vec<Metric>> {
    const NEW: u64 = 40;
    let mut metrics = Vec::new();
    for kib in [128, 512, 2048, 8192, 32768, 65536] {
        let chunk_bytes = kib << 10;
        let mut scene = Scene::new(chunk_bytes, time())?;
        let whole = chunk_bytes.max(BYTES);
        let name = format!("swap.chunk.{kib}k");
        let plain = scene.plain(VRAM_VA, RAM_VA)?;
        let first = BUFFER_AT / chunk_bytes;
        let (rate, suspended) = scene.relocate(first..first + whole / chunk_bytes, To::Host)?;
        scene.verify(1)?;
        let mib = MIB as f64;
        metrics.push(Metric::ratio(format!("{name}.throughput"), rate / mib, "MiB/s", plain / mib, Target::None));
        metrics.push(Metric::ratio(
            format!("{name}.suspension_of_{}m", whole / MIB),
            suspended,
            "ms",
            whole as f64 / plain * 1e3,
            Target::None,
        ));
        scene.relocate(first..first + whole / chunk_bytes, To::Card)?;
        let mut alone = Vec::new();
        for _ in 0..3 {
            alone.push(scene.relocate(first..first + 1, To::Host)?.1);
            scene.relocate(first..first + 1, To::Card)?;
        }
        let copy = chunk_bytes as f64 / plain * 1e3;
        metrics.push(Metric::ratio(format!("{name}.suspension_of_one"), middle(&alone)?, "ms", copy, Target::None));
        // Allocate buffers of 300 KiB separately, to measure the card memory that they waste.
        let before = account(&scene.rig, 0)?.placed;
        let used = (NEW * 300) << 10;
        for page in 0..used / PAGE {
            scene.driver.guest.vram_write(4 * MIB + page * PAGE, &[1; 64]);
        }
        let taken = u64::from(account(&scene.rig, 0)?.placed - before) * chunk_bytes;
        let wasted = taken.saturating_sub(used);
        let wasted = Metric::plain(format!("{name}.unused_of_{}k", used >> 10), wasted as f64 / 1024.0, "KiB");
        metrics.push(wasted.beside("GPUswap figures 7 to 9: 2 MiB is a good size, larger ones fragment"));
        scene.verify(1)?;
    }
    Ok(metrics)
}
