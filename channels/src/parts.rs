//! A card and a guest as separate objects.

use crate::{GuestMemory, GuestRing, Host, Place, Unmapped, Unreadable};
use nvspec::addr::{GpuVa, VramAddr};
use nvspec::fifo::ChannelId;

/// A card, and the guest memory or ring to be read.
#[derive(Debug)]
pub struct Parts<'a, H, G> {
    /// Card interface.
    pub card: &'a mut H,
    /// Guest memory or ring.
    pub guest: &'a mut G,
}

impl<H: Host, G> Host for Parts<'_, H, G> {
    fn read32(&mut self, offset: u32) -> u32 {
        self.card.read32(offset)
    }

    fn write32(&mut self, offset: u32, value: u32) {
        self.card.write32(offset, value);
    }

    fn vram_read(&mut self, address: VramAddr, data: &mut [u8]) {
        self.card.vram_read(address, data);
    }

    fn vram_write(&mut self, address: VramAddr, data: &[u8]) {
        self.card.vram_write(address, data);
    }

    fn vram_flush(&mut self) {
        self.card.vram_flush();
    }

    fn userd_read(&mut self, channel: ChannelId, offset: u64) -> u32 {
        self.card.userd_read(channel, offset)
    }

    fn userd_write(&mut self, channel: ChannelId, offset: u64, value: u32) {
        self.card.userd_write(channel, offset, value);
    }
}

impl<H, G: GuestMemory> GuestMemory for Parts<'_, H, G> {
    fn read(&mut self, place: Place, data: &mut [u8]) -> Result<(), Unreadable> {
        self.guest.read(place, data)
    }
}

impl<H, G: GuestRing> GuestRing for Parts<'_, H, G> {
    fn read(&mut self, va: GpuVa, data: &mut [u8]) -> Result<(), Unmapped> {
        self.guest.read(va, data)
    }

    fn taken(&mut self, va: GpuVa, dwords: u32) {
        self.guest.taken(va, dwords);
    }
}
