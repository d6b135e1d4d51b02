//! The DRM device, with its buffers and channels.
//!
//! UNSAFETY: makes the `ioctl` system call. [`Request`] pairs each argument type with its number, so the kernel
//! accesses only the argument. The two arguments that contain addresses are built next to their calls.

#![expect(unsafe_code, reason = "ioctl")]

use std::cell::{Cell, OnceCell};
use std::collections::HashMap;
use std::fs::{File, OpenOptions};
use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};

use super::push::{MOST_WORDS, Object, PUSHBUFFER_BYTES, Push, STAMP_AT};
use super::uapi::{self, Request};
use crate::mapping::Mapping;
use crate::{Error, Place, Result};

/// An open nouveau render node.
#[derive(Debug)]
pub struct Device {
    file: File,
    /// Number of [`Buffer`]s per handle. The kernel uses the same handle for all references to a buffer.
    handles: Mutex<HashMap<u32, usize>>,
}

impl Device {
    /// Opens the node and checks that its driver is nouveau.
    ///
    /// # Errors
    /// Returns an error if the node cannot be opened, or belongs to another driver.
    pub fn open(node: &Path) -> Result<Arc<Self>> {
        let refused = |why: String, remedy| Error::Open { device: node.display().to_string(), why, remedy };
        let file = OpenOptions::new().read(true).write(true).open(node);
        let remedy = "check that nouveau is loaded and that this user may use its render node";
        let file = file.map_err(|error| refused(error.to_string(), remedy))?;
        let device = Self { file, handles: Mutex::default() };
        let mut name = [0u8; 32];
        let mut version = uapi::Version {
            name_length: name.len(),
            name: name.as_mut_ptr().expose_provenance(),
            ..Default::default()
        };
        device.call(&mut version).map_err(|error| refused(error.to_string(), "choose a render node of nouveau"))?;
        let name = &name[..version.name_length.min(name.len())];
        if name != b"nouveau" {
            let why = format!("its driver is {:?}", String::from_utf8_lossy(name));
            return Err(refused(why, "choose a render node of nouveau"));
        }
        Ok(Arc::new(device))
    }

    /// Returns the value of a parameter, one of [`uapi::param`].
    ///
    /// # Errors
    /// Returns an error if the driver does not support the parameter.
    pub fn parameter(&self, param: u64) -> Result<u64> {
        let mut argument = uapi::GetParam { param, value: 0 };
        self.call(&mut argument).map_err(|source| driver(format!("parameter {param}"), source))?;
        Ok(argument.value)
    }

    fn call<T: Request>(&self, argument: &mut T) -> io::Result<()> {
        call(&self.file, argument)
    }

    /// Imports a buffer, and increments its reference count. Returns the existing handle if this file has already
    /// opened the buffer.
    fn import(&self, shared: &OwnedFd) -> io::Result<u32> {
        let mut handles = self.handles.lock().unwrap_or_else(PoisonError::into_inner);
        let mut import = uapi::PrimeFdToHandle(uapi::Prime { handle: 0, flags: 0, fd: shared.as_raw_fd() });
        self.call(&mut import)?;
        *handles.entry(import.0.handle).or_default() += 1;
        Ok(import.0.handle)
    }

    /// Increments the number of buffers that use a handle.
    fn hold(&self, handle: u32) {
        *self.handles.lock().unwrap_or_else(PoisonError::into_inner).entry(handle).or_default() += 1;
    }

    /// Decrements the number of buffers that use a handle. Closes the handle when its last buffer is released.
    fn release(&self, handle: u32) {
        let mut handles = self.handles.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(count) = handles.get_mut(&handle) else { return };
        *count -= 1;
        if *count == 0 {
            handles.remove(&handle);
            // Keep the lock held, or an import could return the handle before it is closed. A failure to close a handle
            // cannot be handled.
            let _ = self.call(&mut uapi::GemClose { handle, pad: 0 });
        }
    }
}

