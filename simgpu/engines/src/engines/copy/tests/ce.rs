use super::{ARENA, ARENA_BYTES, Bench, Layout, NOW_NS, Side, assert_same, fits, on_the_bus, side};
use crate::engines::copy::CopyEngine;
use proptest::prelude::*;

const CLASS: u32 = 0x90b5;
const HALF: u64 = ARENA_BYTES / 2;
const EXEC: u32 = 0x300;
const LINEAR: u32 = 0x110;

fn address(high: u32, va: u64) -> [(u32, u32); 2] {
    [(high, (va >> 32) as u32), (high + 4, va as u32)]
}

/// Appends the source methods if `source` is true, or the destination methods otherwise. Returns the EXEC bit for a
/// pitch-linear side, or 0 for a block-linear side.
fn describe(source: bool, side: &Side, start: u64, methods: &mut Vec<(u32, u32)>) -> u32 {
    let (high, pitch_method, tiling, bit) =
        if source { (0x30c, 0x31c, 0x200, 0x10) } else { (0x314, 0x320, 0x220, 0x100) };
    methods.extend(address(high, start + side.base));
    match &side.layout {
        Layout::Pitch { pitch } => {
            methods.push((pitch_method, *pitch as u32));
            bit
        }
        Layout::Blocks { mode, size, at, .. } => {
            let values = [u64::from(*mode), size[0], size[1], size[2], at[2], at[0], at[1]];
            methods.extend((0..7).map(|i| (tiling + 4 * i, values[i as usize] as u32)));
            0
        }
    }
}

/// Parameters of an element remapping.
#[derive(Clone, Debug)]
struct Format {
    component: u64,
    sources: u64,
    selectors: Vec<u32>,
    constants: [u32; 2],
}

impl Format {
    fn word(&self) -> u32 {
        let selectors = self.selectors.iter().rev().fold(0, |word, selector| word << 4 | selector);
        let targets = self.selectors.len() as u32;
        selectors | (self.component as u32 - 1) << 16 | (self.sources as u32 - 1) << 20 | (targets - 1) << 24
    }

    fn source_bytes(&self) -> u64 {
        self.component * self.sources
    }

    fn target_bytes(&self) -> u64 {
        self.component * self.selectors.len() as u64
    }

    /// Returns byte `byte` of the destination element for the source element `source`.
    fn byte(&self, byte: u64, source: &[u8]) -> u8 {
        let (component, within) = (byte / self.component, byte % self.component);
        match self.selectors[component as usize] {
            which @ 0..=3 => source[(u64::from(which) * self.component + within) as usize],
            constant @ 4..=5 => (self.constants[constant as usize - 4] >> (8 * within)) as u8,
            _ => 0,
        }
    }
}

fn format() -> impl Strategy<Value = Format> {
    (1u64..5, 1u64..5).prop_flat_map(|(component, sources)| {
        let selector = prop_oneof![4 => 0..sources as u32, 1 => 4u32..16];
        (prop::collection::vec(selector, 1..5), any::<[u32; 2]>()).prop_map(move |(selectors, constants)| Format {
            component,
            sources,
            selectors,
            constants,
        })
    })
}

fn shape(source: u64, target: u64) -> impl Strategy<Value = (u64, u64, Side, Side)> {
    let size = prop_oneof![(1u64..100, 1u64..40), (1u64..900, 1u64..7), (1u64..5, 1u64..120)];
    size.prop_flat_map(move |(line, lines)| {
        (Just(line), Just(lines), side(line, lines, source, true), side(line, lines, target, true))
    })
    .prop_filter("within the arena", move |(line, lines, from, to)| {
        fits(from, *line, *lines, source) && fits(to, *line, *lines, target)
    })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn copies_agree_with_a_plain_copy(
        (line, lines, from, to) in shape(1, 1),
        budget in prop_oneof![Just(u64::MAX), 1u64..5000],
        (switch, seed) in any::<(bool, u8)>(),
        class in prop_oneof![Just(0x90b5u32), Just(0x90b8u32)],
    ) {
        let mut bench = Bench::<CopyEngine>::new();
        (bench.budget, bench.switch) = (budget, switch);
        let mut model = bench.fill(seed);
        let (source, target) = (from.reference(1), to.reference(1));
        let mut bus_bytes = 0;
        for y in 0..lines {
            for x in 0..line {
                model[(HALF + target(x, y)) as usize] = model[source(x, y) as usize];
                bus_bytes += on_the_bus(source(x, y)) + on_the_bus(HALF + target(x, y));
            }
        }
        let mut methods = Vec::new();
        let exec = describe(true, &from, ARENA, &mut methods) | describe(false, &to, ARENA + HALF, &mut methods);
        methods.extend([(0x324, line as u32), (0x328, lines as u32), (EXEC, exec)]);
        bench.send(class, &methods).expect("a good copy");
        assert_same(&bench.arena(), &model)?;
        prop_assert_eq!((bench.work.bytes, bench.work.launches, bench.work.releases), (line * lines, 1, 0));
        prop_assert_eq!(bench.work.bus_bytes, bus_bytes);
    }

    #[test]
    fn remapped_copies_agree_with_changing_elements_one_by_one(
        (format, (line, lines, from, to)) in format().prop_flat_map(|format| {
            let shape = shape(format.source_bytes(), format.target_bytes());
            (Just(format), shape)
        }),
        budget in prop_oneof![Just(u64::MAX), 1u64..5000],
        (switch, seed) in any::<(bool, u8)>(),
    ) {
        let mut bench = Bench::<CopyEngine>::new();
        (bench.budget, bench.switch) = (budget, switch);
        let mut model = bench.fill(seed);
        let before = model.clone();
        let (source, target) = (from.reference(format.source_bytes()), to.reference(format.target_bytes()));
        // A remap that writes only constants does not read the source.
        let reads = format.selectors.iter().any(|selector| *selector <= 3);
        let mut bus_bytes = 0;
        for y in 0..lines {
            for x in 0..line {
                let bytes = (0..format.source_bytes()).map(|byte| source(x * format.source_bytes() + byte, y));
                bus_bytes += bytes.clone().filter(|_| reads).map(on_the_bus).sum::<u64>();
                let element: Vec<u8> = bytes.map(|at| before[at as usize]).collect();
                for byte in 0..format.target_bytes() {
                    let at = target(x * format.target_bytes() + byte, y);
                    model[(HALF + at) as usize] = format.byte(byte, &element);
                    bus_bytes += on_the_bus(HALF + at);
                }
            }
        }
        let mut methods = Vec::new();
        let exec = describe(true, &from, ARENA, &mut methods) | describe(false, &to, ARENA + HALF, &mut methods);
        methods.extend([(0x32c, format.word()), (0x330, format.constants[0]), (0x334, format.constants[1])]);
        methods.extend([(0x324, line as u32), (0x328, lines as u32), (EXEC, exec | 1)]);
        bench.send(CLASS, &methods).expect("a good copy");
        assert_same(&bench.arena(), &model)?;
        prop_assert_eq!(bench.work.bytes, line * lines * format.target_bytes());
        prop_assert_eq!(bench.work.bus_bytes, bus_bytes);
    }
}

