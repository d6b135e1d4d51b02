//! Tests copies using an address space whose pages are scattered over VRAM and host memory, a simple reference model of
//! the layout, and a byte-by-byte reference copy.

mod ce;
mod faults;
mod layout;
mod m2mf;

use crate::engines::{ContextState, Engine, EngineCx, EngineError, Work};
use nvspec::addr::{GpuVa, Iova, VramAddr};
use proptest::prelude::*;
use simgpu_memory::memory::BusAddr;
use simgpu_memory::mmu::Access;
use simgpu_memory::mmu::fixture::{PTE_SYSTEM, PTE_VALID, SYSTEM_BASE, SYSTEM_BYTES, Tables};

/// First virtual address of the arena.
const ARENA: u64 = 0x12_3456_0000;
/// Size of the arena in bytes.
const ARENA_BYTES: u64 = 1 << 20;
/// Card clock in the tests, in ns.
const NOW_NS: u64 = 0x0123_4567_89ab_cde0;

/// Returns the number of bus bytes per byte at an arena offset: 1 for host memory, 0 for VRAM.
fn on_the_bus(offset: u64) -> u64 {
    u64::from((offset / 4096).is_multiple_of(3))
}

/// An address space and an engine.
struct Bench<E> {
    tables: Tables,
    engine: E,
    work: Work,
    /// Budget of a step in bytes.
    budget: u64,
    /// True if the test switches channels: the state is saved and loaded between steps, and converted to and from a
    /// context image between methods.
    switch: bool,
}

impl<E: Engine + Default> Bench<E> {
    fn new() -> Self {
        let mut tables = Tables::new();
        for page in 0..ARENA_BYTES / 4096 {
            // Pages with consecutive virtual addresses are never physically adjacent, and every third page is in host
            // memory.
            let scattered = page * 37 % 256 * 4096;
            let pte = match on_the_bus(page * 4096) {
                1 => PTE_SYSTEM | (SYSTEM_BASE + SYSTEM_BYTES / 2 + scattered) >> 8,
                _ => (0x40_0000 + scattered) >> 8,
            };
            tables.small(ARENA + page * 4096, PTE_VALID | pte | if page % 2 == 0 { 0xfe << 36 } else { 0 });
        }
        Self { tables, engine: E::default(), work: Work::default(), budget: u64::MAX, switch: false }
    }

    /// Sends methods, and completes each method's work before sending the next.
    fn send(&mut self, class: u32, methods: &[(u32, u32)]) -> Result<(), EngineError> {
        for (method, data) in methods {
            let Tables { memory, mmu, space, .. } = &self.tables;
            let mut cx = EngineCx { memory, mmu, space, now_ns: NOW_NS, work: &mut self.work };
            self.engine.method(3, class, *method, *data, &mut cx)?;
            while self.engine.pending() {
                self.engine.step(&mut cx, self.budget)?;
                if self.switch {
                    let state = self.engine.save();
                    assert!(!self.engine.pending());
                    self.engine = E::default();
                    self.engine.load(state);
                }
            }
            if self.switch {
                let image = self.engine.save().to_words();
                self.engine = E::default();
                self.engine.load(ContextState::from_words(&image));
            }
        }
        Ok(())
    }

    /// Fills the arena with a pattern that depends on `seed`, and returns the pattern.
    fn fill(&mut self, seed: u8) -> Vec<u8> {
        let mut state = u32::from(seed) + 1;
        let data: Vec<u8> = (0..ARENA_BYTES)
            .map(|_| {
                state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
                (state >> 24) as u8
            })
            .collect();
        let Tables { memory, mmu, space, .. } = &self.tables;
        mmu.write(memory, space, GpuVa(ARENA), &data, Access::USER).expect("mapped");
        data
    }

    fn arena(&self) -> Vec<u8> {
        self.tables.bytes(ARENA, ARENA_BYTES as usize)
    }
}

/// Compares two slices and reports the first mismatch.
fn assert_same(found: &[u8], expected: &[u8]) -> Result<(), TestCaseError> {
    if let Some(at) = (0..expected.len()).find(|at| found[*at] != expected[*at]) {
        prop_assert!(false, "byte {at:#x} is {:#x}, not {:#x}", found[at], expected[at]);
    }
    prop_assert_eq!(found.len(), expected.len());
    Ok(())
}

/// Layout of a block-linear surface, built byte by byte.
struct Reference {
    width: u64,
    height: u64,
    offsets: Vec<u64>,
}

