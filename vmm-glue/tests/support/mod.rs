//! A device that reports its calls, and a server that runs for one test.
#![allow(dead_code, reason = "each test file uses part of it")]

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread::JoinHandle;
use std::time::Duration;

use vmm_glue::client::{Client, QEMU_CAPABILITIES};
use vmm_glue::device::NUM_REGIONS;
use vmm_glue::server::Keeper;
use vmm_glue::{
    AccessError, Ack, Deferred, Device, DmaRegion, IrqCounts, Link, MapError, RegionIndex, RegionInfo, Server,
    ServerOptions, SocketOptions, StopHandle,
};

/// Timeout for an expected event. Only a failing test waits this long.
pub const EVENT_TIMEOUT: Duration = Duration::from_secs(20);

/// Size of BAR0 in bytes.
pub const BAR0_SIZE: u64 = 0x2000;
/// Offset at which writes are rejected.
pub const DENIED: u64 = 0x1000;
/// Offset at which writes are deferred, and reported on completion.
pub const DEFERRED_WRITE_AT: u64 = 0x1010;
/// Offset at which writes request a memory sharing check.
pub const CHECK_SHARED: u64 = 0x1008;

/// Events received by a device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Event {
    Connected,
    Read(RegionIndex, u64, usize),
    Write(RegionIndex, u64, Vec<u8>),
    Completed(Vec<u8>),
    Map { gpa: u64, size: u64, readable: bool, writable: bool, mapped: bool },
    Unmap { gpa: u64, size: u64 },
    Reset,
    Disconnected,
    NotShared(u64),
}

pub struct TestDevice {
    pub link: Link,
    pub events: Sender<Event>,
    pub bar0: Vec<u8>,
    pub bar1: RegionInfo,
    /// Address at which maps are rejected.
    pub refused_map: Option<u64>,
    /// Channel from which each unmap, after it is reported, receives a message before it returns.
    pub held_unmap: Option<Receiver<()>>,
    /// Data of a deferred write.
    pub deferred: Option<Vec<u8>>,
    pub held_completion: Option<Receiver<()>>,
}

impl TestDevice {
    pub fn new(link: Link, events: Sender<Event>) -> Self {
        Self {
            link,
            events,
            bar0: vec![0; BAR0_SIZE as usize],
            bar1: RegionInfo::default(),
            refused_map: None,
            held_unmap: None,
            deferred: None,
            held_completion: None,
        }
    }

    /// Reports a call. Checks that the call does not overtake a deferred write.
    fn tell(&self, event: Event) {
        assert_eq!(self.deferred, None, "{event:?} arrived before the deferred write was completed");
        let _ = self.events.send(event);
    }
}

impl Device for TestDevice {
    fn regions(&self) -> [RegionInfo; NUM_REGIONS] {
        let mut regions: [RegionInfo; NUM_REGIONS] = Default::default();
        regions[0] = RegionInfo::read_write(BAR0_SIZE);
        regions[1] = self.bar1.clone();
        regions[RegionIndex::Rom as usize] = RegionInfo::read_only(0x1000);
        regions[RegionIndex::Config as usize] = RegionInfo::read_write(0x1000);
        regions
    }

    fn connected(&mut self) {
        self.tell(Event::Connected);
    }

    fn region_read(&mut self, region: RegionIndex, offset: u64, data: &mut [u8]) -> Result<(), AccessError> {
        self.tell(Event::Read(region, offset, data.len()));
        if region == RegionIndex::Bar0 && offset == DENIED {
            return Err(AccessError::Denied);
        }
        if region == RegionIndex::Bar0 {
            data.copy_from_slice(&self.bar0[offset as usize..][..data.len()]);
        }
        Ok(())
    }

    fn region_write(&mut self, region: RegionIndex, offset: u64, data: &[u8]) -> Result<Ack, AccessError> {
        if (region, offset) == (RegionIndex::Bar0, DEFERRED_WRITE_AT) {
            assert_eq!(
                self.deferred.replace(data.to_vec()),
                None,
                "the last deferred write is completed before the next"
            );
            return Ok(Ack::Deferred(Deferred::default()));
        }
        self.tell(Event::Write(region, offset, data.to_vec()));
        match (region, offset) {
            (RegionIndex::Bar0, DENIED) => return Err(AccessError::Denied),
            (RegionIndex::Bar0, CHECK_SHARED) => self.link.check_shared(),
            (RegionIndex::Bar0, _) => self.bar0[offset as usize..][..data.len()].copy_from_slice(data),
            _ => (),
        }
        Ok(Ack::Done)
    }

    fn complete(&mut self, _: Deferred) {
        if let Some(held) = &self.held_completion {
            held.recv_timeout(EVENT_TIMEOUT).expect("the test releases the call");
        }
        let data = self.deferred.take().expect("a write was deferred");
        self.bar0[DEFERRED_WRITE_AT as usize..][..data.len()].copy_from_slice(&data);
        self.tell(Event::Completed(data));
    }

