//! Moves guests between cards while they compute, drains a card while a VM is added, and makes a card fail.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use serde_json::Value;
use tests::guest::{self, TRAPPED, card_toml, vm_toml};
use tests::{Daemon, Paths, Vm, VmConfig, scale};

use super::paravirt;
use super::stories::complaints;
use super::upgrade::{Copies, compute_until};

/// Default number of moves of computing guests.
const MOVES: usize = 24;
/// Number of moves at full scale.
const FULL_MOVES: usize = 100;
/// Time limit for taking a lost card out of service.
// TIMEOUT: the daemon polls the card ten times a second.
const DEAD_LIMIT: Duration = Duration::from_secs(30);
/// Names of the daemon's cards.
const CARDS: [&str; 4] = ["card0", "card1", "card2", "card3"];

/// Returns the configuration tables of four cards with host memory. The third card has memory for only one working
/// guest.
fn cards_toml(paths: &Paths) -> String {
    let memory = "memory = { host_mib = 320, chaos_every = 50, chaos_seed = 7 }\n";
    let more = |name: &str, vram_mib: u32| {
        format!("\n[[card]]\nname = {name:?}\nkind = \"simgpu\"\nvram_mib = {vram_mib}\novercommit = true\n{memory}")
    };
    let first = card_toml(paths, 256) + "overcommit = true\n" + memory;
    first + &more("card1", 256) + &more("card2", 48) + &more("card3", 256)
}

fn stock(daemon: &Daemon, name: &str, kernel: &str) -> Result<Vm> {
    let vm = Vm::launch(&VmConfig::new(name, tests::images()?, kernel)?.with_gpu(daemon.vm_socket(name)))?;
    vm.wait_ready()?;
    guest::load_driver(&vm)?;
    Ok(vm)
}

/// Moves a VM, and waits until its guest has resumed on the other card.
fn moved(daemon: &Daemon, name: &str, to: &str) -> Result<Value> {
    let moved = daemon.ctl_json(&["vm", "move", name, "--card", to])?;
    ensure!(moved["to"] == to, "{moved}");
    let rung = guest::counter(daemon, name, "doorbells")?;
    tests::wait::until("the VM to resume", guest::SMOKE_LIMIT, || {
        Ok((guest::counter(daemon, name, "doorbells")? > rung + 2).then_some(()))
    })?;
    Ok(moved)
}

#[test]
fn guests_compute_and_verify_while_they_go_from_card_to_card() -> Result<()> {
    // Two of the VMMs map memory for their apertures, and keep it mapped when the VM moves.
    let vms = vm_toml("old", 96) + TRAPPED + &vm_toml("new", 96) + &paravirt::offered("knows", 96, "");
    let daemon = Daemon::start("moving", |paths| cards_toml(paths) + &vms)?;
    let vms = [stock(&daemon, "old", "6.1")?, stock(&daemon, "new", "6.12")?, paravirt::boot(&daemon, "knows", "6.1")?];
    let moves = scale::pick(MOVES, FULL_MOVES);
    let stop = AtomicBool::new(false);
    let (pauses, bytes) = std::thread::scope(|scope| -> Result<_> {
        let runs: Vec<_> = vms.iter().map(|vm| scope.spawn(|| compute_until(vm, &stop))).collect();
        let mut pauses = Vec::new();
        let mut at = [0; 3];
        let mut done = Ok(());
        for step in 0..moves {
            let which = step % vms.len();
            // Move the VMs between two cards in the first half of the test, and between all cards in the second half.
            let among = if step < moves / 2 { 2 } else { CARDS.len() };
            at[which] = (at[which] + 1) % among;
            done = moved(&daemon, vms[which].name(), CARDS[at[which]]).and_then(|moved| {
                pauses.push(moved["pause_ms"].as_u64().context("no pause")?);
                Ok(())
            });
            if done.is_err() {
                break;
            }
        }
        stop.store(true, Ordering::Release);
        let bytes = runs.into_iter().map(|run| run.join().map_err(|_| anyhow::anyhow!("a thread panicked"))?);
        let bytes = bytes.collect::<Result<Vec<u64>>>();
        done.with_context(|| daemon.log_tail())?;
        Ok((pauses, bytes.with_context(|| daemon.log_tail())?))
    })?;
    let longest = pauses.iter().max();
    println!(
        "REPORT {} moves under three guests: longest pause {longest:?} ms, all {pauses:?}; bytes {bytes:?}",
        pauses.len()
    );
    assert!(bytes.iter().all(|bytes| *bytes > 0), "{bytes:?}");
    for vm in &vms {
        vm.ensure_healthy()?;
        assert_eq!(complaints(&vm.kernel_log()?), Vec::<&str>::new(), "VM {}", vm.name());
        let shown = guest::show(&daemon, vm.name())?;
        assert_eq!((&shown["counters"]["faults"], &shown["counters"]["hangs"]), (&0.into(), &0.into()), "{shown}");
        let smoke = guest::smoke(vm, "all --quick")?;
        assert!(smoke.ok, "{}", smoke.line);
    }
    let shown = guest::show(&daemon, "new")?;
    assert!(shown["counters"]["aperture_moves"].as_u64() > Some(0), "{shown}");
    Ok(())
}

