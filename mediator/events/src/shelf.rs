//! Bounded storage for the log's events.
//!
//! When a bound is exceeded, the oldest event of the subject with the most events is dropped; in case of a tie, the
//! oldest event of all these subjects. Therefore, a subject keeps all its events until it occupies more than an equal
//! share of the log.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::Arc;

use api::{Event, Subject};

/// Maximum number of events.
pub(crate) const MAX_EVENTS: usize = 4096;
/// Maximum total size of events in bytes.
const MAX_BYTES: usize = 2 << 20;
/// Estimated size of an event excluding its texts, in bytes.
const OVERHEAD: usize = size_of::<Event>() + 128;

/// The events, keyed by number.
#[derive(Debug, Default)]
pub(crate) struct Shelf {
    events: BTreeMap<u64, Arc<Event>>,
    bytes: usize,
    /// Numbers of each subject's events, in ascending order.
    of: BTreeMap<Subject, VecDeque<u64>>,
    /// Subjects ordered by number of events and age of the oldest event. The oldest event of the last subject is
    /// dropped next.
    order: BTreeSet<(usize, Reverse<u64>, Subject)>,
}

fn size(event: &Event) -> usize {
    let Event { cursor, at, subject, card, author, text, .. } = event;
    let texts = [Some(cursor), Some(at), Some(&subject.name), card.as_ref(), author.program.as_ref(), Some(text)];
    // The subject is also a key in two maps.
    OVERHEAD + subject.name.len() * 2 + texts.into_iter().flatten().map(String::len).sum::<usize>()
}

impl Shelf {
    /// Adds an event, whose number must be the highest.
    pub fn add(&mut self, event: Event) {
        self.bytes += size(&event);
        let (number, subject) = (event.number, event.subject.clone());
        self.events.insert(number, Arc::new(event));
        self.numbers(&subject, |numbers| numbers.push_back(number));
        while self.events.len() > MAX_EVENTS || self.bytes > MAX_BYTES {
            let Some((.., heaviest)) = self.order.last().cloned() else { return };
            let mut oldest = None;
            self.numbers(&heaviest, |numbers| oldest = numbers.pop_front());
            if let Some(gone) = oldest.and_then(|number| self.events.remove(&number)) {
                self.bytes -= size(&gone);
            }
        }
    }

    /// Changes a subject's list of event numbers.
    fn numbers(&mut self, subject: &Subject, change: impl FnOnce(&mut VecDeque<u64>)) {
        let mut numbers = self.of.remove(subject).unwrap_or_default();
        if let Some(oldest) = numbers.front() {
            self.order.remove(&(numbers.len(), Reverse(*oldest), subject.clone()));
        }
        change(&mut numbers);
        if let Some(oldest) = numbers.front() {
            self.order.insert((numbers.len(), Reverse(*oldest), subject.clone()));
            self.of.insert(subject.clone(), numbers);
        }
    }

    /// Returns up to `limit` events after a number.
    pub fn after(&self, number: u64, limit: usize) -> Vec<Arc<Event>> {
        let after = self.events.range(number.saturating_add(1)..);
        after.take(limit).map(|(_, event)| Arc::clone(event)).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use api::{EventKind, SubjectKind};
    use proptest::prelude::*;

    fn event(number: u64, name: &str, text: usize) -> Event {
        Event {
            cursor: format!("1-{number}"),
            number,
            at: String::new(),
            kind: EventKind::Changed,
            subject: Subject { kind: SubjectKind::Vm, name: name.to_owned() },
            card: None,
            author: crate::author::daemon(),
            text: "x".repeat(text),
            waited_ms: None,
            suppressed: 0,
        }
    }

    impl Shelf {
        /// Checks the bounds and the consistency of all parts.
        fn audit(&self) {
            assert!(self.events.len() <= MAX_EVENTS && self.bytes <= MAX_BYTES);
            assert_eq!(self.bytes, self.events.values().map(|event| size(event)).sum::<usize>());
            let mut of: BTreeMap<Subject, VecDeque<u64>> = BTreeMap::new();
            self.events.values().for_each(|event| of.entry(event.subject.clone()).or_default().push_back(event.number));
            assert_eq!(self.of, of);
            let order = of.iter().map(|(subject, numbers)| (numbers.len(), Reverse(numbers[0]), subject.clone()));
            assert_eq!(self.order, order.collect());
        }

        fn count(&self, name: &str) -> usize {
            self.events.values().filter(|event| event.subject.name == name).count()
        }
    }

    #[test]
    fn loud_subjects_do_not_push_out_events_of_quiet_ones() {
        let mut shelf = Shelf::default();
        let mut number = 0;
        let mut add = |shelf: &mut Shelf, name: &str| {
            number += 1;
            shelf.add(event(number, name, 20));
        };
        for _ in 0..100 {
            add(&mut shelf, "quiet");
        }
        for n in 0..20_000 {
            add(&mut shelf, if n % 3 == 0 { "loud" } else { "louder" });
        }
        shelf.audit();
        assert_eq!((shelf.count("quiet"), shelf.events.len()), (100, MAX_EVENTS));
        assert_eq!(shelf.count("loud").abs_diff(shelf.count("louder")), 0);
        // The newest events are kept.
        assert_eq!(shelf.events.last_key_value().unwrap().0, &20_100);
        assert_eq!(shelf.after(20_098, 10).len(), 2);
    }

    #[test]
    fn bytes_are_bounded_for_long_texts() {
        let mut shelf = Shelf::default();
        (1..3000).for_each(|number| shelf.add(event(number, "a", 4000)));
        shelf.audit();
        assert!(shelf.events.len() < 600 && shelf.bytes > MAX_BYTES / 2, "{}", shelf.events.len());
        // A single event that is too large evicts all others, and is then dropped itself.
        shelf.add(event(3000, "b", MAX_BYTES));
        shelf.audit();
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(48))]

        #[test]
        fn shelf_stays_within_bounds_and_keeps_the_newest(adds in prop::collection::vec((0_usize..40, 0_usize..30_000), 1..600)) {
            let mut shelf = Shelf::default();
            for (number, (who, text)) in (1..).zip(adds) {
                shelf.add(event(number, &format!("v{}", who * who / 40), text));
                prop_assert_eq!(shelf.after(number - 1, 1).len(), 1);
                let heaviest = shelf.of.values().map(VecDeque::len).max();
                prop_assert_eq!(heaviest, shelf.order.last().map(|(count, ..)| *count));
            }
            shelf.audit();
        }
    }
}
