//! A small vfio-user client for host processes that drive a device without a VMM, for tests and benchmarks, and for
//! simulated hostile guests.
//!
//! The client is synchronous and does not trust its server: it checks the length of each reply. [`Client::request`] and
//! the methods built on it follow the protocol. [`Client::send_raw`] and [`Client::receive_message`] do not enforce it.

use std::collections::VecDeque;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use rustix::event::{EventfdFlags, eventfd};
use rustix::fs::MemfdFlags;
use thiserror::Error;
use zerocopy::{FromBytes, Immutable, IntoBytes};

use crate::protocol::{
    CAP_SPARSE_MMAP, Command, DMA_MAP_READ, DMA_MAP_WRITE, DMA_UNMAP_ALL, DeviceInfo, DmaAccess, DmaMap, DmaUnmap,
    FLAG_ERROR, FLAG_NO_REPLY, FLAG_TYPE_REPLY, HEADER_SIZE, Header, IRQ_ACTION_TRIGGER, IRQ_ACTION_UNMASK,
    IRQ_DATA_EVENTFD, IRQ_DATA_NONE, IrqInfo, IrqSet, MultiWrite, REGION_CAPS, REGION_MMAP, REGION_READ, REGION_WRITE,
    RegionAccess, RegionInfoBody, SparseArea, SparseMmapCap, Version,
};
use crate::socket;
use vmm_memory::memory::{AddRegion, GuestMemory, MemoryError, MemoryLimits, MemoryTable};
use vmm_memory::wake::Wake;

mod migration;

/// Capabilities that QEMU 11.1 proposes.
pub const QEMU_CAPABILITIES: &str = "{\"capabilities\": {\"migration\": {\"pgsize\": 4096, \"max_bitmap_size\": 268435456}, \
    \"max_msg_fds\": 16, \"max_data_xfer_size\": 1048576, \"pgsizes\": 4096, \"max_dma_maps\": 65535, \
    \"write_multiple\": true}}";
/// Capabilities that cloud-hypervisor proposes.
pub const CLOUD_HYPERVISOR_CAPABILITIES: &str =
    "{\"capabilities\":{\"max_msg_fds\":1,\"max_data_xfer_size\":1048576,\"migration\":{\"pgsize\":4096}}}";

/// Maximum size of a received message in bytes.
const MAX_MESSAGE: usize = 2 << 20;

/// Reasons why a call fails.
#[derive(Debug, Error)]
pub enum ClientError {
    /// The socket failed, or no reply arrived within the timeout set with [`Client::set_timeout`].
    #[error("the socket failed")]
    Io(#[from] io::Error),
    /// The server closed the connection.
    #[error("the server closed the connection")]
    Closed,
    /// The server replied with an error number.
    #[error("the server replied with errno {0}")]
    Refused(u32),
    /// The server violated the protocol.
    #[error("invalid reply: {0}")]
    Protocol(String),
}

impl ClientError {
    /// Returns the error number in the server's reply.
    pub fn errno(&self) -> Option<u32> {
        match self {
            Self::Refused(errno) => Some(*errno),
            _ => None,
        }
    }
}

type Result<T> = std::result::Result<T, ClientError>;

/// A received message.
#[derive(Debug)]
pub struct Message {
    /// Message header.
    pub header: Header,
    /// Message body, excluding the header.
    pub body: Vec<u8>,
    /// Descriptors attached to the message.
    pub fds: Vec<OwnedFd>,
}

/// Client memory that [`Client::serve_dma`] accesses.
pub trait DmaTarget {
    /// Reads `data.len()` bytes at `gpa`. An error is the `errno` value of the reply.
    fn read(&mut self, gpa: u64, data: &mut [u8]) -> std::result::Result<(), u32>;
    /// Writes `data` at `gpa`. An error is the `errno` value of the reply.
    fn write(&mut self, gpa: u64, data: &[u8]) -> std::result::Result<(), u32>;
}

/// A client's connection to its server.
#[derive(Debug)]
pub struct Client {
    stream: UnixStream,
    next_id: u16,
    /// Server requests that arrived while waiting for a reply.
    requests: VecDeque<Message>,
    /// Server capabilities as JSON.
    capabilities: String,
}

impl Client {
    /// Connects without sending anything.
    pub fn connect_silent(path: &Path) -> Result<Self> {
        Ok(Self::from_stream(UnixStream::connect(path)?))
    }

