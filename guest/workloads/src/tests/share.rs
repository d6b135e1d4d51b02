//! Tests segments of device memory: keys, permissions and lifetimes within a machine, and sharing between two machines,
//! one of which writes while the other reads.

use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::thread::sleep;
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use workloads::{Gpu, Random};

use super::Facts;
use crate::compute::{self, Guest};
use crate::ending::Ending;
use crate::options::Options;
use crate::rig::{Counts, Rig};
use gdev::nouveau::Device;
use gdev::nouveau::mediator::{ABROAD, ABROAD_READ_WRITE, CREATE, Mediator, READ_ONLY, Wanted, question};

/// Size of a segment in bytes.
const BYTES: u64 = 256 << 10;
/// Maximum number of polls for another process's action.
const MAX_POLLS: u32 = 400;
const POLL_INTERVAL: Duration = Duration::from_millis(50);

/// Runs `share [--what keys|hold|steal|put|get] [--key N] [--channel N] [--duration SECONDS]`.
pub fn run(rig: &Rig, options: &Options) -> Result<Facts> {
    let what = options.text("what").unwrap_or("keys");
    let node = Path::new(options.text("node").unwrap_or(crate::DEFAULT_NODE));
    let key = options.number("key", 0x6b65_7900)?;
    let mediator = Mediator::open()?;
    let duration = Duration::from_secs(options.number("duration", 60)?);
    match what {
        "keys" => keys(rig, node, &mediator, key)?,
        "hold" => hold(node, &mediator, key, duration)?,
        "steal" => steal(&mediator, key, i32::try_from(options.number("channel", 0)?)?)?,
        "put" => put(rig, node, &mediator, key, duration)?,
        "get" => get(rig, node, &mediator, key)?,
        other => bail!("--what {other}: keys, hold, steal, put or get"),
    }
    let placed = mediator.query(question::PLACED)?;
    ensure!(placed > 0 && placed <= mediator.query(question::VRAM)?, "{placed} bytes are on the card");
    Ok(vec![("what", what.to_owned()), ("placed", placed.to_string())])
}

fn wanted(key: u64, flags: u32) -> Wanted {
    let abroad = if flags & ABROAD == 0 { 0 } else { ABROAD_READ_WRITE };
    Wanted { key, bytes: BYTES, flags, mode: 0o600, abroad }
}

/// Opens the device and creates a context with a channel.
fn context(node: &Path) -> Result<Guest> {
    compute::context(&Device::open(node)?)
}

fn write(gpu: &mut Guest, address: u64, data: &[u8]) -> Result<()> {
    let segment = gpu.backend_mut().adopt(address, BYTES);
    gpu.upload(segment, 0, data)?;
    gpu.finish()?;
    Ok(gpu.free(segment)?)
}

fn check(rig: &Rig, gpu: &mut Guest, address: u64, expected: &[u8]) -> Result<()> {
    let segment = gpu.backend_mut().adopt(address, BYTES);
    let mut data = vec![0; BYTES as usize];
    gpu.download(segment, 0, &mut data)?;
    gpu.free(segment)?;
    let wrong = data.iter().zip(expected).position(|(found, expected)| found != expected);
    ensure!(wrong.is_none(), "byte {wrong:?} of the segment differs");
    rig.add(Counts { bytes: BYTES, copies: 0, channels: 0 });
    Ok(())
}

fn data(seed: u64) -> Vec<u8> {
    Random::new(seed).words(BYTES as usize / 4).iter().flat_map(|word| word.to_le_bytes()).collect()
}

/// Waits until a segment is attached in `count` address spaces.
fn attached(mediator: &Mediator, id: u32, count: u64) -> Result<()> {
    for _ in 0..MAX_POLLS {
        if mediator.attached(id)? == count {
            return Ok(());
        }
        sleep(POLL_INTERVAL);
    }
    bail!("segment {id} is attached {} times, not {count}", mediator.attached(id)?)
}

