//! Guests that compute without a VMM: a card and its mediator in this process, and the rig's driver as a device for
//! workloads.
//!
//! These guests need no boot, so benchmarks can sweep parameters and tests can run many guests. They call the mediator
//! in the same way as the server. Tests with VMs cover messages, sockets and stock drivers.

use std::time::Duration;

use crate::driver::{At, CE0, CE1, Channel, Driver, M2MF, PAGE, m2mf_copy, methods, object};
use crate::{Guest, Machine, Rig, settings, sharing};
use anyhow::{Context, Result, bail, ensure};
use card_manager::{Division, Sharing};
use nvspec::class::compute90c0 as compute;
use simgpu::{ComputeTiming, EngineTiming, TimeModel};
use vgpu::Settings;
use vram::{Limits, TenantId, VmSummary};
use workloads::{Buffer, Gpu, Grid, Module, Params, Place};

/// Size of a MiB in bytes.
pub const MIB: u64 = 1 << 20;
/// Subchannel and SET_OBJECT data of compute.
const COMPUTE: (u32, u32) = (1, 0x90c0);
/// Virtual address of the first byte of the heap.
const HEAP_VA: u64 = 0x100_0000;
/// Maximum size of the heap in bytes. The heap ends with the driver's only page table.
const HEAP_MAX: u64 = 128 * MIB - HEAP_VA;
/// Number of banks of parameters, and therefore the maximum number of launches in flight.
const BANKS: u64 = 8;
/// Size of local memory and stacks of all warps in bytes.
const LOCAL: u64 = 4 * MIB;
/// Maximum time for which work may wait for memory.
const QUEUE_LIMIT: Duration = Duration::from_secs(60);

/// A card and the division of its memory.
#[derive(Clone, Copy, Debug)]
pub struct CardConfig {
    /// Memory shared by the VMs, in MiB.
    pub card_mib: u64,
    /// Size of host memory for chunks, in MiB.
    pub host_mib: u64,
    /// Size of a chunk in bytes.
    pub chunk_bytes: u64,
    /// Division of memory.
    pub division: Division,
    /// Model of the time that work takes.
    pub time: Option<TimeModel>,
    /// Set if the card records its engines' accesses in order ([`simgpu::SimGpu::take_touches`]). One thread then
    /// executes kernels, so that the order is always the same.
    pub traced: bool,
}

impl CardConfig {
    /// Creates a configuration with chunks of 2 MiB, in which work takes no time.
    #[must_use]
    pub fn new(card_mib: u64, host_mib: u64) -> Self {
        Self { card_mib, host_mib, chunk_bytes: 2 * MIB, division: Division::default(), time: None, traced: false }
    }

    /// Starts the card.
    ///
    /// # Errors
    /// If the sizes are not valid for a card.
    pub fn open(&self) -> Result<Rig> {
        // The mediator's structures use three chunks, and it keeps two more in reserve.
        let reserve_bytes = (16 * MIB).max(5 * self.chunk_bytes);
        let vram_mib = u32::try_from(self.card_mib + reserve_bytes / MIB)?;
        let sharing = Sharing {
            chunk_bytes: self.chunk_bytes,
            reserve_bytes,
            host_bytes: self.host_mib * MIB,
            division: self.division,
            ..sharing()
        };
        let (profile, compute_workers) = (self.traced, self.traced.then_some(0));
        let config =
            simgpu::Config { vram_mib, time: self.time, profile, compute_workers, ..simgpu::Config::default() };
        Ok(Rig::made(&config, &sharing, |card| card))
    }
}

/// Returns a time model in which engines move `vram` bytes per second of card memory and `bus` bytes per second of host
/// memory.
#[must_use]
pub fn timing(vram: u64, bus: u64) -> TimeModel {
    let engine = EngineTiming { bytes_per_second: vram, launch_ns: 5_000 };
    let compute = ComputeTiming::at(1150, vram);
    TimeModel { graph: engine, compute, copy: engine, switch_ns: 10_000, bus_bytes_per_second: bus }
}

/// Adds a VM with `vram_mib` MiB of VRAM, a running driver and 1 MiB of RAM.
///
/// # Errors
/// If the RAM cannot be allocated.
pub fn guest(rig: &Rig, vm: u32, vram_mib: u64, memory: Limits) -> Result<Driver> {
    let mut settings = Settings { queue_limit: QUEUE_LIMIT, ..settings(vram_mib, 8) };
    settings.share.memory = memory;
    let mut guest = rig.guest_with(vm, &settings);
    ensure!(guest.map_ram(0, MIB, true), "no RAM");
    Ok(Driver::new(guest))
}

/// Returns a VM's account.
///
/// # Errors
/// If the VM does not exist.
pub fn account(rig: &Rig, vm: u32) -> Result<VmSummary> {
    rig.usage().0.vms.get(&TenantId(vm)).copied().with_context(|| format!("no VM {vm}"))
}

