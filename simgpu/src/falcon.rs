//! A falcon's memories as seen by the CPU: drivers upload code and data, and read data back. The model does not execute
//! falcon code, but a started falcon works only if there is code at its start address.

use nvspec::falcon::{CODE_PAGE_BYTES, CODE_PAGE_WORDS, CODE_WORDS_MAX};
use nvspec::regs::fecs::DMEM_CONTROL::{ADDRESS, READ_INCREMENT, WRITE_INCREMENT};
use nvspec::regs::fecs::IMEM_CONTROL;
use saved_state::Invalid;
use serde::{Deserialize, Serialize};

/// Size of data memory in dwords: 4 KiB. Addresses beyond this size wrap around.
const WORDS: usize = 1024;

#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct SavedMemory {
    pub(crate) words: Vec<u32>,
    control: u32,
}

/// A data memory with one port.
#[derive(Clone, Debug)]
pub(crate) struct DataMemory {
    words: Box<[u32; WORDS]>,
    control: u32,
}

impl DataMemory {
    pub(crate) fn new() -> Self {
        Self { words: Box::new([0; WORDS]), control: 0 }
    }

    pub(crate) fn save(&self) -> SavedMemory {
        let Self { words, control } = self;
        SavedMemory { words: words.to_vec(), control: *control }
    }

    pub(crate) fn restored(SavedMemory { words, control }: SavedMemory) -> Result<Self, Invalid> {
        let words =
            words.into_boxed_slice().try_into().map_err(|_| Invalid::new("the size of a falcon's memory is wrong"))?;
        Ok(Self { words, control })
    }

    pub(crate) fn control(&self) -> u32 {
        self.control
    }

    pub(crate) fn set_control(&mut self, value: u32) {
        self.control = value;
    }

    fn advance(&mut self) -> usize {
        let address = ADDRESS.get(self.control);
        self.control = ADDRESS.with(self.control, address.wrapping_add(4));
        address as usize / 4 % WORDS
    }

    fn position(&self) -> usize {
        ADDRESS.get(self.control) as usize / 4 % WORDS
    }

    pub(crate) fn read(&mut self) -> u32 {
        let at = if READ_INCREMENT.is_set(self.control) { self.advance() } else { self.position() };
        self.words[at]
    }

    pub(crate) fn write(&mut self, value: u32) {
        let at = if WRITE_INCREMENT.is_set(self.control) { self.advance() } else { self.position() };
        self.words[at] = value;
    }
}

/// Saved state of a code memory and its port. Each written page has an entry: its number, its tag, the number of dwords
/// written, and a flag that is set if any dword is nonzero.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct SavedCode {
    pages: Vec<(u16, u32, u32, bool)>,
    control: u32,
    tag: u32,
}

/// Size of code memory in pages: the range of the port's address field.
const CODE_PAGES: usize = CODE_WORDS_MAX / CODE_PAGE_WORDS;

#[derive(Clone, Copy, Debug, Default)]
struct CodePage {
    /// Virtual address of the page, in pages.
    tag: u32,
    /// Number of dwords written since the tag was last set.
    words: u32,
    /// Set if any dword is nonzero.
    any: bool,
}

/// The port to the code memory. It discards uploaded code, and only records whether a falcon can start with this code.
#[derive(Clone, Debug)]
pub(crate) struct CodeMemory {
    pages: Box<[CodePage; CODE_PAGES]>,
    control: u32,
    tag: u32,
}

impl CodeMemory {
    pub(crate) fn new() -> Self {
        Self { pages: Box::new([CodePage::default(); CODE_PAGES]), control: 0, tag: 0 }
    }

    pub(crate) fn save(&self) -> SavedCode {
        let Self { pages, control, tag } = self;
        let written = (0u16..).zip(pages.iter()).filter(|(_, page)| page.words != 0);
        let pages = written.map(|(number, CodePage { tag, words, any })| (number, *tag, *words, *any)).collect();
        SavedCode { pages, control: *control, tag: *tag }
    }

    pub(crate) fn restored(SavedCode { pages, control, tag }: SavedCode) -> Result<Self, Invalid> {
        let mut memory = Self { control, tag, ..Self::new() };
        Invalid::unless(saved_state::ascend(pages.iter().map(|page| page.0).collect::<Vec<_>>()), || {
            "code pages are not in ascending order".into()
        })?;
        for (number, tag, words, any) in pages {
            let page = memory.pages.get_mut(usize::from(number));
            let page = page.filter(|_| words != 0).ok_or_else(|| Invalid::new("a code page number is out of range"))?;
            *page = CodePage { tag, words, any };
        }
        Ok(memory)
    }

    pub(crate) fn control(&self) -> u32 {
        self.control
    }

    pub(crate) fn set_control(&mut self, value: u32) {
        self.control = value;
    }

    /// Sets the virtual address of the next page to be written, in pages.
    pub(crate) fn set_tag(&mut self, value: u32) {
        self.tag = value;
    }

    pub(crate) fn tag(&self) -> u32 {
        self.tag
    }

    pub(crate) fn write(&mut self, value: u32) {
        let address = IMEM_CONTROL::ADDRESS.get(self.control);
        let page = &mut self.pages[(address / CODE_PAGE_BYTES) as usize % CODE_PAGES];
        if address.is_multiple_of(CODE_PAGE_BYTES) {
            *page = CodePage { tag: self.tag, ..CodePage::default() };
        }
        page.words = page.words.saturating_add(1);
        page.any |= value != 0;
        if IMEM_CONTROL::WRITE_INCREMENT.is_set(self.control) {
            self.control = IMEM_CONTROL::ADDRESS.with(self.control, address.wrapping_add(4));
        }
    }

    /// Returns true if there is code at the falcon's start address: a completely written page with this virtual address
    /// and a nonzero dword. GUESS: a partially written page is invalid.
    pub(crate) fn begins_at(&self, vector: u32) -> bool {
        let whole = |page: &CodePage| page.words >= CODE_PAGE_WORDS as u32 && page.any;
        self.pages.iter().any(|page| whole(page) && page.tag == vector / CODE_PAGE_BYTES)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn code_begins_where_a_whole_page_has_the_tag() {
        let mut memory = CodeMemory::new();
        assert!(!memory.begins_at(0));
        memory.set_control(IMEM_CONTROL::WRITE_INCREMENT.mask());
        for tag in [0, 3] {
            memory.set_tag(tag);
            (0..CODE_PAGE_WORDS as u32).for_each(|word| memory.write(word));
        }
        memory.set_tag(5);
        memory.write(1);
        let found = [0, 0x100, 0x200, 0x300, 0x500].map(|vector| memory.begins_at(vector));
        assert_eq!(found, [true, false, false, true, false], "the last page is incomplete");
        memory.set_control(IMEM_CONTROL::WRITE_INCREMENT.mask());
        memory.set_tag(0);
        (0..CODE_PAGE_WORDS).for_each(|_| memory.write(0));
        assert!(!memory.begins_at(0), "zeros are not code");
    }

    #[test]
    fn port_increments_only_in_the_direction_asked_for() {
        let mut memory = DataMemory::new();
        memory.set_control(WRITE_INCREMENT.encode(1) | 0x10);
        memory.write(1);
        memory.write(2);
        memory.set_control(READ_INCREMENT.encode(1) | 0x10);
        assert_eq!((memory.read(), memory.read()), (1, 2));
        memory.set_control(0x10);
        assert_eq!((memory.read(), memory.read()), (1, 1));
    }
}
