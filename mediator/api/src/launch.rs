//! VMM command lines that connect to a virtual machine's socket.

use std::fmt;
use std::path::Path;
use std::str::FromStr;

use clap::ValueEnum;
use serde::{Deserialize, Serialize};

use crate::LaunchArgs;

mod domain;

pub use domain::NAMESPACE;

/// VMM under which a virtual machine can run.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize, Serialize, ValueEnum, schemars::JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum Vmm {
    /// QEMU 10.1 or newer.
    #[default]
    Qemu,
    /// cloud-hypervisor.
    CloudHypervisor,
    /// QEMU through libvirt, as a complete domain.
    Libvirt,
    /// Xen's `xl`, for a virtual machine that is a Xen domain.
    Xen,
}

impl fmt::Display for Vmm {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Qemu => "qemu",
            Self::CloudHypervisor => "cloud-hypervisor",
            Self::Libvirt => "libvirt",
            Self::Xen => "xen",
        })
    }
}

/// VMM that uses vfio-user over a socket.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SocketVmm {
    /// QEMU 10.1 or newer.
    Qemu,
    /// cloud-hypervisor.
    CloudHypervisor,
    /// QEMU through libvirt.
    Libvirt,
}

impl From<SocketVmm> for Vmm {
    fn from(vmm: SocketVmm) -> Self {
        match vmm {
            SocketVmm::Qemu => Self::Qemu,
            SocketVmm::CloudHypervisor => Self::CloudHypervisor,
            SocketVmm::Libvirt => Self::Libvirt,
        }
    }
}

/// Size of a guest's RAM: a number followed by `M` or `G`.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize, Serialize, schemars::JsonSchema)]
#[serde(try_from = "String", into = "String")]
pub struct MemorySize(String);

impl Default for MemorySize {
    fn default() -> Self {
        Self("2G".to_owned())
    }
}

impl FromStr for MemorySize {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let number = text.strip_suffix(['M', 'G']).unwrap_or(text);
        match number.parse::<u32>() {
            // The meaning of a number without a unit depends on the VMM.
            Ok(1..) if number.starts_with('+') => {
                Err(format!("`{text}` is not a memory size, expected for example 2G"))
            }
            Ok(1..) if text == number => Ok(Self(format!("{number}M"))),
            Ok(1..) => Ok(Self(text.to_owned())),
            _ => Err(format!(
                "`{text}` is not a memory size, expected a number of MiB, or a number with M or G, such as 2G"
            )),
        }
    }
}

impl MemorySize {
    /// Returns the size in MiB.
    #[must_use]
    pub fn mib(&self) -> u64 {
        let number = |text: &str, factor| text.parse::<u64>().unwrap_or(0) * factor;
        match self.0.strip_suffix('G') {
            Some(gib) => number(gib, 1024),
            None => number(self.0.trim_end_matches('M'), 1),
        }
    }
}

impl TryFrom<String> for MemorySize {
    type Error = String;

    fn try_from(text: String) -> Result<Self, String> {
        text.parse()
    }
}

impl From<MemorySize> for String {
    fn from(size: MemorySize) -> Self {
        size.0
    }
}

/// A virtual machine whose VMM arguments are requested.
#[derive(Clone, Copy, Debug)]
pub struct Named<'a> {
    /// Name of the virtual machine.
    pub name: &'a str,
    /// Path of the virtual machine's socket.
    pub socket: &'a Path,
    /// Profile from which the libvirt hook creates the virtual machine, if any.
    pub profile: Option<&'a str>,
    /// True if the guest's programs use CUDA, through a device that is not a virtual GPU.
    pub is_cuda: bool,
}

impl Named<'_> {
    /// Returns the device ID in QEMU. The ID depends on the kind of device, because a guest can have both a virtual GPU
    /// and the CUDA function of another entry.
    fn id(&self) -> &'static str {
        if self.is_cuda { "cuda0" } else { "vgpu0" }
    }
}

/// Returns the `xl` configuration for a virtual machine's domain `domain`, with `memory` of guest RAM and BARs that
/// total `bars_mib` MiB.
#[must_use]
pub fn xl(domain: &str, bars_mib: u64, MemorySize(memory): &MemorySize) -> LaunchArgs {
    let mib = match memory.strip_suffix('G') {
        Some(gib) => gib.parse::<u64>().unwrap_or(0).saturating_mul(1024),
        None => memory.trim_end_matches('M').parse().unwrap_or(0),
    };
    // Below 4 GiB, the BARs need space in addition to the ranges used by QEMU and the firmware.
    let hole = bars_mib.saturating_add(96).next_multiple_of(256).max(256);
    let name = if domain.bytes().all(|byte| byte.is_ascii_digit()) { "..." } else { domain };
    let args = vec![
        format!("name = \"{name}\""),
        "type = \"hvm\"".to_owned(),
        format!("memory = {mib}"),
        format!("maxmem = {mib}"),
        format!("mmio_hole = {hole}"),
    ];
    let notes = [
        "lines for the domain's configuration file; create the domain paused with `xl create -p FILE`, wait until `mediatorctl vm show` shows it as connected, \
         then run `xl unpause NAME`: firmware that runs earlier does not detect the device",
        "maxmem must not exceed memory, because pages that the domain does not have yet cannot be lent",
        "the device uses slot 10 of bus 0 (00:10.0); do not assign this slot to a QEMU device",
        "xl does not save or migrate such a domain while it is served, because the device's state would be lost",
    ];
    LaunchArgs { vmm: Vmm::Xen.to_string(), command: args.join("\n"), args, notes: notes.map(str::to_owned).to_vec() }
}

