//! Kills the daemon while guests run, and restarts it as a service manager does. The VMMs remain connected, and the
//! guests reload their driver.

use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use tests::guest::{self, card_toml, vm_toml};
use tests::klog::Line;
use tests::{Daemon, Vm, VmConfig, scale};

use super::paravirt;

/// Default number of kills. Each kill takes a minute. Working and idle guests alternate.
const KILLS: u64 = 1;
/// Number of kills at full scale.
const FULL_KILLS: u64 = 2;
/// Environment variable that overrides the number of kills.
const KILLS_ARE: &str = "GPU_MEDIATOR_KILLS";
/// Maximum time that a guest program may keep running on a device that has lost its work.
// TIMEOUT: nouveau waits 15 s for each channel of an exiting program, and longer for its own channels.
const NOTICE_LIMIT: Duration = Duration::from_secs(240);
/// Signs of a bug in the kernel itself, as opposed to driver messages about its device.
const FAULTS: [&str; 6] = ["Oops", "BUG:", "Kernel panic", "general protection", "unable to handle", "KASAN"];

fn faults(log: &[Line]) -> Vec<&str> {
    log.iter().map(|line| line.text.as_str()).filter(|text| FAULTS.iter().any(|fault| text.contains(fault))).collect()
}

/// Unloads and reloads the guest's driver.
fn reload(vm: &Vm) -> Result<()> {
    let began = Instant::now();
    // An exited program keeps the device open until the driver has abandoned its work.
    tests::wait::until("nouveau to be unloaded", guest::LOAD_LIMIT, || {
        let unloaded = vm.run_within("unload", guest::LOAD_LIMIT)?;
        Ok((unloaded.code == 0).then_some(()))
    })
    .with_context(|| format!("VM {}: {:?}", vm.name(), vm.kernel_log()))?;
    let unloaded = began.elapsed();
    guest::load_driver(vm)?;
    println!("REPORT VM {}: unloaded after {unloaded:.1?}, loaded after {:.1?}", vm.name(), began.elapsed());
    Ok(())
}

/// Checks that the guest's device works, and that its VMM is still the same process.
fn works(vm: &Vm, qemu: u32) -> Result<()> {
    ensure!(vm.alive() && vm.pid() == qemu, "another QEMU");
    let smoke = guest::smoke(vm, "all --quick")?;
    ensure!(smoke.ok, "{}", smoke.line);
    Ok(())
}

/// Tests a guest whose VMM maps memory for the apertures. The next daemon's device must reuse this memory.
fn goes_on_after_kills(name: &str, kernel: &str) -> Result<()> {
    let mut daemon = Daemon::start_as_service(name, |paths| card_toml(paths, 128) + &vm_toml(name, 64))?;
    let vm = Vm::launch(&VmConfig::new(name, tests::images()?, kernel)?.with_gpu(daemon.vm_socket(name)))?;
    vm.wait_ready()?;
    let qemu = vm.pid();
    guest::load_driver(&vm)?;
    guest::smoke(&vm, "copy --engine m2mf --from gart --to vram --size 65536")?;
    let kills = std::env::var(KILLS_ARE)
        .map_or(Ok(scale::pick(KILLS, FULL_KILLS)), |kills| kills.parse())
        .context(KILLS_ARE)?;
    for kill in 1..=kills {
        let said = vm.kernel_log()?.len();
        let work = (kill % 2 == 1)
            .then(|| vm.start("run /bin/gpu-workloads stream --engine m2mf --size 65536 --duration 600"));
        let work = work.transpose()?;
        if work.is_some() {
            let rung = guest::counter(&daemon, name, "doorbells")?;
            tests::wait::until("the guest to start working", guest::SMOKE_LIMIT, || {
                Ok((guest::counter(&daemon, name, "doorbells")? > rung + 4).then_some(()))
            })?;
        }
        daemon.kill_and_restart()?;
        if let Some(work) = work {
            // Give the program a second to fail by itself. Otherwise, it never returns, so kill it.
            std::thread::sleep(Duration::from_secs(1));
            if !work.ended() {
                work.kill()?;
            }
            let ended = work.wait_within(NOTICE_LIMIT)?;
            println!("REPORT VM {name}: the program exited with code {}", ended.code);
        }
        assert_eq!(guest::show(&daemon, name)?["state"], "connected", "kill {kill}: {}", daemon.log_tail());
        // Before the VMM resumes, the daemon checks the memory that the VMM has mapped.
        tests::wait::until("the VMM to resume", NOTICE_LIMIT, || {
            Ok((guest::show(&daemon, name)?["transport"]["daemon_deaths_survived"] == kill).then_some(()))
        })?;
        reload(&vm).with_context(|| format!("kill {kill}: {}", daemon.log_tail()))?;
        let log = vm.kernel_log()?;
        for line in log.get(said..).unwrap_or_default().iter().filter(|line| line.complains()) {
            println!("REPORT VM {name} after kill {kill}: {}", line.text);
        }
        assert_eq!(faults(&log), Vec::<&str>::new(), "VM {name}, kill {kill}");
        let smoke = guest::smoke(&vm, "copy --engine m2mf --from gart --to vram --size 262144")?;
        ensure!(smoke.ok && smoke.bytes > 0, "{}", smoke.line);
    }
    works(&vm, qemu)?;
    // A guest that has been reset only needs to load its driver again.
    daemon.kill_and_restart()?;
    vm.reset()?;
    vm.wait_ready()?;
    guest::load_driver(&vm)?;
    works(&vm, qemu)
}

#[test]
fn paravirtual_guest_reloads_driver_after_daemon_is_killed() -> Result<()> {
    let name = "killedpv";
    let mut daemon = Daemon::start_as_service(name, |paths| card_toml(paths, 128) + &paravirt::offered(name, 64, ""))?;
    let vm = paravirt::boot(&daemon, name, "6.1")?;
    let qemu = vm.pid();
    guest::smoke(&vm, "copy --engine m2mf --from gart --to vram --size 65536")?;
    daemon.kill_and_restart()?;
    reload(&vm).with_context(|| daemon.log_tail())?;
    for line in vm.kernel_log()?.iter().filter(|line| line.complains()) {
        println!("REPORT VM {name}: {}", line.text);
    }
    assert_eq!(faults(&vm.kernel_log()?), Vec::<&str>::new(), "VM {name}");
    guest::await_counter(&daemon, name, "pv_batches", |batches| batches > 0)?;
    works(&vm, qemu)
}

#[test]
fn linux_6_12_reloads_driver_after_daemon_is_killed() -> Result<()> {
    goes_on_after_kills("killed612", "6.12")
}

mod full {
    use super::*;

    #[test]
    fn linux_6_1_reloads_driver_after_daemon_is_killed() -> Result<()> {
        goes_on_after_kills("killed61", "6.1")
    }
}
