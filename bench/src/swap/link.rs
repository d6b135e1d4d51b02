//! Measures the overhead of moving chunks relative to their transfer time on a link, and the resulting speeds on links
//! of 6 to 50 GB/s.
//!
//! The software card transfers bytes with this machine's CPUs, and measures the duration of the transfers. The rest of
//! a relocation's time is software overhead: the mover, the model of the card's engines and rings, and waits for both.
//! The engines of a real card transfer the bytes concurrently. Here, link time and software time are added as if they
//! never overlapped, so times are upper bounds and speeds are lower bounds. The baseline, a guest driver's copies with
//! the same engines, is computed in the same way.

use std::time::Instant;

use anyhow::Result;
use vram::To;

use super::CHUNK;
use super::bandwidth::{BUFFER_AT, BYTES, RAM_VA, Scene, VRAM_VA};
use crate::report::{Metric, Target, quantile};
use rig::in_process_vm::MIB;

/// Achievable PCI Express copy speeds in bytes per second: version 2.0 with 16 lanes, as on a GF100, version 3.0, and
/// version 5.0. The last value is the target: the minimum speed of relocation relative to plain copies.
const LINKS: [(&str, f64, f64); 3] = [("6_gb_per_s", 6e9, 0.9), ("12_gb_per_s", 12e9, 0.9), ("50_gb_per_s", 50e9, 0.8)];
/// Chunk sizes in KiB.
const CHUNK_SIZES_KIB: [u64; 4] = [128, 512, 2048, 8192];
/// Number of measurements of each type. The types alternate. An additional measurement at the start populates unused
/// memory.
const ROUNDS: usize = 10;

/// Duration of an operation, in seconds.
#[derive(Clone, Copy)]
struct Took {
    all: f64,
    /// Time in seconds, excluding the transfer of the bytes.
    own: f64,
}

/// Measures the time of an operation on a scene.
fn timed(scene: &mut Scene, work: impl FnOnce(&mut Scene) -> Result<()>) -> Result<Took> {
    let before = scene.rig.card.counters().copied.host_ns;
    let began = Instant::now();
    work(scene)?;
    let all = began.elapsed().as_secs_f64();
    let moving = (scene.rig.card.counters().copied.host_ns - before) as f64 / 1e9;
    Ok(Took { all, own: (all - moving).max(0.0) })
}

/// Transfer methods: relocation and a guest's copies, in both directions.
const WAYS: [&str; 4] = ["out", "back", "plain_out", "plain_back"];

/// Measures each method in each round, after a round whose results are discarded.
fn rounds(chunk_bytes: u64) -> Result<[Vec<Took>; WAYS.len()]> {
    let mut scene = Scene::new(chunk_bytes, None)?;
    let chunks = BUFFER_AT / chunk_bytes..(BUFFER_AT + BYTES).div_ceil(chunk_bytes);
    let mut all: [Vec<Took>; WAYS.len()] = Default::default();
    for round in 0..=ROUNDS {
        let out = timed(&mut scene, |scene| scene.relocate(chunks.clone(), To::Host).map(drop))?;
        scene.rig.host.scrub();
        let back = timed(&mut scene, |scene| scene.relocate(chunks.clone(), To::Card).map(drop))?;
        scene.rig.host.scrub();
        let plain_out = timed(&mut scene, |scene| scene.plain(VRAM_VA, RAM_VA).map(drop))?;
        let plain_back = timed(&mut scene, |scene| scene.plain(RAM_VA, VRAM_VA).map(drop))?;
        scene.verify(1)?;
        if round > 0 {
            for (times, took) in all.iter_mut().zip([out, back, plain_out, plain_back]) {
                times.push(took);
            }
        }
    }
    Ok(all)
}

/// Runs the benchmark.
pub fn run() -> Result<Vec<Metric>> {
    let mut metrics = Vec::new();
    for kib in CHUNK_SIZES_KIB {
        let chunk = kib << 10;
        let times = rounds(chunk)?;
        let row = format!("swap.link.{kib}k");
        for (way, times) in WAYS.iter().zip(&times) {
            let per_mib = |took: &Took| took.own * 1e6 * MIB as f64 / BYTES as f64;
            let own: Vec<f64> = times.iter().map(per_mib).collect();
            metrics.push(Metric::of_samples(format!("{row}.{way}.own_per_mib"), &own, "us"));
            if let Some(slow) = quantile(&own, 0.9) {
                metrics.push(Metric::plain(format!("{row}.{way}.own_per_mib_p90"), slow, "us"));
            }
            let rates: Vec<f64> = times.iter().map(|took| BYTES as f64 / took.all / 1e9).collect();
            metrics.push(Metric::of_samples(format!("{row}.{way}.unbound"), &rates, "GB/s"));
        }
        let [out, back, plain_out, plain_back] = &times;
        for (link, rate, least) in LINKS {
            let modelled = |times: &[Took]| times.iter().map(|took| (took.own + BYTES as f64 / rate) * 1e3).collect();
            for (way, relocated, plain) in [("out", out, plain_out), ("back", back, plain_back)] {
                let (relocated, plain): (Vec<f64>, Vec<f64>) = (modelled(relocated), modelled(plain));
                // The other sizes are for comparison.
                let target = if chunk == CHUNK { Target::AtMost(1.0 / least) } else { Target::None };
                let name = format!("{row}.{link}.{way}");
                metrics.push(Metric::ratio_of_samples(format!("{name}.to_plain"), &relocated, "ms", &plain, target));
                let bare = vec![BYTES as f64 / rate * 1e3; relocated.len()];
                metrics.push(Metric::ratio_of_samples(
                    format!("{name}.to_link"),
                    &relocated,
                    "ms",
                    &bare,
                    Target::None,
                ));
            }
        }
    }
    Ok(metrics)
}
