//! Generates the metric tables in `docs/reference/mediatorctl.md` from the metrics' descriptions.

use std::collections::BTreeSet;
use std::fmt::Write;
use std::fs;
use std::path::Path;

/// Path of the generated page.
const PAGE: &str = "docs/reference/mediatorctl.md";
/// Common prefix of all metric names.
const PREFIX: &str = "gpu_mediator_";
/// Groups of metrics: heading, and name prefixes after the common prefix. The last group includes all remaining
/// metrics.
const KINDS: [(&str, &[&str]); 4] = [
    ("Of a card, by `card`:", &["card_", "host_memory_"]),
    ("Of a VM, by `vm` and `card`:", &["vm_"]),
    ("Of a tenant, by `tenant` and `card`:", &["tenant_"]),
    ("Of the daemon, with no labels other than those in the table:", &[""]),
];

/// Renders one table per group of the metrics in `text`.
fn tables(text: &str) -> String {
    let mut tables = KINDS.map(|(heading, _)| (heading, String::new()));
    for line in text.lines().filter_map(|line| line.strip_prefix("# HELP ")) {
        let (name, help) = line.split_once(' ').unwrap();
        let kind = text.lines().find_map(|line| line.strip_prefix(&format!("# TYPE {name} "))).unwrap();
        let short = name.strip_prefix(PREFIX).unwrap();
        let at = KINDS.iter().position(|(_, begins)| begins.iter().any(|begin| short.starts_with(begin))).unwrap();
        writeln!(tables[at].1, "| `{name}` | {kind} | {help} |").unwrap();
    }
    let mut page = String::new();
    for (heading, rows) in tables.into_iter().filter(|(_, rows)| !rows.is_empty()) {
        write!(page, "{heading}\n\n| metric | type | meaning |\n|---|---|---|\n{rows}\n").unwrap();
    }
    page
}

/// Returns the metric families outside the memory and scheduler sections, without samples.
fn families() -> String {
    let info = api::DaemonInfo {
        version: String::new(),
        pid: 0,
        upgrades: 0,
        upgraded_at: None,
        upgrade_pause_ms: None,
        upgrade_failures: 0,
    };
    let mut text = String::new();
    super::samples(&mut text, &super::CARD, &[], |_| String::new());
    super::samples(&mut text, &super::VM, &[], |_| String::new());
    super::samples(&mut text, &super::counts::VM, &[], |_| String::new());
    super::locks::samples(&mut text);
    text += &super::tenants::text(&[]);
    text += &super::moves::Moves::default().text();
    text + &super::daemon(&info, 0)
}

/// Returns the metric families in the memory and scheduler sections, without samples.
fn families_of_sections() -> [String; 2] {
    let (mut memory, mut scheduler) = (String::new(), String::new());
    super::memory::samples(&mut memory, &[]);
    super::scheduler::samples(&mut scheduler, &[]);
    [memory, scheduler]
}

/// Returns the names of the metrics in a Prometheus or Grafana file.
fn named(file: &str) -> BTreeSet<&str> {
    let begins = file.match_indices(PREFIX).map(|(at, _)| &file[at..]);
    let end = |text: &str| text.find(|c: char| !c.is_ascii_alphanumeric() && c != '_').unwrap_or(text.len());
    begins.map(|text| &text[..end(text)]).collect()
}

#[test]
fn dashboards_and_alert_rules_name_metrics_that_exist() {
    let [memory, scheduler] = families_of_sections();
    let text = families() + &memory + &scheduler;
    let mut exist = BTreeSet::new();
    for line in text.lines().filter_map(|line| line.strip_prefix("# TYPE ")) {
        match line.split_once(' ').unwrap() {
            (name, "histogram") => exist.extend(["bucket", "sum", "count"].map(|part| format!("{name}_{part}"))),
            (name, _) => drop(exist.insert(name.to_owned())),
        }
    }
    let packaging = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../packaging");
    for (folder, files) in [("grafana", 4), ("prometheus", 2)] {
        let entries: Vec<_> =
            fs::read_dir(packaging.join(folder)).unwrap().map(|entry| entry.unwrap().path()).collect();
        assert_eq!(entries.len(), files, "{entries:?}");
        for path in entries {
            let file = fs::read_to_string(&path).unwrap();
            let named = named(&file);
            assert!(named.len() > 5, "{}: {named:?}", path.display());
            let unknown: Vec<_> = named.into_iter().filter(|name| !exist.contains(*name)).collect();
            assert!(unknown.is_empty(), "{} names metrics that do not exist: {unknown:?}", path.display());
        }
    }
}

#[test]
fn generated_tables_of_metrics_are_in_the_page() {
    doc_pages::part(PAGE, "metrics", &tables(&families()));
    let [memory, scheduler] = families_of_sections();
    doc_pages::part(PAGE, "metrics of memory", &tables(&memory));
    doc_pages::part(PAGE, "metrics of the scheduler", &tables(&scheduler));
}
