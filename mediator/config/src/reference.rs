//! Generates the tables of keys in `docs/reference/configuration.md`: keys, types and defaults come from the types of
//! the configuration, and texts from `reference.toml`.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write;

use schemars::{JsonSchema, Schema, schema_for};
use serde::Deserialize;
use serde_json::Value;

use super::*;

/// Path of the generated page.
const PAGE: &str = "docs/reference/configuration.md";
/// Texts of the keys, by table and key.
const TEXTS: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/src/reference.toml");

/// Texts of one key.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Row {
    /// Default of the key, unless the key's type defines a constant one.
    #[serde(default)]
    default: String,
    #[serde(default)]
    bounds: Option<String>,
    meaning: String,
}

/// Properties of a key according to the code.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Fact {
    kind: &'static str,
    /// Default in the page's format; `None` if the type defines none.
    default: Option<String>,
}

type Texts = BTreeMap<String, BTreeMap<String, Row>>;

/// Resolves a schema's reference.
fn resolved<'a>(whole: &'a Schema, schema: &'a Value) -> &'a Value {
    let inner = schema["allOf"].get(0).or(schema["anyOf"].get(0)).unwrap_or(schema);
    match inner["$ref"].as_str().and_then(|path| path.rsplit('/').next()) {
        Some(name) => whole.get("$defs").and_then(|all| all.get(name)).unwrap_or(inner),
        None => inner,
    }
}

fn kind(schema: &Value) -> &'static str {
    let first = schema["type"].as_str().or_else(|| schema["type"].get(0).and_then(Value::as_str));
    match first {
        Some("boolean") => "boolean",
        Some("integer" | "number") => "integer",
        Some("array") => "list",
        Some("object") => "table",
        None if schema["oneOf"][0]["type"] == "array" => "list or integer",
        // A string, or an enumeration, whose schema lists constants instead of a type.
        _ => "string",
    }
}

fn shown(default: &Value) -> Option<String> {
    match default {
        Value::String(text) if !text.is_empty() => Some(format!("`\"{text}\"`")),
        Value::Bool(value) => Some(format!("`{value}`")),
        Value::Number(number) => Some(number.to_string()),
        _ => None,
    }
}

/// Adds a table's keys in order. Keys of a nested table follow as `outer.inner` if `texts` contains such keys.
fn collect(
    whole: &Schema,
    table: &Value,
    defaults: &Value,
    prefix: &str,
    texts: &BTreeMap<String, Row>,
    keys: &mut Vec<(String, Fact)>,
) {
    let required: BTreeSet<&str> =
        table["required"].as_array().into_iter().flatten().filter_map(Value::as_str).collect();
    for (name, schema) in table["properties"].as_object().into_iter().flatten() {
        let key = format!("{prefix}{name}");
        let default = schema.get("default").unwrap_or(&defaults[name]);
        let target = resolved(whole, schema);
        let is_open = texts.keys().any(|text| text.starts_with(&format!("{key}.")));
        if is_open {
            collect(whole, target, default, &format!("{key}."), texts, keys);
            continue;
        }
        let default = match required.contains(name.as_str()) {
            true => Some("required".to_owned()),
            false => shown(default),
        };
        keys.push((key, Fact { kind: kind(target), default }));
    }
}

/// Returns the keys of a type, except those described in other tables of the page.
fn facts<T: JsonSchema>(texts: &BTreeMap<String, Row>, elsewhere: &[&str]) -> Vec<(String, Fact)> {
    let whole = schema_for!(T);
    let value = whole.as_value().clone();
    let mut keys = Vec::new();
    collect(&whole, &value, &value["default"].clone(), "", texts, &mut keys);
    keys.retain(|(key, _)| !elsewhere.contains(&key.as_str()));
    keys
}

/// Sorts a table's keys into the order of its texts.
fn sort(name: &str, facts: &mut [(String, Fact)], all: &str) {
    facts.sort_by_key(|(key, _)| all.find(&format!("[\"{name}\".\"{key}\"]")));
}

/// Returns true for a number, a quoted string, or a boolean.
fn is_literal(text: &str) -> bool {
    let text = text.trim_matches('`');
    text.parse::<u64>().is_ok() || (text.starts_with('"') && text.ends_with('"')) || ["true", "false"].contains(&text)
}

