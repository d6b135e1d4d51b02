use serde_json::json;

use super::*;

const CARDS: &str = "[[card]]\nname = \"one\"\nkind = \"simgpu\"\nvram_mib = 512\nreserve_mib = 64\n\
                     [[card]]\nname = \"two\"\nkind = \"simgpu\"\nvram_mib = 1024\nreserve_mib = 64\n\
                     [[card]]\nname = \"h100\"\nkind = \"cuda\"\nvram_mib = 4096\nmemory.host_mib = 4096\n\
                     [[profile]]\nname = \"half\"\nvram_mib = 448\nweight = 300\nclass = \"interactive\"\n\
                     memory.guarantee_mib = 448\ntime.cap_permille = 500\nchannels = 8\n\
                     [[profile]]\nname = \"small\"\nvram_mib = 64\n";

fn read(more: &str) -> Result<Config, String> {
    Config::parse(&format!("{CARDS}{more}"), "m.toml").map_err(|error| error.to_string())
}

fn vm(name: &str, more: &str) -> String {
    format!("[[vm]]\nname = \"{name}\"\n{more}\n")
}

#[test]
fn a_table_has_the_keys_of_its_profile_where_it_says_nothing() {
    let text = vm("a", "profile = \"half\"\ntime.weight = 100\nchannels = 9")
        + "[[tenant]]\nname = \"t\"\nprofile = \"half\"\nmemory.quota_mib = 448\n";
    let config = read(&text).unwrap();
    let a = &config.vms[0];
    assert_eq!((a.vram_mib, a.channels, a.profile.as_deref()), (Some(448), Some(9), Some("half")));
    // A value in the table takes precedence even if it equals the default.
    assert_eq!((a.time.weight, a.time.cap_permille, a.time.class), (100, 500, sched::LatencyClass::Interactive));
    assert_eq!((a.memory.weight, a.memory.guarantee_mib), (Some(300), Some(448)));
    let tenant = &config.tenants[0];
    assert_eq!((tenant.vram_mib, tenant.time.weight, tenant.memory.guarantee_mib), (448, 300, Some(448)));
    assert_eq!(tenant.memory.quota_mib, Some(448));
}

#[test]
fn a_virtual_machine_without_a_card_is_where_most_room_is() {
    let text = ["a", "b", "c"].map(|name| vm(name, "profile = \"half\"")).concat();
    let config = read(&text).unwrap();
    // The cards have 448 and 960 MiB left at first, then 448 and 512, and then 448 and 64.
    assert_eq!(config.vms.iter().map(|vm| vm.card.as_str()).collect::<Vec<_>>(), ["two", "two", "one"]);
    let error = read(&(text + &vm("d", "profile = \"half\""))).unwrap_err();
    assert!(
        error.contains("vm[3].card: no card has enough free capacity: `one` (memory.guarantee_mib: 448 MiB"),
        "{error}"
    );
    assert!(
        error.contains("expected at most 0: card `one`") && error.contains("`two` (memory.guarantee_mib"),
        "{error}"
    );
    assert!(error.contains("`h100` is of kind = \"cuda\""), "{error}");
}

#[test]
fn profiles_that_cannot_be_are_refused() {
    for (more, expected) in [
        ("[[profile]]\nname = \"small\"\nvram_mib = 16\n", "profile[2].name: `small` is also the name of profile[1]"),
        ("[[profile]]\nname = \"a b\"\nvram_mib = 16\n", "profile[2].name: \"a b\" is not a name"),
        ("[[profile]]\nname = \"c\"\nvram_mib = 16\nweight = 0\n", "profile[2]: no card can run it"),
        ("[[profile]]\nname = \"c\"\nvram_mib = 8192\nmemory.guarantee_mib = 8192\n", "profile[2]: no card can run it"),
        ("[[profile]]\nname = \"c\"\nvram_mib = 16\ncolour = 1\n", "profile[2].colour: unknown key `colour`"),
        (
            "[[vm]]\nname = \"a\"\nprofile = \"none\"\n",
            "vm[0].profile: there is no profile `none`, expected `half` or `small`",
        ),
        ("[[tenant]]\nname = \"a\"\n", "tenant[0].vram_mib: missing, expected MiB of memory or a `profile`"),
        ("[[vm]]\nname = \"a\"\ncard = \"one\"\n", "vm[0].vram_mib: missing"),
    ] {
        let error = read(more).unwrap_err();
        assert!(error.contains(expected), "{more}: {error}");
    }
}

#[test]
fn profile_fits_until_remaining_capacity_is_exceeded() {
    let config = read(&vm("a", "profile = \"half\"\ncard = \"two\"")).unwrap();
    let [half, small] = &config.profiles[..] else { panic!("{:?}", config.profiles) };
    let lacks = |profile: &ProfileSpec, card: usize| {
        profile.lacks(&config.daemon, &config.cards[card], &config.vms, &config.tenants)
    };
    assert_eq!((lacks(half, 0), lacks(half, 1), lacks(half, 2), lacks(small, 0)), (None, None, None, None));
    let mut vms = config.vms.clone();
    vms.extend(half.vm("b", "two"));
    let lack = half.lacks(&config.daemon, &config.cards[1], &vms, &[]).unwrap();
    assert!(lack.starts_with("memory.guarantee_mib: 448 MiB, expected at most 64: card `two`"), "{lack}");
}

#[test]
fn null_and_tables_are_merged_key_by_key() {
    let config = read("").unwrap();
    let table = |value: Value| value.as_object().cloned().unwrap();
    let own = table(json!({ "name": "a", "profile": "half", "vram_mib": null, "memory": { "quota_mib": 1 } }));
    let whole = expanded(&own, &config.profiles, Of::Vm).unwrap();
    assert_eq!(whole["vram_mib"], 448);
    assert_eq!(whole["memory"], json!({ "quota_mib": 1, "guarantee_mib": 448, "weight": 300 }));
    let none = table(json!({ "name": "a" }));
    assert_eq!(expanded(&none, &config.profiles, Of::Vm).unwrap(), none);
    let error = expanded(&table(json!({ "profile": 3 })), &config.profiles, Of::Vm).unwrap_err();
    assert_eq!(error, "profile: 3, expected the name of a profile");
}
