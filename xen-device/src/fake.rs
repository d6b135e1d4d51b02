//! A fake hypervisor for tests on any host. It is stricter than Xen: errors that Xen would accept, such as binding a
//! port twice, releasing a part of a range, or leaving the interrupt pin asserted at the end, are recorded in
//! [`FakeXen::breaches`].
//!
//! The guest's side is [`FakeDomain`], which makes accesses as Xen does for virtual CPUs, and adds and removes memory.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use rustix::event::{EventfdFlags, eventfd};
use vmm_glue::link::Wake;
use vmm_glue::memory::{Mapping, PAGE_SIZE};

use crate::hypervisor::{AttachError, DomainId, Hypervisor, Range, Target};
use crate::ram::VGA;
use crate::requests::{Request, kind, state, writer};
use crate::store::{DomainName, Found, Store};

/// TIMEOUT: a server that takes longer to answer an access is considered hung. Any host answers far faster.
const ANSWER: Duration = Duration::from_secs(60);
/// Port of the first virtual CPU.
const FIRST_PORT: u32 = 11;
/// Port of buffered requests.
const BUFFERED_PORT: u32 = 7;
/// Offset of the server's port numbers from the domain's port numbers.
const OURS: u32 = 1000;

/// The hypervisor and its domains.
#[derive(Clone, Debug, Default)]
pub struct FakeXen(Arc<Mutex<Machine>>);

#[derive(Debug, Default)]
struct Machine {
    domains: BTreeMap<DomainId, Arc<Domain>>,
    stores: Vec<Arc<Signal>>,
    breaches: Vec<String>,
}

/// The name, memory and server of a domain.
#[derive(Debug)]
struct Domain {
    id: DomainId,
    name: String,
    cpus: usize,
    /// The domain's memory, followed by pages that can be added.
    memory: File,
    kib: u64,
    hvm: bool,
    target_kib: u64,
    state: Mutex<State>,
    /// Set once a server has found the domain and decided whether to serve it.
    seen: AtomicBool,
    xen: FakeXen,
}

#[derive(Debug, Default)]
struct State {
    frames: BTreeSet<u64>,
    /// Pages added to the domain's memory, as page numbers in the file by guest frame.
    given: BTreeMap<u64, u64>,
    /// File pages that can be added.
    spare: BTreeSet<u64>,
    stuck: bool,
    server: Option<Arc<Server>>,
    /// Level of the domain's interrupt pin.
    pin: bool,
    messages: Vec<(u64, u32)>,
    raised: u64,
    saves_refused: bool,
    asked: Vec<u64>,
}

#[derive(Debug)]
struct Server {
    requests: Mapping,
    buffered: Mapping,
    slot: u8,
    signal: Signal,
    state: Mutex<ServerState>,
}

#[derive(Debug, Default)]
struct ServerState {
    enabled: bool,
    bound: BTreeSet<u32>,
    ranges: Vec<Range>,
    /// Ports that have fired but have not been taken.
    fired: BTreeSet<u32>,
    silent: BTreeSet<u32>,
    pending: BTreeSet<u32>,
    notified: BTreeMap<u32, u64>,
    fails: bool,
}

/// An event whose descriptor is readable while the event is set.
#[derive(Debug)]
struct Signal(OwnedFd);

impl Signal {
    fn new() -> Self {
        Self(eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).expect("an eventfd"))
    }

    fn set(&self) {
        let _ = rustix::io::write(&self.0, &1u64.to_ne_bytes());
    }

    fn clear(&self) -> bool {
        rustix::io::read(&self.0, &mut [0u8; 8]).is_ok()
    }
}

/// Properties of a domain.
#[derive(Clone, Debug)]
pub struct FakeSpec {
    /// ID of the domain.
    pub id: DomainId,
    /// Name of the domain.
    pub name: String,
    /// Number of virtual CPUs.
    pub cpus: usize,
    /// Size of the domain's memory in KiB. The memory starts at address 0, with a hole for a PC's VGA memory.
    pub kib: u64,
    /// Target size of the domain's memory in KiB, if smaller than `kib`.
    pub target_kib: Option<u64>,
    /// True for an HVM domain.
    pub hvm: bool,
    /// Number of pages that the host can add to the domain's memory.
    pub spare: u64,
}