#[test]
fn card_drains_while_vm_arrives_and_upgrade_keeps_moved_vms() -> Result<()> {
    let vms: String = ["a", "b", "c"].into_iter().map(|name| vm_toml(name, 32)).collect();
    let scratch = tests::wait::Scratch::new("drained")?;
    let program = scratch.path().join("mediatord");
    let more = "\n[[card]]\nname = \"card1\"\nkind = \"simgpu\"\nvram_mib = 256\n";
    let mut daemon = Daemon::start_copy("drained", &program, |paths| card_toml(paths, 256) + more + &vms)?;
    let mut copies =
        ["a", "b", "c"].map(|name| Copies::begin(&daemon, name)).into_iter().collect::<Result<Vec<_>>>()?;
    copies.iter_mut().try_for_each(Copies::copy)?;
    let (report, late) = std::thread::scope(|scope| -> Result<_> {
        let drains = scope.spawn(|| daemon.ctl_json(&["card", "drain", "card0"]));
        // Add a VM during the drain. It is placed either on another card, or on this card and then moved with the other
        // VMs.
        let late = daemon.ctl(&["vm", "add", "d", "--vram-mib", "32"])?;
        let report = drains.join().map_err(|_| anyhow::anyhow!("a thread panicked"))??;
        Ok((report, late))
    })?;
    late.success()?;
    ensure!(report["left"] == serde_json::json!([]), "{report}");
    for name in ["a", "b", "c", "d"] {
        ensure!(guest::show(&daemon, name)?["card"] == "card1", "VM {name}: {report}");
    }
    copies.iter_mut().try_for_each(|copies| copies.copy().with_context(|| daemon.log_tail()))?;
    // The upgraded daemon must still treat the card as drained, and resume the VMs.
    daemon.upgrade()?;
    copies.iter_mut().try_for_each(|copies| copies.copy().with_context(|| daemon.log_tail()))?;
    let refused = daemon.ctl(&["vm", "add", "e", "--vram-mib", "32", "--card", "card0"])?;
    ensure!(refused.code != Some(0) && refused.stderr.contains("undrain"), "{}", refused.stderr);
    daemon.ctl(&["card", "undrain", "card0"])?.success()?;
    daemon.ctl(&["vm", "add", "e", "--vram-mib", "32", "--card", "card0"])?.success()?;
    // Move the VMs back.
    for name in ["a", "b"] {
        daemon.ctl(&["vm", "move", name, "--card", "card0"])?.success()?;
    }
    copies.iter_mut().try_for_each(|copies| copies.copy().with_context(|| daemon.log_tail()))?;
    ensure!(daemon.stop()?.success(), "{}", daemon.log_tail());
    Ok(())
}

#[test]
fn vms_of_dead_card_move_to_another_card() -> Result<()> {
    let fault = "\n[[card.fault]]\nengine = \"copy0\"\nkind = \"vanish\"\nafter = 0\n";
    let more = "\n[[card]]\nname = \"card1\"\nkind = \"simgpu\"\nvram_mib = 128\n";
    let vms = vm_toml("dies", 32) + &vm_toml("beside", 32) + &vm_toml("else", 32).replace("card0", "card1");
    let daemon = Daemon::start("card-dies", |paths| card_toml(paths, 128) + fault + more + &vms)?;
    let mut elsewhere = Copies::begin(&daemon, "else")?;
    elsewhere.copy()?;
    let mut beside = Copies::begin(&daemon, "beside")?;
    beside.copy()?;
    let mut dies = Copies::begin(&daemon, "dies")?;
    dies.ring_copy_engine()?;
    tests::wait::until("the card to be out of service", DEAD_LIMIT, || {
        Ok((!daemon.ctl_json(&["card", "show", "card0"])?["error"].is_null()).then_some(()))
    })
    .with_context(|| format!("{}\n{:?}", daemon.log_tail(), daemon.ctl_json(&["card", "show", "card0"])))?;
    // VMs on other cards must not be affected.
    elsewhere.copy().with_context(|| daemon.log_tail())?;
    let shown = daemon.ctl_json(&["card", "show", "card0"])?;
    println!("REPORT a failed card: {}", shown["error"]);
    for name in ["dies", "beside"] {
        let moved = daemon.ctl_json(&["vm", "move", name, "--card", "card1"])?;
        ensure!(moved["from"] == "card0" && moved["to"] == "card1", "{moved}");
        Copies::begin(&daemon, name)?.copy().with_context(|| daemon.log_tail())?;
    }
    elsewhere.copy().with_context(|| daemon.log_tail())
}
