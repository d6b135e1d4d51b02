//! Measures doorbells of a VM that is alone on its card, with the guest in this process. The metrics are the rate with
//! one and with several doorbells in flight, and the duration of the USERD store, during which a virtual CPU waits.

use anyhow::{Context, Result};
use nvspec::instance::userd;
use rig::Rig;
use rig::driver::{CE0, Channel, Driver, PAGE, object};
use std::time::{Duration, Instant};
use vmm_glue::RegionIndex;
use vram::Limits;

use crate::report::{Metric, median};
use rig::in_process_vm::{CardConfig, guest, wait};

/// Number of rounds. The report contains the median.
const ROUNDS: usize = 7;
/// Number of doorbells per round.
const DOORBELLS: usize = 20_000;
/// Number of doorbells in flight in the queued measurement.
const QUEUED: usize = 8;
/// VRAM size of the VM in MiB. The card has twice as much memory.
const MIB: u64 = 32;

/// Result of one round.
struct Round {
    rate: f64,
    /// Durations of the stores in us, in ascending order.
    stores: Vec<f64>,
}

/// Rings [`DOORBELLS`] doorbells, with `queued` in flight.
fn ring(driver: &mut Driver, channel: &mut Channel, queued: usize) -> Result<Round> {
    let mut stores = Vec::with_capacity(DOORBELLS);
    let mut spent = Duration::ZERO;
    for batch in 0..DOORBELLS / queued {
        let began = Instant::now();
        let mut between = Duration::ZERO;
        for _ in 0..queued {
            // Exclude the guest's own time, which includes writing to the ring and the push buffers.
            let own = Instant::now();
            let put = driver.queue_fenced(channel, &object(CE0));
            between += own.elapsed();
            let stored = Instant::now();
            let at = u64::from(channel.id) * PAGE + userd::GP_PUT;
            driver.guest.write(RegionIndex::Bar1, at, &put.to_le_bytes());
            stores.push(stored.elapsed().as_secs_f64() * 1e6);
        }
        wait(driver, channel).with_context(|| format!("batch {batch}"))?;
        spent += began.elapsed().saturating_sub(between);
    }
    stores.sort_by(f64::total_cmp);
    Ok(Round { rate: stores.len() as f64 / spent.as_secs_f64(), stores })
}

/// Runs the benchmark.
pub fn run() -> Result<Vec<Metric>> {
    let mut metrics = Vec::new();
    let rig: Rig = CardConfig::new(2 * MIB, MIB).open()?;
    let mut driver = guest(&rig, 0, MIB, Limits::default())?;
    let mut channel = driver.channel(1);
    for (name, queued) in [("waited", 1), ("queued", QUEUED)] {
        let rounds: Vec<Round> = (0..ROUNDS).map(|_| ring(&mut driver, &mut channel, queued)).collect::<Result<_>>()?;
        let middle = |of: &dyn Fn(&Round) -> f64| {
            median(&rounds.iter().map(of).collect::<Vec<_>>()).context("no round was measured")
        };
        let at = |round: &Round, permille: usize| round.stores[round.stores.len() * permille / 1000];
        metrics.push(Metric::plain(format!("doorbells.{name}.rate"), middle(&|round| round.rate)?, "1/s"));
        metrics.push(Metric::plain(format!("doorbells.{name}.store.p50"), middle(&|round| at(round, 500))?, "us"));
        metrics.push(Metric::plain(format!("doorbells.{name}.store.p99"), middle(&|round| at(round, 990))?, "us"));
    }
    Ok(metrics)
}
