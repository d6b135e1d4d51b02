//! A copy engine, classes 0x90b5 and 0x90b8, with the methods of nouveau's microcode. The model does not execute
//! uploaded microcode. Both engines accept both classes, because nouveau's microcode does not check the class.
//!
//! | method group | here |
//! |---|---|
//! | copy, pitch and block linear with 16 and 64 byte wide blocks, format and swizzle, query | done |
//! | write cache flush, performance trigger | without effect |
//! | NVIDIA's own microcode (addresses at 0x400), interrupts by copy | not modelled |

use super::job::{Completion, Job, Lane, Remap, STEP_MAX};
use super::layout::{Blocks, GOB_ROWS_LOG2, GOB_WIDTH_LOG2, Surface};
use crate::engines::semaphore::Form;
use crate::engines::{ContextState, Engine, EngineCx, EngineError, Progress, State};
use nvspec::addr::GpuVa;
use nvspec::class::{ce90b5 as methods, id};

/// Log2 of the row length of 16-byte-wide blocks, in bytes.
const NARROW_LOG2: u32 = 4;
const WORDS: usize = (methods::QUERY_COUNTER / 4 + 1) as usize;

/// A copy engine.
#[derive(Debug, Default)]
pub struct CopyEngine {
    registers: Registers,
}

/// State of a channel's copy object.
#[derive(Clone, Debug)]
pub(crate) struct Registers {
    /// Last data dword of each method.
    words: [u32; WORDS],
    job: Option<Job>,
}

impl Default for Registers {
    fn default() -> Self {
        Self { words: [0; WORDS], job: None }
    }
}

/// Methods that describe one side of a copy.
struct Side {
    mode: u32,
    width: u32,
    height: u32,
    x: u32,
    y: u32,
    z: u32,
    high: u32,
    low: u32,
    pitch: u32,
}

const SRC: Side = Side {
    mode: methods::SRC_TILE_MODE,
    width: methods::SRC_WIDTH,
    height: methods::SRC_HEIGHT,
    x: methods::SRC_X,
    y: methods::SRC_Y,
    z: methods::SRC_Z,
    high: methods::SRC_ADDRESS_HIGH,
    low: methods::SRC_ADDRESS_LOW,
    pitch: methods::SRC_PITCH,
};

const DST: Side = Side {
    mode: methods::DST_TILE_MODE,
    width: methods::DST_WIDTH,
    height: methods::DST_HEIGHT,
    x: methods::DST_X,
    y: methods::DST_Y,
    z: methods::DST_Z,
    high: methods::DST_ADDRESS_HIGH,
    low: methods::DST_ADDRESS_LOW,
    pitch: methods::DST_PITCH,
};

impl Registers {
    fn word(&self, method: u32) -> u32 {
        self.words[(method / 4) as usize]
    }

    fn address(&self, high: u32, low: u32) -> GpuVa {
        GpuVa(u64::from(self.word(high)) << 32 | u64::from(self.word(low)))
    }

    /// Returns the surface of one side, with `bytes`-byte elements. Like the microcode, this ignores the depth of the
    /// surface and does not check positions against its size.
    fn surface(&self, side: &Side, linear: bool, bytes: usize) -> Surface {
        use methods::tile_mode;
        let base = self.address(side.high, side.low);
        if linear {
            return Surface::Pitch { base, pitch: i64::from(self.word(side.pitch)) };
        }
        let mode = self.word(side.mode);
        let narrow = tile_mode::WIDTH.get(mode) == tile_mode::WIDTH_16;
        let width_log2 = if narrow { NARROW_LOG2 } else { GOB_WIDTH_LOG2 };
        let rows_log2 = GOB_ROWS_LOG2 + tile_mode::HEIGHT.get(mode);
        let in_bytes = |method| u64::from(self.word(method)) * bytes as u64;
        Surface::Blocks(Blocks {
            base,
            width_log2,
            rows_log2,
            slices_log2: tile_mode::DEPTH.get(mode),
            blocks_x: in_bytes(side.width).div_ceil(1 << width_log2),
            blocks_y: u64::from(self.word(side.height)).div_ceil(1 << rows_log2),
            x: in_bytes(side.x),
            y: u64::from(self.word(side.y)),
            z: u64::from(self.word(side.z)),
        })
    }

