//! Tests guests whose memory moves at random. Together, they use several times the card's memory, and chunks move after
//! every few submissions. Meanwhile, VMMs and the daemon are killed.

use std::time::Duration;

use anyhow::Result;
use tests::guest::{self, card_toml, vm_toml};
use tests::{Daemon, Output, Vm, VmConfig, wait};

/// Time limit for the daemon to detect the end of a VM, and for chunks to move.
const NOTICE_TIMEOUT: Duration = Duration::from_secs(60);

/// Returns the configuration of a card with `vram_mib` MiB of VRAM and chunks of `chunk_kib` KiB. The mediator reserves
/// `reserve_mib` MiB, and moves random chunks after every `every` submissions.
fn stirred_toml(paths: &tests::Paths, vram_mib: u32, reserve_mib: u32, chunk_kib: u32, every: u32) -> String {
    let card = card_toml(paths, vram_mib) + &format!("reserve_mib = {reserve_mib}\nchunk_kib = {chunk_kib}\n");
    card + "overcommit = true\n" + &format!("memory = {{ host_mib = 256, chaos_every = {every}, chaos_seed = 6 }}\n")
}

fn config(daemon: &Daemon, name: &str, kernel: &str) -> Result<VmConfig> {
    Ok(VmConfig::new(name, tests::images()?, kernel)?.with_gpu(daemon.vm_socket(name)))
}

fn boot(daemon: &Daemon, name: &str, kernel: &str) -> Result<Vm> {
    launch(&config(daemon, name, kernel)?)
}

fn launch(config: &VmConfig) -> Result<Vm> {
    let vm = Vm::launch(config)?;
    vm.wait_ready()?;
    guest::load_driver(&vm)?;
    Ok(vm)
}

fn moved(daemon: &Daemon, name: &str) -> Result<u64> {
    guest::counter(daemon, name, "memory_chunks_moved")
}

/// Waits until `count` more chunks of a VM have moved.
fn wait_moved(daemon: &Daemon, name: &str, count: u64) -> Result<()> {
    let before = moved(daemon, name)?;
    wait::until(&format!("memory of {name} to move"), NOTICE_TIMEOUT, || {
        Ok((moved(daemon, name)? >= before + count).then_some(()))
    })
}

fn verified(vm: &Vm, output: &Output) -> Result<()> {
    let smoke = guest::parse_smoke(output)?;
    println!("VM {}: {}", vm.name(), smoke.line);
    assert!(smoke.ok && smoke.bytes > 0, "VM {}: {}", vm.name(), output.text());
    Ok(())
}

#[test]
fn oversubscribed_guests_verify_and_one_dies_mid_relocation() -> Result<()> {
    // Start a card with 48 MiB for two VMs of 96 MiB each. One VM is paravirtual, which must not affect the results.
    let vms = vm_toml("stays", 96) + "paravirtual = { offered = true }\n" + &vm_toml("dies", 96);
    let mut daemon = Daemon::start("stirred", |paths| stirred_toml(paths, 64, 16, 128, 2) + &vms)?;
    let stays = launch(&config(&daemon, "stays", "6.12")?.paravirtual()?)?;
    let dies = boot(&daemon, "dies", "6.1")?;
    let command = "run /bin/gpu-workloads workload --name memory --working-set 24m --rounds 1";
    let runs = [stays.start(command)?, dies.start(command)?];
    for (vm, run) in [&stays, &dies].into_iter().zip(runs) {
        verified(vm, &run.wait_within(guest::SMOKE_LIMIT)?)?;
        assert!(moved(&daemon, vm.name())? > 0, "no memory of {} moved", vm.name());
    }
    let good = stays.start("run /bin/gpu-workloads workload --name all --scale 1")?;
    let doomed = dies.start("run /bin/gpu-workloads stress --seconds 600")?;
    wait_moved(&daemon, "dies", 20)?;
    dies.kill()?;
    drop(doomed);
    wait::until("its channels and memory to be freed", NOTICE_TIMEOUT, || {
        let shown = guest::show(&daemon, "dies")?;
        Ok((shown["state"] == "waiting" && shown["channels_used"] == 0).then_some(()))
    })?;
    verified(&stays, &good.wait_within(guest::SMOKE_LIMIT)?)?;
    assert_eq!(guest::counter(&daemon, "stays", "faults")?, 0);
    guest::await_counter(&daemon, "stays", "pv_batches", |batches| batches > 0)?;
    assert!(daemon.alive());
    Ok(())
}

#[test]
fn daemon_killed_in_mid_relocation_serves_again_after_a_restart() -> Result<()> {
    let vms = vm_toml("before", 96) + &vm_toml("after", 96);
    let toml = |paths: &tests::Paths| stirred_toml(paths, 64, 16, 2048, 1) + &vms;
    let mut daemon = Daemon::start_as_service("restirred", toml)?;
    let before = boot(&daemon, "before", "6.12")?;
    let work = before.start("run /bin/gpu-workloads stress --seconds 600")?;
    wait_moved(&daemon, "before", 20)?;
    daemon.kill_and_restart()?;
    drop(work);
    // The host memory of evicted chunks was lost with the process. Check that VMs can start again, including one with
    // the same name.
    let after = boot(&daemon, "after", "6.1")?;
    before.ensure_healthy()?;
    before.kill()?;
    drop(before);
    let before = boot(&daemon, "before", "6.12")?;
    for vm in [&after, &before] {
        guest::smoke(vm, "copy --engine ce0 --from vram --to gart --size 1048576")?;
    }
    let log = daemon.log();
    assert!(!log.contains("panicked"), "{log}");
    Ok(())
}

#[test]
fn guest_on_the_largest_chunks_is_verified_while_they_move() -> Result<()> {
    // The card is divided into 64 MiB chunks. The VM needs two chunks but may use only one on the card. The mediator
    // uses one chunk itself and one for the VM's page tables, and keeps two in reserve.
    let daemon = Daemon::start("large", |paths| stirred_toml(paths, 384, 256, 65536, 4) + &vm_toml("large", 128))?;
    let vm = boot(&daemon, "large", "6.12")?;
    guest::smoke(&vm, "workload --name memory --working-set 48m --rounds 1")?;
    assert!(moved(&daemon, "large")? > 0, "nothing moved");
    assert_eq!(guest::counter(&daemon, "large", "faults")?, 0);
    Ok(())
}
