//! The tables of metrics in `docs/reference/mediatorctl.md`, made from the metrics' own descriptions.

use std::fmt::Write;

/// The page.
const PAGE: &str = "docs/reference/mediatorctl.md";
/// Kinds of metrics: their heading, and how their names begin after the common prefix. The last one has the rest.
const KINDS: [(&str, &[&str]); 4] = [
    ("Of a card, by `card`:", &["card_", "host_memory_"]),
    ("Of a VM, by `vm` and `card`:", &["vm_"]),
    ("Of a tenant, by `tenant` and `card`:", &["tenant_"]),
    ("Of the daemon, with no labels other than those in the table:", &[""]),
];

/// Returns one table for each kind that occurs in the `text` of metrics.
fn tables(text: &str) -> String {
    let mut tables = KINDS.map(|(heading, _)| (heading, String::new()));
    for line in text.lines().filter_map(|line| line.strip_prefix("# HELP ")) {
        let (name, help) = line.split_once(' ').unwrap();
        let kind = text.lines().find_map(|line| line.strip_prefix(&format!("# TYPE {name} "))).unwrap();
        let short = name.strip_prefix("gpu_mediator_").unwrap();
        let at = KINDS.iter().position(|(_, begins)| begins.iter().any(|begin| short.starts_with(begin))).unwrap();
        writeln!(tables[at].1, "| `{name}` | {kind} | {help} |").unwrap();
    }
    let mut page = String::new();
    for (heading, rows) in tables.into_iter().filter(|(_, rows)| !rows.is_empty()) {
        write!(page, "{heading}\n\n| metric | type | meaning |\n|---|---|---|\n{rows}\n").unwrap();
    }
    page
}

#[test]
fn generated_tables_of_metrics_are_in_the_page() {
    let info =
        api::DaemonInfo { version: String::new(), pid: 0, upgrades: 0, upgrade_pause_ms: None, upgrade_failures: 0 };
    let mut text = String::new();
    super::samples(&mut text, &super::CARD, &[], |_| String::new());
    super::samples(&mut text, &super::VM, &[], |_| String::new());
    super::samples(&mut text, &super::counts::VM, &[], |_| String::new());
    super::locks::samples(&mut text);
    text += &super::tenants::text(&[]);
    text += &super::moves::Moves::default().text();
    text += &super::daemon(&info, 0);
    doc_pages::part(PAGE, "metrics", &tables(&text));

    let (mut memory, mut scheduler) = (String::new(), String::new());
    super::memory::samples(&mut memory, &[]);
    super::scheduler::samples(&mut scheduler, &[]);
    doc_pages::part(PAGE, "metrics of memory", &tables(&memory));
    doc_pages::part(PAGE, "metrics of the scheduler", &tables(&scheduler));
}