impl FakeSpec {
    /// Describes an HVM domain with one virtual CPU and 16 MiB of memory.
    #[must_use]
    pub fn new(id: DomainId, name: &str) -> Self {
        Self { id, name: name.to_owned(), cpus: 1, kib: 16 << 10, target_kib: None, hvm: true, spare: 0 }
    }
}

impl FakeXen {
    /// Creates a domain.
    ///
    /// # Panics
    /// Panics if this host cannot create a memory file.
    #[must_use]
    pub fn create(&self, spec: FakeSpec) -> FakeDomain {
        let FakeSpec { id, name, cpus, kib, target_kib, hvm, spare } = spec;
        let pages = kib.div_ceil(4)..kib.div_ceil(4).saturating_add(spare);
        let memory =
            vmm_glue::mappable::region_memory(&name, pages.end.saturating_mul(PAGE_SIZE)).expect("a memory file");
        let frames = (0..kib.div_ceil(4)).filter(|frame| !VGA.contains(frame)).collect();
        let state = State { frames, spare: pages.collect(), ..State::default() };
        let domain = Arc::new(Domain {
            id,
            name,
            cpus,
            memory: memory.into(),
            kib,
            hvm,
            target_kib: target_kib.unwrap_or(kib),
            state: Mutex::new(state),
            seen: AtomicBool::new(false),
            xen: self.clone(),
        });
        self.0.lock().domains.insert(id, Arc::clone(&domain));
        self.tell();
        FakeDomain(domain)
    }

    /// Returns the domain list, for one server.
    #[must_use]
    pub fn store(&self) -> Box<dyn Store> {
        let signal = Arc::new(Signal::new());
        self.0.lock().stores.push(Arc::clone(&signal));
        Box::new(FakeStore { xen: self.clone(), signal, found: None })
    }

    /// Returns the hypervisor, for one server.
    #[must_use]
    pub fn hypervisor(&self) -> Box<dyn Hypervisor> {
        Box::new(self.clone())
    }

    /// Returns descriptions of the server's protocol violations.
    #[must_use]
    pub fn breaches(&self) -> Vec<String> {
        self.0.lock().breaches.clone()
    }

    fn breach(&self, what: String) -> io::Error {
        self.0.lock().breaches.push(what.clone());
        io::Error::other(what)
    }

    fn tell(&self) {
        self.0.lock().stores.iter().for_each(|signal| signal.set());
    }
}

impl Hypervisor for FakeXen {
    fn attach(&self, domain: DomainId, slot: u8, wake: &Arc<Wake>) -> Result<Arc<dyn Target>, AttachError> {
        let refused = |error, advice| AttachError::Refused { domain, what: "create a server", error, advice };
        let found = self.0.lock().domains.get(&domain).cloned();
        let found = found.ok_or_else(|| refused(io::Error::from_raw_os_error(libc::ESRCH), ""))?;
        if !found.hvm {
            return Err(refused(io::Error::from_raw_os_error(libc::EINVAL), "; is it an HVM domain?"));
        }
        let page = || {
            let fd = vmm_glue::mappable::region_memory("page", PAGE_SIZE).expect("a memory file");
            Mapping::of_file(fd, 0, PAGE_SIZE, wake).expect("a mapping")
        };
        let server = Arc::new(Server {
            requests: page(),
            buffered: page(),
            slot,
            signal: Signal::new(),
            state: Mutex::default(),
        });
        let mut state = found.state.lock();
        if state.server.is_some() {
            return Err(refused(self.breach(format!("domain {domain} is served twice")), ""));
        }
        state.server = Some(Arc::clone(&server));
        drop(state);
        Ok(Arc::new(FakeTarget { domain: found, server, wake: Arc::clone(wake) }))
    }
}

