//! Tests of the metrics, parsed as a scraper would parse them: see
//! https://prometheus.io/docs/instrumenting/exposition_formats/ and the naming rules of
//! https://prometheus.io/docs/practices/naming/.

use super::*;
use crate::fixture::{copy, guest, one_card};
use std::collections::{BTreeMap, BTreeSet};

/// A metric with all its lines in the exposition.
#[derive(Debug, Default)]
struct Family {
    kind: String,
    help: String,
    /// Name, labels and value of each sample of the metric.
    samples: Vec<(String, BTreeMap<String, String>, f64)>,
}

fn name_is_good(name: &str, colon: bool) -> bool {
    let good = |byte: u8| byte.is_ascii_alphanumeric() || byte == b'_' || (colon && byte == b':');
    !name.is_empty() && !name.as_bytes()[0].is_ascii_digit() && name.bytes().all(good)
}

/// Returns the labels inside the braces, and the text after them.
fn labels(mut text: &str) -> Result<(BTreeMap<String, String>, &str), String> {
    let mut labels = BTreeMap::new();
    loop {
        if let Some(rest) = text.strip_prefix('}') {
            return Ok((labels, rest));
        }
        let (name, rest) = text.split_once("=\"").ok_or("a label without a value")?;
        if !name_is_good(name, false) || name.starts_with("__") {
            return Err(format!("label {name}"));
        }
        let (mut value, mut chars) = (String::new(), rest.char_indices());
        let end = loop {
            match chars.next().ok_or("a value without an end")? {
                (at, '"') => break at + 1,
                (_, '\\') => value.push(match chars.next().map(|(_, char)| char) {
                    Some('n') => '\n',
                    Some(char @ ('\\' | '"')) => char,
                    other => return Err(format!("escape {other:?}")),
                }),
                (_, char) => value.push(char),
            }
        };
        if labels.insert(name.to_owned(), value).is_some() {
            return Err(format!("duplicate label {name}"));
        }
        text = &rest[end..];
        text = text.strip_prefix(',').unwrap_or(text);
    }
}

fn parse(text: &str) -> Result<BTreeMap<String, Family>, String> {
    let mut families = BTreeMap::<String, Family>::new();
    let mut current = String::new();
    let mut seen = BTreeSet::new();
    if !text.ends_with('\n') {
        return Err("no newline at the end".to_owned());
    }
    for line in text.lines() {
        let wrong = |what: &str| format!("{what}: {line}");
        if let Some(rest) = line.strip_prefix("# HELP ") {
            let (name, help) = rest.split_once(' ').ok_or_else(|| wrong("no help"))?;
            if families.contains_key(name) {
                return Err(wrong("declared twice, or not contiguous"));
            }
            current = name.to_owned();
            families.insert(current.clone(), Family { help: help.to_owned(), ..Family::default() });
        } else if let Some(rest) = line.strip_prefix("# TYPE ") {
            let (name, kind) = rest.split_once(' ').ok_or_else(|| wrong("no type"))?;
            let family = families.get_mut(name).filter(|family| name == current && family.kind.is_empty());
            family.ok_or_else(|| wrong("type without help"))?.kind = kind.to_owned();
        } else {
            let end = line.find(['{', ' ']).ok_or_else(|| wrong("no value"))?;
            let (name, rest) = line.split_at(end);
            let (labels, rest) = match rest.strip_prefix('{') {
                Some(rest) => labels(rest).map_err(|what| wrong(&what))?,
                None => (BTreeMap::new(), rest),
            };
            let value = rest.strip_prefix(' ').and_then(|value| value.parse().ok()).ok_or_else(|| wrong("value"))?;
            let family = families.get_mut(&current).ok_or_else(|| wrong("sample without a type"))?;
            let suffixes: &[&str] = if family.kind == "histogram" { &["_bucket", "_sum", "_count"] } else { &[""] };
            let ours = suffixes.iter().any(|suffix| name.strip_suffix(suffix) == Some(&current));
            if !ours || !name_is_good(name, true) || !seen.insert(format!("{name}{labels:?}")) {
                return Err(wrong("wrong name, or duplicate sample"));
            }
            family.samples.push((name.to_owned(), labels, value));
        }
    }
    Ok(families)
}

/// Returns the naming rule that a metric violates, if any.
fn badly_named(name: &str, kind: &str) -> Option<&'static str> {
    let words: Vec<_> = name.split('_').collect();
    let unit = |unit: &&str| {
        ["ms", "us", "ns", "milliseconds", "kib", "mib", "kb", "mb", "percent", "permille", "minutes"].contains(unit)
    };
    match kind {
        _ if !name.starts_with("gpu_mediator_") => Some("prefix"),
        _ if words.iter().any(unit) => Some("not a base unit"),
        "counter" if !name.ends_with("_total") => Some("a counter ends with _total"),
        "gauge" | "histogram" if name.ends_with("_total") => Some("only a counter ends with _total"),
        "gauge" | "histogram" if ["_count", "_sum", "_bucket"].iter().any(|end| name.ends_with(end)) => {
            Some("suffix of a histogram")
        }
        "histogram" if !name.ends_with("_seconds") && !name.ends_with("_bytes") => Some("unit of a histogram"),
        "counter" | "gauge" | "histogram" => None,
        _ => Some("type"),
    }
}

