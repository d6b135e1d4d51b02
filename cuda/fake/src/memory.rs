//! Handles, and mappings in this process's own address space.
//!
//! UNSAFETY: maps files over reserved addresses.
#![allow(unsafe_code, reason = "see UNSAFETY")]

use std::collections::HashMap;
use std::fs::File;
use std::os::fd::{AsRawFd as _, IntoRawFd as _};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::card::{self, Tier};
use crate::result::{INVALID_HANDLE, INVALID_VALUE, OUT_OF_MEMORY};
use crate::space::{Broken, GRANULE, Space};

/// An allocation, as this process holds it. Every descriptor and mapping shares its description, and so its life.
#[derive(Clone)]
pub struct Physical {
    file: Arc<File>,
    bytes: u64,
    tier: Tier,
    /// By [`import`].
    imported: bool,
}

#[derive(Default)]
struct Memory {
    space: Space,
    handles: HashMap<u64, Physical>,
    next: u64,
    /// Allocations by `cuMemAlloc`, by address.
    plain: HashMap<u64, u64>,
    /// Tiers of mappings by address.
    tiers: HashMap<u64, Tier>,
}

static MEMORY: Mutex<Option<Memory>> = Mutex::new(None);

struct Locked(MutexGuard<'static, Option<Memory>>);

fn lock() -> Locked {
    Locked(MEMORY.lock().unwrap_or_else(PoisonError::into_inner))
}

impl Locked {
    fn get(&mut self) -> &mut Memory {
        self.0.get_or_insert_default()
    }
}

fn broken(rule: Broken) -> i32 {
    if std::env::var_os("FAKE_CUDA_LOG").is_some() {
        eprintln!("fake libcuda: {}", rule.0);
    }
    INVALID_VALUE
}

/// Allocates physical memory; its handle.
pub fn create(tier: Tier, bytes: u64) -> Result<u64, i32> {
    if bytes == 0 || !bytes.is_multiple_of(GRANULE) {
        return Err(INVALID_VALUE);
    }
    let file = card::get().allocate(tier, bytes).ok_or(OUT_OF_MEMORY)?;
    Ok(insert(file, tier, bytes, false))
}

fn insert(file: File, tier: Tier, bytes: u64, imported: bool) -> u64 {
    let mut memory = lock();
    let memory = memory.get();
    memory.next += 1;
    let handle = 0x1000 + memory.next;
    memory.handles.insert(handle, Physical { file: Arc::new(file), bytes, tier, imported });
    handle
}

/// Gives a handle up.
pub fn release(handle: u64) -> Result<(), i32> {
    lock().get().handles.remove(&handle).map(drop).ok_or(INVALID_HANDLE)
}

/// A new descriptor of an allocation.
pub fn export(handle: u64) -> Result<i32, i32> {
    let mut memory = lock();
    let physical = memory.get().handles.get(&handle).ok_or(INVALID_HANDLE)?;
    // As seen on an H100 with driver 580: a program's chunks reach a new owner by kept descriptors only.
    if physical.imported {
        return Err(INVALID_VALUE);
    }
    physical.file.try_clone().map(|file| file.into_raw_fd()).map_err(|_| OUT_OF_MEMORY)
}

/// A handle of the allocation that a descriptor stands for.
pub fn import(descriptor: i32) -> Result<u64, i32> {
    // SAFETY: the descriptor is only borrowed for the copy.
    let copy = unsafe { libc::fcntl(descriptor, libc::F_DUPFD_CLOEXEC, 0) };
    if copy < 0 {
        return Err(INVALID_VALUE);
    }
    // SAFETY: the copy is new and nobody else's.
    let file = unsafe { <File as std::os::fd::FromRawFd>::from_raw_fd(copy) };
    let (tier, bytes) = card::get().identify(&file).ok_or(INVALID_VALUE)?;
    Ok(insert(file, tier, bytes, true))
}

fn cover(at: u64, bytes: u64) -> bool {
    // SAFETY: the range is a reservation of ours, or a new one where `at` is 0.
    let found = unsafe {
        libc::mmap(
            at as *mut libc::c_void,
            bytes as usize,
            libc::PROT_NONE,
            libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE | libc::MAP_FIXED,
            -1,
            0,
        )
    };
    found as u64 == at
}

/// Reserves addresses.
pub fn reserve(bytes: u64, align: u64) -> Result<u64, i32> {
    if bytes == 0 || !bytes.is_multiple_of(GRANULE) || (align != 0 && !align.is_power_of_two()) {
        return Err(INVALID_VALUE);
    }
    let align = align.max(GRANULE);
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
    let length = (bytes + align) as usize;
    // SAFETY: a new mapping of which the aligned part is kept; the rest is never used.
    let found = unsafe { libc::mmap(std::ptr::null_mut(), length, libc::PROT_NONE, flags, -1, 0) };
    if found == libc::MAP_FAILED {
        return Err(OUT_OF_MEMORY);
    }
    let at = (found as u64).next_multiple_of(align);
    lock().get().space.reserve(at, bytes);
    Ok(at)
}

/// Frees a reservation.
pub fn unreserve(at: u64, bytes: u64) -> Result<(), i32> {
    lock().get().space.unreserve(at, bytes).map_err(broken)
}

/// Maps an allocation. Nothing may access it yet.
pub fn map(at: u64, bytes: u64, offset: u64, handle: u64) -> Result<(), i32> {
    let mut memory = lock();
    let memory = memory.get();
    let physical = memory.handles.get(&handle).cloned().ok_or(INVALID_HANDLE)?;
    memory.space.map(at, bytes, offset, handle, physical.bytes).map_err(broken)?;
    // SAFETY: the range lies in a reservation of ours with nothing mapped.
    let found = unsafe {
        libc::mmap(
            at as *mut libc::c_void,
            bytes as usize,
            libc::PROT_NONE,
            libc::MAP_SHARED | libc::MAP_FIXED,
            physical.file.as_raw_fd(),
            0,
        )
    };
    memory.tiers.insert(at, physical.tier);
    if found as u64 == at { Ok(()) } else { Err(OUT_OF_MEMORY) }
}

/// Unmaps whole mappings: an access kills the program from here on.
pub fn unmap(at: u64, bytes: u64) -> Result<(), i32> {
    let mut memory = lock();
    let memory = memory.get();
    for (start, mapping) in memory.space.unmap(at, bytes).map_err(broken)? {
        memory.tiers.remove(&start);
        if !cover(start, mapping.bytes) {
            return Err(OUT_OF_MEMORY);
        }
    }
    Ok(())
}

/// Lets the card access whole mappings.
pub fn open(at: u64, bytes: u64) -> Result<(), i32> {
    let found = lock().get().space.open(at, bytes).map_err(broken)?;
    for (start, mapping) in found {
        // SAFETY: the range is mapped.
        let result = unsafe {
            libc::mprotect(start as *mut libc::c_void, mapping.bytes as usize, libc::PROT_READ | libc::PROT_WRITE)
        };
        if result != 0 {
            return Err(INVALID_VALUE);
        }
    }
    Ok(())
}

/// The mapping that an address lies in: start, bytes and memory.
pub fn find(at: u64) -> Option<(u64, u64, Tier)> {
    let mut memory = lock();
    let memory = memory.get();
    let (start, mapping) = memory.space.find(at)?;
    Some((start, mapping.bytes, memory.tiers.get(&start).copied()?))
}

/// Allocates as `cuMemAlloc` does.
pub fn allocate(bytes: u64) -> Result<u64, i32> {
    let rounded = bytes.max(1).checked_next_multiple_of(GRANULE).ok_or(OUT_OF_MEMORY)?;
    let handle = create(Tier::Device, rounded)?;
    let at = reserve(rounded, 0)?;
    map(at, rounded, 0, handle)?;
    open(at, rounded)?;
    release(handle)?;
    lock().get().plain.insert(at, rounded);
    Ok(at)
}

/// Frees what [`allocate`] gave.
pub fn free(at: u64) -> Result<(), i32> {
    let bytes = lock().get().plain.remove(&at).ok_or(INVALID_VALUE)?;
    unmap(at, bytes)?;
    unreserve(at, bytes)
}
