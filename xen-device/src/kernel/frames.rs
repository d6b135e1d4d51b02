//! Calls that add memory to a domain and remove memory from it. The kernel passes them to Xen unchanged.
//!
//! `memory_op` is identical in all Xen versions. The toolstack limits a domain's memory, and a `domctl` call raises
//! this limit. Xen may change the layout of this call with each version of the interface. The call used here is
//! identical in all [`DOMCTL_VERSIONS`]. Xen checks the version first, and rejects all versions except its own.
//!
//! Sources: Xen's public headers `memory.h`, `domctl.h`, `xen.h`; Linux's `uapi/xen/privcmd.h` (both devices).

use std::fs::File;
use std::io;
use std::ops::{Range, RangeInclusive};
use std::os::fd::{AsFd, AsRawFd};
use std::ptr;

use parking_lot::Mutex;
use rustix::mm::{MapFlags, ProtFlags};

use super::{PAGE, ioctl_number};
use crate::hypervisor::DomainId;

/// The kernel's device for memory that the hypervisor may access during a call.
pub(super) const BUFFERS: &str = "/dev/xen/hypercall";
const HYPERCALL: libc::c_ulong = ioctl_number(b'P', 0, size_of::<Hypercall>());

/// `struct privcmd_hypercall`.
#[repr(C)]
struct Hypercall {
    number: u64,
    arguments: [u64; 5],
}

const MEMORY_OP: u64 = 12;
const DOMCTL: u64 = 36;

/// Commands of `memory_op`.
mod memory {
    pub const DECREASE_RESERVATION: u64 = 1;
    pub const CURRENT_RESERVATION: u64 = 3;
    pub const MAXIMUM_RESERVATION: u64 = 4;
    pub const POPULATE_PHYSMAP: u64 = 6;
}

const DOMCTL_MAX_MEM: u32 = 11;
/// Interface versions from Xen 4.11 to 4.22.
const DOMCTL_VERSIONS: RangeInclusive<u32> = 0x10..=0x18;
/// Memory that `libxl` allows each domain beyond its limit, in KiB.
const SLACK_KIB: u64 = 1024;

/// Maximum number of frames per call: the number of entries that fit in a page, which is also the number of frames in a
/// large page.
const MAX_FRAMES: u64 = 512;
const LIST: usize = 512;
const LARGE_ORDER: u32 = 9;
const _: () = assert!(LIST * size_of::<u64>() == PAGE && LIST as u64 == MAX_FRAMES && 1 << LARGE_ORDER == MAX_FRAMES);

/// `struct xen_memory_reservation`.
#[repr(C)]
struct Reservation {
    frames: u64,
    count: u64,
    order: u32,
    flags: u32,
    domain: u16,
}

/// `struct xen_domctl`, with a union at least as large as that of any version.
#[repr(C)]
struct Domctl {
    command: u32,
    version: u32,
    domain: u64,
    max_kib: u64,
    rest: [u64; 31],
}

/// Two pages that the hypervisor may read and write, allocated on the first call: the argument, and a list of frames.
#[derive(Debug)]
pub(super) struct Buffer {
    base: *mut u8,
}

// SAFETY: this value owns the memory, and its holder may use it from any thread.
unsafe impl Send for Buffer {}

impl Drop for Buffer {
    fn drop(&mut self) {
        // SAFETY: `base` is from `mmap`, with two pages.
        if let Err(errno) = unsafe { rustix::mm::munmap(self.base.cast(), 2 * PAGE) } {
            tracing::error!(%errno, "cannot unmap memory for calls of the hypervisor");
        }
    }
}

impl Buffer {
    fn new(device: &File) -> io::Result<Self> {
        // SAFETY: the kernel chooses the address of the new mapping.
        let base = unsafe {
            rustix::mm::mmap(
                ptr::null_mut(),
                2 * PAGE,
                ProtFlags::READ | ProtFlags::WRITE,
                MapFlags::SHARED,
                device.as_fd(),
                0,
            )
        }?;
        Ok(Self { base: base.cast() })
    }

    /// Writes a call's argument to the first page. Returns its address.
    fn argument<T>(&mut self, value: T) -> u64 {
        const { assert!(size_of::<T>() <= PAGE && align_of::<T>() <= PAGE) };
        // SAFETY: this buffer owns the page, which is aligned and large enough.
        unsafe { self.base.cast::<T>().write(value) };
        self.base.addr() as u64
    }

    /// Writes a list of frames to the second page. Returns the list's address.
    fn frames(&mut self, frames: impl Iterator<Item = u64>) -> u64 {
        let list = self.base.wrapping_add(PAGE);
        for (at, frame) in (0..LIST).zip(frames) {
            // SAFETY: the entry is inside the second page, which this buffer owns.
            unsafe { list.cast::<u64>().add(at).write(frame) };
        }
        list.addr() as u64
    }
}

/// Calls that query or change one domain's memory.
#[derive(Debug)]
pub(super) struct Frames<'a> {
    pub privcmd: &'a File,
    pub buffer: &'a Mutex<Option<Buffer>>,
    pub domain: DomainId,
}

