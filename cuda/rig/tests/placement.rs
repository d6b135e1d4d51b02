//! Tests tenants whose cards the daemon chooses, as processes on the fake driver with NVLink connections.

mod support;

use serde_json::{Value, json};
use support::Rig;
use support::daemon::{Daemon, bad, card, good, json as shown, run};

/// Creates a rig with four cards of 64 MiB, of which the first and the last are connected, and a configured tenant with
/// two cards.
fn four_cards() -> Rig {
    let mut rig = support::daemon::rig(|rig| {
        let cards = (0..4).map(|at| card(rig, &format!("gpu{at}"), &format!("cuda.device = \"{at}\"\n")));
        cards.collect::<String>()
            + "[[tenant]]\nname = \"train\"\ncards = 2\nplacement = \"nvlink\"\nvram_mib = 32\n\
               memory.guarantee_mib = 32\n"
    });
    (rig.cards, rig.nvlinks) = (4, "0-3:4");
    rig
}

fn cards_of(rig: &Rig, name: &str) -> Value {
    let tenant = shown(rig, &["tenant", "show", name]);
    if tenant["cards"].is_null() { tenant["card"].clone() } else { tenant["cards"].clone() }
}

fn add(rig: &Rig, name: &str, mib: &str, more: &[&str]) -> Value {
    good(rig, &[&["tenant", "add", name, "--vram-mib", mib], more].concat());
    cards_of(rig, name)
}

#[test]
fn chosen_cards_outlive_the_daemon_and_other_tenants() {
    let mut rig = four_cards();
    let daemon = Daemon::start(&rig);
    assert_eq!(cards_of(&rig, "train"), json!(["gpu0", "gpu3"]));
    // Test each policy while a tenant uses the connected cards.
    assert_eq!(add(&rig, "room", "32", &["--cards", "2"]), json!(["gpu1", "gpu2"]));
    assert_eq!(add(&rig, "packed", "16", &["--placement", "pack"]), json!("gpu0"));
    assert_eq!(add(&rig, "pair", "16", &["--cards", "2", "--placement", "nvlink"]), json!(["gpu0", "gpu3"]));
    assert_eq!(add(&rig, "spread", "16", &["--cards", "2", "--placement", "spread"]), json!(["gpu1", "gpu2"]));
    // The state contains the chosen cards' names, and the number of cards from the configuration file.
    let state = std::fs::read_to_string(rig.folder.path().join("state/state.json")).expect("readable");
    let state: Value = serde_json::from_str(&state).expect("JSON");
    assert_eq!(state["tenants_changed"]["train"]["cards"], json!({ "file": 2, "now": ["gpu0", "gpu3"] }));
    // The connected cards have no space for another tenant now, so a new choice would differ.
    good(&rig, &["tenant", "remove", "room"]);
    good(&rig, &["tenant", "remove", "spread"]);
    let mut program = run(&rig, "train", &[], &["live", "--mib", "16"]);
    program.steps(2);
    daemon.kill();
    let daemon = Daemon::start(&rig);
    for (name, expected) in
        [("train", json!(["gpu0", "gpu3"])), ("packed", json!("gpu0")), ("pair", json!(["gpu0", "gpu3"]))]
    {
        assert_eq!(cards_of(&rig, name), expected, "{name}");
    }
    program.steps(5);
    program.kill();
    // The tenant keeps its cards even without the connections.
    drop(daemon);
    rig.nvlinks = "";
    let _daemon = Daemon::start(&rig);
    assert_eq!(cards_of(&rig, "train"), json!(["gpu0", "gpu3"]));
    // A document may contain the number of cards. The daemon's export contains the cards' names.
    let file = rig.folder.path().join("desired.toml");
    let path = file.display().to_string();
    let apply = |text: &str| std::fs::write(&file, format!("[[tenant]]\nname = \"train\"\n{text}")).expect("written");
    apply("cards = 2\ntime.weight = 7\n");
    good(&rig, &["apply", "-f", &path]);
    assert_eq!(shown(&rig, &["tenant", "show", "train"])["time"]["weight"], 7);
    apply("cards = 3\n");
    assert!(bad(&rig, 4, &["apply", "-f", &path]).contains("tenant `train`: cards is "));
    std::fs::write(&file, good(&rig, &["export"])).expect("written");
    good(&rig, &["assert", "--exact", "-f", &path]);
}

#[test]
fn tenant_without_enough_suitable_cards_is_refused_by_card() {
    let rig = four_cards();
    let _daemon = Daemon::start(&rig);
    good(&rig, &["card", "drain", "gpu1"]);
    let refused = bad(&rig, 4, &["tenant", "add", "x", "--cards", "2", "--vram-mib", "64", "--guarantee-mib", "40"]);
    for part in [
        "cards: fewer than 2 cards are suitable: `gpu0` (memory.guarantee_mib: 40 MiB, expected at most the 32 MiB of card `gpu0`",
        "`gpu1` (card: card `gpu1` is drained",
        "`gpu2` (suitable)",
        "`gpu3` (memory.guarantee_mib: 40 MiB",
    ] {
        assert!(refused.contains(part), "{part}: {refused}");
    }
    for (arguments, code, expected) in [
        (&["--cards", "0"][..], 2, "cards: 0, expected a number from 2"),
        (&["--cards", "5"], 4, "cards: 5, expected at most the 4 cards of kind"),
        (&["--cards", "2", "--card", "gpu0"], 2, "cannot be used with"),
        (&["--cards", "2", "--placement", "best"], 2, "unknown variant `best`"),
    ] {
        let refused = bad(&rig, code, &[&["tenant", "add", "x", "--vram-mib", "16"], arguments].concat());
        assert!(refused.contains(expected), "{arguments:?}: {refused}");
    }
    assert_eq!(shown(&rig, &["tenant", "list"])["tenants"].as_array().expect("a list").len(), 1);
}
