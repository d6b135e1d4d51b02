//! Cards behind VFIO: their keys, and the keys exclusive to software cards.

use serde::{Deserialize, Serialize};

use super::{CardKind, CardSpec};

/// Reset method of a card behind VFIO, used before the mediator takes over the card and after the card has failed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize, Serialize, schemars::JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum ResetWay {
    /// A function-level reset if the function supports it, otherwise a reset of the card's units.
    #[default]
    Auto,
    /// A reset of the bus and all its devices. Cards that must then run their VBIOS are lost until the host restarts.
    Bus,
    /// A reset of the card's units through registers.
    Units,
}

/// Returns the VFIO-related errors in a card's table, each with its key. Rules for all cards are checked elsewhere.
pub(super) fn card(card: &CardSpec, others: &[CardSpec]) -> Vec<(&'static str, String)> {
    let mut wrong = Vec::new();
    if card.kind != CardKind::Vfio {
        if card.address.is_some() {
            wrong.push(("address", "expected no such key unless kind = \"vfio\"".to_owned()));
        }
        if card.reset != ResetWay::default() {
            wrong.push(("reset", "expected no such key unless kind = \"vfio\"".to_owned()));
        }
        return wrong;
    }
    match card.address {
        None => {
            let what = "missing, expected the address of a PCI function such as \"0000:65:00.0\"; \
                        `mediatorctl card list --host` shows them";
            wrong.push(("address", what.to_owned()));
        }
        Some(address) => {
            if let Some(other) = others.iter().find(|other| other.address == Some(address)) {
                let what = format!("`{address}` is the address of card `{}`, expected another", other.name);
                wrong.push(("address", what));
            }
        }
    }
    let alien = [
        ("time", card.time.is_some()),
        ("profile", card.profile),
        ("flr", card.flr),
        ("fault", !card.faults.is_empty()),
    ];
    for (key, _) in alien.into_iter().filter(|(_, there)| *there) {
        wrong.push((key, "expected no such key unless kind = \"simgpu\"".to_owned()));
    }
    let sizes =
        [("bar1_mib", card.bar1_mib, super::default_bar1()), ("bar3_mib", card.bar3_mib, super::default_bar3())];
    for (key, _, _) in sizes.into_iter().filter(|(_, mib, default)| mib != default) {
        wrong.push((key, "expected no such key with kind = \"vfio\": the card has a fixed size".to_owned()));
    }
    wrong
}

#[cfg(test)]
mod tests {
    use crate::{Config, ResetWay};

    fn parsed(keys: &str) -> Result<Config, String> {
        let text = format!("[[card]]\nname = \"c\"\nkind = \"vfio\"\n{keys}\n");
        Config::parse(&text, "m.toml").map_err(|error| error.to_string())
    }

    #[test]
    fn vfio_card_is_parsed() {
        let config = parsed("address = \"0000:65:00.0\"\nvram_mib = 6144\nreset = \"bus\"").expect("the file is valid");
        let card = &config.cards[0];
        assert_eq!(
            (card.address.map(|address| address.to_string()), card.reset),
            (Some("0000:65:00.0".into()), ResetWay::Bus)
        );
    }

    #[test]
    fn config_errors_name_line_and_key() {
        for (keys, expected) in [
            (
                "",
                "m.toml:1:1: card[0].address: missing, expected the address of a PCI function such as \"0000:65:00.0\"",
            ),
            (
                "address = \"65:00.0\"",
                "m.toml:4:11: card[0].address: \"65:00.0\" is not a PCI function address, expected",
            ),
            ("address = 65", "m.toml:4:11: card[0].address: invalid type"),
            ("address = \"0000:65:00.0\"\nreset = \"flr\"", "m.toml:5:9: card[0].reset: unknown variant `flr`"),
            ("address = \"0000:65:00.0\"\nprofile = true", "m.toml:5:11: card[0].profile: expected no such key"),
            ("address = \"0000:65:00.0\"\nflr = true", "m.toml:5:7: card[0].flr: expected no such key"),
            ("address = \"0000:65:00.0\"\nbar1_mib = 256", "m.toml:5:12: card[0].bar1_mib: expected no such key"),
            ("address = \"0000:65:00.0\"\ntime.copy_mib_per_s = 1", "card[0].time: expected no such key"),
            (
                "address = \"0000:65:00.0\"\n[[card]]\nname = \"d\"\nkind = \"vfio\"\naddress = \"0000:65:00.0\"",
                "m.toml:8:11: card[1].address: `0000:65:00.0` is the address of card `c`, expected another",
            ),
            (
                "address = \"0000:65:00.0\"\n[[card]]\nname = \"d\"\nkind = \"simgpu\"\naddress = \"0000:66:00.0\"",
                "m.toml:8:11: card[1].address: expected no such key unless kind = \"vfio\"",
            ),
            ("address = \"0000:65:00.0\"\nvram_mib = 8", "m.toml:5:12: card[0].vram_mib: 8 MiB, expected 16 to 6144"),
        ] {
            let found = parsed(keys).unwrap_err();
            assert!(found.contains(expected), "{keys}: {found}");
        }
    }
}
