//! Measures kernels on the software card's compute engine, in thread instructions per second: integers, floats, memory
//! and divergence, on one core and on two cores.
//!
//! Rounds with one worker and with two workers alternate, and the median is reported. The time of a round is its
//! wall-clock time minus the workers' run-queue wait, as counted by the kernel. The result still includes all delays
//! that workers cause each other (locks, caches, block distribution, wake-ups), but is hardly distorted by a busy host.
//! The subtracted time is reported as a separate metric. If it exceeds half of the total, the figures are rough. As an
//! upper bound for this host's two cores, the benchmark also measures a plain loop in one and in two independent
//! threads.

use std::hint::black_box;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow, ensure};
use nvspec::addr::{GpuVa, VramAddr};
use nvspec::class::compute90c0 as methods;
use simgpu_engines::compute::Compute;
use simgpu_engines::engines::{EngineCx, Progress, Work};
use simgpu_memory::memory::{BusAddr, Memory, Vram};
use simgpu_memory::mmu::{AddressSpace, Mmu};

use crate::report::{Metric, Target, median};

/// Number of measurements of each type. The report contains the median.
const ROUNDS: usize = 21;
/// Minimum duration of a measurement.
const MIN_MEASUREMENT: Duration = Duration::from_millis(60);
/// Number of loop iterations in each kernel.
const LOOPS: u32 = 256;
/// Number of blocks and number of threads per block.
const SHAPE: (u32, u32) = (64, 256);
/// Target for the float kernel on one core, in millions of thread instructions per second.
const ONE_CORE: f64 = 200.0;
/// Target for the speed-up with a second core.
const TWO_CORES: f64 = 1.8;

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

const KERNELS: [(&str, &str); 4] =
    [("integer", INTEGER), ("float", FLOAT), ("memory", MEMORY), ("divergent", DIVERGENT)];

const MIB: u64 = 1 << 20;
/// Virtual address of the code. A page table maps the first 128 MiB to the same VRAM addresses.
const CODE: u64 = 16 * MIB;
const BANK: u64 = 17 * MIB;
const DATA: u64 = 18 * MIB;

/// An engine with a loaded program.
struct Engine {
    compute: Compute,
    memory: Arc<Memory>,
    mmu: Arc<Mmu>,
    space: AddressSpace,
    workers: usize,
}

impl Engine {
    fn new(workers: usize, source: &str) -> Result<Self> {
        let memory = Arc::new(Memory::new(Vram::new(64 * MIB)?));
        let (directory, table) = (BusAddr::Vram(VramAddr(0x1_0000)), 0x10_0000u64);
        memory.write(directory, &((1 | table >> 8) << 32).to_le_bytes())?;
        for page in (CODE..32 * MIB).step_by(4096) {
            let entry = BusAddr::Vram(VramAddr(table + page / 4096 * 8));
            memory.write(entry, &(1 | page >> 8).to_le_bytes())?;
        }
        let program = sm20::assemble(source).map_err(|errors| anyhow!("{errors:?}"))?;
        let kernel = program.kernel("k").context("no kernel")?;
        memory.write(BusAddr::Vram(VramAddr(CODE)), &program.bytes())?;
        let params: Vec<u8> = [DATA as u32, LOOPS].iter().flat_map(|word| word.to_le_bytes()).collect();
        memory.write(BusAddr::Vram(VramAddr(BANK + 0x20)), &params)?;
        let mmu = Arc::new(Mmu::new());
        let waiter = std::thread::current();
        let wake = Arc::new(move || waiter.unpark());
        let compute = Compute::new(Arc::clone(&memory), Arc::clone(&mmu), wake, workers, 4);
        let space = AddressSpace { directory, limit: GpuVa((1 << 40) - 1) };
        let mut engine = Self { compute, memory, mmu, space, workers };
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
            engine.with(|compute, cx| compute.method(method, data, cx)).0?;
        }
        Ok(engine)
    }

    fn with<T>(&mut self, act: impl FnOnce(&mut Compute, &mut EngineCx<'_>) -> T) -> (T, Work) {
        let Self { compute, memory, mmu, space, .. } = self;
        let mut work = Work::default();
        let result = act(compute, &mut EngineCx { memory, mmu, space, now_ns: 0, work: &mut work });
        (result, work)
    }

    /// Runs the kernel, and returns the number of thread instructions.
    fn run(&mut self) -> Result<u64> {
        self.with(|compute, cx| compute.method(methods::LAUNCH, 0, cx)).0?;
        loop {
            let (progress, work) = self.with(Compute::step);
            match progress? {
                Progress::Done => return Ok(work.thread_instructions),
                Progress::More => {}
                Progress::Elsewhere => std::thread::park(),
            }
        }
    }

    /// Measures the rate of one round, in which each launch must execute `instructions` thread instructions.
    fn round(&mut self, instructions: u64) -> Result<Rate> {
        let mut done = 0;
        let time = timed(self.workers, || {
            let began = Instant::now();
            while began.elapsed() < MIN_MEASUREMENT {
                let now = self.run()?;
                ensure!(now == instructions, "the same kernel executed {now} instructions, but {instructions} before");
                done += now;
            }
            Ok(())
        })?;
        Ok(time.rate(done))
    }
}

