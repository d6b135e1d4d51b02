//! Lists the benchmarks, with the papers' figures that they reproduce, and the pages that contain their results.

use anyhow::{Result, bail};

/// A benchmark: name, requirements, and the figure that it reproduces.
type Bench = (&'static str, Needs, &'static str);

/// Requirements of a benchmark in addition to the sources.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Needs {
    Nothing,
    /// Guest images, and the daemon's release build.
    Guests,
    /// A GPU with NVIDIA's driver.
    Gpu,
}

impl Needs {
    fn name(self) -> &'static str {
        match self {
            Self::Nothing => "-",
            Self::Guests => "guests",
            Self::Gpu => "a GPU",
        }
    }
}

const BENCHES: [Bench; 32] = [
    ("transport", Needs::Guests, "cost of an access over vfio-user; no figure"),
    ("shadow", Needs::Nothing, "cost of shadow page tables; no figure"),
    ("compute", Needs::Nothing, "speed of the software card; no figure"),
    ("sched-sim", Needs::Nothing, "GPUvm's and Gdev's figures of schedulers, simulated: docs/design/scheduling.md"),
    ("sched-guests", Needs::Guests, "the same with guests: docs/design/scheduling.md"),
    ("swap", Needs::Nothing, "GPUswap's figures 4 to 9, Gdev's 12 and 13: docs/design/overhead.md"),
    ("evict", Needs::Nothing, "eviction policies with programs like Rodinia's: docs/design/memory.md"),
    ("fv", Needs::Guests, "full virtualization next to passthrough: docs/design/overhead.md"),
    ("doorbells", Needs::Nothing, "cost of a doorbell; no figure"),
    ("lockhold", Needs::Nothing, "lock hold times: docs/design/overhead.md"),
    ("move", Needs::Guests, "pauses of moves and upgrades: docs/design/overhead.md"),
    ("pv", Needs::Guests, "GPUvm's figures 4 and 5, tables 2 to 4: docs/design/overhead.md"),
    ("pv-contexts", Needs::Guests, "cost of many contexts in a paravirtual guest: docs/design/overhead.md"),
    ("pv-dataflow", Needs::Guests, "Gdev's shared memory between VMs: docs/design/overhead.md"),
    ("gdev", Needs::Guests, "Gdev's figures 3 and 4, copies and cost of the library: docs/guides/gdev.md"),
    ("costs", Needs::Nothing, "work of the mediator without a VM: docs/design/cost-model.md"),
    ("xen", Needs::Guests, "accesses of a Xen domain: docs/guides/xen.md"),
    ("nested", Needs::Guests, "a card behind VFIO in a nested host: docs/guides/real-cards.md"),
    ("isolation", Needs::Guests, "attacks by a guest next to an honest one, all policies: docs/design/scheduling.md"),
    ("isolation-direct", Needs::Guests, "the same with policy direct"),
    ("isolation-fifo", Needs::Guests, "the same with policy fifo"),
    ("isolation-credit", Needs::Guests, "the same with policy credit"),
    ("isolation-band", Needs::Guests, "the same with policy band"),
    ("isolation-disengaged", Needs::Guests, "the same with policy disengaged"),
    ("pictures", Needs::Nothing, "draws the pictures of results that exist"),
    ("cuda", Needs::Gpu, "programs on a CUDA card: docs/guides/cuda.md"),
    ("cards", Needs::Gpu, "tenants with two cards, next to programs without the library: docs/guides/cuda.md"),
    ("vcuda", Needs::Gpu, "a CUDA program of a VM next to a native one: docs/guides/cuda-vms.md"),
    ("disk", Needs::Gpu, "Gdev's figures 8 to 10, encrypted blocks instead of files: docs/guides/gdev.md"),
    ("together", Needs::Gpu, "decode loops in a share group, with turns, and with MPS alone: docs/guides/cuda.md"),
    ("gaps", Needs::Gpu, "time that a card loses at each change of tenants: docs/design/scheduling.md"),
    ("neighbours", Needs::Gpu, "a CUDA program next to honest and hostile ones: docs/guides/cuda.md"),
];

/// Checks that a name selects a benchmark. It must be a full name, or the part of a name before a `-`.
///
/// # Errors
/// Returns an error if the name selects no benchmark. The error lists the known names.
pub fn check(name: &str) -> Result<()> {
    let selects = |known: &str| known.strip_prefix(name).is_some_and(|rest| rest.is_empty() || rest.starts_with('-'));
    if !name.is_empty() && BENCHES.iter().any(|(known, ..)| selects(known)) {
        return Ok(());
    }
    let known: Vec<_> = BENCHES.iter().map(|(known, ..)| *known).collect();
    bail!("there is no benchmark `{name}`, expected one of {}; see `cargo xtask bench --list`", known.join(", "))
}

/// Returns true if the benchmark with exactly this name needs neither guests nor a GPU.
pub fn needs_no_guests(name: &str) -> bool {
    BENCHES.iter().any(|(known, needs, _)| *known == name && *needs == Needs::Nothing)
}

/// Returns all benchmarks as a table.
pub fn list() -> String {
    let line = |name: &str, needs: &str, repeats: &str| format!("{name:<22}{needs:<8}{repeats}\n");
    let lines = BENCHES.iter().map(|(name, needs, repeats)| line(name, needs.name(), repeats));
    std::iter::once(line("NAME", "NEEDS", "REPEATS")).chain(lines).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::run::root;

    #[test]
    fn bench_names_are_checked_before_builds() {
        for name in ["swap", "sched", "pv", "isolation-fifo", "cuda", "pictures"] {
            check(name).unwrap();
        }
        for name in ["", "swop", "p", "sched-", "isolation-"] {
            let error = check(name).unwrap_err().to_string();
            assert!(error.contains("expected one of transport, shadow"), "{name}: {error}");
        }
        assert!(needs_no_guests("swap") && !needs_no_guests("sched") && !needs_no_guests("fv"));
    }

    /// Checks that each page in the list exists, and that it names the benchmark.
    #[test]
    fn pages_of_benches_exist_and_name_them() {
        for (name, _, repeats) in BENCHES {
            let Some((_, page)) = repeats.split_once(": docs/") else { continue };
            let text = std::fs::read_to_string(root().join("docs").join(page)).unwrap();
            let whole = name.split('-').next().unwrap_or(name);
            assert!(text.contains(&format!("bench {whole}")), "{page} does not name {name}");
        }
    }

    #[test]
    fn list_has_every_benchmark_of_the_program() {
        let files = ["tests/src/bin/bench/main.rs", "bench/src/main.rs"].map(|path| root().join(path));
        let text = files.iter().find_map(|path| std::fs::read_to_string(path).ok()).unwrap();
        let (_, table) = text.split_once("const BENCHMARKS").unwrap();
        let (table, _) = table.split_once("];").unwrap();
        let found: Vec<_> =
            table.lines().filter_map(|line| line.trim().strip_prefix("(\"")?.split('"').next()).collect();
        assert!(found.len() > 20, "{found:?}");
        for name in found {
            assert!(BENCHES.iter().any(|(known, ..)| *known == name), "{name} is not in the list");
        }
    }
}
