//! A simulated guest driver, and workers that are threads of this process.
#![allow(dead_code, reason = "each test file uses a part of it")]

use std::collections::BTreeMap;
use std::fs::File;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags};
use saved_state::{Part, SavedState, Writer};
use vcuda::{CudaDevice, CudaFunction, Launcher, Limits, Process, ProcessId, SavedFunction, Started};
use vm_memory::{Bytes, FileOffset, MmapRegion, VolatileMemory};
use vmm_glue::mappable::region_memory;
use vmm_glue::{Ack, Device, Link, RegionIndex};
use worker_link::{FromWorker, LinkError, Obstacle, Rejoin, ToWorker};

/// Size of guest memory in bytes.
pub const RAM: u64 = 4 << 20;
/// Size of the window in bytes.
pub const WINDOW: u64 = vcuda::MIN_WINDOW_BYTES;
/// Number of entries of the queue.
const ENTRIES: u64 = 64;
const DESCRIPTORS: u64 = 0x1000;
const AVAILABLE: u64 = 0x2000;
const USED: u64 = 0x3000;
/// Guest address of the table of indirect descriptors.
pub const TABLE: u64 = 0x10_0000;
const COMMAND: u64 = 0x1_0000;
const ANSWER: u64 = 0x2_0000;
/// Distance between the buffers of consecutive command slots in bytes.
const STEP: u64 = 0x200;
/// Time limit for a response or another wait.
// TIMEOUT: the executor responds within microseconds, unless the host is busy.
const ANSWERED: Duration = Duration::from_secs(60);

/// Limits of the device.
const LIMITS: Limits = Limits { window_bytes: WINDOW, workers: 4 };

/// An event of a worker.
#[derive(Debug, PartialEq, Eq)]
pub enum Event {
    Started,
    Message(ToWorker),
    Ended,
}

/// Starts threads as workers. At a doorbell, the thread adds 1 to the first word of its control blob.
pub struct Threads {
    events: Sender<Event>,
    /// If set, each start waits for a message.
    pub gate: Option<Receiver<()>>,
    pub refuses: bool,
    /// Threads that the next device can adopt.
    pub known: Known,
    /// Socket that threads use to find the next device, and the time for which the next device waits for them.
    pub rejoin: Option<Rejoin>,
    /// Set if the threads do not try to connect to the next device, as if they were stopped.
    pub are_stopped: Arc<AtomicBool>,
    /// Card that the threads use.
    pub card: &'static str,
}

/// Threads that a later device may adopt, keyed by number.
pub type Known = Arc<Mutex<BTreeMap<u64, Thread>>>;

impl Threads {
    fn new(events: &Sender<Event>, known: &Known, rejoin: &Option<Rejoin>) -> Self {
        let (known, rejoin, are_stopped) = (Arc::clone(known), rejoin.clone(), Arc::default());
        Self { events: events.clone(), gate: None, refuses: false, known, rejoin, are_stopped, card: "one" }
    }
}

pub struct Thread {
    id: u64,
    ended: OwnedFd,
    socket: Socket,
    killed: Arc<AtomicBool>,
}

/// Socket of a thread's current link. Killing the thread shuts the socket down.
type Socket = Arc<Mutex<OwnedFd>>;

impl Thread {
    fn again(&self) -> Self {
        let (socket, killed) = (Arc::clone(&self.socket), Arc::clone(&self.killed));
        Self { id: self.id, ended: self.ended.try_clone().unwrap(), socket, killed }
    }
}

impl Process for Thread {
    fn ended(&self) -> BorrowedFd<'_> {
        self.ended.as_fd()
    }

    fn kill(&mut self) {
        self.killed.store(true, Ordering::Release);
        let _ = rustix::net::shutdown(&*self.socket.lock().unwrap(), rustix::net::Shutdown::Both);
    }

    fn reap(&mut self) {}

    fn id(&self) -> Option<ProcessId> {
        // All threads connect with this process's ID.
        Some(ProcessId { pid: std::process::id() as i32, started: self.id })
    }

    fn leave(&mut self) {}
}

/// Offset in the control blob of the word that selects a [`behaviour`].
pub const BEHAVIOUR: u64 = 0x800;