#[test]
fn all_metrics_are_well_formed_well_named_and_by_vm() {
    let served = one_card("time = { copy_mib_per_s = 64 }\n");
    let client = served.client();
    for name in ["a", "b.c-d_e"] {
        let _: api::Vm = client.post("/v1/vms", &api::AddVm::new(name, "card0", 16)).unwrap();
    }
    let (mut driver, mut channel) = guest(&served, "a");
    copy(&mut driver, &mut channel);
    driver.wait(&channel);
    let text = client.request(Method::GET, "/metrics", Default::default()).unwrap();
    let families = parse(std::str::from_utf8(&text).unwrap()).unwrap();
    assert!(families.len() > 20, "{}", families.len());
    for (name, family) in &families {
        assert_eq!(badly_named(name, &family.kind), None, "{name}");
        assert!(!family.help.is_empty(), "{name}");
        assert!(family.samples.iter().all(|(.., value)| value.is_finite() && *value >= 0.0), "{family:?}");
        if name.starts_with("gpu_mediator_vm_") {
            let by_vm = |vm: &str| family.samples.iter().filter(|(_, labels, _)| labels["vm"] == vm).count();
            assert!(family.samples.iter().all(|(_, labels, _)| labels["card"] == "card0"), "{family:?}");
            // A metric with additional labels may have no samples yet.
            let sparse = family
                .samples
                .iter()
                .all(|(_, labels, _)| labels.contains_key("reason") || labels.contains_key("count"));
            assert!(sparse || (by_vm("a") > 0 && by_vm("a") == by_vm("b.c-d_e")), "{family:?}");
        }
    }
    let vram = &families["gpu_mediator_vm_vram_bytes"];
    assert_eq!(vram.samples[0].2, f64::from(16 << 20));
    let waits = &families["gpu_mediator_vm_wait_seconds"];
    let unbound = |(name, labels, _): &&(String, BTreeMap<String, String>, f64)| {
        name.ends_with("_bucket") && labels["le"] == "+Inf" && labels["vm"] == "a" && labels["engine"] == "compute"
    };
    assert_eq!(waits.samples.iter().find(unbound).unwrap().2, 1.0);
}

/// Returns the names and types of the metrics from the tables in docs/reference/mediatorctl.md.
fn documented() -> BTreeMap<String, String> {
    let page = include_str!("../../../../../docs/reference/mediatorctl.md");
    let mut documented = BTreeMap::new();
    for row in page.lines().filter(|line| line.starts_with("| `gpu_mediator_")) {
        let cells: Vec<_> = row.split('|').map(str::trim).collect();
        for name in cells[1].split(", ") {
            let before = documented.insert(name.trim_matches('`').to_owned(), cells[2].to_owned());
            assert_eq!(before, None, "{name} is documented twice");
        }
    }
    documented
}

#[test]
fn metrics_are_those_that_are_documented() {
    let served = one_card("memory = { host_mib = 64 }\n");
    let _: api::Vm = served.client().post("/v1/vms", &api::AddVm::new("a", "card0", 16)).unwrap();
    let text = served.client().request(Method::GET, "/metrics", Default::default()).unwrap();
    let families = parse(std::str::from_utf8(&text).unwrap()).unwrap();
    let shown: BTreeMap<_, _> = families.into_iter().map(|(name, family)| (name, family.kind)).collect();
    assert_eq!(shown, documented());
}

#[test]
fn metrics_reader_rejects_malformed_text_and_bad_names() {
    let head = "# HELP a_total x\n# TYPE a_total counter\n";
    assert_eq!(
        parse(&format!("{head}a_total{{l=\"x\\\"\\\\\\n\"}} 1\n")).unwrap()["a_total"].samples[0].1["l"],
        "x\"\\\n"
    );
    for bad in [
        "a_total 1\n",
        "b 1\n",
        "a_total{l=\"1} 1\n",
        "a_total{l=\"1\",l=\"2\"} 1\n",
        "a_total{1=\"\"} 1\n",
        "a_total x\n",
        "a_total 1",
    ] {
        let text = if bad == "a_total 1\n" { bad.to_owned() } else { format!("{head}{bad}") };
        assert!(parse(&text).is_err(), "{bad}");
    }
    assert!(parse(&format!("{head}a_total 1\na_total 1\n")).is_err());
    assert!(parse(&format!("{head}{head}")).is_err());
    for (name, kind) in [
        ("mediator_x_total", "counter"),
        ("gpu_mediator_x", "counter"),
        ("gpu_mediator_x_total", "gauge"),
        ("gpu_mediator_wait_ms", "gauge"),
        ("gpu_mediator_vram_mib", "gauge"),
        ("gpu_mediator_x", "untyped"),
    ] {
        assert!(badly_named(name, kind).is_some(), "{name} {kind}");
    }
}
