//! The machine and its kernel: KVM, IOMMU, asynchronous I/O, pinned memory.

use config::CardKind;

use super::{Finding, Patient};

/// Maximum number of asynchronous operations of one virtual machine: one for each interrupt of its device.
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
            "/dev/kvm is there, but the CPU offers no virtualization",
            "turn VT-x or AMD-V on in the firmware's setup; of a virtual machine, let it have nested virtualization",
        ),
        Some(rights) if rights.mode & 0o006 == 0o006 => Finding::good("kvm", "/dev/kvm, for all users"),
        Some(rights) => Finding::good("kvm", format!("/dev/kvm, for group {}", rights.group)),
        None if offers => Finding::needed(
            needed,
            "kvm",
            "there is no /dev/kvm",
            "`modprobe kvm_intel` or `modprobe kvm_amd`; if that fails, turn VT-x or AMD-V on in the firmware's setup",
        ),
        None => Finding::needed(
            needed,
            "kvm",
            "there is no /dev/kvm, and the CPU offers no virtualization",
            "turn VT-x or AMD-V on in the firmware's setup; without, VMMs translate and are slow",
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
                format!("{used} of {most} asynchronous operations of the kernel are in use"),
                "raise `fs.aio-max-nr` (`sysctl -w fs.aio-max-nr=1048576`, and in /etc/sysctl.d)",
            )
        }
        (Some(_), Some(most)) => Finding::good("aio", format!("the kernel has asynchronous I/O, {most} operations")),
        _ => Finding::needed(
            needed,
            "aio",
            "the kernel has no asynchronous I/O",
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
            "the kernel has no IOMMU",
            "turn VT-d or AMD-Vi on in the firmware's setup, and boot Intel's with `intel_iommu=on`",
        )),
        // No card needs an IOMMU, so a finding would only be noise.
        0 => None,
        _ if there || needed => Some(Finding::good("iommu", format!("on, {groups} groups"))),
        _ => None,
    }
}

/// Checks the limit of pinned memory, because the daemon pins the memory that a real card accesses.
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
        Some("unlimited") => Finding::good("memlock", "the daemon may pin any amount of memory"),
        Some(bytes) => {
            let mib = bytes.parse::<u64>().unwrap_or(0) >> 20;
            Finding::missing(
                "memlock",
                format!("the daemon may pin {mib} MiB"),
                "a drop-in with `LimitMEMLOCK=infinity` (`systemctl edit gpu-mediator`): a card behind VFIO has guests' RAM pinned",
            )
        }
        None => Finding::note(
            "memlock",
            "the daemon does not run, so its limit is not known",
            "start it and check again; it needs `LimitMEMLOCK=infinity`",
        ),
    })
}
