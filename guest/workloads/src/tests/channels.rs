//! Tests concurrent channels: interleaved copies, chains across channels, and destroying and recreating channels.

use std::path::Path;

use anyhow::{Result, bail};

use super::Facts;
use crate::options::Options;
use crate::pattern::{Expected, Random, Stream};
use crate::rig::{Helper, Rig, expect_copy};
use gdev::nouveau::device::{Buffer, Channel, Domain, Use};
use gdev::nouveau::push::{Engine, linear};

/// Size of each channel's buffers, in bytes.
const BUFFER_BYTES: u64 = 96 << 10;
/// Maximum number of channels per open file. The 6.1 kernel has space for the notifiers of 16 channels.
const MOST_OF_A_CLIENT: u64 = 12;
/// Maximum number of channels to create: all hardware channels except for some that the kernel and the helpers use.
const MAX_CHANNELS: u64 = 100;

/// A channel, and the data on which it works.
struct Lane {
    channel: Channel,
    engine: Engine,
    source: Buffer,
    target: Buffer,
    stream: Stream,
    expected: Expected,
}

/// The channels of one open file, which share an address space.
struct Group<'a> {
    rig: &'a Rig,
    helper: Helper<'a>,
    lanes: Vec<Lane>,
}

/// Runs `channels [--n N] [--rounds N] [--quick]`.
pub fn run(rig: &Rig, options: &Options) -> Result<Facts> {
    let quick = options.flag("quick");
    let count = options.number("n", if quick { 4 } else { 8 })?;
    let rounds = options.number("rounds", if quick { 4 } else { 16 })?;
    if count == 0 || count > MAX_CHANNELS {
        bail!("--n {count}: from 1 to {MAX_CHANNELS}");
    }
    let mut random = rig.random();
    let (_, engines) = rig.full_channel()?;
    let node = options.text("node").unwrap_or(crate::DEFAULT_NODE);
    let more = (1..count.div_ceil(MOST_OF_A_CLIENT)).map(|_| Rig::open(Path::new(node), random.next()));
    let more: Vec<Rig> = more.collect::<Result<_>>()?;

    let mut groups = Vec::new();
    for (number, rig) in std::iter::once(rig).chain(&more).enumerate() {
        let lanes = (count - number as u64 * MOST_OF_A_CLIENT).min(MOST_OF_A_CLIENT);
        groups.push(Group::new(rig, lanes, &engines, &mut random)?);
    }
    rig.progress("channels");
    for _ in 0..rounds {
        for group in &mut groups {
            group.copy_in_each(&mut random)?;
        }
    }
    for group in &groups {
        group.check()?;
        group.chain()?;
    }
    for group in &mut groups {
        group.renew_every_second(&mut random)?;
        group.check()?;
    }
    let lanes = groups.iter().flat_map(|group| &group.lanes);
    let numbers: Vec<String> = lanes.map(|lane| lane.channel.number().to_string()).collect();
    drop(groups);
    more.iter().for_each(|other| rig.add(other.counts()));
    Ok(vec![("n", count.to_string()), ("rounds", rounds.to_string()), ("ids", numbers.join("+"))])
}

impl<'a> Group<'a> {
    fn new(rig: &'a Rig, count: u64, engines: &[Engine], random: &mut Random) -> Result<Self> {
        let mut group = Self { rig, helper: Helper::new(rig, Engine::M2mf)?, lanes: Vec::new() };
        for number in 0..count {
            let lane = group.lane(engines[number as usize % engines.len()], random)?;
            group.lanes.push(lane);
        }
        Ok(group)
    }

    fn lane(&self, engine: Engine, random: &mut Random) -> Result<Lane> {
        let domain = if random.below(2) == 0 { Domain::Vram } else { Domain::Gart };
        let (source, target) = (self.rig.buffer(domain, BUFFER_BYTES)?, self.rig.buffer(Domain::Vram, BUFFER_BYTES)?);
        let (stream, expected) = (random.stream(), Expected::background(random.stream()));
        self.helper.fill(&source, &Expected::background(stream))?;
        self.helper.fill(&target, &expected)?;
        Ok(Lane { channel: self.rig.channel(&[engine])?, engine, source, target, stream, expected })
    }

    /// Starts a copy of a random range on each channel, and records the expected result.
    fn copy_in_each(&mut self, random: &mut Random) -> Result<()> {
        for lane in &mut self.lanes {
            let length = 1 + random.below(BUFFER_BYTES / 4);
            let (from, to) = (random.below(BUFFER_BYTES - length), random.below(BUFFER_BYTES - length));
            let (source, target) = (lane.source.address() + from, lane.target.address() + to);
            let rects = linear(source, target, length, lane.engine.most_lines());
            let uses = [Use::read(&lane.source), Use::write(&lane.target)];
            self.rig.launch(&lane.channel, lane.engine, &rects, &uses)?;
            expect_copy(&mut lane.expected, &rects, &lane.source, lane.stream, &lane.target);
        }
        Ok(())
    }

    fn check(&self) -> Result<()> {
        for lane in &self.lanes {
            let what = format!("target of channel {}", lane.channel.number());
            self.helper.check(&what, &lane.target, &lane.expected)?;
        }
        Ok(())
    }

    /// Replaces every second channel. After each replacement, all channels copy again.
    fn renew_every_second(&mut self, random: &mut Random) -> Result<()> {
        for at in (0..self.lanes.len()).step_by(2) {
            let engine = self.lanes[at].engine;
            self.lanes[at].channel = self.rig.channel(&[engine])?;
            self.copy_in_each(random)?;
        }
        Ok(())
    }

    /// Passes one buffer through all channels without CPU waits: the kernel makes each channel wait for the previous
    /// one.
    fn chain(&self) -> Result<()> {
        let expected = Expected::background(self.rig.random().stream());
        let mut stages = Vec::new();
        for stage in 0..=self.lanes.len() {
            stages.push(self.rig.buffer(if stage % 2 == 0 { Domain::Gart } else { Domain::Vram }, BUFFER_BYTES)?);
        }
        self.helper.fill(&stages[0], &expected)?;
        for (lane, pair) in self.lanes.iter().zip(stages.windows(2)) {
            let [from, to] = pair else { continue };
            let rects = linear(from.address(), to.address(), BUFFER_BYTES, lane.engine.most_lines());
            self.rig.launch(&lane.channel, lane.engine, &rects, &[Use::read(from), Use::write(to)])?;
        }
        match stages.last() {
            Some(last) => self.helper.check("end of the chain of channels", last, &expected),
            None => Ok(()),
        }
    }
}
