//! Buffers that the kernel moves between VRAM and guest RAM, on request and under memory pressure.

use anyhow::{Result, ensure};

use super::Facts;
use crate::options::Options;
use crate::pattern::{Expected, Piece};
use crate::rig::{Helper, Rig};
use gdev::nouveau::device::{Buffer, Channel, Domain, Use};
use gdev::nouveau::push::{Engine, Push};

/// Runs `move [--quick] [--pressure]`.
pub fn run(rig: &Rig, options: &Options) -> Result<Facts> {
    let quick = options.flag("quick");
    let channel = rig.channel(&[Engine::M2mf])?;
    let helper = Helper::new(rig, Engine::M2mf)?;
    let sizes: &[u64] = if quick { &[4096, 65536, 1 << 20] } else { &[4096, 12288, 65536, 1 << 20, (9 << 20) + 4096] };
    let mut moves = 0;
    for size in sizes {
        moves += by_request(rig, &channel, &helper, *size, if quick { 2 } else { 4 })?;
    }
    let evicted = if quick && !options.flag("pressure") { 0 } else { under_pressure(rig, &channel, &helper)? };
    Ok(vec![("moves", moves.to_string()), ("pressed", evicted.to_string())])
}

/// Makes the kernel move a buffer to `place` with a submission that does not change the buffer.
fn send(channel: &Channel, buffer: &Buffer, place: Domain) -> Result<()> {
    let mut push = Push::default();
    push.nop(Engine::M2mf.subchannel());
    channel.submit(&push, &[Use::read(buffer).at(place)])?;
    Ok(())
}

fn by_request(rig: &Rig, channel: &Channel, helper: &Helper<'_>, size: u64, rounds: u32) -> Result<u64> {
    let mut random = rig.random();
    let buffer = rig.buffer(Domain::Either, size)?;
    let mut expected = Expected::background(random.stream());
    helper.fill(&buffer, &expected)?;
    let mut moves = 0;
    for round in 0..2 * rounds {
        let place = if buffer.place()? == Domain::Vram { Domain::Gart } else { Domain::Vram };
        send(channel, &buffer, place)?;
        ensure!(buffer.place()? == place, "the kernel did not move {size} bytes to {}", place.name());
        moves += 1;
        helper.check(&format!("{size} bytes after move {round} to {}", place.name()), &buffer, &expected)?;
        // Write new contents each time, so that a check never accepts a stale copy.
        let (at, stream) = (random.below(size - 16), random.stream());
        expected.put(Piece { at, length: 16, stream, from: 0 });
        let mut bytes = [0; 16];
        stream.fill(0, &mut bytes);
        buffer.wait(true)?;
        buffer.map()?.write(at as usize, &bytes);
    }
    helper.check("after the last move", &buffer, &expected)?;
    Ok(moves)
}

/// Allocates more buffers than fit in VRAM, so that the kernel must evict some of them to load others.
fn under_pressure(rig: &Rig, channel: &Channel, helper: &Helper<'_>) -> Result<u64> {
    const BUFFER_BYTES: u64 = 8 << 20;
    /// Maximum VRAM size for this test, in bytes. Guest RAM must hold the buffers that do not fit.
    const MAX_VRAM_BYTES: u64 = 320 << 20;
    let vram = rig.vram()?;
    if vram > MAX_VRAM_BYTES {
        println!("no pressure: {vram} bytes of VRAM are too many");
        return Ok(0);
    }
    let mut random = rig.random();
    let mut buffers = Vec::new();
    for _ in 0..vram / BUFFER_BYTES + 3 {
        let buffer = rig.buffer(Domain::Vram, BUFFER_BYTES)?;
        let expected = Expected::background(random.stream());
        helper.fill(&buffer, &expected)?;
        buffers.push((buffer, expected));
    }
    for (number, (buffer, expected)) in buffers.iter().enumerate() {
        send(channel, buffer, Domain::Vram)?;
        helper.check(&format!("buffer {number} of {} under pressure", buffers.len()), buffer, expected)?;
        if number % 8 == 0 {
            rig.progress("move");
        }
    }
    Ok(buffers.len() as u64)
}
