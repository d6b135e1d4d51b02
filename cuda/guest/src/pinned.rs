//! Pinned memory: parts of the window with the same address in the guest and in the worker.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

use cuda_calls::own;
use cuda_ring::{ADDRESSES, BLOB_GRANULE, Blob, BlobKind, PINNED_ADDRESSES};

use crate::call::{code, report_refused};
use crate::frame::{Frame, Handler};
use crate::result::{INVALID_CONTEXT, INVALID_VALUE, NOT_SUPPORTED, OUT_OF_MEMORY, SUCCESS};
use crate::{connection, registered, report, thread};

pub const HANDLERS: &[(&str, Handler)] = &[
    ("cuMemHostAlloc", host_alloc),
    ("cuMemAllocHost_v2", alloc_host),
    ("cuMemFreeHost", free_host),
    ("cuMemHostGetDevicePointer_v2", device_pointer),
    ("cuMemHostGetFlags", flags),
    ("cuMemAllocManaged", managed),
    ("cuMemAdvise", hint),
    ("cuMemAdvise_v2", hint),
    ("cuMemPrefetchAsync", hint),
    ("cuMemPrefetchAsync_v2", hint),
];

/// Size in bytes of a blob that is shared by small allocations.
const SLAB_BYTES: u64 = 16 << 20;
/// Minimum size in bytes of an allocation with its own blob.
const OWN_BYTES: u64 = 4 << 20;
/// Alignment in bytes of allocations in a shared blob.
const ALIGN: u64 = 512;

/// An allocation of pinned memory.
#[derive(Clone, Copy, Debug)]
pub struct Allocation {
    /// Start address.
    pub address: u64,
    /// Size in bytes.
    pub bytes: u64,
    /// Set if the memory was allocated as managed memory.
    pub managed: bool,
    flags: u32,
    /// Address of the allocation's blob.
    slab: u64,
}

/// A blob, and its free ranges.
#[derive(Debug)]
struct Slab {
    blob: Blob,
    free: BTreeMap<u64, u64>,
}

#[derive(Debug)]
struct Pinned {
    next: u64,
    /// Address ranges of removed blobs: their sizes in bytes, keyed by start address.
    left: BTreeMap<u64, u64>,
    slabs: BTreeMap<u64, Slab>,
    allocations: BTreeMap<u64, Allocation>,
}

/// The program's pinned memory. Static, because exported functions cannot receive state as an argument.
static PINNED: Mutex<Pinned> = Mutex::new(Pinned {
    next: PINNED_ADDRESSES,
    left: BTreeMap::new(),
    slabs: BTreeMap::new(),
    allocations: BTreeMap::new(),
});

fn lock() -> MutexGuard<'static, Pinned> {
    PINNED.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Returns the allocation that contains an address.
pub fn find(address: u64) -> Option<Allocation> {
    let pinned = lock();
    let (_, found) = pinned.allocations.range(..=address).next_back()?;
    (address - found.address < found.bytes).then_some(*found)
}

impl Slab {
    /// Allocates from the first free range that is large enough.
    fn take(&mut self, bytes: u64) -> Option<u64> {
        let (at, length) = self.free.iter().find(|(_, length)| **length >= bytes).map(|(at, length)| (*at, *length))?;
        self.free.remove(&at);
        if length > bytes {
            self.free.insert(at + bytes, length - bytes);
        }
        Some(at)
    }

    /// Frees a range, and merges it with its free neighbours.
    fn give(&mut self, mut at: u64, mut bytes: u64) {
        if let Some((before, length)) = self.free.range(..at).next_back().map(|(at, length)| (*at, *length))
            && before + length == at
        {
            self.free.remove(&before);
            (at, bytes) = (before, bytes + length);
        }
        if let Some(length) = self.free.remove(&(at + bytes)) {
            bytes += length;
        }
        self.free.insert(at, bytes);
    }
}

impl Pinned {
    fn allocate(&mut self, bytes: u64, flags: u32, managed: bool) -> Result<u64, i32> {
        let rounded = bytes.checked_next_multiple_of(ALIGN).ok_or(OUT_OF_MEMORY)?;
        let shared = rounded < OWN_BYTES;
        let found = if shared {
            self.slabs.iter_mut().find_map(|(slab, of)| of.take(rounded).map(|address| (*slab, address)))
        } else {
            None
        };
        let (slab, address) = match found {
            Some(found) => found,
            None => {
                let whole = if shared { SLAB_BYTES } else { rounded.next_multiple_of(BLOB_GRANULE) };
                let slab = self.add_slab(whole)?;
                let address = self.slabs.get_mut(&slab).and_then(|of| of.take(rounded)).ok_or(OUT_OF_MEMORY)?;
                (slab, address)
            }
        };
        self.allocations.insert(address, Allocation { address, bytes, managed, flags, slab });
        Ok(address)
    }

