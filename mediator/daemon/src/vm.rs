//! A running virtual machine: its thread, its socket, and the state of both.

use std::os::fd::OwnedFd;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use locks::{Mutex, rank};
use vmm_glue::device::NUM_REGIONS;
use vmm_glue::link::StopHandle;
use vmm_glue::{
    AccessError, Ack, Deferred, Device, DmaRegion, Link, MapError, Mapping, Migration, MmapArea, RegionIndex,
    RegionInfo, SuspendedClient,
};

use super::backend::{Built, VmBackend};
use super::endpoint::EndpointServer;
use super::error::DaemonError;
use listening::SocketPath;

/// Polling interval for the exit of a thread.
const POLL_INTERVAL: Duration = Duration::from_micros(200);

/// Device status for operators, collected from calls to the device.
#[derive(Debug, Default)]
pub(super) struct Seen {
    /// True if the current or last VMM's guest memory is private to that VMM.
    pub memory_not_shared: AtomicBool,
    /// Number of device resets.
    pub resets: AtomicU64,
    /// Reason why the thread exited prematurely.
    pub failed: Mutex<rank::Failure, Option<String>>,
}

/// A virtual machine with its thread.
pub(super) struct Running {
    /// Path of the socket; `None` if the service manager created it, or if the virtual machine has no socket.
    pub socket: Option<PathBuf>,
    /// Path of the socket while it is served.
    socket_path: Arc<Mutex<rank::SocketPath, Option<SocketPath>>>,
    pub link: Link,
    pub backend: Arc<dyn VmBackend>,
    pub seen: Arc<Seen>,
    stop: StopHandle,
    thread: Mutex<rank::Threads, Option<JoinHandle<Option<Rest>>>>,
}

/// A virtual machine whose thread is suspended until it resumes or is handed over. Its client receives no messages.
pub(super) struct Rest {
    work: Work,
    /// The suspended client.
    pub parked: SuspendedClient,
}

impl Rest {
    /// Duplicates the descriptor of the listening socket.
    ///
    /// # Errors
    /// Returns an error if the endpoint has no socket, or if the descriptor cannot be duplicated.
    pub fn listener(&self) -> std::io::Result<OwnedFd> {
        self.work.server.listener()
    }
}

/// An earlier daemon's client, if any, and its device's last status.
pub struct EarlierClient {
    /// Suspended client.
    pub parked: Option<SuspendedClient>,
    /// Status of the device.
    pub seen: Seen,
}

impl Running {
    /// Starts a virtual machine's thread, which runs until `stop` and first resumes the client in `earlier`.
    pub fn start(
        name: &str,
        server: EndpointServer,
        socket_path: Option<SocketPath>,
        link: Link,
        stop: StopHandle,
        built: Built,
        earlier: EarlierClient,
    ) -> Result<Self, DaemonError> {
        let EarlierClient { parked, seen } = earlier;
        let Built { device, backend } = built;
        let seen = Arc::new(seen);
        let socket = socket_path.as_ref().map(|socket| socket.path().to_owned());
        let socket_path = Arc::new(Mutex::new(socket_path));
        let work = Work {
            device: Observed { device, seen: Arc::clone(&seen) },
            server,
            socket_path: Arc::clone(&socket_path),
            link: link.clone(),
            stop: stop.clone(),
        };
        let thread = work.spawn(name, parked).inspect_err(|_| {
            // The closure has dropped the device.
            give_back(name, &*backend);
            forget(&socket_path);
        })?;
        Ok(Self { socket, socket_path, link, backend, seen, stop, thread: Mutex::new(Some(thread)) })
    }

    /// Requests suspension of the thread once its client has no incomplete request; see [`Self::rested`].
    pub fn park(&self) {
        self.stop.park();
    }

