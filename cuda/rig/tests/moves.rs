//! Tests tenants that move between two cards of a daemon. Here, tenants with running programs cannot move; the tests of
//! the crate `tenant-move` move running programs.

mod support;

use support::Rig;
use support::daemon::*;

const CARDS: [&str; 2] = ["one", "two"];

/// Creates a rig with two cards. Tenants `a` and `b` are on the first card, and `c` is on the second.
fn two_cards(more: &str) -> Rig {
    let mut rig = rig(|rig| {
        let cards = [0, 1].map(|at| card(rig, CARDS[at], &format!("cuda.device = \"{at}\"\n")));
        cards.concat() + &tenant("a", "one", more) + &tenant("b", "one", "") + &tenant("c", "two", "")
    });
    rig.cards = 2;
    rig
}

fn card_of(rig: &Rig, name: &str) -> String {
    json(rig, &["tenant", "show", name])["card"].as_str().expect("a name").to_owned()
}

/// Returns true if the owner of a card lists a tenant.
fn is_listed(rig: &Rig, card: &str, name: &str) -> bool {
    let memory = json(rig, &["memory", "show", card]);
    memory["vms"].as_array().expect("a list").iter().any(|vm| vm["vm"] == name)
}

#[test]
fn idle_tenant_changes_its_card_and_keeps_it() {
    let rig = two_cards("time.weight = 200\n");
    let daemon = Daemon::start(&rig);
    let output = good(&rig, &["tenant", "move", "a", "--card", "two"]);
    assert!(output.starts_with("tenant a has moved from one to two: 0 programs"), "{output}");
    assert!(!is_listed(&rig, "one", "a") && is_listed(&rig, "two", "a"));
    daemon.kill();
    let _daemon = Daemon::start(&rig);
    assert_eq!(card_of(&rig, "a"), "two");
    assert_eq!(json(&rig, &["tenant", "show", "a"])["time"]["weight"], 200);
    assert_eq!(run(&rig, "a", &[], &["live", "--mib", "4"]).end(), "held 2");
}

#[test]
fn tenant_that_cannot_move_is_refused_by_name() {
    let mut rig = rig(|rig| {
        let cards = [("one", 0, ""), ("two", 1, ""), ("three", 2, "cuda.chunk_mib = 4\n")];
        let cards = cards.map(|(name, at, more)| {
            card(rig, name, &format!("cuda.device = \"{at}\"\n")).replace(
                "cuda.chunk_mib = 2\n",
                match more {
                    "" => "cuda.chunk_mib = 2\n",
                    more => more,
                },
            )
        });
        let group = tenant("g", "one", "share_group = \"team\"\nsharing = \"turns\"\n");
        let soft = "[[card]]\nname = \"soft\"\nkind = \"simgpu\"\nvram_mib = 64\n";
        let both = "[[tenant]]\nname = \"m\"\ncards = [\"one\", \"two\"]\nvram_mib = 64\n";
        let tenants = tenant("a", "one", "") + &tenant("f", "two", "memory.guarantee_mib = 56\n") + both;
        cards.concat() + soft + &tenants + &group
    });
    rig.cards = 3;
    let _daemon = Daemon::start(&rig);
    for (name, to, code, why) in [
        ("a", "one", 4, "it already has that card"),
        ("a", "three", 4, "its `cuda.chunk_mib` is 4, expected 2"),
        ("a", "soft", 4, "the card is not of kind `cuda`"),
        ("a", "none", 3, "there is no card `none`"),
        ("z", "two", 3, "there is no tenant `z`"),
        ("g", "two", 4, "it is in a share group"),
        ("m", "two", 4, "it has several cards"),
    ] {
        let text = bad(&rig, code, &["tenant", "move", name, "--card", to]);
        assert!(text.contains(why), "{name} {to}: {text}");
    }
    // The guarantee of the other card's tenant leaves too little memory for this one.
    good(&rig, &["tenant", "set", "a", "--guarantee-mib", "16"]);
    let text = bad(&rig, 4, &["tenant", "move", "a", "--card", "two"]);
    assert!(text.contains("memory.guarantee_mib"), "{text}");
    // A tenant with several cards stays, so the drain fails.
    bad(&rig, 4, &["card", "drain", "two"]);
    let text = bad(&rig, 4, &["tenant", "move", "a", "--card", "two"]);
    assert!(text.contains("the card is drained"), "{text}");
}

#[test]
fn tenant_with_running_program_stays_until_program_ends() {
    let rig = two_cards("");
    let _daemon = Daemon::start(&rig);
    let mut program = run(&rig, "a", &[], &["live", "--mib", "8"]);
    program.steps(2);
    let text = bad(&rig, 4, &["tenant", "move", "a", "--card", "two"]);
    assert!(text.contains("1 of its programs run") && text.contains("end them first"), "{text}");
    assert!(text.contains("the tenant and its programs continue"), "{text}");
    program.steps(2);
    assert_eq!(card_of(&rig, "a"), "one");
    assert_eq!(program.end(), "held 4");
    until(&rig, "a", "its memory is free", |a| programs(a) == 0);
    good(&rig, &["tenant", "move", "a", "--card", "two"]);
    assert_eq!(run(&rig, "a", &[], &["live", "--mib", "4"]).end(), "held 2");
}

#[test]
fn drained_card_loses_its_tenants_or_names_them() {
    let rig = two_cards("");
    let _daemon = Daemon::start(&rig);
    let mut program = run(&rig, "b", &[], &["live", "--mib", "8"]);
    program.steps(2);
    let output = ctl(&rig, &["--json", "card", "drain", "one"]);
    let report: serde_json::Value = serde_json::from_slice(&output.stdout).expect("JSON");
    assert_eq!(output.status.code(), Some(4), "{report}");
    assert_eq!(report["tenants"].as_array().map(Vec::len), Some(1), "{report}");
    assert_eq!((&report["tenants"][0]["tenant"], &report["tenants"][0]["to"]), (&"a".into(), &"two".into()));
    assert_eq!(report["left"][0]["vm"], "b", "{report}");
    assert!(report["left"][0]["why"].as_str().is_some_and(|why| why.contains("end them first")), "{report}");
    program.steps(2);
    assert_eq!(program.end(), "held 4");
    until(&rig, "b", "its memory is free", |b| programs(b) == 0);
    let text = good(&rig, &["card", "drain", "one"]);
    assert!(text.contains("no VMs or tenants are left on it"), "{text}");
    assert_eq!(["a", "b", "c"].map(|name| card_of(&rig, name)), ["two"; 3]);
}
