//! Tests domains that share a card through stock and paravirtual drivers, and copy and compute. One domain is
//! destroyed, recreated, and then attacks. At full scale, three domains also swap, and one reboots.

use std::time::Duration;

use anyhow::Result;
use serde_json::Value;
use tests::guest::{self, Smoke};
use tests::xen::{Domain, DomainSpec, XenMachine};
use tests::{scale, wait};

/// VRAM size of the card in MiB. It is less than the VMs' total VRAM, so that chunks must move.
const CARD_MIB: u32 = 96;
/// VRAM size of a VM in MiB.
const VM_MIB: u32 = 48;
/// Memory of domain 0 in MiB, including its files and the software card.
const DOM0_MIB: u32 = 1400;
/// Pattern that a hostile guest searches for.
const PATTERN: u64 = 0x5eed_0fed_0000_0001;
/// Returns the options of an attack. The default attack is short, because each access causes a guest exit in an
/// emulated machine, and the mediator reads each channel's tables.
fn attack_size() -> String {
    scale::pick("--probes 2 --channels 4", "--probes 6 --channels 16").to_owned()
}

/// Time limit for a VM's status to satisfy a condition.
const SHOW_LIMIT: Duration = Duration::from_secs(120);

/// Returns the daemon's configuration. The VMs are named after their domains.
fn config(names: &[&str], paravirtual: &str) -> String {
    let vms = names.iter().map(|name| {
        let offered = if *name == paravirtual { "paravirtual = { offered = true }\n" } else { "" };
        format!("\n[[vm]]\nname = {name:?}\ncard = \"card0\"\nvram_mib = {VM_MIB}\nxen_domain = {name:?}\napertures = \"remapped\"\n{offered}")
    });
    format!(
        "[daemon]\nadmin_socket = \"/run/admin.sock\"\nsocket_dir = \"/run\"\n\n[[card]]\nname = \"card0\"\nkind = \"simgpu\"\n\
         vram_mib = {CARD_MIB}\nbar1_mib = 32\nbar3_mib = 16\novercommit = true\nmemory = {{ host_mib = 192 }}\n{}",
        vms.collect::<String>()
    )
}

fn counter(shown: &Value, name: &str) -> u64 {
    shown["counters"][name].as_u64().unwrap_or(0)
}

/// Polls a VM's status until `holds` returns true for it. For a busy VM, the daemon shows the last known state.
fn shown_with(machine: &XenMachine, name: &str, what: &str, holds: impl Fn(&Value) -> bool) -> Result<Value> {
    wait::until(what, SHOW_LIMIT, || machine.show(name).map(|shown| holds(&shown).then_some(shown)))
}

