//! Serves one domain, from the first access to the last.

use std::io;
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use vmm_glue::counters::{add, worth_logging};
use vmm_glue::device::Device;
use vmm_glue::link::{ClientInfo, Link, StopHandle};
use vmm_glue::spin::Spin;

use crate::access::Accesses;
use crate::function::Function;
use crate::hypervisor::{DomainId, Target};
use crate::options::XenOptions;
use crate::ram::Ram;
use crate::requests::{self, Request, SLOTS, kind};
use crate::store::{Found, Store};

/// TIMEOUT: interval between two checks of memory with holes. The server need not react quickly when a guest takes
/// memory back.
const HOLES: Duration = Duration::from_millis(500);
/// Number of rounds of requests after which other events are checked, even if more requests arrive.
const MAX_ROUNDS: u32 = 256;
/// Number of polls for a request per clock reading.
const POLLS_PER_CLOCK_READ: u32 = 64;
/// Maximum number of buffered requests taken in sequence.
const MAX_BUFFERED: u32 = requests::RING;

/// Reason why a domain is no longer served.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Ended {
    /// The domain no longer exists.
    Gone,
    /// The operator has disconnected the domain.
    Disconnected,
    /// The server is stopping.
    Stopped,
}

/// A slot in the page of requests, with its port.
#[derive(Clone, Copy, Debug)]
struct Cpu {
    number: usize,
    /// The server's port for this virtual CPU.
    port: u32,
    /// True if the port has fired and is still masked.
    silent: bool,
}

/// A domain being served.
pub(crate) struct Session<'a> {
    id: DomainId,
    target: Arc<dyn Target>,
    link: &'a Link,
    device: &'a mut dyn Device,
    slot: u8,
    function: Function,
    ram: Ram,
    cpus: Vec<Cpu>,
    /// The server's port for buffered requests, and a flag that is true if the port is masked.
    buffered: Option<(u32, bool)>,
    spin: Spin,
    malformed: u64,
    looked: Instant,
}

impl<'a> Session<'a> {
    /// Starts serving a domain.
    ///
    /// # Errors
    /// Returns an error if the domain's ports cannot be bound, or if Xen refuses to forward accesses. The device is
    /// then not notified.
    pub fn begin(
        found: Found,
        target: Arc<dyn Target>,
        link: &'a Link,
        device: &'a mut dyn Device,
        options: &XenOptions,
    ) -> io::Result<Self> {
        let mut cpus = Vec::new();
        for number in 0..SLOTS {
            match requests::port(target.requests(), number) {
                // Xen writes the ports when the server is enabled, so 0 means that no such virtual CPU exists.
                0 => continue,
                port => cpus.push(Cpu { number, port: target.bind(port)?, silent: false }),
            }
        }
        let buffered = match target.buffered_port() {
            0 => None,
            port => Some((target.bind(port)?, false)),
        };
        link.set_client(Some(ClientInfo { pid: 0, uid: 0, domain: Some(found.id) }));
        add(&link.counters().clients, 1);
        let function = Function::new(link, &target, device);
        device.connected();
        let mut ram = Ram::new(found.most_kib, options.memory);
        ram.lend_all(&*target, link, device);
        let (spin, slot) = (Spin::new(options.spin), options.slot);
        Ok(Self {
            id: found.id,
            target,
            link,
            device,
            slot,
            function,
            ram,
            cpus,
            buffered,
            spin,
            malformed: 0,
            looked: Instant::now(),
        })
    }

    /// Serves the domain until the session ends.
    ///
    /// # Errors
    /// Returns an error if the host fails, so that events or the domain list can no longer be read.
    pub fn run(&mut self, store: &mut dyn Store, stop: &StopHandle) -> io::Result<Ended> {
        loop {
            if stop.is_stopped() {
                return Ok(Ended::Stopped);
            }
            if self.link.take_disconnect() {
                tracing::info!(domain = self.id, "the domain is no longer served, as requested");
                return Ok(Ended::Disconnected);
            }
            // Discard a request to check for private memory files, because a domain has none.
            self.link.take_check_shared();
            if self.serve() {
                continue;
            }
            self.listen()?;
            if self.serve_once() {
                continue;
            }
            if self.wait(store, stop)? && !store.exists(self.id)? {
                return Ok(Ended::Gone);
            }
            if self.ram.has_holes() && self.looked.elapsed() >= HOLES {
                self.ram.look_at_holes(&*self.target, self.link, self.device);
                self.looked = Instant::now();
            }
        }
    }

    /// Ends the session: withdraws memory and interrupts, and notifies the device. Outstanding requests remain
    /// unanswered.
    pub fn end(mut self) {
        self.function.leave();
        self.ram.withdraw_all(self.link, self.device);
        self.link.interrupts().detach_all();
        self.link.set_client(None);
        self.device.disconnected();
    }

