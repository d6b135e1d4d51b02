//! Tests placement on cards, with a table of cases and with random cases.

use proptest::prelude::*;

use super::*;
use crate::{Config, LabelMatch, Labels, VmMemory, check};

/// Returns cards with 1024, 1024 and 512 MiB, each with 32 MiB reserved.
fn cards() -> Vec<CardSpec> {
    let card = |name: &str, mib: u64| {
        format!("[[card]]\nname = \"{name}\"\nkind = \"simgpu\"\nvram_mib = {mib}\nreserve_mib = 32\n")
    };
    let text = [card("a", 1024), card("b", 1024), card("small", 512)].concat();
    Config::parse(&text, "test").unwrap().cards
}

fn daemon(placement: Placement) -> DaemonSpec {
    DaemonSpec { placement, ..DaemonSpec::default() }
}

fn labelled(text: &str) -> Labels {
    text.split_once('=').map(|(key, value)| (key.to_owned(), value.to_owned())).into_iter().collect()
}

fn matches(text: &[&str]) -> Vec<LabelMatch> {
    text.iter().map(|text| text.parse().unwrap()).collect()
}

/// A VM: its card, VRAM in MiB, and label.
type Known = (&'static str, u64, &'static str);

fn there(vms: &[Known]) -> Vec<VmSpec> {
    let one = |(index, (card, mib, labels)): (usize, &Known)| VmSpec {
        labels: labelled(labels),
        ..VmSpec::new(&format!("vm{index}"), card, *mib)
    };
    vms.iter().enumerate().map(one).collect()
}

fn placed(vm: &VmSpec, placement: Placement, cards: &[CardSpec], others: &[VmSpec]) -> String {
    let others: Vec<&VmSpec> = others.iter().collect();
    vm.clone().placed(&daemon(placement), cards, &others).card
}

#[test]
fn policies_choose_card_by_room_packing_or_vm_count() {
    // The expected cards are those for the policies room, pack and spread.
    let cases: [(&str, &[Known], [&str; 3]); 5] = [
        ("the first of equal cards", &[], ["a", "small", "a"]),
        ("the free capacity of each card counts", &[("a", 256, "")], ["b", "a", "b"]),
        ("so does the number of VMs", &[("a", 256, ""), ("b", 64, ""), ("b", 64, "")], ["b", "a", "small"]),
        ("full cards are excluded", &[("a", 992, ""), ("b", 64, "")], ["b", "b", "small"]),
        ("the small card is fuller", &[("a", 64, ""), ("small", 64, "")], ["b", "small", "b"]),
    ];
    for (what, others, expected) in cases {
        let vm = VmSpec::new("new", "", 64);
        let found = [Placement::Room, Placement::Pack, Placement::Spread]
            .map(|policy| placed(&vm, policy, &cards(), &there(others)));
        assert_eq!(found, expected, "{what}");
    }
}

#[test]
fn drained_card_is_skipped_and_named_when_none_remains() {
    let mut cards = cards();
    (cards[0].drained, cards[1].drained) = (true, true);
    let vm = VmSpec::new("new", "", 64);
    assert_eq!(placed(&vm, Placement::Room, &cards, &[]), "small");
    cards[2].drained = true;
    assert_eq!(placed(&vm, Placement::Room, &cards, &[]), "");
    let refusals = check::vm(&vm, &daemon(Placement::Room), &cards, &[]);
    assert_eq!(refusals.len(), 1, "{refusals:?}");
    let (kind, what) = (refusals[0].kind, &refusals[0].what);
    assert_eq!(kind, RefusalKind::Quota);
    assert!(what.contains("`small` (card: card `small` is drained") && what.contains("card undrain small"), "{what}");
    // A VM that is already on the card stays valid.
    assert_eq!(check::vm(&VmSpec::new("old", "a", 64), &daemon(Placement::Room), &cards, &[]), []);
}

