//! Tests the `gdev` library itself: copies below and above its limits, fences, references, errors, and copy times.

use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail, ensure};
use gdev::nouveau::{Device, Nouveau, TUNING};
use gdev::{Context, Copy, Error, Fence, Grid, Image, Memory, Params, Place, Tuning};

use super::Facts;
use crate::options::Options;
use crate::pattern::Random;
use crate::rig::{Counts, Rig};

/// Size of each buffer for copies, in bytes.
const BYTES: u64 = 3 << 20;
/// Copy sizes in bytes, around the library's limits.
const SIZES: [u64; 12] = [1, 3, 4, 63, 64, 1023, 1024, 1025, 4096, 4097, 65_536, (2 << 20) + 5];
/// Kernel that adds 1 to each word, with one thread per word.
const SOURCE: &str = "
.kernel increment
.params 8
    S2R R0, SR_TID.X
    MOV32I R1, 4
    IMAD.U32.U32 R2.CC, R0, R1, c[0][0x20]
    IMAD.U32.U32.HI.X R3, R0, R1, c[0][0x24]
    LD.E R4, [R2]
    IADD R4, R4, 1
    ST.E [R2], R4
    EXIT
";

fn context(node: &Path, tuning: Tuning) -> Result<Context<Nouveau>> {
    Ok(Context::new(Nouveau::new(&Device::open(node)?)?, tuning))
}

fn node(options: &Options) -> &Path {
    Path::new(options.text("node").unwrap_or(crate::DEFAULT_NODE))
}

/// Runs `gdev`.
pub fn run(rig: &Rig, options: &Options) -> Result<Facts> {
    let node = node(options);
    let mut verified = copies(rig, node)?;
    verified += both(rig, node)?;
    verified += references(rig, node)?;
    errors(node)?;
    rig.add(Counts { bytes: verified, copies: 0, channels: 7 });
    Ok(vec![("bytes", verified.to_string())])
}

fn data(random: &mut Random, bytes: u64) -> Vec<u8> {
    (0..bytes.div_ceil(8)).flat_map(|_| random.next().to_le_bytes()).take(bytes as usize).collect()
}

fn check(context: &mut Context<Nouveau>, memory: Memory, offset: u64, expected: &[u8]) -> Result<u64> {
    let mut found = vec![0; expected.len()];
    context.read(memory, offset, &mut found)?;
    let wrong = found.iter().zip(expected).position(|(found, expected)| found != expected);
    ensure!(wrong.is_none(), "byte {wrong:?} of {} at {offset:#x} differs", expected.len());
    Ok(expected.len() as u64)
}

/// Tests copies of all `SIZES` with three tunings, which differ in overlap and direct writes.
fn copies(rig: &Rig, node: &Path) -> Result<u64> {
    let mut random = rig.random();
    let mut context = context(node, TUNING)?;
    let memory = context.allocate(Place::Vram, BYTES)?;
    let pinned = context.allocate(Place::Ram, BYTES)?;
    let mut expected = data(&mut random, BYTES);
    context.write(memory, 0, &expected)?;
    let mut verified = 0;
    let small = Tuning { piece_bytes: Tuning::PIECE_BYTES_MIN, ..TUNING };
    for tuning in [TUNING, Tuning { overlap: false, ..small }, Tuning { direct_write_bytes: 0, ..small }] {
        context.tune(tuning)?;
        for bytes in SIZES {
            let offset = random.below(BYTES - bytes);
            let piece = data(&mut random, bytes);
            context.write(memory, offset, &piece)?;
            expected[offset as usize..][..piece.len()].copy_from_slice(&piece);
            verified += check(&mut context, memory, offset, &piece)?;
        }
    }
    // Test an asynchronous copy and its fence.
    let fence: Fence = context.copy(&Copy { from: memory, from_offset: 0, to: pinned, to_offset: 0, bytes: BYTES })?;
    context.wait(fence)?;
    ensure!(context.is_done(fence)?, "an awaited copy is not done");
    verified += check(&mut context, pinned, 0, &expected)?;
    context.free(pinned)?;
    verified += check(&mut context, memory, 0, &expected)?;
    Ok(verified)
}

