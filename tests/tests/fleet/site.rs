//! Prepares the host: the installed package, users, and programs for the fake driver's CUDA cards.

use std::env;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use serde_json::Value;
use tests::Debian;
use tests::daemon::{binary, run_to_end};
use tests::files::Files;
pub use tests::pages::blocks;
use tests::wait::Scratch;

/// Time limit for building the package, including `cargo`.
const PACKAGE_LIMIT: Duration = Duration::from_secs(400);
/// Time limit of a wait. It only detects hangs.
pub const WAIT_TIMEOUT: Duration = Duration::from_secs(300);
/// Memory size of each CUDA card in MiB.
pub const CARD_MIB: u64 = 1024;

/// Command that configures podman for a host without a disk for layers, networks, or separate control groups.
pub const CONTAINERS: &str = "mkdir -p /etc/containers && printf '[storage]\\ndriver = \"vfs\"\\nrunroot = \"/run/containers\"\\ngraphroot = \
    \"/var/lib/containers\"\\n' > /etc/containers/storage.conf && printf '[engine]\\nruntime = \"crun\"\\nno_pivot_root = true\\n\
    cgroup_manager = \"cgroupfs\"\\nevents_logger = \"none\"\\n[containers]\\nlog_driver = \"k8s-file\"\\n' > \
    /etc/containers/containers.conf && printf '{\"default\":[{\"type\":\"insecureAcceptAnything\"}]}' > /etc/containers/policy.json";

/// Script that creates the users that the packages' own scripts would create, and two users that run jobs.
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
ldconfig
"#;

/// The operator's guide with the service's configuration.
const PAGE: &str = include_str!("../../../docs/guides/libvirt.md");

/// Package format.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Form {
    Deb,
    Rpm,
}

