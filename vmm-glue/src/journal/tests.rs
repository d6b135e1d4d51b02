//! Tests journals that are truncated, modified, outdated or incomplete, and a journal with too many descriptors.

use std::os::fd::{AsRawFd, BorrowedFd};
use std::path::PathBuf;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use rustix::event::{EventfdFlags, eventfd};

use super::*;
use crate::client::memory_file;
use crate::connection::Connection;
use crate::device::{AccessError, Ack, Deferred, MapError, NUM_REGIONS, RegionIndex, RegionInfo};
use crate::link::{ClientInfo, Link};
use crate::protocol::{Command, DmaMap, DmaUnmap, HEADER_SIZE, Header, RegionAccess};
use crate::server::ServerOptions;
use crate::{Device, IrqCounts};
use vmm_memory::memory::DmaRegion;
use zerocopy::IntoBytes;

const VERSION: &[u8] = b"\0\0\x01\0{\"capabilities\":{}}\0";
const CLIENT_INFO: ClientInfo = ClientInfo { pid: 0, uid: 0, domain: None };

/// A stand-in for the service manager.
#[derive(Debug, Default)]
struct Store {
    kept: Mutex<Vec<(Kept, OwnedFd)>>,
    /// Number of changes. `busy` simulates a store with too many changes.
    changes: AtomicUsize,
    busy: AtomicBool,
}

impl Store {
    fn remains(&self) -> Vec<(Kept, OwnedFd)> {
        self.kept.lock().unwrap().iter().map(|(what, fd)| (*what, fd.try_clone().unwrap())).collect()
    }

    fn names(&self) -> Vec<Kept> {
        let mut names: Vec<_> = self.kept.lock().unwrap().iter().map(|(what, _)| *what).collect();
        names.sort_unstable();
        names
    }
}

impl Keeper for Store {
    fn keep(&self, _: BorrowedFd<'_>) {}
    fn release(&self) {}

    fn keeps_more(&self) -> bool {
        true
    }

    fn is_busy(&self) -> bool {
        self.busy.load(Ordering::Relaxed)
    }

    fn keep_more(&self, what: Kept, fd: BorrowedFd<'_>) -> bool {
        self.give_up(what);
        self.kept.lock().unwrap().push((what, fd.try_clone_to_owned().unwrap()));
        true
    }

    fn give_up(&self, what: Kept) {
        self.changes.fetch_add(1, Ordering::Relaxed);
        self.kept.lock().unwrap().retain(|(of, _)| *of != what);
    }
}

/// A device that consists of a configuration space and defers all writes. The second field is the deferred write.
#[derive(Debug)]
struct Words(Vec<u8>, Option<(u64, Vec<u8>)>);

impl Words {
    /// Creates a device with 256 bytes of the value `byte`.
    fn of(byte: u8) -> Self {
        Self(vec![byte; 256], None)
    }
}

impl Device for Words {
    fn regions(&self) -> [RegionInfo; NUM_REGIONS] {
        let mut regions: [RegionInfo; NUM_REGIONS] = Default::default();
        regions[RegionIndex::Config as usize] = RegionInfo::read_write(self.0.len() as u64);
        regions
    }

    fn region_read(&mut self, _: RegionIndex, offset: u64, data: &mut [u8]) -> Result<(), AccessError> {
        data.copy_from_slice(&self.0[offset as usize..][..data.len()]);
        Ok(())
    }

    fn region_write(&mut self, _: RegionIndex, offset: u64, data: &[u8]) -> Result<Ack, AccessError> {
        assert_eq!(self.1.replace((offset, data.to_vec())), None);
        Ok(Ack::Deferred(Deferred::default()))
    }

    fn complete(&mut self, _: Deferred) {
        let (offset, data) = self.1.take().unwrap();
        self.0[offset as usize..][..data.len()].copy_from_slice(&data);
    }

    fn dma_map(&mut self, _: &DmaRegion) -> Result<(), MapError> {
        Ok(())
    }

    fn dma_unmap(&mut self, _: u64, _: u64) {}
    fn reset(&mut self) {}
    fn disconnected(&mut self) {}

