//! Measures how long locks are held. Records a histogram with eight buckets per octave, the maximum, the sum, and the
//! source locations of long holds.
//!
//! For benchmarks, the holder's CPU time can also be measured ([`measure_work`]). In contrast to the hold time, it
//! excludes time in which the holder is preempted.
//!
//! Each lock has its own meter, which only the lock's holder updates. Readers sum up the meters of all locks of a kind,
//! including dropped locks.

use crate::Measured;
use parking_lot::Mutex;
use std::collections::BTreeMap;
use std::panic::Location;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Weak};

/// Number of buckets per octave.
const BUCKETS_PER_OCTAVE: u64 = 8;
const STEPS_LOG2: u32 = BUCKETS_PER_OCTAVE.trailing_zeros();
/// Number of octaves. The buckets cover holds of up to 2^40 ns, or 18 minutes.
const OCTAVES: u32 = 40;
const BUCKETS: usize = ((OCTAVES - STEPS_LOG2 + 1) as usize) * BUCKETS_PER_OCTAVE as usize;

/// Duration in ns above which holds are recorded by source location. Such holds are rare (about one in several
/// thousand), and the number of locations is bounded by the source code.
const LONG_NS: u64 = 50_000;

/// Source location at which a lock was acquired.
type Place = &'static Location<'static>;

/// Holds of more than 50 us that started at the same source location.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Long {
    /// Number of holds.
    pub count: u64,
    /// Longest hold, in ns.
    pub longest_ns: u64,
}

impl Long {
    fn add(&mut self, other: Self) {
        self.count = self.count.saturating_add(other.count);
        self.longest_ns = self.longest_ns.max(other.longest_ns);
    }
}

/// Returns the bucket of a duration.
fn bucket(ns: u64) -> usize {
    let shift = (u64::BITS - ns.leading_zeros()).saturating_sub(STEPS_LOG2 + 1);
    (((u64::from(shift) * BUCKETS_PER_OCTAVE) + (ns >> shift)) as usize).min(BUCKETS - 1)
}

/// Returns the largest duration in a bucket, in ns.
fn upper(bucket: usize) -> u64 {
    let bucket = bucket as u64;
    if bucket < 2 * BUCKETS_PER_OCTAVE {
        return bucket;
    }
    let shift = bucket / BUCKETS_PER_OCTAVE - 1;
    ((bucket - shift * BUCKETS_PER_OCTAVE + 1) << shift) - 1
}

/// Hold time statistics of one lock.
#[derive(Debug)]
pub(crate) struct Meter {
    counts: [AtomicU64; BUCKETS],
    longest_ns: AtomicU64,
    sum_ns: AtomicU64,
    long: Mutex<BTreeMap<Place, Long>>,
}

impl Meter {
    fn new() -> Self {
        Self {
            counts: [const { AtomicU64::new(0) }; BUCKETS],
            longest_ns: AtomicU64::new(0),
            sum_ns: AtomicU64::new(0),
            long: Mutex::default(),
        }
    }

    /// Records a hold. Only the lock's holder calls this function, so atomic read-modify-write operations are
    /// unnecessary.
    pub(crate) fn record(&self, ns: u64, place: Place) {
        let add = |word: &AtomicU64, more: u64| {
            word.store(word.load(Ordering::Relaxed).saturating_add(more), Ordering::Relaxed);
        };
        add(&self.counts[bucket(ns)], 1);
        add(&self.sum_ns, ns);
        if ns > self.longest_ns.load(Ordering::Relaxed) {
            self.longest_ns.store(ns, Ordering::Relaxed);
        }
        if ns > LONG_NS {
            self.long.lock().entry(place).or_default().add(Long { count: 1, longest_ns: ns });
        }
    }

    fn holds(&self) -> Holds {
        Holds {
            counts: self.counts.iter().map(|count| count.load(Ordering::Relaxed)).collect(),
            longest_ns: self.longest_ns.load(Ordering::Relaxed),
            sum_ns: self.sum_ns.load(Ordering::Relaxed),
            long: self.long.lock().clone(),
        }
    }
}

/// Hold time statistics.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Holds {
    counts: Vec<u64>,
    longest_ns: u64,
    sum_ns: u64,
    long: BTreeMap<Place, Long>,
}

impl Default for Holds {
    fn default() -> Self {
        Self { counts: vec![0; BUCKETS], longest_ns: 0, sum_ns: 0, long: BTreeMap::new() }
    }
}

