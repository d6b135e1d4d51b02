//! The backend for a nouveau render node: a channel with M2MF and compute objects, buffers, programs, and launches.
//!
//! Copies use M2MF, the copy engine of PGRAPH, so that one channel executes all work in order. The CPU maps buffers in
//! VRAM through BAR1. Each submission ends by writing a stamp with its number to the end of its push buffer's memory.
//! If the stamp is missing after the kernel has reported completion, the work was aborted. On request
//! ([`Nouveau::measure_launches`]), the GPU time of each launch is measured by timestamps before and after it.
//!
//! Launches are asynchronous until all of the channel's push buffers are in flight.
//!
//! [`device`], [`push`] and [`uapi`] are the lower layer: device files, buffers, channels, and push buffers. These
//! modules support the stock drivers of Debian's 6.1 and 6.12 kernels on a Fermi card, without relocations, tiled
//! buffers and `VM_BIND`.

mod both;
pub mod device;
pub mod mediator;
pub mod methods;
pub mod push;
pub mod uapi;

use std::collections::HashMap;
use std::os::fd::OwnedFd;
use std::ptr::NonNull;
use std::sync::Arc;
use std::time::Duration;

use crate::{
    Backend, Copy, Error, Fence, Grid, Image, Memory, Module, Params, Place, Result, Segment, SegmentRequest, Shared,
    Tuning,
};
pub use device::Device;
use device::{Buffer, Channel, Domain, RING, Use};
use mediator::Mediator;
use methods::{Area, Code};
use push::{Engine, Object, Push, STAMP_AT, STAMP_BYTES, linear};
use uapi::param;

/// Copy settings for a guest with the software card.
pub const TUNING: Tuning =
    Tuning { direct_write_bytes: 4 << 10, direct_read_bytes: 1 << 10, piece_bytes: 2 << 20, overlap: true };

/// Number of launches whose stamps fit in the stamp buffer.
const STAMPED: u64 = 128;
/// Maximum number of submissions in flight. Each measured launch needs its own stamps.
pub const MOST_IN_FLIGHT: u64 = STAMPED / 2;
/// Offset of a small program in the memory of the push buffer that copies the program to VRAM, in bytes.
const PROGRAM_AT: u64 = 1 << 10;
/// Maximum size of a small program in bytes.
const SMALL_PROGRAM_BYTES: u64 = STAMP_AT - PROGRAM_AT;

/// Statistics of a [`Nouveau`].
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Done {
    /// Number of launched copies, each of one rectangle.
    pub copies: u64,
    /// Number of launched grids.
    pub launches: u64,
    /// Number of bytes that the CPU copied to and from buffers.
    pub cpu_bytes: u64,
    /// Number of bytes that the card copied between its own memory and RAM.
    pub link_bytes: u64,
    /// GPU time of the measured launches, according to the GPU's clock.
    pub gpu_time: Duration,
}

#[derive(Debug)]
struct Loaded {
    code: Buffer,
    program: sm20::Program,
}

/// Memory that kernels can access.
#[derive(Debug)]
enum Held {
    /// A buffer of the guest kernel. Every submission that uses the buffer must list it.
    Own(Buffer),
    /// A segment attached to the channel.
    Segment { address: u64, id: u32 },
    /// Other memory, at a virtual address that the guest kernel did not allocate.
    Foreign { address: u64 },
}

impl Held {
    fn address(&self) -> u64 {
        match self {
            Self::Own(buffer) => buffer.address(),
            Self::Segment { address, .. } | Self::Foreign { address } => *address,
        }
    }
}

/// A buffer exported to other contexts.
#[derive(Debug)]
struct Exported {
    descriptor: OwnedFd,
    domain: Domain,
}

/// A location in memory that kernels can access.
#[derive(Debug, Clone, Copy)]
struct Spot<'a> {
    address: u64,
    buffer: Option<&'a Buffer>,
}

impl<'a> From<&'a Buffer> for Spot<'a> {
    fn from(buffer: &'a Buffer) -> Self {
        Self { address: buffer.address(), buffer: Some(buffer) }
    }
}

