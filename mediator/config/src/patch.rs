//! Changes to tables at run time: some keys get new values, and the others keep theirs.
//!
//! A key is identified by its path, such as `band.period_ns`. Comparisons use leaf values. A key that a table omits
//! counts as null.

use std::collections::BTreeMap;

use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::{Map, Value};

/// Returns `current` with the values from `patch`. Nested tables are changed in the same way.
///
/// # Errors
/// Returns an error if `patch` has an unknown key or a value of a wrong type: `KEY: what is wrong, what was expected`.
pub fn patched<T: Serialize + DeserializeOwned>(current: &T, patch: &Map<String, Value>) -> Result<T, String> {
    let mut whole = serde_json::to_value(current).map_err(|error| error.to_string())?;
    // Change the keys one at a time, so that an error is reported with its key.
    for (path, value) in leaves(patch) {
        *place(&mut whole, &path) = value;
        T::deserialize(&whole).map_err(|error| format!("{}: {error}", path.join(".")))?;
    }
    T::deserialize(whole).map_err(|error| error.to_string())
}

/// Returns all leaf values, each with its path.
fn leaves(patch: &Map<String, Value>) -> Vec<(Vec<String>, Value)> {
    let mut leaves = Vec::new();
    for (key, value) in patch {
        match value {
            Value::Object(table) if !table.is_empty() => {
                leaves.extend(self::leaves(table).into_iter().map(|(rest, value)| {
                    let path = std::iter::once(key.clone()).chain(rest).collect();
                    (path, value)
                }));
            }
            value => leaves.push((vec![key.clone()], value.clone())),
        }
    }
    leaves
}

/// Returns the value at a path. Values on the path that are not tables are replaced by tables.
fn place<'a>(mut at: &'a mut Value, path: &[String]) -> &'a mut Value {
    for key in path {
        if !at.is_object() {
            *at = Value::Object(Map::new());
        }
        at = &mut at[key.as_str()];
    }
    at
}

/// Converts a table to JSON.
///
/// # Errors
/// Returns an error if the value is not a table, or contains a value that JSON cannot express.
pub fn table(of: &impl Serialize) -> Result<Map<String, Value>, String> {
    match serde_json::to_value(of) {
        Ok(Value::Object(table)) => Ok(table),
        Ok(other) => Err(format!("expected a table, not {other}")),
        Err(error) => Err(error.to_string()),
    }
}

/// Returns `current` with the given values at their paths.
///
/// # Errors
/// Returns an error for the same reasons as [`patched`].
pub fn with<T: Serialize + DeserializeOwned>(current: &T, values: &BTreeMap<String, Value>) -> Result<T, String> {
    patched(current, &tables(values))
}

/// Returns a patch that sets the given paths to values.
#[must_use]
pub fn tables(values: &BTreeMap<String, Value>) -> Map<String, Value> {
    let mut patch = Value::Object(Map::new());
    for (path, value) in values {
        let path: Vec<_> = path.split('.').map(str::to_owned).collect();
        *place(&mut patch, &path) = value.clone();
    }
    match patch {
        Value::Object(patch) => patch,
        _ => Map::new(),
    }
}

/// Returns the value at a path; null if the path does not exist.
#[must_use]
pub fn value(table: &Map<String, Value>, path: &str) -> Value {
    let mut keys = path.split('.');
    let first = keys.next().and_then(|key| table.get(key));
    keys.fold(first, |at, key| at?.get(key)).cloned().unwrap_or(Value::Null)
}

/// A key whose value differs between two tables.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Difference {
    /// Path of the key.
    pub key: String,
    /// Value in the first table.
    pub from: Value,
    /// Value in the second table.
    pub to: Value,
}

