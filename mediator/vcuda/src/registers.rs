//! BAR0: the registers of a modern virtio-pci device and the MSI-X table.
//!
//! The registers are a state machine that stores values and reports the effects of writes. Each access is handled
//! immediately.
//!
//! Source: VIRTIO 1.2 section 4.1.4.

mod saved;

use std::ops::Range;

pub(crate) use saved::SavedRegisters;

/// Size of BAR0 in bytes.
pub(crate) const BAR0_BYTES: u64 = 0x8000;
/// Offsets of the common configuration.
pub(crate) const COMMON: Range<u64> = 0..0x38;
/// Offsets of the interrupt status.
pub(crate) const ISR: Range<u64> = 0x1000..0x1004;
/// Offsets of the virtio-gpu configuration.
pub(crate) const DEVICE: Range<u64> = 0x2000..0x2010;
/// Offsets of the queues' doorbells.
pub(crate) const NOTIFY: Range<u64> = 0x3000..0x4000;
/// Stride of the queues' doorbells in bytes.
pub(crate) const NOTIFY_MULTIPLIER: u32 = 4;
/// Offsets of the MSI-X table.
pub(crate) const MSIX_TABLE: Range<u64> = 0x6000..0x6000 + VECTORS as u64 * 16;
/// Offsets of the MSI-X pending bits. The VMM stores these bits, which read as 0 here.
pub(crate) const MSIX_PBA: Range<u64> = 0x7000..0x7008;
/// Number of MSI-X vectors: configuration, control queue, cursor queue.
pub(crate) const VECTORS: u8 = 3;
/// Vector number for events that raise no interrupt.
pub(crate) const NO_VECTOR: u16 = 0xffff;

/// Number of queues: control and cursor.
pub(crate) const QUEUES: usize = 2;
/// Maximum sizes of the queues in entries.
pub(crate) const QUEUE_SIZES: [u16; QUEUES] = [1024, 16];

/// Bits of the device status.
pub(crate) mod status {
    pub(crate) const FEATURES_OK: u8 = 8;
    pub(crate) const DRIVER_OK: u8 = 4;
    pub(crate) const NEEDS_RESET: u8 = 64;
}

/// Offered features: 3D, blobs, contexts with a capability set, indirect descriptors, version 1, and addresses
/// translated by an IOMMU.
const FEATURES: u64 = 1 << 0 | 1 << 3 | 1 << 4 | 1 << 28 | 1 << 32 | 1 << 33;
/// Features that the driver must accept.
const REQUIRED: u64 = 1 << 32;

/// Offsets in the common configuration.
mod common {
    pub(super) const DEVICE_FEATURE_SELECT: u64 = 0x00;
    pub(super) const DEVICE_FEATURE: u64 = 0x04;
    pub(super) const DRIVER_FEATURE_SELECT: u64 = 0x08;
    pub(super) const DRIVER_FEATURE: u64 = 0x0c;
    pub(super) const CONFIG_VECTOR: u64 = 0x10;
    pub(super) const NUM_QUEUES: u64 = 0x12;
    pub(super) const STATUS: u64 = 0x14;
    pub(super) const QUEUE_SELECT: u64 = 0x16;
    pub(super) const QUEUE_SIZE: u64 = 0x18;
    pub(super) const QUEUE_VECTOR: u64 = 0x1a;
    pub(super) const QUEUE_ENABLE: u64 = 0x1c;
    pub(super) const QUEUE_NOTIFY_OFF: u64 = 0x1e;
    pub(super) const QUEUE_DESC: u64 = 0x20;
    pub(super) const QUEUE_DRIVER: u64 = 0x28;
    pub(super) const QUEUE_DEVICE: u64 = 0x30;
}

/// An effect of a write.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Effect {
    /// The write has no effect outside the registers.
    None,
    /// The driver has rung the doorbell of the control queue, or enabled the device.
    Kick,
    /// The driver resets the device. The status does not read as 0 until [`Registers::reset`].
    Reset,
}

