//! Parsers for command line values with a unit or a name.

use std::str::FromStr;
use std::time::Duration;

use serde::de::DeserializeOwned;
use serde::de::value::{Error, StrDeserializer};

pub use config::size::mib;

/// A fraction in percent, with at most one decimal.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Percent {
    /// The fraction in permille, as in the API.
    pub permille: u32,
}

impl FromStr for Percent {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let number = text.strip_suffix('%').unwrap_or(text).trim_end();
        let (whole, tenths) = number.split_once('.').unwrap_or((number, "0"));
        let digits = |text: &str| !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
        let permille = (digits(whole) && digits(tenths) && tenths.len() == 1)
            .then(|| whole.parse::<u32>().ok()?.checked_mul(10)?.checked_add(tenths.parse().ok()?))
            .flatten();
        match permille {
            Some(permille @ 0..=1000) => Ok(Self { permille }),
            _ => Err(format!("`{text}` is not a percentage, expected a number from 0 to 100, such as 12.5")),
        }
    }
}

/// Parses a duration: digits followed by `ms`, `s` or `m`.
///
/// # Errors
/// Returns an error if the text is invalid; the error names the expected format.
pub fn span(text: &str) -> Result<Duration, String> {
    let unit = text.trim_start_matches(|digit: char| digit.is_ascii_digit());
    let number = text.strip_suffix(unit).and_then(|number| number.parse::<u64>().ok());
    let ms = match unit {
        "ms" => Some(1),
        "s" => Some(1000),
        "m" => Some(60_000),
        _ => None,
    };
    let span = number.zip(ms).and_then(|(number, ms)| number.checked_mul(ms)).filter(|ms| *ms > 0);
    span.map(Duration::from_millis)
        .ok_or_else(|| format!("`{text}` is not a duration, expected a number with ms, s or m, such as 500ms"))
}

/// Parses a duration in seconds, from 0.1 to a day, with or without decimals.
///
/// # Errors
/// Returns an error if the text is invalid; the error names the expected format.
pub fn seconds(text: &str) -> Result<Duration, String> {
    let plain = text.bytes().all(|byte| byte.is_ascii_digit() || byte == b'.');
    match text.parse::<f64>() {
        Ok(seconds @ 0.1..=86_400.0) if plain => Ok(Duration::from_secs_f64(seconds)),
        _ => Err(format!("`{text}` is not a valid time, expected seconds from 0.1 to 86400, such as 2 or 0.5")),
    }
}

/// Parses a revision of the daemon's state.
///
/// # Errors
/// Returns an error if the text is invalid; the error names the expected format.
pub fn revision(text: &str) -> Result<String, String> {
    let plain = text.bytes().all(|byte| byte.is_ascii_hexdigit() || byte == b'-');
    if plain && !text.is_empty() {
        return Ok(text.to_owned());
    }
    Err(format!("`{text}` is not a revision, expected one printed by `mediatorctl export`"))
}

/// Parses a label: a key, `=`, and a value. The daemon checks both.
///
/// # Errors
/// Returns an error if the text is invalid; the error names the expected format.
pub fn label(text: &str) -> Result<(String, String), String> {
    let pair = text.split_once('=').map(|(key, value)| (key.to_owned(), value.to_owned()));
    pair.ok_or_else(|| format!("`{text}` is not a label, expected KEY=VALUE, such as pod=web-0"))
}

/// Parses a value given by its configuration file name.
///
/// # Errors
/// Returns an error if the name is unknown; the error lists the valid names.
pub fn named<T: DeserializeOwned>(text: &str) -> Result<T, String> {
    T::deserialize(StrDeserializer::<Error>::new(text)).map_err(|error| error.to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn percent_has_at_most_one_decimal() {
        let permille = |text: &str| text.parse::<Percent>().map(|percent| percent.permille).ok();
        for (text, expected) in [("0", 0), ("10", 100), ("12.5", 125), ("100%", 1000), ("33.3 %", 333)] {
            assert_eq!(permille(text), Some(expected), "{text}");
        }
        for text in ["", "%", ".5", "5.", "12.55", "100.1", "-1", "+1", "ten", "99999999999", "4294967295.9"] {
            assert_eq!(permille(text), None, "{text}");
        }
    }

    #[test]
    fn lengths_of_time_have_a_unit() {
        for (text, ms) in [("500ms", 500), ("60s", 60_000), ("2m", 120_000)] {
            assert_eq!(span(text), Ok(Duration::from_millis(ms)), "{text}");
        }
        for text in ["", "5", "s", "0s", "1h", "-1s", "1.5s", "99999999999999999999s", "18446744073709551615m"] {
            assert!(span(text).unwrap_err().contains("expected a number with ms, s or m"), "{text}");
        }
    }

    #[test]
    fn seconds_have_bounds_and_revisions_no_spaces() {
        for (text, ms) in [("2", 2000), ("0.5", 500), ("0.1", 100), ("86400", 86_400_000)] {
            assert_eq!(seconds(text), Ok(Duration::from_millis(ms)), "{text}");
        }
        for text in ["", "0", "0.01", "86401", "-1", "+1", "1e3", "inf", "nan", "2s", "."] {
            assert!(seconds(text).unwrap_err().contains("expected seconds"), "{text}");
        }
        assert_eq!(revision("18aef-3"), Ok("18aef-3".to_owned()));
        for text in ["", "18aef 3", "\"a\"", "web"] {
            assert!(revision(text).is_err(), "{text}");
        }
    }

    #[test]
    fn names_are_those_of_the_configuration() {
        assert_eq!(named("band"), Ok(sched::PolicyKind::Band));
        assert_eq!(named("interactive"), Ok(sched::LatencyClass::Interactive));
        let error = named::<sched::Queues>("double").unwrap_err();
        assert_eq!(error, "unknown variant `double`, expected `separate` or `single`");
    }
}
