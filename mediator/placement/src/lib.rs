//! Chooses cards for a tenant whose configuration specifies only their number.
//!
//! [`choose`] selects among the cards that accept the tenant, according to a [`Placement`] policy and to the
//! connections between the cards ([`Links`]).
//!
//! The crate does not check whether a card accepts a tenant, and does not record the choice. `config` defines the
//! rules, and the daemon stores the chosen cards with its other changes to the configuration.

#![forbid(unsafe_code)]

use std::cmp::Reverse;
use std::collections::BTreeMap;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// Maximum number of cards that [`choose`] combines. If more cards accept a tenant, only the best ones are considered.
const MAX_CANDIDATES: usize = 16;

/// Policy that chooses among suitable cards for a virtual machine or tenant whose configuration does not name cards.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize, Serialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum Placement {
    /// The card with the most VRAM that is not guaranteed to any virtual machine; for a tenant, the card with the
    /// smallest fraction of its memory assigned to tenants.
    #[default]
    Room,
    /// The fullest card with enough memory, so that other cards stay empty as long as possible.
    Pack,
    /// The card with the fewest virtual machines or tenants; among several, the one with the most free capacity.
    Spread,
    /// Cards that are connected to each other by NVLink, for a tenant with several cards. For all others, like `room`.
    Nvlink,
}

impl Placement {
    /// Returns the name of the policy.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Room => "room",
            Self::Pack => "pack",
            Self::Spread => "spread",
            Self::Nvlink => "nvlink",
        }
    }
}

/// Numbers of NVLink connections between pairs of cards.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Links(BTreeMap<(String, String), u32>);

impl Links {
    /// Combines the reports of all cards. Each report has the card's name, its UUID, and the numbers of connections to
    /// other cards by their UUIDs. Connections to unknown cards are omitted.
    pub fn from_reports<'a>(reports: impl IntoIterator<Item = (&'a str, &'a str, &'a BTreeMap<String, u32>)>) -> Self {
        let reports: Vec<_> = reports.into_iter().collect();
        let mut links = BTreeMap::new();
        for (name, _, peers) in &reports {
            for (peer, uuid, _) in &reports {
                if let Some(&count) = peers.get(*uuid).filter(|&&count| count > 0 && name != peer) {
                    let of_pair = links.entry(pair(name, peer)).or_insert(0);
                    // If the cards report different numbers of connections, only the lower number is certain to connect
                    // both.
                    *of_pair = if *of_pair == 0 { count } else { count.min(*of_pair) };
                }
            }
        }
        Self(links)
    }

    /// Returns the number of connections between two cards.
    #[must_use]
    pub fn between(&self, one: &str, other: &str) -> u32 {
        self.0.get(&pair(one, other)).copied().unwrap_or(0)
    }
}

/// Returns the key of two cards, which does not depend on their order.
fn pair(one: &str, other: &str) -> (String, String) {
    let (first, second) = if one < other { (one, other) } else { (other, one) };
    (first.to_owned(), second.to_owned())
}

/// A card that accepts the tenant.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Candidate<'a> {
    /// Name of the card.
    pub name: &'a str,
    /// Memory of the card, in MiB.
    pub total_mib: u64,
    /// Memory that the card's tenants see, including the new tenant, in MiB.
    pub seen_mib: u64,
    /// Memory that the card's tenants may have on the card at the same time, including the new tenant, in MiB.
    pub demand_mib: u64,
    /// Number of the card's other tenants.
    pub tenants: usize,
}

/// Sort key of a card. The lowest key is the best.
type Key = (u64, u64, u64);

impl Candidate<'_> {
    /// Returns the memory that tenants see, in permille of the card's memory. Exceeds 1000 if the memory is
    /// overcommitted.
    fn load(&self) -> u64 {
        self.seen_mib.saturating_mul(1000) / self.total_mib.max(1)
    }

    fn key(&self, policy: Placement) -> Key {
        match policy {
            Placement::Room | Placement::Nvlink => (0, 0, self.load()),
            Placement::Spread => (0, self.tenants as u64, self.load()),
            // An empty small card does not count as fuller than a used large one.
            Placement::Pack if self.demand_mib <= self.total_mib => {
                (0, u64::from(self.tenants == 0), u64::MAX - self.load())
            }
            // Cards without enough memory for all of their tenants come last, in ascending order of load.
            Placement::Pack => (1, 0, self.load()),
        }
    }
}