/// Size of a queue, and guest addresses of its parts.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Setup {
    /// Number of entries.
    pub(crate) size: u16,
    pub(crate) descriptors: u64,
    pub(crate) available: u64,
    pub(crate) used: u64,
}

/// Registers of a queue.
#[derive(Clone, Copy, Debug)]
struct QueueRegisters {
    setup: Setup,
    vector: u16,
    enabled: bool,
}

/// Values of the registers.
#[derive(Debug)]
pub(crate) struct Registers {
    device_feature_select: u32,
    driver_feature_select: u32,
    driver_features: u64,
    config_vector: u16,
    status: u8,
    isr: u8,
    queue_select: u16,
    queues: [QueueRegisters; QUEUES],
    table: [u8; VECTORS as usize * 16],
    /// Set if the driver has requested a reset that is not complete.
    is_resetting: bool,
}

impl Default for Registers {
    fn default() -> Self {
        let queue =
            |size| QueueRegisters { setup: Setup { size, ..Setup::default() }, vector: NO_VECTOR, enabled: false };
        Self {
            device_feature_select: 0,
            driver_feature_select: 0,
            driver_features: 0,
            config_vector: NO_VECTOR,
            status: 0,
            isr: 0,
            queue_select: 0,
            queues: QUEUE_SIZES.map(queue),
            table: [0; VECTORS as usize * 16],
            is_resetting: false,
        }
    }
}

impl Registers {
    /// Reads registers. Bytes outside of registers read as zeros. Reading the interrupt status clears it.
    pub(crate) fn read(&mut self, offset: u64, data: &mut [u8]) {
        data.fill(0);
        if COMMON.contains(&offset) {
            let value = self.common(offset).to_le_bytes();
            // An 8-byte register can be read in halves.
            let skip = if offset >= common::QUEUE_DESC { usize::from(offset % 8 == 4).wrapping_mul(4) } else { 0 };
            data.iter_mut().zip(value.iter().skip(skip)).for_each(|(to, byte)| *to = *byte);
        } else if ISR.contains(&offset) {
            if let Some(first) = data.first_mut() {
                *first = std::mem::take(&mut self.isr);
            }
        } else if DEVICE.contains(&offset) {
            // The device has no events, one scanout (which Linux before 6.4 requires) and one capability set.
            let config = [0u32, 0, 1, 1].map(u32::to_le_bytes);
            copy(config.as_flattened(), offset.wrapping_sub(DEVICE.start), data);
        } else if MSIX_TABLE.contains(&offset) {
            copy(&self.table, offset.wrapping_sub(MSIX_TABLE.start), data);
        }
    }

    /// Returns the value of the register at an offset. For either half of a 64-bit register, returns the whole value.
    fn common(&self, offset: u64) -> u64 {
        let queue = self.queues.get(usize::from(self.queue_select));
        let of_queue = |value: fn(&QueueRegisters) -> u64| queue.map_or(0, value);
        match offset {
            common::DEVICE_FEATURE_SELECT => self.device_feature_select.into(),
            common::DEVICE_FEATURE => half(FEATURES, self.device_feature_select),
            common::DRIVER_FEATURE_SELECT => self.driver_feature_select.into(),
            common::DRIVER_FEATURE => half(self.driver_features, self.driver_feature_select),
            common::CONFIG_VECTOR => self.config_vector.into(),
            common::NUM_QUEUES => self.queues.len() as u64,
            common::STATUS => self.status.into(),
            common::QUEUE_SELECT => self.queue_select.into(),
            common::QUEUE_SIZE => of_queue(|queue| queue.setup.size.into()),
            common::QUEUE_VECTOR => queue.map_or(NO_VECTOR, |queue| queue.vector).into(),
            common::QUEUE_ENABLE => of_queue(|queue| queue.enabled.into()),
            common::QUEUE_NOTIFY_OFF => self.queue_select.into(),
            common::QUEUE_DESC..common::QUEUE_DRIVER => of_queue(|queue| queue.setup.descriptors),
            common::QUEUE_DRIVER..common::QUEUE_DEVICE => of_queue(|queue| queue.setup.available),
            common::QUEUE_DEVICE.. => of_queue(|queue| queue.setup.used),
            _ => 0,
        }
    }

