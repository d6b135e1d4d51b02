//! Tests guests and clients that attack other guests and clients.

mod holes;
mod rogues;

use std::os::fd::AsFd;
use std::time::Duration;

use anyhow::{Context, Result};
use tests::guest::{self, card_toml, vm_toml};
use tests::{Daemon, Vm, VmConfig, wait};
use vmm_glue::client::Client;

/// Pattern in the victim's VRAM: 16 bytes that no other test uses.
const PATTERN: &str = "5ec2e75ec2e75ec2deadbeefcafef00d";

fn pair(name: &str) -> Result<Daemon> {
    Daemon::start(name, |paths| card_toml(paths, 256) + &vm_toml("victim", 96) + &vm_toml("attacker", 96))
}

fn boot(daemon: &Daemon, name: &str, kernel: &str) -> Result<Vm> {
    let vm = Vm::launch(&VmConfig::new(name, tests::images()?, kernel)?.with_gpu(daemon.vm_socket(name)))?;
    vm.wait_ready()?;
    Ok(vm)
}

#[test]
fn freed_memory_of_one_guest_is_not_seen_by_another() -> Result<()> {
    let daemon = Daemon::start("residue", |paths| card_toml(paths, 256) + &vm_toml("victim", 160))?;
    let victim = boot(&daemon, "victim", "6.1")?;
    guest::load_driver(&victim)?;
    let filled = guest::smoke(&victim, &format!("fill --pattern {PATTERN}"))?;
    assert!(filled.line.contains("hits="), "{}", filled.line);
    // The victim's process has freed the memory. It still belongs to the victim's VM, and another VM can access only
    // its own memory.
    daemon.ctl(&["vm", "add", "beside", "--card", "card0", "--vram-mib", "48"])?.success()?;
    let beside = boot(&daemon, "beside", "6.12")?;
    guest::load_driver(&beside)?;
    guest::smoke(&beside, &format!("scan --pattern {PATTERN}"))?;
    // After the victim exits, the daemon scrubs the memory and assigns it to a new VM.
    drop(victim);
    daemon.ctl(&["vm", "remove", "victim"])?.success()?;
    daemon.ctl(&["vm", "add", "heir", "--card", "card0", "--vram-mib", "160"])?.success()?;
    let heir = boot(&daemon, "heir", "6.1")?;
    guest::load_driver(&heir)?;
    guest::smoke(&heir, &format!("scan --pattern {PATTERN}"))?;
    Ok(())
}

#[test]
fn next_client_of_a_vm_does_not_see_its_predecessors_memory() -> Result<()> {
    let daemon = Daemon::start("successor", |paths| card_toml(paths, 256) + &vm_toml("victim", 96))?;
    let first = boot(&daemon, "victim", "6.1")?;
    guest::load_driver(&first)?;
    guest::smoke(&first, &format!("fill --pattern {PATTERN}"))?;
    first.kill()?;
    wait::until("the VM's socket to accept clients again", Duration::from_secs(30), || {
        Ok((guest::show(&daemon, "victim")?["state"] == "waiting").then_some(()))
    })?;
    let second = boot(&daemon, "victim", "6.1")?;
    guest::load_driver(&second)?;
    guest::smoke(&second, &format!("scan --pattern {PATTERN}"))?;
    Ok(())
}

#[test]
fn pointers_outside_of_the_share_are_denied_and_counted() -> Result<()> {
    let daemon = pair("pointers")?;
    let victim = boot(&daemon, "victim", "6.12")?;
    let attacker = boot(&daemon, "attacker", "6.1")?;
    guest::load_driver(&victim)?;
    guest::smoke(&victim, &format!("fill --pattern {PATTERN}"))?;
    let stress = victim.start("run /bin/gpu-workloads stress --seconds 20")?;
    // Run the attacker without a driver, so that the program has exclusive access to the BARs.
    let attack = guest::smoke(&attacker, &format!("bar hostile --mapped --pattern {PATTERN}"))?;
    assert!(attack.line.contains("hits=0"), "{}", attack.line);
    let stress = guest::parse_smoke(&stress.wait_within(guest::SMOKE_LIMIT)?)?;
    assert!(stress.ok, "the neighbour's copies: {}", stress.line);
    let attacker_shown = guest::show(&daemon, "attacker")?;
    assert!(attacker_shown["denied_total"].as_u64() > Some(0), "{attacker_shown}");
    assert_eq!(guest::show(&daemon, "victim")?["denied_total"], 0);
    // Check that the attacker's own driver can still start.
    guest::load_driver(&attacker)?;
    guest::smoke(&attacker, "copy --engine m2mf --from gart --to vram --size 65536")?;
    Ok(())
}