    fn is_renewable(&self) -> bool {
        true
    }
}

fn message(id: u16, command: Command, body: &[u8]) -> Vec<u8> {
    let size = u32::try_from(HEADER_SIZE + body.len()).unwrap();
    [Header::request(id, command, size, 0).as_bytes(), body].concat()
}

fn map(id: u16, address: u64) -> Vec<u8> {
    message(id, Command::DMA_MAP, DmaMap { argsz: 32, flags: 3, offset: 0, address, size: 0x1000 }.as_bytes())
}

/// A process that serves a client until it is killed.
struct Process {
    store: Arc<Store>,
    link: Link,
    device: Words,
    connection: Connection,
}

fn link() -> Link {
    Link::new(IrqCounts { intx: 1, msi: 2, ..IrqCounts::default() }).unwrap()
}

impl Process {
    fn new() -> Self {
        let (store, link, mut device) = (Arc::<Store>::default(), link(), Words::of(7));
        let mut connection = Connection::new(link.clone(), &ServerOptions::default(), CLIENT_INFO);
        connection.keep_journal(&(Arc::clone(&store) as Arc<dyn Keeper>), &mut device);
        let mut process = Self { store, link, device, connection };
        process.feed(&message(0, Command::VERSION, VERSION), vec![]);
        process
    }

    /// Receives and handles messages. Returns the replies.
    fn feed(&mut self, bytes: &[u8], fds: Vec<OwnedFd>) -> Vec<u8> {
        self.connection.handle_bytes(&mut self.device, bytes, fds).unwrap();
        self.connection.work(&mut self.device).unwrap();
        self.connection.output().take()
    }

    fn lend(&mut self, address: u64) {
        let answer = self.feed(&map(1, address), vec![memory_file(0x1000, true).unwrap()]);
        assert_eq!(answer.len(), HEADER_SIZE);
    }

    /// Creates the next process from the descriptors left by the previous one.
    fn next(&self, kept: Vec<(Kept, OwnedFd)>) -> Result<Self, ParkError> {
        let (store, link) = (Arc::clone(&self.store), link());
        let keeper = Arc::clone(&store) as Arc<dyn Keeper>;
        let connection = Journal::restored(keeper, kept, &link, CLIENT_INFO, &ServerOptions::default())?;
        Ok(Self { store, link, device: Words::of(0), connection })
    }

