//! The command line: a command, words, `--name value`, and `--name`.

use std::collections::BTreeMap;

use anyhow::{Context, Result, bail};

/// Arguments after the command.
#[derive(Debug, Default)]
pub struct Options {
    words: Vec<String>,
    values: BTreeMap<String, String>,
}

/// Options of all commands. A name that ends in `=` takes a value.
const COMMON: [&str; 2] = ["node=", "seed="];

impl Options {
    /// Parses arguments. `known` lists the command's options. Options that take a value end in `=`.
    pub fn parse(arguments: &[String], known: &[&str]) -> Result<Self> {
        let mut options = Self::default();
        let mut arguments = arguments.iter();
        while let Some(argument) = arguments.next() {
            let Some(option) = argument.strip_prefix("--") else {
                options.words.push(argument.clone());
                continue;
            };
            let (name, inline) = match option.split_once('=') {
                Some((name, value)) => (name, Some(value.to_owned())),
                None => (option, None),
            };
            let is = |known: &&str, suffix: &str| known.strip_prefix(name) == Some(suffix);
            let all = || known.iter().chain(&COMMON);
            let value = if all().any(|known| is(known, "=")) {
                match inline {
                    Some(value) => value,
                    None => arguments.next().with_context(|| format!("--{name} needs a value"))?.clone(),
                }
            } else if all().any(|known| is(known, "")) && inline.is_none() {
                String::new()
            } else {
                let all: Vec<String> = all().map(|known| format!("--{known}")).collect();
                bail!("unknown option {argument}; known: {}", all.join(" "));
            };
            options.values.insert(name.to_owned(), value);
        }
        Ok(options)
    }

    /// Returns the arguments that are not options.
    pub fn words(&self) -> &[String] {
        &self.words
    }

    /// Returns true if a flag was given.
    pub fn flag(&self, name: &str) -> bool {
        self.values.contains_key(name)
    }

    /// Returns the value of an option.
    pub fn text(&self, name: &str) -> Option<&str> {
        self.values.get(name).map(String::as_str)
    }

    /// Returns the numeric value of an option, or `default` if it was not given.
    pub fn number(&self, name: &str, default: u64) -> Result<u64> {
        match self.text(name) {
            Some(text) => number(text).with_context(|| format!("--{name} {text}")),
            None => Ok(default),
        }
    }
}

/// Parses a number: decimal with an optional suffix k, m or g (powers of 1024), or hexadecimal with the prefix 0x.
pub fn number(text: &str) -> Result<u64> {
    let lower = text.to_ascii_lowercase();
    if let Some(digits) = lower.strip_prefix("0x") {
        return u64::from_str_radix(&digits.replace('_', ""), 16).context("not a hexadecimal number");
    }
    let (digits, shift) = match lower.strip_suffix(['k', 'm', 'g']) {
        Some(digits) if lower.ends_with('k') => (digits, 10),
        Some(digits) if lower.ends_with('m') => (digits, 20),
        Some(digits) => (digits, 30),
        None => (lower.as_str(), 0),
    };
    let value: u64 = digits.replace('_', "").parse().context("not a number")?;
    value.checked_mul(1 << shift).context("too large")
}

/// Parses the bytes of a pattern from hexadecimal digits.
pub fn hex_bytes(text: &str) -> Result<Vec<u8>> {
    let digits = text.trim_start_matches("0x");
    if digits.is_empty() || !digits.len().is_multiple_of(2) || !digits.is_ascii() {
        bail!("{text}: an even number of hexadecimal digits is needed");
    }
    let byte =
        |at: usize| u8::from_str_radix(&digits[at..at + 2], 16).with_context(|| format!("{text}: not hexadecimal"));
    (0..digits.len()).step_by(2).map(byte).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(line: &str, known: &[&str]) -> Result<Options> {
        let words: Vec<String> = line.split_whitespace().map(str::to_owned).collect();
        Options::parse(&words, known)
    }

    #[test]
    fn options_parse_words_values_and_flags() {
        let options = parse("read32 0 --count 3 --quick 0x10 --seed=0x7", &["count=", "quick"]).expect("valid");
        assert_eq!(options.words(), ["read32", "0", "0x10"]);
        assert_eq!(options.number("count", 1).expect("a number"), 3);
        assert_eq!(options.number("seed", 1).expect("a number"), 7);
        assert_eq!(options.number("absent", 9).expect("the default"), 9);
        assert!(options.flag("quick"));
    }

    #[test]
    fn unknown_and_incomplete_options_are_errors() {
        assert!(parse("--counts 3", &["count="]).is_err());
        assert!(parse("--count", &["count="]).is_err());
        assert!(parse("--quick=1", &["quick"]).is_err());
        assert!(parse("--count x", &["count="]).expect("parses").number("count", 0).is_err());
    }

    #[test]
    fn numbers_have_units_and_bases() {
        let numbers = ["12", "0x1f", "4k", "132M", "1g", "0xdead_beef"].map(|text| number(text).expect(text));
        assert_eq!(numbers, [12, 31, 4096, 132 << 20, 1 << 30, 0xdead_beef]);
        assert!(number("99999999999g").is_err());
        assert!(number("k").is_err());
    }

    #[test]
    fn patterns_are_bytes_in_the_order_of_the_digits() {
        assert_eq!(hex_bytes("0xdeadBEEF").expect("valid"), [0xde, 0xad, 0xbe, 0xef]);
        assert!(hex_bytes("abc").is_err());
        assert!(hex_bytes("zz").is_err());
        assert!(hex_bytes("").is_err());
    }
}
