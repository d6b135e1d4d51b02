//! Marks in the work of a program that is alone.

use super::*;

const ONE: Stream = Stream::made(5);
const OTHER: Stream = Stream::made(6);

/// Returns this many marks of a stream, made at `at`.
fn flying(solo_backlog: &mut SoloBacklog, stream: Stream, count: usize, at: Instant) {
    solo_backlog.marks.extend((0..count).map(|_| Mark { context: 1, stream, event: Event::NONE, made: at }));
}

fn ms(ms: u64) -> Duration {
    Duration::from_millis(ms)
}

#[test]
fn stream_with_max_marks_waits_until_one_passes() {
    let (mut solo_backlog, at, mut since) = (SoloBacklog::new(), Instant::now(), None);
    flying(&mut solo_backlog, ONE, 1, at);
    flying(&mut solo_backlog, ONE, MAX_MARKS_PER_STREAM - 1, at + ms(1));
    assert!(!solo_backlog.look(at, ONE, &mut since, |_| false));
    assert!(solo_backlog.look(at, OTHER, &mut None, |_| false), "another stream may have work");
    assert!(solo_backlog.is_any_full());
    assert!(
        !solo_backlog.look(at, ONE, &mut since, |mark| mark.made != at),
        "what is behind one that has not passed has not"
    );
    assert!(solo_backlog.look(at, ONE, &mut since, |mark| mark.made == at));
    assert!(!solo_backlog.is_any_full());
    assert_eq!(solo_backlog.marks.len(), MAX_MARKS_PER_STREAM - 1);
}

#[test]
fn mark_interval_grows_for_short_work_and_shrinks_for_long() {
    let (mut solo_backlog, at) = (SoloBacklog::new(), Instant::now());
    let every = |solo_backlog: &mut SoloBacklog, took, waited| {
        flying(solo_backlog, ONE, 1, at);
        solo_backlog.reap(at + ms(took), waited, |_| true);
        solo_backlog.every
    };
    assert_eq!([1, 1, 1, 1, 1].map(|took| every(&mut solo_backlog, took, true)), [8, 16, 32, 32, 32]);
    assert_eq!([50, 50].map(|took| every(&mut solo_backlog, took, true)), [32, 32], "it is as long as it may be");
    // No wait happened: the mark may have passed long ago.
    assert_eq!(every(&mut solo_backlog, 5000, false), 32);
    assert_eq!([200; 7].map(|took| every(&mut solo_backlog, took, true)), [16, 8, 4, 2, 1, 1, 1]);
}

#[test]
fn stuck_stream_may_submit_more_after_wait_limit() {
    let (mut solo_backlog, at, mut since) = (SoloBacklog::new(), Instant::now(), None);
    flying(&mut solo_backlog, ONE, MAX_MARKS_PER_STREAM, at);
    assert!(!solo_backlog.look(at, ONE, &mut since, |_| false));
    assert!(!solo_backlog.look(at + MARK_TIMEOUT, ONE, &mut since, |_| false));
    assert!(solo_backlog.look(at + MARK_TIMEOUT + ms(1), ONE, &mut since, |_| false), "twice as much");
    flying(&mut solo_backlog, ONE, MAX_MARKS_PER_STREAM, at);
    assert!(!solo_backlog.look(at + MARK_TIMEOUT + ms(2), ONE, &mut since, |_| false), "for as long again");
}
