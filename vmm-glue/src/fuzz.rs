//! Drives a [`Connection`] with steps decoded from arbitrary bytes, for the fuzz target and for a test that runs its
//! seeds.
//!
//! Checks: every framed request gets one reply, unless it requests no reply; the device receives only aligned accesses
//! inside its regions; a deferred write is completed before the next device call; maps and unmaps are paired; a
//! descriptor is sent only with a reply that describes a region and its areas; the output is bounded; no resource
//! leaks.

use std::collections::BTreeMap;
use std::ops::Range;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;

use rustix::event::{EventfdFlags, eventfd};
use zerocopy::{FromBytes, IntoBytes};

use crate::client::{QEMU_CAPABILITIES, memory_file};
use crate::connection::{Connection, Fatal, Outbox};
use crate::device::{AccessError, Ack, Deferred, Device, MapError, NUM_REGIONS, RegionIndex, RegionInfo};
use crate::interrupts::IrqCounts;
use crate::link::{ClientInfo, Link};
use crate::mappable::{MmapArea, region_memory};
use crate::migration::{Migration, MigrationError, State};
use crate::protocol::{
    Command, DmaAccess, FLAG_NO_REPLY, FLAG_TYPE_REPLY, HEADER_SIZE, Header, RegionInfoBody, Version,
};
use crate::server::ServerOptions;
use vmm_memory::memory::{DmaRegion, LOG_BLOCK, MemoryLimits};

/// Maximum number of steps in one input.
const MAX_STEPS: usize = 512;
/// Maximum number of client memory regions in one run.
const MAX_REGIONS: usize = 8;
/// Initial size of each client memory file, in bytes.
const FILE_SIZE: u64 = 0x1_0000;
/// Upper bound (exclusive) of a connection's undrained output, in bytes.
const MAX_OUTPUT: usize = 256 << 10;

/// One action of the client or the device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Step {
    /// Raw bytes, after which the stream may have lost its framing.
    Raw(Vec<u8>),
    /// A framed message with 0 to 3 descriptors (`fds`) of a kind: 0 for eventfds, 1 for sealed memory, 2 for memory, 3
    /// for a pipe.
    #[expect(missing_docs, reason = "said above")]
    Message { command: u8, flags: u8, fds: u8, kind: u8, body: Vec<u8> },
    /// The device raises an interrupt, or sets its INTx level.
    Interrupt(u8),
    /// The device reads client memory through messages. The fields are the address in pages and the size in bytes.
    Dma(u8, u16),
    /// The client replies to the server's oldest request with an error number or with data.
    Answer(u8),
    /// The device requests a memory sharing check.
    CheckShared,
    /// The device reads mapped memory at an address, in pages.
    Touch(u8),
    /// The client resizes all its unsealed memory files to this number of pages, at most to their initial size.
    Truncate(u8),
    /// The client disconnects, and another client negotiates.
    Reconnect,
}

/// Decodes bytes into at most 512 steps. Any bytes are valid. Drops an incomplete last step.
pub fn decode(bytes: &[u8]) -> Vec<Step> {
    let mut rest = bytes;
    std::iter::from_fn(|| decode_one(&mut rest)).take(MAX_STEPS).collect()
}

fn decode_one(rest: &mut &[u8]) -> Option<Step> {
    Some(match byte(rest)? % 9 {
        0 => Step::Raw(bytes(rest)?),
        1 => {
            let (command, flags, fds) = (byte(rest)?, byte(rest)?, byte(rest)?);
            Step::Message { command, flags, fds: fds & 3, kind: (fds >> 2) & 3, body: bytes(rest)? }
        }
        2 => Step::Interrupt(byte(rest)?),
        3 => Step::Dma(byte(rest)?, u16::from_le_bytes([byte(rest)?, byte(rest)?])),
        4 => Step::Answer(byte(rest)?),
        5 => Step::CheckShared,
        6 => Step::Touch(byte(rest)?),
        7 => Step::Truncate(byte(rest)?),
        _ => Step::Reconnect,
    })
}

fn byte(rest: &mut &[u8]) -> Option<u8> {
    let (first, tail) = rest.split_first()?;
    *rest = tail;
    Some(*first)
}

