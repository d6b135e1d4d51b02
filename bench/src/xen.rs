//! Counts the exits of a Xen domain (accesses that the daemon serves) and the buffered exits, while the driver loads
//! and during each workload. The domain has a shared card with remapped apertures, as recommended to operators. For
//! comparison, the domain also uses the card in passthrough mode, where each access is an exit.
//!
//! Xen, domain 0 and the domain are all emulated on two CPUs, so times are valid only for this machine. Exit counts are
//! valid in general.

use anyhow::{Context, Result};
use serde_json::Value;
use tests::xen::{Domain, DomainSpec, XenMachine};

use crate::report::{Metric, Target};

/// VRAM size of the card in MiB.
const CARD_MIB: u32 = 128;
/// VRAM size of the VM in MiB.
const VM_MIB: u32 = 64;
/// Memory of domain 0 in MiB.
const DOM0_MIB: u32 = 1400;
/// Names and commands of the workloads. Each workload runs the same number of times in both modes.
const WORKLOADS: [(&str, &str); 4] = [
    ("copy", "copy --engine ce0 --from vram --to vram --size 65536 --count 20"),
    ("fences", "fences --count 50"),
    ("map", "copy --engine m2mf --from gart --to vram --size 262144"),
    ("mmul", "workload --name mmul --scale 1 --rounds 1"),
];

/// Exit counts of a domain so far.
#[derive(Clone, Copy, Debug, Default)]
struct Exits {
    reads: u64,
    writes: u64,
    buffered: u64,
}

impl Exits {
    fn read(machine: &XenMachine) -> Result<Self> {
        let transport: Value = machine.show("a")?["transport"].clone();
        let count = |name: &str| transport[name].as_u64().with_context(|| format!("no count {name} in {transport}"));
        Ok(Self { reads: count("region_reads")?, writes: count("region_writes")?, buffered: count("posted")? })
    }

    fn since(self, before: Self) -> Self {
        let Self { reads, writes, buffered } = before;
        Self { reads: self.reads - reads, writes: self.writes - writes, buffered: self.buffered - buffered }
    }

    fn all(self) -> f64 {
        (self.reads + self.writes) as f64
    }
}

/// Cost of a step: its number of exits, and its duration in seconds according to this host's clock.
#[derive(Clone, Copy, Debug)]
struct Cost {
    exits: Exits,
    seconds: f64,
}

fn measure(machine: &XenMachine, step: impl FnOnce() -> Result<()>) -> Result<Cost> {
    let (before, began) = (Exits::read(machine)?, std::time::Instant::now());
    step()?;
    let seconds = began.elapsed().as_secs_f64();
    Ok(Cost { exits: Exits::read(machine)?.since(before), seconds })
}

/// Runs the steps with a shared or a passed-through card: loads the driver and then runs the workloads.
fn steps(machine: &XenMachine, domain: &Domain<'_>) -> Result<Vec<(&'static str, Cost)>> {
    let mut all = vec![("load", measure(machine, || domain.load_driver())?)];
    for (name, args) in WORKLOADS {
        all.push((name, measure(machine, || domain.smoke(args).map(drop))?));
    }
    Ok(all)
}

/// Runs the benchmark.
pub fn run() -> Result<Vec<Metric>> {
    let costs = [true, false].map(|mediated| -> Result<_> {
        let vm = match mediated {
            true => format!("vram_mib = {VM_MIB}\napertures = \"remapped\"\n"),
            false => "passthrough = true\n".to_owned(),
        };
        let config = format!(
            "[daemon]\nadmin_socket = \"/run/admin.sock\"\nsocket_dir = \"/run\"\n\n[[card]]\nname = \"card0\"\n\
             kind = \"simgpu\"\nvram_mib = {CARD_MIB}\nbar1_mib = 64\nbar3_mib = 16\n\n[[vm]]\nname = \"a\"\ncard = \"card0\"\n\
             xen_domain = \"a\"\n{vm}"
        );
        let machine = XenMachine::boot("xen-bench", &[DomainSpec::new("a", "6.1")], &config, DOM0_MIB)?;
        let daemon = machine.start_daemon()?;
        let domain = machine.create("a")?;
        domain.wait_ready()?;
        let costs = steps(&machine, &domain)?;
        machine.stop_daemon(daemon)?;
        Ok(costs)
    });
    let [mediated, straight] = costs;
    let mut metrics = Vec::new();
    for ((name, cost), (_, straight)) in mediated?.into_iter().zip(straight?) {
        let metric = |what: &str, value: f64| Metric::plain(format!("xen.{name}.{what}"), value, "accesses");
        let beside = |what: &str, value: f64, unit, baseline| {
            Metric::ratio(format!("xen.{name}.{what}"), value, unit, baseline, Target::None)
        };
        metrics.push(beside("exits", cost.exits.all(), "accesses", straight.exits.all()));
        metrics.push(metric("exits_that_read", cost.exits.reads as f64));
        metrics.push(metric("exits_that_write", cost.exits.writes as f64));
        metrics.push(metric("exits_buffered", cost.exits.buffered as f64));
        metrics.push(beside("time", cost.seconds, "s", straight.seconds));
    }
    Ok(metrics)
}
