//! The hypervisor through Linux devices: `/dev/xen/privcmd` for calls and memory, `/dev/xen/evtchn` for events.
//!
//! This implementation uses only interfaces that are identical in all Xen versions since 4.11 (device model calls, and
//! the mapping of a server's pages as a resource), except for one call, which `frames` describes. It does not need a
//! Xen library.
#![expect(unsafe_code, reason = "ioctls of Xen's devices, and memory that they map")]
// UNSAFETY: each ioctl gets a structure in the layout that its number requires. The structure outlives the call and
// points only to memory of this module. Each mapping is owned by one value, which unmaps it on drop.

mod frames;

use std::ffi::c_void;
use std::fs::{File, OpenOptions};
use std::io::{self, Read, Write};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::os::unix::fs::OpenOptionsExt;
use std::ptr;
use std::sync::Arc;

use parking_lot::Mutex;
use rustix::mm::{MapFlags, ProtFlags};
use vmm_glue::link::Wake;
use vmm_glue::memory::{LentPages, Mapping, PAGE_SIZE};

use self::frames::{Buffer, Frames};
use crate::hypervisor::{AttachError, DomainId, Hypervisor, Range, Target};

const PRIVCMD: &str = "/dev/xen/privcmd";
const EVTCHN: &str = "/dev/xen/evtchn";
const PAGE: usize = 4096;
const _: () = assert!(PAGE as u64 == PAGE_SIZE);
/// Maximum number of frames per mapping.
const MAX_FRAMES: usize = 1 << 16;

/// Returns the number of an ioctl without direction bits, which Xen's ioctls do not use.
const fn ioctl_number(kind: u8, number: u8, size: usize) -> libc::c_ulong {
    (size as libc::c_ulong) << 16 | (kind as libc::c_ulong) << 8 | number as libc::c_ulong
}

const DM_OP: libc::c_ulong = ioctl_number(b'P', 5, size_of::<DmOp>());
const MMAP_BATCH: libc::c_ulong = ioctl_number(b'P', 4, size_of::<MmapBatch>());
const MMAP_RESOURCE: libc::c_ulong = ioctl_number(b'P', 7, size_of::<MmapResource>());
const BIND_INTERDOMAIN: libc::c_ulong = ioctl_number(b'E', 1, size_of::<BindInterdomain>());
const NOTIFY: libc::c_ulong = ioctl_number(b'E', 4, size_of::<u32>());

/// `struct privcmd_dm_op_buf`.
#[repr(C)]
struct DmOpBuffer {
    address: *mut c_void,
    size: usize,
}

/// `struct privcmd_dm_op`.
#[repr(C)]
struct DmOp {
    domain: u16,
    count: u16,
    buffers: *const DmOpBuffer,
}

/// `struct privcmd_mmapbatch_v2`.
#[repr(C)]
struct MmapBatch {
    count: u32,
    domain: u16,
    address: u64,
    frames: *const u64,
    errors: *mut i32,
}

/// `struct privcmd_mmap_resource`.
#[repr(C)]
struct MmapResource {
    domain: u16,
    kind: u32,
    id: u32,
    index: u32,
    count: u64,
    address: u64,
}

/// `struct ioctl_evtchn_bind_interdomain`.
#[repr(C)]
struct BindInterdomain {
    domain: u32,
    port: u32,
}

/// Device model calls, `XEN_DMOP_*`.
mod op {
    pub const CREATE_SERVER: u64 = 1;
    pub const SERVER_INFO: u64 = 2;
    pub const MAP_RANGE: u64 = 3;
    pub const UNMAP_RANGE: u64 = 4;
    pub const SET_STATE: u64 = 5;
    pub const DESTROY_SERVER: u64 = 6;
    pub const SET_INTX: u64 = 8;
    pub const INJECT_MSI: u64 = 14;
    pub const RELOCATE_MEMORY: u64 = 17;
}

/// Declares that the server updates the ring's read pointer atomically.
const BUFFERED_ATOMIC: u64 = 2;
/// Makes Xen keep the server's pages out of the domain's memory.
const NO_FRAMES: u64 = 1;
const RANGE_MEMORY: u64 = 1;
const RANGE_PCI: u64 = 2;
const RESOURCE_SERVER: u32 = 0;