    /// Waits until the thread is suspended, or until `until`.
    ///
    /// # Errors
    /// Returns an error if the thread is not suspended in time, or if it has failed.
    pub fn rested(&self, until: Option<Instant>) -> Result<Rest, &'static str> {
        while self.thread.lock().as_ref().is_some_and(|thread| !thread.is_finished()) {
            if until.is_some_and(|until| Instant::now() >= until) {
                return Err("it cannot be suspended, because it waits for its client or for memory");
            }
            std::thread::sleep(POLL_INTERVAL);
        }
        let thread = self.thread.lock().take();
        let rest = thread.and_then(|thread| thread.join().ok()).flatten();
        self.stop.unpark();
        rest.ok_or("it has just failed")
    }

    /// Resumes a suspended virtual machine.
    ///
    /// # Errors
    /// Returns an error if no thread can be created.
    pub fn go_on(&self, name: &str, Rest { work, parked }: Rest) -> Result<(), DaemonError> {
        match work.spawn(name, Some(parked)) {
            Ok(thread) => *self.thread.lock() = Some(thread),
            Err(error) => {
                *self.seen.failed.lock() = Some(error.to_string());
                return Err(error);
            }
        }
        Ok(())
    }

    /// Like [`Self::go_on`], for a thread that is not suspended yet: resumes it after its suspension.
    pub(super) fn go_on_later(self: &Arc<Self>, name: &str) {
        let (name, this) = (name.to_owned(), Arc::clone(self));
        std::thread::spawn(move || match this.rested(None).map(|rest| this.go_on(&name, rest)) {
            Ok(Ok(())) => {}
            Ok(Err(error)) => {
                tracing::error!(vm = name, %error, "the VM is out of service; remove it and add it again");
            }
            Err(why) => tracing::error!(vm = name, why, "the VM does not continue"),
        });
    }

    /// Resumes a suspended virtual machine with a device on another card, and returns it. The caller must release the
    /// previous device's card resources.
    ///
    /// # Errors
    /// Returns an error if no thread can be created.
    pub fn moved(&self, name: &str, Rest { work, parked }: Rest, built: Built) -> Result<Self, DaemonError> {
        let Built { device, backend } = built;
        let seen = Arc::clone(&self.seen);
        let work = Work { device: Observed { device, seen: Arc::clone(&seen) }, ..work };
        let thread = work.spawn(name, Some(parked)).inspect_err(|_| give_back(name, &*backend))?;
        Ok(Self {
            socket: self.socket.clone(),
            socket_path: Arc::clone(&self.socket_path),
            link: self.link.clone(),
            backend,
            seen,
            stop: self.stop.clone(),
            thread: Mutex::new(Some(thread)),
        })
    }

    /// Requests that the thread exit, without waiting for it.
    pub fn stop(&self) {
        self.stop.stop();
    }

    /// Stops the thread, disconnects the client, and frees the virtual machine's card resources. Removes the socket,
    /// unless it must outlive the daemon.
    pub fn end(&self, name: &str, how: End) {
        self.stop();
        let thread = self.thread.lock().take();
        if thread.is_some_and(|thread| thread.join().is_err()) {
            tracing::error!(vm = name, "the thread of a VM panicked while the VM was removed");
        }
        give_back(name, &*self.backend);
        match how {
            End::Removed => forget(&self.socket_path),
            End::Daemon => drop(self.socket_path.lock().take()),
        }
    }
}

/// Reason why a virtual machine is stopped.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum End {
    /// An operator is removing the virtual machine.
    Removed,
    /// The daemon is exiting, and may be restarted.
    Daemon,
}

fn forget(socket: &Mutex<rank::SocketPath, Option<SocketPath>>) {
    if let Some(socket) = socket.lock().take() {
        socket.forget();
    }
}

fn give_back(name: &str, backend: &dyn VmBackend) {
    if let Err(error) = backend.release() {
        tracing::error!(vm = name, %error, "the card keeps resources of a removed VM");
    }
}

/// Objects used by a virtual machine's thread.
struct Work {
    device: Observed,
    server: EndpointServer,
    socket_path: Arc<Mutex<rank::SocketPath, Option<SocketPath>>>,
    link: Link,
    stop: StopHandle,
}

