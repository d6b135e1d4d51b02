//! The interface between a server and the hypervisor.

use std::io;
use std::os::fd::BorrowedFd;
use std::sync::Arc;

use thiserror::Error;
use vmm_glue::link::Wake;
use vmm_glue::memory::Mapping;

/// A domain ID.
pub type DomainId = u16;

/// An inclusive address range in a domain's memory space.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Range {
    /// First address of the range.
    pub first: u64,
    /// Last address of the range.
    pub last: u64,
}

/// Reason why a domain cannot be served.
#[derive(Debug, Error)]
pub enum AttachError {
    /// This process cannot open one of the kernel's Xen devices.
    #[error("{path}: {error}; {advice}")]
    Device {
        /// Path of the kernel's device.
        path: &'static str,
        /// System error.
        error: io::Error,
        /// Advice to the operator.
        advice: &'static str,
    },
    /// Xen rejected a call.
    #[error("Xen refused to {what} in domain {domain}: {error}{advice}")]
    Refused {
        /// ID of the domain.
        domain: DomainId,
        /// Description of the rejected call.
        what: &'static str,
        /// Xen's error.
        error: io::Error,
        /// Advice to the operator, if any.
        advice: &'static str,
    },
}

/// A hypervisor whose domains can be served.
pub trait Hypervisor: Send + std::fmt::Debug {
    /// Makes this process the server of the PCI function in `slot` of bus 0 of a domain. No accesses arrive before
    /// [`Target::enable`] is called.
    ///
    /// # Errors
    /// Returns an error if Xen or the kernel rejects the call.
    fn attach(&self, domain: DomainId, slot: u8, wake: &Arc<Wake>) -> Result<Arc<dyn Target>, AttachError>;
}

/// A domain as used by its server, from any thread. Dropping this value removes the server.
pub trait Target: Send + Sync + std::fmt::Debug {
    /// Returns the page of synchronous requests, which has one slot per virtual CPU.
    fn requests(&self) -> &Mapping;

    /// Returns the page of buffered requests.
    fn buffered(&self) -> &Mapping;

    /// Returns the domain's port for buffered requests.
    fn buffered_port(&self) -> u32;

    /// Binds a port of the domain. Returns the server's port.
    ///
    /// # Errors
    /// Returns an error if the port does not exist.
    fn bind(&self, port: u32) -> io::Result<u32>;

    /// Enables the forwarding of accesses.
    ///
    /// # Errors
    /// Returns an error if Xen rejects the call.
    fn enable(&self) -> io::Result<()>;

    /// Claims addresses, so that accesses to them are forwarded to this process.
    ///
    /// # Errors
    /// Returns an error if any of the addresses is already claimed.
    fn claim(&self, range: Range) -> io::Result<()>;

    /// Releases a claim.
    ///
    /// # Errors
    /// Returns an error if the range was not claimed.
    fn disclaim(&self, range: Range) -> io::Result<()>;

    /// Notifies the domain, through one of the server's ports, that a request has been answered.
    ///
    /// # Errors
    /// Returns an error if the port no longer exists, for example because the domain was destroyed.
    fn notify(&self, port: u32) -> io::Result<()>;

    /// Returns a descriptor that is readable once a port has fired.
    fn events(&self) -> BorrowedFd<'_>;

    /// Takes ports that have fired, without waiting, until `ports` is full, and returns their number. Each of them
    /// stays masked until [`Self::unmask`] is called.
    ///
    /// # Errors
    /// Returns an error if events were lost or the device has failed.
    fn fired(&self, ports: &mut [u32]) -> io::Result<usize>;

    /// Unmasks ports. A port that has fired in the meantime fires immediately.
    ///
    /// # Errors
    /// Returns an error if the device has failed.
    fn unmask(&self, ports: &[u32]) -> io::Result<()>;

    /// Returns a flag for each of the `count` frames starting at `first`, which is true if the domain has memory at
    /// this frame.
    ///
    /// # Errors
    /// Returns an error if the domain no longer exists.
    fn present(&self, first: u64, count: usize) -> io::Result<Vec<bool>>;

    /// Maps `count` frames of the domain starting at `first`, either all of them or none.
    ///
    /// # Errors
    /// Returns an error if any frame is missing.
    fn map(&self, first: u64, count: usize) -> io::Result<Mapping>;

    /// Adds `count` frames starting at `first` to the domain, beyond its current memory and limit, either all of them
    /// or none.
    ///
    /// # Errors
    /// Returns an error if the host has no memory for the frames, or if Xen rejects the call.
    fn add_frames(&self, first: u64, count: u64) -> io::Result<()>;

    /// Removes `count` frames starting at `first` from the domain. They continue to exist as long as they are mapped in
    /// this process.
    ///
    /// # Errors
    /// Returns an error if any frame is missing. The other frames are removed nevertheless.
    fn take_frames(&self, first: u64, count: u64) -> io::Result<()>;

    /// Moves `count` frames from `from` to `to`. The two ranges must not overlap.
    ///
    /// # Errors
    /// Returns an error if Xen rejects the move. Some frames may then have been moved.
    fn move_frames(&self, from: u64, to: u64, count: u64) -> io::Result<()>;

    /// Delivers an MSI.
    ///
    /// # Errors
    /// Returns an error if Xen rejects the call.
    fn inject_msi(&self, address: u64, data: u32) -> io::Result<()>;

    /// Sets the level of pin A of the function's slot.
    ///
    /// # Errors
    /// Returns an error if Xen rejects the call.
    fn set_intx(&self, level: bool) -> io::Result<()>;
}