impl Frames<'_> {
    /// Adds `count` frames starting at `first` to the domain, either all of them or none.
    pub fn add(&self, first: u64, count: u64) -> io::Result<()> {
        let end = first.checked_add(count).ok_or(io::ErrorKind::InvalidInput)?;
        self.make_room(count)?;
        let mut at = first;
        while at < end {
            let there = self.populate(at..end.min(at.saturating_add(MAX_FRAMES)))?;
            at = at.saturating_add(there);
            if there == 0 {
                // Remove the added frames. If this fails, the domain keeps the frames until its destruction.
                let taken = self.take(first, at.saturating_sub(first));
                let out = io::Error::from(io::ErrorKind::OutOfMemory);
                return Err(taken.err().unwrap_or(out));
            }
        }
        Ok(())
    }

    /// Removes `count` frames starting at `first` from the domain.
    pub fn take(&self, first: u64, count: u64) -> io::Result<()> {
        let end = first.saturating_add(count);
        let mut at = first;
        let mut missing = 0u64;
        while at < end {
            let piece = at..end.min(at.saturating_add(MAX_FRAMES));
            let wanted = piece.end.saturating_sub(piece.start);
            let taken = self.reserve(memory::DECREASE_RESERVATION, piece.clone(), 0)?;
            missing = missing.saturating_add(wanted.saturating_sub(taken));
            // Xen stops at the first missing frame.
            at = if taken < wanted { at.saturating_add(taken).saturating_add(1) } else { piece.end };
        }
        match missing {
            0 => Ok(()),
            _ => Err(io::Error::other(format!("{missing} of {count} frames did not belong to the domain"))),
        }
    }

    /// Adds frames to the domain, as one large page if they form one. Returns the number of added frames.
    fn populate(&self, frames: Range<u64>) -> io::Result<u64> {
        let count = frames.end.saturating_sub(frames.start);
        let is_large = count == 1 << LARGE_ORDER && frames.start.is_multiple_of(count);
        if is_large
            && self.reserve(memory::POPULATE_PHYSMAP, frames.start..frames.start.saturating_add(1), LARGE_ORDER)? == 1
        {
            return Ok(count);
        }
        self.reserve(memory::POPULATE_PHYSMAP, frames, 0)
    }

    /// Makes a call with a list of runs of 2^`order` frames each. Returns the number of runs that Xen has processed.
    fn reserve(&self, command: u64, frames: Range<u64>, order: u32) -> io::Result<u64> {
        let count = frames.end.saturating_sub(frames.start).min(MAX_FRAMES);
        self.with(|buffer, privcmd| {
            let frames = buffer.frames(frames);
            let argument = buffer.argument(Reservation { frames, count, order, flags: 0, domain: self.domain });
            call(privcmd, MEMORY_OP, [command, argument])
        })
    }

    /// Raises the domain's limit by `count` frames if necessary.
    fn make_room(&self, count: u64) -> io::Result<()> {
        let ask = |command| {
            self.with(|buffer, privcmd| {
                let argument = buffer.argument(self.domain);
                call(privcmd, MEMORY_OP, [command, argument])
            })
        };
        let need = ask(memory::CURRENT_RESERVATION)?.saturating_add(count);
        if ask(memory::MAXIMUM_RESERVATION)? >= need {
            return Ok(());
        }
        let max_kib = need.saturating_mul(4).saturating_add(SLACK_KIB);
        for version in DOMCTL_VERSIONS {
            let set = self.with(|buffer, privcmd| {
                let domctl =
                    Domctl { command: DOMCTL_MAX_MEM, version, domain: self.domain.into(), max_kib, rest: [0; 31] };
                let argument = buffer.argument(domctl);
                call(privcmd, DOMCTL, [argument, 0])
            });
            match set {
                // Xen rejects other versions with this error, so try the next version.
                Err(error) if error.raw_os_error() == Some(libc::EACCES) => {}
                other => return other.map(drop),
            }
        }
        Err(io::Error::other("its limit cannot be raised in this version of Xen; raise it with `xl mem-max`"))
    }

    fn with<T>(&self, make: impl FnOnce(&mut Buffer, &File) -> io::Result<T>) -> io::Result<T> {
        let mut buffer = self.buffer.lock();
        let buffer = match &mut *buffer {
            Some(buffer) => buffer,
            none => {
                let device = File::options().read(true).write(true).open(BUFFERS);
                let device = device.map_err(|error| io::Error::new(error.kind(), format!("{BUFFERS}: {error}")))?;
                none.insert(Buffer::new(&device)?)
            }
        };
        make(buffer, self.privcmd)
    }
}

/// Makes a call whose arguments are in the locked buffer.
fn call(privcmd: &File, number: u64, [first, second]: [u64; 2]) -> io::Result<u64> {
    let call = Hypercall { number, arguments: [first, second, 0, 0, 0] };
    // SAFETY: the structure matches this number. These calls write at most to their arguments.
    let done = unsafe { libc::ioctl(privcmd.as_raw_fd(), HYPERCALL, &raw const call) };
    u64::try_from(done).map_err(|_| io::Error::last_os_error())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn structures_have_xens_sizes() {
        assert_eq!((size_of::<Hypercall>(), HYPERCALL), (48, 0x0030_5000));
        assert_eq!(size_of::<Reservation>(), 32);
        assert_eq!((std::mem::offset_of!(Reservation, order), std::mem::offset_of!(Reservation, domain)), (16, 24));
        // The union starts at byte 16 and is at most 128 bytes long in all versions.
        assert_eq!(std::mem::offset_of!(Domctl, max_kib), 16);
        assert!(size_of::<Domctl>() >= 16 + 128);
    }
}
