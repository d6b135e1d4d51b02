//! Work that faults or never ends: the driver in the guest is told as the card would tell it, and kills that channel only.

use anyhow::Result;
use tests::guest::{self, card_toml, vm_toml};
use tests::{Daemon, Vm, VmConfig, klog};

/// Lines of the kernel's log in which nouveau speaks of a fault, a killed channel, or recovery.
fn troubles(log: &[klog::Line]) -> Vec<&str> {
    let words = ["fault", "killed", "TIMEOUT", "timeout", "recover", "rc:", "ILLEGAL", "DATA_ERROR", "errored"];
    log.iter()
        .map(|line| line.text.as_str())
        .filter(|text| text.contains("nouveau") && words.iter().any(|word| text.contains(word)))
        .collect()
}

/// What the guest's kernel has said of troubles since it had said `before` lines of them.
fn news(vm: &Vm, before: usize) -> Result<Vec<String>> {
    Ok(troubles(&vm.kernel_log()?).into_iter().skip(before).map(str::to_owned).collect())
}

/// A guest whose work goes wrong in three ways, one after the other, beside one that copies all the while.
fn only_the_culprit_is_told(kernel: &str) -> Result<()> {
    // The software card hangs long after the two other ways have been tried, by which only a few copies are launched.
    let hang = "\n[[card.fault]]\nengine = \"graph\"\nkind = \"hang\"\nafter = 200\n";
    let faulty = vm_toml("faulty", 192) + "hang_limit_ms = 1500\n";
    let name = format!("faults{}", kernel.replace('.', ""));
    let daemon = Daemon::start(&name, |paths| card_toml(paths, 512) + hang + &faulty + &vm_toml("neighbour", 192))?;
    let boot = |name: &str, kernel: &str| -> Result<Vm> {
        Vm::launch(&VmConfig::new(name, tests::images()?, kernel)?.with_gpu(daemon.vm_socket(name)))
    };
    let (vm, neighbour) = (boot("faulty", kernel)?, boot("neighbour", "6.12")?);
    for vm in [&vm, &neighbour] {
        vm.wait_ready()?;
        guest::load_driver(vm)?;
    }
    let quiet = troubles(&neighbour.kernel_log()?).len();
    // By the copy engines alone, which no fault is armed on.
    let good =
        neighbour.start("run /bin/gpu-workloads copy --engine ce0 --from gart --to gart --size 300000 --count 150")?;

    let faulty = |what: &str, words: &[&str]| -> Result<()> {
        let before = troubles(&vm.kernel_log()?).len();
        let smoke = guest::smoke(&vm, &format!("faulty --what {what}"))?;
        assert!(smoke.bytes > 0, "{}", smoke.line);
        let said = news(&vm, before)?;
        let found = said.iter().any(|line| words.iter().all(|word| line.contains(word)));
        assert!(found, "{what}: no line has {words:?}: {said:#?}");
        Ok(())
    };
    faulty("unmapped", &["7f12340000", "PGRAPH", "gpu-workloads"])?;
    faulty("method", &["mthd 1ffc", "gpu-workloads"])?;
    faulty("hang", &["gpu-workloads"])?;
    assert_eq!(guest::counter(&daemon, "faulty", "hangs")?, 1);

    let good = guest::parse_smoke(&good.wait_within(guest::SMOKE_LIMIT)?)?;
    assert!(good.ok, "{}", good.line);
    assert_eq!(news(&neighbour, quiet)?, Vec::<String>::new(), "the neighbour's driver was told");
    assert_eq!(guest::counter(&daemon, "neighbour", "faults")? + guest::counter(&daemon, "neighbour", "hangs")?, 0);
    Ok(())
}

#[test]
fn linux_6_1_is_told_of_its_faults_and_hangs_and_recovers() -> Result<()> {
    only_the_culprit_is_told("6.1")
}

#[test]
fn linux_6_12_is_told_of_its_faults_and_hangs_and_recovers() -> Result<()> {
    only_the_culprit_is_told("6.12")
}
