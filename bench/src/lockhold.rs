//! Measures the hold times of the card lock and of the VM locks. Guests in this process work, are added and removed,
//! contend, and run short of memory, while another thread reads a card register. The longest hold is compared with the
//! longest of these reads, which is a delay that the card or this host can cause at any time. Also measures the CPU
//! time of each hold, which is the mediator's own contribution.
//!
//! All memory of the process is populated at the start. Otherwise, the first access to a page of the software card's
//! VRAM would cause a page fault. With a real card, there is no such fault.

use anyhow::{Result, anyhow};
use locks::{Holds, Measured, holds, measure_work, worked};
use nvspec::regs::pmc;
use rig::Rig;
use rig::driver::{CE0, Channel, Driver, PAGE, ce_copy, object};
use rustix::mm::{MlockAllFlags, mlockall};
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};
use vmm_glue::RegionIndex;
use vram::{Limits, Step, TenantId, To};

use crate::report::{Metric, Target};
use rig::in_process_vm::{CardConfig, guest, wait};

const MIB: u64 = 1 << 20;
/// Size of the card's VRAM, and also of the host memory for chunks, in MiB.
const CARD_MIB: u64 = 128;
/// VRAM size of a VM in MiB.
const VM_MIB: u64 = 32;
/// Virtual address of the source buffer.
const FROM: u64 = 0x100_0000;
const TO: u64 = 0x200_0000;
/// Number of pages per buffer.
const PAGES: u64 = 64;
/// Target for the 99.9th percentile of the hold time in us.
const MOST_US: f64 = 50.0;
/// Number of code locations shown per lock.
const PLACES: usize = 6;
/// Target for the longest hold in us, in excess of the longest single access.
const LONGEST_US: f64 = 1000.0;
/// Interval between measured accesses. A shorter interval would add too much load.
const ACCESS_INTERVAL: Duration = Duration::from_millis(1);

/// A VM with a channel that copies pages.
struct Worker {
    driver: Driver,
    channel: Channel,
}

impl Worker {
    fn new(rig: &Rig, vm: u32) -> Result<Self> {
        let mut driver = guest(rig, vm, VM_MIB, Limits::default())?;
        let channel = driver.channel(1);
        driver.buffer(&channel, FROM, PAGES, 1);
        driver.buffer(&channel, TO, PAGES, 2);
        Ok(Self { driver, channel })
    }

    fn work(&mut self) -> Result<()> {
        self.driver.submit(&mut self.channel, &[object(CE0), ce_copy(FROM, TO, PAGES as u32)].concat());
        wait(&mut self.driver, &self.channel)
    }
}

fn at_work(rig: &Rig) -> Result<()> {
    let mut workers = [Worker::new(rig, 0)?, Worker::new(rig, 1)?];
    for _ in 0..500 {
        workers.iter_mut().try_for_each(Worker::work)?;
    }
    Ok(())
}

fn churn(rig: &Rig) -> Result<()> {
    let mut other = Worker::new(rig, 0)?;
    for _ in 0..20 {
        let mut worker = Worker::new(rig, 1)?;
        worker.work()?;
        other.work()?;
        worker.driver.unbind(&worker.channel);
        worker.driver.guest.remove()?;
    }
    Ok(())
}

fn hostile(rig: &Rig) -> Result<()> {
    let mut other = Worker::new(rig, 0)?;
    let Worker { mut driver, mut channel } = Worker::new(rig, 1)?;
    for _ in 0..100 {
        driver.submit(&mut channel, &[object(CE0), ce_copy(FROM, TO, PAGES as u32)].concat());
        for _ in 0..20 {
            driver.list(&[]);
            driver.list(&[1]);
            driver.flush();
        }
        wait(&mut driver, &channel)?;
        for command in [2u16, 6].repeat(20) {
            driver.guest.write(RegionIndex::Config, 4, &command.to_le_bytes());
        }
        other.work()?;
    }
    Ok(())
}

