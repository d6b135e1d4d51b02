//! Tests the pages for operators: the daemon must accept the configurations, and the tables must be complete.

use std::fs;
use std::path::Path;
use std::process::Command;

use api::Card;
use fleet_dra::device::Offer;
use fleet_dra::metrics::Metrics;
use serde_json::{Value, json};

mod support;

fn page(name: &str) -> String {
    fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/guides").join(name)).unwrap()
}

/// Returns a page's code blocks in one language, excluding the indentation of an enclosing list.
fn blocks(page: &str, language: &str) -> Vec<String> {
    let mut blocks = Vec::new();
    let mut open: Option<(usize, String)> = None;
    for line in page.lines() {
        let indent = line.len() - line.trim_start().len();
        match &mut open {
            Some(_) if line.trim() == "```" => blocks.extend(open.take().map(|(_, text)| text)),
            Some((depth, text)) => {
                text.push_str(line.get(*depth..).unwrap_or_default());
                text.push('\n');
            }
            None if line.trim() == format!("```{language}") => open = Some((indent, String::new())),
            None => {}
        }
    }
    blocks
}

#[test]
fn daemon_takes_the_configurations_of_the_pages() {
    let folder = tempfile::tempdir().unwrap();
    for name in ["kubernetes.md", "slurm.md", "libvirt.md", "proxmox.md"] {
        let found = blocks(&page(name), "toml");
        assert!(!found.is_empty(), "{name} has a configuration");
        for text in found {
            let file = folder.path().join("m.toml");
            fs::write(&file, &text).unwrap();
            let mut command = Command::new(support::built("mediatord"));
            let output = command.args(["--check", "--config"]).arg(&file).output().unwrap();
            assert!(output.status.success(), "{name}: {}\n{text}", String::from_utf8_lossy(&output.stderr));
        }
    }
}

#[test]
fn page_names_every_parameter() {
    let schema: Value = serde_json::from_str(&fleet_dra::parameters::schema().unwrap()).unwrap();
    let page = page("kubernetes.md");
    let row = |name: &str| {
        assert!(page.contains(&format!("| `{name}` |")), "docs/guides/kubernetes.md has no row for {name}")
    };
    for (table, definition) in [("memory", "Memory"), ("time", "Time")] {
        let keys = schema["$defs"][definition]["properties"].as_object().unwrap();
        assert!(!keys.is_empty());
        keys.keys().for_each(|key| row(&format!("{table}.{key}")));
    }
    ["segmentGroup", "shareGroup", "sharing"].into_iter().for_each(row);
}

#[test]
fn page_names_every_attribute_and_metric() {
    let card: Card = serde_json::from_value(json!({
        "name": "a", "kind": "simgpu", "pci_id": "10de:06d8", "model": "GF100", "vram_mib": 1024, "vram_reserved_mib": 64,
        "vram_assigned_mib": 0, "vram_free_mib": 960, "bar1_mib": 128, "bar3_mib": 64, "channels": 128, "channels_used": 0, "vms": [],
        "passthrough": false, "error": null,
    }))
    .unwrap();
    let page = page("kubernetes.md");
    let device = Offer::all(&[card], &[], &[]).remove(0).device();
    for name in device.attributes.unwrap().keys().chain(device.capacity.unwrap().keys()) {
        assert!(page.contains(&format!("`{name}`")), "docs/guides/kubernetes.md does not name {name}");
    }
    let metrics = Metrics::default().text();
    let names = metrics.lines().filter_map(|line| line.strip_prefix("# TYPE ")?.split(' ').next());
    let mut count = 0;
    for name in names {
        assert!(page.contains(name), "docs/guides/kubernetes.md does not name {name}");
        count += 1;
    }
    assert!(count > 0, "{metrics}");
}
