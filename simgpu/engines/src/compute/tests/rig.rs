//! A compute engine with memory, which tests drive through methods.

use crate::compute::Compute;
use crate::compute::grid::ACCESS;
use crate::compute::launch::Launch;
use crate::engines::{EngineCx, EngineError, Progress, Work};
use nvspec::addr::{GpuVa, VramAddr};
use nvspec::class::compute90c0 as methods;
use simgpu_memory::memory::{BusAddr, Memory, Vram};
use simgpu_memory::mmu::{AddressSpace, Flush, Mmu, Session};
use sm20::Program;
use std::sync::Arc;

pub(super) const CODE: u64 = 0x10_0000;
pub(super) const BANK: u64 = 0x14_0000;
pub(super) const LOCAL: u64 = 0x20_0000;
pub(super) const LOCAL_BYTES: u64 = 0x10_0000;
pub(super) const DATA: u64 = 0x40_0000;
/// End of the mapped virtual addresses.
pub(super) const END: u64 = 0x80_0000;
/// Offset of the first parameter in bank 0.
const PARAMS: u64 = 0x20;
/// VRAM address that virtual address 0 maps to.
const FRAMES: u64 = 0x40_0000;
const TABLE: u64 = 0x4_0000;

/// The engine and its context.
pub(super) struct Rig {
    pub(super) compute: Compute,
    memory: Arc<Memory>,
    mmu: Arc<Mmu>,
    space: AddressSpace,
    pub(super) work: Work,
}

impl Rig {
    /// Creates an engine with `workers` threads. Without threads, it makes progress only when stepped.
    pub(super) fn new(workers: usize) -> Self {
        let memory = Arc::new(Memory::new(Vram::new(16 << 20).expect("vram")));
        let directory = BusAddr::Vram(VramAddr(0x1_0000));
        memory.write(directory, &((1 | TABLE >> 8) << 32).to_le_bytes()).expect("directory");
        let mmu = Arc::new(Mmu::new());
        let compute = Compute::new(Arc::clone(&memory), Arc::clone(&mmu), Arc::new(|| {}), workers, 4);
        let space = AddressSpace { directory, limit: GpuVa((1 << 40) - 1) };
        let mut rig = Self { compute, memory, mmu, space, work: Work::default() };
        (CODE..END).step_by(0x1000).for_each(|va| rig.page(va, 1 | (FRAMES + va) >> 8));
        for (method, data) in [
            (methods::CODE_ADDRESS_LOW, CODE as u32),
            (methods::LOCAL_ADDRESS_LOW, LOCAL as u32),
            (methods::LOCAL_SIZE_LOW, LOCAL_BYTES as u32),
            (methods::STACK_SIZE, 0x800),
            (methods::CONSTANT_SIZE, 0x1000),
            (methods::CONSTANT_ADDRESS_LOW, BANK as u32),
            (methods::CONSTANT_BIND, 1),
        ] {
            rig.method(method, data).expect("good");
        }
        rig
    }

    /// Sets the page table entry of address `va`.
    pub(super) fn page(&mut self, va: u64, pte: u64) {
        let entry = BusAddr::Vram(VramAddr(TABLE + va / 0x1000 * 8));
        self.memory.write(entry, &pte.to_le_bytes()).expect("table");
    }

    pub(super) fn flush(&self) {
        self.mmu.flush(Flush::default());
    }

    pub(super) fn method(&mut self, method: u32, data: u32) -> Result<(), EngineError> {
        let Self { compute, memory, mmu, space, work } = self;
        compute.method(method, data, &mut EngineCx { memory, mmu, space, now_ns: 0x1_2345_6780, work })
    }

    pub(super) fn step(&mut self) -> Result<Progress, EngineError> {
        let Self { compute, memory, mmu, space, work } = self;
        compute.step(&mut EngineCx { memory, mmu, space, now_ns: 0, work })
    }

    /// Steps the engine until no work is pending.
    pub(super) fn finish(&mut self) -> Result<(), EngineError> {
        loop {
            match self.step()? {
                Progress::Done => return Ok(()),
                Progress::More => {}
                Progress::Elsewhere => std::thread::yield_now(),
            }
        }
    }

