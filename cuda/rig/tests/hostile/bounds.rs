//! Tests that neither one message nor many messages from one tenant delay any other tenant.

use std::os::unix::fs::PermissionsExt as _;
use std::time::Duration;

use cuda_protocol::{FixedKind, FromOwner, FromTenant, Share};

use crate::support::hostile::*;
use crate::support::{Rig, describe, owner, owner_by};

/// Owner arguments that disable quanta, and keep turns from ending while a program is idle; see [`NEVER_IDLE`].
const QUIET: [&str; 4] = ["--quanta", "off", NEVER_IDLE[0], NEVER_IDLE[1]];

/// Connects a client that sends `Hello`, opens a token `times` times, and does not read replies.
fn open_deaf(raw: &mut Raw, share: Share, times: u32) -> usize {
    let deaf = raw.connect(Through::Itself, None);
    raw.say(deaf, FromTenant::Hello(hello("a", false)), 1);
    raw.say(deaf, FromTenant::Open { request: 3, share }, times);
    deaf
}

/// Allocates `chunks` chunks for a client, and returns their sharing token.
fn share(raw: &mut Raw, link: usize, chunks: u32) -> Share {
    let chunks = raw.allocate(link, 1, chunks);
    raw.say(link, FromTenant::Export { request: 2, chunks }, 1);
    raw.wait_for(link, |message| match message {
        FromOwner::Shared { share, .. } => Some(share),
        _ => None,
    })
}

#[test]
fn unread_chunks_do_not_disconnect_neighbour() {
    let rig = Rig::new(256);
    // The limit on unread descriptors does not apply to root. Run the owner unprivileged, with so few descriptors that
    // the attack reaches the limit.
    let open = |mode| std::fs::Permissions::from_mode(mode);
    for folder in [rig.folder.path(), rig.socket().parent().expect("a folder")] {
        std::fs::set_permissions(folder, open(0o777)).expect("its own folder");
    }
    let prefix: &[&str] = if is_root() {
        &["prlimit", "--nofile=768:768", "setpriv", "--reuid", "4321", "--regid", "4321", "--clear-groups"]
    } else {
        &["prlimit", "--nofile=768:768"]
    };
    let mut serving = owner_by(&rig, prefix, 64, &QUIET);
    std::fs::set_permissions(rig.socket(), open(0o777)).expect("the owner's socket");
    let mut neighbour = Neighbour::start(&rig, "b", &[]);
    let mut raw = Raw::start(&rig, None);
    let (reader, _) = raw.hello("a", Through::Itself, Some(Manner::honest()));
    let share = share(&mut raw, reader, 16);
    for _ in 0..8 {
        // No thread reads these connections, and they stay open.
        open_deaf(&mut raw, share, 60);
    }
    assert_has_share(&mut serving, &mut neighbour, 1000);
    // Use a new process each time, because the owner kills processes that continue without their connections.
    let attack = |times| {
        let mut other = Raw::start(&rig, None);
        for _ in 0..4 {
            open_deaf(&mut other, share, times);
        }
    };
    // A well-behaved client opens the token only once.
    assert_keeps(&mut serving, &mut neighbour, || attack(1), || attack(60));
    neighbour.end();
    drop(raw);
    describe(serving);
}

#[test]
fn silent_connections_leave_a_neighbour_its_own() {
    let rig = Rig::new(256);
    let mut serving = owner_by(&rig, &["prlimit", "--nofile=256:256"], 64, &QUIET);
    let mut neighbour = Neighbour::start(&rig, "b", &[]);
    let mut raw = Raw::start(&rig, None);
    let links: Vec<usize> = (0..187).map(|_| raw.connect(Through::Itself, Some(Manner::default()))).collect();
    assert_has_share(&mut serving, &mut neighbour, 1000);
    // A new connection replaces a silent one.
    let mut second = Neighbour::start(&rig, "b", &["--kernel-us", "100"]);
    assert_has_share(&mut serving, &mut second, 1000);
    // The owner closes the remaining silent connections after a while, without a message.
    for link in [links[0], links[186]] {
        let (_, closed) = raw.hear(link, 1, Duration::from_secs(30));
        assert!(closed);
    }
    second.end();
    let raw = std::cell::RefCell::new(raw);
    let connect = |count| {
        let raw = &mut *raw.borrow_mut();
        let links: Vec<usize> = (0..count).map(|_| raw.connect(Through::Itself, Some(Manner::default()))).collect();
        links.into_iter().for_each(|link| raw.close(link));
    };
    assert_keeps(&mut serving, &mut neighbour, || connect(1), || connect(187));
    neighbour.end();
    drop(raw);
    describe(serving);
}

