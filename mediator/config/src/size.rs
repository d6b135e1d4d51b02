//! Syntax of sizes in files, options and requests: `20G`, `512M`, or a bare number of MiB.

use std::fmt;

use serde::Deserializer;
use serde::de::{Error, Unexpected, Visitor};

/// Parses a size in MiB.
///
/// # Errors
/// If the text is invalid, returns an error that describes the expected format.
pub fn mib(text: &str) -> Result<u64, String> {
    let (digits, factor) = match text.as_bytes().last() {
        Some(b'M') => (&text[..text.len() - 1], 1),
        Some(b'G') => (&text[..text.len() - 1], 1 << 10),
        Some(b'T') => (&text[..text.len() - 1], 1 << 20),
        _ => (text, 1),
    };
    let plain = !digits.is_empty() && digits.bytes().all(|byte| byte.is_ascii_digit());
    // The size in bytes must also fit in 64 bits.
    let mib = digits.parse::<u64>().ok().filter(|_| plain).and_then(|number| number.checked_mul(factor));
    let mib = mib.filter(|mib| mib.checked_mul(1 << 20).is_some());
    mib.ok_or_else(|| format!("`{text}` is not a size, expected a number of MiB, or one with M or G, such as 20G"))
}

struct Size;

impl Visitor<'_> for Size {
    type Value = u64;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a number of MiB, or a size such as \"20G\"")
    }

    fn visit_u64<E: Error>(self, mib: u64) -> Result<u64, E> {
        Ok(mib)
    }

    fn visit_i64<E: Error>(self, mib: i64) -> Result<u64, E> {
        u64::try_from(mib).map_err(|_| E::invalid_value(Unexpected::Signed(mib), &self))
    }

    fn visit_str<E: Error>(self, text: &str) -> Result<u64, E> {
        mib(text).map_err(E::custom)
    }
}

/// Deserializes a key with a size in MiB.
pub(crate) fn key<'de, D: Deserializer<'de>>(deserializer: D) -> Result<u64, D::Error> {
    // A binary format contains only the number.
    if deserializer.is_human_readable() {
        deserializer.deserialize_any(Size)
    } else {
        deserializer.deserialize_u64(Size)
    }
}

/// Deserializes an optional key with a size in MiB; null means that the key is absent.
pub(crate) fn optional<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<u64>, D::Error> {
    struct Optional;

    impl<'de> Visitor<'de> for Optional {
        type Value = Option<u64>;

        fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
            Size.expecting(f)
        }

        fn visit_none<E: Error>(self) -> Result<Option<u64>, E> {
            Ok(None)
        }

        fn visit_unit<E: Error>(self) -> Result<Option<u64>, E> {
            Ok(None)
        }

        fn visit_some<D: Deserializer<'de>>(self, deserializer: D) -> Result<Option<u64>, D::Error> {
            key(deserializer).map(Some)
        }
    }

    deserializer.deserialize_option(Optional)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Config;

    #[test]
    fn sizes_have_one_syntax() {
        for (text, expected) in [("512", 512), ("512M", 512), ("20G", 20 << 10), ("2T", 2 << 20), ("0", 0)] {
            assert_eq!(mib(text), Ok(expected), "{text}");
        }
        for text in ["", "G", "1.5G", "-1", "+1", "1K", "1g", "20 G", "99999999999999999999", "99999999999999M"] {
            assert!(mib(text).unwrap_err().contains("is not a size, expected a number of MiB"), "{text}");
        }
    }

    #[test]
    fn files_take_sizes_with_unit_in_all_keys() {
        let text = "[[card]]\nname = \"card0\"\nkind = \"simgpu\"\nvram_mib = \"1G\"\nbar1_mib = \"64M\"\n\
                    reserve_mib = \"64\"\nmemory.host_mib = \"2G\"\nmemory.ram.quota_mib = \"4G\"\n\
                    [[profile]]\nname = \"p\"\nvram_mib = \"128M\"\nmemory.guarantee_mib = \"64M\"\n\
                    [[vm]]\nname = \"a\"\ncard = \"card0\"\nvram_mib = \"256M\"\nmemory.quota_mib = \"128M\"\n\
                    [[vm]]\nname = \"b\"\ncard = \"card0\"\nprofile = \"p\"\nmemory.guarantee_mib = \"32M\"\n\
                    [[card]]\nname = \"h100\"\nkind = \"cuda\"\nvram_mib = \"40G\"\ncuda.chunk_mib = \"2M\"\n\
                    [[tenant]]\nname = \"t\"\ncard = \"h100\"\nvram_mib = \"20G\"\n";
        let config = Config::parse(text, "f").unwrap();
        let [card, h100] = &config.cards[..] else { panic!("two cards") };
        assert_eq!((card.vram_mib, card.bar1_mib, card.reserve_mib), (1024, 64, Some(64)));
        assert_eq!((card.memory.host_mib, card.memory.ram.quota_mib), (2048, Some(4096)));
        assert_eq!((h100.vram_mib, h100.cuda().chunk_mib, config.tenants[0].vram_mib), (40 << 10, 2, 20 << 10));
        let [a, b] = &config.vms[..] else { panic!("two VMs") };
        assert_eq!((a.vram_mib, a.memory.quota_mib), (Some(256), Some(128)));
        assert_eq!((b.vram_mib, b.memory.guarantee_mib), (Some(128), Some(32)));
        let error = Config::parse(&text.replace("\"256M\"", "\"256K\""), "f").unwrap_err().to_string();
        assert!(error.contains("f:16:12: vm[0].vram_mib: `256K` is not a size, expected a number of MiB"), "{error}");
    }
}
