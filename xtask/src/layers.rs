//! Checks the dependencies between crates, and the crates' licences.

use std::fs;

use anyhow::{Context, Result};
use cargo_metadata::{DependencyKind, Metadata, MetadataCommand, Package};
use serde::Deserialize;
use spdx::{Expression, LicenseReq, ParseMode};

use crate::run::root;

/// The diagram in ARCHITECTURE.md as data: each crate, with the workspace crates on which it may depend. A crate's
/// tests and benches may use additional crates. An unlisted crate fails the check.
const LAYERS: &[(&str, &[&str])] = &[
    ("nvspec", &[]),
    ("card", &[]),
    ("sm20", &[]),
    ("gdev", &["nvspec", "pv", "sm20", "vmm-glue"]),
    ("gdev-c", &["gdev", "sm20"]),
    ("gdev-crypt", &["gdev", "sm20"]),
    ("gdev-driver-api", &["gdev", "sm20"]),
    ("workloads", &["gdev", "sm20"]),
    ("simgpu-memory", &["card", "nvspec"]),
    ("simgpu-engines", &["card", "nvspec", "simgpu-memory", "sm20"]),
    ("simgpu", &["nvspec", "card", "saved-state", "simgpu-engines", "simgpu-memory"]),
    ("devmodel", &["nvspec", "saved-state"]),
    ("shadow-pt", &["nvspec", "saved-state"]),
    ("tenant", &[]),
    ("saved-state", &[]),
    ("channels", &["nvspec", "saved-state", "tenant"]),
    ("pv", &["nvspec", "saved-state"]),
    ("vram", &["nvspec", "saved-state", "tenant"]),
    ("sched", &["saved-state", "tenant"]),
    ("gang", &["sched"]),
    ("tenancy", &["saved-state", "sched", "vram"]),
    ("vmm-memory", &["saved-state"]),
    ("vmm-glue", &["saved-state", "vmm-memory"]),
    ("xen-device", &["vmm-glue"]),
    ("cuda-control", &["gang", "sched", "tenancy"]),
    ("cuda-protocol", &[]),
    ("cuda-table", &[]),
    ("cuda-driver", &["cuda-table"]),
    ("cuda-exports", &[]),
    ("cuda-fake", &["cuda-exports", "cuda-images", "cuda-table"]),
    ("cuda-rig", &["cuda-protocol"]),
    ("chunk-arena", &[]),
    ("cuda-pacing", &["cuda-driver", "cuda-protocol"]),
    ("program-cards", &["cuda-driver", "cuda-exports", "cuda-pacing"]),
    ("cuda-shim", &["chunk-arena", "cuda-driver", "cuda-pacing", "cuda-protocol", "cuda-table", "program-cards"]),
    ("guest-nvml", &["cuda-calls", "cuda-table"]),
    ("owner-driver", &[]),
    ("owner-host", &["cuda-control", "cuda-protocol", "gang", "sched", "vram"]),
    ("cuda-mps", &[]),
    ("cuda-pieces", &["owner-driver", "vram"]),
    (
        "cuda-owner",
        &[
            "cuda-control",
            "cuda-mps",
            "cuda-pieces",
            "cuda-protocol",
            "gang",
            "owner-driver",
            "owner-host",
            "sched",
            "tenancy",
            "vram",
        ],
    ),
    ("cuda-ring", &[]),
    ("cuda-calls", &["cuda-ring"]),
    ("worker-link", &[]),
    (
        "cuda-guest",
        &["cuda-calls", "cuda-exports", "cuda-ring", "cuda-table", "guest-nvml", "render-node", "worker-link"],
    ),
    ("cuda-images", &[]),
    ("object-log", &["cuda-calls", "cuda-ring", "worker-link"]),
    ("cuda-worker", &["cuda-calls", "cuda-images", "cuda-ring", "object-log", "worker-link"]),
    ("locks", &[]),
    ("vfio-host", &["nvspec"]),
    ("vfio-card", &["card", "nvspec", "vfio-host"]),
    // This crate only chooses a card: `config` has the rules that cards must obey, and the daemon reads the cards'
    // links from their owners.
    ("placement", &[]),
    ("config", &["channels", "placement", "sched", "shadow-pt", "vfio-host", "vram"]),
    ("api", &["config", "sched"]),
    ("overrides", &["config", "sched"]),
    ("tenant-move", &["api", "config", "cuda-control"]),
    ("owner-settings", &["config", "cuda-control", "gang", "overrides", "vram"]),
    (
        "guest-workers",
        &[
            "config",
            "cuda-control",
            "cuda-protocol",
            "cuda-ring",
            "listening",
            "locks",
            "owner-process",
            "tenant-move",
            "vcuda",
            "worker-link",
        ],
    ),
    ("physical", &["card", "config", "saved-state", "simgpu", "vfio-card"]),
    ("logging", &["config", "locks"]),
    ("metrics", &["api", "locks"]),
    ("cuda-status", &["cuda-control", "locks", "sched", "tenancy"]),
    ("card-views", &["api", "config", "cuda-control", "cuda-status", "sched", "tenancy", "vram"]),
    ("events", &["admin-socket", "api", "locks"]),
    ("rebalance", &["config", "sched"]),
    ("fdstore", &["config", "vmm-glue"]),
    ("listening", &["config", "fdstore", "locks", "vmm-glue"]),
    ("owner-process", &["api", "cuda-control", "cuda-status", "events", "listening"]),
    ("card-state", &["channels", "devmodel", "nvspec", "pv", "saved-state", "sched", "shadow-pt", "tenancy", "vram"]),
    ("handover", &["saved-state"]),
    ("firmware", &["nvspec"]),
    ("residue", &["nvspec", "sm20", "tenant"]),
    ("bringup", &["card", "channels", "firmware", "nvspec"]),
    (
        "card-memory",
        &[
            "bringup",
            "card",
            "channels",
            "locks",
            "nvspec",
            "pv",
            "saved-state",
            "sched",
            "shadow-pt",
            "tenancy",
            "vram",
        ],
    ),
    (
        "card-manager",
        &[
            "bringup",
            "card",
            "card-memory",
            "card-state",
            "channels",
            "devmodel",
            "firmware",
            "locks",
            "nvspec",
            "pv",
            "residue",
            "saved-state",
            "sched",
            "shadow-pt",
            "tenancy",
            "vram",
        ],
    ),
    ("vm-device", &["card", "devmodel", "nvspec", "card-manager", "saved-state", "vmm-glue"]),
    (
        "vgpu",
        &[
            "card",
            "card-state",
            "channels",
            "devmodel",
            "locks",
            "nvspec",
            "card-manager",
            "pv",
            "saved-state",
            "shadow-pt",
            "vm-device",
            "vmm-glue",
            "vram",
        ],
    ),
    ("passthrough", &["bringup", "card", "devmodel", "locks", "nvspec", "vm-device", "vmm-glue"]),
    ("render-node", &["cuda-ring"]),
    ("cuda-probe", &["cuda-ring", "render-node"]),
    ("vcuda", &["cuda-ring", "locks", "object-log", "saved-state", "vmm-glue", "worker-link"]),
    (
        "rig",
        &[
            "card",
            "firmware",
            "gdev",
            "handover",
            "nvspec",
            "card-manager",
            "pv",
            "saved-state",
            "sched",
            "shadow-pt",
            "simgpu",
            "vgpu",
            "vm-device",
            "vmm-glue",
            "vram",
            "workloads",
            "xen-device",
        ],
    ),
    ("admin-client", &["api"]),
    ("admin-socket", &[]),
    ("status-page", &[]),
    ("perfetto-trace", &["sched"]),
    (
        "mediatorctl",
        &[
            "admin-client",
            "api",
            "config",
            "cuda-protocol",
            "firmware",
            "cdi-spec",
            "nvspec",
            "perfetto-trace",
            "sched",
            "shadow-pt",
            "vfio-host",
            "vram",
        ],
    ),
    ("slurm-plugin", &["admin-client", "api", "cuda-protocol", "cdi-spec", "mediatorctl"]),
    (
        "mediatord",
        &[
            "admin-socket",
            "status-page",
            "api",
            "card",
            "card-views",
            "config",
            "cuda-control",
            "cuda-status",
            "events",
            "fdstore",
            "firmware",
            "guest-workers",
            "handover",
            "overrides",
            "owner-process",
            "owner-settings",
            "tenant-move",
            "listening",
            "locks",
            "logging",
            "metrics",
            "nvspec",
            "card-manager",
            "passthrough",
            "physical",
            "rebalance",
            "rig",
            "saved-state",
            "sched",
            "vcuda",
            "vgpu",
            "vm-device",
            "vmm-glue",
            "vram",
            "xen-device",
        ],
    ),
    ("cdi-spec", &[]),
    ("fleet-grpc", &[]),
    ("fleet-dra", &["admin-client", "api", "cdi-spec", "fleet-grpc"]),
    ("fleet-kubevirt", &["api", "cdi-spec", "fleet-grpc"]),
    ("images", &[]),
    ("gpu-workloads", &["gdev", "pv", "sm20", "workloads"]),
    ("guest-init", &[]),
    ("tests", &["gdev", "images", "rig", "sched", "workloads"]),
    (
        "bench",
        &[
            "card-manager",
            "locks",
            "nvspec",
            "rig",
            "sched",
            "shadow-pt",
            "simgpu",
            "simgpu-engines",
            "simgpu-memory",
            "sm20",
            "tests",
            "vgpu",
            "vmm-glue",
            "vram",
            "workloads",
        ],
    ),
    ("doc-pages", &[]),
    ("xtask", &["doc-pages", "images"]),
];

