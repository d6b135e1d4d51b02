//! An open render node whose context uses the CUDA capability set.
//!
//! UNSAFETY: calls `ioctl` and maps memory at addresses chosen by the caller. [`Request`] associates each argument type
//! with its request number. Arguments with addresses are built next to the calls.

use std::fs;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, FromRawFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::ptr;

use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;
use rustix::ioctl::{Ioctl, IoctlOutput, Opcode};
use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap, mmap_anonymous, munmap};

use crate::uapi::{self, Request, context, parameter};

/// Capability set of CUDA contexts.
pub const CAPSET: u32 = 24;
/// Version of the capability set.
const CAPSET_VERSION: u32 = 1;
/// Number of rings of a context (the driver's maximum). Ring 0 is not used.
pub const RINGS: u64 = 64;

/// Reason why a node cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum OpenError {
    /// No node offers the capability set.
    #[error(
        "no render node in /dev/dri has CUDA: the kernel needs virtio_gpu (Debian's cloud kernels lack it), and the VM a \
         CUDA function"
    )]
    None,
    /// The user does not have permission to open the nodes.
    #[error("{0} cannot be opened: add the user to the group `render`")]
    Denied(PathBuf),
    /// A request to the node failed.
    #[error("{0} refuses a CUDA context: {1}")]
    Refused(PathBuf, io::Error),
    /// The host's version is not supported.
    #[error(
        "the host's CUDA function has version {host}, this library version {CAPSET_VERSION}: update {}",
        if *host > CAPSET_VERSION { "the package gpu-mediator-guest in this VM" } else { "gpu-mediator on the host" }
    )]
    Version {
        /// Capability set version of the host.
        host: u32,
    },
}

/// Checks that the versions of the host and the library differ by at most one.
fn check_version(host: u32) -> Result<(), OpenError> {
    if host.abs_diff(CAPSET_VERSION) <= 1 { Ok(()) } else { Err(OpenError::Version { host }) }
}

/// Properties of the CUDA device, from its capability set.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Capset {
    /// Version of the protocol.
    pub version: u32,
    /// Size in bytes of the window, which is shared by all programs.
    pub window_bytes: u64,
}

/// A blob handle. The caller must close it with [`Node::close`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Handle(u32);

/// A render node and its context.
#[derive(Debug)]
pub struct Node {
    file: OwnedFd,
    capset: Capset,
}

struct Call<'a, T>(&'a mut T);

// SAFETY: `Request` guarantees that the number matches the argument.
unsafe impl<T: Request> Ioctl for Call<'_, T> {
    type Output = ();
    const IS_MUTATING: bool = true;

    fn opcode(&self) -> Opcode {
        T::OPCODE
    }

    fn as_ptr(&mut self) -> *mut std::ffi::c_void {
        ptr::from_mut(self.0).cast()
    }

    unsafe fn output_from_ptr(_: IoctlOutput, _: *mut std::ffi::c_void) -> rustix::io::Result<()> {
        Ok(())
    }
}

fn call<T: Request>(file: &OwnedFd, argument: &mut T) -> rustix::io::Result<()> {
    rustix::io::retry_on_intr(|| {
        // SAFETY: see `Ioctl for Call`. Addresses in the argument are valid during the call.
        unsafe { rustix::ioctl::ioctl(file, Call(argument)) }
    })
}

fn address<T>(of: &T) -> u64 {
    ptr::from_ref(of).expose_provenance() as u64
}

impl Node {
    /// Opens the first node with the capability set and creates a context.
    ///
    /// # Errors
    /// Returns an error if no such node exists or the node rejects the context.
    pub fn find() -> Result<Self, OpenError> {
        let entries = fs::read_dir("/dev/dri").map_err(|_| OpenError::None)?;
        let mut paths: Vec<_> = entries.flatten().map(|entry| entry.path()).collect();
        paths.retain(|path| path.file_name().is_some_and(|name| name.as_encoded_bytes().starts_with(b"renderD")));
        paths.sort();
        let mut denied = None;
        for path in paths {
            match Self::open(&path) {
                Ok(Some(node)) => return check_version(node.capset.version).map(|()| node),
                Ok(None) => {}
                Err(Errno::ACCESS | Errno::PERM) => denied = Some(path),
                Err(error) => return Err(OpenError::Refused(path, error.into())),
            }
        }
        Err(denied.map_or(OpenError::None, OpenError::Denied))
    }

