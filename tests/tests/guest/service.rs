//! Tests the Debian package on a Debian host with systemd.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;
use std::{env, fs};

use anyhow::{Context, Result, ensure};
use serde_json::Value;
use tests::Host;
use tests::daemon::{binary, run_to_end};
use tests::files::Files;
use tests::wait::Scratch;

/// The version that the test installs first.
const OLD: &str = "0.0.9";
/// Time limit for building a package, including `cargo`.
const PACKAGE_LIMIT: Duration = Duration::from_secs(300);

/// Builds the package of the programs under test, with the additional `options` of `cargo xtask package`.
pub fn package(folder: &Path, options: &[&str]) -> Result<PathBuf> {
    let programs = binary("mediatord")?;
    let programs = programs.parent().context("a folder of programs")?;
    let mut command = Command::new(env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    command.args(["run", "--quiet", "--package", "xtask", "--", "package", "--daemon", "--binaries"]).arg(programs);
    let ended = run_to_end(command.args(options).arg("--out").arg(folder), PACKAGE_LIMIT)?.success()?;
    Ok(ended.stdout.trim().into())
}

/// Creates a copy of the package in `folder`, with another version.
fn reversioned(package: &Path, version: &str, folder: &Path) -> Result<PathBuf> {
    let tree = folder.join(version);
    let run = |command: &mut Command| run_to_end(command, PACKAGE_LIMIT)?.success();
    run(Command::new("dpkg-deb").arg("--raw-extract").arg(package).arg(&tree))?;
    let control = tree.join("DEBIAN/control");
    let text = fs::read_to_string(&control)?;
    let lines = text.lines().map(|line| match line.starts_with("Version: ") {
        true => format!("Version: {version}\n"),
        false => format!("{line}\n"),
    });
    fs::write(&control, lines.collect::<String>())?;
    let other = folder.join(format!("{version}.deb"));
    run(Command::new("dpkg-deb").args(["--build", "--root-owner-group", "-Znone"]).arg(&tree).arg(&other))?;
    Ok(other)
}

/// Command prefix that runs a command as a user with access to the admin socket.
const OPERATOR: &str = "setpriv --reuid=alice --regid=alice --init-groups";
/// Command prefix that runs a command as an unprivileged user.
const STRANGER: &str = "setpriv --reuid=mallory --regid=mallory --init-groups";
/// Maximum exposure score of the unit, from 0 to 100 (`systemd-analyze security`), caused by AF_UNIX, other users, `/`,
/// `chown` and `setpriority`. `docs/guides/operating.md` contains the same score, and a test of `xtask` compares both.
const EXPOSURE: u32 = 6;
/// Number of VMs. Each VM requests more than half of the card.
const VMS: u32 = 8;
const VRAM_MIB: u32 = 40;
/// Time limit of a wait. It only detects hangs.
const WAIT_TIMEOUT: Duration = Duration::from_secs(120);

const SITE: &str = r#"[daemon]
state_dir = "/var/lib/gpu-mediator"
admin_mode = "0660"
admin_group = "operators"

[[card]]
name = "card0"
kind = "simgpu"
vram_mib = 64
overcommit = true
memory = { host_mib = 360 }
"#;

/// Boots a host with the packages and administration tools.
fn host() -> Result<Host> {
    let scratch = Scratch::new("package")?;
    let new = package(scratch.path(), &[])?;
    let old = reversioned(&new, OLD, scratch.path())?;
    let mut files = Files::default();
    files.copy(&old, "root/old.deb", 0o644)?;
    files.copy(&new, "root/new.deb", 0o644)?;
    files.copy(Path::new(env!("CARGO_BIN_EXE_light-vmm")), "usr/bin/light-vmm", 0o755)?;
    files.write("root/site.toml", 0o644, SITE.as_bytes());
    Host::boot("service", files)
}

/// Returns a systemd property of the service.
fn property(host: &Host, name: &str) -> Result<String> {
    host.ok(&format!("systemctl show --value --property={name} gpu-mediator"))
}

/// Adds a drop-in for the unit.
fn drop_in(host: &Host, name: &str, lines: &str) -> Result<()> {
    let folder = "/etc/systemd/system/gpu-mediator.service.d";
    let command = format!("mkdir -p {folder} && printf '[Service]\\n{lines}\\n' > {folder}/{name}.conf");
    host.ok(&format!("{command} && systemctl daemon-reload")).map(drop)
}

/// Runs `mediatorctl` as the administrator, and returns its parsed output.
fn json(host: &Host, arguments: &str) -> Result<Value> {
    let command = format!("mediatorctl --json {arguments}");
    let text = host
        .vm()
        .run_within(&format!("sh {command}"), WAIT_TIMEOUT)?
        .success()
        .with_context(|| command.clone())?
        .text();
    serde_json::from_str(&text).with_context(|| format!("{command}:\n{text}"))
}

/// Returns the daemon's exported VMs and settings, without the revision.
fn state(host: &Host) -> Result<Value> {
    let mut state = json(host, "export")?;
    state.as_object_mut().context("a state")?.remove("revision");
    Ok(state)
}

/// Starts a background program as a given user, with its output in `/tmp/UNIT.log`.
fn start(host: &Host, unit: &str, user: &str, command: &str) -> Result<()> {
    let output = format!("--property=StandardOutput=file:/tmp/{unit}.log --property=StandardError=inherit");
    host.ok(&format!("systemd-run --quiet --unit={unit} --uid={user} {output} {command}")).map(drop)
}

/// Starts the VMM of a VM as a user other than the operator.
fn start_vmm(host: &Host, vm: u32) -> Result<()> {
    start(host, &format!("vm{vm}"), "bob", &format!("light-vmm /run/gpu-mediator/vm{vm}.sock {VRAM_MIB}"))
}

/// Waits until a VMM prints a line that starts with `word`.
fn vmm_says(host: &Host, vm: u32, word: &str) -> Result<String> {
    host.until(&format!("vm{vm}: {word}"), &format!("grep '^{word}' /tmp/vm{vm}.log"), WAIT_TIMEOUT)
}

/// Waits until systemd has automatically restarted the service `restarts` times.
fn restarted(host: &Host, restarts: u32) -> Result<()> {
    let command = format!(
        "systemctl is-active --quiet gpu-mediator && test $(systemctl show --value --property=NRestarts gpu-mediator) = {restarts}"
    );
    host.until("the service to return", &command, WAIT_TIMEOUT).map(drop)
}

fn is_installed(host: &Host) -> Result<()> {
    host.ok("dpkg --install /root/old.deb")?;
    let wanted = [
        ("Type", "notify"),
        ("ActiveState", "active"),
        ("SubState", "running"),
        ("UnitFileState", "enabled"),
        ("NRestarts", "0"),
        ("User", "gpu-mediator"),
    ];
    for (name, value) in wanted {
        assert_eq!(property(host, name)?, value, "{name}");
    }
    let process =
        host.ok(&format!("grep -E '^(CapBnd|NoNewPrivs|Seccomp):' /proc/{}/status", property(host, "MainPID")?))?;
    let line = |name: &str| process.lines().find_map(|line| Some(line.strip_prefix(name)?.trim().to_owned()));
    for (name, value) in [("NoNewPrivs:", "1"), ("Seccomp:", "2"), ("CapBnd:", "0000000000000000")] {
        assert_eq!(line(name).as_deref(), Some(value), "{name}");
    }
    assert_eq!(host.ok("systemd-analyze verify --man=no gpu-mediator.service")?, "");
    host.ok(&format!("systemd-analyze security --no-pager --threshold={EXPOSURE} gpu-mediator.service | tail -n 1"))?;
    Ok(())
}

/// Creates users and groups, configures a card, and checks the permissions.
fn is_configured(host: &Host) -> Result<()> {
    for group in ["operators", "kvm"] {
        host.ok(&format!("addgroup --quiet --system {group}"))?;
    }
    for (user, group) in [("alice", "operators"), ("bob", "kvm"), ("mallory", "")] {
        host.ok(&format!(
            "adduser --quiet --system --group {user} && {{ test -z '{group}' || adduser --quiet {user} {group}; }}"
        ))?;
    }
    drop_in(host, "groups", "SupplementaryGroups=operators kvm")?;
    host.ok("cp /root/site.toml /etc/gpu-mediator.toml && mediatord --check && systemctl restart gpu-mediator")?;
    for vm in 1..=VMS {
        let add = format!("vm add vm{vm} --card card0 --vram-mib {VRAM_MIB} --group kvm --mode 0660");
        host.ok(&format!("{OPERATOR} mediatorctl {add}"))?;
    }
    host.ok(&format!("{OPERATOR} mediatorctl memory set-quota vm8 20"))?;
    host.ok(&format!("{OPERATOR} mediatorctl sched set-vm vm7 --weight 300 --cap 50"))?;
    let refused = host.sh(&format!("{STRANGER} mediatorctl vm list"))?;
    assert_eq!(refused.code, 5);
    let said = refused.text();
    assert!(said.contains("this user has no access to /run/gpu-mediator/admin.sock: Permission denied"), "{said}");
    assert!(said.contains("join the socket's group: `admin_group`"), "{said}");
    // The operator must not be able to run VMMs.
    let refused = host.sh(&format!("{OPERATOR} light-vmm /run/gpu-mediator/vm1.sock {VRAM_MIB}"))?;
    assert!(refused.code == 1 && refused.text().contains("Permission denied"), "{refused:?}");
    Ok(())
}

/// Checks that two VMs together can use more memory than the card has.
fn works(host: &Host) -> Result<()> {
    for vm in [1, 2] {
        start_vmm(host, vm)?;
    }
    for vm in [1, 2] {
        let result = vmm_says(host, vm, "RESULT")?;
        assert!(result.starts_with("RESULT ok=true"), "{result}");
    }
    let memory = json(host, "memory show card0")?;
    let in_host = memory["host_used_bytes"].as_u64().context("host memory")?;
    assert!(in_host >= 16 << 20, "{in_host} bytes in host memory");
    Ok(())
}

/// Checks that the next daemon takes over the VMs, and that systemd regards it as the service's main process.
fn is_reloaded(host: &Host) -> Result<()> {
    let (before, pid) = (state(host)?, property(host, "MainPID")?);
    host.ok("systemctl reload gpu-mediator")?;
    let gone =
        format!("test $(systemctl show --value --property=MainPID gpu-mediator) != {pid} && ! test -e /proc/{pid}");
    host.until("the next daemon to become the service's main process", &gone, WAIT_TIMEOUT)?;
    restarted(host, 0)?;
    let shown = json(host, "daemon show")?;
    assert_eq!((shown["upgrades"].as_u64(), shown["pid"].to_string()), (Some(1), property(host, "MainPID")?));
    host.ok("systemctl is-active vm1 vm2")?;
    for vm in ["vm1", "vm2"] {
        assert_eq!(json(host, &format!("vm show {vm}"))?["state"], "connected");
    }
    assert_eq!(state(host)?, before);
    Ok(())
}

/// Checks a slow restart by the administrator, during which connecting clients wait.
fn is_restarted(host: &Host) -> Result<()> {
    let before = state(host)?;
    drop_in(host, "slow", "ExecStartPre=/bin/sh -c \"until test -e /run/go; do sleep 0.1; done\"")?;
    host.ok("systemctl restart --no-block gpu-mediator")?;
    let away = "test $(systemctl show --value --property=SubState gpu-mediator) = start-pre";
    host.until("the service to stop", away, WAIT_TIMEOUT)?;
    start_vmm(host, 3)?;
    start(host, "list", "alice", "mediatorctl --json vm list")?;
    host.until("the VMM to be connected", "grep '^connecting' /tmp/vm3.log", WAIT_TIMEOUT)?;
    host.ok("sleep 1; systemctl is-active vm3 list && test ! -s /tmp/list.log && touch /run/go")?;
    assert!(vmm_says(host, 3, "RESULT")?.starts_with("RESULT ok=true"));
    let listed =
        host.until("a response to the operator", "test -s /tmp/list.log && cat /tmp/list.log", WAIT_TIMEOUT)?;
    assert_eq!(listed.matches("\"name\"").count(), VMS as usize, "{listed}");
    restarted(host, 0)?;
    // The vGPUs' state is lost with the daemon, and the VMMs detect this.
    for vm in [1, 2] {
        vmm_says(host, vm, "the device has gone")?;
    }
    // The VMMs' connections are lost as well. For VM 3, systemd stores a copy of the connection, the journal, the VMM's
    // RAM and interrupt, and the mapped memory of BAR1, BAR3 and PRAMIN.
    assert_eq!(property(host, "NFileDescriptorStore")?, (VMS + 8).to_string());
    assert_eq!(state(host)?, before);
    host.ok("rm /etc/systemd/system/gpu-mediator.service.d/slow.conf").map(drop)
}

fn is_killed(host: &Host) -> Result<()> {
    let before = state(host)?;
    host.ok("systemctl kill --signal=KILL --kill-who=main gpu-mediator")?;
    restarted(host, 1)?;
    // VM 3's VMM is still connected to its device, which was reset.
    let shown = json(host, "vm show vm3")?;
    assert_eq!((&shown["state"], &shown["transport"]["daemon_deaths_survived"]), (&"connected".into(), &1.into()));
    host.ok("systemctl is-active vm3")?;
    assert_eq!(property(host, "NFileDescriptorStore")?, (VMS + 8).to_string());
    assert_eq!(state(host)?, before);
    start_vmm(host, 4)?;
    assert!(vmm_says(host, 4, "RESULT")?.starts_with("RESULT ok=true"));
    Ok(())
}

/// Checks a stop and a later start by the administrator. A folder mounted by a container is retained, and contains the
/// new daemon's socket.
fn is_stopped_and_started(host: &Host) -> Result<()> {
    let socket = "--socket-path /run/gpu-mediator/pod/gpu.sock";
    host.ok(&format!("mediatorctl vm add pod --card card0 --vram-mib {VRAM_MIB} {socket}"))?;
    host.ok("mkdir -p /tmp/mounted && mount --bind /run/gpu-mediator/pod /tmp/mounted")?;
    let before = state(host)?;
    let folder = "stat --format='%d %i' /run/gpu-mediator/pod /tmp/mounted /run/gpu-mediator";
    let folders = host.ok(folder)?;
    host.ok("systemctl stop gpu-mediator")?;
    assert_eq!(property(host, "ActiveState")?, "inactive");
    assert_eq!(host.ok(folder)?, folders, "the daemon's exit removes no folder");
    let refused = host.sh(&format!("light-vmm /tmp/mounted/gpu.sock {VRAM_MIB}"))?;
    assert_ne!(refused.code, 0, "nothing serves the socket");
    host.ok("systemctl start gpu-mediator")?;
    assert_eq!(host.ok(folder)?, folders);
    assert_eq!(state(host)?, before);
    // The container must see the new socket, and a VMM must be able to use it.
    let same = "test $(stat --format=%i /tmp/mounted/gpu.sock) = $(stat --format=%i /run/gpu-mediator/pod/gpu.sock)";
    host.ok(same)?;
    start(host, "pod", "root", &format!("light-vmm /tmp/mounted/gpu.sock {VRAM_MIB}"))?;
    let result = host.until("the pod's VM to work", "grep '^RESULT' /tmp/pod.log", WAIT_TIMEOUT)?;
    assert!(result.starts_with("RESULT ok=true"), "{result}");
    host.ok("mediatorctl vm remove pod && umount /tmp/mounted && rmdir /tmp/mounted && test ! -e /run/gpu-mediator/pod")
        .map(drop)
}

/// Checks that systemd restarts an unresponsive daemon.
fn hangs(host: &Host) -> Result<()> {
    let before = state(host)?;
    drop_in(host, "watchdog", "WatchdogSec=10")?;
    host.ok("systemctl restart gpu-mediator && systemctl kill --signal=STOP --kill-who=main gpu-mediator")?;
    restarted(host, 1)?;
    host.ok("journalctl --no-pager --unit=gpu-mediator | grep 'Watchdog timeout'")?;
    assert_eq!(state(host)?, before);
    host.ok("rm /etc/systemd/system/gpu-mediator.service.d/watchdog.conf && systemctl daemon-reload").map(drop)
}

fn is_misconfigured(host: &Host) -> Result<()> {
    let before = state(host)?;
    host.ok("sed -i 's/^kind = .*/kind = \"gtx480\"/' /etc/gpu-mediator.toml")?;
    assert_ne!(host.sh("systemctl restart gpu-mediator")?.code, 0);
    // The service remains in the failed state: systemd does not retry, and no client waits for it.
    for (name, value) in
        [("ActiveState", "failed"), ("ExecMainStatus", "2"), ("NRestarts", "0"), ("NFileDescriptorStore", "0")]
    {
        assert_eq!(property(host, name)?, value, "{name}");
    }
    let said = host.ok("journalctl --no-pager --unit=gpu-mediator --lines=20 --output=cat")?;
    assert!(said.contains("mediatord: /etc/gpu-mediator.toml:8:8: card[0].kind: unknown variant `gtx480`"), "{said}");
    host.ok("cp /root/site.toml /etc/gpu-mediator.toml && systemctl restart gpu-mediator")?;
    assert_eq!(state(host)?, before);
    Ok(())
}

fn is_upgraded(host: &Host) -> Result<()> {
    let before = state(host)?;
    let sockets = "stat --format='%n %i %A %G' /run/gpu-mediator/*.sock";
    let (old, process) = (host.ok(sockets)?, property(host, "MainPID")?);
    host.ok("dpkg --install /root/new.deb")?;
    assert_eq!(host.ok("dpkg-query --show --showformat='${Version}' gpu-mediator")?, env!("CARGO_PKG_VERSION"));
    assert_ne!(property(host, "MainPID")?, process);
    assert_eq!(property(host, "ActiveState")?, "active");
    assert_eq!(state(host)?, before);
    // The sockets must not have been replaced.
    assert_eq!(host.ok(sockets)?, old);
    host.ok("cmp /root/site.toml /etc/gpu-mediator.toml")?;
    Ok(())
}

/// Lists all files except for temporary files, caches, logs, dpkg's database, and root's home folder.
fn files_of(host: &Host) -> Result<BTreeSet<String>> {
    let without = ["/root", "/tmp", "/var/cache", "/var/lib/dpkg", "/var/log"].map(|path| format!("-path {path}"));
    let command = format!("find / -xdev \\( {} \\) -prune -o -print", without.join(" -o "));
    let listed = host.vm().run_within(&format!("sh {command}"), WAIT_TIMEOUT)?.success()?;
    let files: BTreeSet<String> = listed.lines.into_iter().collect();
    ensure!(files.contains("/etc/passwd") && files.len() > 1000, "{} files are no host", files.len());
    Ok(files)
}

fn is_removed(host: &Host, before: &BTreeSet<String>) -> Result<()> {
    let kept = state(host)?;
    host.ok("dpkg --remove gpu-mediator")?;
    assert_eq!(property(host, "ActiveState")?, "inactive");
    host.ok("test ! -e /run/gpu-mediator && test ! -e /usr/bin/mediatord")?;
    // Check that a second installation restores the same files.
    host.ok("dpkg --install /root/new.deb")?;
    restarted(host, 0)?;
    assert_eq!(property(host, "UnitFileState")?, "enabled");
    assert_eq!(state(host)?, kept);

    host.ok("rm -r /etc/systemd/system/gpu-mediator.service.d && dpkg --purge gpu-mediator")?;
    assert_eq!(property(host, "LoadState")?, "not-found");
    let left: Vec<_> = files_of(host)?.difference(before).cloned().collect();
    assert_eq!(left, Vec::<String>::new());
    // The user is kept, so that its ID is not reused.
    host.ok("id gpu-mediator")?;
    Ok(())
}

#[test]
fn packaged_service_survives_kill_hang_reload_and_upgrade() -> Result<()> {
    let host = host()?;
    let files = files_of(&host)?;
    is_installed(&host)?;
    is_configured(&host)?;
    works(&host)?;
    is_reloaded(&host)?;
    is_restarted(&host)?;
    is_killed(&host)?;
    is_stopped_and_started(&host)?;
    hangs(&host)?;
    is_misconfigured(&host)?;
    is_upgraded(&host)?;
    let complaints = host.sh("journalctl --no-pager --unit=gpu-mediator --output=cat | grep -E ' (WARN|ERROR) ' | grep -v 'the previous daemon was killed'")?;
    assert_eq!(complaints.text(), "");
    is_removed(&host, &files)
}
