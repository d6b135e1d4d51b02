//! CUDA programs in a guest, with the daemon, workers and the fake driver on the host.

use std::os::unix::fs::{PermissionsExt as _, symlink};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use tests::files::Files;
use tests::wait::Scratch;
use tests::{Daemon, Vm, VmConfig};

/// Time limit of a program in the guest.
const LIMIT: Duration = Duration::from_secs(120);
/// Name of the VM.
const VM: &str = "guest";

/// Returns a file that cargo has built next to the tests.
fn built(name: &str) -> Result<PathBuf> {
    let own = std::env::current_exe()?;
    let path = own.parent().and_then(Path::parent).context("the test is in no folder")?.join(name);
    ensure!(path.is_file(), "{} is not built", path.display());
    Ok(path)
}

/// Writes a program that starts the worker with the fake card in its environment.
fn worker(folder: &Path) -> Result<PathBuf> {
    let path = folder.join("worker");
    let (card, program) = (folder.join("card"), built("cuda-worker")?);
    // The fake card is a folder that workers change; its driver is next to the worker.
    let libraries = program.parent().context("the worker is in no folder")?;
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

#[test]
fn driver_api_program_computes_in_a_guest() -> Result<()> {
    let scratch = Scratch::new("cuda-programs")?;
    let folder = scratch.path();
    let fake = built("libcuda_fake.so")?;
    let plain_folder = folder.join("plain");
    std::fs::create_dir(&plain_folder)?;
    symlink(&fake, plain_folder.join("libcuda.so.1"))?;
    let (worker, card) = (worker(folder)?, folder.join("card"));
    // The owner of the card inherits them; workers start with an empty environment.
    let variables = [("FAKE_CUDA_FOLDER", card.as_os_str()), ("FAKE_CUDA_MIB", "256".as_ref())];
    let daemon = Daemon::start_with("cuda-programs", &variables, |paths| {
        format!(
            "[daemon]\nadmin_socket = {:?}\nsocket_dir = {:?}\n\
             [[card]]\nname = \"fake\"\nkind = \"cuda\"\nvram_mib = 256\nmemory.host_mib = 256\n\
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
    let mut config = VmConfig::new("cuda-programs", images, "6.12")?.with_gpu(daemon.vm_socket(VM));
    config.kernel = guest.bootable(files.finish(), &folder.join("initrd"))?;
    let vm = Vm::launch(&config)?;
    vm.wait_ready()?;
    vm.run_within("load", LIMIT)?.success().context("the modules")?;
    let look = vm.run_within("run /cuda/cuda-program look", LIMIT)?.success()?;
    ensure!(look.text().trim() == "free=64 total=64 device=64", "the tenant's memory: {}", look.text());
    // The program checks each word, and prints a checksum that depends on its arguments alone.
    let arguments = ["train", "--mib", "8", "--rounds", "2"];
    let trained = vm.run_within(&format!("run /cuda/cuda-program {}", arguments.join(" ")), LIMIT)?.success()?;
    let plain = Command::new(built("cuda-program")?)
        .args(arguments)
        .envs(variables)
        .env("LD_LIBRARY_PATH", &plain_folder)
        .output()
        .context("the program without a VM")?;
    ensure!(trained.text().trim() == String::from_utf8_lossy(&plain.stdout).trim(), "{}: {plain:?}", trained.text());
    let status = daemon.ctl_json(&["vm", "show", VM])?;
    ensure!(status["mode"] == "cuda" && status["counters"]["workers_started"] == 2, "{status}");
    Ok(())
}
