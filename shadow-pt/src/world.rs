//! Combines the interfaces that a synchronization needs in one object, so that its implementation borrows the card's
//! memory only once.

use crate::{Frame, Frames, GuestMemory, ShadowMemory, Unreadable};
use nvspec::addr::{Gpa, GuestVramAddr, Iova, Place, VramAddr};

/// Guest memory, granted memory, and card memory for shadow tables.
pub trait World: GuestMemory + Frames + ShadowMemory {}

impl<T: GuestMemory + Frames + ShadowMemory> World for T {}

/// A world that consists of three separate objects.
#[derive(Debug)]
pub struct Parts<'a, G, F, M> {
    /// Guest memory.
    pub guest: &'a mut G,
    /// Memory granted to the guest.
    pub frames: &'a mut F,
    /// Card memory for shadow tables.
    pub memory: &'a mut M,
}

impl<G: GuestMemory, F, M> GuestMemory for Parts<'_, G, F, M> {
    fn read(&mut self, place: Place, data: &mut [u8]) -> Result<(), Unreadable> {
        self.guest.read(place, data)
    }
}

impl<G, F: Frames, M> Frames for Parts<'_, G, F, M> {
    fn vram(&mut self, address: GuestVramAddr, len: u64) -> Option<Frame> {
        self.frames.vram(address, len)
    }

    fn ram(&mut self, address: Gpa, len: u64, write: bool) -> Option<Iova> {
        self.frames.ram(address, len, write)
    }
}

impl<G, F, M: ShadowMemory> ShadowMemory for Parts<'_, G, F, M> {
    fn alloc(&mut self, bytes: u64) -> Option<VramAddr> {
        self.memory.alloc(bytes)
    }

    fn free(&mut self, address: VramAddr, bytes: u64) {
        self.memory.free(address, bytes);
    }

    fn write(&mut self, address: VramAddr, data: &[u8]) {
        self.memory.write(address, data);
    }
}
