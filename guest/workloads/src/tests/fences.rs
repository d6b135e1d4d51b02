//! Many small submissions, all of which must complete in order.

use anyhow::{Result, ensure};

use super::Facts;
use crate::options::Options;
use crate::rig::{Counts, Rig};
use gdev::mapping::Width;
use gdev::nouveau::device::{Domain, Use};
use gdev::nouveau::push::{Engine, Push, Rect};

/// Number of submissions in flight before each wait in the second part of the test.
const SUBMISSIONS_PER_WAIT: u64 = 32;

fn word(source: u64, target: u64) -> Rect {
    Rect { source, target, source_pitch: 4, target_pitch: 4, line_bytes: 4, lines: 1 }
}

/// Runs `fences [--count N] [--quick]`.
pub fn run(rig: &Rig, options: &Options) -> Result<Facts> {
    let count = options.number("count", if options.flag("quick") { 96 } else { 512 })?.clamp(1, 1 << 16);
    let (channel, engines) = rig.full_channel()?;
    let before = interrupts();
    let page = count.next_multiple_of(SUBMISSIONS_PER_WAIT) * 4;
    let numbers = rig.buffer(Domain::Gart, page)?;
    let last = rig.buffer(Domain::Gart, 4096)?;
    let seen = rig.buffer(Domain::Gart, page)?;
    let salt = rig.random().next() as u32 & 0xffff_0000;
    let number = |at: u64| u64::from(salt.wrapping_add(at as u32 + 1));
    for at in 0..count {
        numbers.map()?.store(at as usize * 4, Width::Dword, number(at));
    }
    last.map()?.store(0, Width::Dword, u64::from(salt));

    // Wait for each submission. When the wait returns, the submission's word must have been stored, but no later word.
    for at in 0..count {
        let engine = engines[at as usize % engines.len()];
        let mut push = Push::default();
        push.copy(engine, &word(numbers.address() + at * 4, last.address()));
        channel.submit(&push, &[Use::read(&numbers), Use::write(&last)])?;
        last.wait(false)?;
        let found = last.map()?.load(0, Width::Dword);
        ensure!(found == number(at), "after fence {at}: wanted {:#x}, found {found:#x}", number(at));
    }
    rig.add(Counts { bytes: count * 4, copies: count, channels: 0 });

    // Now up to 32 submissions are in flight together. Each copies its predecessor's number to `seen`, and then stores
    // its own in `last`.
    last.wait(true)?;
    last.map()?.store(0, Width::Dword, u64::from(salt));
    for start in (0..count).step_by(SUBMISSIONS_PER_WAIT as usize) {
        let end = (start + SUBMISSIONS_PER_WAIT).min(count);
        for at in start..end {
            let mut push = Push::default();
            push.copy(Engine::M2mf, &word(last.address(), seen.address() + at * 4));
            push.copy(Engine::M2mf, &word(numbers.address() + at * 4, last.address()));
            let uses = [Use::read(&numbers), Use { reads: true, ..Use::write(&last) }, Use::write(&seen)];
            channel.submit(&push, &uses)?;
        }
        seen.wait(false)?;
        for at in start..end {
            let found = seen.map()?.load(at as usize * 4, Width::Dword);
            let wanted = if at == 0 { u64::from(salt) } else { number(at - 1) };
            ensure!(found == wanted, "submission {at} ran out of order: wanted {wanted:#x}, found {found:#x}");
        }
    }
    rig.add(Counts { bytes: count * 4, copies: count * 2, channels: 0 });
    let interrupts = interrupts().saturating_sub(before);
    Ok(vec![("fences", (2 * count).to_string()), ("interrupts", interrupts.to_string())])
}

/// Returns the total number of the card's interrupts on all CPUs.
fn interrupts() -> u64 {
    let table = std::fs::read_to_string("/proc/interrupts").unwrap_or_default();
    let of_card = |line: &&str| line.ends_with("nvkm") || line.ends_with("nouveau");
    let count = |line: &str| line.split_whitespace().skip(1).map_while(|word| word.parse::<u64>().ok()).sum::<u64>();
    table.lines().filter(of_card).map(count).sum()
}
