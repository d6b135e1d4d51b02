//! Kernels that fault or never end. For some of them, the channel is killed. For the others, the error is only
//! reported, and the grid ends early.

use std::sync::Arc;

use anyhow::{Context, Result, ensure};
use workloads::{Gpu, Grid, Options, Params, Place};

use super::Facts;
use super::faulty::UNMAPPED_ADDR;
use crate::compute::{self, Guest};
use crate::rig::{Counts, Rig};
use gdev::Image;
use gdev::nouveau::Device;

/// Value that each kernel stores before its error.
const STARTED_MARK: u32 = 0x600d;
/// A grid of one thread.
const ONE: Grid = Grid { blocks: [1; 3], threads: [1; 3] };

/// A kernel in `faulty_kernels.sm20`.
pub struct Faulty {
    /// Command-line name of the kernel.
    pub what: &'static str,
    kernel: &'static str,
    /// Set if the channel is killed. On a warp error, the kernel driver only reports the error: the grid ends, and the
    /// channel continues.
    killed: bool,
}

/// All faulty kernels.
pub const KERNELS: [Faulty; 4] = [
    Faulty { what: "kernel-unmapped", kernel: "unmapped", killed: true },
    Faulty { what: "kernel-illegal", kernel: "illegal", killed: false },
    Faulty { what: "kernel-misaligned", kernel: "misaligned", killed: false },
    Faulty { what: "kernel-endless", kernel: "endless", killed: true },
];

/// Launches a kernel. Checks that it kills its channel only if expected, and that all other channels still compute.
pub fn run(rig: &Rig, faulty: &Faulty) -> Result<Facts> {
    let mut bystander = compute::context(rig.device())?;
    let mut victim = compute::context(rig.device())?;
    let number = victim.backend().number();
    println!("victim channel={number} bystander channel={}", bystander.backend().number());
    match launch(&mut victim, faulty.kernel)? {
        Ok(()) if faulty.killed => anyhow::bail!("channel {number} still accepts work"),
        Ok(()) => works(rig, &mut victim, "the channel itself")?,
        Err(error) if faulty.killed => println!("the kernel reports: {error:#}"),
        Err(error) => return Err(error),
    }
    works(rig, &mut bystander, "a channel from before")?;
    works(rig, &mut compute::context(rig.device())?, "a new channel")?;
    Ok(vec![
        ("what", faulty.what.to_owned()),
        ("victim", number.to_string()),
        ("killed", faulty.killed.to_string()),
        ("address", format!("{UNMAPPED_ADDR:#x}")),
    ])
}

/// Launches a kernel from `faulty_kernels.sm20`, waits until it ends, and returns the outcome.
fn launch(gpu: &mut Guest, kernel: &str) -> Result<Result<()>> {
    let program = sm20::assemble(include_str!("faulty_kernels.sm20"));
    let program = program.map_err(|errors| anyhow::anyhow!("faulty_kernels.sm20: {errors:?}"))?;
    let module = gpu.load(Image::Sm20(&program))?;
    let mark = gpu.allocate(Place::Ram, 4)?;
    gpu.upload(mark, 0, &[0; 4])?;
    let params = Params::new().buffer(mark).address(UNMAPPED_ADDR);
    // The kernel may detect the dead channel before the submission returns.
    let outcome = gpu.launch(module, kernel, ONE, &params, &[mark]).and_then(|_| gpu.finish());
    let found = gpu.backend_mut().peek(mark)?;
    ensure!(found == STARTED_MARK, "the kernel has not started: it left {found:#x}");
    Ok(outcome.map_err(Into::into))
}

/// Launches the endless kernel on a new channel, and returns once the driver has killed the channel.
pub fn never_ends(device: &Arc<Device>) -> Result<()> {
    let mut gpu = compute::context(device)?;
    match launch(&mut gpu, "endless")? {
        Ok(()) => anyhow::bail!("channel {} still accepts work", gpu.backend().number()),
        Err(_) => Ok(()),
    }
}

/// Fails unless the context executes a workload correctly.
fn works(rig: &Rig, gpu: &mut Guest, what: &str) -> Result<()> {
    let options = Options { seed: rig.random().next(), ..Options::default() };
    let workload = workloads::by_name("madd", options).context("a workload")?;
    let report = workloads::run(&*workload, gpu).context(format!("{what}, after a kernel failed"))?;
    rig.add(Counts { bytes: report.verified, copies: gpu.backend().done().copies, channels: 1 });
    Ok(())
}
