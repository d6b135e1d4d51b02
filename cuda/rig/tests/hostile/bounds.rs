//! One message, or one tenant's many messages: no other tenant is delayed.

use std::os::unix::fs::PermissionsExt as _;
use std::time::Duration;

use cuda_protocol::{FixedKind, FromOwner, FromTenant, Share};

use crate::support::hostile::*;
use crate::support::{Rig, describe, owner, owner_by};

/// The neighbour works as before, and keeps its connection and its memory.
fn is_served(neighbour: &mut Neighbour) {
    neighbour.works();
    let report = neighbour.during(Duration::from_millis(500));
    assert!(report.kernels > 0 && report.refused == 0, "{report:?}");
    assert!(!neighbour.lost_connection(), "{}", neighbour.log());
}

/// A token of `chunks` of a client's chunks.
fn share(raw: &mut Raw, link: usize, chunks: u32) -> Share {
    let chunks = raw.allocate(link, 1, chunks);
    raw.say(link, FromTenant::Export { request: 2, chunks }, 1);
    raw.wait_for(link, |message| match message {
        FromOwner::Shared { share, .. } => Some(share),
        _ => None,
    })
}

#[test]
fn chunks_that_a_tenant_does_not_read_cost_no_neighbour_its_connection() {
    let rig = Rig::new(256);
    // Root is not subject to the limit of unread descriptors. The owner is to have rights of its own only, and
    // as few descriptors as let the attack reach the limit.
    let open = |mode| std::fs::Permissions::from_mode(mode);
    for folder in [rig.folder.path(), rig.socket().parent().expect("a folder")] {
        std::fs::set_permissions(folder, open(0o777)).expect("its own folder");
    }
    let prefix: &[&str] = if is_root() {
        &["prlimit", "--nofile=768:768", "setpriv", "--reuid", "4321", "--regid", "4321", "--clear-groups"]
    } else {
        &["prlimit", "--nofile=768:768"]
    };
    let serving = owner_by(&rig, prefix, 64, &["--quanta", "off"]);
    std::fs::set_permissions(rig.socket(), open(0o777)).expect("the owner's socket");
    let mut neighbour = Neighbour::start(&rig, "b", &[]);
    let mut raw = Raw::start(&rig, None);
    let (reader, _) = raw.hello("a", Through::Itself, Some(Manner::honest()));
    let share = share(&mut raw, reader, 16);
    for _ in 0..8 {
        // Nothing reads these.
        let deaf = raw.connect(Through::Itself, None);
        raw.say(deaf, FromTenant::Hello(hello("a", false)), 1);
        raw.say(deaf, FromTenant::Open { request: 3, share }, 60);
    }
    is_served(&mut neighbour);
    neighbour.end();
    drop(raw);
    describe(serving);
}

#[test]
fn silent_connections_leave_a_neighbour_its_own() {
    let rig = Rig::new(256);
    let serving = owner_by(&rig, &["prlimit", "--nofile=256:256"], 64, &["--quanta", "off"]);
    let mut neighbour = Neighbour::start(&rig, "b", &[]);
    let mut raw = Raw::start(&rig, None);
    let links: Vec<usize> = (0..187).map(|_| raw.connect(Through::Itself, Some(Manner::default()))).collect();
    is_served(&mut neighbour);
    // A program that comes now is let in, in the place of a silent one.
    let mut second = Neighbour::start(&rig, "b", &[]);
    is_served(&mut second);
    // All of them are ended after a while, without a word.
    for link in [links[0], links[186]] {
        let (_, closed) = raw.hear(link, 1, Duration::from_secs(30));
        assert!(closed);
    }
    is_served(&mut neighbour);
    second.end();
    neighbour.end();
    drop(raw);
    describe(serving);
}

#[test]
fn many_opens_and_their_end_do_not_hold_a_neighbour_up() {
    let rig = Rig::new(256);
    let serving = owner(&rig, 64, &["--quanta", "off"]);
    let mut neighbour = Neighbour::start(&rig, "b", &[]);
    let mut raw = Raw::start(&rig, None);
    let (reader, _) = raw.hello("a", Through::Itself, Some(Manner::honest()));
    let share = share(&mut raw, reader, 16);
    let mut others = Vec::new();
    for _ in 0..4 {
        let (link, _) = raw.hello("a", Through::Itself, Some(Manner::honest()));
        raw.say(link, FromTenant::Open { request: 3, share }, 2_500);
        others.push(link);
    }
    is_served(&mut neighbour);
    // 65,536 numbers of 16 chunks end at once.
    drop(raw);
    is_served(&mut neighbour);
    neighbour.end();
    describe(serving);
}

#[test]
fn requests_without_end_do_not_hold_a_neighbour_up() {
    let rig = Rig::new(256);
    let serving = owner(&rig, 64, &["--quanta", "off"]);
    let mut neighbour = Neighbour::start(&rig, "b", &[]);
    let mut raw = Raw::start(&rig, None);
    let (link, _) = raw.hello("a", Through::Itself, Some(Manner::honest()));
    let (card, kind, bytes) = (0, FixedKind::Driver, 48 << 20);
    for _ in 0..50 {
        raw.say(link, FromTenant::Fix { request: 1, card, kind, bytes }, 1);
        raw.say(link, FromTenant::Unfix { card, kind, bytes }, 1);
        raw.say(link, FromTenant::Allocate { request: 2, card, chunks: 1000 }, 20);
        raw.say(link, FromTenant::AskMemory { request: 3, card }, 20);
    }
    is_served(&mut neighbour);
    neighbour.end();
    drop(raw);
    describe(serving);
}

#[test]
fn a_program_of_any_number_of_threads_that_allocate_at_once_gets_what_there_is() {
    let rig = Rig::new(256);
    let serving = owner(&rig, 64, &["--quanta", "off"]);
    let mut neighbour = Neighbour::start(&rig, "b", &[]);
    // 64 MiB in chunks of 2 MiB. The others learn that there is no more.
    assert_eq!(rig.program("a", &["burst", "--threads", "100"]).end().trim(), "32 32");
    is_served(&mut neighbour);
    neighbour.end();
    describe(serving);
}
