//! Tests VMs that run under the machine's own KVM and share a card behind VFIO. They copy, compute and swap. One VM
//! reboots and turns hostile, and a paravirtual VM is killed.

use std::time::Duration;

use anyhow::Result;
use serde_json::Value;
use tests::files::Files;
use tests::guest::{self, Smoke};
use tests::nest::inner::{InnerSpec, InnerVm};
use tests::nest::{self, ADDRESS, Nest, OUTER_VM, Shape};
use tests::scale;

/// VRAM size of the card in MiB.
const CARD_MIB: u32 = 256;
/// VRAM size of the card in MiB, as configured for the inner daemon.
const VRAM_MIB: u32 = 96;
/// VRAM size of a VM in MiB. It is small, because each word that the daemon zeroes causes a message to the outer
/// daemon.
const VM_MIB: u32 = 32;
/// Quota of a VM on the card in MiB.
const QUOTA_MIB: u32 = 8;
/// Host memory for evicted chunks in MiB: as much as all VRAM visible to VMs, because none of it is guaranteed to be on
/// the card.
const HOST_MIB: u32 = 2 * VM_MIB;
/// Name of the VM that reboots and turns hostile.
const FIRST: &str = "a";
/// Name of the paravirtual VM, which is killed.
const PARAVIRTUAL: &str = "pv";
/// Configuration line of a paravirtual VM.
const OFFERED: &str = "paravirtual = { offered = true }\n";
/// Pattern that a hostile guest searches for.
const PATTERN: u64 = 0x5eed_0fed_0000_0001;
/// Returns the options of an attack. The default attack is short, because each access causes a guest exit in an
/// emulated machine, and the mediator reads each channel's tables.
fn attack_size() -> String {
    scale::pick("--probes 2 --channels 4", "--probes 6 --channels 16").to_owned()
}

/// A workload that copies between RAM and VRAM. It is small, because each word that a guest CPU transfers through an
/// aperture causes an exit.
const COPIES: &str = "copy --engine m2mf --from gart --to vram --size 65536";
/// A workload that runs kernels.
const KERNELS: &str = "workload --name mmul";

/// Returns the daemon's configuration for these VMs.
fn config(vms: &[InnerSpec]) -> String {
    let offered = |vm: &InnerSpec| if vm.paravirtual { OFFERED } else { "" };
    let memory = format!("memory = {{ quota_mib = {QUOTA_MIB} }}\n");
    // Trap these VMs' apertures. The machine's own card has no mapped BARs, so copying a page to or from memory under a
    // mapped aperture would cause an exit per word.
    let own = |vm: &InnerSpec| guest::vm_toml(vm.name, VM_MIB) + guest::TRAPPED + &memory + offered(vm);
    let vms: String = vms.iter().map(own).collect();
    nest::config(VRAM_MIB, &format!("overcommit = true\nmemory = {{ host_mib = {HOST_MIB} }}\n{vms}"))
}

fn counter(shown: &Value, name: &str) -> u64 {
    shown["counters"][name].as_u64().unwrap_or(0)
}

/// Prints the outer daemon's counters for the machine.
fn stage(nest: &Nest, what: &str) -> Result<()> {
    let shown = guest::show(nest.outer(), OUTER_VM)?;
    nest.say(&format!("-- {what}: {}", shown["counters"]));
    Ok(())
}

