//! Runs the papers' workloads with the stock driver: on a passed-through card, and concurrently in two mediated VMs.

use anyhow::{Context, Result};
use serde_json::Value;
use tests::guest::{self, card_toml, passthrough_toml, vm_toml};
use tests::{Daemon, Output, Vm, VmConfig};

use super::stories::complaints;

/// Command for all workloads, at a size that an emulated guest completes in seconds.
const ALL: &str = "workload --name all --scale 1";

fn boot(daemon: &Daemon, name: &str, kernel: &str) -> Result<Vm> {
    let vm = Vm::launch(&VmConfig::new(name, tests::images()?, kernel)?.with_gpu(daemon.vm_socket(name)))?;
    vm.wait_ready()?;
    guest::load_driver(&vm)?;
    Ok(vm)
}

/// Checks the output line of each workload, and that the kernel has logged no complaints.
fn all_verified(vm: &Vm, output: &Output) -> Result<()> {
    println!("VM {}:\n{}", vm.name(), output.text());
    let lines = |ok: &str| output.lines.iter().filter(|line| line.starts_with("RESULT ") && line.contains(ok)).count();
    // The output contains one line per workload, and a summary line.
    assert_eq!((lines(" ok=true "), lines(" ok=false ")), (workloads::NAMES.len() + 1, 0));
    for name in workloads::NAMES {
        let line = output.lines.iter().find(|line| line.starts_with(&format!("RESULT name={name} ")));
        let nothing = line.is_some_and(|line| line.contains(" bytes=0 "));
        assert_eq!((line.is_some(), nothing), (true, *name == "nop"), "{name}: {line:?}");
    }
    assert_eq!(complaints(&vm.kernel_log()?), Vec::<&str>::new(), "VM {}", vm.name());
    Ok(())
}

/// Tests a working set 1.5 times as large as the guest's VRAM. The guest kernel moves buffers between VRAM and RAM
/// between launches.
#[test]
fn a_working_set_larger_than_vram_is_verified() -> Result<()> {
    let daemon = Daemon::start("hungry", |paths| card_toml(paths, 256) + &vm_toml("hungry", 64))?;
    let vm = boot(&daemon, "hungry", "6.12")?;
    let smoke = guest::smoke(&vm, "workload --name memory --working-set 96m --rounds 1")?;
    println!("{}", smoke.line);
    assert!(smoke.bytes >= 96 << 20, "{}", smoke.line);
    assert_eq!(complaints(&vm.kernel_log()?), Vec::<&str>::new());
    Ok(())
}

/// Tests the baseline of the library's benchmark. Its results are checked like the library's.
#[test]
fn raw_ioctls_and_library_compute_the_same() -> Result<()> {
    let daemon = Daemon::start("raw", |paths| card_toml(paths, 320) + &vm_toml("raw", 192))?;
    let vm = boot(&daemon, "raw", "6.12")?;
    let output = vm.run_within("run /bin/gpu-workloads compare --name all", guest::SMOKE_LIMIT)?;
    all_verified(&vm, &output)?;
    assert!(output.lines.iter().all(|line| !line.starts_with("RESULT ") || !line.contains("raw_ns=0 ")));
    Ok(())
}

/// Tests the timer alarm. No other program runs, so no guest access can cause the interrupt.
#[test]
fn alarm_of_the_timer_interrupts_the_guest() -> Result<()> {
    let daemon = Daemon::start("alarm", |paths| card_toml(paths, 128) + &vm_toml("alarm", 64))?;
    let vm = boot(&daemon, "alarm", "6.1")?;
    let smoke = guest::smoke(&vm, "bar alarm --count 5")?;
    println!("{}", smoke.line);
    assert_eq!(complaints(&vm.kernel_log()?), Vec::<&str>::new());
    Ok(())
}

#[test]
fn all_workloads_are_verified_in_two_mediated_vms_at_once() -> Result<()> {
    let vms = vm_toml("first", 192) + &vm_toml("second", 192);
    let daemon = Daemon::start("compute2", |paths| card_toml(paths, 512) + &vms)?;
    let vms = [boot(&daemon, "first", "6.1")?, boot(&daemon, "second", "6.12")?];
    let command = format!("run /bin/gpu-workloads {ALL}");
    let runs = [vms[0].start(&command)?, vms[1].start(&command)?];
    for (vm, run) in vms.iter().zip(runs) {
        all_verified(vm, &run.wait_within(guest::SMOKE_LIMIT)?)?;
        let shown = guest::show(&daemon, vm.name())?;
        assert_eq!(shown["denied_total"], 0, "{}", shown["denied"]);
        assert_eq!((&shown["counters"]["faults"], &shown["counters"]["hangs"]), (&0.into(), &0.into()));
    }
    Ok(())
}

mod full {
    use super::*;

    #[test]
    fn all_workloads_are_verified_by_passthrough() -> Result<()> {
        let daemon = Daemon::start("computes", |paths| card_toml(paths, 256) + &passthrough_toml("computes"))?;
        let vm = boot(&daemon, "computes", "6.12")?;
        let output = vm.run_within(&format!("run /bin/gpu-workloads {ALL}"), guest::SMOKE_LIMIT)?;
        all_verified(&vm, &output)?;
        // Launch the kernel repeatedly, and print the report in the format that benchmarks read.
        let looped = "run /bin/gpu-workloads workload --name loop --rounds 20000 --duration 2 --json";
        let output = vm.run_within(looped, guest::SMOKE_LIMIT)?;
        let object = output.lines.iter().find(|line| line.starts_with('{')).context("an object of JSON")?;
        let object: Value = serde_json::from_str(object)?;
        let number = |name: &str| object[name].as_u64().with_context(|| format!("{name} in {object}"));
        assert_eq!((&object["name"], &object["ok"]), (&"loop".into(), &true.into()), "{object}");
        assert!(number("iterations")? > 0 && number("launches")? == number("iterations")?, "{object}");
        assert!(number("looped_us")? >= 2_000_000 && number("gpu_us")? > 0, "{object}");
        Ok(())
    }
}