/// The domain list as seen by one server.
#[derive(Debug)]
struct FakeStore {
    xen: FakeXen,
    signal: Arc<Signal>,
    /// The last domain found by the server, until the server queries changes again.
    found: Option<Arc<Domain>>,
}

impl Store for FakeStore {
    fn find(&mut self, name: &DomainName) -> io::Result<Option<Found>> {
        let machine = self.xen.0.lock();
        let is = |domain: &&Arc<Domain>| match name {
            DomainName::Id(id) => domain.id == *id,
            DomainName::Name(name) => domain.name == *name,
        };
        let found = machine.domains.values().rev().find(is);
        self.found = found.cloned();
        Ok(found.map(|domain| Found { id: domain.id, most_kib: domain.kib, target_kib: domain.target_kib }))
    }

    fn exists(&mut self, id: DomainId) -> io::Result<bool> {
        Ok(self.xen.0.lock().domains.contains_key(&id))
    }

    fn refuse_saves(&mut self, id: DomainId, refused: bool) -> io::Result<()> {
        let machine = self.xen.0.lock();
        let domain = machine.domains.get(&id).ok_or(io::ErrorKind::NotFound)?;
        domain.state.lock().saves_refused = refused;
        Ok(())
    }

    fn changed(&mut self) -> io::Result<bool> {
        if let Some(found) = self.found.take() {
            found.seen.store(true, Ordering::Release);
        }
        Ok(self.signal.clear())
    }

    fn events(&self) -> BorrowedFd<'_> {
        self.signal.0.as_fd()
    }
}

/// A domain as seen by its server.
#[derive(Debug)]
struct FakeTarget {
    domain: Arc<Domain>,
    server: Arc<Server>,
    wake: Arc<Wake>,
}

impl Drop for FakeTarget {
    fn drop(&mut self) {
        let mut state = self.domain.state.lock();
        state.server = None;
        let pin = state.pin;
        drop(state);
        if pin {
            let _ = self.domain.xen.breach("a server exited with its pin asserted".to_owned());
        }
    }
}

impl FakeTarget {
    fn breach(&self, what: String) -> io::Error {
        self.domain.xen.breach(format!("domain {}: {what}", self.domain.id))
    }
}

impl Target for FakeTarget {
    fn requests(&self) -> &Mapping {
        &self.server.requests
    }

    fn buffered(&self) -> &Mapping {
        &self.server.buffered
    }

    fn buffered_port(&self) -> u32 {
        BUFFERED_PORT
    }

    fn bind(&self, port: u32) -> io::Result<u32> {
        let known =
            port == BUFFERED_PORT || port.checked_sub(FIRST_PORT).is_some_and(|cpu| (cpu as usize) < self.domain.cpus);
        if !known || !self.server.state.lock().bound.insert(port) {
            return Err(self.breach(format!("port {port} is bound, which does not exist or is already bound")));
        }
        Ok(port.saturating_add(OURS))
    }

    fn enable(&self) -> io::Result<()> {
        for cpu in 0..self.domain.cpus {
            let port = FIRST_PORT.saturating_add(u32::try_from(cpu).unwrap_or(u32::MAX));
            writer::set_port(&self.server.requests, cpu, port);
        }
        self.server.state.lock().enabled = true;
        Ok(())
    }

    fn claim(&self, range: Range) -> io::Result<()> {
        let mut state = self.server.state.lock();
        let overlaps = |other: &Range| other.first <= range.last && range.first <= other.last;
        if range.first > range.last || state.ranges.iter().any(overlaps) {
            drop(state);
            return Err(self.breach(format!("{range:x?} is claimed, part of which is already claimed")));
        }
        state.ranges.push(range);
        Ok(())
    }

    fn disclaim(&self, range: Range) -> io::Result<()> {
        let mut state = self.server.state.lock();
        let Some(place) = state.ranges.iter().position(|other| *other == range) else {
            drop(state);
            return Err(self.breach(format!("{range:x?} is released, which was not claimed")));
        };
        state.ranges.swap_remove(place);
        Ok(())
    }

