//! Checks cards: the host driver of each card behind VFIO, and NVIDIA's driver for CUDA cards.

use std::path::{Path, PathBuf};

use config::{CardKind, CardSpec};
use vfio_host::{Function, Sysfs};

use super::{Finding, Patient};
use crate::cdi::NAMES;

/// Folders that the dynamic loader searches for libraries.
pub(super) const LIBRARIES: [&str; 5] =
    ["usr/lib/x86_64-linux-gnu", "usr/lib/x86_64-linux-gnu/nvidia/current", "usr/lib64", "usr/lib", "usr/local/lib"];
/// Folder of the installed library that stands in for the driver and NVML in tenants' programs.
const FRONT: &str = "usr/lib/gpu-mediator/cuda";

pub(super) fn look(patient: &Patient<'_>) -> Vec<Finding> {
    let functions = Sysfs::at(patient.host.path("sys")).list().unwrap_or_default();
    let cards = patient.config.iter().flat_map(|config| &config.cards);
    let mut findings: Vec<_> = cards
        .clone()
        .flat_map(|card| match card.kind {
            CardKind::Vfio => vfio(card, &functions),
            CardKind::Cuda => cuda(card, patient),
            CardKind::Simgpu => Vec::new(),
        })
        .collect();
    if patient.has(CardKind::Cuda) {
        let missing = |name: &&&str| !patient.host.has(format!("{FRONT}/{name}"));
        findings.push(match NAMES.iter().find(missing) {
            None => Finding::good("library", format!("/{FRONT}")),
            Some(name) => Finding::missing(
                "library",
                format!("/{FRONT}/{name} is missing"),
                "install the package gpu-mediator with its CUDA parts; tenants' programs load the library by any of its four names",
            ),
        });
    }
    let known = |function: &&Function| cards.clone().any(|card| card.address == Some(function.address));
    let others: Vec<_> =
        functions.iter().filter(|one| one.is_card() && !known(one)).map(|one| one.address.to_string()).collect();
    if !others.is_empty() {
        let found = format!("NVIDIA cards without a [[card]] table: {}", others.join(", "));
        findings.push(Finding::note(
            "cards",
            found,
            "`mediatorctl card list --host` lists them; see docs/guides/real-cards.md and docs/guides/cuda.md",
        ));
    }
    findings
}

fn vfio(card: &CardSpec, functions: &[Function]) -> Vec<Finding> {
    let Some(address) = card.address else { return Vec::new() };
    let Some(function) = functions.iter().find(|function| function.address == address) else {
        let found = format!("card `{}`: the host has no NVIDIA PCI function {address}", card.name);
        return vec![Finding::missing("driver", found, "`mediatorctl card list --host` lists those of the host")];
    };
    let obstacles = function.obstacles();
    if obstacles.is_empty() {
        return vec![Finding::good("driver", format!("card `{}`: {address} is bound to vfio-pci", card.name))];
    }
    let told = obstacles
        .iter()
        .map(|obstacle| Finding::missing("driver", format!("card `{}`: {obstacle}", card.name), obstacle.what_to_do()));
    told.collect()
}

fn cuda(card: &CardSpec, patient: &Patient<'_>) -> Vec<Finding> {
    let (host, driver) = (&patient.host, card.cuda().driver);
    let places: Vec<PathBuf> = match driver.is_absolute() {
        true => vec![driver.clone()],
        false => LIBRARIES.iter().map(|folder| Path::new(folder).join(&driver)).collect(),
    };
    let library = places.iter().find(|path| host.has(path));
    let mut findings = Vec::new();
    findings.push(match library {
        Some(path) => Finding::good("nvidia", format!("card `{}`: {}", card.name, Path::new("/").join(path).display())),
        None => Finding::missing(
            "nvidia",
            format!("card `{}`: {} is missing", card.name, driver.display()),
            "install NVIDIA's driver (Debian: `nvidia-driver libcuda1`), or set `cuda.driver` to its library",
        ),
    });
    // A driver configured by path need not use NVIDIA's kernel module.
    if !driver.is_absolute() {
        let version = host.read("proc/driver/nvidia/version");
        let version = version.as_deref().and_then(|text| text.lines().next());
        findings.push(match version {
            Some(version) => Finding::good("nvidia", version.split_whitespace().collect::<Vec<_>>().join(" ")),
            None => {
                Finding::missing("nvidia", "NVIDIA's kernel module is not loaded", "run `modprobe nvidia nvidia-uvm`")
            }
        });
        let absent: Vec<_> = ["dev/nvidiactl", "dev/nvidia-uvm"]
            .into_iter()
            .filter(|path| !host.has(path))
            .map(|path| format!("/{path}"))
            .collect();
        if !absent.is_empty() {
            let found = format!("missing device nodes: {}", absent.join(", "));
            findings.push(Finding::missing(
                "nvidia",
                found,
                "run `nvidia-modprobe -c 0 -u`, or start nvidia-persistenced at boot",
            ));
        }
    }
    findings
}
