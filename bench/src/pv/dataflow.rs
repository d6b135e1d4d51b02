//! Gdev's figure 11: graphs with nodes that pass their outputs in segments, in comparison with copies through CPU
//! memory.
//!
//! An emulated CPU performs the copies through CPU memory, so measured times would overstate the benefit of segments.
//! Instead, the copies are counted, and a model ([`crate::model`]) computes the times of both methods on a real host.

use anyhow::{Context, Result};
use tests::guest;
use tests::{Daemon, Vm, VmConfig};

use super::{CARD_MIB, KERNEL, OFFERED, ROUNDS, VRAM_MIB, counting};
use crate::Request;
use crate::model::{Bill, Counts, Platform};
use crate::report::{Metric, Target};

/// Name of the VM.
const VM: &str = "pv";
/// Shape, kernel and matrix size of each data-flow program. The papers' matrices have 256 and 1024 rows. Here, a
/// product of matrices with 64 rows takes as long as the papers' product.
const FLOWS: [(&str, &str, u32); 6] = [
    ("tree", "madd", 64),
    ("tree", "madd", 256),
    ("tree", "mmul", 64),
    ("rectangle", "madd", 64),
    ("rectangle", "madd", 256),
    ("rectangle", "mmul", 64),
];
/// Number of rows and columns of a tile in `mmul`.
const TILE: f64 = 16.0;
const PEER: &str = "Gdev: down to 0.67";

/// Measurements of a method for passing outputs to the next node.
#[derive(Default)]
struct Side {
    ms: Vec<f64>,
    counts: Counts,
}

/// Runs the benchmark. Its parts are the graphs, such as `tree.madd.64`.
pub fn run(request: &Request) -> Result<Vec<Metric>> {
    let images = tests::images()?;
    let daemon = Daemon::start("dataflow", |paths| {
        let card = guest::card_toml(paths, CARD_MIB);
        card + &guest::vm_toml(VM, VRAM_MIB) + OFFERED
    })?;
    let vm = Vm::launch(&VmConfig::new(VM, images, KERNEL)?.with_gpu(daemon.vm_socket(VM)).paravirtual()?)?;
    vm.wait_ready()?;
    guest::load_driver(&vm)?;
    let mut metrics = Vec::new();
    let rounds = request.rounds.unwrap_or(ROUNDS);
    for (shape, kernel, side) in FLOWS {
        let part = format!("{shape}.{kernel}.{side}");
        if !request.wants(&part) {
            continue;
        }
        let mut sides = [Side::default(), Side::default()];
        let command = format!("dataflow --shape {shape} --kernel {kernel} --side {side}");
        let ways = [command.clone(), format!("{command} --share")];
        for round in 0..rounds {
            eprintln!("bench: pv-dataflow, {part}, round {} of {rounds}", round + 1);
            for (command, Side { ms, counts }) in ways.iter().zip(&mut sides) {
                let line = guest::smoke(&vm, command)?.line;
                ms.push(counting::number(&line, "makespan_us")? / 1e3);
                counts.vram_bytes = counting::number(&line, "nodes")? * traffic(kernel, side);
            }
        }
        for (command, Side { counts, .. }) in ways.iter().zip(&mut sides) {
            let phases = counting::marked(&daemon, &vm, command, &["ready", "done"], None)?;
            let done = phases.get("done").context("no counts")?;
            *counts = Counts { vram_bytes: counts.vram_bytes, ..*done };
        }
        metrics.extend(figures(&format!("pv-dataflow.{part}"), &sides));
    }
    Ok(metrics)
}

/// Returns the number of card memory bytes that a node's kernel transfers.
fn traffic(kernel: &str, side: u32) -> f64 {
    let side = f64::from(side);
    match kernel {
        "mmul" => (2.0 * side.powi(3) / TILE + side.powi(2)) * 4.0,
        _ => 3.0 * side.powi(2) * 4.0,
    }
}

fn figures(name: &str, [copied, shared]: &[Side; 2]) -> Vec<Metric> {
    let bill = |side: &Side| Bill::for_counts(Platform::Mediated { posted: true }, &side.counts);
    let (of_copied, of_shared) = (bill(copied), bill(shared));
    let model = Metric::ratio(format!("{name}.model"), of_shared.us() / 1e3, "ms", of_copied.us() / 1e3, Target::None);
    let mut metrics = vec![
        Metric::ratio_of_samples(format!("{name}.time"), &shared.ms, "ms", &copied.ms, Target::None).beside(PEER),
        model.within(Some(of_shared.ratio(&of_copied, 0.0))).beside(PEER),
    ];
    let counts = copied.counts.named().into_iter().zip(shared.counts.named());
    for ((what, copied), (_, shared)) in counts.filter(|((_, copied), (_, shared))| copied + shared > 0.0) {
        let name = format!("{name}.{what}");
        metrics.push(if copied > 0.0 {
            Metric::ratio(name, shared, "count", copied, Target::None)
        } else {
            Metric::plain(name, shared, "count")
        });
    }
    metrics
}
