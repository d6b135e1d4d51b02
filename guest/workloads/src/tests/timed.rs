//! Benchmark workloads, each of which repeats one type of operation. Their setup is not timed. The results are checked
//! at the end, so that a wrong result does not count as a fast one.

use std::time::Instant;

use anyhow::{Result, bail};

use super::Facts;
use crate::options::Options;
use crate::pattern::Expected;
use crate::rig::{Helper, Rig};
use gdev::nouveau::device::{Buffer, Channel, Domain, Use};
use gdev::nouveau::push::{Engine, linear};

/// Size of the buffers for small copies, in bytes.
const SMALL_COPY_BYTES: u64 = 4096;
/// Maximum number of channels per open file. Linux 6.1 has space for 16 notifiers.
const MAX_CHANNELS_PER_FILE: u64 = 12;

/// A workload: its name, its default number of repetitions, and a function that returns the time of all repetitions in
/// seconds.
struct Workload {
    name: &'static str,
    count: u64,
    run: fn(&Rig, u64) -> Result<f64>,
}

#[rustfmt::skip]
const WORKLOADS: [Workload; 8] = [
    Workload { name: "channels", count: 4, run: channels },
    Workload { name: "copy-small-in", count: 200, run: |rig, count| copies(rig, count, Domain::Gart, Domain::Vram, SMALL_COPY_BYTES) },
    Workload { name: "copy-small-out", count: 200, run: |rig, count| copies(rig, count, Domain::Vram, Domain::Gart, SMALL_COPY_BYTES) },
    Workload { name: "copy-large-in", count: 6, run: |rig, count| copies(rig, count, Domain::Gart, Domain::Vram, 8 << 20) },
    Workload { name: "copy-large-out", count: 6, run: |rig, count| copies(rig, count, Domain::Vram, Domain::Gart, 8 << 20) },
    Workload { name: "map-churn", count: 60, run: map_churn },
    Workload { name: "many-channels", count: 20, run: many_channels },
    Workload { name: "small-submissions", count: 800, run: small_submissions },
];

/// Runs `timed --what NAME [--count N]`.
pub fn run(rig: &Rig, options: &Options) -> Result<Facts> {
    let name = options.text("what").unwrap_or_default();
    let Some(workload) = WORKLOADS.iter().find(|workload| workload.name == name) else {
        let names: Vec<_> = WORKLOADS.iter().map(|workload| workload.name).collect();
        bail!("--what {name}: one of {}", names.join(" "));
    };
    let count = options.number("count", workload.count)?.clamp(1, 1 << 20);
    let seconds = (workload.run)(rig, count)?;
    Ok(vec![("what", name.to_owned()), ("count", count.to_string()), ("timed_us", format!("{:.0}", seconds * 1e6))])
}

/// Creates channels, uses each one once, and destroys them.
fn channels(rig: &Rig, count: u64) -> Result<f64> {
    let helper = Helper::new(rig, Engine::M2mf)?;
    let expected = Expected::background(rig.random().stream());
    // Give each channel its own buffer. If a fence is signalled without a wait, stock nouveau may access the channel of
    // a buffer's last fence after the channel has been freed (`nouveau_fence_sync`).
    let mut buffers = Vec::new();
    for _ in 0..count {
        let (from, to) = (rig.buffer(Domain::Gart, SMALL_COPY_BYTES)?, rig.buffer(Domain::Gart, SMALL_COPY_BYTES)?);
        helper.fill(&from, &expected)?;
        buffers.push((from, to));
    }
    let began = Instant::now();
    for (from, to) in &buffers {
        let channel = rig.channel(&[Engine::M2mf])?;
        copy(rig, &channel, from, to, SMALL_COPY_BYTES)?;
        to.wait(false)?;
    }
    let seconds = began.elapsed().as_secs_f64();
    for (_, to) in &buffers {
        helper.check("copied by a channel that has gone", to, &expected)?;
    }
    Ok(seconds)
}

/// Submits copies, and waits for each one.
fn copies(rig: &Rig, count: u64, from: Domain, to: Domain, size: u64) -> Result<f64> {
    let (from, to) = (rig.buffer(from, size)?, rig.buffer(to, size)?);
    let channel = rig.channel(&[Engine::M2mf])?;
    let helper = Helper::new(rig, Engine::M2mf)?;
    let expected = Expected::background(rig.random().stream());
    helper.fill(&from, &expected)?;
    // Exclude the first use of the buffers from the measurement.
    copy(rig, &channel, &from, &to, size)?;
    to.wait(false)?;
    let began = Instant::now();
    for _ in 0..count {
        copy(rig, &channel, &from, &to, size)?;
        to.wait(false)?;
    }
    let seconds = began.elapsed().as_secs_f64();
    helper.check("copied again and again", &to, &expected)?;
    Ok(seconds)
}