/// Reads a two-byte length and that many bytes, or all remaining bytes if there are fewer.
fn bytes(rest: &mut &[u8]) -> Option<Vec<u8>> {
    let len = usize::from(u16::from_le_bytes([byte(rest)?, byte(rest)?]));
    let (head, tail) = rest.split_at(len.min(rest.len()));
    *rest = tail;
    Some(head.to_vec())
}

/// Encodes steps as bytes. Bodies are truncated to 65535 bytes.
pub fn encode(steps: &[Step]) -> Vec<u8> {
    let mut out = Vec::new();
    let body = |out: &mut Vec<u8>, body: &[u8]| {
        let len = u16::try_from(body.len()).unwrap_or(u16::MAX);
        out.extend(len.to_le_bytes());
        out.extend(body.iter().take(usize::from(len)));
    };
    for step in steps {
        match step {
            Step::Raw(bytes) => {
                out.push(0);
                body(&mut out, bytes);
            }
            Step::Message { command, flags, fds, kind, body: bytes } => {
                out.extend([1, *command, *flags, (fds & 3) | ((kind & 3) << 2)]);
                body(&mut out, bytes);
            }
            Step::Interrupt(which) => out.extend([2, *which]),
            Step::Dma(page, len) => {
                let [low, high] = len.to_le_bytes();
                out.extend([3, *page, low, high]);
            }
            Step::Answer(errno) => out.extend([4, *errno]),
            Step::CheckShared => out.push(5),
            Step::Touch(page) => out.extend([6, *page]),
            Step::Truncate(pages) => out.extend([7, *pages]),
            Step::Reconnect => out.push(8),
        }
    }
    out
}

/// A device that validates the calls that it receives.
#[derive(Debug)]
struct Checked {
    mapped: BTreeMap<u64, u64>,
    connected: bool,
    /// The mappable region.
    bar1: RegionInfo,
    /// Set if the last write was deferred.
    deferred: bool,
    /// Migration state, as set by the calls.
    state: State,
    /// Number of state bytes that remain to be read, or that were written.
    bytes: usize,
    logs: bool,
}

/// Size of the device's state in bytes.
const STATE_BYTES: usize = 100;

impl Checked {
    /// Moves from state `from` to state `to`.
    fn goes(&mut self, from: State, to: State) {
        assert!(self.connected);
        assert_eq!(std::mem::replace(&mut self.state, to), from);
    }
}

impl Migration for Checked {
    fn stop(&mut self) -> Result<(), MigrationError> {
        self.goes(State::Running, State::Stop);
        Ok(())
    }

    fn start(&mut self) {
        self.goes(State::Stop, State::Running);
    }

    fn begin_saving(&mut self) -> Result<(), MigrationError> {
        self.goes(State::Stop, State::StopCopy);
        self.bytes = STATE_BYTES;
        Ok(())
    }

    fn save(&mut self, data: &mut [u8]) -> Result<usize, MigrationError> {
        assert_eq!(self.state, State::StopCopy);
        assert!(data.len() <= 4096, "a read of {} bytes", data.len());
        let len = data.len().min(self.bytes);
        self.bytes = self.bytes.saturating_sub(len);
        Ok(len)
    }

    fn end_saving(&mut self) {
        self.goes(State::StopCopy, State::Stop);
    }

    fn begin_loading(&mut self) -> Result<(), MigrationError> {
        self.goes(State::Stop, State::Resuming);
        self.bytes = 0;
        Ok(())
    }

    fn load(&mut self, data: &[u8]) -> Result<(), MigrationError> {
        assert_eq!(self.state, State::Resuming);
        assert!(data.len() <= 4096, "{} bytes", data.len());
        self.bytes = self.bytes.saturating_add(data.len());
        if self.bytes > STATE_BYTES { Err(MigrationError::invalid("too long")) } else { Ok(()) }
    }

    fn end_loading(&mut self) -> Result<(), MigrationError> {
        let whole = self.bytes == STATE_BYTES;
        self.goes(State::Resuming, if whole { State::Stop } else { State::Error });
        if whole { Ok(()) } else { Err(MigrationError::invalid("incomplete")) }
    }

    fn log_writes(&mut self, on: bool) {
        assert_ne!(std::mem::replace(&mut self.logs, on), on);
    }

