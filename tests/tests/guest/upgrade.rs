//! Upgrades the daemon while guests compute. Some successors fail to start.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};

use anyhow::{Context, Result, ensure};
use rig::RemoteGuest;
use rig::driver::{CE0, Channel, Driver, M2MF, PAGE, ce_copy, m2mf_copy, object};
use tests::guest::{self, TRAPPED, card_toml, vm_toml};
use tests::wait::Scratch;
use tests::{Daemon, Vm, VmConfig, scale};

use super::paravirt;
use super::stories::complaints;

/// Returns the number of rollbacks while guests compute. An upgrade follows each rollback.
fn rounds() -> u64 {
    scale::pick(4, 20)
}

/// Environment variable with the path of an earlier version of the daemon, which alternates with the current version
/// (see CONTRIBUTING.md). If it is not set, the current version is its own successor.
const BEFORE: &str = "GPU_MEDIATOR_BEFORE";
/// GPU virtual address of the source buffer.
const FROM: u64 = 0x100_0000;
const TO: u64 = 0x200_0000;

/// A guest without a VMM, with a channel for copies on request.
pub(super) struct Copies {
    driver: Driver<RemoteGuest>,
    channel: Channel,
    pages: u64,
}

impl Copies {
    pub(super) fn begin(daemon: &Daemon, name: &str) -> Result<Self> {
        let mut driver = Driver::new(RemoteGuest::connect(&daemon.vm_socket(name), 32 << 20)?);
        let channel = driver.channel(1);
        Ok(Self { driver, channel, pages: 0 })
    }

    /// Writes a page of memory, copies it, and verifies the copy.
    pub(super) fn copy(&mut self) -> Result<()> {
        let Self { driver, channel, pages } = self;
        *pages += 1;
        let (from, to, seed) = (FROM + *pages * PAGE, TO + *pages * PAGE, *pages as u32);
        driver.buffer(channel, from, 1, seed);
        let place = driver.buffer(channel, to, 1, 0xdead);
        driver.submit(channel, &[object(M2MF), m2mf_copy(from, to, PAGE as u32)].concat());
        driver.wait(channel);
        ensure!(driver.vram_holds(place, 1, seed) && driver.faults.is_empty(), "copy {pages}: {:?}", driver.faults);
        Ok(())
    }

    /// Starts a copy on a copy engine without waiting for it.
    pub(super) fn ring_copy_engine(&mut self) -> Result<()> {
        let Self { driver, channel, .. } = self;
        driver.buffer(channel, FROM, 1, 1);
        driver.buffer(channel, TO, 1, 2);
        driver.submit(channel, &[object(CE0), ce_copy(FROM, TO, 1)].concat());
        Ok(())
    }
}

/// Replaces a program that may be running. A running process keeps its old file.
fn put(path: &Path, text: &[u8]) -> Result<()> {
    let new = path.with_extension("new");
    fs::write(&new, text)?;
    fs::set_permissions(&new, fs::Permissions::from_mode(0o755))?;
    fs::rename(&new, path).with_context(|| format!("cannot write {}", path.display()))
}

