//! Tests stock nouveau on a vGPU, from probe to hot unplug.

use std::time::Duration;

use anyhow::Result;
use tests::guest::{self, TRAPPED, card_toml, vm_toml};
use tests::{Daemon, Vm, VmConfig, klog};

/// Messages that Linux 6.12 also prints on a healthy card of this type. Linux requests a privileged copy engine
/// channel, which Fermi lacks, and a display format, which a card without outputs lacks.
const HARMLESS: [&str; 2] = ["failed to create ce channel, -22", "No compatible format found"];

/// Starts one daemon and one VM with the given kernel, and waits until the guest has booted.
fn one(name: &str, kernel: &str, hotplug: bool, more: &str) -> Result<(Daemon, Vm)> {
    let daemon = Daemon::start(name, |paths| card_toml(paths, 512) + &vm_toml(name, 256) + more)?;
    let mut config = VmConfig::new(name, tests::images()?, kernel)?.with_gpu(daemon.vm_socket(name));
    config.hotplug = hotplug;
    let vm = Vm::launch(&config)?;
    vm.wait_ready()?;
    Ok((daemon, vm))
}

/// Returns kernel complaints that a healthy card would not cause.
pub(crate) fn complaints(log: &[klog::Line]) -> Vec<&str> {
    log.iter()
        .filter(|line| line.complains() && (line.text.contains("nouveau") || line.text.contains("drm")))
        .map(|line| line.text.as_str())
        .filter(|text| !HARMLESS.iter().any(|harmless| text.contains(harmless)))
        .collect()
}

/// Tests the driver with trapped apertures.
fn comes_up(name: &str, kernel: &str) -> Result<()> {
    let (daemon, vm) = one(name, kernel, false, TRAPPED)?;
    assert_eq!(guest::load_driver(&vm)?, "nouveau renderD128 MSI");
    let smoke = guest::smoke(&vm, "all --quick")?;
    assert!(smoke.bytes > 1 << 20, "{}", smoke.line);
    let log = vm.kernel_log()?;
    assert_eq!(complaints(&log), Vec::<&str>::new());
    let shown = guest::show(&daemon, name)?;
    assert_eq!(shown["driver"]["interrupts"], "msi");
    assert_eq!(shown["denied_total"], 0, "a stock driver touches nothing that is denied: {}", shown["denied"]);
    Ok(())
}

/// Runs the same test as [`comes_up`], but with mapped apertures, where CPU accesses cause no messages.
fn comes_up_remapped(name: &str, kernel: &str) -> Result<()> {
    let (daemon, vm) = one(name, kernel, false, "")?;
    assert_eq!(guest::load_driver(&vm)?, "nouveau renderD128 MSI");
    let before = guest::messages(&daemon, name)?;
    println!("REPORT {before} messages and {} pages moved to load", guest::counter(&daemon, name, "aperture_moves")?);
    let smoke = guest::smoke(&vm, "all --quick")?;
    assert!(smoke.bytes > 1 << 20, "{}", smoke.line);
    let before = guest::messages(&daemon, name)?;
    let map = guest::smoke(&vm, "map --quick")?;
    let messages = guest::messages(&daemon, name)? - before;
    println!("{messages} messages for {} verified bytes", map.bytes);
    assert_eq!(complaints(&vm.kernel_log()?), Vec::<&str>::new());
    let shown = guest::show(&daemon, name)?;
    let counter = |counter: &str| shown["counters"][counter].as_u64();
    assert_eq!(counter("aperture_messages"), Some(0), "all of what can be mapped is");
    assert_eq!(counter("aperture_aliases"), Some(0));
    assert!(counter("aperture_moves").is_some_and(|moves| moves > 0));
    assert_eq!(shown["denied_total"], 0, "{}", shown["denied"]);
    Ok(())
}

#[test]
fn linux_6_1_comes_up_with_remapped_apertures() -> Result<()> {
    comes_up_remapped("remap61", "6.1")
}

#[test]
fn linux_6_12_comes_up_and_copies_without_complaint() -> Result<()> {
    comes_up("linux612", "6.12")
}