/// The Xen hypervisor under this kernel.
#[derive(Debug)]
pub struct KernelHypervisor {
    privcmd: Arc<File>,
}

impl KernelHypervisor {
    /// Opens the kernel's device.
    ///
    /// # Errors
    /// Returns an error if this is not domain 0, or if the process is not permitted to call the hypervisor.
    pub fn open() -> Result<Self, AttachError> {
        let advice = "domains are served from domain 0 of a Xen host, by root, with the kernel's module xen-privcmd";
        Ok(Self { privcmd: Arc::new(device(PRIVCMD, 0, advice)?) })
    }
}

fn device(path: &'static str, flags: i32, advice: &'static str) -> Result<File, AttachError> {
    let opened = OpenOptions::new().read(true).write(true).custom_flags(flags).open(path);
    opened.map_err(|error| AttachError::Device { path, error, advice })
}

impl Hypervisor for KernelHypervisor {
    fn attach(&self, domain: DomainId, slot: u8, wake: &Arc<Wake>) -> Result<Arc<dyn Target>, AttachError> {
        let advice = "the kernel's module xen-evtchn provides it";
        let calls = Calls { privcmd: Arc::clone(&self.privcmd), domain };
        let events = device(EVTCHN, libc::O_NONBLOCK, advice)?;
        let refused = |what, advice| move |error| AttachError::Refused { domain, what, error, advice };

        let mut answer = calls
            .dm_op([op::CREATE_SERVER, BUFFERED_ATOMIC, 0, 0])
            .map_err(refused("create a server for a PCI function", "; is it an HVM domain?"))?;
        let id = answer[1] >> 32 & 0xffff;
        // From here on, dropping this value destroys the server.
        let server = Server { calls, id };
        answer = server
            .calls
            .dm_op([op::SERVER_INFO, id | NO_FRAMES << 16, 0, 0])
            .map_err(refused("query the server", ""))?;
        let buffered_port = u32::try_from(answer[1] >> 32).unwrap_or(0);
        let page = |index, what| {
            let pages = server.calls.map_resource(id, index).map_err(refused(what, ""))?;
            Ok(Mapping::of_lent(Box::new(pages), wake))
        };
        let buffered = page(0, "map the page of buffered requests")?;
        let requests = page(1, "map the page of requests")?;
        let function = u64::from(slot & 0x1f) << 3;
        server
            .calls
            .dm_op([op::MAP_RANGE, id | RANGE_PCI << 32, function, function])
            .map_err(refused("claim a PCI function", ""))?;
        Ok(Arc::new(KernelTarget {
            requests,
            buffered,
            buffered_port,
            server,
            slot,
            events,
            calls: Mutex::default(),
            wake: Arc::clone(wake),
        }))
    }
}

/// Hypervisor calls for one domain.
#[derive(Clone, Debug)]
struct Calls {
    privcmd: Arc<File>,
    domain: DomainId,
}

impl Calls {
    /// Makes a device model call. `words` contains its number and its arguments. Returns the words as modified by Xen.
    fn dm_op(&self, mut words: [u64; 4]) -> io::Result<[u64; 4]> {
        let buffers = [DmOpBuffer { address: words.as_mut_ptr().cast(), size: size_of_val(&words) }];
        let call = DmOp { domain: self.domain, count: 1, buffers: buffers.as_ptr() };
        // SAFETY: the structure refers to one 32-byte buffer, the size of `struct xen_dm_op`, and both outlive the
        // call.
        let done = unsafe { libc::ioctl(self.privcmd.as_raw_fd(), DM_OP, &raw const call) };
        if done < 0 { Err(io::Error::last_os_error()) } else { Ok(words) }
    }

    /// Reserves address space, but not memory, for `count` pages.
    fn area(&self, count: usize) -> io::Result<Foreign> {
        let len = count.checked_mul(PAGE).filter(|_| (1..=MAX_FRAMES).contains(&count));
        let len = len.ok_or_else(|| io::Error::from(io::ErrorKind::InvalidInput))?;
        // SAFETY: the kernel chooses the address of the new mapping.
        let base = unsafe {
            rustix::mm::mmap(
                ptr::null_mut(),
                len,
                ProtFlags::READ | ProtFlags::WRITE,
                MapFlags::SHARED,
                self.privcmd.as_fd(),
                0,
            )
        }?;
        Ok(Foreign { base: base.cast(), len })
    }

