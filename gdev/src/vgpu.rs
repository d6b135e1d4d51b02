//! The backend for a vGPU without a virtual machine: a host process that is a tenant of the daemon.
//!
//! The process connects to the socket that the operator assigned to it, as a VMM does, and is the driver of the vGPU:
//! it initializes the device, writes page tables, and creates one channel for each context. Contexts of one process
//! share the device. Pinned memory is the process's own memory, which the device accesses without messages; only
//! doorbells, page tables, small copies and interrupts are messages.
//!
//! All work of a context is executed in order by one channel with M2MF and compute. The end of each submission is a
//! stamp in pinned memory. Parts: `bus` (registers and VRAM over vfio-user), `device` (the vGPU), `space`
//! (page tables), `channel` (submissions and waits), `ram` (pinned memory), `ranges` (an allocator).
//!
//! Not supported: segments, which need the paravirtual interface.

mod bus;
mod channel;
mod device;
mod ram;
mod ranges;
mod space;

use std::collections::HashMap;
use std::path::Path;
use std::ptr::NonNull;
use std::sync::Arc;

use channel::Channel;
use device::Device;
use ram::PinnedMemory;
use space::Physical;

use crate::nouveau::methods::{self, Area, Code};
use crate::nouveau::push::{Engine, Object, Push, linear};
use crate::{
    Backend, Copy, Error, Fence, Grid, Image, Memory, Module, Params, Place, Result, Segment, SegmentRequest, Shared,
    Tuning,
};

/// Limits of copies of a host process. Each 4 KiB that the CPU writes into VRAM is a message.
pub const TUNING: Tuning =
    Tuning { direct_write_bytes: 4 << 10, direct_read_bytes: 1 << 10, piece_bytes: 2 << 20, overlap: true };

/// The card reads code ahead of the program counter.
const FETCH_AHEAD_BYTES: u64 = 0x100;

/// VRAM of a device, which several contexts may map.
#[derive(Debug)]
struct Vram {
    device: Arc<Device>,
    at: u64,
    bytes: u64,
}

impl Vram {
    fn new(device: &Arc<Device>, bytes: u64) -> Result<Arc<Self>> {
        let at = device.lock().take_vram(bytes)?;
        Ok(Arc::new(Self { device: Arc::clone(device), at, bytes }))
    }
}

impl Drop for Vram {
    fn drop(&mut self) {
        self.device.lock().vram.give(self.at, self.bytes);
    }
}

/// Pinned memory of a device, which several contexts may map.
#[derive(Debug)]
struct Ram {
    device: Arc<Device>,
    memory: PinnedMemory,
}

impl Drop for Ram {
    fn drop(&mut self) {
        self.memory.release(&mut self.device.lock());
    }
}

/// Memory behind an allocation.
#[derive(Clone, Debug)]
enum Backing {
    Vram(Arc<Vram>),
    Ram(Arc<Ram>),
}

impl Backing {
    fn physical(&self) -> Physical {
        match self {
            Self::Vram(vram) => Physical::Vram(vram.at),
            Self::Ram(ram) => ram.memory.physical(),
        }
    }
}

/// Memory that is mapped into a context.
#[derive(Debug)]
struct Mapped {
    backing: Backing,
    address: u64,
    bytes: u64,
}

#[derive(Debug)]
struct Loaded {
    code: Mapped,
    program: sm20::Program,
}

/// A context on a vGPU.
#[derive(Debug)]
pub struct Vgpu {
    channel: Channel,
    memory: HashMap<usize, Mapped>,
    next_memory: usize,
    modules: Vec<Loaded>,
    bank: Mapped,
    local: Option<Mapped>,
    /// Freed memory that submissions up to a number may still use.
    freed: Vec<(u64, Mapped)>,
}

impl Vgpu {
    /// Opens the vGPU at a socket, and creates a context on it.
    ///
    /// # Errors
    /// If the socket cannot be opened, if the daemon refuses the process, or if channels or memory are missing.
    pub fn open(socket: &Path) -> Result<Self> {
        let device = Device::open(socket)?;
        let mut channel = Channel::new(&device)?;
        let bank = map_vram(&mut channel, u64::from(methods::BANK_BYTES))?;
        let mut push = Push::default();
        push.bind(Engine::M2mf.object());
        push.bind(Object::COMPUTE);
        methods::set_up(&mut push, device.multiprocessors(), bank.address);
        let mut context = Self {
            channel,
            memory: HashMap::new(),
            next_memory: 0,
            modules: Vec::new(),
            bank,
            local: None,
            freed: Vec::new(),
        };
        let first = context.submit(push)?;
        match context.wait(first) {
            // The mediator reports a refused channel as a fault of its first work.
            Err(Error::Lost(why)) => Err(Error::Open {
                device: format!("a channel of vgpu:{}", socket.display()),
                why,
                remedy: "the VM may have all of its channels in use: see `channels` in its configuration, and the log of \
                         the daemon",
            }),
            result => result.map(|()| context),
        }
    }

