//! Contents of registers without behaviour: a sparse image of BAR0. `nvspec` declares the access modes.

use nvspec::regs::{blocks, windows::BAR0_BYTES};
use nvspec::{Access, RegInfo};
use saved_state::{Invalid, ascend};

const PAGE_BYTES: u32 = 4096;
const PAGE_WORDS: usize = (PAGE_BYTES / 4) as usize;
const PAGES: usize = (BAR0_BYTES / PAGE_BYTES as u64) as usize;

/// One 32-bit word per BAR0 dword. Pages that were never written use no memory and read as zero.
#[derive(Debug)]
pub(crate) struct Storage {
    pages: Vec<Option<Box<[u32; PAGE_WORDS]>>>,
}

impl Storage {
    /// Creates the storage with all registers at their reset values.
    pub(crate) fn new() -> Self {
        let mut storage = Self { pages: (0..PAGES).map(|_| None).collect() };
        storage.reset();
        storage
    }

    /// Returns the BAR0 offsets and values of all nonzero dwords, in ascending order.
    pub(crate) fn save(&self) -> Vec<(u32, u32)> {
        let Self { pages } = self;
        let pages = (0u32..).step_by(PAGE_BYTES as usize).zip(pages);
        let held = pages.filter_map(|(base, page)| Some((base, page.as_deref()?)));
        let words = held.flat_map(|(base, page)| (base..).step_by(4).zip(page.iter().copied()));
        words.filter(|(_, value)| *value != 0).collect()
    }

    /// Restores the saved dwords, and sets all other dwords to 0.
    pub(crate) fn restored(saved: &[(u32, u32)]) -> Result<Self, Invalid> {
        let mut storage = Self { pages: (0..PAGES).map(|_| None).collect() };
        let words = saved.iter().all(|(at, _)| u64::from(*at) < BAR0_BYTES && at.is_multiple_of(4));
        Invalid::unless(words && ascend(saved.iter().map(|(at, _)| at)), || {
            "saved registers are out of order or outside of BAR0".into()
        })?;
        saved.iter().for_each(|(at, value)| storage.poke(*at, *value));
        Ok(storage)
    }

    /// Sets all registers to their reset values.
    pub(crate) fn reset(&mut self) {
        self.pages.iter_mut().for_each(|page| *page = None);
        self.reset_range(0, BAR0_BYTES as u32);
    }

    /// Sets the registers in `first..end` to their reset values, and the other dwords in the range to zero. Both bounds
    /// must be multiples of 4 KiB.
    pub(crate) fn reset_range(&mut self, first: u32, end: u32) {
        for page in first / PAGE_BYTES..end / PAGE_BYTES {
            if let Some(slot) = self.pages.get_mut(page as usize) {
                *slot = None;
            }
        }
        for reg in blocks().flat_map(|(_, _, _, info)| *info).filter(|reg| reg.reset != 0) {
            for offset in (0..reg.count).map(|index| reg.offset + index * reg.stride) {
                if (first..end).contains(&offset) {
                    self.poke(offset, reg.reset);
                }
            }
        }
    }

    /// Returns the dword at `offset`, regardless of the register's access mode.
    pub(crate) fn peek(&self, offset: u32) -> u32 {
        match self.pages.get((offset / PAGE_BYTES) as usize) {
            Some(Some(page)) => page[(offset % PAGE_BYTES / 4) as usize],
            _ => 0,
        }
    }

    /// Replaces the dword at `offset`, regardless of the register's access mode.
    pub(crate) fn poke(&mut self, offset: u32, value: u32) {
        if let Some(slot) = self.pages.get_mut((offset / PAGE_BYTES) as usize) {
            let page = slot.get_or_insert_with(|| Box::new([0; PAGE_WORDS]));
            page[(offset % PAGE_BYTES / 4) as usize] = value;
        }
    }

    /// Performs a CPU read of a register without behaviour.
    pub(crate) fn read(&self, info: &RegInfo, offset: u32) -> u32 {
        match info.access {
            Access::Wo => 0,
            Access::Rw | Access::Ro | Access::W1c => self.peek(offset),
        }
    }

    /// Performs a CPU write to a register without behaviour.
    pub(crate) fn write(&mut self, info: &RegInfo, offset: u32, value: u32) {
        match info.access {
            Access::Rw | Access::Wo => self.poke(offset, value),
            Access::W1c => self.poke(offset, self.peek(offset) & !value),
            Access::Ro => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use nvspec::regs::{pbus, pfb, pmc};

    #[test]
    fn reset_values_are_those_declared() {
        let storage = Storage::new();
        assert_eq!(storage.peek(pmc::INTR_MASK_0::OFFSET), u32::MAX);
        assert_eq!(storage.peek(pfb::MMU_CTRL::OFFSET), 0x00ff_8000);
        assert_eq!(storage.peek(0xff_fffc), 0);
    }

    #[test]
    fn write_one_to_clear_clears_only_ones() {
        let mut storage = Storage::new();
        storage.poke(pbus::INTR::OFFSET, 0xa);
        storage.write(pbus::Reg::INTR.info(), pbus::INTR::OFFSET, 0x2);
        assert_eq!(storage.peek(pbus::INTR::OFFSET), 0x8);
    }

    #[test]
    fn reset_of_a_range_leaves_the_rest() {
        let mut storage = Storage::new();
        storage.poke(pmc::INTR_MASK_0::OFFSET, 5);
        storage.poke(pfb::MMU_CTRL::OFFSET, 6);
        storage.reset_range(0, 0x1000);
        assert_eq!((storage.peek(pmc::INTR_MASK_0::OFFSET), storage.peek(pfb::MMU_CTRL::OFFSET)), (u32::MAX, 6));
    }
}
