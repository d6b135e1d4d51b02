use super::{ARENA, ARENA_BYTES, Bench, Layout, NOW_NS, Side, assert_same, fits, on_the_bus, side};
use crate::engines::copy::M2mf;
use crate::engines::{ContextState, Engine, EngineError, Work};
use proptest::prelude::*;

const CLASS: u32 = 0x9039;
/// Offset of the second half of the arena.
const HALF: u64 = ARENA_BYTES / 2;
const EXEC: u32 = 0x300;
const DATA: u32 = 0x304;
const LINEAR: u32 = 0x110;

fn address(high: u32, va: u64) -> [(u32, u32); 2] {
    [(high, (va >> 32) as u32), (high + 4, va as u32)]
}

/// Appends the source methods if `source` is true, or the destination methods otherwise. Returns the EXEC bit for a
/// pitch-linear side, or 0 for a block-linear side.
fn describe(source: bool, side: &Side, start: u64, methods: &mut Vec<(u32, u32)>) -> u32 {
    let (high, pitch_method, tiling, position, bit) =
        if source { (0x30c, 0x314, 0x204, 0x344, 0x10) } else { (0x238, 0x318, 0x220, 0x34c, 0x100) };
    methods.extend(address(high, start + side.base));
    match &side.layout {
        Layout::Pitch { pitch } => {
            methods.push((pitch_method, *pitch as u32));
            bit
        }
        Layout::Blocks { mode, size, at, .. } => {
            let values = [u64::from(*mode), size[0], size[1], size[2], at[2]];
            methods.extend((0..5).map(|i| (tiling + 4 * i, values[i as usize] as u32)));
            methods.extend([(position, at[0] as u32), (position + 4, at[1] as u32)]);
            0
        }
    }
}

fn shape() -> impl Strategy<Value = (u64, u64, Side, Side)> {
    let size = prop_oneof![(1u64..300, 1u64..60), (1u64..3000, 1u64..9), (1u64..9, 1u64..120)];
    size.prop_flat_map(|(line, lines)| {
        (Just(line), Just(lines), side(line, lines, 1, false), side(line, lines, 1, false))
    })
    .prop_filter("within the arena", |(line, lines, from, to)| {
        fits(from, *line, *lines, 1) && fits(to, *line, *lines, 1)
    })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn copies_agree_with_a_plain_copy(
        (line, lines, from, to) in shape(),
        budget in prop_oneof![Just(u64::MAX), 1u64..5000],
        (switch, seed) in any::<(bool, u8)>(),
    ) {
        let mut bench = Bench::<M2mf>::new();
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
        methods.extend([(0x31c, line as u32), (0x320, lines as u32), (EXEC, exec | 1 << 20)]);
        bench.send(CLASS, &methods).expect("a good copy");
        assert_same(&bench.arena(), &model)?;
        prop_assert_eq!((bench.work.bytes, bench.work.launches, bench.work.releases), (line * lines, 1, 0));
        prop_assert_eq!(bench.work.bus_bytes, bus_bytes);
    }

    #[test]
    fn inline_data_goes_where_a_copy_would(
        (line, lines, _, to) in shape(), seed in any::<u8>(), switch in any::<bool>(),
    ) {
        let mut bench = Bench::<M2mf>::new();
        let mut model = bench.fill(seed);
        let data: Vec<u32> = (0..(line * lines).div_ceil(4) as u32).map(|i| i.wrapping_mul(0x9e37_79b9)).collect();
        let bytes: Vec<u8> = data.iter().flat_map(|word| word.to_le_bytes()).collect();
        let target = to.reference(1);
        let mut bus_bytes = 0;
        for y in 0..lines {
            for x in 0..line {
                model[(HALF + target(x, y)) as usize] = bytes[(y * line + x) as usize];
                bus_bytes += on_the_bus(HALF + target(x, y));
            }
        }
        let mut methods = Vec::new();
        let exec = describe(false, &to, ARENA + HALF, &mut methods);
        methods.extend([(0x31c, line as u32), (0x320, lines as u32), (EXEC, exec | 1 << 20 | 0x11)]);
        bench.switch = switch;
        bench.send(CLASS, &methods).expect("begun");
        for word in &data {
            bench.send(CLASS, &[(DATA, *word)]).expect("taken");
        }
        assert_same(&bench.arena(), &model)?;
        prop_assert_eq!((bench.work.bytes, bench.work.bus_bytes), (line * lines, bus_bytes));
        prop_assert_eq!(bench.send(CLASS, &[(DATA, 0)]), Err(EngineError::Data(3)), "no further data is expected");
    }
}

fn linear(from: u64, to: u64, line: u32, lines: u32) -> Vec<(u32, u32)> {
    let mut methods = Vec::new();
    methods.extend(address(0x238, to));
    methods.extend(address(0x30c, from));
    methods.extend([(0x314, line), (0x318, line), (0x31c, line), (0x320, lines)]);
    methods
}