/// Tests concurrent copies in both directions, between different buffers and within one buffer.
fn both(rig: &Rig, node: &Path) -> Result<u64> {
    let mut random = rig.random();
    let mut context = context(node, TUNING)?;
    let [written, read] = [context.allocate(Place::Vram, BYTES)?, context.allocate(Place::Vram, BYTES)?];
    let [source, target] = [context.allocate(Place::Ram, BYTES)?, context.allocate(Place::Ram, BYTES)?];
    let mut verified = 0;
    for (bytes, offset) in [(BYTES, 0), (4, 8), (65_537, 3), (1, BYTES - 1)] {
        let (new, old) = (data(&mut random, bytes), data(&mut random, bytes));
        context.write(source, offset, &new)?;
        context.write(read, offset, &old)?;
        let write = Copy { from: source, from_offset: offset, to: written, to_offset: offset, bytes };
        let back = Copy { from: read, from_offset: offset, to: target, to_offset: offset, bytes };
        context.copy_both([&write, &back])?;
        verified += check(&mut context, written, offset, &new)? + check(&mut context, target, offset, &old)?;
    }
    // Write one half of a buffer and read its other half, with the copies in both orders.
    let half = BYTES / 2;
    for order in [false, true] {
        let (new, old) = (data(&mut random, half), data(&mut random, half));
        context.write(source, 0, &new)?;
        context.write(read, half, &old)?;
        let write = Copy { from: source, from_offset: 0, to: read, to_offset: 0, bytes: half };
        let back = Copy { from: read, from_offset: half, to: target, to_offset: half, bytes: half };
        context.copy_both(if order { [&write, &back] } else { [&back, &write] })?;
        verified += check(&mut context, read, 0, &new)? + check(&mut context, target, half, &old)?;
        let refused = context.copy_both([&write, &Copy { from_offset: 0, ..back }]);
        ensure!(matches!(refused, Err(Error::Overlap(_))), "copies of one range were not refused");
    }
    Ok(verified)
}

/// Tests references to memory from contexts of the same open device file and of another one.
fn references(rig: &Rig, node: &Path) -> Result<u64> {
    let mut random = rig.random();
    let device = Device::open(node)?;
    let mut owner = Context::new(Nouveau::new(&device)?, TUNING);
    let mut same = Context::new(Nouveau::new(&device)?, TUNING);
    let mut other = context(node, TUNING)?;
    let module = other.load(Image::Sm20(&program()?))?;
    let memory = owner.allocate(Place::Vram, 256 << 10)?;
    let words: Vec<u32> = (0..(256 << 10) / 4).map(|_| random.next() as u32).collect();
    let bytes: Vec<u8> = words.iter().flat_map(|word| word.to_le_bytes()).collect();
    owner.write(memory, 0, &bytes)?;
    owner.finish()?;
    let shared = owner.share(memory)?;
    let here = same.reference(&shared)?;
    let there = other.reference(&shared)?;
    let again = other.reference(&shared)?;
    drop(shared);
    let mut verified = check(&mut same, here, 0, &bytes)? + check(&mut other, there, 0, &bytes)?;
    // Free the owner's memory and all references except `there`, which must remain valid.
    other.free(again)?;
    owner.free(memory)?;
    drop(owner);
    same.free(here)?;
    other.launch(module, "increment", Grid::line(64, 64), &Params::new().buffer(there), &[there])?;
    let increased: Vec<u8> = words[..64].iter().flat_map(|word| word.wrapping_add(1).to_le_bytes()).collect();
    verified += check(&mut other, there, 0, &increased)? + check(&mut other, there, 256, &bytes[256..])?;
    Ok(verified)
}

fn program() -> Result<sm20::Program> {
    sm20::assemble(SOURCE).map_err(|errors| anyhow::anyhow!("{errors:?}"))
}

/// Tests that invalid calls return specific errors, and that the context still works afterwards.
fn errors(node: &Path) -> Result<()> {
    let (mut context, mut other) = (context(node, TUNING)?, context(node, TUNING)?);
    let module = context.load(Image::Sm20(&program()?))?;
    let memory = context.allocate(Place::Vram, 4096)?;
    let freed = context.allocate(Place::Vram, 4096)?;
    context.free(freed)?;
    let one = Grid::line(1, 1);
    let params = Params::new().buffer(memory);
    let mut launch = |name: &str, params: &Params, uses: &[Memory]| context.launch(module, name, one, params, uses);
    let refused = matches!(launch("decrement", &params, &[memory]), Err(Error::Kernel(_)))
        && matches!(launch("increment", &Params::new().word(1), &[memory]), Err(Error::Parameters { .. }))
        && matches!(launch("increment", &params, &[freed]), Err(Error::Memory(_)))
        && matches!(context.write(freed, 0, &[1]), Err(Error::Memory(_)))
        && matches!(context.free(freed), Err(Error::Memory(_)))
        && matches!(context.load(Image::Cuda(b".version 8.0")), Err(Error::Image(_)))
        && matches!(other.launch(module, "increment", one, &params, &[]), Err(Error::Module(_)))
        && matches!(context.allocate(Place::Vram, 1 << 50), Err(Error::Allocation { .. }));
    ensure!(refused, "a wrong call was accepted, or refused for another reason");
    context.write(memory, 0, &7u32.to_le_bytes())?;
    context.launch(module, "increment", one, &params, &[memory])?;
    check(&mut context, memory, 0, &8u32.to_le_bytes())?;
    Ok(())
}