    fn add_slab(&mut self, bytes: u64) -> Result<u64, i32> {
        let connection = connection::get()?;
        let left = self.left.iter().find(|(_, length)| **length == bytes).map(|(at, _)| *at);
        let address = left.unwrap_or(self.next);
        if address.checked_add(bytes).is_none_or(|end| end > ADDRESSES.end) {
            return Err(OUT_OF_MEMORY);
        }
        let created = connection.transport.create(BlobKind::Pinned, bytes, Some(address));
        let blob = created.map_err(|error| window_full(bytes, &error))?;
        let answer = thread::with(|thread| {
            connection.ask(thread, own::PIN, None, |message| message.extend([u64::from(blob.id), address]))
        });
        if let Err(code) = answer.and_then(|answer| if answer.code == 0 { Ok(()) } else { Err(answer.code) }) {
            let _ = connection.transport.remove(blob, true);
            return Err(code);
        }
        match left {
            Some(left) => drop(self.left.remove(&left)),
            None => self.next += bytes,
        }
        self.slabs.insert(address, Slab { blob, free: BTreeMap::from([(address, bytes)]) });
        Ok(address)
    }

    fn free(&mut self, address: u64) -> Result<(), i32> {
        let found = self.allocations.remove(&address).ok_or(INVALID_VALUE)?;
        let slab = self.slabs.get_mut(&found.slab).ok_or(INVALID_VALUE)?;
        slab.give(address, found.bytes.next_multiple_of(ALIGN));
        let blob = slab.blob;
        let is_empty = slab.free.first_key_value() == Some((&blob.address, &blob.bytes));
        // Keep the last slab for small allocations, even if it is empty.
        let is_spare =
            blob.bytes == SLAB_BYTES && self.slabs.values().filter(|s| s.blob.bytes == SLAB_BYTES).count() == 1;
        if !is_empty || is_spare {
            return Ok(());
        }
        self.slabs.remove(&found.slab);
        let connection = connection::get()?;
        let answer = thread::with(|thread| connection.ask(thread, own::UNPIN, None, |m| m.push(u64::from(blob.id))));
        let _ = connection.transport.remove(blob, true);
        self.left.insert(blob.address, blob.bytes);
        answer.and_then(|answer| if answer.code == 0 { Ok(()) } else { Err(answer.code) })
    }
}

/// Reports on standard error, once per program, that the window is full. Returns the result code of the call.
fn window_full(bytes: u64, error: &std::io::Error) -> i32 {
    /// Set once the program has reported that the window is full. Static, because exported functions cannot receive
    /// state as an argument.
    static IS_REPORTED: AtomicBool = AtomicBool::new(false);
    if !IS_REPORTED.swap(true, Ordering::Relaxed) {
        report!(
            "{} MiB of pinned memory do not fit into the window of this VM: {error}; all programs of the VM share the \
             window, whose size is `cuda.window_mib` on the host",
            bytes.div_ceil(1 << 20)
        );
    }
    OUT_OF_MEMORY
}

fn allocate(frame: &Frame, flags: u32, managed: bool) -> i32 {
    let bytes = frame.arg(1);
    if thread::current() == 0 {
        return INVALID_CONTEXT;
    }
    if bytes == 0 || frame.arg(0) == 0 {
        return INVALID_VALUE;
    }
    let result = lock().allocate(bytes, flags, managed);
    result.map_or_else(|error| error, |address| frame.put(0, address))
}

fn host_alloc(frame: &Frame) -> i32 {
    allocate(frame, frame.int(2), false)
}

fn alloc_host(frame: &Frame) -> i32 {
    allocate(frame, 0, false)
}

/// Allocates managed memory as pinned memory, which is coherent but slow for the card.
fn managed(frame: &Frame) -> i32 {
    allocate(frame, 0, true)
}

/// Frees pinned memory after the context's work has completed, as the driver does.
pub fn free(address: u64) -> Result<(), i32> {
    crate::contexts::synchronize_current()?;
    lock().free(address)
}

fn free_host(frame: &Frame) -> i32 {
    if frame.arg(0) == 0 {
        return SUCCESS;
    }
    code(free(frame.arg(0)))
}

fn device_pointer(frame: &Frame) -> i32 {
    if registered::find(frame.arg(1)).is_some() {
        report_refused("cuMemHostGetDevicePointer of registered memory");
        return NOT_SUPPORTED;
    }
    if find(frame.arg(1)).is_none() || frame.int(2) != 0 {
        return INVALID_VALUE;
    }
    frame.put(0, frame.arg(1))
}

fn flags(frame: &Frame) -> i32 {
    if let Some(found) = registered::find(frame.arg(1)) {
        return frame.put(0, found.flags);
    }
    // Pinned memory is always mapped for the card.
    find(frame.arg(1)).map_or(INVALID_VALUE, |found| frame.put(0, found.flags | 2))
}

/// Checks the arguments of a hint about the location of managed memory. Has no effect, because this memory does not
/// move.
fn hint(frame: &Frame) -> i32 {
    let (address, bytes) = (frame.arg(0), frame.arg(1));
    let is_within = |found: &Allocation| bytes <= found.address + found.bytes - address;
    match find(address).filter(|found| found.managed && is_within(found)) {
        Some(_) if thread::current() != 0 => SUCCESS,
        Some(_) => INVALID_CONTEXT,
        None => INVALID_VALUE,
    }
}