/// A channel for copies and compute work.
#[derive(Debug)]
pub struct Nouveau {
    device: Arc<Device>,
    channel: Channel,
    /// Memory and its size in bytes, by index.
    memory: HashMap<usize, (Held, u64)>,
    next_memory: usize,
    modules: Vec<Loaded>,
    bank: Buffer,
    /// Stamps at the start and the end of each measured launch.
    stamps: Option<Buffer>,
    local: Option<Buffer>,
    mediator: Option<Arc<Mediator>>,
    /// The copy engines' channels, created on first use.
    engines: Option<[both::CopyChannel; 2]>,
    multiprocessors: u32,
    /// Maximum number of submissions in flight.
    in_flight: u64,
    /// Number of the last submission that the context has waited for.
    awaited: u64,
    /// Set if launches write stamps.
    measures: bool,
    /// Number of measured launches.
    measured: u64,
    /// Number of measured launches whose timestamps have been read.
    collected: u64,
    done: Done,
    /// Recorded end times of launches in ns of the card's clock, or `None` while not recording.
    ends: Option<Vec<u64>>,
}

impl Nouveau {
    /// Creates a channel.
    ///
    /// # Errors
    /// Returns an error if no channel or memory is available.
    pub fn new(device: &Arc<Device>) -> Result<Self> {
        Self::running_ahead(device, RING as u64)
    }

    /// Creates a channel with at most `in_flight` submissions in flight, between 1 and [`MOST_IN_FLIGHT`]. Further
    /// launches wait for the oldest submission.
    ///
    /// # Errors
    /// Returns an error if no channel or memory is available.
    pub fn running_ahead(device: &Arc<Device>, in_flight: u64) -> Result<Self> {
        let in_flight = in_flight.clamp(1, MOST_IN_FLIGHT);
        let channel = Channel::with_ring(device, in_flight as usize)?;
        let mut push = Push::default();
        for object in [Engine::M2mf.object(), Object::COMPUTE] {
            channel.create(object)?;
            push.bind(object);
        }
        let multiprocessors = (device.parameter(param::GRAPH_UNITS)? >> 8) as u32 & 0xff_ffff;
        if multiprocessors == 0 {
            return Err(Error::Unsupported { device: "nouveau", what: "kernels on a card without multiprocessors" });
        }
        let bank = Buffer::new(device, Domain::Vram, u64::from(methods::BANK_BYTES))?;
        let context = Self {
            device: Arc::clone(device),
            channel,
            memory: HashMap::new(),
            next_memory: 0,
            modules: Vec::new(),
            bank,
            stamps: None,
            local: None,
            mediator: None,
            engines: None,
            multiprocessors,
            in_flight,
            awaited: 0,
            measures: false,
            measured: 0,
            collected: 0,
            done: Done::default(),
            ends: None,
        };
        methods::set_up(&mut push, multiprocessors, context.bank.address());
        context.submit(push, &[Use::write(&context.bank)])?;
        Ok(context)
    }

    /// Returns the guest's channel number.
    #[must_use]
    pub fn number(&self) -> i32 {
        self.channel.number()
    }

    /// Returns the device file.
    #[must_use]
    pub fn device(&self) -> &Arc<Device> {
        &self.device
    }

    /// Measures the GPU time of all further launches. Each of these launches writes two stamps.
    pub fn measure_launches(&mut self) {
        self.measures = true;
    }

    /// Measures further launches, and starts recording their end times.
    pub fn keep_ends(&mut self) {
        self.measure_launches();
        self.ends = Some(Vec::new());
    }

    /// Returns the recorded end times of completed launches, in ns of the card's clock, and stops recording.
    pub fn take_ends(&mut self) -> Option<Vec<u64>> {
        self.ends.take()
    }

    /// Returns the statistics so far. They exclude the GPU time of launches that the context has not waited for.
    #[must_use]
    pub fn done(&self) -> Done {
        self.done
    }

    /// Reads the first 32-bit word of memory in RAM, without waiting.
    ///
    /// # Errors
    /// Returns an error if the memory does not belong to the context.
    pub fn peek(&mut self, memory: Memory) -> Result<u32> {
        let mut word = [0; 4];
        self.read_by_cpu(memory, 0, &mut word)?;
        Ok(u32::from_le_bytes(word))
    }

