//! `light-vmm SOCKET MIB [WORKLOAD]`: a minimal VM and client of the mediator, for hosts on which QEMU would be too
//! slow.
//!
//! The program starts the vGPU, writes a page in each chunk of the VRAM (MIB MiB), copies each page with the GPU, and
//! verifies every byte of the copies. It then waits until the device disappears, and reports this. If a workload is
//! given, the program instead runs the workload's kernels repeatedly with the `gdev` library until it is terminated,
//! and verifies each result.

use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::thread;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use gdev::Target;
use rig::driver::{At, Driver, M2MF, PAGE, m2mf_copy, object, pattern};
use rig::{Machine, RemoteGuest};
use workloads::{Options, by_name};

const MIB: u64 = 1 << 20;
/// Default chunk size in bytes.
const CHUNK: u64 = 2 * MIB;
/// GPU virtual address of the chunks' pages.
const FROM: u64 = 0x100_0000;
/// GPU virtual address of the copies.
const TO: u64 = 0x200_0000;

fn main() -> ExitCode {
    match run() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("light-vmm: {error:#}");
            ExitCode::FAILURE
        }
    }
}

/// Runs a workload until the program is terminated.
fn compute(socket: &Path, name: &str) -> Result<()> {
    let mut gpu = gdev::open(&Target::Vgpu(socket.to_owned()))?;
    for seed in 1.. {
        let options = Options { seed, ..Options::default() };
        let workload = by_name(name, options).with_context(|| format!("no workload is named {name}"))?;
        let report = workloads::run(&*workload, &mut gpu)?;
        ensure!(report.verified > 0, "no result of {name} was verified");
        if seed == 1 {
            println!("RESULT ok=true workload={name} verified={}", report.verified);
        }
    }
    Ok(())
}

fn run() -> Result<()> {
    let mut arguments = std::env::args().skip(1);
    let socket: PathBuf = arguments.next().context("no socket is named")?.into();
    let mib: u64 = arguments.next().context("no MiB of VRAM are named")?.parse()?;
    println!("connecting");
    if let Some(name) = arguments.next() {
        return compute(&socket, &name);
    }
    let guest = RemoteGuest::connect(&socket, mib * MIB).with_context(|| socket.display().to_string())?;
    let mut driver = Driver::new(guest);
    ensure!(driver.guest.map_ram(0, MIB, true), "the device does not accept RAM");
    let mut channel = driver.channel(1);
    let copies = driver.room() / (CHUNK + PAGE);
    let to = driver.vram(copies);
    driver.map(channel.space, TO, At::Vram(to), copies);
    for copy in 0..copies {
        let at = driver.vram(CHUNK / PAGE);
        driver.map(channel.space, FROM + copy * PAGE, At::Vram(at), 1);
        driver.guest.vram_write(at, &pattern(copy as u32, 0));
    }
    for copy in 0..copies {
        let (from, to) = (FROM + copy * PAGE, TO + copy * PAGE);
        driver.submit(&mut channel, &[object(M2MF), m2mf_copy(from, to, PAGE as u32)].concat());
        driver.wait(&channel);
    }
    ensure!(driver.faults.is_empty(), "the GPU faults: {:x?}", driver.faults);
    let good = (0..copies).filter(|&copy| driver.vram_holds(to + copy * PAGE, 1, copy as u32)).count() as u64;
    println!("RESULT ok={} copies={copies} good={good}", good == copies && copies > 0);
    ensure!(good == copies, "{good} of {copies} copies are correct");
    while driver.guest.settle() {
        thread::sleep(Duration::from_millis(100));
    }
    println!("the device has gone");
    Ok(())
}
