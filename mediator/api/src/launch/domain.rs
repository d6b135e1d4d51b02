//! libvirt domains for virtual machines.
//!
//! libvirt does not support vfio-user, so the device is specified as a QEMU argument that libvirt passes through.
//! libvirt itself configures the rest: memory in a file that QEMU shares with the daemon, and a PCI Express machine.
//!
//! Sources: `formatdomain.html`, `drvqemu.html#pass-through-of-arbitrary-qemu-commands`.

use super::{MemorySize, Named, Path};
use crate::LaunchArgs;

/// Path of the domain's emulator, which must be QEMU 10.1 or newer.
const EMULATOR: &str = "/usr/bin/qemu-system-x86_64";
/// XML namespace of the element that specifies the vGPU for the hook.
pub const NAMESPACE: &str = "urn:gpu-mediator:libvirt:1";
/// Slot of the device on the root bus. libvirt does not use this slot itself.
const SLOT: &str = "1e.0";

/// Escapes text for an attribute value in single quotes.
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

/// Returns the domain XML. Its comments explain elements, and list those that an administrator may add.
pub(super) fn described(vm: Named<'_>, memory: &MemorySize) -> LaunchArgs {
    let Named { name, socket, profile, .. } = vm;
    let (name, device, mib) = (escaped(name), escaped(&device(socket, vm.id())), memory.mib());
    let vgpu = match profile {
        Some(profile) => format!("<gpu:vgpu xmlns:gpu='{NAMESPACE}' vm='{name}' profile='{}'/>", escaped(profile)),
        None => format!(
            "<!-- With an element like this, the hook creates the vGPU when the domain starts, and removes it after the domain has stopped:
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
  <!-- The card accesses the guest's memory through this file. -->
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
    <!-- QEMU 10.1 or newer: `mediatorctl doctor` checks the version. -->
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
        "add disks and network interfaces with `virsh edit`",
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
