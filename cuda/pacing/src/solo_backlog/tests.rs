//! Tests the marks of a program that is alone.

use super::*;

const ONE: Stream = Stream::made(5);
const OTHER: Stream = Stream::made(6);

/// Adds `count` marks to a stream, recorded at `at`.
fn flying(marks: &mut Marks, stream: Stream, count: usize, at: Instant) {
    marks.marks.extend((0..count).map(|_| Mark { context: 1, stream, event: Event::of_test(0), made: at }));
}

fn ms(ms: u64) -> Duration {
    Duration::from_millis(ms)
}

#[test]
fn stream_with_max_marks_waits_until_one_passes() {
    let (mut marks, at, mut since) = (Marks::new(), Instant::now(), None);
    flying(&mut marks, ONE, 1, at);
    flying(&mut marks, ONE, MAX_MARKS_PER_STREAM - 1, at + ms(1));
    assert!(!marks.look(at, ONE, &mut since, |_| false));
    assert!(marks.look(at, OTHER, &mut None, |_| false), "another stream may have work");
    assert!(marks.is_any_full());
    assert!(!marks.look(at, ONE, &mut since, |mark| mark.made != at), "a mark after a pending one has not passed");
    assert!(marks.look(at, ONE, &mut since, |mark| mark.made == at));
    assert!(!marks.is_any_full());
    assert_eq!(marks.marks.len(), MAX_MARKS_PER_STREAM - 1);
}

#[test]
fn mark_interval_grows_for_short_work_and_shrinks_for_long() {
    let (mut marks, at) = (Marks::new(), Instant::now());
    let every = |marks: &mut Marks, took, waited| {
        flying(marks, ONE, 1, at);
        marks.reap(at + ms(took), waited, |_| true);
        marks.every
    };
    assert_eq!([1, 1, 1, 1, 1].map(|took| every(&mut marks, took, true)), [8, 16, 32, 32, 32]);
    assert_eq!([50, 50].map(|took| every(&mut marks, took, true)), [32, 32], "the interval is at its maximum");
    // No thread waited, so the mark may have completed long ago.
    assert_eq!(every(&mut marks, 5000, false), 32);
    assert_eq!([200; 7].map(|took| every(&mut marks, took, true)), [16, 8, 4, 2, 1, 1, 1]);
}

#[test]
fn stuck_stream_may_submit_more_after_wait_limit() {
    let (mut marks, at, mut since) = (Marks::new(), Instant::now(), None);
    flying(&mut marks, ONE, MAX_MARKS_PER_STREAM, at);
    assert!(!marks.look(at, ONE, &mut since, |_| false));
    assert!(!marks.look(at + MARK_TIMEOUT, ONE, &mut since, |_| false));
    assert!(marks.look(at + MARK_TIMEOUT + ms(1), ONE, &mut since, |_| false), "twice as many marks");
    flying(&mut marks, ONE, MAX_MARKS_PER_STREAM, at);
    assert!(!marks.look(at + MARK_TIMEOUT + ms(2), ONE, &mut since, |_| false), "for the same time again");
}
