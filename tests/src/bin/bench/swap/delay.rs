//! GPUswap's figure 6: how long a VM waits for memory that others have, and how long those are suspended for it, against the
//! time that a copy of the evicted bytes takes.

use std::time::Instant;

use anyhow::Result;
use rig::Rig;
use rig::driver::{At, Channel, Driver, M2MF, PAGE, m2mf_copy, object, pattern};
use tests::bench::{Metric, Target};
use tests::light::{CardConfig, MIB, account, guest, wait};
use vram::{Limits, VmId};

use super::{BUS_RATE, CHUNK, division, eventually, quantile, time};

/// MiB of the card, all of which the victim takes.
const CARD_MIB: u64 = 48;
/// Chunks that are asked for at a time.
const REQUESTS: [u64; 4] = [1, 2, 4, 8];
/// Requests of each size.
const ROUNDS: u32 = 6;
/// First chunk of guests' VRAM that the driver itself has nothing in.
const FIRST: u64 = 4;
/// Address of a guest's chunks for the GPU: a page of each.
const VA: u64 = 0x100_0000;
/// Both copy engines.
const LANES: f64 = 2.0;

/// A guest and its channel.
struct Vm {
    driver: Driver,
    channel: Channel,
}

impl Vm {
    fn new(rig: &Rig, vm: u32, vram_mib: u64) -> Result<Self> {
        let mut driver = guest(rig, vm, vram_mib, Limits::default())?;
        let channel = driver.channel(1);
        Ok(Self { driver, channel })
    }

    /// Has the GPU write to `chunks` chunks that were never used. Returns the seconds until it has.
    fn allocate(&mut self, chunks: u64) -> Result<f64> {
        let Self { driver, channel } = self;
        let began = Instant::now();
        for chunk in 0..chunks {
            driver.map(channel.space, VA + chunk * PAGE, At::Vram((FIRST + chunk) * CHUNK), 1);
        }
        // By the engine that computes.
        let touches = (0..chunks).map(|chunk| m2mf_copy(VA + chunk * PAGE, VA + chunk * PAGE, 64));
        driver.submit(channel, &[object(M2MF)].into_iter().chain(touches).collect::<Vec<_>>().concat());
        wait(driver, channel)?;
        Ok(began.elapsed().as_secs_f64())
    }
}

fn moved_of(rig: &Rig, vm: u32) -> (u64, u64) {
    rig.host.lock().memory().moved(VmId(vm)).map_or((0, 0), |moved| (moved.sum.bytes, moved.sum.suspended_ns))
}

/// Cost of one request, in seconds, and the bytes that went for it.
struct Cost {
    usable: f64,
    on_card: f64,
    suspended: f64,
    bytes: f64,
}

fn request(rig: &Rig, vm: u32, chunks: u64) -> Result<Cost> {
    let mut requester = Vm::new(rig, vm, 64)?;
    // What its driver itself needs is not counted.
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

/// Measures.
pub fn run() -> Result<Vec<Metric>> {
    let mut division = division();
    // The victim works no more, and is not idle for that.
    division.balance.idle_after_ns = 3_600_000_000_000;
    let config = CardConfig { division, time: time(), ..CardConfig::new(CARD_MIB, 128) };
    // The same with nobody in the way.
    let empty = config.open()?;
    let mut alone = Vec::new();
    for round in 0..ROUNDS {
        let mut vm = Vm::new(&empty, round, 64)?;
        alone.push(vm.allocate(1)?);
        vm.driver.guest.remove()?;
    }
    drop(empty);

    let rig = config.open()?;
    let victim = Vm::new(&rig, 0, 64)?;
    let mut chunks = 0;
    while rig.host.lock().vram().chunks.spare() > 0 {
        victim.driver.guest.vram_write((FIRST + chunks) * CHUNK, &pattern(9, FIRST + chunks));
        chunks += 1;
    }
    let (mut metrics, mut ratios, mut victims) = (Vec::new(), Vec::new(), Vec::new());
    let mut vm = 1;
    for count in REQUESTS {
        let mut costs = Vec::new();
        for _ in 0..ROUNDS {
            costs.push(request(&rig, vm, count)?);
            vm += 1;
        }
        let copy = |cost: &Cost| (cost.bytes / (LANES * BUS_RATE as f64)).max(1e-6);
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
    let kept = (FIRST..FIRST + chunks).all(|chunk| {
        let (mut found, expected) = (vec![0; PAGE as usize], pattern(9, chunk));
        victim.driver.guest.vram_read(chunk * CHUNK, &mut found);
        found == expected
    });
    anyhow::ensure!(kept, "bytes of the victim are wrong");
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