fn driver(what: impl Into<String>, source: io::Error) -> Error {
    Error::Driver { what: what.into(), source }
}

/// Issues an ioctl, and repeats it if the kernel requests a retry. Addresses in the argument must be valid until the
/// call returns.
///
/// # Errors
/// Returns the system's error, prefixed with the name of the request.
pub fn call<T: Request>(file: &File, argument: &mut T) -> io::Result<()> {
    loop {
        // SAFETY: the ioctl number encodes the number of bytes that the kernel may access, which is the size of `T`.
        let result =
            unsafe { libc::ioctl(file.as_raw_fd(), libc::c_ulong::from(T::NUMBER), std::ptr::from_mut(argument)) };
        if result >= 0 {
            return Ok(());
        }
        let error = io::Error::last_os_error();
        // The kernel may request a retry because of a signal or a reservation conflict.
        if !matches!(error.raw_os_error(), Some(libc::EINTR | libc::EAGAIN)) {
            return Err(io::Error::new(error.kind(), format!("{}: {error}", T::NAME)));
        }
    }
}

/// Memory domain of a buffer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Domain {
    /// VRAM only.
    Vram,
    /// Guest RAM only.
    Gart,
    /// Either VRAM or guest RAM. The kernel prefers VRAM if the buffer fits, and migrates the buffer on request.
    Either,
}

impl Domain {
    /// Returns the kernel's domain bits.
    #[must_use]
    pub fn bits(self) -> u32 {
        match self {
            Self::Vram => uapi::DOMAIN_VRAM,
            Self::Gart => uapi::DOMAIN_GART,
            Self::Either => uapi::DOMAIN_VRAM | uapi::DOMAIN_GART,
        }
    }

    /// Returns the command-line name.
    #[must_use]
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
    device: Arc<Device>,
    handle: u32,
    domain: Domain,
    size: u64,
    address: u64,
    map_handle: u64,
    mapping: OnceCell<Mapping>,
}

impl Buffer {
    /// Allocates a buffer. The kernel rounds the size up to pages.
    ///
    /// # Errors
    /// Returns an error if no memory is left.
    pub fn new(device: &Arc<Device>, domain: Domain, size: u64) -> Result<Self> {
        let info = uapi::GemInfo {
            size,
            domain: domain.bits() | uapi::DOMAIN_MAPPABLE,
            tile_flags: uapi::TILE_NONCONTIG,
            ..Default::default()
        };
        let mut argument = uapi::GemNew { info, ..Default::default() };
        let place = if domain == Domain::Gart { Place::Ram } else { Place::Vram };
        let refused = |error: io::Error| Error::Allocation { place, bytes: size, why: error.to_string() };
        device.call(&mut argument).map_err(refused)?;
        let uapi::GemInfo { handle, size, offset: address, map_handle, .. } = argument.info;
        device.hold(handle);
        Ok(Self { device: Arc::clone(device), handle, domain, size, address, map_handle, mapping: OnceCell::new() })
    }

    /// Returns the size in bytes, as rounded up by the kernel.
    #[must_use]
    pub fn size(&self) -> u64 {
        self.size
    }

    /// Returns the GPU virtual address, which migrations do not change.
    #[must_use]
    pub fn address(&self) -> u64 {
        self.address
    }

    /// Returns the allowed memory domain.
    #[must_use]
    pub fn domain(&self) -> Domain {
        self.domain
    }

    /// Queries the current location of the buffer: [`Domain::Vram`] or [`Domain::Gart`].
    ///
    /// # Errors
    /// Returns an error if the driver fails.
    pub fn place(&self) -> Result<Domain> {
        let mut info = uapi::GemInfo { handle: self.handle, ..Default::default() };
        self.device.call(&mut info).map_err(|source| driver("the location of a buffer", source))?;
        if info.offset != self.address {
            return Err(driver("the location of a buffer", io::Error::other("its GPU address changed")));
        }
        Ok(if info.domain & uapi::DOMAIN_VRAM == 0 { Domain::Gart } else { Domain::Vram })
    }