/// Returns the arguments of `vmm` for a guest with `memory` of RAM and with the virtual machine's device.
#[must_use]
pub fn args(vmm: SocketVmm, vm: Named<'_>, memory: &MemorySize) -> LaunchArgs {
    let path = vm.socket.display().to_string();
    let MemorySize(size) = memory;
    let (args, notes): (Vec<String>, Vec<&str>) = match vmm {
        SocketVmm::Libvirt => return domain::described(vm, memory),
        SocketVmm::Qemu => {
            let device = serde_json::json!({
                "driver": "vfio-user-pci",
                "id": vm.id(),
                "rombar": 0,
                "socket": { "type": "unix", "path": path },
            });
            let args = [
                "-m".to_owned(),
                size.clone(),
                "-object".to_owned(),
                format!("memory-backend-memfd,id=vgpu-ram,size={size},share=on"),
                "-machine".to_owned(),
                "memory-backend=vgpu-ram".to_owned(),
                "-device".to_owned(),
                device.to_string(),
            ];
            let mut notes = vec![
                "requires QEMU 10.1 or newer; start QEMU after the VM is listed as waiting",
                "share=on is required, because the card accesses guest memory through the file that QEMU passes",
                "do not set x-no-posted-writes for a VM with `apertures = \"trapped\"`: each register write would wait for a response",
                "do not migrate or save such a VM: the device's state would be lost without an error message",
            ];
            if vm.is_cuda {
                notes.push("the guest's kernel needs the driver virtio_gpu, which Debian's cloud kernels lack");
                notes.push("for a virtual GPU of another VM entry in the same guest, pass both -device arguments to QEMU, and the others once");
            }
            (args.to_vec(), notes)
        }
        SocketVmm::CloudHypervisor => {
            let args = [
                "--memory".to_owned(),
                format!("size={size},shared=on"),
                "--user-device".to_owned(),
                format!("socket={path}"),
            ];
            let notes = vec![
                "shared=on is required, because the card accesses guest memory through the file that cloud-hypervisor passes",
                "do not migrate or snapshot such a VM: the device's state would be lost",
            ];
            (args.to_vec(), notes)
        }
    };
    LaunchArgs {
        vmm: Vmm::from(vmm).to_string(),
        command: args.iter().map(|arg| quoted(arg)).collect::<Vec<_>>().join(" "),
        args,
        notes: notes.into_iter().map(str::to_owned).collect(),
    }
}

/// Quotes an argument for a POSIX shell.
fn quoted(arg: &str) -> String {
    let plain = |byte: u8| byte.is_ascii_alphanumeric() || b"-_=,./:@%+".contains(&byte);
    if !arg.is_empty() && arg.bytes().all(plain) {
        return arg.to_owned();
    }
    format!("'{}'", arg.replace('\'', "'\\''"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn vm() -> Named<'static> {
        Named { name: "a", socket: Path::new("/run/m/a.sock"), profile: None, is_cuda: false }
    }

    #[test]
    fn qemu_gets_shared_memory_and_the_device_as_json() {
        let args = args(SocketVmm::Qemu, vm(), &"1G".parse().unwrap());
        assert_eq!(
            args.command,
            "-m 1G -object memory-backend-memfd,id=vgpu-ram,size=1G,share=on -machine memory-backend=vgpu-ram \
             -device '{\"driver\":\"vfio-user-pci\",\"id\":\"vgpu0\",\"rombar\":0,\
             \"socket\":{\"path\":\"/run/m/a.sock\",\"type\":\"unix\"}}'"
        );
    }

    #[test]
    fn cloud_hypervisor_gets_shared_memory_and_the_socket() {
        let args = args(SocketVmm::CloudHypervisor, vm(), &MemorySize::default());
        assert_eq!(args.args, ["--memory", "size=2G,shared=on", "--user-device", "socket=/run/m/a.sock"]);
        assert!(args.notes.iter().any(|note| note.contains("shared=on")), "{:?}", args.notes);
    }

    #[test]
    fn xl_gets_lines_with_all_memory_and_room_for_the_bars() {
        let args = xl("guest", 16 + 128 + 64, &"1G".parse().unwrap());
        assert_eq!(args.vmm, "xen");
        let lines = "name = \"guest\"\ntype = \"hvm\"\nmemory = 1024\nmaxmem = 1024\nmmio_hole = 512";
        assert_eq!(args.command, lines);
        assert!(args.notes.iter().any(|note| note.contains("xl create -p")), "{:?}", args.notes);
        assert!(xl("7", 96, &"512M".parse().unwrap()).args.contains(&"memory = 512".to_owned()));
        assert!(xl("7", 96, &MemorySize::default()).args.contains(&"mmio_hole = 256".to_owned()));
    }

    #[test]
    fn arguments_survive_a_shell() {
        assert_eq!(quoted("a b"), "'a b'");
        assert_eq!(quoted("it's"), "'it'\\''s'");
        assert_eq!(quoted(""), "''");
    }

    #[test]
    fn sizes_without_number_are_refused() {
        for text in ["", "G", "0G", "0", "2T", "-1G", "+1G", "1G,share=off", "99999999999G"] {
            let error = text.parse::<MemorySize>().unwrap_err();
            assert!(error.starts_with(&format!("`{text}` is not a memory size, expected")), "{error}");
        }
        for (text, mib) in [("512M", 512), ("2G", 2048), ("512", 512)] {
            assert_eq!(text.parse::<MemorySize>().map(|size| size.mib()), Ok(mib));
        }
    }
}
