//! The interface to the hypervisor that a server uses.

use std::io;
use std::os::fd::BorrowedFd;
use std::sync::Arc;

use thiserror::Error;
use vmm_glue::link::Wake;
use vmm_glue::memory::Mapping;

/// The number of a domain.
pub type DomainId = u16;

/// Addresses in a domain's memory space, both ends included.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Range {
    /// First address.
    pub first: u64,
    /// Last address.
    pub last: u64,
}

/// Reason why a domain cannot be served.
#[derive(Debug, Error)]
pub enum AttachError {
    /// This process is not permitted or not able to call the hypervisor.
    #[error("{path}: {error}; {advice}")]
    Device {
        /// The kernel's device.
        path: &'static str,
        /// The system's error.
        error: io::Error,
        /// Advice to the operator.
        advice: &'static str,
    },
    /// Xen rejected a call.
    #[error("Xen refuses to {what} of domain {domain}: {error}{advice}")]
    Refused {
        /// The domain.
        domain: DomainId,
        /// Description of the call.
        what: &'static str,
        /// Xen's error.
        error: io::Error,
        /// Advice to the operator, if any.
        advice: &'static str,
    },
}

/// A way to serve domains.
pub trait Hypervisor: Send + std::fmt::Debug {
    /// Becomes the server of the PCI function in `slot` of bus 0 of a domain. Accesses only arrive after
    /// [`Target::enable`].
    ///
    /// # Errors
    /// Returns an error if Xen or the kernel rejects the call.
    fn attach(&self, domain: DomainId, slot: u8, wake: &Arc<Wake>) -> Result<Arc<dyn Target>, AttachError>;
}

/// A domain as its server may use it, from any thread. Dropping this value removes the server.
pub trait Target: Send + Sync + std::fmt::Debug {
    /// Returns the page of synchronous requests, with a slot for each virtual CPU.
    fn requests(&self) -> &Mapping;

    /// Returns the page of buffered requests.
    fn buffered(&self) -> &Mapping;

    /// Returns the domain's port that signals buffered requests.
    fn buffered_port(&self) -> u32;

    /// Binds a port of the domain. Returns the server's port.
    ///
    /// # Errors
    /// Returns an error if the port does not exist.
    fn bind(&self, port: u32) -> io::Result<u32>;

    /// Enables accesses.
    ///
    /// # Errors
    /// Returns an error if Xen rejects the call.
    fn enable(&self) -> io::Result<()>;

    /// Claims addresses: accesses inside the claims are passed to this process.
    ///
    /// # Errors
    /// Returns an error if a part is already claimed.
    fn claim(&self, range: Range) -> io::Result<()>;

    /// Releases a claim.
    ///
    /// # Errors
    /// Returns an error if the range was not claimed.
    fn disclaim(&self, range: Range) -> io::Result<()>;

    /// Notifies the domain, through one of the server's ports, that a request is answered.
    ///
    /// # Errors
    /// Returns an error if the port no longer exists, for example because the domain was destroyed.
    fn notify(&self, port: u32) -> io::Result<()>;

    /// Returns a descriptor that is readable when a port has fired.
    fn events(&self) -> BorrowedFd<'_>;

    /// Takes the ports that have fired, at most as many as fit. Each of them stays masked until [`Self::unmask`]. Does
    /// not wait.
    ///
    /// # Errors
    /// Returns an error if events were lost or the device has failed.
    fn fired(&self, ports: &mut [u32]) -> io::Result<usize>;

    /// Unmasks ports; a port that has fired since then fires at once.
    ///
    /// # Errors
    /// Returns an error if the device has failed.
    fn unmask(&self, ports: &[u32]) -> io::Result<()>;

    /// Returns true for each of the `count` frames starting at `first` at which the domain has memory.
    ///
    /// # Errors
    /// Returns an error if the domain no longer exists.
    fn present(&self, first: u64, count: usize) -> io::Result<Vec<bool>>;

    /// Maps `count` frames of the domain, starting at `first`. Maps either all of the frames or none of them.
    ///
    /// # Errors
    /// Returns an error if one of the frames is missing.
    fn map(&self, first: u64, count: usize) -> io::Result<Mapping>;

    /// Adds `count` frames, starting at `first`, to the domain, beyond its current memory and limit. Adds either all of
    /// the frames or none of them.
    ///
    /// # Errors
    /// Returns an error if the host has no memory for the frames, or Xen refuses the call.
    fn add_frames(&self, first: u64, count: u64) -> io::Result<()>;

    /// Removes `count` frames, starting at `first`, from the domain. The frames continue to exist for as long as they
    /// are mapped here.
    ///
    /// # Errors
    /// Returns an error if one of the frames is missing. The other frames are removed.
    fn take_frames(&self, first: u64, count: u64) -> io::Result<()>;

    /// Moves `count` frames that begin at `from` to `to`; the two ranges do not overlap.
    ///
    /// # Errors
    /// Returns an error if Xen refuses the move; in this case, some frames may have been moved.
    fn move_frames(&self, from: u64, to: u64, count: u64) -> io::Result<()>;

    /// Delivers a message-signalled interrupt.
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