impl Holds {
    /// Returns the number of holds.
    #[must_use]
    pub fn count(&self) -> u64 {
        self.counts.iter().sum()
    }

    /// Returns the maximum hold time in ns.
    #[must_use]
    pub fn longest_ns(&self) -> u64 {
        self.longest_ns
    }

    /// Returns the total hold time in ns.
    #[must_use]
    pub fn sum_ns(&self) -> u64 {
        self.sum_ns
    }

    /// Returns the `permille` quantile of the hold times in ns, rounded up by at most one eighth, or 0 if no holds were
    /// recorded.
    #[must_use]
    pub fn at(&self, permille: u64) -> u64 {
        let wanted = self.count().saturating_mul(permille).div_ceil(1000).max(1);
        let mut seen = 0;
        let found = self.counts.iter().position(|count| {
            seen += count;
            seen >= wanted
        });
        found.map_or(0, |bucket| upper(bucket).min(self.longest_ns))
    }

    /// Returns the number of holds of at most `ns`. May omit holds that are shorter than `ns` by up to one eighth.
    #[must_use]
    pub fn at_most(&self, ns: u64) -> u64 {
        self.counts.iter().enumerate().take_while(|(index, _)| upper(*index) <= ns).map(|(_, count)| count).sum()
    }

    /// Returns the holds of more than 50 us, sorted by source location.
    pub fn long(&self) -> impl Iterator<Item = (&'static Location<'static>, Long)> + '_ {
        self.long.iter().map(|(place, long)| (*place, *long))
    }

    /// Returns the holds since `earlier`. The maximum is rounded up by at most one eighth, unless it is also the
    /// overall maximum.
    #[must_use]
    pub fn since(&self, earlier: &Self) -> Self {
        let counts: Vec<u64> =
            self.counts.iter().zip(&earlier.counts).map(|(now, then)| now.saturating_sub(*then)).collect();
        let last = counts.iter().rposition(|count| *count != 0);
        let longest_ns = last.map_or(0, |bucket| upper(bucket).min(self.longest_ns));
        let mut long = self.long.clone();
        for (place, then) in &earlier.long {
            let Some(now) = long.get_mut(place) else { continue };
            now.count = now.count.saturating_sub(then.count);
            now.longest_ns = now.longest_ns.min(longest_ns);
        }
        long.retain(|_, long| long.count != 0);
        Self { counts, longest_ns, sum_ns: self.sum_ns.saturating_sub(earlier.sum_ns), long }
    }

    fn add(&mut self, other: &Self) {
        self.counts.iter_mut().zip(&other.counts).for_each(|(sum, more)| *sum = sum.saturating_add(*more));
        self.longest_ns = self.longest_ns.max(other.longest_ns);
        self.sum_ns = self.sum_ns.saturating_add(other.sum_ns);
        other.long.iter().for_each(|(place, more)| self.long.entry(place).or_default().add(*more));
    }
}

/// Meters of one lock.
#[derive(Debug)]
struct Meters {
    time: Meter,
    work: Meter,
}

/// Meters of all locks of one kind.
#[derive(Debug)]
struct Kind {
    live: Vec<Weak<Meters>>,
    gone: Option<[Holds; 2]>,
}

/// True if the CPU time of lock holders is measured.
static WORK: AtomicBool = AtomicBool::new(false);

/// Enables CPU time measurement for subsequent holds. Costs a system call at the start and the end of each hold.
pub fn measure_work() {
    WORK.store(true, Ordering::Relaxed);
}

/// Returns this thread's CPU time in ns, or `None` if CPU time is not measured.
pub(crate) fn work() -> Option<u64> {
    WORK.load(Ordering::Relaxed).then(|| {
        let used = rustix::time::clock_gettime(rustix::time::ClockId::ThreadCPUTime);
        let (seconds, ns) = (u64::try_from(used.tv_sec).unwrap_or(0), u64::try_from(used.tv_nsec).unwrap_or(0));
        seconds.saturating_mul(1_000_000_000).saturating_add(ns)
    })
}

static KINDS: [Mutex<Kind>; Measured::ALL.len()] =
    [const { Mutex::new(Kind { live: Vec::new(), gone: None }) }; Measured::ALL.len()];