    /// Returns the CPU mapping, which goes through BAR1 while the buffer is in VRAM.
    ///
    /// # Errors
    /// Returns an error if the kernel cannot map the buffer.
    pub fn map(&self) -> Result<&Mapping> {
        if let Some(mapping) = self.mapping.get() {
            return Ok(mapping);
        }
        let refused = |source| driver("mapping a buffer", source);
        let length = usize::try_from(self.size).map_err(|error| refused(io::Error::other(error)))?;
        let mapping = Mapping::new(&self.device.file, self.map_handle, length).map_err(refused)?;
        Ok(self.mapping.get_or_init(|| mapping))
    }

    /// Removes the CPU mapping, so that the kernel can reuse its BAR1 range.
    pub fn unmap(&mut self) {
        self.mapping.take();
    }

    /// Waits for the GPU's writes to the buffer and, if `to_write` is true, also for its reads.
    ///
    /// # Errors
    /// Returns an error if the driver fails.
    pub fn wait(&self, to_write: bool) -> Result<()> {
        let flags = if to_write { uapi::CPU_PREP_WRITE } else { 0 };
        let mut prepare = uapi::GemCpuPrep { handle: self.handle, flags };
        self.prepare(&mut prepare).map_err(|source| driver("waiting for the GPU", source))
    }

    /// Returns true if the GPU is still reading or writing the buffer.
    ///
    /// # Errors
    /// Returns an error if the driver fails.
    pub fn is_busy(&self) -> Result<bool> {
        let flags = uapi::CPU_PREP_WRITE | uapi::CPU_PREP_NOWAIT;
        match self.prepare(&mut uapi::GemCpuPrep { handle: self.handle, flags }) {
            Ok(()) => Ok(false),
            Err(error) if error.kind() == io::ErrorKind::ResourceBusy => Ok(true),
            Err(error) => Err(driver("querying the state of a buffer", error)),
        }
    }

    fn prepare(&self, argument: &mut uapi::GemCpuPrep) -> io::Result<()> {
        self.device.call(argument)?;
        self.device.call(&mut uapi::GemCpuFini { handle: self.handle })
    }

    /// Exports the buffer as a file descriptor.
    ///
    /// # Errors
    /// Returns an error if the kernel cannot share the buffer.
    pub fn export(&self) -> Result<OwnedFd> {
        let mut export = uapi::PrimeHandleToFd(uapi::Prime { handle: self.handle, flags: uapi::PRIME_FLAGS, fd: -1 });
        self.device.call(&mut export).map_err(|source| driver("a descriptor of a buffer", source))?;
        // SAFETY: the kernel has just created the descriptor for this process.
        Ok(unsafe { OwnedFd::from_raw_fd(export.0.fd) })
    }

    /// Imports a buffer from a file descriptor. Each device file maps the buffer at its own GPU virtual address.
    ///
    /// # Errors
    /// Returns an error if the kernel cannot import the memory.
    pub fn import(device: &Arc<Device>, shared: &OwnedFd, domain: Domain) -> Result<Self> {
        let refused = |source| driver("a reference to a buffer", source);
        let handle = device.import(shared).map_err(refused)?;
        let mut info = uapi::GemInfo { handle, ..Default::default() };
        if let Err(error) = device.call(&mut info) {
            device.release(handle);
            return Err(refused(error));
        }
        let uapi::GemInfo { size, offset: address, map_handle, .. } = info;
        let device = Arc::clone(device);
        Ok(Self { device, handle, domain, size, address, map_handle, mapping: OnceCell::new() })
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        self.mapping.take();
        self.device.release(self.handle);
    }
}