    /// Serves requests until none arrives within the polling time, but at most [`MAX_ROUNDS`] rounds. Returns true in
    /// the latter case, in which more requests may be ready.
    fn serve(&mut self) -> bool {
        let mut spinning = None;
        let mut served = 0;
        while served < MAX_ROUNDS {
            if self.serve_once() {
                served = served.saturating_add(1);
                if let Some(deadline) = spinning.take() {
                    self.spin.hit(Instant::now(), deadline);
                    add(&self.link.counters().spin_hits, 1);
                }
                continue;
            }
            let now = Instant::now();
            let Some(deadline) = spinning.or_else(|| self.spin.deadline(now)) else { return false };
            spinning = Some(deadline);
            if now >= deadline {
                self.spin.miss(now);
                return false;
            }
            // In domain 0, reading the clock may enter the hypervisor, so read it only occasionally.
            let _ = (0..POLLS_PER_CLOCK_READ).any(|_| {
                std::hint::spin_loop();
                self.is_ready()
            });
        }
        true
    }

    /// Returns true if any virtual CPU's request is ready.
    fn is_ready(&self) -> bool {
        self.cpus.iter().any(|cpu| requests::is_ready(self.target.requests(), cpu.number))
    }

    /// Serves one request per virtual CPU, and the buffered requests before them. Returns true if any request was
    /// served.
    fn serve_once(&mut self) -> bool {
        let mut any = self.serve_buffered();
        for at in 0..self.cpus.len() {
            let Some(Cpu { number, port, .. }) = self.cpus.get(at).copied() else { break };
            let Some(request) = requests::take(self.target.requests(), number) else { continue };
            any = true;
            // The request may have arrived, preceded by buffered writes, after the ring was checked.
            self.serve_buffered();
            let read = self.request(&request);
            requests::answer(self.target.requests(), number, read);
            // This fails if the domain no longer exists, which xenstore reports.
            let _ = self.target.notify(port);
        }
        any
    }

    fn serve_buffered(&mut self) -> bool {
        let mut any = false;
        for _ in 0..MAX_BUFFERED {
            match requests::take_buffered(self.target.buffered()) {
                Ok(None) => break,
                Ok(Some(request)) => {
                    any = true;
                    add(&self.link.counters().posted, 1);
                    self.request(&request);
                }
                Err(error) => {
                    self.malformed = self.malformed.saturating_add(1);
                    add(&self.link.counters().errors, 1);
                    if worth_logging(self.malformed) {
                        tracing::warn!(%error, "buffered requests are lost");
                    }
                    break;
                }
            }
        }
        any
    }

    fn request(&mut self, request: &Request) -> Option<u64> {
        match request.kind {
            kind::INVALIDATE => {
                self.ram.invalidate(&*self.target, self.link, self.device);
                return None;
            }
            kind::TIME_OFFSET => return None,
            _ => {}
        }
        let was_master = self.function.bus_master;
        let mut accesses = Accesses {
            link: self.link,
            function: &mut self.function,
            device: &mut *self.device,
            slot: self.slot,
            malformed: &mut self.malformed,
        };
        let read = accesses.serve(request);
        if !was_master && self.function.bus_master && self.ram.has_holes() {
            self.ram.look_at_holes(&*self.target, self.link, self.device);
        }
        read
    }

    /// Unmasks ports that have fired, before a sleep.
    fn listen(&mut self) -> io::Result<()> {
        let silent = |(port, silent): (u32, &mut bool)| std::mem::take(silent).then_some(port);
        let ports = self.cpus.iter_mut().filter_map(|cpu| silent((cpu.port, &mut cpu.silent)));
        let buffered = self.buffered.iter_mut().filter_map(|(port, is_silent)| silent((*port, is_silent)));
        let ports: Vec<u32> = ports.chain(buffered).collect();
        if ports.is_empty() { Ok(()) } else { self.target.unmask(&ports) }
    }

    /// Sleeps until an event occurs, or until memory with holes must be checked. Returns true if domains were created
    /// or destroyed.
    fn wait(&mut self, store: &mut dyn Store, stop: &StopHandle) -> io::Result<bool> {
        // Watch events that arrived during a request to xenstore end the wait immediately.
        if store.changed()? {
            return Ok(true);
        }
        let timeout = HOLES.saturating_sub(self.looked.elapsed());
        let timeout = Timespec { tv_sec: 0, tv_nsec: timeout.subsec_nanos().into() };
        let timeout = self.ram.has_holes().then_some(&timeout);
        let (events, changes) = {
            let input = |fd| PollFd::from_borrowed_fd(fd, PollFlags::IN);
            let mut fds =
                [input(self.target.events()), input(store.events()), input(self.link.wake().fd()), input(stop.fd())];
            match poll(&mut fds, timeout) {
                Ok(_) | Err(Errno::INTR) => {}
                Err(errno) => return Err(errno.into()),
            }
            let ready = |fd: &PollFd<'_>| !fd.revents().is_empty();
            let [events, changes, wake, _] = &fds;
            if ready(wake) {
                self.link.wake().clear();
            }
            (ready(events), ready(changes))
        };
        self.spin.woke(events, Instant::now());
        if events {
            self.take_events()?;
        }
        Ok(changes && store.changed()?)
    }

    fn take_events(&mut self) -> io::Result<()> {
        let mut ports = [0; SLOTS];
        let count = self.target.fired(&mut ports)?;
        for port in ports.iter().take(count) {
            let cpu = self.cpus.iter_mut().find(|cpu| cpu.port == *port);
            match (cpu, &mut self.buffered) {
                (Some(cpu), _) => cpu.silent = true,
                (None, Some((buffered, silent))) if buffered == port => *silent = true,
                _ => self.target.unmask(&[*port])?,
            }
        }
        Ok(())
    }
}
