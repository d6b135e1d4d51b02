//! Records a workload's memory accesses in order. The workload runs as a mediated guest on a card with space for all of
//! its memory.
//!
//! The card records the memory blocks that its engines access, in short steps ([`simgpu::SimGpu::take_touches`]). The
//! mediator's chunk table maps these blocks to the guest's chunks. The mediator's access tracking adds the chunks that
//! it observed in use, which are those referenced by submissions or accessed by the guest's CPU. A step covers about
//! one thread block of a grid. If accesses to host memory are not permitted, all memory used by a step must be on the
//! card at the same time.

use std::collections::{BTreeMap, BTreeSet};

use anyhow::{Context, Result, ensure};
use rig::Rig;
use sm20::Program;
use vram::victim::VictimPolicy;
use vram::{GuestVramAddr, Limits, Lookup, Place as ChunkPlace, TenantId};
use workloads::{Buffer, Gpu, Grid, Module, Options, Params, Place, by_name};

use rig::in_process_vm::{CardConfig, LightGpu, MIB, gpu};

/// Size of a recorded chunk in bytes: the smallest chunk size of a card, and the software card's recording granularity.
pub(super) const BLOCK: u64 = vram::CHUNK_BYTES_MIN;
/// ID of the only VM.
const VM: TenantId = TenantId(0);
/// Size of the VM's VRAM in MiB.
const VM_MIB: u64 = 64;

/// Numbers of bytes read and written in a chunk. Both are 0 if only the mediator observed the use (code, constants, and
/// the driver's rings).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Use {
    pub(super) read: u64,
    pub(super) written: u64,
}

/// Chunks that are used together.
pub(super) type Step = BTreeMap<u32, Use>;

/// A submission or a transfer by the guest's CPU, with the chunks that it uses.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Submission {
    /// Chunks whose use the mediator had observed when it received the submission.
    pub(super) seen: BTreeSet<u32>,
    pub(super) steps: Vec<Step>,
}

/// Trace of a complete run.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Trace {
    pub(super) submissions: Vec<Submission>,
    /// First and last chunk of each buffer, in the guest's numbering.
    pub(super) buffers: Vec<(u32, u32)>,
}

impl Trace {
    pub(super) fn steps(&self) -> impl Iterator<Item = &Step> {
        self.submissions.iter().flat_map(|submission| &submission.steps)
    }

    /// Returns the total use of each chunk.
    pub(super) fn sums(&self) -> Step {
        let mut sums = Step::new();
        for (&chunk, used) in self.steps().flatten() {
            let sum = sums.entry(chunk).or_default();
            *sum = Use { read: sum.read + used.read, written: sum.written + used.written };
        }
        sums
    }
}

/// Runs a workload, verifies its result, and returns its trace.
pub(super) fn record(name: &str, scale: u32, seed: u64) -> Result<Trace> {
    let mut config = CardConfig { chunk_bytes: BLOCK, traced: true, ..CardConfig::new(2 * VM_MIB, 0) };
    // The mediator tracks accesses only with this policy.
    config.division.balance.policy = VictimPolicy::Clock;
    let rig = config.open()?;
    let gpu = gpu(&rig, VM.0, VM_MIB, Limits::UNRESERVED)?;
    let mut recorder = Recorder { gpu, rig: &rig, trace: Trace::default() };
    let workload = by_name(name, Options { scale, seed, ..Options::default() }).context("a workload")?;
    // Discard accesses during the driver's initialization, which do not belong to the workload.
    drop(rig.card.take_touches());
    recorder.take_seen();
    let report = workloads::run(&*workload, &mut recorder)?;
    ensure!(report.verified > 0, "no result of {name} was verified");
    Ok(recorder.trace)
}

/// A device that records its use of memory.
struct Recorder<'a> {
    gpu: LightGpu,
    rig: &'a Rig,
    trace: Trace,
}

