//! GPUswap's figure 6: how long a VM waits for memory that others have, and how long those are suspended for it, against the
//! time that a copy of the evicted bytes takes; the same by the size of a chunk (figure 9), and at the speed of real links.

use std::time::Instant;

use anyhow::{Result, ensure};
use rig::Rig;
use rig::driver::{At, Channel, Driver, M2MF, PAGE, m2mf_copy, object, pattern};
use simgpu::TimeModel;
use tests::bench::{Metric, Target};
use tests::light::{CardConfig, MIB, account, guest, wait};
use vram::{Limits, VmId};

use super::{BUS_RATE, CHUNK, LINKS, division, eventually, largest, middle, time};

/// MiB of the card, all of which the victim takes.
const CARD_MIB: u64 = 48;
/// Chunks that are asked for at a time.
const REQUESTS: [u64; 4] = [1, 2, 4, 8];
/// Requests of each size.
const ROUNDS: u32 = 25;
/// Bytes that are asked for with chunks of other sizes, and how often.
const BY_CHUNK: u64 = 8 * MIB;
const ROUNDS_BY_CHUNK: u32 = 8;
const CHUNKS_KIB: [u64; 7] = [128, 256, 512, 1024, 2048, 4096, 8192];
/// First byte of guests' VRAM that the driver itself has nothing at.
const FIRST: u64 = 8 * MIB;
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
    fn allocate(&mut self, chunks: u64, chunk_bytes: u64) -> Result<f64> {
        let Self { driver, channel } = self;
        let began = Instant::now();
        for chunk in 0..chunks {
            driver.map(channel.space, VA + chunk * PAGE, At::Vram(FIRST + chunk * chunk_bytes), 1);
        }
        // By the engine that computes.
        let touches = (0..chunks).map(|chunk| m2mf_copy(VA + chunk * PAGE, VA + chunk * PAGE, 64));
        driver.submit(channel, &[object(M2MF)].into_iter().chain(touches).collect::<Vec<_>>().concat());
        wait(driver, channel)?;
        Ok(began.elapsed().as_secs_f64())
    }
}

/// Moves of a VM's memory: bytes, seconds of suspension, and of copies.
fn moved_of(rig: &Rig, vm: u32) -> [f64; 3] {
    let state = rig.host.lock();
    let sum = state.memory().moved(VmId(vm)).map(|moved| moved.sum).unwrap_or_default();
    [sum.bytes as f64, sum.suspended_ns as f64 / 1e9, sum.copied_ns as f64 / 1e9]
}

/// Cost of one request, in seconds.
struct Cost {
    usable: f64,
    on_card: f64,
    suspended: f64,
    /// Bytes that went for it, and seconds of their copies.
    bytes: f64,
    copied: f64,
    /// The same of what came for it.
    came_bytes: f64,
    came_copied: f64,
}

impl Cost {
    /// Seconds of the copies of what goes, by both engines of the modelled card.
    fn copy(&self) -> f64 {
        (self.bytes / (LANES * BUS_RATE as f64)).max(1e-6)
    }

    /// Seconds until it is on the card, had a link of so many bytes per second copied, and everything else taken what it did.
    fn on_card_over(&self, link: f64) -> f64 {
        self.on_card - self.copied - self.came_copied + (self.bytes + self.came_bytes) / link
    }

    /// Seconds for which the victim would have been suspended then.
    fn suspended_over(&self, link: f64) -> f64 {
        self.suspended - self.copied + self.bytes / link
    }
}

/// A card whose memory a victim has, all of it.
struct Scene {
    rig: Rig,
    chunk_bytes: u64,
    victim: Vm,
    /// Chunks that it has filled.
    filled: u64,
    next: u32,
}

impl Scene {
    fn config(chunk_bytes: u64, time: Option<TimeModel>) -> CardConfig {
        let mut division = division();
        // The victim works no more, and is not idle for that.
        division.balance.idle_after_ns = 3_600_000_000_000;
        CardConfig { division, time, chunk_bytes, ..CardConfig::new(CARD_MIB, 128) }
    }

