//! Tests CUDA programs in a guest, with the daemon, the workers and the fake driver on the host.

use std::os::unix::fs::{PermissionsExt as _, symlink};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use tests::files::Files;
use tests::wait::{self, Scratch};
use tests::{Daemon, Vm, VmConfig};

/// Time limit of a program in the guest.
const LIMIT: Duration = Duration::from_secs(120);
/// Name of the VM.
const VM: &str = "guest";

/// Returns the path of a file that cargo has built next to the tests.
fn built(name: &str) -> Result<PathBuf> {
    let own = std::env::current_exe()?;
    let path = own.parent().and_then(Path::parent).context("the test has no parent folder")?.join(name);
    ensure!(path.is_file(), "{} is not built", path.display());
    Ok(path)
}

/// Writes a script that starts the worker with the fake card in its environment.
fn worker(folder: &Path) -> Result<PathBuf> {
    let path = folder.join("worker");
    let (card, program) = (folder.join("card"), built("cuda-worker")?);
    // The fake card is a folder that workers write to. Its driver is next to the worker.
    let libraries = program.parent().context("the worker has no parent folder")?;
    let text = format!(
        "#!/bin/sh\nexport FAKE_CUDA_FOLDER={card} FAKE_CUDA_MIB=256\nexec {} --writable {card} --readable {} \"$@\"\n",
        program.display(),
        libraries.display(),
        card = card.display(),
    );
    std::fs::write(&path, text)?;
    std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o755))?;
    Ok(path)
}

/// A daemon with a VM on the fake card, and the guest.
struct Site {
    // Declared first, so that the VM is dropped before the daemon.
    vm: Vm,
    daemon: Daemon,
    scratch: Scratch,
}

impl Site {
    /// Boots a guest with the program and the library.
    fn start(name: &str) -> Result<Self> {
        let scratch = Scratch::new(name)?;
        let folder = scratch.path();
        let fake = built("libcuda_fake.so")?;
        let plain_folder = folder.join("plain");
        std::fs::create_dir(&plain_folder)?;
        symlink(&fake, plain_folder.join("libcuda.so.1"))?;
        let (worker, card) = (worker(folder)?, folder.join("card"));
        // The card's owner inherits these variables. Workers start with an empty environment.
        let variables = [("FAKE_CUDA_FOLDER", card.as_os_str()), ("FAKE_CUDA_MIB", "256".as_ref())];
        let daemon = Daemon::start_as_service_with(&format!("{name}-daemon"), &variables, |paths| {
            format!(
                "[daemon]\nadmin_socket = {:?}\nsocket_dir = {:?}\n\
                 [[card]]\nname = \"fake\"\nkind = \"cuda\"\nvram_mib = 256\nmemory.host_mib = 1280\n\
                 cuda = {{ driver = {fake:?}, worker = {worker:?}, chunk_mib = 2, host_ready_mib = 0 }}\n\
                 [[vm]]\nname = \"{VM}\"\ncard = \"fake\"\nvram_mib = 64\ncuda = {{ window_mib = 1024 }}\n",
                paths.admin_socket, paths.folder
            )
        })?;
        let mut files = Files::default();
        files.program(&built("cuda-program")?, "cuda/cuda-program")?;
        files.library(&built("libcuda_guest.so")?, "lib/x86_64-linux-gnu/libcuda.so.1")?;
        let images = tests::images()?;
        let guest = images::ensure_cuda_guest("6.12", &images::Progress::stderr())?;
        let mut config = VmConfig::new(name, images, "6.12")?.with_gpu(daemon.vm_socket(VM));
        config.kernel = guest.bootable(files.finish(), &folder.join("initrd"))?;
        let vm = Vm::launch(&config)?;
        vm.wait_ready()?;
        vm.run_within("load", LIMIT)?.success().context("the modules")?;
        Ok(Self { vm, daemon, scratch })
    }

