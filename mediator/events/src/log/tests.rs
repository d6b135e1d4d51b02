//! Tests pages, cursors, lost events, limits, and the handover of the log.

use super::*;
use crate::shelf::MAX_EVENTS;
use api::EventKind;
use proptest::prelude::*;

const KIND: EventKind = EventKind::Changed;

/// Adds an event at a time that starts a new window.
fn add(log: &Log, name: &str, seconds: u64) {
    log.add_at(NewEvent::vm(KIND, name, format!("at {seconds}")), author::daemon(), Duration::from_secs(seconds));
}

fn texts(page: &EventPage) -> Vec<&str> {
    page.events.iter().map(|event| &*event.text).collect()
}

#[test]
fn pages_continue_at_cursor_until_log_is_read() {
    let log = Log::new();
    assert!(log.page(None, 10).unwrap().events.is_empty());
    (0..5).for_each(|n| add(&log, "a", n * 10));
    let first = log.page(None, 3).unwrap();
    assert_eq!((texts(&first), first.lost, &first.note), (vec!["at 0", "at 10", "at 20"], 0, &None));
    let second = log.page(Some(&first.next), 3).unwrap();
    assert_eq!(texts(&second), ["at 30", "at 40"]);
    let end = log.page(Some(&second.next), 3).unwrap();
    assert_eq!((end.events.len(), &end.next, end.lost), (0, &second.next, 0));
    // Each event contains the cursor of the position after it.
    assert_eq!(log.page(Some(&first.events[1].cursor), 1).unwrap().events, first.events[2..]);
    let numbers: Vec<u64> = first.events.iter().chain(&second.events).map(|event| event.number).collect();
    assert!(numbers.windows(2).all(|pair| pair[1] == pair[0] + 1), "{numbers:?}");
}

#[test]
fn slow_reader_learns_number_of_lost_events() {
    let log = Log::new();
    add(&log, "a", 0);
    let cursor = log.page(None, 10).unwrap().next;
    (1..=MAX_EVENTS as u64 + 99).for_each(|n| add(&log, "a", n * 10));
    let page = log.page(Some(&cursor), 10).unwrap();
    assert_eq!((page.lost, page.restarted, page.events.len()), (99, false, 10));
    assert!(page.note.unwrap().starts_with("99 events after the cursor are lost"));
    assert_eq!(log.page(Some(&page.next), MAX_EVENTS).unwrap().lost, 0);
    assert_eq!(log.page(None, 10).unwrap().lost, 100);
}

#[test]
fn bad_cursors_are_refused() {
    let log = Log::new();
    add(&log, "a", 0);
    assert_eq!(log.page(Some("tail"), 1), Err(BadCursor::Form("tail".to_owned())));
    let next = log.page(None, 1).unwrap().next;
    let ahead = next.replace("-1", "-2");
    assert_eq!(log.page(Some(&ahead), 1), Err(BadCursor::Ahead(ahead, next)));
}

#[test]
fn cursor_of_earlier_daemon_gets_all_events_and_a_note() {
    let log = Log::new();
    add(&log, "a", 0);
    let page = log.page(Some("1f-900"), 10).unwrap();
    assert_eq!((page.events.len(), page.restarted, page.lost), (1, true, 0));
    let note = page.note.unwrap();
    assert!(note.starts_with("the cursor is from a daemon that has exited") && note.contains("begins at 20"), "{note}");
    let next = log.page(Some(&page.next), 10).unwrap();
    assert_eq!((next.restarted, next.note), (false, None));
}

#[test]
fn flood_is_summed_up_before_the_next_event() {
    let log = Log::new();
    (0..42).for_each(|_| add(&log, "loud", 1));
    add(&log, "quiet", 12);
    let page = log.page(None, 100).unwrap();
    assert_eq!(texts(&page)[4..], ["at 1", "37 more in 10 s, the last: at 1", "at 12"]);
    assert_eq!(page.events.iter().map(|event| event.suppressed).collect::<Vec<_>>(), [0, 0, 0, 0, 0, 37, 0]);
}

#[test]
fn long_text_is_cut_at_a_character() {
    let log = Log::new();
    log.add(NewEvent::vm(KIND, "a", "ä".repeat(3000)));
    let text = &log.page(None, 1).unwrap().events[0].text;
    assert!(text.len() <= MAX_TEXT + '…'.len_utf8() && text.ends_with("ä…"), "{}", text.len());
}

#[test]
fn handed_log_continues_with_numbers_and_cursors() {
    let log = Log::new();
    (0..3).for_each(|n| add(&log, "a", n * 10));
    let cursor = log.page(None, 2).unwrap().next;
    let saved = log.freeze();
    add(&log, "late", 40);
    assert_eq!(log.page(None, 10).unwrap().events.len(), 3, "an event after the freeze has no number yet");
    let next = Log::restored(saved);
    add(&next, "b", 50);
    let page = next.page(Some(&cursor), 10).unwrap();
    assert_eq!((texts(&page), page.lost, page.restarted), (vec!["at 20", "at 50"], 0, false));
    // The next daemon did not take over.
    log.thaw();
    assert_eq!(texts(&log.page(Some(&cursor), 10).unwrap()), ["at 20", "at 40"]);
}

#[test]
fn damaged_hand_over_loses_events_and_keeps_numbers() {
    let log = Log::new();
    (0..3).for_each(|n| add(&log, "a", n * 10));
    let mut saved = log.freeze();
    saved.events[1] = "{".to_owned();
    saved.events[2] = saved.events[0].clone();
    let next = Log::restored(saved);
    let page = next.page(None, 10).unwrap();
    assert_eq!((texts(&page), page.lost), (vec!["at 0"], 2));
}

#[test]
fn follower_is_woken_by_event_and_by_close() {
    let log = Log::new();
    let mut news = log.news();
    add(&log, "a", 0);
    assert!(news.has_changed().unwrap());
    assert_eq!(*news.borrow_and_update(), News { count: 1, closed: false });
    log.tick();
    assert!(!news.has_changed().unwrap(), "nothing new");
    log.close();
    assert!(news.borrow_and_update().closed);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]

    /// A reader that follows the cursor sees each event once, unless the event is counted as lost.
    #[test]
    fn events_are_read_or_counted_as_lost(steps in prop::collection::vec((0_u8..6, 1_usize..3000), 1..12), limit in 1_usize..700) {
        let log = Log::new();
        let (mut at, mut added, mut seen, mut cursor) = (0, 0, 0, None::<String>);
        for (who, adds) in steps {
            for _ in 0..adds {
                at += 10;
                added += 1;
                add(&log, &format!("vm{who}"), at);
            }
            let page = log.page(cursor.as_deref(), limit).unwrap();
            prop_assert!(page.events.len() <= limit);
            seen += page.events.len() as u64 + page.lost;
            cursor = Some(page.next);
        }
        loop {
            let page = log.page(cursor.as_deref(), limit).unwrap();
            seen += page.events.len() as u64 + page.lost;
            cursor = Some(page.next);
            if page.events.is_empty() {
                break;
            }
        }
        prop_assert_eq!(seen, added);
    }
}