/// Tests the methods that nouveau uses for buffer moves.
#[test]
fn pages_are_moved_as_lines_of_4096_bytes() {
    let mut bench = Bench::<M2mf>::new();
    let data = bench.fill(1);
    let mut methods = linear(ARENA, ARENA + HALF, 4096, 100);
    methods.push((EXEC, 0x0010_0110));
    bench.send(CLASS, &methods).expect("moved");
    let arena = bench.arena();
    assert_eq!(arena[..HALF as usize], data[..HALF as usize]);
    assert_eq!(arena[HALF as usize..][..409_600], data[..409_600]);
    assert_eq!(arena[HALF as usize + 409_600..], data[HALF as usize + 409_600..]);
    assert_eq!((bench.work.bytes, bench.work.launches, bench.work.releases), (409_600, 1, 0));
}

#[test]
fn overlapping_copy_repeats_written_bytes() {
    let mut bench = Bench::<M2mf>::new();
    let mut model = bench.fill(2);
    for i in 0..0x2000 {
        model[0x103 + i] = model[0x100 + i];
    }
    let mut methods = linear(ARENA + 0x100, ARENA + 0x103, 0x2000, 1);
    methods.push((EXEC, LINEAR));
    bench.send(CLASS, &methods).expect("copied");
    assert!(bench.arena() == model);
}

#[test]
fn pitch_is_signed() {
    let mut bench = Bench::<M2mf>::new();
    let mut model = bench.fill(3);
    for line in 0..4 {
        for x in 0..16 {
            model[0x8000 + line * 16 + x] = model[0x1000 - line * 0x100 + x];
        }
    }
    let mut methods = linear(ARENA + 0x1000, ARENA + 0x8000, 16, 4);
    methods.extend([(0x314, 0xffff_ff00), (EXEC, LINEAR)]);
    bench.send(CLASS, &methods).expect("copied");
    assert!(bench.arena() == model);
}

#[test]
fn semaphore_is_released_after_copy_in_both_forms() {
    for (exec, long) in [(LINEAR | 0x2000, true), (LINEAR | 0x10_2000, false)] {
        let mut bench = Bench::<M2mf>::new();
        let before = bench.fill(4);
        let mut methods = linear(ARENA, ARENA + HALF, 0x3000, 1);
        // Put the semaphore inside the destination. The copy must not overwrite the released value.
        methods.extend(address(0x32c, ARENA + HALF + 0x100));
        methods.extend([(0x334, 0xcafe_f00d), (EXEC, exec)]);
        bench.budget = 0x500;
        bench.send(CLASS, &methods).expect("copied");
        let arena = bench.arena();
        let at = HALF as usize + 0x100;
        assert_eq!(arena[at..at + 4], 0xcafe_f00du32.to_le_bytes());
        if long {
            assert_eq!(arena[at + 4..at + 8], [0; 4]);
            assert_eq!(arena[at + 8..at + 16], NOW_NS.to_le_bytes());
        } else {
            assert_eq!(arena[at + 4..at + 16], before[0x104..0x110]);
        }
        assert_eq!((bench.work.releases, bench.work.non_stall), (1, false));
    }
}

#[test]
fn interrupt_is_raised_when_asked_for() {
    let mut bench = Bench::<M2mf>::new();
    let mut methods = linear(ARENA, ARENA + HALF, 64, 1);
    methods.push((EXEC, LINEAR | 0x1_0000));
    bench.send(CLASS, &methods).expect("copied");
    assert!(bench.work.non_stall);
    let mut upload = linear(0, ARENA, 6, 1);
    upload.extend([(EXEC, LINEAR | 0x1_0001), (DATA, 0)]);
    bench.work = Work::default();
    bench.send(CLASS, &upload).expect("begun");
    assert!(!bench.work.non_stall, "two bytes are outstanding");
    bench.send(CLASS, &[(DATA, 0)]).expect("done");
    assert!(bench.work.non_stall);
}

#[test]
fn copy_of_nothing_completes() {
    for (line, lines) in [(0, 5), (5, 0), (0, 0)] {
        for inline in [0, 1] {
            let mut bench = Bench::<M2mf>::new();
            let before = bench.fill(5);
            let mut methods = linear(0, 0, line, lines);
            methods.extend(address(0x32c, ARENA));
            methods.extend([(0x334, 0x7777_7777), (EXEC, LINEAR | 0x10_2000 | inline)]);
            bench.send(CLASS, &methods).expect("nothing to do");
            assert_eq!(bench.arena()[..4], [0x77; 4]);
            assert!(bench.arena()[4..] == before[4..]);
            assert_eq!(bench.work.bytes, 0);
        }
    }
}

#[test]
fn more_lines_than_the_hardware_counts_are_refused() {
    let mut bench = Bench::<M2mf>::new();
    let mut methods = linear(ARENA, ARENA + HALF, 4, 2047);
    methods.push((EXEC, LINEAR));
    assert_eq!(bench.send(CLASS, &methods), Ok(()));
    assert_eq!(bench.send(CLASS, &[(0x320, 2048), (EXEC, LINEAR)]), Err(EngineError::Data(4)));
    assert!(!bench.engine.pending());
}

