//! Several channels at once: interleaved copies, chains from channel to channel, destruction and re-creation.

use anyhow::{Result, bail};

use super::Facts;
use crate::device::{Buffer, Channel, Domain, Use};
use crate::options::Options;
use crate::pattern::{Expected, Random, Stream};
use crate::push::{Engine, linear};
use crate::rig::{Helper, Rig, expect_copy};

/// Bytes of each channel's buffers.
const SIZE: u64 = 96 << 10;

/// A channel with the data that it works on.
struct Lane {
    channel: Channel,
    engine: Engine,
    source: Buffer,
    target: Buffer,
    stream: Stream,
    expected: Expected,
}

/// `channels [--n N] [--rounds N] [--quick]`
pub fn run(rig: &Rig, options: &Options) -> Result<Facts> {
    let quick = options.flag("quick");
    let count = options.number("n", if quick { 4 } else { 8 })?;
    let rounds = options.number("rounds", if quick { 4 } else { 16 })?;
    if count == 0 || count > 120 {
        bail!("--n {count}: from 1 to 120");
    }
    let mut random = rig.random();
    let (_, engines) = rig.full_channel()?;
    let helper = Helper::new(rig, Engine::M2mf)?;
    let mut lanes = Vec::new();
    for number in 0..count {
        lanes.push(lane(rig, &helper, engines[number as usize % engines.len()], &mut random)?);
    }
    rig.progress("channels");
    for _ in 0..rounds {
        for lane in &mut lanes {
            scattered_copy(rig, lane, &mut random)?;
        }
    }
    check_all(&helper, &lanes)?;
    chain(rig, &helper, &lanes)?;

    // Every second channel goes and comes again, while the others go on.
    for at in (0..lanes.len()).step_by(2) {
        let engine = lanes[at].engine;
        lanes[at].channel = rig.channel(&[engine])?;
        for lane in &mut lanes {
            scattered_copy(rig, lane, &mut random)?;
        }
    }
    check_all(&helper, &lanes)?;
    let numbers: Vec<String> = lanes.iter().map(|lane| lane.channel.number().to_string()).collect();
    Ok(vec![("n", count.to_string()), ("rounds", rounds.to_string()), ("ids", numbers.join("+"))])
}

fn lane(rig: &Rig, helper: &Helper<'_>, engine: Engine, random: &mut Random) -> Result<Lane> {
    let domain = if random.below(2) == 0 { Domain::Vram } else { Domain::Gart };
    let (source, target) = (rig.buffer(domain, SIZE)?, rig.buffer(Domain::Vram, SIZE)?);
    let (stream, expected) = (random.stream(), Expected::background(random.stream()));
    helper.fill(&source, &Expected::background(stream))?;
    helper.fill(&target, &expected)?;
    Ok(Lane { channel: rig.channel(&[engine])?, engine, source, target, stream, expected })
}

fn scattered_copy(rig: &Rig, lane: &mut Lane, random: &mut Random) -> Result<()> {
    let length = 1 + random.below(SIZE / 4);
    let (from, to) = (random.below(SIZE - length), random.below(SIZE - length));
    let (source, target) = (lane.source.address() + from, lane.target.address() + to);
    let rects = linear(source, target, length, lane.engine.most_lines());
    rig.launch(&lane.channel, lane.engine, &rects, &[Use::read(&lane.source), Use::write(&lane.target)])?;
    expect_copy(&mut lane.expected, &rects, &lane.source, lane.stream, &lane.target);
    Ok(())
}

fn check_all(helper: &Helper<'_>, lanes: &[Lane]) -> Result<()> {
    for (number, lane) in lanes.iter().enumerate() {
        helper.check(&format!("target of channel {number}"), &lane.target, &lane.expected)?;
    }
    Ok(())
}

/// One buffer passed through all channels without the CPU waiting in between: the kernel makes each channel wait for the last.
fn chain(rig: &Rig, helper: &Helper<'_>, lanes: &[Lane]) -> Result<()> {
    let expected = Expected::background(rig.random().stream());
    let mut stages = Vec::new();
    for stage in 0..=lanes.len() {
        stages.push(rig.buffer(if stage % 2 == 0 { Domain::Gart } else { Domain::Vram }, SIZE)?);
    }
    helper.fill(&stages[0], &expected)?;
    for (lane, pair) in lanes.iter().zip(stages.windows(2)) {
        let [from, to] = pair else { continue };
        let rects = linear(from.address(), to.address(), SIZE, lane.engine.most_lines());
        rig.launch(&lane.channel, lane.engine, &rects, &[Use::read(from), Use::write(to)])?;
    }
    match stages.last() {
        Some(last) => helper.check("end of the chain of channels", last, &expected),
        None => Ok(()),
    }
}