    /// Writes a register. Writes to other offsets, and writes to the common configuration during a reset, have no
    /// effect.
    pub(crate) fn write(&mut self, offset: u64, data: &[u8]) -> Effect {
        if NOTIFY.contains(&offset) {
            let is_control = offset < NOTIFY.start.wrapping_add(NOTIFY_MULTIPLIER.into());
            return if is_control && self.is_live() { Effect::Kick } else { Effect::None };
        }
        if MSIX_TABLE.contains(&offset) {
            let from = usize::try_from(offset.wrapping_sub(MSIX_TABLE.start)).unwrap_or(usize::MAX);
            self.table.iter_mut().skip(from).zip(data).for_each(|(to, byte)| *to = *byte);
            return Effect::None;
        }
        if !COMMON.contains(&offset) || self.is_resetting {
            return Effect::None;
        }
        let mut bytes = [0; 8];
        bytes.iter_mut().zip(data).for_each(|(to, byte)| *to = *byte);
        let value = u64::from_le_bytes(bytes);
        self.write_common(offset, value, data.len())
    }

    fn write_common(&mut self, offset: u64, value: u64, len: usize) -> Effect {
        let [b0, b1, b2, b3, ..] = value.to_le_bytes();
        let (word, half) = (u32::from_le_bytes([b0, b1, b2, b3]), u16::from_le_bytes([b0, b1]));
        match offset {
            common::DEVICE_FEATURE_SELECT => self.device_feature_select = word,
            common::DRIVER_FEATURE_SELECT => self.driver_feature_select = word,
            common::DRIVER_FEATURE if self.status & status::FEATURES_OK == 0 => {
                set_half(&mut self.driver_features, self.driver_feature_select, word);
            }
            common::CONFIG_VECTOR => self.config_vector = vector(half),
            common::STATUS => return self.set_status(b0),
            common::QUEUE_SELECT => self.queue_select = half,
            _ => self.write_queue(offset, value, len),
        }
        Effect::None
    }

    /// Writes a register of the selected queue.
    fn write_queue(&mut self, offset: u64, value: u64, len: usize) {
        let Some(queue) = self.queues.get_mut(usize::from(self.queue_select)) else { return };
        let [b0, b1, ..] = value.to_le_bytes();
        let half = u16::from_le_bytes([b0, b1]);
        if offset == common::QUEUE_VECTOR {
            queue.vector = vector(half);
            return;
        }
        // A queue in use cannot be changed.
        if queue.enabled {
            return;
        }
        let (register, part) = match offset {
            common::QUEUE_SIZE => {
                let most = QUEUE_SIZES.get(usize::from(self.queue_select)).copied().unwrap_or(0);
                if half.is_power_of_two() && half <= most {
                    queue.setup.size = half;
                }
                return;
            }
            common::QUEUE_ENABLE => {
                queue.enabled = half == 1;
                return;
            }
            common::QUEUE_DESC..common::QUEUE_DRIVER => (&mut queue.setup.descriptors, offset % 8),
            common::QUEUE_DRIVER..common::QUEUE_DEVICE => (&mut queue.setup.available, offset % 8),
            common::QUEUE_DEVICE.. => (&mut queue.setup.used, offset % 8),
            _ => return,
        };
        match (part, len) {
            (0, 8) => *register = value,
            (0 | 4, 4) => set_half(register, u32::from(part == 4), u32::try_from(value).unwrap_or(0)),
            _ => {}
        }
    }

    fn set_status(&mut self, new: u8) -> Effect {
        if new == 0 {
            // Set this even if nothing needs to be reset, so that the status reads as 0 only after a complete reset.
            self.is_resetting = true;
            self.status |= status::NEEDS_RESET;
            return Effect::Reset;
        }
        let mut new = new | self.status & status::NEEDS_RESET;
        let is_acceptable = self.driver_features & !FEATURES == 0 && self.driver_features & REQUIRED == REQUIRED;
        if new & status::FEATURES_OK != 0 && !is_acceptable {
            new &= !status::FEATURES_OK;
        }
        self.status = new;
        if self.is_live() { Effect::Kick } else { Effect::None }
    }

