//! Work that tries to harm other users of the card. Each rogue runs one attack for the requested time, and then shows,
//! if possible, that its own channels still work.

mod registers;

use std::fs;
use std::thread::sleep;
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};

use super::faulty::UNMAPPED_ADDR;
use super::workload::{Looped, Repeat, again_and_again};
use super::{Facts, faulty_kernels};
use crate::compute::{self, MOST_IN_FLIGHT};
use crate::ending::Ending;
use crate::options::Options;
use crate::pattern::Expected;
use crate::rig::{Counts, Helper, Rig};
use gdev::mapping::Width;
use gdev::nouveau::device::{Buffer, Channel, Domain, Use};
use gdev::nouveau::push::{Engine, Push, linear};

/// Number of submissions that a flood keeps in flight.
const FLOOD: usize = 256;
/// Number of loop iterations per thread in `split`. At 70 ns per warp instruction, 256 threads take about 20 us.
const SPLIT_ROUNDS: u32 = 9;
/// Number of channels that wait for a channel with a delayed doorbell.
const WAITERS: u32 = 4;
/// Delay of the doorbell of the channel that the others wait for.
const HELD_BACK: Duration = Duration::from_millis(50);
/// Number of bytes that each waiting channel copies after its wait.
const COPY_BYTES: u64 = 4096;
/// Number of handovers between two channels per submission.
const HANDOVERS: u32 = 32;
/// Number of bytes copied per handover.
const HANDED: u64 = 64 << 10;
/// Host method that raises a non-stall interrupt.
const NON_STALL: u32 = 0x20;
/// A method that does not exist in any class.
const NO_METHOD: u32 = 0x1ffc;
/// Number of non-stall interrupts per submission of `stream`.
const INTERRUPTS: u32 = 2000;
/// Number of illegal methods per submission of `stream`. The guest kernel takes about a millisecond to acknowledge
/// each. Meanwhile, the submission occupies the engine, and its VM is charged for the time.
const ILLEGAL: u32 = 20;
/// File that contains the console log level. Under emulation, each line printed on the console causes traps, which
/// would slow the attack down.
const PRINTK: &str = "/proc/sys/kernel/printk";

/// An attack on other users.
struct Rogue {
    what: &'static str,
    run: fn(&Rig, Duration) -> Result<Facts>,
}

const ROGUES: [Rogue; 14] = [
    Rogue { what: "flood", run: flood },
    Rogue { what: "split", run: split },
    Rogue { what: "endless", run: endless },
    Rogue { what: "withhold", run: |rig, duration| withhold(rig, duration, true) },
    Rogue { what: "hold", run: |rig, duration| withhold(rig, duration, false) },
    Rogue { what: "handover", run: handover },
    Rogue { what: "faults", run: faults },
    Rogue { what: "non-stall", run: |rig, duration| stream(rig, duration, NON_STALL, INTERRUPTS) },
    Rogue { what: "illegal", run: |rig, duration| stream(rig, duration, NO_METHOD, ILLEGAL) },
    Rogue { what: "stopped", run: registers::stopped },
    Rogue { what: "unlisted", run: registers::unlisted },
    Rogue { what: "masked", run: registers::masked },
    Rogue { what: "mastering", run: registers::mastering },
    Rogue { what: "batches", run: registers::batches },
];

/// Runs `rogue --what WHAT [--duration SECONDS]`, where WHAT is one of [`ROGUES`].
pub fn run(rig: &Rig, options: &Options) -> Result<Facts> {
    let what = options.text("what").unwrap_or_default();
    let Some(rogue) = ROGUES.iter().find(|rogue| rogue.what == what) else {
        bail!("--what {what}: one of {}", ROGUES.map(|rogue| rogue.what).join(" "));
    };
    let duration = Duration::from_secs(options.number("duration", 5)?.min(86_400));
    let mut facts = vec![("what", what.to_owned())];
    facts.extend((rogue.run)(rig, duration)?);
    Ok(facts)
}

/// Submits empty work as fast as the kernel accepts it.
fn flood(rig: &Rig, duration: Duration) -> Result<Facts> {
    let channel = Channel::with_ring(rig.device(), FLOOD)?;
    channel.add(Engine::M2mf.object())?;
    let mut push = Push::default();
    push.nop(Engine::M2mf.subchannel());
    let (ending, mut submissions) = (Ending::after(duration), 0u64);
    while !ending.is_over() {
        channel.submit(&push, &[])?;
        submissions += 1;
    }
    rig.add(Counts { channels: 1, ..Counts::default() });
    copies(rig, &channel)?;
    Ok(vec![("submissions", submissions.to_string())])
}

