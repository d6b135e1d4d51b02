//! PCI configuration space of the function: a modern virtio-gpu with MSI-X.
//!
//! The VMM emulates much of the space (BAR addresses, MSI-X delivery) and forwards the writes.
//!
//! Sources: PCI Local Bus 3.0 chapter 6; VIRTIO 1.2 section 4.1.4.

use saved_state::Invalid;

use crate::registers::{BAR0_BYTES, COMMON, DEVICE, ISR, MSIX_PBA, MSIX_TABLE, NOTIFY, NOTIFY_MULTIPLIER, VECTORS};

/// Size of the configuration space in bytes.
pub(crate) const CONFIG_BYTES: usize = 256;

/// Offset of the command register.
const COMMAND: usize = 0x04;
/// Writable bits of the command register: memory, bus master, and INTx disable.
const COMMAND_BITS: u16 = 0x0406;
const BUS_MASTER: u8 = 1 << 2;

/// Offset of BAR0, which contains the registers.
const BAR0: usize = 0x10;
/// Offset of BAR4, the 64-bit BAR for the window.
const BAR4: usize = 0x20;
/// Flags in BAR4: 64-bit, prefetchable.
const BAR_WIDE_PREFETCHABLE: u8 = 0x0c;

/// Offsets of the capabilities, in list order.
mod capability {
    pub(super) const COMMON: usize = 0x40;
    pub(super) const ISR: usize = 0x50;
    pub(super) const DEVICE: usize = 0x60;
    pub(super) const NOTIFY: usize = 0x70;
    pub(super) const SHARED_MEMORY: usize = 0x84;
    pub(super) const MSIX: usize = 0x9c;
}

/// Types of virtio capabilities.
mod kind {
    pub(super) const COMMON: u8 = 1;
    pub(super) const NOTIFY: u8 = 2;
    pub(super) const ISR: u8 = 3;
    pub(super) const DEVICE: u8 = 4;
    pub(super) const SHARED_MEMORY: u8 = 8;
}

/// ID of the host-visible window among the shared memory regions.
const HOST_VISIBLE: u8 = 1;
/// ID of a vendor-specific capability.
const VENDOR_SPECIFIC: u8 = 0x09;
/// ID of the MSI-X capability.
const MSIX: u8 = 0x11;

/// The function's configuration space.
#[derive(Clone, Debug)]
pub(crate) struct Config {
    bytes: [u8; CONFIG_BYTES],
    /// Mask of writable bits.
    writable: [u8; CONFIG_BYTES],
    initial: [u8; CONFIG_BYTES],
}

impl Config {
    /// Creates the configuration space of a function with a window of `window_bytes` bytes, a power of two.
    pub(crate) fn new(window_bytes: u64) -> Self {
        let mut image = Image { bytes: [0; CONFIG_BYTES], writable: [0; CONFIG_BYTES] };
        image.put(0x00, &0x1af4u16.to_le_bytes());
        image.put(0x02, &0x1050u16.to_le_bytes());
        // Status: the function has a capability list.
        image.put(0x06, &0x0010u16.to_le_bytes());
        // Revision 1, class of display controllers that are neither VGA nor 3D.
        image.put(0x08, &[1, 0x00, 0x80, 0x03]);
        image.put(0x2c, &0x1af4u16.to_le_bytes());
        image.put(0x2e, &0x1100u16.to_le_bytes());
        image.put(0x34, &[0x40]);
        image.put(BAR4, &[BAR_WIDE_PREFETCHABLE]);
        image.allow(COMMAND, &COMMAND_BITS.to_le_bytes());
        image.allow(BAR0, &(!BAR0_BYTES.wrapping_sub(1)).to_le_bytes()[..4]);
        image.allow(BAR4, &(!window_bytes.wrapping_sub(1)).to_le_bytes());
        // Interrupt line, for firmware.
        image.allow(0x3c, &[0xff]);
        for (at, next, kind, place) in [
            (capability::COMMON, capability::ISR, kind::COMMON, COMMON),
            (capability::ISR, capability::DEVICE, kind::ISR, ISR),
            (capability::DEVICE, capability::NOTIFY, kind::DEVICE, DEVICE),
            (capability::NOTIFY, capability::SHARED_MEMORY, kind::NOTIFY, NOTIFY),
        ] {
            let len = if kind == kind::NOTIFY { 20 } else { 16 };
            image.virtio(at, next, [len, kind, 0, 0], place.start, place.end.saturating_sub(place.start));
        }
        image.put(capability::NOTIFY.wrapping_add(16), &NOTIFY_MULTIPLIER.to_le_bytes());
        let [low, high] = [window_bytes & 0xffff_ffff, window_bytes >> 32];
        let shared = [24, kind::SHARED_MEMORY, 4, HOST_VISIBLE];
        image.virtio(capability::SHARED_MEMORY, capability::MSIX, shared, 0, low);
        image.put(capability::SHARED_MEMORY.wrapping_add(20), &high.to_le_bytes());
        let control = u16::from(VECTORS).wrapping_sub(1);
        image.put(capability::MSIX, &[MSIX, 0]);
        image.put(capability::MSIX.wrapping_add(2), &control.to_le_bytes());
        // The enable bit and the function mask bit.
        image.allow(capability::MSIX.wrapping_add(3), &[0xc0]);
        // The vector table and the pending bits are in BAR0.
        image.put(capability::MSIX.wrapping_add(4), &MSIX_TABLE.start.to_le_bytes()[..4]);
        image.put(capability::MSIX.wrapping_add(8), &MSIX_PBA.start.to_le_bytes()[..4]);
        let Image { bytes, writable } = image;
        Self { bytes, writable, initial: bytes }
    }

