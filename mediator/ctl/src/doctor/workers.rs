//! Checks the requirements of VMs whose programs use CUDA: workers (program, sandbox, users), windows, and driver
//! versions.

use std::path::{Path, PathBuf};

use config::{CardKind, CardSpec};

use super::cards::LIBRARIES;
use super::{Finding, Patient};

/// Path where the package installs the worker program.
const WORKER: &str = "usr/lib/gpu-mediator/cuda-worker";
/// Capabilities that the daemon needs to assign separate users to workers, as bit numbers and names.
const NEEDED: [(u32, &str); 3] = [(5, "CAP_KILL"), (6, "CAP_SETGID"), (7, "CAP_SETUID")];

/// Checks a host with a CUDA card, even if no VM with CUDA is configured: such VMs can also be added at run time.
pub(super) fn look(patient: &Patient<'_>) -> Vec<Finding> {
    let Ok(config) = &patient.config else { return Vec::new() };
    let cards: Vec<_> = config.cards.iter().filter(|card| card.kind == CardKind::Cuda).collect();
    if cards.is_empty() {
        return Vec::new();
    }
    let needed = config.vms.iter().any(|vm| vm.cuda.is_some());
    let mut findings = Vec::new();
    for card in &cards {
        findings.push(worker(patient, card, needed));
        findings.push(users(patient, card, needed));
        findings.extend(driver_versions(patient, card));
    }
    findings.push(sandbox(patient, &cards, needed));
    findings.extend(hmm(patient));
    if needed {
        findings.extend(windows(patient));
    }
    findings
}

fn worker(patient: &Patient<'_>, card: &CardSpec, needed: bool) -> Finding {
    let path = card.cuda().worker.unwrap_or_else(|| Path::new("/").join(WORKER));
    match patient.host.has(&path) {
        true => Finding::good("worker", path.display().to_string()),
        false => Finding::needed(
            needed,
            "worker",
            format!("card `{}`: {} is missing", card.name, path.display()),
            "install the package gpu-mediator with its CUDA parts, or set `cuda.worker` to the program",
        ),
    }
}

fn users(patient: &Patient<'_>, card: &CardSpec, needed: bool) -> Finding {
    let name = &card.name;
    let Some([first, last]) = card.cuda().worker_users else {
        return Finding::note(
            "worker-users",
            format!("card `{name}`: workers run as the daemon's user, confined only by their sandbox"),
            "set a range of users in `cuda.worker_users`, and uncomment its lines in the drop-in cuda.conf",
        );
    };
    let status = super::service::process(&patient.host).and_then(|pid| patient.host.read(format!("proc/{pid}/status")));
    let held = status.and_then(|text| {
        let mask = text.lines().find_map(|line| line.strip_prefix("CapEff:"))?.trim().to_owned();
        u64::from_str_radix(&mask, 16).ok()
    });
    let Some(held) = held else {
        return Finding::note(
            "worker-users",
            format!(
                "card `{name}`: users {first} to {last}; the daemon is not running, so its capabilities are unknown"
            ),
            "start it and check again",
        );
    };
    let lacking = NEEDED.iter().filter(|(bit, _)| held & 1 << bit == 0).map(|(_, name)| *name);
    let lacking: Vec<_> = lacking.collect();
    if lacking.is_empty() {
        return Finding::good("worker-users", format!("card `{name}`: users {first} to {last}"));
    }
    Finding::needed(
        needed,
        "worker-users",
        format!(
            "card `{name}`: the daemon cannot run workers as users {first} to {last}: it lacks {}",
            lacking.join(", ")
        ),
        "uncomment the lines for `cuda.worker_users` in the drop-in cuda.conf, then run `systemctl daemon-reload` and \
         `systemctl restart gpu-mediator`",
    )
}

fn sandbox(patient: &Patient<'_>, cards: &[&CardSpec], needed: bool) -> Finding {
    if let Some(card) = cards.iter().find(|card| !card.cuda().sandbox) {
        return Finding::note(
            "sandbox",
            format!(
                "card `{}`: workers are not sandboxed, so a guest can do anything that the daemon's user can",
                card.name
            ),
            "remove `cuda.sandbox = false`",
        );
    }
    let modules = patient.host.read("sys/kernel/security/lsm");
    match modules.as_deref() {
        Some(list) if list.trim().split(',').any(|name| name == "landlock") => {
            Finding::good("sandbox", "the kernel supports Landlock")
        }
        Some(list) => {
            let have_users = cards.iter().all(|card| card.cuda().worker_users.is_some());
            Finding::needed(
                needed && !have_users,
                "sandbox",
                format!("the kernel does not support Landlock, only {}", list.trim()),
                "boot Linux 5.13 or newer with `lsm=landlock,...` in its options; otherwise workers need separate users \
                 (`cuda.worker_users`)",
            )
        }
        None => Finding::note(
            "sandbox",
            "/sys/kernel/security/lsm cannot be read, so support for Landlock is unknown",
            "run this as root; `mount -t securityfs securityfs /sys/kernel/security` if it is not mounted",
        ),
    }
}

/// Checks heterogeneous memory management, which lets the card's kernels access all memory of their process.
fn hmm(patient: &Patient<'_>) -> Option<Finding> {
    let disabled = patient.host.read("sys/module/nvidia_uvm/parameters/uvm_disable_hmm")?;
    Some(match disabled.trim() {
        "Y" | "1" => Finding::good("hmm", "off"),
        _ => Finding::note(
            "hmm",
            "the driver may let a guest's kernels access all memory of their worker",
            "put `options nvidia-uvm uvm_disable_hmm=1` into a file in /etc/modprobe.d, then reload the module",
        ),
    })
}

/// Compares the total window size with the host's memory.
fn windows(patient: &Patient<'_>) -> Option<Finding> {
    let config = patient.config.as_ref().ok()?;
    let windows = config.vms.iter().filter_map(|vm| Some(vm.cuda?.window_mib)).fold(0u64, u64::saturating_add);
    let text = patient.host.read("proc/meminfo")?;
    let line = text.lines().find_map(|line| line.strip_prefix("MemTotal:"))?;
    let memory = line.split_whitespace().next()?.parse::<u64>().ok()? >> 10;
    let found = format!("windows of {windows} MiB in total, with {memory} MiB of host memory");
    if windows <= memory {
        return Some(Finding::good("window", found));
    }
    let remedy = "reduce `cuda.window_mib`: guests can fill their windows in addition to their RAM";
    Some(Finding::missing("window", found, remedy))
}

/// Compares the versions of NVIDIA's library and kernel module. The library's file name contains its version.
fn driver_versions(patient: &Patient<'_>, card: &CardSpec) -> Option<Finding> {
    let (host, driver) = (&patient.host, card.cuda().driver);
    let places = match driver.is_absolute() {
        true => vec![driver],
        false => LIBRARIES.iter().map(|folder| Path::new(folder).join(&driver)).collect::<Vec<PathBuf>>(),
    };
    let target = places.iter().find_map(|path| std::fs::read_link(host.path(path)).ok())?;
    let library = target.file_name()?.to_str()?.strip_prefix("libcuda.so.")?.to_owned();
    let module = host.read("sys/module/nvidia/version")?.trim().to_owned();
    if !library.contains('.') || library == module {
        return None;
    }
    Some(Finding::missing(
        "versions",
        format!(
            "card `{}`: NVIDIA's library has version {library}, but its kernel module has version {module}",
            card.name
        ),
        "load the new module: stop all programs on the card, then run `rmmod nvidia_uvm nvidia` and `modprobe nvidia-uvm`; or reboot",
    ))
}
