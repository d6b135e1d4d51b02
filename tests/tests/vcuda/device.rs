//! Tests the CUDA device with stock guest kernels, and with a worker that does not use CUDA.

use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use images::cpio::Archive;
use tests::children;
use tests::wait::{self, Scratch};
use tests::{Vm, VmConfig};

/// Time limit of a program in the guest.
const LIMIT: Duration = Duration::from_secs(120);
/// Time limit for the server to create its socket.
const START_LIMIT: Duration = Duration::from_secs(30);

struct Server(Child);

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Returns the path of a `vcuda` example, built next to the tests.
fn example(name: &str) -> Result<PathBuf> {
    let own = std::env::current_exe()?;
    let profile = own.parent().and_then(Path::parent).context("the test has no parent folder")?;
    Ok(profile.join("examples").join(name))
}

fn probe(vm: &Vm, mode: &str) -> Result<String> {
    let output = vm.run_within(&format!("run /bin/cuda-probe {mode}"), LIMIT)?;
    Ok(output.success().with_context(|| format!("cuda-probe {mode}"))?.text())
}

fn load(vm: &Vm) -> Result<()> {
    vm.wait_ready()?;
    vm.run_within("load", LIMIT)?.success().context("the modules")?;
    let log: Vec<_> = vm.kernel_log()?.into_iter().map(|line| line.text).collect();
    ensure!(log.iter().any(|line| line.contains("cap set 0: id 24, max-version 1")), "{}", log.join("\n"));
    Ok(())
}

/// Runs three programs on a kernel: one that performs all checks, one that is killed, and one that loses its worker.
/// Then resets the guest while a program runs.
fn programs_work_on(kernel: &str) -> Result<()> {
    let name = format!("cuda-{kernel}");
    let scratch = Scratch::new(&name)?;
    let socket = scratch.path().join("cuda.sock");
    let mut command = Command::new(example("serve")?);
    command.arg(&socket).arg(example("probe-worker")?).stdin(Stdio::null());
    command.stderr(File::create(scratch.path().join("serve.log"))?);
    let server = Server(children::spawn(&mut command).context("the server")?);
    wait::until("the socket", START_LIMIT, || Ok(socket.exists().then_some(())))?;
    let images = tests::images()?;
    let guest = images::ensure_cuda_guest(kernel, &images::Progress::stderr())?;
    let mut config = VmConfig::new(&name, images, kernel)?.with_gpu(&socket);
    config.kernel = guest.bootable(Archive::default(), &scratch.path().join("initrd"))?;
    let vm = Vm::launch(&config)?;
    load(&vm)?;

    let checked = probe(&vm, "check")?;
    ensure!(checked.ends_with("all is well"), "{checked}");

    let held = vm.start("run /bin/cuda-probe hold")?;
    held.wait_line("holding", LIMIT)?;
    held.kill()?;
    ensure!(held.wait_within(LIMIT)?.code != 0, "the program was killed while it waited");
    ensure!(probe(&vm, "lose")?.ends_with("lost"), "the worker's end is reported");
    ensure!(probe(&vm, "check")?.ends_with("all is well"), "others work after that");

    let held = vm.start("run /bin/cuda-probe hold")?;
    held.wait_line("holding", LIMIT)?;
    drop(held);
    vm.reset()?;
    load(&vm)?;
    ensure!(probe(&vm, "check")?.ends_with("all is well"), "the next boot finds a clean device");
    drop(server);
    Ok(())
}

#[test]
fn programs_share_memory_with_workers_on_6_12() -> Result<()> {
    programs_work_on("6.12")
}

#[test]
fn programs_share_memory_with_workers_on_6_1() -> Result<()> {
    programs_work_on("6.1")
}
