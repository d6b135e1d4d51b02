//! The DRM device, its buffers and channels.
//!
//! UNSAFETY: the `ioctl` system call. [`Request`] pairs each argument type with its number, so the kernel reads and
//! writes exactly the argument; the two arguments that hold addresses are built next to their calls.

#![expect(unsafe_code, reason = "ioctl")]

use std::cell::{Cell, OnceCell};
use std::fs::{File, OpenOptions};
use std::io;
use std::os::fd::AsRawFd;
use std::path::Path;
use std::rc::Rc;

use anyhow::{Context, Result, ensure};

use crate::access::Mapping;
use crate::push::{MOST_WORDS, Object, Push};
use crate::uapi::{self, Request};

/// An open render node of nouveau.
#[derive(Debug)]
pub struct Device {
    file: File,
}

impl Device {
    /// Opens the node and checks that it is nouveau's.
    pub fn open(node: &Path) -> Result<Rc<Self>> {
        let file = OpenOptions::new().read(true).write(true).open(node);
        let device = Self { file: file.with_context(|| format!("{}: is nouveau loaded?", node.display()))? };
        let mut name = [0u8; 32];
        let mut version = uapi::Version {
            name_length: name.len(),
            name: name.as_mut_ptr().expose_provenance(),
            ..Default::default()
        };
        device.call(&mut version)?;
        let length = version.name_length.min(name.len());
        ensure!(&name[..length] == b"nouveau", "{}: driver is {:?}", node.display(), String::from_utf8_lossy(&name));
        Ok(Rc::new(device))
    }

    /// Returns the value of a parameter, one of [`uapi::param`].
    pub fn parameter(&self, param: u64) -> Result<u64> {
        let mut argument = uapi::GetParam { param, value: 0 };
        self.call(&mut argument).with_context(|| format!("parameter {param}"))?;
        Ok(argument.value)
    }

    fn call<T: Request>(&self, argument: &mut T) -> io::Result<()> {
        call(&self.file, argument)
    }
}

/// Makes a request of a driver. The argument contains no addresses except those that this file writes to it.
pub fn call<T: Request>(file: &File, argument: &mut T) -> io::Result<()> {
    loop {
        // SAFETY: the number contains the number of bytes that the kernel may read and write, which is the size of `T`.
        let result =
            unsafe { libc::ioctl(file.as_raw_fd(), libc::c_ulong::from(T::NUMBER), std::ptr::from_mut(argument)) };
        if result >= 0 {
            return Ok(());
        }
        let error = io::Error::last_os_error();
        // The kernel may request a retry after a signal or a reservation.
        if !matches!(error.raw_os_error(), Some(libc::EINTR | libc::EAGAIN)) {
            return Err(io::Error::new(error.kind(), format!("{}: {error}", T::NAME)));
        }
    }
}

/// Memory for a buffer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Domain {
    /// VRAM only.
    Vram,
    /// Guest RAM only.
    Gart,
    /// Either memory: VRAM if the buffer fits. The kernel moves the buffer as requested.
    Either,
}

impl Domain {
    /// Returns the kernel's bits.
    pub fn bits(self) -> u32 {
        match self {
            Self::Vram => uapi::DOMAIN_VRAM,
            Self::Gart => uapi::DOMAIN_GART,
            Self::Either => uapi::DOMAIN_VRAM | uapi::DOMAIN_GART,
        }
    }

    /// Returns the name on the command line.
    pub fn name(self) -> &'static str {
        match self {
            Self::Vram => "vram",
            Self::Gart => "gart",
            Self::Either => "either",
        }
    }
}

/// A buffer of GPU memory.
#[derive(Debug)]
pub struct Buffer {
    device: Rc<Device>,
    handle: u32,
    domain: Domain,
    size: u64,
    address: u64,
    map_handle: u64,
    mapping: OnceCell<Mapping>,
}