/// Repeatedly allocates buffers, uses them on the GPU, and frees them, which maps and unmaps each buffer in the address
/// space.
fn map_churn(rig: &Rig, count: u64) -> Result<f64> {
    let channel = rig.channel(&[Engine::M2mf])?;
    let helper = Helper::new(rig, Engine::M2mf)?;
    let source = rig.buffer(Domain::Gart, SMALL_COPY_BYTES)?;
    let kept = rig.buffer(Domain::Gart, SMALL_COPY_BYTES)?;
    let expected = Expected::background(rig.random().stream());
    helper.fill(&source, &expected)?;
    let mut random = rig.random();
    let began = Instant::now();
    for _ in 0..count {
        let domain = if random.below(2) == 0 { Domain::Vram } else { Domain::Gart };
        let buffer = rig.buffer(domain, SMALL_COPY_BYTES << random.below(9))?;
        copy(rig, &channel, &source, &buffer, SMALL_COPY_BYTES)?;
        copy(rig, &channel, &buffer, &kept, SMALL_COPY_BYTES)?;
        kept.wait(false)?;
    }
    let seconds = began.elapsed().as_secs_f64();
    helper.check("passed through buffers that came and went", &kept, &expected)?;
    Ok(seconds)
}

/// Repeatedly submits a copy on each of many channels, and then waits for all of them.
fn many_channels(rig: &Rig, count: u64) -> Result<f64> {
    let helper = Helper::new(rig, Engine::M2mf)?;
    let source = rig.buffer(Domain::Gart, SMALL_COPY_BYTES)?;
    let expected = Expected::background(rig.random().stream());
    helper.fill(&source, &expected)?;
    let mut lanes = Vec::new();
    for _ in 0..MAX_CHANNELS_PER_FILE {
        lanes.push((rig.channel(&[Engine::M2mf])?, rig.buffer(Domain::Gart, SMALL_COPY_BYTES)?));
    }
    let began = Instant::now();
    for _ in 0..count {
        for (channel, target) in &lanes {
            copy(rig, channel, &source, target, SMALL_COPY_BYTES)?;
        }
        for (_, target) in &lanes {
            target.wait(false)?;
        }
    }
    let seconds = began.elapsed().as_secs_f64();
    for (_, target) in &lanes {
        helper.check("copied in one of many channels", target, &expected)?;
    }
    Ok(seconds)
}

/// Submits small copies with only occasional waits.
fn small_submissions(rig: &Rig, count: u64) -> Result<f64> {
    const SUBMISSIONS_PER_WAIT: u64 = 32;
    let channel = rig.channel(&[Engine::M2mf])?;
    let helper = Helper::new(rig, Engine::M2mf)?;
    let (source, target) = (rig.buffer(Domain::Gart, SMALL_COPY_BYTES)?, rig.buffer(Domain::Gart, SMALL_COPY_BYTES)?);
    let expected = Expected::background(rig.random().stream());
    helper.fill(&source, &expected)?;
    let began = Instant::now();
    for at in 0..count {
        let offset = at % (SMALL_COPY_BYTES / 64) * 64;
        let rects = linear(source.address() + offset, target.address() + offset, 64, Engine::M2mf.most_lines());
        rig.launch(&channel, Engine::M2mf, &rects, &[Use::read(&source), Use::write(&target)])?;
        if at % SUBMISSIONS_PER_WAIT == SUBMISSIONS_PER_WAIT - 1 {
            target.wait(false)?;
        }
    }
    target.wait(false)?;
    let seconds = began.elapsed().as_secs_f64();
    if count >= SMALL_COPY_BYTES / 64 {
        helper.check("copied piece by piece", &target, &expected)?;
    }
    Ok(seconds)
}

fn copy(rig: &Rig, channel: &Channel, from: &Buffer, to: &Buffer, size: u64) -> Result<()> {
    let rects = linear(from.address(), to.address(), size, Engine::M2mf.most_lines());
    rig.launch(channel, Engine::M2mf, &rects, &[Use::read(from), Use::write(to)])
}
