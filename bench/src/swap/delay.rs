//! GPUswap's figures 6 and 9: the time that a VM waits for other VMs' memory, and the suspension time of those VMs.
//! Both are relative to the time for copying the evicted bytes, and are measured by request size and by chunk size.

use std::time::Instant;

use anyhow::{Context, Result, ensure};
use rig::Rig;
use rig::driver::{At, Channel, Driver, M2MF, PAGE, m2mf_copy, object, pattern};
use vram::{Limits, TenantId};

use super::{BUS_RATE, CHUNK, LANES, division, eventually, quantile, time};
use crate::report::interval::{Interval, mean};
use crate::report::{Metric, Target};
use rig::in_process_vm::{CardConfig, MIB, account, guest, wait};

/// VRAM size of the card in MiB. The victim uses all of it.
const CARD_MIB: u64 = 48;
/// Size of each VM's VRAM in MiB.
const VM_MIB: u64 = 64;
/// Numbers of chunks per request.
const REQUESTS: [u64; 4] = [1, 2, 4, 8];
/// Number of requests per size.
const REQUESTS_PER_SIZE: u32 = 6;
/// First guest VRAM address beyond the driver's memory. It is a chunk boundary for every chunk size.
const FIRST_FREE_AT: u64 = 8 * MIB;
/// Chunk sizes in KiB. GPUswap's range is 128 to 65,536.
const CHUNK_SIZES_KIB: [u64; 4] = [128, 512, 2048, 8192];
/// Number of bytes per request with each chunk size.
const REQUEST_BYTES: u64 = 8 * MIB;
/// Number of requests with each chunk size.
const ASKED_ROUNDS: u32 = 10;
/// GPU virtual address at which a guest's first page is mapped. One page per chunk is mapped, in order.
const VA: u64 = 0x100_0000;

/// A guest and its channel.
struct Vm {
    driver: Driver,
    channel: Channel,
    /// Size of a chunk in bytes.
    chunk: u64,
}

impl Vm {
    fn new(rig: &Rig, vm: u32, chunk: u64) -> Result<Self> {
        let mut driver = guest(rig, vm, VM_MIB, Limits::default())?;
        let channel = driver.channel(1);
        Ok(Self { driver, channel, chunk })
    }

    /// Creates a VM that occupies all card memory, with a pattern at the start of each chunk from [`FIRST_FREE_AT`] on.
    /// Also returns the number of these chunks.
    fn of_all(rig: &Rig, vm: u32, chunk: u64) -> Result<(Self, u64)> {
        let one = Self::new(rig, vm, chunk)?;
        let mut chunks = 0;
        while rig.host.lock().vram().chunks.spare() > 0 {
            one.driver.guest.vram_write(FIRST_FREE_AT + chunks * chunk, &pattern(9, chunks));
            chunks += 1;
        }
        Ok((one, chunks))
    }

    /// Returns true if the first `chunks` of these chunks still have the patterns written by [`Self::of_all`].
    fn kept(&self, chunks: u64) -> bool {
        (0..chunks).all(|number| {
            let (mut found, expected) = (vec![0; PAGE as usize], pattern(9, number));
            self.driver.guest.vram_read(FIRST_FREE_AT + number * self.chunk, &mut found);
            found == expected
        })
    }

    /// Writes to `chunks` unused chunks with the GPU. Returns the duration in seconds.
    fn allocate(&mut self, chunks: u64) -> Result<f64> {
        let Self { driver, channel, chunk: bytes } = self;
        let began = Instant::now();
        for chunk in 0..chunks {
            driver.map(channel.space, VA + chunk * PAGE, At::Vram(FIRST_FREE_AT + chunk * *bytes), 1);
        }
        // PGRAPH's M2MF performs these copies.
        let touches = (0..chunks).map(|chunk| m2mf_copy(VA + chunk * PAGE, VA + chunk * PAGE, 64));
        driver.submit(channel, &[object(M2MF)].into_iter().chain(touches).collect::<Vec<_>>().concat());
        wait(driver, channel)?;
        Ok(began.elapsed().as_secs_f64())
    }
}

fn moved_of(rig: &Rig, vm: u32) -> (u64, u64) {
    rig.host.lock().memory().moved(TenantId(vm)).map_or((0, 0), |moved| (moved.sum.bytes, moved.sum.suspended_ns))
}

/// Cost of a request: times in seconds until its memory is usable and until all of it is on the card, the victim's
/// suspension time in seconds, and the number of moved bytes.
struct Cost {
    usable: f64,
    on_card: f64,
    suspended: f64,
    bytes: f64,
}

fn request(rig: &Rig, vm: u32, chunks: u64, chunk: u64) -> Result<Cost> {
    let mut requester = Vm::new(rig, vm, chunk)?;
    // Exclude memory that the driver needs for its own purposes.
    let settled = |rig: &Rig| -> Result<bool> {
        let own = account(rig, vm)?;
        Ok(own.host == 0 && own.moving == 0 && account(rig, 0)?.moving == 0)
    };
    eventually("the driver's memory is on the card", || settled(rig))?;
    let (bytes, suspended) = moved_of(rig, 0);
    let began = Instant::now();
    let usable = requester.allocate(chunks)?;
    eventually("the memory is on the card", || settled(rig))?;
    let on_card = began.elapsed().as_secs_f64();
    let (bytes_after, suspended_after) = moved_of(rig, 0);
    requester.driver.guest.remove()?;
    let back = || Ok(account(rig, 0)?.moving == 0 && account(rig, 0)?.host == 0);
    eventually("the victim has its memory back", back)?;
    Ok(Cost {
        usable,
        on_card,
        suspended: (suspended_after - suspended) as f64 / 1e9,
        bytes: (bytes_after - bytes) as f64,
    })
}