/// Chooses `count` of the candidates. Returns their indices in ascending order, or `None` if `count` is 0, exceeds
/// `MAX_CANDIDATES`, or exceeds the number of candidates. Among equally good choices, cards that are connected by
/// NVLink are preferred, and then the first ones.
#[must_use]
pub fn choose(policy: Placement, candidates: &[Candidate<'_>], count: usize, links: &Links) -> Option<Vec<usize>> {
    if count == 0 || candidates.len() < count || count > MAX_CANDIDATES {
        return None;
    }
    let mut order: Vec<usize> = (0..candidates.len()).collect();
    // The sort is stable, so the first one of equal cards is preferred.
    order.sort_by_key(|&at| candidates[at].key(policy));
    order.truncate(MAX_CANDIDATES);
    let ranks = ranks(&order, candidates, policy);
    // There are at most 65536 sets.
    let sets = (1u32..1 << order.len()).filter(|set| set.count_ones() as usize == count);
    let best = sets.min_by_key(|&set| {
        let members = || (0..order.len()).filter(move |at| set & (1 << at) != 0);
        let rank: u64 = members().map(|at| ranks[at]).sum();
        let (mut linked, mut total) = (0u64, 0u64);
        for one in members() {
            for other in members().filter(|&other| other > one) {
                let between = links.between(candidates[order[one]].name, candidates[order[other]].name);
                linked += u64::from(between > 0);
                total += u64::from(between);
            }
        }
        let linked = Reverse((linked, total));
        // Among equal sets, the one with the lowest number contains the first cards.
        match policy {
            Placement::Nvlink => (0, linked, rank, set),
            Placement::Room | Placement::Pack | Placement::Spread => (rank, linked, 0, set),
        }
    })?;
    let mut chosen: Vec<usize> = (0..order.len()).filter(|at| best & (1 << at) != 0).map(|at| order[at]).collect();
    chosen.sort_unstable();
    Some(chosen)
}

/// Returns the rank of each card in `order`. Equal cards have the same rank.
fn ranks(order: &[usize], candidates: &[Candidate<'_>], policy: Placement) -> Vec<u64> {
    let mut rank = 0;
    let mut before = None;
    let each = order.iter().map(|&at| {
        let key = candidates[at].key(policy);
        rank += u64::from(before.is_some_and(|before| before != key));
        before = Some(key);
        rank
    });
    each.collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// Returns cards of 100 MiB with names `a`, `b`, .., from their load and number of tenants.
    fn cards(loads: &[(u64, usize)]) -> Vec<Candidate<'static>> {
        const NAMES: [&str; 20] =
            ["a", "b", "c", "d", "e", "f", "g", "h", "i", "j", "k", "l", "m", "n", "o", "p", "q", "r", "s", "t"];
        let card = |(&(seen_mib, tenants), name): (&(u64, usize), &&'static str)| Candidate {
            name,
            total_mib: 100,
            seen_mib,
            demand_mib: seen_mib,
            tenants,
        };
        loads.iter().zip(&NAMES).map(card).collect()
    }

    fn links(pairs: &[(&str, &str, u32)]) -> Links {
        Links(pairs.iter().map(|(one, other, count)| (pair(one, other), *count)).collect())
    }

    #[test]
    fn each_policy_has_its_own_order() {
        let cards = cards(&[(30, 0), (50, 1), (40, 3), (90, 1), (110, 2)]);
        for (policy, one, two) in [
            (Placement::Room, 0, [0, 2]),
            // The fifth card has too little memory for its tenants, and the first one has no tenants.
            (Placement::Pack, 3, [1, 3]),
            (Placement::Spread, 0, [0, 1]),
            (Placement::Nvlink, 0, [0, 2]),
        ] {
            assert_eq!(choose(policy, &cards, 1, &Links::default()), Some(vec![one]), "{policy:?}");
            assert_eq!(choose(policy, &cards, 2, &Links::default()), Some(two.to_vec()), "{policy:?}");
        }
    }

    #[test]
    fn nvlink_prefers_neighbours_to_free_memory() {
        let cards = cards(&[(10, 0), (20, 1), (60, 1), (70, 1)]);
        let pairs = links(&[("a", "d", 2), ("c", "d", 4)]);
        assert_eq!(choose(Placement::Nvlink, &cards, 2, &pairs), Some(vec![2, 3]));
        assert_eq!(choose(Placement::Nvlink, &cards, 3, &pairs), Some(vec![0, 2, 3]));
        assert_eq!(choose(Placement::Room, &cards, 2, &pairs), Some(vec![0, 1]));
        // More pairs are better than more connections of one pair.
        let ring = links(&[("a", "b", 1), ("b", "c", 1), ("a", "c", 1), ("c", "d", 9)]);
        assert_eq!(choose(Placement::Nvlink, &cards, 3, &ring), Some(vec![0, 1, 2]));
    }

    #[test]
    fn links_decide_between_equal_cards() {
        let (cards, pairs) = (cards(&[(10, 0); 4]), links(&[("b", "d", 1)]));
        for policy in [Placement::Room, Placement::Pack, Placement::Spread, Placement::Nvlink] {
            assert_eq!(choose(policy, &cards, 2, &pairs), Some(vec![1, 3]), "{policy:?}");
            assert_eq!(choose(policy, &cards, 2, &Links::default()), Some(vec![0, 1]), "{policy:?}");
        }
    }

    #[test]
    fn impossible_numbers_of_cards_have_no_choice() {
        let two = cards(&[(10, 0); 2]);
        for count in [0, 3, 17] {
            assert_eq!(choose(Placement::Room, &two, count, &Links::default()), None, "{count}");
        }
        // The best 16 of 20 cards are combined.
        let mut many = cards(&[(50, 0); 20]);
        many[19].seen_mib = 10;
        assert_eq!(choose(Placement::Room, &many, 2, &Links::default()), Some(vec![0, 19]));
    }

    #[test]
    fn reports_of_both_ends_are_combined() {
        let peers = |list: &[(&str, u32)]| list.iter().map(|(uuid, n)| ((*uuid).to_owned(), *n)).collect();
        let (a, b, c): (BTreeMap<_, _>, BTreeMap<_, _>, BTreeMap<_, _>) =
            (peers(&[("GPU-b", 4), ("GPU-x", 2)]), peers(&[("GPU-a", 3), ("GPU-b", 9)]), peers(&[("GPU-a", 0)]));
        let links = Links::from_reports([("a", "GPU-a", &a), ("b", "GPU-b", &b), ("c", "GPU-c", &c)]);
        assert_eq!((links.between("a", "b"), links.between("b", "a")), (3, 3));
        assert_eq!((links.between("a", "c"), links.between("b", "b"), links.between("a", "x")), (0, 0, 0));
    }

    proptest! {
        /// Every choice has the requested number of different cards, and no other set has a better rank.
        #[test]
        fn room_takes_the_least_loaded_cards(loads in proptest::collection::vec((0u64..200, 0usize..4), 1..12), count in 1usize..6) {
            let cards = cards(&loads);
            let chosen = choose(Placement::Room, &cards, count, &Links::default());
            prop_assert_eq!(chosen.is_some(), count <= cards.len());
            let chosen = chosen.unwrap_or_default();
            prop_assert!(chosen.windows(2).all(|pair| pair[0] < pair[1]));
            let worst = chosen.iter().map(|&at| cards[at].seen_mib).max().unwrap_or(u64::MAX);
            let better = (0..cards.len()).filter(|at| !chosen.contains(at)).any(|at| cards[at].seen_mib < worst);
            prop_assert!(chosen.is_empty() || !better);
        }
    }
}
