//! Logging: sends `tracing` events to standard error, and limits the number of lines that tenants and clients can
//! cause.
//!
//! Every event is rate-limited, regardless of its level. Events about a VM have one token bucket per call site and VM:
//! a burst of `BURST_EVENTS` events passes, and then one event per `REFILL_INTERVAL`. An event is about a VM if it is
//! in a span named `VM_SPAN`, which every thread that works for a VM enters, or if it has a field named `vm`. All other
//! events have one bucket of `BURST_OF_ALL` tokens per call site, because socket clients or cards can cause some of
//! these events. Records of crates that use `log` share one call site per level. [`suppressed`] returns the number of
//! suppressed events, and [`tell_suppressed`] logs it by origin.
//!
//! The crate does not select the events to log, and does not store them.

use std::collections::HashMap;
use std::io::IsTerminal;
use std::sync::Arc;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use tracing::field::{Field, Visit};
use tracing::span::{Attributes, Id};
use tracing::{Event, Metadata, Subscriber, callsite::Identifier};
use tracing_subscriber::filter::EnvFilter;
use tracing_subscriber::layer::{Context, Filter, SubscriberExt};
use tracing_subscriber::registry::LookupSpan;
use tracing_subscriber::util::{SubscriberInitExt, TryInitError};
use tracing_subscriber::{Layer, fmt};

use config::LogFormat;
use config::filter::parse_filter;

/// Name of the span that a virtual machine's threads enter. Its field `name` is the virtual machine's name.
pub(crate) const VM_SPAN: &str = "vm";
/// Environment variable that overrides the configured filter.
pub(crate) const FILTER_VARIABLE: &str = "MEDIATORD_LOG";
/// Number of events that may pass in a burst, per call site and virtual machine.
pub(crate) const BURST_EVENTS: u32 = 10;
/// Interval at which another event may pass after a burst.
pub const REFILL_INTERVAL: Duration = Duration::from_secs(5);
/// Number of events that may pass in a burst, per call site, if they are not about a virtual machine. The number is
/// large because an operator may add many virtual machines in quick succession.
pub(crate) const BURST_OF_ALL: u32 = 200;
/// Maximum number of buckets. Once it is reached, events without a bucket are suppressed until another bucket is full
/// again.
const MAX_BUCKETS: usize = 4096;
/// Maximum number of lines in one report of suppressed events. One more line has the total of the remaining buckets.
const MAX_TOLD: usize = 16;
/// Target of these reports, which are not rate-limited.
const REPORT: &str = "mediator::held_back";

static SUPPRESSED: AtomicU64 = AtomicU64::new(0);
/// Rate limit that the process's subscriber applies.
static LIMIT: OnceLock<GuestLimit> = OnceLock::new();

/// Returns the number of events suppressed since the daemon started.
#[must_use]
pub fn suppressed() -> u64 {
    SUPPRESSED.load(Ordering::Relaxed)
}

/// Sends the process's logs to standard error. `FILTER_VARIABLE` overrides `filter` if set and valid.
///
/// # Errors
/// Returns an error if a subscriber is already installed.
pub fn init(filter: &str, format: LogFormat) -> Result<(), TryInitError> {
    let from_environment = std::env::var(FILTER_VARIABLE).ok().and_then(|filter| parse_filter(&filter).ok());
    let filter = from_environment.or_else(|| parse_filter(filter).ok()).unwrap_or_else(|| EnvFilter::new("info"));
    let output = fmt::layer().with_writer(std::io::stderr);
    let output = match format {
        LogFormat::Text => output.with_ansi(std::io::stderr().is_terminal()).boxed(),
        LogFormat::Json => output.json().with_span_list(false).boxed(),
    };
    let limit = LIMIT.get_or_init(GuestLimit::default).clone();
    tracing_subscriber::registry().with(filter).with(output.with_filter(limit)).try_init()
}

