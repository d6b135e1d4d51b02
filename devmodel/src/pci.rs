//! PCI configuration space of a vGPU or a passed-through card. The function is a PCI Express endpoint with three memory
//! BARs, power management, and MSI with one 64-bit vector. An expansion ROM, function-level resets and a
//! vendor-specific capability are optional.
//!
//! The VMM emulates much of configuration space itself and forwards writes (QEMU: BAR addresses and MSI delivery). This
//! module therefore maintains only the state that the device needs: the command register, the MSI enable bit, and the
//! BAR sizes.
//!
//! Not included: the contents of the expansion ROM, I/O BARs, and extended capabilities.
//!
//! Sources: PCI Local Bus 3.0 chapter 6; PCI Express Base 2.1 chapter 7; the capability offsets of a GF100.

mod saved;

/// Size of configuration space in bytes.
pub const CONFIG_BYTES: usize = 4096;
/// Size in bytes of the part of configuration space that can contain capabilities.
const LEGACY_BYTES: usize = 256;
/// ID of a vendor-specific capability. Source: PCI Local Bus 3.0, appendix H.
const VENDOR_SPECIFIC: u8 = 0x09;

/// Register offsets in the standard header.
mod header {
    pub const VENDOR: usize = 0x00;
    pub const DEVICE: usize = 0x02;
    pub const COMMAND: usize = 0x04;
    pub const STATUS: usize = 0x06;
    pub const REVISION: usize = 0x08;
    pub const CLASS: usize = 0x09;
    pub const CACHE_LINE: usize = 0x0c;
    pub const BAR0: usize = 0x10;
    pub const BAR1: usize = 0x14;
    pub const BAR3: usize = 0x1c;
    pub const SUBSYSTEM_VENDOR: usize = 0x2c;
    pub const SUBSYSTEM: usize = 0x2e;
    pub const ROM: usize = 0x30;
    pub const CAPABILITIES: usize = 0x34;
    pub const INTERRUPT_LINE: usize = 0x3c;
    pub const INTERRUPT_PIN: usize = 0x3d;
}

/// Offsets of the capabilities and their registers, as on a GF100.
mod capability {
    pub const POWER: usize = 0x60;
    pub const POWER_CAPS: usize = 0x62;
    pub const POWER_CONTROL: usize = 0x64;
    pub const MSI: usize = 0x68;
    pub const MSI_CONTROL: usize = 0x6a;
    pub const MSI_ADDRESS: usize = 0x6c;
    pub const MSI_ADDRESS_HI: usize = 0x70;
    pub const MSI_DATA: usize = 0x74;
    pub const EXPRESS: usize = 0x78;
    pub const EXPRESS_CAPS: usize = 0x7a;
    pub const DEVICE_CAPS: usize = 0x7c;
    pub const DEVICE_CONTROL: usize = 0x80;
    pub const DEVICE_STATUS: usize = 0x82;
    pub const LINK_CAPS: usize = 0x84;
    pub const LINK_CONTROL: usize = 0x88;
    pub const LINK_STATUS: usize = 0x8a;
    pub const DEVICE_CONTROL_2: usize = 0xa0;
    pub const LINK_CONTROL_2: usize = 0xa8;
    /// Unused on a GF100.
    pub const VENDOR: usize = 0xc0;
}

/// Bits of the command register.
mod command {
    pub const MEMORY: u8 = 1 << 1;
    pub const MASTER: u8 = 1 << 2;
    pub const WRITABLE: u16 = 0x0546;
    /// INTx disable bit, in the high byte of the register.
    pub const INTX_DISABLE: u8 = 1 << 2;
}

const STATUS_INTERRUPT: u8 = 1 << 3;
const STATUS_CAPABILITIES: u16 = 1 << 4;
const MSI_ENABLE: u8 = 1 << 0;
const MSI_64BIT: u16 = 1 << 7;
/// Power state field in the low byte of the power management control register. The value 0 is D0.
const POWER_STATE: u8 = 3;
/// Function-level reset capability bit, in the highest byte of the PCI Express device capabilities.
const CAN_RESET: u8 = 1 << 4;
/// Initiates a function-level reset. This bit of the high byte of the device control register reads as 0.
const INITIATE_RESET: u8 = 1 << 7;
/// Expansion ROM enable bit, in the lowest byte of the expansion ROM BAR.
const ROM_ENABLE: u8 = 1 << 0;
/// Range of sizes of an expansion ROM BAR, in bytes.
const ROM_BYTES: std::ops::RangeInclusive<u64> = 2 << 10..=16 << 20;