#[test]
fn many_opens_and_their_end_do_not_hold_a_neighbour_up() {
    let rig = Rig::new(256);
    let mut serving = owner(&rig, 64, &QUIET);
    let mut neighbour = Neighbour::start(&rig, "b", &[]);
    let mut raw = Raw::start(&rig, None);
    let (reader, _) = raw.hello("a", Through::Itself, Some(Manner::honest()));
    let share = share(&mut raw, reader, 16);
    // Use a new process each time, because the owner kills processes that continue without their connections.
    let attack = |times| {
        let mut other = Raw::start(&rig, None);
        for _ in 0..4 {
            let (link, _) = other.hello("a", Through::Itself, Some(Manner::honest()));
            other.say(link, FromTenant::Open { request: 3, share }, times);
        }
        // Dropping `other` closes connections with up to 65,536 chunk numbers at the same time.
    };
    assert_keeps(&mut serving, &mut neighbour, || attack(1), || attack(2_500));
    drop(raw);
    assert_has_share(&mut serving, &mut neighbour, 1000);
    neighbour.end();
    describe(serving);
}

#[test]
fn requests_without_end_do_not_hold_a_neighbour_up() {
    let rig = Rig::new(256);
    let mut serving = owner(&rig, 64, &QUIET);
    let mut neighbour = Neighbour::start(&rig, "b", &[]);
    let mut raw = Raw::start(&rig, None);
    let (link, _) = raw.hello("a", Through::Itself, Some(Manner::honest()));
    let (card, kind, bytes) = (0, FixedKind::Driver, 48 << 20);
    let mut ask = |rounds: u32, bytes: u64, chunks: u32, times: u32| {
        for _ in 0..rounds {
            raw.say(link, FromTenant::Fix { request: 1, card, kind, bytes }, 1);
            raw.say(link, FromTenant::Unfix { card, kind, bytes }, 1);
            raw.say(link, FromTenant::Allocate { request: 2, card, chunks }, times);
            raw.say(link, FromTenant::AskMemory { request: 3, card }, times);
        }
    };
    ask(1, bytes, 1000, 20);
    let ask = std::cell::RefCell::new(ask);
    // A well-behaved client requests the available chunks only once. These chunks are freed when the client exits.
    assert_keeps(
        &mut serving,
        &mut neighbour,
        || ask.borrow_mut()(1, 2 << 20, 1, 1),
        || ask.borrow_mut()(50, bytes, 1000, 20),
    );
    neighbour.end();
    drop(raw);
    describe(serving);
}

#[test]
fn many_threads_allocating_at_once_get_all_available_memory() {
    let rig = Rig::new(256);
    let mut serving = owner(&rig, 64, &QUIET);
    let mut neighbour = Neighbour::start(&rig, "b", &[]);
    // The card has 64 MiB in chunks of 2 MiB. The other threads get an out-of-memory error.
    let burst = |threads: &str| rig.program("a", &["burst", "--threads", threads]).end();
    assert_eq!(burst("100").trim(), "32 32");
    assert_has_share(&mut serving, &mut neighbour, 1000);
    // The neighbour's requests for 2 MiB get only host memory while a program occupies the whole card.
    assert_keeps(&mut serving, &mut neighbour, || drop(burst("2")), || drop(burst("100")));
    neighbour.end();
    describe(serving);
}
