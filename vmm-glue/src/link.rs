//! A device's link to its server, usable from any thread of the device and the daemon.

mod saved;

pub(crate) use saved::SavedLink;
pub use vmm_memory::wake::Wake;

use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use parking_lot::Mutex;
use serde::Serialize;

use crate::counters::Counters;
use crate::dma::DmaClient;
use crate::interrupts::{Interrupts, IrqCounts};
use vmm_memory::memory::GuestMemory;

/// Stops running servers, or suspends their clients, from any thread. Clones control the same servers.
#[derive(Clone, Debug)]
pub struct StopHandle(Arc<Stop>);

#[derive(Debug)]
struct Stop {
    wake: Wake,
    stopped: AtomicBool,
    parking: AtomicBool,
}

impl StopHandle {
    /// Creates a handle for new servers. Fails if no file descriptor is available.
    pub fn new() -> std::io::Result<Self> {
        let (stopped, parking) = (AtomicBool::new(false), AtomicBool::new(false));
        Ok(Self(Arc::new(Stop { wake: Wake::new()?, stopped, parking })))
    }

    /// Stops every current and future [`crate::Server::run`] call with this handle.
    pub fn stop(&self) {
        self.0.stopped.store(true, Ordering::Release);
        self.0.wake.wake();
    }

    /// Makes every [`crate::Server::serve`] call with this handle return its suspended client, once none of the
    /// client's requests is partially executed.
    pub fn park(&self) {
        self.0.parking.store(true, Ordering::Release);
        self.0.wake.wake();
    }

    /// Cancels [`Self::park`] for servers that start later.
    pub fn unpark(&self) {
        self.0.parking.store(false, Ordering::Release);
        if !self.is_stopped() {
            self.0.wake.clear();
        }
    }

    pub(crate) fn is_parking(&self) -> bool {
        self.0.parking.load(Ordering::Acquire)
    }

    /// Returns true if [`Self::stop`] was called.
    pub fn is_stopped(&self) -> bool {
        self.0.stopped.load(Ordering::Acquire)
    }

    /// Returns the event that is set when servers with this handle must stop or suspend.
    pub fn fd(&self) -> BorrowedFd<'_> {
        self.0.wake.fd()
    }
}

/// A connected client.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct ClientInfo {
    /// PID of the connected process in the server's namespace, or 0 if the process is not visible there.
    pub pid: i32,
    /// User ID of the connected process.
    pub uid: u32,
    /// ID of the served domain, if the client is not a process.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub domain: Option<u16>,
}

#[derive(Debug)]
struct Inner {
    interrupts: Arc<Interrupts>,
    memory: Arc<GuestMemory>,
    counters: Arc<Counters>,
    dma: DmaClient,
    wake: Arc<Wake>,
    check_shared: AtomicBool,
    disconnect: AtomicBool,
    client: Mutex<Option<ClientInfo>>,
}

/// A device's handle to its server. Create it first, and pass clones to the device and the server. All clones refer to
/// the same link.
#[derive(Clone, Debug)]
pub struct Link(Arc<Inner>);

impl Link {
    /// Creates a link for a device with these interrupts. Fails if no file descriptor is available, or if the kernel
    /// lacks asynchronous I/O.
    pub fn new(irqs: IrqCounts) -> std::io::Result<Self> {
        crate::event::check()?;
        let wake = Arc::new(Wake::new()?);
        let counters = Arc::new(Counters::default());
        Ok(Self(Arc::new(Inner {
            interrupts: Arc::new(Interrupts::new(irqs)),
            memory: Arc::new(GuestMemory::default()),
            dma: DmaClient::new(Arc::clone(&wake), Arc::clone(&counters)),
            counters,
            wake,
            check_shared: AtomicBool::new(false),
            disconnect: AtomicBool::new(false),
            client: Mutex::new(None),
        })))
    }

    /// Returns the device's interrupts.
    pub fn interrupts(&self) -> &Arc<Interrupts> {
        &self.0.interrupts
    }