    /// Opens a node and creates a context. Returns `None` if the node does not support CUDA.
    ///
    /// # Errors
    /// Returns an error if the node cannot be opened or rejects the context.
    pub fn open(path: &Path) -> rustix::io::Result<Option<Self>> {
        let file = rustix::fs::open(path, OFlags::RDWR | OFlags::CLOEXEC, Mode::empty())?;
        if !is_virtio_gpu(&file)? {
            return Ok(None);
        }
        let needed = [parameter::BLOBS, parameter::HOST_VISIBLE, parameter::CONTEXT_INIT];
        let lacks = needed.into_iter().any(|number| parameter(&file, number).is_ok_and(|value| value == 0));
        if lacks || parameter(&file, parameter::CAPSETS).unwrap_or(0) & 1 << CAPSET == 0 {
            return Ok(None);
        }
        let capset = capset(&file)?;
        let parameters = [[context::CAPSET, CAPSET.into()], [context::RINGS, RINGS]];
        let mut init = uapi::InitContext { count: 2, parameters: address(&parameters), ..Default::default() };
        call(&file, &mut init)?;
        Ok(Some(Self { file, capset }))
    }

    /// Returns the properties of the device.
    #[must_use]
    pub fn capset(&self) -> Capset {
        self.capset
    }

    /// Creates a blob with the identifier `blob`, chosen by the program.
    ///
    /// # Errors
    /// Returns an error if the window is full. Other errors are reported when the blob is mapped.
    pub fn create_blob(&self, blob: u64, bytes: u64) -> rustix::io::Result<Handle> {
        let (memory, flags) = (uapi::MEMORY_HOST3D, uapi::BLOB_MAPPABLE);
        let mut create = uapi::CreateBlob { memory, flags, bytes, blob, ..Default::default() };
        call(&self.file, &mut create)?;
        Ok(Handle(create.handle))
    }

    /// Maps a whole blob at an address chosen by the kernel, and returns the address. Child processes do not inherit
    /// the mapping.
    ///
    /// # Errors
    /// Returns an error if the device rejects the blob.
    pub fn map(&self, handle: Handle, bytes: u64) -> rustix::io::Result<u64> {
        // SAFETY: the kernel chooses an unused address.
        unsafe { self.map_with(handle, bytes, ptr::null_mut(), MapFlags::empty()) }
    }

    /// Maps a whole blob at `at`, replacing the pages there. If the device rejects the blob, these pages become
    /// inaccessible.
    ///
    /// # Errors
    /// Returns an error if the device rejects the blob.
    ///
    /// # Safety
    /// The pages at `at` must not be in use.
    pub unsafe fn map_at(&self, handle: Handle, bytes: u64, at: u64) -> rustix::io::Result<u64> {
        let place = ptr::with_exposed_provenance_mut(usize::try_from(at).map_err(|_| Errno::INVAL)?);
        // SAFETY: the caller guarantees that the pages are not in use.
        let mapped = unsafe { self.map_with(handle, bytes, place, MapFlags::FIXED) };
        if mapped.is_err() {
            // SAFETY: as above. Required because the kernel may have removed the pages before the device rejected the
            // blob.
            unsafe { reserve(at, bytes) }?;
        }
        mapped
    }

    /// # Safety
    /// With [`MapFlags::FIXED`], the pages at `at` must not be in use.
    unsafe fn map_with(
        &self,
        handle: Handle,
        bytes: u64,
        at: *mut std::ffi::c_void,
        flags: MapFlags,
    ) -> rustix::io::Result<u64> {
        let mut map = uapi::Map { handle: handle.0, ..Default::default() };
        call(&self.file, &mut map)?;
        let len = usize::try_from(bytes).map_err(|_| Errno::INVAL)?;
        let access = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: the caller guarantees that a fixed mapping does not replace pages in use.
        let start = unsafe { mmap(at, len, access, MapFlags::SHARED | flags, &self.file, map.offset) }?;
        // SAFETY: the pages have just been mapped.
        unsafe { madvise(start, len, Advice::LinuxDontFork) }?;
        Ok(start.expose_provenance() as u64)
    }

    /// Closes a handle. The blob continues to exist while it is mapped.
    ///
    /// # Errors
    /// Returns an error if the handle does not exist.
    pub fn close(&self, handle: Handle) -> rustix::io::Result<()> {
        call(&self.file, &mut uapi::Close { handle: handle.0, padding: 0 })
    }