impl Buffer {
    /// Allocates a buffer; the kernel rounds the size up to pages.
    pub fn new(device: &Rc<Device>, domain: Domain, size: u64) -> Result<Self> {
        let info = uapi::GemInfo {
            size,
            domain: domain.bits() | uapi::DOMAIN_MAPPABLE,
            tile_flags: uapi::TILE_NONCONTIG,
            ..Default::default()
        };
        let mut argument = uapi::GemNew { info, ..Default::default() };
        device.call(&mut argument).with_context(|| format!("a buffer of {size} bytes in {}", domain.name()))?;
        let uapi::GemInfo { handle, size, offset: address, map_handle, .. } = argument.info;
        Ok(Self { device: Rc::clone(device), handle, domain, size, address, map_handle, mapping: OnceCell::new() })
    }

    /// Returns the size in bytes, rounded up by the kernel.
    pub fn size(&self) -> u64 {
        self.size
    }

    /// Returns the GPU virtual address; moves do not change it.
    pub fn address(&self) -> u64 {
        self.address
    }

    /// Returns the memory in which the buffer may be.
    pub fn domain(&self) -> Domain {
        self.domain
    }

    /// Queries the memory in which the buffer currently is: [`Domain::Vram`] or [`Domain::Gart`].
    pub fn place(&self) -> Result<Domain> {
        let mut info = uapi::GemInfo { handle: self.handle, ..Default::default() };
        self.device.call(&mut info)?;
        ensure!(info.offset == self.address, "the GPU address of a buffer changed");
        Ok(if info.domain & uapi::DOMAIN_VRAM == 0 { Domain::Gart } else { Domain::Vram })
    }

    /// Returns the CPU's view, which goes through BAR1 while the buffer is in VRAM.
    pub fn map(&self) -> Result<&Mapping> {
        if let Some(mapping) = self.mapping.get() {
            return Ok(mapping);
        }
        let length = usize::try_from(self.size)?;
        let mapping = Mapping::new(&self.device.file, self.map_handle, length).context("mapping a buffer")?;
        Ok(self.mapping.get_or_init(|| mapping))
    }

    /// Unmaps the CPU's view, so that the kernel can reuse its range of BAR1.
    pub fn unmap(&mut self) {
        self.mapping.take();
    }

    /// Waits until the GPU has written the buffer, and with `to_write` also until it has read the buffer.
    pub fn wait(&self, to_write: bool) -> Result<()> {
        let flags = if to_write { uapi::CPU_PREP_WRITE } else { 0 };
        let mut prepare = uapi::GemCpuPrep { handle: self.handle, flags };
        self.device.call(&mut prepare).context("waiting for the GPU")?;
        self.device.call(&mut uapi::GemCpuFini { handle: self.handle })?;
        Ok(())
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        self.mapping.take();
        // If the kernel refuses to close the handle, nothing can be done.
        let _ = self.device.call(&mut uapi::GemClose { handle: self.handle, pad: 0 });
    }
}

/// Use of a buffer by a submission.
#[derive(Debug, Clone, Copy)]
pub struct Use<'a> {
    /// The buffer.
    pub buffer: &'a Buffer,
    /// Set if the GPU reads the buffer.
    pub reads: bool,
    /// Set if the GPU writes the buffer.
    pub writes: bool,
    /// Memory in which the buffer must be during the submission; the kernel moves it there.
    pub place: Domain,
}

impl<'a> Use<'a> {
    /// Creates a use in which the GPU reads the buffer, in any memory.
    pub fn read(buffer: &'a Buffer) -> Self {
        Self { buffer, reads: true, writes: false, place: buffer.domain }
    }

    /// Creates a use in which the GPU writes the buffer, in any memory.
    pub fn write(buffer: &'a Buffer) -> Self {
        Self { buffer, reads: false, writes: true, place: buffer.domain }
    }

    /// Returns the same use in the given memory.
    pub fn at(self, place: Domain) -> Self {
        Self { place, ..self }
    }
}

/// Default number of pushbuffers of a channel that can be in flight at once.
pub const RING: usize = 8;

