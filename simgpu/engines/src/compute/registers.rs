//! The state that methods set in a channel's compute object, and its conversion to a launch.

use super::launch::{Bank, Banks, GlobalMap, Launch};
use super::stack;
use crate::engines::EngineError;
use nvspec::addr::GpuVa;
use nvspec::class::compute90c0::limit;
use nvspec::class::m2mf9039::{cond_mode, render_override};
use nvspec::class::{compute90c0 as methods, data_error};

/// State of a channel's compute object.
#[derive(Clone, Debug)]
pub(crate) struct Registers {
    /// Last data dword of each method that stores state.
    words: Box<[u32; methods::STATE_WORDS]>,
    banks: Banks,
    global_map: GlobalMap,
}

impl Default for Registers {
    /// Returns the initial state. GUESS: the hardware's initial windows and identity map are those that drivers set.
    fn default() -> Self {
        let words = Box::new([0; methods::STATE_WORDS]);
        let mut registers = Self { words, banks: Banks::default(), global_map: GlobalMap::default() };
        registers.set(methods::COND_MODE, cond_mode::ALWAYS);
        registers.set(methods::SHARED_WINDOW, 0xfe00_0000);
        registers.set(methods::LOCAL_WINDOW, 0xff00_0000);
        registers
    }
}

const fn bad(error: u32) -> EngineError {
    EngineError::Data(error)
}

impl Registers {
    pub(crate) fn word(&self, method: u32) -> u32 {
        methods::state_word(method).map_or(0, |(index, _)| self.words[index])
    }

    /// Stores the data of a method that only sets state.
    pub(crate) fn set(&mut self, method: u32, data: u32) {
        if let Some((index, _)) = methods::state_word(method) {
            self.words[index] = data;
        }
    }

    pub(crate) fn address(&self, high: u32, low: u32) -> GpuVa {
        GpuVa(u64::from(self.word(high)) << 32 | u64::from(self.word(low)))
    }

    /// Returns the selected constant buffer.
    pub(crate) fn selected(&self) -> Bank {
        Bank {
            base: self.address(methods::CONSTANT_ADDRESS_HIGH, methods::CONSTANT_ADDRESS_LOW).0,
            bytes: self.word(methods::CONSTANT_SIZE),
        }
    }

    /// Binds or unbinds the selected constant buffer.
    pub(crate) fn bind(&mut self, data: u32) -> Result<(), EngineError> {
        use methods::bind::{BANK, VALID};
        if data & !(VALID.mask() | BANK.mask()) != 0 {
            return Err(bad(data_error::INVALID_BITFIELD));
        }
        let selected = if VALID.is_set(data) { self.selected() } else { Bank::default() };
        if selected.bytes > limit::CONSTANT_BYTES {
            return Err(bad(data_error::INVALID_VALUE));
        }
        let bank = self.banks.get_mut(BANK.get(data) as usize).ok_or(bad(data_error::INVALID_VALUE))?;
        *bank = selected;
        Ok(())
    }

    /// Sets an entry of the global map.
    pub(crate) fn map_global(&mut self, data: u32) -> Result<(), EngineError> {
        use methods::global_map::{GLOBAL_UPPER, READ, VIRTUAL_UPPER, WRITE};
        if data & !(GLOBAL_UPPER.mask() | READ.mask() | VIRTUAL_UPPER.mask() | WRITE.mask()) != 0 {
            return Err(bad(data_error::INVALID_BITFIELD));
        }
        let right = |field: nvspec::Field, right: u16| if field.is_set(data) { right } else { 0 };
        self.global_map.0[GLOBAL_UPPER.get(data) as usize] =
            VIRTUAL_UPPER.get(data) as u16 | right(READ, GlobalMap::READ) | right(WRITE, GlobalMap::WRITE);
        Ok(())
    }

    /// Returns true if the method state permits launches.
    pub(crate) fn enabled(&self) -> Result<bool, EngineError> {
        match (self.word(methods::RENDER_ENABLE_OVERRIDE), self.word(methods::COND_MODE)) {
            (render_override::ALWAYS, _) | (render_override::NONE, cond_mode::ALWAYS) => Ok(true),
            (render_override::NEVER, _) | (render_override::NONE, cond_mode::NEVER) => Ok(false),
            _ => Err(bad(data_error::INVALID_ENUM)),
        }
    }

