//! The kernels, generated from one source as sm_20 assembly or as PTX.
//!
//! Each thread transforms one 16-byte block. It copies its share of the tables to shared memory, multiplies its
//! sector's encrypted number by the block's power of x (XTS, IEEE 1619), and computes AES by table look-up.

use std::fmt::Write;

use crate::SECTOR_BYTES;
use crate::tables::{Direction, KEYS_OFFSET, LAST_ROUND_OFFSET, ROUNDS, TABLE_BYTES};

/// Number of threads per thread block.
pub const THREADS: u32 = 256;
/// AES block size in bytes.
pub const BLOCK_BYTES: usize = 16;
/// Size of a kernel's parameters in bytes: the addresses of the data, the tables and the encrypted sector numbers, and
/// the number of AES blocks.
pub const PARAMS_BYTES: u32 = 28;
/// Log2 of the number of AES blocks per sector.
const BLOCKS_LOG2: u32 = (SECTOR_BYTES / BLOCK_BYTES).ilog2();
// All threads of a block copy the tables in the same number of loop iterations, so they do not diverge. The exponent of
// an AES block's power of x is below 32.
const _: () = assert!(TABLE_BYTES.is_multiple_of(4 * THREADS as usize) && BLOCKS_LOG2 <= 5);

/// Language of the generated kernels.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Language {
    /// Assembly for the `sm20` crate.
    Sm20,
    /// PTX for sm_70 and later.
    Ptx,
}

/// 32-bit registers, by their sm_20 numbers.
mod register {
    pub const THREAD: u32 = 0;
    pub const BLOCK: u32 = 1;
    pub const THREADS: u32 = 2;
    pub const INDEX: u32 = 4;
    /// A 64-bit address in this register and the next.
    pub const ADDRESS: u32 = 6;
    pub const TWEAK: u32 = 8;
    pub const STATE: u32 = 12;
    pub const NEXT: u32 = 16;
    pub const KEY: u32 = 20;
    pub const FIRST: u32 = 21;
    pub const SECOND: u32 = 22;
    pub const ROUND: u32 = 23;
    pub const LEFT: u32 = 24;
    pub const RIGHT: u32 = 25;
    pub const COUNT: u32 = 26;
}

/// A kernel parameter, by index.
#[derive(Clone, Copy)]
enum Parameter {
    Data,
    Tables,
    Tweaks,
}

struct Text {
    language: Language,
    out: String,
}

/// Returns the source code of both kernels.
pub fn source(language: Language) -> String {
    let mut text = Text { language, out: String::new() };
    if language == Language::Ptx {
        text.line(".version 7.0\n.target sm_70\n.address_size 64\n");
    }
    for direction in Direction::ALL {
        text.kernel(direction);
    }
    text.out
}

impl Text {
    fn line(&mut self, line: impl AsRef<str>) {
        // Writing to a string cannot fail.
        let _ = writeln!(self.out, "{}", line.as_ref());
    }

    /// Emits an operation on two registers, or on a register and an immediate. `sm20` and `ptx` are its mnemonics.
    fn two(&mut self, sm20: &str, ptx: &str, to: u32, from: u32, operand: &str) {
        match self.language {
            Language::Sm20 => self.line(format!("    {sm20} R{to}, R{from}, {operand}")),
            Language::Ptx => self.line(format!("    {ptx} %r{to}, %r{from}, {operand};")),
        }
    }

    fn name(&self, register: u32) -> String {
        let prefix = if self.language == Language::Sm20 { "R" } else { "%r" };
        format!("{prefix}{register}")
    }

    fn xor(&mut self, to: u32, from: u32, with: u32) {
        let with = self.name(with);
        self.two("LOP.XOR", "xor.b32", to, from, &with);
    }

    fn and(&mut self, to: u32, from: u32, mask: u32) {
        self.two("LOP.AND", "and.b32", to, from, &mask.to_string());
    }

    fn shift_left(&mut self, to: u32, from: u32, bits: u32) {
        self.two("SHL", "shl.b32", to, from, &bits.to_string());
    }

