//! The GPU through nouveau's ioctls: a channel with M2MF and compute, buffers, programs, launches.
//!
//! Transfers to and from VRAM go through a staging buffer and M2MF; buffers in RAM are mapped. All work of the channel
//! is executed in order. Time stamps before and after each launch give its time on the GPU. If a stamp is missing after
//! the guest's kernel has reported the end, that launch and the later ones were cut short.
//!
//! Launches without a wait run ahead by as many submissions as the channel has pushbuffers.

mod methods;

use std::rc::Rc;
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use workloads::{Gpu, Grid, Module, Params, Place};

use crate::device::{Buffer, Channel, Device, Domain, RING, Use};
use crate::push::{Engine, Object, Push, linear};
use crate::uapi::param;
use methods::{Area, Code, STAMP_BYTES};

/// Size of the staging buffer in bytes.
const STAGING: u64 = 2 << 20;
/// Number of launches whose stamps are kept.
const STAMPED: u64 = 128;
/// Maximum number of submissions in flight: each needs its own stamps.
pub const MOST_IN_FLIGHT: u64 = STAMPED / 2;
/// Offset of the stamp of [`Gpu::finish`] in the buffer of stamps; pairs of launches come before it.
const LAST_STAMP: u64 = STAMPED * 2 * STAMP_BYTES;

/// Work that was done on a [`Guest`].
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Done {
    /// Number of copies launched.
    pub copies: u64,
    /// Number of grids launched.
    pub launches: u64,
    /// Number of bytes that the CPU copied to and from memory that the card accesses.
    pub cpu_bytes: u64,
    /// Number of bytes that the card copied between such memory and its own.
    pub link_bytes: u64,
    /// Time that the GPU spent on grids, by its own clock.
    pub gpu_time: Duration,
}

#[derive(Debug)]
struct Loaded {
    code: Buffer,
    program: sm20::Program,
}

/// Memory that compute kernels can use.
#[derive(Debug)]
enum Held {
    /// A buffer of the guest's kernel; every submission that uses the buffer must name it.
    Own(Buffer),
    /// Memory at a virtual address that the guest's kernel did not allocate.
    Foreign(u64),
}

/// An offset in memory that compute kernels can use.
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

/// A channel that computes.
#[derive(Debug)]
pub struct Guest {
    device: Rc<Device>,
    channel: Channel,
    buffers: Vec<Option<Held>>,
    modules: Vec<Loaded>,
    staging: Buffer,
    bank: Buffer,
    stamps: Buffer,
    local: Option<Buffer>,
    multiprocessors: u32,
    /// Maximum number of submissions in flight.
    in_flight: u64,
    /// Payload of the next wait's stamp, which differs from all earlier payloads.
    sequence: u32,
    /// Number of launches, from the first on, whose stamps were read.
    collected: u64,
    /// Set if work was submitted since the last wait.
    busy: bool,
    done: Done,
    /// End times of launches, in ns of the card's clock, if they are recorded.
    ends: Option<Vec<u64>>,
}

impl Guest {
    /// Creates a channel.
    pub fn new(device: &Rc<Device>) -> Result<Self> {
        Self::running_ahead(device, RING as u64)
    }

    /// Creates a channel in which a launch waits for the oldest submission once `in_flight` submissions are in flight.
    pub fn running_ahead(device: &Rc<Device>, in_flight: u64) -> Result<Self> {
        ensure!((1..=MOST_IN_FLIGHT).contains(&in_flight), "{in_flight} in flight: from 1 to {MOST_IN_FLIGHT}");
        let channel = Channel::with_ring(device, usize::try_from(in_flight)?)?;
        channel.add(Engine::M2mf.object())?;
        channel.add(Object::COMPUTE)?;
        let multiprocessors = (device.parameter(param::GRAPH_UNITS)? >> 8) as u32 & 0xff_ffff;
        ensure!(multiprocessors > 0, "the kernel says that the card has no multiprocessors");
        let bank = Buffer::new(device, Domain::Vram, u64::from(methods::BANK_BYTES))?;
        let stamps = Buffer::new(device, Domain::Gart, LAST_STAMP + STAMP_BYTES)?;
        stamps.map()?.write(0, &vec![0; usize::try_from(stamps.size())?]);
        let mut push = Push::default();
        methods::set_up(&mut push, multiprocessors, bank.address());
        channel.submit(&push, &[Use::write(&bank)])?;
        Ok(Self {
            device: Rc::clone(device),
            channel,
            buffers: Vec::new(),
            modules: Vec::new(),
            staging: Buffer::new(device, Domain::Gart, STAGING)?,
            bank,
            stamps,
            local: None,
            multiprocessors,
            in_flight,
            sequence: 1,
            collected: 0,
            busy: true,
            done: Done::default(),
            ends: None,
        })
    }