/// Identity and BAR sizes of a function.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PciIdentity {
    /// Vendor ID.
    pub vendor: u16,
    /// Device ID.
    pub device: u16,
    /// Subsystem vendor ID.
    pub subsystem_vendor: u16,
    /// Subsystem ID.
    pub subsystem: u16,
    /// Revision ID.
    pub revision: u8,
    /// 24-bit class code: base class, subclass, programming interface.
    pub class: u32,
    /// Size of BAR0 in bytes, a power of two from 4 KiB to 2 GiB.
    pub bar0_bytes: u64,
    /// Size of BAR1 in bytes, a power of two of at least 4 KiB.
    pub bar1_bytes: u64,
    /// Size of BAR3 in bytes, a power of two of at least 4 KiB.
    pub bar3_bytes: u64,
}

/// Effects of a configuration space write on the device. A field that is `None` is unchanged.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PciEvents {
    /// True if the function may perform DMA.
    pub bus_master: Option<bool>,
    /// True if the function responds to accesses to its memory BARs.
    pub memory: Option<bool>,
    /// True if the function must not assert INTx.
    pub intx_disabled: Option<bool>,
    /// True if the function signals interrupts with MSI.
    pub msi: Option<bool>,
    /// True if the function and its configuration space must be reset. The other fields are then `None`.
    pub reset: bool,
}

impl PciEvents {
    /// Returns true if there are no effects.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        *self == Self::default()
    }
}

/// The size of a BAR cannot be encoded.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{bar} of {bytes:#x} bytes: a BAR must be a power of two of at least 4 KiB{limit}")]
pub struct BadBar {
    bar: &'static str,
    bytes: u64,
    limit: &'static str,
}

/// The size of an expansion ROM cannot be encoded.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("an expansion ROM of {0:#x} bytes: must be a power of two from 2 KiB to 16 MiB")]
pub struct BadRom(u64);

/// A vendor-specific capability does not fit in configuration space.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("a vendor-specific capability of {0} bytes: must have at least 3 bytes, and end below byte 256")]
pub struct BadCapability(usize);

/// Configuration space of a function.
#[derive(Clone)]
pub struct PciConfig {
    bytes: Box<[u8; CONFIG_BYTES]>,
    /// Mask of guest-writable bits.
    writable: Box<[u8; CONFIG_BYTES]>,
    /// Reset values.
    initial: Box<[u8; CONFIG_BYTES]>,
}

impl std::fmt::Debug for PciConfig {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("PciConfig")
            .field("bus_master", &self.bus_master())
            .field("memory", &self.memory_enabled())
            .field("intx_disabled", &self.intx_disabled())
            .field("msi", &self.msi_enabled())
            .finish_non_exhaustive()
    }
}

impl PciConfig {
    /// Creates a function in its initial state.
    ///
    /// # Errors
    /// Returns an error if a BAR size cannot be encoded.
    pub fn new(identity: &PciIdentity) -> Result<Self, BadBar> {
        let check = |bar, bytes: u64, wide: bool| {
            if !bytes.is_power_of_two() || bytes < 4096 || (!wide && bytes > 1 << 31) {
                let limit = if wide { "" } else { " and at most 2 GiB" };
                return Err(BadBar { bar, bytes, limit });
            }
            Ok(())
        };
        check("BAR0", identity.bar0_bytes, false)?;
        check("BAR1", identity.bar1_bytes, true)?;
        check("BAR3", identity.bar3_bytes, true)?;

        let mut image = Image { bytes: Box::new([0; CONFIG_BYTES]), writable: Box::new([0; CONFIG_BYTES]) };
        image.fill(identity);
        let Image { bytes, writable } = image;
        Ok(Self { initial: bytes.clone(), bytes, writable })
    }

