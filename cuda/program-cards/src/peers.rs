//! Peer access that the program has enabled between contexts.
//!
//! The driver applies `cuCtxEnablePeerAccess` only to its own allocations. Chunks are mappings, so `cuda-shim` sets
//! their access permissions itself, for each pair of devices with at least one enabled pair of contexts.

use std::collections::HashMap;
use std::ffi::c_int;
use std::sync::{Mutex, MutexGuard, PoisonError};

/// Access from one context to another context's memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Pair {
    /// Accessing context, and its device.
    pub from: (u64, c_int),
    /// Context that owns the memory, and its device.
    pub to: (u64, c_int),
}

/// The enabled pairs of contexts.
#[derive(Debug, Default)]
pub struct Peers {
    pairs: Mutex<Vec<Pair>>,
    /// Primary contexts, keyed by device.
    primaries: Mutex<HashMap<c_int, u64>>,
}

impl Peers {
    fn pairs(&self) -> MutexGuard<'_, Vec<Pair>> {
        self.pairs.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn primaries(&self) -> MutexGuard<'_, HashMap<c_int, u64>> {
        self.primaries.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Records the primary context of a device.
    pub fn set_primary(&self, device: c_int, context: u64) {
        self.primaries().insert(device, context);
    }

    /// Returns the primary context of a device, if the program has retained it.
    pub fn primary(&self, device: c_int) -> Option<u64> {
        self.primaries().get(&device).copied()
    }

    /// Records an enabled pair.
    pub fn add(&self, pair: Pair) {
        self.pairs().push(pair);
    }

    /// Removes the pairs that match `is_it`. Returns the pairs of devices that have no enabled pair left, each as the
    /// accessing device and the device that owns the memory.
    pub fn remove(&self, is_it: impl Fn(&Pair) -> bool) -> Vec<(c_int, c_int)> {
        let mut pairs = self.pairs();
        let removed: Vec<Pair> = pairs.extract_if(.., |pair| is_it(pair)).collect();
        let mut devices: Vec<_> = removed.iter().map(|pair| (pair.from.1, pair.to.1)).collect();
        devices.sort_unstable();
        devices.dedup();
        devices.retain(|&(from, to)| pairs.iter().all(|pair| (pair.from.1, pair.to.1) != (from, to)));
        devices
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn device_loses_access_with_its_last_pair_of_contexts() {
        let peers = Peers::default();
        for (from, to) in [((1, 0), (3, 1)), ((2, 0), (3, 1)), ((3, 1), (1, 0))] {
            peers.add(Pair { from, to });
        }
        assert_eq!(peers.remove(|pair| pair.from.0 == 1 && pair.to.0 == 3), [], "context 2 still has access");
        assert_eq!(peers.remove(|pair| pair.from.0 == 1 || pair.to.0 == 1), [(1, 0)]);
        assert_eq!(peers.remove(|pair| pair.to.0 == 3), [(0, 1)]);
    }
}