    fn dma_map(&mut self, region: &DmaRegion) -> Result<(), MapError> {
        let DmaRegion { gpa, size, readable, writable, mapping, .. } = region;
        if self.refused_map == Some(*gpa) {
            return Err(MapError("the device rejects this address".into()));
        }
        let mapped = mapping.is_some();
        self.tell(Event::Map { gpa: *gpa, size: *size, readable: *readable, writable: *writable, mapped });
        Ok(())
    }

    fn dma_unmap(&mut self, gpa: u64, size: u64) {
        self.tell(Event::Unmap { gpa, size });
        if let Some(held) = &self.held_unmap {
            held.recv_timeout(EVENT_TIMEOUT).expect("the test releases the call");
        }
    }

    fn reset(&mut self) {
        self.tell(Event::Reset);
    }

    fn disconnected(&mut self) {
        self.bar0.fill(0);
        self.tell(Event::Disconnected);
    }

    fn memory_not_shared(&mut self, gpa: u64) {
        self.tell(Event::NotShared(gpa));
    }
}

pub const IRQS: IrqCounts = IrqCounts { intx: 1, msi: 4, msix: 0, err: 0, req: 0 };

/// A running server.
pub struct Host {
    pub link: Link,
    pub events: Receiver<Event>,
    pub stop: StopHandle,
    pub path: PathBuf,
    thread: Option<JoinHandle<()>>,
    _directory: tempfile::TempDir,
}

impl Host {
    pub fn start() -> Self {
        Self::start_with(ServerOptions::default(), |_| ())
    }

    pub fn start_with(options: ServerOptions, prepare: impl FnOnce(&mut TestDevice)) -> Self {
        Self::start_as(prepare, |path| Server::bind(path, &SocketOptions::default(), options).unwrap())
    }

    pub fn kept_by(keeper: Arc<dyn Keeper>) -> Self {
        let server = |path: &Path| Server::bind(path, &SocketOptions::default(), ServerOptions::default()).unwrap();
        Self::start_as(|_| (), |path| server(path).kept_by(Some(keeper)))
    }

    fn start_as(prepare: impl FnOnce(&mut TestDevice), bind: impl FnOnce(&Path) -> Server) -> Self {
        let make = |link: Link, sender| {
            let mut device = TestDevice::new(link, sender);
            prepare(&mut device);
            Box::new(device) as Box<dyn Device>
        };
        Self::serve(make, bind)
    }

    /// Serves a device that reports no events.
    pub fn start_device(make: impl FnOnce(Link) -> Box<dyn Device>) -> Self {
        let server = |path: &Path| Server::bind(path, &SocketOptions::default(), ServerOptions::default()).unwrap();
        let make = |link, sender: Sender<Event>| {
            sender.send(Event::Connected).unwrap();
            make(link)
        };
        Self::serve(make, server)
    }

    fn serve(make: impl FnOnce(Link, Sender<Event>) -> Box<dyn Device>, bind: impl FnOnce(&Path) -> Server) -> Self {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("device.sock");
        let link = Link::new(IRQS).unwrap();
        let (sender, events) = channel();
        let mut device = make(link.clone(), sender);
        let stop = StopHandle::new().unwrap();
        let server = bind(&path);
        let thread = std::thread::spawn({
            let (link, stop) = (link.clone(), stop.clone());
            move || server.run(&link, &mut *device, &stop).unwrap()
        });
        Self { link, events, stop, path, thread: Some(thread), _directory: directory }
    }

    pub fn client(&self) -> Client {
        self.client_as(QEMU_CAPABILITIES)
    }

    pub fn client_as(&self, capabilities: &str) -> Client {
        let client = Client::connect_as(&self.path, capabilities).unwrap();
        client.set_timeout(Some(EVENT_TIMEOUT)).unwrap();
        self.expect(Event::Connected);
        client
    }

    /// Returns the device's next event.
    #[track_caller]
    pub fn next(&self) -> Event {
        self.events.recv_timeout(EVENT_TIMEOUT).expect("the device receives a call")
    }

    #[track_caller]
    pub fn expect(&self, event: Event) {
        assert_eq!(self.next(), event);
    }

    /// Waits for an event, skipping earlier ones.
    #[track_caller]
    pub fn wait_for(&self, event: &Event) {
        while self.next() != *event {}
    }

    pub fn quiet(&self) -> bool {
        self.events.try_recv().is_err()
    }
}

impl Drop for Host {
    fn drop(&mut self) {
        self.stop.stop();
        let result = self.thread.take().map(JoinHandle::join);
        if !std::thread::panicking() {
            result.unwrap().unwrap();
        }
    }
}

/// Error numbers that tests expect.
pub const E2BIG: Option<u32> = Some(7);
pub const EACCES: Option<u32> = Some(13);
pub const EBUSY: Option<u32> = Some(16);
pub const EEXIST: Option<u32> = Some(17);
pub const EINVAL: Option<u32> = Some(22);
pub const ENOTTY: Option<u32> = Some(25);
pub const ENOSPC: Option<u32> = Some(28);
pub const ENOSYS: Option<u32> = Some(38);
pub const ENOTSUP: Option<u32> = Some(95);