/// A submission's use of a buffer.
#[derive(Debug, Clone, Copy)]
pub struct Use<'a> {
    /// The buffer.
    pub buffer: &'a Buffer,
    /// Set if the GPU reads the buffer.
    pub reads: bool,
    /// Set if the GPU writes the buffer.
    pub writes: bool,
    /// Required memory domain during the submission. The kernel migrates the buffer there.
    pub place: Domain,
}

impl<'a> Use<'a> {
    /// Describes a read of the buffer, in any domain that the buffer allows.
    #[must_use]
    pub fn read(buffer: &'a Buffer) -> Self {
        Self { buffer, reads: true, writes: false, place: buffer.domain }
    }

    /// Describes a write of the buffer, in any domain that the buffer allows.
    #[must_use]
    pub fn write(buffer: &'a Buffer) -> Self {
        Self { buffer, reads: false, writes: true, place: buffer.domain }
    }

    /// Returns the same use with domain `place`.
    #[must_use]
    pub fn at(self, place: Domain) -> Self {
        Self { place, ..self }
    }
}

/// Default number of push buffers that a channel can have in flight.
pub const RING: usize = 8;

/// A GPU channel with its push buffers.
#[derive(Debug)]
pub struct Channel {
    device: Arc<Device>,
    number: i32,
    /// Push buffers, each of which is allocated before its first use.
    ring: Box<[OnceCell<Buffer>]>,
    /// Number of submissions so far.
    submitted: Cell<u64>,
    /// Number of the submission whose push buffer is known to be unused.
    claimed: Cell<u64>,
}

impl Channel {
    /// Allocates a channel without objects.
    ///
    /// # Errors
    /// Returns an error if no channel is available.
    pub fn new(device: &Arc<Device>) -> Result<Self> {
        Self::with_ring(device, RING)
    }

    /// Allocates a channel with `pushbuffers` push buffers, but at least one. A submission waits until its push buffer
    /// is no longer in use.
    ///
    /// # Errors
    /// Returns an error if no channel is available.
    pub fn with_ring(device: &Arc<Device>, pushbuffers: usize) -> Result<Self> {
        let mut argument = uapi::ChannelAlloc::default();
        device.call(&mut argument).map_err(|source| driver("a channel", source))?;
        let (device, number) = (Arc::clone(device), argument.channel);
        let ring = (0..pushbuffers.max(1)).map(|_| OnceCell::new()).collect();
        Ok(Self { device, number, ring, submitted: Cell::new(0), claimed: Cell::new(0) })
    }

    /// Returns the guest's channel number.
    #[must_use]
    pub fn number(&self) -> i32 {
        self.number
    }

    /// Creates an object. A submission must bind the object to its subchannel before using it.
    ///
    /// # Errors
    /// Returns an error if the card does not have the class.
    pub fn create(&self, object: Object) -> Result<()> {
        let class = object.class;
        let mut argument =
            uapi::ObjectAlloc { channel: self.number, handle: 0xbeef_0000 | u32::from(class), class: class.into() };
        let refused = |source| driver(format!("an object of class {class:04x}"), source);
        self.device.call(&mut argument).map_err(refused)
    }

    /// Creates an object and binds it to its subchannel.
    ///
    /// # Errors
    /// Returns an error if the card does not have the class, or if the channel does not accept work.
    pub fn add(&self, object: Object) -> Result<()> {
        self.create(object)?;
        let mut push = Push::default();
        push.bind(object);
        self.submit(&push, &[]).map(drop)
    }

    /// Returns the number of submissions so far.
    #[must_use]
    pub fn submitted(&self) -> u64 {
        self.submitted.get()
    }

    /// Returns the push buffer of a submission, counted from 1, or `None` if a later submission has reused it.
    fn pushbuffer(&self, submission: u64) -> Option<&Buffer> {
        let (submitted, count) = (self.submitted.get(), self.ring.len() as u64);
        let recent = submission <= submitted && submission + count > submitted && submission > 0;
        let slot = self.ring.get((submission.wrapping_sub(1) % count) as usize).filter(|_| recent);
        slot.and_then(OnceCell::get)
    }

