//! Tests groups of work, their estimated durations, and polling for their completion.
//!
//! UNSAFETY: replaces driver functions.
#![allow(unsafe_code, reason = "see UNSAFETY")]

use super::*;
use crate::driver::SUCCESS;

const STREAM: Stream = Stream::made(5);

thread_local! {
    static CURRENT: std::cell::Cell<u64> = const { std::cell::Cell::new(0) };
}

unsafe extern "C" fn get_current(to: *mut u64) -> i32 {
    // SAFETY: the caller's pointer is valid.
    unsafe { *to = CURRENT.get() };
    SUCCESS
}

extern "C" fn set_current(context: u64) -> i32 {
    CURRENT.set(context);
    SUCCESS
}

/// Fails without a context, like the driver. Otherwise, reports that the work before the event has not completed.
extern "C" fn not_ended(_: u64) -> i32 {
    if CURRENT.get() == 0 { driver::INVALID_CONTEXT } else { driver::NOT_READY }
}

extern "C" fn recorded(_: u64, _: u64) -> i32 {
    SUCCESS
}

/// Reports that each event occurred 5 ms after the base event.
unsafe extern "C" fn elapsed(to: *mut f32, _: u64, _: u64) -> i32 {
    // SAFETY: the caller's pointer is valid.
    unsafe { *to = 5.0 };
    SUCCESS
}

/// Replaces the driver's functions with the functions above.
fn stand_in_for_the_driver() {
    use crate::symbols::{REAL, at};
    let functions = [
        (at::cuCtxGetCurrent, get_current as *mut ()),
        (at::cuCtxSetCurrent, set_current as *mut ()),
        (at::cuEventQuery, not_ended as *mut ()),
        (at::cuEventRecord, recorded as *mut ()),
        (at::cuEventElapsedTime, elapsed as *mut ()),
    ];
    for (index, function) in functions {
        REAL[index].store(function, Ordering::SeqCst);
    }
}

#[test]
fn work_is_in_flight_for_a_thread_without_a_context_as_well() {
    stand_in_for_the_driver();
    let mut pace = flying(&[(1.0, true)], Instant::now());
    pace.reap();
    assert_eq!(pace.groups.len(), 1, "the driver has not reported its completion");
    assert_eq!(CURRENT.get(), 0, "the thread's context is restored");
}

/// Returns groups in flight that were submitted at `at`, each with one kernel.
fn flying(lengths: &[(f64, bool)], at: Instant) -> Pace {
    let mut pace = Pace { all_measured: true, ..Pace::default() };
    for &(ms, sure) in lengths {
        let mut group = Group::new(1, STREAM, None);
        (group.end, group.opened) = (Some(Event::of_test(9)), at);
        (group.estimate, group.sure) = (ms * 1e6, sure);
        group.keys.push(1);
        pace.groups.push_back(group);
    }
    pace
}

/// Evaluates a group with one kernel that takes `ms` milliseconds. Returns the new estimate.
fn taken(pace: &mut Pace, ms: f64) -> Length {
    let expected = pace.lengths.get(&1).map_or(UNKNOWN_NS, |length| length.ns);
    let group = flying(&[(expected / 1e6, false)], Instant::now()).groups.remove(0).expect("one");
    pace.learn(&group, ms * 1e6);
    pace.lengths[&1]
}

#[test]
fn elapsed_part_of_long_kernel_is_not_counted_as_left() {
    let at = Instant::now();
    let mut pace = flying(&[(21.0, true)], at);
    assert!(pace.left_ns(at) > 20e6, "none of it has run");
    let late = at + Duration::from_millis(18);
    assert!((pace.left_ns(late) - 3e6).abs() < 1e3);
    // Work that takes longer than expected is considered about to complete. The work after it has not begun.
    pace.groups.extend(flying(&[(21.0, true)], at).groups);
    assert!((pace.left_ns(at + Duration::from_millis(50)) - 21e6).abs() < 1e3);
    // The completion of the first group was detected late, so the estimate assumes that the second group has run only
    // since then.
    pace.groups.pop_front();
    pace.seen = Some(at + Duration::from_millis(50));
    assert!((pace.left_ns(at + Duration::from_millis(60)) - 11e6).abs() < 1e3);
}

