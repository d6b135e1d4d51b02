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

/// A guest whose work goes wrong in the way `what`, beside one that copies all the while. Returns what the guest's kernel
/// said.
fn beside_a_neighbour(kernel: &str, what: &str, extra: &str) -> Result<Vec<String>> {
    let name = format!("{what}{}", kernel.replace('.', ""));
    let faulty = vm_toml("faulty", 192) + "hang_limit_ms = 1500\n";
    let daemon = Daemon::start(&name, |paths| card_toml(paths, 512) + extra + &faulty + &vm_toml("neighbour", 192))?;
    let boot = |name: &str, kernel: &str| -> Result<Vm> {
        Vm::launch(&VmConfig::new(name, tests::images()?, kernel)?.with_gpu(daemon.vm_socket(name)))
    };
    let (vm, neighbour) = (boot("faulty", kernel)?, boot("neighbour", "6.12")?);
    for vm in [&vm, &neighbour] {
        vm.wait_ready()?;
        guest::load_driver(vm)?;
    }
    let quiet = troubles(&neighbour.kernel_log()?).len();
    // By the copy engines alone, which the faults are not armed on.
    let good =
        neighbour.start("run /bin/gpu-smoke copy --engine ce0 --from gart --to gart --size 300000 --count 60")?;
    let smoke = guest::smoke(&vm, &format!("faulty --what {what}"))?;
    assert!(smoke.bytes > 0, "{}", smoke.line);
    let good = guest::parse_smoke(&good.wait_within(guest::SMOKE_LIMIT)?)?;
    assert!(good.ok, "{}", good.line);
    let log = vm.kernel_log()?;
    let said: Vec<String> = troubles(&log).into_iter().map(str::to_owned).collect();
    assert!(!said.is_empty(), "the guest's driver was not told");
    let log = neighbour.kernel_log()?;
    assert_eq!(troubles(&log).len(), quiet, "the neighbour's driver was told: {:?}", troubles(&log));
    assert_eq!(guest::counter(&daemon, "neighbour", "faults")? + guest::counter(&daemon, "neighbour", "hangs")?, 0);
    Ok(said)
}

fn unmapped(kernel: &str) -> Result<()> {
    let said = beside_a_neighbour(kernel, "unmapped", "")?;
    let right = |line: &String| line.contains("7f12340000") && line.contains("PGRAPH") && line.contains("gpu-smoke");
    assert!(said.iter().any(right), "no line names address, engine and program: {said:#?}");
    Ok(())
}

fn hang(kernel: &str) -> Result<()> {
    let fault = "\n[[card.fault]]\nengine = \"graph\"\nkind = \"hang\"\nafter = 40\n";
    let said = beside_a_neighbour(kernel, "hang", fault)?;
    assert!(said.iter().any(|line| line.contains("gpu-smoke")), "no line names the program: {said:#?}");
    Ok(())
}

#[test]
fn linux_6_1_is_told_of_an_unmapped_address() -> Result<()> {
    unmapped("6.1")
}

#[test]
fn linux_6_12_is_told_of_an_unmapped_address() -> Result<()> {
    unmapped("6.12")
}

#[test]
fn linux_6_1_is_told_of_an_illegal_method() -> Result<()> {
    let said = beside_a_neighbour("6.1", "method", "")?;
    assert!(said.iter().any(|line| line.contains("mthd 1ffc")), "no line names the method: {said:#?}");
    Ok(())
}

#[test]
fn linux_6_1_recovers_from_work_that_never_ends() -> Result<()> {
    hang("6.1")
}

#[test]
fn linux_6_12_recovers_from_work_that_never_ends() -> Result<()> {
    hang("6.12")
}
