//! Labels: metadata from orchestrators, shown with each virtual machine or tenant.
//!
//! A key is also a label name in the metrics, so it is limited to the characters that Prometheus allows there. The
//! daemon itself uses labels only for affinity between virtual machines ([`LabelMatch`]).

use std::collections::BTreeMap;
use std::fmt;
use std::str::FromStr;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// Maximum number of labels of one virtual machine or tenant.
pub(crate) const MAX_LABELS: usize = 16;
/// Maximum length of a key, in bytes.
const MAX_KEY: usize = 32;
/// Maximum length of a value, in bytes, which fits the names of Kubernetes objects.
const MAX_VALUE: usize = 253;

/// A `labels` table: keys and values for orchestrators.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize, Serialize, JsonSchema)]
#[serde(transparent)]
pub struct Labels(pub BTreeMap<String, String>);

impl Labels {
    /// Returns true if there are no labels.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Returns the labels, sorted by key.
    pub fn iter(&self) -> impl Iterator<Item = (&str, &str)> {
        self.0.iter().map(|(key, value)| (key.as_str(), value.as_str()))
    }

    /// Checks the number of labels, their keys and their values.
    ///
    /// # Errors
    /// If a label is invalid, returns an error that describes the expected value.
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
                    "{shown:?} is not a key, expected 1 to {MAX_KEY} of the characters a-z 0-9 _ with a letter first"
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

/// A label selector: `KEY` for any value, or `KEY=VALUE`.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize, Serialize, JsonSchema)]
#[serde(try_from = "String", into = "String")]
#[schemars(with = "String")]
pub struct LabelMatch {
    key: String,
    value: Option<String>,
}

impl LabelMatch {
    /// Returns true if the selector matches one of these labels.
    pub(crate) fn is_among(&self, labels: &Labels) -> bool {
        let found = labels.0.get(&self.key);
        found.is_some_and(|found| self.value.as_ref().is_none_or(|value| value == found))
    }
}

impl FromStr for LabelMatch {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let (key, value) = match text.split_once('=') {
            Some((key, value)) => (key, Some(value)),
            None => (text, None),
        };
        let label = Labels(BTreeMap::from([(key.to_owned(), value.unwrap_or_default().to_owned())]));
        label.check().map_err(|what| format!("{what}; write KEY or KEY=VALUE"))?;
        Ok(Self { key: key.to_owned(), value: value.map(str::to_owned) })
    }
}

impl TryFrom<String> for LabelMatch {
    type Error = String;

    fn try_from(text: String) -> Result<Self, String> {
        text.parse()
    }
}

impl From<LabelMatch> for String {
    fn from(label: LabelMatch) -> Self {
        label.to_string()
    }
}

impl fmt::Display for LabelMatch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.value {
            Some(value) => write!(f, "{}={value}", self.key),
            None => f.write_str(&self.key),
        }
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
            (("", "x"), "not a key"),
            (("Pod", "x"), "not a key"),
            (("1st", "x"), "not a key"),
            (("a-b", "x"), "not a key"),
            ((&*format!("{key}k"), "x"), "not a key"),
            (("pod", &*format!("{value}v")), "the value of `pod`"),
            (("pod", "a\nb"), "the value of `pod`"),
        ] {
            let error = labels(&[bad]).check().unwrap_err();
            assert!(error.contains(word), "{bad:?}: {error}");
        }
        let many: Labels = (0..=MAX_LABELS).map(|n| (format!("k{n}"), String::new())).collect();
        assert_eq!(many.check(), Err("17 labels, expected at most 16".to_owned()));
    }

    #[test]
    fn labels_are_found_by_key_alone_or_with_their_value() {
        let of = labels(&[("app", "web"), ("tier", "")]);
        for (text, found) in
            [("app", true), ("app=web", true), ("app=db", false), ("app=", false), ("tier=", true), ("zone", false)]
        {
            let label: LabelMatch = text.parse().unwrap();
            assert_eq!((label.is_among(&of), label.to_string().as_str()), (found, text));
        }
        for bad in ["", "=web", "App=web", "app=a\nb"] {
            let error = bad.parse::<LabelMatch>().unwrap_err();
            assert!(error.ends_with("write KEY or KEY=VALUE"), "{bad:?}: {error}");
        }
    }
}
