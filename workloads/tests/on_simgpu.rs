//! Runs every workload on `simgpu`'s compute engine, without a driver.

use anyhow::{Context, Result, ensure};
use nvspec::addr::{GpuVa, VramAddr};
use nvspec::class::compute90c0 as methods;
use simgpu_engines::compute::Compute;
use simgpu_engines::engines::{EngineCx, Progress, Work};
use simgpu_memory::memory::{BusAddr, Memory, Vram};
use simgpu_memory::mmu::{AddressSpace, Mmu};
use std::sync::Arc;
use workloads::{Buffer, Gpu, Grid, Module, Options, Params, Place, Random, Setup, Workload};

const MIB: u64 = 1 << 20;
/// Number of page tables. Each one covers 128 MiB.
const TABLES: u64 = 2;
const TABLE_MIB: u64 = 128;
const DIRECTORY: u64 = 0x1_0000;
const TABLE: u64 = MIB;
/// GPU virtual address of the start of VRAM. The second table's range begins at a multiple of 2^32.
const VRAM_BASE: u64 = (0x13 << 32) - TABLE_MIB * MIB;
/// Address of bank 0, which contains the kernel parameters.
const BANK: u64 = 2 * MIB;
const LOCAL: u64 = 4 * MIB;
const LOCAL_BYTES: u64 = 4 * MIB;
/// VRAM address of the first buffer. The second buffer of the smallest workloads crosses a multiple of 2^32.
const FIRST_BUFFER_AT: u64 = TABLE_MIB * MIB - 0x6000;
const END: u64 = TABLES * TABLE_MIB * MIB;
const PAGE: u64 = 0x1000;
/// Value of the bytes in allocated memory. Guard bytes with this value follow each buffer, and no work may overwrite
/// them.
const UNUSED: u8 = 0xa5;

/// The compute engine with its own address space.
struct SimGpu {
    compute: Compute,
    memory: Arc<Memory>,
    mmu: Arc<Mmu>,
    space: AddressSpace,
    next: u64,
    modules: Vec<(u64, sm20::Program)>,
    /// Number of instructions executed by all threads so far.
    instructions: u64,
}

impl SimGpu {
    fn new() -> Result<Self> {
        let memory = Arc::new(Memory::new(Vram::new(END).context("vram")?));
        for index in 0..TABLES {
            let table = TABLE + index * 0x4_0000;
            let entry = (1 | table >> 8) << 32;
            let at = DIRECTORY + (VRAM_BASE / (TABLE_MIB * MIB) + index) * 8;
            memory.write(BusAddr::Vram(VramAddr(at)), &entry.to_le_bytes())?;
            for page in 0..0x8000 {
                let entry = 1 | (index * TABLE_MIB * MIB + page * 0x1000) >> 8;
                memory.write(BusAddr::Vram(VramAddr(table + page * 8)), &entry.to_le_bytes())?;
            }
        }
        let mmu = Arc::new(Mmu::new());
        let waiter = std::thread::current();
        let wake = Arc::new(move || waiter.unpark());
        let compute = Compute::new(Arc::clone(&memory), Arc::clone(&mmu), wake, 2, 4);
        let space = AddressSpace { directory: BusAddr::Vram(VramAddr(DIRECTORY)), limit: GpuVa((1 << 40) - 1) };
        let mut gpu = Self { compute, memory, mmu, space, next: FIRST_BUFFER_AT, modules: Vec::new(), instructions: 0 };
        gpu.methods(&[
            (methods::LOCAL_ADDRESS_HIGH, ((VRAM_BASE + LOCAL) >> 32) as u32),
            (methods::LOCAL_ADDRESS_LOW, (VRAM_BASE + LOCAL) as u32),
            (methods::LOCAL_SIZE_LOW, LOCAL_BYTES as u32),
            (methods::STACK_SIZE, 0x800),
            (methods::CONSTANT_SIZE, 0x1000),
            (methods::CONSTANT_ADDRESS_HIGH, ((VRAM_BASE + BANK) >> 32) as u32),
            (methods::CONSTANT_ADDRESS_LOW, (VRAM_BASE + BANK) as u32),
            (methods::CONSTANT_BIND, 1),
        ])?;
        Ok(gpu)
    }

