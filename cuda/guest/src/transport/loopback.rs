//! A worker on the same machine, without a VM. The transport is a UNIX socket, with a memfd as the window.
//!
//! `cuda-loopback` first sends the window's descriptor over the socket, which then serves as the link to the worker.
//!
//! UNSAFETY: maps parts of the window, waits on a futex in it, and closes descriptors in children.
#![allow(unsafe_code, reason = "see UNSAFETY")]

use std::collections::BTreeMap;
use std::io;
use std::mem::MaybeUninit;
use std::os::fd::{AsRawFd as _, OwnedFd};
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use cuda_ring::{Blob, BlobKind, Shared, Transport, Words as _, control, state};
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SocketAddrUnix, SocketFlags, SocketType,
};
use worker_link::{Link, LinkError, ToWorker};

/// Allocations in the window: the next offset, and the free ranges, keyed by offset.
#[derive(Debug, Default)]
struct Parts {
    next: u64,
    free: BTreeMap<u64, u64>,
    /// Offsets of the blobs in bytes, keyed by identifier.
    blobs: BTreeMap<u32, u64>,
    last_id: u32,
}

/// Connection to a worker through `cuda-loopback`.
#[derive(Debug)]
pub struct Loopback {
    link: Arc<Link>,
    window: OwnedFd,
    bytes: u64,
    parts: Mutex<Parts>,
    /// Address of the control blob, or 0 before it exists.
    control: Arc<AtomicU64>,
}

fn wake_all(control: &Shared) {
    control.add(control::EVENTS, 1);
    // SAFETY: the word is mapped, and `FUTEX_WAKE` does not access memory.
    unsafe { libc::syscall(libc::SYS_futex, control.address(control::EVENTS), libc::FUTEX_WAKE, i32::MAX) };
}

fn shared(address: &AtomicU64) -> Option<Shared> {
    let address = address.load(Ordering::Acquire);
    // SAFETY: the control blob remains mapped until the process exits.
    (address != 0).then(|| unsafe { Shared::new(address, control::BYTES) })
}

/// Reads the link, so that the worker never blocks, and reports the worker's exit.
fn watch(link: &Link, control: &AtomicU64) {
    let mut descriptors = [rustix::event::PollFd::new(link, rustix::event::PollFlags::IN)];
    loop {
        match link.receive_from_worker() {
            Ok(_) | Err(LinkError::Malformed(_)) => {}
            Err(LinkError::WouldBlock) => {
                let _ = rustix::event::poll(&mut descriptors, None);
            }
            Err(LinkError::Closed | LinkError::Socket(_)) => break,
        }
    }
    if let Some(control) = shared(control) {
        control.store(control::STATE, state::LOST);
        wake_all(&control);
    }
}

impl Loopback {
    /// Connects to the `cuda-loopback` socket.
    ///
    /// # Errors
    /// Returns an error if no worker can be started.
    pub fn connect(path: &Path) -> io::Result<Self> {
        let flags = SocketFlags::CLOEXEC;
        let socket = rustix::net::socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None)?;
        rustix::net::connect(&socket, &SocketAddrUnix::new(path)?)?;
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut ancillary = RecvAncillaryBuffer::new(&mut space);
        let mut byte = [0u8; 8];
        let mut parts = [io::IoSliceMut::new(&mut byte)];
        rustix::net::recvmsg(&socket, &mut parts, &mut ancillary, RecvFlags::CMSG_CLOEXEC)?;
        let descriptor = ancillary.drain().find_map(|message| match message {
            RecvAncillaryMessage::ScmRights(mut descriptors) => descriptors.next(),
            _ => None,
        });
        let window = descriptor.ok_or_else(|| io::Error::other("cuda-loopback started no worker"))?;
        let bytes = rustix::fs::fstat(&window)?.st_size.cast_unsigned();
        let (link, control) = (Arc::new(Link::new(socket)), Arc::new(AtomicU64::new(0)));
        super::spawn({
            let (link, control) = (Arc::clone(&link), Arc::clone(&control));
            move || watch(&link, &control)
        })?;
        Ok(Self { link, window, bytes, parts: Mutex::default(), control })
    }

    fn send(&self, message: ToWorker) -> io::Result<()> {
        loop {
            match self.link.send_to_worker(message) {
                Ok(()) => return Ok(()),
                // A separate thread of the worker reads the link, so the queue has space again soon.
                Err(LinkError::WouldBlock) => std::thread::yield_now(),
                Err(error) => return Err(io::Error::other(error)),
            }
        }
    }
}

