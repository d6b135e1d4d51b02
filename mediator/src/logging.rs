//! Logs: `tracing` to standard error, and a bound on what a guest can make the daemon write.
//!
//! Every thread that works for a virtual machine runs inside of a span called [`VM_SPAN`]. Events below that span are what
//! a guest or its VMM can trigger, so each call site may log only [`BURST`] times in a row for each virtual machine, and then
//! once per [`INTERVAL`]; the rest is counted in [`suppressed`]. `trace` and `debug` are held back too: their filter is off
//! unless someone looks. Warnings with a field called `vm`, from threads that serve several, are limited in the same way.
//! All else is the operator's and never held back, and errors never are.

use std::collections::HashMap;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::io::IsTerminal;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use tracing::field::{Field, Visit};
use tracing::span::{Attributes, Id};
use tracing::{Event, Level, Subscriber, callsite::Identifier};
use tracing_subscriber::filter::{EnvFilter, ParseError};
use tracing_subscriber::layer::{Context, Filter, SubscriberExt};
use tracing_subscriber::registry::LookupSpan;
use tracing_subscriber::util::{SubscriberInitExt, TryInitError};
use tracing_subscriber::{Layer, fmt};

use crate::config::LogFormat;

/// Name of the span of a virtual machine's threads; its field `name` is the machine's.
pub const VM_SPAN: &str = "vm";
/// Environment variable that replaces the configured filter.
pub const FILTER_VARIABLE: &str = "MEDIATORD_LOG";
/// Events of one call site and virtual machine that pass in a row.
pub const BURST: u32 = 10;
/// Time in which one more may pass after a burst.
pub const INTERVAL: Duration = Duration::from_secs(5);
/// Most pairs of call site and virtual machine that are remembered; beyond it, the table starts anew.
const MAX_BUCKETS: usize = 4096;

static SUPPRESSED: AtomicU64 = AtomicU64::new(0);

/// Events that were held back since the daemon started.
#[must_use]
pub fn suppressed() -> u64 {
    SUPPRESSED.load(Ordering::Relaxed)
}

/// Checks a filter such as `info,mediator=debug`.
///
/// # Errors
/// When it is none.
pub fn parse_filter(filter: &str) -> Result<EnvFilter, ParseError> {
    EnvFilter::builder().parse(filter)
}

/// Sends the process's logs to standard error. [`FILTER_VARIABLE`] goes before `filter` when it is set and right.
///
/// # Errors
/// When a subscriber is installed already.
pub fn init(filter: &str, format: LogFormat) -> Result<(), TryInitError> {
    let from_environment = std::env::var(FILTER_VARIABLE).ok().and_then(|filter| parse_filter(&filter).ok());
    let filter = from_environment.or_else(|| parse_filter(filter).ok()).unwrap_or_else(|| EnvFilter::new("info"));
    let output = fmt::layer().with_writer(std::io::stderr);
    let output = match format {
        LogFormat::Text => output.with_ansi(std::io::stderr().is_terminal()).boxed(),
        LogFormat::Json => output.json().with_span_list(false).boxed(),
    };
    tracing_subscriber::registry().with(filter).with(output.with_filter(GuestLimit::default())).try_init()
}

/// A token bucket: full at first, one token more for each interval.
#[derive(Clone, Copy, Debug)]
struct Bucket {
    tokens: u32,
    since: Instant,
}

impl Bucket {
    fn new(now: Instant) -> Self {
        Self { tokens: BURST, since: now }
    }

    fn take(&mut self, now: Instant) -> bool {
        let passed = now.saturating_duration_since(self.since).as_nanos() / INTERVAL.as_nanos();
        if let Ok(passed) = u32::try_from(passed) {
            self.tokens = self.tokens.saturating_add(passed).min(BURST);
            self.since += INTERVAL * passed;
        } else {
            *self = Self::new(now);
        }
        let some = self.tokens > 0;
        self.tokens = self.tokens.saturating_sub(1);
        some
    }
}

/// Whose events share a bucket.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
enum Whose {
    /// Those below a [`VM_SPAN`].
    Span(Id),
    /// Those with a field `vm`, by a hash of its value.
    Field(u64),
}

