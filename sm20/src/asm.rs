//! The assembler. Its language is described in `docs/reference/sm20-assembly.md` in the repository.
//!
//! The assembler makes two passes. The first pass splits the source into statements, and assigns values to labels and
//! constants. The second pass parses operands and encodes instructions.

mod cursor;
mod directive;
mod expression;
mod layout;
mod operand;
mod statement;
mod symbols;

use crate::codec::encode;
use crate::ir::{BarrierOperand, Form, Instruction, Op};
use cursor::Failure;
use layout::{Draft, Item, Layout, Place};
use statement::without_comments;
use symbols::Symbols;

/// Kernels and their code, from a source text, a cubin, or raw machine code.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Program {
    /// Kernels in source order.
    pub kernels: Vec<Kernel>,
    /// The code in 32-bit words. The low word of a 64-bit instruction comes first.
    pub words: Vec<u32>,
}

impl Program {
    /// Returns the code as stored in GPU memory.
    pub fn bytes(&self) -> Vec<u8> {
        self.words.iter().flat_map(|word| word.to_le_bytes()).collect()
    }

    /// Creates a program from machine code and a description of each kernel. The code is not decoded.
    ///
    /// # Errors
    /// Returns an error if the length of the code is not a multiple of 8 bytes or exceeds 8 MiB, or if a kernel is
    /// misaligned or outside the code.
    pub fn from_raw(code: &[u8], kernels: Vec<Kernel>) -> Result<Self, String> {
        let (pairs, rest) = code.as_chunks::<8>();
        if !rest.is_empty() || code.len() > MAX_BYTES as usize {
            return Err(format!("{} bytes of code: a multiple of 8, and at most {MAX_BYTES}", code.len()));
        }
        let within = |kernel: &Kernel| {
            let end = kernel.entry_offset.checked_add(kernel.size);
            let inside = end.is_some_and(|end| end as usize <= code.len());
            inside && kernel.entry_offset.is_multiple_of(8) && kernel.size >= 8
        };
        if let Some(kernel) = kernels.iter().find(|kernel| !within(kernel)) {
            let (name, entry, size) = (&kernel.name, kernel.entry_offset, kernel.size);
            return Err(format!("kernel {name:?}, {size} bytes at {entry:#x}, is not within the code"));
        }
        let words = pairs.as_flattened().as_chunks::<4>().0.iter().map(|word| u32::from_le_bytes(*word)).collect();
        Ok(Self { kernels, words })
    }

    /// Returns the kernel with this name.
    pub fn kernel(&self, name: &str) -> Option<&Kernel> {
        self.kernels.iter().find(|kernel| kernel.name == name)
    }
}

/// An entry point and its launch resources, with sizes in bytes.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Kernel {
    /// Kernel name, from `.kernel`.
    pub name: String,
    /// Offset from the start of the code.
    pub entry_offset: u32,
    /// Size of the code, up to the next kernel.
    pub size: u32,
    /// Number of registers per thread, which is the value of `.registers`, or one more than the highest register used
    /// by the code.
    pub registers: u32,
    /// Static shared memory per block, which is the value of `.shared`.
    pub shared_bytes: u32,
    /// Local memory per thread, which is the value of `.local`.
    pub local_bytes: u32,
    /// Number of barriers per block, which is the value of `.barriers`, or one more than the highest barrier used by
    /// the code.
    pub barriers: u32,
    /// Total size of the parameters, from `.params`.
    pub params: u32,
    /// The individual parameters, if the source lists them.
    pub parameters: Vec<Parameter>,
}

/// A kernel parameter.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Parameter {
    /// Offset in bytes from the start of the parameters.
    pub offset: u32,
    /// Size in bytes.
    pub bytes: u32,
}

/// An error in a source text.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{line}:{column}: {message}")]
pub struct AsmError {
    /// Line number, starting at 1.
    pub line: u32,
    /// Column in characters, starting at 1.
    pub column: u32,
    /// Error message.
    pub message: String,
}