    fn notify(&self, port: u32) -> io::Result<()> {
        let theirs = port.saturating_sub(OURS);
        let mut state = self.server.state.lock();
        if !state.bound.contains(&theirs) {
            drop(state);
            return Err(self.breach(format!("port {port} is notified, which is not bound")));
        }
        let count = state.notified.entry(theirs).or_default();
        *count = count.saturating_add(1);
        Ok(())
    }

    fn events(&self) -> BorrowedFd<'_> {
        self.server.signal.0.as_fd()
    }

    fn fired(&self, ports: &mut [u32]) -> io::Result<usize> {
        let mut state = self.server.state.lock();
        if state.fails {
            return Err(io::Error::from_raw_os_error(libc::EFBIG));
        }
        self.server.signal.clear();
        let mut count = 0usize;
        while let Some((place, theirs)) = ports.get_mut(count).zip(state.fired.pop_first()) {
            *place = theirs.saturating_add(OURS);
            state.silent.insert(theirs);
            count = count.saturating_add(1);
        }
        if !state.fired.is_empty() {
            self.server.signal.set();
        }
        Ok(count)
    }

    fn unmask(&self, ports: &[u32]) -> io::Result<()> {
        for port in ports {
            let theirs = port.saturating_sub(OURS);
            let mut state = self.server.state.lock();
            if !state.silent.remove(&theirs) {
                drop(state);
                return Err(self.breach(format!("port {port} is unmasked, which was not masked")));
            }
            if state.pending.remove(&theirs) {
                state.fired.insert(theirs);
                self.server.signal.set();
            }
        }
        Ok(())
    }

    fn present(&self, first: u64, count: usize) -> io::Result<Vec<bool>> {
        let mut state = self.domain.state.lock();
        state.asked.push(first);
        Ok((first..=u64::MAX).take(count).map(|frame| state.frames.contains(&frame)).collect())
    }

    fn map(&self, first: u64, count: usize) -> io::Result<Mapping> {
        let end = first.saturating_add(u64::try_from(count).unwrap_or(u64::MAX));
        let state = self.domain.state.lock();
        let pages: Option<Vec<u64>> = (first..end).map(|frame| state.page(frame)).collect();
        // Only pages that are contiguous in the file can be mapped together. Pages allocated together are contiguous.
        let start = pages.as_deref().and_then(|pages| pages.first()).copied();
        let is_run = |start: &u64| pages.iter().flatten().zip(*start..).all(|(page, at)| *page == at);
        let Some(start) = start.filter(is_run) else { return Err(io::Error::from_raw_os_error(libc::EINVAL)) };
        let fd: OwnedFd = self.domain.memory.try_clone()?.into();
        let size = u64::try_from(count).unwrap_or(0).saturating_mul(PAGE_SIZE);
        let mapping = Mapping::of_file(fd, start.saturating_mul(PAGE_SIZE), size, &self.wake);
        mapping.map_err(|error| io::Error::other(error.to_string()))
    }

    fn add_frames(&self, first: u64, count: u64) -> io::Result<()> {
        let frames = first..first.saturating_add(count);
        let mut state = self.domain.state.lock();
        if frames.clone().any(|frame| state.page(frame).is_some()) {
            drop(state);
            return Err(self.breach(format!("frames {frames:x?} are added, some of which exist")));
        }
        if u64::try_from(state.spare.len()).unwrap_or(u64::MAX) < count {
            return Err(io::Error::from_raw_os_error(libc::ENOMEM));
        }
        for frame in frames {
            if let Some(page) = state.spare.pop_first() {
                state.given.insert(frame, page);
            }
        }
        Ok(())
    }

    fn take_frames(&self, first: u64, count: u64) -> io::Result<()> {
        let frames = first..first.saturating_add(count);
        let mut state = self.domain.state.lock();
        let taken: Vec<_> = frames.clone().filter_map(|frame| state.given.remove(&frame)).collect();
        let all = u64::try_from(taken.len()) == Ok(count);
        state.spare.extend(taken);
        let stuck = state.stuck;
        drop(state);
        match all || stuck {
            true => Ok(()),
            false => Err(self.breach(format!("frames {frames:x?} are removed, some of which were not added"))),
        }
    }

    fn move_frames(&self, from: u64, to: u64, count: u64) -> io::Result<()> {
        let mut state = self.domain.state.lock();
        if state.stuck {
            return Err(io::Error::from_raw_os_error(libc::EINVAL));
        }
        for at in 0..count {
            let page = state.given.remove(&from.saturating_add(at));
            let place = to.saturating_add(at);
            let (Some(page), None) = (page, state.page(place)) else {
                drop(state);
                return Err(self.breach(format!(
                    "{count} frames move from {from:#x} to {to:#x}, over existing ones or from missing ones"
                )));
            };
            state.given.insert(place, page);
        }
        Ok(())
    }

    fn inject_msi(&self, address: u64, data: u32) -> io::Result<()> {
        self.domain.state.lock().messages.push((address, data));
        Ok(())
    }

    fn set_intx(&self, level: bool) -> io::Result<()> {
        let mut state = self.domain.state.lock();
        if level && !state.pin {
            state.raised = state.raised.saturating_add(1);
        }
        state.pin = level;
        Ok(())
    }
}

