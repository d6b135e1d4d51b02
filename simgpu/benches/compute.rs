//! How many instructions of threads kernels execute per second: with integers, floats, memory and divergence; with one
//! thread of the host and with two.

use criterion::{Criterion, Throughput, criterion_group, criterion_main};
use nvspec::addr::{GpuVa, VramAddr};
use nvspec::class::compute90c0 as methods;
use simgpu::compute::Compute;
use simgpu::engines::{EngineCx, Progress, Work};
use simgpu::memory::{BusAddr, Memory, Vram};
use simgpu::mmu::{AddressSpace, Mmu};
use std::sync::Arc;

/// Rounds of each kernel's loop.
const ROUNDS: u32 = 256;
/// Blocks and threads of a block.
const SHAPE: (u32, u32) = (64, 256);

const HEAD: &str = ".kernel k
    S2R R0, SR_TID.X
    S2R R1, SR_CTAID.X
    S2R R2, SR_NTID.X
    IMAD.U32.U32 R0, R1, R2, R0
    ISCADD R1, R0, c[0][0x20], 0x2
    LD R4, [R1]
    MOV R5, 0x3
    MOV32I R6, 0x3f7fff00
    MOV32I R7, 0x3a83126f
    I2F.F32.U32 R8, R0
    MOV R9, RZ
    top:";

const TAIL: &str = "
    IADD R9, R9, 0x1
    ISETP.LT.AND P0, PT, R9, c[0][0x24]
    @P0 BRA top
    IADD R4, R4, R5
    LOP.XOR R4, R4, R8
    ST [R1+0x40000], R4
    EXIT";

const INTEGER: &str = "
    IMAD.U32.U32 R4, R4, R5, R0
    LOP.XOR R5, R5, R4
    SHR.U32 R10, R4, 0x7
    IADD R4, R4, R10
    IMAD.U32.U32 R4, R4, R5, R0
    LOP.XOR R5, R5, R4
    SHL R10, R4, 0x3
    IADD R5, R5, -R10";

const FLOAT: &str = "
    FFMA R8, R8, R6, R7
    FFMA R10, R8, R6, R7
    FMUL R11, R10, R6
    FADD R8, R8, R11
    FFMA R8, R8, R7, R6
    FFMA R10, R10, R6, R8
    FFMA R11, R11, R6, R10
    FFMA R8, R11, R7, R6";

const MEMORY: &str = "
    LD R10, [R1]
    IADD R10, R10, 0x1
    ST [R1], R10
    LD R11, [R1]";

const DIVERGENT: &str = "
    LOP.AND R10, R4, 0x1
    ISETP.NE.AND P1, PT, R10, RZ
    SSY joined
    @P1 BRA odd
    SHR.U32 R4, R4, 0x1
    IADD R5, R5, 0x1
    NOP.S
    odd: IMAD.U32.U32 R4, R4, R5, R0
    IADD R4, R4, 0x7
    NOP.S
    joined: IADD R4, R4, R9";

const MIB: u64 = 1 << 20;
/// One address for all: a page table for the first 128 MiB, whose pages lie in VRAM where they are.
const CODE: u64 = 16 * MIB;
const BANK: u64 = 17 * MIB;
const DATA: u64 = 18 * MIB;

/// An engine with a program.
struct Bench {
    compute: Compute,
    memory: Arc<Memory>,
    mmu: Arc<Mmu>,
    space: AddressSpace,
}

impl Bench {
    fn new(workers: usize, source: &str) -> Self {
        let memory = Arc::new(Memory::new(Vram::new(64 * MIB).expect("vram")));
        let (directory, table) = (BusAddr::Vram(VramAddr(0x1_0000)), 0x10_0000u64);
        memory.write(directory, &((1 | table >> 8) << 32).to_le_bytes()).expect("directory");
        for page in (CODE..32 * MIB).step_by(4096) {
            let entry = BusAddr::Vram(VramAddr(table + page / 4096 * 8));
            memory.write(entry, &(1 | page >> 8).to_le_bytes()).expect("table");
        }
        let program = sm20::assemble(source).unwrap_or_else(|errors| panic!("{errors:?}"));
        memory.write(BusAddr::Vram(VramAddr(CODE)), &program.bytes()).expect("code");
        let params: Vec<u8> = [DATA as u32, ROUNDS].iter().flat_map(|word| word.to_le_bytes()).collect();
        memory.write(BusAddr::Vram(VramAddr(BANK + 0x20)), &params).expect("parameters");
        let mmu = Arc::new(Mmu::new());
        let waiter = std::thread::current();
        let wake = Arc::new(move || waiter.unpark());
        let compute = Compute::new(Arc::clone(&memory), Arc::clone(&mmu), wake, workers, 4);
        let space = AddressSpace { directory, limit: GpuVa((1 << 40) - 1) };
        let mut bench = Self { compute, memory, mmu, space };
        for (method, data) in [
            (methods::CODE_ADDRESS_LOW, CODE as u32),
            (methods::CONSTANT_SIZE, 0x1000),
            (methods::CONSTANT_ADDRESS_LOW, BANK as u32),
            (methods::CONSTANT_BIND, 1),
            (methods::REGISTERS, program.kernels[0].registers),
            (methods::GRID_YX, 1 << 16 | SHAPE.0),
            (methods::GRID_Z, 1),
            (methods::BLOCK_YX, 1 << 16 | SHAPE.1),
            (methods::BLOCK_Z, 1),
        ] {
            bench.with(|compute, cx| compute.method(method, data, cx).expect("good"));
        }
        bench
    }

    fn with<T>(&mut self, act: impl FnOnce(&mut Compute, &mut EngineCx<'_>) -> T) -> (T, Work) {
        let Self { compute, memory, mmu, space } = self;
        let mut work = Work::default();
        let result = act(compute, &mut EngineCx { memory, mmu, space, now_ns: 0, work: &mut work });
        (result, work)
    }

    /// Runs the kernel and returns the instructions of its threads.
    fn run(&mut self) -> u64 {
        self.with(|compute, cx| compute.method(methods::LAUNCH, 0, cx).expect("good"));
        loop {
            let (progress, work) = self.with(|compute, cx| compute.step(cx).expect("a good kernel"));
            match progress {
                Progress::Done => return work.thread_instructions,
                Progress::More => {}
                Progress::Elsewhere => std::thread::park(),
            }
        }
    }
}

fn kernels(criterion: &mut Criterion) {
    for workers in [1, 2] {
        let mut group = criterion.benchmark_group(format!("compute, {workers} threads"));
        group.sample_size(10);
        for (name, body) in [("integer", INTEGER), ("float", FLOAT), ("memory", MEMORY), ("divergent", DIVERGENT)] {
            let mut bench = Bench::new(workers, &format!("{HEAD}{body}{TAIL}"));
            let instructions = bench.run();
            group.throughput(Throughput::Elements(instructions));
            group.bench_function(name, |bencher| bencher.iter(|| assert_eq!(bench.run(), instructions)));
        }
        group.finish();
    }
}

criterion_group!(benches, kernels);
criterion_main!(benches);
