//! Simulates the quanta of several cards, whose owners exchange states with a delay.

use std::collections::VecDeque;

use proptest::prelude::*;
use vram::{Mode, Quanta, QuantaConfig, WorkingSet};

use super::*;

const MS: u64 = 1_000_000;
/// Time between two decisions of an owner, in ns.
const STEP_NS: u64 = 10 * MS;
/// Duration of the copies when the quantum changes, in ns.
const LOAD_NS: u64 = 100 * MS;
const QUANTUM_NS: u64 = 1000 * MS;
/// Delay of a message, in ns.
const DELAY_NS: u64 = 3 * MS;

/// One card and its owner.
struct Card {
    number: CardId,
    quanta: Quanta,
    links: GangQuanta,
    tenants: Vec<TenantId>,
    /// Time in ns at which the copies for the current quantum end.
    loaded_at: Option<u64>,
}

impl Card {
    /// Returns true if a tenant can use its memory on this card.
    fn is_usable(&self, tenant: TenantId, now: u64) -> bool {
        matches!(self.quanta.state(tenant, now), QuantumState::Free | QuantumState::Holds)
    }

    fn step(&mut self, now: u64) {
        self.quanta.set_leads(self.links.leads());
        self.quanta.set_unready(self.links.unready());
        if self.quanta.tick(now).is_some() {
            self.loaded_at = self.quanta.turn().map(|_| now + LOAD_NS);
        }
        if self.loaded_at.is_some_and(|at| at <= now) && !self.quanta.waits_for_cards(now) {
            self.quanta.copies_done(now);
            self.loaded_at = None;
        }
    }
}

/// All cards, and the messages in flight.
struct World {
    now: u64,
    cards: Vec<Card>,
    messages: VecDeque<(u64, CardId, StateMessage)>,
}

impl World {
    /// Creates cards, each with enough memory for one tenant. Each set contains the cards of one tenant.
    fn new(count: u32, tenants: &[BTreeSet<u32>]) -> Self {
        let config =
            QuantaConfig { mode: Mode::Forced, min_ns: QUANTUM_NS, max_ns: QUANTUM_NS, ..QuantaConfig::default() };
        let card = |number| {
            let mut card = Card {
                number: CardId(number),
                quanta: Quanta::new(config),
                links: GangQuanta::new(CardId(number)),
                tenants: Vec::new(),
                loaded_at: None,
            };
            card.quanta.relocated(0, 1000, 1000);
            (0..count).filter(|other| *other != number).for_each(|other| card.links.reached(CardId(other)));
            for (at, cards) in (1u32..).zip(tenants).filter(|(_, cards)| cards.contains(&number)) {
                let tenant = TenantId(at);
                card.tenants.push(tenant);
                if cards.len() > 1 {
                    card.links.join(GangId(at), tenant, cards.iter().copied().map(CardId).collect());
                }
            }
            let sets = card.tenants.iter().map(|tenant| (*tenant, WorkingSet::movable(900))).collect();
            card.quanta.set_working_sets(1000, sets);
            card
        };
        Self { now: 0, cards: (0..count).map(card).collect(), messages: VecDeque::new() }
    }

    fn step(&mut self) {
        self.now += STEP_NS;
        while let Some((_, from, message)) = self.messages.pop_front_if(|(at, ..)| *at <= self.now) {
            if let Some(card) = self.cards.iter_mut().find(|card| card.number == message.to) {
                card.links.received(from, message.gang, message.state);
            }
        }
        let (now, messages) = (self.now, &mut self.messages);
        for card in &mut self.cards {
            card.step(now);
            let Card { links, quanta, .. } = card;
            let sent = links.messages(|tenant| CardState { quantum: quanta.state(tenant, now), is_stuck: false });
            messages.extend(sent.into_iter().map(|message| (now + DELAY_NS, card.number, message)));
        }
    }

    /// Returns true if a tenant can work on all of its cards.
    fn works(&self, tenant: TenantId) -> bool {
        self.cards.iter().filter(|card| card.tenants.contains(&tenant)).all(|card| card.is_usable(tenant, self.now))
    }

    /// Returns the part of `ns` during which each tenant can work, in permille.
    fn shares(&mut self, tenants: usize, ns: u64) -> Vec<u64> {
        let mut worked = vec![0; tenants];
        let steps = ns / STEP_NS;
        for _ in 0..steps {
            self.step();
            for (tenant, worked) in (1u32..).zip(&mut worked) {
                *worked += u64::from(self.works(TenantId(tenant)));
            }
        }
        worked.into_iter().map(|worked| worked * 1000 / steps).collect()
    }
}

fn state(quantum: QuantumState) -> CardState {
    CardState { quantum, is_stuck: false }
}

fn on(cards: &[u32]) -> BTreeSet<u32> {
    cards.iter().copied().collect()
}

