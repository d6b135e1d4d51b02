//! Tests work that faults or hangs. The guest driver must receive the same report as from a real card, and kill only
//! the affected channel.

use anyhow::Result;
use tests::guest::{self, card_toml, vm_toml};
use tests::{Daemon, Pending, Vm, VmConfig, klog};

use super::paravirt::offered;

/// Returns the kernel log lines in which nouveau reports a fault, a killed channel, or a recovery.
fn troubles(log: &[klog::Line]) -> Vec<&str> {
    let words =
        ["fault", "killed", "TIMEOUT", "timeout", "recover", "rc:", "ILLEGAL", "DATA_ERROR", "errored", "TRAP", "trap"];
    log.iter()
        .map(|line| line.text.as_str())
        .filter(|text| text.contains("nouveau") && words.iter().any(|word| text.contains(word)))
        .collect()
}

/// Returns the [`troubles`] in the guest's kernel log after the first `before` ones.
fn news(vm: &Vm, before: usize) -> Result<Vec<String>> {
    Ok(troubles(&vm.kernel_log()?).into_iter().skip(before).map(str::to_owned).collect())
}

/// A guest with faulty work, and another guest on the same card with correct work.
struct Scene {
    daemon: Daemon,
    vm: Vm,
    neighbour: Vm,
    /// Number of fault lines that the other guest's kernel had logged at the start.
    quiet: usize,
}

impl Scene {
    /// Boots both guests. `card` is appended to the card's configuration.
    fn new(name: &str, kernel: &str, card: &str) -> Result<Self> {
        Self::with(name, kernel, card, false)
    }

    /// Creates the scene as [`Self::new`] does, but with the paravirtual driver in the faulty guest if `knows` is true.
    fn with(name: &str, kernel: &str, card: &str, knows: bool) -> Result<Self> {
        let faulty = if knows { offered("faulty", 192, "") } else { vm_toml("faulty", 192) };
        let vms = faulty + "hang_limit_ms = 1500\n" + &vm_toml("neighbour", 192);
        let name = format!("{name}{}", kernel.replace('.', ""));
        let daemon = Daemon::start(&name, |paths| card_toml(paths, 512) + card + &vms)?;
        let boot = |name: &str, kernel: &str, knows: bool| -> Result<Vm> {
            let config = VmConfig::new(name, tests::images()?, kernel)?.with_gpu(daemon.vm_socket(name));
            Vm::launch(&if knows { config.paravirtual()? } else { config })
        };
        let (vm, neighbour) = (boot("faulty", kernel, knows)?, boot("neighbour", "6.12", false)?);
        for vm in [&vm, &neighbour] {
            vm.wait_ready()?;
            guest::load_driver(vm)?;
        }
        let quiet = troubles(&neighbour.kernel_log()?).len();
        Ok(Self { daemon, vm, neighbour, quiet })
    }

    /// Causes a fault of the given type. For each list of words, the guest kernel must log a line that contains all of
    /// them.
    fn faulty(&self, what: &str, lines: &[&[&str]]) -> Result<()> {
        let before = troubles(&self.vm.kernel_log()?).len();
        let smoke = guest::smoke(&self.vm, &format!("faulty --what {what}"))?;
        assert!(smoke.bytes > 0, "{}", smoke.line);
        let said = news(&self.vm, before)?;
        for words in lines {
            let found = said.iter().any(|line| words.iter().all(|word| line.contains(word)));
            assert!(found, "{what}: no line contains {words:?}: {said:#?}");
        }
        Ok(())
    }

    /// Checks that the faulty guest had one hang, and that the other guest's work was correct until the end and caused
    /// no kernel messages.
    fn finish(&self, good: Pending<'_>) -> Result<()> {
        guest::await_counter(&self.daemon, "faulty", "hangs", |hangs| hangs == 1)?;
        let good = guest::parse_smoke(&good.wait_within(guest::SMOKE_LIMIT)?)?;
        assert!(good.ok, "{}", good.line);
        assert_eq!(news(&self.neighbour, self.quiet)?, Vec::<String>::new(), "the neighbour's driver was notified");
        let counter = |counter| guest::counter(&self.daemon, "neighbour", counter);
        assert_eq!((counter("faults")?, counter("hangs")?), (0, 0));
        Ok(())
    }
}

/// Causes three types of faults in sequence in one guest. The other guest copies during the whole test.
fn only_the_culprit_is_told(kernel: &str) -> Result<()> {
    // The first two types of faults take only a few launches, so the hang after 200 launches does not occur during
    // them. Keep the residue. Otherwise, the mediator's own kernel, which clears PGRAPH between VMs, would also be
    // launched on this engine, and could trigger the hang.
    let hang = "residue = \"keep\"\n\n[[card.fault]]\nengine = \"graph\"\nkind = \"hang\"\nafter = 200\n";
    let scene = Scene::new("faults", kernel, hang)?;
    // The other guest uses only the copy engines, which have no injected fault.
    let copies = "run /bin/gpu-workloads copy --engine ce0 --from gart --to gart --size 300000 --count 150";
    let good = scene.neighbour.start(copies)?;
    scene.faulty("unmapped", &[&["7f12340000", "PGRAPH", "gpu-workloads"]])?;
    scene.faulty("method", &[&["mthd 1ffc", "gpu-workloads"]])?;
    scene.faulty("hang", &[&["gpu-workloads"]])?;
    scene.finish(good)
}

/// Makes a guest's kernels fail in four ways. The other guest computes on the same engine during the whole test.
fn only_the_culprit_is_told_of_its_kernels(kernel: &str, knows: bool) -> Result<()> {
    let scene = Scene::with("kernels", kernel, "", knows)?;
    let good = scene.neighbour.start("run /bin/gpu-workloads workload --name mmul --duration 15")?;
    scene.faulty("kernel-unmapped", &[&["7f12340000", "PGRAPH", "gpu-workloads"]])?;
    let trap = |error| [["TRAP", "gpu-workloads"], ["GPC0/TPC0/MP trap", error]];
    let [who, what] = trap("warp 0009");
    scene.faulty("kernel-illegal", &[&who, &what])?;
    let [who, what] = trap("warp 000f");
    scene.faulty("kernel-misaligned", &[&who, &what])?;
    scene.faulty("kernel-endless", &[&["gpu-workloads"]])?;
    scene.finish(good)
}

#[test]
fn linux_6_12_is_notified_of_faults_and_hangs_and_recovers() -> Result<()> {
    only_the_culprit_is_told("6.12")
}

#[test]
fn linux_6_1_is_notified_of_gpu_kernel_errors_and_recovers() -> Result<()> {
    only_the_culprit_is_told_of_its_kernels("6.1", false)
}

mod full {
    use super::*;

    #[test]
    fn linux_6_1_is_notified_of_faults_and_hangs_and_recovers() -> Result<()> {
        only_the_culprit_is_told("6.1")
    }

    /// Runs the same test with the paravirtual driver, which must not affect the results.
    #[test]
    fn linux_6_12_pv_is_notified_of_gpu_kernel_errors_and_recovers() -> Result<()> {
        only_the_culprit_is_told_of_its_kernels("6.12", true)
    }
}