#[test]
fn next_daemon_that_does_not_come_up_changes_nothing() -> Result<()> {
    let scratch = Scratch::new("upgrade-refused")?;
    let program = scratch.path().join("mediatord");
    let other = "\n[[card]]\nname = \"card1\"\nkind = \"simgpu\"\nvram_mib = 96\n";
    let vms = vm_toml("a", 32) + &vm_toml("b", 32) + &vm_toml("c", 32).replace("card0", "card1");
    let mut daemon = Daemon::start_copy("refused", &program, |paths| card_toml(paths, 128) + other + &vms)?;
    let mut copies = [Copies::begin(&daemon, "a")?, Copies::begin(&daemon, "b")?, Copies::begin(&daemon, "c")?];
    let good = fs::read(&program)?;
    let pid = daemon.pid();
    let scripts: [(&str, &[u8]); 3] = [
        ("ends at once", b"#!/bin/sh\nexit 3\n"),
        ("says something else", b"#!/bin/sh\necho hello >&0\nsleep 1\n"),
        ("is not a program", b"\x7fELF"),
    ];
    let refused = |daemon: &mut Daemon, copies: &mut [Copies], what: &str, said: &str| -> Result<()> {
        let ended = daemon.ctl(&["daemon", "upgrade"])?;
        assert_eq!(ended.code, Some(4), "{what}: {}{}", ended.stdout, ended.stderr);
        assert!(ended.stderr.contains("and continues") && ended.stderr.contains(said), "{what}: {}", ended.stderr);
        assert!(daemon.alive() && daemon.pid() == pid, "{what}");
        copies.iter_mut().try_for_each(|copies| copies.copy().context(what.to_owned()))
    };
    for (what, text) in scripts {
        put(&program, text)?;
        refused(&mut daemon, &mut copies, what, "mediatord")?;
    }
    put(&program, &fs::read(faulty_receiver()?)?)?;
    for (step, said) in [
        ("reads less", "card"),
        ("exits after its introduction", "the other process exited"),
        ("exits after receiving everything", "the other process exited"),
        ("refuses", "it refuses, as the test requested"),
        ("is silent", "before it was ready"),
    ] {
        fs::write(program.with_extension("step"), step)?;
        refused(&mut daemon, &mut copies, step, said)?;
    }
    put(&program, &good)?;
    let config = fs::read_to_string(daemon.config())?;
    for (what, text, said) in [
        ("a file that is none", "nonsense".to_owned(), "expected"),
        ("a VM less", config.replace(&vm_toml("b", 32), ""), "VM `b`: the configuration no longer has it"),
        ("another size", config.replace("vram_mib = 128", "vram_mib = 256"), "card"),
        (
            "more host memory",
            config.replace("vram_mib = 128\n", "vram_mib = 128\nmemory = { host_mib = 64 }\n"),
            "host memory, which can only be increased by a restart",
        ),
        ("another socket", config.replace("admin.sock", "other.sock"), "an upgrade keeps the paths of sockets"),
    ] {
        assert_ne!(text, config, "{what}");
        fs::write(daemon.config(), text)?;
        refused(&mut daemon, &mut copies, what, said)?;
    }
    fs::write(daemon.config(), config)?;
    // With the original program and configuration, several upgrades in a row must succeed.
    for upgrades in 1..=3 {
        let info = daemon.upgrade()?;
        assert_eq!(info["upgrades"], upgrades, "{info}");
        copies.iter_mut().try_for_each(|copies| copies.copy().with_context(|| daemon.log_tail()))?;
    }
    // Check that VMs can be removed, and that the last daemon exits as the first one would have.
    daemon.ctl(&["vm", "remove", "b"])?.success()?;
    assert!(!daemon.vm_socket("b").exists() && daemon.vm_socket("a").exists());
    let [a, _, mut c] = copies;
    drop(a);
    c.copy()?;
    tests::wait::until("VM a to be without a VMM", guest::SMOKE_LIMIT, || {
        Ok((guest::show(&daemon, "a")?["state"] == "waiting").then_some(()))
    })?;
    assert!(Copies::begin(&daemon, "a")?.copy().is_ok(), "another VMM");
    ensure!(daemon.stop()?.success(), "{}", daemon.log_tail());
    assert!(!daemon.vm_socket("a").exists() && !daemon.paths().admin_socket.exists());
    Ok(())
}

#[test]
fn next_daemon_that_dies_at_takeover_loses_vm_devices() -> Result<()> {
    let scratch = Scratch::new("upgrade-lost")?;
    let program = scratch.path().join("mediatord");
    let mut daemon = Daemon::start_copy("lost", &program, |paths| card_toml(paths, 128) + &vm_toml("a", 32))?;
    Copies::begin(&daemon, "a")?.copy()?;
    let good = fs::read(&program)?;
    put(&program, &fs::read(faulty_receiver()?)?)?;
    fs::write(program.with_extension("step"), "exits when it is ready")?;
    // The admin socket no longer responds, because the previous daemon has released all resources.
    let ended = daemon.ctl(&["daemon", "upgrade"])?;
    assert_ne!(ended.code, Some(0), "{}", ended.stdout);
    tests::wait::until("the previous daemon to exit", guest::SMOKE_LIMIT, || Ok((!daemon.alive()).then_some(())))?;
    // The files left behind by the daemon must not prevent a new daemon from starting.
    put(&program, &good)?;
    daemon.kill_and_restart()?;
    Copies::begin(&daemon, "a")?.copy()
}

/// Returns the path of the `rig` crate's receiver, which fails at a given step.
fn faulty_receiver() -> Result<PathBuf> {
    let own = std::env::current_exe()?;
    let folder = own.ancestors().nth(2).context("no folder of programs")?;
    Ok(folder.join("examples").join("faulty_receiver"))
}

/// Copies data and verifies the copies until `stop` is set. Returns the number of verified bytes.
pub(super) fn compute_until(vm: &Vm, stop: &AtomicBool) -> Result<u64> {
    let mut bytes = 0;
    while !stop.load(Ordering::Acquire) {
        bytes += guest::smoke(vm, "stress --seconds 3 --max 262144")?.bytes;
    }
    Ok(bytes)
}

/// Boots a guest and loads its stock driver.
fn stock(daemon: &Daemon, name: &str, kernel: &str) -> Result<Vm> {
    let vm = Vm::launch(&VmConfig::new(name, tests::images()?, kernel)?.with_gpu(daemon.vm_socket(name)))?;
    vm.wait_ready()?;
    guest::load_driver(&vm)?;
    Ok(vm)
}