impl Transport for Loopback {
    fn create(&self, kind: BlobKind, bytes: u64, address: Option<u64>) -> io::Result<Blob> {
        let (id, offset) = {
            let mut parts = self.parts.lock().unwrap_or_else(PoisonError::into_inner);
            let reused = parts.free.iter().find(|(_, length)| **length == bytes).map(|(offset, _)| *offset);
            let offset = match reused {
                Some(offset) => {
                    parts.free.remove(&offset);
                    offset
                }
                None => {
                    let offset = parts.next;
                    parts.next =
                        offset.checked_add(bytes).filter(|end| *end <= self.bytes).ok_or(io::ErrorKind::OutOfMemory)?;
                    offset
                }
            };
            parts.last_id += 1;
            let id = parts.last_id;
            parts.blobs.insert(id, offset);
            (id, offset)
        };
        let fixed = if address.is_some() { libc::MAP_FIXED } else { 0 };
        // SAFETY: without an address, the mapping is new. With an address, it replaces pages in a range that this
        // library has reserved.
        let found = unsafe {
            libc::mmap(
                address.unwrap_or(0) as *mut libc::c_void,
                bytes as usize,
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_SHARED | libc::MAP_NORESERVE | fixed,
                self.window.as_raw_fd(),
                offset.cast_signed(),
            )
        };
        if found == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: the mapping was created above. Children must not share it.
        unsafe { libc::madvise(found, bytes as usize, libc::MADV_DONTFORK) };
        if kind == BlobKind::Control {
            self.control.store(found as u64, Ordering::Release);
        }
        self.send(ToWorker::Blob { id, kind: kind.number(), serial: 0, offset, size: bytes })?;
        Ok(Blob { id, address: found as u64, bytes })
    }

    fn remove(&self, blob: Blob, keep_range: bool) -> io::Result<()> {
        let at = blob.address as *mut libc::c_void;
        // SAFETY: the mapping was created by `create`, and the caller no longer uses it.
        unsafe {
            if keep_range {
                let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE | libc::MAP_FIXED;
                libc::mmap(at, blob.bytes as usize, libc::PROT_NONE, flags, -1, 0);
            } else {
                libc::munmap(at, blob.bytes as usize);
            }
        }
        self.send(ToWorker::Remove { id: blob.id, serial: 0 })?;
        let mut parts = self.parts.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(offset) = parts.blobs.remove(&blob.id) {
            let flags = rustix::fs::FallocateFlags::PUNCH_HOLE | rustix::fs::FallocateFlags::KEEP_SIZE;
            rustix::fs::fallocate(&self.window, flags, offset, blob.bytes)?;
            parts.free.insert(offset, blob.bytes);
        }
        Ok(())
    }

    fn doorbell(&self) -> io::Result<()> {
        self.send(ToWorker::Doorbell)
    }

    fn wait(&self, offset: u64, value: u64) -> io::Result<()> {
        let control = shared(&self.control).ok_or(io::ErrorKind::NotConnected)?;
        let events = control.load(control::EVENTS);
        if control.load(offset) >= value || control.load(control::STATE) == state::LOST {
            return Ok(());
        }
        let word = control.address(control::EVENTS);
        let forever = std::ptr::null::<libc::timespec>();
        // SAFETY: the word is mapped.
        unsafe { libc::syscall(libc::SYS_futex, word, libc::FUTEX_WAIT, events as u32, forever) };
        Ok(())
    }

    fn close_in_child(&self) {
        // SAFETY: the child no longer uses these descriptors, because every call there returns an error.
        unsafe {
            libc::close(std::os::fd::AsFd::as_fd(&*self.link).as_raw_fd());
            libc::close(self.window.as_raw_fd());
        }
    }
}