impl Reference {
    /// Builds the layout. `size` and `block` are the dimensions of the surface and of a block in bytes, rows and
    /// slices.
    fn new(size: [u64; 3], block: [u64; 3]) -> Self {
        let up = |size: u64, block: u64| size.div_ceil(block);
        let blocks = [0, 1, 2].map(|axis| up(size[axis], block[axis]));
        let (width, height) = (blocks[0] * block[0], blocks[1] * block[1]);
        let mut offsets = vec![u64::MAX; (width * height * blocks[2] * block[2]) as usize];
        let mut next = 0;
        for bz in 0..blocks[2] {
            for by in 0..blocks[1] {
                for bx in 0..blocks[0] {
                    // Number the offsets in order: slices within a block, GOBs from top to bottom within a slice, and
                    // rows within a GOB.
                    for z in 0..block[2] {
                        for gob in 0..block[1] / 8 {
                            for row in 0..8 {
                                for x in 0..block[0] {
                                    let (x, y, z) =
                                        (bx * block[0] + x, by * block[1] + gob * 8 + row, bz * block[2] + z);
                                    offsets[((z * height + y) * width + x) as usize] = next;
                                    next += 1;
                                }
                            }
                        }
                    }
                }
            }
        }
        Self { width, height, offsets }
    }

    fn offset(&self, x: u64, y: u64, z: u64) -> u64 {
        self.offsets[((z * self.height + y) * self.width + x) as usize]
    }

    fn bytes(&self) -> u64 {
        self.offsets.len() as u64
    }
}

/// Parameters of one side of a copy. Positions and sizes are in bytes (elements, for a remapping copy), rows and
/// slices.
#[derive(Clone, Debug)]
struct Side {
    /// Offset in bytes from the start of this side's half of the arena.
    base: u64,
    layout: Layout,
}

#[derive(Clone, Debug)]
enum Layout {
    Pitch { pitch: u64 },
    Blocks { mode: u32, block: [u64; 3], size: [u64; 3], at: [u64; 3] },
}

impl Side {
    /// Returns a function that computes the offset from `base` of byte `x` of line `y`, for `element`-byte elements.
    fn reference(&self, element: u64) -> impl Fn(u64, u64) -> u64 + use<> {
        let (base, layout) = (self.base, self.layout.clone());
        let blocks = match &layout {
            Layout::Pitch { .. } => None,
            Layout::Blocks { block, size, .. } => Some(Reference::new([size[0] * element, size[1], size[2]], *block)),
        };
        move |x, y| match (&layout, &blocks) {
            (Layout::Blocks { at, .. }, Some(blocks)) => base + blocks.offset(at[0] * element + x, at[1] + y, at[2]),
            (Layout::Pitch { pitch }, _) => base + y * pitch + x,
            (Layout::Blocks { .. }, None) => unreachable!("made above"),
        }
    }
}

/// Generates a side for `lines` lines of `line` elements of `element` bytes each. The side may exceed its half of the
/// arena, so callers filter it with [`fits`].
fn side(line: u64, lines: u64, element: u64, narrow: bool) -> impl Strategy<Value = Side> {
    let pitch = (0u64..0x2000, 0u64..200)
        .prop_map(move |(base, gap)| Side { base, layout: Layout::Pitch { pitch: line * element + gap } });
    let room = (0u64..40, 0u64..12, 0u64..5);
    let blocks = (any::<bool>(), 0u32..4, 0u32..3, room.clone(), room, 0u64..8).prop_map(
        move |(thin, rows, slices, before, behind, base)| {
            let thin = thin && narrow;
            let mode = if thin { 0xe } else { 0 } | rows << 4 | slices << 8;
            let at = [before.0, before.1, before.2];
            let size = [at[0] + line + behind.0, at[1] + lines + behind.1, at[2] + 1 + behind.2];
            let block = [if thin { 16 } else { 64 }, 8 << rows, 1 << slices];
            Side { base: base * 512, layout: Layout::Blocks { mode, block, size, at } }
        },
    );
    prop_oneof![pitch, blocks]
}

/// Returns true if the side is within its half of the arena.
fn fits(side: &Side, line: u64, lines: u64, element: u64) -> bool {
    let bytes = match &side.layout {
        Layout::Pitch { pitch } => pitch * lines + line * element,
        Layout::Blocks { block, size, .. } => Reference::new([size[0] * element, size[1], size[2]], *block).bytes(),
    };
    side.base + bytes <= ARENA_BYTES / 2
}

#[test]
fn arena_is_scattered_over_both_memories() {
    let bench = Bench::<super::M2mf>::new();
    let frames: Vec<BusAddr> = (0..ARENA_BYTES / 4096)
        .map(|page| bench.tables.translate(ARENA + page * 4096, true).expect("mapped").address)
        .collect();
    assert!(frames.iter().any(|frame| matches!(frame, BusAddr::System(Iova(_)))));
    assert!(frames.iter().any(|frame| matches!(frame, BusAddr::Vram(VramAddr(_)))));
    assert!(frames.windows(2).all(|pair| pair[0].offset(4096) != pair[1]));
}
