//! The device with stock kernels, and a worker without CUDA.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

use anyhow::{Context, Result};
use tests::children;
use tests::wait::{self, Scratch};
use tests::{Vm, VmConfig};

/// Time limit of a program in the guest.
const LIMIT: Duration = Duration::from_secs(120);

struct Machine {
    vm: Vm,
    _server: Server,
    scratch: Scratch,
}

struct Server(std::process::Child);

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Returns an example of the crate `vcuda`, which is built next to the tests.
fn example(name: &str) -> Result<PathBuf> {
    let own = std::env::current_exe()?;
    let profile = own.parent().and_then(Path::parent).context("the test is in no folder")?;
    Ok(profile.join("examples").join(name))
}

fn boot(kernel: &str) -> Result<Machine> {
    let name = format!("cuda-{kernel}");
    let scratch = Scratch::new(&name)?;
    let socket = scratch.path().join("cuda.sock");
    let log = std::fs::File::create(scratch.path().join("serve.log"))?;
    let mut command = Command::new(example("serve")?);
    command.arg(&socket).arg(example("probe-worker")?).stdin(Stdio::null()).stderr(log);
    let server = Server(children::spawn(&mut command).context("the server")?);
    wait::until("the socket", Duration::from_secs(30), || Ok(socket.exists().then_some(())))?;
    let images = tests::images()?;
    let guest = images::ensure_cuda_guest(kernel, &images::Progress::stderr())?;
    let mut config = VmConfig::new(&name, images, kernel)?.with_gpu(&socket);
    config.kernel = guest.bootable(images::cpio::Archive::default(), &scratch.path().join("initrd"))?;
    let vm = Vm::launch(&config)?;
    vm.wait_ready()?;
    vm.run_within("load", LIMIT)?.success().context("the modules")?;
    Ok(Machine { vm, _server: server, scratch })
}

fn probes(kernel: &str) -> Result<()> {
    let Machine { vm, scratch, _server } = boot(kernel)?;
    let checked = vm.run_within("run /bin/cuda-probe check", LIMIT)?;
    println!("{}\n{}", checked.text(), vm.run("dmesg")?.text());
    println!("{}", std::fs::read_to_string(scratch.path().join("serve.log"))?);
    checked.success()?;
    Ok(())
}

#[test]
fn program_on_6_12_shares_memory_with_its_worker() -> Result<()> {
    probes("6.12")
}

#[test]
fn program_on_6_1_shares_memory_with_its_worker() -> Result<()> {
    probes("6.1")
}