    fn map_resource(&self, id: u64, index: u32) -> io::Result<Foreign> {
        let area = self.area(1)?;
        let call = MmapResource {
            domain: self.domain,
            kind: RESOURCE_SERVER,
            id: u32::try_from(id).unwrap_or(u32::MAX),
            index,
            count: 1,
            address: area.base.addr() as u64,
        };
        // SAFETY: the call maps one page over the page owned by `area`.
        let done = unsafe { libc::ioctl(self.privcmd.as_raw_fd(), MMAP_RESOURCE, &raw const call) };
        if done < 0 { Err(io::Error::last_os_error()) } else { Ok(area) }
    }

    /// Maps frames, and returns an error number for each. Frames that could not be mapped must not be accessed.
    fn map_frames(&self, first: u64, count: usize) -> io::Result<(Foreign, Vec<i32>)> {
        let area = self.area(count)?;
        let frames: Vec<u64> = (first..=u64::MAX).take(count).collect();
        let mut errors = vec![0i32; count];
        if frames.len() != count {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        let call = MmapBatch {
            count: u32::try_from(count).unwrap_or(0),
            domain: self.domain,
            address: area.base.addr() as u64,
            frames: frames.as_ptr(),
            errors: errors.as_mut_ptr(),
        };
        // SAFETY: the call maps `count` pages over pages owned by `area`. Both lists have `count` entries.
        let done = unsafe { libc::ioctl(self.privcmd.as_raw_fd(), MMAP_BATCH, &raw const call) };
        let error = io::Error::last_os_error();
        // ENOENT means that a frame is paged out. The list also contains this error.
        if done < 0 && error.raw_os_error() != Some(libc::ENOENT) {
            return Err(error);
        }
        Ok((area, errors))
    }
}

/// A server that exists in the hypervisor.
#[derive(Debug)]
struct Server {
    calls: Calls,
    id: u64,
}

impl Drop for Server {
    fn drop(&mut self) {
        // This fails if the domain, and with it the server, no longer exists.
        let _ = self.calls.dm_op([op::DESTROY_SERVER, self.id, 0, 0]);
    }
}

/// Domain pages mapped into this process.
#[derive(Debug)]
struct Foreign {
    base: *mut u8,
    len: usize,
}

// SAFETY: this value owns the memory and uses it only through volatile accesses, which any thread may make.
unsafe impl Send for Foreign {}
// SAFETY: as for `Send`.
unsafe impl Sync for Foreign {}

// SAFETY: `base` is a mapping of `len` bytes (whole pages) that exists until the value is dropped.
unsafe impl LentPages for Foreign {
    fn base(&self) -> *mut u8 {
        self.base
    }

    fn len(&self) -> usize {
        self.len
    }
}

impl Drop for Foreign {
    fn drop(&mut self) {
        // SAFETY: `base` and `len` are from `mmap`.
        if let Err(errno) = unsafe { rustix::mm::munmap(self.base.cast(), self.len) } {
            tracing::error!(%errno, "cannot unmap a domain's memory: the hypervisor keeps it for this process");
        }
    }
}

/// A domain that is served.
#[derive(Debug)]
struct KernelTarget {
    // Fields are dropped in this order: the server first, so that no access arrives while its pages are dropped.
    server: Server,
    requests: Mapping,
    buffered: Mapping,
    buffered_port: u32,
    slot: u8,
    /// The event device. Closing it unbinds the server's ports.
    events: File,
    calls: Mutex<Option<Buffer>>,
    wake: Arc<Wake>,
}

impl KernelTarget {
    fn frames(&self) -> Frames<'_> {
        let Calls { privcmd, domain } = &self.server.calls;
        Frames { privcmd, buffer: &self.calls, domain: *domain }
    }

    fn range(&self, op: u64, Range { first, last }: Range) -> io::Result<()> {
        self.server.calls.dm_op([op, self.server.id | RANGE_MEMORY << 32, first, last]).map(drop)
    }
}

impl Target for KernelTarget {
    fn requests(&self) -> &Mapping {
        &self.requests
    }

    fn buffered(&self) -> &Mapping {
        &self.buffered
    }

    fn buffered_port(&self) -> u32 {
        self.buffered_port
    }