/// Behaviours of a worker that is requested to save its state.
pub mod behaviour {
    /// Saves the state. The new worker continues.
    pub const SAVES: u64 = 0;
    /// Refuses to save.
    pub const REFUSES: u64 = 1;
    /// Exits without a reply.
    pub const ENDS: u64 = 2;
    /// Saves the state. The new worker exits.
    pub const NEXT_ENDS: u64 = 3;
    /// Falsely reports that it has restored a state, and does not save its own.
    pub const LIES: u64 = 4;
    /// Continues without a reply.
    pub const IS_SILENT: u64 = 5;
}

impl Launcher for Threads {
    fn launch(&mut self, window: OwnedFd) -> Result<Started, String> {
        self.start(window, None, false)
    }

    fn launch_next(&mut self, window: OwnedFd, state: OwnedFd, is_held: bool) -> Result<Started, String> {
        self.start(window, Some(state), is_held)
    }

    fn card(&self) -> &str {
        self.card
    }

    fn adopt(&mut self, id: ProcessId) -> Option<Box<dyn Process>> {
        let known = self.known.lock().unwrap();
        known.get(&id.started).map(|thread| Box::new(thread.again()) as Box<dyn Process>)
    }

    fn rejoin(&self) -> Option<&Rejoin> {
        self.rejoin.as_ref()
    }
}

impl Threads {
    fn start(&mut self, window: OwnedFd, state: Option<OwnedFd>, is_held: bool) -> Result<Started, String> {
        if self.refuses {
            return Err("refused".to_owned());
        }
        if let Some(gate) = &self.gate {
            gate.recv().map_err(|error| error.to_string())?;
        }
        let (link, theirs) = worker_link::Link::pair().unwrap();
        let socket: Socket = Arc::new(Mutex::new(theirs.as_fd().try_clone_to_owned().unwrap()));
        let (ended, keep) = rustix::pipe::pipe().unwrap();
        let events = self.events.clone();
        let _ = events.send(Event::Started);
        let rejoin = self.rejoin.as_ref().map(|rejoin| (rejoin.socket.clone(), Arc::clone(&self.are_stopped)));
        let killed = Arc::new(AtomicBool::new(false));
        let (is_killed, current) = (Arc::clone(&killed), Arc::clone(&socket));
        std::thread::spawn(move || {
            work(theirs, window, (state, is_held), &events, rejoin, &current, &is_killed);
            let _ = events.send(Event::Ended);
            drop(keep);
        });
        let mut known = self.known.lock().unwrap();
        let id = known.len() as u64;
        let thread = Thread { id, ended, socket, killed };
        known.insert(id, thread.again());
        Ok(Started { link, process: Box::new(thread) })
    }
}

/// Writes the state of a program: the offset of its control blob.
fn save_control(file: &OwnedFd, control: usize) {
    rustix::io::pwrite(file, &[&b"state"[..], &control.to_le_bytes()].concat(), 0).unwrap();
}

/// Returns the offset of the control blob in a saved state, or `None` if the file has no state.
fn saved_control(file: &OwnedFd) -> Option<usize> {
    let mut bytes = [0; 13];
    rustix::io::pread(file, &mut bytes, 0).unwrap();
    let (tag, control) = bytes.split_at(5);
    (tag == b"state").then(|| usize::from_le_bytes(control.try_into().unwrap()))
}