impl State {
    /// Returns the number of the page in the file that backs a frame.
    fn page(&self, frame: u64) -> Option<u64> {
        let own = self.frames.contains(&frame).then_some(frame);
        own.or_else(|| self.given.get(&frame).copied())
    }
}

/// The domain's side of the fake.
#[derive(Clone, Debug)]
pub struct FakeDomain(Arc<Domain>);

impl FakeDomain {
    fn server(&self) -> Option<Arc<Server>> {
        self.0.state.lock().server.clone().filter(|server| server.state.lock().enabled)
    }

    /// Waits until the domain is served.
    ///
    /// # Panics
    /// Panics if the wait exceeds the time limit.
    pub fn wait_served(&self) {
        self.until("the domain to be served", || {
            self.server().filter(|server| server.state.lock().bound.len() > self.0.cpus).map(drop)
        });
    }

    /// Waits until a server has found the domain and decided whether to serve it.
    ///
    /// # Panics
    /// Panics if the wait exceeds the time limit.
    pub fn wait_seen(&self) {
        self.until("the domain to be seen", || self.0.seen.load(Ordering::Acquire).then_some(()));
    }

    /// Waits until no server serves the domain.
    ///
    /// # Panics
    /// Panics if the wait exceeds the time limit.
    pub fn wait_left(&self) {
        self.until("the server to leave", || self.0.state.lock().server.is_none().then_some(()));
    }

    fn until<T>(&self, what: &str, mut look: impl FnMut() -> Option<T>) -> T {
        let end = Instant::now().checked_add(ANSWER).expect("a time");
        loop {
            if let Some(found) = look() {
                return found;
            }
            assert!(Instant::now() < end, "domain {}: waited for {what}", self.0.id);
            std::thread::yield_now();
        }
    }

    /// Puts a request into a virtual CPU's slot and wakes the server, without waiting. Returns `None` if no server
    /// serves the domain.
    pub fn put(&self, cpu: usize, request: &Request) -> Option<()> {
        let server = self.server()?;
        writer::put(&server.requests, cpu, request);
        fire(&server, FIRST_PORT.saturating_add(u32::try_from(cpu).ok()?));
        Some(())
    }

    /// Takes the answer to a virtual CPU's request, if it has arrived.
    #[must_use]
    pub fn answer(&self, cpu: usize) -> Option<u64> {
        let server = self.server()?;
        (writer::state(&server.requests, cpu) == state::ANSWERED).then(|| writer::finish(&server.requests, cpu))
    }

    /// Makes a request and waits for the answer. Returns `None` if the server no longer exists.
    ///
    /// # Panics
    /// Panics if no answer arrives.
    pub fn request(&self, cpu: usize, request: &Request) -> Option<u64> {
        self.put(cpu, request)?;
        self.wait_answer(cpu)
    }

