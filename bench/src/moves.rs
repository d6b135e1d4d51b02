//! Measures the pauses of VMs during daemon upgrades, by memory size and number of channels. Two daemons, one with
//! small VMs and one with large VMs, run concurrently and are upgraded in turn while all VMs work. Also measures the
//! pauses of VMs that move to another card ([`cards`]).

mod cards;

use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Instant;

use anyhow::{Context, Result, anyhow};
use rig::RemoteGuest;
use rig::driver::{At, CE0, Channel, Driver, PAGE, ce_copy, object};
use tests::Daemon;
use tests::guest::{card_toml, vm_toml};

use crate::report::{Metric, Target, quantile};

/// Number of VMs per daemon.
const VMS: usize = 4;
const VM_MIB: u32 = 256;
/// Number of upgrades per daemon.
const UPGRADES: usize = 100;
/// Load of a small VM.
const SMALL_VM: Load = Load { mib: 8, channels: 1 };
/// Load of a large VM.
const LARGE_VM: Load = Load { mib: 224, channels: 8 };
/// Target for the 99th percentile of the pauses in ms.
const MOST_MS: f64 = 300.0;
/// Number of pages per copy.
const PAGES: u64 = 64;
/// Virtual address of the first buffer.
const BASE: u64 = 0x100_0000;
/// Virtual address of the source chunk of copies. The destination is mapped directly after it.
const FILLED: u64 = 0x400_0000;
const MIB: u64 = 1 << 20;
/// Default size of a chunk in bytes.
const CHUNK: u64 = 2 * MIB;

/// Memory and channels used by a VM.
#[derive(Clone, Copy)]
struct Load {
    /// Memory in MiB.
    mib: u64,
    channels: u8,
}

/// A VM that copies on its channels.
pub(super) struct Worker {
    driver: Driver<RemoteGuest>,
    channels: Vec<Channel>,
}

impl Worker {
    fn new(daemon: &Daemon, name: &str, load: Load) -> Result<Self> {
        let Load { mib, channels } = load;
        let mut driver = Driver::new(RemoteGuest::connect(&daemon.vm_socket(name), u64::from(VM_MIB) * MIB)?);
        let mut channels: Vec<Channel> = (1..=channels).map(|id| driver.channel(id)).collect();
        for channel in &channels {
            driver.buffer(channel, BASE, PAGES, 1);
            driver.buffer(channel, BASE + PAGES * PAGE, PAGES, 2);
        }
        // All memory must be on the card and nonzero, so write the first chunk and copy it to the others.
        let first = &mut channels[0];
        driver.buffer(first, FILLED, CHUNK / PAGE, 3);
        for _ in 1..mib * MIB / CHUNK {
            let at = driver.vram(CHUNK / PAGE);
            driver.map(first.space, FILLED + CHUNK, At::Vram(at), CHUNK / PAGE);
            driver.flush();
            driver.submit(first, &[object(CE0), ce_copy(FILLED, FILLED + CHUNK, (CHUNK / PAGE) as u32)].concat());
            driver.wait(first);
        }
        Ok(Self { driver, channels })
    }

    /// Copies on all channels until `stop` is set. Returns the duration of each round in ms.
    pub(super) fn work(&mut self, stop: &AtomicBool) -> Result<Vec<f64>> {
        let Self { driver, channels } = self;
        let mut rounds = Vec::new();
        while !stop.load(Ordering::Acquire) {
            let began = Instant::now();
            for channel in channels.iter_mut() {
                driver.submit(channel, &[object(CE0), ce_copy(BASE, BASE + PAGES * PAGE, PAGES as u32)].concat());
            }
            channels.iter().for_each(|channel| driver.wait(channel));
            rounds.push(began.elapsed().as_secs_f64() * 1000.0);
        }
        anyhow::ensure!(driver.faults.is_empty(), "{:?}", driver.faults);
        Ok(rounds)
    }
}

/// A daemon and its VMs.
struct Host {
    daemon: Daemon,
    workers: Vec<Worker>,
    pauses: Vec<f64>,
}

impl Host {
    fn new(name: &str, load: Load) -> Result<Self> {
        let names: Vec<String> = (0..VMS).map(|vm| format!("vm{vm}")).collect();
        let vms: String = names.iter().map(|name| vm_toml(name, VM_MIB)).collect();
        let daemon = Daemon::start(name, |paths| card_toml(paths, VMS as u32 * VM_MIB + 256) + &vms)?;
        let workers = names.iter().map(|name| Worker::new(&daemon, name, load)).collect::<Result<_>>()?;
        Ok(Self { daemon, workers, pauses: Vec::new() })
    }
}

/// Runs the benchmark.
pub fn run() -> Result<Vec<Metric>> {
    let mut metrics = upgrades()?;
    metrics.extend(cards::run()?);
    Ok(metrics)
}

fn upgrades() -> Result<Vec<Metric>> {
    let mut hosts = [Host::new("few", SMALL_VM)?, Host::new("many", LARGE_VM)?];
    let stop = AtomicBool::new(false);
    let done = thread::scope(|scope| -> Result<()> {
        let mut runs = Vec::new();
        let mut daemons = Vec::new();
        for Host { daemon, workers, pauses } in &mut hosts {
            runs.extend(workers.iter_mut().map(|worker| scope.spawn(|| worker.work(&stop))));
            daemons.push((daemon, pauses));
        }
        let mut upgrade = || -> Result<()> {
            for round in 0..UPGRADES {
                eprintln!("bench: move, upgrade {} of {UPGRADES}", round + 1);
                for (daemon, pauses) in &mut daemons {
                    let info = daemon.upgrade()?;
                    pauses.push(info["upgrade_pause_ms"].as_u64().context("no pause")? as f64);
                }
            }
            Ok(())
        };
        let upgraded = upgrade();
        stop.store(true, Ordering::Release);
        for run in runs {
            let rounds = run.join().map_err(|_| anyhow!("a thread panicked"))??;
            anyhow::ensure!(!rounds.is_empty(), "a VM did no work");
        }
        upgraded
    });
    done?;
    let [few, many] = &hosts;
    let at = |host: &Host, q: f64| quantile(&host.pauses, q).context("no pauses");
    Ok(vec![
        Metric::plain("move.upgrade.pause_p50_8_mib_1_channel", at(few, 0.5)?, "ms"),
        Metric::plain("move.upgrade.pause_p99_8_mib_1_channel", at(few, 0.99)?, "ms").target(Target::AtMost(MOST_MS)),
        Metric::plain("move.upgrade.pause_p50_224_mib_8_channels", at(many, 0.5)?, "ms"),
        Metric::plain("move.upgrade.pause_p99_224_mib_8_channels", at(many, 0.99)?, "ms")
            .target(Target::AtMost(MOST_MS)),
    ])
}