/// Logs the number of events suppressed since the last call: one line per call site and virtual machine, and a total
/// for the rest.
pub fn tell_suppressed() {
    if let Some(limit) = LIMIT.get() {
        limit.tell();
    }
}

/// A token bucket, which starts full and receives one token per interval.
#[derive(Clone, Debug)]
struct Bucket {
    burst: u32,
    tokens: u32,
    since: Instant,
    /// Number of suppressed events that have not been reported yet.
    held_back: u64,
    /// Call site of the events.
    site: &'static Metadata<'static>,
    /// The virtual machine's name or number.
    vm: Option<String>,
}

impl Bucket {
    fn new(site: &'static Metadata<'static>, vm: Option<String>, now: Instant) -> Self {
        let burst = if vm.is_some() { BURST_EVENTS } else { BURST_OF_ALL };
        Self { burst, tokens: burst, since: now, held_back: 0, site, vm }
    }

    fn refill(&mut self, now: Instant) {
        let passed = now.saturating_duration_since(self.since).as_nanos() / REFILL_INTERVAL.as_nanos();
        if let Ok(passed) = u32::try_from(passed) {
            self.tokens = self.tokens.saturating_add(passed).min(self.burst);
            self.since += REFILL_INTERVAL * passed;
        } else {
            (self.tokens, self.since) = (self.burst, now);
        }
    }

    fn take(&mut self, now: Instant) -> bool {
        self.refill(now);
        let some = self.tokens > 0;
        self.tokens = self.tokens.saturating_sub(1);
        self.held_back += u64::from(!some);
        some
    }

    /// Returns true if the bucket is in the same state as a new bucket.
    fn is_idle(&mut self, now: Instant) -> bool {
        self.refill(now);
        self.tokens == self.burst && self.held_back == 0
    }
}

/// Origin of the events that share a bucket.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
enum Whose {
    /// A virtual machine with a [`VM_SPAN`].
    Span(Id),
    /// A virtual machine named in a `vm` field.
    Field(String),
    /// All other events.
    All,
}

#[derive(Debug, Default)]
struct Books {
    buckets: HashMap<(Identifier, Whose), Bucket>,
    /// Names of the spans' virtual machines.
    names: HashMap<Id, String>,
    /// Number of unreported suppressed events that have no bucket, or whose bucket was removed.
    unknown: u64,
    /// Time of the last sweep for unneeded buckets. Sweeps are slow.
    swept: Option<Instant>,
}

/// Limits events by call site, and by virtual machine if known. Clones share the state.
#[derive(Clone, Debug, Default)]
pub(crate) struct GuestLimit {
    books: Arc<locks::Mutex<locks::rank::Log, Books>>,
}

impl GuestLimit {
    fn passes(&self, site: &'static Metadata<'static>, whose: Whose, now: Instant) -> bool {
        let Books { buckets, names, unknown, swept } = &mut *self.books.lock();
        let key = (site.callsite(), whose);
        let mut full = buckets.len() >= MAX_BUCKETS && !buckets.contains_key(&key);
        if full && swept.is_none_or(|swept| now.saturating_duration_since(swept) >= REFILL_INTERVAL) {
            *swept = Some(now);
            buckets.retain(|_, bucket| !bucket.is_idle(now));
            full = buckets.len() >= MAX_BUCKETS;
        }
        let passes = !full && {
            let vm = match &key.1 {
                Whose::Span(id) => Some(names.get(id).cloned().unwrap_or_default()),
                Whose::Field(vm) => Some(vm.clone()),
                Whose::All => None,
            };
            buckets.entry(key).or_insert_with(|| Bucket::new(site, vm, now)).take(now)
        };
        *unknown += u64::from(full);
        if !passes {
            SUPPRESSED.fetch_add(1, Ordering::Relaxed);
        }
        passes
    }