/// Path of cargo-deny's settings, relative to the root.
const DENY: &str = "deny.toml";

/// The parts of [`DENY`] that this check reads.
#[derive(Deserialize)]
struct Deny {
    licenses: Allowed,
}

#[derive(Deserialize)]
struct Allowed {
    allow: Vec<String>,
    /// Additional licences of individual crates.
    #[serde(default)]
    exceptions: Vec<Exception>,
}

#[derive(Deserialize)]
struct Exception {
    #[serde(rename = "crate")]
    package: String,
    allow: Vec<String>,
}

impl Allowed {
    /// Returns the licences permitted for a package.
    fn of(&self, package: &str) -> Vec<String> {
        let more = self.exceptions.iter().filter(|exception| exception.package == package);
        self.allow.iter().chain(more.flat_map(|exception| &exception.allow)).cloned().collect()
    }
}

/// Returns the licences permitted by [`DENY`].
fn allowed_licences() -> Result<Allowed> {
    let text = fs::read_to_string(root().join(DENY)).context(DENY)?;
    let Deny { licenses } = toml::from_str(&text).context(DENY)?;
    Ok(licenses)
}

/// Returns cargo's metadata of a workspace. `manifest` is the path of its manifest, relative to the root.
pub fn metadata(manifest: &str) -> Result<Metadata> {
    let mut command = MetadataCommand::new();
    command.manifest_path(root().join(manifest));
    command.exec().with_context(|| format!("cargo metadata for {manifest}"))
}