#[test]
fn vm_goes_where_one_is_that_it_is_to_be_near_to() {
    let others = there(&[("a", 512, "app=web"), ("small", 64, "app=db")]);
    let near = |labels: &[&str], mib| VmSpec { near: matches(labels), ..VmSpec::new("new", "", mib) };
    for (labels, expected) in [
        (&["app=web"][..], "a"),
        (&["app=db"], "small"),
        (&["app"], "a"),
        (&["zone", "app=db"], "small"),
        (&["zone"], "b"),
    ] {
        assert_eq!(placed(&near(labels, 64), Placement::Room, &cards(), &others), expected, "{labels:?}");
    }
    // If that card has too little capacity, the VM is not placed on another card.
    let large = near(&["app=db"], 480);
    assert_eq!(placed(&large, Placement::Room, &cards(), &others), "");
    let beside: Vec<&VmSpec> = others.iter().collect();
    let what = check::vm(&large, &daemon(Placement::Room), &cards(), &beside).remove(0).what;
    assert!(what.contains("`b` (near: card `small` has a VM to which this VM must be near"), "{what}");
    // A VM on a drained card does not attract other VMs.
    let mut drained = cards();
    drained[2].drained = true;
    assert_eq!(placed(&large, Placement::Room, &drained, &others), "b");
    // A VM with a configured card is placed there.
    let named = VmSpec { card: "b".to_owned(), ..near(&["app=db"], 64) };
    assert_eq!(check::vm(&named, &daemon(Placement::Room), &cards(), &beside), []);
}

#[test]
fn vms_that_are_apart_are_never_on_one_card_whichever_says_it() {
    let others = there(&[("a", 64, "app=web"), ("b", 64, "app=db")]);
    let apart = |labels: &[&str], card: &str| VmSpec { apart_from: matches(labels), ..VmSpec::new("new", card, 64) };
    let refused = |vm: &VmSpec, others: &[VmSpec]| {
        let others: Vec<&VmSpec> = others.iter().collect();
        let refusals = check::vm(vm, &daemon(Placement::Room), &cards(), &others);
        refusals.into_iter().map(|refusal| (refusal.kind, refusal.field, refusal.what)).collect::<Vec<_>>()
    };
    for (labels, expected) in [(&["app=web"][..], "b"), (&["app=db"], "a"), (&["app"], "small"), (&["zone"], "a")] {
        assert_eq!(placed(&apart(labels, ""), Placement::Room, &cards(), &others), expected, "{labels:?}");
    }
    let what = "`app=web` is a label of VM `vm0` on card `a`, expected another card".to_owned();
    assert_eq!(refused(&apart(&["app=web"], "a"), &others), [(RefusalKind::Conflict, "apart_from", what)]);
    // Conversely, an existing VM may have to stay apart.
    let lone = [apart(&["app=web"], "a")];
    let web = VmSpec { labels: labelled("app=web"), ..VmSpec::new("web", "a", 64) };
    let what = "VM `new` is apart from `app=web`, a label of this one, and is on card `a`, expected another card";
    assert_eq!(refused(&web, &lone), [(RefusalKind::Conflict, "apart_from", what.to_owned())]);
    assert_eq!(placed(&VmSpec { card: String::new(), ..web }, Placement::Room, &cards(), &lone), "b");
    // Every card has such a VM, so no card is suitable.
    let all = there(&[("a", 64, "x=1"), ("b", 64, "x=2"), ("small", 64, "x=3")]);
    assert_eq!(refused(&apart(&["x"], ""), &all)[0].1, "card");
    assert!(refused(&apart(&["x"], ""), &all)[0].2.contains("`b` (apart_from: `x` is a label of VM `vm1` on card `b`"));
}

