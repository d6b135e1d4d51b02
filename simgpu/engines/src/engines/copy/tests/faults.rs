//! Tests errors: missing pages, unknown methods, and invalid bits.

use super::{ARENA, ARENA_BYTES, Bench, on_the_bus};
use crate::engines::copy::{CopyEngine, M2mf};
use crate::engines::{Engine, EngineError};
use nvspec::addr::GpuVa;
use simgpu_memory::mmu::fixture::{PTE_READ_ONLY, PTE_VALID};
use simgpu_memory::mmu::{Flush, MmuFault};

const HALF: u64 = ARENA_BYTES / 2;

fn fault(reason: u32, va: u64, write: bool) -> Result<(), EngineError> {
    Err(EngineError::Fault(MmuFault { reason, va: GpuVa(va), write }))
}

fn address(high: u32, va: u64) -> [(u32, u32); 2] {
    [(high, (va >> 32) as u32), (high + 4, va as u32)]
}

fn m2mf_copy(from: u64, to: u64, line: u32, lines: u32) -> Vec<(u32, u32)> {
    let mut methods = Vec::new();
    methods.extend(address(0x30c, from));
    methods.extend(address(0x238, to));
    methods.extend([(0x314, line), (0x318, line), (0x31c, line), (0x320, lines), (0x300, 0x110)]);
    methods
}

fn ce_copy(from: u64, to: u64, line: u32, lines: u32) -> Vec<(u32, u32)> {
    let mut methods = Vec::new();
    methods.extend(address(0x30c, from));
    methods.extend(address(0x314, to));
    methods.extend([(0x31c, line), (0x320, line), (0x324, line), (0x328, lines), (0x300, 0x110)]);
    methods
}

/// Checks that a copy stops exactly at a read-only page in the middle, regardless of the step size.
fn stops_exactly<E: Engine + Default>(class: u32, copy: impl Fn(u64, u64, u32, u32) -> Vec<(u32, u32)>) {
    for budget in [1, 0x700, u64::MAX] {
        let mut bench = Bench::<E>::new();
        bench.budget = budget;
        let mut model = bench.fill(9);
        let broken = ARENA + HALF + 0x5000;
        bench.tables.small(broken, PTE_VALID | PTE_READ_ONLY | 0x70_0000 >> 8);
        bench.tables.mmu.flush(Flush::default());
        // The copy starts 0x123 bytes into a page: 0x4edd bytes precede the faulting page.
        let done = 0x5000 - 0x123;
        model.copy_within(0x40..0x40 + done, HALF as usize + 0x123);
        let result = bench.send(class, &copy(ARENA + 0x40, ARENA + HALF + 0x123, 0x1000, 8));
        assert_eq!(result, fault(6, broken, true), "budget {budget:#x}");
        assert!(!bench.engine.pending(), "the copy is abandoned");
        assert_eq!(bench.work.bytes, done as u64);
        let crossed = |at: u64| on_the_bus(0x40 + at) + on_the_bus(HALF + 0x123 + at);
        assert_eq!(bench.work.bus_bytes, (0..done as u64).map(crossed).sum::<u64>());
        let arena = bench.arena();
        let (before, behind) = (HALF as usize + 0x5000, HALF as usize + 0x6000);
        assert!(arena[..before] == model[..before] && arena[behind..] == model[behind..]);

        // A source fault reports the source address. If both sides are unmapped, the source faults first.
        let from = ARENA + ARENA_BYTES;
        let copied = bench.send(class, &copy(from - 0x800, ARENA, 0x1000, 1));
        assert_eq!(copied, fault(2, from, false), "budget {budget:#x}");
        assert_eq!(bench.send(class, &copy(from, broken, 0x1000, 1)), fault(2, from, false));
        assert_eq!(bench.send(class, &copy(0xff_ffff_f000, ARENA, 0x10, 1)), fault(0, 0xff_ffff_f000, false));
        assert_eq!(bench.send(class, &copy(ARENA, ARENA + HALF, 0x10, 1)), Ok(()), "works after faults");
    }
}