impl Recorder<'_> {
    fn take_seen(&self) -> BTreeSet<u32> {
        let touched = std::mem::take(&mut self.rig.host.lock().vram_mut().touched);
        touched.into_iter().filter(|(vm, _)| *vm == VM).map(|(_, chunk)| chunk as u32).collect()
    }

    /// Returns the mapping from the card's blocks to the guest's chunks.
    fn chunks_by_block(&self) -> BTreeMap<u64, u32> {
        let state = self.rig.host.lock();
        let chunks = &state.vram().chunks;
        let placed = (0..(VM_MIB * MIB / BLOCK) as u32).filter_map(|chunk| {
            match chunks.lookup(VM, GuestVramAddr(u64::from(chunk) * BLOCK), 1) {
                Lookup::Placed(ChunkPlace::Card(at)) => Some((at.0 / BLOCK, chunk)),
                _ => None,
            }
        });
        placed.collect()
    }

    /// Records a completed submission.
    fn submitted(&mut self) -> Result<()> {
        self.gpu.finish()?;
        let (seen, owners) = (self.take_seen(), self.chunks_by_block());
        let mut steps: Vec<Step> = Vec::new();
        for touches in self.rig.card.take_touches() {
            let of_guest = touches.into_iter().filter_map(|(block, touched)| {
                Some((*owners.get(&block)?, Use { read: touched.read, written: touched.written }))
            });
            steps.push(of_guest.collect());
        }
        steps.retain(|step| !step.is_empty());
        // Memory that the submission references counts as used when the submission starts.
        if steps.is_empty() {
            steps.push(Step::new());
        }
        seen.iter().for_each(|&chunk| _ = steps[0].entry(chunk).or_default());
        self.trace.submissions.push(Submission { seen, steps });
        Ok(())
    }

    /// Records a transfer by the CPU, chunk by chunk.
    fn transferred(&mut self, buffer: Buffer, at: u64, bytes: usize, write: bool) -> Result<()> {
        drop(self.rig.card.take_touches());
        let (seen, start) = (self.take_seen(), self.gpu.backend().vram_address(buffer, at)?);
        let end = start + bytes as u64;
        for chunk in start / BLOCK..end.div_ceil(BLOCK) {
            let part = end.min((chunk + 1) * BLOCK) - start.max(chunk * BLOCK);
            let used = if write { Use { read: 0, written: part } } else { Use { read: part, written: 0 } };
            let chunk = chunk as u32;
            let seen = seen.range(chunk..=chunk).copied().collect();
            self.trace.submissions.push(Submission { seen, steps: vec![[(chunk, used)].into_iter().collect()] });
        }
        Ok(())
    }
}

impl Gpu for Recorder<'_> {
    fn allocate(&mut self, place: Place, bytes: u64) -> Result<Buffer> {
        let buffer = Gpu::allocate(&mut self.gpu, place, bytes)?;
        let start = self.gpu.backend().vram_address(buffer, 0)?;
        self.trace.buffers.push(((start / BLOCK) as u32, ((start + bytes.max(1) - 1) / BLOCK) as u32));
        Ok(buffer)
    }

    fn free(&mut self, buffer: Buffer) -> Result<()> {
        Gpu::free(&mut self.gpu, buffer)
    }

    fn upload(&mut self, buffer: Buffer, at: u64, bytes: &[u8]) -> Result<()> {
        Gpu::upload(&mut self.gpu, buffer, at, bytes)?;
        self.transferred(buffer, at, bytes.len(), true)
    }

    fn download(&mut self, buffer: Buffer, at: u64, bytes: &mut [u8]) -> Result<()> {
        Gpu::download(&mut self.gpu, buffer, at, bytes)?;
        self.transferred(buffer, at, bytes.len(), false)
    }

    fn copy(&mut self, from: Buffer, to: Buffer, bytes: u64) -> Result<()> {
        Gpu::copy(&mut self.gpu, from, to, bytes)?;
        self.submitted()
    }

    fn load(&mut self, program: &Program) -> Result<Module> {
        let module = Gpu::load(&mut self.gpu, program)?;
        self.submitted()?;
        Ok(module)
    }

    fn launch(&mut self, module: Module, name: &str, grid: Grid, params: &Params, uses: &[Buffer]) -> Result<()> {
        Gpu::launch(&mut self.gpu, module, name, grid, params, uses)?;
        self.submitted()
    }

    fn finish(&mut self) -> Result<()> {
        Gpu::finish(&mut self.gpu)
    }
}
