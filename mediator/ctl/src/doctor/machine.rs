//! Checks the machine and its kernel: KVM, IOMMU, asynchronous I/O, and locked memory.

use config::CardKind;

use super::{Finding, Patient};

/// Maximum number of asynchronous I/O operations per virtual machine: one for each interrupt of its device.
const AIO_EACH: u64 = 4;

pub(super) fn look(patient: &Patient<'_>) -> Vec<Finding> {
    [kvm(patient), Some(aio(patient)), iommu(patient), memlock(patient)].into_iter().flatten().collect()
}

fn kvm(patient: &Patient<'_>) -> Option<Finding> {
    let host = &patient.host;
    let flags = host.read("proc/cpuinfo").unwrap_or_default();
    let offers = flags
        .lines()
        .filter(|line| line.starts_with("flags"))
        .take(1)
        .any(|line| line.split_whitespace().any(|flag| ["vmx", "svm"].contains(&flag)));
    let needed = patient.has_vms();
    Some(match host.rights("dev/kvm") {
        Some(_) if !offers => Finding::needed(
            needed,
            "kvm",
            "/dev/kvm exists, but the CPU does not offer virtualization",
            "enable VT-x or AMD-V in the firmware setup; in a virtual machine, enable nested virtualization for it",
        ),
        Some(rights) if rights.mode & 0o006 == 0o006 => Finding::good("kvm", "/dev/kvm is accessible to all users"),
        Some(rights) => Finding::good("kvm", format!("/dev/kvm is accessible to group {}", rights.group)),
        None if offers => Finding::needed(
            needed,
            "kvm",
            "/dev/kvm is missing",
            "run `modprobe kvm_intel` or `modprobe kvm_amd`; if that fails, enable VT-x or AMD-V in the firmware setup",
        ),
        None => Finding::needed(
            needed,
            "kvm",
            "/dev/kvm is missing, and the CPU does not offer virtualization",
            "enable VT-x or AMD-V in the firmware setup; otherwise VMMs fall back to slow emulation",
        ),
    })
}

fn aio(patient: &Patient<'_>) -> Finding {
    let number = |file: &str| patient.host.read(file).and_then(|text| text.trim().parse::<u64>().ok());
    let needed = patient.has_vms();
    match (number("proc/sys/fs/aio-nr"), number("proc/sys/fs/aio-max-nr")) {
        (Some(used), Some(most)) if most.saturating_sub(used) < AIO_EACH * config::check::MAX_VMS as u64 => {
            Finding::needed(
                needed,
                "aio",
                format!("{used} of {most} asynchronous I/O operations are in use"),
                "raise `fs.aio-max-nr` (`sysctl -w fs.aio-max-nr=1048576`, and permanently in /etc/sysctl.d)",
            )
        }
        (Some(_), Some(most)) => {
            Finding::good("aio", format!("the kernel supports {most} asynchronous I/O operations"))
        }
        _ => Finding::needed(
            needed,
            "aio",
            "the kernel does not support asynchronous I/O",
            "boot a kernel with CONFIG_AIO: interrupts of vGPUs need it",
        ),
    }
}

fn iommu(patient: &Patient<'_>) -> Option<Finding> {
    let needed = patient.has(CardKind::Vfio);
    let groups = patient.host.names("sys/kernel/iommu_groups").len();
    let there = patient.host.has("sys/bus/pci/devices");
    match groups {
        0 if needed => Some(Finding::missing(
            "iommu",
            "the kernel does not use an IOMMU",
            "enable VT-d or AMD-Vi in the firmware setup; on Intel, also boot with `intel_iommu=on`",
        )),
        // No card needs an IOMMU, so a finding would be noise.
        0 => None,
        _ if there || needed => Some(Finding::good("iommu", format!("enabled, {groups} groups"))),
        _ => None,
    }
}

/// Checks the locked-memory limit, because the daemon pins the memory that a real card accesses.
fn memlock(patient: &Patient<'_>) -> Option<Finding> {
    if !patient.has(CardKind::Vfio) {
        return None;
    }
    let limit = super::service::process(&patient.host).and_then(|pid| {
        let limits = patient.host.read(format!("proc/{pid}/limits"))?;
        let line = limits.lines().find_map(|line| line.strip_prefix("Max locked memory"))?.to_owned();
        Some(line.split_whitespace().next()?.to_owned())
    });
    Some(match limit.as_deref() {
        Some("unlimited") => Finding::good("memlock", "the daemon may lock any amount of memory"),
        Some(bytes) => {
            let mib = bytes.parse::<u64>().unwrap_or(0) >> 20;
            Finding::missing(
                "memlock",
                format!("the daemon may lock only {mib} MiB"),
                "add a drop-in with `LimitMEMLOCK=infinity` (`systemctl edit gpu-mediator`): VFIO locks the guests' RAM",
            )
        }
        None => Finding::note(
            "memlock",
            "the daemon is not running, so its limit is unknown",
            "start it and check again; it needs `LimitMEMLOCK=infinity`",
        ),
    })
}
