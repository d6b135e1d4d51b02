//! Tests of `GET /v1/events`: authors, kinds, cursors, and the limits of streams.

use super::*;
use api::{AuthorKind, EventKind, EventPage, SubjectKind};
use std::io::{BufRead, BufReader};

/// Returns all events in the daemon's log.
fn all(client: &Client) -> EventPage {
    client.get("/v1/events?limit=1024").unwrap()
}

/// Waits for an event of this kind about the named object, and returns it.
fn awaited(client: &Client, kind: EventKind, name: &str) -> api::Event {
    let mut found = None;
    eventually(&format!("an event {kind:?} of {name}"), || {
        found = all(client).events.into_iter().find(|event| event.kind == kind && event.subject.name == name);
        found.is_some()
    });
    found.unwrap()
}

fn kinds(page: &EventPage) -> Vec<EventKind> {
    page.events.iter().map(|event| event.kind).collect()
}

/// Follows the events through a socket. Returns the status line, and then each page as a line of JSON.
fn followed(served: &Served, socket: &str, query: &str) -> impl Iterator<Item = String> + use<> {
    let mut stream = UnixStream::connect(served.fixture.path(socket)).unwrap();
    stream.set_read_timeout(Some(WAIT_TIMEOUT)).unwrap();
    write!(stream, "GET /v1/events?{query} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n").unwrap();
    let lines = BufReader::new(stream).lines().map_while(Result::ok);
    lines.filter(|line| line.starts_with('{') || line.starts_with("HTTP/"))
}

fn page(line: &str) -> EventPage {
    serde_json::from_str(line).unwrap_or_else(|error| panic!("{error}: {line}"))
}

#[test]
fn changes_have_the_client_as_their_author() {
    let served = Served::new();
    let client = served.client();
    let start = all(&client);
    assert_eq!(kinds(&start), [EventKind::Started]);
    let _: api::Vm = client.post("/v1/vms", &api::AddVm::new("a", "card0", 64)).unwrap();
    client.delete("/v1/vms/a").unwrap();
    // A rejected change causes no event.
    refused(client.post::<api::Vm>("/v1/vms", &api::AddVm::new("b", "card9", 64)));
    let body = json!({ "vm": [{ "name": "c", "card": "card1", "vram_mib": 64 }] });
    client.request(Method::PATCH, "/v1/desired", body.to_string().into()).unwrap();
    // Both sockets serve the same events.
    let changes: EventPage = served.reader().get(&format!("/v1/events?after={}", start.next)).unwrap();
    assert_eq!(kinds(&changes), [EventKind::Added, EventKind::Removed, EventKind::Added, EventKind::Applied]);
    let own = i32::try_from(std::process::id()).unwrap();
    for event in &changes.events {
        assert_eq!((event.author.kind, event.author.pid), (AuthorKind::Client, Some(own)), "{event:?}");
        assert_eq!(event.author.uid, Some(rustix::process::getuid().as_raw()));
        assert!(event.author.program.is_some() && event.at.ends_with('Z'), "{event:?}");
    }
    let [added, .., applied] = changes.events.as_slice() else { panic!("{changes:?}") };
    assert_eq!(
        (added.subject.kind, &*added.subject.name, added.card.as_deref()),
        (SubjectKind::Vm, "a", Some("card0"))
    );
    assert_eq!((&*added.text, &*applied.text), ("added to card `card0`", "a desired state: VM `c` is added"));
    // The author is cleared at the end of the request, although its thread continues to run.
    served.fixture.daemon.remove("c").unwrap();
    assert_eq!(all(&client).events.last().unwrap().author.kind, AuthorKind::Daemon);
}

#[test]
fn configured_vms_have_the_configuration_as_author() {
    let served = one_card("[[vm]]\nname = \"web\"\ncard = \"card0\"\nvram_mib = 16\n");
    let events = all(&served.client()).events;
    assert_eq!((events[1].kind, events[1].author.kind), (EventKind::Added, AuthorKind::Configuration), "{events:?}");
}