/// Limits events below a [`VM_SPAN`], and warnings about one virtual machine.
#[derive(Debug, Default)]
pub struct GuestLimit {
    buckets: Mutex<HashMap<(Identifier, Whose), Bucket>>,
}

impl GuestLimit {
    fn passes(&self, callsite: Identifier, whose: Whose, now: Instant) -> bool {
        let mut buckets = self.buckets.lock();
        if buckets.len() >= MAX_BUCKETS {
            buckets.clear();
        }
        let passes = buckets.entry((callsite, whose)).or_insert_with(|| Bucket::new(now)).take(now);
        if !passes {
            SUPPRESSED.fetch_add(1, Ordering::Relaxed);
        }
        passes
    }
}

/// Finds the field `vm` of an event.
#[derive(Default)]
struct VmField(Option<u64>);

impl Visit for VmField {
    fn record_debug(&mut self, field: &Field, value: &dyn std::fmt::Debug) {
        if field.name() == VM_SPAN {
            let mut hasher = DefaultHasher::new();
            format!("{value:?}").hash(&mut hasher);
            self.0 = Some(hasher.finish());
        }
    }
}

impl<S: Subscriber + for<'a> LookupSpan<'a>> Filter<S> for GuestLimit {
    fn enabled(&self, _: &tracing::Metadata<'_>, _: &Context<'_, S>) -> bool {
        true
    }

    fn event_enabled(&self, event: &Event<'_>, cx: &Context<'_, S>) -> bool {
        let metadata = event.metadata();
        if *metadata.level() == Level::ERROR {
            return true;
        }
        let span = cx.event_scope(event).and_then(|scope| scope.from_root().find(|span| span.name() == VM_SPAN));
        let field = || {
            let mut found = VmField::default();
            if *metadata.level() == Level::WARN {
                event.record(&mut found);
            }
            found.0.map(Whose::Field)
        };
        let whose = span.map(|span| Whose::Span(span.id())).or_else(field);
        whose.is_none_or(|whose| self.passes(metadata.callsite(), whose, Instant::now()))
    }

    fn on_new_span(&self, attributes: &Attributes<'_>, id: &Id, _: Context<'_, S>) {
        // Identifiers of spans are used again: a new virtual machine starts with full buckets.
        if attributes.metadata().name() == VM_SPAN {
            self.buckets.lock().retain(|(_, whose), _| *whose != Whose::Span(id.clone()));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io;
    use std::sync::Arc;
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

    #[test]
    fn guest_events_are_limited_per_vm_and_operator_events_are_not() {
        let lines = Lines::default();
        let output = fmt::layer().with_ansi(false).with_writer(lines.clone()).with_filter(GuestLimit::default());
        tracing::subscriber::with_default(tracing_subscriber::registry().with(output), || {
            for name in ["a", "b"] {
                tracing::info_span!("vm", name).in_scope(|| {
                    tracing::info_span!("inner").in_scope(|| {
                        for _ in 0..100 {
                            tracing::warn!("bad register");
                        }
                    });
                });
            }
            for _ in 0..100 {
                tracing::warn!("from the operator");
                tracing::info!(vm = "a", "operator's news");
                tracing::warn!(vm = "a", "shared thread");
            }
        });
        let passed = usize::try_from(BURST).unwrap();
        // A slow host may let the interval's next token through.
        assert!((2 * passed..4 * passed).contains(&lines.count("bad register")));
        assert!((passed..2 * passed).contains(&lines.count("shared thread")));
        assert_eq!(lines.count("from the operator"), 100);
        assert_eq!(lines.count("operator's news"), 100);
        assert!(lines.count("name=\"b\"") >= passed);
        assert!(suppressed() > 100);
    }

    #[test]
    fn bucket_refills_with_time_up_to_a_burst() {
        let start = Instant::now();
        let mut bucket = Bucket::new(start);
        assert!((0..BURST).all(|_| bucket.take(start)));
        assert!(!bucket.take(start));
        assert!(bucket.take(start + INTERVAL));
        assert!(!bucket.take(start + INTERVAL));
        let late = start + INTERVAL * 1000;
        assert!((0..BURST).all(|_| bucket.take(late)));
        assert!(!bucket.take(late));
    }
}
