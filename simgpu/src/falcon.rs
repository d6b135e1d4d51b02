//! The data memory of a falcon, as far as the CPU reaches it: drivers append to what they uploaded and read it back.
//! Code memory is not kept, as no falcon code is executed.

use nvspec::regs::fecs::DMEM_CONTROL::{ADDRESS, READ_INCREMENT, WRITE_INCREMENT};
use saved_state::Invalid;
use serde::{Deserialize, Serialize};

/// Words of data memory: as many as the address field of the port can reach, in 4 KiB.
const WORDS: usize = 1024;

/// A data memory with its port, as it is saved.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct SavedMemory {
    pub(crate) words: Vec<u32>,
    control: u32,
}

/// One port to the data memory.
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
            words.into_boxed_slice().try_into().map_err(|_| Invalid::new("a falcon's memory has another size"))?;
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn port_increments_only_in_the_direction_asked_for() {
        let mut memory = DataMemory::new();
        memory.set_control(WRITE_INCREMENT.of(1) | 0x10);
        memory.write(1);
        memory.write(2);
        memory.set_control(READ_INCREMENT.of(1) | 0x10);
        assert_eq!((memory.read(), memory.read()), (1, 2));
        memory.set_control(0x10);
        assert_eq!((memory.read(), memory.read()), (1, 1));
    }
}