fn unbound_and_bound_again(kernel: &str) -> Result<()> {
    let (_daemon, vm) = one("rebind", kernel, false, "")?;
    guest::load_driver(&vm)?;
    // Unbind the driver, first before any work, and then after work.
    vm.run_within("unbind", guest::LOAD_LIMIT)?.success()?;
    assert_eq!(complaints(&vm.kernel_log()?), Vec::<&str>::new());
    vm.run_within("bind", guest::LOAD_LIMIT)?.success()?;
    guest::smoke(&vm, "copy --engine m2mf --from gart --to vram --size 65536")?;
    for _ in 0..2 {
        vm.run_within("unbind", guest::LOAD_LIMIT)?.success()?;
        vm.run_within("bind", guest::LOAD_LIMIT)?.success()?;
        guest::smoke(&vm, "copy --engine m2mf --from gart --to vram --size 65536")?;
    }
    assert_eq!(complaints(&vm.kernel_log()?), Vec::<&str>::new());
    Ok(())
}

#[test]
fn driver_of_6_12_is_unbound_and_bound_again() -> Result<()> {
    unbound_and_bound_again("6.12")
}

#[test]
fn guest_reboots_and_its_driver_comes_up_again() -> Result<()> {
    let (daemon, vm) = one("reboot", "6.12", false, "")?;
    guest::load_driver(&vm)?;
    vm.reboot()?;
    vm.wait_ready()?;
    guest::load_driver(&vm)?;
    guest::smoke(&vm, "copy --engine m2mf --from vram --to gart --size 1048576")?;
    vm.reset()?;
    vm.wait_ready()?;
    assert_eq!(guest::show(&daemon, "reboot")?["channels_used"], 0, "a reset leaves no channel");
    guest::load_driver(&vm)?;
    guest::smoke(&vm, "copy --engine m2mf --from vram --to gart --size 1048576")?;
    Ok(())
}

#[test]
fn device_is_unplugged_and_plugged_while_the_guest_runs() -> Result<()> {
    let (daemon, vm) = one("hotplug", "6.12", true, "")?;
    guest::load_driver(&vm)?;
    guest::smoke(&vm, "copy --engine m2mf --from gart --to vram --size 65536")?;
    vm.device_del()?;
    tests::wait::until("the VMM to disconnect", Duration::from_secs(30), || {
        Ok((guest::show(&daemon, "hotplug")?["state"] == "waiting").then_some(()))
    })?;
    vm.device_add(&daemon.vm_socket("hotplug"))?;
    tests::wait::until("the render node to return", guest::LOAD_LIMIT, || {
        Ok(vm.run("nodes")?.text().contains("renderD128").then_some(()))
    })?;
    guest::smoke(&vm, "copy --engine m2mf --from gart --to vram --size 65536")?;
    Ok(())
}

#[test]
fn two_guests_share_one_card() -> Result<()> {
    let daemon =
        Daemon::start("share", |paths| card_toml(paths, 512) + &vm_toml("first", 192) + &vm_toml("second", 192))?;
    let boot = |name: &str, kernel| -> Result<Vm> {
        Vm::launch(&VmConfig::new(name, tests::images()?, kernel)?.with_gpu(daemon.vm_socket(name)))
    };
    let vms = [boot("first", "6.1")?, boot("second", "6.12")?];
    for vm in &vms {
        vm.wait_ready()?;
        guest::load_driver(vm)?;
    }
    // Run both guests concurrently. Neither may wait for the other.
    let command = "run /bin/gpu-workloads all --quick";
    let runs = [vms[0].start(command)?, vms[1].start(command)?];
    for run in runs {
        let smoke = guest::parse_smoke(&run.wait_within(guest::SMOKE_LIMIT)?)?;
        assert!(smoke.ok, "{}", smoke.line);
    }
    Ok(())
}

/// Runs each test with the kernel version that the default run omits.
mod full {
    use super::*;

    #[test]
    fn linux_6_12_comes_up_with_remapped_apertures() -> Result<()> {
        comes_up_remapped("remap612", "6.12")
    }

    #[test]
    fn linux_6_1_comes_up_and_copies_without_complaint() -> Result<()> {
        comes_up("linux61", "6.1")
    }

    #[test]
    fn driver_of_6_1_is_unbound_and_bound_again() -> Result<()> {
        unbound_and_bound_again("6.1")
    }
}
