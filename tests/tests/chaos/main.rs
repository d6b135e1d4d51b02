//! Tests processes that are killed in the middle of their work, and operators' mistakes.

mod churn;
mod memory;

use std::time::Duration;

use anyhow::Result;
use tests::guest::{self, card_toml, passthrough_toml, vm_toml};
use tests::{Daemon, Vm, VmConfig, wait};

fn boot(daemon: &Daemon, name: &str, kernel: &str) -> Result<Vm> {
    let vm = Vm::launch(&VmConfig::new(name, tests::images()?, kernel)?.with_gpu(daemon.vm_socket(name)))?;
    vm.wait_ready()?;
    Ok(vm)
}

#[test]
fn killed_vm_frees_its_resources_and_neighbour_keeps_copying() -> Result<()> {
    let mut daemon =
        Daemon::start("kill", |paths| card_toml(paths, 256) + &vm_toml("stays", 96) + &vm_toml("dies", 96))?;
    let stays = boot(&daemon, "stays", "6.12")?;
    let dies = boot(&daemon, "dies", "6.1")?;
    guest::load_driver(&stays)?;
    guest::load_driver(&dies)?;
    let good = stays.start("run /bin/gpu-workloads stress --seconds 25")?;
    let doomed = dies.start("run /bin/gpu-workloads stress --seconds 600")?;
    doomed.wait_line("stress", guest::LOAD_LIMIT)?;
    wait::until("the doomed VM to submit", Duration::from_secs(60), || {
        Ok((guest::counter(&daemon, "dies", "doorbells")? > 50).then_some(()))
    })?;
    dies.kill()?;
    drop(doomed);
    wait::until("its channels and memory to be freed", Duration::from_secs(60), || {
        let shown = guest::show(&daemon, "dies")?;
        Ok((shown["state"] == "waiting" && shown["channels_used"] == 0).then_some(()))
    })?;
    guest::await_counter(&daemon, "dies", "address_spaces", |spaces| spaces == 0)?;
    let good = guest::parse_smoke(&good.wait_within(guest::SMOKE_LIMIT)?)?;
    assert!(good.ok, "{}", good.line);
    assert!(daemon.alive());
    // Check that a new VM can use the name and the memory of the removed VM.
    daemon.ctl(&["vm", "remove", "dies"])?.success()?;
    daemon.ctl(&["vm", "add", "dies", "--card", "card0", "--vram-mib", "96"])?.success()?;
    let again = boot(&daemon, "dies", "6.1")?;
    guest::load_driver(&again)?;
    guest::smoke(&again, "copy --engine m2mf --from gart --to vram --size 1048576")?;
    Ok(())
}

#[test]
fn vms_are_added_and_removed_while_another_copies() -> Result<()> {
    let daemon = Daemon::start("churn", |paths| card_toml(paths, 256) + &vm_toml("stays", 64))?;
    let stays = boot(&daemon, "stays", "6.1")?;
    guest::load_driver(&stays)?;
    let good = stays.start("run /bin/gpu-workloads stress --seconds 15")?;
    let free = |daemon: &Daemon| -> Result<u64> {
        Ok(daemon.ctl_json(&["card", "show", "card0"])?["vram_free_mib"].as_u64().unwrap_or(0))
    };
    let before = free(&daemon)?;
    for round in 0..20 {
        let name = format!("guest{round}");
        daemon.ctl(&["vm", "add", &name, "--card", "card0", "--vram-mib", "64"])?.success()?;
        assert_eq!(free(&daemon)?, before - 64);
        daemon.ctl(&["vm", "remove", &name])?.success()?;
    }
    assert_eq!(free(&daemon)?, before);
    let refused = daemon.ctl(&["vm", "add", "huge", "--card", "card0", "--vram-mib", "4096"])?;
    assert_eq!(refused.code, Some(4), "{}{}", refused.stdout, refused.stderr);
    assert_eq!(daemon.ctl(&["vm", "remove", "nobody"])?.code, Some(3));
    let good = guest::parse_smoke(&good.wait_within(guest::SMOKE_LIMIT)?)?;
    assert!(good.ok, "{}", good.line);
    Ok(())
}

#[test]
fn memory_that_is_not_shared_is_reported() -> Result<()> {
    let mut daemon = Daemon::start("private", |paths| card_toml(paths, 128) + &vm_toml("private", 64))?;
    let mut config = VmConfig::new("private", tests::images()?, "6.1")?.with_gpu(daemon.vm_socket("private"));
    config.share = false;
    let vm = Vm::launch(&config)?;
    vm.wait_ready()?;
    // The driver cannot start. This test only requires the daemon's message.
    let load = vm.start("load")?;
    daemon.wait_log("share=on", Duration::from_secs(120))?;
    assert_eq!(guest::show(&daemon, "private")?["memory_not_shared"], true);
    drop(load);
    Ok(())
}

#[test]
fn sigterm_ends_the_daemon_while_a_guest_uses_it() -> Result<()> {
    let mut daemon = Daemon::start("term", |paths| card_toml(paths, 128) + &vm_toml("user", 64))?;
    let vm = boot(&daemon, "user", "6.1")?;
    guest::load_driver(&vm)?;
    let _stress = vm.start("run /bin/gpu-workloads stress --seconds 60")?;
    let status = daemon.stop()?;
    assert!(status.success(), "{status}\n{}", daemon.log_tail());
    assert!(!daemon.vm_socket("user").exists() && !daemon.paths().admin_socket.exists());
    vm.ensure_healthy()?;
    Ok(())
}

#[test]
fn passthrough_vm_drives_the_card_itself() -> Result<()> {
    let daemon = Daemon::start("straight", |paths| card_toml(paths, 256) + &passthrough_toml("straight"))?;
    let vm = boot(&daemon, "straight", "6.1")?;
    guest::load_driver(&vm)?;
    guest::smoke(&vm, "all --quick")?;
    let refused = daemon.ctl(&["vm", "add", "beside", "--card", "card0", "--vram-mib", "64"])?;
    assert_eq!(refused.code, Some(4), "{}{}", refused.stdout, refused.stderr);
    Ok(())
}

#[test]
fn configuration_errors_name_line_and_key() -> Result<()> {
    let refused = Daemon::refused("typo", |paths| card_toml(paths, 128).replace("vram_mib", "vram_mb"))?;
    assert_eq!(refused.code, Some(2), "{}", refused.stderr);
    // The message must contain the file, the line, the column, the wrong key and the expected key.
    let words = ["mediatord.toml:9:1:", "`vram_mb`", "expected", "`vram_mib`"];
    assert!(words.iter().all(|word| refused.stderr.contains(word)), "{}", refused.stderr);
    let refused =
        Daemon::refused("nocard", |paths| card_toml(paths, 128) + &vm_toml("a", 64).replace("card0", "card9"))?;
    assert!(refused.stderr.contains("card9"), "{}", refused.stderr);
    Ok(())
}

#[test]
fn socket_path_in_use_is_rejected() -> Result<()> {
    let first = Daemon::start("owner", |paths| card_toml(paths, 128) + &vm_toml("a", 64))?;
    let taken = first.vm_socket("a");
    let refused = Daemon::refused("intruder", |paths| {
        card_toml(paths, 128) + &vm_toml("b", 64) + &format!("socket = {taken:?}\n")
    })?;
    assert_ne!(refused.code, Some(0));
    assert!(refused.stderr.contains("in use"), "{}", refused.stderr);
    Ok(())
}