/// Runs the same workload in several VMs concurrently.
fn at_once(vms: &[&InnerVm<'_>], args: &str) -> Result<Vec<Smoke>> {
    let command = format!("run /bin/gpu-workloads {args}");
    let started = vms.iter().map(|vm| vm.start(&command)).collect::<Result<Vec<_>>>()?;
    vms.iter().zip(started).map(|(vm, pending)| vm.finish(pending, args)).collect()
}

#[test]
fn vms_that_know_the_mediator_share_the_machines_card() -> Result<()> {
    share(InnerSpec { paravirtual: true, ..InnerSpec::new(FIRST) })
}

/// Runs the same test with a stock driver. Loading this driver alone causes half a million VM exits in an emulated
/// machine.
#[test]
#[ignore = "loading the stock driver there takes seven minutes on a quiet host; docs/guides/real-cards.md has the times"]
fn vms_of_the_machine_share_its_card() -> Result<()> {
    share(InnerSpec::new(FIRST))
}

/// Tests the VM `first` and a paravirtual VM on the same card.
fn share(first: InnerSpec) -> Result<()> {
    let driver =
        if first.paravirtual { "the paravirtual driver in both" } else { "stock nouveau, and the paravirtual driver" };
    let vms = [first, InnerSpec { paravirtual: true, ..InnerSpec::new(PARAVIRTUAL) }];
    let mut files = Files::default();
    files.write("etc/mediatord.toml", 0o644, config(&vms).as_bytes());
    let shape = Shape { card_mib: CARD_MIB, card_keys: "", memory_mib: 1280, vms: &vms, huge_mib: 0 };
    let nest = Nest::boot("nested-vms", shape, files)?;
    nest.ok(&format!("mediatorctl card bind {ADDRESS}"))?;
    nest.approve_firmware()?;
    let daemon = nest.start_daemon("/etc/mediatord.toml")?;
    stage(&nest, "daemon")?;

    // Start the two drivers concurrently.
    let (mut first, pv) = (nest.launch(FIRST)?, nest.launch(PARAVIRTUAL)?);
    let release = first.wait_ready()?;
    pv.wait_ready()?;
    stage(&nest, "vms up")?;
    std::thread::scope(|scope| {
        let other = scope.spawn(|| pv.load_driver());
        first.load_driver()?;
        other.join().expect("no panic")
    })?;
    stage(&nest, "loaded")?;
    let loaded = nest.show(FIRST)?;
    assert_eq!(loaded["driver"]["interrupts"], "msi", "{loaded}");

    // Both VMs copy and compute concurrently. Then the test evicts their memory, and one VM uses more than its quota on
    // the card.
    let mut verified = Vec::new();
    for args in [COPIES, KERNELS] {
        verified.extend(at_once(&[&first, &pv], args)?);
        stage(&nest, args)?;
    }
    for name in [FIRST, PARAVIRTUAL] {
        nest.ctl_json(&format!("memory evict {name}"))?;
    }
    verified.extend(at_once(&[&first, &pv], COPIES)?);
    // Fill all of the paravirtual VM's memory with data that the other VM must not find.
    let filled = format!("fill --pattern {PATTERN:016x}");
    verified.push(pv.smoke(&filled)?);
    stage(&nest, &filled)?;
    let moved = [FIRST, PARAVIRTUAL].map(|name| nest.show(name).map(|shown| counter(&shown, "memory_chunks_moved")));
    let moved = moved.into_iter().collect::<Result<Vec<_>>>()?;
    assert!(moved.iter().all(|moved| *moved > 0), "chunks that have moved: {moved:?}");

    // Reboot the first VM. It then attacks the mediator without a driver while the other VM copies.
    first.reboot()?;
    first.wait_ready()?;
    let started = pv.start(&format!("run /bin/gpu-workloads {COPIES}"))?;
    let attack = first.smoke(&format!("bar hostile --fresh {} --pattern {PATTERN:016x}", attack_size()))?;
    assert!(attack.line.contains("hits=0"), "{}", attack.line);
    verified.push(pv.finish(started, "copies beside a hostile VM")?);
    let shown = nest.show(PARAVIRTUAL)?;
    assert!(counter(&shown, "pv_batches") > 0, "{shown}");
    assert_eq!(shown["denied_total"], 0, "{shown}");
    assert!(nest.show(FIRST)?["denied_total"].as_u64() > Some(0));

    // Kill the paravirtual VM in the middle of its copies. Its vGPU waits for the next client.
    let copies = pv.start("run /bin/gpu-workloads stream --duration 120")?;
    std::thread::sleep(Duration::from_secs(2));
    assert!(!copies.ended());
    pv.kill()?;
    nest.wait_state(PARAVIRTUAL, "waiting")?;

    let log = nest.stop_daemon(daemon)?;
    assert!(!log.contains("panicked"), "{log}");
    let outer = guest::show(nest.outer(), OUTER_VM)?;
    nest.say(&format!("the outer daemon's view: {outer}"));
    let bytes: u64 = verified.iter().map(|smoke| smoke.bytes).sum();
    println!(
        "REPORT {}; VMs Linux {release} under QEMU and kvm, {driver}; card vfio {ADDRESS}: {bytes} bytes verified, {} messages to load nouveau, \
         {} paravirtual batches, {moved:?} chunks moved, {} messages to the outer daemon",
        nest.platform(),
        guest::messages_in(&loaded["transport"]),
        counter(&shown, "pv_batches"),
        guest::messages(nest.outer(), OUTER_VM)?,
    );
    Ok(())
}