    /// Appends `body` as a vendor-specific capability, and replaces its first three bytes with the capability's ID,
    /// link and length.
    ///
    /// # Errors
    /// Returns an error if the capability does not fit in the first 256 bytes, or if `body` is shorter than three
    /// bytes.
    pub fn add_vendor_capability(&mut self, body: &[u8]) -> Result<(), BadCapability> {
        let room = LEGACY_BYTES.saturating_sub(capability::VENDOR);
        let [id, next, length] = [VENDOR_SPECIFIC, 0, u8::try_from(body.len()).unwrap_or(0)];
        let Some((_, rest)) = body.split_first_chunk::<3>().filter(|_| body.len() <= room) else {
            return Err(BadCapability(body.len()));
        };
        let bytes = [id, next, length].into_iter().chain(rest.iter().copied());
        for (at, byte) in (capability::VENDOR..).zip(bytes) {
            for image in [&mut self.bytes, &mut self.initial] {
                if let Some(to) = image.get_mut(at) {
                    *to = byte;
                }
            }
        }
        for image in [&mut self.bytes, &mut self.initial] {
            if let Some(next) = image.get_mut(capability::EXPRESS.saturating_add(1)) {
                *next = u8::try_from(capability::VENDOR).unwrap_or(0);
            }
        }
        Ok(())
    }

    /// Adds an expansion ROM of `bytes` bytes.
    ///
    /// # Errors
    /// Returns an error if the size is not a power of two from 2 KiB to 16 MiB.
    pub fn add_rom(&mut self, bytes: u64) -> Result<(), BadRom> {
        if !bytes.is_power_of_two() || !ROM_BYTES.contains(&bytes) {
            return Err(BadRom(bytes));
        }
        let [low, rest @ ..] = (!bytes.wrapping_sub(1)).to_le_bytes();
        let mask = std::iter::once(low | ROM_ENABLE).chain(rest).take(4);
        for (writable, mask) in self.writable.iter_mut().skip(header::ROM).zip(mask) {
            *writable = mask;
        }
        Ok(())
    }

    /// Adds support for function-level resets (FLR).
    pub fn add_reset(&mut self) {
        for image in [&mut self.bytes, &mut self.initial] {
            if let Some(byte) = image.get_mut(capability::DEVICE_CAPS.saturating_add(3)) {
                *byte |= CAN_RESET;
            }
        }
        if let Some(mask) = self.writable.get_mut(capability::DEVICE_CONTROL.saturating_add(1)) {
            *mask |= INITIATE_RESET;
        }
    }

    /// Reads configuration space at byte `offset`. Bytes beyond the end of configuration space read as 0xff.
    pub fn read(&self, offset: u64, data: &mut [u8]) {
        for (at, byte) in (offset..=u64::MAX).zip(data) {
            *byte = usize::try_from(at).ok().and_then(|at| self.bytes.get(at)).copied().unwrap_or(0xff);
        }
    }

    /// Returns the aligned dword that contains byte `offset`, or all ones beyond the end of configuration space.
    #[must_use]
    pub fn read32(&self, offset: u32) -> u32 {
        let mut word = [0; 4];
        self.read(u64::from(offset & !3), &mut word);
        u32::from_le_bytes(word)
    }

    /// Writes configuration space at byte `offset`, and returns the effects. Read-only bits are not modified.
    pub fn write(&mut self, offset: u64, data: &[u8]) -> PciEvents {
        let before = self.state();
        for (at, new) in (offset..=u64::MAX).zip(data) {
            let Ok(at) = usize::try_from(at) else { break };
            let (Some(byte), Some(mask)) = (self.bytes.get_mut(at), self.writable.get(at)) else { break };
            *byte = (*byte & !mask) | (new & mask);
        }
        if self.take_reset() { PciEvents { reset: true, ..PciEvents::default() } } else { self.changes_since(before) }
    }

    /// Returns true if a reset was requested, and clears the request. Writes to read-only bits do not request a reset.
    fn take_reset(&mut self) -> bool {
        let byte = self.bytes.get_mut(capability::DEVICE_CONTROL.saturating_add(1));
        byte.is_some_and(|byte| {
            let asked = *byte & INITIATE_RESET != 0;
            *byte &= !INITIATE_RESET;
            asked
        })
    }

    /// Restores the reset values, and returns the effects.
    pub fn reset(&mut self) -> PciEvents {
        let before = self.state();
        self.bytes.clone_from(&self.initial);
        self.changes_since(before)
    }

    /// Returns true if the function may perform DMA.
    #[must_use]
    pub fn bus_master(&self) -> bool {
        self.byte(header::COMMAND) & command::MASTER != 0
    }

    /// Returns true if the function responds to accesses to its memory BARs.
    #[must_use]
    pub fn memory_enabled(&self) -> bool {
        self.byte(header::COMMAND) & command::MEMORY != 0
    }

