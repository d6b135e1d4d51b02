//! Push buffers: Fermi method headers, and copies through M2MF and the copy engines.
//!
//! The definitions intentionally do not come from `nvspec`: this encoder tests the decoders that use `nvspec`, and
//! shared definitions would hide mistakes. Sources: envytools' `rnndb/fifo` and `rnndb/graph`, and the methods that
//! nouveau sends.

use std::ops::Range;

/// An engine that can copy.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Engine {
    /// Class 0x9039, part of PGRAPH.
    M2mf,
    /// Class 0x90b5 on copy engine 0.
    Ce0,
    /// Class 0x90b8 on copy engine 1.
    Ce1,
}

impl Engine {
    /// All engines.
    pub const ALL: [Self; 3] = [Self::M2mf, Self::Ce0, Self::Ce1];

    /// Returns the command-line name.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::M2mf => "m2mf",
            Self::Ce0 => "ce0",
            Self::Ce1 => "ce1",
        }
    }

    /// Returns the class of the object.
    #[must_use]
    pub fn class(self) -> u16 {
        match self {
            Self::M2mf => 0x9039,
            Self::Ce0 => 0x90b5,
            Self::Ce1 => 0x90b8,
        }
    }

    /// Returns the subchannel to which this library binds the object.
    #[must_use]
    pub fn subchannel(self) -> u32 {
        match self {
            Self::M2mf => 2,
            Self::Ce0 => 4,
            Self::Ce1 => 5,
        }
    }

    /// Returns the object through which a channel uses the engine.
    #[must_use]
    pub fn object(self) -> Object {
        let engine = match self {
            Self::M2mf => 0,
            Self::Ce0 => 4,
            Self::Ce1 => 5,
        };
        Object { class: self.class(), engine, subchannel: self.subchannel() }
    }

    /// Returns the maximum number of lines per launch.
    #[must_use]
    pub fn most_lines(self) -> u32 {
        match self {
            Self::M2mf => 2047,
            Self::Ce0 | Self::Ce1 => 8191,
        }
    }
}

/// An object of a channel, with the subchannel to which this library binds it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Object {
    /// Class of the object.
    pub class: u16,
    /// PFIFO number of the engine that implements the class.
    pub engine: u32,
    /// Number of the subchannel.
    pub subchannel: u32,
}

impl Object {
    /// The compute object of a Fermi card, part of PGRAPH.
    pub const COMPUTE: Self = Self { class: 0x90c0, engine: 0, subchannel: 1 };

    /// Returns the data of `SET_OBJECT`, with the class in bits 15:0 and the engine in bits 20:16.
    #[must_use]
    pub fn data(self) -> u32 {
        self.engine << 16 | u32::from(self.class)
    }
}

/// Maximum line length of a copy in bytes. The copy engines' line length has 16 bits.
pub const MOST_LINE_BYTES: u32 = 0x8000;
/// Maximum pitch in bytes. The copy engines' pitch has 19 bits.
pub const MOST_PITCH: u32 = 0x7ffff;

/// A pitch-linear rectangle copy between GPU virtual addresses.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Rect {
    /// GPU virtual address of the first source line.
    pub source: u64,
    /// GPU virtual address of the first target line.
    pub target: u64,
    /// Source pitch in bytes.
    pub source_pitch: u32,
    /// Target pitch in bytes.
    pub target_pitch: u32,
    /// Line length in bytes.
    pub line_bytes: u32,
    /// Number of lines.
    pub lines: u32,
}

/// Splits a contiguous copy of `length` bytes into rectangles of at most `most_lines` lines.
#[must_use]
pub fn linear(source: u64, target: u64, length: u64, most_lines: u32) -> Vec<Rect> {
    let line = u64::from(MOST_LINE_BYTES);
    let mut rects = Vec::new();
    let mut done = 0;
    while done < length {
        let left = length - done;
        let (line_bytes, lines) =
            if left >= line { (line, (left / line).min(u64::from(most_lines))) } else { (left, 1) };
        rects.push(Rect {
            source: source + done,
            target: target + done,
            source_pitch: line_bytes as u32,
            target_pitch: line_bytes as u32,
            line_bytes: line_bytes as u32,
            lines: lines as u32,
        });
        done += line_bytes * lines;
    }
    rects
}

/// A push buffer under construction.
#[derive(Debug, Default, Clone)]
pub struct Push {
    words: Vec<u32>,
}

