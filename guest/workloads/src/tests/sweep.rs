//! A matrix of copies: every engine, all combinations of memory types, and many sizes and shapes.

use anyhow::Result;

use super::Facts;
use super::copy::{Case, Shape, other_engine};
use crate::options::Options;
use crate::rig::{Helper, Rig};
use gdev::nouveau::device::{Channel, Domain};
use gdev::nouveau::push::{Engine, MOST_LINE_BYTES};

const QUICK_SIZES: [u64; 7] = [4, 5, 63, 4096, 4097, 65_549, (1 << 20) + 1];
const SIZES_BYTES: [u64; 14] = [
    4,
    1,
    7,
    64,
    255,
    4095,
    4096,
    4097,
    0xffff,
    (128 << 10) + 3,
    (1 << 20) + 1,
    4 << 20,
    (8 << 20) - 1,
    (16 << 20) + 5,
];

/// A copy size in bytes that exceeds a BAR1 of 128 MiB.
const BEYOND_APERTURE: u64 = (132 << 20) + 13;

/// Number of lines, line length, source pitch and target pitch of each copy. All but the first are in bytes.
const QUICK_PITCHES: [[u32; 4]; 4] = [[2, 1, 3, 1], [17, 100, 4096, 333], [2047, 5, 5, 8], [64, 4096, 4099, 8192]];
const PITCHES: [[u32; 4]; 5] = [
    [2047, 700, 701, 1024],
    [3, MOST_LINE_BYTES, 0x7_0000, MOST_LINE_BYTES],
    [2047, 4096, 4096, 4096],
    [8191, 64, 64, 100],
    [1000, 1, 256, 256],
];

const DOMAINS: [Domain; 2] = [Domain::Vram, Domain::Gart];

/// Runs `sweep [--quick]`.
pub fn run(rig: &Rig, options: &Options) -> Result<Facts> {
    let quick = options.flag("quick");
    let (channel, engines) = rig.full_channel()?;
    let mut cases = 0u64;
    for engine in &engines {
        let helper = Helper::new(rig, other_engine(*engine, &engines))?;
        cases += matrix(rig, &channel, *engine, &helper, quick)?;
        rig.progress("sweep");
    }
    let beyond = !quick && beyond_aperture(rig, &channel, &engines)?;
    let names: Vec<&str> = engines.iter().map(|engine| engine.name()).collect();
    Ok(vec![("cases", cases.to_string()), ("engines", names.join("+")), ("beyond_aperture", beyond.to_string())])
}

fn matrix(rig: &Rig, channel: &Channel, engine: Engine, helper: &Helper<'_>, quick: bool) -> Result<u64> {
    let sizes: &[u64] = if quick { &QUICK_SIZES } else { &SIZES_BYTES };
    let pitches = QUICK_PITCHES.iter().chain(if quick { &[][..] } else { &PITCHES[..] });
    let pitches = pitches.filter(|[lines, ..]| *lines <= engine.most_lines());
    let shapes: Vec<Shape> = sizes
        .iter()
        .map(|size| Shape::Linear { size: *size })
        .chain(pitches.map(|&[lines, line_bytes, source_pitch, target_pitch]| Shape::Pitch {
            lines,
            line_bytes,
            source_pitch,
            target_pitch,
        }))
        .collect();
    let mut random = rig.random();
    let mut cases = 0;
    for shape in shapes {
        for from in DOMAINS {
            for to in DOMAINS {
                Case::anywhere(engine, from, to, shape, &mut random).run(rig, channel, helper)?;
                cases += 1;
            }
        }
    }
    Ok(cases)
}

/// Copies more data than an aperture can map, if VRAM is large enough.
fn beyond_aperture(rig: &Rig, channel: &Channel, engines: &[Engine]) -> Result<bool> {
    let room = rig.vram()? * 7 / 8;
    let (from, to) = if room >= 2 * BEYOND_APERTURE {
        (Domain::Vram, Domain::Vram)
    } else if room >= BEYOND_APERTURE {
        (Domain::Gart, Domain::Vram)
    } else {
        println!("no copy beyond the aperture: VRAM has only {room} bytes to spare");
        return Ok(false);
    };
    let mut random = rig.random();
    for engine in engines {
        let helper = Helper::new(rig, other_engine(*engine, engines))?;
        let shape = Shape::Linear { size: BEYOND_APERTURE };
        Case::anywhere(*engine, from, to, shape, &mut random).run(rig, channel, &helper)?;
        rig.progress("sweep");
    }
    Ok(true)
}