/// Upgrades the daemon `turns` times while all `vms` copy data and verify the copies. `exchange` prepares each upgrade,
/// which occurs in the middle of the first VM's work. Returns the pauses in ms, and the number of bytes verified by
/// each VM.
fn upgrade_under(
    daemon: &mut Daemon,
    vms: &[Vm],
    turns: u64,
    mut exchange: impl FnMut(&mut Daemon, u64) -> Result<()>,
) -> Result<(Vec<u64>, Vec<u64>)> {
    let stop = AtomicBool::new(false);
    let first = vms[0].name();
    let (pauses, bytes) = std::thread::scope(|scope| -> Result<_> {
        let runs: Vec<_> = vms.iter().map(|vm| scope.spawn(|| compute_until(vm, &stop))).collect();
        let mut pauses = Vec::new();
        let mut upgraded = Ok(());
        for turn in 0..turns {
            let rung = guest::counter(daemon, first, "doorbells");
            upgraded = exchange(daemon, turn).and_then(|()| daemon.upgrade()).and_then(|info| {
                pauses.push(info["upgrade_pause_ms"].as_u64().context("no pause")?);
                // Wait until the guests have resumed, so that the next upgrade occurs in the middle of their work.
                let rung = rung?;
                tests::wait::until(&format!("VM {first} to resume"), guest::SMOKE_LIMIT, || {
                    Ok((guest::counter(daemon, first, "doorbells")? > rung + 4).then_some(()))
                })
            });
            if upgraded.is_err() {
                break;
            }
        }
        stop.store(true, Ordering::Release);
        let bytes = runs.into_iter().map(|run| run.join().map_err(|_| anyhow::anyhow!("a thread panicked"))?);
        let bytes = bytes.collect::<Result<Vec<u64>>>();
        upgraded?;
        Ok((pauses, bytes.with_context(|| daemon.log_tail())?))
    })?;
    assert!(bytes.iter().all(|bytes| *bytes > 0), "{bytes:?}");
    for vm in vms {
        vm.ensure_healthy()?;
        assert_eq!(complaints(&vm.kernel_log()?), Vec::<&str>::new(), "VM {}", vm.name());
        let shown = guest::show(daemon, vm.name())?;
        assert_eq!((&shown["counters"]["faults"], &shown["counters"]["hangs"]), (&0.into(), &0.into()), "{shown}");
        let smoke = guest::smoke(vm, "all --quick")?;
        assert!(smoke.ok, "{}", smoke.line);
    }
    Ok((pauses, bytes))
}

#[test]
fn guests_compute_and_verify_while_their_daemon_is_upgraded() -> Result<()> {
    let vms = [vm_toml("old", 96), vm_toml("new", 96), paravirt::offered("knows", 96, "")];
    let vms: String = vms.into_iter().map(|vm| vm + TRAPPED).collect();
    let memory = "overcommit = true\nmemory = { host_mib = 320, chaos_every = 50, chaos_seed = 7 }\n";
    let scratch = Scratch::new("upgrades")?;
    let program = scratch.path().join("mediatord");
    let mut daemon = Daemon::start_copy("upgrade", &program, |paths| card_toml(paths, 256) + memory + &vms)?;
    let before =
        std::env::var_os(BEFORE).map(|before| Ok::<_, anyhow::Error>((fs::read(before)?, fs::read(&program)?)));
    let programs = before.transpose().context(BEFORE)?;
    let vms = [stock(&daemon, "old", "6.1")?, stock(&daemon, "new", "6.12")?, paravirt::boot(&daemon, "knows", "6.1")?];
    let (pauses, bytes) = upgrade_under(&mut daemon, &vms, 2 * rounds(), |_, turn| {
        let back = turn % 2 == 0;
        match &programs {
            Some((before, now)) => put(&program, if back { before } else { now }),
            None => Ok(()),
        }
    })?;
    let whose = if programs.is_some() { "another program" } else { "the same program" };
    println!(
        "REPORT pauses of {rounds} rollbacks to {whose} and {rounds} upgrades, in turns, under three guests: {pauses:?} ms; bytes \
         verified: {bytes:?}",
        rounds = rounds()
    );
    Ok(())
}

#[test]
fn guest_with_mapped_apertures_computes_during_upgrades() -> Result<()> {
    let vm = vm_toml("maps", 96);
    let scratch = Scratch::new("upgrades-mapped")?;
    let program = scratch.path().join("mediatord");
    let mut daemon = Daemon::start_copy("mapped", &program, |paths| card_toml(paths, 256) + &vm)?;
    let vms = [stock(&daemon, "maps", "6.12")?];
    let (pauses, bytes) = upgrade_under(&mut daemon, &vms, rounds(), |_, _| Ok(()))?;
    println!(
        "REPORT pauses of {} upgrades under a guest with mapped apertures: {pauses:?} ms; bytes verified: {bytes:?}",
        rounds()
    );
    Ok(())
}