    /// Wraps an existing connection, without sending anything.
    pub fn from_stream(stream: UnixStream) -> Self {
        Self { stream, next_id: 0, requests: VecDeque::new(), capabilities: String::new() }
    }

    /// Connects and negotiates like QEMU.
    pub fn connect(path: &Path) -> Result<Self> {
        Self::connect_as(path, QEMU_CAPABILITIES)
    }

    /// Connects and negotiates with the given capabilities, as JSON.
    pub fn connect_as(path: &Path, capabilities: &str) -> Result<Self> {
        let mut client = Self::connect_silent(path)?;
        client.negotiate(0, 1, capabilities)?;
        Ok(client)
    }

    /// Proposes a version. Returns the server's version.
    pub fn negotiate(&mut self, major: u16, minor: u16, capabilities: &str) -> Result<(u16, u16)> {
        let body = [Version { major, minor }.as_bytes(), capabilities.as_bytes(), &[0]].concat();
        let reply = self.request(Command::VERSION, &body, &[])?;
        let (version, text) = parse::<Version>(&reply.body)?;
        let text = text
            .strip_suffix(b"\0")
            .ok_or_else(|| ClientError::Protocol("the server's capabilities are not NUL-terminated".into()))?;
        self.capabilities = String::from_utf8_lossy(text).into_owned();
        Ok((version.major, version.minor))
    }

    /// Returns the server's capabilities, as JSON.
    pub fn capabilities(&self) -> &str {
        &self.capabilities
    }

    /// Returns the socket.
    pub fn stream(&self) -> &UnixStream {
        &self.stream
    }

    /// Sets the reply timeout. `None`, the default, means no timeout.
    pub fn set_timeout(&self, timeout: Option<Duration>) -> Result<()> {
        Ok(self.stream.set_read_timeout(timeout)?)
    }