    /// Returns the channel's number in the guest.
    pub fn number(&self) -> i32 {
        self.channel.number()
    }

    /// From now on, records the end time of each launch.
    pub fn keep_ends(&mut self) {
        self.ends = Some(Vec::new());
    }

    /// Returns the recorded end times of completed launches, in ns of the card's clock, and stops recording.
    pub fn take_ends(&mut self) -> Option<Vec<u64>> {
        self.ends.take()
    }

    /// Returns the work done so far; launches without a wait have no time yet.
    pub fn done(&self) -> Done {
        self.done
    }

    /// Returns the current first word of a buffer in RAM, without waiting.
    pub fn peek(&self, buffer: workloads::Buffer) -> Result<u32> {
        let mut word = [0; 4];
        self.in_ram(buffer)?.context("a buffer in RAM")?.map()?.read(0, &mut word);
        Ok(u32::from_le_bytes(word))
    }

    /// Registers a buffer at `address` of the channel's address space that the kernel did not allocate. The buffer must
    /// be freed before that memory.
    pub fn adopt(&mut self, address: u64, bytes: u64) -> workloads::Buffer {
        self.buffers.push(Some(Held::Foreign(address)));
        workloads::Buffer { index: self.buffers.len() - 1, address, bytes }
    }

    fn held(&self, buffer: workloads::Buffer) -> Result<&Held> {
        self.buffers.get(buffer.index).and_then(Option::as_ref).context("a buffer that is not there")
    }

    /// Returns the buffer, if the memory is a buffer of the guest's kernel.
    fn buffer(&self, buffer: workloads::Buffer) -> Result<Option<&Buffer>> {
        Ok(match self.held(buffer)? {
            Held::Own(buffer) => Some(buffer),
            Held::Foreign(_) => None,
        })
    }

    /// Returns the buffer as CPU memory; `None` if it is in VRAM.
    fn in_ram(&self, buffer: workloads::Buffer) -> Result<Option<&Buffer>> {
        Ok(self.buffer(buffer)?.filter(|buffer| buffer.domain() == Domain::Gart))
    }