/// Returns the keys whose values differ, sorted by path.
#[must_use]
pub fn differences(from: &Map<String, Value>, to: &Map<String, Value>) -> Vec<Difference> {
    // An empty table has no values. Tables whose keys are all omitted are serialized as empty tables.
    let filled = |(_, value): &(_, Value)| value.as_object().is_none_or(|table| !table.is_empty());
    let named = |(path, value): (Vec<String>, Value)| (path.join("."), value);
    let flat = |table| leaves(table).into_iter().filter(filled).map(named).collect();
    let (mut from, to): (BTreeMap<String, Value>, BTreeMap<String, Value>) = (flat(from), flat(to));
    let mut found = BTreeMap::new();
    for (key, to) in to {
        let from = from.remove(&key).unwrap_or(Value::Null);
        if from != to {
            found.insert(key, (from, to));
        }
    }
    // The remaining values are missing from the other table.
    found.extend(from.into_iter().filter(|(_, from)| !from.is_null()).map(|(key, from)| (key, (from, Value::Null))));
    found.into_iter().map(|(key, (from, to))| Difference { key, from, to }).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use sched::{Config, PolicyKind};

    fn patched_by(text: &str) -> Result<Config, String> {
        let current = Config { strikes: 7, ..Config::default() };
        patched(&current, &serde_json::from_str(text).unwrap())
    }

    #[test]
    fn keys_that_are_left_out_stay() {
        let new = patched_by(r#"{ "policy": "fifo", "band": { "wait_ns": 0 } }"#).unwrap();
        assert_eq!((new.policy, new.strikes, new.band.wait_ns), (PolicyKind::Fifo, 7, 0));
        assert_eq!(new.band.period_ns, Config::default().band.period_ns);
        assert_eq!(patched_by("{}").unwrap().strikes, 7);
    }

    #[test]
    fn differences_are_listed_by_path_and_can_be_reverted() {
        let current = table(&Config { strikes: 7, ..Config::default() }).unwrap();
        let mut other = Config::default();
        other.band.wait_ns = 0;
        let found = differences(&current, &table(&other).unwrap());
        let shown: Vec<_> = found.iter().map(|one| format!("{} {} {}", one.key, one.from, one.to)).collect();
        assert_eq!(shown, ["band.wait_ns 500000 0", "strikes 7 3"]);
        let back = found.into_iter().map(|one| (one.key, one.from)).collect();
        assert_eq!(table(&with(&other, &back).unwrap()).unwrap(), current);
        // An omitted key counts as null on either side.
        let share = |max_run_ms| table(&crate::TimeShare { max_run_ms, ..Default::default() }).unwrap();
        let (none, some) = (share(None), share(Some(5)));
        let shown =
            |from, to| differences(from, to).into_iter().map(|one| (one.key, one.from, one.to)).collect::<Vec<_>>();
        assert_eq!(shown(&none, &some), [("max_run_ms".to_owned(), Value::Null, 5.into())]);
        assert_eq!(shown(&some, &none), [("max_run_ms".to_owned(), 5.into(), Value::Null)]);
        assert_eq!(shown(&none, &none), []);
        let memory = |quota_mib| {
            let memory = crate::VmMemory { quota_mib, ..Default::default() };
            table(&crate::VmSpec { memory, ..crate::VmSpec::new("a", "card0", 16) }).unwrap()
        };
        let (none, some) = (memory(None), memory(Some(5)));
        assert_eq!(shown(&none, &some), [("memory.quota_mib".to_owned(), Value::Null, 5.into())]);
        assert_eq!(shown(&some, &none), [("memory.quota_mib".to_owned(), 5.into(), Value::Null)]);
    }

    #[test]
    fn patch_errors_name_key() {
        for (text, key, what) in [
            (r#"{ "polcy": "fifo" }"#, "polcy", "unknown field `polcy`, expected one of `policy`"),
            (r#"{ "policy": "band", "band": { "wait": 1 } }"#, "band.wait", "unknown field `wait`"),
            (r#"{ "bandd": {} }"#, "bandd", "unknown field"),
            (r#"{ "bandd": null }"#, "bandd", "unknown field"),
            (r#"{ "strikes": "many" }"#, "strikes", "invalid type: string \"many\", expected u32"),
            (r#"{ "strikes": -1 }"#, "strikes", "invalid value: integer `-1`, expected u32"),
            (r#"{ "strikes": { "a": 1 } }"#, "strikes.a", "invalid type: map, expected u32"),
            (r#"{ "band": 3 }"#, "band", "invalid type: integer `3`"),
            (r#"{ "policy": "best" }"#, "policy", "unknown variant `best`, expected one of `direct`"),
        ] {
            let error = patched_by(text).unwrap_err();
            assert!(error.starts_with(&format!("{key}: {what}")), "{text}: {error}");
        }
    }
}
