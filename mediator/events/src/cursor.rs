//! Cursors: positions in the event log of one daemon, or of several daemons that have taken over from one another.

use std::fmt;
use std::str::FromStr;

/// Position in the log after an event.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Cursor {
    /// Time at which the log was started, in ms since 1970; unique per log.
    pub epoch: u64,
    /// Number of events in the log up to this position.
    pub count: u64,
}

impl fmt::Display for Cursor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:x}-{}", self.epoch, self.count)
    }
}

/// Reason why a text is not a cursor of this log.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum BadCursor {
    /// The text does not have the format of a cursor.
    #[error("after: `{0}` is not a cursor")]
    Form(String),
    /// The cursor is beyond the end of the log.
    #[error("after: `{0}` is after the last event, `{1}`")]
    Ahead(String, String),
}

impl BadCursor {
    /// Advice to the client.
    pub const ADVICE: &str = "pass `next` of an earlier response or `cursor` of an event, or omit `after`";
}

impl FromStr for Cursor {
    type Err = BadCursor;

    fn from_str(text: &str) -> Result<Self, BadCursor> {
        let parsed = text.split_once('-').and_then(|(epoch, count)| {
            let cursor = Self { epoch: u64::from_str_radix(epoch, 16).ok()?, count: count.parse().ok()? };
            // Reject other spellings of the same numbers.
            (cursor.to_string() == text).then_some(cursor)
        });
        parsed.ok_or_else(|| {
            let shown: String = text.chars().take(64).collect();
            BadCursor::Form(shown)
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cursor_survives_text_and_other_texts_are_refused() {
        let cursor = Cursor { epoch: 0x19a_cafe, count: 42 };
        assert_eq!(cursor.to_string(), "19acafe-42");
        assert_eq!("19acafe-42".parse(), Ok(cursor));
        for bad in ["", "42", "-", "19acafe-", "-42", "19ACAFE-42", "19acafe-042", "+1-2", "1-+2", "1-2-3", "x-1"] {
            assert_eq!(bad.parse::<Cursor>(), Err(BadCursor::Form(bad.to_owned())));
        }
        let long = "9".repeat(1000).parse::<Cursor>().unwrap_err().to_string();
        assert!(long.len() < 100, "{long}");
    }
}
