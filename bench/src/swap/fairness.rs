//! GPUswap's figure 4: two VMs allocate far more memory than the card has, and one of them starts later.

use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use rig::Rig;
use rig::driver::{At, PAGE, pattern};
use vram::{Limits, TenantId};

use super::picture::{Picture, Series, draw};
use super::{CHUNK, division, time};
use crate::report::{Metric, Target};
use rig::in_process_vm::{CardConfig, MIB, copy_line, guest, wait};

/// VRAM size of the card in MiB. The card has an odd number of chunks, so that two VMs cannot divide them evenly, as in
/// the paper.
const CARD_MIB: u64 = 94;
/// Memory that each VM allocates, in MiB.
const EACH_MIB: u64 = 120;
/// Interval between chunk allocations of a VM.
const ALLOCATION_INTERVAL: Duration = Duration::from_millis(25);
/// Delay between the start of the first VM and the start of the second VM.
const SECOND_VM_START: Duration = Duration::from_millis(2500);
/// Time for which each VM keeps its memory after allocating all of it.
const HOLD_TIME: Duration = Duration::from_millis(3500);
/// Index of the first guest VRAM chunk that the driver does not use.
const FIRST_FREE_CHUNK: u64 = 4;
/// GPU virtual address at which the first page of the first chunk is mapped. One page per chunk is mapped, in order.
const VA: u64 = 0x100_0000;

/// A snapshot of both VMs' memory in chunks, on the card and in host memory.
struct Sample {
    at: Duration,
    card: [u32; 2],
    host: [u32; 2],
}

/// Allocates one chunk at a time and uses it on the GPU, then keeps all chunks, and finally verifies them.
fn allocator(rig: &Rig, vm: u32) -> Result<()> {
    let mut driver = guest(rig, vm, EACH_MIB + FIRST_FREE_CHUNK * CHUNK / MIB, Limits::default())?;
    let mut channel = driver.channel(1);
    let chunks = EACH_MIB * MIB / CHUNK;
    for chunk in 0..chunks {
        let (at, va) = ((FIRST_FREE_CHUNK + chunk) * CHUNK, VA + chunk * PAGE);
        driver.map(channel.space, va, At::Vram(at), 1);
        driver.guest.vram_write(at, &pattern(vm, chunk));
        driver.submit(&mut channel, &copy_line(0, va, va, 64));
        wait(&mut driver, &channel)?;
        std::thread::sleep(ALLOCATION_INTERVAL);
    }
    let began = Instant::now();
    while began.elapsed() < HOLD_TIME {
        // Submit work, so that the VM does not count as idle.
        driver.submit(&mut channel, &copy_line(0, VA, VA, 64));
        wait(&mut driver, &channel)?;
        std::thread::sleep(ALLOCATION_INTERVAL);
    }
    for chunk in 0..chunks {
        let mut found = vec![0; PAGE as usize];
        driver.guest.vram_read((FIRST_FREE_CHUNK + chunk) * CHUNK, &mut found);
        ensure!(found == pattern(vm, chunk), "VM {vm}: chunk {chunk} has wrong contents");
    }
    driver.guest.remove()?;
    Ok(())
}

fn sample(rig: &Rig, at: Duration) -> Sample {
    let summary = rig.usage().0;
    let of = |vm: u32| summary.vms.get(&TenantId(vm)).copied().unwrap_or_default();
    Sample { at, card: [0, 1].map(|vm| of(vm).placed), host: [0, 1].map(|vm| of(vm).host) }
}

/// Runs the benchmark, and draws a chart of the shares to `file`.
pub fn run(file: Option<&Path>) -> Result<Vec<Metric>> {
    let config = CardConfig { division: division(), time: time(), ..CardConfig::new(CARD_MIB, 256) };
    let rig = config.open()?;
    let ended = AtomicBool::new(false);
    let samples = std::thread::scope(|scope| -> Result<Vec<Sample>> {
        let (rig, ended) = (&rig, &ended);
        let sampler = scope.spawn(move || {
            let (began, mut samples) = (Instant::now(), Vec::new());
            while !ended.load(Ordering::SeqCst) {
                samples.push(sample(rig, began.elapsed()));
                std::thread::sleep(Duration::from_millis(5));
            }
            samples
        });
        let first = scope.spawn(move || allocator(rig, 0));
        std::thread::sleep(SECOND_VM_START);
        let done = allocator(rig, 1);
        let first = first.join().ok().context("the first allocator panicked");
        std::thread::sleep(Duration::from_millis(100));
        ended.store(true, Ordering::SeqCst);
        done.and(first.flatten())?;
        sampler.join().ok().context("the sampler panicked")
    })?;
    // Use the samples taken while both VMs need more than half of the card.
    let card = (CARD_MIB * MIB / CHUNK) as u32;
    let both: Vec<&Sample> = samples
        .iter()
        .filter(|sample| (0..2).all(|vm| sample.card[vm] + sample.host[vm] > card / 2 + 1))
        .skip_while(|sample| sample.card[1] + 1 < card / 2)
        .collect();
    ensure!(!both.is_empty(), "the two VMs never competed for the card");
    // Evaluate only the second half, because a VM that is still growing exceeds its share by one chunk.
    let settled = both.len() / 2;
    let imbalance =
        |samples: &[&Sample]| samples.iter().map(|sample| sample.card[0].abs_diff(sample.card[1])).max().unwrap_or(0);
    let used = both.iter().map(|sample| f64::from(sample.card[0] + sample.card[1]) / f64::from(card));
    let used = used.sum::<f64>() / both.len() as f64;
    if let Some(file) = file {
        let line = |name: &str, of: &dyn Fn(&Sample) -> u32| Series {
            name: name.to_owned(),
            points: samples
                .iter()
                .map(|sample| (sample.at.as_secs_f64(), f64::from(of(sample)) * (CHUNK / MIB) as f64))
                .collect(),
        };
        let series = [
            line("first, card", &|sample| sample.card[0]),
            line("first, host", &|sample| sample.host[0]),
            line("second, card", &|sample| sample.card[1]),
            line("second, host", &|sample| sample.host[1]),
        ];
        let title = "Two allocators on a card (GPUswap, figure 4)";
        draw(file, &Picture { title, x: "seconds", y: "MiB" }, &series)?;
    }
    let chunks = |name: &str, value: u32| Metric::plain(format!("swap.fairness.{name}"), f64::from(value), "chunks");
    Ok(vec![
        chunks("imbalance", imbalance(&both[settled..]))
            .target(Target::AtMost(1.0))
            .beside("GPUswap figure 4: at most one chunk"),
        chunks("imbalance_while_the_second_grows", imbalance(&both[..settled])),
        Metric::plain("swap.fairness.card_used", used * 100.0, "%"),
    ])
}
