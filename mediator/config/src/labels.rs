//! Labels: words of whoever places work, told again wherever a virtual machine or a tenant is shown.
//!
//! A key is the name of a label in the metrics, too, so it has only what Prometheus allows there.

use std::collections::BTreeMap;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// Most labels of one virtual machine or tenant.
const MAX_LABELS: usize = 16;
/// Longest key, in bytes.
const MAX_KEY: usize = 32;
/// Longest value, in bytes: the name of a Kubernetes object fits.
const MAX_VALUE: usize = 253;

/// A `labels` table: keys and values that mean nothing to the daemon.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize, Serialize, JsonSchema)]
#[serde(transparent)]
pub struct Labels(pub BTreeMap<String, String>);

impl Labels {
    /// Says whether there are none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// The labels by key.
    pub fn iter(&self) -> impl Iterator<Item = (&str, &str)> {
        self.0.iter().map(|(key, value)| (key.as_str(), value.as_str()))
    }

    /// Checks number, keys and values.
    ///
    /// # Errors
    /// What is wrong and what was expected.
    pub fn check(&self) -> Result<(), String> {
        if self.0.len() > MAX_LABELS {
            return Err(format!("{} labels, expected at most {MAX_LABELS}", self.0.len()));
        }
        for (key, value) in &self.0 {
            let first = key.bytes().next().is_some_and(|byte| byte.is_ascii_lowercase());
            let rest = key.bytes().all(|byte| byte.is_ascii_lowercase() || byte.is_ascii_digit() || byte == b'_');
            if !first || !rest || key.len() > MAX_KEY {
                let shown: String = key.chars().take(MAX_KEY).collect();
                return Err(format!(
                    "{shown:?} is no key, expected 1 to {MAX_KEY} of the characters a-z 0-9 _ with a letter first"
                ));
            }
            if value.len() > MAX_VALUE || value.chars().any(char::is_control) {
                return Err(format!(
                    "the value of `{key}`, expected at most {MAX_VALUE} bytes without control characters"
                ));
            }
        }
        Ok(())
    }
}

impl FromIterator<(String, String)> for Labels {
    fn from_iter<T: IntoIterator<Item = (String, String)>>(labels: T) -> Self {
        Self(labels.into_iter().collect())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn labels(pairs: &[(&str, &str)]) -> Labels {
        pairs.iter().map(|&(key, value)| (key.to_owned(), value.to_owned())).collect()
    }

    #[test]
    fn keys_and_values_are_bounded() {
        let (key, value) = ("k".repeat(MAX_KEY), "v".repeat(MAX_VALUE));
        assert_eq!(labels(&[("pod", "web-0"), (&key, &value), ("empty", "")]).check(), Ok(()));
        for (bad, word) in [
            (("", "x"), "no key"),
            (("Pod", "x"), "no key"),
            (("1st", "x"), "no key"),
            (("a-b", "x"), "no key"),
            ((&*format!("{key}k"), "x"), "no key"),
            (("pod", &*format!("{value}v")), "the value of `pod`"),
            (("pod", "a\nb"), "the value of `pod`"),
        ] {
            let error = labels(&[bad]).check().unwrap_err();
            assert!(error.contains(word), "{bad:?}: {error}");
        }
        let many: Labels = (0..=MAX_LABELS).map(|n| (format!("k{n}"), String::new())).collect();
        assert_eq!(many.check(), Err("17 labels, expected at most 16".to_owned()));
    }
}
