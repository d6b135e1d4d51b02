//! Metrics of time sharing, by card, virtual machine and engine. Times are in seconds.

use std::fmt::{self, Display, Write};

use super::escaped;
use api::{CardScheduler, Durations, VmEngine, VmShare};

/// A number of nanoseconds, formatted as seconds without loss of precision.
pub(super) struct Seconds(pub(super) u64);

impl Display for Seconds {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (whole, rest) = (self.0 / 1_000_000_000, self.0 % 1_000_000_000);
        if rest == 0 {
            return write!(f, "{whole}");
        }
        let rest = format!("{rest:09}");
        write!(f, "{whole}.{}", rest.trim_end_matches('0'))
    }
}

/// A counter of a virtual machine's engine usage: name, meaning, and value.
type EngineCounter = (&'static str, &'static str, fn(&VmEngine) -> String);

const ENGINE: [EngineCounter; 6] = [
    ("vm_engine_seconds_total", "Engine time that a VM has used, by `engine`", |engine| {
        Seconds(engine.used_ns).to_string()
    }),
    ("vm_submissions_total", "Submissions of a VM that arrived, by `engine`", |engine| engine.arrived.to_string()),
    ("vm_submissions_started_total", "Submissions of a VM that were started, by `engine`", |engine| {
        engine.started.to_string()
    }),
    ("vm_submissions_completed_total", "Submissions of a VM that completed, by `engine`", |engine| {
        engine.completed.to_string()
    }),
    (
        "vm_submissions_dropped_total",
        "Submissions of a VM that were withdrawn, or dropped with their channel, by `engine`",
        |engine| engine.dropped.to_string(),
    ),
    (
        "vm_kills_total",
        "Submissions of a VM whose channel was killed because they exceeded their time limit, by `engine`",
        |engine| engine.killed.to_string(),
    ),
];

/// A gauge of a virtual machine: name, meaning, and value.
type ShareGauge = (&'static str, &'static str, fn(&VmShare) -> String);

const SHARE: [ShareGauge; 6] = [
    ("vm_entitled_ratio", "Entitled share of compute while all VMs of the card compete", |vm| {
        format!("{}", f64::from(vm.entitled_permille) / 1000.0)
    }),
    ("vm_copies_entitled_ratio", "Entitled share of each copy engine while all VMs of the card compete", |vm| {
        format!("{}", f64::from(vm.copies_entitled_permille.unwrap_or(vm.entitled_permille)) / 1000.0)
    }),
    ("vm_queued_submissions", "Submissions of a VM that wait for a slice", |vm| vm.queued.to_string()),
    ("vm_in_flight_submissions", "Submissions of a VM that are on the card", |vm| vm.in_flight.to_string()),
    ("vm_strikes", "Submissions over their time limit since a VM was added or last released", |vm| {
        vm.strikes.to_string()
    }),
    ("vm_quarantined", "1 for a VM that is quarantined: none of its work is started", |vm| {
        u8::from(vm.quarantine.is_some()).to_string()
    }),
];

/// Prefix of all metric names in this module.
const PREFIX: &str = "gpu_mediator";

/// Appends all scheduler metrics of the cards.
pub(super) fn samples(text: &mut String, cards: &[CardScheduler]) {
    let busy = head(
        text,
        "card_engine_busy_seconds_total",
        "counter",
        "Time for which an engine of a card was busy for VMs, including removed ones, by `engine`",
    );
    for card in cards {
        for (engine, used) in &card.engines {
            let labels = format!("card=\"{}\",engine=\"{}\"", escaped(&card.card), engine.name());
            let _ = writeln!(text, "{busy}{{{labels}}} {}", Seconds(used.busy_ns));
        }
    }
    for (name, help, value) in ENGINE {
        let name = head(text, name, "counter", help);
        each_engine(cards, |labels, engine| {
            let _ = writeln!(text, "{name}{{{labels}}} {}", value(engine));
        });
    }
    for (name, help, value) in SHARE {
        let name = head(text, name, "gauge", help);
        for (card, vm) in cards.iter().flat_map(|card| card.vms.iter().map(move |vm| (card, vm))) {
            let _ = writeln!(text, "{name}{{{}}} {}", labels(card, vm), value(vm));
        }
    }
    let help = "Time for which submissions of a VM waited to start, by `engine`, in buckets from 10 us to 30 s; times may be counted as up to one eighth longer";
    let name = head(text, "vm_wait_seconds", "histogram", help);
    each_engine(cards, |labels, engine| histogram(text, &name, labels, &engine.wait));
}

/// Writes a metric's description. Returns the metric's name.
pub(super) fn head(text: &mut String, name: &str, kind: &str, help: &str) -> String {
    let name = format!("{PREFIX}_{name}");
    let _ = writeln!(text, "# HELP {name} {help}\n# TYPE {name} {kind}");
    name
}

fn labels(card: &CardScheduler, vm: &VmShare) -> String {
    format!("vm=\"{}\",card=\"{}\"", escaped(&vm.vm), escaped(&card.card))
}

fn each_engine(cards: &[CardScheduler], mut each: impl FnMut(&str, &VmEngine)) {
    for (card, vm) in cards.iter().flat_map(|card| card.vms.iter().map(move |vm| (card, vm))) {
        for (engine, used) in &vm.engines {
            each(&format!("{},engine=\"{}\"", labels(card, vm), engine.name()), used);
        }
    }
}

/// Appends a histogram's samples for one set of labels.
pub(super) fn histogram(text: &mut String, name: &str, labels: &str, durations: &Durations) {
    for bucket in &durations.buckets {
        let _ = writeln!(text, "{name}_bucket{{{labels},le=\"{}\"}} {}", Seconds(bucket.at_most_ns), bucket.count);
    }
    let _ = writeln!(text, "{name}_bucket{{{labels},le=\"+Inf\"}} {}", durations.count);
    let _ = writeln!(text, "{name}_sum{{{labels}}} {}", Seconds(durations.sum_ns));
    let _ = writeln!(text, "{name}_count{{{labels}}} {}", durations.count);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn seconds_are_written_without_loss() {
        let text = |ns| Seconds(ns).to_string();
        assert_eq!([0, 1, 10_000, 1_500_000_000].map(text), ["0", "0.000000001", "0.00001", "1.5"]);
        assert_eq!(text(u64::MAX), "18446744073.709551615");
    }
}