#[test]
fn rectangles_that_leave_a_block_linear_surface_are_refused() {
    let surface = [(0x204, 0), (0x208, 64), (0x20c, 16), (0x210, 2)];
    for (change, code) in [
        ((0x344, 49), 0x23),
        ((0x344, 0xf_ffff), 0x23),
        ((0x348, 13), 0x23),
        ((0x214, 2), 0x21),
        ((0x31c, 65), 0x23),
        ((0x31c, u32::MAX), 0x23),
        ((0x320, 17), 0x23),
        ((0x204, 0x60), 5),
        ((0x204, 0x600), 5),
        ((0x204, 1), 5),
    ] {
        let mut bench = Bench::<M2mf>::new();
        let mut methods = linear(ARENA, ARENA + HALF, 16, 4);
        methods.extend(surface);
        methods.push((EXEC, 0x100));
        assert_eq!(bench.send(CLASS, &methods), Ok(()), "valid without the change");
        assert_eq!(bench.send(CLASS, &[change, (EXEC, 0x100)]), Err(EngineError::Data(code)), "{change:x?}");
        // Apply the same change to the other side.
        let method = match change.0 {
            tiling @ 0x204..=0x214 => tiling + 0x1c,
            position @ 0x344..=0x348 => position + 8,
            other => other,
        };
        let mut bench = Bench::<M2mf>::new();
        let mut methods = linear(ARENA, ARENA + HALF, 16, 4);
        methods.extend(surface.map(|(method, data)| (method + 0x1c, data)));
        methods.extend([(EXEC, 0x10), (method, change.1)]);
        assert_eq!(bench.send(CLASS, &methods), Ok(()));
        assert_eq!(bench.send(CLASS, &[(EXEC, 0x10)]), Err(EngineError::Data(code)), "{change:x?} out");
    }
}

#[test]
fn render_condition_suppresses_copies() {
    let mut bench = Bench::<M2mf>::new();
    let before = bench.fill(6);
    let mut methods = linear(ARENA, ARENA + HALF, 64, 1);
    methods.extend([(0x340, 0), (EXEC, LINEAR), (0x340, 1), (0x308, 2), (EXEC, LINEAR)]);
    bench.send(CLASS, &methods).expect("suppressed");
    assert!(bench.arena() == before);
    bench.send(CLASS, &[(0x340, 0), (0x308, 1), (EXEC, LINEAR)]).expect("forced");
    assert_eq!(bench.arena()[HALF as usize..][..64], before[..64]);
    for mode in 2..=7 {
        assert_eq!(bench.send(CLASS, &[(0x308, 0), (0x340, mode), (EXEC, LINEAR)]), Err(EngineError::Data(5)));
    }
}

#[test]
fn state_of_a_new_channel_is_loaded_as_fresh() {
    let mut bench = Bench::<M2mf>::new();
    let mut methods = linear(ARENA, ARENA + HALF, 64, 1);
    methods.push((EXEC, LINEAR | 1));
    bench.send(CLASS, &methods).expect("begun");
    bench.engine.load(ContextState::default());
    assert_eq!(bench.send(CLASS, &[(DATA, 0)]), Err(EngineError::Data(3)));
    bench.send(CLASS, &[(EXEC, LINEAR)]).expect("nothing to copy");
    assert_eq!(bench.work.bytes, 0);
}

/// Parses arbitrary images, because guests can write their own images.
#[test]
fn context_image_of_anything_is_a_state() {
    let mut bench = Bench::<M2mf>::new();
    for image in [vec![], vec![0x9039], vec![0x90b5; 400], vec![0x9039; 3], vec![u32::MAX; 200]] {
        bench.engine.load(ContextState::from_words(&image));
        assert!(!bench.engine.pending());
        bench.send(CLASS, &[(0x100, 0)]).expect("usable");
    }
    let mut image = vec![u32::MAX; 200];
    image[0] = 0x9039;
    bench.engine.load(ContextState::from_words(&image));
    assert!(bench.send(CLASS, &[(EXEC, LINEAR)]).is_err(), "too many lines");
}

proptest! {
    #[test]
    fn context_image_of_any_words_does_no_harm(
        words in prop::collection::vec(any::<u32>(), 0..200), exec in any::<u32>(), word in any::<u32>(),
    ) {
        let mut bench = Bench::<M2mf>::new();
        let image: Vec<u32> = std::iter::once(0x9039).chain(words).collect();
        bench.engine.load(ContextState::from_words(&image));
        let _any = bench.send(CLASS, &[(DATA, word), (0x320, 7), (0x31c, 0x1000), (EXEC, exec & 0x13_3111)]);
        prop_assert!(!bench.engine.pending());
    }
}
