//! Measures the cost of register accesses.

use std::time::Instant;

use anyhow::{Result, ensure};

use super::card::Card;
use super::layout::reg;
use crate::options::Options;
use crate::rig::Counts;
use crate::tests::Facts;
use gdev::mapping::Width;

const MAX_COUNT: u64 = 100_000_000;

fn place(card: &Card, options: &Options, register: u32) -> Result<(u64, usize, u64)> {
    let (bar, offset) = (options.number("bar", 0)?, options.number("offset", register.into())?);
    let count = options.number("count", 10_000)?;
    ensure!((1..=MAX_COUNT).contains(&count), "--count {count}: from 1 to {MAX_COUNT}");
    let length = card.region(bar)?.bytes();
    let offset = usize::try_from(offset)?;
    ensure!(
        offset.checked_add(4).is_some_and(|end| end <= length),
        "--offset {offset:#x}: region has {length:#x} bytes"
    );
    Ok((bar, offset, count))
}

/// Repeatedly reads a register: the chip ID, or the register selected by options.
pub fn reads(card: &Card, options: &Options) -> Result<(Counts, Facts)> {
    let (bar, offset, count) = place(card, options, reg::BOOT0)?;
    let region = card.region(bar)?;
    let mut slowest = 0;
    let mut quickest = u128::MAX;
    let began = Instant::now();
    for _ in 0..count {
        let one = Instant::now();
        region.load(offset, Width::Dword);
        let nanoseconds = one.elapsed().as_nanos();
        slowest = slowest.max(nanoseconds);
        quickest = quickest.min(nanoseconds);
    }
    let mean = began.elapsed().as_nanos() as f64 / count as f64;
    println!("{count} reads of region {bar} + {offset:#x}: {mean:.0} ns each, from {quickest} to {slowest}");
    Ok((
        Counts::default(),
        vec![
            ("count", count.to_string()),
            ("ns_per_op", format!("{mean:.1}")),
            ("ns_least", quickest.to_string()),
            ("ns_most", slowest.to_string()),
        ],
    ))
}

/// Repeatedly writes a register: one without side effects, or the register selected by options. Then reads a register
/// once, to wait for the writes.
pub fn writes(card: &Card, options: &Options) -> Result<(Counts, Facts)> {
    let (bar, offset, count) = place(card, options, reg::PBUS_INTR)?;
    let value = options.number("value", 0)?;
    let region = card.region(bar)?;
    // Exclude earlier writes that are still in flight.
    card.read(reg::BOOT0);
    let began = Instant::now();
    for _ in 0..count {
        region.store(offset, Width::Dword, value);
    }
    let issued = began.elapsed().as_nanos() as f64 / count as f64;
    card.read(reg::BOOT0);
    let done = began.elapsed().as_nanos() as f64 / count as f64;
    println!("{count} writes to region {bar} + {offset:#x}: {issued:.0} ns each until issued, {done:.0} until done");
    Ok((
        Counts::default(),
        vec![("count", count.to_string()), ("ns_per_op", format!("{done:.1}")), ("ns_issue", format!("{issued:.1}"))],
    ))
}
