//! Attacks through the card's registers while the driver is bound: writes registers that the driver rarely writes, as
//! fast as possible.
//!
//! The kernel driver is unaware of the attack, which may affect the program's own channels. A channel lost during the
//! attack is counted and replaced.

use std::fs::{self, OpenOptions};
use std::os::unix::fs::FileExt;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use pv::abi::register;
use pv::guest::{Ops, Reply};
use workloads::{Setup, Workload};

use crate::bar::card::Card;
use crate::bar::layout::{PAGE, reg};
use crate::bar::queue::{NEXT, Queue, USED, WRITE};
use crate::compute::{self, Guest};
use crate::ending::Ending;
use crate::rig::{Counts, Rig};
use crate::tests::Facts;
use gdev::mapping::Width;
use gdev::nouveau::device::{Buffer, Domain};

/// Side length of the matrices in elements. In the timing model for tests with several guests, one kernel takes 50 ms
/// of card time.
const SIDE: u32 = 32;
const ROUNDS: u32 = 100;
/// Number of kernels in flight.
const IN_FLIGHT: u64 = 4;
/// Number of times that a register is toggled between two kernels.
const TOGGLES: u32 = 64;
/// Mask of all engines in PFIFO.
const ENGINES: u32 = 0x3f;
/// Channel state register value that lets the channel run.
const RUNS: u32 = 0x001f_0001;
/// Mask of the entry count in the runlist submission register.
const RUNLIST_LENGTH_MASK: u32 = 0xfff;
/// Number of 16 MiB buffers in guest RAM that are mapped for the card while bus mastering is toggled.
const MAPPED: usize = 6;
const BUFFER: u64 = 16 << 20;
/// Offset of the command register in PCI configuration space.
const COMMAND: u64 = 4;
/// Command register bit for bus mastering.
const BUS_MASTER: u16 = 1 << 2;
/// Size of the VRAM range within which batches copy data, in bytes.
const ARENA: u64 = 8 << 20;
const COPIES: u32 = 1000;
/// Size of an encoded copy operation in bytes.
const COPY_BYTES: u32 = 32;
const IN_PAGE: u32 = 100;
/// Offset of a batch's header in the ring page, after the rings.
const HEADER: usize = 0xc00;
/// Upper bits of the first word of each page of the arena. The lower bits are the page number.
const BRAND: u32 = 0xa2e4_0000;

/// Function that stops a running channel through a register, and then restores the register.
type Toggle = fn(&Card, u32);

/// Toggles the channel's state register.
pub fn stopped(rig: &Rig, duration: Duration) -> Result<Facts> {
    under_kernels(rig, duration, &[state])
}

/// Submits the runlist, first without channels and then with all of them.
pub fn unlisted(rig: &Rig, duration: Duration) -> Result<Facts> {
    under_kernels(rig, duration, &[list])
}

/// Alternates between preempting the channel, writing the scheduler mask, and the two attacks above.
pub fn masked(rig: &Rig, duration: Duration) -> Result<Facts> {
    under_kernels(rig, duration, &[preempt, mask, state, list])
}

fn state(card: &Card, channel: u32) {
    card.write(reg::CHANNEL_STATE + 8 * channel, 0);
    card.write(reg::CHANNEL_STATE + 8 * channel, RUNS);
}

fn list(card: &Card, _channel: u32) {
    let listed = card.read(reg::RUNLIST_SUBMIT);
    card.write(reg::RUNLIST_SUBMIT, listed & !RUNLIST_LENGTH_MASK);
    card.write(reg::RUNLIST_SUBMIT, listed);
}

fn preempt(card: &Card, channel: u32) {
    card.write(reg::PREEMPT, channel);
}

fn mask(card: &Card, _channel: u32) {
    card.write(reg::SCHED_DISABLE, ENGINES);
    card.write(reg::SCHED_DISABLE, 0);
}

/// Toggles registers with each of `ways` in turn while kernels run.
fn under_kernels(rig: &Rig, duration: Duration, ways: &[Toggle]) -> Result<Facts> {
    let card = Card::open(None)?;
    let options = workloads::Options { seed: rig.seed(), rounds: Some(ROUNDS), side: Some(SIDE), ..Default::default() };
    let workload = workloads::by_name("long-madd", options).context("a workload")?;
    let (ending, mut lost, mut toggles, mut kernels) = (Ending::after(duration), 0u64, 0u64, 0u64);
    while !ending.is_over() {
        let mut gpu = compute::running_ahead(rig.device(), IN_FLIGHT)?;
        let channel = u32::try_from(gpu.backend().number())?;
        rig.add(Counts { channels: 1, ..Counts::default() });
        let outcome = run_toggled(&*workload, &mut gpu, &ending, |round| {
            let toggle = ways[usize::try_from(round)? % ways.len()];
            (0..TOGGLES).for_each(|_| toggle(&card, channel));
            toggles += u64::from(TOGGLES);
            kernels += 1;
            Ok(())
        });
        if let Err(error) = outcome {
            lost += 1;
            println!("channel {channel} is lost: {error:#}");
        }
    }
    ensure!(toggles > 0, "nothing was written");
    Ok(vec![("kernels", kernels.to_string()), ("writes", toggles.to_string()), ("lost", lost.to_string())])
}

