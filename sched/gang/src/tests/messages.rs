//! Tests a card with arbitrary messages, including messages that homes and cards never send.

use super::super::*;
use proptest::prelude::*;
use sched::VgpuParams;
use sched::groups::{GroupConfig, Sharing};
use sched::turns::{TurnsConfig, scheduler_defaults};

/// Maximum number of messages and orders that one event may cause per gang.
const MAX_RESULTS: usize = 16;
const CARD: CardId = CardId(1);

/// Creates card 1 with two gangs. Their homes are cards 0 and 1.
fn card() -> GangTurns {
    let turns = GroupTurns::new(scheduler_defaults(), TurnsConfig::default(), GroupConfig::default(), Nanos(0));
    let mut card = GangTurns::new(CARD, turns.expect("the defaults are valid"), GangConfig::default());
    for (number, cards) in [(0, [0, 1]), (1, [1, 2])] {
        let (tenant, cards) = (TenantId(number), cards.map(CardId).into());
        card.with_turns(Nanos(0), |turns| turns.add(tenant, VgpuParams::default(), Nanos(0)));
        assert!(card.join(GangId(number), tenant, &cards, Nanos(0)));
    }
    card.reached(CardId(0), Nanos(0));
    card.reached(CardId(2), Nanos(0));
    card
}

#[test]
fn gang_joins_with_a_single_tenant_of_its_cards() {
    let (mut card, here, elsewhere) = (card(), [CARD, CardId(3)].into(), [CardId(2), CardId(3)].into());
    assert!(!card.join(GangId(2), TenantId(9), &here, Nanos(0)), "the tenant is unknown");
    assert!(!card.join(GangId(2), TenantId(1), &here, Nanos(0)), "the tenant is already a member");
    for tenant in [2, 3].map(TenantId) {
        card.with_turns(Nanos(0), |turns| turns.add(tenant, VgpuParams::default(), Nanos(0)));
    }
    card.with_turns(Nanos(0), |turns| turns.set_group(TenantId(3), Some(("group", Sharing::Turns)), Nanos(0)));
    assert!(!card.join(GangId(2), TenantId(3), &here, Nanos(0)), "the tenant is in a group");
    assert!(!card.join(GangId(2), TenantId(2), &elsewhere, Nanos(0)), "the set of cards does not include this card");
    assert!(!card.join(GangId(1), TenantId(2), &here, Nanos(0)), "the gang is already a member");
    assert!(card.join(GangId(2), TenantId(2), &here, Nanos(0)));
    assert_eq!(card.gang_of(TenantId(2)), Some(GangId(2)));
}

fn command(gang: u32, round: u64, command: Command) -> Message {
    Message { gang: GangId(gang), clock: 1, body: Body::Command { round, command } }
}

#[test]
fn command_from_a_card_that_is_not_home_is_ignored() {
    let mut card = card();
    card.take_messages();
    for (from, gang) in [(2, 0), (1, 0), (0, 1), (2, 1), (0, 7)] {
        card.receive(CardId(from), command(gang, 1, Command::Compete), Nanos(1));
        card.receive(CardId(from), command(gang, 1, Command::Gather { age: 0 }), Nanos(1));
        card.receive(CardId(from), command(gang, 1, Command::Run), Nanos(1));
    }
    assert_eq!((card.take_orders(), card.take_messages()), (vec![], vec![]));
    assert_eq!(card.turns().holders().count(), 0);
}

#[test]
fn gates_stay_closed_without_a_gather() {
    let mut card = card();
    card.receive(CardId(0), command(0, 0, Command::Compete), Nanos(1));
    card.receive(CardId(0), command(0, 0, Command::Run), Nanos(1));
    assert_eq!(card.take_orders(), []);
    card.receive(CardId(0), command(0, 1, Command::Gather { age: 1 }), Nanos(1));
    card.receive(CardId(0), command(0, 2, Command::Run), Nanos(1));
    assert_eq!(card.take_orders(), [], "the command belongs to another gather");
    card.receive(CardId(0), command(0, 1, Command::Run), Nanos(1));
    assert_eq!(card.take_orders(), [GangOrder::Turn(Order::Grant(TenantId(0)))]);
}

