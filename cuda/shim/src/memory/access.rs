//! Access to a card's memory from the program's other cards.

use std::ffi::c_int;
use std::sync::atomic::Ordering;

use super::chunks::ChunkMemory;
use super::pages::Driver;
use super::{Memory, Operations};
use crate::driver::{Address, OUT_OF_MEMORY};
use crate::log::report;

impl Memory {
    /// Sets the address range of the card's region.
    pub(super) fn set_region(&self, base: Address, bytes: u64) {
        self.region.0.store(base, Ordering::SeqCst);
        self.region.1.store(base.saturating_add(bytes), Ordering::SeqCst);
    }

    /// Records that the program has memory of this card outside the region.
    pub fn set_elsewhere(&self) {
        self.elsewhere.store(true, Ordering::SeqCst);
    }

    /// Returns true if an address belongs to the program's memory on this card. Usually does not acquire a lock.
    pub fn has(&self, address: Address) -> bool {
        let (base, end) = (self.region.0.load(Ordering::SeqCst), self.region.1.load(Ordering::SeqCst));
        if (base..end).contains(&address) {
            return true;
        }
        let elsewhere =
            |memory: &ChunkMemory| memory.handles.find(address).is_some() || memory.opened.reserved(address, 1);
        self.elsewhere.load(Ordering::SeqCst) && elsewhere(&self.lock())
    }
}

impl Operations<'_> {
    /// Grants another device access to all current and future chunks of the card.
    pub fn add_peer(self, device: c_int) -> Result<(), c_int> {
        self.with(|memory| if memory.add_peer(device) { Ok(()) } else { Err(OUT_OF_MEMORY) })
    }

    /// Revokes another device's access to the card's chunks.
    pub fn remove_peer(self, device: c_int) {
        if !self.with(|memory| memory.remove_peer(device)) {
            report!("device {device} keeps its access to another card's memory");
        }
    }
}

impl ChunkMemory {
    /// Returns true on success. On failure, the device has no access.
    fn add_peer(&mut self, device: c_int) -> bool {
        if self.peers.contains(&device) {
            return true;
        }
        self.peers.push(device);
        let all = self.regions.iter_mut().all(|region| region.add_peer(&mut Driver, device));
        all || {
            self.remove_peer(device);
            false
        }
    }

    fn remove_peer(&mut self, device: c_int) -> bool {
        self.peers.retain(|peer| *peer != device);
        // Try each region, even after a failure.
        let mut all = true;
        for region in &mut self.regions {
            all &= region.remove_peer(&mut Driver, device);
        }
        all
    }
}