    /// Returns true if the function must not assert INTx.
    #[must_use]
    pub fn intx_disabled(&self) -> bool {
        self.byte(header::COMMAND.saturating_add(1)) & command::INTX_DISABLE != 0
    }

    /// Returns true if the function signals interrupts with MSI.
    #[must_use]
    pub fn msi_enabled(&self) -> bool {
        self.byte(capability::MSI_CONTROL) & MSI_ENABLE != 0
    }

    /// Returns true if the function is in power state D0. In all other states, its BARs do not respond.
    #[must_use]
    pub fn is_awake(&self) -> bool {
        self.byte(capability::POWER_CONTROL) & POWER_STATE == 0
    }

    /// Sets or clears the interrupt status bit in the status register.
    pub fn set_interrupt_status(&mut self, pending: bool) {
        if let Some(status) = self.bytes.get_mut(header::STATUS) {
            *status = (*status & !STATUS_INTERRUPT) | if pending { STATUS_INTERRUPT } else { 0 };
        }
    }

    fn byte(&self, at: usize) -> u8 {
        self.bytes.get(at).copied().unwrap_or(0)
    }

    fn state(&self) -> [bool; 4] {
        [self.bus_master(), self.memory_enabled(), self.intx_disabled(), self.msi_enabled()]
    }

    fn changes_since(&self, before: [bool; 4]) -> PciEvents {
        let [master, memory, intx, msi] = before;
        let change = |old: bool, new: bool| (old != new).then_some(new);
        PciEvents {
            bus_master: change(master, self.bus_master()),
            memory: change(memory, self.memory_enabled()),
            intx_disabled: change(intx, self.intx_disabled()),
            msi: change(msi, self.msi_enabled()),
            reset: false,
        }
    }
}

/// Builder for the initial contents of configuration space.
struct Image {
    bytes: Box<[u8; CONFIG_BYTES]>,
    writable: Box<[u8; CONFIG_BYTES]>,
}

impl Image {
    fn fill(&mut self, identity: &PciIdentity) {
        use {capability as cap, header as h};
        let class = identity.class.to_le_bytes();

        self.read_only(h::VENDOR, &identity.vendor.to_le_bytes());
        self.read_only(h::DEVICE, &identity.device.to_le_bytes());
        self.set(h::COMMAND, &[0, 0], &command::WRITABLE.to_le_bytes());
        self.read_only(h::STATUS, &STATUS_CAPABILITIES.to_le_bytes());
        self.read_only(h::REVISION, &[identity.revision]);
        self.read_only(h::CLASS, class.split_last().map_or(&[], |(_, low)| low));
        self.set(h::CACHE_LINE, &[0], &[0xff]);
        self.read_only(h::SUBSYSTEM_VENDOR, &identity.subsystem_vendor.to_le_bytes());
        self.read_only(h::SUBSYSTEM, &identity.subsystem.to_le_bytes());
        self.read_only(h::CAPABILITIES, &[0x60]);
        self.set(h::INTERRUPT_LINE, &[0], &[0xff]);
        self.read_only(h::INTERRUPT_PIN, &[1]);

        // Memory BARs: BAR0 is 32-bit. BAR1 and BAR3 are 64-bit and prefetchable.
        let address_mask = |bytes: u64| !bytes.wrapping_sub(1);
        let low = address_mask(identity.bar0_bytes).to_le_bytes();
        self.set(h::BAR0, &[0; 4], low.split_at(4).0);
        self.set(h::BAR1, &0xcu64.to_le_bytes(), &address_mask(identity.bar1_bytes).to_le_bytes());
        self.set(h::BAR3, &0xcu64.to_le_bytes(), &address_mask(identity.bar3_bytes).to_le_bytes());

        // Power management version 1.2: D0 and D3hot. Registers keep their values in D3hot.
        self.read_only(cap::POWER, &[0x01, 0x68]);
        self.read_only(cap::POWER_CAPS, &0x0003u16.to_le_bytes());
        self.set(cap::POWER_CONTROL, &0x0008u16.to_le_bytes(), &0x0003u16.to_le_bytes());

        // MSI: one vector, 64-bit address, no masking.
        self.read_only(cap::MSI, &[0x05, 0x78]);
        self.set(cap::MSI_CONTROL, &MSI_64BIT.to_le_bytes(), &[MSI_ENABLE, 0]);
        self.set(cap::MSI_ADDRESS, &[0; 4], &0xffff_fffcu32.to_le_bytes());
        self.set(cap::MSI_ADDRESS_HI, &[0; 4], &[0xff; 4]);
        self.set(cap::MSI_DATA, &[0; 2], &[0xff; 2]);

        // PCI Express endpoint, capability version 2, link trained at 5 GT/s with 16 lanes.
        self.read_only(cap::EXPRESS, &[0x10, 0x00]);
        self.read_only(cap::EXPRESS_CAPS, &0x0002u16.to_le_bytes());
        self.read_only(cap::DEVICE_CAPS, &0x0000_8000u32.to_le_bytes());
        self.set(cap::DEVICE_CONTROL, &0x2810u16.to_le_bytes(), &0x7fffu16.to_le_bytes());
        self.read_only(cap::DEVICE_STATUS, &[0; 2]);
        self.read_only(cap::LINK_CAPS, &0x0000_0102u32.to_le_bytes());
        self.set(cap::LINK_CONTROL, &[0; 2], &0x01ebu16.to_le_bytes());
        self.read_only(cap::LINK_STATUS, &0x1102u16.to_le_bytes());
        self.set(cap::DEVICE_CONTROL_2, &[0; 2], &0x001fu16.to_le_bytes());
        self.set(cap::LINK_CONTROL_2, &0x0002u16.to_le_bytes(), &0x000fu16.to_le_bytes());
    }

