//! The filter for log events. It does not configure their format.

use tracing_subscriber::filter::{EnvFilter, ParseError};

/// Crates of this project that log, as targets of their events, except for `fleet_dra`, which does not use this filter.
const CRATES: [&str; 31] = [
    "bringup",
    "card_manager",
    "card_memory",
    "cuda_mps",
    "cuda_owner",
    "devmodel",
    "fdstore",
    "firmware",
    "guest_workers",
    "handover",
    "listening",
    "logging",
    "mediator",
    "mediatord",
    "overrides",
    "owner_driver",
    "owner_host",
    "owner_process",
    "passthrough",
    "simgpu",
    "simgpu_engines",
    "simgpu_memory",
    "tenancy",
    "tenant_move",
    "vcuda",
    "vfio_card",
    "vgpu",
    "vm_device",
    "vmm_glue",
    "vmm_memory",
    "xen_device",
];

/// Parses a filter such as `info,mediator=debug`. `mediator` represents all crates of this project.
///
/// # Errors
/// Returns an error if the filter is invalid.
pub fn parse_filter(filter: &str) -> Result<EnvFilter, ParseError> {
    let of_each = |directive: &str| match directive.strip_prefix("mediator=") {
        Some(level) => CRATES.map(|name| format!("{name}={level}")).join(","),
        None => directive.to_owned(),
    };
    let filter = filter.split(',').map(of_each).collect::<Vec<_>>().join(",");
    EnvFilter::builder().parse(filter)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;
    use std::path::Path;

    #[test]
    fn mediator_in_filter_represents_all_crates_that_log() {
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
        let manifest = |folder: &Path| -> toml::Table {
            std::fs::read_to_string(folder.join("Cargo.toml")).unwrap().parse().unwrap()
        };
        let members = manifest(&root)["workspace"]["members"].as_array().unwrap().clone();
        let mut logging = BTreeSet::from(["mediator".to_owned()]);
        for member in &members {
            let manifest = manifest(&root.join(member.as_str().unwrap()));
            if manifest.get("dependencies").is_some_and(|all| all.get("tracing").is_some()) {
                logging.insert(manifest["package"]["name"].as_str().unwrap().replace('-', "_"));
            }
        }
        let logging: Vec<&str> = logging.iter().map(String::as_str).filter(|name| *name != "fleet_dra").collect();
        assert_eq!(logging, CRATES);
    }

    #[test]
    fn filter_with_mediator_is_valid_and_bad_level_is_rejected() {
        let filter = parse_filter("warn,mediator=debug").unwrap().to_string();
        assert!(filter.contains("cuda_owner=debug") && filter.contains("warn"), "{filter}");
        assert!(parse_filter("mediator=loud").is_err());
    }
}
