//! Restricts the visible cards to the tenant's cards.
//!
//! The driver itself hides the other cards: it reads the variable [`VARIABLE`] in `cuInit`. During that call, the
//! variable lists the UUIDs of the tenant's cards, which determines the number, order and PCI addresses of the devices.
//! The variable's original value selects among the tenant's cards, and is restored afterwards.
//!
//! UNSAFETY: changes the environment.
#![allow(unsafe_code, reason = "see UNSAFETY")]

use std::ffi::c_int;

use cuda_protocol::CardInfo;

/// NVIDIA's environment variable for the cards visible to a process.
const VARIABLE: &str = "CUDA_VISIBLE_DEVICES";

/// Calls the driver's `cuInit` through `init`, with the tenant's cards in the environment. Must not be called
/// concurrently.
pub fn initialise(cards: &[CardInfo], init: impl FnOnce() -> c_int) -> c_int {
    let before = std::env::var_os(VARIABLE);
    let own: Vec<String> = cards.iter().map(|card| name(&card.uuid)).collect();
    let seen = match &before {
        Some(list) => chosen(&list.to_string_lossy(), &own),
        None => own.iter().map(String::as_str).collect(),
    };
    // SAFETY: no thread may read the environment directly meanwhile. The same holds for a program that sets this
    // variable itself before it uses CUDA. Threads that use functions of the C library or of Rust see the old or the
    // new value.
    unsafe { std::env::set_var(VARIABLE, seen.join(",")) };
    let result = init();
    match before {
        // SAFETY: as above.
        Some(list) => unsafe { std::env::set_var(VARIABLE, list) },
        // SAFETY: as above.
        None => unsafe { std::env::remove_var(VARIABLE) },
    }
    result
}

/// Formats a UUID like NVIDIA's tools and libraries.
fn name(uuid: &[u8; 16]) -> String {
    let hex: String = uuid.iter().map(|byte| format!("{byte:02x}")).collect();
    format!("GPU-{}-{}-{}-{}-{}", &hex[..8], &hex[8..12], &hex[12..16], &hex[16..20], &hex[20..])
}

/// Returns the tenant's cards that a list of indices or UUID prefixes selects. Like the driver, ignores all entries
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
}