/// Launches kernels until the time expires, and calls `between` after each launch.
fn run_toggled(
    workload: &dyn Workload,
    gpu: &mut Guest,
    ending: &Ending,
    mut between: impl FnMut(u64) -> Result<()>,
) -> Result<()> {
    let setup = Setup::new(workload, gpu)?;
    setup.upload(gpu)?;
    gpu.finish()?;
    let mut round = 0;
    while !ending.is_over() {
        workload.launch(gpu, &setup)?;
        between(round)?;
        round += 1;
    }
    gpu.finish()?;
    setup.free(gpu)
}

/// Toggles bus mastering while many pages of RAM are mapped for the card.
pub fn mastering(rig: &Rig, duration: Duration) -> Result<Facts> {
    let card = Card::open(None)?;
    let buffers = (0..MAPPED).map(|_| rig.buffer(Domain::Gart, BUFFER)).collect::<Result<Vec<Buffer>>>()?;
    buffers.iter().try_for_each(|buffer| buffer.wait(true))?;
    let config = OpenOptions::new().read(true).write(true).open(card.config_path()).context("configuration space")?;
    let mut command = [0; 2];
    config.read_exact_at(&mut command, COMMAND)?;
    let on = u16::from_le_bytes(command) | BUS_MASTER;
    let (ending, mut writes) = (Ending::after(duration), 0u64);
    while !ending.is_over() {
        for value in [on & !BUS_MASTER, on] {
            config.write_all_at(&value.to_le_bytes(), COMMAND).context("the command register")?;
            writes += 1;
        }
    }
    Ok(vec![("writes", writes.to_string())])
}

/// Submits batches through the paravirtual interface, which the kernel driver does not use. Each batch copies gigabytes
/// of data.
pub fn batches(rig: &Rig, duration: Duration) -> Result<Facts> {
    let card = Card::open(None)?;
    let config = fs::read(card.config_path()).context("configuration space")?;
    let capability = pv::guest::capability(&config).context("the card does not offer the paravirtual interface")?;
    let arena = rig.buffer(Domain::Vram, ARENA)?;
    let (at, bytes) = place(&card, &arena)?;
    let half = bytes / 2;
    let copy = Ops::new().copy(at + half, at, half).bytes();
    let header = size_of::<[u32; 2]>();
    ensure!(copy.len() - header == COPY_BYTES as usize, "a copy's operation has {} bytes", copy.len() - header);
    let mut queue = Queue::new(&card, &capability)?;
    let (ending, mut batches, mut ended) = (Ending::after(duration), 0u64, 0u64);
    let mut last = None;
    while !ending.is_over() {
        queue.start()?;
        queue.request.bytes.write(0, &copy[header..].repeat(IN_PAGE as usize));
        let words = [COPIES, COPIES * COPY_BYTES].map(u32::to_le_bytes).concat();
        queue.ring.bytes.write(HEADER, &words);
        queue.descriptor(0, queue.ring.gpa + HEADER as u64, words.len() as u32, NEXT, 1);
        let pages = (COPIES / IN_PAGE) as u16;
        for index in 1..=pages {
            queue.descriptor(index, queue.request.gpa, IN_PAGE * COPY_BYTES, NEXT, index + 1);
        }
        // The replies need more than a page, so list the same page several times.
        for index in pages + 1..=pages + 4 {
            let flags = if index == pages + 4 { WRITE } else { WRITE | NEXT };
            queue.descriptor(index, queue.reply.gpa, PAGE as u32, flags, index + 1);
        }
        queue.publish(0);
        batches += 1;
        while !ending.is_over() && queue.ring.bytes.load(USED + 2, Width::Word) == 0 {
            queue.read(register::ENDED);
        }
        if queue.ring.bytes.load(USED + 2, Width::Word) != 0 {
            ended += 1;
            let mut bytes = [0; 8];
            queue.reply.bytes.read(0, &mut bytes);
            last = Some(Reply::read(&bytes));
        }
    }
    let mib = (half * u64::from(COPIES)) >> 20;
    println!("the last reply: {last:x?}");
    Ok(vec![("writes", batches.to_string()), ("ended", ended.to_string()), ("batch_mib", mib.to_string())])
}

/// Finds a buffer in VRAM by the first words of its pages. Returns its VRAM address, and the number of contiguous bytes
/// at that address.
fn place(card: &Card, buffer: &Buffer) -> Result<(u64, u64)> {
    let pages = u32::try_from(buffer.size() / PAGE)?;
    let map = buffer.map()?;
    for page in 0..pages {
        map.store(usize::try_from(u64::from(page) * PAGE)?, Width::Dword, u64::from(BRAND | page));
    }
    card.read(reg::BOOT0);
    let found = (0..card.vram()?).step_by(PAGE as usize).find(|at| card.vram_read(*at) == BRAND);
    let found = found.context("the buffer's first page is nowhere in VRAM")?;
    let follows = |page: &u32| card.vram_read(found + u64::from(*page) * PAGE) == BRAND | page;
    let length = u64::try_from((0..pages).take_while(follows).count())? * PAGE;
    ensure!(length >= 2 * PAGE, "the buffer is fragmented into parts of {length} bytes");
    Ok((found, length))
}