/// Runs kernels back to back, each of which ends before the mediator checks its run time.
fn split(rig: &Rig, duration: Duration) -> Result<Facts> {
    let options = workloads::Options { seed: rig.seed(), rounds: Some(SPLIT_ROUNDS), ..workloads::Options::default() };
    let pieces = workloads::by_name("loop", options).context("a workload")?;
    let mut gpu = compute::running_ahead(rig.device(), MOST_IN_FLIGHT)?;
    let repeat = Repeat { duration, in_flight: MOST_IN_FLIGHT, pause: None, ends: false };
    let Looped { iterations, .. } = again_and_again(&*pieces, &mut gpu, repeat)?;
    let report = workloads::run(&*pieces, &mut gpu)?;
    rig.add(Counts { bytes: report.verified, copies: gpu.backend().done().copies, channels: 1 });
    Ok(vec![("submissions", iterations.to_string())])
}

/// Runs endless kernels, each on a new channel.
fn endless(rig: &Rig, duration: Duration) -> Result<Facts> {
    let (ending, mut killed, mut refused) = (Ending::after(duration), 0u64, 0u64);
    while !ending.is_over() {
        // While the VM is quarantined, work on new channels is not executed.
        match faulty_kernels::never_ends(rig.device()) {
            Ok(()) => killed += 1,
            Err(error) => {
                refused += 1;
                println!("not even begun: {error:#}");
            }
        }
        println!("killed={killed} refused={refused}");
    }
    Ok(vec![("killed", killed.to_string()), ("refused", refused.to_string())])
}

/// Runs channels that wait for the semaphore of a channel with a delayed doorbell. If `yields` is true, the waiting
/// channels yield to other channels. Otherwise, they occupy the PBDMA until their time slice ends.
fn withhold(rig: &Rig, duration: Duration, yields: bool) -> Result<Facts> {
    let semaphore = rig.buffer(Domain::Gart, COPY_BYTES)?;
    let source = rig.buffer(Domain::Gart, COPY_BYTES)?;
    let expected = Expected::background(rig.random().stream());
    Helper::new(rig, Engine::M2mf)?.fill(&source, &expected)?;
    let promiser = rig.channel(&[Engine::M2mf])?;
    let waiter = |_| Ok((rig.channel(&[Engine::M2mf])?, rig.buffer(Domain::Gart, COPY_BYTES)?));
    let waiters: Vec<(Channel, Buffer)> = (0..WAITERS).map(waiter).collect::<Result<_>>()?;
    semaphore.map()?.store(0, Width::Dword, 0);
    let (ending, mut round) = (Ending::after(duration), 0u32);
    while !ending.is_over() {
        round += 1;
        for (channel, target) in &waiters {
            let mut push = Push::default();
            push.acquire(semaphore.address(), round, yields);
            for rect in linear(source.address(), target.address(), COPY_BYTES, Engine::M2mf.most_lines()) {
                push.copy(Engine::M2mf, &rect);
            }
            // Declare the semaphore as read-only in all submissions, or the kernel would synchronize the channels.
            channel.submit(&push, &[Use::read(&semaphore), Use::read(&source), Use::write(target)])?;
        }
        let mut promised = Push::default();
        promised.release(semaphore.address(), round);
        sleep(HELD_BACK);
        promiser.submit(&promised, &[Use::read(&semaphore)])?;
        waiters.iter().try_for_each(|(_, target)| target.wait(false))?;
    }
    let mut found = vec![0; usize::try_from(COPY_BYTES)?];
    for (channel, target) in &waiters {
        target.map()?.read(0, &mut found);
        expected.check(&format!("copied by waiting channel {}", channel.number()), 0, &found)?;
        rig.verified(COPY_BYTES);
    }
    rig.add(Counts { copies: u64::from(round * WAITERS), ..Counts::default() });
    Ok(vec![("rounds", round.to_string())])
}