    fn with<T>(&mut self, act: impl FnOnce(&mut Compute, &mut EngineCx<'_>) -> T) -> T {
        let Self { compute, memory, mmu, space, .. } = self;
        let mut work = Work::default();
        let result = act(compute, &mut EngineCx { memory, mmu, space, now_ns: 0, work: &mut work });
        self.instructions += work.thread_instructions;
        result
    }

    fn methods(&mut self, list: &[(u32, u32)]) -> Result<()> {
        for (method, data) in list {
            self.with(|compute, cx| compute.method(*method, *data, cx))
                .map_err(|error| anyhow::anyhow!("method {method:#x}: {error:?}"))?;
        }
        Ok(())
    }

    fn range(buffer: Buffer, at: u64, bytes: usize) -> Result<BusAddr> {
        ensure!(at + bytes as u64 <= buffer.bytes, "{bytes} bytes at {at:#x} of {buffer:x?}");
        Ok(BusAddr::Vram(VramAddr(buffer.address - VRAM_BASE + at)))
    }
}

impl Gpu for SimGpu {
    fn allocate(&mut self, _: Place, bytes: u64) -> Result<Buffer> {
        let address = VRAM_BASE + self.next;
        let pages = (bytes + 1).next_multiple_of(PAGE);
        ensure!(self.next + pages <= END, "no memory");
        self.memory.write(BusAddr::Vram(VramAddr(self.next)), &vec![UNUSED; pages as usize])?;
        self.next += pages;
        Ok(Buffer { index: 0, address, bytes })
    }

    fn free(&mut self, buffer: Buffer) -> Result<()> {
        let end = buffer.address - VRAM_BASE + buffer.bytes;
        let mut behind = vec![0; ((end + 1).next_multiple_of(PAGE) - end) as usize];
        self.memory.read(BusAddr::Vram(VramAddr(end)), &mut behind)?;
        ensure!(behind.iter().all(|byte| *byte == UNUSED), "a guard byte after {buffer:x?} was overwritten");
        Ok(())
    }

    fn upload(&mut self, buffer: Buffer, at: u64, bytes: &[u8]) -> Result<()> {
        Ok(self.memory.write(Self::range(buffer, at, bytes.len())?, bytes)?)
    }

    fn download(&mut self, buffer: Buffer, at: u64, bytes: &mut [u8]) -> Result<()> {
        Ok(self.memory.read(Self::range(buffer, at, bytes.len())?, bytes)?)
    }

    fn copy(&mut self, from: Buffer, to: Buffer, bytes: u64) -> Result<()> {
        let mut passed = vec![0; usize::try_from(bytes)?];
        self.download(from, 0, &mut passed)?;
        self.upload(to, 0, &passed)
    }

    fn load(&mut self, program: &sm20::Program) -> Result<Module> {
        let buffer = self.allocate(Place::Vram, program.bytes().len() as u64)?;
        self.upload(buffer, 0, &program.bytes())?;
        self.modules.push((buffer.address, program.clone()));
        Ok(Module { index: self.modules.len() - 1 })
    }