#[test]
fn of_work_that_may_have_begun_at_any_time_no_length_is_learnt() {
    stand_in_for_the_driver();
    let mut pace = flying(&[(2.0, false)], Instant::now());
    pace.clocks.insert(1, Clock { base: Event::of_test(1), offset: 0.0, busy_until: 0.0, spare: Vec::new() });
    let group = pace.groups.remove(0).expect("one");
    pace.account(&group, Event::of_test(9));
    assert!(pace.lengths.is_empty(), "{:?}", pace.lengths);
    // The next work begins when the previous work has completed.
    pace.ends.insert((1, STREAM), 3.0);
    pace.account(&group, Event::of_test(9));
    assert_eq!(pace.lengths[&1].ns, 2e6);
}

#[test]
fn work_submitted_with_unknown_length_corrects_estimate() {
    let mut pace = Pace::default();
    let groups = flying(&[(0.2, false); 20], Instant::now()).groups;
    let found: Vec<f64> = groups.iter().map(|group| (pace.learn(group, 12e6), pace.lengths[&1].ns).1).collect();
    assert!(found.iter().all(|ns| (ns - 12e6).abs() < 1.0), "{found:?}");
    assert!(pace.lengths[&1].steady >= MIN_CONFIRMING_GROUPS, "each took as long as the first");
}

#[test]
fn copy_may_run_next_to_long_kernel_of_other_stream() {
    let other = Stream::made(6);
    let mut pace = flying(&[(21.0, true)], Instant::now());
    assert!(pace.is_free_for(other) && !pace.is_free_for(STREAM));
    pace.groups.extend(flying(&[(21.0, true)], Instant::now()).groups);
    assert!(!pace.is_free_for(other), "a stream with work in flight");
}

#[test]
fn work_end_is_predicted_only_for_steady_lengths() {
    let at = Instant::now();
    let soon = |pace: &Pace| pace.left(at + Duration::from_millis(1));
    assert_eq!(soon(&flying(&[], at)), Left::Nothing);
    assert_eq!(soon(&flying(&[(1.5, true)], at)), Left::About(Duration::from_micros(500)));
    assert_eq!(soon(&flying(&[(1.5, true), (0.5, false)], at)), Left::Unknown);
    let mut open = flying(&[(1.5, true)], at);
    open.groups[0].end = None;
    assert_eq!(soon(&open), Left::Unknown, "its completion cannot be detected");
    let mut unmeasured = flying(&[(1.5, true)], at);
    unmeasured.all_measured = false;
    assert_eq!(soon(&unmeasured), Left::Unknown, "earlier unmeasured work is in flight");
}

#[test]
fn the_end_of_all_work_is_looked_for_when_no_more_is_submitted() {
    stand_in_for_the_driver();
    let begin = Instant::now();
    let mut pace = flying(&[(0.06, true)], begin);
    pace.groups[0].end = None;
    pace.clocks
        .insert(1, Clock { base: Event::of_test(1), offset: 0.0, busy_until: 0.0, spare: vec![Event::of_test(7)] });
    let later = |us| begin + Duration::from_micros(us);
    pace.last = Some(later(990));
    pace.look_for_end(&Captures::default(), later(1000));
    assert_eq!(pace.groups[0].end, None, "more submissions may follow");
    pace.look_for_end(&Captures::default(), later(1100));
    assert_eq!(pace.groups[0].end, Some(Event::of_test(7)));
}

#[test]
fn frequent_length_survives_one_delayed_group() {
    let mut pace = Pace::default();
    let took = |pace: &mut Pace, ms: f64| (taken(pace, ms).ns / 1e6).round();
    for _ in 0..20 {
        took(&mut pace, 2.0);
    }
    assert_eq!([5.0, 2.0].map(|ms| took(&mut pace, ms)), [2.0, 2.0]);
    assert!(pace.lengths[&1].steady >= MIN_CONFIRMING_GROUPS, "the estimate is trusted");
    let longer = [5.0, 5.0, 5.0, 5.0].map(|ms| took(&mut pace, ms));
    assert_eq!(longer[3], 5.0, "{longer:?}");
    for _ in 0..20 {
        took(&mut pace, 5.0);
    }
    assert_eq!(took(&mut pace, 50.0), 50.0, "a repeated deviation is not an outlier");
}

#[test]
fn a_kind_that_is_often_in_a_group_is_corrected_once() {
    let mut pace = Pace::default();
    let mut one = flying(&[(2.4, false)], Instant::now()).groups.remove(0).expect("one");
    one.keys = vec![1; 8];
    // Run groups of various sizes. Each kernel takes 0.25 ms instead of the expected 0.3 ms.
    pace.lengths.insert(1, Length { ns: 300_000.0, steady: 0 });
    pace.learn(&one, 2e6);
    for count in [8, 7, 8, 3, 8] {
        let known = pace.lengths[&1];
        assert!((known.ns - 250_000.0).abs() < 20_000.0, "{known:?}");
        (one.keys, one.estimate) = (vec![1; count], known.ns * count as f64);
        pace.learn(&one, 250_000.0 * count as f64);
    }
    let known = pace.lengths[&1];
    assert!((known.ns - 250_000.0).abs() < 500.0 && known.steady >= MIN_CONFIRMING_GROUPS, "{known:?}");
}

