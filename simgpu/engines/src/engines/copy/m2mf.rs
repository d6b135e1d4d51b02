//! M2MF, class 0x9039, PGRAPH's copy class: copies between pitch- and block-linear surfaces, and inline uploads.
//!
//! | method group | here |
//! |---|---|
//! | copy, inline data, semaphore, interrupt | done |
//! | render condition | always and never; conditions on memory are rejected when the copy is launched |
//! | spare, firmware, instrumentation, performance trigger | stored, without effect |
//! | notifier (0x104-0x10c), macros (0x114-0x124, 0x3400-), global condition (0x130-0x138) | illegal method |

use super::job::{Completion, Job, each_run};
use super::layout::{Blocks, GOB_ROWS_LOG2, GOB_WIDTH_LOG2, Surface};
use crate::engines::semaphore::Form;
use crate::engines::{ContextState, Engine, EngineCx, EngineError, Progress, State};
use nvspec::addr::GpuVa;
use nvspec::class::{data_error, id, m2mf9039 as methods};

const FIRST_METHOD: u32 = methods::NOP;
const WORDS: usize = ((methods::TILING_POSITION_OUT_Y - FIRST_METHOD) / 4 + 1) as usize;

/// The M2MF engine.
#[derive(Debug, Default)]
pub struct M2mf {
    registers: Registers,
}

/// State of a channel's M2MF object.
#[derive(Clone, Debug)]
pub(crate) struct Registers {
    /// Last data dword of each method.
    words: [u32; WORDS],
    job: Option<Job>,
    upload: Option<Upload>,
}

/// An inline data upload in progress.
#[derive(Clone, Copy, Debug)]
struct Upload {
    target: Surface,
    line: u64,
    lines: u64,
    x: u64,
    y: u64,
    completion: Completion,
}

impl Default for Registers {
    fn default() -> Self {
        let mut registers = Self { words: [0; WORDS], job: None, upload: None };
        registers.set(methods::COND_MODE, methods::cond_mode::ALWAYS);
        registers
    }
}

/// Methods that describe one side of a copy.
struct Side {
    mode: u32,
    width: u32,
    height: u32,
    depth: u32,
    x: u32,
    y: u32,
    z: u32,
    high: u32,
    low: u32,
    pitch: u32,
}

const IN: Side = Side {
    mode: methods::TILING_MODE_IN,
    width: methods::TILING_PITCH_IN,
    height: methods::TILING_HEIGHT_IN,
    depth: methods::TILING_DEPTH_IN,
    x: methods::TILING_POSITION_IN_X,
    y: methods::TILING_POSITION_IN_Y,
    z: methods::TILING_POSITION_IN_Z,
    high: methods::OFFSET_IN_HIGH,
    low: methods::OFFSET_IN_LOW,
    pitch: methods::PITCH_IN,
};

const OUT: Side = Side {
    mode: methods::TILING_MODE_OUT,
    width: methods::TILING_PITCH_OUT,
    height: methods::TILING_HEIGHT_OUT,
    depth: methods::TILING_DEPTH_OUT,
    x: methods::TILING_POSITION_OUT_X,
    y: methods::TILING_POSITION_OUT_Y,
    z: methods::TILING_POSITION_OUT_Z,
    high: methods::OFFSET_OUT_HIGH,
    low: methods::OFFSET_OUT_LOW,
    pitch: methods::PITCH_OUT,
};

impl Registers {
    fn word(&self, method: u32) -> u32 {
        self.words[((method - FIRST_METHOD) / 4) as usize]
    }

    fn set(&mut self, method: u32, data: u32) {
        self.words[((method - FIRST_METHOD) / 4) as usize] = data;
    }

    fn address(&self, high: u32, low: u32) -> GpuVa {
        GpuVa(u64::from(self.word(high)) << 32 | u64::from(self.word(low)))
    }