/// Returns crates without a layer, forbidden dependencies, and permitted dependencies that are unused.
pub fn layers(metadata: &Metadata) -> Vec<String> {
    let mut problems = Vec::new();
    let packages = metadata.workspace_packages();
    for package in &packages {
        let name = package.name.as_str();
        let Some((_, allowed)) = LAYERS.iter().find(|(n, _)| *n == name) else {
            problems.push(format!("{name}: this crate has no layer; see ARCHITECTURE.md and xtask/src/layers.rs"));
            continue;
        };
        for dependency in package.dependencies.iter().filter(|d| d.kind != DependencyKind::Development) {
            let ours = packages.iter().any(|p| p.name.as_str() == dependency.name);
            if ours && !allowed.contains(&dependency.name.as_str()) {
                problems.push(format!("{name}: must not depend on {}", dependency.name));
            }
        }
        for unused in allowed.iter().filter(|allowed| !uses(package, allowed)) {
            problems.push(format!(
                "{name}: does not depend on {unused}, which xtask/src/layers.rs permits; remove that entry"
            ));
        }
    }
    problems
}

/// Returns true if the package depends on `name` outside its tests.
fn uses(package: &Package, name: &str) -> bool {
    package.dependencies.iter().any(|d| d.kind != DependencyKind::Development && d.name == name)
}

/// Returns packages with a missing, unreadable or forbidden licence.
pub fn licences(metadata: &Metadata) -> Result<Vec<String>> {
    let (mut problems, allowed) = (Vec::new(), allowed_licences()?);
    for package in &metadata.packages {
        let problem = match package.license.as_deref() {
            None => Some("names no licence".to_owned()),
            Some(text) => licence_problem(text, &allowed.of(&package.name)),
        };
        problems.extend(problem.map(|p| format!("{} {}: {p}", package.name, package.version)));
    }
    Ok(problems)
}

fn licence_problem(text: &str, allowed: &[String]) -> Option<String> {
    match Expression::parse_mode(text, ParseMode::LAX) {
        Err(error) => Some(format!("the licence {text:?} cannot be read: {}", error.reason)),
        Ok(expression) if expression.evaluate(|one| is_allowed(one, allowed)) => None,
        Ok(_) => Some(format!("the licence {text} is not among those that {DENY} allows")),
    }
}

/// Returns true if exactly this licence is permitted, including its exception, if any.
fn is_allowed(requirement: &LicenseReq, allowed: &[String]) -> bool {
    allowed.contains(&requirement.to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn problem(text: &str) -> Option<String> {
        licence_problem(text, &allowed_licences().unwrap().of("a crate"))
    }

    #[test]
    fn a_choice_with_an_allowed_licence_passes() {
        assert_eq!(problem("MIT OR GPL-2.0-only"), None);
        assert_eq!(problem("MIT/Apache-2.0"), None);
        assert_eq!(problem("Apache-2.0 WITH LLVM-exception"), None);
        assert_eq!(problem("(MIT OR Apache-2.0) AND NCSA"), None);
    }

    #[test]
    fn others_are_refused() {
        assert!(problem("GPL-3.0-only").is_some());
        assert!(problem("MIT AND GPL-2.0-only").is_some());
        assert!(problem("Apache-2.0 WITH Classpath-exception-2.0").is_some());
        assert!(problem("no licence at all").is_some());
    }

    #[test]
    fn exception_is_for_one_crate() {
        let allowed = allowed_licences().unwrap();
        assert_eq!(licence_problem("MPL-2.0", &allowed.of("cbindgen")), None);
        assert!(licence_problem("MPL-2.0", &allowed.of("another")).is_some());
    }

    #[test]
    fn this_workspace_keeps_its_layers() {
        assert_eq!(layers(&metadata("Cargo.toml").unwrap()), Vec::<String>::new());
    }
}