    fn shift_right(&mut self, to: u32, from: u32, bits: u32) {
        self.two("SHR.U32", "shr.u32", to, from, &bits.to_string());
    }

    fn add(&mut self, to: u32, from: u32, operand: &str) {
        self.two("IADD", "add.u32", to, from, operand);
    }

    fn copy(&mut self, to: u32, from: u32) {
        match self.language {
            Language::Sm20 => self.line(format!("    MOV R{to}, R{from}")),
            Language::Ptx => self.line(format!("    mov.u32 %r{to}, %r{from};")),
        }
    }

    fn set(&mut self, to: u32, value: u32) {
        match self.language {
            Language::Sm20 => self.line(format!("    MOV32I R{to}, {value}")),
            Language::Ptx => self.line(format!("    mov.u32 %r{to}, {value};")),
        }
    }

    /// Emits a load from shared memory at a register plus an offset.
    fn load_shared(&mut self, to: u32, at: u32, offset: usize) {
        match self.language {
            Language::Sm20 => self.line(format!("    LDS R{to}, [R{at}+{offset}]")),
            Language::Ptx => self.line(format!("    ld.shared.u32 %r{to}, [%r{at}+{offset}];")),
        }
    }

    /// Computes the address of element `index` of a parameter's array, whose elements are `bytes` bytes long.
    fn address(&mut self, parameter: Parameter, index: u32, bytes: usize) {
        let (at, scratch) = (register::ADDRESS, register::SECOND);
        match self.language {
            Language::Sm20 => {
                let offset = 0x20 + 8 * parameter as u32;
                self.set(scratch, bytes as u32);
                self.line(format!("    IMAD.U32.U32 R{at}.CC, R{index}, R{scratch}, c[0][{offset}]"));
                self.line(format!("    IMAD.U32.U32.HI.X R{}, R{index}, R{scratch}, c[0][{}]", at + 1, offset + 4));
            }
            Language::Ptx => {
                let name = ["data", "tables", "tweaks"][parameter as usize];
                self.line(format!("    ld.param.u64 %d1, [{name}];"));
                self.line(format!("    mad.wide.u32 %d0, %r{index}, {bytes}, %d1;"));
            }
        }
    }

    fn load(&mut self, to: u32, offset: u32) {
        match self.language {
            Language::Sm20 => self.line(format!("    LD.E R{to}, [R{}+{offset}]", register::ADDRESS)),
            Language::Ptx => self.line(format!("    ld.global.u32 %r{to}, [%d0+{offset}];")),
        }
    }

    fn store(&mut self, from: u32, offset: u32) {
        match self.language {
            Language::Sm20 => self.line(format!("    ST.E [R{}+{offset}], R{from}", register::ADDRESS)),
            Language::Ptx => self.line(format!("    st.global.u32 [%d0+{offset}], %r{from};")),
        }
    }

    /// Branches back to a label while a register is below a limit.
    fn repeat(&mut self, counter: u32, limit: u32, label: &str) {
        match self.language {
            Language::Sm20 => {
                self.line(format!("    ISETP.LT.U32.AND P0, PT, R{counter}, {limit}"));
                self.line(format!("  @P0 BRA {label}"));
            }
            Language::Ptx => {
                self.line(format!("    setp.lt.u32 %p0, %r{counter}, {limit};"));
                self.line(format!("    @%p0 bra {label};"));
            }
        }
    }

    fn label(&mut self, name: &str) {
        self.line(format!("{name}:"));
    }

