//! Tests the paravirtual driver on cards that do not offer the interface, where nouveau's hooks are inactive.

use anyhow::Result;
use tests::guest::{self, card_toml, vm_toml};
use tests::{Daemon, Vm, VmConfig};

use super::stories::complaints;

/// Returns the configuration of a second card, and of a VM with this card in passthrough mode.
fn passed_through(name: &str) -> String {
    let card = "\n[[card]]\nname = \"card1\"\nkind = \"simgpu\"\nvram_mib = 256\n";
    format!("{card}\n[[vm]]\nname = {name:?}\ncard = \"card1\"\npassthrough = true\n")
}

fn boot(daemon: &Daemon, name: &str, kernel: &str) -> Result<Vm> {
    let config = VmConfig::new(name, tests::images()?, kernel)?.with_gpu(daemon.vm_socket(name)).paravirtual()?;
    let vm = Vm::launch(&config)?;
    vm.wait_ready()?;
    guest::load_driver(&vm)?;
    Ok(vm)
}

/// Concurrently runs the driver with hooks on a vGPU and on a passed-through card. Neither card offers the interface.
fn is_as_the_stock_one(kernel: &str) -> Result<()> {
    let names = [format!("mediated{kernel}"), format!("passed{kernel}")];
    let daemon = Daemon::start(&format!("hooked{kernel}"), |paths| {
        card_toml(paths, 256) + &vm_toml(&names[0], 192) + &passed_through(&names[1])
    })?;
    let vms = [boot(&daemon, &names[0], kernel)?, boot(&daemon, &names[1], kernel)?];
    for vm in &vms {
        // The driver with hooks is loaded, but has not found the interface.
        let modules = vm.run_ok("modules")?.text();
        assert!(
            modules.lines().any(|line| line.starts_with("gpu_mediator_pv") && line.contains("nouveau")),
            "{modules}"
        );
        assert!(!vm.run_ok("ls /dev")?.lines.iter().any(|name| name.starts_with("gpu-mediator")));
    }
    let command = "run /bin/gpu-workloads workload --name all --scale 1";
    let runs = [vms[0].start(command)?, vms[1].start(command)?];
    for (vm, run) in vms.iter().zip(runs) {
        let smoke = guest::parse_smoke(&run.wait_within(guest::SMOKE_LIMIT)?)?;
        assert!(smoke.ok && smoke.bytes > 1 << 20, "VM {}: {}", vm.name(), smoke.line);
        vm.run_within("unbind", guest::LOAD_LIMIT)?.success()?;
        vm.run_within("bind", guest::LOAD_LIMIT)?.success()?;
        guest::smoke(vm, "copy --engine m2mf --from gart --to vram --size 65536")?;
        assert_eq!(complaints(&vm.kernel_log()?), Vec::<&str>::new(), "VM {}", vm.name());
    }
    assert_eq!(guest::show(&daemon, &names[0])?["denied_total"], 0);
    Ok(())
}

#[test]
fn hooked_driver_6_12_matches_stock_without_pv_interface() -> Result<()> {
    is_as_the_stock_one("6.12")
}

mod full {
    use super::*;

    #[test]
    fn hooked_driver_6_1_matches_stock_without_pv_interface() -> Result<()> {
        is_as_the_stock_one("6.1")
    }
}