    /// Returns the launch that the state describes, for a card with `sms` multiprocessors.
    pub(crate) fn launch(&self, cta_param: u32, sms: u32) -> Result<Launch, EngineError> {
        let pair = |yx: u32, z: u32| [self.word(yx) & 0xffff, self.word(yx) >> 16, self.word(z)];
        let grid = pair(methods::GRID_YX, methods::GRID_Z);
        let block = pair(methods::BLOCK_YX, methods::BLOCK_Z);
        let registers = self.word(methods::REGISTERS);
        let (local_low, local_high) = (self.word(methods::LOCAL_LOW_SIZE), self.word(methods::LOCAL_HIGH_SIZE));
        let (shared_bytes, barriers) = (self.word(methods::SHARED_SIZE), self.word(methods::BLOCK_BARRIERS));
        let [x, y, z] = block;
        let empty = grid.contains(&0) || block.contains(&0);
        // The products cannot overflow: each dimension is checked against its limit first.
        let shape = x <= limit::BLOCK_XY && y <= limit::BLOCK_XY && z <= limit::BLOCK_Z;
        if empty || !shape || x * y * z > limit::BLOCK_THREADS || registers > limit::REGISTERS {
            return Err(bad(data_error::INVALID_VALUE));
        }
        let warps = (x * y * z).div_ceil(32);
        let too_much = warps * 32 * registers > limit::SM_REGISTERS
            || shared_bytes > limit::SHARED_BYTES
            || barriers > limit::BARRIERS
            || u64::from(local_low) + u64::from(local_high) > u64::from(limit::LOCAL_BYTES);
        if too_much {
            return Err(bad(data_error::INVALID_VALUE));
        }
        let mapped = self.word(methods::GLOBAL_MAP_MODE) != 0 && self.global_map != GlobalMap::default();
        let local_size = self.address(methods::LOCAL_SIZE_HIGH, methods::LOCAL_SIZE_LOW);
        Ok(Launch {
            grid,
            block,
            code: self.address(methods::CODE_ADDRESS_HIGH, methods::CODE_ADDRESS_LOW),
            entry: self.word(methods::PROGRAM_START),
            registers,
            shared_bytes,
            shared_window: u64::from(self.word(methods::SHARED_WINDOW)),
            barriers,
            local_low,
            local_high,
            local_window: u64::from(self.word(methods::LOCAL_WINDOW)),
            local_base: self.address(methods::LOCAL_ADDRESS_HIGH, methods::LOCAL_ADDRESS_LOW),
            local_bytes: local_size.0,
            stack_limit: stack::limit(self.word(methods::STACK_SIZE)),
            banks: self.banks,
            global_map: mapped.then(|| self.global_map.clone()),
            cta_param,
            grid_param: self.word(methods::GRID_PARAM),
            sms,
        })
    }

    /// Number of words in a context image.
    pub(crate) const IMAGE_WORDS: usize = methods::STATE_WORDS + 3 * limit::CONSTANT_BANKS as usize + 128;

    /// Serializes the state to a context image: methods, banks and the global map, but no running grid.
    pub(crate) fn to_words(&self) -> Vec<u32> {
        let banks = self.banks.iter().flat_map(|bank| [bank.base as u32, (bank.base >> 32) as u32, bank.bytes]);
        let map = self.global_map.0.chunks_exact(2).map(|pair| u32::from(pair[0]) | u32::from(pair[1]) << 16);
        self.words.iter().copied().chain(banks).chain(map).collect()
    }

    /// Parses the state from an untrusted image. Masks off bits that no method can set.
    pub(crate) fn from_words(words: &[u32]) -> Self {
        let mut registers = Self::default();
        if words.len() < Self::IMAGE_WORDS {
            return registers;
        }
        let (state, rest) = words.split_at(methods::STATE_WORDS);
        let masks = methods::STATE.iter().flat_map(|row| std::iter::repeat_n(row.mask, row.count as usize));
        for ((place, word), mask) in registers.words.iter_mut().zip(state).zip(masks) {
            *place = word & mask;
        }
        let (banks, map) = rest.split_at(3 * limit::CONSTANT_BANKS as usize);
        for (bank, words) in registers.banks.iter_mut().zip(banks.chunks_exact(3)) {
            let base = u64::from(words[1] & 0xff) << 32 | u64::from(words[0]);
            *bank = Bank { base, bytes: words[2].min(limit::CONSTANT_BYTES) };
        }
        for (pair, word) in registers.global_map.0.chunks_exact_mut(2).zip(map) {
            (pair[0], pair[1]) = (*word as u16 & 0x3ff, (word >> 16) as u16 & 0x3ff);
        }
        registers
    }
}
