//! Repeatedly pauses a computing guest, saves its vGPU to a file, and restores the vGPU. Another guest keeps running.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use serde_json::{Value, json};
use tests::guest::{self, card_toml, vm_toml};
use tests::{Daemon, Vm, VmConfig, scale};

use super::stories::complaints;
use super::upgrade::compute_until;

/// Returns the number of save and restore cycles.
fn rounds() -> usize {
    scale::pick(5, 20)
}

fn stock(daemon: &Daemon, name: &str, kernel: &str) -> Result<Vm> {
    let vm = Vm::launch(&VmConfig::new(name, tests::images()?, kernel)?.with_gpu(daemon.vm_socket(name)))?;
    vm.wait_ready()?;
    guest::load_driver(&vm)?;
    Ok(vm)
}

/// Pauses a VM, saves its vGPU, restores it from the file, and resumes the VM. Returns the file's size in bytes, and
/// the pause in ms.
fn round(daemon: &Daemon, vm: &Vm) -> Result<(Value, Value)> {
    let file = vm.folder().join("saved.vgpu");
    let file = file.to_str().context("the path is not UTF-8")?;
    vm.qmp("stop", json!({}))?;
    let saved = daemon.ctl_json(&["vm", "save", vm.name(), file, "--force"])?;
    let restored = daemon.ctl_json(&["vm", "restore", vm.name(), file])?;
    vm.qmp("cont", json!({}))?;
    let rung = guest::counter(daemon, vm.name(), "doorbells")?;
    tests::wait::until("the VM to resume", guest::SMOKE_LIMIT, || {
        Ok((guest::counter(daemon, vm.name(), "doorbells")? > rung + 2).then_some(()))
    })?;
    Ok((saved["bytes"].clone(), restored["pause_ms"].clone()))
}

#[test]
fn saving_a_guest_that_computes_and_restoring_it_loses_no_byte() -> Result<()> {
    let vms = vm_toml("saved", 64) + &vm_toml("stays", 64);
    // The card's host memory has space for two temporary copies of the VM.
    let daemon = Daemon::start("saving", |paths| card_toml(paths, 256) + "memory = { host_mib = 320 }\n" + &vms)?;
    let (saved, stays) = (stock(&daemon, "saved", "6.12")?, stock(&daemon, "stays", "6.1")?);
    let stop = AtomicBool::new(false);
    let (rounds, bytes) = std::thread::scope(|scope| -> Result<_> {
        let runs = [&saved, &stays].map(|vm| scope.spawn(|| compute_until(vm, &stop)));
        let rounds = (0..rounds()).map(|_| {
            std::thread::sleep(Duration::from_millis(300));
            round(&daemon, &saved)
        });
        let rounds = rounds.collect::<Result<Vec<_>>>();
        stop.store(true, Ordering::Release);
        if rounds.is_err() {
            let _ = saved.qmp("cont", json!({}));
        }
        let bytes = runs.into_iter().map(|run| run.join().map_err(|_| anyhow::anyhow!("a thread panicked"))?);
        let bytes = bytes.collect::<Result<Vec<u64>>>();
        Ok((rounds.with_context(|| daemon.log_tail())?, bytes.with_context(|| daemon.log_tail())?))
    })?;
    println!(
        "REPORT {} times saved and restored (bytes, ms of pause): {rounds:?}; computed {bytes:?} bytes",
        rounds.len()
    );
    for vm in [&saved, &stays] {
        vm.ensure_healthy()?;
        ensure!(complaints(&vm.kernel_log()?).is_empty(), "VM {}: {:?}", vm.name(), vm.kernel_log()?);
        let shown = guest::show(&daemon, vm.name())?;
        ensure!(shown["counters"]["faults"] == 0 && shown["counters"]["hangs"] == 0, "{shown}");
        let smoke = guest::smoke(vm, "all --quick")?;
        ensure!(smoke.ok, "{}", smoke.line);
    }
    Ok(())
}