    fn take_written(&mut self, range: Range<u64>, each: &mut dyn FnMut(Range<u64>)) {
        assert!(self.logs && range.start < range.end);
        each(0..LOG_BLOCK);
        each(range.end.saturating_sub(1)..u64::MAX);
    }
}

impl Checked {
    /// Creates the device, or returns `None` if no file descriptor is available.
    fn new() -> Option<Self> {
        let bar1 = region(RegionIndex::Bar1);
        let file = Arc::new(region_memory("fuzz", bar1.size()).ok()?);
        let areas = [(0, 0x1000), (0x2000, 0x2000)].map(|(offset, size)| MmapArea { offset, size });
        let bar1 = bar1.with_mappable(file, areas.to_vec());
        let state = State::Running;
        let bar1 = bar1.ok()?;
        Some(Self { mapped: BTreeMap::new(), connected: false, bar1, deferred: false, state, bytes: 0, logs: false })
    }

    /// Checks that a deferred write was completed before the current call.
    fn enter(&self) {
        assert!(!self.deferred, "a deferred write was not completed");
    }
}

fn region(index: RegionIndex) -> RegionInfo {
    match index {
        RegionIndex::Bar0 => RegionInfo::read_write(0x2000),
        RegionIndex::Bar1 => RegionInfo::read_write(0x4000),
        RegionIndex::Rom => RegionInfo::read_only(0x1000),
        RegionIndex::Config => RegionInfo::read_write(0x1000),
        _ => RegionInfo::default(),
    }
}

fn check_piece(index: RegionIndex, offset: u64, len: usize) {
    assert!(matches!(len, 1 | 2 | 4 | 8), "an access of {len} bytes");
    let len = u64::try_from(len).unwrap_or(0);
    assert!(offset.is_multiple_of(len), "{len} bytes at {offset:#x}");
    assert!(offset.saturating_add(len) <= region(index).size(), "{len} bytes at {offset:#x} of {index:?}");
}

impl Device for Checked {
    fn regions(&self) -> [RegionInfo; NUM_REGIONS] {
        RegionIndex::ALL.map(|index| match index {
            RegionIndex::Bar1 => self.bar1.clone(),
            _ => region(index),
        })
    }

    fn connected(&mut self) {
        self.enter();
        assert!(!std::mem::replace(&mut self.connected, true));
    }

    fn region_read(&mut self, index: RegionIndex, offset: u64, data: &mut [u8]) -> Result<(), AccessError> {
        self.enter();
        check_piece(index, offset, data.len());
        data.fill(0x5a);
        if offset == 0x1ff8 { Err(AccessError::Denied) } else { Ok(()) }
    }

    fn region_write(&mut self, index: RegionIndex, offset: u64, data: &[u8]) -> Result<Ack, AccessError> {
        self.enter();
        check_piece(index, offset, data.len());
        assert!(region(index).writable());
        match offset {
            0x1ff8 => Err(AccessError::Failed),
            _ if offset & 0x40 != 0 => {
                self.deferred = true;
                Ok(Ack::Deferred(Deferred::default()))
            }
            _ => Ok(Ack::Done),
        }
    }

    fn complete(&mut self, _: Deferred) {
        assert!(std::mem::take(&mut self.deferred));
    }

    fn dma_map(&mut self, region: &DmaRegion) -> Result<(), MapError> {
        self.enter();
        if region.gpa == 0xf000 {
            return Err(MapError("not there".into()));
        }
        assert_eq!(self.mapped.insert(region.gpa, region.size), None);
        assert!(self.mapped.len() <= MAX_REGIONS);
        Ok(())
    }

    fn dma_unmap(&mut self, gpa: u64, size: u64) {
        self.enter();
        assert_eq!(self.mapped.remove(&gpa), Some(size));
    }

    fn migration(&mut self) -> Option<&mut dyn Migration> {
        self.enter();
        Some(self)
    }

    fn reset(&mut self) {
        self.enter();
        assert!(self.connected);
        self.state = State::Running;
    }

    fn disconnected(&mut self) {
        self.enter();
        (self.state, self.logs) = (State::Running, false);
        assert!(self.mapped.is_empty());
        assert!(std::mem::take(&mut self.connected));
    }
}

