//! Tests of links between owners in one process. Nothing waits, because time is an argument.

use super::*;
use gang::{Body, CardState, GangId};

const ONE: CardId = CardId(1);
const TWO: CardId = CardId(2);

/// Two owners with their sockets in a folder.
struct Owners {
    folder: tempfile::TempDir,
    links: BTreeMap<CardId, OwnerLinks>,
    now: u64,
}

impl Owners {
    fn new() -> Self {
        let folder = tempfile::tempdir().expect("a folder");
        let mut owners = Self { folder, links: BTreeMap::new(), now: 0 };
        owners.start(ONE);
        owners.start(TWO);
        owners
    }

    fn path(&self, card: CardId) -> PathBuf {
        self.folder.path().join(format!("{}.gangs", card.0))
    }

    /// Starts the owner of a card, replacing an earlier one.
    fn start(&mut self, card: CardId) {
        self.links.remove(&card);
        let mut links = OwnerLinks::listen(card, &self.path(card)).expect("listens");
        let peers = [ONE, TWO].into_iter().filter(|other| *other != card).map(|other| (other, self.path(other)));
        links.set_peers(&peers.collect());
        self.links.insert(card, links);
    }

    fn of(&mut self, card: CardId) -> &mut OwnerLinks {
        self.links.get_mut(&card).expect("it runs")
    }

    /// Serves both owners until they are idle, and returns their events.
    fn serve(&mut self) -> BTreeMap<CardId, Vec<LinkEvent>> {
        let mut news: BTreeMap<CardId, Vec<LinkEvent>> = BTreeMap::new();
        for _ in 0..4 {
            for (&card, links) in &mut self.links {
                news.entry(card).or_default().extend(links.serve(self.now, true));
            }
        }
        news
    }

    /// Advances the time to the next connection attempt, and serves both owners.
    fn retry(&mut self) -> BTreeMap<CardId, Vec<LinkEvent>> {
        self.now += RETRY_NS;
        self.serve()
    }
}

fn message(clock: u64) -> Message {
    Message { gang: GangId(7), clock, body: Body::Report { round: 3, state: CardState::Offered, wants: true } }
}

/// Connects to the owner of card 1, pretending to be the owner of card 2.
fn imposter(owners: &Owners) -> OwnedFd {
    let socket = connect(&owners.path(ONE)).expect("it listens");
    transmit(&socket, &Packet::Greeting { version: VERSION, card: TWO }).expect("sent");
    socket
}

#[test]
fn owners_find_each_other_and_exchange_messages_in_order() {
    let mut owners = Owners::new();
    let news = owners.serve();
    assert_eq!(news[&ONE], [LinkEvent::Reached(TWO)]);
    assert_eq!(news[&TWO], [LinkEvent::Reached(ONE)]);
    for clock in 1..=3 {
        owners.of(TWO).send(ONE, message(clock), 0);
    }
    owners.of(ONE).send(TWO, message(MAX_CLOCK), 0);
    let news = owners.serve();
    assert_eq!(news[&ONE], [1, 2, 3].map(|clock| LinkEvent::Said(TWO, message(clock))));
    assert_eq!(news[&TWO], [LinkEvent::Said(ONE, message(MAX_CLOCK))]);
    assert_eq!((owners.of(ONE).next_due(0), owners.of(TWO).next_due(0)), (None, None));
}

#[test]
fn running_owner_replies_to_probes_in_order_with_messages() {
    let mut owners = Owners::new();
    owners.serve();
    owners.of(ONE).probe(TWO, 0);
    owners.of(TWO).send(ONE, message(1), 0);
    let news = owners.serve();
    assert_eq!(news[&ONE], [LinkEvent::Said(TWO, message(1)), LinkEvent::Replied(TWO)]);
    assert_eq!(news[&TWO], []);
}

#[test]
fn restarted_owner_is_lost_and_reached_again() {
    let mut owners = Owners::new();
    owners.serve();
    for card in [ONE, TWO] {
        let other = if card == ONE { TWO } else { ONE };
        owners.start(card);
        let mut news = owners.serve();
        let more = owners.retry();
        more.into_iter().for_each(|(card, more)| news.entry(card).or_default().extend(more));
        assert_eq!(news[&other], [LinkEvent::Lost(card), LinkEvent::Reached(card)], "{card:?}");
        assert_eq!(news[&card], [LinkEvent::Reached(other)], "{card:?}");
    }
}

