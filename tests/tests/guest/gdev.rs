//! C programs that use Gdev's interface, in a guest. `cuda/rig` runs the same sources on the fake CUDA driver.

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

/// Returns the library that cargo has built next to the tests.
fn library() -> Result<PathBuf> {
    let own = std::env::current_exe()?;
    let path = own.parent().and_then(Path::parent).context("the test is in no folder")?.join("libgdev.so");
    ensure!(path.is_file(), "{} is not built", path.display());
    Ok(path)
}

/// Compiles a C program of the examples.
fn compiled(folder: &Path, name: &str) -> Result<PathBuf> {
    let c = Path::new(env!("CARGO_MANIFEST_DIR")).join("../gdev/c");
    let (library, program) = (library()?, folder.join(name));
    let beside = library.parent().context("the library is in no folder")?;
    let mut compiler = Command::new("cc");
    compiler.args(["-std=c11", "-D_GNU_SOURCE", "-Wall", "-Wextra", "-Werror", "-O1", "-o"]).arg(&program);
    compiler.arg("-I").arg(c.join("include")).arg(c.join(format!("examples/c/{name}.c")));
    compiler.arg("-L").arg(beside).arg("-lgdev").arg(format!("-Wl,-rpath,{}", beside.display()));
    let output = compiler.output().context("no C compiler")?;
    ensure!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    Ok(program)
}

#[test]
fn c_programs_compute_and_share_memory_in_a_guest() -> Result<()> {
    let scratch = Scratch::new("gdev")?;
    let daemon = Daemon::start("gdev", |paths| card_toml(paths, 320) + &offered(VM, 160, ""))?;
    let mut files = Files::default();
    for name in ["add", "wrong", "shared"] {
        files.program(&compiled(scratch.path(), name)?, &format!("gdev/{name}"))?;
    }
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
    ] {
        let output = vm.run_within(&format!("run /gdev/{arguments}"), guest::SMOKE_LIMIT)?;
        ensure!(output.code == 0 && output.text().trim() == expected, "{arguments}: {}", output.text());
    }
    ensure!(guest::counter(&daemon, VM, "pv_attachments")? == 0, "an ended program has a segment attached");
    assert_eq!(complaints(&vm.kernel_log()?), Vec::<&str>::new());
    Ok(())
}
