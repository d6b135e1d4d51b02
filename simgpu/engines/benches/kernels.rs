//! Benchmarks kernels on the caller's thread: one arithmetic kernel, and one memory kernel per warp access pattern.

use criterion::{Criterion, Throughput, criterion_group, criterion_main};
use nvspec::addr::{GpuVa, VramAddr};
use nvspec::class::compute90c0 as methods;
use simgpu_engines::compute::Compute;
use simgpu_engines::engines::{EngineCx, Progress, Work};
use simgpu_memory::memory::{BusAddr, Memory, Vram};
use simgpu_memory::mmu::{AddressSpace, Mmu};
use std::sync::Arc;

const MIB: u64 = 1 << 20;
/// Virtual address of the code. All areas in this file are identity-mapped to VRAM.
const CODE: u64 = 16 * MIB;
const BANK: u64 = 17 * MIB;
const DATA: u64 = 18 * MIB;
const END: u64 = 32 * MIB;
/// Loop iterations per thread.
const ROUNDS_PER_THREAD: u32 = 64;
/// Number of blocks, and number of threads per block.
const SHAPE: (u32, u32) = (8, 128);

/// An arithmetic-only kernel.
const ARITHMETIC: &str = ".kernel k
    S2R R0, SR_TID.X
    MOV R3, RZ
    round: IMAD R1, R0, R0, R3
    LOP.XOR R2, R1, R2
    FADD R4, R1, R2
    SHL R5, R1, 0x3
    IADD R3, R3, 0x1
    ISETP.LT.AND P0, PT, R3, c[0][0x28]
    @P0 BRA round
    EXIT";

/// A kernel in which each thread repeatedly increments one word. The second parameter is the distance between the words
/// of adjacent threads, in bytes.
const MEMORY: &str = ".kernel k
    S2R R0, SR_TID.X
    MOV R1, c[0][0x24]
    IMAD R4, R0, R1, c[0][0x20]
    MOV R3, RZ
    round: LD R5, [R4]
    IADD R5, R5, 0x1
    ST [R4], R5
    IADD R3, R3, 0x1
    ISETP.LT.AND P0, PT, R3, c[0][0x28]
    @P0 BRA round
    EXIT";

/// A compute engine with a loaded program.
struct Rig {
    compute: Compute,
    memory: Arc<Memory>,
    mmu: Arc<Mmu>,
    space: AddressSpace,
}

impl Rig {
    fn new(memory: Memory, source: &str, stride: u32) -> Self {
        let memory = Arc::new(memory);
        let vram = |at| BusAddr::Vram(VramAddr(at));
        let (directory, table) = (vram(0x1_0000), 0x10_0000u64);
        memory.write(directory, &((1 | table >> 8) << 32).to_le_bytes()).expect("directory");
        for page in (CODE..END).step_by(4096) {
            memory.write(vram(table + page / 4096 * 8), &(1 | page >> 8).to_le_bytes()).expect("table");
        }
        let program = sm20::assemble(source).expect("a program");
        let kernel = program.kernel("k").expect("a kernel");
        memory.write(vram(CODE), &program.bytes()).expect("code");
        let params: Vec<u8> =
            [DATA as u32, stride, ROUNDS_PER_THREAD].iter().flat_map(|word| word.to_le_bytes()).collect();
        memory.write(vram(BANK + 0x20), &params).expect("parameters");
        let mmu = Arc::new(Mmu::new());
        let compute = Compute::new(Arc::clone(&memory), Arc::clone(&mmu), Arc::new(|| {}), 0, 4);
        let space = AddressSpace { directory, limit: GpuVa((1 << 40) - 1) };
        let mut rig = Self { compute, memory, mmu, space };
        for (method, data) in [
            (methods::CODE_ADDRESS_LOW, CODE as u32),
            (methods::CONSTANT_SIZE, 0x1000),
            (methods::CONSTANT_ADDRESS_LOW, BANK as u32),
            (methods::CONSTANT_BIND, 1),
            (methods::REGISTERS, kernel.registers),
            (methods::GRID_YX, 1 << 16 | SHAPE.0),
            (methods::GRID_Z, 1),
            (methods::BLOCK_YX, 1 << 16 | SHAPE.1),
            (methods::BLOCK_Z, 1),
        ] {
            rig.with(|compute, cx| compute.method(method, data, cx)).0.expect("good");
        }
        rig
    }

    fn with<T>(&mut self, act: impl FnOnce(&mut Compute, &mut EngineCx<'_>) -> T) -> (T, Work) {
        let Self { compute, memory, mmu, space } = self;
        let mut work = Work::default();
        let result = act(compute, &mut EngineCx { memory, mmu, space, now_ns: 0, work: &mut work });
        (result, work)
    }

    /// Runs the kernel and returns the number of warp instructions.
    fn run(&mut self) -> u64 {
        self.with(|compute, cx| compute.method(methods::LAUNCH, 0, cx)).0.expect("good");
        loop {
            let (progress, work) = self.with(Compute::step);
            if progress.expect("good") == Progress::Done {
                return work.instructions;
            }
        }
    }
}

fn kernels(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("kernels");
    let memories: [fn(Vram) -> Memory; 2] = [Memory::new, Memory::profiled];
    for (name, source, stride, memory) in [
        ("arithmetic", ARITHMETIC, 0, memories[0]),
        ("words in a row", MEMORY, 4, memories[0]),
        ("lines of a page", MEMORY, 128, memories[0]),
        ("pages", MEMORY, 4096 + 4, memories[0]),
        ("pages, profiled", MEMORY, 4096 + 4, memories[1]),
    ] {
        let mut rig = Rig::new(memory(Vram::new(64 * MIB).expect("vram")), source, stride);
        group.throughput(Throughput::Elements(rig.run()));
        group.bench_function(name, |bench| bench.iter(|| rig.run()));
    }
    group.finish();
}

criterion_group!(benches, kernels);
criterion_main!(benches);