#[test]
fn set_keys_are_named_and_drain_and_moves_have_begin_and_end() {
    let more = "[[card]]\nname = \"card1\"\nkind = \"simgpu\"\nvram_mib = 128\n[[vm]]\nname = \"a\"\ncard = \"card0\"\nvram_mib = 16\n";
    let served = one_card(more);
    let client = served.client();
    let start = all(&client).next;
    for (path, body) in [
        ("/v1/vms/a/time", json!({ "weight": 7 })),
        ("/v1/vms/a/memory", json!({ "quota_mib": 16 })),
        ("/v1/cards/card0/scheduler", json!({ "strikes": 4 })),
        ("/v1/cards/card0/memory", json!({ "low_water_mib": 4 })),
    ] {
        client.request(Method::PATCH, path, body.to_string().into()).unwrap();
    }
    for path in ["/v1/vms/a/release", "/v1/cards/card0/drain", "/v1/cards/card0/undrain"] {
        client.request(Method::POST, path, Default::default()).unwrap();
    }
    let page: EventPage = client.get(&format!("/v1/events?after={start}")).unwrap();
    let shown: Vec<_> = page.events.iter().map(|event| (event.kind, &*event.subject.name)).collect();
    let expected = [
        (EventKind::Changed, "a"),
        (EventKind::Changed, "a"),
        (EventKind::Changed, "card0"),
        (EventKind::Changed, "card0"),
        (EventKind::Released, "a"),
        (EventKind::DrainBegan, "card0"),
        (EventKind::MoveBegan, "a"),
        (EventKind::Moved, "a"),
        (EventKind::Drained, "card0"),
        (EventKind::Undrained, "card0"),
    ];
    assert_eq!(shown, expected);
    let text = |at: usize| &*page.events[at].text;
    assert_eq!((text(0), text(2)), ("set: time.weight = 7", "set: scheduler.strikes = 4"));
    assert_eq!((text(1), text(3)), ("set: memory.quota_mib = 16", "set: memory.low_water_mib = 4"));
    assert_eq!(text(6), "moves to card `card1`: its card is drained");
    assert!(page.events.iter().all(|event| event.author.kind == AuthorKind::Client), "{page:?}");
}

#[test]
fn kill_quarantine_and_connection_are_found_without_an_author() {
    let served = one_card(
        "residue = \"keep\"\nscheduler = { strikes = 1 }\nfault = [{ engine = \"graph\", kind = \"hang\", after = 0, count = 1 }]\n",
    );
    let client = served.client();
    let _: api::Vm = client.post("/v1/vms", &api::AddVm::new("a", "card0", 16)).unwrap();
    let _: api::VmTime = client.patch("/v1/vms/a/time", &json!({ "max_run_ms": 50 })).unwrap();
    let (mut guest, mut channel) = guest(&served, "a");
    let connected = awaited(&client, EventKind::Connected, "a");
    assert!(connected.text.contains("VMM, user "), "{connected:?}");
    copy(&mut guest, &mut channel);
    let killed = awaited(&client, EventKind::Killed, "a");
    assert_eq!(killed.text, "a submission was killed for exceeding the time limit");
    let quarantined = awaited(&client, EventKind::Quarantined, "a");
    assert!(quarantined.text.contains("`mediatorctl sched release a`"), "{quarantined:?}");
    awaited(&client, EventKind::Overran, "a");
    assert!(killed.number < quarantined.number && killed.card.as_deref() == Some("card0"));
    assert_eq!((killed.author.kind, quarantined.author.kind), (AuthorKind::Daemon, AuthorKind::Daemon));
    client.request(Method::POST, "/v1/vms/a/release", Default::default()).unwrap();
    let released = awaited(&client, EventKind::Released, "a");
    assert_eq!(released.author.kind, AuthorKind::Client);
    drop(guest);
    awaited(&client, EventKind::Disconnected, "a");
}

#[test]
fn kill_right_before_removal_is_an_event() {
    let served = one_card(
        "residue = \"keep\"\nfault = [{ engine = \"graph\", kind = \"hang\", after = 0, count = 1 }]\n[[vm]]\nname = \"a\"\n\
         card = \"card0\"\nvram_mib = 16\ntime.max_run_ms = 50\n",
    );
    let client = served.client();
    let (mut guest, mut channel) = guest(&served, "a");
    copy(&mut guest, &mut channel);
    let killed = || {
        let card: api::CardScheduler = client.get("/v1/cards/card0/scheduler").unwrap();
        card.vms[0].engines.values().any(|engine| engine.killed > 0)
    };
    eventually("the VM's work is killed", killed);
    // Remove the VM between two comparisons of the state, which run once per second.
    client.delete("/v1/vms/a").unwrap();
    let page = all(&client);
    let at = |kind| page.events.iter().position(|event| event.kind == kind);
    assert!(at(EventKind::Killed).is_some() && at(EventKind::Killed) < at(EventKind::Removed), "{page:?}");
    let killed = &page.events[at(EventKind::Killed).unwrap()];
    assert_eq!(killed.author.kind, AuthorKind::Daemon, "the originator of the removal did not kill the work");
    drop(guest);
}

#[test]
fn failed_card_is_an_event() {
    let served = one_card("[[vm]]\nname = \"a\"\ncard = \"card0\"\nvram_mib = 16\n");
    let host = served.fixture.daemon.host_of("card0").unwrap();
    let panics = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
        let _state = host.lock();
        panic!("injected");
    }));
    assert!(panics.is_err());
    let failed = awaited(&served.client(), EventKind::Failed, "card0");
    assert!(failed.text.starts_with("the card is out of service: "), "{failed:?}");
}