#[test]
fn invalid_packets_end_only_the_connection() {
    let too_long = [0; MAX_PACKET + 1];
    let valid = |packet: &Packet| postcard::to_allocvec(packet).expect("encodes");
    let trailing = [valid(&Packet::Gang(message(1))), vec![0]].concat();
    let greeting = valid(&Packet::Greeting { version: VERSION, card: TWO });
    let late = valid(&Packet::Gang(message(MAX_CLOCK + 1)));
    for bytes in [&too_long[..], &[9, 9], &trailing, &greeting, &late] {
        let mut owners = Owners::new();
        owners.links.remove(&TWO);
        let socket = imposter(&owners);
        assert_eq!(owners.serve()[&ONE], [LinkEvent::Reached(TWO)]);
        rustix::net::send(&socket, bytes, SendFlags::empty()).expect("sent");
        assert_eq!(owners.serve()[&ONE], [LinkEvent::Lost(TWO)], "{bytes:?}");
        owners.start(TWO);
        assert_eq!(owners.serve()[&ONE], [LinkEvent::Reached(TWO)], "the real owner is reached");
    }
}

#[test]
fn owner_that_reads_nothing_is_lost_at_a_bound() {
    let mut owners = Owners::new();
    owners.links.remove(&TWO);
    let _stopped = imposter(&owners);
    owners.serve();
    let sent = (0..1 << 20).find(|&clock| {
        owners.of(ONE).send(TWO, message(clock), 0);
        !owners.of(ONE).serve(0, false).is_empty()
    });
    assert!(sent.is_some_and(|sent| sent > 16), "{sent:?}");
}

#[test]
fn silent_and_unknown_connections_are_closed() {
    let mut owners = Owners::new();
    owners.serve();
    let silent: Vec<OwnedFd> = (0..2 * MAX_UNKNOWN).map(|_| connect(&owners.path(ONE)).expect("connects")).collect();
    owners.serve();
    assert_eq!(owners.of(ONE).unknown.len(), MAX_UNKNOWN);
    let stranger = connect(&owners.path(ONE)).expect("connects");
    transmit(&stranger, &Packet::Greeting { version: VERSION, card: CardId(9) }).expect("sent");
    let old = connect(&owners.path(ONE)).expect("connects");
    transmit(&old, &Packet::Greeting { version: VERSION + 1, card: TWO }).expect("sent");
    owners.serve();
    owners.now += GREETING_NS;
    let news = owners.serve();
    assert!(owners.of(ONE).unknown.is_empty() && news[&ONE].is_empty(), "the other owner stays connected");
    for socket in silent.iter().chain([&stranger, &old]) {
        assert!(matches!(receive(socket), Ok(None) | Err(Errno::CONNRESET)));
    }
}

#[test]
fn stopped_owner_is_asked_again_after_its_time() {
    let mut owners = Owners::new();
    owners.links.remove(&ONE);
    // The socket accepts connections, but no owner reads from them.
    let listener = cuda_protocol::Link::listen(&owners.path(ONE)).expect("listens");
    owners.serve();
    assert_eq!(owners.of(TWO).next_due(0), Some(GREETING_NS));
    owners.now = GREETING_NS;
    assert!(owners.serve()[&TWO].is_empty());
    drop(listener);
    owners.start(ONE);
    owners.retry();
    assert_eq!(owners.retry()[&TWO], [], "it was reached before");
    owners.of(TWO).send(ONE, message(1), 0);
    assert_eq!(owners.serve()[&ONE], [LinkEvent::Said(TWO, message(1))]);
}

#[test]
fn peer_that_is_no_longer_needed_is_lost() {
    let mut owners = Owners::new();
    owners.serve();
    owners.of(ONE).set_peers(&BTreeMap::new());
    assert_eq!(owners.of(ONE).next_due(5), Some(0), "events are pending");
    assert_eq!(owners.serve()[&ONE], [LinkEvent::Lost(TWO)]);
    assert_eq!(owners.retry()[&ONE], [], "its owner is rejected");
}
