//! One minute of received shares as a small chart.

use std::collections::{BTreeMap, VecDeque};
use std::time::Duration;

use sched::Engine;

use api::CardScheduler;

/// Length of the displayed history.
const SHOWN: Duration = Duration::from_secs(60);
/// Width of the chart, in characters.
const WIDTH: usize = 15;
/// Maximum number of samples, reached with short intervals.
const MAX_SAMPLES: usize = 600;
/// Characters for the chart's bar heights.
const LEVELS: [char; 8] = ['▁', '▂', '▃', '▄', '▅', '▆', '▇', '█'];

/// Key of a history: card, virtual machine or tenant, and engine.
pub(super) type Key = (String, String, Engine);

/// Received shares of the last minute in permille, oldest first.
#[derive(Debug, Default)]
pub(super) struct History(BTreeMap<Key, VecDeque<u32>>);

impl History {
    /// Adds a refresh's shares, and drops the shares of removed virtual machines.
    pub(super) fn add(&mut self, cards: &[CardScheduler], interval: Duration) {
        let count = SHOWN.as_millis().checked_div(interval.as_millis()).unwrap_or(1);
        let count = usize::try_from(count).unwrap_or(1).clamp(1, MAX_SAMPLES);
        let mut next = BTreeMap::new();
        for card in cards {
            for vm in &card.vms {
                for (engine, used) in &vm.engines {
                    let key = (card.card.clone(), vm.vm.clone(), *engine);
                    let mut samples = self.0.remove(&key).unwrap_or_default();
                    samples.push_back(used.received_permille);
                    while samples.len() > count {
                        samples.pop_front();
                    }
                    next.insert(key, samples);
                }
            }
        }
        self.0 = next;
    }

    /// Renders the chart, with the latest samples at the right. Each character is the mean of one or more samples.
    pub(super) fn picture(&self, key: &Key) -> String {
        let samples: Vec<u32> = self.0.get(key).into_iter().flatten().copied().collect();
        let each = samples.len().div_ceil(WIDTH).max(1);
        // Group samples from the end, so that the characters of old samples stay the same when new samples arrive.
        let groups =
            samples.rchunks(each).map(|group| group.iter().sum::<u32>() / u32::try_from(group.len()).unwrap_or(1));
        let mut picture: Vec<char> = groups.map(level).collect();
        picture.reverse();
        picture.into_iter().collect()
    }
}

fn level(permille: u32) -> char {
    let index = usize::try_from(permille.min(1000)).unwrap_or(0) * (LEVELS.len() - 1) / 1000;
    LEVELS.get(index).copied().unwrap_or(' ')
}

/// Renders the received share as a bar of ten characters, with a mark at the entitled share.
pub(super) fn bar(received_permille: u32, entitled_permille: u32) -> String {
    let cell = |permille: u32| usize::try_from(permille.min(1000).div_ceil(100)).unwrap_or(0);
    let (received, mark) = (cell(received_permille), cell(entitled_permille).saturating_sub(1));
    let one = |at: usize| match (at < received, at == mark) {
        (true, true) => '▓',
        (true, false) => '█',
        (false, true) => '|',
        (false, false) => '·',
    };
    (0..10).map(one).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bar_shows_received_share_and_entitlement() {
        assert_eq!(bar(305, 500), "████|·····");
        assert_eq!(bar(610, 500), "████▓██···");
        assert_eq!((&*bar(0, 0), &*bar(5000, 1000)), ("|·········", "█████████▓"));
    }

    #[test]
    fn levels_cover_the_whole() {
        assert_eq!([0, 500, 1000, 9999].map(level), ['▁', '▄', '█', '█']);
    }
}
