//! Addresses of PCI functions.

use std::fmt;
use std::str::FromStr;

use schemars::JsonSchema;
use serde::{Deserialize, Deserializer, Serialize, Serializer};

/// Address of a PCI function, in the kernel's format: `0000:65:00.0`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, JsonSchema)]
#[schemars(with = "String")]
pub struct Address {
    domain: u32,
    bus: u8,
    /// Device in bits 7:3, function in bits 2:0.
    devfn: u8,
}

impl Address {
    /// Returns the address of function `devfn` (device in bits 7:3) on `bus` of `domain`.
    #[must_use]
    pub fn new(domain: u32, bus: u8, devfn: u8) -> Self {
        Self { domain, bus, devfn }
    }
}

impl fmt::Display for Address {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { domain, bus, devfn } = self;
        write!(f, "{domain:04x}:{bus:02x}:{:02x}.{}", devfn >> 3, devfn & 7)
    }
}

/// Error for text that is not a PCI function address.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0:?} is not a PCI function address, expected one such as 0000:65:00.0 (`lspci -D` shows them)")]
pub struct NoAddress(String);

impl FromStr for Address {
    type Err = NoAddress;

    fn from_str(text: &str) -> Result<Self, NoAddress> {
        let parse = || {
            let (domain, rest) = text.split_once(':')?;
            let (bus, rest) = rest.split_once(':')?;
            let (device, function) = rest.split_once('.')?;
            let hex = |digits: &str, lengths: std::ops::RangeInclusive<usize>| {
                let good = lengths.contains(&digits.len()) && digits.bytes().all(|byte| byte.is_ascii_hexdigit());
                good.then(|| u32::from_str_radix(digits, 16).ok()).flatten()
            };
            let device = hex(device, 2..=2).filter(|device| *device < 32)?;
            let function = hex(function, 1..=1).filter(|function| *function < 8)?;
            let bus = u8::try_from(hex(bus, 2..=2)?).ok()?;
            Some(Self { domain: hex(domain, 4..=8)?, bus, devfn: u8::try_from(device << 3 | function).ok()? })
        };
        parse().ok_or_else(|| NoAddress(text.chars().take(32).collect()))
    }
}

impl<'de> Deserialize<'de> for Address {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        String::deserialize(deserializer)?.parse().map_err(serde::de::Error::custom)
    }
}

impl Serialize for Address {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn invalid_address_error_shows_an_example() {
        let wrong = ["", "65:00.0", "0000:65:00", "0000:65:20.0", "0000:65:00.8", "000:65:00.0", "0000:065:00.0", "x"];
        for text in wrong.into_iter().chain(["+000:65:00.0", "0000:65:00.0 ", "000000000:65:00.0"]) {
            let error = text.parse::<Address>().unwrap_err().to_string();
            assert!(error.contains("expected one such as 0000:65:00.0"), "{text}: {error}");
        }
        let long = "7".repeat(1000).parse::<Address>().unwrap_err().to_string();
        assert!(long.len() < 200, "{long}");
    }

    proptest! {
        #[test]
        fn every_address_is_read_as_it_is_written(domain: u32, bus: u8, devfn: u8) {
            let address = Address::new(domain, bus, devfn);
            prop_assert_eq!(address.to_string().parse::<Address>(), Ok(address));
        }

        #[test]
        fn no_text_panics(text in ".{0,24}") {
            let _ = text.parse::<Address>();
        }
    }
}