/// Waits until all work submitted on a channel is complete.
///
/// # Errors
/// If the GPU faults.
pub fn wait<M: Machine>(driver: &mut Driver<M>, channel: &Channel) -> Result<()> {
    while !driver.is_done(channel) {
        ensure!(driver.faults.is_empty(), "the GPU faults: {:x?}", driver.faults);
        ensure!(driver.guest.wait_msi(), "the device has gone");
        driver.service();
    }
    Ok(())
}

/// Returns methods that bind a copy engine and copy one line.
#[must_use]
pub fn copy_line(engine: u32, from: u64, to: u64, bytes: u32) -> Vec<u32> {
    let halves = |va: u64| [(va >> 32) as u32, va as u32];
    let ([from_high, from], [to_high, to]) = (halves(from), halves(to));
    let mut words = object(if engine == 0 { CE0 } else { CE1 });
    words.extend(methods(4, 0x30c, &[from_high, from, to_high, to, bytes, bytes, bytes, 1]));
    words.extend(methods(4, 0x300, &[0x110]));
    words
}

/// A guest that computes. The CPU transfers inputs and results as if through an aperture.
pub struct LightGpu<M = Guest> {
    /// The guest's driver.
    pub driver: Driver<M>,
    channel: Channel,
    heap: Heap,
    modules: Vec<(u64, sm20::Program)>,
    banks: Buffer,
    /// Number of submissions since the last wait.
    pending: u64,
    launches: u64,
}

/// Allocates pages of guest VRAM. The heap starts at `at`, and is mapped at [`HEAP_VA`] for the GPU.
struct Heap {
    at: u64,
    bytes: u64,
    /// Number of mapped bytes.
    mapped: u64,
    /// Free ranges below `mapped`: start and length.
    free: Vec<(u64, u64)>,
}

impl Heap {
    /// Allocates the first free range that fits. If none fits, allocates a range after all others.
    fn take(&mut self, bytes: u64) -> Result<u64> {
        let bytes = bytes.next_multiple_of(PAGE);
        if let Some(hole) = self.free.iter_mut().find(|(_, len)| *len >= bytes) {
            let at = hole.0;
            *hole = (hole.0 + bytes, hole.1 - bytes);
            return Ok(at);
        }
        let at = self.mapped;
        ensure!(at + bytes <= self.bytes, "no VRAM for {bytes} bytes beside {at}");
        Ok(at)
    }

    /// Frees a range and merges adjacent holes, so that a repeated job does not need more memory each time.
    fn give(&mut self, at: u64, bytes: u64) {
        self.free.retain(|(_, len)| *len > 0);
        let next = self.free.partition_point(|(start, _)| *start < at);
        self.free.insert(next, (at, bytes.next_multiple_of(PAGE)));
        self.free.dedup_by(|hole, before| {
            let touch = before.0 + before.1 == hole.0;
            before.1 += if touch { hole.1 } else { 0 };
            touch
        });
    }
}

impl<M: Machine> LightGpu<M> {
    /// Creates a guest that uses all VRAM that the driver's page table covers for buffers.
    ///
    /// # Errors
    /// If the guest does not start.
    pub fn new(mut driver: Driver<M>) -> Result<Self> {
        let channel = driver.channel(1);
        let bytes = (driver.room() / PAGE * PAGE).min(HEAP_MAX);
        let heap = Heap { at: driver.vram(bytes / PAGE), bytes, mapped: 0, free: Vec::new() };
        let none = Buffer { index: 0, address: 0, bytes: 0 };
        let mut gpu = Self { driver, channel, heap, modules: Vec::new(), banks: none, pending: 0, launches: 0 };
        gpu.banks = gpu.allocate(Place::Vram, BANKS * PAGE)?;
        let local = gpu.allocate(Place::Vram, LOCAL)?;
        let words = [
            object(COMPUTE),
            to(compute::LOCAL_ADDRESS_HIGH, (local.address >> 32) as u32),
            to(compute::LOCAL_ADDRESS_LOW, local.address as u32),
            to(compute::LOCAL_SIZE_LOW, LOCAL as u32),
            to(compute::STACK_SIZE, 0x800),
            to(compute::CONSTANT_SIZE, PAGE as u32),
        ];
        gpu.submit(&words.concat())?;
        gpu.finish()?;
        Ok(gpu)
    }

    /// Returns the maximum total size of the buffers that were in use at the same time, in bytes.
    #[must_use]
    pub fn footprint(&self) -> u64 {
        self.heap.mapped
    }

    /// Returns the guest VRAM address of a buffer's byte `at`.
    #[must_use]
    pub fn vram_of(&self, buffer: Buffer, at: u64) -> u64 {
        self.heap.at + (buffer.address - HEAP_VA) + at
    }

    fn submit(&mut self, words: &[u32]) -> Result<()> {
        if self.pending == BANKS {
            self.finish()?;
        }
        self.driver.submit(&mut self.channel, words);
        self.pending += 1;
        Ok(())
    }

