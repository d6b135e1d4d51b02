//! Tests profiles: virtual machines created from them, their placement, and how many more instances fit.

use super::*;
use mediatord::fixture::one_card;
use serde_json::Value;

/// Starts a daemon with profiles and two cards, each with 120 MiB for virtual machines.
fn served() -> Served {
    one_card(
        "reserve_mib = 8\n[[card]]\nname = \"card1\"\nkind = \"simgpu\"\nvram_mib = 128\nreserve_mib = 8\n\
         [[profile]]\nname = \"half\"\nvram_mib = 60\nweight = 300\nclass = \"interactive\"\n\
         [[profile]]\nname = \"whole\"\nvram_mib = 120\nchannels = 8\n",
    )
}

fn good(served: &Served, arguments: &[&str]) -> String {
    let ran = ctl(served, arguments);
    assert_eq!(ran.code, Code::Good, "{arguments:?}: {}", ran.err);
    ran.out
}

fn json(served: &Served, arguments: &[&str]) -> Value {
    serde_json::from_str(&good(served, &[&["--json"], arguments].concat())).unwrap()
}

/// Returns how many more instances of a profile fit on each card.
fn left(served: &Served, profile: &str) -> Vec<u64> {
    let shown = json(served, &["profile", "show", profile]);
    shown["cards"].as_array().unwrap().iter().map(|card| card["left"].as_u64().unwrap()).collect()
}

#[test]
fn a_vm_is_made_from_a_profile_where_most_room_is() {
    let served = served();
    assert_eq!((left(&served, "half"), left(&served, "whole")), (vec![2, 2], vec![1, 1]));
    for (name, card) in [("a", "card0"), ("b", "card1"), ("c", "card0")] {
        let vm = json(&served, &["vm", "add", name, "--profile", "half"]);
        assert_eq!((vm["card"].as_str(), vm["profile"].as_str()), (Some(card), Some("half")), "{name}");
    }
    let time = json(&served, &["export"]);
    assert_eq!(time["vm"][0]["time"]["weight"], 300);
    assert_eq!((left(&served, "half"), left(&served, "whole")), (vec![0, 1], vec![0, 0]));
    let ran = ctl(&served, &["vm", "add", "d", "--profile", "whole"]);
    assert_eq!(ran.code, Code::Conflict);
    assert!(
        ran.err
            .contains("VM `d`: card: no card has enough free capacity: `card0` (vram_mib: 120 MiB, expected at most 0"),
        "{}",
        ran.err
    );
    assert!(ran.err.contains("`card1` (vram_mib: 120 MiB, expected at most 60"), "{}", ran.err);
    // Options take precedence over the profile.
    let vm = json(&served, &["vm", "add", "d", "--profile", "half", "--weight", "100", "--channels", "4"]);
    assert_eq!((vm["card"].as_str(), vm["channels_limit"].as_u64()), (Some("card1"), Some(4)));
    assert_eq!(json(&served, &["export"])["vm"][3]["time"]["weight"], 100);
    let table = good(&served, &["profile", "list"]);
    let rows: Vec<Vec<&str>> = table.lines().map(|line| line.split_whitespace().collect()).collect();
    assert_eq!(rows[1], ["half", "60", "300", "interactive", "card0", "2", "0"], "{table}");
    assert_eq!(rows[3], ["whole", "120", "-", "-", "card0", "0", "0"], "{table}");
    assert!(good(&served, &["profile", "show", "half"]).contains("expected at most 0: card `card1` has 128 MiB"));
}

#[test]
fn a_domain_of_libvirt_names_its_profile_and_needs_no_vm() {
    let served = served();
    let domain =
        good(&served, &["vm", "launch-args", "web", "--vmm", "libvirt", "--profile", "half", "--memory", "1G"]);
    let socket = served.fixture.path("web.sock").display().to_string();
    for part in ["vm='web' profile='half'/>", "<memory unit='MiB'>1024</memory>", &socket, "</domain>\n<!-- add disks"]
    {
        assert!(domain.contains(part), "{part}: {domain}");
    }
    for (arguments, code) in [
        (&["vm", "launch-args", "web", "--vmm", "libvirt", "--profile", "none"][..], Code::NotFound),
        (&["vm", "launch-args", "web", "--profile", "half"], Code::Usage),
        (&["vm", "launch-args", "web", "--vmm", "libvirt"], Code::NotFound),
        (&["vm", "launch-args", "a b", "--vmm", "libvirt", "--profile", "half"], Code::Usage),
    ] {
        assert_eq!(ctl(&served, arguments).code, code, "{arguments:?}");
    }
}

#[test]
fn unknown_profiles_and_missing_sizes_are_refused() {
    let served = served();
    for (arguments, what) in [
        (
            &["vm", "add", "a", "--profile", "none"][..],
            "profile: there is no profile `none`, expected `half` or `whole`",
        ),
        (&["tenant", "add", "a", "--profile", "none"], "profile: there is no profile `none`"),
        (&["vm", "add", "a"], "--vram-mib"),
        (&["vm", "add", "a", "--profile", "half", "--passthrough"], "cannot be used with"),
    ] {
        let ran = ctl(&served, arguments);
        assert_eq!(ran.code, Code::Usage, "{arguments:?}: {}", ran.err);
        assert!(ran.err.contains(what), "{arguments:?}: {}", ran.err);
    }
    // None of the cards accepts tenants.
    assert_eq!(ctl(&served, &["tenant", "add", "a", "--profile", "half"]).code, Code::NotFound);
}

#[test]
fn exported_state_with_profiles_matches_applied_state() {
    let served = served();
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("state.toml");
    let path = file.to_str().unwrap();
    std::fs::write(&file, "[[vm]]\nname = \"a\"\nprofile = \"whole\"\n[[vm]]\nname = \"b\"\nprofile = \"half\"\n")
        .unwrap();
    good(&served, &["apply", "-f", path]);
    assert_eq!(json(&served, &["vm", "show", "b"])["card"], "card1");
    good(&served, &["assert", "-f", path]);
    let exported = good(&served, &["export"]);
    std::fs::write(&file, exported).unwrap();
    good(&served, &["assert", "-f", path]);
    std::fs::write(&file, "[[vm]]\nname = \"c\"\nprofile = \"whole\"\n").unwrap();
    let ran = ctl(&served, &["apply", "-f", path]);
    assert_eq!(ran.code, Code::Conflict);
    assert!(ran.err.contains("VM `c`: card: no card has enough free capacity"), "{}", ran.err);
}
