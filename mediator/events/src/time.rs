//! Time of day as text.

use std::time::{SystemTime, UNIX_EPOCH};

/// Returns a time in UTC, as RFC 3339 with milliseconds. Times before 1970 count as its begin.
pub(crate) fn rfc3339(at: SystemTime) -> String {
    let since = at.duration_since(UNIX_EPOCH).unwrap_or_default();
    let (days, seconds) = (since.as_secs() / 86_400, since.as_secs() % 86_400);
    let (year, month, day) = date(days);
    let (hour, minute, second) = (seconds / 3600, seconds / 60 % 60, seconds % 60);
    format!("{year:04}-{month:02}-{day:02}T{hour:02}:{minute:02}:{second:02}.{:03}Z", since.subsec_millis())
}

/// Returns the date of a day after 1970-01-01, by Hinnant's algorithm: years begin in March, so that a leap day is the
/// last of its year.
fn date(days: u64) -> (u64, u64, u64) {
    // Days since 0000-03-01.
    let days = days + 719_468;
    let (era, of_era) = (days / 146_097, days % 146_097);
    let year = (of_era - of_era / 1460 + of_era / 36_524 - of_era / 146_096) / 365;
    let of_year = of_era - (365 * year + year / 4 - year / 100);
    let month = (5 * of_year + 2) / 153;
    let day = of_year - (153 * month + 2) / 5 + 1;
    let (month, next) = if month < 10 { (month + 3, 0) } else { (month - 9, 1) };
    (era * 400 + year + next, month, day)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

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