#[test]
fn m2mf_stops_at_the_byte_that_faults() {
    stops_exactly::<M2mf>(0x9039, m2mf_copy);
}

#[test]
fn copy_engine_stops_at_the_byte_that_faults() {
    stops_exactly::<CopyEngine>(0x90b5, ce_copy);
}

#[test]
fn remapped_copy_stops_at_the_byte_that_faults() {
    let mut bench = Bench::<CopyEngine>::new();
    let end = ARENA + ARENA_BYTES;
    let mut methods = ce_copy(ARENA, end - 6, 8, 1);
    methods.pop();
    methods.extend([(0x32c, 0), (0x300, 0x111)]);
    assert_eq!(bench.send(0x90b5, &methods), fault(2, end, true));
    assert_eq!(bench.work.bytes, 6);
}

#[test]
fn inline_data_stops_at_the_byte_that_faults() {
    let mut bench = Bench::<M2mf>::new();
    let end = ARENA + ARENA_BYTES;
    let mut methods = m2mf_copy(0, end - 6, 12, 1);
    methods.pop();
    methods.extend([(0x300, 0x111), (0x304, 1), (0x304, 2)]);
    assert_eq!(bench.send(0x9039, &methods), fault(2, end, true));
    assert_eq!(bench.send(0x9039, &[(0x304, 3)]), Err(EngineError::Data(3)), "given up");
}

#[test]
fn semaphore_that_faults_is_the_fault() {
    let mut bench = Bench::<M2mf>::new();
    let mut methods = m2mf_copy(ARENA, ARENA + HALF, 16, 1);
    methods.pop();
    methods.extend(address(0x32c, 0x1000));
    methods.push((0x300, 0x2110));
    assert_eq!(bench.send(0x9039, &methods), fault(0, 0x1000, true));
    assert_eq!(bench.work.releases, 0);
    methods.extend([(0x330, 0x1002), (0x300, 0x2110)]);
    let methods = &methods[methods.len() - 2..];
    assert_eq!(bench.send(0x9039, methods), Err(EngineError::Data(0xb)), "not dword-aligned");
    let mut bench = Bench::<CopyEngine>::new();
    let mut methods = ce_copy(ARENA, ARENA + HALF, 16, 1);
    methods.extend(address(0x338, 0x1000));
    methods.push((0x300, 0x1110));
    assert_eq!(bench.send(0x90b5, &methods), fault(0, 0x1000, true));
}

#[test]
fn classes_of_other_engines_are_refused() {
    let (mut m2mf, mut ce) = (Bench::<M2mf>::new(), Bench::<CopyEngine>::new());
    for class in [0, 0x902d, 0x9097, 0x90c0, 0x90b5, 0x90b8, 0xa0b5] {
        assert!(!m2mf.engine.class_supported(class));
        assert_eq!(m2mf.send(class, &[(0x100, 0)]), Err(EngineError::IllegalClass));
    }
    for class in [0x9039, 0x85b5, 0xa0b5] {
        assert!(!ce.engine.class_supported(class));
        assert_eq!(ce.send(class, &[(0x100, 0)]), Err(EngineError::IllegalClass));
    }
    assert!(m2mf.engine.class_supported(0x9039));
    assert!(ce.engine.class_supported(0x90b5) && ce.engine.class_supported(0x90b8));
}

/// All methods of M2MF, as inclusive ranges.
const M2MF_METHODS: &[(u32, u32)] = &[
    (0x100, 0x100),
    (0x110, 0x110),
    (0x13c, 0x140),
    (0x150, 0x154),
    (0x204, 0x214),
    (0x220, 0x230),
    (0x238, 0x310),
    (0x314, 0x320),
    (0x32c, 0x350),
];

