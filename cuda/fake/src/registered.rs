//! Tracks the registered ranges of host memory.

use std::collections::BTreeMap;
use std::sync::{Mutex, PoisonError};

/// Registered ranges of this process, keyed by first address. Static, because the exported functions share them.
pub static REGISTERED: Mutex<BTreeMap<u64, u64>> = Mutex::new(BTreeMap::new());

/// Returns true if an address is in registered memory.
pub fn is_registered(at: u64) -> bool {
    let registered = REGISTERED.lock().unwrap_or_else(PoisonError::into_inner);
    registered.range(..=at).next_back().is_some_and(|(start, length)| at - start < *length)
}