/// Number of errors after which assembly stops.
const MAX_ERRORS: usize = 100;

/// Maximum size of a program in bytes, which is the range of a relative branch.
const MAX_BYTES: u32 = 8 << 20;

/// Assembles a source text. Reports up to 100 errors.
pub fn assemble(source: &str) -> Result<Program, Vec<AsmError>> {
    let mut errors = Vec::new();
    let lines = without_comments(source, &mut errors);
    let Layout { items, mut kernels, mut symbols, .. } = Layout::first_pass(&lines, &mut errors);
    let mut words = Vec::new();
    for item in &items {
        if errors.len() >= MAX_ERRORS {
            break;
        }
        symbols.scope = item.kernel;
        if let Err(failure) = emit(item, &mut symbols, &mut kernels, &mut words) {
            errors.push(failure.at(item.cursor.line));
        }
    }
    errors.sort_by_key(|error| (error.line, error.column));
    errors.truncate(MAX_ERRORS);
    if !errors.is_empty() {
        return Err(errors);
    }
    Ok(Program { kernels: kernels.into_iter().map(|draft| draft.kernel).collect(), words })
}

/// Second pass: emits the words of an item.
fn emit(item: &Item<'_>, symbols: &mut Symbols, kernels: &mut [Draft], words: &mut Vec<u32>) -> Result<(), Failure> {
    let mut cursor = item.cursor;
    match item.place {
        Place::Instruction { address, form } => {
            let at = cursor.column();
            let instruction = operand::instruction(&mut cursor, symbols, address, form)?;
            if let Some(draft) = item.kernel.and_then(|kernel| kernels.get_mut(kernel)) {
                note(&instruction, draft).map_err(|message| Failure::new(at, message))?;
            }
            let word = encode(&instruction).map_err(|error| Failure::new(at, error.to_string()))?;
            push(words, word, form);
        }
        Place::Data { form } => {
            directive::values(&mut cursor, symbols, form)?.into_iter().for_each(|value| push(words, value, form));
        }
        Place::Padding { words: count } => {
            (0..count.wrapping_shr(1)).for_each(|_| push(words, NOP, Form::Long));
            if count & 1 != 0 {
                push(words, SHORT_NOP, Form::Short);
            }
        }
        Place::Name => directive::name(&mut cursor, symbols)?,
    }
    Ok(())
}

/// Encoding of an unguarded NOP.
const NOP: u64 = 0x4000_0000_0000_1de4;
/// Encoding of an unguarded NOP.E32.
const SHORT_NOP: u64 = 0x0000_1c08;

fn push(words: &mut Vec<u32>, value: u64, form: Form) {
    let [a, b, c, d, e, f, g, h] = value.to_le_bytes();
    words.push(u32::from_le_bytes([a, b, c, d]));
    if form == Form::Long {
        words.push(u32::from_le_bytes([e, f, g, h]));
    }
}

/// Updates a kernel's register and barrier counts for an instruction, or checks them against the declared counts.
fn note(instruction: &Instruction, draft: &mut Draft) -> Result<(), String> {
    let mut registers = 0;
    instruction.op.registers(|register, count| {
        if !register.is_zero() {
            registers = registers.max(u32::from(register.index()).saturating_add(count.into()));
        }
    });
    need(&mut draft.kernel.registers, draft.registers, registers, "registers")?;
    if let Op::Bar { barrier: BarrierOperand::Immediate(number), .. } = instruction.op {
        need(&mut draft.kernel.barriers, draft.barriers, u32::from(number).saturating_add(1), "barriers")?;
    }
    Ok(())
}

fn need(value: &mut u32, declared: bool, needed: u32, what: &str) -> Result<(), String> {
    if declared && needed > *value {
        return Err(format!("the kernel declares {value} {what}, but this needs {needed}"));
    }
    *value = needed.max(*value);
    Ok(())
}