    fn bind(&self, port: u32) -> io::Result<u32> {
        let call = BindInterdomain { domain: self.server.calls.domain.into(), port };
        // SAFETY: the structure matches this number.
        let bound = unsafe { libc::ioctl(self.events.as_raw_fd(), BIND_INTERDOMAIN, &raw const call) };
        u32::try_from(bound).map_err(|_| io::Error::last_os_error())
    }

    fn enable(&self) -> io::Result<()> {
        self.server.calls.dm_op([op::SET_STATE, self.server.id | 1 << 16, 0, 0]).map(drop)
    }

    fn claim(&self, range: Range) -> io::Result<()> {
        self.range(op::MAP_RANGE, range)
    }

    fn disclaim(&self, range: Range) -> io::Result<()> {
        self.range(op::UNMAP_RANGE, range)
    }

    fn notify(&self, port: u32) -> io::Result<()> {
        // SAFETY: the structure contains only a port.
        let done = unsafe { libc::ioctl(self.events.as_raw_fd(), NOTIFY, &raw const port) };
        if done < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
    }

    fn events(&self) -> BorrowedFd<'_> {
        self.events.as_fd()
    }

    fn fired(&self, ports: &mut [u32]) -> io::Result<usize> {
        let mut bytes = vec![0; size_of_val(ports)];
        let len = match (&self.events).read(&mut bytes) {
            Ok(len) => len,
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(0),
            Err(error) => return Err(error),
        };
        let (words, _) = bytes.get(..len).unwrap_or_default().as_chunks::<4>();
        ports.iter_mut().zip(words).for_each(|(port, word)| *port = u32::from_ne_bytes(*word));
        Ok(words.len())
    }

    fn unmask(&self, ports: &[u32]) -> io::Result<()> {
        let bytes: Vec<u8> = ports.iter().flat_map(|port| port.to_ne_bytes()).collect();
        if bytes.is_empty() { Ok(()) } else { (&self.events).write_all(&bytes) }
    }

    fn present(&self, first: u64, count: usize) -> io::Result<Vec<bool>> {
        let (_, errors) = self.server.calls.map_frames(first, count)?;
        Ok(errors.into_iter().map(|error| error == 0).collect())
    }

    fn map(&self, first: u64, count: usize) -> io::Result<Mapping> {
        let (area, errors) = self.server.calls.map_frames(first, count)?;
        match errors.into_iter().find(|error| *error != 0) {
            Some(error) => Err(io::Error::from_raw_os_error(error.saturating_abs())),
            None => Ok(Mapping::of_lent(Box::new(area), &self.wake)),
        }
    }

    fn add_frames(&self, first: u64, count: u64) -> io::Result<()> {
        self.frames().add(first, count)
    }

    fn take_frames(&self, first: u64, count: u64) -> io::Result<()> {
        self.frames().take(first, count)
    }

    fn move_frames(&self, from: u64, to: u64, count: u64) -> io::Result<()> {
        // The 64-bit word contains the count and padding.
        let count = u32::try_from(count).map_err(io::Error::other)?;
        self.server.calls.dm_op([op::RELOCATE_MEMORY, count.into(), from, to]).map(drop)
    }

    fn inject_msi(&self, address: u64, data: u32) -> io::Result<()> {
        self.server.calls.dm_op([op::INJECT_MSI, data.into(), address, 0]).map(drop)
    }

    fn set_intx(&self, level: bool) -> io::Result<()> {
        // The 64-bit word contains segment 0, bus 0, the slot, pin A, and the level.
        let place = u64::from(self.slot) << 24 | u64::from(level) << 40;
        self.server.calls.dm_op([op::SET_INTX, place, 0, 0]).map(drop)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn structures_have_the_kernels_sizes() {
        assert_eq!((size_of::<DmOp>(), size_of::<DmOpBuffer>()), (16, 16));
        assert_eq!((size_of::<MmapBatch>(), size_of::<MmapResource>()), (32, 32));
        assert_eq!(DM_OP, 0x0010_5005);
        assert_eq!(BIND_INTERDOMAIN, 0x0008_4501);
    }

    #[test]
    fn missing_xen_error_names_privcmd_and_module() {
        if std::path::Path::new(PRIVCMD).exists() {
            return;
        }
        let error = KernelHypervisor::open().unwrap_err().to_string();
        assert!(error.contains(PRIVCMD) && error.contains("xen-privcmd"), "{error}");
    }
}