/// A lock's meters. When the lock is dropped, its counts are added to those of previously dropped locks.
#[derive(Debug)]
pub(crate) struct Share {
    kind: Measured,
    meters: Arc<Meters>,
}

impl Share {
    pub(crate) fn new(kind: Measured) -> Self {
        crate::ticks::prepare();
        let meters = Arc::new(Meters { time: Meter::new(), work: Meter::new() });
        KINDS[kind as usize].lock().live.push(Arc::downgrade(&meters));
        Self { kind, meters }
    }

    pub(crate) fn record(&self, ns: u64, place: Place) {
        self.meters.time.record(ns, place);
    }

    /// Same as [`Self::record`] for the holder's CPU time.
    pub(crate) fn record_work(&self, ns: u64, place: Place) {
        self.meters.work.record(ns, place);
    }

    /// Returns the hold times of this lock only.
    pub(crate) fn holds(&self) -> Holds {
        self.meters.time.holds()
    }
}

impl Drop for Share {
    fn drop(&mut self) {
        let kind = &mut *KINDS[self.kind as usize].lock();
        kind.live.retain(|live| !std::ptr::eq(live.as_ptr(), Arc::as_ptr(&self.meters)));
        let gone = kind.gone.get_or_insert_default();
        gone[0].add(&self.meters.time.holds());
        gone[1].add(&self.meters.work.holds());
    }
}

/// Returns the hold times of all locks of a kind since the process started.
#[must_use]
pub fn holds(kind: Measured) -> Holds {
    sum(kind, 0, |meters| &meters.time)
}

/// Returns the CPU time that holders of locks of a kind have used since the call of [`measure_work`].
#[must_use]
pub fn worked(kind: Measured) -> Holds {
    sum(kind, 1, |meters| &meters.work)
}

fn sum(kind: Measured, which: usize, meter: impl Fn(&Meters) -> &Meter) -> Holds {
    let kind = KINDS[kind as usize].lock();
    let mut sum = kind.gone.as_ref().map_or_else(Holds::default, |gone| gone[which].clone());
    kind.live.iter().filter_map(Weak::upgrade).for_each(|meters| sum.add(&meter(&meters).holds()));
    sum
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bucket_upper_bound_exceeds_value_by_at_most_an_eighth() {
        for ns in (0..4096).chain([1 << 20, (1 << 33) + 12345, (1 << 39) + 7]) {
            let largest = upper(bucket(ns));
            assert!(
                largest >= ns && largest - ns <= ns / BUCKETS_PER_OCTAVE,
                "{ns} ns is in the bucket up to {largest} ns"
            );
        }
        assert_eq!(bucket(u64::MAX), BUCKETS - 1);
    }

    #[test]
    fn the_longest_of_a_thousand_is_above_the_quantile() {
        let meter = Meter::new();
        let (short, long) = (Location::caller(), Location::caller());
        (0..999).for_each(|_| meter.record(1000, short));
        meter.record(5_000_000, long);
        let holds = meter.holds();
        assert_eq!((holds.count(), holds.longest_ns(), holds.sum_ns()), (1000, 5_000_000, 5_999_000));
        assert!((1000..=1125).contains(&holds.at(999)), "{}", holds.at(999));
        assert_eq!(holds.at(1000), 5_000_000);
        assert_eq!(holds.at_most(2000), 999);
        assert_eq!(Holds::default().at(999), 0);
        assert_eq!(holds.long().collect::<Vec<_>>(), [(long, Long { count: 1, longest_ns: 5_000_000 })]);
        meter.record(2000, short);
        let later = meter.holds().since(&holds);
        assert_eq!(later.long().count(), 0);
        assert!(later.count() == 1 && (2000..=2250).contains(&later.longest_ns()), "{later:?}");
    }

    #[test]
    fn processor_time_is_measured_once_it_is_asked_for() {
        assert_eq!(work(), None);
        measure_work();
        let (before, began) = (work().unwrap(), std::time::Instant::now());
        while work().unwrap() == before {
            std::hint::spin_loop();
        }
        assert!(u128::from(work().unwrap() - before) <= began.elapsed().as_nanos() + 1_000_000);
        let share = Share::new(Measured::ALL[0]);
        share.record_work(7_000, Location::caller());
        assert!(worked(Measured::ALL[0]).count() >= 1);
        drop(share);
        assert!(worked(Measured::ALL[0]).longest_ns() >= 7_000, "the hold of a dropped lock is missing");
    }
}
