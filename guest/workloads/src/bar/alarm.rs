//! Tests PTIMER's alarm while a driver is bound: the driver acknowledges the alarm, and the kernel counts the
//! interrupt.

use std::fs;
use std::thread::sleep;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};

use super::card::Card;
use super::layout::reg;
use crate::options::Options;
use crate::rig::Counts;
use crate::tests::Facts;

const INTERRUPTS: &str = "/proc/interrupts";
/// Names of the driver's interrupt handlers in `/proc/interrupts`.
const DRIVER: [&str; 2] = ["nvkm", "nouveau"];
/// Delay from the register writes to the alarm, in ns of the card's clock. The writes take less time, even under
/// emulation.
const ALARM_DELAY_NS: u32 = 50_000_000;
/// Time limit for an interrupt. TIMEOUT: only an alarm that never fires takes this long.
const ALARM_TIMEOUT: Duration = Duration::from_secs(30);

/// Runs `bar alarm [--count=]`.
pub fn run(card: &Card, options: &Options) -> Result<(Counts, Facts)> {
    let count = options.number("count", 3)?;
    let mut latest = 0;
    for alarm in 0..count {
        latest = latest.max(rings(card).with_context(|| format!("alarm {alarm}"))?);
    }
    Ok((Counts::default(), vec![("alarms", count.to_string()), ("late_us", (latest / 1000).to_string())]))
}

/// Sets the alarm and waits for its interrupt. Returns the delay from the alarm to the detection of the interrupt, in
/// ns.
fn rings(card: &Card) -> Result<u32> {
    let before = interrupts()?;
    let at = card.read(reg::PTIMER_LOW).wrapping_add(ALARM_DELAY_NS);
    card.write(reg::PTIMER_ALARM, at);
    card.write(reg::PTIMER_INTR_EN, 1);
    let began = Instant::now();
    while began.elapsed() < ALARM_TIMEOUT {
        let (now, time) = (interrupts()?, card.read(reg::PTIMER_LOW));
        let late = time.wrapping_sub(at);
        if now > before {
            ensure!(late < 1 << 31, "an interrupt arrived {} ns before the alarm time", at.wrapping_sub(time));
            return Ok(late);
        }
        sleep(Duration::from_millis(1));
    }
    bail!("no interrupt within {} s; {before} before", ALARM_TIMEOUT.as_secs())
}

/// Returns the total number of the driver's interrupts on all CPUs.
fn interrupts() -> Result<u64> {
    let text = fs::read_to_string(INTERRUPTS).context(INTERRUPTS)?;
    let line = text.lines().find(|line| DRIVER.iter().any(|driver| line.ends_with(driver)));
    let line = line.context("the driver has no interrupt handler")?;
    Ok(line.split_whitespace().skip(1).map_while(|word| word.parse::<u64>().ok()).sum())
}
