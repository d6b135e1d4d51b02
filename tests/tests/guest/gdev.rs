//! Tests C programs that use Gdev's interface in a guest. `cuda/rig` runs the same sources on the fake CUDA driver.

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, ensure};
use tests::files::Files;
use tests::guest::{self, card_toml};
use tests::wait::Scratch;
use tests::{Daemon, Vm, VmConfig};

use super::paravirt::offered;
use super::stories::complaints;

/// Name of the VM.
const VM: &str = "gdev";
/// Name of the VM with the vGPU that a host process uses.
const HOST: &str = "host";

/// Returns the path of a library that cargo has built next to the tests.
fn library(name: &str) -> Result<PathBuf> {
    let own = std::env::current_exe()?;
    let path = own.parent().and_then(Path::parent).context("the test has no parent folder")?.join(name);
    ensure!(path.is_file(), "{} is not built", path.display());
    Ok(path)
}

/// Compiles a crate's C example program, which needs the library at `library`.
fn compiled(folder: &Path, part: &str, name: &str, library: &Path) -> Result<PathBuf> {
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("../gdev").join(part);
    let program = folder.join(name);
    let beside = library.parent().context("the library has no parent folder")?;
    let mut compiler = Command::new("cc");
    compiler.args(["-std=c11", "-D_GNU_SOURCE", "-Wall", "-Wextra", "-Werror", "-O1", "-o"]).arg(&program);
    compiler.arg("-I").arg(source.join("include")).arg(source.join(format!("examples/c/{name}.c")));
    compiler.arg(library).arg(format!("-Wl,-rpath,{}", beside.display()));
    let output = compiler.output().context("no C compiler")?;
    ensure!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    Ok(program)
}

/// Copies the driver API library to a file named after its soname. Returns the file's path. The file's folder is next
/// to the built libraries, because guests mount their own file system at `/tmp`.
fn driver_library() -> Result<PathBuf> {
    let built = library("libgdev_cuda.so")?;
    let folder = built.with_file_name("gdev-driver-api");
    std::fs::create_dir_all(&folder)?;
    let path = folder.join("libcuda.so.1");
    std::fs::copy(built, &path)?;
    Ok(path)
}

#[test]
fn c_programs_compute_and_share_memory_in_a_guest() -> Result<()> {
    let scratch = Scratch::new("gdev")?;
    let daemon = Daemon::start("gdev", |paths| card_toml(paths, 320) + &offered(VM, 160, "") + &offered(HOST, 64, ""))?;
    let mut files = Files::default();
    for name in ["add", "wrong", "shared"] {
        files.program(&compiled(scratch.path(), "c", name, &library("libgdev.so")?)?, &format!("gdev/{name}"))?;
    }
    let driver = compiled(scratch.path(), "driver-api", "driver", &driver_library()?)?;
    files.program(&driver, "gdev/driver")?;
    files.write("gdev/add.sm20", 0o644, include_bytes!("../../../gdev/c/examples/c/add.sm20"));

    let mut config = VmConfig::new(VM, tests::images()?, "6.12")?.with_gpu(daemon.vm_socket(VM)).paravirtual()?;
    // The kernel accepts concatenated archives.
    let mut initrd = std::fs::read(&config.kernel.initrd).context("the initramfs")?;
    initrd.extend(files.finish().finish());
    config.kernel.initrd = scratch.path().join("initrd");
    std::fs::write(&config.kernel.initrd, initrd).context("an initramfs")?;
    let vm = Vm::launch(&config)?;
    vm.wait_ready()?;
    guest::load_driver(&vm)?;
    for (arguments, expected) in [
        ("add nouveau /gdev/add.sm20", "verified 100000 words"),
        ("add nouveau:/dev/dri/renderD128 /gdev/add.sm20 0xfedcba9876543210", "verified 100000 words"),
        ("wrong nouveau /gdev/add.sm20", "0 mistakes"),
        ("shared nouveau 77", "shared 262144 bytes"),
        ("driver /gdev/add.sm20 78", "verified 100000 words"),
    ] {
        let output = vm.run_within(&format!("run /gdev/{arguments}"), guest::SMOKE_LIMIT)?;
        ensure!(output.code == 0 && output.text().trim() == expected, "{arguments}: {}", output.text());
    }
    // Run three of the programs on the host as well.
    let target = format!("vgpu:{}", daemon.vm_socket(HOST).display());
    let kernel = Path::new(env!("CARGO_MANIFEST_DIR")).join("../gdev/c/examples/c/add.sm20");
    let on_host = |program: &str, arguments: &[&str]| -> Result<String> {
        let mut command = Command::new(scratch.path().join(program));
        if program == "driver" {
            command.env("GDEV_TARGET", &target);
        }
        let output = command.args(arguments).arg(&kernel).output()?;
        ensure!(output.status.success(), "{program}: {}", String::from_utf8_lossy(&output.stderr));
        Ok(String::from_utf8_lossy(&output.stdout).trim().to_owned())
    };
    ensure!(on_host("add", &[&target])? == "verified 100000 words");
    ensure!(on_host("wrong", &[&target])? == "0 mistakes");
    ensure!(on_host("driver", &[])? == "verified 100000 words");
    // The segments of programs that have ended must be detached.
    guest::await_counter(&daemon, VM, "pv_attachments", |attachments| attachments == 0)?;
    assert_eq!(complaints(&vm.kernel_log()?), Vec::<&str>::new());
    Ok(())
}