    fn new(chunk_bytes: u64, time: Option<TimeModel>) -> Result<Self> {
        let rig = Self::config(chunk_bytes, time).open()?;
        let victim = Vm::new(&rig, 0, 64)?;
        let mut filled = 0;
        while rig.host.lock().vram().chunks.spare() > 0 {
            victim.driver.guest.vram_write(FIRST + filled * chunk_bytes, &pattern(9, filled));
            filled += 1;
        }
        Ok(Self { rig, chunk_bytes, victim, filled, next: 1 })
    }

    /// A VM comes, asks for memory, and goes.
    fn request(&mut self, chunks: u64) -> Result<Cost> {
        let (rig, vm) = (&self.rig, self.next);
        self.next += 1;
        let mut requester = Vm::new(rig, vm, 64)?;
        // What its driver itself needs is not counted.
        let settled = |rig: &Rig| -> Result<bool> {
            let own = account(rig, vm)?;
            Ok(own.host == 0 && own.moving == 0 && account(rig, 0)?.moving == 0)
        };
        eventually("the driver's memory is on the card", || settled(rig))?;
        let before = [0, vm].map(|vm| moved_of(rig, vm));
        let began = Instant::now();
        let usable = requester.allocate(chunks, self.chunk_bytes)?;
        eventually("the memory is on the card", || settled(rig))?;
        let on_card = began.elapsed().as_secs_f64();
        let after = [0, vm].map(|vm| moved_of(rig, vm));
        requester.driver.guest.remove()?;
        let back = || Ok(account(rig, 0)?.moving == 0 && account(rig, 0)?.host == 0);
        eventually("the victim has its memory back", back)?;
        let of = |whose: usize, what: usize| after[whose][what] - before[whose][what];
        Ok(Cost {
            usable,
            on_card,
            suspended: of(0, 1),
            bytes: of(0, 0),
            copied: of(0, 2),
            came_bytes: of(1, 0),
            came_copied: of(1, 2),
        })
    }

    fn verify(&self) -> Result<()> {
        let kept = (0..self.filled).all(|chunk| {
            let (mut found, expected) = (vec![0; PAGE as usize], pattern(9, chunk));
            self.victim.driver.guest.vram_read(FIRST + chunk * self.chunk_bytes, &mut found);
            found == expected
        });
        ensure!(kept, "bytes of the victim are wrong");
        Ok(())
    }
}

/// The middle one and the largest of the costs, in ms, against the copy.
fn rows(name: &str, costs: &[Cost]) -> Result<Vec<Metric>> {
    let ms = |of: fn(&Cost) -> f64| costs.iter().map(|cost| of(cost) * 1e3).collect::<Vec<_>>();
    let evicted = middle(&costs.iter().map(|cost| cost.bytes).collect::<Vec<_>>())?;
    let copying = middle(&ms(Cost::copy))?;
    let mut metrics = vec![Metric::plain(format!("{name}.evicted"), evicted / MIB as f64, "MiB")];
    for (what, of) in [
        ("usable", (|cost: &Cost| cost.usable) as fn(&Cost) -> f64),
        ("on_card", |cost| cost.on_card),
        ("suspension", |cost| cost.suspended),
    ] {
        let values = ms(of);
        for (rank, value) in [("p50", middle(&values)?), ("max", largest(&values))] {
            metrics.push(Metric::ratio(format!("{name}.{what}_{rank}"), value, "ms", copying, Target::None));
        }
    }
    Ok(metrics)
}