    /// Returns true if the driver is ready and the device has not failed.
    pub(crate) fn is_live(&self) -> bool {
        let needed = status::FEATURES_OK | status::DRIVER_OK;
        !self.is_resetting && self.status & (needed | status::NEEDS_RESET) == needed
    }

    /// Returns the setup of the control queue, if the queue is enabled and the device is live.
    pub(crate) fn control_queue(&self) -> Option<Setup> {
        let [control, _] = &self.queues;
        (control.enabled && self.is_live()).then_some(control.setup)
    }

    /// Records an interrupt of the control queue, and returns its MSI-X vector, if the queue has one.
    pub(crate) fn interrupt(&mut self) -> Option<u16> {
        self.isr |= 1;
        let [control, _] = &self.queues;
        (control.vector != NO_VECTOR).then_some(control.vector)
    }

    /// Marks the device as failed, and returns the vector for reporting the failure.
    pub(crate) fn fail(&mut self) -> Option<u16> {
        self.status |= status::NEEDS_RESET;
        self.isr |= 2;
        (self.config_vector != NO_VECTOR).then_some(self.config_vector)
    }

    /// Clears all registers, and marks the device as being reset until [`Self::reset`]. Keeps the MSI-X table, which
    /// belongs to the PCI function.
    pub(crate) fn begin_reset(&mut self) {
        *self = Self { is_resetting: true, status: status::NEEDS_RESET, table: self.table, ..Self::default() };
    }

    /// Like [`Self::begin_reset`], for a reset of the PCI function, which also clears the MSI-X table.
    pub(crate) fn begin_function_reset(&mut self) {
        self.begin_reset();
        self.table = Self::default().table;
    }

    /// Returns true if a reset is incomplete.
    pub(crate) fn is_resetting(&self) -> bool {
        self.is_resetting
    }

    /// Completes a reset. Keeps the MSI-X table, which may have been written during the reset.
    pub(crate) fn reset(&mut self) {
        *self = Self { table: self.table, ..Self::default() };
    }
}

/// Returns `value` if it is a valid vector, or [`NO_VECTOR`] otherwise.
fn vector(value: u16) -> u16 {
    if value < u16::from(VECTORS) { value } else { NO_VECTOR }
}

/// Returns one of the two 32-bit halves of a value, or 0 for other indices.
fn half(value: u64, select: u32) -> u64 {
    match select {
        0 => value & 0xffff_ffff,
        1 => value >> 32,
        _ => 0,
    }
}

fn set_half(value: &mut u64, select: u32, word: u32) {
    match select {
        0 => *value = *value & !0xffff_ffff | u64::from(word),
        1 => *value = *value & 0xffff_ffff | u64::from(word) << 32,
        _ => {}
    }
}

