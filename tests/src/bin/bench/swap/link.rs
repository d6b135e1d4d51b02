//! Cost of moving chunks beside the time that a link takes for their bytes, and so what is left of links of 6 to 50 GB/s.
//!
//! The software card moves bytes with this machine's processors, and counts the time that goes into that. What a relocation takes
//! beyond it is the software's own: the mover's, the card's model of its engines and rings, a wait for either. A real card's engines
//! move the bytes beside it. Here a link's time is added to the software's, as if nothing of the two overlapped, so that times are upper
//! bounds and rates lower ones; the same of the copies that a guest's driver has the same engines make, which they are compared with.

use std::time::Instant;

use anyhow::Result;
use tests::bench::{Metric, Target, quantile};
use tests::light::MIB;
use vram::To;

use super::CHUNK;
use super::bandwidth::{AT, BYTES, RAM_VA, Scene, VRAM_VA};

/// Bytes per second of PCI Express: of version 2.0 with 16 lanes as a GF100 has it, of 3.0, of 5.0; as far as copies reach.
const LINKS: [(&str, f64); 3] = [("6_gb_per_s", 6e9), ("12_gb_per_s", 12e9), ("50_gb_per_s", 50e9)];
/// KiB of a chunk.
const SIZES: [u64; 4] = [128, 512, 2048, 8192];
/// Measurements of each kind, one of all after the other; one more before them finds memory that was never used.
const ROUNDS: usize = 10;

/// Time of a piece of work, in seconds.
#[derive(Clone, Copy)]
struct Took {
    all: f64,
    /// Without what went into moving bytes.
    own: f64,
}

/// Does something with a scene.
fn timed(scene: &mut Scene, work: impl FnOnce(&mut Scene) -> Result<()>) -> Result<Took> {
    let before = scene.rig.card.counters().copied.host_ns;
    let began = Instant::now();
    work(scene)?;
    let all = began.elapsed().as_secs_f64();
    let moving = (scene.rig.card.counters().copied.host_ns - before) as f64 / 1e9;
    Ok(Took { all, own: (all - moving).max(0.0) })
}

/// Ways that bytes go, relocated and as a guest copies them.
const WAYS: [&str; 4] = ["out", "back", "plain_out", "plain_back"];

/// Times of each way, by round.
fn rounds(chunk_bytes: u64) -> Result<[Vec<Took>; WAYS.len()]> {
    let mut scene = Scene::new(chunk_bytes, None)?;
    let chunks = AT / chunk_bytes..(AT + BYTES).div_ceil(chunk_bytes);
    let mut all: [Vec<Took>; WAYS.len()] = Default::default();
    for round in 0..=ROUNDS {
        let out = timed(&mut scene, |scene| scene.relocate(chunks.clone(), To::Host).map(drop))?;
        scene.rig.host.scrub();
        let back = timed(&mut scene, |scene| scene.relocate(chunks.clone(), To::Card).map(drop))?;
        scene.rig.host.scrub();
        let plain_out = timed(&mut scene, |scene| scene.plain((VRAM_VA, RAM_VA)).map(drop))?;
        let plain_back = timed(&mut scene, |scene| scene.plain((RAM_VA, VRAM_VA)).map(drop))?;
        scene.verify(1)?;
        if round > 0 {
            for (times, took) in all.iter_mut().zip([out, back, plain_out, plain_back]) {
                times.push(took);
            }
        }
    }
    Ok(all)
}

/// Measures.
pub fn run() -> Result<Vec<Metric>> {
    let mut metrics = Vec::new();
    for kib in SIZES {
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
        for (link, rate) in LINKS {
            let modelled = |times: &[Took]| times.iter().map(|took| (took.own + BYTES as f64 / rate) * 1e3).collect();
            for (way, relocated, plain) in [("out", out, plain_out), ("back", back, plain_back)] {
                let (relocated, plain): (Vec<f64>, Vec<f64>) = (modelled(relocated), modelled(plain));
                // As much as 0.9 of the rate. The other sizes are there to be compared.
                let target = if chunk == CHUNK { Target::AtMost(1.0 / 0.9) } else { Target::None };
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