    /// Submits a pushbuffer, and the stamp of its end.
    fn submit(&mut self, mut push: Push) -> Result<Fence> {
        methods::wait_for_idle(&mut push);
        methods::stamp(&mut push, self.channel.fence_address(), (self.channel.submitted() + 1) as u32);
        push.interrupt();
        self.channel.submit(&push).map(Fence::new)
    }

    fn submit_copy(&mut self, from: u64, to: u64, bytes: u64) -> Result<Fence> {
        let mut push = Push::default();
        // M2MF does not wait for grids by itself.
        methods::wait_for_idle(&mut push);
        for rect in &linear(from, to, bytes, Engine::M2mf.most_lines()) {
            if !push.has_room() {
                self.submit(std::mem::take(&mut push))?;
            }
            push.copy(Engine::M2mf, rect);
        }
        self.submit(push)
    }

    fn insert(&mut self, mapped: Mapped) -> Memory {
        let memory = Memory { index: self.next_memory, address: mapped.address, bytes: mapped.bytes };
        self.memory.insert(memory.index, mapped);
        self.next_memory += 1;
        memory
    }

    fn mapped(&self, memory: Memory) -> Result<&Mapped> {
        let known = self.memory.get(&memory.index);
        let known = known.filter(|mapped| (mapped.address, mapped.bytes) == (memory.address, memory.bytes));
        known.ok_or(Error::Memory(memory.index))
    }

    /// Returns memory whose range the CPU accesses.
    fn by_cpu(&self, memory: Memory, offset: u64, bytes: usize) -> Result<&Mapped> {
        let (mapped, bytes) = (self.mapped(memory)?, bytes as u64);
        let inside = offset.checked_add(bytes).is_some_and(|end| end <= mapped.bytes);
        if inside { Ok(mapped) } else { Err(Error::Range { offset, bytes, size: mapped.bytes }) }
    }

    /// Unmaps memory when the submissions so far have ended.
    fn release(&mut self, mapped: Mapped) -> Result<()> {
        self.freed.push((self.channel.submitted(), mapped));
        self.reclaim()
    }

    /// Unmaps freed memory that no submission still uses.
    fn reclaim(&mut self) -> Result<()> {
        while let Some((number, _)) = self.freed.first()
            && self.channel.is_done(*number)
        {
            let (_, mapped) = self.freed.remove(0);
            let (mut device, space) = self.channel.parts();
            space.unmap(&mut device, mapped.address, mapped.bytes)?;
        }
        Ok(())
    }

    /// Makes local memory large enough for `bytes` bytes per thread.
    fn provide_local(&mut self, bytes: u32) -> Result<()> {
        let multiprocessors = u64::from(self.channel.device().multiprocessors());
        let wanted = methods::local_area(multiprocessors, bytes);
        if self.local.as_ref().is_some_and(|local| local.bytes >= wanted) {
            return Ok(());
        }
        let local = map_vram(&mut self.channel, wanted)?;
        let mut push = Push::default();
        methods::wait_for_idle(&mut push);
        methods::set_local(&mut push, Area { address: local.address, bytes: local.bytes });
        self.submit(push)?;
        match self.local.replace(local) {
            Some(old) => self.release(old),
            None => Ok(()),
        }
    }
}

/// Returns the size of the VRAM of the vGPU at a socket, in bytes.
///
/// # Errors
/// If the socket cannot be opened, or the daemon refuses the process.
pub(crate) fn memory_bytes(socket: &Path) -> Result<u64> {
    Ok(Device::open(socket)?.vram_bytes())
}

/// Allocates VRAM and maps it.
fn map_vram(channel: &mut Channel, bytes: u64) -> Result<Mapped> {
    let backing = Backing::Vram(Vram::new(channel.device(), bytes)?);
    map(channel, backing, bytes)
}

fn map(channel: &mut Channel, backing: Backing, bytes: u64) -> Result<Mapped> {
    let physical = backing.physical();
    let address = {
        let (mut device, space) = channel.parts();
        space.map(&mut device, physical, bytes)?
    };
    Ok(Mapped { backing, address, bytes })
}