    fn kernel(&mut self, direction: Direction) {
        let name = direction.name();
        match self.language {
            Language::Sm20 => {
                self.line(format!(".kernel {name}\n    .params 8, 8, 8, 4\n    .shared {TABLE_BYTES}"));
                self.line("    S2R R0, SR_TID.X\n    S2R R1, SR_CTAID.X\n    S2R R2, SR_NTID.X");
                self.line("    IMAD.U32.U32 R1, R1, R2, R0");
            }
            Language::Ptx => {
                self.line(format!(".visible .entry {name}(.param .u64 data, .param .u64 tables, .param .u64 tweaks,"));
                self.line("    .param .u32 blocks)\n{");
                self.line(format!("    .reg .u32 %r<{}>;\n    .reg .u64 %d<2>;\n    .reg .pred %p0;", register::COUNT));
                self.line(format!("    .shared .align 16 .b8 table[{TABLE_BYTES}];"));
                self.line("    mov.u32 %r0, %tid.x;\n    mov.u32 %r1, %ctaid.x;\n    mov.u32 %r2, %ntid.x;");
                self.line("    mad.lo.u32 %r1, %r1, %r2, %r0;");
            }
        }
        self.copy_tables(name);
        self.end_surplus_threads();
        self.load_tweak();
        self.rounds(name, direction);
        match self.language {
            Language::Sm20 => self.line("    EXIT"),
            Language::Ptx => self.line("    ret;\n}"),
        }
    }

    fn copy_tables(&mut self, kernel: &str) {
        use register::{FIRST, INDEX, KEY, THREAD, THREADS};
        let label = format!("{kernel}_copy");
        self.copy(INDEX, THREAD);
        self.label(&label);
        self.address(Parameter::Tables, INDEX, 4);
        self.load(FIRST, 0);
        self.shift_left(KEY, INDEX, 2);
        match self.language {
            Language::Sm20 => self.line(format!("    STS [R{KEY}], R{FIRST}")),
            Language::Ptx => {
                // The kernel's table is not guaranteed to start at address 0 of shared memory, so add its address.
                self.line(format!("    mov.u32 %r{}, table;", register::SECOND));
                self.line(format!("    add.u32 %r{KEY}, %r{KEY}, %r{};", register::SECOND));
                self.line(format!("    st.shared.u32 [%r{KEY}], %r{FIRST};"));
            }
        }
        let step = self.name(THREADS);
        self.add(INDEX, INDEX, &step);
        self.repeat(INDEX, (TABLE_BYTES / 4) as u32, &label);
        match self.language {
            Language::Sm20 => self.line("    BAR.SYNC 0"),
            Language::Ptx => self.line("    bar.sync 0;"),
        }
    }

    fn end_surplus_threads(&mut self) {
        match self.language {
            Language::Sm20 => {
                self.line(format!("    ISETP.GE.U32.AND P0, PT, R{}, c[0][{}]\n  @P0 EXIT", register::BLOCK, 0x20 + 24))
            }
            Language::Ptx => {
                self.line(format!("    ld.param.u32 %r{}, [blocks];", register::FIRST));
                self.line(format!("    setp.ge.u32 %p0, %r{}, %r{};\n    @%p0 ret;", register::BLOCK, register::FIRST));
            }
        }
    }

    /// Computes the block's tweak: the encrypted sector number times x to the power of the block's index, in GF(2^128)
    /// with the polynomial x^128 + x^7 + x^2 + x + 1.
    fn load_tweak(&mut self) {
        use register::{BLOCK, FIRST, INDEX, LEFT, RIGHT, SECOND, TWEAK};
        self.shift_right(INDEX, BLOCK, BLOCKS_LOG2);
        self.address(Parameter::Tweaks, INDEX, BLOCK_BYTES);
        for word in 0..4 {
            self.load(TWEAK + word, 4 * word);
        }
        self.and(LEFT, BLOCK, (1 << BLOCKS_LOG2) - 1);
        // Shift right by 32 - LEFT in two steps, because LEFT may be 0.
        match self.language {
            Language::Sm20 => self.line(format!("    MOV32I R{RIGHT}, 31\n    IADD R{RIGHT}, R{RIGHT}, -R{LEFT}")),
            Language::Ptx => self.line(format!("    sub.u32 %r{RIGHT}, 31, %r{LEFT};")),
        }
        let (left, right) = (self.name(LEFT), self.name(RIGHT));
        for word in (0..4).rev() {
            let tweak = TWEAK + word;
            // The bits shifted out of this word are carried into the next word, or reduced by the polynomial.
            self.shift_right(SECOND, tweak, 1);
            self.two("SHR.U32", "shr.u32", SECOND, SECOND, &right);
            if word == 3 {
                self.copy(FIRST, SECOND);
            } else {
                self.xor(tweak + 1, tweak + 1, SECOND);
            }
            self.two("SHL", "shl.b32", tweak, tweak, &left);
        }
        self.xor(TWEAK, TWEAK, FIRST);
        for bits in [1, 2, 7] {
            self.shift_left(SECOND, FIRST, bits);
            self.xor(TWEAK, TWEAK, SECOND);
            self.shift_right(SECOND, FIRST, 32 - bits);
            self.xor(TWEAK + 1, TWEAK + 1, SECOND);
        }
    }

