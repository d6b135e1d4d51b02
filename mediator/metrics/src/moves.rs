//! Counts moves of virtual machines between cards, and returns the counts as metrics.

use std::collections::BTreeMap;
use std::fmt::Write;

use ::locks::{Mutex, rank};

use super::escaped;

/// Move counts since the daemon started.
#[derive(Default)]
pub struct Moves(Mutex<rank::Moves, Counts>);

#[derive(Clone, Debug, Default)]
struct Counts {
    /// Number of moved virtual machines, by old and new card.
    made: BTreeMap<(String, String), u64>,
    /// Number of moves that were started and failed.
    failed: u64,
    /// Pause of the virtual machine in the last move, in ms.
    last_pause_ms: Option<u64>,
}

impl Moves {
    /// Counts a virtual machine's move.
    pub fn record(&self, moved: &api::Moved) {
        let mut counts = self.0.lock();
        let made = counts.made.entry((moved.from.clone(), moved.to.clone())).or_default();
        *made = made.saturating_add(1);
        counts.last_pause_ms = Some(moved.pause_ms);
    }

    /// Counts a failed move.
    pub fn failed(&self) {
        let mut counts = self.0.lock();
        counts.failed = counts.failed.saturating_add(1);
    }

    /// Returns the counts as metrics.
    #[must_use]
    pub fn text(&self) -> String {
        let counts = self.0.lock().clone();
        let mut text = String::new();
        let name = "gpu_mediator_moves_total";
        let _ = writeln!(
            text,
            "# HELP {name} Moves of VMs since the daemon started, by `from` and `to`, the cards; no sample before the first move\n# TYPE {name} counter"
        );
        for ((from, to), count) in &counts.made {
            let _ = writeln!(text, "{name}{{from=\"{}\",to=\"{}\"}} {count}", escaped(from), escaped(to));
        }
        let name = "gpu_mediator_move_failures_total";
        let _ = writeln!(text, "# HELP {name} Moves of VMs that started and failed");
        let _ = writeln!(text, "# TYPE {name} counter\n{name} {}", counts.failed);
        let name = "gpu_mediator_move_pause_seconds";
        let _ = writeln!(
            text,
            "# HELP {name} Time for which a VM was paused in the last move; no sample before the first move\n# TYPE {name} gauge"
        );
        if let Some(ms) = counts.last_pause_ms {
            let _ = writeln!(text, "{name} {}.{:03}", ms / 1000, ms % 1000);
        }
        text
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn moves_are_counted_by_their_cards() {
        let moved = |vm: &str, pause_ms| api::Moved {
            vm: vm.to_owned(),
            from: "card0".to_owned(),
            to: "card1".to_owned(),
            pause_ms,
            pause: api::PauseParts::default(),
            memory_mib: 64,
            total_ms: 90,
        };
        let moves = Moves::default();
        assert!(!moves.text().lines().any(|line| line.starts_with("gpu_mediator_move_pause")), "there was no move yet");
        moves.record(&moved("a", 12));
        moves.record(&moved("b", 1007));
        moves.failed();
        let text = moves.text();
        for line in [
            "gpu_mediator_moves_total{from=\"card0\",to=\"card1\"} 2",
            "gpu_mediator_move_failures_total 1",
            "gpu_mediator_move_pause_seconds 1.007",
        ] {
            assert!(text.lines().any(|found| found == line), "{line}\n{text}");
        }
    }
}
