//! GPUvm's figure 6: 1 to 8 computing contexts, in one VM and in the same number of VMs, under full virtualization and
//! with the modified driver. The baseline is a VM with a passed-through card.
//!
//! As in the paper, each context launches `madd` repeatedly, on a card with a fixed kernel duration. A model
//! ([`crate::model`]) uses the counts of the guests' operations to compute the cost of contexts, excluding their
//! kernels, for guests and for the host. Measured times would not be meaningful, because the emulated guests share two
//! CPUs.

use std::time::Instant;

use anyhow::{Context, Result};
use tests::guest::{self, SMOKE_LIMIT};
use tests::{Daemon, Vm, VmConfig, many_vms};

use super::{BASELINE, KERNEL, OFFERED, counting};
use crate::Request;
use crate::model::{Bill, Counts, Platform};
use crate::report::{Metric, Target};

/// Numbers of contexts to measure.
const COUNTS: [usize; 4] = [1, 2, 4, 8];
/// Maximum number of VMs.
const MAX_VMS: usize = 8;
/// RAM size of a VM in MiB.
const MEMORY_MIB: u32 = 320;
/// VRAM size of a VM in MiB.
const VRAM_MIB: u32 = 48;
/// VRAM size of the card in MiB.
const CARD_MIB: u32 = 64 + MAX_VMS as u32 * VRAM_MIB;
/// Number of launches per context. The paper uses 10,000.
const LAUNCHES: u32 = 100;
/// Maximum cost per context with several contexts, relative to the cost of a single context.
const GROWTH: f64 = 1.10;
const PEER: &str = "GPUvm: FV grows with contexts, PV as passthrough";

/// VMs of one kind on one card.
struct Host {
    daemon: Daemon,
    vms: Vec<Vm>,
}

/// Result for several contexts: the time until the last context ends, in ms, and the total counts.
struct Run {
    contexts: usize,
    ms: f64,
    counts: Counts,
}

impl Host {
    fn boot(kind: &str, count: usize, toml: &str, knowing: bool) -> Result<Self> {
        let images = tests::images()?;
        let daemon = Daemon::start("contexts", |paths| {
            // A kernel takes half a millisecond, as in other benchmarks with stock guests.
            let time = many_vms::card_time_toml();
            let vms = (0..count).map(|index| {
                let vram = if kind == BASELINE { String::new() } else { format!("vram_mib = {VRAM_MIB}\n") };
                format!("\n[[vm]]\nname = \"vm{index}\"\ncard = \"card0\"\n{vram}{toml}")
            });
            guest::card_toml(paths, CARD_MIB) + &time + &vms.collect::<String>()
        })?;
        let launch = |index: usize| -> Result<Vm> {
            let name = format!("vm{index}");
            let config = VmConfig::new(&name, images, KERNEL)?.with_gpu(daemon.vm_socket(&name));
            let config = if knowing { config.paravirtual()? } else { config };
            Vm::launch(&VmConfig { memory_mib: MEMORY_MIB, ..config })
        };
        let vms = (0..count).map(launch).collect::<Result<Vec<_>>>()?;
        for vm in &vms {
            vm.wait_ready()?;
            guest::load_driver(vm)?;
        }
        let host = Self { daemon, vms };
        // The first context of a VM creates state that later contexts reuse. Creating it is two thirds of the first
        // context's work, which would hide any growth.
        host.run(count, |context| context)?;
        Ok(host)
    }

    /// Runs `contexts` contexts concurrently. `vm_of` returns the VM of each context.
    fn run(&self, contexts: usize, vm_of: fn(usize) -> usize) -> Result<Run> {
        let counts = || -> Result<Counts> {
            let all = self.vms.iter().map(|vm| counting::total(&self.daemon, vm.name()));
            all.sum_up()
        };
        let before = counts()?;
        let began = Instant::now();
        let command =
            format!("run /bin/gpu-workloads launches --name madd --side {} --count {LAUNCHES}", many_vms::SIDE);
        let running = (0..contexts).map(|context| {
            let vm = self.vms.get(vm_of(context)).context("no such VM")?;
            vm.start(&command)
        });
        let running = running.collect::<Result<Vec<_>>>()?;
        for context in running {
            guest::parse_smoke(&context.wait_within(SMOKE_LIMIT)?.success()?)?;
        }
        let ms = began.elapsed().as_secs_f64() * 1e3;
        Ok(Run { contexts, ms, counts: counts()?.minus(&before) })
    }

    fn sweep(&self, what: &str, vm_of: fn(usize) -> usize) -> Result<Vec<Run>> {
        let runs = COUNTS.into_iter().map(|contexts| {
            eprintln!("bench: pv-contexts, {what}, {contexts} contexts");
            self.run(contexts, vm_of)
        });
        runs.collect()
    }
}

/// Sums counts, or returns the first error.
trait SumUp {
    fn sum_up(self) -> Result<Counts>;
}

impl<I: Iterator<Item = Result<Counts>>> SumUp for I {
    fn sum_up(mut self) -> Result<Counts> {
        self.try_fold(Counts::default(), |sum, counts| Ok(sum.plus(&counts?)))
    }
}

/// Runs the benchmark. Its parts are the ways to provide a card to VMs: `passthrough`, `fv` and `pv`.
pub fn run(request: &Request) -> Result<Vec<Metric>> {
    let mut metrics = Vec::new();
    let mediated = Platform::Mediated { posted: true };
    if request.wants(BASELINE) {
        let host = Host::boot(BASELINE, 1, "passthrough = true\n", false)?;
        let runs = host.sweep(BASELINE, |_| 0)?;
        metrics.extend(figures("native", Platform::Native, &runs)?);
        metrics.extend(figures(BASELINE, Platform::Passthrough, &runs)?);
    }
    for (kind, toml, knowing) in [("fv", "", false), ("pv", OFFERED, true)] {
        if request.wants(kind) {
            let host = Host::boot(kind, MAX_VMS, toml, knowing)?;
            for (name, vm_of) in [("one-vm", (|_| 0) as fn(usize) -> usize), ("vms", |context| context)] {
                let name = format!("{kind}-{name}");
                metrics.extend(figures(&name, mediated, &host.sweep(&name, vm_of)?)?);
            }
        }
    }
    Ok(metrics)
}

/// Returns the figures per context for one way to provide a card, in comparison with a single context.
fn figures(name: &str, platform: Platform, runs: &[Run]) -> Result<Vec<Metric>> {
    let bill = |run: &Run| Bill::for_counts(platform, &run.counts.times(1.0 / run.contexts as f64));
    let alone = bill(runs.first().context("no measurement")?);
    let mut metrics = Vec::new();
    for run in runs {
        let name = format!("pv-contexts.{name}.{}", run.contexts);
        let (own, target) = (bill(run), if run.contexts == 1 { Target::None } else { Target::AtMost(GROWTH) });
        let model = Metric::ratio(format!("{name}.model"), own.us() / 1e3, "ms", alone.us() / 1e3, target);
        metrics.push(model.within(Some(own.ratio(&alone, 0.0))).beside(PEER));
        if platform != Platform::Native {
            metrics.push(Metric::plain(format!("{name}.time"), run.ms, "ms"));
        }
        let some = run.counts.named().into_iter().filter(|(_, count)| *count > 0.0);
        metrics.extend(
            some.map(|(what, count)| Metric::plain(format!("{name}.{what}"), count / run.contexts as f64, "count")),
        );
    }
    Ok(metrics)
}
