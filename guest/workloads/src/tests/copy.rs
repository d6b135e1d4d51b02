//! Tests one type of copy. Checks every byte of the target, including the bytes around the copied range.

use anyhow::{Result, bail};

use super::Facts;
use crate::options::Options;
use crate::pattern::{Expected, Random};
use crate::rig::{Helper, Rig, ensure_inside, expect_copy};
use gdev::nouveau::device::{Channel, Domain, Use};
use gdev::nouveau::push::{Engine, MOST_LINE_BYTES, MOST_PITCH, Rect, linear};

/// Number of bytes before and after the copied range that must not change.
const MARGIN_BYTES: u64 = 64;

/// Returns the engine with this command-line name.
pub fn engine(name: &str) -> Result<Engine> {
    Ok(match name {
        "m2mf" => Engine::M2mf,
        "ce" | "ce0" => Engine::Ce0,
        "ce1" => Engine::Ce1,
        _ => bail!("engine {name}: one of m2mf, ce, ce0, ce1"),
    })
}

fn domain(name: &str) -> Result<Domain> {
    Ok(match name {
        "vram" => Domain::Vram,
        "gart" => Domain::Gart,
        _ => bail!("domain {name}: one of vram, gart"),
    })
}

/// Layout of the bytes to copy.
#[derive(Debug, Clone, Copy)]
pub enum Shape {
    /// The bytes are contiguous.
    Linear {
        /// Size in bytes.
        size: u64,
    },
    /// The bytes are in lines.
    Pitch {
        /// Number of lines.
        lines: u32,
        /// Line length in bytes.
        line_bytes: u32,
        /// Source pitch in bytes.
        source_pitch: u32,
        /// Target pitch in bytes.
        target_pitch: u32,
    },
}

impl Shape {
    /// Returns the number of bytes from the start of the first line to the end of the last line, for source and target.
    fn extents(self) -> (u64, u64) {
        match self {
            Self::Linear { size } => (size, size),
            Self::Pitch { lines, line_bytes, source_pitch, target_pitch } => {
                let extent = |pitch: u32| u64::from(lines - 1) * u64::from(pitch) + u64::from(line_bytes);
                (extent(source_pitch), extent(target_pitch))
            }
        }
    }

    /// Returns the rectangles that copy the bytes. Splits a linear copy at the engine's limit on lines.
    pub fn rects(self, source: u64, target: u64, engine: Engine) -> Vec<Rect> {
        match self {
            Self::Linear { size } => linear(source, target, size, engine.most_lines()),
            Self::Pitch { lines, line_bytes, source_pitch, target_pitch } => {
                vec![Rect { source, target, source_pitch, target_pitch, line_bytes, lines }]
            }
        }
    }
}

/// A copy under test.
#[derive(Debug, Clone, Copy)]
pub struct Case {
    /// Engine under test.
    pub engine: Engine,
    /// Memory of the source.
    pub from: Domain,
    /// Memory of the target.
    pub to: Domain,
    /// Layout of the bytes.
    pub shape: Shape,
    /// Offset in the source, in bytes.
    pub source_offset: u64,
    /// Offset in the target after the margin, in bytes.
    pub target_offset: u64,
}

impl Case {
    /// Creates a copy at random offsets below 256, which may be odd.
    pub fn anywhere(engine: Engine, from: Domain, to: Domain, shape: Shape, random: &mut Random) -> Self {
        Self { engine, from, to, shape, source_offset: random.below(256), target_offset: random.below(256) }
    }

    /// Returns the name of the case for messages.
    pub fn name(&self) -> String {
        let Self { engine, from, to, shape, source_offset, target_offset } = self;
        let names = (engine.name(), from.name(), to.name());
        format!("{} {} to {} {shape:?} at {source_offset} to {target_offset}", names.0, names.1, names.2)
    }

    /// Executes and checks the copy. The helper fills and checks the buffers without using the engine under test.
    pub fn run(&self, rig: &Rig, channel: &Channel, helper: &Helper<'_>) -> Result<()> {
        let mut random = rig.random();
        let (source_extent, target_extent) = self.shape.extents();
        let source = rig.buffer(self.from, self.source_offset + source_extent)?;
        let target = rig.buffer(self.to, MARGIN_BYTES + self.target_offset + target_extent + MARGIN_BYTES)?;
        let (stream, guard) = (random.stream(), random.stream());
        helper.fill(&source, &Expected::background(stream))?;
        let mut expected = Expected::background(guard);
        helper.fill(&target, &expected)?;

        let start = source.address() + self.source_offset;
        let rects = self.shape.rects(start, target.address() + MARGIN_BYTES + self.target_offset, self.engine);
        ensure_inside(&rects, &source, &target)?;
        rig.launch(channel, self.engine, &rects, &[Use::read(&source), Use::write(&target)])?;
        expect_copy(&mut expected, &rects, &source, stream, &target);
        helper.check(&self.name(), &target, &expected)
    }
}

/// Returns a present engine other than `tested`, or `tested` if there is none.
pub fn other_engine(tested: Engine, present: &[Engine]) -> Engine {
    present.iter().copied().find(|engine| *engine != tested).unwrap_or(tested)
}

/// Runs `copy`, which repeats one case.
pub fn run(rig: &Rig, options: &Options) -> Result<Facts> {
    let engine = engine(options.text("engine").unwrap_or("m2mf"))?;
    let from = domain(options.text("from").unwrap_or("gart"))?;
    let to = domain(options.text("to").unwrap_or("vram"))?;
    let count = options.number("count", 1)?;
    let lines = options.number("lines", 1)?;
    let size = options.number("size", 65536)?;
    let shape = if lines > 1 {
        let pitch = options.number("pitch", size)?;
        let fits = size <= u64::from(MOST_LINE_BYTES) && pitch <= u64::from(MOST_PITCH);
        if !fits || lines > u64::from(engine.most_lines()) || size == 0 || pitch < size {
            bail!(
                "with lines, size is that of a line: at most {MOST_LINE_BYTES} and at most the pitch, lines at most {}",
                engine.most_lines()
            );
        }
        let (source_pitch, target_pitch) = (pitch as u32, pitch as u32);
        Shape::Pitch { lines: lines as u32, line_bytes: size as u32, source_pitch, target_pitch }
    } else {
        Shape::Linear { size }
    };
    if size == 0 {
        bail!("size must not be 0");
    }
    let (channel, present) = rig.full_channel()?;
    if !present.contains(&engine) {
        bail!("the card has no {}", engine.name());
    }
    let helper = Helper::new(rig, other_engine(engine, &present))?;
    let case = Case {
        engine,
        from,
        to,
        shape,
        source_offset: options.number("source-offset", 0)?,
        target_offset: options.number("target-offset", 0)?,
    };
    for _ in 0..count {
        case.run(rig, &channel, &helper)?;
    }
    Ok(vec![
        ("engine", engine.name().to_owned()),
        ("from", from.name().to_owned()),
        ("to", to.name().to_owned()),
        ("size", size.to_string()),
        ("count", count.to_string()),
    ])
}
