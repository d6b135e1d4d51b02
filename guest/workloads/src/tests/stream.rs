//! Repeats the same copy on one engine, with several copies in flight, as a steady load.

use std::time::Duration;

use anyhow::{Context, Result, ensure};

use super::Facts;
use crate::compute::MOST_IN_FLIGHT;
use crate::ending::Ending;
use crate::options::Options;
use crate::pattern::Expected;
use crate::rig::{Counts, Helper, Rig};
use gdev::nouveau::device::{Channel, Domain, Use};
use gdev::nouveau::push::{Engine, linear};

/// Maximum size of a copy in bytes.
const MAX_COPY_BYTES: u64 = 8 << 20;
/// Granularity of copy sizes in bytes: one large page, so that buffers are not larger than the copies.
const UNIT: u64 = 128 << 10;

/// Runs `stream [--engine m2mf|ce0|ce1] [--size BYTES] [--in-flight N] [--duration SECONDS]`.
pub fn run(rig: &Rig, options: &Options) -> Result<Facts> {
    let name = options.text("engine").unwrap_or("ce0");
    let engine = Engine::ALL.into_iter().find(|engine| engine.name() == name);
    let engine = engine.with_context(|| format!("--engine {name}: one of m2mf ce0 ce1"))?;
    let size = options.number("size", 1 << 20)?.clamp(1, MAX_COPY_BYTES).next_multiple_of(UNIT);
    let in_flight = options.number("in-flight", 4)?;
    ensure!((1..=MOST_IN_FLIGHT).contains(&in_flight), "--in-flight {in_flight}: from 1 to {MOST_IN_FLIGHT}");
    let duration = Duration::from_secs(options.number("duration", 5)?.min(86_400));

    let channel = Channel::with_ring(rig.device(), usize::try_from(in_flight)?)?;
    channel.add(engine.object())?;
    let (source, target) = (rig.buffer(Domain::Gart, size)?, rig.buffer(Domain::Vram, size)?);
    let expected = Expected::background(rig.random().stream());
    let helper = Helper::new(rig, engine)?;
    helper.fill(&source, &expected)?;
    let rects = linear(source.address(), target.address(), size, engine.most_lines());
    let (ending, mut copies) = (Ending::after(duration), 0u64);
    while !ending.is_over() || copies == 0 {
        rig.launch(&channel, engine, &rects, &[Use::read(&source), Use::write(&target)])?;
        copies += 1;
    }
    target.wait(false)?;
    let took = ending.elapsed();
    helper.check("target of the stream", &target, &expected)?;
    rig.add(Counts { channels: 1, ..Counts::default() });
    Ok(vec![("iterations", copies.to_string()), ("looped_us", took.as_micros().to_string())])
}