    /// Registers memory that the guest kernel did not allocate, at `address` in the channel's address space. The caller
    /// must free the registration before the memory.
    pub fn adopt(&mut self, address: u64, bytes: u64) -> Memory {
        self.insert(Held::Foreign { address }, bytes)
    }

    fn insert(&mut self, held: Held, bytes: u64) -> Memory {
        let memory = Memory { index: self.next_memory, address: held.address(), bytes };
        self.memory.insert(memory.index, (held, bytes));
        self.next_memory += 1;
        memory
    }

    fn held(&self, memory: Memory) -> Result<&Held> {
        let known = self.memory.get(&memory.index);
        let known = known.filter(|(held, bytes)| (held.address(), *bytes) == (memory.address, memory.bytes));
        known.map(|(held, _)| held).ok_or(Error::Memory(memory.index))
    }

    /// Returns the memory's buffer, or `None` if the guest kernel did not allocate the memory.
    fn buffer(&self, memory: Memory) -> Result<Option<&Buffer>> {
        Ok(match self.held(memory)? {
            Held::Own(buffer) => Some(buffer),
            Held::Segment { .. } | Held::Foreign { .. } => None,
        })
    }

    fn spot(&self, memory: Memory, offset: u64) -> Result<Spot<'_>> {
        Ok(Spot { address: memory.address + offset, buffer: self.buffer(memory)? })
    }

    /// Checks a CPU access. Returns the buffer and the offset.
    fn by_cpu(&self, memory: Memory, offset: u64, bytes: usize) -> Result<(&Buffer, usize)> {
        let what = "CPU access to segments: copy them";
        let buffer = self.buffer(memory)?.ok_or(Error::Unsupported { device: self.name(), what })?;
        let size = buffer.size();
        let inside = offset.checked_add(bytes as u64).is_some_and(|end| end <= size);
        if inside { Ok((buffer, offset as usize)) } else { Err(Error::Range { offset, bytes: bytes as u64, size }) }
    }

    /// Returns an error if the stamp of a completed submission is missing.
    fn check_stamp(&self, number: u64) -> Result<()> {
        // The stamp of an older submission was checked when its push buffer was reused.
        let stamp = self.channel.stamp(number)?;
        if stamp.is_none_or(|stamp| stamp == number as u32) { Ok(()) } else { Err(Error::Lost(self.verdict())) }
    }

    /// Appends the stamp with the submission's number to a push buffer, and submits the push buffer.
    fn submit(&self, mut push: Push, uses: &[Use<'_>]) -> Result<Fence> {
        let number = self.channel.submitted() + 1;
        let pushbuffer = self.channel.next_pushbuffer()?;
        if number > self.in_flight {
            self.check_stamp(number - self.in_flight)?;
        }
        methods::wait_for_idle(&mut push);
        methods::stamp(&mut push, pushbuffer.address() + STAMP_AT, number as u32);
        let list: Vec<Use<'_>> = uses.iter().copied().chain([Use::write(pushbuffer)]).collect();
        let lost = |error: Error| Error::Lost(format!("{}: {error}", self.verdict()));
        self.channel.submit(&push, &list).map(Fence::new).map_err(lost)
    }

    /// Submits an M2MF copy that waits for all earlier grids. Returns the copy's fence, and the number of its
    /// rectangles.
    fn submit_copy(&self, from: Spot<'_>, to: Spot<'_>, bytes: u64) -> Result<(Fence, u64)> {
        let rects = linear(from.address, to.address, bytes, Engine::M2mf.most_lines());
        let uses: Vec<Use<'_>> = from.buffer.map(Use::read).into_iter().chain(to.buffer.map(Use::write)).collect();
        let mut push = Push::default();
        // M2MF does not implicitly wait for grids.
        methods::wait_for_idle(&mut push);
        for rect in &rects {
            if !push.has_room() {
                self.submit(std::mem::take(&mut push), &uses)?;
            }
            push.copy(Engine::M2mf, rect);
        }
        Ok((self.submit(push, &uses)?, rects.len() as u64))
    }

    fn verdict(&self) -> String {
        format!("channel {} accepts no more work: see the kernel log", self.channel.number())
    }

    /// Ensures that there are at least `bytes` bytes of local memory per thread.
    fn provide_local(&mut self, bytes: u32) -> Result<()> {
        let wanted = methods::local_area(u64::from(self.multiprocessors), bytes);
        if self.local.as_ref().is_some_and(|local| local.size() >= wanted) {
            return Ok(());
        }
        let local = Buffer::new(&self.device, Domain::Vram, wanted)?;
        let mut push = Push::default();
        methods::wait_for_idle(&mut push);
        methods::set_local(&mut push, Area { address: local.address(), bytes: local.size() });
        self.submit(push, &[Use::write(&local)])?;
        // The guest kernel keeps the old local memory mapped while work uses it.
        self.local = Some(local);
        Ok(())
    }

    /// Reads a launch's stamp. Returns its payload, and the GPU time in nanoseconds.
    fn read_stamp(&self, at: u64) -> Result<(u32, u64)> {
        let Some(stamps) = &self.stamps else { return Ok((0, 0)) };
        let mut bytes = [0; STAMP_BYTES as usize];
        stamps.map()?.read(at as usize, &mut bytes);
        let [low, high] =
            [&bytes[..8], &bytes[8..]].map(|half| u64::from_le_bytes(half.try_into().unwrap_or_default()));
        Ok((low as u32, high))
    }

    /// Adds the GPU times of the launches before number `until`, all of which have completed.
    fn collect_times(&mut self, until: u64) -> Result<()> {
        for number in self.collected..until {
            let at = stamps_at(number);
            let [(begin, from), (end, to)] = [self.read_stamp(at)?, self.read_stamp(at + STAMP_BYTES)?];
            let mark = mark(number);
            if (begin, end) != (mark, mark) {
                return Err(Error::Lost(format!("a kernel did not complete; {}", self.verdict())));
            }
            if from > to {
                let times = format!("a kernel ended at {to} ns and began at {from} ns of the card's clock");
                return Err(Error::Lost(times));
            }
            self.done.gpu_time += Duration::from_nanos(to - from);
            self.ends.iter_mut().for_each(|ends| ends.push(to));
        }
        self.collected = self.collected.max(until);
        Ok(())
    }

    fn mediator(&mut self) -> Result<Arc<Mediator>> {
        if let Some(mediator) = &self.mediator {
            return Ok(Arc::clone(mediator));
        }
        let mediator = Mediator::open()?;
        self.mediator = Some(Arc::clone(&mediator));
        Ok(mediator)
    }
}

