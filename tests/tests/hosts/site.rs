//! The host: the package installed, users, programs for CUDA cards of the fake driver.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;
use std::{env, fs};

use anyhow::{Context, Result};
use serde_json::Value;
use tests::Host;
use tests::daemon::{binary, run_to_end};
use tests::files::Files;
use tests::wait::Scratch;

/// Time that making the package may take, `cargo` included.
const PACKAGE_LIMIT: Duration = Duration::from_secs(400);
/// Waits are for hangs.
pub const LIMIT: Duration = Duration::from_secs(300);
/// MiB of each CUDA card.
pub const CARD_MIB: u64 = 1024;

/// Users as the packages' own scripts would make them, and two who run jobs.
const ACCOUNTS: &str = r#"set -e
cat >> /etc/passwd <<END
munge:x:110:110::/nonexistent:/usr/sbin/nologin
slurm:x:64030:64030::/nonexistent:/usr/sbin/nologin
libvirt-qemu:x:64055:994::/var/lib/libvirt:/usr/sbin/nologin
alice:x:1001:1001::/tmp:/bin/sh
bob:x:1002:1002::/tmp:/bin/sh
END
cat >> /etc/group <<END
munge:x:110:
slurm:x:64030:
kvm:x:994:libvirt-qemu
libvirt-qemu:x:64055:libvirt-qemu
alice:x:1001:
bob:x:1002:
END
printf '127.0.0.1 localhost host\n' > /etc/hosts
printf 'passwd: files\ngroup: files\nhosts: files\n' > /etc/nsswitch.conf
ip link set lo up 2>/dev/null || true
dpkg --force-confold --install /root/gpu-mediator.deb
rm /root/gpu-mediator.deb
ldconfig
"#;

/// The service's own configuration: a software card for virtual machines.
const SITE: &str = r#"[daemon]
state_dir = "/var/lib/gpu-mediator"

[[card]]
name = "card0"
kind = "simgpu"
vram_mib = 256

[[profile]]
name = "desktop"
vram_mib = 64
weight = 50
class = "interactive"
"#;

/// Makes the package of the programs that this run tests.
fn package(folder: &Path) -> Result<PathBuf> {
    let programs = binary("mediatord")?;
    let programs = programs.parent().context("a folder of programs")?;
    let mut command = Command::new(env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    command.args(["run", "--quiet", "--package", "xtask", "--", "package", "--fast", "--binaries"]).arg(programs);
    let ended = run_to_end(command.arg("--out").arg(folder), PACKAGE_LIMIT)?.success()?;
    Ok(ended.stdout.trim().lines().next().unwrap_or_default().into())
}

/// A host that has booted, with all that the engines hand out.
pub fn boot(name: &str) -> Result<Host> {
    let images = tests::images()?;
    let kernel = images.kernel("6.1")?;
    let scratch = Scratch::new("fleet-package")?;
    let mut files = Files::default();
    files.copy(&package(scratch.path())?, "root/gpu-mediator.deb", 0o644)?;
    files.write("root/accounts.sh", 0o755, ACCOUNTS.as_bytes());
    files.write("etc/gpu-mediator.toml", 0o644, SITE.as_bytes());
    files.program(&binary("cuda-program")?, "usr/bin/cuda-program")?;
    for library in ["libcuda.so.1", "libnvidia-ml.so.1"] {
        let fake = stripped(&binary("libcuda_fake.so")?, scratch.path())?;
        files.copy(&fake, &format!("opt/fake/{library}"), 0o755)?;
    }
    files.copy(&kernel.vmlinuz, "srv/vm/vmlinuz", 0o644)?;
    files.copy(&kernel.initrd, "srv/vm/initrd", 0o644)?;
    let host = Host::boot_fleet(name, files)?;
    // One that the kernel has no module for on this machine is not needed on it.
    host.ok("for module in $(cat /etc/modules.list); do insmod $module 2>/dev/null; done; chmod 755 /srv /srv/vm; sh /root/accounts.sh")?;
    Ok(host)
}

/// A library without what is for debuggers.
fn stripped(library: &Path, scratch: &Path) -> Result<PathBuf> {
    let to = scratch.join(library.file_name().context("a name")?);
    run_to_end(Command::new("strip").arg("--strip-debug").arg("-o").arg(&to).arg(library), PACKAGE_LIMIT)?.success()?;
    fs::metadata(&to)?;
    Ok(to)
}

/// Starts a daemon of its own with a CUDA card of the fake driver, in `/run/NAME`.
pub fn start_node(host: &Host, name: &str) -> Result<()> {
    let config = format!(
        "[daemon]\nadmin_socket = \"/run/{name}/admin.sock\"\nsocket_dir = \"/run/{name}\"\nstate_dir = \"/var/lib/{name}\"\n\n\
         [[card]]\nname = \"h100\"\nkind = \"cuda\"\nvram_mib = {CARD_MIB}\nmemory.host_mib = 256\nmemory.quanta.mode = \"off\"\n\
         cuda.driver = \"/opt/fake/libcuda.so.1\"\ncuda.chunk_mib = 4\ncuda.host_ready_mib = 4\n"
    );
    let config = config.replace('\n', "\\n").replace('"', "\\\"");
    host.ok(&format!(
        "mkdir -p /run/{name}/card && chmod 1777 /run/{name}/card && printf \"{config}\" > /etc/{name}.toml"
    ))?;
    run_node(host, name)
}

/// Starts the daemon of a node that has a configuration.
pub fn run_node(host: &Host, name: &str) -> Result<()> {
    host.ok(&format!(
        "systemd-run --quiet --unit={name} --property=UMask=0000 --property=Type=notify --setenv=FAKE_CUDA_FOLDER=/run/{name}/card \
         --setenv=FAKE_CUDA_MIB={} mediatord --config /etc/{name}.toml",
        CARD_MIB + 64
    ))
    .map(drop)
}

/// The answer of `mediatorctl`.
pub fn json(host: &Host, arguments: &str) -> Result<Value> {
    let command = format!("mediatorctl --json {arguments}");
    let text =
        host.vm().run_within(&format!("sh {command}"), LIMIT)?.success().with_context(|| command.clone())?.text();
    serde_json::from_str(&text).with_context(|| format!("{command}:\n{text}"))
}

/// The names of the tenants, or of the virtual machines, of a daemon.
pub fn names(host: &Host, socket: &str, kind: &str) -> Result<Vec<String>> {
    let list = json(host, &format!("--socket {socket} {kind} list"))?;
    let list = list[format!("{kind}s")].as_array().context("a list")?.clone();
    Ok(list.iter().filter_map(|one| Some(one["name"].as_str()?.to_owned())).collect())
}
