//! `cargo xtask demo`: two stock guests share a card, copy concurrently, and verify every byte.
//!
//! Boots Debian's 6.1 and 6.12 kernels in parallel, each with a vGPU on the same software card, and loads stock nouveau
//! in both. Runs `gpu-workloads all` in both concurrently, and prints a table. The exit status is 0 only if all results
//! were verified.

use std::process::ExitCode;
use std::time::Instant;

use anyhow::{Context, Result};
use tests::guest::{self, Smoke};
use tests::{Daemon, Vm, VmConfig};

/// Name and kernel of each VM.
const GUESTS: [(&str, &str); 2] = [("alice", "6.1"), ("bob", "6.12")];

/// A row of the table.
struct Row {
    vm: &'static str,
    kernel: String,
    driver: String,
    smoke: Smoke,
    messages: u64,
}

fn main() -> ExitCode {
    if let Err(error) = tests::children::end_with_parent() {
        eprintln!("demo: it continues if its parent process is killed: {error}");
    }
    match run(std::env::args().any(|arg| arg == "--full")) {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            eprintln!("demo: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn run(full: bool) -> Result<bool> {
    let images = tests::images()?;
    eprintln!("demo: starting mediatord with one software card of 1024 MiB and two VMs of 384 MiB");
    let daemon = Daemon::start("demo", |paths| {
        let mut toml = guest::card_toml(paths, 1024);
        for (name, _) in GUESTS {
            toml.push_str(&guest::vm_toml(name, 384));
        }
        toml
    })?;
    let began = Instant::now();
    eprintln!("demo: booting {} guests", GUESTS.len());
    let mut vms = Vec::new();
    for (name, kernel) in GUESTS {
        let config = VmConfig::new(name, images, kernel)?.with_gpu(daemon.vm_socket(name));
        vms.push(Vm::launch(&config)?);
    }
    let rows: Vec<Result<Row>> = std::thread::scope(|scope| {
        let runs: Vec<_> = vms.iter().map(|vm| scope.spawn(|| drive(vm, &daemon, full))).collect();
        runs.into_iter().map(|run| run.join().unwrap_or_else(|_| Err(anyhow::anyhow!("a thread panicked")))).collect()
    });
    let mut good = true;
    println!(
        "{:8} {:24} {:22} {:>8} {:>15} {:>8} {:>10}",
        "VM", "kernel", "driver", "channels", "bytes verified", "seconds", "messages"
    );
    for ((name, _), row) in GUESTS.into_iter().zip(rows) {
        match row {
            Ok(Row { vm, kernel, driver, smoke, messages }) => {
                let Smoke { ok, bytes, channels, seconds, .. } = smoke;
                println!("{vm:8} {kernel:24} {driver:22} {channels:>8} {bytes:>15} {seconds:>8.1} {messages:>10}");
                good &= ok;
            }
            Err(error) => {
                println!("{name:8} failed: {error:#}");
                good = false;
            }
        }
    }
    println!("{} in {:.0} s", if good { "all verified" } else { "NOT all verified" }, began.elapsed().as_secs_f64());
    if !good {
        eprintln!("demo: end of the daemon's log:\n{}", daemon.log_tail());
    }
    Ok(good)
}

/// Loads one guest's driver and runs the workloads.
fn drive(vm: &Vm, daemon: &Daemon, full: bool) -> Result<Row> {
    let name = GUESTS.into_iter().map(|(name, _)| name).find(|name| *name == vm.name()).context("a VM of the demo")?;
    let kernel = vm.wait_ready()?;
    eprintln!("demo: {name} has booted {kernel}; loading nouveau");
    let driver = guest::load_driver(vm)?;
    eprintln!("demo: {name} has {driver}; copying");
    let smoke = guest::smoke(vm, if full { "all" } else { "all --quick" })?;
    eprintln!("demo: {name} is done");
    Ok(Row { vm: name, kernel, driver, smoke, messages: guest::messages(daemon, name)? })
}