    /// Submits a command to the device.
    ///
    /// # Errors
    /// Returns an error if the driver cannot send the command.
    pub fn submit(&self, command: &[u8]) -> rustix::io::Result<()> {
        self.submit_with(command, 0, 0).map(drop)
    }

    /// Submits a command to the device. Returns a descriptor that becomes readable when the device has completed this
    /// submission or a later one on the same ring.
    ///
    /// # Errors
    /// Returns an error if the driver cannot send the command or the process has no free descriptor.
    pub fn submit_fenced(&self, command: &[u8], ring: u32) -> rustix::io::Result<OwnedFd> {
        let fence = self.submit_with(command, uapi::FENCE_OUT | uapi::RING_IDX, ring)?;
        if fence < 0 {
            return Err(Errno::BADF);
        }
        // SAFETY: the driver created the descriptor for the caller.
        Ok(unsafe { OwnedFd::from_raw_fd(fence) })
    }

    fn submit_with(&self, command: &[u8], flags: u32, ring: u32) -> rustix::io::Result<i32> {
        let bytes = u32::try_from(command.len()).map_err(|_| Errno::INVAL)?;
        let command = command.as_ptr().expose_provenance() as u64;
        let mut submit = uapi::Submit { flags, bytes, command, fence: -1, ring, ..Default::default() };
        call(&self.file, &mut submit)?;
        Ok(submit.fence)
    }
}

/// Replaces pages with an inaccessible reservation.
///
/// # Errors
/// Returns an error if the kernel rejects the request.
///
/// # Safety
/// The pages must not be in use.
pub(crate) unsafe fn reserve(at: u64, bytes: u64) -> rustix::io::Result<()> {
    let len = usize::try_from(bytes).map_err(|_| Errno::INVAL)?;
    let place = ptr::with_exposed_provenance_mut(usize::try_from(at).map_err(|_| Errno::INVAL)?);
    let flags = MapFlags::PRIVATE | MapFlags::NORESERVE | MapFlags::FIXED;
    // SAFETY: the caller guarantees that the pages are not in use.
    unsafe { mmap_anonymous(place, len, ProtFlags::empty(), flags) }.map(drop)
}

/// Unmaps pages.
///
/// # Errors
/// Returns an error if the kernel rejects the request.
///
/// # Safety
/// The pages must not be in use.
pub(crate) unsafe fn unmap(at: u64, bytes: u64) -> rustix::io::Result<()> {
    let len = usize::try_from(bytes).map_err(|_| Errno::INVAL)?;
    let place = ptr::with_exposed_provenance_mut(usize::try_from(at).map_err(|_| Errno::INVAL)?);
    // SAFETY: the caller guarantees that the pages are not in use.
    unsafe { munmap(place, len) }
}

fn is_virtio_gpu(file: &OwnedFd) -> rustix::io::Result<bool> {
    let mut name = [0u8; 32];
    let place = name.as_mut_ptr().expose_provenance() as u64;
    let mut version = uapi::Version { name_bytes: name.len() as u64, name: place, ..Default::default() };
    call(file, &mut version)?;
    let name = std::hint::black_box(name);
    Ok(name.starts_with(b"virtio_gpu\0"))
}

fn parameter(file: &OwnedFd, number: u64) -> rustix::io::Result<u64> {
    // The kernel writes 4 bytes.
    let mut value = 0u64;
    let place = ptr::from_mut(&mut value).expose_provenance() as u64;
    call(file, &mut uapi::GetParameter { parameter: number, value: place })?;
    Ok(std::hint::black_box(value))
}

fn capset(file: &OwnedFd) -> rustix::io::Result<Capset> {
    let mut bytes = [0u8; 16];
    let place = bytes.as_mut_ptr().expose_provenance() as u64;
    let mut get = uapi::GetCapset { id: CAPSET, version: CAPSET_VERSION, address: place, bytes: 16, padding: 0 };
    call(file, &mut get)?;
    let [v0, v1, v2, v3, _, _, _, _, window @ ..] = std::hint::black_box(bytes);
    Ok(Capset { version: u32::from_le_bytes([v0, v1, v2, v3]), window_bytes: u64::from_le_bytes(window) })
}

impl AsFd for Node {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_differ_by_one_at_most() {
        for host in [CAPSET_VERSION - 1, CAPSET_VERSION, CAPSET_VERSION + 1] {
            assert!(check_version(host).is_ok());
        }
        let error = check_version(CAPSET_VERSION + 2).unwrap_err().to_string();
        assert!(error.ends_with("update the package gpu-mediator-guest in this VM"), "{error}");
    }
}