/// All methods of a copy engine, as inclusive ranges.
const CE_METHODS: &[(u32, u32)] =
    &[(0x000, 0x000), (0x100, 0x100), (0x140, 0x140), (0x200, 0x218), (0x220, 0x238), (0x300, 0x304), (0x30c, 0x340)];

fn only_these<E: Engine + Default>(class: u32, known: &[(u32, u32)]) {
    let mut bench = Bench::<E>::new();
    for method in (0..0x4000).step_by(4) {
        let exists = known.iter().any(|(first, last)| (*first..=*last).contains(&method));
        let result = bench.send(class, &[(method, 0)]);
        assert_eq!(result != Err(EngineError::IllegalMethod), exists, "method {method:#x}: {result:?}");
    }
    for method in [1, 0x102, 0x301, 0x33f, u32::MAX, 0x1_0300] {
        assert_eq!(bench.send(class, &[(method, 0)]), Err(EngineError::IllegalMethod), "method {method:#x}");
    }
}

#[test]
fn methods_that_do_not_exist_are_illegal() {
    only_these::<M2mf>(0x9039, M2MF_METHODS);
    only_these::<CopyEngine>(0x90b5, CE_METHODS);
}

#[test]
fn reserved_bits_of_m2mf_are_refused() {
    for (method, reserved) in [
        (0x204, 0x1000),
        (0x220, 0x8000_0000),
        (0x238, 0x100),
        (0x30c, 0x100),
        (0x32c, 0x8000_0000),
        (0x300, 0x2),
        (0x300, 0x20_0000),
        (0x344, 0x10_0000),
        (0x350, 0x1_0000),
        (0x340, 8),
    ] {
        let mut bench = Bench::<M2mf>::new();
        assert_eq!(bench.send(0x9039, &[(method, reserved)]), Err(EngineError::Data(0xc)), "{method:#x}");
    }
    for exec in [0x3110, 0x2_0110, 0x3_0110] {
        let mut bench = Bench::<M2mf>::new();
        assert_eq!(bench.send(0x9039, &[(0x300, exec)]), Err(EngineError::Data(5)), "{exec:#x}");
    }
}

#[test]
fn reserved_bits_of_the_copy_engine_are_refused() {
    for (method, reserved) in [
        (0x200, 0x1000),
        (0x204, 0x8_0000),
        (0x208, 0x2000),
        (0x20c, 0x800),
        (0x210, 0x1000),
        (0x234, 0x8_0000),
        (0x238, 0x2000),
        (0x30c, 0x100),
        (0x320, 0x8_0000),
        (0x324, 0x1_0000),
        (0x328, 0x2000),
        (0x32c, 0x0004_0000),
        (0x32c, 0x0040_0000),
        (0x32c, 0x0400_0000),
        (0x338, 0x100),
    ] {
        let mut bench = Bench::<CopyEngine>::new();
        assert_eq!(bench.send(0x90b5, &[(method, reserved)]), Err(EngineError::Data(3)), "{method:#x}");
    }
}

/// Sends random methods with random data to both engines. Each method must fail, or its copy must terminate.
mod fuzz {
    use super::*;
    use proptest::prelude::*;

    fn data() -> impl Strategy<Value = u32> {
        prop_oneof![any::<u32>(), 0u32..0x200, Just(0x110), Just(0x111), Just((ARENA >> 32) as u32), Just(ARENA as u32)]
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(32))]

        #[test]
        fn any_methods_end(
            methods in prop::collection::vec((0u32..0xe0, data()), 1..80), budget in 0x1000u64..0x4_0000,
        ) {
            let (mut m2mf, mut ce) = (Bench::<M2mf>::new(), Bench::<CopyEngine>::new());
            (m2mf.budget, ce.budget) = (budget, budget);
            for (method, data) in methods {
                let _any = m2mf.send(0x9039, &[(method * 4, data)]);
                let _any = ce.send(0x90b5, &[(method * 4, data)]);
                prop_assert!(!m2mf.engine.pending() && !ce.engine.pending());
            }
        }
    }
}
