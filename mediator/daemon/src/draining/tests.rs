//! Tests which arrivals drained cards accept, and the order in which virtual machines leave.

use super::*;
use crate::fixture::{FakeOpener, Fixture, Released, config, daemon_table, start};
use ::config::Config;
use ::config::check::RefusalKind;
use api::ErrorCode;
use std::collections::HashMap;

fn moved(vm: &str) -> Moved {
    let (from, to) = ("card0".to_owned(), "card1".to_owned());
    Moved { vm: vm.to_owned(), from, to, pause_ms: 12, pause: api::PauseParts::default(), memory_mib: 64, total_ms: 90 }
}

fn immovable(vm: &str) -> DaemonError {
    DaemonError::Immovable { vm: vm.to_owned(), why: "no card has enough free capacity".to_owned() }
}

fn names(of: &[&str]) -> Vec<String> {
    of.iter().map(|name| (*name).to_owned()).collect()
}

#[test]
fn drain_retries_immovable_vms_while_others_leave() {
    let mut asked = Vec::new();
    let (done, left) = emptied(names(&["cache", "gone", "stuck", "web"]), |vm| {
        asked.push(vm.to_owned());
        match vm {
            // `cache` has an affinity to `web`.
            "cache" if !asked.contains(&"web".to_owned()) => Err(immovable(vm)),
            "gone" => Ok(None),
            "stuck" => Err(DaemonError::Failed("its guest does not release the card".to_owned())),
            _ => Ok(Some(moved(vm))),
        }
    });
    assert_eq!(asked, ["cache", "gone", "stuck", "web", "cache"], "a failed move is not retried");
    assert_eq!(done.iter().map(|one| &*one.vm).collect::<Vec<_>>(), ["web", "cache"]);
    assert_eq!(left, [Left { vm: "stuck".to_owned(), why: "its guest does not release the card".to_owned() }]);
    let mut asked = 0;
    let (done, left) = emptied(names(&["b", "a"]), |vm| {
        asked += 1;
        Err(immovable(vm))
    });
    assert_eq!((asked, done.len()), (2, 0), "no VM has moved, so there is no retry");
    assert_eq!(left.iter().map(|one| &*one.vm).collect::<Vec<_>>(), ["a", "b"]);
    assert!(left[0].why.ends_with("VM `a` cannot move to another card: no card has enough free capacity"), "{left:?}");
}

#[test]
fn drained_card_rejects_new_vms_until_undrained() {
    let fixture = Fixture::new();
    let daemon = &fixture.daemon;
    daemon.add(VmSpec::new("a", "card0", 64)).unwrap();
    let before = daemon.revision();
    let report = daemon.drain_if("card0", None).unwrap();
    assert_eq!((&*report.card, report.moved.len()), ("card0", 0));
    let why = &report.left[0].why;
    assert_eq!(report.left.iter().map(|one| &*one.vm).collect::<Vec<_>>(), ["a"]);
    assert!(why.starts_with("VM `a` cannot move to card `card1`: "), "it was tried, to the card with room: {why}");
    assert!(daemon.moves.text().contains("gpu_mediator_move_failures_total 1\n"));
    assert!(daemon.card("card0").unwrap().drained && !daemon.card("card1").unwrap().drained);
    assert_eq!(fixture.connect("a").read32(0, 0).unwrap(), 0, "it goes on");
    assert_ne!(daemon.revision(), before);

    let error = daemon.add(VmSpec::new("b", "card0", 64)).unwrap_err();
    assert_eq!(error.code(), ErrorCode::Conflict);
    assert!(error.to_string().contains("`mediatorctl card undrain card0`"), "{error}");
    assert_eq!(daemon.add(VmSpec::new("b", "", 64)).unwrap().card, "card1");
    let error = daemon.move_if("b", Some("card0"), None).unwrap_err();
    assert!(error.to_string().contains("cannot move to card `card0`: card: card `card0` is drained"), "{error}");
    // The policy has only the drained card to choose from.
    let error = daemon.move_if("b", None, None).unwrap_err();
    assert!(matches!(error, DaemonError::Immovable { .. }) && error.to_string().contains("drained"), "{error}");

    assert_eq!(daemon.drain_if("card0", None).unwrap().left.len(), 1, "again");
    daemon.remove("a").unwrap();
    assert_eq!(daemon.drain_if("card0", None).unwrap().left, []);
    assert!(!daemon.undrain_if("card0", None).unwrap().drained);
    assert_eq!(daemon.add(VmSpec::new("a", "card0", 64)).unwrap().card, "card0");
}