/// Measures.
pub fn run() -> Result<Vec<Metric>> {
    // The same with nobody in the way.
    let empty = Scene::config(CHUNK, time()).open()?;
    let mut alone = Vec::new();
    for round in 0..ROUNDS {
        let mut vm = Vm::new(&empty, round, 64)?;
        alone.push(vm.allocate(1, CHUNK)?);
        vm.driver.guest.remove()?;
    }
    drop(empty);

    let mut scene = Scene::new(CHUNK, time())?;
    let (mut metrics, mut all) = (Vec::new(), Vec::new());
    for count in REQUESTS {
        let costs = (0..ROUNDS).map(|_| scene.request(count)).collect::<Result<Vec<_>>>()?;
        metrics.extend(rows(&format!("swap.delay.{}m", count * CHUNK / MIB), &costs)?);
        all.extend(costs.into_iter().filter(|cost| cost.bytes > 0.0));
    }
    scene.verify()?;
    metrics.push(Metric::plain("swap.delay.without_pressure_p50", middle(&alone)? * 1e3, "ms"));
    metrics.push(Metric::plain("swap.delay.requests", all.len() as f64, "requests"));
    let of = |of: fn(&Cost) -> f64| all.iter().map(|cost| of(cost) / cost.copy()).collect::<Vec<_>>();
    for (what, values, target, peer) in [
        ("usable", of(|cost| cost.usable), Target::AtMost(1.25), "GPUswap figure 6a: < 100 ms"),
        ("on_card", of(|cost| cost.on_card), Target::None, "GPUswap waits until it is there"),
        ("suspension", of(|cost| cost.suspended), Target::None, "GPUswap figure 6b: < 50 ms"),
    ] {
        metrics.push(Metric::plain(format!("swap.delay.{what}_p50"), middle(&values)?, "x copy"));
        let largest = Metric::plain(format!("swap.delay.{what}_max"), largest(&values), "x copy");
        metrics.push(largest.target(target).beside(peer));
    }
    Ok(metrics)
}

/// The same on a card whose copies are this machine's, with the time of those taken away and that of a link put in its place.
pub fn links() -> Result<Vec<Metric>> {
    let mut scene = Scene::new(CHUNK, None)?;
    let mut metrics = Vec::new();
    for count in REQUESTS {
        let costs = (0..ROUNDS).map(|_| scene.request(count)).collect::<Result<Vec<_>>>()?;
        let name = format!("swap.links.delay.{}m", count * CHUNK / MIB);
        let mut both = |what: String, values: Vec<f64>, peer: &'static str| -> Result<()> {
            metrics.push(Metric::plain(format!("{name}.{what}_p50"), middle(&values)? * 1e3, "ms"));
            metrics.push(Metric::plain(format!("{name}.{what}_max"), largest(&values) * 1e3, "ms").beside(peer));
            Ok(())
        };
        let each = |of: &dyn Fn(&Cost) -> f64| costs.iter().map(of).collect::<Vec<_>>();
        both("usable".to_owned(), each(&|cost| cost.usable), "GPUswap figure 6a: < 100 ms")?;
        for (link, rate) in LINKS {
            both(format!("on_card.{link}"), each(&|cost| cost.on_card_over(rate)), "")?;
            both(format!("suspension.{link}"), each(&|cost| cost.suspended_over(rate)), "GPUswap figure 6b: < 50 ms")?;
        }
    }
    scene.verify()?;
    Ok(metrics)
}

/// The same amount of memory in chunks of other sizes.
pub fn by_chunk() -> Result<Vec<Metric>> {
    let mut metrics = Vec::new();
    for kib in CHUNKS_KIB {
        let chunk_bytes = kib << 10;
        let mut scene = Scene::new(chunk_bytes, time())?;
        let costs = (0..ROUNDS_BY_CHUNK).map(|_| scene.request(BY_CHUNK / chunk_bytes)).collect::<Result<Vec<_>>>()?;
        scene.verify()?;
        let rows = rows(&format!("swap.chunk_delay.{kib}k"), &costs)?;
        metrics.extend(rows.into_iter().map(|row| row.beside("GPUswap figure 9: 2 MiB is best")));
    }
    Ok(metrics)
}