/// Runs two channels that repeatedly wait for each other, and copy data between waits.
fn handover(rig: &Rig, duration: Duration) -> Result<Facts> {
    let semaphore = rig.buffer(Domain::Gart, COPY_BYTES)?;
    semaphore.map()?.store(0, Width::Dword, 0);
    let source = rig.buffer(Domain::Gart, HANDED)?;
    let side = |_| Ok((rig.channel(&[Engine::M2mf])?, rig.buffer(Domain::Gart, HANDED)?));
    let sides: Vec<(Channel, Buffer)> = (0..2).map(side).collect::<Result<_>>()?;
    let (ending, mut turn) = (Ending::after(duration), 0u32);
    while !ending.is_over() {
        for (place, (channel, target)) in (0..).zip(&sides) {
            let mut push = Push::default();
            for hand in 0..HANDOVERS {
                let turn = turn + 2 * hand + place;
                push.acquire(semaphore.address(), turn, true);
                for rect in linear(source.address(), target.address(), HANDED, Engine::M2mf.most_lines()) {
                    push.copy(Engine::M2mf, &rect);
                }
                push.release(semaphore.address(), turn + 1);
            }
            channel.submit(&push, &[Use::read(&semaphore), Use::read(&source), Use::write(target)])?;
        }
        turn += 2 * HANDOVERS;
    }
    sides.iter().try_for_each(|(_, target)| target.wait(false))?;
    rig.add(Counts { copies: turn.into(), ..Counts::default() });
    Ok(vec![("writes", turn.to_string())])
}

/// Runs channels that fault on one engine and also have a context on another.
fn faults(rig: &Rig, duration: Duration) -> Result<Facts> {
    fs::write(PRINTK, "1").context(PRINTK)?;
    let (ending, mut killed, mut refused) = (Ending::after(duration), 0u64, 0u64);
    while !ending.is_over() {
        match fault(rig) {
            Ok(()) => killed += 1,
            Err(error) => {
                refused += 1;
                println!("not even begun: {error:#}");
            }
        }
    }
    ensure!(killed > 0, "no channel was killed");
    Ok(vec![("writes", killed.to_string()), ("refused", refused.to_string())])
}

/// Reads an unmapped address with a copy engine, and waits until the channel is dead.
fn fault(rig: &Rig) -> Result<()> {
    let channel = rig.channel(&[Engine::M2mf, Engine::Ce0])?;
    let target = rig.buffer(Domain::Gart, COPY_BYTES)?;
    // Ignore errors, because the kernel may detect the dead channel before the submission returns.
    let rects = linear(UNMAPPED_ADDR, target.address(), COPY_BYTES, Engine::Ce0.most_lines());
    let _ = rig.launch(&channel, Engine::Ce0, &rects, &[Use::write(&target)]);
    let _ = target.wait(false);
    Ok(())
}

/// Sends the same M2MF method repeatedly.
fn stream(rig: &Rig, duration: Duration, method: u32, count: u32) -> Result<Facts> {
    fs::write(PRINTK, "1").context(PRINTK)?;
    let channel = rig.channel(&[Engine::M2mf])?;
    let mut push = Push::default();
    (0..count).for_each(|_| push.methods(Engine::M2mf.subchannel(), method, &[0]));
    let (ending, mut submissions) = (Ending::after(duration), 0u64);
    while !ending.is_over() {
        channel.submit(&push, &[])?;
        submissions += 1;
    }
    Ok(vec![("writes", (submissions * u64::from(count)).to_string())])
}

/// Fails unless the channel copies every byte correctly.
fn copies(rig: &Rig, channel: &Channel) -> Result<()> {
    let (source, target) = (rig.buffer(Domain::Gart, COPY_BYTES)?, rig.buffer(Domain::Gart, COPY_BYTES)?);
    let expected = Expected::background(rig.random().stream());
    Helper::new(rig, Engine::M2mf)?.fill(&source, &expected)?;
    let rects = linear(source.address(), target.address(), COPY_BYTES, Engine::M2mf.most_lines());
    rig.launch(channel, Engine::M2mf, &rects, &[Use::read(&source), Use::write(&target)])?;
    target.wait(false)?;
    let mut found = vec![0; usize::try_from(COPY_BYTES)?];
    target.map()?.read(0, &mut found);
    expected.check("copied behind the flood", 0, &found)?;
    ensure!(found.iter().any(|byte| *byte != 0), "the pattern is all zeros");
    rig.verified(COPY_BYTES);
    Ok(())
}