#[test]
fn report_of_a_card_outside_the_gang_is_ignored() {
    let mut card = card();
    card.wants(TenantId(1), Nanos(0));
    card.take_messages();
    let offer = Body::Report { round: 0, state: CardState::Offered, wants: true };
    card.receive(CardId(0), Message { gang: GangId(1), clock: 1, body: offer }, Nanos(1));
    assert_eq!(card.take_messages(), []);
    card.receive(CardId(2), Message { gang: GangId(1), clock: 1, body: offer }, Nanos(1));
    let gathers =
        |message: &Message| matches!(message.body, Body::Command { round: 1, command: Command::Gather { .. } });
    assert!(card.take_messages().iter().any(|(to, message)| *to == CardId(2) && gathers(message)));
}

fn any_body() -> impl Strategy<Value = Body> {
    use CardState::{Absent, Contested, Drained, Ending, Gathering, Offered, Ready, Resting, Running, Stuck, Waiting};
    let state = proptest::sample::select(vec![
        Absent, Waiting, Offered, Gathering, Ready, Contested, Running, Resting, Ending, Drained, Stuck,
    ]);
    let age = prop_oneof![Just(0), Just(u64::MAX), 0..9u64];
    let plain = proptest::sample::select(vec![
        Command::Report,
        Command::Rest,
        Command::Compete,
        Command::Run,
        Command::Stop,
        Command::Step,
        Command::Release,
    ]);
    let command = prop_oneof![3 => plain, 1 => age.prop_map(|age| Command::Gather { age })];
    let round = || prop_oneof![4 => 0..4u64, 1 => Just(u64::MAX)];
    prop_oneof![
        (round(), state, any::<bool>()).prop_map(|(round, state, wants)| Body::Report { round, state, wants }),
        (round(), command).prop_map(|(round, command)| Body::Command { round, command }),
    ]
}

#[derive(Clone, Debug)]
enum Call {
    Receive(u32, Message),
    Wants(u32),
    Ended(u32, bool),
    Pause(u32, bool),
    Lost(u32),
    Reached(u32),
    Wait(u64),
}

fn any_call() -> impl Strategy<Value = Call> {
    let clock = prop_oneof![4 => 0..100u64, 1 => Just(u64::MAX)];
    let message =
        (0..3u32, clock, any_body()).prop_map(|(gang, clock, body)| Message { gang: GangId(gang), clock, body });
    prop_oneof![
        8 => (0..4u32, message).prop_map(|(from, message)| Call::Receive(from, message)),
        2 => (0..2u32).prop_map(Call::Wants),
        2 => (0..2u32, any::<bool>()).prop_map(|(tenant, more)| Call::Ended(tenant, more)),
        1 => (0..2u32, any::<bool>()).prop_map(|(tenant, paused)| Call::Pause(tenant, paused)),
        1 => (0..4u32).prop_map(Call::Lost),
        1 => (0..4u32).prop_map(Call::Reached),
        3 => (0..60_000_000u64).prop_map(Call::Wait),
    ]
}

proptest! {
    #[test]
    fn any_messages_cause_bounded_work_and_no_panic(calls in proptest::collection::vec(any_call(), 1..80)) {
        let (mut card, mut now) = (card(), 0);
        for call in calls {
            let at = Nanos(now);
            card.take_orders();
            card.take_messages();
            match call {
                Call::Receive(from, message) => card.receive(CardId(from), message, at),
                Call::Wants(tenant) => card.wants(TenantId(tenant), at),
                Call::Ended(tenant, more) => card.ended(TenantId(tenant), at, more, at),
                Call::Pause(tenant, paused) => card.pause(TenantId(tenant), paused, at),
                Call::Lost(from) => card.lost(CardId(from), at),
                Call::Reached(from) => card.reached(CardId(from), at),
                Call::Wait(ns) => {
                    now += ns;
                    card.tick(Nanos(now));
                }
            }
            let results = card.orders.len() + card.messages.len();
            prop_assert!(results <= 2 * MAX_RESULTS, "{} orders, {} messages", card.orders.len(), card.messages.len());
            prop_assert!(card.own.is_empty());
        }
    }
}