/// Tests the methods that nouveau uses for buffer moves.
#[test]
fn pages_are_moved_as_lines_of_4096_bytes() {
    let mut bench = Bench::<CopyEngine>::new();
    let data = bench.fill(1);
    let mut methods = Vec::new();
    methods.extend(address(0x30c, ARENA));
    methods.extend(address(0x314, ARENA + HALF));
    methods.extend([(0x31c, 4096), (0x320, 4096), (0x324, 4096), (0x328, 128), (EXEC, LINEAR)]);
    bench.send(0x90b8, &methods).expect("moved");
    let arena = bench.arena();
    assert!(arena[..HALF as usize] == data[..HALF as usize]);
    assert!(arena[HALF as usize..] == data[..HALF as usize]);
    assert_eq!((bench.work.bytes, bench.work.launches, bench.work.releases), (HALF, 1, 0));
}

#[test]
fn query_is_written_after_copy_in_both_forms() {
    for (exec, long) in [(LINEAR | 0x1000, true), (LINEAR | 0x3000, false)] {
        let mut bench = Bench::<CopyEngine>::new();
        let before = bench.fill(2);
        let mut methods = Vec::new();
        methods.extend(address(0x30c, ARENA));
        methods.extend(address(0x314, ARENA + HALF));
        methods.extend(address(0x338, ARENA + HALF + 0x40));
        methods.extend([(0x340, 0xfeed_beef), (0x324, 0x1000), (0x328, 1), (EXEC, exec)]);
        bench.send(CLASS, &methods).expect("copied");
        let arena = bench.arena();
        let at = HALF as usize + 0x40;
        assert_eq!(arena[at..at + 4], 0xfeed_beefu32.to_le_bytes());
        if long {
            assert_eq!(arena[at + 4..at + 8], [0; 4]);
            assert_eq!(arena[at + 8..at + 16], NOW_NS.to_le_bytes());
        } else {
            assert_eq!(arena[at + 4..at + 16], before[0x44..0x50]);
        }
        assert_eq!(bench.work.releases, 1);
    }
}

#[test]
fn query_without_a_copy_is_written() {
    let mut bench = Bench::<CopyEngine>::new();
    bench.send(CLASS, &address(0x338, ARENA)).expect("set");
    bench.send(CLASS, &[(0x340, 1), (EXEC, LINEAR | 0x3000)]).expect("written");
    assert_eq!(bench.arena()[..4], [1, 0, 0, 0]);
}

#[test]
fn fill_by_constants_does_not_read_the_source() {
    let mut bench = Bench::<CopyEngine>::new();
    let mut model = bench.fill(3);
    for word in model[HALF as usize..][..0x4000].chunks_exact_mut(4) {
        word.copy_from_slice(&0x1234_5678u32.to_le_bytes());
    }
    let mut methods = Vec::new();
    methods.extend(address(0x30c, 0));
    methods.extend(address(0x314, ARENA + HALF));
    // Copy a single four-byte component, which is the first constant.
    methods.extend([(0x32c, 0x3_0004), (0x330, 0x1234_5678), (0x31c, 0), (0x320, 0x1000)]);
    methods.extend([(0x324, 0x400), (0x328, 4), (EXEC, LINEAR | 1)]);
    bench.send(CLASS, &methods).expect("the unmapped source at 0 is not read");
    assert!(bench.arena() == model);
}

#[test]
fn component_that_the_source_does_not_have_is_zero() {
    let mut bench = Bench::<CopyEngine>::new();
    bench.fill(4);
    let mut methods = Vec::new();
    methods.extend(address(0x30c, ARENA));
    methods.extend(address(0x314, ARENA + HALF));
    // Copy a single byte of the second component, although the source has only one component.
    methods.extend([(0x32c, 1), (0x324, 16), (0x328, 1), (EXEC, LINEAR | 1)]);
    bench.send(CLASS, &methods).expect("copied");
    assert_eq!(bench.arena()[HALF as usize..][..16], [0; 16]);
}