    fn rounds(&mut self, kernel: &str, direction: Direction) {
        use register::{BLOCK, FIRST, KEY, NEXT, ROUND, SECOND, STATE, TWEAK};
        // Rows of the state are rotated to the left for encryption, and to the right for decryption.
        let step = if direction == Direction::Encrypt { 1 } else { 3 };
        let label = format!("{kernel}_round");
        self.set(ROUND, 1);
        match self.language {
            Language::Sm20 => self.set(KEY, 0),
            Language::Ptx => self.line(format!("    mov.u32 %r{KEY}, table;")),
        }
        self.address(Parameter::Data, BLOCK, BLOCK_BYTES);
        for word in 0..4 {
            self.load(STATE + word, 4 * word);
            self.xor(STATE + word, STATE + word, TWEAK + word);
            self.load_shared(FIRST, KEY, KEYS_OFFSET + 4 * word as usize);
            self.xor(STATE + word, STATE + word, FIRST);
        }
        self.label(&label);
        self.mix(step, 0);
        for word in 0..4 {
            self.copy(STATE + word, NEXT + word);
        }
        self.add(KEY, KEY, "16");
        self.add(ROUND, ROUND, "1");
        self.repeat(ROUND, ROUNDS as u32, &label);
        self.mix(step, LAST_ROUND_OFFSET);
        self.address(Parameter::Data, BLOCK, BLOCK_BYTES);
        for word in 0..4 {
            self.xor(SECOND, NEXT + word, TWEAK + word);
            self.store(SECOND, 4 * word);
        }
    }

    /// Computes a round's next state using the tables at `offset`. The last round looks up bytes. KEY is the address of
    /// the tables plus 16 bytes per completed round.
    fn mix(&mut self, step: u32, offset: usize) {
        use register::{FIRST, KEY, NEXT, SECOND, STATE};
        let is_last = offset == LAST_ROUND_OFFSET;
        for word in 0..4 {
            self.load_shared(NEXT + word, KEY, KEYS_OFFSET + 16 + 4 * word as usize);
            for row in 0..4 {
                let from = STATE + (word + step * row) % 4;
                if row == 0 {
                    self.shift_left(FIRST, from, 2);
                } else {
                    self.shift_right(FIRST, from, 8 * row - 2);
                }
                self.and(FIRST, FIRST, 0x3fc);
                if self.language == Language::Ptx {
                    self.line(format!("    mov.u32 %r{SECOND}, table;"));
                    self.line(format!("    add.u32 %r{FIRST}, %r{FIRST}, %r{SECOND};"));
                }
                let table = if is_last { 0 } else { 0x400 * row as usize };
                self.load_shared(FIRST, FIRST, offset + table);
                if is_last && row > 0 {
                    self.shift_left(FIRST, FIRST, 8 * row);
                }
                self.xor(NEXT + word, NEXT + word, FIRST);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kernels_for_sm_20_assemble_with_their_parameters() {
        let program = sm20::assemble(&source(Language::Sm20)).expect("a program");
        for direction in Direction::ALL {
            let kernel = program.kernel(direction.name()).expect("the kernel");
            assert_eq!((kernel.params, kernel.shared_bytes), (PARAMS_BYTES, TABLE_BYTES as u32));
        }
    }
}