/// Runs an attack on the socket of `attacker`, and checks that the copies of the guest of `victim` succeed, and that
/// the socket then serves another client.
fn beside_a_client(name: &str, attack: impl FnOnce(&Daemon) -> Result<()>) -> Result<()> {
    let daemon = pair(name)?;
    let victim = boot(&daemon, "victim", "6.1")?;
    guest::load_driver(&victim)?;
    let stress = victim.start("run /bin/gpu-workloads stress --seconds 8")?;
    attack(&daemon)?;
    let stress = guest::parse_smoke(&stress.wait_within(guest::SMOKE_LIMIT)?)?;
    assert!(stress.ok, "the neighbour's copies: {}", stress.line);
    // Check that the socket serves the next client.
    let mut next = Client::connect(&daemon.vm_socket("attacker"))?;
    assert_ne!(next.read32(0, 0)?, u32::MAX, "BOOT_0 of a clean vGPU");
    Ok(())
}

#[test]
fn malformed_messages_end_their_connection_only() -> Result<()> {
    beside_a_client("malformed", |daemon| {
        let path = daemon.vm_socket("attacker");
        // Send a frame that claims 2 GiB, a frame shorter than its header, and bytes that are not a frame.
        for bytes in [
            &[1, 0, 1, 0, 0, 0, 0, 0x80, 0, 0, 0, 0, 0, 0, 0, 0][..],
            &[2, 0, 1, 0, 4, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0][..],
            &[0xff; 64][..],
        ] {
            let client = Client::connect(&path)?;
            client.send_raw(bytes, &[])?;
            client.set_timeout(Some(Duration::from_secs(20)))?;
            wait::until("the server to disconnect", Duration::from_secs(20), || {
                Ok((std::io::Read::read(&mut client.stream(), &mut [0; 256]).unwrap_or(0) == 0).then_some(()))
            })?;
        }
        // Disconnect in the middle of a message.
        let client = Client::connect(&path)?;
        client.send_raw(&[1, 0, 9], &[])?;
        drop(client);
        Ok(())
    })
}

#[test]
fn client_that_does_not_read_is_dropped() -> Result<()> {
    beside_a_client("deaf", |daemon| {
        let mut client = Client::connect(&daemon.vm_socket("attacker"))?;
        client.stream().set_write_timeout(Some(Duration::from_secs(5)))?;
        // Send requests without reading the replies. Limit their number, in case the server accepts them all.
        let body = vmm_glue::client::write_body(0, 0, &[0; 4]);
        for _ in 0..200_000 {
            if client.send(vmm_glue::protocol::Command::REGION_WRITE, 0, &body, &[]).is_err() {
                return Ok(());
            }
        }
        anyhow::bail!("the server buffered 200000 replies for a client that does not read")
    })
}

#[test]
fn second_client_is_rejected_and_first_continues() -> Result<()> {
    beside_a_client("second", |daemon| {
        let path = daemon.vm_socket("attacker");
        let mut first = Client::connect(&path)?;
        let second = Client::connect(&path);
        assert!(second.is_err(), "a second client was accepted");
        first.read32(0, 0).context("the first client")?;
        Ok(())
    })
}

#[test]
fn truncated_client_memory_does_not_harm_others() -> Result<()> {
    beside_a_client("truncated", |daemon| {
        let mut client = Client::connect(&daemon.vm_socket("attacker"))?;
        let file = vmm_glue::client::memory_file(1 << 20, false)?;
        client.dma_map(0, 1 << 20, true, Some((file.as_fd(), 0)))?;
        rustix::fs::ftruncate(&file, 0)?;
        // Enable bus mastering, which makes the server access the memory.
        client.write(7, 4, &6u16.to_le_bytes())?;
        let _ = client.read32(0, 0);
        Ok(())
    })
}
