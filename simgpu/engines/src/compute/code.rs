//! The instruction cache: keeps decoded instructions across grids as long as the code bytes do not change.

use super::launch::{Failure, ILLEGAL};
use nvspec::addr::{GpuVa, VA_BITS};
use nvspec::class::compute90c0::{limit, warp_error};
use simgpu_memory::mmu::Session;
use sm20::{Form, Instruction, Op};
use std::collections::HashMap;

/// Size of a line in bytes. Lines are read and compared with memory as a whole.
const LINE_BYTES: usize = 512;
const LINE_WORDS: usize = LINE_BYTES / 4;
/// Maximum number of lines per worker. A full cache is cleared.
const LINES_MAX: usize = 512;

#[derive(Clone, Copy, Debug)]
enum Slot {
    /// The instruction has not been decoded yet.
    Unknown,
    Good(Decoded),
    Bad(u32),
}

#[derive(Clone, Copy, Debug)]
pub(crate) struct Decoded {
    pub(crate) instruction: Instruction,
    /// Number of registers that a program needs for this instruction: one more than the highest register that it uses,
    /// including pairs and quads.
    registers: u8,
}

#[derive(Debug)]
struct Line {
    words: [u32; LINE_WORDS],
    slots: [Slot; LINE_WORDS],
    /// Number of the last grid in which the line was compared with memory.
    checked: u64,
}

/// A worker's instruction cache.
#[derive(Debug)]
pub(crate) struct Code {
    lines: Vec<Line>,
    /// Index in `lines` by the line's GPU virtual address.
    places: HashMap<u64, usize>,
    /// Address and index of the most recently used line.
    last: (u64, usize),
    base: u64,
    grid: u64,
}

const NO_LINE: u64 = u64::MAX;

impl Code {
    pub(crate) fn new() -> Self {
        Self { lines: Vec::new(), places: HashMap::new(), last: (NO_LINE, 0), base: 0, grid: 0 }
    }

    /// Starts a grid with the code segment at `base`. Each line is compared with memory before its first use in the
    /// grid.
    pub(crate) fn begin(&mut self, base: GpuVa) {
        self.base = base.0;
        self.grid += 1;
        self.last = (NO_LINE, 0);
    }

    /// Fetches the instruction at byte offset `pc` of the code segment, for a program with `registers` registers.
    pub(crate) fn fetch(&mut self, pc: u32, registers: u32, session: &mut Session<'_>) -> Result<Instruction, Failure> {
        let va = self.base.wrapping_add(u64::from(pc));
        let at = va & !(LINE_BYTES as u64 - 1);
        if at != self.last.0 {
            self.last = (at, self.line(at, session)?);
        }
        let word = (va - at) as usize / 4;
        if let Slot::Good(decoded) = &self.lines[self.last.1].slots[word]
            && va.is_multiple_of(4)
            && u32::from(decoded.registers) <= registers
        {
            return Ok(decoded.instruction);
        }
        self.decode(va, word, registers, session)
    }

    #[cold]
    fn decode(
        &mut self,
        va: u64,
        word: usize,
        registers: u32,
        session: &mut Session<'_>,
    ) -> Result<Instruction, Failure> {
        if !va.is_multiple_of(4) {
            return Err(Failure::Warp(warp_error::MISALIGNED_PC));
        }
        let place = self.last.1;
        if let Slot::Unknown = self.lines[place].slots[word] {
            let line = &self.lines[place];
            let low = line.words[word];
            let high = match line.words.get(word + 1) {
                Some(high) => *high,
                None if sm20::size(low) == 4 => 0,
                // Do not cache this instruction: its second dword is in the next line, whose changes would not
                // invalidate the entry.
                None => session.read32(GpuVa(va).offset(4))?,
            };
            let slot = decode(u64::from(high) << 32 | u64::from(low));
            if word + 1 < LINE_WORDS || sm20::size(low) == 4 {
                self.lines[place].slots[word] = slot;
            }
            return checked(slot, registers);
        }
        checked(self.lines[place].slots[word], registers)
    }

    /// Returns the index of the line at address `at`. The first use in a grid refreshes the line from memory.
    fn line(&mut self, at: u64, session: &mut Session<'_>) -> Result<usize, Failure> {
        if at >> VA_BITS != 0 {
            return Err(Failure::Warp(warp_error::PC_OVERFLOW));
        }
        let known = self.places.get(&at).copied();
        if let Some(place) = known
            && self.lines[place].checked == self.grid
        {
            return Ok(place);
        }
        let mut bytes = [0; LINE_BYTES];
        session.read(GpuVa(at), &mut bytes)?;
        let mut words = [0; LINE_WORDS];
        for (word, bytes) in words.iter_mut().zip(bytes.chunks_exact(4)) {
            *word = u32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]);
        }
        if let Some(place) = known {
            let line = &mut self.lines[place];
            if line.words != words {
                (line.words, line.slots) = (words, [Slot::Unknown; LINE_WORDS]);
            }
            line.checked = self.grid;
            return Ok(place);
        }
        if self.lines.len() == LINES_MAX {
            self.lines.clear();
            self.places.clear();
        }
        let place = self.lines.len();
        self.lines.push(Line { words, slots: [Slot::Unknown; LINE_WORDS], checked: self.grid });
        self.places.insert(at, place);
        Ok(place)
    }
}

fn checked(slot: Slot, registers: u32) -> Result<Instruction, Failure> {
    match slot {
        Slot::Good(decoded) if u32::from(decoded.registers) <= registers => Ok(decoded.instruction),
        Slot::Good(_) => Err(Failure::Warp(warp_error::OUT_OF_RANGE_REGISTER)),
        Slot::Bad(error) => Err(Failure::Warp(error)),
        Slot::Unknown => Err(ILLEGAL),
    }
}

fn decode(word: u64) -> Slot {
    let word = if sm20::size(word as u32) == 4 { word & u64::from(u32::MAX) } else { word };
    let Ok(instruction) = sm20::decode(word) else { return Slot::Bad(warp_error::ILLEGAL_ENCODING) };
    debug_assert_eq!(instruction.size(), if instruction.form == Form::Short { 4 } else { 8 });
    match registers(&instruction.op) {
        Ok(registers) => Slot::Good(Decoded { instruction, registers }),
        Err(error) => Slot::Bad(error),
    }
}

/// Returns one more than the highest register that an operation uses, or the warp error if its registers are invalid.
pub(crate) fn registers(op: &Op) -> Result<u8, u32> {
    let mut registers = 0;
    let mut aligned = true;
    op.registers(|register, count| {
        if !register.is_zero() {
            aligned &= register.index() % count.max(1) == 0;
            registers = registers.max(register.index().saturating_add(count));
        }
    });
    if !aligned {
        Err(warp_error::MISALIGNED_REGISTER)
    } else if u32::from(registers) > limit::REGISTERS {
        Err(warp_error::OUT_OF_RANGE_REGISTER)
    } else {
        Ok(registers)
    }
}
