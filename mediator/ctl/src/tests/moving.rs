//! Tests `vm move`, `card drain` and `card undrain`, and the placement of new virtual machines.

use super::*;
use api::{Card, DrainReport, Vm};

fn card_of(served: &Served, arguments: &[&str]) -> String {
    let ran = ctl(served, &[&["--json", "vm", "add"], arguments, &["--vram-mib", "64"]].concat());
    assert_eq!(ran.code, Code::Good, "{}", ran.err);
    serde_json::from_str::<Vm>(&ran.out).unwrap().card
}

#[test]
fn drained_card_rejects_new_vms_and_drain_exits_4_if_vms_remain() {
    let served = Served::new();
    let drained = |text: &str| {
        let lines: Vec<_> = text.lines().map(|line| line.split_whitespace().collect::<Vec<_>>()).collect();
        let column = lines[0].len() - 2;
        assert_eq!(lines[0][column], "DRAINED", "{text}");
        // Count the columns from the end, because two of the table's headings consist of two words.
        lines[1..].iter().map(|cells| cells[cells.len() - 2].to_owned()).collect::<Vec<_>>()
    };
    assert_eq!(drained(&ctl(&served, &["card", "list"]).out), ["no", "no"]);
    let ran = ctl(&served, &["card", "drain", "card0"]);
    assert_eq!(
        (ran.code, &*ran.out),
        (Code::Good, "card card0 accepts no new VMs and tenants\n\nno VMs or tenants are left on it\n")
    );
    assert_eq!(drained(&ctl(&served, &["card", "show"]).out), ["yes", "no"]);
    assert!(ctl(&served, &["card", "show", "card0"]).out.contains("drained"));
    let ran = ctl(&served, &["vm", "add", "a", "--card", "card0", "--vram-mib", "64"]);
    assert!(ran.code == Code::Conflict && ran.err.contains("`mediatorctl card undrain card0`"), "{}", ran.err);
    assert_eq!(card_of(&served, &["a"]), "card1");

    let ran = ctl(&served, &["--json", "card", "drain", "card1"]);
    let report: DrainReport = serde_json::from_str(&ran.out).unwrap();
    assert_eq!((ran.code, report.card.as_str(), report.moved.len()), (Code::Conflict, "card1", 0));
    assert_eq!(report.left.iter().map(|one| &*one.vm).collect::<Vec<_>>(), ["a"]);
    assert!(report.left[0].why.contains("card `card0` is drained"), "{report:?}");

    assert_eq!(ctl(&served, &["card", "undrain", "card0"]).out, "card card0 accepts VMs and tenants again\n");
    let card: Card = serde_json::from_str(&ctl(&served, &["--json", "card", "undrain", "card1"]).out).unwrap();
    assert!(!card.drained);
}

#[test]
fn impossible_move_or_drain_exits_with_code_and_cause() {
    let served = Served::new();
    added(&served, "a");
    let cases: [(&[&str], Code, &str); 6] = [
        (&["vm", "move", "z"], Code::NotFound, "there is no VM `z`"),
        (&["vm", "move", "a", "--card", "z"], Code::NotFound, "there is no card `z`"),
        (
            &["vm", "move", "a", "--card", "card0"],
            Code::Conflict,
            "VM `a` cannot move to card `card0`: it already has that card",
        ),
        (&["--if-revision", "0-0", "vm", "move", "a"], Code::Conflict, "revision conflict: expected 0-0"),
        (&["card", "drain", "z"], Code::NotFound, "there is no card `z`"),
        (&["card", "undrain", "z"], Code::NotFound, "there is no card `z`"),
    ];
    for (arguments, code, what) in cases {
        let ran = ctl(&served, arguments);
        assert_eq!(ran.code, code, "{arguments:?}: {}", ran.err);
        assert!(ran.err.contains(what), "{arguments:?}: {}", ran.err);
        assert_eq!(ctl_at("/nonexistent/admin.sock", arguments).code, Code::Unreachable, "{arguments:?}");
        assert_eq!(ctl(&served, &[arguments, &["--frobnicate"]].concat()).code, Code::Usage, "{arguments:?}");
    }
}

#[test]
fn labels_place_vms_near_or_apart() {
    let served = Served::new();
    assert_eq!(card_of(&served, &["web", "--label", "app=web"]), "card0");
    // `card1` has the most free capacity.
    assert_eq!(card_of(&served, &["cache", "--near", "app=web"]), "card0");
    assert_eq!(card_of(&served, &["db", "--apart-from", "app=web"]), "card1");
    let ran = ctl(&served, &["vm", "add", "x", "--card", "card0", "--vram-mib", "64", "--apart-from", "app"]);
    assert!(ran.code == Code::Conflict && ran.err.contains("apart_from: `app` is a label of VM `web`"), "{}", ran.err);
    assert_eq!(ctl(&served, &["vm", "add", "x", "--vram-mib", "64", "--near", "App"]).code, Code::Usage);
    let exported: api::Exported = serde_json::from_str(&ctl(&served, &["--json", "export"]).out).unwrap();
    assert_eq!(exported.vm[0].near[0].to_string(), "app=web");
}