/// Size in bytes of a message that describes a region without areas.
const PLAIN_REGION: usize = HEADER_SIZE.saturating_add(size_of::<RegionInfoBody>());

/// Drains the output, which consists of whole messages. Checks that every description of areas, and no other message,
/// carries a descriptor.
fn take(out: &mut Outbox) -> Vec<u8> {
    let mut all = Vec::new();
    while !out.is_empty() {
        let (bytes, fd) = out.next();
        let (mut rest, mut fd) = (bytes, fd.is_some());
        while let Ok((header, _)) = Header::read_from_prefix(rest) {
            let size = usize::try_from(header.size).unwrap_or(usize::MAX);
            let described = header.is_reply() && header.command() == Command::DEVICE_GET_REGION_INFO;
            assert_eq!(std::mem::take(&mut fd), described && size > PLAIN_REGION, "a descriptor with {header:?}");
            rest = rest.get(size..).unwrap_or_default();
        }
        all.extend_from_slice(bytes);
        let len = bytes.len();
        out.advance(len);
    }
    all
}

struct Run {
    link: Link,
    device: Checked,
    connection: Option<Connection>,
    options: ServerOptions,
    /// Set while the stream is framed correctly.
    framed: bool,
    next_id: u16,
    files: Vec<OwnedFd>,
    /// Server requests to which the client has not replied.
    requests: Vec<(Header, DmaAccess)>,
}

/// Runs the steps encoded in `bytes`. Panics if a check fails.
pub fn run(bytes: &[u8]) {
    let Ok(link) = Link::new(IrqCounts { intx: 1, msi: 4, msix: 2, err: 1, req: 1 }) else { return };
    let Some(device) = Checked::new() else { return };
    let memory = MemoryLimits { regions: MAX_REGIONS, mapped_bytes: 1 << 24, ..MemoryLimits::default() };
    let options = ServerOptions { memory, max_transfer: 4096, ..ServerOptions::default() };
    let mut run = Run {
        link,
        device,
        connection: None,
        options,
        framed: true,
        next_id: 0,
        files: Vec::new(),
        requests: Vec::new(),
    };
    run.connect();
    for step in decode(bytes) {
        if let Err(_fatal) = run.step(step) {
            run.reconnect();
        }
    }
    run.close();
    assert!(run.link.memory().snapshot().regions().is_empty());
    assert_eq!(run.link.interrupts().msi_attached(), 0);
}

impl Run {
    fn connect(&mut self) {
        let client = ClientInfo { pid: 0, uid: 0, domain: None };
        self.connection = Some(Connection::new(self.link.clone(), &self.options, client));
        self.framed = true;
        self.requests.clear();
        let body = [Version { major: 0, minor: 0 }.as_bytes(), QEMU_CAPABILITIES.as_bytes(), &[0]].concat();
        let negotiated = self.message(Command::VERSION, 0, &body, Vec::new());
        assert!(negotiated.is_ok());
    }

    fn close(&mut self) {
        if let Some(connection) = self.connection.take() {
            connection.close(&mut self.device);
        }
        assert!(!self.device.connected);
        self.files.clear();
    }

    fn reconnect(&mut self) {
        self.close();
        self.connect();
    }

    fn step(&mut self, step: Step) -> Result<(), Fatal> {
        match step {
            Step::Raw(bytes) => {
                self.framed = false;
                self.feed(&bytes, Vec::new()).map(drop)
            }
            Step::Message { command, flags, fds, kind, body } => {
                let fds = (0..fds).filter_map(|_| self.descriptor(kind)).collect();
                self.message(Command(command.into()), flags.into(), &body, fds)
            }
            Step::Interrupt(which) => {
                match which {
                    0 | 1 => self.link.interrupts().set_intx_level(which == 1),
                    _ => drop(self.link.interrupts().trigger_msi(u32::from(which.saturating_sub(2)))),
                }
                Ok(())
            }
            Step::Dma(page, len) => {
                // The tests of `dma` check the result. Here, it may arrive at any time or never.
                let _ = self.link.dma().read(u64::from(page) << 12, usize::from(len));
                self.feed(&[], Vec::new()).map(drop)
            }
            Step::Answer(errno) => self.answer(errno),
            Step::CheckShared => {
                self.link.check_shared();
                self.feed(&[], Vec::new()).map(drop)
            }
            Step::Touch(page) => {
                let _ = self.link.memory().read(u64::from(page) << 12, &mut [0; 8]);
                self.feed(&[], Vec::new()).map(drop)
            }
            Step::Truncate(pages) => {
                for file in &self.files {
                    let _ = rustix::fs::ftruncate(file, (u64::from(pages) << 12).min(FILE_SIZE));
                }
                Ok(())
            }
            Step::Reconnect => {
                self.reconnect();
                Ok(())
            }
        }
    }

