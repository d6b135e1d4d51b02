//! Fills all VRAM with a pattern, or searches newly allocated buffers for a pattern that another VM left.

use anyhow::{Result, bail};

use super::Facts;
use crate::options::{Options, hex_bytes};
use crate::rig::Rig;
use gdev::nouveau::device::{Buffer, Channel, Domain, Use};
use gdev::nouveau::push::{Engine, linear};

/// Buffer sizes in bytes, in the order of allocation. The next size is used once the previous one no longer fits.
const BUFFER_SIZES_BYTES: [u64; 3] = [4 << 20, 256 << 10, 16 << 10];
/// Maximum number of buffers to allocate.
const MOST_BUFFERS: usize = 4096;
/// Size in bytes of the bounce buffer in guest RAM.
const BOUNCE: u64 = 4 << 20;
/// Permitted pattern lengths in bytes. Shorter patterns could occur by chance.
const PATTERN_BYTES: std::ops::RangeInclusive<usize> = 4..=64;

/// Runs `fill --pattern HEX`.
pub fn fill(rig: &Rig, options: &Options) -> Result<Facts> {
    let pattern = pattern(rig, options)?;
    let (channel, bounce) = (rig.channel(&[Engine::M2mf])?, rig.buffer(Domain::Gart, BOUNCE)?);
    let repeated: Vec<u8> = pattern.iter().copied().cycle().take(BOUNCE as usize).collect();
    bounce.map()?.write(0, &repeated);
    let buffers = all_vram(rig)?;
    let mut filled = 0;
    for buffer in &buffers {
        let mut at = 0;
        while at < buffer.size() {
            let length = (buffer.size() - at).min(BOUNCE);
            let rects = linear(bounce.address(), buffer.address() + at, length, Engine::M2mf.most_lines());
            let uses = [Use::read(&bounce), Use::write(buffer).at(Domain::Vram)];
            rig.launch(&channel, Engine::M2mf, &rects, &uses)?;
            at += length;
        }
        filled += buffer.size();
    }
    // Check that the pattern was written. Otherwise, a scan in another VM would prove nothing.
    let mut found = 0;
    for buffer in &buffers {
        found += scan_buffer(rig, &channel, &bounce, buffer, &pattern)?.hits;
    }
    let wanted = filled / pattern.len() as u64;
    if found < wanted - buffers.len() as u64 {
        bail!("the pattern was written {wanted} times, but found only {found} times");
    }
    Ok(vec![("filled", filled.to_string()), ("buffers", buffers.len().to_string()), ("hits", found.to_string())])
}

/// Runs `scan --pattern HEX`, which fails if it finds the pattern.
pub fn scan(rig: &Rig, options: &Options) -> Result<Facts> {
    let pattern = pattern(rig, options)?;
    let (channel, bounce) = (rig.channel(&[Engine::M2mf])?, rig.buffer(Domain::Gart, BOUNCE)?);
    let buffers = all_vram(rig)?;
    let mut total = Scan::default();
    for buffer in &buffers {
        let Scan { hits, nonzero, bytes } = scan_buffer(rig, &channel, &bounce, buffer, &pattern)?;
        total = Scan { hits: total.hits + hits, nonzero: total.nonzero + nonzero, bytes: total.bytes + bytes };
    }
    let Scan { hits, nonzero, bytes } = total;
    println!("scanned {bytes} bytes in {} buffers: {hits} hits, {nonzero} bytes not zero", buffers.len());
    if hits > 0 {
        bail!("the pattern was found: scanned={bytes} hits={hits} nonzero={nonzero}");
    }
    Ok(vec![("scanned", bytes.to_string()), ("hits", hits.to_string()), ("nonzero", nonzero.to_string())])
}

fn pattern(rig: &Rig, options: &Options) -> Result<Vec<u8>> {
    let pattern = match options.text("pattern") {
        Some(text) => hex_bytes(text)?,
        None => [rig.random().next().to_le_bytes(), rig.random().next().to_le_bytes()].concat(),
    };
    if !PATTERN_BYTES.contains(&pattern.len()) {
        bail!("--pattern has {} bytes: from {} to {}", pattern.len(), PATTERN_BYTES.start(), PATTERN_BYTES.end());
    }
    Ok(pattern)
}

/// Allocates all available VRAM. Once VRAM is full, the kernel places new buffers in guest RAM, so that no buffer is
/// evicted.
fn all_vram(rig: &Rig) -> Result<Vec<Buffer>> {
    let mut buffers = Vec::new();
    for size in BUFFER_SIZES_BYTES {
        while buffers.len() < MOST_BUFFERS {
            // The allocation fails if the buffer's page tables do not fit, which also means that VRAM is full.
            let Ok(buffer) = rig.buffer(Domain::Either, size) else { break };
            if buffer.place()? != Domain::Vram {
                break;
            }
            buffers.push(buffer);
        }
    }
    if buffers.is_empty() {
        bail!("the kernel has no VRAM left");
    }
    Ok(buffers)
}

/// Numbers of pattern matches, nonzero bytes and scanned bytes.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
struct Scan {
    hits: u64,
    nonzero: u64,
    bytes: u64,
}

fn scan_buffer(rig: &Rig, channel: &Channel, bounce: &Buffer, buffer: &Buffer, pattern: &[u8]) -> Result<Scan> {
    let mut total = Scan::default();
    let mut bytes = vec![0; buffer.size().min(bounce.size()) as usize];
    let mut at = 0;
    while at < buffer.size() {
        let length = (buffer.size() - at).min(bounce.size());
        let rects = linear(buffer.address() + at, bounce.address(), length, Engine::M2mf.most_lines());
        let uses = [Use::read(buffer).at(Domain::Vram), Use::write(bounce)];
        rig.launch(channel, Engine::M2mf, &rects, &uses)?;
        bounce.wait(false)?;
        let bytes = &mut bytes[..length as usize];
        bounce.map()?.read(0, bytes);
        total.hits += count(bytes, pattern);
        total.nonzero += bytes.iter().filter(|byte| **byte != 0).count() as u64;
        total.bytes += length;
        at += length;
    }
    rig.verified(total.bytes);
    Ok(total)
}

/// Returns the number of non-overlapping occurrences of the pattern, at any byte offset.
pub fn count(bytes: &[u8], pattern: &[u8]) -> u64 {
    let Some(first) = pattern.first() else { return 0 };
    let (mut hits, mut at) = (0, 0);
    while at + pattern.len() <= bytes.len() {
        match bytes[at..].iter().position(|byte| byte == first) {
            None => break,
            Some(next) => at += next,
        }
        if bytes[at..].starts_with(pattern) {
            hits += 1;
            at += pattern.len();
        } else {
            at += 1;
        }
    }
    hits
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn patterns_are_counted_at_any_byte() {
        assert_eq!(count(b"xxabcabcxabxabc", b"abc"), 3);
        assert_eq!(count(b"aaaa", b"aa"), 2);
        assert_eq!(count(b"ab", b"abc"), 0);
        assert_eq!(count(b"", b"abc"), 0);
    }
}