/// Measures copies between VRAM and pinned RAM in both directions, sequential or concurrent.
fn tune_both(rig: &Rig, options: &Options, bytes: u64, count: u64) -> Result<Facts> {
    let mut context = context(node(options), TUNING)?;
    let [written, read] = [context.allocate(Place::Vram, bytes)?, context.allocate(Place::Vram, bytes)?];
    let [source, target] = [context.allocate(Place::Ram, bytes)?, context.allocate(Place::Ram, bytes)?];
    let [new, old] = [data(&mut rig.random(), bytes), data(&mut rig.random(), bytes)];
    context.write(source, 0, &new)?;
    context.write(read, 0, &old)?;
    let write = Copy { from: source, from_offset: 0, to: written, to_offset: 0, bytes };
    let back = Copy { from: read, from_offset: 0, to: target, to_offset: 0, bytes };
    // The first copies create the engines' channels, so do not measure them.
    context.copy_both([&write, &back])?;
    let mut times = Vec::new();
    for _ in 0..count {
        let began = Instant::now();
        if options.flag("serial") {
            context.copy(&write)?;
            context.copy(&back)?;
            context.finish()?;
        } else {
            context.copy_both([&write, &back])?;
        }
        times.push(began.elapsed());
    }
    let verified = check(&mut context, written, 0, &new)? + check(&mut context, target, 0, &old)?;
    rig.add(Counts { bytes: verified, copies: 0, channels: 3 });
    report("both", bytes, times)
}

/// Returns the results of measured copies as key-value pairs.
fn report(direction: &str, bytes: u64, mut times: Vec<Duration>) -> Result<Facts> {
    times.sort_unstable();
    let median = times.get(times.len() / 2).context("a time")?;
    let least = times.first().context("a time")?;
    Ok(vec![
        ("direction", direction.to_owned()),
        ("size", bytes.to_string()),
        ("median_ns", median.as_nanos().to_string()),
        ("least_ns", least.as_nanos().to_string()),
    ])
}

/// Runs `tuning --direction write|read|both --bytes N [--count N] [--direct] [--piece BYTES] [--serial] [--pinned]`,
/// which measures copies between the CPU and either VRAM or pinned RAM. `both` measures concurrent copies between VRAM
/// and pinned RAM in both directions, or sequential ones with `--serial`.
pub fn tuning(rig: &Rig, options: &Options) -> Result<Facts> {
    let direction = options.text("direction").unwrap_or("write");
    let (bytes, count) = (options.number("bytes", 1 << 20)?, options.number("count", 10)?);
    ensure!((1..=256 << 20).contains(&bytes), "--bytes {bytes}: from 1 to {}", 256 << 20);
    ensure!((1..=1 << 20).contains(&count), "--count {count}: from 1 to {}", 1 << 20);
    if direction == "both" {
        return tune_both(rig, options, bytes, count);
    }
    let direct = if options.flag("direct") { bytes } else { 0 };
    let tuning = Tuning {
        direct_write_bytes: direct,
        direct_read_bytes: direct,
        piece_bytes: options.number("piece", TUNING.piece_bytes)?,
        overlap: !options.flag("serial"),
    };
    tuning.check()?;
    let mut context = context(node(options), tuning)?;
    let place = if options.flag("pinned") { Place::Ram } else { Place::Vram };
    let memory = context.allocate(place, bytes)?;
    let mut expected = data(&mut rig.random(), bytes);
    let mut found = vec![0; expected.len()];
    // The first copy allocates the bounce buffers and maps the aperture, so do not measure it.
    context.write(memory, 0, &expected)?;
    context.read(memory, 0, &mut found)?;
    ensure!(found == expected, "the first copy differs");
    let mut times = Vec::new();
    for round in 0..count {
        expected[0] = round as u8;
        let began = Instant::now();
        match direction {
            "write" => {
                context.write(memory, 0, &expected)?;
                context.finish()?;
            }
            "read" => context.read(memory, 0, &mut found)?,
            other => bail!("--direction {other}: write, read or both"),
        }
        times.push(began.elapsed());
    }
    context.write(memory, 0, &expected)?;
    rig.add(Counts { bytes: check(&mut context, memory, 0, &expected)?, copies: 0, channels: 1 });
    report(direction, bytes, times)
}