    /// Binds a constant bank.
    pub(super) fn bind(&mut self, bank: u32, va: u64, bytes: u32) {
        for (method, data) in [
            (methods::CONSTANT_SIZE, bytes),
            (methods::CONSTANT_ADDRESS_LOW, va as u32),
            (methods::CONSTANT_BIND, bank << 8 | 1),
        ] {
            self.method(method, data).expect("good");
        }
    }

    /// Describes a launch of 9 * 8 * 7 blocks of 5 * 3 * 4 threads in the method state, and returns the launch.
    pub(super) fn described(&mut self) -> Launch {
        for (method, data) in [
            (methods::REGISTERS, 63),
            (methods::GRID_YX, 8 << 16 | 9),
            (methods::GRID_Z, 7),
            (methods::BLOCK_YX, 3 << 16 | 5),
            (methods::BLOCK_Z, 4),
            (methods::GRID_PARAM, 0x4321),
        ] {
            self.method(method, data).expect("good");
        }
        self.compute.registers.launch(0x1234, 4).expect("good")
    }

    /// Calls `act` with a memory session like that of a warp.
    pub(super) fn with_session<T>(&self, act: impl FnOnce(&mut Session<'_>) -> T) -> T {
        act(&mut self.mmu.session(&self.memory, &self.space, ACCESS))
    }

    pub(super) fn write(&self, va: u64, words: &[u32]) {
        let bytes: Vec<u8> = words.iter().flat_map(|word| word.to_le_bytes()).collect();
        self.memory.write(BusAddr::Vram(VramAddr(FRAMES + va)), &bytes).expect("within");
    }

    pub(super) fn read(&self, va: u64, count: usize) -> Vec<u32> {
        let mut bytes = vec![0; 4 * count];
        self.memory.read(BusAddr::Vram(VramAddr(FRAMES + va)), &mut bytes).expect("within");
        bytes.chunks_exact(4).map(|bytes| u32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]])).collect()
    }

    pub(super) fn params(&self, words: &[u32]) {
        self.write(BANK + PARAMS, words);
    }

    /// Loads a program at the code address.
    pub(super) fn load(&mut self, source: &str) -> Program {
        let program = sm20::assemble(source).unwrap_or_else(|errors| panic!("{errors:?} in\n{source}"));
        self.write(CODE, &program.words);
        program
    }

    /// Launches a kernel without stepping.
    pub(super) fn launch(
        &mut self,
        program: &Program,
        name: &str,
        grid: [u32; 3],
        block: [u32; 3],
    ) -> Result<(), EngineError> {
        let kernel = program.kernel(name).expect("kernel exists");
        for (method, data) in [
            (methods::PROGRAM_START, kernel.entry_offset),
            (methods::REGISTERS, kernel.registers),
            (methods::SHARED_SIZE, kernel.shared_bytes),
            (methods::LOCAL_LOW_SIZE, kernel.local_bytes),
            (methods::BLOCK_BARRIERS, kernel.barriers),
            (methods::GRID_YX, grid[1] << 16 | grid[0]),
            (methods::GRID_Z, grid[2]),
            (methods::BLOCK_YX, block[1] << 16 | block[0]),
            (methods::BLOCK_Z, block[2]),
            (methods::LAUNCH, 0x1000),
        ] {
            self.method(method, data)?;
        }
        Ok(())
    }

    /// Runs the program's kernel `k` with a one-dimensional grid.
    pub(super) fn run(&mut self, source: &str, blocks: u32, threads: u32) -> Result<(), EngineError> {
        let program = self.load(source);
        self.launch(&program, "k", [blocks, 1, 1], [threads, 1, 1])?;
        self.finish()
    }
}

/// Input of one thread: a in R4, b in R6 and c in R8, each with its upper dword in the next register.
pub(super) type Input = [u64; 3];

/// Results of one thread: R12, R13, the predicates, and the condition code.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Output {
    pub(super) low: u32,
    pub(super) high: u32,
    /// Bits 0 to 2: P0 to P2; bit 4: zero; bit 5: sign; bit 6: carry; bit 7: overflow.
    pub(super) bits: u32,
}

