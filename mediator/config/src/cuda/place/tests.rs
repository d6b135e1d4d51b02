use super::*;
use crate::Config;

/// Returns the tables of four CUDA cards with 64 GiB each, `a` to `d`, and of a software card, `vm`.
fn cards() -> String {
    let card = |name: &str| format!("[[card]]\nname = \"{name}\"\nkind = \"cuda\"\nvram_mib = 65536\n");
    ["a", "b", "c", "d"].map(card).concat() + "[[card]]\nname = \"vm\"\nkind = \"simgpu\"\n"
}

fn of_tenant(name: &str, more: &str) -> String {
    format!("[[tenant]]\nname = \"{name}\"\nvram_mib = 32768\n{more}")
}

/// Places the tenants of a file one after the other, and returns their cards.
fn placed(text: &str, links: &Links) -> Vec<String> {
    let config = Config::parse(text, "m.toml").expect("the file is valid");
    let mut there: Vec<TenantSpec> = Vec::new();
    for at in placement_order(&config.tenants) {
        let others: Vec<_> = there.iter().collect();
        let policy = (config.daemon.placement, links);
        there.push(config.tenants[at].clone().placed(policy, &config.cards, &[], &others));
    }
    there.iter().map(|tenant| format!("{}: {}", tenant.name, tenant.card_names().join(","))).collect()
}

fn mistakes(text: &str) -> String {
    Config::parse(text, "m.toml").map_or_else(|error| error.to_string(), |_| String::new())
}

fn nvlinks(pairs: &[(&str, &str)]) -> Links {
    let uuid = |name: &str| format!("GPU-{name}");
    let peers: Vec<_> = ["a", "b", "c", "d"]
        .into_iter()
        .map(|name| {
            let of = pairs.iter().filter_map(|(one, other)| match name {
                name if name == *one => Some(uuid(other)),
                name if name == *other => Some(uuid(one)),
                _ => None,
            });
            (name, uuid(name), of.map(|peer| (peer, 4)).collect())
        })
        .collect();
    Links::from_reports(peers.iter().map(|(name, uuid, peers)| (*name, uuid.as_str(), peers)))
}

#[test]
fn number_of_cards_is_placed_by_the_policy() {
    let (none, pairs) = (Links::default(), nvlinks(&[("a", "d"), ("b", "c")]));
    let first = of_tenant("x", "card = \"a\"\n");
    let two = |more: &str| of_tenant("y", &format!("cards = 2\n{more}"));
    let text = |more: &str, daemon: &str| format!("{daemon}{}{first}{}", cards(), two(more));
    for (more, daemon, links, expected) in [
        ("", "", &none, "y: b,c"),
        ("placement = \"pack\"\n", "", &none, "y: a,b"),
        ("placement = \"spread\"\n", "", &none, "y: b,c"),
        ("placement = \"nvlink\"\n", "", &pairs, "y: b,c"),
        ("", "[daemon]\nplacement = \"pack\"\n", &none, "y: a,b"),
        ("placement = \"spread\"\n", "[daemon]\nplacement = \"pack\"\n", &none, "y: b,c"),
        ("", "[daemon]\nplacement = \"nvlink\"\n", &nvlinks(&[("a", "d")]), "y: a,d"),
    ] {
        assert_eq!(placed(&text(more, daemon), links), ["x: a", expected], "{more} {daemon}");
    }
    // A tenant with one card uses the same policies.
    let one = format!("[daemon]\nplacement = \"pack\"\n{}{first}{}{}", cards(), of_tenant("y", ""), of_tenant("z", ""));
    assert_eq!(placed(&one, &none), ["x: a", "y: a", "z: b"]);
}

#[test]
fn cards_without_room_are_left_out() {
    let guarantee = "memory.guarantee_mib = 32768\n";
    let full = |card: &str| {
        of_tenant(card, &format!("card = \"{card}\"\nmemory.guarantee_mib = 49152\n")).replace("32768", "65536")
    };
    let text = format!("{}{}{}{}", cards(), of_tenant("y", &format!("cards = 2\n{guarantee}")), full("a"), full("c"));
    // Tenants with named cards are placed first, even if they come later in the file.
    assert_eq!(placed(&text, &Links::default()), ["a: a", "c: c", "y: b,d"]);
    let drained = text.replace("name = \"b\"\n", "name = \"b\"\ndrained = true\n");
    let found = mistakes(&drained);
    for part in [
        "tenant[0].cards: fewer than 2 cards are suitable: `a` (memory.guarantee_mib: 32768 MiB, expected at most the \
         16384 MiB of card `a`",
        "`b` (card: card `b` is drained",
        "`c` (memory.guarantee_mib",
        "`d` (suitable), `vm` (kind: it is of kind = \"simgpu\", expected \"cuda\")",
    ] {
        assert!(found.contains(part), "{part}: {found}");
    }
}