    /// Returns the surface of one side, for an access to `lines` rows of `line` bytes each.
    fn surface(&self, side: &Side, linear: bool, line: u32, lines: u32) -> Result<Surface, EngineError> {
        use methods::block_size;
        let base = self.address(side.high, side.low);
        if linear {
            return Ok(Surface::Pitch { base, pitch: i64::from(self.word(side.pitch).cast_signed()) });
        }
        let mode = self.word(side.mode);
        let (rows, slices) = (block_size::HEIGHT.get(mode), block_size::DEPTH.get(mode));
        if block_size::WIDTH.get(mode) != 0 || rows > block_size::LOG2_MAX || slices > block_size::LOG2_MAX {
            return Err(EngineError::Data(data_error::INVALID_ENUM));
        }
        let word = |method| u64::from(self.word(method));
        let (width, height, depth) = (word(side.width), word(side.height), word(side.depth));
        let (x, y, z) = (word(side.x), word(side.y), word(side.z));
        if line != 0 && lines != 0 {
            if x + u64::from(line) > width || y + u64::from(lines) > height {
                return Err(EngineError::Data(data_error::XY_OUT_OF_BOUNDS));
            }
            if z >= depth {
                return Err(EngineError::Data(data_error::Z_OUT_OF_BOUNDS));
            }
        }
        let (width_log2, rows_log2) = (GOB_WIDTH_LOG2, GOB_ROWS_LOG2 + rows);
        Ok(Surface::Blocks(Blocks {
            base,
            width_log2,
            rows_log2,
            slices_log2: slices,
            blocks_x: width.div_ceil(1 << width_log2),
            blocks_y: height.div_ceil(1 << rows_log2),
            x,
            y,
            z,
        }))
    }

    fn completion(&self, exec: u32) -> Result<Completion, EngineError> {
        use methods::exec::{
            COMPLETION, COMPLETION_FLUSH, COMPLETION_NONE, COMPLETION_SEMAPHORE, INTERRUPT, INTERRUPT_NON_STALL,
            INTERRUPT_NONE, SEMAPHORE_ONE_WORD,
        };
        let semaphore = match COMPLETION.get(exec) {
            COMPLETION_NONE | COMPLETION_FLUSH => None,
            COMPLETION_SEMAPHORE => {
                let va = self.address(methods::NOTIFY_ADDRESS_HIGH, methods::NOTIFY_ADDRESS_LOW);
                if !va.0.is_multiple_of(4) {
                    return Err(EngineError::Data(data_error::INVALID_ADDRESS_ALIGNMENT));
                }
                let form = if SEMAPHORE_ONE_WORD.is_set(exec) { Form::OneWord } else { Form::FourWords };
                Some((va, self.word(methods::NOTIFY_PAYLOAD), form))
            }
            _ => return Err(EngineError::Data(data_error::INVALID_ENUM)),
        };
        let interrupt = match INTERRUPT.get(exec) {
            INTERRUPT_NONE => false,
            INTERRUPT_NON_STALL => true,
            _ => return Err(EngineError::Data(data_error::INVALID_ENUM)),
        };
        Ok(Completion { semaphore, interrupt })
    }

    /// Returns true if the channel's render condition permits copies.
    fn enabled(&self) -> Result<bool, EngineError> {
        use methods::{cond_mode, render_override};
        match (self.word(methods::RENDER_ENABLE_OVERRIDE), self.word(methods::COND_MODE)) {
            (render_override::ALWAYS, _) | (render_override::NONE, cond_mode::ALWAYS) => Ok(true),
            (render_override::NEVER, _) | (render_override::NONE, cond_mode::NEVER) => Ok(false),
            _ => Err(EngineError::Data(data_error::INVALID_ENUM)),
        }
    }

    fn launch(&mut self, exec: u32, cx: &mut EngineCx<'_>) -> Result<(), EngineError> {
        use methods::exec::{INLINE, LINEAR_IN, LINEAR_OUT};
        let (line, lines) = (self.word(methods::LINE_LENGTH_IN), self.word(methods::LINE_COUNT));
        if lines > methods::LINE_COUNT_MAX {
            return Err(EngineError::Data(data_error::INVALID_VALUE));
        }
        let completion = self.completion(exec)?;
        let enabled = self.enabled()?;
        let target = self.surface(&OUT, LINEAR_OUT.is_set(exec), line, lines)?;
        self.set(methods::EXEC, exec);
        self.upload = None;
        if INLINE.is_set(exec) {
            if enabled && line != 0 && lines != 0 {
                let (line, lines) = (u64::from(line), u64::from(lines));
                self.upload = Some(Upload { target, line, lines, x: 0, y: 0, completion });
            } else {
                self.job = Some(Job::nothing(completion));
            }
        } else {
            let source = self.surface(&IN, LINEAR_IN.is_set(exec), line, lines)?;
            // GUESS: the completion is executed even if the condition suppresses the copy.
            self.job = Some(if enabled {
                Job::new(source, target, line, lines, None, completion)
            } else {
                Job::nothing(completion)
            });
        }
        cx.work.launches += 1;
        Ok(())
    }

