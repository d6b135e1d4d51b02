//! Holds of the card's lock and VMs' locks, with guests in this process: at work, coming and going, against the
//! others, and short of memory. The longest is compared with the longest single access to the card in the same run, which is
//! what this host takes from a thread at any moment. The processor time of each hold is measured beside it: what is long by that is
//! the mediator's own.

use anyhow::Result;
use locks::{Holds, Measured, holds, measure_work, worked};
use nvspec::regs::pmc;
use rig::Rig;
use rig::driver::{CE0, Channel, Driver, PAGE, ce_copy, object};
use std::time::Instant;
use tests::bench::{Metric, Target};
use tests::light::{CardConfig, guest, wait};
use vmm_glue::RegionIndex;
use vram::{Limits, Step, To, VmId};

const MIB: u64 = 1 << 20;
/// MiB of the card and of host memory.
const CARD_MIB: u64 = 128;
/// MiB of a VM.
const VM_MIB: u64 = 32;
/// Virtual addresses of buffers.
const FROM: u64 = 0x100_0000;
const TO: u64 = 0x200_0000;
/// Pages of a buffer.
const PAGES: u64 = 64;
/// Target for 999 of 1000 holds, in us.
const MOST_US: f64 = 50.0;
/// Places that are shown of a lock.
const PLACES: usize = 6;
/// Target for the longest, in us beyond a single access.
const LONGEST_US: f64 = 1000.0;

/// A VM at work.
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
        let steps: Vec<Step> = (0..(VM_MIB / 2) as u32).map(|index| Step { vm: VmId(0), index, to }).collect();
        rig.host.relocate(VmId(0), &steps);
        worker.work()?;
    }
    Ok(())
}

/// Longest single access to the card, in us.
fn longest_access(rig: &Rig) -> f64 {
    let access = |_| {
        let began = Instant::now();
        rig.host.card().read32(pmc::BOOT_0::OFFSET);
        began.elapsed().as_secs_f64() * 1e6
    };
    (0..200_000).map(access).fold(0.0, f64::max)
}

/// Prints where the locks were taken that were held for long, the longest first.
fn show_long(part: &str, kind: Measured, held: &Holds) {
    let mut long: Vec<_> = held.long().collect();
    long.sort_by_key(|(_, long)| std::cmp::Reverse(long.longest_ns));
    for (at, long) in long.into_iter().take(PLACES) {
        let longest = long.longest_ns / 1000;
        eprintln!(
            "{part}: {} held longest {longest} us of processor time, {} times above 50 us, from {at}",
            kind.name(),
            long.count
        );
    }
}

/// Measures.
pub fn run() -> Result<Vec<Metric>> {
    type Part = (&'static str, fn(&Rig) -> Result<()>);
    let parts: [Part; 4] = [("normal", at_work), ("churn", churn), ("hostile", hostile), ("swap", swap)];
    let mut metrics = Vec::new();
    measure_work();
    for (part, run) in parts {
        let rig = CardConfig::new(CARD_MIB, CARD_MIB).open()?;
        let access = longest_access(&rig);
        metrics.push(Metric::plain(format!("lockhold.{part}.access.longest"), access, "us"));
        let before = Measured::ALL.map(|kind| (holds(kind), worked(kind)));
        run(&rig)?;
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