    fn remap(&self) -> Remap {
        use methods::format as f;
        let format = self.word(methods::FORMAT);
        let component = f::COMPONENT_BYTES.get(format) + 1;
        let constants = [self.word(methods::SWIZZLE_CONST0), self.word(methods::SWIZZLE_CONST1)].map(u32::to_le_bytes);
        let mut lanes = [Lane::Constant(0); 16];
        let targets = f::DST_COMPONENTS.get(format) + 1;
        let selectors = [f::COMPONENT_0, f::COMPONENT_1, f::COMPONENT_2, f::COMPONENT_3];
        for (index, field) in (0..targets).zip(selectors) {
            for byte in 0..component {
                lanes[(index * component + byte) as usize] = match field.get(format) {
                    source @ 0..4 => Lane::Source((source * component + byte) as u8),
                    f::FROM_CONST0 => Lane::Constant(constants[0][byte as usize]),
                    f::FROM_CONST1 => Lane::Constant(constants[1][byte as usize]),
                    _ => Lane::Constant(0),
                };
            }
        }
        Remap {
            source_bytes: ((f::SRC_COMPONENTS.get(format) + 1) * component) as usize,
            target_bytes: (targets * component) as usize,
            lanes,
        }
    }

    /// Returns the methods that store state, and the bits that each method stores.
    fn stored() -> impl Iterator<Item = (u32, u32)> {
        let acts = |method: &u32| {
            matches!(*method, methods::NOP | methods::PM_TRIGGER | methods::EXEC | methods::WRCACHE_FLUSH)
        };
        (methods::NAME..=methods::QUERY_COUNTER)
            .step_by(4)
            .filter(move |method| !acts(method))
            .filter_map(|method| methods::method_mask(method).map(|mask| (method, mask)))
    }

    /// Serializes the state to a context image, excluding copies in progress.
    pub(crate) fn to_words(&self) -> Vec<u32> {
        Self::stored().map(|(method, _)| self.word(method)).collect()
    }

    /// Parses the state from an untrusted image. Masks off bits that no method can set.
    pub(crate) fn from_words(words: &[u32]) -> Self {
        let mut registers = Self::default();
        for ((method, mask), word) in Self::stored().zip(words) {
            registers.words[(method / 4) as usize] = word & mask;
        }
        registers
    }

    fn launch(&mut self, exec: u32) {
        use methods::exec::{DST_LINEAR, FORMAT, QUERY, QUERY_SHORT, SRC_LINEAR};
        let remap = FORMAT.is_set(exec).then(|| self.remap());
        let (source_bytes, target_bytes) = remap.map_or((1, 1), |remap| (remap.source_bytes, remap.target_bytes));
        let query = QUERY.is_set(exec).then(|| {
            let form = if QUERY_SHORT.is_set(exec) { Form::OneWord } else { Form::FourWords };
            let va = self.address(methods::QUERY_ADDRESS_HIGH, methods::QUERY_ADDRESS_LOW);
            (va, self.word(methods::QUERY_COUNTER), form)
        });
        self.job = Some(Job::new(
            self.surface(&SRC, SRC_LINEAR.is_set(exec), source_bytes),
            self.surface(&DST, DST_LINEAR.is_set(exec), target_bytes),
            self.word(methods::X_COUNT),
            self.word(methods::Y_COUNT),
            remap,
            Completion { semaphore: query, interrupt: false },
        ));
    }
}

impl Engine for CopyEngine {
    fn class_supported(&self, class: u32) -> bool {
        matches!(class, id::FERMI_DMA | id::FERMI_DECOMPRESS)
    }

    fn method(
        &mut self,
        _subchannel: u8,
        class: u32,
        method: u32,
        data: u32,
        cx: &mut EngineCx<'_>,
    ) -> Result<(), EngineError> {
        if !self.class_supported(class) {
            return Err(EngineError::IllegalClass);
        }
        let mask = methods::method_mask(method).ok_or(EngineError::IllegalMethod)?;
        if data & !mask != 0 {
            return Err(EngineError::Data(methods::error::INVALID_BITFIELD));
        }
        while self.pending() {
            self.step(cx, STEP_MAX)?;
        }
        if method == methods::EXEC {
            self.registers.launch(data);
            cx.work.launches += 1;
        } else {
            self.registers.words[(method / 4) as usize] = data;
        }
        Ok(())
    }

    fn pending(&self) -> bool {
        self.registers.job.is_some()
    }

    fn step(&mut self, cx: &mut EngineCx<'_>, budget_bytes: u64) -> Result<Progress, EngineError> {
        super::step(&mut self.registers.job, cx, budget_bytes)
    }

    fn save(&mut self) -> ContextState {
        ContextState(State::Ce(Box::new(std::mem::take(&mut self.registers))))
    }

    fn load(&mut self, state: ContextState) {
        self.registers = match state.0 {
            State::Ce(registers) => *registers,
            State::New | State::M2mf(_) | State::Graph(..) => Registers::default(),
        };
    }

    fn reset(&mut self) {
        self.registers = Registers::default();
    }
}
