//! Tables that are changed while the daemon runs: some keys get new values, the others stay.

use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::{Map, Value};

/// `current` with the keys of `patch` instead of its own; tables within it are changed in the same way.
///
/// # Errors
/// When `patch` has a key that there is not, or a value of another type: `KEY: what is wrong, what was expected`.
pub fn patched<T: Serialize + DeserializeOwned>(current: &T, patch: &Map<String, Value>) -> Result<T, String> {
    let mut whole = serde_json::to_value(current).map_err(|error| error.to_string())?;
    // One key at a time, so that a mistake is told with its key.
    for (path, value) in leaves(patch) {
        *place(&mut whole, &path) = value;
        T::deserialize(&whole).map_err(|error| format!("{}: {error}", path.join(".")))?;
    }
    T::deserialize(whole).map_err(|error| error.to_string())
}

/// All values that are no tables with keys, each with its path.
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

/// Where a path leads; what is no table on the way becomes one.
fn place<'a>(mut at: &'a mut Value, path: &[String]) -> &'a mut Value {
    for key in path {
        if !at.is_object() {
            *at = Value::Object(Map::new());
        }
        at = &mut at[key.as_str()];
    }
    at
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
    fn mistakes_are_told_with_their_key() {
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