    /// Sends raw bytes. Blocks until all bytes are sent.
    pub fn send_raw(&self, bytes: &[u8], fds: &[BorrowedFd<'_>]) -> Result<()> {
        let mut rest = bytes;
        let mut fds = fds;
        while !rest.is_empty() {
            match socket::send(&self.stream, rest, fds) {
                Ok(len) => {
                    rest = rest.get(len..).unwrap_or_default();
                    fds = &[];
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    let mut wait = [rustix::event::PollFd::new(&self.stream, rustix::event::PollFlags::OUT)];
                    rustix::event::poll(&mut wait, None).map_err(io::Error::from)?;
                }
                Err(error) => return Err(error.into()),
            }
        }
        Ok(())
    }

    /// Sends a request without waiting for the reply. Returns the message ID.
    pub fn send(&mut self, command: Command, flags: u32, body: &[u8], fds: &[BorrowedFd<'_>]) -> Result<u16> {
        let id = self.next_id;
        self.next_id = id.wrapping_add(1);
        let size = u32::try_from(HEADER_SIZE.saturating_add(body.len())).unwrap_or(u32::MAX);
        let header = Header::request(id, command, size, flags);
        self.send_raw(&[header.as_bytes(), body].concat(), fds)?;
        Ok(id)
    }

    /// Sends a request and waits for its reply. Queues server requests that arrive before the reply, for
    /// [`Self::serve_dma`].
    pub fn request(&mut self, command: Command, body: &[u8], fds: &[BorrowedFd<'_>]) -> Result<Message> {
        let id = self.send(command, 0, body, fds)?;
        self.reply(id)
    }

    /// Waits for the reply to request `id`.
    pub fn reply(&mut self, id: u16) -> Result<Message> {
        loop {
            let message = self.receive_message()?;
            if !message.header.is_reply() {
                self.requests.push_back(message);
                continue;
            }
            if message.header.id != id {
                return Err(ClientError::Protocol(format!(
                    "the server sent reply {} to request {id}",
                    message.header.id
                )));
            }
            if message.header.flags & FLAG_ERROR != 0 {
                return Err(ClientError::Refused(message.header.error));
            }
            return Ok(message);
        }
    }

    /// Waits for one message from the server.
    pub fn receive_message(&mut self) -> Result<Message> {
        let mut bytes = [0; HEADER_SIZE];
        let mut fds = Vec::new();
        self.fill(&mut bytes, &mut fds)?;
        let header = Header::read_from_bytes(&bytes).map_err(|_| ClientError::Closed)?;
        let len = usize::try_from(header.size).unwrap_or(usize::MAX);
        let len = len.checked_sub(HEADER_SIZE).filter(|&len| len <= MAX_MESSAGE);
        let len = len.ok_or_else(|| ClientError::Protocol(format!("a message of {} bytes", header.size)))?;
        let mut body = vec![0; len];
        self.fill(&mut body, &mut fds)?;
        Ok(Message { header, body, fds })
    }

    fn fill(&self, buffer: &mut [u8], fds: &mut Vec<OwnedFd>) -> Result<()> {
        let mut rest = buffer;
        while !rest.is_empty() {
            let mut space = [std::mem::MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(16))];
            let mut control = rustix::net::RecvAncillaryBuffer::new(&mut space);
            let flags = rustix::net::RecvFlags::CMSG_CLOEXEC;
            let mut iov = [io::IoSliceMut::new(rest)];
            let result = rustix::net::recvmsg(&self.stream, &mut iov, &mut control, flags).map_err(io::Error::from)?;
            for message in control.drain() {
                if let rustix::net::RecvAncillaryMessage::ScmRights(rights) = message {
                    fds.extend(rights);
                }
            }
            if result.bytes == 0 {
                return Err(ClientError::Closed);
            }
            rest = rest.get_mut(result.bytes..).unwrap_or_default();
        }
        Ok(())
    }

    /// Waits for a `DMA_READ` or `DMA_WRITE` from the server and replies to it. Returns the message header.
    pub fn serve_dma(&mut self, memory: &mut dyn DmaTarget) -> Result<Header> {
        let message = match self.requests.pop_front() {
            Some(message) => message,
            None => self.receive_message()?,
        };
        let Message { header, body, .. } = message;
        let (access, data) = parse::<DmaAccess>(&body)?;
        let outcome = match header.command() {
            Command::DMA_READ => {
                let len = usize::try_from(access.count).unwrap_or(usize::MAX).min(MAX_MESSAGE);
                let mut data = vec![0; len];
                memory.read(access.address, &mut data).map(|()| data)
            }
            Command::DMA_WRITE => memory.write(access.address, data).map(|()| Vec::new()),
            other => return Err(ClientError::Protocol(format!("the server sent {other}"))),
        };
        let reply = match outcome {
            Ok(data) => [
                reply_header(&header, access.as_bytes().len().saturating_add(data.len()), 0).as_bytes(),
                access.as_bytes(),
                &data,
            ]
            .concat(),
            Err(errno) => reply_header(&header, 0, errno).as_bytes().to_vec(),
        };
        self.send_raw(&reply, &[])?;
        Ok(header)
    }

    /// Reads `data.len()` bytes from a region.
    pub fn read(&mut self, region: u32, offset: u64, data: &mut [u8]) -> Result<()> {
        let access = RegionAccess { offset, region, count: length(data.len()) };
        let reply = self.request(Command::REGION_READ, access.as_bytes(), &[])?;
        let (_, bytes) = parse::<RegionAccess>(&reply.body)?;
        if bytes.len() != data.len() {
            return Err(ClientError::Protocol(format!("{} bytes for a read of {} bytes", bytes.len(), data.len())));
        }
        data.copy_from_slice(bytes);
        Ok(())
    }

    /// Reads 4 bytes from a region.
    pub fn read32(&mut self, region: u32, offset: u64) -> Result<u32> {
        let mut data = [0; 4];
        self.read(region, offset, &mut data)?;
        Ok(u32::from_le_bytes(data))
    }

    /// Writes to a region and waits for the reply.
    pub fn write(&mut self, region: u32, offset: u64, data: &[u8]) -> Result<()> {
        self.request(Command::REGION_WRITE, &write_body(region, offset, data), &[]).map(drop)
    }

    /// Writes 4 bytes to a region and waits for the reply.
    pub fn write32(&mut self, region: u32, offset: u64, value: u32) -> Result<()> {
        self.write(region, offset, &value.to_le_bytes())
    }

    /// Writes to a region without requesting a reply.
    pub fn post(&mut self, region: u32, offset: u64, data: &[u8]) -> Result<()> {
        self.send(Command::REGION_WRITE, FLAG_NO_REPLY, &write_body(region, offset, data), &[]).map(drop)
    }

    /// Sends a batch of writes of up to 8 bytes each, without requesting a reply. Each write consists of region, offset
    /// and data.
    pub fn post_many(&mut self, writes: &[(u32, u64, &[u8])]) -> Result<()> {
        self.send(Command::REGION_WRITE_MULTI, FLAG_NO_REPLY, &multi_body(writes), &[]).map(drop)
    }

    /// Maps memory for the device, either from a file at the given offset or without a file.
    pub fn dma_map(&mut self, gpa: u64, size: u64, writable: bool, file: Option<(BorrowedFd<'_>, u64)>) -> Result<()> {
        let flags = DMA_MAP_READ | if writable { DMA_MAP_WRITE } else { 0 };
        let offset = file.map_or(0, |(_, offset)| offset);
        let body = DmaMap { argsz: length(size_of::<DmaMap>()), flags, offset, address: gpa, size };
        let fds: Vec<_> = file.into_iter().map(|(fd, _)| fd).collect();
        self.request(Command::DMA_MAP, body.as_bytes(), &fds).map(drop)
    }

    /// Unmaps memory from the device. Returns the number of unmapped bytes in the server's reply.
    pub fn dma_unmap(&mut self, gpa: u64, size: u64) -> Result<u64> {
        let body = DmaUnmap { argsz: length(size_of::<DmaUnmap>()), flags: 0, address: gpa, size };
        let reply = self.request(Command::DMA_UNMAP, body.as_bytes(), &[])?;
        let (reply, _) = DmaUnmap::read_from_prefix(&reply.body).map_err(|_| io::Error::other("truncated reply"))?;
        Ok(reply.size)
    }

    /// Unmaps all memory from the device.
    pub fn dma_unmap_all(&mut self) -> Result<()> {
        let body = DmaUnmap { argsz: length(size_of::<DmaUnmap>()), flags: DMA_UNMAP_ALL, ..Default::default() };
        self.request(Command::DMA_UNMAP, body.as_bytes(), &[]).map(drop)
    }

    /// Attaches eventfds to the interrupts of a type (0 is INTx, 1 is MSI, 2 is MSI-X), starting with interrupt
    /// `start`.
    pub fn set_irqs(&mut self, index: u32, start: u32, fds: &[BorrowedFd<'_>]) -> Result<()> {
        let flags = IRQ_DATA_EVENTFD | IRQ_ACTION_TRIGGER;
        self.irq_request(IrqSet { argsz: 20, flags, index, start, count: length(fds.len()) }, &[], fds)
    }

    /// Creates `count` eventfds, and attaches them to the interrupts of a type, starting with interrupt 0.
    pub fn attach_irqs(&mut self, index: u32, count: usize) -> Result<Vec<OwnedFd>> {
        let fds = (0..count).map(|_| eventfd(0, EventfdFlags::CLOEXEC)).collect::<std::result::Result<Vec<_>, _>>();
        let fds = fds.map_err(io::Error::from)?;
        let borrowed: Vec<_> = fds.iter().map(|fd| fd.as_fd()).collect();
        self.set_irqs(index, 0, &borrowed)?;
        Ok(fds)
    }

    /// Detaches all interrupts of a type.
    pub fn disable_irqs(&mut self, index: u32) -> Result<()> {
        let flags = IRQ_DATA_NONE | IRQ_ACTION_TRIGGER;
        self.irq_request(IrqSet { argsz: 20, flags, index, start: 0, count: 0 }, &[], &[])
    }

    /// Unmasks INTx, as a VMM does after the guest has handled the interrupt.
    pub fn unmask_intx(&mut self) -> Result<()> {
        let flags = IRQ_DATA_NONE | IRQ_ACTION_UNMASK;
        self.irq_request(IrqSet { argsz: 20, flags, index: 0, start: 0, count: 1 }, &[], &[])
    }

    /// Sends an unchecked `DEVICE_SET_IRQS` request.
    pub fn irq_request(&mut self, request: IrqSet, booleans: &[u8], fds: &[BorrowedFd<'_>]) -> Result<()> {
        self.request(Command::DEVICE_SET_IRQS, &[request.as_bytes(), booleans].concat(), fds).map(drop)
    }

    /// Resets the device.
    pub fn reset(&mut self) -> Result<()> {
        self.request(Command::DEVICE_RESET, &[], &[]).map(drop)
    }

    /// Queries the numbers of regions and of interrupt types.
    pub fn device_info(&mut self) -> Result<DeviceInfo> {
        let body = DeviceInfo { argsz: 16, ..Default::default() };
        let reply = self.request(Command::DEVICE_GET_INFO, body.as_bytes(), &[])?;
        Ok(parse(&reply.body)?.0)
    }

    /// Queries a region, accepting a reply of up to `argsz` bytes. Returns the region's description, capabilities and
    /// descriptors.
    pub fn region_info(&mut self, index: u32, argsz: u32) -> Result<(RegionInfoBody, Vec<u8>, Vec<OwnedFd>)> {
        let body = RegionInfoBody { argsz, index, ..Default::default() };
        let reply = self.request(Command::DEVICE_GET_REGION_INFO, body.as_bytes(), &[])?;
        let (info, caps) = parse(&reply.body)?;
        Ok((info, caps.to_vec(), reply.fds))
    }

    /// Queries a region like QEMU, which repeats the query if the reply does not fit.
    pub fn region(&mut self, index: u32) -> Result<Region> {
        let fixed = length(size_of::<RegionInfoBody>());
        let (mut info, mut caps, mut fds) = self.region_info(index, fixed)?;
        if info.argsz > fixed {
            (info, caps, fds) = self.region_info(index, info.argsz)?;
        }
        let areas = if info.flags & REGION_CAPS == 0 { Vec::new() } else { sparse_areas(&info, &caps)? };
        if fds.len() > 1 {
            return Err(ClientError::Protocol(format!("{} descriptors for a region", fds.len())));
        }
        Ok(Region { info, areas, file: fds.pop() })
    }

    /// Queries a region and maps its mappable areas.
    pub fn map_region(&mut self, index: u32) -> Result<MappedRegion> {
        let Region { info, areas, file } = self.region(index)?;
        let (Some(file), true) = (file, info.flags & REGION_MMAP != 0) else {
            return Err(ClientError::Protocol(format!("region {index} cannot be mapped")));
        };
        let (memory, wake) = (GuestMemory::default(), Arc::new(Wake::new()?));
        for SparseArea { offset, size } in areas {
            let request = AddRegion {
                gpa: offset,
                size,
                offset: info.offset.saturating_add(offset),
                readable: info.flags & REGION_READ != 0,
                writable: info.flags & REGION_WRITE != 0,
                fd: Some(file.try_clone()?),
            };
            let added = memory.add(request, &MemoryLimits::default(), &wake);
            added.map_err(|error| {
                ClientError::Protocol(format!("cannot map the area at {offset:#x} of region {index}: {error}"))
            })?;
        }
        Ok(MappedRegion { memory: memory.snapshot() })
    }

    /// Queries an interrupt type.
    pub fn irq_info(&mut self, index: u32) -> Result<IrqInfo> {
        let body = IrqInfo { argsz: 16, index, ..Default::default() };
        let reply = self.request(Command::DEVICE_GET_IRQ_INFO, body.as_bytes(), &[])?;
        Ok(parse(&reply.body)?.0)
    }
}

/// A server's description of a region.
#[derive(Debug)]
pub struct Region {
    /// Description of the region.
    pub info: RegionInfoBody,
    /// Mappable areas of the region.
    pub areas: Vec<SparseArea>,
    /// The file that backs the areas.
    pub file: Option<OwnedFd>,
}

/// The mapped areas of a region. They remain mapped after the client disconnects.
#[derive(Debug)]
pub struct MappedRegion {
    /// The mapped areas, each at its offset in the region.
    memory: Arc<MemoryTable>,
}

impl MappedRegion {
    /// Reads at a region offset without sending a message. Fails outside the areas.
    pub fn read(&self, offset: u64, data: &mut [u8]) -> std::result::Result<(), MemoryError> {
        self.memory.read(offset, data)
    }

    /// Writes at a region offset without sending a message. Fails outside the areas.
    pub fn write(&self, offset: u64, data: &[u8]) -> std::result::Result<(), MemoryError> {
        self.memory.write(offset, data)
    }
}

/// Returns the areas in the sparse-mmap capability. `caps` contains the bytes that follow the region's description.
fn sparse_areas(info: &RegionInfoBody, caps: &[u8]) -> Result<Vec<SparseArea>> {
    let wrong = |what: &str| ClientError::Protocol(format!("capabilities of region {}: {what}", info.index));
    let mut offset = info.cap_offset;
    loop {
        let start = usize::try_from(offset).ok().and_then(|offset| offset.checked_sub(size_of::<RegionInfoBody>()));
        let rest =
            start.and_then(|start| caps.get(start..)).ok_or_else(|| wrong("an offset points outside the reply"))?;
        let (cap, rest) = SparseMmapCap::read_from_prefix(rest).map_err(|_| wrong("a capability is truncated"))?;
        if cap.id == CAP_SPARSE_MMAP {
            let (areas, _) = rest.as_chunks::<{ size_of::<SparseArea>() }>();
            let count = usize::try_from(cap.nr_areas).unwrap_or(usize::MAX);
            let areas = areas.get(..count).ok_or_else(|| wrong("areas are missing"))?;
            let areas =
                areas.iter().map(|bytes| SparseArea::read_from_bytes(bytes)).collect::<std::result::Result<_, _>>();
            return areas.map_err(|_| wrong("an area is truncated"));
        }
        offset = match cap.next {
            0 => return Ok(Vec::new()),
            next if next > offset => next,
            _ => return Err(wrong("a capability points backwards")),
        };
    }
}

/// Creates a memfd of `size` bytes for guest memory, as a VMM does. Seals the memfd's size if `sealed` is set.
pub fn memory_file(size: u64, sealed: bool) -> io::Result<OwnedFd> {
    let fd = rustix::fs::memfd_create("guest-memory", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)?;
    rustix::fs::ftruncate(&fd, size)?;
    if sealed {
        rustix::fs::fcntl_add_seals(&fd, rustix::fs::SealFlags::SHRINK | rustix::fs::SealFlags::GROW)?;
    }
    Ok(fd)
}

/// Waits until an eventfd is signalled, then reads and clears its count.
pub fn wait_event(fd: impl AsFd, timeout: Duration) -> io::Result<u64> {
    let mut wait = [rustix::event::PollFd::new(&fd, rustix::event::PollFlags::IN)];
    let timeout = rustix::event::Timespec::try_from(timeout).map_err(|_| io::ErrorKind::InvalidInput)?;
    if rustix::event::poll(&mut wait, Some(&timeout))? == 0 {
        return Err(io::ErrorKind::TimedOut.into());
    }
    let mut bytes = [0; 8];
    rustix::io::read(&fd, &mut bytes)?;
    Ok(u64::from_ne_bytes(bytes))
}

/// Returns the body of a `REGION_WRITE`.
pub fn write_body(region: u32, offset: u64, data: &[u8]) -> Vec<u8> {
    let access = RegionAccess { offset, region, count: length(data.len()) };
    [access.as_bytes(), data].concat()
}

/// Returns the body of a `REGION_WRITE_MULTI`. Each write consists of region, offset and up to 8 bytes of data.
pub fn multi_body(writes: &[(u32, u64, &[u8])]) -> Vec<u8> {
    let mut body = u64::try_from(writes.len()).unwrap_or(0).to_ne_bytes().to_vec();
    for &(region, offset, bytes) in writes {
        let mut data = [0; 8];
        for (place, byte) in data.iter_mut().zip(bytes) {
            *place = *byte;
        }
        body.extend_from_slice(MultiWrite { offset, region, count: length(bytes.len()), data }.as_bytes());
    }
    body
}

fn reply_header(request: &Header, body: usize, errno: u32) -> Header {
    let error_flag = if errno == 0 { 0 } else { FLAG_ERROR };
    Header {
        size: length(HEADER_SIZE.saturating_add(body)),
        flags: FLAG_TYPE_REPLY | error_flag,
        error: errno,
        ..*request
    }
}

fn parse<T: FromBytes + Immutable>(body: &[u8]) -> Result<(T, &[u8])> {
    T::read_from_prefix(body).map_err(|_| ClientError::Protocol(format!("a reply body of {} bytes", body.len())))
}

fn length(len: usize) -> u32 {
    u32::try_from(len).unwrap_or(u32::MAX)
}
