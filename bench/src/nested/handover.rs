//! Switches PGRAPH between two VMs, with and without clearing registers and shared memory between switches.

use std::time::Instant;

use anyhow::{Context, Result};
use card_manager::Sharing;
use rig::driver::{Channel, Driver, M2MF, PAGE, m2mf_copy, object};
use rig::{Rig, sharing};
use simgpu::Config;

use super::Values;
use crate::report::Metric;

/// VRAM size of a card in MiB.
const CARD_MIB: u32 = 64;
/// VRAM size of a VM in MiB.
const VM_MIB: u64 = 16;
const CHANNELS: u32 = 8;
/// Virtual address of the source buffer.
const FROM: u64 = 0x100_0000;
const TO: u64 = 0x200_0000;
/// Number of measurements of each kind.
const ROUNDS: usize = 15;
/// Number of switches per measurement.
const HANDOVERS_PER_MEASUREMENT: u32 = 40;

/// A VM with a channel that copies a page.
struct Worker {
    driver: Driver,
    channel: Channel,
}

impl Worker {
    fn new(rig: &Rig, vm: u32) -> Self {
        let mut driver = Driver::new(rig.guest(vm, VM_MIB, CHANNELS));
        let channel = driver.channel(1);
        driver.buffer(&channel, FROM, 1, 1);
        driver.buffer(&channel, TO, 1, 2);
        Self { driver, channel }
    }

    fn work(&mut self) {
        self.driver.submit(&mut self.channel, &[object(M2MF), m2mf_copy(FROM, TO, PAGE as u32)].concat());
        self.driver.wait(&self.channel);
    }
}

/// A card with two VMs.
struct Scene {
    rig: Rig,
    workers: [Worker; 2],
    values: Values,
}

impl Scene {
    fn new(clear: bool) -> Self {
        let sharing = Sharing { clear, ..sharing() };
        let rig = Rig::made(&Config { vram_mib: CARD_MIB, ..Config::default() }, &sharing, |card| card);
        let workers = [0, 1].map(|vm| Worker::new(&rig, vm));
        Self { rig, workers, values: Values::default() }
    }

    fn cleared(&self) -> u64 {
        self.rig.host.lock().tenancy_counts().map_or(0, |counts| counts.cleared)
    }

    /// Runs copies for the two VMs in alternation, and records their mean duration in microseconds.
    fn round(&mut self) {
        let began = Instant::now();
        for _ in 0..HANDOVERS_PER_MEASUREMENT / 2 {
            self.workers.iter_mut().for_each(Worker::work);
        }
        self.values.0.push(began.elapsed().as_secs_f64() * 1e6 / f64::from(HANDOVERS_PER_MEASUREMENT));
    }
}

/// Runs the benchmark.
pub(super) fn run() -> Result<Vec<Metric>> {
    let mut scenes = [true, false].map(Scene::new);
    for round in 0..ROUNDS {
        for scene in crate::report::order(scenes.len(), round) {
            scenes.get_mut(scene).context("a scene")?.round();
        }
    }
    let [clear, keep] = scenes;
    let turns = f64::from(HANDOVERS_PER_MEASUREMENT) * ROUNDS as f64;
    let mut metrics = clear.values.beside(&keep.values, "nested.handover.turn", "us")?;
    metrics.push(Metric::plain("nested.handover.cleared_of_turns", clear.cleared() as f64 / turns, "1"));
    metrics.push(Metric::plain("nested.handover.cleared_of_turns_kept", keep.cleared() as f64 / turns, "1"));
    Ok(metrics)
}