    fn launch(&mut self, module: Module, name: &str, grid: Grid, params: &Params, _: &[Buffer]) -> Result<()> {
        let (code, program) = self.modules[module.index].clone();
        let kernel = program.kernel(name).with_context(|| format!("no kernel {name}"))?;
        ensure!(kernel.params == params.bytes().len() as u32, "{name} has {} bytes of parameters", kernel.params);
        self.memory.write(BusAddr::Vram(VramAddr(BANK + 0x20)), params.bytes())?;
        let Grid { blocks, threads } = grid;
        self.methods(&[
            (methods::CODE_ADDRESS_HIGH, (code >> 32) as u32),
            (methods::CODE_ADDRESS_LOW, code as u32),
            (methods::PROGRAM_START, kernel.entry_offset),
            (methods::REGISTERS, kernel.registers),
            (methods::SHARED_SIZE, kernel.shared_bytes),
            (methods::LOCAL_LOW_SIZE, kernel.local_bytes),
            (methods::BLOCK_BARRIERS, kernel.barriers),
            (methods::GRID_YX, blocks[1] << 16 | blocks[0]),
            (methods::GRID_Z, blocks[2]),
            (methods::BLOCK_YX, threads[1] << 16 | threads[0]),
            (methods::BLOCK_Z, threads[2]),
            (methods::LAUNCH, 0x1000),
        ])?;
        loop {
            let step = self.with(simgpu_engines::compute::Compute::step);
            match step.map_err(|error| anyhow::anyhow!("{name}: {error:?}"))? {
                Progress::Done => return Ok(()),
                Progress::More => {}
                Progress::Elsewhere => std::thread::park(),
            }
        }
    }

    fn finish(&mut self) -> Result<()> {
        Ok(())
    }
}

#[test]
fn every_workload_matches_cpu_results() {
    for (scale, name) in [1, 10].into_iter().flat_map(|scale| workloads::NAMES.iter().map(move |name| (scale, name))) {
        let mut gpu = SimGpu::new().expect("a card");
        let options = Options { scale, seed: 7, ..Options::default() };
        let workload = workloads::by_name(name, options).expect("a workload of that name");
        let report = workloads::run(&*workload, &mut gpu).unwrap_or_else(|error| panic!("{error:#}"));
        assert_eq!(report.verified > 0, *name != "nop", "{name}");
    }
}

/// Returns the number of instructions executed by all threads in a run.
fn work(name: &str, scale: u32) -> u64 {
    let mut gpu = SimGpu::new().expect("a card");
    let workload = workloads::by_name(name, Options { scale, ..Options::default() }).expect("a workload of that name");
    workloads::run(&*workload, &mut gpu).unwrap_or_else(|error| panic!("{error:#}"));
    gpu.instructions
}

#[test]
fn work_is_small_at_scale_1_and_grows_in_proportion() {
    for name in workloads::NAMES {
        let works = [1, 2, 8].map(|scale| work(name, scale));
        println!("{name}: {works:?}");
        assert!(works[0] <= 5_000_000, "{name} takes {works:?} instructions");
        // Some workloads have no kernels, or use only the copy engine.
        if works[0] > 100_000 {
            assert!((3 * works[1]..=6 * works[1]).contains(&works[2]), "{name} takes {works:?} instructions");
        }
    }
}

/// An injected fault between a workload and its device.
#[derive(Clone, Copy)]
enum Mishap {
    /// The launch with this number is lost.
    LostLaunch(usize),
    /// The second-highest bit of a word in the download with this number is flipped. The resulting error exceeds any
    /// float's bound. The second field is the position of the word, in units of 2^-32 of the distance from the first
    /// word to the last.
    WrongWord(usize, u32),
}

/// A device with an injected fault.
struct Faulty<'g> {
    inner: &'g mut SimGpu,
    mishap: Option<Mishap>,
    launches: usize,
    downloads: usize,
}

impl<'g> Faulty<'g> {
    fn new(inner: &'g mut SimGpu, mishap: Option<Mishap>) -> Self {
        Self { inner, mishap, launches: 0, downloads: 0 }
    }
}

