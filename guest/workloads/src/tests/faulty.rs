//! Work that the card must reject, or that never ends. The kernel must not kill any channel except the one that
//! submitted the work.

use std::time::{Duration, Instant};

use anyhow::{Result, bail, ensure};

use super::{Facts, faulty_kernels};
use crate::options::Options;
use crate::pattern::Expected;
use crate::rig::{Helper, Rig};
use gdev::nouveau::device::{Buffer, Channel, Domain, Use};
use gdev::nouveau::push::{Engine, Push, linear};

/// A GPU virtual address at which this program has no buffer.
pub const UNMAPPED_ADDR: u64 = 0x7f_1234_0000;
/// Byte offset of a method that no class defines.
const NO_METHOD: u32 = 0x1ffc;
/// Size of a copy in bytes.
const COPY_BYTES: u64 = 65536;
/// Time limit for the guest's kernel to detect a dead channel.
const NOTICED: Duration = Duration::from_secs(60);
/// Maximum number of copies before the card must have hung.
const COPIES: u32 = 4000;

/// Runs `faulty --what unmapped|method|hang`, or one of [`faulty_kernels::KERNELS`].
pub fn run(rig: &Rig, options: &Options) -> Result<Facts> {
    let what = options.text("what").unwrap_or("unmapped");
    if let Some(faulty) = faulty_kernels::KERNELS.iter().find(|faulty| faulty.what == what) {
        return faulty_kernels::run(rig, faulty);
    }
    // Create both channels before the fault. The bystander must still work afterwards.
    let bystander = rig.channel(&[Engine::Ce0])?;
    let victim = rig.channel(&[Engine::M2mf])?;
    let number = victim.number();
    let (source, target) = (rig.buffer(Domain::Gart, COPY_BYTES)?, rig.buffer(Domain::Gart, COPY_BYTES)?);
    let expected = Expected::background(rig.random().stream());
    Helper::new(rig, Engine::Ce0)?.fill(&source, &expected)?;
    println!("victim channel={number} bystander channel={}", bystander.number());
    match what {
        "unmapped" => {
            let rects = linear(UNMAPPED_ADDR, target.address(), 4096, Engine::M2mf.most_lines());
            // The kernel may detect the dead channel before the submission returns. `dies` then also reports it.
            if let Err(error) = rig.launch(&victim, Engine::M2mf, &rects, &[Use::write(&target)]) {
                println!("the kernel reports immediately: {error:#}");
            }
        }
        "method" => {
            let mut push = Push::default();
            push.methods(Engine::M2mf.subchannel(), NO_METHOD, &[0xbad]);
            victim.submit(&push, &[])?;
        }
        "hang" => {}
        _ => {
            let kernels = faulty_kernels::KERNELS.map(|faulty| faulty.what).join(" ");
            bail!("--what {what}: one of unmapped method hang {kernels}")
        }
    }
    // An illegal method is reported and skipped. Other faults kill the channel.
    let killed = if what == "method" {
        once(rig, &victim, Engine::M2mf, &source, &target)?;
        false
    } else {
        dies(rig, &victim, &source, &target)?;
        true
    };
    works(rig, &bystander, Engine::Ce0, &source, &expected)?;
    works(rig, &rig.channel(&[Engine::M2mf])?, Engine::M2mf, &source, &expected)?;
    Ok(vec![
        ("what", what.to_owned()),
        ("victim", number.to_string()),
        ("killed", killed.to_string()),
        ("address", format!("{UNMAPPED_ADDR:#x}")),
    ])
}

/// Submits copies until the kernel reports that the channel is dead.
fn dies(rig: &Rig, channel: &Channel, source: &Buffer, target: &Buffer) -> Result<()> {
    let began = Instant::now();
    for _ in 0..COPIES {
        if let Err(error) = once(rig, channel, Engine::M2mf, source, target) {
            println!("the kernel reports: {error:#}");
            return Ok(());
        }
        if began.elapsed() > NOTICED {
            break;
        }
    }
    bail!("channel {} still accepts work", channel.number())
}

fn once(rig: &Rig, channel: &Channel, engine: Engine, source: &Buffer, target: &Buffer) -> Result<()> {
    let rects = linear(source.address(), target.address(), COPY_BYTES, engine.most_lines());
    rig.launch(channel, engine, &rects, &[Use::read(source), Use::write(target)])?;
    Ok(target.wait(false)?)
}

/// Fails unless the channel copies every byte correctly.
fn works(rig: &Rig, channel: &Channel, engine: Engine, source: &Buffer, expected: &Expected) -> Result<()> {
    let target = rig.buffer(Domain::Gart, COPY_BYTES)?;
    once(rig, channel, engine, source, &target)?;
    let mut found = vec![0; COPY_BYTES as usize];
    target.map()?.read(0, &mut found);
    expected.check("copied by another channel than the faulty one", 0, &found)?;
    ensure!(found.iter().any(|byte| *byte != 0), "the pattern is all zeros");
    rig.verified(COPY_BYTES);
    Ok(())
}