    fn inside(buffer: Buffer, at: u64, bytes: usize) -> Result<u64> {
        let end = at.checked_add(bytes as u64);
        ensure!(end.is_some_and(|end| end <= buffer.bytes), "{bytes} bytes at {at:#x} of {buffer:x?}");
        Ok(buffer.address + at)
    }
}

fn to(method: u32, data: u32) -> Vec<u32> {
    methods(COMPUTE.0, method, &[data])
}

impl<M: Machine> Gpu for LightGpu<M> {
    fn allocate(&mut self, place: Place, bytes: u64) -> Result<Buffer> {
        if place == Place::Ram {
            bail!("a light guest has no buffers in RAM");
        }
        let at = self.heap.take(bytes)?;
        let pages = bytes.div_ceil(PAGE);
        if at + pages * PAGE > self.heap.mapped {
            self.driver.map(self.channel.space, HEAP_VA + at, At::Vram(self.heap.at + at), pages);
            self.heap.mapped = at + pages * PAGE;
        }
        Ok(Buffer { index: 0, address: HEAP_VA + at, bytes })
    }

    fn free(&mut self, buffer: Buffer) -> Result<()> {
        self.heap.give(buffer.address - HEAP_VA, buffer.bytes);
        Ok(())
    }

    fn upload(&mut self, buffer: Buffer, at: u64, bytes: &[u8]) -> Result<()> {
        Self::inside(buffer, at, bytes.len())?;
        self.finish()?;
        self.driver.guest.vram_write(self.vram_of(buffer, at), bytes);
        Ok(())
    }

    fn download(&mut self, buffer: Buffer, at: u64, bytes: &mut [u8]) -> Result<()> {
        Self::inside(buffer, at, bytes.len())?;
        self.finish()?;
        self.driver.guest.vram_read(self.vram_of(buffer, at), bytes);
        Ok(())
    }

    fn copy(&mut self, from: Buffer, to: Buffer, bytes: u64) -> Result<()> {
        let len = usize::try_from(bytes)?;
        let (from, to) = (Self::inside(from, 0, len)?, Self::inside(to, 0, len)?);
        self.submit(&[object(M2MF), m2mf_copy(from, to, u32::try_from(bytes)?)].concat())
    }

    fn load(&mut self, program: &sm20::Program) -> Result<Module> {
        if let Some(index) = self.modules.iter().position(|(_, known)| known == program) {
            return Ok(Module { index });
        }
        let bytes = program.bytes();
        let code = self.allocate(Place::Vram, bytes.len() as u64)?;
        self.upload(code, 0, &bytes)?;
        self.modules.push((code.address, program.clone()));
        Ok(Module { index: self.modules.len() - 1 })
    }

    fn launch(&mut self, module: Module, name: &str, grid: Grid, params: &Params, _: &[Buffer]) -> Result<()> {
        let (code, program) = self.modules.get(module.index).context("a module")?;
        let kernel = program.kernel(name).with_context(|| format!("no kernel {name}"))?;
        ensure!(kernel.params == params.bytes().len() as u32, "{name} has {} bytes of parameters", kernel.params);
        let Grid { blocks, threads } = grid;
        let bank = self.banks.address + self.launches % BANKS * PAGE;
        let words = [
            object(COMPUTE),
            to(compute::CONSTANT_ADDRESS_HIGH, (bank >> 32) as u32),
            to(compute::CONSTANT_ADDRESS_LOW, bank as u32),
            to(compute::CONSTANT_BIND, 1),
            // Invalidates the caches of code, global memory and constants.
            to(compute::INVALIDATE_SHADER_CACHES_NO_WAIT, 0x1011),
            to(compute::CODE_ADDRESS_HIGH, (code >> 32) as u32),
            to(compute::CODE_ADDRESS_LOW, *code as u32),
            to(compute::PROGRAM_START, kernel.entry_offset),
            to(compute::REGISTERS, kernel.registers),
            to(compute::SHARED_SIZE, kernel.shared_bytes),
            to(compute::LOCAL_LOW_SIZE, kernel.local_bytes),
            to(compute::BLOCK_BARRIERS, kernel.barriers),
            to(compute::GRID_YX, blocks[1] << 16 | blocks[0]),
            to(compute::GRID_Z, blocks[2]),
            to(compute::BLOCK_YX, threads[1] << 16 | threads[0]),
            to(compute::BLOCK_Z, threads[2]),
            to(compute::LAUNCH, 0x1000),
            // M2MF copies do not wait for grids by default.
            to(compute::WAIT_FOR_IDLE, 0),
        ];
        let words = words.concat();
        // The previous launch with this bank has ended if fewer than this number of launches are in flight.
        if self.pending == BANKS {
            self.finish()?;
        }
        let at = self.heap.at + (bank - HEAP_VA);
        self.driver.guest.vram_write(at + 0x20, params.bytes());
        self.launches += 1;
        self.submit(&words)
    }

    fn finish(&mut self) -> Result<()> {
        wait(&mut self.driver, &self.channel)?;
        self.pending = 0;
        Ok(())
    }
}

#[cfg(test)]
mod tests;