impl Gpu for Faulty<'_> {
    fn allocate(&mut self, place: Place, bytes: u64) -> Result<Buffer> {
        self.inner.allocate(place, bytes)
    }

    fn free(&mut self, buffer: Buffer) -> Result<()> {
        self.inner.free(buffer)
    }

    fn upload(&mut self, buffer: Buffer, at: u64, bytes: &[u8]) -> Result<()> {
        self.inner.upload(buffer, at, bytes)
    }

    fn download(&mut self, buffer: Buffer, at: u64, bytes: &mut [u8]) -> Result<()> {
        self.inner.download(buffer, at, bytes)?;
        if let Some(Mishap::WrongWord(download, way)) = self.mishap
            && download == self.downloads
        {
            let word = (bytes.len() as u64 / 4 * u64::from(way)) >> 32;
            bytes[word as usize * 4 + 3] ^= 0x40;
        }
        self.downloads += 1;
        Ok(())
    }

    fn copy(&mut self, from: Buffer, to: Buffer, bytes: u64) -> Result<()> {
        self.inner.copy(from, to, bytes)
    }

    fn load(&mut self, program: &sm20::Program) -> Result<Module> {
        self.inner.load(program)
    }

    fn launch(&mut self, module: Module, name: &str, grid: Grid, params: &Params, uses: &[Buffer]) -> Result<()> {
        self.launches += 1;
        match self.mishap {
            Some(Mishap::LostLaunch(launch)) if launch + 1 == self.launches => Ok(()),
            _ => self.inner.launch(module, name, grid, params, uses),
        }
    }

    fn finish(&mut self) -> Result<()> {
        self.inner.finish()
    }
}

fn smallest(name: &str) -> Box<dyn Workload> {
    workloads::by_name(name, Options { seed: 3, ..Options::default() }).expect("a workload of that name")
}

/// Runs a workload up to the end of the download on a device with an injected fault. Returns the setup and the number
/// of launches.
fn run_with(mishap: Option<Mishap>, workload: &dyn Workload) -> Result<(Setup, usize)> {
    let mut card = SimGpu::new()?;
    let mut gpu = Faulty::new(&mut card, mishap);
    let mut setup = Setup::new(workload, &mut gpu)?;
    setup.upload(&mut gpu)?;
    workload.launch(&mut gpu, &setup)?;
    setup.download(&mut gpu)?;
    Ok((setup, gpu.launches))
}

#[test]
fn a_launch_that_was_lost_is_noticed() {
    // A lost launch of an empty workload cannot be detected.
    for name in workloads::NAMES.iter().filter(|name| **name != "nop") {
        let workload = smallest(name);
        let (setup, launches) = run_with(None, &*workload).expect("no mishap");
        workload.check(setup.results()).expect("right");
        // Do not lose a late launch, because the last launches of `bfs` find no new nodes.
        for lost in [0, launches / 2].into_iter().take(launches) {
            let (setup, _) = run_with(Some(Mishap::LostLaunch(lost)), &*workload).expect("runs");
            assert!(workload.check(setup.results()).is_err(), "{name} without launch {lost} of {launches}");
        }
    }
}

#[test]
fn a_wrong_bit_of_a_result_is_noticed() {
    let mut random = Random::new(11);
    for name in workloads::NAMES {
        let workload = smallest(name);
        let mut gpu = SimGpu::new().expect("a card");
        let mut setup = Setup::new(&*workload, &mut gpu).expect("memory");
        setup.upload(&mut gpu).expect("memory");
        workload.launch(&mut gpu, &setup).expect("runs");
        let mut download = |mishap| {
            let mut gpu = Faulty::new(&mut gpu, mishap);
            setup.download(&mut gpu).expect("memory");
            (gpu.downloads, workload.check(setup.results()))
        };
        let (downloads, right) = download(None);
        right.expect("right");
        for which in 0..downloads {
            for way in [0, u32::MAX, random.word(), random.word()] {
                let (_, checked) = download(Some(Mishap::WrongWord(which, way)));
                assert!(checked.is_err(), "{name}: output {which}, {way:#x} of the way");
            }
        }
    }
}