#[test]
fn length_is_steady_after_repeats_and_not_after_change() {
    let mut pace = Pace::default();
    let lengths = [3.0, 3.0, 3.1, 3.0, 30.0, 30.0, 30.0];
    let sure: Vec<bool> = lengths.iter().map(|&ms| taken(&mut pace, ms).steady >= MIN_CONFIRMING_GROUPS).collect();
    assert_eq!(sure, [false, false, true, true, false, false, true]);
}

#[test]
fn unseen_work_is_limited_until_some_has_completed() {
    let mut pace = Pace::default();
    assert_eq!(pace.unknown_ns(4e6), 2e6, "two of them reach the bound");
    let mut took = |kind: u64, ms: f64| {
        let mut group = flying(&[(pace.unknown_ns(4e6) / 1e6, false)], Instant::now()).groups.remove(0).expect("one");
        (group.keys, group.unknown_ns) = (vec![kind], group.estimate);
        pace.learn(&group, ms * 1e6);
        assert!((pace.lengths[&kind].ns - ms * 1e6).abs() < 1.0, "{:?}", pace.lengths);
        (pace.unknown_ns(4e6) / 1e6 * 10.0).round() / 10.0
    };
    assert_eq!([(1, 600.0), (2, 700.0)].map(|(kind, ms)| took(kind, ms)), [600.0, 700.0], "a single deviation");
    assert_eq!([3, 4, 5].map(|kind| took(kind, 0.3)), [350.2, 175.2, 87.8], "it may have been an outlier");
    let last = (6..30).map(|kind| took(kind, 0.01)).last();
    assert_eq!(last, Some(0.2), "the minimum assumed duration");
}

#[test]
fn unseen_kind_in_flight_limit_ignores_other_short_kinds() {
    let mut pace = flying(&[(0.2, false)], Instant::now());
    pace.unknown_ns = Some(1000.0);
    assert_eq!(pace.unknown_ns_of(2, 4e6), UNKNOWN_NS, "the first one takes as long as other work");
    assert_eq!(pace.unknown_ns_of(1, 4e6), 2e6, "none of this kind has completed");
    pace.unknown_ns = Some(5e6);
    assert_eq!(pace.unknown_ns_of(1, 4e6), 5e6);
}

#[test]
fn long_submission_ends_group_so_pauses_do_not_count() {
    stand_in_for_the_driver();
    let (ahead, captures) = (RunAhead::default(), Captures::default());
    ahead.bound(4000);
    {
        let mut pace = ahead.lock();
        let spare = vec![Event::of_test(7), Event::of_test(8)];
        pace.clocks.insert(0, Clock { base: Event::of_test(1), offset: 0.0, busy_until: 0.0, spare });
        pace.lengths.insert(1, Length { ns: 100_000.0, steady: STEADY_MOST });
        pace.lengths.insert(2, Length { ns: 1_000_000.0, steady: STEADY_MOST });
    }
    ahead.submitted(&captures, STREAM, 1, false);
    assert_eq!(ahead.lock().groups[0].end, None, "an event after each short kernel costs too much");
    ahead.submitted(&captures, STREAM, 2, false);
    assert_eq!(ahead.groups(), 1);
    assert!(ahead.lock().groups[0].end.is_some(), "the program may pause after it");
    ahead.submitted(&captures, STREAM, 1, false);
    assert_eq!(ahead.groups(), 2, "later work has a group of its own");
}

#[test]
fn program_waits_for_a_result_only_after_its_turn_has_work() {
    stand_in_for_the_driver();
    let (ahead, captures, now) = (RunAhead::default(), Captures::default(), Instant::now());
    let earlier = |ms| now.checked_sub(Duration::from_millis(ms)).expect("the clock has run for longer");
    *ahead.lock() = Pace { last: Some(earlier(2)), all_measured: true, ..Pace::default() };
    let lead = Duration::from_micros(450);
    assert!(ahead.awaits_result(&captures, lead, earlier(3)), "it has submitted work in this turn");
    assert!(!ahead.awaits_result(&captures, lead, earlier(1)), "its turn has just begun");
}