fn keys(rig: &Rig, node: &Path, mediator: &Arc<Mediator>, key: u64) -> Result<()> {
    let (mut first, mut second) = (context(node)?, context(node)?);
    ensure!(mediator.share_get(wanted(key, 0)).is_err(), "a segment is there before it was made");
    let id = mediator.share_get(wanted(key, CREATE))?;
    ensure!(mediator.share_get(wanted(key, 0))? == id, "the key finds another segment");
    let here = mediator.attach(id, first.backend().number(), 0)?;
    let there = mediator.attach(id, second.backend().number(), READ_ONLY)?;
    check(rig, &mut second, there, &vec![0; BYTES as usize])?;
    write(&mut first, here, &data(rig.seed()))?;
    check(rig, &mut second, there, &data(rig.seed()))?;

    // Another process can find the segment by its key, but must not use this process's channels. Its attachments end
    // when it exits.
    let this = std::env::current_exe().context("the path of this program")?;
    let (key_text, channel) = (key.to_string(), first.backend().number().to_string());
    let node_text = node.to_string_lossy();
    let other = |what: &str| {
        let mut command = Command::new(&this);
        command.args(["share", "--what", what, "--node", &node_text, "--key", &key_text, "--channel", &channel]);
        command.stdout(Stdio::null());
        command
    };
    ensure!(other("steal").status()?.success(), "another process could use this one's channel");
    attached(mediator, id, 2)?;
    let mut holder = other("hold").spawn().context("starting a process")?;
    attached(mediator, id, 3)?;
    holder.kill()?;
    holder.wait()?;
    attached(mediator, id, 2)?;

    // Detach the segment while the GPU may be using it. Only the first context's channel may be lost. The second
    // context's channel must continue to work.
    let segment = first.backend_mut().adopt(here, BYTES);
    for _ in 0..4 {
        first.upload(segment, 0, &data(rig.seed() + 1))?;
    }
    mediator.detach(id, first.backend().number())?;
    ensure!(mediator.detach(id, first.backend().number()).is_err(), "it can be detached twice");
    if let Err(error) = first.finish() {
        println!("work in flight was aborted: {error:#}");
    }
    let mut third = context(node)?;
    let again = mediator.attach(id, third.backend().number(), 0)?;
    write(&mut third, again, &data(rig.seed() + 2))?;
    check(rig, &mut second, there, &data(rig.seed() + 2))?;

    // A removed segment has no key, but continues to exist in address spaces that have it attached.
    mediator.remove(id)?;
    ensure!(mediator.share_get(wanted(key, 0)).is_err(), "the key of a removed segment finds it");
    check(rig, &mut second, there, &data(rig.seed() + 2))?;
    mediator.detach(id, second.backend().number())?;
    mediator.detach(id, third.backend().number())?;
    ensure!(mediator.attached(id).is_err(), "a removed segment is there that nobody has attached");
    Ok(())
}

fn hold(node: &Path, mediator: &Mediator, key: u64, duration: Duration) -> Result<()> {
    let gpu = context(node)?;
    let id = mediator.share_get(wanted(key, 0))?;
    mediator.attach(id, gpu.backend().number(), 0)?;
    let ending = Ending::after(duration);
    while !ending.is_over() {
        sleep(POLL_INTERVAL);
    }
    Ok(())
}

fn steal(mediator: &Mediator, key: u64, channel: i32) -> Result<()> {
    let id = mediator.share_get(wanted(key, 0))?;
    ensure!(
        mediator.attach(id, channel, 0).is_err(),
        "channel {channel} belongs to another process, but accepted a segment"
    );
    Ok(())
}

fn put(rig: &Rig, node: &Path, mediator: &Mediator, key: u64, duration: Duration) -> Result<()> {
    let mut gpu = context(node)?;
    let id = mediator.share_get(wanted(key, CREATE | ABROAD))?;
    let address = mediator.attach(id, gpu.backend().number(), 0)?;
    write(&mut gpu, address, &data(rig.seed()))?;
    let ending = Ending::after(duration);
    // The other machine replies with data from the next seed.
    let answer = data(rig.seed() + 1);
    while check(rig, &mut gpu, address, &answer).is_err() {
        ensure!(!ending.is_over(), "no reply from the other machine");
        sleep(POLL_INTERVAL);
    }
    Ok(mediator.remove(id)?)
}

fn get(rig: &Rig, node: &Path, mediator: &Mediator, key: u64) -> Result<()> {
    let mut gpu = context(node)?;
    ensure!(mediator.share_get(wanted(key, 0)).is_err(), "the other machine's key is found without the group");
    let id = mediator.share_get(wanted(key, ABROAD))?;
    let address = mediator.attach(id, gpu.backend().number(), 0)?;
    check(rig, &mut gpu, address, &data(rig.seed()))?;
    write(&mut gpu, address, &data(rig.seed() + 1))
}
