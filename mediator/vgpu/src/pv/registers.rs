//! Registers of the paravirtual interface.

use super::{Interface, OFFSET};
use pv::abi::{MAX_QUEUE, SIGNATURE, feature, register as r, status};

/// Action required from the caller after a register write.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum RegisterEffect {
    Nothing,
    /// Check for new batches.
    Doorbell,
    /// Remove everything that the interface has created.
    Reset,
    /// Start the queue.
    Start,
}

impl Interface {
    /// Reads registers. Accesses are aligned and at most eight bytes long, so they never extend beyond the interface.
    pub(crate) fn read(&self, offset: u64, data: &mut [u8]) {
        for (at, byte) in (offset..).zip(data) {
            let word = self.read32(at as u32 & !3).to_le_bytes();
            *byte = word[(at & 3) as usize];
        }
    }

    /// Writes a register. Only 32-bit writes have an effect.
    pub(crate) fn write(&mut self, offset: u64, data: &[u8]) -> RegisterEffect {
        match data.try_into() {
            Ok(word) if offset.is_multiple_of(4) => self.write32(offset as u32, u32::from_le_bytes(word)),
            _ => RegisterEffect::Nothing,
        }
    }

    /// Reads the register at a byte offset of BAR0.
    fn read32(&self, offset: u32) -> u32 {
        let (lo, hi) = (|address: u64| address as u32, |address: u64| (address >> 32) as u32);
        match offset - OFFSET {
            r::SIGNATURE => SIGNATURE,
            r::FEATURES => self.offered,
            r::STATUS => self.status,
            r::QUEUE_SIZE => self.setup.size.into(),
            r::QUEUE_DESCRIPTORS => lo(self.setup.descriptors),
            at if at == r::QUEUE_DESCRIPTORS + 4 => hi(self.setup.descriptors),
            r::QUEUE_AVAILABLE => lo(self.setup.available),
            at if at == r::QUEUE_AVAILABLE + 4 => hi(self.setup.available),
            r::QUEUE_USED => lo(self.setup.used),
            at if at == r::QUEUE_USED + 4 => hi(self.setup.used),
            r::ENDED => self.ended,
            r::INTERRUPT => self.interrupt.into(),
            r::INTERRUPT_ENABLE => self.interrupt_enabled.into(),
            _ => 0,
        }
    }

    /// Writes the register at a byte offset of BAR0.
    fn write32(&mut self, offset: u32, value: u32) -> RegisterEffect {
        let at = offset - OFFSET;
        let lo = |address: &mut u64| *address = (*address & !0xffff_ffff) | u64::from(value);
        let hi = |address: &mut u64| *address = (*address & 0xffff_ffff) | u64::from(value) << 32;
        match at {
            r::STATUS => return self.set_status(value),
            r::DOORBELL if self.status == status::READY => {
                self.counts.doorbells += 1;
                return RegisterEffect::Doorbell;
            }
            r::INTERRUPT => self.interrupt &= value & 1 == 0,
            r::INTERRUPT_ENABLE => {
                self.interrupt_enabled = value & 1 != 0 && self.accepted & feature::INTERRUPT != 0;
            }
            // The queue must not change while it is in use.
            _ if self.status != status::RESET => {}
            r::FEATURES => self.accepted = value,
            r::QUEUE_SIZE => {
                let size = u16::try_from(value).ok().filter(|size| size.is_power_of_two() && *size <= MAX_QUEUE);
                self.setup.size = size.unwrap_or(0);
            }
            r::QUEUE_DESCRIPTORS => lo(&mut self.setup.descriptors),
            at if at == r::QUEUE_DESCRIPTORS + 4 => hi(&mut self.setup.descriptors),
            r::QUEUE_AVAILABLE => lo(&mut self.setup.available),
            at if at == r::QUEUE_AVAILABLE + 4 => hi(&mut self.setup.available),
            r::QUEUE_USED => lo(&mut self.setup.used),
            at if at == r::QUEUE_USED + 4 => hi(&mut self.setup.used),
            _ => {}
        }
        RegisterEffect::Nothing
    }

    fn set_status(&mut self, value: u32) -> RegisterEffect {
        match (value, self.status) {
            (status::RESET, _) => RegisterEffect::Reset,
            (status::READY, status::RESET) => RegisterEffect::Start,
            _ => RegisterEffect::Nothing,
        }
    }
}