    /// Returns and resets the counts of suppressed events: by call site and virtual machine, and for the rest.
    fn take_held_back(&self) -> (Vec<Bucket>, u64) {
        let books = &mut *self.books.lock();
        let mut rest = std::mem::take(&mut books.unknown);
        let mut told = Vec::new();
        for bucket in books.buckets.values_mut().filter(|bucket| bucket.held_back != 0) {
            if told.len() < MAX_TOLD {
                told.push(bucket.clone());
            } else {
                rest += bucket.held_back;
            }
            bucket.held_back = 0;
        }
        (told, rest)
    }

    fn tell(&self) {
        // Do not hold the lock while the lines are written, because they pass through this filter.
        let (told, rest) = self.take_held_back();
        for Bucket { held_back, site, vm, .. } in told {
            let place = site.file().unwrap_or_else(|| site.target());
            let (level, line, vm) = (site.level().as_str(), site.line().unwrap_or(0), vm.as_deref().unwrap_or("-"));
            tracing::warn!(target: REPORT, vm, count = held_back, level, place, line, "log events were suppressed");
        }
        if rest != 0 {
            tracing::warn!(target: REPORT, count = rest, "more log events were suppressed");
        }
    }
}

/// Visitor that extracts the value of a field.
struct Value<'a> {
    of: &'a str,
    found: Option<String>,
}

impl Visit for Value<'_> {
    fn record_str(&mut self, field: &Field, value: &str) {
        if field.name() == self.of {
            self.found = Some(value.to_owned());
        }
    }

    fn record_debug(&mut self, field: &Field, value: &dyn std::fmt::Debug) {
        if field.name() == self.of {
            self.found = Some(format!("{value:?}"));
        }
    }
}

impl<S: Subscriber + for<'a> LookupSpan<'a>> Filter<S> for GuestLimit {
    fn enabled(&self, _: &Metadata<'_>, _: &Context<'_, S>) -> bool {
        true
    }

    fn event_enabled(&self, event: &Event<'_>, cx: &Context<'_, S>) -> bool {
        let metadata = event.metadata();
        if metadata.target() == REPORT {
            return true;
        }
        let span = cx.event_scope(event).and_then(|scope| scope.from_root().find(|span| span.name() == VM_SPAN));
        let whose = span.map(|span| Whose::Span(span.id())).unwrap_or_else(|| {
            let mut vm = Value { of: VM_SPAN, found: None };
            event.record(&mut vm);
            vm.found.map_or(Whose::All, Whose::Field)
        });
        self.passes(metadata, whose, Instant::now())
    }

    fn on_new_span(&self, attributes: &Attributes<'_>, id: &Id, _: Context<'_, S>) {
        if attributes.metadata().name() == VM_SPAN {
            let mut name = Value { of: "name", found: None };
            attributes.record(&mut name);
            self.books.lock().names.insert(id.clone(), name.found.unwrap_or_default());
        }
    }