    /// Reads from `offset`. Bytes beyond the end read as zeros.
    pub(crate) fn read(&self, offset: u64, data: &mut [u8]) {
        let from = usize::try_from(offset).unwrap_or(CONFIG_BYTES);
        let bytes = self.bytes.iter().skip(from).copied().chain(std::iter::repeat(0));
        data.iter_mut().zip(bytes).for_each(|(to, byte)| *to = byte);
    }

    /// Writes at `offset`. Only writable bits change.
    pub(crate) fn write(&mut self, offset: u64, data: &[u8]) {
        let from = usize::try_from(offset).unwrap_or(CONFIG_BYTES);
        for ((byte, mask), new) in self.bytes.iter_mut().zip(self.writable).skip(from).zip(data) {
            *byte = (*byte & !mask) | (new & mask);
        }
    }

    /// Returns true if the function may access guest memory.
    pub(crate) fn is_bus_master(&self) -> bool {
        self.bytes.get(COMMAND).is_some_and(|command| command & BUS_MASTER != 0)
    }

    /// Restores the configuration space saved by another process.
    ///
    /// # Errors
    /// Returns an error if the configuration space belongs to another function.
    pub(crate) fn restore(&mut self, saved: &[u8]) -> Result<(), Invalid> {
        let other = || Invalid::new("the configuration space belongs to another function");
        let saved: [u8; CONFIG_BYTES] = saved.try_into().map_err(|_| other())?;
        let parts = saved.iter().zip(self.initial).zip(self.writable);
        let is_same = parts.into_iter().all(|((saved, initial), writable)| saved & !writable == initial & !writable);
        if !is_same {
            return Err(other());
        }
        self.bytes = saved;
        Ok(())
    }

    /// Resets the configuration space to its initial values.
    pub(crate) fn reset(&mut self) {
        self.bytes = self.initial;
    }
}

struct Image {
    bytes: [u8; CONFIG_BYTES],
    writable: [u8; CONFIG_BYTES],
}

impl Image {
    fn put(&mut self, at: usize, bytes: &[u8]) {
        self.bytes.iter_mut().skip(at).zip(bytes).for_each(|(to, byte)| *to = *byte);
    }

    fn allow(&mut self, at: usize, bits: &[u8]) {
        self.writable.iter_mut().skip(at).zip(bits).for_each(|(to, bits)| *to = *bits);
    }

    /// Adds a virtio capability, given its length, type, BAR and ID, and a location in the BAR.
    fn virtio(&mut self, at: usize, next: usize, what: [u8; 4], offset: u64, len: u64) {
        self.put(at, &[VENDOR_SPECIFIC, u8::try_from(next).unwrap_or(0)]);
        self.put(at.wrapping_add(2), &what);
        self.put(at.wrapping_add(8), &offset.to_le_bytes()[..4]);
        self.put(at.wrapping_add(12), &len.to_le_bytes()[..4]);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const WINDOW: u64 = 64 << 30;

    fn word(config: &Config, at: u64) -> u32 {
        let mut data = [0; 4];
        config.read(at, &mut data);
        u32::from_le_bytes(data)
    }

    #[test]
    fn driver_finds_virtio_capabilities() {
        let config = Config::new(WINDOW);
        assert_eq!([word(&config, 0), word(&config, 8), word(&config, 0x2c)], [0x1050_1af4, 0x0380_0001, 0x1100_1af4]);
        let mut found = Vec::new();
        let mut at = word(&config, 0x34) & 0xff;
        while at != 0 {
            let head = word(&config, at.into());
            let place = [word(&config, u64::from(at) + 8), word(&config, u64::from(at) + 12)];
            found.push((head & 0xff, head >> 24, place));
            at = head >> 8 & 0xff;
        }
        let virtio = [(1, 0, 0x38), (3, 0x1000, 4), (4, 0x2000, 16), (2, 0x3000, 0x1000), (8, 0, 0)];
        let virtio = virtio.map(|(kind, offset, len)| (9, kind, [offset, len]));
        assert_eq!(found[..5], virtio);
        assert_eq!(found[5], (0x11, 0, [0x7000, 0]));
        // The window: BAR4, region 1, 64 GiB.
        assert_eq!([0x84 + 4, 0x84 + 16, 0x84 + 20].map(|at| word(&config, at)), [0x0000_0104, 0, 16]);
        assert_eq!([0x9c, 0xa0].map(|at| word(&config, at)), [0x0002_0011, 0x6000]);
    }

    #[test]
    fn base_addresses_are_sized_by_ones() {
        let mut config = Config::new(WINDOW);
        for at in (0x10..0x28).step_by(4) {
            config.write(at, &[0xff; 4]);
        }
        let bars = [0x10, 0x14, 0x18, 0x1c, 0x20, 0x24].map(|at| word(&config, at));
        assert_eq!(bars, [0xffff_8000, 0, 0, 0, 0x0000_000c, 0xffff_fff0]);
        config.reset();
        assert_eq!(word(&config, 0x24), 0);
    }

    #[test]
    fn writes_change_writable_bits_only() {
        let mut config = Config::new(WINDOW);
        let before = config.bytes;
        (0..256).for_each(|at| config.write(at, &[0xff]));
        assert!(config.is_bus_master());
        config.write(4, &[0; 2]);
        assert!(!config.is_bus_master());
        config.reset();
        assert_eq!(config.bytes, before);
        config.write(250, &[0xff; 8]);
        config.write(u64::MAX, &[0xff]);
        assert_eq!(config.bytes, before);
    }
}