fn work(
    mut link: worker_link::Link,
    window: OwnedFd,
    (state, mut is_held): (Option<OwnedFd>, bool),
    events: &Sender<Event>,
    rejoin: Option<(PathBuf, Arc<AtomicBool>)>,
    socket: &Mutex<OwnedFd>,
    killed: &AtomicBool,
) {
    let was_held = is_held;
    let region = MmapRegion::<()>::from_file(FileOffset::new(File::from(window), 0), WINDOW as usize).unwrap();
    let memory = region.as_volatile_slice();
    let (mut control, mut rung, mut is_arriving) = (0, false, is_held);
    let behaviour = |control| memory.load::<u64>(control + BEHAVIOUR as usize, Ordering::Acquire).unwrap();
    let step = |control: usize| {
        // The test may store to the word at the same time.
        memory.get_atomic_ref::<AtomicU64>(control).unwrap().fetch_add(1, Ordering::AcqRel);
    };
    if let Some(state) = state.as_ref().filter(|_| is_held) {
        control = saved_control(state).unwrap();
        if behaviour(control) == behaviour::NEXT_ENDS {
            return;
        }
        let _ = link.send_from_worker(FromWorker::Restored);
    }
    loop {
        let _ = rustix::event::poll(&mut [PollFd::new(&link, PollFlags::IN)], None);
        let (message, file) = match link.try_receive_in_worker() {
            Ok(received) => received,
            Err(LinkError::WouldBlock) => continue,
            // When the device closes the link, a new worker that still waits to be resumed exits, and an old worker
            // that was held continues.
            Err(LinkError::Closed) if is_arriving => return,
            Err(LinkError::Closed) => match &rejoin {
                Some((path, is_stopped)) if !killed.load(Ordering::Acquire) => {
                    is_held = false;
                    std::thread::sleep(Duration::from_millis(1));
                    if !is_stopped.load(Ordering::Acquire)
                        && let Ok(next) = worker_link::Link::connect(path)
                    {
                        link = next;
                        *socket.lock().unwrap() = link.as_fd().try_clone_to_owned().unwrap();
                        if killed.load(Ordering::Acquire) {
                            return;
                        }
                    }
                    continue;
                }
                _ => return,
            },
            Err(error) => panic!("{error}"),
        };
        let _ = events.send(Event::Message(message));
        match message {
            ToWorker::Blob { kind: 1, offset, .. } => {
                control = offset as usize;
                if let Some(state) = state.as_ref().filter(|_| !was_held) {
                    if saved_control(state).is_none() || behaviour(control) == behaviour::NEXT_ENDS {
                        return;
                    }
                    let _ = link.send_from_worker(FromWorker::Restored);
                }
            }
            ToWorker::Hold => match behaviour(control) {
                behaviour::REFUSES => {
                    let _ = link.send_from_worker(FromWorker::Refused { obstacle: Obstacle::Capture });
                }
                behaviour::ENDS => return,
                behaviour::IS_SILENT => {}
                _ => {
                    is_held = true;
                    save_control(&file.unwrap(), control);
                    let _ = link.send_from_worker(FromWorker::Saved);
                }
            },
            ToWorker::Resume => {
                (is_held, is_arriving) = (false, false);
                if std::mem::take(&mut rung) {
                    step(control);
                    let _ = link.send_from_worker(FromWorker::Check);
                }
            }
            ToWorker::Save => {
                let behaviour = behaviour(control);
                let reply = match behaviour {
                    behaviour::REFUSES => FromWorker::Refused { obstacle: Obstacle::Capture },
                    behaviour::LIES => FromWorker::Restored,
                    behaviour::IS_SILENT => continue,
                    _ => FromWorker::Saved,
                };
                if reply == FromWorker::Saved && behaviour != behaviour::ENDS {
                    save_control(&file.unwrap(), control);
                    let _ = link.send_from_worker(reply);
                }
                match behaviour {
                    behaviour::REFUSES => drop(link.send_from_worker(reply)),
                    behaviour::LIES => {
                        let _ = link.send_from_worker(reply);
                        return;
                    }
                    _ => return,
                }
            }
            ToWorker::Doorbell if is_held => rung = true,
            ToWorker::Doorbell => {
                step(control);
                let _ = link.send_from_worker(FromWorker::Check);
            }
            ToWorker::Remove { id, serial } => {
                let _ = link.send_from_worker(FromWorker::Removed { id, serial });
            }
            ToWorker::Goodbye => return,
            ToWorker::Blob { .. } => {}
        }
    }
}

/// A guest and its driver.
pub struct Guest {
    pub device: CudaDevice,
    pub function: CudaFunction,
    pub events: Receiver<Event>,
    pub link: Link,
    pub ram: MmapRegion<()>,
    /// File that contains guest memory.
    file: OwnedFd,
    pub sender: Sender<Event>,
    pub known: Known,
    rejoin: Option<Rejoin>,
    pub are_stopped: Arc<AtomicBool>,
    /// Card that the next device's workers use.
    pub card: &'static str,
    available: u16,
    used: u16,
}

impl Guest {
    /// Starts a device and its driver.
    pub fn new() -> Self {
        Self::with(|_| {})
    }