fn swap(rig: &Rig) -> Result<()> {
    let mut worker = Worker::new(rig, 0)?;
    for round in 0..40 {
        let to = if round % 2 == 0 { To::Host } else { To::Card };
        let steps: Vec<Step> = (0..(VM_MIB / 2) as u32).map(|index| Step { vm: TenantId(0), index, to }).collect();
        rig.host.relocate(TenantId(0), &steps);
        worker.work()?;
    }
    Ok(())
}

/// Runs a part while measuring single accesses to the card. Returns the durations of the accesses in us, in ascending
/// order.
fn with_accesses(rig: &Rig, run: fn(&Rig) -> Result<()>) -> Result<Vec<f64>> {
    let ended = AtomicBool::new(false);
    thread::scope(|scope| {
        let looker = scope.spawn(|| {
            let mut took = Vec::new();
            while !ended.load(Ordering::Relaxed) {
                let began = Instant::now();
                rig.host.card().read32(pmc::BOOT_0::OFFSET);
                took.push(began.elapsed().as_secs_f64() * 1e6);
                thread::sleep(ACCESS_INTERVAL);
            }
            took.sort_by(f64::total_cmp);
            took
        });
        let ran = run(rig);
        ended.store(true, Ordering::Relaxed);
        let took = looker.join().map_err(|_| anyhow!("the thread that accesses the card has panicked"))?;
        ran.map(|()| took)
    })
}

/// Prints the code locations with the longest lock holds by CPU time, at most [`PLACES`] of them, longest first.
fn show_long(part: &str, kind: Measured, held: &Holds) {
    let mut long: Vec<_> = held.long().collect();
    long.sort_by_key(|(_, long)| std::cmp::Reverse(long.longest_ns));
    for (at, long) in long.into_iter().take(PLACES) {
        let longest = long.longest_ns / 1000;
        eprintln!(
            "{part}: {} held for at most {longest} us of CPU time, {} times above 50 us, from {at}",
            kind.name(),
            long.count
        );
    }
}

/// Runs the benchmark.
pub fn run() -> Result<Vec<Metric>> {
    type Part = (&'static str, fn(&Rig) -> Result<()>);
    let parts: [Part; 4] = [("normal", at_work), ("churn", churn), ("hostile", hostile), ("swap", swap)];
    let mut metrics = Vec::new();
    measure_work();
    if let Err(error) = mlockall(MlockAllFlags::CURRENT | MlockAllFlags::FUTURE) {
        eprintln!("bench: memory is populated on first access, which prolongs lock holds: {error} (run this as root)");
    }
    for (part, run) in parts {
        let rig = CardConfig::new(CARD_MIB, CARD_MIB).open()?;
        let before = Measured::ALL.map(|kind| (holds(kind), worked(kind)));
        let accesses = with_accesses(&rig, run)?;
        let access = accesses.last().copied().unwrap_or_default();
        let usual = accesses.get(accesses.len() * 999 / 1000).copied().unwrap_or_default();
        metrics.push(Metric::plain(format!("lockhold.{part}.access.p999"), usual, "us"));
        metrics.push(Metric::plain(format!("lockhold.{part}.access.longest"), access, "us"));
        for (kind, (before, before_work)) in Measured::ALL.into_iter().zip(before) {
            let held: Holds = holds(kind).since(&before);
            let work = worked(kind).since(&before_work);
            let us = |ns: u64| ns as f64 / 1e3;
            let name = |what| format!("lockhold.{part}.{}.{what}", kind.name());
            metrics.push(Metric::plain(name("holds"), held.count() as f64, "holds"));
            metrics.push(Metric::plain(name("p999"), us(held.at(999)), "us").target(Target::AtMost(MOST_US)));
            let longest = Metric::plain(name("longest"), us(held.longest_ns()), "us");
            metrics.push(longest.target(Target::AtMost(LONGEST_US + access)));
            metrics.push(Metric::plain(name("work.p999"), us(work.at(999)), "us").target(Target::AtMost(MOST_US)));
            metrics.push(
                Metric::plain(name("work.longest"), us(work.longest_ns()), "us").target(Target::AtMost(LONGEST_US)),
            );
            show_long(part, kind, &work);
        }
    }
    Ok(metrics)
}

const _: () = assert!(PAGE * PAGES < MIB);
