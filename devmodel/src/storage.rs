//! Storage for plain registers, which read as the value last written. The storage covers all of BAR0, and allocates
//! pages on demand.

mod saved;

use nvspec::regs::{self, windows};
use nvspec::{Access, RegInfo};

const PAGE_DWORDS: usize = 1024;
const PAGES: usize = (windows::BAR0_BYTES / 4096) as usize;

type Page = Box<[u32; PAGE_DWORDS]>;

/// Values of all plain registers. The storage never exceeds the size of BAR0, and needs less than 1 MiB for the
/// writable registers of the policy table.
#[derive(Clone)]
pub struct Storage {
    pages: Vec<Option<Page>>,
}

impl std::fmt::Debug for Storage {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Storage").field("pages", &self.pages_in_use()).finish()
    }
}

impl Default for Storage {
    fn default() -> Self {
        let mut storage = Self { pages: Vec::new() };
        storage.reset();
        storage
    }
}

impl Storage {
    /// Sets all registers to their reset values.
    pub fn reset(&mut self) {
        self.pages.clear();
        self.pages.resize_with(PAGES, || None);
        self.reset_range(0, u32::MAX);
    }

    /// Sets all registers in the 4 KiB pages of `base..end` to their reset values.
    pub fn reset_range(&mut self, base: u32, end: u32) {
        let (first, _) = place(base);
        let (behind, _) = place(end);
        for page in self.pages.iter_mut().take(behind).skip(first) {
            *page = None;
        }
        let blocks = regs::blocks().filter(|(_, block, block_end, _)| *block < end && *block_end > base);
        for reg in blocks.flat_map(|(_, _, _, info)| info.iter()).filter(|reg| reg.reset != 0) {
            for index in 0..reg.count {
                let offset = reg.offset.wrapping_add(index.wrapping_mul(reg.stride));
                if (base..end).contains(&offset) {
                    self.set(offset, reg.reset);
                }
            }
        }
    }

    /// Returns the dword at byte `offset` of BAR0, or 0 if it was never written.
    #[must_use]
    pub fn get(&self, offset: u32) -> u32 {
        let (page, dword) = place(offset);
        self.pages.get(page).and_then(Option::as_ref).and_then(|page| page.get(dword)).copied().unwrap_or(0)
    }

    /// Sets the dword at byte `offset` of BAR0.
    pub fn set(&mut self, offset: u32, value: u32) {
        let (page, dword) = place(offset);
        let Some(slot) = self.pages.get_mut(page) else { return };
        if value == 0 && slot.is_none() {
            return;
        }
        if let Some(cell) = slot.get_or_insert_with(|| Box::new([0; PAGE_DWORDS])).get_mut(dword) {
            *cell = value;
        }
    }

    /// Reads register `reg`, which is at byte `offset` of BAR0.
    #[must_use]
    pub fn read(&self, reg: &RegInfo, offset: u32) -> u32 {
        if reg.access == Access::Wo { 0 } else { self.get(offset) }
    }

    /// Writes register `reg`, which is at byte `offset` of BAR0.
    pub fn write(&mut self, reg: &RegInfo, offset: u32, value: u32) {
        match reg.access {
            Access::Rw | Access::Wo => self.set(offset, value),
            Access::W1c => self.set(offset, self.get(offset) & !value),
            Access::Ro => {}
        }
    }

    /// Returns the number of allocated 4 KiB pages.
    #[must_use]
    pub fn pages_in_use(&self) -> usize {
        self.pages.iter().flatten().count()
    }
}

fn place(offset: u32) -> (usize, usize) {
    let dword = (offset / 4) as usize;
    (dword / PAGE_DWORDS, dword % PAGE_DWORDS)
}

#[cfg(test)]
mod tests {
    use super::*;
    use nvspec::regs::{ce0, pbus, pmc};

    #[test]
    fn registers_start_at_their_reset_value_and_return_to_it() {
        let mut storage = Storage::default();
        assert_eq!(storage.get(pmc::INTR_MASK_0::OFFSET), 0xffff_ffff);
        storage.set(pmc::INTR_MASK_0::OFFSET, 0);
        storage.set(pbus::DEBUG_1::OFFSET, 7);
        storage.reset();
        assert_eq!(storage.get(pmc::INTR_MASK_0::OFFSET), 0xffff_ffff);
        assert_eq!(storage.get(pbus::DEBUG_1::OFFSET), 0);
    }

    #[test]
    fn access_kind_determines_write_effect() {
        let mut storage = Storage::default();
        let (ro, w1c) = (ce0::Reg::HWCFG.info(), pbus::Reg::INTR.info());
        let before = storage.get(ro.offset);
        storage.write(ro, ro.offset, !before);
        assert_eq!(storage.read(ro, ro.offset), before);
        storage.set(w1c.offset, 0b1110);
        storage.write(w1c, w1c.offset, 0b0100);
        assert_eq!(storage.read(w1c, w1c.offset), 0b1010);
    }

    #[test]
    fn offsets_beyond_the_bar_hold_nothing() {
        let mut storage = Storage::default();
        storage.set(0xffff_fffc, 1);
        assert_eq!(storage.get(0xffff_fffc), 0);
    }
}