    /// Waits for the answer to a request. Returns `None` if the server no longer exists.
    ///
    /// # Panics
    /// Panics if no answer arrives.
    #[must_use]
    pub fn wait_answer(&self, cpu: usize) -> Option<u64> {
        self.until("an answer", || match self.server() {
            None => Some(None),
            Some(_) => self.answer(cpu).map(Some),
        })
    }

    /// Performs an access as Xen does: accesses pages added to the domain directly, returns all ones outside the
    /// server's claims, and forwards all other accesses to the server.
    ///
    /// # Panics
    /// Panics if the memory file cannot be read or written.
    pub fn memory(&self, cpu: usize, mut request: Request) -> u64 {
        request.kind = kind::MEMORY;
        if let Some(page) = self.given(request.address / PAGE_SIZE) {
            assert!(request.count == 1 && !request.data_is_address, "{request:?}");
            let at = page.saturating_mul(PAGE_SIZE).saturating_add(request.address % PAGE_SIZE);
            let mut bytes = request.data.to_le_bytes();
            let size = usize::try_from(request.size).unwrap_or(8).min(8);
            let place = bytes.split_at_mut(size).0;
            match request.read {
                true => rustix::io::pread(&self.0.memory, place, at).expect("read"),
                false => rustix::io::pwrite(&self.0.memory, place, at).expect("written"),
            };
            return u64::from_le_bytes(bytes);
        }
        let last = request.address.saturating_add(request.size.into()).saturating_sub(1);
        // Xen treats adjacent ranges as one.
        let claimed = |at: u64| {
            let ranges = self.server().map(|server| server.state.lock().ranges.clone()).unwrap_or_default();
            ranges.iter().any(|range| (range.first..=range.last).contains(&at))
        };
        if !(request.address..=last).all(claimed) {
            return u64::MAX;
        }
        self.request(cpu, &request).unwrap_or(u64::MAX)
    }

    /// Reads `size` bytes at an address.
    #[must_use]
    pub fn read(&self, cpu: usize, address: u64, size: u32) -> u64 {
        self.memory(cpu, Request { address, size, count: 1, read: true, ..Request::default() })
    }

    /// Writes `size` bytes at an address.
    pub fn write(&self, cpu: usize, address: u64, size: u32, data: u64) {
        self.memory(cpu, Request { address, size, count: 1, data, ..Request::default() });
    }

    /// Accesses `size` bytes of configuration space: writes `data` if it is given, and reads otherwise.
    pub fn config(&self, offset: u64, size: u32, data: Option<u64>) -> u64 {
        let slot = self.server().map_or(0, |server| server.slot);
        let address = u64::from(slot) << 35 | offset;
        let request = Request {
            address,
            size,
            count: 1,
            data: data.unwrap_or(0),
            read: data.is_none(),
            kind: kind::PCI_CONFIG,
            ..Request::default()
        };
        self.request(0, &request).unwrap_or(u64::MAX)
    }

    /// Reads a dword of configuration space.
    #[must_use]
    pub fn config_read(&self, offset: u64) -> u32 {
        u32::try_from(self.config(offset, 4, None) & 0xffff_ffff).unwrap_or(0)
    }

    /// Writes a dword of configuration space.
    pub fn config_write(&self, offset: u64, data: u32) {
        self.config(offset, 4, Some(data.into()));
    }

    /// Buffers a write, as Xen does for legacy VGA. Returns false if the buffer is full, or if the domain has no
    /// server.
    #[must_use]
    pub fn buffer(&self, request: &Request) -> bool {
        let Some(server) = self.server() else { return false };
        let done = writer::buffer(&server.buffered, request);
        fire(&server, BUFFERED_PORT);
        done
    }

    /// Writes arbitrary bytes at any offset of one of the server's pages, and wakes the server.
    ///
    /// # Panics
    /// Panics if the bytes are outside the page.
    pub fn junk(&self, buffered: bool, at: usize, bytes: &[u8]) {
        use vm_memory::VolatileMemory;
        let Some(server) = self.server() else { return };
        let (page, port) = if buffered { (&server.buffered, BUFFERED_PORT) } else { (&server.requests, FIRST_PORT) };
        page.get_slice(at, bytes.len()).expect("inside the page").copy_from(bytes);
        fire(&server, port);
    }