    pub fn with(change: impl FnOnce(&mut Threads)) -> Self {
        let (sender, events) = channel();
        let mut threads = Threads::new(&sender, &Known::default(), &None);
        change(&mut threads);
        let (known, rejoin) = (Arc::clone(&threads.known), threads.rejoin.clone());
        let are_stopped = Arc::clone(&threads.are_stopped);
        let link = Link::new(vcuda::irqs()).unwrap();
        let limits = LIMITS;
        let (mut device, function) = CudaDevice::build("test", limits, &link, Box::new(threads)).unwrap();
        let file = region_memory("ram", RAM).unwrap();
        let ram = FileOffset::new(File::from(file.try_clone().unwrap()), 0);
        let ram = MmapRegion::from_file(ram, RAM as usize).unwrap();
        let region = link.lend(0, RAM, true, Some(file.try_clone().unwrap())).unwrap();
        device.dma_map(&region).unwrap();
        let (available, used, card) = (0, 0, "one");
        let mut guest = Self {
            device,
            function,
            events,
            link,
            ram,
            file,
            sender,
            known,
            rejoin,
            are_stopped,
            card,
            available,
            used,
        };
        guest.drive();
        guest
    }

    /// Creates a link for the next device, and shares the guest memory through it.
    fn next_link(&self) -> Link {
        let link = Link::new(vcuda::irqs()).unwrap();
        link.lend(0, RAM, true, Some(self.file.try_clone().unwrap())).unwrap();
        link
    }

    /// Returns a launcher of threads that use another card.
    pub fn threads_on(&self, card: &'static str) -> Box<Threads> {
        Box::new(Threads { card, ..Threads::new(&self.sender, &self.known, &self.rejoin) })
    }

    /// Hands the function over to another device, as in an upgrade. `meanwhile` runs while no device serves the guest.
    pub fn upgrade(&mut self, meanwhile: impl FnOnce(&mut Self)) {
        self.upgrade_from(SavedFunction::VERSION, meanwhile);
    }

    /// Like [`Self::upgrade`], from a program that writes this version of the saved state.
    pub fn upgrade_from(&mut self, version: u32, meanwhile: impl FnOnce(&mut Self)) {
        let suspended = self.function.suspend(Instant::now() + ANSWERED).unwrap();
        let (saved, descriptors) = suspended.save().unwrap();
        let known = saved_state::Known { name: SavedFunction::NAME.to_owned(), version };
        let mut writer = Writer::for_reader([0; 16], vec![known]);
        writer.put(0, &saved).unwrap();
        let file = writer.finish();
        let mut state = SavedState::parse(&file, &[saved_state::Known::for_part::<SavedFunction>()]).unwrap();
        let saved = state.take(0).unwrap();
        let link = self.next_link();
        let restored = CudaDevice::restore("next", LIMITS, &link, self.threads_on(self.card), saved, descriptors);
        let (device, function) = restored.unwrap();
        meanwhile(self);
        suspended.leave();
        (self.device, self.function, self.link) = (device, function, link);
        self.function.start().unwrap();
    }

    /// Continues with another device from the journal, as after the daemon was killed. `meanwhile` runs while no device
    /// serves the guest.
    pub fn kill(&mut self, meanwhile: impl FnOnce(&mut Self)) {
        let journal = self.device.journal().unwrap();
        let regions = self.device.regions();
        let window = Arc::clone(regions[4].mappable().unwrap().file());
        let suspended = self.function.suspend(Instant::now() + ANSWERED).unwrap();
        meanwhile(self);
        let link = self.next_link();
        let (device, function) = CudaDevice::build("next", LIMITS, &link, self.threads_on(self.card)).unwrap();
        suspended.leave();
        // Dropping the first device closes the links of its workers.
        (self.device, self.function, self.link) = (device, function, link);
        self.device.take_journal(journal).unwrap();
        self.device.take_file(RegionIndex::Bar4, window).unwrap();
        self.write(RegionIndex::Config, 4, &[6, 0]);
    }

