//! Implements the guest library's transport on a render node.
//!
//! UNSAFETY: maps memory at addresses chosen by the library, and closes a descriptor in a child process.

use std::collections::BTreeMap;
use std::io;
use std::mem::ManuallyDrop;
use std::os::fd::AsRawFd;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};

use cuda_ring::{Blob, BlobKind, Transport};
use rustix::event::{PollFd, PollFlags, poll};
use rustix::io::Errno;

use crate::node::{Handle, Node, OpenError, RINGS, reserve, unmap};

/// Command that wakes the worker.
const DOORBELL: u32 = 1;
/// Command whose fence the device signals when a word has reached a value.
const WAIT: u32 = 2;
/// Command that reports the process ID.
const IDENTIFY: u32 = 3;

/// The transport of one process.
#[derive(Debug)]
pub struct RenderTransport {
    /// The node's destructor must not close the descriptor in a child process, where its number may have been reused.
    node: ManuallyDrop<Node>,
    is_closed: AtomicBool,
    next: AtomicU32,
    /// Number of the control blob, or 0 before it exists.
    control: AtomicU32,
    handles: Mutex<BTreeMap<u32, Handle>>,
}

impl RenderTransport {
    /// Opens the first node with the capability set.
    ///
    /// # Errors
    /// Returns an error if no such node exists, or the node rejects the context.
    pub fn open() -> Result<Self, OpenError> {
        Ok(Self::new(Node::find()?))
    }

    /// Creates a transport on an open node.
    #[must_use]
    pub fn new(node: Node) -> Self {
        // The process ID is only displayed, so errors are ignored.
        let _ = node.submit(&words(&[IDENTIFY, std::process::id()]));
        Self {
            node: ManuallyDrop::new(node),
            is_closed: AtomicBool::new(false),
            next: AtomicU32::new(1),
            control: AtomicU32::new(0),
            handles: Mutex::new(BTreeMap::new()),
        }
    }

    fn node(&self) -> io::Result<&Node> {
        if self.is_closed.load(Ordering::Acquire) { Err(Errno::BADF.into()) } else { Ok(&self.node) }
    }

    fn handles(&self) -> std::sync::MutexGuard<'_, BTreeMap<u32, Handle>> {
        self.handles.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Transport for RenderTransport {
    fn create(&self, kind: BlobKind, bytes: u64, address: Option<u64>) -> io::Result<Blob> {
        let node = self.node()?;
        let id = self.next.fetch_add(1, Ordering::Relaxed);
        let handle = node.create_blob(u64::from(id) << 32 | u64::from(kind.number()), bytes)?;
        let mapped = match address {
            // SAFETY: the library passes addresses that it has reserved, or whose contents it moves to the blob.
            Some(at) => unsafe { node.map_at(handle, bytes, at) },
            None => node.map(handle, bytes),
        };
        let address = match mapped {
            Ok(address) => address,
            Err(error) => {
                let _ = node.close(handle);
                return Err(error.into());
            }
        };
        self.handles().insert(id, handle);
        if kind == BlobKind::Control {
            self.control.store(id, Ordering::Release);
        }
        Ok(Blob { id, address, bytes })
    }

    fn remove(&self, blob: Blob, keep_range: bool) -> io::Result<()> {
        let node = self.node()?;
        let Blob { id, address, bytes } = blob;
        let handle = self.handles().remove(&id).ok_or(io::ErrorKind::NotFound)?;
        if keep_range {
            // SAFETY: the library removes the blob, so its pages are not in use.
            unsafe { reserve(address, bytes) }?;
        } else {
            // SAFETY: as above.
            unsafe { unmap(address, bytes) }?;
        }
        Ok(node.close(handle)?)
    }

    fn doorbell(&self) -> io::Result<()> {
        Ok(self.node()?.submit(&DOORBELL.to_le_bytes())?)
    }

    fn wait(&self, offset: u64, value: u64) -> io::Result<()> {
        let node = self.node()?;
        let mut command = words(&[WAIT, self.control.load(Ordering::Acquire)]);
        command.extend(offset.to_le_bytes());
        command.extend(value.to_le_bytes());
        let fence = node.submit_fenced(&command, ring())?;
        match poll(&mut [PollFd::new(&fence, PollFlags::IN)], None) {
            // If a signal interrupts the wait, the caller checks the word.
            Ok(_) | Err(Errno::INTR) => Ok(()),
            Err(error) => Err(error.into()),
        }
    }

    fn close_in_child(&self) {
        if !self.is_closed.swap(true, Ordering::AcqRel) {
            // SAFETY: the descriptor is open, and `is_closed` prevents its use in this process afterwards.
            unsafe { rustix::io::close(std::os::fd::AsFd::as_fd(&*self.node).as_raw_fd()) };
        }
    }
}

impl Drop for RenderTransport {
    fn drop(&mut self) {
        self.close_in_child();
    }
}

fn words(words: &[u32]) -> Vec<u8> {
    words.iter().flat_map(|word| word.to_le_bytes()).collect()
}

/// Bit mask of the rings assigned to threads. Bit 0 is always set, because ring 0 must not be used.
static USED_RINGS: AtomicU64 = AtomicU64::new(1);
/// The ring that threads share if no other ring is free.
const SHARED_RING: u32 = RINGS as u32 - 1;

/// A thread's ring. It is released when the thread exits.
struct Ring(u32);

impl Drop for Ring {
    fn drop(&mut self) {
        if self.0 != SHARED_RING {
            USED_RINGS.fetch_and(!(1 << self.0), Ordering::AcqRel);
        }
    }
}

thread_local! {
    static RING: Ring = Ring(take_ring());
}

fn take_ring() -> u32 {
    let taken = USED_RINGS.fetch_update(Ordering::AcqRel, Ordering::Acquire, |used| {
        let free = used.trailing_ones();
        (free < SHARED_RING).then(|| used | 1 << free)
    });
    taken.map_or(SHARED_RING, u64::trailing_ones)
}

/// Returns this thread's ring. A signalled fence also signals earlier fences on the same ring, but not on other rings.
fn ring() -> u32 {
    RING.try_with(|ring| ring.0).unwrap_or(SHARED_RING)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn threads_have_own_rings_and_give_them_back() {
        let mine = ring();
        assert_eq!(ring(), mine);
        assert!(mine != 0);
        let barrier = std::sync::Barrier::new(40);
        let mut rings: Vec<u32> = std::thread::scope(|scope| {
            let threads: Vec<_> = (0..40)
                .map(|_| {
                    scope.spawn(|| {
                        let ring = ring();
                        barrier.wait();
                        ring
                    })
                })
                .collect();
            threads.into_iter().map(|thread| thread.join().unwrap()).collect()
        });
        rings.push(mine);
        rings.sort_unstable();
        rings.dedup();
        assert_eq!(rings.len(), 41);
        assert_eq!(USED_RINGS.load(Ordering::Acquire).count_ones(), 2, "ring 0 and this thread's ring");
    }
}
