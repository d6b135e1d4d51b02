//! CPU accesses to VRAM through BAR1: all widths and alignments, many mappings, and coherence with the GPU.

use anyhow::{Result, ensure};

use super::Facts;
use crate::options::Options;
use crate::pattern::{Expected, Piece, Random};
use crate::rig::{Helper, Rig};
use gdev::mapping::Width;
use gdev::nouveau::device::{Buffer, Domain, Use};
use gdev::nouveau::push::{Engine, linear};

/// Number of unaligned accesses per buffer.
const ACCESSES: u64 = 300;

/// Runs `map [--quick]`.
pub fn run(rig: &Rig, options: &Options) -> Result<Facts> {
    let quick = options.flag("quick");
    let helper = Helper::new(rig, Engine::M2mf)?;
    for size in if quick { &[4096, 65536][..] } else { &[4096, 12288, 65536, 131_072, 1 << 20][..] } {
        written_by_cpu(rig, &helper, *size)?;
        odd_accesses(rig, *size, if quick { ACCESSES / 3 } else { ACCESSES })?;
        rig.progress("map");
    }
    written_by_gpu(rig, &helper, if quick { 4096 } else { 16384 })?;
    let buffers = if quick { 12 } else { 64 };
    many(rig, buffers)?;
    let windows = if quick { 0 } else { more_than_the_aperture(rig)? };
    Ok(vec![("buffers", buffers.to_string()), ("windows", windows.to_string())])
}

/// Checks data that the CPU writes through BAR1 and the GPU reads.
fn written_by_cpu(rig: &Rig, helper: &Helper<'_>, size: u64) -> Result<()> {
    let buffer = rig.buffer(Domain::Vram, size)?;
    let expected = Expected::background(rig.random().stream());
    let mut bytes = vec![0; size as usize];
    expected.fill(0, &mut bytes);
    buffer.map()?.write(0, &bytes);
    helper.check(&format!("{size} bytes written through BAR1"), &buffer, &expected)
}

/// Checks data that the GPU writes and the CPU reads through BAR1.
fn written_by_gpu(rig: &Rig, helper: &Helper<'_>, size: u64) -> Result<()> {
    let buffer = rig.buffer(Domain::Vram, size)?;
    let expected = Expected::background(rig.random().stream());
    helper.fill(&buffer, &expected)?;
    let mut bytes = vec![0; size as usize];
    buffer.map()?.read(0, &mut bytes);
    rig.verified(size);
    expected.check("written by the GPU, read through BAR1", 0, &bytes)
}

/// Compares loads and stores of all widths, at any byte offset, with the same accesses to a copy in ordinary memory.
fn odd_accesses(rig: &Rig, size: u64, accesses: u64) -> Result<()> {
    let mut random = rig.random();
    let buffer = rig.buffer(Domain::Vram, size)?;
    let mut plain = vec![0; size as usize];
    Expected::background(random.stream()).fill(0, &mut plain);
    buffer.map()?.write(0, &plain);
    for _ in 0..accesses {
        let width = Width::ALL[random.below(4) as usize];
        let at = place(&mut random, size, width);
        let here = at..at + width.bytes();
        if random.below(2) == 0 {
            let value = random.next();
            buffer.map()?.store(at, width, value);
            plain[here].copy_from_slice(&value.to_le_bytes()[..width.bytes()]);
        } else {
            let found = buffer.map()?.load(at, width).to_le_bytes();
            ensure!(
                found[..width.bytes()] == plain[here.clone()],
                "{width:?} at {at:#x} through BAR1: wanted {:02x?}, found {:02x?}",
                &plain[here],
                &found[..width.bytes()]
            );
            rig.verified(width.bytes() as u64);
        }
    }
    same_to_the_gpu(rig, &buffer, &plain)
}

/// Returns a random offset, half of the time near a page boundary, where accesses may be split.
fn place(random: &mut Random, size: u64, width: Width) -> usize {
    let last = size - width.bytes() as u64;
    let near_an_edge = random.below(size / 4096 + 1) * 4096 + random.below(16);
    let at = if random.below(2) == 0 { near_an_edge.saturating_sub(8) } else { random.below(last + 1) };
    at.min(last) as usize
}

fn same_to_the_gpu(rig: &Rig, buffer: &Buffer, plain: &[u8]) -> Result<()> {
    let channel = rig.channel(&[Engine::M2mf])?;
    let copy = rig.buffer(Domain::Gart, buffer.size())?;
    let rects = linear(buffer.address(), copy.address(), plain.len() as u64, Engine::M2mf.most_lines());
    rig.launch(&channel, Engine::M2mf, &rects, &[Use::read(buffer), Use::write(&copy)])?;
    copy.wait(false)?;
    let mut found = vec![0; plain.len()];
    copy.map()?.read(0, &mut found);
    let wrong = found.iter().zip(plain).position(|(found, plain)| found != plain);
    ensure!(wrong.is_none(), "after odd accesses, byte {wrong:x?} is not what the CPU wrote");
    rig.verified(plain.len() as u64);
    Ok(())
}

/// Maps many buffers at once, unmaps them, and maps them again.
fn many(rig: &Rig, count: u64) -> Result<()> {
    let mut random = rig.random();
    let mut buffers = Vec::new();
    for _ in 0..count {
        let buffer = rig.buffer(Domain::Vram, 4096 << random.below(4))?;
        buffers.push((buffer, Expected::background(random.stream())));
    }
    for round in 0..2 {
        for (buffer, expected) in &mut buffers {
            if round == 0 {
                let mut bytes = vec![0; 256];
                expected.fill(0, &mut bytes);
                buffer.map()?.write(0, &bytes);
            }
            buffer.unmap();
        }
        for (buffer, expected) in &buffers {
            let mut found = [0; 64];
            buffer.map()?.read(192, &mut found);
            expected.check("one of many mappings", 192, &found)?;
            rig.verified(found.len() as u64);
        }
    }
    Ok(())
}

/// Creates up to 24 mappings of 8 MiB. If VRAM is large enough for all of them, they do not fit in a BAR1 of 128 MiB,
/// so that the kernel revokes and reassigns ranges.
fn more_than_the_aperture(rig: &Rig) -> Result<u64> {
    const WINDOW_BYTES: u64 = 8 << 20;
    let windows = (rig.vram()? * 3 / 4 / WINDOW_BYTES).min(24);
    let mut random = rig.random();
    let mut buffers = Vec::new();
    for _ in 0..windows {
        let at = random.below(WINDOW_BYTES / 8 - 1) * 8;
        let mut expected = Expected::background(random.stream());
        expected.put(Piece { at: 0, length: 8, stream: random.stream(), from: 0 });
        buffers.push((rig.buffer(Domain::Vram, WINDOW_BYTES)?, expected, at));
    }
    for (buffer, expected, at) in &buffers {
        for at in [0, *at] {
            let mut word = [0; 8];
            expected.fill(at, &mut word);
            buffer.map()?.write(at as usize, &word);
        }
    }
    for (buffer, expected, at) in &buffers {
        for at in [0, *at] {
            let mut word = [0; 8];
            buffer.map()?.read(at as usize, &mut word);
            expected.check("one of more mappings than fit BAR1", at, &word)?;
            rig.verified(8);
        }
    }
    Ok(windows)
}