#[test]
fn two_gangs_have_their_quanta_on_both_cards_together() {
    let mut world = World::new(2, &[on(&[0, 1]), on(&[0, 1])]);
    // The second card begins with its other tenant, as after an earlier quantum.
    world.cards[1].quanta.tick(1);
    world.cards[1].quanta.copies_done(1);
    let shares = world.shares(2, 60_000 * MS);
    assert!(shares.iter().all(|share| *share > 400), "permille: {shares:?}");
}

#[test]
fn gangs_and_single_tenants_share_the_cards() {
    let mut world = World::new(2, &[on(&[0, 1]), on(&[0]), on(&[1]), on(&[0, 1])]);
    let shares = world.shares(4, 120_000 * MS);
    assert!(shares.iter().all(|share| *share > 150), "permille: {shares:?}");
}

#[test]
fn overlapping_gangs_do_not_deadlock() {
    // Two gangs that both need cards 2 and 3, with different lowest cards.
    let mut world = World::new(4, &[on(&[0, 2, 3]), on(&[1, 2, 3]), on(&[0, 1])]);
    let shares = world.shares(3, 120_000 * MS);
    assert!(shares.iter().all(|share| *share > 100), "permille: {shares:?}");
}

#[test]
fn idle_gang_at_home_does_not_block_other_cards() {
    let mut world = World::new(2, &[on(&[0, 1]), on(&[0]), on(&[1])]);
    world.cards[0].quanta.set_idle(BTreeMap::from([(TenantId(2), u64::MAX)]));
    let shares = world.shares(3, 60_000 * MS);
    assert!(shares[0] > 300 && shares[2] > 300, "the gang is alone on its home card: {shares:?}");
}

#[test]
fn lost_card_counts_as_free() {
    let mut links = GangQuanta::new(CardId(0));
    links.join(GangId(7), TenantId(1), BTreeSet::from([CardId(0), CardId(1)]));
    links.received(CardId(1), GangId(7), state(QuantumState::Waits));
    assert!(links.unready().is_empty(), "the card is not linked");
    assert!(links.messages(|_| state(QuantumState::Holds)).is_empty(), "the card is not linked");
    links.reached(CardId(1));
    links.received(CardId(1), GangId(7), state(QuantumState::Waits));
    assert_eq!(links.unready(), BTreeSet::from([TenantId(1)]));
    let message = StateMessage { to: CardId(1), gang: GangId(7), state: state(QuantumState::Holds) };
    assert_eq!(links.messages(|_| state(QuantumState::Holds)), [message]);
    assert!(links.messages(|_| state(QuantumState::Holds)).is_empty(), "the other owner knows it");
    links.lost(CardId(1));
    assert!(links.unready().is_empty());
    links.reached(CardId(1));
    assert_eq!(links.messages(|_| state(QuantumState::Holds)), [message], "the next owner does not know it");
    links.leave(TenantId(1));
    assert!(links.messages(|_| state(QuantumState::Waits)).is_empty());
}

#[test]
fn stuck_work_is_known_on_all_cards() {
    let mut cards: Vec<GangQuanta> = (0..3).map(|card| GangQuanta::new(CardId(card))).collect();
    for (at, card) in (0..).zip(&mut cards) {
        card.join(GangId(7), TenantId(1), (0..3).map(CardId).collect());
        (0..3).filter(|other| *other != at).for_each(|other| card.reached(CardId(other)));
    }
    let mut spread = |stuck: usize| {
        // Each card learns the state of its neighbours in one step.
        for _ in 0..2 {
            for at in 0..3 {
                let own = CardState { quantum: QuantumState::Waits, is_stuck: at == stuck };
                for StateMessage { to, gang, state } in cards[at].messages(|_| own) {
                    cards[to.0 as usize].received(CardId(at as u32), gang, state);
                }
            }
        }
        cards.iter().map(|card| card.is_stuck_elsewhere(TenantId(1))).collect::<Vec<_>>()
    };
    assert_eq!(spread(0), [false, true, true]);
    assert_eq!(spread(2), [true, true, false]);
    assert_eq!(spread(3), [false; 3], "it has ended");
}

#[test]
fn states_of_unknown_tenants_are_bounded() {
    let mut links = GangQuanta::new(CardId(1));
    links.reached(CardId(0));
    for gang in 0..5000 {
        links.received(CardId(0), GangId(gang), state(QuantumState::Waits));
    }
    assert_eq!(links.states[&CardId(0)].len(), MAX_STATES);
    links.join(GangId(7), TenantId(1), BTreeSet::from([CardId(0), CardId(1)]));
    assert_eq!(links.leads(), BTreeMap::from([(TenantId(1), Lead::Waits)]), "the state came before the tenant");
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]
    #[test]
    fn no_tenant_starves(sets in prop::collection::vec(prop::collection::btree_set(0u32..4, 1..4), 2..7)) {
        let mut world = World::new(4, &sets);
        let shares = world.shares(sets.len(), 200_000 * MS);
        prop_assert!(shares.iter().all(|share| *share >= 20), "permille {:?} of {:?}", shares, sets);
    }
}