#[test]
fn move_rejection_names_obstacle() {
    let fixture = Fixture::new();
    let daemon = &fixture.daemon;
    let labelled = |name: &str, card: &str| VmSpec {
        labels: [("app".to_owned(), "web".to_owned())].into_iter().collect(),
        apart_from: vec!["app=web".parse().unwrap()],
        ..VmSpec::new(name, card, 64)
    };
    daemon.add(labelled("a", "card0")).unwrap();
    daemon.add(labelled("b", "card1")).unwrap();
    let refused = |vm: &str, card: Option<&str>, expected: Option<&str>| {
        let error = daemon.move_if(vm, card, expected).unwrap_err();
        (error.code(), error.to_string())
    };
    assert_eq!(refused("z", Some("card1"), None).0, ErrorCode::NotFound);
    assert_eq!(refused("a", Some("card9"), None).0, ErrorCode::NotFound);
    let (code, what) = refused("a", Some("card0"), None);
    assert_eq!((code, &*what), (ErrorCode::Conflict, "VM `a` cannot move to card `card0`: it already has that card"));
    let (_, what) = refused("a", Some("card1"), None);
    assert!(what.contains("apart_from: `app=web` is a label of VM `b` on card `card1`"), "{what}");
    let (_, what) = refused("a", None, None);
    assert!(
        what.starts_with("VM `a` cannot move to another card: no card has enough free capacity: `card1` (apart_from"),
        "{what}"
    );
    assert!(refused("a", Some("card1"), Some("0-0")).1.starts_with("revision conflict"), "another operator");
    assert!(matches!(daemon.drain_if("card0", Some("0-0")), Err(DaemonError::Changed { .. })));
    assert!(!daemon.card("card0").unwrap().drained);
    assert!(matches!(daemon.drain_if("card9", None), Err(DaemonError::NoCard(_))));
    assert!(daemon.moves.text().contains("gpu_mediator_move_failures_total 0\n"), "a refused move does not begin");

    daemon.remove("b").unwrap();
    daemon.add(VmSpec { passthrough: true, vram_mib: None, ..VmSpec::new("wired", "card1", 0) }).unwrap();
    assert!(refused("a", None, None).1.contains("VM `wired` uses card `card1` in passthrough"));
    let report = daemon.drain_if("card1", None).unwrap();
    assert!(
        report.left[0].why.contains("VM `wired` cannot move to another card: it uses its card in passthrough"),
        "{report:?}"
    );
}

#[test]
fn placement_policy_is_the_daemons() {
    let folder = tempfile::tempdir().unwrap();
    let mut config = config(folder.path(), &["card0", "card1", "card2"]);
    config.daemon.placement = ::config::Placement::Pack;
    config.cards[0].drained = true;
    // A VM stays on a drained card if the configuration file names the card for it. A VM without a card in the file is
    // placed elsewhere.
    config.vms = vec![VmSpec::new("old", "card0", 64)];
    let daemon = start(config, &FakeOpener(Released::default()), HashMap::new()).unwrap();
    let cards: Vec<_> = ["a", "b"].map(|name| daemon.add(VmSpec::new(name, "", 64)).unwrap().card).into();
    assert_eq!((cards, &*daemon.vm("old").unwrap().card), (names(&["card1", "card1"]), "card0"));
}

#[test]
fn mark_is_kept_over_a_restart_and_applied_from_a_file() {
    let folder = tempfile::tempdir().unwrap();
    let text = daemon_table(folder.path())
        + &format!("state_dir = \"{}/state\"\n", folder.path().display())
        + "[[card]]\nname = \"card0\"\nkind = \"simgpu\"\n[[card]]\nname = \"card1\"\nkind = \"simgpu\"\n";
    let begin = || {
        let (config, override_store) =
            overrides::OverrideStore::open(Config::parse(&text, "test").unwrap(), false).unwrap();
        crate::Daemon::start(config, &FakeOpener(Released::default()), crate::Sockets::default(), override_store)
            .unwrap()
    };
    let daemon = begin();
    daemon.add(VmSpec::new("a", "card0", 64)).unwrap();
    assert_eq!(daemon.drain_if("card0", None).unwrap().left.len(), 1);
    drop(daemon);

    let daemon = begin();
    assert!(daemon.card("card0").unwrap().drained, "the card stays drained after a restart");
    assert_eq!(daemon.vm("a").unwrap().card, "card0");
    assert!(daemon.export().card[0].drained);
    let desired = |drained: bool, vm: serde_json::Value| {
        let card = serde_json::json!({ "name": "card0", "drained": drained });
        serde_json::from_value::<api::Desired>(serde_json::json!({ "card": [card], "vm": vm })).unwrap()
    };
    // One document contains both the VM and the mark, and the mark applies.
    let vm = serde_json::json!([{ "name": "b", "card": "card0", "vram_mib": 64 }]);
    let error = daemon.apply(&desired(true, vm.clone()), false, false, None).unwrap_err();
    assert!(error.code() == ErrorCode::Conflict && error.to_string().contains("card `card0` is drained"), "{error}");
    daemon.apply(&desired(false, vm), false, false, None).unwrap();
    assert_eq!((daemon.vm("b").unwrap().card.as_str(), daemon.card("card0").unwrap().drained), ("card0", false));
    daemon.apply(&desired(true, serde_json::json!([])), false, false, None).unwrap();
    assert!(daemon.card("card0").unwrap().drained);
    drop(daemon);
    assert!(begin().card("card0").unwrap().drained);
}

#[test]
fn drained_card_rejects_new_vms_but_accepts_configured_ones() {
    let mut card = Config::parse("[[card]]\nname = \"a\"\nkind = \"simgpu\"\n", "test").unwrap().cards;
    assert_eq!(Arrival::New.refused("a", &card), None);
    card[0].drained = true;
    assert_eq!(Arrival::Configured.refused("a", &card), None);
    let refusal = Arrival::New.refused("a", &card).unwrap();
    assert_eq!((refusal.kind, refusal.field), (RefusalKind::Conflict, "card"));
    assert_eq!(Arrival::New.refused("b", &card), None);
}