    /// Sets up the device as Linux's driver does.
    pub fn drive(&mut self) {
        (self.available, self.used) = (0, 0);
        self.ram.as_volatile_slice().write_slice(&[0; 0x4000], 0).unwrap();
        self.write(RegionIndex::Config, 4, &[6, 0]);
        self.write(RegionIndex::Bar0, 0x08, &1u32.to_le_bytes());
        self.write(RegionIndex::Bar0, 0x0c, &3u32.to_le_bytes());
        self.write(RegionIndex::Bar0, 0x14, &[0xb]);
        self.write(RegionIndex::Bar0, 0x18, &(ENTRIES as u16).to_le_bytes());
        for (register, address) in [(0x20, DESCRIPTORS), (0x28, AVAILABLE), (0x30, USED)] {
            self.write(RegionIndex::Bar0, register, &address.to_le_bytes());
        }
        self.write(RegionIndex::Bar0, 0x1c, &[1, 0]);
        self.write(RegionIndex::Bar0, 0x14, &[0xf]);
        assert_eq!(self.status(), 0xf);
    }

    pub fn write(&mut self, region: RegionIndex, offset: u64, data: &[u8]) {
        assert_eq!(self.device.region_write(region, offset, data), Ok(Ack::Done));
    }

    pub fn status(&mut self) -> u8 {
        let mut status = [0];
        self.device.region_read(RegionIndex::Bar0, 0x14, &mut status).unwrap();
        status[0]
    }

    /// Writes to guest memory.
    pub fn poke(&self, at: u64, data: &[u8]) {
        self.ram.as_volatile_slice().write_slice(data, at as usize).unwrap();
    }

    fn peek<const N: usize>(&self, at: u64) -> [u8; N] {
        let mut data = [0; N];
        self.ram.as_volatile_slice().read_slice(&mut data, at as usize).unwrap();
        data
    }

    /// Returns true if the device requests no doorbells.
    pub fn kicks_are_suppressed(&self) -> bool {
        u16::from_le_bytes(self.peek(USED)) & 1 != 0
    }

    pub fn describe(&self, at: u64, address: u64, len: u32, flags: u16, next: u16) {
        let mut descriptor = address.to_le_bytes().to_vec();
        descriptor.extend(len.to_le_bytes());
        descriptor.extend(flags.to_le_bytes());
        descriptor.extend(next.to_le_bytes());
        self.poke(at, &descriptor);
    }

    /// Adds the chain that begins with descriptor `head` to the available ring. Rings the queue's doorbell, unless the
    /// device suppresses it.
    pub fn offer(&mut self, head: u16) {
        let slot = AVAILABLE + 4 + u64::from(self.available) % ENTRIES * 2;
        self.poke(slot, &head.to_le_bytes());
        self.available += 1;
        self.ram.as_volatile_slice().store(self.available, AVAILABLE as usize + 2, Ordering::Release).unwrap();
        std::sync::atomic::fence(Ordering::SeqCst);
        if !self.kicks_are_suppressed() {
            self.write(RegionIndex::Bar0, 0x3000, &[0, 0]);
        }
    }

    /// Sends a command in slot `slot` with two descriptors.
    pub fn post(&mut self, slot: u16, command: &[u8]) {
        let at = u64::from(slot) * STEP;
        self.poke(COMMAND + at, command);
        self.poke(ANSWER + at, &[0xee; STEP as usize]);
        let head = slot * 2;
        self.describe(DESCRIPTORS + u64::from(head) * 16, COMMAND + at, command.len() as u32, 1, head + 1);
        self.describe(DESCRIPTORS + u64::from(head + 1) * 16, ANSWER + at, STEP as u32, 2, 0);
        self.offer(head);
    }

    /// Returns the number of responses that have arrived but that [`Self::answer`] has not returned yet.
    pub fn answers(&self) -> u16 {
        let index: u16 = self.ram.as_volatile_slice().load(USED as usize + 2, Ordering::Acquire).unwrap();
        index.wrapping_sub(self.used)
    }

    /// Reverts the last response, as if the device had not sent it.
    pub fn unanswer(&mut self) {
        self.used -= 1;
        self.poke(USED + 2, &self.used.to_le_bytes());
    }

    /// Waits for the next response, and returns its slot and bytes.
    pub fn answer(&mut self) -> (u16, Vec<u8>) {
        let begin = Instant::now();
        while self.answers() == 0 {
            assert!(begin.elapsed() < ANSWERED, "no answer");
            std::thread::sleep(Duration::from_micros(50));
        }
        let element: [u8; 8] = self.peek(USED + 4 + u64::from(self.used) % ENTRIES * 8);
        self.used += 1;
        let [id, len] = [0, 4].map(|at| u32::from_le_bytes(element[at..at + 4].try_into().unwrap()));
        let slot = (id / 2) as u16;
        let mut bytes = vec![0; len as usize];
        self.ram.as_volatile_slice().read_slice(&mut bytes, (ANSWER + u64::from(slot) * STEP) as usize).unwrap();
        (slot, bytes)
    }