    /// Runs the program on the host, without a VM, and returns its output.
    fn plain(&self, arguments: &[&str]) -> Result<String> {
        let folder = self.scratch.path();
        let output = Command::new(built("cuda-program")?)
            .args(arguments)
            .env("FAKE_CUDA_FOLDER", folder.join("card"))
            .env("FAKE_CUDA_MIB", "256")
            .env("LD_LIBRARY_PATH", folder.join("plain"))
            .output()
            .context("the program without a VM")?;
        ensure!(output.status.success(), "{output:?}");
        Ok(String::from_utf8_lossy(&output.stdout).trim().to_owned())
    }

    /// Returns the number at a JSON pointer in the VM's status.
    fn shown(&self, pointer: &str) -> Result<u64> {
        let status = self.daemon.ctl_json(&["vm", "show", VM])?;
        status.pointer(pointer).and_then(serde_json::Value::as_u64).with_context(|| format!("{pointer}: {status}"))
    }
}

#[test]
fn driver_api_program_computes_in_a_guest() -> Result<()> {
    let site = Site::start("cuda-programs")?;
    let look = site.vm.run_within("run /cuda/cuda-program look", LIMIT)?.success()?;
    ensure!(look.text().trim() == "free=64 total=64 device=64", "the tenant's memory: {}", look.text());
    // The program checks each word, and prints a checksum that depends only on its arguments.
    let arguments = ["train", "--mib", "8", "--rounds", "2"];
    let trained = site.vm.run_within(&format!("run /cuda/cuda-program {}", arguments.join(" ")), LIMIT)?.success()?;
    ensure!(trained.text().trim() == site.plain(&arguments)?, "{}", trained.text());
    let status = site.daemon.ctl_json(&["vm", "show", VM])?;
    ensure!(status["mode"] == "cuda" && status["counters"]["workers_started"] == 2, "{status}");
    // The exit of a program must not be reported as a violation.
    wait::until("the end of both workers", LIMIT, || Ok((site.shown("/counters/workers_lost")? == 2).then_some(())))?;
    ensure!(!site.daemon.log().contains("worker of a CUDA program exits"), "{}", site.daemon.log_tail());
    Ok(())
}

/// Tests that a program keeps computing while the daemon is upgraded, killed twice and upgraded again, and while the
/// program's share changes.
#[test]
fn program_computes_through_upgrades_and_kills_of_the_daemon() -> Result<()> {
    let mut site = Site::start("cuda-state")?;
    // The rounds take 30 s of card time, which does not change the result.
    let trained = site.vm.start("run /cuda/cuda-program train --mib 8 --rounds 100 --spin-us 300000")?;
    let has_program =
        |site: &Site| -> Result<bool> { Ok(site.daemon.ctl_json(&["vm", "show", VM])?["programs"][0].is_object()) };
    wait::until("the program", LIMIT, || Ok(has_program(&site)?.then_some(())))?;
    site.daemon.upgrade()?;
    ensure!(has_program(&site)? && !trained.ended(), "the program continues in the next daemon");
    for deaths in 1..=2 {
        std::thread::sleep(Duration::from_secs(1));
        site.daemon.kill_and_restart()?;
        wait::until("the program after a kill", LIMIT, || Ok(has_program(&site)?.then_some(())))?;
        ensure!(site.shown("/transport/daemon_deaths_survived")? == deaths, "{}", site.daemon.log_tail());
    }
    site.daemon.ctl(&["tenant", "set", VM, "--weight", "300", "--quota-mib", "32"])?.success()?;
    site.daemon.upgrade()?;
    ensure!(!trained.ended(), "the program was too short for this test");
    let output = trained.wait_within(LIMIT)?.success().with_context(|| site.daemon.log_tail())?;
    ensure!(output.text().trim() == site.plain(&["train", "--mib", "8", "--rounds", "100"])?, "{}", output.text());
    let tenant = site.daemon.ctl_json(&["tenant", "show", VM])?;
    ensure!(tenant["time"]["weight"] == 300 && tenant["memory"]["quota_mib"] == 32, "{tenant}");
    // No worker was restarted, so the first worker performed the whole computation.
    ensure!(site.shown("/counters/workers_started")? == 0, "{}", site.daemon.log_tail());
    Ok(())
}