#[test]
fn wrong_numbers_of_cards_are_refused_by_name() {
    for (more, expected) in [
        ("cards = 0\n", "tenant[0].cards: 0, expected a number from 2, or the names of the cards"),
        ("cards = 1\n", "tenant[0].cards: 1, expected a number from 2; for one card"),
        ("cards = 5\n", "tenant[0].cards: 5, expected at most the 4 cards of kind = \"cuda\" of this host"),
        ("cards = 17\n", "tenant[0].cards: 17 cards, expected at most 16"),
        ("cards = -1\n", "expected a list with the names of cards, or the number of cards"),
        ("cards = \"2\"\n", "expected a list with the names of cards, or the number of cards"),
        ("cards = 1.5\n", "expected a list with the names of cards, or the number of cards"),
        ("cards = 2\ncard = \"a\"\n", "tenant[0].card: `a`, expected no such key with `cards`"),
        ("cards = 2\nshare_group = \"g\"\n", "tenant[0].share_group: `g`, expected no such key with `cards`"),
        ("cards = 2\non_stuck = \"suspend\"\n", "tenant[0].on_stuck: `suspend`"),
        (
            "cards = 2\nplacement = \"best\"\n",
            "unknown variant `best`, expected one of `room`, `pack`, `spread`, `nvlink`",
        ),
        ("cards = 2\nmemory.weight = 0\n", "tenant[0].memory.weight: 0"),
    ] {
        let found = mistakes(&(cards() + &of_tenant("y", more)));
        assert!(found.contains(expected), "{more}: {found}");
        assert_eq!(found.lines().count(), 1, "{more}: {found}");
    }
    let of_vms = "[[card]]\nname = \"vm\"\nkind = \"simgpu\"\n".to_owned() + &of_tenant("y", "cards = 2\n");
    assert!(mistakes(&of_vms).contains("tenant[0].cards: this host has no card of kind = \"cuda\""));
}

#[test]
fn chosen_cards_are_stored_as_names() {
    let table = |cards: Value| serde_json::json!({ "name": "y", "cards": cards, "vram_mib": 16 });
    let spec = |cards: Value| TenantSpec::from_table(table(cards).as_object().expect("a table")).expect("valid");
    let (open, chosen) = (spec(2.into()), spec(serde_json::json!(["a", "b"])));
    assert_eq!((open.first_card(), chosen.first_card()), ("", "a"));
    let stored = crate::patch::differences(
        &crate::patch::table(&open).expect("a table"),
        &crate::patch::table(&chosen).expect("a table"),
    );
    let stored: Vec<_> = stored.into_iter().map(|one| (one.key, one.from, one.to)).collect();
    assert_eq!(stored, [("cards".to_owned(), 2.into(), serde_json::json!(["a", "b"]))]);
    let values = stored.into_iter().map(|(key, _, to)| (key, to)).collect();
    assert_eq!(crate::patch::with(&open, &values).expect("valid"), chosen);
    // A document with the number describes the same tenant.
    let number = |count: u64| chosen.without_number(table(count.into()).as_object().expect("a table").clone());
    assert_eq!((number(2).contains_key("cards"), number(3).contains_key("cards")), (false, true));
}

#[test]
fn cards_on_the_command_line_are_names_or_a_number() {
    for (text, expected) in [
        ("2", Ok(TenantCards::Number(2))),
        ("a,b", Ok(vec!["a".to_owned(), "b".to_owned()].into())),
        ("0,1", Ok(vec!["0".to_owned(), "1".to_owned()].into())),
        ("a", Ok(vec!["a".to_owned()].into())),
        ("", Err(())),
        ("a,,b", Err(())),
        ("99999999999999999999", Err(())),
    ] {
        assert_eq!(text.parse::<TenantCards>().map_err(|_| ()), expected, "{text}");
    }
}
