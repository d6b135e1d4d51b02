//! Tests the holes of the reference code. A guest with exclusive access to the BARs tries them while another guest
//! copies memory and verifies the copies.

use std::ops::RangeInclusive;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use anyhow::{Context, Result};
use serde_json::Value;
use tests::guest::{self, TRAPPED, card_toml, vm_toml};
use tests::{Daemon, Vm, klog, wait};

use super::{PATTERN, boot};

/// Numbers of the holes to try: the nineteen holes of the reference code, and unknown registers.
const HOLES: RangeInclusive<u32> = 1..=29;
/// Number of the hole that lists registers in context images and accesses the mediator's images.
const IMAGES: u32 = 30;
/// Numbers of the holes in the paravirtual interface.
const PARAVIRTUAL: RangeInclusive<u32> = 31..=38;
/// Numbers of the holes whose attempts only read memory or write virtual registers, so that the mediator denies no
/// access: residue, scheduler masks, the timer, interrupts, and configuration space.
const VIRTUAL: [u32; 5] = [17, 21, 23, 27, 29];
/// Time limit for all attempts at one hole.
const HOLE_LIMIT: Duration = Duration::from_secs(240);

/// Returns the sum of the daemon's violation counters for a VM.
fn counted(shown: &Value) -> u64 {
    let counters =
        ["faults", "channel_binds_refused", "doorbells_refused", "pv_refused"].map(|name| &shown["counters"][name]);
    counters.into_iter().chain([&shown["denied_total"]]).filter_map(Value::as_u64).sum()
}

/// Copies and verifies data in the victim until `stop` is set. Returns the number of verified bytes.
fn copy_until(victim: &Vm, stop: &AtomicBool) -> Result<u64> {
    let mut bytes = 0;
    while !stop.load(Ordering::Acquire) {
        bytes += guest::smoke(victim, "stress --seconds 3 --max 262144")?.bytes;
    }
    Ok(bytes)
}

/// Waits until the victim has submitted more work, which proves that it is active.
fn submits_more(daemon: &Daemon) -> Result<()> {
    let rung = guest::counter(daemon, "victim", "doorbells")?;
    wait::until("work submitted by the neighbour", Duration::from_secs(120), || {
        Ok((guest::counter(daemon, "victim", "doorbells")? > rung).then_some(()))
    })
}

/// Tries one hole. Returns the program's report, and a flag that is true if the mediator contained the attempts.
fn attempt(attacker: &Vm, hole: u32, more: &str) -> Result<(String, bool)> {
    let command = format!("run /bin/gpu-workloads bar hole {hole} --pattern {PATTERN} {more}");
    let output = attacker.run_within(&command, HOLE_LIMIT)?;
    let prefix = format!("hole={hole} ");
    let line = output.lines.iter().find(|line| line.starts_with(&prefix));
    let line = line.with_context(|| format!("hole {hole} was not tried:\n{}", output.text()))?;
    let held = line.contains(" outcome=denied ") || line.contains(" outcome=contained ");
    Ok((line.clone(), held && output.code == 0))
}

/// Tries the holes in one guest while another guest copies memory and verifies the copies.
fn beside_a_neighbour(name: &str, holes: &[RangeInclusive<u32>]) -> Result<()> {
    let offered = "paravirtual = { offered = true, group = \"a\" }\n";
    // Trap every access of the attacker.
    let vms = vm_toml("victim", 96) + &vm_toml("attacker", 96) + TRAPPED + offered;
    let mut daemon = Daemon::start(name, |paths| card_toml(paths, 256) + &vms)?;
    let victim = boot(&daemon, "victim", "6.12")?;
    let attacker = boot(&daemon, "attacker", "6.1")?;
    guest::load_driver(&victim)?;
    // Fill and free memory in a process of the victim. The memory still belongs to the victim's VM, so an attacker that
    // can read it is detected.
    guest::smoke(&victim, &format!("fill --pattern {PATTERN}"))?;
    let log_before = victim.kernel_log()?.len();

    let stop = AtomicBool::new(false);
    let (tried, copied, submits) = std::thread::scope(|scope| {
        let copies = scope.spawn(|| copy_until(&victim, &stop));
        let submits = submits_more(&daemon);
        let tried = holes.iter().cloned().flatten().map(|hole| {
            let before = counted(&guest::show(&daemon, "attacker")?);
            let (line, held) = attempt(&attacker, hole, "")?;
            let count = counted(&guest::show(&daemon, "attacker")?) - before;
            Ok((format!("{line} counted={count}"), held && (count > 0 || VIRTUAL.contains(&hole))))
        });
        let tried: Result<Vec<_>> = tried.collect();
        let submits = submits.and_then(|()| submits_more(&daemon));
        stop.store(true, Ordering::Release);
        (tried, copies.join(), submits)
    });
    let copied = copied.map_err(|_| anyhow::anyhow!("the neighbour's thread panicked"))?;
    assert!(copied? > 0, "the neighbour verified nothing");
    submits?;
    let tried = tried?;
    tried.iter().for_each(|(line, _)| println!("{line}"));
    let open: Vec<_> = tried.iter().filter(|(_, held)| !held).map(|(line, _)| line).collect();
    assert!(open.is_empty(), "open, or not counted: {open:#?}");
    let shown = guest::show(&daemon, "victim")?;
    assert_eq!(counted(&shown), 0, "{shown}");
    if holes.contains(&PARAVIRTUAL) {
        guest::await_counter(&daemon, "attacker", "pv_refused", |refused| refused > 0)?;
    }
    let log = victim.kernel_log()?;
    let complaints: Vec<_> = log[log_before..].iter().filter(|line| klog::Line::complains(line)).collect();
    assert!(complaints.is_empty(), "the neighbour's kernel: {complaints:?}");
    assert!(daemon.alive());
    // Check that the program detects a real hole, by letting it treat the end of the attacker's own share as the
    // victim's memory.
    for hole in [1, 10, 11] {
        let (line, held) = attempt(&attacker, hole, "--share 88m")?;
        assert!(!held, "{line}");
    }
    // Check that the attacker's own driver can still start and receives interrupts. A correct copy alone does not prove
    // that interrupts arrive, because the driver polls for the copy before it waits.
    guest::load_driver(&attacker)?;
    guest::smoke(&attacker, "copy --engine m2mf --from gart --to vram --size 65536")
        .inspect_err(|_| println!("{:?}", daemon.ctl(&["sched", "show"])))?;
    guest::await_counter(&daemon, "attacker", "interrupts", |interrupts| interrupts > 0)
}

#[test]
fn holes_are_closed_to_a_guest() -> Result<()> {
    beside_a_neighbour("holes", &[HOLES, PARAVIRTUAL])
}

#[test]
fn guest_context_images_do_not_harm_neighbour() -> Result<()> {
    beside_a_neighbour("contexts", &[IMAGES..=IMAGES])
}