/// Size of the memory of a push buffer in bytes.
pub const PUSHBUFFER_BYTES: u64 = 16 << 10;
/// Size of a stamp in bytes: a 32-bit payload, a 32-bit zero, and a 64-bit time in ns.
pub const STAMP_BYTES: u64 = 16;
/// Offset of a submission's stamp in the memory of its push buffer, in bytes.
pub const STAMP_AT: u64 = PUSHBUFFER_BYTES - STAMP_BYTES;
/// Maximum length of a push buffer in dwords.
pub const MOST_WORDS: usize = STAMP_AT as usize / 4;

/// Maximum length of a rectangle's methods in dwords.
const RECT_WORDS: usize = 16;
/// Maximum length of the methods that end a submission, in dwords: a wait for the engine, a stamp, and an interrupt.
const END_WORDS: usize = 8;

impl Push {
    /// Returns the dwords of the push buffer.
    #[must_use]
    pub fn words(&self) -> &[u32] {
        &self.words
    }

    /// Returns true if there is space for another rectangle and the end of a submission.
    #[must_use]
    pub fn has_room(&self) -> bool {
        self.words.len() + RECT_WORDS + END_WORDS <= MOST_WORDS
    }

    /// Writes data to consecutive methods, starting at byte address `method`.
    pub fn methods(&mut self, subchannel: u32, method: u32, data: &[u32]) {
        self.words.push(0x2000_0000 | (data.len() as u32) << 16 | subchannel << 13 | method >> 2);
        self.words.extend_from_slice(data);
    }

    /// Writes 13 bits of immediate data to a method.
    ///
    /// # Panics
    /// Panics if the data exceeds 13 bits.
    pub fn immediate(&mut self, subchannel: u32, method: u32, data: u32) {
        assert!(data < 1 << 13, "immediate data has 13 bits");
        self.words.push(0x8000_0000 | data << 16 | subchannel << 13 | method >> 2);
    }

    /// Binds an object to its subchannel.
    pub fn bind(&mut self, object: Object) {
        self.methods(object.subchannel, 0x0000, &[object.data()]);
    }

    /// Adds a method that has no effect.
    pub fn nop(&mut self, subchannel: u32) {
        self.methods(subchannel, 0x0008, &[0]);
    }

    /// Waits until the 32-bit word at `address` equals `payload`. If `yields` is true, other channels may use the PBDMA
    /// in the meantime.
    pub fn acquire(&mut self, address: u64, payload: u32, yields: bool) {
        self.semaphore(address, payload, u32::from(yields) << 12 | 1);
    }

    /// Stores `payload` at `address` through the host engine, without waiting for other engines.
    pub fn release(&mut self, address: u64, payload: u32) {
        self.semaphore(address, payload, 0x0110_0002);
    }

    /// Stores `payload` at `address` through the host engine, once the engine of the channel's last method is idle.
    pub fn release_when_idle(&mut self, address: u64, payload: u32) {
        self.semaphore(address, payload, 0x0100_0002);
    }

    /// Raises the channel's non-stall interrupt.
    pub fn interrupt(&mut self) {
        self.methods(0, 0x0020, &[0]);
    }

    /// Executes a semaphore operation of the host engine, which is available on every subchannel.
    fn semaphore(&mut self, address: u64, payload: u32, operation: u32) {
        self.methods(0, 0x0010, &[(address >> 32) as u32, address as u32, payload, operation]);
    }

    /// Adds the methods that copy a rectangle.
    pub fn copy(&mut self, engine: Engine, rect: &Rect) {
        let high = |address: u64| (address >> 32) as u32;
        let low = |address: u64| address as u32;
        let subchannel = engine.subchannel();
        match engine {
            Engine::M2mf => {
                self.methods(subchannel, 0x0238, &[high(rect.target), low(rect.target)]);
                let source = [
                    high(rect.source),
                    low(rect.source),
                    rect.source_pitch,
                    rect.target_pitch,
                    rect.line_bytes,
                    rect.lines,
                ];
                self.methods(subchannel, 0x030c, &source);
                // Both sides are pitch-linear, no completion is requested, and semaphores have one word.
                self.methods(subchannel, 0x0300, &[0x0010_0110]);
            }
            Engine::Ce0 | Engine::Ce1 => {
                let all = [
                    high(rect.source),
                    low(rect.source),
                    high(rect.target),
                    low(rect.target),
                    rect.source_pitch,
                    rect.target_pitch,
                    rect.line_bytes,
                    rect.lines,
                ];
                self.methods(subchannel, 0x030c, &all);
                // Both sides are pitch-linear.
                self.immediate(subchannel, 0x0300, 0x0110);
            }
        }
    }
}

