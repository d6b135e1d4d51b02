//! Limits the events of one kind about one subject: in each window of length [`WINDOW`], the first [`BURST`] events
//! pass, and one more event summarizes the rest.

use std::collections::BTreeMap;
use std::time::Duration;

use api::{Author, EventKind, Subject};

use crate::event::NewEvent;

/// Length of a window.
pub(crate) const WINDOW: Duration = Duration::from_secs(10);
/// Number of events that pass per window.
pub(crate) const BURST: u32 = 5;
/// Maximum number of open windows. Beyond it, events about other subjects are only counted.
const MAX_WINDOWS: usize = 1024;

/// A time window for events of one kind about one subject.
#[derive(Debug, Default)]
struct Window {
    since: Duration,
    passed: u32,
    held: u64,
    /// Last event that was suppressed.
    last: Option<(NewEvent, Author)>,
}

/// All windows. Times are relative to the start of the log.
#[derive(Debug, Default)]
pub(crate) struct Limits {
    windows: BTreeMap<(EventKind, Subject), Window>,
    /// Time of the first suppressed event without a window, and the number of such events.
    unlisted: Option<(Duration, u64)>,
}

impl Limits {
    /// Returns the event and its author if the event passes, and otherwise counts it.
    pub fn admit(&mut self, event: NewEvent, author: Author, now: Duration) -> Option<(NewEvent, Author)> {
        let key = (event.kind, event.subject.clone());
        if self.windows.len() >= MAX_WINDOWS && !self.windows.contains_key(&key) {
            // Drop windows that have ended without suppressed events.
            self.windows.retain(|_, window| window.held > 0 || !window.has_ended(now));
            if self.windows.len() >= MAX_WINDOWS {
                self.unlisted.get_or_insert((now, 0)).1 += 1;
                return None;
            }
        }
        let window = self.windows.entry(key).or_insert_with(|| Window { since: now, ..Window::default() });
        if window.has_ended(now) && window.held == 0 {
            *window = Window { since: now, ..Window::default() };
        }
        if window.passed < BURST {
            window.passed += 1;
            return Some((event, author));
        }
        window.held += 1;
        window.last = Some((event, author));
        None
    }

    /// Closes windows that have ended. Returns the last suppressed event of each closed window, if any, with the number
    /// of suppressed events. Also reports the number of events without a window.
    pub fn ended(&mut self, now: Duration) -> Vec<(NewEvent, Author, u64)> {
        let mut reports = Vec::new();
        self.windows.retain(|_, window| {
            if !window.has_ended(now) {
                return true;
            }
            if let Some((mut event, author)) = window.last.take() {
                let (held, seconds) = (window.held, WINDOW.as_secs());
                event.text = format!("{held} more in {seconds} s, the last: {}", event.text);
                reports.push((event, author, held));
            }
            false
        });
        if let Some((_, held)) = self.unlisted.take_if(|(since, _)| now.saturating_sub(*since) >= WINDOW) {
            let text = format!("{held} events about many subjects in {} s are not listed", WINDOW.as_secs());
            reports.push((NewEvent::daemon(EventKind::Suppressed, text), crate::author::daemon(), held));
        }
        reports
    }
}

impl Window {
    fn has_ended(&self, now: Duration) -> bool {
        now.saturating_sub(self.since) >= WINDOW
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn admit(limits: &mut Limits, name: &str, kind: EventKind, ms: u64) -> bool {
        let event = NewEvent::tenant(kind, name, format!("at {ms}"));
        limits.admit(event, crate::author::daemon(), Duration::from_millis(ms)).is_some()
    }

    #[test]
    fn flood_of_one_subject_is_summed_and_others_pass() {
        let mut limits = Limits::default();
        let passed = (0..42).filter(|ms| admit(&mut limits, "loud", EventKind::Connected, *ms)).count();
        assert_eq!(passed, 5);
        // Other kinds and other subjects have separate windows.
        assert!(admit(&mut limits, "loud", EventKind::Quarantined, 50));
        assert!(admit(&mut limits, "quiet", EventKind::Connected, 50));
        assert!(limits.ended(Duration::from_millis(9_999)).is_empty());
        let reports = limits.ended(Duration::from_millis(10_050));
        let [(event, _, held)] = reports.as_slice() else { panic!("{reports:?}") };
        assert_eq!((*held, &*event.text), (37, "37 more in 10 s, the last: at 41"));
        assert!(admit(&mut limits, "loud", EventKind::Connected, 10_060));
    }

    #[test]
    fn event_after_ended_window_waits_for_report_of_that_window() {
        let mut limits = Limits::default();
        assert_eq!((0..6).filter(|ms| admit(&mut limits, "a", EventKind::Killed, *ms)).count(), 5);
        // The report precedes the event, which keeps events in chronological order.
        assert!(!admit(&mut limits, "a", EventKind::Killed, 20_000));
        assert_eq!(limits.ended(Duration::from_secs(20))[0].2, 2);
        assert!(admit(&mut limits, "a", EventKind::Killed, 20_001));
    }

    #[test]
    fn number_of_windows_is_bounded_and_further_events_are_counted() {
        let mut limits = Limits::default();
        let passed = (0..3000).filter(|n| admit(&mut limits, &format!("t{n}"), EventKind::Added, 1)).count();
        assert_eq!((passed, limits.windows.len()), (MAX_WINDOWS, MAX_WINDOWS));
        let reports = limits.ended(Duration::from_secs(11));
        let [(event, _, held)] = reports.as_slice() else { panic!("{reports:?}") };
        assert_eq!((event.kind, *held), (EventKind::Suppressed, 3000 - MAX_WINDOWS as u64));
        assert!(limits.windows.is_empty());
    }
}
