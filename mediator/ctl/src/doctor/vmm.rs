//! Checks VMMs: QEMU's version and devices, and libvirt with its hook, users and profiles.

use std::path::Path;

use super::{Finding, Patient};

/// First QEMU version with `vfio-user-pci`.
const QEMU: (u32, u32) = (10, 1);
/// Names of the QEMU executable.
const NAMES: [&str; 2] = ["qemu-system-x86_64", "qemu-kvm"];
/// Path where the package installs libvirt's hook, and where libvirt searches for it.
const HOOK: &str = "etc/libvirt/hooks/qemu.d/gpu-mediator";
/// File that permits QEMU's connections under libvirt's AppArmor profile.
const APPARMOR: &str = "etc/apparmor.d/abstractions/libvirt-qemu.d/gpu-mediator";
/// Debian's user for libvirt's QEMU processes.
const QEMU_USER: &str = "libvirt-qemu";

pub(super) fn look(patient: &Patient<'_>) -> Vec<Finding> {
    let mut findings = vec![qemu(patient)];
    findings.extend(libvirt(patient));
    findings
}

/// Returns the first two version numbers in the output of `--version`.
fn version(text: &str) -> Option<(u32, u32)> {
    let rest = text.split_once("version ")?.1;
    let mut numbers = rest.split(|c: char| !c.is_ascii_digit()).map(str::parse);
    Some((numbers.next()?.ok()?, numbers.next()?.ok()?))
}

/// Returns advice on installing a sufficiently new QEMU on this distribution.
fn newer(patient: &Patient<'_>) -> String {
    let release = patient.host.read("etc/os-release").unwrap_or_default();
    let is = |word: &str| release.lines().any(|line| line.trim_matches('"') == word);
    match () {
        () if is("VERSION_CODENAME=trixie") => {
            "install it from Debian 13's backports: `apt install -t trixie-backports qemu-system-x86`".to_owned()
        }
        () if is("VERSION_CODENAME=bookworm") => {
            "Debian 12 does not package it; upgrade to Debian 13 with backports, or build QEMU 10.1".to_owned()
        }
        () => "install QEMU 10.1 or newer, for example from Debian 13's backports".to_owned(),
    }
}

fn qemu(patient: &Patient<'_>) -> Finding {
    let (host, needed) = (&patient.host, patient.has_vms());
    let Some(program) = NAMES.iter().find_map(|name| host.program(name)) else {
        let what = format!("{}; cloud-hypervisor also works", newer(patient));
        return Finding::needed(needed, "qemu", "QEMU is not installed", what);
    };
    let name = program.file_name().unwrap_or_default().to_string_lossy().into_owned();
    let Some(version) = host.program_output(&program, &["--version"]).as_deref().and_then(version) else {
        return Finding::needed(needed, "qemu", format!("{name} --version reports no version"), newer(patient));
    };
    let shown = format!("{name} is QEMU {}.{}", version.0, version.1);
    if version < QEMU {
        return Finding::needed(
            needed,
            "qemu",
            format!("{shown}, older than 10.1, the first version with vfio-user"),
            newer(patient),
        );
    }
    match host.program_output(&program, &["-device", "help"]) {
        Some(devices) if devices.contains("\"vfio-user-pci\"") => {
            Finding::good("qemu", format!("{shown}, with vfio-user-pci"))
        }
        _ => Finding::needed(
            needed,
            "qemu",
            format!("{shown}, without the device vfio-user-pci"),
            "build it with --enable-vfio-user",
        ),
    }
}

fn libvirt(patient: &Patient<'_>) -> Vec<Finding> {
    let host = &patient.host;
    if ["libvirtd", "virtqemud"].iter().all(|name| host.program(name).is_none()) {
        return Vec::new();
    }
    let mut findings = vec![match host.has(HOOK) {
        true => Finding::good("libvirt", format!("the hook /{HOOK} is installed")),
        false => Finding::note(
            "libvirt",
            format!("the hook /{HOOK} is missing"),
            "install the package's file there (docs/guides/libvirt.md): it creates and removes the vGPUs of domains",
        ),
    }];
    if host.has("etc/apparmor.d/abstractions/libvirt-qemu") && !host.has(APPARMOR) {
        findings.push(Finding::note(
            "apparmor",
            format!("/{APPARMOR} is missing"),
            "install the package's file there: otherwise AppArmor denies libvirt's QEMU access to the vGPUs' sockets",
        ));
    }
    if host.has_user(QEMU_USER) {
        findings.extend(sockets(patient));
    }
    findings
}

/// Checks that libvirt's user can connect to the sockets of the configured virtual machines.
fn sockets(patient: &Patient<'_>) -> Option<Finding> {
    let groups = patient.host.groups(QEMU_USER);
    let config = patient.config.as_ref().ok()?;
    let shut = |socket: &Path| {
        let rights = patient.host.rights(socket).filter(|rights| rights.is_socket)?;
        let may = rights.user == QEMU_USER && rights.mode & 0o200 != 0
            || groups.contains(&rights.group) && rights.mode & 0o020 != 0
            || rights.mode & 0o002 != 0;
        (!may).then(|| {
            format!("{} (user {}, group {}, {:04o})", socket.display(), rights.user, rights.group, rights.mode)
        })
    };
    let shut: Vec<_> = config.vms.iter().filter_map(|vm| shut(&vm.socket_path(&config.daemon.socket_dir))).collect();
    if shut.is_empty() {
        return None;
    }
    let found = format!("the user {QEMU_USER} cannot connect to {}", shut.join(", "));
    let what = "add `group = \"kvm\"` to the [[vm]] tables and `SupplementaryGroups=kvm` to the service, or let the hook create the VMs";
    Some(Finding::note("rights", found, what))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_are_read_as_qemu_prints_them() {
        assert_eq!(version("QEMU emulator version 11.1.3 (Debian 1:11.1.3+ds-1)"), Some((11, 1)));
        assert_eq!(version("QEMU emulator version 9.2.0"), Some((9, 2)));
        assert_eq!((version("nothing"), version("version x")), (None, None));
    }
}
