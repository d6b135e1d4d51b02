//! Tests the harness itself, using guests without vGPUs.

use anyhow::Result;
use tests::{Vm, VmConfig, images};

fn boots_and_answers(kernel: &str) -> Result<()> {
    let images = images()?;
    let vm = Vm::launch(&VmConfig::new("harness", images, kernel)?)?;
    assert_eq!(vm.wait_ready()?, images.kernel(kernel)?.release);
    assert_eq!(vm.run_ok("cat /proc/sys/kernel/ostype")?.lines, ["Linux"]);
    let log = vm.kernel_log()?;
    assert!(log[0].text.starts_with("Linux version"), "{:?}", log[0]);
    assert!(log.iter().any(|l| l.complains()) && log.iter().any(|l| !l.complains()));
    assert_ne!(vm.run("cat /no/such/file")?.code, 0);
    assert_eq!(vm.run_ok("cat /proc/modules")?.lines, Vec::<String>::new());
    Ok(())
}

#[test]
fn kernel_6_1_boots_and_answers() -> Result<()> {
    boots_and_answers("6.1")
}

#[test]
fn kernel_6_12_boots_and_answers() -> Result<()> {
    boots_and_answers("6.12")
}

#[test]
fn vm_returns_after_reset_and_reboot_but_not_after_kill() -> Result<()> {
    let vm = Vm::launch(&VmConfig::new("again", images()?, "6.1")?)?;
    vm.wait_ready()?;
    vm.run_ok("write /tmp/mark x")?;
    vm.reset()?;
    vm.wait_ready()?;
    assert_ne!(vm.run("cat /tmp/mark")?.code, 0);
    vm.reboot()?;
    vm.wait_ready()?;
    vm.run_ok("meminfo")?;
    vm.kill()?;
    assert!(!vm.alive());
    let error = vm.run("meminfo").unwrap_err().to_string();
    assert!(error.contains("QEMU has exited") && error.contains("console.log"), "{error}");
    Ok(())
}

#[test]
fn commands_run_concurrently() -> Result<()> {
    let vm = Vm::launch(&VmConfig::new("beside", images()?, "6.12")?)?;
    vm.wait_ready()?;
    let slow = vm.start("sleep 2")?;
    assert_eq!(vm.run_ok("cat /proc/sys/kernel/ostype")?.lines, ["Linux"]);
    assert_eq!(slow.wait()?.code, 0);
    Ok(())
}