    /// Removes frames from the domain as Xen does when a guest releases them: notifies the server through the last
    /// virtual CPU's slot, and waits for the answer.
    pub fn give_back(&self, frames: std::ops::Range<u64>) {
        self.take(frames);
        self.request(
            self.0.cpus.saturating_sub(1),
            &Request { kind: kind::INVALIDATE, size: 4, count: 1, ..Request::default() },
        );
    }

    /// Removes frames from the domain without notification.
    pub fn take(&self, frames: std::ops::Range<u64>) {
        self.0.state.lock().frames.retain(|frame| !frames.contains(frame));
    }

    /// Adds frames to the domain without notification.
    pub fn populate(&self, frames: std::ops::Range<u64>) {
        self.0.state.lock().frames.extend(frames);
    }

    /// Returns the guest frames of the pages added to the domain's memory.
    #[must_use]
    pub fn all_given(&self) -> Vec<u64> {
        self.0.state.lock().given.keys().copied().collect()
    }

    fn given(&self, frame: u64) -> Option<u64> {
        self.0.state.lock().given.get(&frame).copied()
    }

    /// Makes Xen reject requests to move frames from now on.
    pub fn stick(&self) {
        self.0.state.lock().stuck = true;
    }

    /// Makes the guest release an added page, and makes Xen reject requests to move frames from now on.
    pub fn drop_given(&self, frame: u64) {
        let mut state = self.0.state.lock();
        state.stuck = true;
        state.given.remove(&frame);
    }

    /// Returns the file that backs the domain's memory.
    #[must_use]
    pub fn file(&self) -> &File {
        &self.0.memory
    }

    /// Returns the address and data of each delivered MSI message.
    #[must_use]
    pub fn messages(&self) -> Vec<(u64, u32)> {
        self.0.state.lock().messages.clone()
    }

    /// Returns the pin's level and its number of rising edges.
    #[must_use]
    pub fn pin(&self) -> (bool, u64) {
        let state = self.0.state.lock();
        (state.pin, state.raised)
    }

    /// Returns true if the toolstack would refuse to save the domain.
    #[must_use]
    pub fn saves_refused(&self) -> bool {
        self.0.state.lock().saves_refused
    }

    /// Returns the start frames of the ranges that the server has queried.
    #[must_use]
    pub fn asked(&self) -> Vec<u64> {
        self.0.state.lock().asked.clone()
    }

    /// Returns the ranges claimed by the server, in address order.
    #[must_use]
    pub fn ranges(&self) -> Vec<Range> {
        let mut ranges = self.server().map(|server| server.state.lock().ranges.clone()).unwrap_or_default();
        ranges.sort_unstable_by_key(|range| range.first);
        ranges
    }

    /// Returns the number of times that the server has notified a virtual CPU.
    #[must_use]
    pub fn notified(&self, cpu: u32) -> u64 {
        let port = FIRST_PORT.saturating_add(cpu);
        self.server().and_then(|server| server.state.lock().notified.get(&port).copied()).unwrap_or(0)
    }

    /// Makes the event device fail from now on.
    pub fn break_events(&self) {
        if let Some(server) = self.server() {
            server.state.lock().fails = true;
            server.signal.set();
        }
    }

    /// Destroys the domain.
    pub fn destroy(&self) {
        self.0.xen.0.lock().domains.remove(&self.0.id);
        self.0.xen.tell();
    }
}

/// Fires a server's port as Xen does. A masked port becomes pending.
fn fire(server: &Server, port: u32) {
    let mut state = server.state.lock();
    if state.silent.contains(&port) {
        state.pending.insert(port);
    } else if state.bound.contains(&port) {
        state.fired.insert(port);
        server.signal.set();
    } else {
        // The port is not bound yet. Its event fires when the port is first unmasked.
        state.pending.insert(port);
    }
}