/// Builds a package of the programs under test, in format `form`.
fn package(folder: &Path, form: Form) -> Result<PathBuf> {
    let programs = binary("mediatord")?;
    let programs = programs.parent().context("a folder of programs")?;
    let mut command = Command::new(env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    command.args(["run", "--quiet", "--package", "xtask", "--", "package", "--fast", "--daemon"]);
    command.args((form == Form::Rpm).then_some("--rpm")).arg("--binaries").arg(programs);
    let ended = run_to_end(command.arg("--out").arg(folder), PACKAGE_LIMIT)?.success()?;
    // The output contains a line for each format.
    let line = ended.stdout.trim().lines().nth(usize::from(form == Form::Rpm));
    Ok(line.with_context(|| ended.stdout.clone())?.into())
}

/// Starts a host with the package installed. Returns `None` if this machine cannot run such a host.
pub fn start_up(name: &str, form: Form) -> Result<Option<Debian>> {
    if let Some(why) = tests::debian::impossible() {
        println!("skipped: {why}");
        return Ok(None);
    }
    let scratch = Scratch::new("fleet-package")?;
    let mut files = Files::default();
    let (place, install) = match form {
        Form::Deb => ("root/package.deb", "dpkg --force-confold --install /root/package.deb"),
        // The package's dependencies have other names on this host.
        Form::Rpm => ("root/package.rpm", "rpm --install --nodeps /root/package.rpm"),
    };
    files.copy(&package(scratch.path(), form)?, place, 0o644)?;
    files.write("root/accounts.sh", 0o755, ACCOUNTS.as_bytes());
    let [config] = &blocks(PAGE, "toml")[..] else {
        bail!("docs/guides/libvirt.md does not have exactly one configuration")
    };
    files.write("etc/gpu-mediator.toml", 0o644, config.as_bytes());
    // The host's C library is at least as new as the one against which the programs were linked.
    for (name, place) in [
        ("cuda-program", "usr/bin/cuda-program"),
        ("libcuda_fake.so", "opt/fake/libcuda.so.1"),
        ("libcuda_fake.so", "opt/fake/libnvidia-ml.so.1"),
    ] {
        files.copy(&stripped(&binary(name)?, scratch.path())?, place, 0o755)?;
    }
    let light_vmm = Path::new(env!("CARGO_BIN_EXE_light-vmm"));
    files.copy(&stripped(light_vmm, scratch.path())?, "usr/bin/light-vmm", 0o755)?;
    let kernel = tests::images()?.kernel("6.1")?;
    files.copy(&kernel.vmlinuz, "srv/vm/vmlinuz", 0o644)?;
    files.copy(&kernel.initrd, "srv/vm/initrd", 0o644)?;
    let host = Debian::start_up(name, files)?;
    host.ok(&format!("sh /root/accounts.sh && {install} && rm /root/package.*"))?;
    Ok(Some(host))
}

/// Returns a stripped copy of a program or library.
fn stripped(built: &Path, scratch: &Path) -> Result<PathBuf> {
    let to = scratch.join(built.file_name().context("a name")?);
    run_to_end(Command::new("strip").arg("--strip-debug").arg("-o").arg(&to).arg(built), PACKAGE_LIMIT)?.success()?;
    Ok(to)
}

/// Starts the service as its unit does: as its own user, and with its folders.
pub fn start_service(host: &Debian) -> Result<()> {
    host.ok("for folder in run var/lib; do install --directory --owner=gpu-mediator --group=gpu-mediator /$folder/gpu-mediator; done")?;
    let user = "setpriv --reuid=gpu-mediator --regid=gpu-mediator --clear-groups";
    host.start("gpu-mediator", &format!("umask 0077; exec {user} mediatord --config /etc/gpu-mediator.toml"))?;
    answers(host, "/run/gpu-mediator/admin.sock")
}

/// Waits until a daemon responds.
fn answers(host: &Debian, socket: &str) -> Result<()> {
    host.until("the daemon to respond", &format!("mediatorctl --socket {socket} card show"), WAIT_TIMEOUT).map(drop)
}

/// Starts a separate daemon with a fake driver's CUDA card and a software card, in `/run/NAME`.
pub fn start_node(host: &Debian, name: &str) -> Result<()> {
    start_node_with(host, name, "", "")
}

/// Starts a daemon like [`start_node`], but with additional keys in `[daemon]` and additional tables.
pub fn start_node_with(host: &Debian, name: &str, keys: &str, tables: &str) -> Result<()> {
    let config = format!(
        "[daemon]\n{keys}admin_socket = \"/run/{name}/admin.sock\"\nsocket_dir = \"/run/{name}\"\nstate_dir = \"/var/lib/{name}\"\n\n\
         [[card]]\nname = \"h100\"\nkind = \"cuda\"\nvram_mib = {CARD_MIB}\nmemory.host_mib = 256\nmemory.quanta.mode = \"off\"\n\
         cuda.driver = \"/opt/fake/libcuda.so.1\"\ncuda.chunk_mib = 4\ncuda.host_ready_mib = 4\n\n\
         [[card]]\nname = \"soft\"\nkind = \"simgpu\"\nvram_mib = 128\n{tables}"
    );
    host.write(&format!("/etc/{name}.toml"), 0o644, &config)?;
    host.ok(&format!("mkdir -p /run/{name}/card && chmod 1777 /run/{name}/card"))?;
    run_node(host, name)
}

/// Starts the daemon of a configured node.
pub fn run_node(host: &Debian, name: &str) -> Result<()> {
    // Programs of all users must be able to access the fake driver's files. The second card exists only for nodes whose
    // configuration includes it.
    let variables = format!("FAKE_CUDA_FOLDER=/run/{name}/card FAKE_CUDA_MIB={} FAKE_CUDA_CARDS=2", CARD_MIB + 64);
    host.start(name, &format!("umask 0; exec env {variables} mediatord --config /etc/{name}.toml"))?;
    answers(host, &format!("/run/{name}/admin.sock"))
}

/// Returns the parsed output of `mediatorctl`.
pub fn json(host: &Debian, arguments: &str) -> Result<Value> {
    let command = format!("mediatorctl --json {arguments}");
    let text = host.ok(&command)?;
    serde_json::from_str(&text).with_context(|| format!("{command}:\n{text}"))
}

/// Returns the names of a daemon's tenants or virtual machines.
pub fn names(host: &Debian, socket: &str, kind: &str) -> Result<Vec<String>> {
    let list = json(host, &format!("--socket {socket} {kind} list"))?;
    let list = list[format!("{kind}s")].as_array().context("a list")?.clone();
    Ok(list.iter().filter_map(|one| Some(one["name"].as_str()?.to_owned())).collect())
}