impl Output {
    pub(super) fn wide(self) -> u64 {
        u64::from(self.high) << 32 | u64::from(self.low)
    }
}

/// Executes `code` on each input. The code reads a from R4, b from R6 and c from R8. It returns its results in R12,
/// R13, P0 to P2 and the condition code.
pub(super) fn compute(code: &str, inputs: &[Input]) -> Vec<Output> {
    let mut rig = Rig::new(0);
    let source = format!(
        ".kernel k
         S2R R0, SR_TID.X
         S2R R1, SR_CTAID.X
         S2R R2, SR_NTID.X
         IMAD.U32.U32 R0, R1, R2, R0
         ISETP.GE.U32.AND P6, PT, R0, c[0][0x20]
         @P6 EXIT
         ISCADD R1, R0, c[0][0x24], 0x5
         ISCADD R2, R0, c[0][0x28], 0x4
         LD.128 R4, [R1]
         LD.64 R8, [R1+0x10]
         MOV R12, RZ
         MOV R13, RZ
         {code}
         CSET.EQU.AND R16, CC
         CSET.SFT.AND R17, CC
         CSET.HS.AND R18, CC
         CSET.OFT.AND R19, CC
         LOP.AND R16, R16, 0x10
         LOP.AND R17, R17, 0x20
         LOP.AND R18, R18, 0x40
         LOP.AND R19, R19, 0x80
         P2R R14, PR, RZ, 0x7
         LOP.OR R14, R14, R16
         LOP.OR R14, R14, R17
         LOP.OR R14, R14, R18
         LOP.OR R14, R14, R19
         MOV R15, RZ
         ST.128 [R2], R12
         EXIT"
    );
    let (from, to) = (DATA, DATA + 0x20_0000);
    let mut outputs = Vec::new();
    for inputs in inputs.chunks(0x8000) {
        let words: Vec<u32> = inputs
            .iter()
            .flat_map(|[a, b, c]| [*a, *b, *c, 0].map(|value| [value as u32, (value >> 32) as u32]))
            .flatten()
            .collect();
        rig.write(from, &words);
        rig.params(&[inputs.len() as u32, from as u32, to as u32]);
        rig.run(&source, (inputs.len() as u32).div_ceil(96), 96).unwrap_or_else(|error| panic!("{error} in {code}"));
        let results = rig.read(to, 4 * inputs.len());
        outputs.extend(results.chunks_exact(4).map(|words| Output { low: words[0], high: words[1], bits: words[2] }));
    }
    outputs
}

/// A pseudo-random sequence (xorshift). The instruction coverage that the tests require depends on this generator.
#[derive(Clone, Debug)]
pub(super) struct Random(pub(super) u64);

impl Random {
    pub(super) fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0.wrapping_mul(0x2545_f491_4f6c_dd1d)
    }
}

/// Returns all triples of edge values, followed by random triples. If `triples` is false, the triples of edge values
/// all have the first edge value as their third value.
pub(super) fn inputs(
    edges: &[u64],
    triples: bool,
    random: usize,
    mut number: impl FnMut(&mut Random) -> u64,
) -> Vec<Input> {
    let mut random_numbers = Random(0x1234_5678_9abc_def1);
    let mut inputs = Vec::new();
    for a in edges {
        for b in edges {
            let third = if triples { edges } else { &edges[..1] };
            inputs.extend(third.iter().map(|c| [*a, *b, *c]));
        }
    }
    inputs.extend((0..random).map(|_| std::array::from_fn(|_| number(&mut random_numbers))));
    inputs
}

/// Compares each output with the value that `expected` returns for its input.
#[track_caller]
pub(super) fn check<T: PartialEq + std::fmt::Debug>(
    code: &str,
    inputs: &[Input],
    result: impl Fn(Output) -> T,
    expected: impl Fn(Input) -> T,
) {
    for (input, output) in inputs.iter().zip(compute(code, inputs)) {
        assert_eq!(result(output), expected(*input), "{code} of {input:#x?}");
    }
}
