//! The value of `CUDA_VISIBLE_DEVICES` for the driver's initialization.

/// NVIDIA's environment variable for the cards visible to a process.
pub const VARIABLE: &str = "CUDA_VISIBLE_DEVICES";

/// Returns the list for the driver: the tenant's cards `own`, or those that the program's own `list` selects, and then
/// `others`. The list is empty if the program selects no card.
///
/// The driver ignores all entries after an invalid one. The other cards follow the tenant's cards, so one that the
/// driver does not know has no effect on the tenant's cards.
#[must_use]
pub fn arranged(list: Option<&str>, own: &[[u8; 16]], others: &[[u8; 16]]) -> String {
    let own_names: Vec<String> = own.iter().map(name).collect();
    let mut seen: Vec<String> = match list {
        Some(list) => chosen(list, &own_names).into_iter().map(str::to_owned).collect(),
        None => own_names,
    };
    if !seen.is_empty() {
        seen.extend(others.iter().filter(|card| !own.contains(card)).map(name));
    }
    seen.join(",")
}

/// Formats a UUID like NVIDIA's tools and libraries.
fn name(uuid: &[u8; 16]) -> String {
    let hex: String = uuid.iter().map(|byte| format!("{byte:02x}")).collect();
    format!("GPU-{}-{}-{}-{}-{}", &hex[..8], &hex[8..12], &hex[12..16], &hex[16..20], &hex[20..])
}

/// Returns the tenant's cards selected by a list of indices or UUID prefixes. Like the driver, ignores all entries
/// after an invalid one.
fn chosen<'a>(list: &str, own: &'a [String]) -> Vec<&'a str> {
    let mut seen: Vec<&str> = Vec::new();
    for entry in list.split(',').map(str::trim) {
        let by_name = || own.iter().position(|name| entry.len() > 4 && name.starts_with(entry));
        let found = entry.parse::<usize>().ok().or_else(by_name).and_then(|at| own.get(at));
        match found {
            Some(found) if !seen.contains(&found.as_str()) => seen.push(found),
            _ => break,
        }
    }
    seen
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_list_chooses_among_the_tenants_cards_and_reaches_no_others() {
        let own = [[0x11; 16], [0x22; 16]].map(|uuid| name(&uuid));
        assert_eq!(own[0], "GPU-11111111-1111-1111-1111-111111111111");
        let both = [own[0].as_str(), own[1].as_str()];
        assert_eq!(chosen("0,1", &own), both);
        assert_eq!(chosen(" 1 , 0", &own), [both[1], both[0]]);
        assert_eq!(chosen(&format!("{},0", own[1]), &own), [both[1], both[0]]);
        assert_eq!(chosen("GPU-2222", &own), [both[1]]);
        for list in ["", "-1", "2", "GPU-33333333", "GPU-", "all", "MIG-1", "7,0"] {
            assert_eq!(chosen(list, &own), [""; 0], "{list}");
        }
        assert_eq!(chosen("1,5,0", &own), [both[1]]);
        assert_eq!(chosen("1,1", &own), [both[1]]);
    }

    #[test]
    fn other_cards_follow_the_tenants_card() {
        let (own, others) = ([[0x11; 16]], [[0x22; 16], [0x11; 16], [0x33; 16]]);
        let all = [[0x11; 16], [0x22; 16], [0x33; 16]].map(|uuid| name(&uuid)).join(",");
        for list in [None, Some("0"), Some("GPU-1111"), Some("0,1")] {
            assert_eq!(arranged(list, &own, &others), all, "{list:?}");
        }
        // A program without a card stays without one, and cannot select the other cards.
        for list in ["", "1", "-1", "GPU-22222222", "none"] {
            assert_eq!(arranged(Some(list), &own, &others), "", "{list}");
        }
        assert_eq!(
            arranged(Some("1,0"), &[[0x22; 16], [0x11; 16]], &[]),
            [[0x11; 16], [0x22; 16]].map(|u| name(&u)).join(",")
        );
    }
}
