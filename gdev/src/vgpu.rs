//! The backend for a vGPU without a virtual machine: a host process that is a tenant of the daemon.
//!
//! The process connects to its assigned socket like a VMM. It drives the vGPU itself: it initializes the device, writes
//! page tables, and creates one channel per context. The contexts of a process share the device. Pinned memory belongs
//! to the process, and the device accesses it without messages. Only doorbells, page table updates, small copies and
//! interrupts need messages.
//!
//! One channel with M2MF and compute objects executes all work of a context in order. Each submission ends by writing a
//! stamp to pinned memory. Parts: `bus` (registers and VRAM over vfio-user), `device` (the vGPU), `space` (page
//! tables), `channel` (submissions and waits), `paravirtual` (segments), `ram` (pinned memory), `ranges` (an
//! allocator).
//!
//! Segments need the paravirtual interface, which the operator enables in the VM's configuration. All contexts of the
//! process act as the same user of the machine.

mod bus;
mod channel;
mod device;
mod paravirtual;
mod ram;
mod ranges;
mod space;

use std::collections::HashMap;
use std::os::fd::OwnedFd;
use std::path::Path;
use std::ptr::NonNull;
use std::sync::Arc;

pub use bus::Bus;
use channel::Channel;
use device::Device;
use pv::abi::share::{self, control};
use pv::guest::Ops;
use ram::PinnedMemory;
use space::Physical;

use crate::nouveau::methods::{self, Area, Code};
use crate::nouveau::push::{Engine, Object, Push, linear};
use crate::{
    Backend, Copy, Error, Fence, Grid, Image, Memory, Module, Params, Place, Result, Segment, SegmentRequest, Shared,
    Tuning,
};

/// Copy settings for a host process. The CPU writes VRAM in messages of up to 4 KiB.
pub const TUNING: Tuning =
    Tuning { direct_write_bytes: 4 << 10, direct_read_bytes: 1 << 10, piece_bytes: 2 << 20, overlap: true };

/// Space in bytes after a program, because the card prefetches code beyond the program counter.
const FETCH_AHEAD_BYTES: u64 = 0x100;

/// VRAM that several contexts may map.
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

/// Pinned memory that several contexts may map.
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

/// Memory that backs an allocation.
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

/// Memory mapped into a context.
#[derive(Debug)]
struct Mapped {
    backing: Backing,
    address: u64,
    bytes: u64,
}

/// Memory that kernels can access.
#[derive(Debug)]
enum Held {
    Own(Mapped),
    /// A segment that the mediator has mapped.
    Segment {
        id: u32,
        address: u64,
        bytes: u64,
    },
}

impl Held {
    /// Returns the GPU virtual address and the size in bytes.
    fn range(&self) -> (u64, u64) {
        match self {
            Self::Own(mapped) => (mapped.address, mapped.bytes),
            Self::Segment { address, bytes, .. } => (*address, *bytes),
        }
    }
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
    memory: HashMap<usize, Held>,
    next_memory: usize,
    modules: Vec<Loaded>,
    bank: Mapped,
    local: Option<Mapped>,
    /// Freed memory blocks, each with the number of the last submission that may use the block.
    freed: Vec<(u64, Mapped)>,
}

impl Vgpu {
    /// Opens the vGPU at a socket, and creates a context on it.
    ///
    /// # Errors
    /// Returns an error if the socket cannot be opened, the daemon rejects the connection, or no channel or memory is
    /// available.
    pub fn open(socket: &Path) -> Result<Self> {
        Self::on_device(&Device::open(socket)?, &format!("vgpu:{}", socket.display()))
    }

    /// Initializes the vGPU that `bus` accesses, and creates a context on it. `msi` is the eventfd of the device's
    /// interrupt.
    ///
    /// # Errors
    /// Returns an error if the device does not behave like a GF100, or if no channel or memory is available.
    pub fn on(bus: Box<dyn Bus>, msi: OwnedFd) -> Result<Self> {
        Self::on_device(&Device::start(bus, msi)?, "the vGPU")
    }