/// Returns the ranges that a copy writes and reads, as one `(target, source)` pair per line, in order.
pub fn lines(rect: &Rect) -> impl Iterator<Item = (Range<u64>, Range<u64>)> + '_ {
    (0..u64::from(rect.lines)).map(|line| {
        let source = rect.source + line * u64::from(rect.source_pitch);
        let target = rect.target + line * u64::from(rect.target_pitch);
        let length = u64::from(rect.line_bytes);
        (target..target + length, source..source + length)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn headers_are_fermis() {
        let mut push = Push::default();
        push.methods(2, 0x0238, &[1, 2]);
        push.immediate(4, 0x0300, 0x0110);
        assert_eq!(push.words(), [0x2002_408e, 1, 2, 0x8110_80c0]);
    }

    #[test]
    fn semaphores_are_the_host_engines() {
        let mut push = Push::default();
        push.acquire(0x12_3456_7000, 9, true);
        push.acquire(0x12_3456_7000, 9, false);
        push.release(0x12_3456_7000, 9);
        push.release_when_idle(0x12_3456_7000, 9);
        let semaphore = |operation| [0x2004_0004, 0x12, 0x3456_7000, 9, operation];
        assert_eq!(push.words(), [0x1001, 1, 0x0110_0002, 0x0100_0002].map(semaphore).concat());
    }

    #[test]
    fn objects_carry_class_and_engine() {
        assert_eq!(Engine::ALL.map(|engine| engine.object().data()), [0x9039, 0x4_90b5, 0x5_90b8]);
        assert_eq!(Object::COMPUTE.data(), 0x90c0);
    }

    const RECT: Rect = Rect {
        source: 0x12_3456_7000,
        target: 0x1_8000_1000,
        source_pitch: 0x1000,
        target_pitch: 0x2000,
        line_bytes: 0x800,
        lines: 7,
    };

    #[test]
    fn m2mf_copy_is_the_sequence_of_the_kernel() {
        let mut push = Push::default();
        push.copy(Engine::M2mf, &RECT);
        assert_eq!(
            push.words(),
            [
                0x2002_408e,
                0x1,
                0x8000_1000, // OFFSET_OUT
                0x2006_40c3,
                0x12,
                0x3456_7000,
                0x1000,
                0x2000,
                0x800,
                7, // OFFSET_IN, pitches, line
                0x2001_40c0,
                0x10_0110, // LAUNCH_DMA
            ]
        );
    }

    #[test]
    fn copy_engine_copy_is_the_sequence_of_the_kernel() {
        let mut push = Push::default();
        push.copy(Engine::Ce1, &RECT);
        assert_eq!(
            push.words(),
            [0x2008_a0c3, 0x12, 0x3456_7000, 0x1, 0x8000_1000, 0x1000, 0x2000, 0x800, 7, 0x8110_a0c0]
        );
    }

    #[test]
    fn linear_copies_cover_every_byte_once_within_the_limits() {
        for length in [1, 4, 0x7fff, 0x8000, 0x8001, 0x8000 * 2047 + 5, 0x8000 * 8191 + 0x8000 + 1, 140 << 20] {
            for engine in Engine::ALL {
                let mut next = 0;
                for rect in linear(0x1000, 0x9_0000_0000, length, engine.most_lines()) {
                    assert!(rect.lines >= 1 && rect.lines <= engine.most_lines());
                    assert!(rect.line_bytes >= 1 && rect.line_bytes <= MOST_LINE_BYTES);
                    assert_eq!((rect.source_pitch, rect.target_pitch), (rect.line_bytes, rect.line_bytes));
                    assert_eq!((rect.source, rect.target), (0x1000 + next, 0x9_0000_0000 + next));
                    next += u64::from(rect.lines) * u64::from(rect.line_bytes);
                }
                assert_eq!(next, length);
            }
        }
    }

    #[test]
    fn longest_rect_fits_where_there_is_room() {
        let mut push = Push::default();
        let rect = Rect { source: 0, target: 0, source_pitch: 1, target_pitch: 1, line_bytes: 1, lines: 1 };
        while push.has_room() {
            push.copy(Engine::M2mf, &rect);
        }
        assert!(push.words().len() <= MOST_WORDS);
    }
}