    fn spot(&self, buffer: workloads::Buffer, at: u64, bytes: u64) -> Result<Spot<'_>> {
        let inside = at.checked_add(bytes).is_some_and(|end| end <= buffer.bytes);
        ensure!(inside, "{bytes} bytes at {at:#x} of a buffer of {}", buffer.bytes);
        Ok(match self.held(buffer)? {
            Held::Own(buffer) => Spot { address: buffer.address() + at, buffer: Some(buffer) },
            Held::Foreign(address) => Spot { address: address + at, buffer: None },
        })
    }

    fn submit(&self, push: &Push, uses: &[Use<'_>]) -> Result<()> {
        self.channel.submit(push, uses).with_context(|| self.verdict())
    }

    fn verdict(&self) -> String {
        format!("channel {} takes no work any more: the kernel's log says why", self.channel.number())
    }

    /// Copies through M2MF, after all grids. Returns the number of copies.
    fn copy_by_gpu(&self, from: Spot<'_>, to: Spot<'_>, bytes: u64) -> Result<u64> {
        let rects = linear(from.address, to.address, bytes, Engine::M2mf.most_lines());
        let uses: Vec<Use<'_>> = from.buffer.map(Use::read).into_iter().chain(to.buffer.map(Use::write)).collect();
        let mut push = Push::default();
        methods::wait_for_idle(&mut push);
        for rect in &rects {
            if !push.has_room() {
                self.submit(&std::mem::take(&mut push), &uses)?;
            }
            push.copy(Engine::M2mf, rect);
        }
        self.submit(&push, &uses)?;
        Ok(rects.len() as u64)
    }

    /// Counts bytes that went through the staging buffer.
    fn staged(&mut self, bytes: usize) {
        self.done.cpu_bytes += bytes as u64;
        self.done.link_bytes += bytes as u64;
        self.busy = true;
    }

    /// Makes local memory large enough for `bytes` bytes per thread.
    fn provide_local(&mut self, bytes: u32) -> Result<()> {
        let wanted = methods::local_area(u64::from(self.multiprocessors), bytes);
        if self.local.as_ref().is_some_and(|local| local.size() >= wanted) {
            return Ok(());
        }
        let local = Buffer::new(&self.device, Domain::Vram, wanted)?;
        let mut push = Push::default();
        methods::wait_for_idle(&mut push);
        methods::set_local(&mut push, Area { address: local.address(), bytes: local.size() });
        self.submit(&push, &[Use::write(&local)])?;
        // The guest's kernel keeps the old local memory mapped until its users end.
        self.local = Some(local);
        Ok(())
    }

    /// Reads a stamp: its payload, and the GPU's time in nanoseconds.
    fn read_stamp(&self, at: u64) -> Result<(u32, u64)> {
        let mut bytes = [0; STAMP_BYTES as usize];
        self.stamps.map()?.read(usize::try_from(at)?, &mut bytes);
        let [low, high] =
            [&bytes[..8], &bytes[8..]].map(|half| u64::from_le_bytes(half.try_into().unwrap_or_default()));
        Ok((low as u32, high))
    }

    /// Adds the times of the ended launches up to number `until`.
    fn collect_times(&mut self, until: u64) -> Result<()> {
        for number in self.collected..until {
            let at = stamps_at(number);
            let [(begin, from), (end, to)] = [self.read_stamp(at)?, self.read_stamp(at + STAMP_BYTES)?];
            let mark = mark(number);
            ensure!((begin, end) == (mark, mark), "a kernel was cut short: {}", self.verdict());
            ensure!(from <= to, "a kernel ended at {to} ns and began at {from} ns of the card's clock");
            self.done.gpu_time += Duration::from_nanos(to - from);
            self.ends.iter_mut().for_each(|ends| ends.push(to));
        }
        self.collected = self.collected.max(until);
        Ok(())
    }
}

/// Returns the offset of the two stamps of a launch.
fn stamps_at(number: u64) -> u64 {
    number % STAMPED * 2 * STAMP_BYTES
}

/// Returns the payload of the stamps of a launch, which differs from the payload of earlier launches with the same
/// stamps.
fn mark(number: u64) -> u32 {
    (number as u32).wrapping_add(1)
}

impl Gpu for Guest {
    fn allocate(&mut self, place: Place, bytes: u64) -> Result<workloads::Buffer> {
        let domain = match place {
            Place::Vram => Domain::Vram,
            Place::Ram => Domain::Gart,
        };
        let buffer = Buffer::new(&self.device, domain, bytes.max(1))?;
        let (address, end) = (buffer.address(), buffer.address() + buffer.size());
        let windowed = address < methods::WINDOWS.end && end > methods::WINDOWS.start;
        ensure!(!windowed, "a buffer at {address:#x}, where kernels see local and shared memory");
        self.buffers.push(Some(Held::Own(buffer)));
        Ok(workloads::Buffer { index: self.buffers.len() - 1, address, bytes })
    }

    fn free(&mut self, buffer: workloads::Buffer) -> Result<()> {
        self.held(buffer)?;
        self.buffers[buffer.index] = None;
        Ok(())
    }

    fn upload(&mut self, buffer: workloads::Buffer, at: u64, bytes: &[u8]) -> Result<()> {
        let target = self.spot(buffer, at, bytes.len() as u64)?;
        if let Some(target) = self.in_ram(buffer)? {
            target.wait(true)?;
            target.map()?.write(usize::try_from(at)?, bytes);
            self.done.cpu_bytes += bytes.len() as u64;
            return Ok(());
        }
        let mut copies = 0;
        for (offset, piece) in (0..).step_by(STAGING as usize).zip(bytes.chunks(STAGING as usize)) {
            self.staging.wait(true)?;
            self.staging.map()?.write(0, piece);
            let target = Spot { address: target.address + offset, ..target };
            copies += self.copy_by_gpu(Spot::from(&self.staging), target, piece.len() as u64)?;
        }
        self.done.copies += copies;
        self.staged(bytes.len());
        Ok(())
    }