/// Runs the same workload in several domains concurrently.
fn at_once(domains: &[&Domain<'_>], args: &str) -> Result<Vec<Smoke>> {
    let command = format!("run /bin/gpu-workloads {args}");
    let started = domains.iter().map(|domain| domain.start(&command)).collect::<Result<Vec<_>>>()?;
    domains.iter().zip(started).map(|(domain, pending)| domain.finish(pending, args)).collect()
}

/// Boots domain 0 with a stock and a paravirtual guest that share a card. The stock guest is destroyed in the middle of
/// its copies, recreated, and then attacks without a driver.
#[test]
fn domains_share_a_card_and_one_returns_hostile() -> Result<()> {
    let pv = DomainSpec { paravirtual: true, ..DomainSpec::new("pv", "6.1") };
    let specs = [DomainSpec::new("a", "6.12"), pv];
    let machine = XenMachine::boot("xen", &specs, &config(&["a", "pv"], "pv"), DOM0_MIB)?;
    let daemon = machine.start_daemon()?;
    let (a, pv) = (machine.create("a")?, machine.create("pv")?);
    let release = a.wait_ready()?;
    pv.wait_ready()?;
    std::thread::scope(|scope| {
        let other = scope.spawn(|| pv.load_driver());
        a.load_driver()?;
        other.join().expect("no panic")
    })?;
    let loaded = machine.show("a")?;
    assert_eq!(loaded["driver"]["interrupts"], "msi", "{loaded}");
    let mut verified = at_once(&[&a, &pv], "stress --seconds 3 --max 65536")?;
    verified.push(a.smoke("workload --name mmul --scale 1 --rounds 1")?);

    let copies = a.start("run /bin/gpu-workloads stress --seconds 120")?;
    std::thread::sleep(Duration::from_secs(2));
    assert!(!copies.ended());
    a.destroy()?;
    machine.wait_state("a", "waiting")?;

    let a = machine.create("a")?;
    a.wait_ready()?;
    verified.push(pv.smoke(&format!("fill --pattern {PATTERN:016x}"))?);
    let started = pv.start("run /bin/gpu-workloads stress --seconds 5 --max 65536")?;
    let (attack, denied) = attacked(&machine, &a)?;
    verified.push(pv.finish(started, "copies beside a hostile domain")?);
    let shown = shown_with(&machine, "pv", "batches of pv", |shown| counter(shown, "pv_batches") > 0)?;
    assert_eq!(shown["denied_total"], 0, "{shown}");

    let log = machine.stop_daemon(daemon)?;
    assert!(!log.contains("panicked"), "{log}");
    println!(
        "REPORT {}; domains Linux {release}: {} bytes verified, {} messages to load nouveau, {denied} denials of an attack, {}",
        machine.platform(),
        verified.iter().map(|smoke| smoke.bytes).sum::<u64>(),
        guest::messages_in(&loaded["transport"]),
        attack.line,
    );
    Ok(())
}

/// Attacks from a domain without a loaded driver. Returns the attack's result, and the number of denied accesses.
fn attacked(machine: &XenMachine, domain: &Domain<'_>) -> Result<(Smoke, Value)> {
    let hostile = format!("bar hostile --fresh --mapped {}", attack_size());
    let attack = domain.smoke(&format!("{hostile} --pattern {PATTERN:016x}"))?;
    assert!(attack.line.contains("hits=0"), "{}", attack.line);
    let shown = shown_with(machine, "a", "denials of a", |shown| shown["denied_total"].as_u64() > Some(0))?;
    Ok((attack, shown["denied_total"].clone()))
}

mod full {
    use super::*;

    #[test]
    fn domains_share_a_card() -> Result<()> {
        let pv = DomainSpec { paravirtual: true, ..DomainSpec::new("pv", "6.1") };
        let specs = [DomainSpec::new("a", "6.1"), DomainSpec::new("b", "6.12"), pv];
        let machine = XenMachine::boot("xen", &specs, &config(&["a", "b", "pv"], "pv"), DOM0_MIB)?;
        let daemon = machine.start_daemon()?;

        // Check that the domain's file contains the lines recommended by the daemon.
        let told = machine.ctl("vm launch-args a --memory 384M")?;
        for line in told.lines().filter(|line| !line.starts_with('#')) {
            assert!(specs[0].config(0).contains(line), "{line} is not in the file of domain a");
        }
        assert!(machine.run("mediatorctl --socket /run/admin.sock vm launch-args a --vmm qemu")?.code != 0);

        // Run three domains together: two with stock drivers, and one paravirtual. Booting takes most of the time.
        let (mut a, b, pv) = (machine.create("a")?, machine.create("b")?, machine.create("pv")?);
        let (release_a, release_b) = (a.wait_ready()?, b.wait_ready()?);
        pv.wait_ready()?;
        std::thread::scope(|scope| {
            let others = [scope.spawn(|| b.load_driver()), scope.spawn(|| pv.load_driver())];
            a.load_driver()?;
            others.into_iter().try_for_each(|other| other.join().expect("no panic"))
        })?;
        let loaded = machine.show("a")?;
        assert_eq!(loaded["driver"]["interrupts"], "msi", "{loaded}");

        // The domain has state that cannot be saved, so `xl save` must fail without affecting the domain.
        let saved = machine.run("xl save a /run/a.saved 2>&1")?;
        assert!(saved.code != 0 && saved.text().contains("Suspend event channel"), "{}", saved.text());

        // All domains copy concurrently, two compute, and all fill their VRAM, which together exceeds the card's VRAM.
        let copied = at_once(&[&a, &b, &pv], "stress --seconds 5 --max 65536")?;
        let computed = at_once(&[&a, &b], "workload --name mmul --scale 1 --rounds 1")?;
        let filled = at_once(&[&a, &b, &pv], &format!("fill --pattern {PATTERN:016x}"))?;
        let shown = shown_with(&machine, "a", "doorbells of a", |shown| counter(shown, "doorbells") > 0)?;
        let shown_pv = shown_with(&machine, "pv", "batches of pv", |shown| counter(shown, "pv_batches") > 0)?;
        let memory = machine.ctl("memory show")?;
        println!("{memory}");

        // Destroy one domain in the middle of its copies. Its VM waits for the next domain.
        let copies = b.start("run /bin/gpu-workloads stress --seconds 120")?;
        std::thread::sleep(Duration::from_secs(2));
        assert!(!copies.ended());
        b.destroy()?;
        machine.wait_state("b", "waiting")?;

        // Reboot one domain.
        a.reboot()?;
        a.wait_ready()?;

        let log = machine.stop_daemon(daemon)?;
        assert!(!log.contains("panicked"), "{log}");
        let bytes: u64 = [copied, computed, filled].concat().iter().map(|smoke| smoke.bytes).sum();
        println!(
            "REPORT {}; domains Linux {release_a} and {release_b}: {bytes} bytes verified, {} messages to load nouveau, {} doorbells, {} \
             paravirtual batches",
            machine.platform(),
            guest::messages_in(&loaded["transport"]),
            counter(&shown, "doorbells"),
            counter(&shown_pv, "pv_batches"),
        );
        Ok(())
    }

    #[test]
    fn hostile_domain_does_not_harm_others() -> Result<()> {
        let pv = DomainSpec { paravirtual: true, ..DomainSpec::new("pv", "6.1") };
        let specs = [DomainSpec::new("a", "6.1"), pv];
        let machine = XenMachine::boot("xen-hostile", &specs, &config(&["a", "pv"], "pv"), DOM0_MIB)?;
        let daemon = machine.start_daemon()?;
        let (a, pv) = (machine.create("a")?, machine.create("pv")?);
        let release = a.wait_ready()?;
        pv.wait_ready()?;
        pv.load_driver()?;
        // Fill the domain's memory with data that the other VM must not find.
        let filled = pv.smoke(&format!("fill --pattern {PATTERN:016x}"))?;

        // Attack the copying VM from a domain without a driver.
        let started = pv.start("run /bin/gpu-workloads stress --seconds 8 --max 65536")?;
        let (attack, denied) = attacked(&machine, &a)?;
        let beside = pv.finish(started, "stress beside a hostile domain")?;
        let shown = shown_with(&machine, "pv", "batches of pv", |shown| counter(shown, "pv_batches") > 0)?;
        assert_eq!(shown["denied_total"], 0, "{shown}");
        let again = pv.smoke("copy --engine m2mf --from gart --to vram --size 65536")?;

        let log = machine.stop_daemon(daemon)?;
        assert!(!log.contains("panicked"), "{log}");
        println!(
            "REPORT {}; domains Linux {release}: {} bytes verified beside an attack with {denied} denials, {}",
            machine.platform(),
            [filled, beside, again].iter().map(|smoke| smoke.bytes).sum::<u64>(),
            attack.line,
        );
        Ok(())
    }
}