fn copy(bytes: &[u8], offset: u64, data: &mut [u8]) {
    let from = usize::try_from(offset).unwrap_or(usize::MAX);
    data.iter_mut().zip(bytes.iter().skip(from)).for_each(|(to, byte)| *to = *byte);
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(registers: &mut Registers, offset: u64, len: usize) -> u64 {
        let mut data = [0; 8];
        registers.read(offset, &mut data[..len]);
        u64::from_le_bytes(data)
    }

    #[test]
    fn only_function_reset_clears_msix_table() {
        let mut registers = driven();
        registers.write(MSIX_TABLE.start, &0xfee0_0000u32.to_le_bytes());
        let before = read(&mut registers, MSIX_TABLE.start, 4);
        assert_eq!(registers.write(common::STATUS, &[0]), Effect::Reset);
        registers.begin_reset();
        registers.reset();
        assert_eq!(read(&mut registers, MSIX_TABLE.start, 4), before);
        registers.begin_function_reset();
        registers.reset();
        assert_eq!(read(&mut registers, MSIX_TABLE.start, 4), read(&mut Registers::default(), MSIX_TABLE.start, 4));
    }

    /// Sets up the registers as Linux does, up to DRIVER_OK.
    fn driven() -> Registers {
        let mut registers = Registers::default();
        let mut offered = 0;
        for select in [0u32, 1] {
            registers.write(common::DEVICE_FEATURE_SELECT, &select.to_le_bytes());
            let word = read(&mut registers, common::DEVICE_FEATURE, 4) as u32;
            offered |= u64::from(word) << (32 * select);
            registers.write(common::DRIVER_FEATURE_SELECT, &select.to_le_bytes());
            registers.write(common::DRIVER_FEATURE, &word.to_le_bytes());
        }
        assert_eq!(offered, 0x3_1000_0019);
        registers.write(common::STATUS, &[0xb]);
        assert_eq!(read(&mut registers, common::STATUS, 1), 0xb);
        assert_eq!(read(&mut registers, common::NUM_QUEUES, 2), 2);
        assert_eq!(read(&mut registers, common::QUEUE_SIZE, 2), 1024);
        registers.write(common::QUEUE_VECTOR, &[1, 0]);
        registers.write(common::QUEUE_DESC, &0x1000u32.to_le_bytes());
        registers.write(common::QUEUE_DESC + 4, &2u32.to_le_bytes());
        registers.write(common::QUEUE_DRIVER, &0x8000u64.to_le_bytes());
        registers.write(common::QUEUE_DEVICE, &0x9000u32.to_le_bytes());
        registers.write(common::QUEUE_ENABLE, &[1, 0]);
        assert_eq!(registers.control_queue(), None);
        assert_eq!(registers.write(common::STATUS, &[0xf]), Effect::Kick);
        registers
    }

    #[test]
    fn driver_sets_up_its_queue() {
        let mut registers = driven();
        let setup = Setup { size: 1024, descriptors: 0x2_0000_1000, available: 0x8000, used: 0x9000 };
        assert_eq!(registers.control_queue(), Some(setup));
        assert_eq!(read(&mut registers, common::QUEUE_DESC + 4, 4), 2);
        assert_eq!(registers.interrupt(), Some(1));
        assert_eq!([read(&mut registers, ISR.start, 1), read(&mut registers, ISR.start, 1)], [1, 0]);
        registers.write(common::QUEUE_DESC, &0u64.to_le_bytes());
        registers.write(common::QUEUE_SIZE, &[8, 0]);
        assert_eq!(registers.control_queue(), Some(setup), "an enabled queue cannot be changed");
    }

    #[test]
    fn unknown_features_are_not_accepted() {
        let mut registers = Registers::default();
        registers.write(common::DRIVER_FEATURE_SELECT, &[1, 0, 0, 0]);
        registers.write(common::DRIVER_FEATURE, &[1, 1, 0, 0]);
        registers.write(common::STATUS, &[0xb]);
        assert_eq!(read(&mut registers, common::STATUS, 1), 3);
    }

    #[test]
    fn status_reads_as_zero_only_after_the_reset() {
        let mut registers = driven();
        assert_eq!(registers.write(common::STATUS, &[0]), Effect::Reset);
        assert_ne!(read(&mut registers, common::STATUS, 1), 0);
        assert_eq!(registers.write(NOTIFY.start, &[0, 0]), Effect::None);
        assert_eq!(registers.control_queue(), None);
        registers.reset();
        assert_eq!(read(&mut registers, common::STATUS, 1), 0);
    }

    #[test]
    fn only_the_control_doorbell_of_a_live_device_kicks() {
        let mut registers = driven();
        assert_eq!(registers.write(NOTIFY.start, &[0, 0]), Effect::Kick);
        assert_eq!(registers.write(NOTIFY.start + 4, &[1, 0]), Effect::None);
        assert_eq!(registers.fail(), None, "the driver has set no vector");
        assert_eq!(registers.write(NOTIFY.start, &[0, 0]), Effect::None);
    }

    #[test]
    fn any_access_is_answered() {
        let mut registers = driven();
        for offset in 0..BAR0_BYTES {
            for len in [1, 2, 4, 8] {
                registers.write(offset, &[0xa5; 8][..len]);
                read(&mut registers, offset, len);
            }
        }
    }
}