    /// Returns the methods that store state, and the bits that each method stores.
    fn stored() -> impl Iterator<Item = (u32, u32)> {
        (FIRST_METHOD..=methods::TILING_POSITION_OUT_Y)
            .step_by(4)
            .filter_map(|method| methods::method_mask(method).map(|mask| (method, mask)))
    }

    /// Serializes the state to a context image: the methods' data, followed by the progress of an inline upload. Copies
    /// in progress are not included.
    pub(crate) fn to_words(&self) -> Vec<u32> {
        let progress = match self.upload {
            // Both coordinates fit in 32 bits.
            Some(upload) => [1, upload.x as u32, upload.y as u32],
            None => [0; 3],
        };
        Self::stored().map(|(method, _)| self.word(method)).chain(progress).collect()
    }

    /// Parses the state from an untrusted image. Masks off bits that no method can set.
    pub(crate) fn from_words(words: &[u32]) -> Self {
        let mut registers = Self::default();
        let mut words = words.iter().copied();
        for ((method, mask), word) in Self::stored().zip(words.by_ref()) {
            registers.set(method, word & mask);
        }
        if words.next() == Some(1)
            && let (Some(x), Some(y)) = (words.next(), words.next())
        {
            registers.resume_upload(u64::from(x), u64::from(y));
        }
        registers
    }

    fn resume_upload(&mut self, x: u64, y: u64) {
        let exec = self.word(methods::EXEC);
        let (line, lines) = (self.word(methods::LINE_LENGTH_IN), self.word(methods::LINE_COUNT));
        let target = self.surface(&OUT, methods::exec::LINEAR_OUT.is_set(exec), line, lines);
        let (line, lines) = (u64::from(line), u64::from(lines));
        if let (Ok(target), Ok(completion)) = (target, self.completion(exec))
            && x < line
            && y < lines
        {
            self.upload = Some(Upload { target, line, lines, x, y, completion });
        }
    }

    /// Writes four bytes of inline data. GUESS: lines are packed without gaps, and only the last dword may be partially
    /// unused.
    fn upload(&mut self, data: u32, cx: &mut EngineCx<'_>) -> Result<(), EngineError> {
        let Some(mut upload) = self.upload.take() else {
            return Err(EngineError::Data(data_error::INVALID_OPERATION));
        };
        let mut session = cx.session();
        let bytes = data.to_le_bytes();
        let mut used = 0;
        while used < bytes.len() && upload.y < upload.lines {
            let part = &bytes[used..];
            let part = &part[..(upload.line - upload.x).min(part.len() as u64) as usize];
            each_run(&upload.target, upload.x, upload.y, part.len(), |va, range| {
                session.write_counted(va, &part[range])
            })?;
            used += part.len();
            upload.x += part.len() as u64;
            if upload.x == upload.line {
                upload.x = 0;
                upload.y += 1;
            }
        }
        cx.work.bytes += used as u64;
        cx.work.bus_bytes += session.take_bus_bytes();
        if upload.y == upload.lines {
            return upload.completion.run(&mut session, cx);
        }
        self.upload = Some(upload);
        Ok(())
    }
}

impl Engine for M2mf {
    fn class_supported(&self, class: u32) -> bool {
        class == id::FERMI_MEMORY_TO_MEMORY_FORMAT_A
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
            return Err(EngineError::Data(data_error::INVALID_BITFIELD));
        }
        while self.pending() {
            self.step(cx, super::job::STEP_MAX)?;
        }
        match method {
            methods::EXEC => self.registers.launch(data, cx),
            methods::DATA => self.registers.upload(data, cx),
            _ => {
                self.registers.set(method, data);
                Ok(())
            }
        }
    }

    fn pending(&self) -> bool {
        self.registers.job.is_some()
    }

    fn step(&mut self, cx: &mut EngineCx<'_>, budget_bytes: u64) -> Result<Progress, EngineError> {
        super::step(&mut self.registers.job, cx, budget_bytes)
    }

    fn save(&mut self) -> ContextState {
        ContextState(State::M2mf(Box::new(std::mem::take(&mut self.registers))))
    }

    fn load(&mut self, state: ContextState) {
        self.registers = match state.0 {
            State::M2mf(registers) => *registers,
            State::Graph(registers, _) => *registers,
            State::New | State::Ce(_) => Registers::default(),
        };
    }

    fn reset(&mut self) {
        self.registers = Registers::default();
    }
}