/// Returns the offset of a launch's two stamps.
fn stamps_at(number: u64) -> u64 {
    number % STAMPED * 2 * STAMP_BYTES
}

/// Returns the payload of a launch's stamps. It differs from the payloads of earlier launches at the same offset.
fn mark(number: u64) -> u32 {
    (number as u32).wrapping_add(1)
}

impl Backend for Nouveau {
    fn name(&self) -> &'static str {
        "nouveau"
    }

    fn allocate(&mut self, place: Place, bytes: u64) -> Result<Memory> {
        let domain = match place {
            Place::Vram => Domain::Vram,
            Place::Ram => Domain::Gart,
        };
        let buffer = Buffer::new(&self.device, domain, bytes.max(1))?;
        let (address, end) = (buffer.address(), buffer.address() + buffer.size());
        if address < methods::WINDOWS.end && end > methods::WINDOWS.start {
            let why = format!("the kernel chose {address:#x}, where kernels see local and shared memory");
            return Err(Error::Allocation { place, bytes, why });
        }
        Ok(self.insert(Held::Own(buffer), bytes))
    }

    fn free(&mut self, memory: Memory) -> Result<()> {
        if let Held::Segment { .. } = self.held(memory)? {
            return Err(Error::Unsupported { device: self.name(), what: "freeing a segment: detach it" });
        }
        self.memory.remove(&memory.index);
        Ok(())
    }

    fn place(&self, memory: Memory) -> Result<Place> {
        let in_ram = self.buffer(memory)?.is_some_and(|buffer| buffer.domain() == Domain::Gart);
        Ok(if in_ram { Place::Ram } else { Place::Vram })
    }

    fn write_by_cpu(&mut self, memory: Memory, offset: u64, bytes: &[u8]) -> Result<()> {
        let (buffer, at) = self.by_cpu(memory, offset, bytes.len())?;
        buffer.map()?.write(at, bytes);
        self.done.cpu_bytes += bytes.len() as u64;
        Ok(())
    }

    fn read_by_cpu(&mut self, memory: Memory, offset: u64, bytes: &mut [u8]) -> Result<()> {
        let (buffer, at) = self.by_cpu(memory, offset, bytes.len())?;
        buffer.map()?.read(at, bytes);
        self.done.cpu_bytes += bytes.len() as u64;
        Ok(())
    }

    fn copy(&mut self, copy: &Copy) -> Result<Fence> {
        let (from, to) = (self.spot(copy.from, copy.from_offset)?, self.spot(copy.to, copy.to_offset)?);
        let (fence, copies) = self.submit_copy(from, to, copy.bytes)?;
        self.done.copies += copies;
        if self.place(copy.from)? != self.place(copy.to)? {
            self.done.link_bytes += copy.bytes;
        }
        Ok(fence)
    }

    fn copy_both(&mut self, copies: [&Copy; 2]) -> Result<()> {
        self.on_both_engines(copies)
    }

    fn load(&mut self, image: Image<'_>) -> Result<Module> {
        let program = methods::program(image, self.name())?;
        let local = program.kernels.iter().map(|kernel| kernel.local_bytes).max().unwrap_or(0);
        self.provide_local(local)?;
        let bytes = program.bytes();
        // The card prefetches code beyond the program counter.
        const FETCH_AHEAD_BYTES: u64 = 0x100;
        let code = Buffer::new(&self.device, Domain::Vram, bytes.len() as u64 + FETCH_AHEAD_BYTES)?;
        if !bytes.is_empty() {
            let length = bytes.len() as u64;
            let (_, copies) = if length <= SMALL_PROGRAM_BYTES {
                // The copy is one submission, whose methods end before the program.
                let pushbuffer = self.channel.next_pushbuffer()?;
                pushbuffer.map()?.write(PROGRAM_AT as usize, &bytes);
                let staging = Spot { address: pushbuffer.address() + PROGRAM_AT, buffer: Some(pushbuffer) };
                self.submit_copy(staging, Spot::from(&code), length)?
            } else {
                // The guest kernel keeps the staging buffer until the copy has completed.
                let staging = Buffer::new(&self.device, Domain::Gart, length)?;
                staging.map()?.write(0, &bytes);
                self.submit_copy(Spot::from(&staging), Spot::from(&code), length)?
            };
            self.done.copies += copies;
            self.done.cpu_bytes += length;
            self.done.link_bytes += length;
        }
        self.modules.push(Loaded { code, program: program.clone() });
        Ok(Module { index: self.modules.len() - 1 })
    }

    fn launch(&mut self, module: Module, name: &str, grid: Grid, params: &Params, uses: &[Memory]) -> Result<Fence> {
        let number = self.measured;
        if self.measures && self.stamps.is_none() {
            let bytes = STAMPED * 2 * STAMP_BYTES;
            let stamps = Buffer::new(&self.device, Domain::Gart, bytes)?;
            stamps.map()?.write(0, &vec![0; bytes as usize]);
            self.stamps = Some(stamps);
        }
        if self.measures && number - self.collected == STAMPED {
            // The previous submission waited for its push buffer, so all launches before `number - in_flight` have
            // completed.
            self.collect_times(number - self.in_flight)?;
        }
        let loaded = self.modules.get(module.index).ok_or(Error::Module(module.index))?;
        let kernel = methods::kernel(&loaded.program, name, grid, params)?;
        let mut list = vec![Use::read(&loaded.code), Use::write(&self.bank)];
        list.extend(self.local.iter().map(Use::write));
        for used in uses {
            list.extend(self.buffer(*used)?.map(|buffer| Use { reads: true, ..Use::write(buffer) }));
        }
        let mut push = Push::default();
        let stamps = self.stamps.as_ref().filter(|_| self.measures);
        let mark = mark(number);
        if let Some(stamps) = stamps {
            methods::stamp(&mut push, stamps.address() + stamps_at(number), mark);
            list.push(Use::write(stamps));
        }
        let code = Code { address: loaded.code.address(), kernel };
        methods::launch(&mut push, code, grid, params, self.bank.address());
        if let Some(stamps) = stamps {
            methods::wait_for_idle(&mut push);
            methods::stamp(&mut push, stamps.address() + stamps_at(number) + STAMP_BYTES, mark);
        }
        let fence = self.submit(push, &list)?;
        self.measured += u64::from(self.measures);
        self.done.launches += 1;
        Ok(fence)
    }

    fn last(&self) -> Option<Fence> {
        Some(self.channel.submitted()).filter(|number| *number > 0).map(Fence::new)
    }

    fn is_done(&mut self, fence: Fence) -> Result<bool> {
        Ok(fence.number() <= self.awaited || self.channel.is_done(fence.number())?)
    }

    fn wait(&mut self, fence: Fence) -> Result<()> {
        let number = fence.number().min(self.channel.submitted());
        if number <= self.awaited {
            return Ok(());
        }
        self.channel.wait(number)?;
        self.check_stamp(number)?;
        if number == self.channel.submitted() {
            self.collect_times(self.measured)?;
        }
        self.awaited = number;
        Ok(())
    }

    fn host_address(&mut self, memory: Memory) -> Result<NonNull<u8>> {
        let buffer = self.buffer(memory)?.filter(|buffer| buffer.domain() == Domain::Gart);
        let what = "CPU addresses for card memory";
        let buffer = buffer.ok_or(Error::Unsupported { device: self.name(), what })?;
        Ok(buffer.map()?.start())
    }

    fn share(&mut self, memory: Memory) -> Result<Shared> {
        let what = "references to segments: attach the segment";
        let buffer = self.buffer(memory)?.ok_or(Error::Unsupported { device: self.name(), what })?;
        Ok(Shared::new(memory.bytes, Exported { descriptor: buffer.export()?, domain: buffer.domain() }))
    }

    fn reference(&mut self, shared: &Shared) -> Result<Memory> {
        let what = "references to another type of device's memory";
        let source = shared.source::<Exported>();
        let Exported { descriptor, domain } = source.ok_or(Error::Unsupported { device: self.name(), what })?;
        let buffer = Buffer::import(&self.device, descriptor, *domain)?;
        Ok(self.insert(Held::Own(buffer), shared.bytes))
    }

    fn has_segments(&mut self) -> bool {
        self.mediator().is_ok()
    }

    fn segment(&mut self, request: SegmentRequest) -> Result<Segment> {
        let SegmentRequest { key, bytes, create, group, mode, group_writes } = request;
        let flags = if create { mediator::CREATE } else { 0 } | if group { mediator::ABROAD } else { 0 };
        let abroad = match (group, group_writes) {
            (false, _) => 0,
            (true, false) => mediator::ABROAD_READ,
            (true, true) => mediator::ABROAD_READ_WRITE,
        };
        let id = self.mediator()?.share_get(mediator::Wanted { key, bytes, flags, mode, abroad })?;
        Ok(Segment { id, bytes })
    }

    fn attach(&mut self, segment: Segment, read_only: bool) -> Result<Memory> {
        let flags = if read_only { mediator::READ_ONLY } else { 0 };
        let address = self.mediator()?.attach(segment.id, self.number(), flags)?;
        Ok(self.insert(Held::Segment { address, id: segment.id }, segment.bytes))
    }

    fn detach(&mut self, memory: Memory) -> Result<()> {
        let Held::Segment { id, .. } = *self.held(memory)? else { return Err(Error::Memory(memory.index)) };
        self.mediator()?.detach(id, self.number())?;
        self.memory.remove(&memory.index);
        Ok(())
    }

    fn remove(&mut self, segment: Segment) -> Result<()> {
        self.mediator()?.remove(segment.id)
    }

    fn attached(&mut self, segment: Segment) -> Result<u64> {
        self.mediator()?.attached(segment.id)
    }
}
