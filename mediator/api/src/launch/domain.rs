//! A libvirt domain for a virtual machine.
//!
//! libvirt does not support vfio-user, so that the device is a raw argument of QEMU, which libvirt passes on. libvirt
//! does the rest: memory in a file that QEMU shares with the daemon, and a PCI Express machine.
//!
//! Sources: `formatdomain.html`, `drvqemu.html#pass-through-of-arbitrary-qemu-commands`.

use super::{MemorySize, Named, Path};
use crate::LaunchArgs;

/// Emulator of the domain; it must be QEMU 10.1 or newer.
const EMULATOR: &str = "/usr/bin/qemu-system-x86_64";
/// Name space of the element that tells the hook which vGPU to create.
pub const NAMESPACE: &str = "urn:gpu-mediator:libvirt:1";
/// The device's slot on the machine's bus: libvirt puts none of its own there.
const SLOT: &str = "1e.0";

/// Escapes text for an attribute between apostrophes.
fn escaped(text: &str) -> String {
    let mut out = String::new();
    for c in text.chars() {
        match c {
            '&' => out.push_str("&amp;"),
            '<' => out.push_str("&lt;"),
            '>' => out.push_str("&gt;"),
            '\'' => out.push_str("&apos;"),
            '"' => out.push_str("&quot;"),
            c => out.push(c),
        }
    }
    out
}

fn device(socket: &Path, id: &str) -> String {
    let device = serde_json::json!({
        "driver": "vfio-user-pci",
        "id": id,
        "bus": "pcie.0",
        "addr": SLOT,
        "rombar": 0,
        "socket": { "type": "unix", "path": socket.display().to_string() },
    });
    device.to_string()
}

/// Returns the domain, with comments about additions that an administrator makes.
pub(super) fn described(vm: Named<'_>, memory: &MemorySize) -> LaunchArgs {
    let Named { name, socket, profile, .. } = vm;
    let (name, device, mib) = (escaped(name), escaped(&device(socket, vm.id())), memory.mib());
    let vgpu = match profile {
        Some(profile) => format!("<gpu:vgpu xmlns:gpu='{NAMESPACE}' vm='{name}' profile='{}'/>", escaped(profile)),
        None => format!(
            "<!-- With an element here as this, the hook makes the vGPU when the domain starts and removes it when that has ended:
         <gpu:vgpu xmlns:gpu='{NAMESPACE}' vm='{name}' vram-mib='256' weight='100'/> -->"
        ),
    };
    let command = format!(
        "<domain type='kvm' xmlns:qemu='http://libvirt.org/schemas/domain/qemu/1.0'>
  <name>{name}</name>
  <metadata>
    {vgpu}
  </metadata>
  <memory unit='MiB'>{mib}</memory>
  <!-- The card reads the guest's memory through this file. -->
  <memoryBacking>
    <source type='memfd'/>
    <access mode='shared'/>
  </memoryBacking>
  <vcpu>1</vcpu>
  <os>
    <type arch='x86_64' machine='q35'>hvm</type>
  </os>
  <features>
    <acpi/>
    <apic/>
  </features>
  <cpu mode='host-passthrough' migratable='off'/>
  <on_reboot>restart</on_reboot>
  <devices>
    <!-- QEMU 10.1 or newer: `mediatorctl doctor` says whether this one is. -->
    <emulator>{EMULATOR}</emulator>
    <serial type='pty'/>
    <memballoon model='none'/>
  </devices>
  <qemu:commandline>
    <qemu:arg value='-device'/>
    <qemu:arg value='{device}'/>
  </qemu:commandline>
</domain>"
    );
    let notes = [
        "add disks and networks with `virsh edit`",
        "do not migrate or save such a domain: the device's state would be lost",
    ];
    LaunchArgs {
        vmm: super::Vmm::Libvirt.to_string(),
        args: Vec::new(),
        command,
        notes: notes.map(str::to_owned).into(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_domain_shares_its_memory_and_names_the_socket() {
        let vm = Named { name: "a", socket: Path::new("/run/it's/a.sock"), profile: None, is_cuda: false };
        let domain = described(vm, &"1G".parse().unwrap());
        let made = described(Named { profile: Some("desktop"), ..vm }, &"1G".parse().unwrap());
        assert!(
            made.command.contains("<gpu:vgpu xmlns:gpu='urn:gpu-mediator:libvirt:1' vm='a' profile='desktop'/>"),
            "{}",
            made.command
        );
        for part in [
            "<name>a</name>",
            "<memory unit='MiB'>1024</memory>",
            "<source type='memfd'/>",
            "<access mode='shared'/>",
            "<qemu:arg value='{&quot;addr&quot;:&quot;1e.0&quot;,&quot;bus&quot;:&quot;pcie.0&quot;,",
            "/run/it&apos;s/a.sock",
        ] {
            assert!(domain.command.contains(part), "{part}:\n{}", domain.command);
        }
        assert_eq!(domain.args, Vec::<String>::new());
    }
}
