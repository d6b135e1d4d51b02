//! Describes setting changes as text.

use serde_json::{Map, Value};

/// Describes changed keys, such as `memory.quota_mib = 32, time.weight = 3`.
#[must_use]
pub fn changed(patch: &Map<String, Value>) -> String {
    let mut parts = Vec::new();
    keys("", patch, &mut parts);
    if parts.is_empty() { "no keys changed".to_owned() } else { format!("set: {}", parts.join(", ")) }
}

/// Describes changed keys of a table.
#[must_use]
pub fn changed_in(table: &str, patch: &Map<String, Value>) -> String {
    changed(&Map::from_iter([(table.to_owned(), Value::Object(patch.clone()))]))
}

fn keys(path: &str, patch: &Map<String, Value>, parts: &mut Vec<String>) {
    for (key, value) in patch {
        let path = if path.is_empty() { key.clone() } else { format!("{path}.{key}") };
        match value {
            Value::Object(inner) => keys(&path, inner, parts),
            Value::Null => parts.push(format!("{path} to its default")),
            value => parts.push(format!("{path} = {value}")),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn changed_keys_are_named_with_their_tables() {
        let patch = json!({ "weight": 3, "copies": { "weight": null }, "class": "normal" });
        let words = changed_in("time", patch.as_object().unwrap());
        assert_eq!(words, "set: time.class = \"normal\", time.copies.weight to its default, time.weight = 3");
        assert_eq!(changed_in("time", &Map::new()), "no keys changed");
    }
}