    /// Sends a command and returns the type and bytes of the response.
    pub fn send(&mut self, command: &[u8]) -> (u32, Vec<u8>) {
        self.post(0, command);
        let (slot, bytes) = self.answer();
        assert_eq!(slot, 0, "the response belongs to another command");
        (u32::from_le_bytes(bytes[..4].try_into().unwrap()), bytes)
    }

    /// Sends a command that must succeed.
    pub fn done(&mut self, command: &[u8]) {
        let (kind, _) = self.send(command);
        assert!((0x1100..0x1200).contains(&kind), "{kind:#x}");
    }

    /// Creates context `id`, with resource `id` as its control blob at `offset`.
    pub fn program(&mut self, id: u32, offset: u64) {
        self.done(&context(id));
        self.done(&blob(id, id, 1, CONTROL_BYTES));
        self.done(&map(id, offset));
    }

    /// Waits for an event of a worker.
    pub fn event(&self) -> Event {
        self.events.recv_timeout(ANSWERED).unwrap()
    }

    /// Waits until a condition is true.
    pub fn until(&mut self, mut holds: impl FnMut(&mut Self) -> bool) {
        let begin = Instant::now();
        while !holds(self) {
            assert!(begin.elapsed() < ANSWERED, "the condition was not met in time");
            std::thread::sleep(Duration::from_micros(200));
        }
    }

    /// Maps the window as the VMM does.
    pub fn window(&self) -> MmapRegion<()> {
        let regions = self.device.regions();
        let file = regions[4].mappable().unwrap().file().try_clone().unwrap();
        MmapRegion::from_file(FileOffset::new(File::from(file), 0), WINDOW as usize).unwrap()
    }
}

/// Size of a control blob in bytes.
pub const CONTROL_BYTES: u64 = cuda_ring::control::BYTES;

/// Returns an encoded command without a fence.
pub fn command(kind: u32, context: u32, body: &[u32]) -> Vec<u8> {
    fenced(kind, context, None, body)
}

/// Returns an encoded command, with a fence on a ring if `fence` is set.
pub fn fenced(kind: u32, context: u32, fence: Option<(u64, u8)>, body: &[u32]) -> Vec<u8> {
    let mut bytes = kind.to_le_bytes().to_vec();
    bytes.extend(u32::from(fence.is_some()).wrapping_mul(3).to_le_bytes());
    let (fence, ring) = fence.unwrap_or_default();
    bytes.extend(fence.to_le_bytes());
    bytes.extend(context.to_le_bytes());
    bytes.extend([ring, 0, 0, 0]);
    bytes.extend(body.iter().flat_map(|word| word.to_le_bytes()));
    bytes
}

pub fn context(id: u32) -> Vec<u8> {
    let mut body = vec![4, 24];
    body.extend([u32::from_le_bytes(*b"prog"); 1]);
    body.extend([0; 15]);
    command(0x200, id, &body)
}

pub fn destroy(id: u32) -> Vec<u8> {
    command(0x201, id, &[])
}

pub fn blob(context: u32, resource: u32, id: u64, bytes: u64) -> Vec<u8> {
    let halves = |value: u64| [value as u32, (value >> 32) as u32];
    let ([id, id_high], [size, size_high]) = (halves(id), halves(bytes));
    command(0x10c, context, &[resource, 2, 1, 0, id, id_high, size, size_high])
}

pub fn map(resource: u32, offset: u64) -> Vec<u8> {
    command(0x208, 0, &[resource, 0, offset as u32, (offset >> 32) as u32])
}

pub fn unref(resource: u32) -> Vec<u8> {
    command(0x102, 0, &[resource, 0])
}

pub fn doorbell(context: u32) -> Vec<u8> {
    command(0x207, context, &[4, 0, 1])
}

pub fn wait(context: u32, fence: (u64, u8), value: u64) -> Vec<u8> {
    fenced(0x207, context, Some(fence), &[24, 0, 2, 0, 0, 0, value as u32, (value >> 32) as u32])
}
