//! The seam to the hypervisor: what a server asks of it.

use std::io;
use std::os::fd::BorrowedFd;
use std::sync::Arc;

use thiserror::Error;

use crate::link::Wake;
use crate::memory::Mapping;

/// The number of a domain.
pub type DomainId = u16;

/// Addresses of a domain's memory space, both ends included.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Range {
    /// First address.
    pub first: u64,
    /// Last address.
    pub last: u64,
}

/// Reasons why a domain cannot be served.
#[derive(Debug, Error)]
pub enum AttachError {
    /// This process may not, or cannot, speak to the hypervisor.
    #[error("{path}: {error}; {advice}")]
    Device {
        /// The kernel's device.
        path: &'static str,
        /// The system's word.
        error: io::Error,
        /// Advice.
        advice: &'static str,
    },
    /// Xen refuses a call.
    #[error("Xen refuses to {what} of domain {domain}: {error}{advice}")]
    Refused {
        /// The domain.
        domain: DomainId,
        /// The call in words.
        what: &'static str,
        /// Its answer.
        error: io::Error,
        /// Advice, if there is any.
        advice: &'static str,
    },
}

/// A way to serve domains.
pub trait Hypervisor: Send + std::fmt::Debug {
    /// Becomes the server of the PCI function in `slot` of bus 0 of a domain. No access comes before [`Target::enable`].
    ///
    /// # Errors
    /// When Xen or the kernel refuses.
    fn attach(&self, domain: DomainId, slot: u8, wake: &Arc<Wake>) -> Result<Arc<dyn Target>, AttachError>;
}

/// A domain as its server may use it, from any thread. The server is gone when this is dropped.
pub trait Target: Send + Sync + std::fmt::Debug {
    /// The page of synchronous requests, a slot for each virtual CPU.
    fn requests(&self) -> &Mapping;

    /// The page of buffered requests.
    fn buffered(&self) -> &Mapping;

    /// The domain's port that tells of buffered requests.
    fn buffered_port(&self) -> u32;

    /// Binds a port of the domain. Returns ours.
    ///
    /// # Errors
    /// When there is no such port.
    fn bind(&self, port: u32) -> io::Result<u32>;

    /// Lets accesses come.
    ///
    /// # Errors
    /// When Xen refuses.
    fn enable(&self) -> io::Result<()>;

    /// Claims addresses: accesses that lie inside of what is claimed come to us.
    ///
    /// # Errors
    /// When a part is claimed already.
    fn claim(&self, range: Range) -> io::Result<()>;

    /// Gives up what was claimed.
    ///
    /// # Errors
    /// When it was not.
    fn disclaim(&self, range: Range) -> io::Result<()>;

    /// Tells the domain, by one of our ports, that a request is answered.
    ///
    /// # Errors
    /// When the port is gone, as that of a domain that is.
    fn notify(&self, port: u32) -> io::Result<()>;

    /// Readable when a port has fired.
    fn events(&self) -> BorrowedFd<'_>;

    /// Takes the ports that have fired, at most as many as fit; each is silent until [`Self::unmask`]. Does not wait.
    ///
    /// # Errors
    /// When events were lost or the device has failed.
    fn fired(&self, ports: &mut [u32]) -> io::Result<usize>;

    /// Lets ports fire again; one that has fired meanwhile does at once.
    ///
    /// # Errors
    /// When the device has failed.
    fn unmask(&self, ports: &[u32]) -> io::Result<()>;

    /// Says for each of `count` frames from `first` whether the domain has memory there.
    ///
    /// # Errors
    /// When the domain has gone.
    fn present(&self, first: u64, count: usize) -> io::Result<Vec<bool>>;

    /// Maps `count` frames of the domain from `first`, all of them.
    ///
    /// # Errors
    /// When one is not there.
    fn map(&self, first: u64, count: usize) -> io::Result<Mapping>;

    /// Gives the domain `count` frames from `first` on, beside what memory it has and may have. All or none.
    ///
    /// # Errors
    /// When the host has no memory for it, or Xen refuses.
    fn add_frames(&self, first: u64, count: u64) -> io::Result<()>;

    /// Takes `count` frames from `first` on from the domain. They stay for as long as they are mapped here.
    ///
    /// # Errors
    /// When one of them is not there; the others are taken.
    fn take_frames(&self, first: u64, count: u64) -> io::Result<()>;

    /// Moves `count` frames that begin at `from` to `to`, which is apart from there.
    ///
    /// # Errors
    /// When Xen refuses, by then some may have moved.
    fn move_frames(&self, from: u64, to: u64, count: u64) -> io::Result<()>;

    /// Delivers a message-signalled interrupt.
    ///
    /// # Errors
    /// When Xen refuses.
    fn inject_msi(&self, address: u64, data: u32) -> io::Result<()>;

    /// Sets the level of pin A of the function's slot.
    ///
    /// # Errors
    /// When Xen refuses.
    fn set_intx(&self, level: bool) -> io::Result<()>;
}