    /// Waits until the GPU no longer uses the push buffer of the next submission. Returns this push buffer. Its memory
    /// from [`STAMP_AT`] on is free for a stamp.
    ///
    /// # Errors
    /// Returns an error if the driver fails, or if no memory is left.
    pub fn next_pushbuffer(&self) -> Result<&Buffer> {
        let (submission, count) = (self.submitted.get() + 1, self.ring.len() as u64);
        let slot = &self.ring[((submission - 1) % count) as usize];
        let buffer = match slot.get() {
            Some(buffer) => buffer,
            None => {
                let new = Buffer::new(&self.device, Domain::Gart, PUSHBUFFER_BYTES)?;
                slot.get_or_init(|| new)
            }
        };
        if submission > count && self.claimed.get() < submission {
            buffer.wait(true)?;
        }
        self.claimed.set(submission);
        Ok(buffer)
    }

    /// Reads the payload of a submission's stamp. Returns `None` if a later submission uses the same push buffer.
    ///
    /// # Errors
    /// Returns an error if the kernel cannot map the push buffer.
    pub fn stamp(&self, submission: u64) -> Result<Option<u32>> {
        let Some(buffer) = self.pushbuffer(submission) else { return Ok(None) };
        let mut payload = [0; 4];
        buffer.map()?.read(STAMP_AT as usize, &mut payload);
        Ok(Some(u32::from_le_bytes(payload)))
    }

    /// Returns true if the GPU has completed a submission, counted from 1.
    ///
    /// # Errors
    /// Returns an error if the driver fails.
    pub fn is_done(&self, submission: u64) -> Result<bool> {
        self.pushbuffer(submission).map_or(Ok(true), |buffer| Ok(!buffer.is_busy()?))
    }

    /// Waits until the GPU has completed a submission, counted from 1.
    ///
    /// # Errors
    /// Returns an error if the driver fails.
    pub fn wait(&self, submission: u64) -> Result<()> {
        self.pushbuffer(submission).map_or(Ok(()), |buffer| buffer.wait(true))
    }

    /// Submits a push buffer to the GPU. Waits only if all of the channel's push buffers are in use. Returns the number
    /// of the submission, counted from 1.
    ///
    /// # Errors
    /// Returns an error if the channel does not accept work.
    pub fn submit(&self, push: &Push, uses: &[Use<'_>]) -> Result<u64> {
        let refused = |source| driver(format!("a submission on channel {}", self.number), source);
        let words = push.words();
        if words.is_empty() || words.len() > MOST_WORDS {
            return Err(refused(io::Error::other(format!("a pushbuffer of {} dwords", words.len()))));
        }
        let submission = self.submitted.get() + 1;
        let buffer = self.next_pushbuffer()?;
        let bytes: Vec<u8> = words.iter().flat_map(|word| word.to_le_bytes()).collect();
        buffer.map()?.write(0, &bytes);

        let mut list = vec![entry(&Use::read(buffer))];
        for used in uses {
            // The list must contain each buffer only once.
            match list.iter_mut().find(|entry| entry.handle == used.buffer.handle) {
                Some(entry) => merge(entry, used),
                None => list.push(entry(used)),
            }
        }
        let mut pieces = [uapi::PushbufPush { length: bytes.len() as u64, ..Default::default() }];
        let mut argument = uapi::GemPushbuf {
            channel: self.number.cast_unsigned(),
            nr_buffers: list.len() as u32,
            buffers: list.as_mut_ptr().expose_provenance() as u64,
            nr_push: pieces.len() as u32,
            push: pieces.as_mut_ptr().expose_provenance() as u64,
            ..Default::default()
        };
        // Both lists are valid until the call returns.
        self.device.call(&mut argument).map_err(refused)?;
        self.submitted.set(submission);
        Ok(submission)
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