fn config(chunk_bytes: u64) -> CardConfig {
    let mut division = division();
    // The victim has no work, but must not count as idle.
    division.balance.idle_after_ns = 3_600_000_000_000;
    CardConfig { chunk_bytes, division, time: time(), ..CardConfig::new(CARD_MIB, 128) }
}

/// Returns the modelled time in seconds for copying the memory that a request evicted, at least 1 us.
fn copy(cost: &Cost) -> f64 {
    (cost.bytes / (LANES * BUS_RATE as f64)).max(1e-6)
}

/// Measures requests of equal size with several chunk sizes.
pub fn by_chunk_size() -> Result<Vec<Metric>> {
    let mut metrics = Vec::new();
    for kib in CHUNK_SIZES_KIB {
        let chunk = kib << 10;
        let rig = config(chunk).open()?;
        let (victim, chunks) = Vm::of_all(&rig, 0, chunk)?;
        let costs = (1..=ASKED_ROUNDS).map(|vm| request(&rig, vm, REQUEST_BYTES / chunk, chunk));
        let costs = costs.collect::<Result<Vec<_>>>().with_context(|| format!("chunks of {kib} KiB"))?;
        ensure!(victim.kept(chunks), "the victim's memory contains wrong data");
        let ms = |of: fn(&Cost) -> f64| costs.iter().map(|cost| of(cost) * 1e3).collect::<Vec<_>>();
        let name = format!("swap.delay_by_chunk.{kib}k");
        let evicted: Vec<f64> = costs.iter().map(|cost| cost.bytes / MIB as f64).collect();
        metrics.push(Metric::plain(format!("{name}.evicted"), mean(&evicted).context("no request")?, "MiB"));
        for (what, of) in [
            ("usable", (|cost| cost.usable) as fn(&Cost) -> f64),
            ("on_card", |cost| cost.on_card),
            ("suspension", |cost| cost.suspended),
        ] {
            let value = mean(&ms(of)).context("no request")?;
            let metric =
                Metric::ratio(format!("{name}.{what}"), value, "ms", mean(&ms(copy)).context("none")?, Target::None);
            let metric = metric.within(Interval::of_ratio(&ms(of), &ms(copy), mean));
            metrics.push(metric.beside("GPUswap figure 9: least with 2 MiB"));
        }
    }
    Ok(metrics)
}

/// Measures requests of several sizes.
pub fn run() -> Result<Vec<Metric>> {
    let config = config(CHUNK);
    // Make the same requests without another VM.
    let empty = config.open()?;
    let mut alone = Vec::new();
    for round in 0..REQUESTS_PER_SIZE {
        let mut vm = Vm::new(&empty, round, CHUNK)?;
        alone.push(vm.allocate(1)?);
        vm.driver.guest.remove()?;
    }
    drop(empty);

    let rig = config.open()?;
    let (victim, chunks) = Vm::of_all(&rig, 0, CHUNK)?;
    let (mut metrics, mut ratios, mut victims) = (Vec::new(), Vec::new(), Vec::new());
    let mut vm = 1;
    for count in REQUESTS {
        let mut costs = Vec::new();
        for _ in 0..REQUESTS_PER_SIZE {
            costs.push(request(&rig, vm, count, CHUNK)?);
            vm += 1;
        }
        let ms = |of: fn(&Cost) -> f64| costs.iter().map(|cost| of(cost) * 1e3).collect::<Vec<_>>();
        let evicted = quantile(&costs.iter().map(|cost| cost.bytes).collect::<Vec<_>>(), 500)?;
        let copying = quantile(&costs.iter().map(|cost| copy(cost) * 1e3).collect::<Vec<_>>(), 500)?;
        let name = format!("swap.delay.{}m", count * CHUNK / MIB);
        metrics.push(Metric::plain(format!("{name}.evicted"), evicted / MIB as f64, "MiB"));
        for (what, of) in [
            ("usable", (|cost: &Cost| cost.usable) as fn(&Cost) -> f64),
            ("on_card", |cost| cost.on_card),
            ("suspension", |cost| cost.suspended),
        ] {
            for (rank, permille) in [("p50", 500), ("p99", 990)] {
                let value = quantile(&ms(of), permille)?;
                metrics.push(Metric::ratio(format!("{name}.{what}_{rank}"), value, "ms", copying, Target::None));
            }
        }
        ratios.extend(costs.iter().filter(|cost| cost.bytes > 0.0).map(|cost| cost.usable / copy(cost)));
        victims.extend(costs.iter().filter(|cost| cost.bytes > 0.0).map(|cost| cost.suspended / copy(cost)));
    }
    ensure!(victim.kept(chunks), "the victim's memory contains wrong data");
    let alone = quantile(&alone, 500)? * 1e3;
    metrics.push(Metric::plain("swap.delay.without_pressure_p50", alone, "ms"));
    let row = |name: &str, values: &[f64], permille| -> Result<Metric> {
        Ok(Metric::plain(format!("swap.delay.{name}"), quantile(values, permille)?, "x copy"))
    };
    metrics.push(row("usable_p50", &ratios, 500)?);
    metrics.push(row("usable_p99", &ratios, 990)?.target(Target::AtMost(1.25)).beside("GPUswap figure 6a: < 100 ms"));
    metrics.push(row("suspension_p50", &victims, 500)?);
    metrics.push(row("suspension_p99", &victims, 990)?.beside("GPUswap figure 6b: < 50 ms"));
    Ok(metrics)
}