#[test]
fn invalid_labels_and_tables_are_rejected_with_location() {
    let mistake = |text: &str| Config::parse(text, "f").unwrap_err().to_string();
    let vm = "[[card]]\nname = \"a\"\nkind = \"simgpu\"\n[[vm]]\nname = \"a\"\ncard = \"a\"\nvram_mib = 64\n";
    let text = mistake(&format!("{vm}near = [\"App\"]\n"));
    assert!(text.contains("vm[0].near") && text.contains("write KEY or KEY=VALUE"), "{text}");
    let many: Vec<String> = (0..17).map(|n| format!("\"k{n}\"")).collect();
    let text = mistake(&format!("{vm}apart_from = [{}]\n", many.join(",")));
    assert_eq!(text, "f:8:14: vm[0].apart_from: 17 labels, expected at most 16");
    let text = mistake("[daemon]\nplacement = \"best\"\n");
    assert!(
        text.contains("daemon.placement: unknown variant `best`, expected one of `room`, `pack`, `spread`"),
        "{text}"
    );
    for (line, expected) in [
        ("every_s = 4", "daemon.rebalance.every_s: 4, expected 5 to 86400"),
        ("above_percent = 0", "daemon.rebalance.above_percent: 0, expected 1 to 100"),
        ("for_rounds = 0", "daemon.rebalance.for_rounds: 0, expected 1 to 1000"),
        ("rest_s = 9999999", "daemon.rebalance.rest_s: 9999999, expected 0 to 2592000"),
    ] {
        let text = mistake(&format!("[daemon.rebalance]\n{line}\n"));
        assert!(text.starts_with("f:2:") && text.ends_with(expected), "{text}");
    }
    let spec = Config::parse("[daemon.rebalance]\n", "f").unwrap().daemon.rebalance.unwrap();
    assert_eq!((spec.every_s, spec.above_percent, spec.for_rounds, spec.rest_s), (60, 25, 3, 600));
    assert_eq!(Config::parse("", "f").unwrap().daemon.rebalance, None);
}

proptest! {
    #[test]
    fn chosen_card_fits_vm_and_none_means_no_card_fits(
        placement in prop_oneof![Just(Placement::Room), Just(Placement::Pack), Just(Placement::Spread)],
        drained in proptest::collection::vec(any::<bool>(), 3),
        vms in proptest::collection::vec((1..30u64, 0..3u8, 0..4u8, 0..4u8), 0..12),
    ) {
        let mut cards = cards();
        for (card, drained) in cards.iter_mut().zip(drained) {
            card.drained = drained;
        }
        let daemon = daemon(placement);
        let names = ["app=0", "app=1", "app=2"];
        let mut there: Vec<VmSpec> = Vec::new();
        for (index, (size, label, near, away)) in vms.into_iter().enumerate() {
            let of = |which: u8| names.get(usize::from(which)).map(|name| name.parse().unwrap()).into_iter().collect();
            let vm = VmSpec {
                labels: labelled(names[usize::from(label)]),
                near: of(near),
                apart_from: of(away),
                memory: VmMemory { guarantee_mib: (size % 3 == 0).then_some(0), ..VmMemory::default() },
                ..VmSpec::new(&format!("vm{index}"), "", size * 16)
            };
            let others: Vec<&VmSpec> = there.iter().collect();
            let placed = vm.clone().placed(&daemon, &cards, &others);
            let refusals = check::vm(&placed, &daemon, &cards, &others);
            if placed.card.is_empty() {
                prop_assert_eq!(refusals.len(), 1);
                continue;
            }
            prop_assert_eq!(refusals, vec![]);
            prop_assert!(cards.iter().any(|card| card.name == placed.card && !card.drained));
            for other in others.iter().filter(|other| other.card == placed.card) {
                prop_assert_eq!(apart(&placed, other), None);
            }
            there.push(placed);
        }
    }
}

#[test]
fn card_that_refuses_for_two_reasons_names_both() {
    let mut vm = VmSpec::new("new", "", 9999);
    vm.memory.guarantee_mib = Some(9998);
    vm.channels = Some(999);
    let refusal = nowhere(&vm, &daemon(Placement::Room), &cards(), &[]).unwrap();
    assert_eq!(refusal.kind, RefusalKind::Invalid);
    let small = "`small` (channels: 999, expected 1 to 128; vram_mib: 9999 MiB, expected a multiple of the chunk of 2048 KiB; \
                 memory.guarantee_mib: 9998 MiB, expected at most 480";
    assert!(refusal.what.contains(small), "{}", refusal.what);
}