/// A GPU channel with its pushbuffers.
#[derive(Debug)]
pub struct Channel {
    device: Rc<Device>,
    number: i32,
    ring: Vec<Buffer>,
    next: Cell<usize>,
}

impl Channel {
    /// Allocates a channel without objects.
    pub fn new(device: &Rc<Device>) -> Result<Self> {
        Self::with_ring(device, RING)
    }

    /// Allocates a channel with a number of pushbuffers: a submission waits for the earlier one with the same
    /// pushbuffer.
    pub fn with_ring(device: &Rc<Device>, pushbuffers: usize) -> Result<Self> {
        ensure!(pushbuffers > 0, "a channel without a pushbuffer");
        let mut argument = uapi::ChannelAlloc::default();
        device.call(&mut argument)?;
        let mut channel =
            Self { device: Rc::clone(device), number: argument.channel, ring: Vec::new(), next: Cell::new(0) };
        for _ in 0..pushbuffers {
            channel.ring.push(Buffer::new(device, Domain::Gart, MOST_WORDS as u64 * 4)?);
        }
        Ok(channel)
    }

    /// Returns the channel's number in the guest.
    pub fn number(&self) -> i32 {
        self.number
    }

    /// Creates an object and binds it to its subchannel.
    pub fn add(&self, object: Object) -> Result<()> {
        let class = object.class;
        let mut argument =
            uapi::ObjectAlloc { channel: self.number, handle: 0xbeef_0000 | u32::from(class), class: class.into() };
        self.device.call(&mut argument).with_context(|| format!("an object of class {class:04x}"))?;
        let mut push = Push::default();
        push.bind(object);
        self.submit(&push, &[])
    }

    /// Submits a pushbuffer to the GPU; returns before the work is done.
    pub fn submit(&self, push: &Push, uses: &[Use<'_>]) -> Result<()> {
        let words = push.words();
        ensure!(!words.is_empty() && words.len() <= MOST_WORDS, "a pushbuffer of {} dwords", words.len());
        let index = self.next.get();
        self.next.set((index + 1) % self.ring.len());
        let buffer = &self.ring[index];
        // The GPU may still fetch from the buffer.
        buffer.wait(true)?;
        let bytes: Vec<u8> = words.iter().flat_map(|word| word.to_le_bytes()).collect();
        buffer.map()?.write(0, &bytes);

        let mut list = vec![entry(&Use::read(buffer))];
        for used in uses {
            // The list may contain each buffer only once.
            match list.iter_mut().find(|entry| entry.handle == used.buffer.handle) {
                Some(entry) => merge(entry, used),
                None => list.push(entry(used)),
            }
        }
        let mut pieces = [uapi::PushbufPush { length: bytes.len() as u64, ..Default::default() }];
        let mut argument = uapi::GemPushbuf {
            channel: u32::try_from(self.number)?,
            nr_buffers: u32::try_from(list.len())?,
            buffers: list.as_mut_ptr().expose_provenance() as u64,
            nr_push: u32::try_from(pieces.len())?,
            push: pieces.as_mut_ptr().expose_provenance() as u64,
            ..Default::default()
        };
        // Both lists live until the call returns.
        self.device.call(&mut argument).with_context(|| format!("a submission on channel {}", self.number))
    }
}

fn entry(used: &Use<'_>) -> uapi::PushbufBuffer {
    let place = used.place.bits();
    uapi::PushbufBuffer {
        handle: used.buffer.handle,
        read_domains: if used.reads { place } else { 0 },
        write_domains: if used.writes { place } else { 0 },
        valid_domains: place,
        ..Default::default()
    }
}

fn merge(entry: &mut uapi::PushbufBuffer, used: &Use<'_>) {
    let place = used.place.bits();
    entry.valid_domains &= place;
    if used.reads {
        entry.read_domains |= place;
    }
    if used.writes {
        entry.write_domains |= place;
    }
}

impl Drop for Channel {
    fn drop(&mut self) {
        // The kernel itself waits for the channel's work.
        let _ = self.device.call(&mut uapi::ChannelFree { channel: self.number });
    }
}
