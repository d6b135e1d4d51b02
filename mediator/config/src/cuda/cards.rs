//! The key `cards` of a tenant: names of cards, or their number.

use std::borrow::Cow;
use std::fmt;
use std::ops::Deref;
use std::str::FromStr;

use schemars::{JsonSchema, Schema, SchemaGenerator};
use serde::de::{Error, SeqAccess, Visitor};
use serde::{Deserialize, Deserializer, Serialize, Serializer};

/// Cards of a tenant with several cards: their names, or their number until the daemon has chosen them.
///
/// Dereferences to the names, which are empty until the cards have been chosen.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum TenantCards {
    /// Names of the cards; empty for a tenant with one card.
    Names(Vec<String>),
    /// Number of cards to choose.
    Number(u64),
}

impl Default for TenantCards {
    fn default() -> Self {
        Self::Names(Vec::new())
    }
}

impl Deref for TenantCards {
    type Target = [String];

    fn deref(&self) -> &[String] {
        match self {
            Self::Names(names) => names,
            Self::Number(_) => &[],
        }
    }
}

impl TenantCards {
    /// Returns true if the key is absent.
    pub(crate) fn is_absent(&self) -> bool {
        matches!(self, Self::Names(names) if names.is_empty())
    }

    /// Returns the number of cards that the daemon must choose, or `None` if the cards are named.
    pub(crate) fn to_choose(&self) -> Option<u64> {
        match self {
            Self::Names(_) => None,
            Self::Number(count) => Some(*count),
        }
    }
}

impl From<Vec<String>> for TenantCards {
    fn from(names: Vec<String>) -> Self {
        Self::Names(names)
    }
}

impl FromStr for TenantCards {
    type Err = String;

    /// Parses a number, or names separated by commas.
    fn from_str(text: &str) -> Result<Self, String> {
        if !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit()) {
            return text.parse().map(Self::Number).map_err(|_| format!("`{text}`, expected a number of cards"));
        }
        match text.split(',').any(str::is_empty) {
            true => Err(format!("`{text}`, expected names of cards separated by commas, or their number")),
            false => Ok(Self::Names(text.split(',').map(str::to_owned).collect())),
        }
    }
}

impl Serialize for TenantCards {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match self {
            Self::Names(names) => names.serialize(serializer),
            Self::Number(count) => serializer.serialize_u64(*count),
        }
    }
}

impl<'de> Deserialize<'de> for TenantCards {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Cards;
        impl<'de> Visitor<'de> for Cards {
            type Value = TenantCards;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a list with the names of cards, or the number of cards")
            }

            fn visit_u64<E: Error>(self, count: u64) -> Result<TenantCards, E> {
                Ok(TenantCards::Number(count))
            }

            fn visit_i64<E: Error>(self, count: i64) -> Result<TenantCards, E> {
                let wrong = || E::invalid_value(serde::de::Unexpected::Signed(count), &self);
                u64::try_from(count).map(TenantCards::Number).map_err(|_| wrong())
            }

            // A null in a stored change removes the key.
            fn visit_unit<E: Error>(self) -> Result<TenantCards, E> {
                Ok(TenantCards::default())
            }

            fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<TenantCards, A::Error> {
                let mut names = Vec::new();
                while let Some(name) = list.next_element()? {
                    names.push(name);
                }
                Ok(TenantCards::Names(names))
            }
        }
        deserializer.deserialize_any(Cards)
    }
}

impl JsonSchema for TenantCards {
    fn schema_name() -> Cow<'static, str> {
        "TenantCards".into()
    }

    fn inline_schema() -> bool {
        true
    }

    fn json_schema(generator: &mut SchemaGenerator) -> Schema {
        let names = generator.subschema_for::<Vec<String>>();
        schemars::json_schema!({ "oneOf": [names, { "type": "integer", "minimum": 2 }] })
    }
}
