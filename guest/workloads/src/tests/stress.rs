//! Performs random copies for a given time, and verifies all of them.

use std::time::{Duration, Instant};

use anyhow::Result;

use super::Facts;
use super::copy::{Case, Shape, other_engine};
use crate::options::Options;
use crate::pattern::Random;
use crate::rig::{Helper, Rig};
use gdev::nouveau::device::{Channel, Domain};
use gdev::nouveau::push::{Engine, MOST_LINE_BYTES};

/// Interval between progress lines.
const PROGRESS: Duration = Duration::from_secs(2);
/// Number of copies after which the channel is replaced.
const CHANNEL_LIFE: u64 = 64;

/// Runs `stress --seconds N [--max SIZE]`.
pub fn run(rig: &Rig, options: &Options) -> Result<Facts> {
    let limit = Duration::from_secs(options.number("seconds", 10)?.min(86_400));
    let most = options.number("max", 1 << 20)?.clamp(64, 64 << 20);
    let mut random = rig.random();
    let (mut channel, engines) = rig.full_channel()?;
    let helpers = engines.iter().map(|engine| Helper::new(rig, other_engine(*engine, &engines)));
    let helpers: Vec<Helper<'_>> = helpers.collect::<Result<_>>()?;
    let began = Instant::now();
    let mut said = began;
    let mut cases = 0u64;
    rig.progress("stress");
    while began.elapsed() < limit {
        if cases % CHANNEL_LIFE == CHANNEL_LIFE - 1 {
            channel = rig.channel(&engines)?;
        }
        let at = random.below(engines.len() as u64) as usize;
        one(rig, &channel, engines[at], &helpers[at], most, &mut random)?;
        cases += 1;
        if said.elapsed() >= PROGRESS {
            said = Instant::now();
            rig.progress("stress");
        }
    }
    Ok(vec![("cases", cases.to_string())])
}

fn one(
    rig: &Rig,
    channel: &Channel,
    engine: Engine,
    helper: &Helper<'_>,
    most: u64,
    random: &mut Random,
) -> Result<()> {
    let mut domain = || if random.below(2) == 0 { Domain::Vram } else { Domain::Gart };
    let (from, to) = (domain(), domain());
    // Divide the maximum size by a random power of two, so that small copies are frequent.
    let halvings = random.below(u64::from(most.ilog2()) - 2);
    let size = 1 + random.below(most >> halvings);
    let shape = if random.below(4) == 0 {
        let line_bytes = 1 + random.below(size.min(u64::from(MOST_LINE_BYTES)).min(4096)) as u32;
        let lines = 1 + random.below((size / u64::from(line_bytes)).clamp(1, 2046)) as u32;
        let mut pitch = || line_bytes + random.below(64) as u32;
        Shape::Pitch { lines, line_bytes, source_pitch: pitch(), target_pitch: pitch() }
    } else {
        Shape::Linear { size }
    };
    Case::anywhere(engine, from, to, shape, random).run(rig, channel, helper)
}