    fn on_device(device: &Arc<Device>, name: &str) -> Result<Self> {
        let mut channel = Channel::new(device)?;
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
            // The mediator reports a rejected channel as a fault of its first work.
            Err(Error::Lost(why)) => Err(Error::Open {
                device: format!("a channel of {name}"),
                why,
                remedy: "the VM may have all of its channels in use: see `channels` in its configuration, and the log of \
                         the daemon",
            }),
            result => result.map(|()| context),
        }
    }

    /// Submits a push buffer, followed by its stamp.
    fn submit(&mut self, mut push: Push) -> Result<Fence> {
        methods::wait_for_idle(&mut push);
        methods::stamp(&mut push, self.channel.fence_address(), (self.channel.submitted() + 1) as u32);
        push.interrupt();
        self.channel.submit(&push).map(Fence::new)
    }

    fn submit_copy(&mut self, from: u64, to: u64, bytes: u64) -> Result<Fence> {
        let mut push = Push::default();
        // M2MF does not implicitly wait for grids.
        methods::wait_for_idle(&mut push);
        for rect in &linear(from, to, bytes, Engine::M2mf.most_lines()) {
            if !push.has_room() {
                self.submit(std::mem::take(&mut push))?;
            }
            push.copy(Engine::M2mf, rect);
        }
        self.submit(push)
    }

    /// Returns the VRAM address of a byte of card memory, for programs that observe the device.
    ///
    /// # Errors
    /// Returns an error if the memory does not belong to the context, is a segment, or is in RAM.
    pub fn vram_address(&self, memory: Memory, offset: u64) -> Result<u64> {
        match &self.mapped(memory)?.backing {
            Backing::Vram(vram) => Ok(vram.at + offset),
            Backing::Ram(_) => Err(Error::Unsupported { device: "vgpu", what: "VRAM addresses of pinned memory" }),
        }
    }

    /// Returns the peak VRAM usage of the vGPU in bytes.
    #[must_use]
    pub fn peak_vram_bytes(&self) -> u64 {
        self.channel.device().peak_vram_bytes()
    }

    fn insert(&mut self, held: Held) -> Memory {
        let (address, bytes) = held.range();
        let memory = Memory { index: self.next_memory, address, bytes };
        self.memory.insert(memory.index, held);
        self.next_memory += 1;
        memory
    }

    fn held(&self, memory: Memory) -> Result<&Held> {
        let known = self.memory.get(&memory.index);
        known.filter(|held| held.range() == (memory.address, memory.bytes)).ok_or(Error::Memory(memory.index))
    }

    /// Returns the memory, unless it is a segment.
    fn mapped(&self, memory: Memory) -> Result<&Mapped> {
        match self.held(memory)? {
            Held::Own(mapped) => Ok(mapped),
            Held::Segment { .. } => {
                Err(Error::Unsupported { device: "vgpu", what: "this on segments: copy, attach and detach them" })
            }
        }
    }

    /// Checks the range of a CPU access. Returns the memory.
    fn by_cpu(&self, memory: Memory, offset: u64, bytes: usize) -> Result<&Mapped> {
        let (mapped, bytes) = (self.mapped(memory)?, bytes as u64);
        let inside = offset.checked_add(bytes).is_some_and(|end| end <= mapped.bytes);
        if inside { Ok(mapped) } else { Err(Error::Range { offset, bytes, size: mapped.bytes }) }
    }

    /// Executes an operation on segments. Returns the value in its reply. `label` describes the operation in errors.
    fn call(&self, ops: &Ops, label: &str) -> Result<u64> {
        self.channel.device().lock().call(ops, label)
    }

    /// Unmaps memory once all earlier submissions have completed.
    fn release(&mut self, mapped: Mapped) -> Result<()> {
        self.freed.push((self.channel.submitted(), mapped));
        self.reclaim()
    }

    /// Unmaps freed memory that is no longer in use.
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

    /// Ensures that there are at least `bytes` bytes of local memory per thread.
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