impl Backend for Vgpu {
    fn name(&self) -> &'static str {
        "vgpu"
    }

    fn allocate(&mut self, place: Place, bytes: u64) -> Result<Memory> {
        self.reclaim()?;
        let bytes = bytes.max(1);
        let device = Arc::clone(self.channel.device());
        let backing = match place {
            Place::Vram => Backing::Vram(Vram::new(&device, bytes)?),
            Place::Ram => {
                let memory = PinnedMemory::new(&mut device.lock(), bytes)?;
                Backing::Ram(Arc::new(Ram { device, memory }))
            }
        };
        let mapped = map(&mut self.channel, backing, bytes)?;
        Ok(self.insert(mapped))
    }

    fn free(&mut self, memory: Memory) -> Result<()> {
        self.mapped(memory)?;
        match self.memory.remove(&memory.index) {
            Some(mapped) => self.release(mapped),
            None => Ok(()),
        }
    }

    fn place(&self, memory: Memory) -> Result<Place> {
        Ok(match self.mapped(memory)?.backing {
            Backing::Vram(_) => Place::Vram,
            Backing::Ram(_) => Place::Ram,
        })
    }

    fn write_by_cpu(&mut self, memory: Memory, offset: u64, bytes: &[u8]) -> Result<()> {
        match &self.by_cpu(memory, offset, bytes.len())?.backing {
            Backing::Vram(vram) => vram.device.lock().bus.write_vram(vram.at + offset, bytes),
            Backing::Ram(ram) => {
                ram.memory.write(offset, bytes);
                Ok(())
            }
        }
    }

    fn read_by_cpu(&mut self, memory: Memory, offset: u64, bytes: &mut [u8]) -> Result<()> {
        match &self.by_cpu(memory, offset, bytes.len())?.backing {
            Backing::Vram(vram) => vram.device.lock().bus.read_vram(vram.at + offset, bytes),
            Backing::Ram(ram) => {
                ram.memory.read(offset, bytes);
                Ok(())
            }
        }
    }

    fn copy(&mut self, copy: &Copy) -> Result<Fence> {
        let (from, to) = (self.mapped(copy.from)?.address, self.mapped(copy.to)?.address);
        self.submit_copy(from + copy.from_offset, to + copy.to_offset, copy.bytes)
    }

    fn load(&mut self, image: Image<'_>) -> Result<Module> {
        let program = methods::program(image, self.name())?;
        let local = program.kernels.iter().map(|kernel| kernel.local_bytes).max().unwrap_or(0);
        self.provide_local(local)?;
        let bytes = program.bytes();
        let code = map_vram(&mut self.channel, bytes.len() as u64 + FETCH_AHEAD_BYTES)?;
        let staging = self.allocate(Place::Ram, bytes.len() as u64)?;
        self.write_by_cpu(staging, 0, &bytes)?;
        if !bytes.is_empty() {
            self.submit_copy(staging.address, code.address, bytes.len() as u64)?;
        }
        self.free(staging)?;
        self.modules.push(Loaded { code, program: program.clone() });
        Ok(Module { index: self.modules.len() - 1 })
    }

    fn launch(&mut self, module: Module, name: &str, grid: Grid, params: &Params, uses: &[Memory]) -> Result<Fence> {
        let loaded = self.modules.get(module.index).ok_or(Error::Module(module.index))?;
        let kernel = methods::kernel(&loaded.program, name, grid, params)?;
        for used in uses {
            self.mapped(*used)?;
        }
        let mut push = Push::default();
        let code = Code { address: loaded.code.address, kernel };
        methods::launch(&mut push, code, grid, params, self.bank.address);
        self.submit(push)
    }

    fn last(&self) -> Option<Fence> {
        Some(self.channel.submitted()).filter(|number| *number > 0).map(Fence::new)
    }

    fn is_done(&mut self, fence: Fence) -> Result<bool> {
        Ok(self.channel.is_done(fence.number()))
    }

    fn wait(&mut self, fence: Fence) -> Result<()> {
        self.channel.wait(fence.number().min(self.channel.submitted()))?;
        self.reclaim()
    }

    fn host_address(&mut self, memory: Memory) -> Result<NonNull<u8>> {
        match &self.mapped(memory)?.backing {
            Backing::Ram(ram) => Ok(ram.memory.start()),
            Backing::Vram(_) => {
                Err(Error::Unsupported { device: self.name(), what: "addresses of the CPU for card memory" })
            }
        }
    }

    fn share(&mut self, memory: Memory) -> Result<Shared> {
        let backing = self.mapped(memory)?.backing.clone();
        Ok(Shared::new(memory.bytes, backing))
    }

    fn reference(&mut self, shared: &Shared) -> Result<Memory> {
        let backing = shared.source::<Backing>().cloned().filter(|backing| {
            let device = match backing {
                Backing::Vram(vram) => &vram.device,
                Backing::Ram(ram) => &ram.device,
            };
            Arc::ptr_eq(device, self.channel.device())
        });
        let what = "references to memory of another device";
        let backing = backing.ok_or(Error::Unsupported { device: self.name(), what })?;
        let mapped = map(&mut self.channel, backing, shared.bytes)?;
        Ok(self.insert(mapped))
    }

    fn segment(&mut self, _: SegmentRequest) -> Result<Segment> {
        Err(no_segments())
    }

    fn attach(&mut self, _: Segment, _: bool) -> Result<Memory> {
        Err(no_segments())
    }

    fn detach(&mut self, memory: Memory) -> Result<()> {
        self.mapped(memory)?;
        Err(Error::Memory(memory.index))
    }

    fn remove(&mut self, _: Segment) -> Result<()> {
        Err(no_segments())
    }

    fn attached(&mut self, _: Segment) -> Result<u64> {
        Err(no_segments())
    }
}

fn no_segments() -> Error {
    Error::Unsupported { device: "vgpu", what: "segments: use a reference, or a VM with the paravirtual driver" }
}