    fn read_only(&mut self, at: usize, value: &[u8]) {
        for (byte, value) in self.bytes.iter_mut().skip(at).zip(value) {
            *byte = *value;
        }
    }

    fn set(&mut self, at: usize, value: &[u8], writable: &[u8]) {
        self.read_only(at, value);
        for (mask, writable) in self.writable.iter_mut().skip(at).zip(writable) {
            *mask = *writable;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn config() -> PciConfig {
        PciConfig::new(&PciIdentity {
            vendor: 0x10de,
            device: 0x06d8,
            subsystem_vendor: 0x10de,
            subsystem: 0x076f,
            revision: 0xa3,
            class: 0x03_02_00,
            bar0_bytes: 16 << 20,
            bar1_bytes: 128 << 20,
            bar3_bytes: 64 << 20,
        })
        .expect("the BAR sizes are invalid")
    }

    #[test]
    fn pci_identity_is_at_standard_offsets() {
        let config = config();
        assert_eq!(config.read32(0x00), 0x06d8_10de);
        assert_eq!(config.read32(0x08), 0x0302_00a3);
        assert_eq!(config.read32(0x2c), 0x076f_10de);
        assert_eq!(config.read32(0x30), 0, "no expansion ROM");
        assert_eq!(config.read32(0x3c), 0x0000_0100, "interrupt pin A");
    }

    #[test]
    fn bars_answer_the_sizing_probe() {
        let mut config = config();
        for at in (0x10..0x28).step_by(4) {
            config.write(at, &[0xff; 4]);
        }
        assert_eq!(config.read32(0x10), 0xff00_0000);
        assert_eq!((config.read32(0x14), config.read32(0x18)), (0xf800_000c, 0xffff_ffff));
        assert_eq!((config.read32(0x1c), config.read32(0x20)), (0xfc00_000c, 0xffff_ffff));
        assert_eq!(config.read32(0x24), 0, "no I/O BAR");
    }

    #[test]
    fn capability_list_holds_power_msi_and_express_and_ends() {
        let config = config();
        let mut at = config.read32(0x34) & 0xff;
        let mut found = Vec::new();
        while at != 0 {
            let word = config.read32(at);
            found.push((word & 0xff, at));
            at = (word >> 8) & 0xff;
        }
        assert_eq!(found, [(0x01, 0x60), (0x05, 0x68), (0x10, 0x78)]);
        assert_eq!(config.read32(0x68) >> 16, 0x0080, "one vector, 64-bit, no masking");
    }

    #[test]
    fn vendor_capability_ends_the_list_and_survives_a_reset() {
        let mut config = config();
        config.add_vendor_capability(&[0, 0, 0, 0x42, 1, 2, 3, 4]).expect("the capability does not fit");
        config.reset();
        assert_eq!(config.read32(0x78) >> 8 & 0xff, 0xc0);
        assert_eq!((config.read32(0xc0), config.read32(0xc4)), (0x4208_0009, 0x0403_0201));
        config.write(0xc0, &[0xff; 8]);
        assert_eq!(config.read32(0xc4), 0x0403_0201, "the capability is writable");
        assert!(config.add_vendor_capability(&[0; 65]).is_err() && config.add_vendor_capability(&[0; 2]).is_err());
    }

    #[test]
    fn command_write_reports_each_change_once() {
        let mut config = config();
        assert_eq!(
            config.write(4, &[0x06, 0x04]),
            PciEvents { bus_master: Some(true), memory: Some(true), intx_disabled: Some(true), ..PciEvents::default() }
        );
        assert!(config.write(4, &[0x06, 0x04]).is_empty());
        assert_eq!(config.write(4, &[0x02]), PciEvents { bus_master: Some(false), ..PciEvents::default() });
        assert!(config.intx_disabled(), "the other byte was changed");
    }

    #[test]
    fn msi_enable_is_seen_and_vector_count_cannot_grow() {
        let mut config = config();
        assert_eq!(config.write(0x6a, &[0xff, 0xff]).msi, Some(true));
        assert_eq!(config.read32(0x68) >> 16, 0x0081);
        assert_eq!(config.reset().msi, Some(false));
    }

    #[test]
    fn reset_is_requested_only_if_function_has_one() {
        let mut config = config();
        // A driver writes back the value that it has read, with the highest bit of device control set.
        let control = [0x10, 0xa8];
        assert!(!config.write(0x80, &control).reset);
        config.add_reset();
        assert_eq!(config.read32(0x7c) >> 28 & 1, 1, "device capabilities");
        config.write(4, &[6]);
        assert_eq!(config.write(0x80, &control), PciEvents { reset: true, ..PciEvents::default() });
        assert_eq!(config.read32(0x80) & 0x8000, 0, "the bit does not read as 0");
        assert_eq!(config.reset().bus_master, Some(false));
        assert_eq!(config.read32(0x7c) >> 28 & 1, 1, "a reset has removed the capability");
        assert!(!config.write(0x80, &[0x10, 0x28]).reset);
    }

    #[test]
    fn rom_answers_the_sizing_probe_and_bad_sizes_are_refused() {
        let mut config = config();
        for bytes in [0, 1024, 3 << 10, 32 << 20] {
            assert!(config.add_rom(bytes).is_err(), "{bytes}");
        }
        config.add_rom(4096).expect("the size is invalid");
        config.write(0x30, &[0xff; 4]);
        assert_eq!(config.read32(0x30), 0xffff_f001);
        config.reset();
        assert_eq!(config.read32(0x30), 0);
    }

    #[test]
    fn function_sleeps_in_any_other_power_state() {
        let mut config = config();
        assert!(config.is_awake());
        for state in 1..4 {
            config.write(0x64, &[state, 0]);
            assert!(!config.is_awake());
        }
        config.write(0x64, &[0]);
        assert!(config.is_awake());
    }

    #[test]
    fn read_only_bytes_do_not_change() {
        let mut config = config();
        let before: Vec<u32> = (0..16).map(|word| config.read32(word * 4)).collect();
        config.write(0, &[0; 4]);
        config.write(8, &[0; 4]);
        config.write(0x2c, &[0xff; 12]);
        for word in [0, 2, 11, 12, 13, 14] {
            assert_eq!(config.read32(word * 4), before[word as usize], "word {word}");
        }
    }

    #[test]
    fn accesses_across_and_beyond_the_end_are_harmless() {
        let mut config = config();
        let mut data = [0; 8];
        config.read(4092, &mut data);
        assert_eq!(data, [0, 0, 0, 0, 0xff, 0xff, 0xff, 0xff]);
        config.read(u64::MAX - 1, &mut data);
        assert!(config.write(u64::MAX - 1, &[0xff; 8]).is_empty());
        assert!(config.write(4094, &[0xff; 8]).is_empty());
    }

    #[test]
    fn bar_size_that_is_no_power_of_two_is_refused() {
        let bad = PciIdentity {
            vendor: 0,
            device: 0,
            subsystem_vendor: 0,
            subsystem: 0,
            revision: 0,
            class: 0,
            bar0_bytes: 16 << 20,
            bar1_bytes: 100 << 20,
            bar3_bytes: 64 << 20,
        };
        let error = PciConfig::new(&bad).expect_err("the size was accepted").to_string();
        assert_eq!(error, "BAR1 of 0x6400000 bytes: a BAR must be a power of two of at least 4 KiB");
    }
}
