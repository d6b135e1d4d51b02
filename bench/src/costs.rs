//! Measures the mediator's own work for a guest's operations, with the guest in this process, to check the costs in the
//! real-host model ([`crate::model`]). A figure above the model's range misses its target, because the model's cost is
//! then too low.
//!
//! The times include accesses to the software card, which are faster than those to a real card. The model counts
//! accesses to a real card separately.

use std::hint::black_box;
use std::time::Instant;

use anyhow::{Context, Result, ensure};
use nvspec::instance::userd;
use nvspec::regs::{pmc, windows::pramin};
use rig::driver::{CE0, Driver, FENCE_VA, PAGE, object};
use rig::paravirtual::{Interface, Ops, RAM_BYTES, kind, status};
use rig::settings;
use vgpu::{PvSettings, Settings};
use vmm_glue::RegionIndex;

use crate::model::{COSTS, Item};
use crate::report::{Metric, Target, median};
use rig::in_process_vm::{CardConfig, MIB, wait};

/// Number of measurements of each cost, except the read speed of tables.
const ROUNDS: usize = 2_001;
/// VRAM size of the VM in MiB. The card has twice as much memory.
const VM_MIB: u64 = 32;
/// Number of operations in a large batch.
const OPERATIONS: u32 = 513;
/// Number of an aperture page that no channel uses.
const PLAIN_PAGE: u64 = 100;
/// Number of bytes copied to measure the read speed of tables.
const COPIED: usize = 32 << 20;

/// Returns the median time of `act`, in us.
fn timed(mut act: impl FnMut() -> Result<()>) -> Result<f64> {
    let mut times = Vec::with_capacity(ROUNDS);
    for _ in 0..ROUNDS {
        let began = Instant::now();
        act()?;
        times.push(began.elapsed().as_secs_f64() * 1e6);
    }
    median(&times).context("no measurement")
}

/// Runs the benchmark.
pub fn run() -> Result<Vec<Metric>> {
    let rig = CardConfig::new(2 * VM_MIB, VM_MIB).open()?;
    let offered = PvSettings { table_bytes: 8 * MIB, segment_bytes: 4 * MIB, group: None };
    let mut guest = rig.guest_with(0, &Settings { paravirtual: Some(offered), ..settings(VM_MIB, 8) });
    ensure!(guest.map_ram(0, MIB, true), "no RAM");
    let mut driver = Driver::new(guest);
    let mut metrics = Vec::new();
    let mut found = |item: Item, us: f64| {
        let cost = &COSTS[item as usize];
        metrics.push(Metric::plain(format!("costs.{}", cost.name), us, "us").target(Target::AtMost(cost.us[2])));
    };
    let guest = &mut driver.guest;
    found(
        Item::Register,
        timed(|| {
            guest.wr(pmc::INTR_MASK_0::OFFSET, u32::MAX);
            Ok(())
        })?,
    );
    let through = timed(|| {
        guest.write(RegionIndex::Bar3, PLAIN_PAGE * PAGE, &[1, 2, 3, 4]);
        Ok(())
    })?;
    let window = timed(|| {
        guest.wr(pramin::BASE, 1);
        Ok(())
    })?;
    found(Item::Aperture, through.max(window));
    let mut channel = driver.channel(1);
    let mut stores = Vec::with_capacity(ROUNDS);
    for _ in 0..ROUNDS {
        let put = driver.queue_fenced(&mut channel, &object(CE0));
        let began = Instant::now();
        driver.guest.write(RegionIndex::Bar1, u64::from(channel.id) * PAGE + userd::GP_PUT, &put.to_le_bytes());
        stores.push(began.elapsed().as_secs_f64() * 1e6);
        wait(&mut driver, &channel)?;
    }
    found(Item::Doorbell, median(&stores).context("no measurement")?);
    let space = channel.space;
    let mut flushes = Vec::with_capacity(ROUNDS);
    for round in 0..ROUNDS as u64 {
        let page = FENCE_VA / PAGE + 16 + round % 64;
        driver.pte(space, page * PAGE, (channel.fence >> 8) as u32 | 1, 0);
        let began = Instant::now();
        driver.flush();
        flushes.push(began.elapsed().as_secs_f64() * 1e6);
    }
    found(Item::Flush, median(&flushes).context("no measurement")?);
    let (from, mut to) = (vec![1u8; COPIED], vec![2u8; COPIED]);
    let mut copies = Vec::new();
    for _ in 0..9 {
        let began = Instant::now();
        to.copy_from_slice(black_box(&from));
        black_box(&mut to);
        copies.push(began.elapsed().as_secs_f64() * 1e6 * 1024.0 / COPIED as f64);
    }
    found(Item::Scan, median(&copies).context("no measurement")?);
    let mut interface = Interface::open(&mut driver.guest, MIB - RAM_BYTES);
    ensure!(Interface::status(&mut driver.guest) == status::READY, "no interface");
    let tables = Ops::new().create(1, kind::DIRECTORY).create(2, kind::SMALL).set(1, 0, 2, 0);
    ensure!(interface.call(&mut driver.guest, &tables).status == 0, "no tables");
    let mut batch = |operations: u32| {
        let ops = (0..operations).fold(Ops::new(), |ops, at| ops.run(2, at, 1, 0, 0));
        timed(|| {
            ensure!(interface.call(&mut driver.guest, &ops).status == 0, "a batch failed");
            Ok(())
        })
    };
    let (small, large) = (batch(1)?, batch(OPERATIONS)?);
    found(Item::Call, small);
    found(Item::Operation, (large - small) / f64::from(OPERATIONS - 1));
    Ok(metrics)
}
