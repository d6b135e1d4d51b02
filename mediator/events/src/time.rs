//! Time of day as text.

use std::time::SystemTime;

use jiff::Timestamp;

/// Formats a UTC time as RFC 3339 with milliseconds. Times that the format cannot represent are treated as 1970.
#[must_use]
pub fn rfc3339(at: SystemTime) -> String {
    format!("{:.3}", Timestamp::try_from(at).unwrap_or_default())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::{Duration, UNIX_EPOCH};

    #[test]
    fn times_are_rfc3339_across_leap_days() {
        let text = |seconds, millis| rfc3339(UNIX_EPOCH + Duration::from_secs(seconds) + Duration::from_millis(millis));
        assert_eq!(text(0, 0), "1970-01-01T00:00:00.000Z");
        assert_eq!(text(951_782_399, 999), "2000-02-28T23:59:59.999Z");
        assert_eq!(text(951_782_400, 0), "2000-02-29T00:00:00.000Z");
        assert_eq!(text(951_868_800, 0), "2000-03-01T00:00:00.000Z");
        assert_eq!(text(1_798_761_599, 7), "2026-12-31T23:59:59.007Z");
        assert_eq!(text(4_107_542_400, 0), "2100-03-01T00:00:00.000Z");
    }
}