/// Returns the VRAM size of the vGPU at a socket, in bytes.
///
/// # Errors
/// Returns an error if the socket cannot be opened, or if the daemon rejects the connection.
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
        Ok(self.insert(Held::Own(mapped)))
    }

    fn free(&mut self, memory: Memory) -> Result<()> {
        self.mapped(memory)?;
        match self.memory.remove(&memory.index) {
            Some(Held::Own(mapped)) => self.release(mapped),
            Some(Held::Segment { .. }) | None => Ok(()),
        }
    }

    fn place(&self, memory: Memory) -> Result<Place> {
        Ok(match self.held(memory)? {
            Held::Own(Mapped { backing: Backing::Ram(_), .. }) => Place::Ram,
            Held::Own(Mapped { backing: Backing::Vram(_), .. }) | Held::Segment { .. } => Place::Vram,
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
        let ((from, _), (to, _)) = (self.held(copy.from)?.range(), self.held(copy.to)?.range());
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
            self.held(*used)?;
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
            Backing::Vram(_) => Err(Error::Unsupported { device: self.name(), what: "CPU addresses for card memory" }),
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
        Ok(self.insert(Held::Own(mapped)))
    }

    fn has_segments(&mut self) -> bool {
        self.channel.device().lock().has_segments()
    }

    fn segment(&mut self, request: SegmentRequest) -> Result<Segment> {
        // Permissions within the machine do not apply, because the process is the only user.
        let SegmentRequest { key, bytes, create, group, mode: _, group_writes } = request;
        let flags = if create { share::CREATE } else { 0 } | if group { share::ABROAD } else { 0 };
        let mode = match (group, group_writes) {
            (false, _) => 0,
            (true, false) => share::mode::READ,
            (true, true) => share::mode::READ | share::mode::WRITE,
        };
        let ops = Ops::new().share_get(key, bytes, flags, mode);
        let id = self.call(&ops, &format!("a segment of {bytes} bytes, key {key}"))?;
        let id = u32::try_from(id).map_err(|_| Error::Lost(format!("the mediator returned {id:#x} as a segment")))?;
        Ok(Segment { id, bytes })
    }

    fn attach(&mut self, segment: Segment, read_only: bool) -> Result<Memory> {
        let Segment { id, bytes } = segment;
        let size = self.call(&Ops::new().control(id, control::SIZE, 0), &format!("the size of segment {id}"))?;
        if bytes > size {
            return Err(Error::Range { offset: 0, bytes, size });
        }
        let flags = if read_only { share::READ_ONLY } else { 0 };
        let ops = Ops::new().attach(id, self.channel.id().into(), flags);
        let address = self.call(&ops, &format!("attaching segment {id}"))?;
        Ok(self.insert(Held::Segment { id, address, bytes }))
    }

    fn detach(&mut self, memory: Memory) -> Result<()> {
        let Held::Segment { id, .. } = *self.held(memory)? else { return Err(Error::Memory(memory.index)) };
        // All attachments of a segment in the same context share a mapping, so only the last one detaches the segment.
        let others = self.memory.iter().filter(|(index, _)| **index != memory.index);
        if !others.into_iter().any(|(_, held)| matches!(held, Held::Segment { id: other, .. } if *other == id)) {
            let ops = Ops::new().detach(id, self.channel.id().into());
            self.call(&ops, &format!("detaching segment {id}"))?;
        }
        self.memory.remove(&memory.index);
        Ok(())
    }

    fn remove(&mut self, segment: Segment) -> Result<()> {
        let ops = Ops::new().control(segment.id, control::REMOVE, 0);
        self.call(&ops, &format!("removing segment {}", segment.id)).map(drop)
    }

    fn attached(&mut self, segment: Segment) -> Result<u64> {
        let ops = Ops::new().control(segment.id, control::ATTACHED, 0);
        self.call(&ops, &format!("the number of contexts with segment {}", segment.id))
    }
}
