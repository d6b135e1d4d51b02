//! Shows the program only the tenant's cards, and the driver only these and the cards to which the program could move.
//!
//! The driver itself hides all other cards: it reads the variable [`VARIABLE`] in `cuInit`. During that call, the
//! variable lists the UUIDs of the cards, which determines the number, order and PCI addresses of the devices. The
//! variable's original value selects among the tenant's cards, and is restored afterwards. `abi::devices` hides the
//! cards after the tenant's cards.
//!
//! UNSAFETY: changes the environment.
#![allow(unsafe_code, reason = "see UNSAFETY")]

use std::ffi::c_int;
use std::path::Path;

use cuda_protocol::CardInfo;
use program_cards::{files, list};

use crate::driver::SUCCESS;
use crate::log::report;

/// Calls the driver's `cuInit` through `init`, with the tenant's cards and `others` in the environment. Calls must not
/// be concurrent.
pub fn initialise(cards: &[CardInfo], others: &[[u8; 16]], init: impl Fn() -> c_int) -> c_int {
    let before = std::env::var_os(list::VARIABLE);
    let chosen = before.as_ref().map(|list| list.to_string_lossy());
    let own: Vec<[u8; 16]> = cards.iter().map(|card| card.uuid).collect();
    let others = files::reachable(others, Path::new(files::CARDS), Path::new(files::DEVICES));
    let with = |others: &[[u8; 16]]| {
        // SAFETY: no thread may read the environment directly in the meantime, which is the same condition as for a
        // program that sets this variable before it uses CUDA. Threads that use functions of the C library or of Rust
        // see the old or the new value.
        unsafe { std::env::set_var(list::VARIABLE, list::arranged(chosen.as_deref(), &own, others)) };
        init()
    };
    let mut result = with(&others);
    if result != SUCCESS && !others.is_empty() {
        // A fault of another card must not stop the program.
        report!("cuInit fails with {result} with other cards visible: the program cannot move to another card");
        result = with(&[]);
    }
    match before {
        // SAFETY: as above.
        Some(list) => unsafe { std::env::set_var(list::VARIABLE, list) },
        // SAFETY: as above.
        None => unsafe { std::env::remove_var(list::VARIABLE) },
    }
    result
}