    fn descriptor(&mut self, kind: u8) -> Option<OwnedFd> {
        match kind {
            0 => eventfd(0, EventfdFlags::CLOEXEC).ok(),
            1 => memory_file(FILE_SIZE, true).ok(),
            2 => {
                let file = memory_file(FILE_SIZE, false).ok()?;
                self.files.push(file.as_fd().try_clone_to_owned().ok()?);
                Some(file)
            }
            _ => rustix::pipe::pipe().ok().map(|(reader, _)| reader),
        }
    }

    fn message(&mut self, command: Command, flags: u32, body: &[u8], fds: Vec<OwnedFd>) -> Result<(), Fatal> {
        let id = self.next_id;
        self.next_id = id.wrapping_add(1);
        let size = u32::try_from(HEADER_SIZE.saturating_add(body.len())).unwrap_or(u32::MAX);
        let header = Header::request(id, command, size, flags);
        let replies = self.feed(&[header.as_bytes(), body].concat(), fds)?;
        if self.framed {
            let wanted = flags & FLAG_NO_REPLY == 0 && !header.is_reply();
            let ours: Vec<_> = replies.iter().filter(|reply| reply.id == id && reply.command == command.0).collect();
            assert_eq!(replies.len(), ours.len());
            assert_eq!(ours.len(), usize::from(wanted), "replies to {header:?}");
        }
        Ok(())
    }

    /// Feeds bytes to the connection. Returns the headers of its replies.
    fn feed(&mut self, bytes: &[u8], fds: Vec<OwnedFd>) -> Result<Vec<Header>, Fatal> {
        let Some(connection) = &mut self.connection else { return Ok(Vec::new()) };
        let mut fds = Some(fds);
        let (mut rest, mut replies) = (bytes, Vec::new());
        loop {
            let before = rest.len();
            rest = connection.handle_bytes(&mut self.device, rest, fds.take().unwrap_or_default())?;
            connection.work(&mut self.device)?;
            let waiting = connection.pending_output();
            assert!(waiting < MAX_OUTPUT, "{waiting} bytes of output");
            let out = take(connection.output());
            let mut out = &out[..];
            while let Ok((header, body)) = Header::read_from_prefix(out) {
                let len = usize::try_from(header.size).ok().and_then(|size| size.checked_sub(HEADER_SIZE));
                let (body, tail) = body.split_at_checked(len.unwrap_or(usize::MAX)).unwrap_or_else(|| {
                    panic!("the message {header:?} is longer than the output");
                });
                if header.is_reply() {
                    replies.push(header);
                } else if let Ok((access, _)) = DmaAccess::read_from_prefix(body) {
                    self.requests.push((header, access));
                }
                out = tail;
            }
            assert!(out.is_empty());
            if rest.is_empty() || rest.len() == before {
                return Ok(replies);
            }
        }
    }

    fn answer(&mut self, errno: u8) -> Result<(), Fatal> {
        if self.requests.is_empty() || !self.framed {
            return Ok(());
        }
        let (request, access) = self.requests.remove(0);
        let mut body = access.as_bytes().to_vec();
        body.resize(body.len().saturating_add(usize::try_from(access.count).unwrap_or(0).min(8192)), errno);
        let flags = if errno < 128 { FLAG_TYPE_REPLY } else { FLAG_TYPE_REPLY | crate::protocol::FLAG_ERROR };
        let size = u32::try_from(HEADER_SIZE.saturating_add(body.len())).unwrap_or(u32::MAX);
        let reply = Header { size, flags, error: u32::from(errno), ..request };
        self.feed(&[reply.as_bytes(), &body].concat(), Vec::new()).map(drop)
    }
}