impl Work {
    fn spawn(self, name: &str, parked: Option<SuspendedClient>) -> Result<JoinHandle<Option<Rest>>, DaemonError> {
        let span = tracing::info_span!(parent: None, "vm", name);
        let thread = std::thread::Builder::new().name(format!("vm-{name}"));
        let thread = thread.spawn(move || span.in_scope(|| self.run(parked)));
        thread.map_err(|error| DaemonError::Failed(format!("cannot create a thread for VM `{name}`: {error}")))
    }

    fn run(self, parked: Option<SuspendedClient>) -> Option<Rest> {
        let Self { mut device, mut server, socket_path, link, stop } = self;
        let seen = Arc::clone(&device.seen);
        if parked.is_none() {
            tracing::info!("waiting for {}", server.awaits());
        }
        let result = catch_unwind(AssertUnwindSafe(|| server.serve(&link, &mut device, &stop, parked)));
        let failed = match result {
            Ok(Ok(Some(parked))) => {
                let work = Self { device, server, socket_path, link, stop };
                return Some(Rest { work, parked });
            }
            Ok(Ok(None)) => None,
            Ok(Err(error)) => Some(error.to_string()),
            Err(panic) => Some(format!("internal error: {}", panic_text(&*panic))),
        };
        if let Some(error) = failed {
            tracing::error!(error, "the VM is out of service; remove it and add it again");
            *seen.failed.lock() = Some(error);
            forget(&socket_path);
        }
        drop(server);
        drop(device);
        tracing::info!("the VM's thread has exited");
        None
    }
}

fn panic_text(panic: &(dyn std::any::Any + Send)) -> &str {
    let text = panic.downcast_ref::<&str>().copied();
    text.or_else(|| panic.downcast_ref::<String>().map(String::as_str)).unwrap_or("panic without a message")
}

/// Wraps a device, and records its status for operators.
struct Observed {
    device: Box<dyn Device>,
    seen: Arc<Seen>,
}

impl Device for Observed {
    fn regions(&self) -> [RegionInfo; NUM_REGIONS] {
        self.device.regions()
    }

    fn connected(&mut self) {
        self.seen.memory_not_shared.store(false, Ordering::Relaxed);
        tracing::info!("a VMM has connected");
        self.device.connected();
    }

    fn region_read(&mut self, region: RegionIndex, offset: u64, data: &mut [u8]) -> Result<(), AccessError> {
        self.device.region_read(region, offset, data)
    }

    fn region_write(&mut self, region: RegionIndex, offset: u64, data: &[u8]) -> Result<Ack, AccessError> {
        self.device.region_write(region, offset, data)
    }

    fn complete(&mut self, deferred: Deferred) {
        self.device.complete(deferred);
    }

    fn dma_map(&mut self, region: &DmaRegion) -> Result<(), MapError> {
        self.device.dma_map(region)
    }

    fn dma_unmap(&mut self, gpa: u64, size: u64) {
        self.device.dma_unmap(gpa, size);
    }

    fn reset(&mut self) {
        self.seen.resets.fetch_add(1, Ordering::Relaxed);
        self.device.reset();
    }

    fn disconnected(&mut self) {
        tracing::info!("the VMM has disconnected");
        self.device.disconnected();
    }

    fn lend_area(&mut self, region: RegionIndex, area: MmapArea, pages: &Arc<Mapping>) -> Result<(), MapError> {
        self.device.lend_area(region, area, pages)
    }

    fn take_file(&mut self, region: RegionIndex, file: Arc<OwnedFd>) -> Result<(), MapError> {
        self.device.take_file(region, file)
    }

    fn journal(&self) -> Option<Arc<OwnedFd>> {
        self.device.journal()
    }

    fn take_journal(&mut self, file: Arc<OwnedFd>) -> Result<(), MapError> {
        self.device.take_journal(file)
    }

    fn is_renewable(&self) -> bool {
        self.device.is_renewable()
    }

    fn migration(&mut self) -> Option<&mut dyn Migration> {
        self.device.migration()
    }

    fn memory_not_shared(&mut self, gpa: u64) {
        self.seen.memory_not_shared.store(true, Ordering::Relaxed);
        self.device.memory_not_shared(gpa);
    }
}
