//! Benchmarks copies and aperture accesses. The baseline is a plain host copy of the same size.

use criterion::{Criterion, Throughput, criterion_group, criterion_main};
use nvspec::addr::{GpuVa, VramAddr};
use simgpu_engines::engines::copy::{CopyEngine, M2mf};
use simgpu_engines::engines::{Engine, EngineCx, Work};
use simgpu_memory::memory::{BusAddr, Memory, Vram};
use simgpu_memory::mmu::{Access, AddressSpace, Mmu};
use std::hint::black_box;

const MIB: u64 = 1 << 20;
const SOURCE: u64 = 1 << 27;
const TARGET: u64 = SOURCE + 64 * MIB;
const BYTES: u64 = 16 * MIB;

fn vram(address: u64) -> BusAddr {
    BusAddr::Vram(VramAddr(address))
}

/// Maps 16 MiB each at `SOURCE` and `TARGET`, using large or small pages.
fn setup(large: bool) -> (Memory, AddressSpace) {
    let memory = Memory::new(Vram::new(256 * MIB).expect("vram"));
    let directory = vram(0x1_0000);
    let table = 0x10_0000u64;
    let entry = (1 | table >> 8) << if large { 0 } else { 32 };
    memory.write(directory.offset(8), &entry.to_le_bytes()).expect("directory");
    let page = if large { 128 << 10 } else { 4096 };
    for (va, frame) in [(SOURCE, 32 * MIB), (TARGET, 64 * MIB)] {
        for offset in (0..BYTES).step_by(page as usize) {
            let index = (va - SOURCE + offset) / page;
            let pte = 1 | (frame + offset) >> 8;
            memory.write(vram(table + index * 8), &pte.to_le_bytes()).expect("table");
        }
        memory.write(vram(frame), &vec![0x5a; BYTES as usize]).expect("touched");
    }
    (memory, AddressSpace { directory, limit: GpuVa((1 << 40) - 1) })
}

fn run(engine: &mut dyn Engine, class: u32, methods: &[(u32, u32)], memory: &Memory, mmu: &Mmu, space: &AddressSpace) {
    let mut work = Work::default();
    let mut cx = EngineCx { memory, mmu, space, now_ns: 0, work: &mut work };
    for (method, data) in methods {
        engine.method(0, class, *method, *data, &mut cx).expect("good");
        while engine.pending() {
            engine.step(&mut cx, 256 << 10).expect("mapped");
        }
    }
    black_box(work);
}

fn copies(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("copy");
    group.throughput(Throughput::Bytes(BYTES));
    group.sample_size(20);
    let mut buffers = (vec![1u8; BYTES as usize], vec![2u8; BYTES as usize]);
    group.bench_function("memcpy", |bench| {
        bench.iter(|| {
            let (from, to) = &mut buffers;
            to.copy_from_slice(black_box(from));
            black_box(&to);
        });
    });
    let pages = (BYTES / 4096) as u32;
    let lines = [(0x30c, 0), (0x310, SOURCE as u32), (0x314, 0), (0x318, TARGET as u32)];
    let linear: Vec<(u32, u32)> = lines
        .into_iter()
        .chain([(0x31c, 4096), (0x320, 4096), (0x324, 4096), (0x328, pages), (0x300, 0x110)])
        .collect();
    for (name, large) in [("large pages", true), ("small pages", false)] {
        let (memory, space) = setup(large);
        let (mmu, mut engine) = (Mmu::new(), CopyEngine::default());
        group.bench_function(format!("linear, {name}"), |bench| {
            bench.iter(|| run(&mut engine, 0x90b5, &linear, &memory, &mmu, &space));
        });
    }
    let (memory, space) = setup(true);
    let (mmu, mut engine) = (Mmu::new(), M2mf::default());
    // A tiled surface with 1024 rows of 16384 bytes, in blocks that are 16 GOBs high.
    let tiled = [
        (0x238, 0),
        (0x23c, TARGET as u32),
        (0x30c, 0),
        (0x310, SOURCE as u32),
        (0x314, 16384),
        (0x220, 0x40),
        (0x224, 16384),
        (0x228, 1024),
        (0x22c, 1),
        (0x31c, 16384),
        (0x320, 1024),
        (0x300, 0x10),
    ];
    group.bench_function("to block linear", |bench| {
        bench.iter(|| run(&mut engine, 0x9039, &tiled, &memory, &mmu, &space));
    });
    group.finish();
}

fn words(criterion: &mut Criterion) {
    let (memory, space) = setup(false);
    let mmu = Mmu::new();
    let mut va = SOURCE;
    criterion.bench_function("write32 through the MMU", |bench| {
        bench.iter(|| {
            va = SOURCE + (va + 4) % (8 * MIB);
            mmu.write32(&memory, &space, GpuVa(va), 7, Access::PRIVILEGED).expect("mapped");
        });
    });
}

criterion_group!(benches, copies, words);
criterion_main!(benches);
