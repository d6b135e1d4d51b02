//! The driver's metrics, in the Prometheus text format.

use std::collections::BTreeMap;
use std::fmt::Write;
use std::sync::atomic::{AtomicBool, AtomicI64, AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};

use crate::store::KeptClaim;

/// The driver's counters and gauges, and the metrics lines of the shares.
#[derive(Debug, Default)]
pub struct Metrics {
    prepared: AtomicU64,
    refused: AtomicU64,
    removed: AtomicU64,
    not_removed: AtomicU64,
    generation: AtomicI64,
    daemon: AtomicBool,
    registered: AtomicBool,
    /// One metrics line per share.
    shares: Mutex<Vec<String>>,
}

fn escaped(value: &str) -> String {
    value.replace('\\', "\\\\").replace('"', "\\\"").replace('\n', "\\n")
}

impl Metrics {
    /// Counts a preparation as successful or failed.
    pub fn prepared(&self, good: bool) {
        if good { &self.prepared } else { &self.refused }.fetch_add(1, Ordering::Relaxed);
    }

    /// Counts a removal as successful or failed.
    pub fn unprepared(&self, good: bool) {
        if good { &self.removed } else { &self.not_removed }.fetch_add(1, Ordering::Relaxed);
    }

    /// Sets the generation of the published slice.
    pub fn generation(&self, generation: i64) {
        self.generation.store(generation, Ordering::Relaxed);
    }

    /// Records whether the daemon is responding.
    pub fn daemon(&self, answers: bool) {
        self.daemon.store(answers, Ordering::Relaxed);
    }

    /// Records whether the kubelet has registered the driver.
    pub fn registered(&self, registered: bool) {
        self.registered.store(registered, Ordering::Relaxed);
    }

    /// Replaces the metrics lines with those of the claims' shares.
    pub fn claims(&self, claims: &BTreeMap<String, KeptClaim>) {
        let mut lines = Vec::new();
        for (uid, kept) in claims {
            for share in &kept.shares {
                let labels = share.body.labels().iter();
                let pod = labels.filter(|(key, _)| *key == "pod").map(|(_, pod)| pod).next().unwrap_or_default();
                lines.extend(share.body.cards().into_iter().map(|card| {
                    format!(
                        "gpu_mediator_dra_share{{namespace=\"{}\",claim=\"{}\",claim_uid=\"{uid}\",pod=\"{}\",share=\"{}\",card=\"{}\"}} 1",
                        escaped(&kept.namespace),
                        escaped(&kept.name),
                        escaped(pod),
                        escaped(share.body.name()),
                        escaped(card),
                    )
                }));
            }
        }
        *self.shares.lock().unwrap_or_else(PoisonError::into_inner) = lines;
    }

    /// Returns all metrics as text.
    #[must_use]
    pub fn text(&self) -> String {
        let mut text = String::new();
        let count = |count: &AtomicU64| count.load(Ordering::Relaxed);
        let name = "gpu_mediator_dra_share";
        let _ = writeln!(text, "# HELP {name} 1 for a share of a card that a claim has\n# TYPE {name} gauge");
        for line in self.shares.lock().unwrap_or_else(PoisonError::into_inner).iter() {
            let _ = writeln!(text, "{line}");
        }
        for (name, help, good, bad) in [
            ("gpu_mediator_dra_prepare_total", "Claims that were prepared, by result", &self.prepared, &self.refused),
            (
                "gpu_mediator_dra_unprepare_total",
                "Claims that were taken back, by result",
                &self.removed,
                &self.not_removed,
            ),
        ] {
            let _ = writeln!(text, "# HELP {name} {help}\n# TYPE {name} counter");
            let _ =
                writeln!(text, "{name}{{result=\"good\"}} {}\n{name}{{result=\"failed\"}} {}", count(good), count(bad));
        }
        let flag = |flag: &AtomicBool| i64::from(flag.load(Ordering::Relaxed));
        for (name, help, value) in [
            (
                "gpu_mediator_dra_slice_generation",
                "Generation of the published slice",
                self.generation.load(Ordering::Relaxed),
            ),
            ("gpu_mediator_dra_daemon_up", "1 while mediatord answers", flag(&self.daemon)),
            ("gpu_mediator_dra_registered", "1 since the kubelet has registered the driver", flag(&self.registered)),
        ] {
            let _ = writeln!(text, "# HELP {name} {help}\n# TYPE {name} gauge\n{name} {value}");
        }
        text
    }
}