/// Renders the Markdown table for the page.
fn table(name: &str, texts: &BTreeMap<String, Row>, facts: &[(String, Fact)]) -> String {
    let known: BTreeSet<&str> = facts.iter().map(|(key, _)| key.as_str()).collect();
    let described: BTreeSet<&str> = texts.keys().map(String::as_str).collect();
    assert_eq!(known, described, "keys of {name}, in the code and in reference.toml");
    let has_bounds = texts.values().any(|row| row.bounds.is_some());
    let mut table = match has_bounds {
        true => "| key | type | default | bounds | meaning |\n|---|---|---|---|---|\n".to_owned(),
        false => "| key | type | default | meaning |\n|---|---|---|---|\n".to_owned(),
    };
    for (key, Fact { kind, default }) in facts {
        let Row { default: text, bounds, meaning } = &texts[key];
        let default = match default {
            Some(default) if text.is_empty() => default.clone(),
            Some(default) => {
                assert!(!is_literal(text), "{name}, {key}: reference.toml contains {text}, but the code {default}");
                text.clone()
            }
            None if text.is_empty() => "none".to_owned(),
            None => text.clone(),
        };
        write!(table, "| `{key}` | {kind} | {default} |").unwrap();
        if has_bounds {
            write!(table, " {} |", bounds.as_deref().unwrap_or_default()).unwrap();
        }
        writeln!(table, " {meaning} |").unwrap();
    }
    table
}

#[test]
fn generated_tables_of_keys_are_in_the_page() {
    let all = std::fs::read_to_string(TEXTS).unwrap();
    let texts: Texts = toml::from_str(&all).unwrap();
    let none = BTreeMap::new();
    let of = |name: &str| texts.get(name).unwrap_or(&none);
    let mut tables = Vec::new();
    macro_rules! add {
        ($name:literal, $type:ty, $elsewhere:expr) => {
            tables.push(($name, facts::<$type>(of($name), &$elsewhere)));
        };
    }
    add!("daemon", DaemonSpec, [""]);
    add!("daemon.rebalance", RebalanceSpec, [""]);
    // `[card.cuda]` and `[[card.fault]]` have separate sections on the page.
    add!("card", CardSpec, ["cuda", "fault"]);
    add!("card.time", TimeSpec, [""]);
    add!("card.cuda", CudaSpec, [""]);
    add!("card.memory", CardMemory, [""]);
    add!("card.scheduler", sched::Config, [""]);
    add!("card.fault", FaultSpec, [""]);
    add!("vm", VmSpec, ["memory"]);
    add!("vm.memory", VmMemory, ["ram"]);
    // The page lists these keys under `[vm.memory]`.
    let ram = facts::<RamSpec>(&none, &[]).into_iter().map(|(key, fact)| (format!("ram.{key}"), fact));
    tables.push(("vm.memory.ram", ram.collect()));
    add!("vm.paravirtual", Paravirtual, [""]);
    add!("vm.cuda", FunctionSpec, [""]);
    add!("vm.time", TimeShare, [""]);
    add!("profile", ProfileSpec, [""]);
    add!("tenant", TenantSpec, ["profile"]);
    let named: BTreeSet<&str> = tables.iter().map(|(name, _)| *name).collect();
    assert_eq!(named, texts.keys().map(String::as_str).collect::<BTreeSet<_>>());
    for (name, facts) in &mut tables {
        sort(name, facts, &all);
        doc_pages::part(PAGE, &format!("keys of {name}"), &table(name, of(name), facts));
    }
    // The code computes these defaults, and the texts must match them.
    for (table, key, expected) in [
        ("vm", "channels", DEFAULT_CHANNELS.to_string()),
        ("vm", "hang_limit_ms", DEFAULT_HANG_LIMIT_MS.to_string()),
        ("profile", "weight", TimeShare::default().weight.to_string()),
    ] {
        assert_eq!(texts[table][key].default, expected, "{table}, {key}");
    }
}

#[test]
fn keys_without_texts_and_wrong_defaults_are_noticed() {
    let row = |default: &str| Row { default: default.to_owned(), bounds: None, meaning: "x".to_owned() };
    let facts = [("a".to_owned(), Fact { kind: "integer", default: Some("5".to_owned()) })];
    let fails = |texts: BTreeMap<String, Row>| std::panic::catch_unwind(|| table("t", &texts, &facts)).is_err();
    let one = |key: &str, default: &str| BTreeMap::from([(key.to_owned(), row(default))]);
    assert_eq!(table("t", &one("a", ""), &facts).lines().last(), Some("| `a` | integer | 5 | x |"));
    assert_eq!(
        table("t", &one("a", "by the card"), &facts).lines().last(),
        Some("| `a` | integer | by the card | x |")
    );
    assert!(fails(one("b", "")) && fails(BTreeMap::new()) && fails(one("a", "6")) && fails(one("a", "`true`")));
}