    fn download(&mut self, buffer: workloads::Buffer, at: u64, bytes: &mut [u8]) -> Result<()> {
        self.finish()?;
        let source = self.spot(buffer, at, bytes.len() as u64)?;
        if let Some(source) = self.in_ram(buffer)? {
            source.map()?.read(usize::try_from(at)?, bytes);
            self.done.cpu_bytes += bytes.len() as u64;
            return Ok(());
        }
        let mut copies = 0;
        for (offset, piece) in (0..).step_by(STAGING as usize).zip(bytes.chunks_mut(STAGING as usize)) {
            let source = Spot { address: source.address + offset, ..source };
            copies += self.copy_by_gpu(source, Spot::from(&self.staging), piece.len() as u64)?;
            self.staging.wait(false)?;
            self.staging.map()?.read(0, piece);
        }
        self.done.copies += copies;
        self.staged(bytes.len());
        self.finish()
    }

    fn copy(&mut self, from: workloads::Buffer, to: workloads::Buffer, bytes: u64) -> Result<()> {
        let (source, target) = (self.spot(from, 0, bytes)?, self.spot(to, 0, bytes)?);
        self.done.copies += self.copy_by_gpu(source, target, bytes)?;
        if self.in_ram(from)?.is_some() != self.in_ram(to)?.is_some() {
            self.done.link_bytes += bytes;
        }
        self.busy = true;
        Ok(())
    }

    fn load(&mut self, program: &sm20::Program) -> Result<Module> {
        let local = program.kernels.iter().map(|kernel| kernel.local_bytes).max().unwrap_or(0);
        self.provide_local(local)?;
        let bytes = program.bytes();
        // The card reads code ahead of the program counter.
        const FETCH_AHEAD_BYTES: u64 = 0x100;
        let buffer = self.allocate(Place::Vram, bytes.len() as u64 + FETCH_AHEAD_BYTES)?;
        self.upload(buffer, 0, &bytes)?;
        let Some(Held::Own(code)) = self.buffers[buffer.index].take() else { bail!("a buffer that was just made") };
        self.modules.push(Loaded { code, program: program.clone() });
        Ok(Module { index: self.modules.len() - 1 })
    }

    fn launch(
        &mut self,
        module: Module,
        name: &str,
        grid: Grid,
        params: &Params,
        uses: &[workloads::Buffer],
    ) -> Result<()> {
        let number = self.done.launches;
        if number - self.collected == STAMPED {
            // The previous submission waited for its pushbuffer, so all launches except the last have ended.
            self.collect_times(number - self.in_flight)?;
        }
        let loaded = self.modules.get(module.index).context("a program that is not there")?;
        let kernel = loaded.program.kernel(name).with_context(|| format!("no kernel {name}"))?;
        let given = params.bytes().len();
        ensure!(
            given as u64 == u64::from(kernel.params),
            "{name} has {} bytes of parameters, not {given}",
            kernel.params
        );
        let mut list = vec![Use::read(&loaded.code), Use::write(&self.bank), Use::write(&self.stamps)];
        list.extend(self.local.iter().map(Use::write));
        for used in uses {
            list.extend(self.buffer(*used)?.map(|buffer| Use { reads: true, ..Use::write(buffer) }));
        }
        let (at, mark) = (self.stamps.address() + stamps_at(number), mark(number));
        let mut push = Push::default();
        methods::stamp(&mut push, at, mark);
        let code = Code { address: loaded.code.address(), kernel };
        methods::launch(&mut push, code, grid, params, self.bank.address());
        methods::wait_for_idle(&mut push);
        methods::stamp(&mut push, at + STAMP_BYTES, mark);
        self.submit(&push, &list)?;
        self.done.launches += 1;
        self.busy = true;
        Ok(())
    }

    fn finish(&mut self) -> Result<()> {
        if !self.busy {
            return Ok(());
        }
        let mut push = Push::default();
        methods::wait_for_idle(&mut push);
        methods::stamp(&mut push, self.stamps.address() + LAST_STAMP, self.sequence);
        self.submit(&push, &[Use::write(&self.stamps)])?;
        self.stamps.wait(false)?;
        let (payload, _) = self.read_stamp(LAST_STAMP)?;
        ensure!(payload == self.sequence, "work was cut short: {}", self.verdict());
        self.collect_times(self.done.launches)?;
        self.busy = false;
        self.sequence = self.sequence.wrapping_add(1);
        Ok(())
    }
}
