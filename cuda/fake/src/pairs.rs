//! Pairs of contexts with peer access.

use std::ffi::c_int;
use std::sync::{Mutex, MutexGuard, PoisonError};

use crate::current::device_of;

/// Enabled pairs: the accessing context, and the context whose memory it can access.
static PAIRS: Mutex<Vec<(u64, u64)>> = Mutex::new(Vec::new());

fn pairs() -> MutexGuard<'static, Vec<(u64, u64)>> {
    PAIRS.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Adds or removes a pair. Returns false if a pair to add already exists or a pair to remove does not exist.
pub fn change(pair: (u64, u64), add: bool) -> bool {
    let mut pairs = pairs();
    if pairs.contains(&pair) == add {
        return false;
    }
    if add {
        pairs.push(pair);
    } else {
        pairs.retain(|known| *known != pair);
    }
    true
}

/// Returns the other devices that can access a device's memory from `cuMemAlloc`.
pub fn of(device: c_int) -> Vec<c_int> {
    let pairs = pairs();
    let found = pairs.iter().filter(|(_, to)| device_of(*to) == Some(device));
    found.filter_map(|(from, _)| device_of(*from)).collect()
}