    fn on_close(&self, id: Id, _: Context<'_, S>) {
        // Span IDs are reused, and a new virtual machine must start with full buckets. The old virtual machine's
        // suppressed events are reported with the rest.
        let Books { buckets, names, unknown, .. } = &mut *self.books.lock();
        if names.remove(&id).is_some() {
            buckets.retain(|(_, whose), bucket| {
                let stays = *whose != Whose::Span(id.clone());
                *unknown += if stays { 0 } else { bucket.held_back };
                stays
            });
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use parking_lot::Mutex;
    use std::io;
    use tracing_subscriber::fmt::MakeWriter;

    #[derive(Clone, Default)]
    struct Lines(Arc<Mutex<Vec<u8>>>);

    impl io::Write for Lines {
        fn write(&mut self, data: &[u8]) -> io::Result<usize> {
            self.0.lock().extend_from_slice(data);
            Ok(data.len())
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    impl<'a> MakeWriter<'a> for Lines {
        type Writer = Self;

        fn make_writer(&'a self) -> Self {
            self.clone()
        }
    }

    impl Lines {
        fn count(&self, text: &str) -> usize {
            String::from_utf8_lossy(&self.0.lock()).lines().filter(|line| line.contains(text)).count()
        }
    }

    /// Calls `act` with a rate-limited subscriber. Returns the subscriber's output, and the limit.
    fn logged(act: impl FnOnce()) -> (Lines, GuestLimit) {
        let (lines, limit) = (Lines::default(), GuestLimit::default());
        let output = fmt::layer().with_ansi(false).with_writer(lines.clone()).with_filter(limit.clone());
        tracing::subscriber::with_default(tracing_subscriber::registry().with(output), || {
            act();
            limit.tell();
        });
        (lines, limit)
    }

    #[test]
    fn log_events_are_limited_per_vm_and_otherwise_per_call_site() {
        let (lines, _) = logged(|| {
            for name in ["a", "b"] {
                tracing::info_span!("vm", name).in_scope(|| {
                    tracing::info_span!("inner").in_scope(|| {
                        for _ in 0..100 {
                            tracing::warn!("bad register");
                            tracing::error!("bad ring");
                        }
                    });
                });
            }
            for _ in 0..1000 {
                tracing::error!("from nobody in particular");
                tracing::info!(vm = "a", "news of a VM");
                tracing::error!(vm = "a", "shared thread");
            }
        });
        let (passed, all) = (usize::try_from(BURST_EVENTS).unwrap(), usize::try_from(BURST_OF_ALL).unwrap());
        // On a slow host, events with tokens of the next interval may also pass.
        for limited in ["bad register", "bad ring"] {
            assert!((2 * passed..4 * passed).contains(&lines.count(limited)), "{limited}");
        }
        for limited in ["news of a VM", "shared thread"] {
            assert!((passed..2 * passed).contains(&lines.count(limited)), "{limited}");
        }
        assert!((all..2 * all).contains(&lines.count("from nobody in particular")));
        assert!(lines.count("name=\"b\"") >= passed);
        assert!(suppressed() > 100);
    }

    #[test]
    fn dropped_log_events_are_reported_once_with_vm_and_call_site() {
        let (lines, limit) = logged(|| {
            let span = tracing::info_span!("vm", name = "web");
            span.in_scope(|| (0..BURST_EVENTS + 7).for_each(|_| tracing::error!("bad ring")));
            // Keep the span open, so that its VM has a name.
            std::mem::forget(span);
        });
        let told = format!("log events were suppressed vm=\"web\" count={}", 7);
        assert_eq!(lines.count(&told), 1, "{}", String::from_utf8_lossy(&lines.0.lock()));
        assert_eq!(lines.count("logging/src/lib.rs"), 1, "with the source location");
        assert!(limit.take_held_back().0.is_empty(), "it is reported only once");
    }

    #[test]
    fn log_events_beyond_tracked_buckets_are_dropped_and_counted() {
        let (lines, _) = logged(|| {
            for vm in 0..2 * MAX_BUCKETS {
                for _ in 0..=BURST_EVENTS {
                    tracing::warn!(vm, "one of many");
                }
            }
        });
        assert!(lines.count("one of many") <= MAX_BUCKETS * (usize::try_from(BURST_EVENTS).unwrap() + 1));
        assert!(lines.count("were suppressed") <= MAX_TOLD + 1);
        assert_eq!(lines.count("more log events were suppressed"), 1);
    }

    #[test]
    fn bucket_refills_with_time_up_to_a_burst() {
        let start = Instant::now();
        let site = std::cell::Cell::new(None);
        logged(|| site.set(tracing::error_span!("site").metadata()));
        let mut bucket = Bucket::new(site.get().expect("an enabled span has it"), Some("a".to_owned()), start);
        assert!((0..BURST_EVENTS).all(|_| bucket.take(start)));
        assert!(!bucket.take(start));
        assert!(bucket.take(start + REFILL_INTERVAL));
        assert!(!bucket.take(start + REFILL_INTERVAL));
        let late = start + REFILL_INTERVAL * 1000;
        assert!((0..BURST_EVENTS).all(|_| bucket.take(late)));
        assert!(!bucket.take(late));
    }
}