    /// Returns the memory mapped by the client.
    pub fn memory(&self) -> &Arc<GuestMemory> {
        &self.0.memory
    }

    /// Returns the interface for accessing client memory through messages, for regions without a file.
    pub fn dma(&self) -> &DmaClient {
        &self.0.dma
    }

    /// Returns the server's counters.
    pub fn counters(&self) -> &Arc<Counters> {
        &self.0.counters
    }

    /// Returns the client, if one is connected and has negotiated.
    pub fn client(&self) -> Option<ClientInfo> {
        *self.0.client.lock()
    }

    /// Requests that the server check whether the client's memory is really shared. A device calls this when the guest
    /// enables bus mastering. If the memory is private, the server calls [`crate::Device::memory_not_shared`].
    pub fn check_shared(&self) {
        self.0.check_shared.store(true, Ordering::Release);
        self.0.wake.wake();
    }

    /// Requests that the server close the client's connection, if any. The next client may then connect.
    pub fn disconnect(&self) {
        self.0.disconnect.store(true, Ordering::Release);
        self.0.wake.wake();
    }

    /// Returns the event that wakes the server.
    pub fn wake(&self) -> &Arc<Wake> {
        &self.0.wake
    }

    /// Returns true if [`Self::check_shared`] was called, and clears this request.
    pub fn take_check_shared(&self) -> bool {
        self.0.check_shared.swap(false, Ordering::AcqRel)
    }

    /// Returns true if [`Self::disconnect`] was called, and clears this request.
    pub fn take_disconnect(&self) -> bool {
        self.0.disconnect.swap(false, Ordering::AcqRel)
    }

    /// Sets the connected client. Called only by the server.
    pub fn set_client(&self, client: Option<ClientInfo>) {
        *self.0.client.lock() = client;
    }
}

/// Simulated client messages, for tests that drive a device without a server.
#[cfg(feature = "client")]
impl Link {
    /// Maps memory like `DMA_MAP`. Returns the region to pass to [`crate::Device::dma_map`]. Addresses and sizes are
    /// multiples of 4 KiB. The file is mapped from offset 0.
    ///
    /// # Errors
    /// Returns an error if the region overlaps another, or if the file cannot be mapped.
    pub fn lend(
        &self,
        gpa: u64,
        size: u64,
        writable: bool,
        fd: Option<std::os::fd::OwnedFd>,
    ) -> Result<vmm_memory::memory::DmaRegion, vmm_memory::memory::AddError> {
        let region = vmm_memory::memory::AddRegion { gpa, size, offset: 0, readable: true, writable, fd };
        self.memory().add(region, &vmm_memory::memory::MemoryLimits::default(), self.wake())
    }

    /// Removes the region at `gpa`, as `DMA_UNMAP` does before it calls [`crate::Device::dma_unmap`].
    pub fn take_back(&self, gpa: u64) -> Option<vmm_memory::memory::DmaRegion> {
        self.memory().remove(gpa)
    }

    /// Returns true if the server was requested to close the connection but has not done so yet.
    pub fn is_disconnecting(&self) -> bool {
        self.0.disconnect.load(Ordering::Acquire)
    }

    /// Attaches an event to the first MSI vector.
    ///
    /// # Errors
    /// Returns an error if no file descriptor is available, or if the device has no MSI.
    pub fn attach_msi(&self) -> std::io::Result<std::os::fd::OwnedFd> {
        use crate::protocol::{IRQ_ACTION_TRIGGER, IRQ_DATA_EVENTFD, IrqSet};
        use rustix::event::{EventfdFlags, eventfd};

        let event = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        let request = IrqSet { argsz: 20, flags: IRQ_DATA_EVENTFD | IRQ_ACTION_TRIGGER, index: 1, start: 0, count: 1 };
        let given = vec![event.try_clone()?];
        self.interrupts().set(&request, &[], given).map_err(std::io::Error::other)?;
        Ok(event)
    }
}