    fn regions(&self) -> usize {
        self.link.memory().snapshot().regions().len()
    }
}

fn path(fd: &OwnedFd) -> PathBuf {
    format!("/proc/self/fd/{}", fd.as_raw_fd()).into()
}

fn journal(kept: &[(Kept, OwnedFd)]) -> &OwnedFd {
    &kept.iter().find(|(what, _)| *what == Kept::Journal).unwrap().1
}

#[test]
fn next_process_restores_client_memory_and_device_config() {
    let mut process = Process::new();
    for address in [0, 0x10_0000, 0x20_0000] {
        process.lend(address);
    }
    for deaths in 1..=3 {
        let mut next = process.next(process.store.remains()).unwrap();
        assert_eq!(next.regions(), 3);
        next.connection.resume(&mut next.device).unwrap();
        // All dwords are restored, except for the upper half of the dword with the command register.
        assert_eq!((next.device.0[0], next.device.0[5], next.device.0[255]), (7, 7, 7));
        assert_eq!(next.link.counters().snapshot().daemon_deaths_survived, deaths);
        let slots: Vec<_> = [Kept::Journal].into_iter().chain((0..3).map(Kept::Slot)).collect();
        assert_eq!(next.store.names(), slots, "no descriptor was stored twice");
        process = next;
        process.device = Words::of(7);
    }
    let unmap = crate::protocol::DmaUnmap { argsz: 24, flags: 0, address: 0x10_0000, size: 0x1000 };
    process.feed(&message(9, Command::DMA_UNMAP, unmap.as_bytes()), vec![]);
    assert_eq!(process.store.names(), [Kept::Journal, Kept::Slot(0), Kept::Slot(2)]);
}

#[test]
fn journal_contains_deferred_write_of_configuration() {
    let mut process = Process::new();
    let access = RegionAccess { offset: 0x40, region: RegionIndex::Config as u32, count: 4 };
    process.feed(&message(1, Command::REGION_WRITE, &[access.as_bytes(), &[1, 2, 3, 4]].concat()), vec![]);
    let mut next = process.next(process.store.remains()).unwrap();
    next.connection.resume(&mut next.device).unwrap();
    assert_eq!(next.device.0[0x40..0x44], [1, 2, 3, 4]);
}

#[test]
fn bytes_that_were_received_are_handled_by_the_next_process() {
    let mut process = Process::new();
    process.lend(0);
    // The process is killed after receiving the message and its descriptors, and before handling them.
    let bytes = map(5, 0x40_0000);
    process.connection.space()[..bytes.len()].copy_from_slice(&bytes);
    process.connection.received(bytes.len(), vec![memory_file(0x1000, true).unwrap()], false);
    let mut next = process.next(process.store.remains()).unwrap();
    next.connection.resume(&mut next.device).unwrap();
    next.connection.process(&mut next.device, 4096).unwrap();
    assert_eq!((next.regions(), next.connection.output().take()[0]), (2, 5));

    // The process is killed after receiving the bytes, and before marking their end.
    let mut process = Process::new();
    let bytes = message(6, Command::DEVICE_GET_INFO, &[0; 16]);
    process.connection.space()[..bytes.len()].copy_from_slice(&bytes);
    let mut next = process.next(process.store.remains()).unwrap();
    next.connection.resume(&mut next.device).unwrap();
    next.connection.process(&mut next.device, 4096).unwrap();
    assert_eq!(next.connection.output().take()[0], 6);

    // Repeat this with descriptors, which are lost.
    let mut process = Process::new();
    let bytes = map(7, 0);
    process.connection.space()[..bytes.len()].copy_from_slice(&bytes);
    let lost = process.next(process.store.remains()).err().unwrap().to_string();
    assert!(lost.contains("receiving descriptors"), "{lost}");
}

#[test]
fn committed_but_unsent_answer_is_sent_once_by_next_process() {
    let mut process = Process::new();
    let bytes = map(5, 0);
    process.connection.space()[..bytes.len()].copy_from_slice(&bytes);
    process.connection.received(bytes.len(), vec![memory_file(0x1000, true).unwrap()], false);
    process.connection.process(&mut process.device, 4096).unwrap();
    // The socket is full, so no part of the reply was sent.
    process.connection.left_unsent();
    let mut next = process.next(process.store.remains()).unwrap();
    next.connection.resume(&mut next.device).unwrap();
    next.connection.process(&mut next.device, 4096).unwrap();
    assert_eq!((next.regions(), next.connection.output().take().len()), (1, HEADER_SIZE));
    // Now the reply has been sent.
    next.connection.work(&mut next.device).unwrap();
    let mut after = next.next(next.store.remains()).unwrap();
    assert_eq!((after.regions(), after.connection.output().len()), (1, 0));
}

#[test]
fn commit_that_was_cut_or_edited_leaves_the_one_before_it() {
    let mut process = Process::new();
    process.lend(0);
    process.lend(0x10_0000);
    let kept = process.store.remains();
    let whole = std::fs::read(path(journal(&kept))).unwrap();
    let lengths = [4096, 4096 + file::HALF_BYTES];
    let length = |at: usize| usize::try_from(u64::from_le_bytes(whole[at..at + 8].try_into().unwrap())).unwrap();
    // Select by size, because the newer commit is larger.
    let newer = lengths.into_iter().max_by_key(|at| length(*at)).unwrap();
    let fd = journal(&kept);
    for at in (0..length(newer)).step_by(37) {
        let byte = whole[newer + 8 + at];
        rustix::io::pwrite(fd, &[byte ^ 1], (newer + 8 + at) as u64).unwrap();
        let regions = process.next(process.store.remains()).map(|next| next.regions());
        // The next process restores the older commit, withdraws a file, or rejects the journal.
        assert!(matches!(regions, Ok(1 | 2) | Err(_)), "{at}: {regions:?}");
        rustix::io::pwrite(fd, &[byte], (newer + 8 + at) as u64).unwrap();
    }
    // Test an incomplete half.
    rustix::io::pwrite(fd, &0u64.to_le_bytes(), newer as u64).unwrap();
    assert!(process.next(process.store.remains()).unwrap().regions() < 2);
    for at in lengths {
        rustix::io::pwrite(fd, &u64::MAX.to_le_bytes(), at as u64).unwrap();
    }
    let said = process.next(process.store.remains()).err().unwrap().to_string();
    assert!(said.contains("nothing was committed"), "{said}");
}

#[test]
fn invalid_or_incomplete_journal_is_rejected() {
    let mut process = Process::new();
    process.lend(0);
    let without = |what: Kept| {
        let kept = process.store.remains().into_iter().filter(|(of, _)| *of != what).collect();
        process.next(kept).err().unwrap().to_string()
    };
    assert!(without(Kept::Journal).contains("its journal is missing"));
    assert!(without(Kept::Slot(0)).contains("descriptor 0 is missing"));
    let instead = |what: Kept, fd: OwnedFd| {
        let mut kept = process.store.remains();
        kept.iter_mut().filter(|(of, _)| *of == what).for_each(|(_, there)| *there = fd.try_clone().unwrap());
        process.next(kept)
    };
    assert!(instead(Kept::Journal, memory_file(4096, true).unwrap()).is_err());
    assert!(instead(Kept::Journal, eventfd(0, EventfdFlags::CLOEXEC).unwrap()).is_err());
    // A file that cannot be mapped is treated as memory withdrawn by the client. Only this client loses its device, as
    // in an upgrade.
    let next = instead(Kept::Slot(0), eventfd(0, EventfdFlags::CLOEXEC).unwrap()).unwrap();
    let regions = next.link.memory().snapshot();
    assert!(regions.regions().len() == 1 && regions.regions()[0].is_withdrawn());
    // Test marks that do not match a connection.
    let kept = process.store.remains();
    for word in 8..40u64 {
        rustix::io::pwrite(journal(&kept), &u64::MAX.to_le_bytes(), word * 8).unwrap();
    }
    assert!(process.next(process.store.remains()).is_err());
}

#[test]
fn device_of_another_kind_is_not_the_clients() {
    let process = Process::new();
    let mut next = process.next(process.store.remains()).unwrap();
    next.device = Words(vec![0; 512], None);
    let said = next.connection.resume(&mut next.device).unwrap_err().to_string();
    assert!(said.contains("regions have changed"), "{said}");
}

#[test]
fn client_with_too_many_descriptors_loses_its_journal() {
    let mut process = Process::new();
    for file in 0..u64::from(SLOTS) {
        process.lend(file * 0x1000);
    }
    assert_eq!(process.store.names().len(), usize::from(SLOTS) + 1);
    process.lend(0x100_0000);
    assert_eq!(process.store.names(), []);
    // The client is still served, without a journal.
    process.lend(0x200_0000);
    assert_eq!((process.regions(), process.store.names()), (usize::from(SLOTS) + 2, vec![]));
}

fn unmap(id: u16, address: u64) -> Vec<u8> {
    message(id, Command::DMA_UNMAP, DmaUnmap { argsz: 24, flags: 0, address, size: 0x1000 }.as_bytes())
}

#[test]
fn frequent_remapping_stops_changing_the_store() {
    let mut process = Process::new();
    let file = memory_file(0x1000, true).unwrap();
    let turn = |process: &mut Process, file: &OwnedFd| {
        process.feed(&map(1, 0), vec![file.try_clone().unwrap()]);
        process.feed(&unmap(2, 0), vec![]);
    };
    // While changes are rare, unused files are dropped immediately.
    turn(&mut process, &file);
    assert_eq!(process.store.names(), [Kept::Journal]);
    process.store.busy.store(true, Ordering::Relaxed);
    turn(&mut process, &file);
    let before = process.store.changes.load(Ordering::Relaxed);
    (0..100).for_each(|_| turn(&mut process, &file));
    assert_eq!(process.store.changes.load(Ordering::Relaxed), before);
    // No data is lost: if the process is killed while the client has the file mapped, the next process receives the
    // file.
    process.feed(&map(1, 0), vec![file.try_clone().unwrap()]);
    let next = process.next(process.store.remains()).unwrap();
    assert_eq!(next.regions(), 1);
    // A new file is recognized even if it reuses the descriptor number of the first file.
    process.feed(&unmap(2, 0), vec![]);
    let other = memory_file(0x1000, true).unwrap();
    process.feed(&map(1, 0), vec![other.try_clone().unwrap()]);
    assert_eq!(process.store.names().len(), 3, "{:?}", process.store.names());
    process.feed(&unmap(2, 0), vec![]);
    // Unused files are dropped to free slots for used ones.
    for file in 0..u64::from(SLOTS) {
        process.lend(file * 0x1000);
    }
    assert_eq!((process.regions(), process.store.names().len()), (usize::from(SLOTS), usize::from(SLOTS) + 1));
    // Once changes are rare again, the next change drops unused files.
    process.store.busy.store(false, Ordering::Relaxed);
    for file in 1..u64::from(SLOTS) {
        process.feed(&unmap(2, file * 0x1000), vec![]);
    }
    assert_eq!(process.store.names().len(), 2);
}