#[test]
fn bad_cursor_and_query_are_refused_with_a_remedy() {
    let served = Served::new();
    let client = served.client();
    let error = refused(client.get::<EventPage>("/v1/events?after=yesterday"));
    assert_eq!((error.code, &*error.error), (ErrorCode::Invalid, "after: `yesterday` is not a cursor"));
    assert!(error.what_to_do.contains("`next` of an earlier response"), "{error:?}");
    for (query, what) in [("limit=0", "limit = 0"), ("limit=1025", "limit = 1025"), ("wait_s=61", "wait_s = 61")] {
        let error = refused(client.get::<EventPage>(&format!("/v1/events?{query}")));
        assert!(error.error.contains(what) && error.code == ErrorCode::Invalid, "{error:?}");
    }
    let error = refused(client.get::<EventPage>("/v1/events?since=1"));
    assert!(error.error.contains("unknown field `since`"), "{error:?}");
    let other: EventPage = client.get("/v1/events?after=1f-5").unwrap();
    assert!(other.restarted && other.note.is_some() && other.events.len() == 1, "{other:?}");
}

#[test]
fn waiting_request_is_answered_by_the_next_event() {
    let served = Served::new();
    let next = all(&served.client()).next;
    let waits = served.reader();
    let path = format!("/v1/events?after={next}&wait_s=60");
    let waiting = std::thread::spawn(move || waits.get::<EventPage>(&path).unwrap());
    let _: api::Vm = served.client().post("/v1/vms", &api::AddVm::new("a", "card0", 64)).unwrap();
    assert_eq!(waiting.join().unwrap().events[0].kind, EventKind::Added);
    // No event occurs during this request.
    let next = all(&served.client()).next;
    let empty: EventPage = served.client().get(&format!("/v1/events?after={next}&wait_s=1")).unwrap();
    assert_eq!((empty.events.len(), empty.next), (0, next));
}

#[test]
fn stream_has_events_as_they_happen_and_ends_with_the_daemon() {
    let mut served = Served::new();
    let client = served.client();
    let mut lines = followed(&served, "read.sock", "follow=true");
    assert!(lines.next().unwrap().contains("200"));
    let first = page(&lines.next().unwrap());
    assert_eq!(kinds(&first), [EventKind::Started]);
    let mut cursor = first.next;
    for name in ["a", "b"] {
        let _: api::Vm = client.post("/v1/vms", &api::AddVm::new(name, "card0", 64)).unwrap();
        let next = page(&lines.next().unwrap());
        assert_eq!((&*next.events[0].subject.name, next.events.len(), next.lost), (name, 1, 0));
        assert_ne!(next.next, cursor);
        cursor = next.next;
    }
    // At shutdown, the daemon does not wait for clients that follow its events.
    served.end().unwrap();
    assert_eq!(lines.next(), None);
}

#[test]
fn followers_of_one_socket_are_bounded_and_leave_places() {
    let served = Served::new();
    let begin = |socket: &str| {
        let mut lines = followed(&served, socket, "follow=true");
        (lines.next().unwrap(), lines)
    };
    let mut followers: Vec<_> = (0..::events::http::MAX_FOLLOWERS).map(|_| begin("read.sock")).collect();
    assert!(followers.iter().all(|(status, _)| status.contains("200")));
    let error = refused(served.reader().get::<EventPage>("/v1/events?follow=true"));
    assert_eq!(error.code, ErrorCode::Conflict);
    assert!(
        error.error.starts_with("16 clients of this socket already wait") && !error.what_to_do.is_empty(),
        "{error:?}"
    );
    // Other requests are not affected, and neither is the operator's socket.
    all(&served.reader());
    assert!(begin("admin.sock").0.contains("200"));
    drop(followers.pop());
    eventually("another client can follow events", || begin("read.sock").0.contains("200"));
}

#[test]
fn stalled_follower_takes_no_memory_and_learns_its_loss() {
    let served = Served::new();
    let mut lines = followed(&served, "admin.sock", "follow=true&limit=1024");
    assert!(lines.next().unwrap().contains("200"));
    // These events overflow the log and all buffers between it and the follower, which is not reading.
    let text = "x".repeat(1000);
    let add = |n: usize| {
        let event = ::events::NewEvent::vm(EventKind::Changed, &format!("vm{n}"), &*text);
        served.fixture.daemon.events.add(event);
    };
    (0..900).for_each(add);
    std::thread::sleep(Duration::from_millis(100));
    // Each object has its own rate limit window, and the number of open windows is limited.
    (0..40).for_each(|round| {
        (0..900).for_each(|n| {
            if (n + round) % 9 == 0 {
                add(n)
            }
        });
    });
    let last = all(&served.client());
    let mut pages = 0;
    let (mut seen, mut lost) = (0, 0);
    let from = |cursor: &str| cursor.rsplit_once('-').unwrap().1.parse::<u64>().unwrap();
    for line in lines {
        let next = page(&line);
        (seen, lost, pages) = (seen + next.events.len() as u64, lost + next.lost, pages + 1);
        // The daemon may have logged further events since then.
        if from(&next.next) >= from(&last.next) {
            assert_eq!(seen + lost, from(&next.next), "each event is either read or counted as lost");
            break;
        }
    }
    assert!(pages > 1 && lost > 0, "{pages} pages, {lost} lost");
}