/// Returns the total run-queue wait of this process's threads in ns, excluding the calling thread. Returns 0 if the
/// kernel does not report it.
fn waited() -> u64 {
    let own = rustix::thread::gettid().as_raw_pid().to_string();
    let Ok(tasks) = std::fs::read_dir("/proc/self/task") else { return 0 };
    let others = tasks.flatten().filter(|task| task.file_name() != own.as_str());
    others
        .filter_map(|task| {
            let counts = std::fs::read_to_string(task.path().join("schedstat")).ok()?;
            counts.split_whitespace().nth(1)?.parse::<u64>().ok()
        })
        .sum()
}

/// Duration of a measurement.
#[derive(Clone, Copy, Debug)]
struct Time {
    /// Duration in seconds, excluding the run-queue wait.
    seconds: f64,
    /// Fraction of the threads' time spent waiting for a CPU.
    waited: f64,
}

impl Time {
    fn rate(self, count: u64) -> Rate {
        Rate { millions: count as f64 / self.seconds / 1e6, waited: self.waited }
    }
}

/// Rate of a measurement.
#[derive(Clone, Copy, Debug)]
struct Rate {
    /// Rate in millions per second.
    millions: f64,
    /// Fraction of the threads' time spent waiting for a CPU.
    waited: f64,
}

/// Measures `act` with `threads` worker threads. While a thread waits, the others do its work, so the wait is divided
/// by the number of threads.
fn timed(threads: usize, act: impl FnOnce() -> Result<()>) -> Result<Time> {
    let (before, began) = (waited(), Instant::now());
    act()?;
    let wall = began.elapsed().as_secs_f64();
    let waited = waited().saturating_sub(before) as f64 / 1e9 / threads as f64;
    Ok(Time { seconds: wall - waited, waited: waited / wall })
}

/// Number of iterations of a loop of pure computation.
const PLAIN_STEPS: u64 = 40_000_000;

/// Measures a loop in `threads` independent threads.
fn plain(threads: usize) -> Result<Rate> {
    let done = Arc::new(std::sync::Barrier::new(threads + 1));
    let workers: Vec<_> = (0..threads as u64)
        .map(|seed| {
            let done = Arc::clone(&done);
            std::thread::spawn(move || {
                done.wait();
                let mut value = black_box(seed);
                for step in 0..PLAIN_STEPS {
                    value = value.wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ step;
                }
                black_box(value);
                done.wait();
                // Keep the thread alive until its wait has been read.
                done.wait();
            })
        })
        .collect();
    let time = timed(threads, || {
        done.wait();
        done.wait();
        Ok(())
    });
    done.wait();
    for worker in workers {
        worker.join().map_err(|_| anyhow!("a thread panicked"))?;
    }
    Ok(time?.rate(PLAIN_STEPS * threads as u64))
}

/// Measures one thread and two threads in alternation. Returns the median rates.
fn in_turns(mut one: impl FnMut() -> Result<Rate>, mut two: impl FnMut() -> Result<Rate>) -> Result<[Rate; 2]> {
    let mut rounds = [Vec::new(), Vec::new()];
    for _ in 0..ROUNDS {
        rounds[0].push(one()?);
        rounds[1].push(two()?);
    }
    let middle = |rounds: &[Rate], part: fn(&Rate) -> f64| {
        median(&rounds.iter().map(part).collect::<Vec<_>>()).context("no measurement")
    };
    let rate = |rounds: &[Rate]| -> Result<Rate> {
        Ok(Rate { millions: middle(rounds, |r| r.millions)?, waited: middle(rounds, |r| r.waited)? })
    };
    Ok([rate(&rounds[0])?, rate(&rounds[1])?])
}

/// Returns the metrics of one kernel or loop.
fn metrics(name: &str, [one, two]: [Rate; 2], first: Target, second: Target) -> [Metric; 3] {
    let one_core = Metric::plain(format!("compute.{name}.one_core"), one.millions, "M/s");
    [
        Metric { target: first, ..one_core },
        Metric::ratio(format!("compute.{name}.two_cores"), two.millions, "M/s", one.millions, second),
        Metric::plain(format!("compute.{name}.two_cores.waited"), 100.0 * two.waited, "%"),
    ]
}

/// Runs the benchmark.
pub fn run() -> Result<Vec<Metric>> {
    let mut all = Vec::new();
    for (name, body) in KERNELS {
        let source = format!("{HEAD}{body}{TAIL}");
        let (mut single, mut double) = (Engine::new(1, &source)?, Engine::new(2, &source)?);
        let instructions = single.run()?;
        ensure!(
            double.run()? == instructions,
            "two workers executed a different number of instructions than one worker"
        );
        let rates = in_turns(|| single.round(instructions), || double.round(instructions))?;
        let target = if name == "float" { Target::AtLeast(ONE_CORE) } else { Target::None };
        all.extend(metrics(name, rates, target, Target::AtLeast(TWO_CORES)));
    }
    let rates = in_turns(|| plain(1), || plain(2))?;
    all.extend(metrics("host", rates, Target::None, Target::None));
    Ok(all)
}
