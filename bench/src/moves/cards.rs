//! Moves a working VM back and forth between two cards of a daemon. Measures the number of bytes copied, and the VM's
//! pauses relative to the time that this CPU needs to copy the VM's memory once.

use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Instant;

use anyhow::{Context, Result, anyhow};
use serde_json::Value;
use tests::Daemon;
use tests::guest::{card_toml, vm_toml};

use super::{Load, MIB, VM_MIB, Worker};
use crate::report::{Metric, Target, median, quantile};

/// Loads of the VM.
const LOADS: [Load; 3] = [Load { mib: 8, channels: 1 }, Load { mib: 64, channels: 4 }, Load { mib: 224, channels: 8 }];
/// Load of a VM on cards without host memory for chunks.
const ON_CARD: Load = Load { mib: 64, channels: 4 };
/// Host memory of each card in MiB.
const HOST_MIB: u32 = 512;
/// Number of moves per load.
const MOVES: usize = 60;
/// Target for a pause, as a multiple of the time to copy the VM's memory once.
const MOST_PAUSE: f64 = 2.0;
/// Target for the amount copied, as a multiple of the VM's memory.
const MOST_BYTES: f64 = 1.3;
/// Size of a baseline copy in MiB.
const BASELINE_MIB: u64 = 64;
const BASELINES: usize = 9;

/// Returns this CPU's copy speed in MiB/s for memory that is already mapped.
fn copy_rate() -> f64 {
    let from = vec![0x5a_u8; (BASELINE_MIB * MIB) as usize];
    let rates: Vec<f64> = (0..BASELINES)
        .map(|_| {
            let mut to = vec![1_u8; from.len()];
            let began = Instant::now();
            to.copy_from_slice(&from);
            std::hint::black_box(&mut to);
            BASELINE_MIB as f64 / began.elapsed().as_secs_f64()
        })
        .collect();
    median(&rates).unwrap_or(f64::NAN)
}

/// Names of a pause's phases, as reported by the daemon.
const PARTS: [&str; 5] = ["rest", "still", "memory", "anew", "go_on"];

/// A move of the VM to the other card.
struct Move {
    /// Durations of the pause's phases, in ms.
    parts: [f64; PARTS.len()],
    /// Amount copied between the cards, in MiB.
    copied: f64,
}

impl Move {
    fn from_json(moved: &Value) -> Result<Self> {
        let number = |value: &Value, key: &str| value[key].as_f64().with_context(|| format!("no {key} in {moved}"));
        let mut parts = [0.0; PARTS.len()];
        for (part, name) in parts.iter_mut().zip(PARTS) {
            *part = number(&moved["pause"], &format!("{name}_us"))? / 1000.0;
        }
        Ok(Self { parts, copied: number(moved, "memory_mib")? })
    }

    /// Returns the VM's pause, in ms.
    fn pause(&self) -> f64 {
        self.parts.iter().sum()
    }
}

/// Moves a VM between cards with `host_mib` MiB of host memory. Returns the moves, and the durations of the VM's rounds
/// during the moves, in ms.
fn moves(load: Load, host_mib: u32) -> Result<(Vec<Move>, Vec<f64>)> {
    let memory = &format!("memory = {{ host_mib = {host_mib} }}\n");
    let other = format!("\n[[card]]\nname = \"card1\"\nkind = \"simgpu\"\nvram_mib = 512\n{memory}");
    let daemon = Daemon::start("cards", |paths| card_toml(paths, 512) + memory + &other + &vm_toml("vm0", VM_MIB))?;
    let mut worker = Worker::new(&daemon, "vm0", load)?;
    let stop = AtomicBool::new(false);
    thread::scope(|scope| -> Result<_> {
        let run = scope.spawn(|| worker.work(&stop));
        let mut moves = Vec::new();
        let mut done = Ok(());
        for round in 0..MOVES {
            let moved = daemon.ctl_json(&["vm", "move", "vm0", "--card", ["card1", "card0"][round % 2]]);
            done = moved.and_then(|moved| {
                moves.push(Move::from_json(&moved)?);
                Ok(())
            });
            if done.is_err() {
                break;
            }
        }
        stop.store(true, Ordering::Release);
        let rounds = run.join().map_err(|_| anyhow!("a thread panicked"))??;
        anyhow::ensure!(!rounds.is_empty(), "the VM did no work");
        done.map(|()| (moves, rounds))
    })
}

/// Runs the benchmark.
pub fn run() -> Result<Vec<Metric>> {
    let rate = copy_rate();
    let mut metrics = vec![Metric::plain("move.card.copy_rate", rate, "MiB/s")];
    for (load, host_mib) in LOADS.map(|load| (load, HOST_MIB)).into_iter().chain([(ON_CARD, 0)]) {
        metrics.extend(measure_load(load, host_mib, rate)?);
    }
    Ok(metrics)
}

/// Measures one load. `rate` is the memory copy speed in MiB/s.
fn measure_load(load: Load, host_mib: u32, rate: f64) -> Result<Vec<Metric>> {
    let Load { mib, channels } = load;
    eprintln!("bench: move, {MOVES} moves of {mib} MiB and {channels} channels, {host_mib} MiB of host memory");
    let (moves, rounds) = moves(load, host_mib)?;
    let pauses: Vec<f64> = moves.iter().map(Move::pause).collect();
    let copied: Vec<f64> = moves.iter().map(|one| one.copied).collect();
    let at = |q: f64| quantile(&pauses, q).context("no pauses");
    let longest = moves.iter().max_by(|one, other| one.pause().total_cmp(&other.pause())).context("no moves")?;
    let copied = median(&copied).context("no moves")?;
    let on_card = if host_mib == 0 { "_on_card" } else { "" };
    let name = |what: &str| format!("move.card.{what}_{mib}_mib_{channels}_channels{on_card}");
    // Time that this CPU needs to copy the VM's memory once.
    let once_ms = mib as f64 / rate * 1000.0;
    let mut metrics = vec![
        Metric::ratio(name("pause_p50"), at(0.5)?, "ms", once_ms, Target::AtMost(MOST_PAUSE)),
        Metric::plain(name("pause_p90"), at(0.9)?, "ms"),
        Metric::plain(name("pause_max"), at(1.0)?, "ms"),
        Metric::ratio(name("copied"), copied, "MiB", mib as f64, Target::AtMost(MOST_BYTES)),
        Metric::plain(name("round_p50"), median(&rounds).context("no rounds")?, "ms"),
        Metric::plain(name("round_max"), quantile(&rounds, 1.0).context("no rounds")?, "ms"),
    ];
    for (at, part) in PARTS.into_iter().enumerate() {
        let times: Vec<f64> = moves.iter().map(|one| one.parts[at]).collect();
        let median = median(&times).context("no moves")?;
        metrics.push(Metric::plain(name(&format!("part_{part}_p50")), median, "ms"));
        metrics.push(Metric::plain(name(&format!("part_{part}_of_longest")), longest.parts[at], "ms"));
    }
    Ok(metrics)
}
